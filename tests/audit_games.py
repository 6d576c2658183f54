"""The games of `langchain_dpicl.audit`, as tests of planted bugs play them."""

from __future__ import annotations

from langchain_dpicl.audit.answering import VotingGame as Game
from langchain_dpicl.audit.bounds import ALARM, highest, loss, lowest
from langchain_dpicl.audit.components import QUERY, voter_of
from langchain_dpicl.audit.games import Game as AnyGame
from langchain_dpicl.audit.games import play
from langchain_dpicl.audit.parts import is_fair_and_fresh
from langchain_dpicl.audit.readers import ReadVotes
from langchain_dpicl.audit.vectors import faults

__all__ = [
    "ALARM",
    "QUERY",
    "Game",
    "ReadVotes",
    "faults",
    "highest",
    "is_fair_and_fresh",
    "loss",
    "lowest",
    "refutations",
    "voter_of",
]


def refutations(game: AnyGame, *, looks: int = 1) -> list[str]:
    """Plays a game; returns what refutes the charge, or nothing. False alarm on a sound package: `ALARM`, at one look."""
    found = play(game, looks=looks)
    return list(found.details) if found.verdict == "violated" else []
