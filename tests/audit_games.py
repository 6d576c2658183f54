"""The games of `langchain_dpicl.audit`, as tests of planted bugs play them."""

from __future__ import annotations

from langchain_dpicl.audit.component_checks import is_fair_and_fresh
from langchain_dpicl.audit.component_games import VotingGame as Game
from langchain_dpicl.audit.game import ALARM, clopper_pearson_lower, clopper_pearson_upper, min_parameter, play
from langchain_dpicl.audit.game import Game as AnyGame
from langchain_dpicl.audit.suite import score_faults
from langchain_dpicl.audit.targets import QUERY, ReadVotes, voter_of

__all__ = [
    "ALARM",
    "QUERY",
    "Game",
    "ReadVotes",
    "clopper_pearson_lower",
    "clopper_pearson_upper",
    "is_fair_and_fresh",
    "min_parameter",
    "refutations",
    "score_faults",
    "voter_of",
]


def refutations(game: AnyGame, *, looks: int = 1) -> list[str]:
    """Plays a game; returns what refutes the charge, or nothing. False alarm on a sound package: `ALARM`, at one look."""
    found = play(game, looks=looks)
    return list(found.details) if found.verdict == "violated" else []
