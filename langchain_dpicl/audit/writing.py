"""Games against `DemonstrationSynthesizer`: generated tokens, with every mechanism."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from langchain_dpicl.audit.components import share_of, synthesizer_of
from langchain_dpicl.audit.games import Game
from langchain_dpicl.audit.readers import TOKENS
from langchain_dpicl.privacy.accounting.events import Event
from langchain_dpicl.synthesis import DemonstrationSynthesizer


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenGame(Game):
    """A game whose trials are texts of one token; see `components.synthesizer_of` for its units and options.

    Attributes:
      public: logits of `TOKENS` after the public prompt.
      kept: texts that count; none: all of them. Two of several are compared where the charge bounds the odds of every
        two outcomes: given that it is one of the two, which one it is is a coin of those odds.
    """

    public: tuple[float, ...] = (0.0,) * len(TOKENS)
    kept: tuple[str, ...] = ()

    def outcomes(self) -> tuple[str, ...]:
        """Returns the token that the target wants; every other one is its complement."""
        return (TOKENS[0].strip(),)

    def sides(self) -> tuple[WritingSide, WritingSide]:
        """Builds the synthesizer on both data sets."""
        return WritingSide(self, self.units), WritingSide(self, self.neighbour)

    def event(self, side: WritingSide) -> Event:
        """Returns the event of the ticket of one token."""
        return side.synthesizer.plan.tickets()[0].event


_AT_ONCE = 250
"""Texts of one synthesizer: with many more, each of them takes longer."""


class WritingSide:
    """One data set, and the texts that were written from it so far."""

    def __init__(self, game: TokenGame, units: tuple[str, ...]) -> None:
        self.game = game
        self.counts: Counter[str] = Counter()
        self.played = 0
        self._units = units
        self._unpaid = False
        self.synthesizer = self._built(min(_AT_ONCE, game.runs))

    def _built(self, tokens: int) -> DemonstrationSynthesizer:
        return synthesizer_of(self._units, tokens, public=self.game.public, **self.game.options)

    def play(self, runs: int) -> None:
        """Has so many texts more written."""
        counted = self.game.kept
        for size in [_AT_ONCE] * (runs // _AT_ONCE) + [runs % _AT_ONCE] * (runs % _AT_ONCE > 0):
            self.synthesizer = self._built(size)
            texts = [text["text"] for text in self.synthesizer.stream(progress=False)]
            self.played += len(texts)
            self.counts.update(text for text in texts if not counted or text in counted)
            (ticket,) = self.synthesizer.plan.tickets()
            remaining = share_of(self.synthesizer).remaining(ticket.template)
            self._unpaid |= remaining != ticket.max_count - len(texts)

    def faults(self) -> Iterator[str]:
        """Yields a fault if the ledger holds another number of tickets than there were texts."""
        if self._unpaid:
            yield "tickets: the ledger holds another number of them than there were texts"
