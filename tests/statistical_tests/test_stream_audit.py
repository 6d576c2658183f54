"""A person who is there for 30 days of a long stream of votes: what all runs say of them stays within one window's price.

The adversary adds up the noisy votes of all runs that can have read the person. One stream goes on for all trials: each
has another person, in other days, so that the standing share is asked for years. False alarm: `ALARM`, at one look.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest

from langchain_dpicl import Budget, DPVotingRunnable
from langchain_dpicl.audit.game import POWER, Game, control, play, power_of, vector_law
from langchain_dpicl.audit.targets import MARK, ReadVotes
from langchain_dpicl.options import FewShotTask, LabelAnswers, Noise, Rows, Serving
from langchain_dpicl.privacy._validate import Adjacency
from langchain_dpicl.privacy.accounting.events import Event, GaussianEvent
from langchain_dpicl.privacy.extensions import private_streams as streams
from langchain_dpicl.privacy.extensions.stream_ledger import QueryShare, Windows
from langchain_dpicl.streams import PrivateStream, RollingRange

DAY, START = 86_400, datetime(2002, 1, 1, 12, tzinfo=UTC).timestamp()
EVERY, RUNS, STRETCH = 7, 9, 70
"""Thirty days every seven, windows of thirty: nine runs can touch one. A trial takes ten weeks."""


class Clock:
    """The time that streams read."""

    now = START

    @classmethod
    def time(cls) -> float:
        """Returns the present."""
        return cls.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "time", Clock)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class YearsGame(Game):
    """A game whose trials are stays of 30 days; units are the votes of the person, one for each of these days."""

    def sides(self) -> tuple[YearsSide, YearsSide]:
        return YearsSide(self, self.units), YearsSide(self, self.neighbour)

    def event(self, side: YearsSide) -> Event:
        (ticket,) = side.voter.plan.tickets()
        # So many Gaussian releases are one with less noise, exactly.
        return GaussianEvent(ticket.event.noise_multiplier / ticket.max_count**0.5)

    def outcomes(self) -> tuple[str, ...]:
        return ("above",)


class YearsSide:
    """One stream, and the stays so far."""

    def __init__(self, game: YearsGame, units: tuple[str, ...]) -> None:
        options = dict(game.options)
        self.game, self.units = game, units
        self.counts: Counter[str] = Counter()
        self.now = START
        Clock.now = self.now
        self.stream = PrivateStream(
            dataset_id="d", time_key="at", unit_key="user", public_size={30: 1}, grace=0, retention=40
        )
        self.voter = DPVotingRunnable.from_private_examples(
            self.stream.rolling(30, every=EVERY),
            llm=ReadVotes(),
            budget=Budget(epsilon=1e12, delta=1e-6, adjacency=options["adjacency"], per="30 days"),
            epsilon=1e11,
            max_queries=1,
            component="audited",
            task=FewShotTask(MARK + "{text}", "{input}", labels=("yes", "no")),
            rows=Rows(units=1),
            noise=Noise("gaussian", multiplier=options["noise_multiplier"]),
            answers=LabelAnswers(calibrate=False, scores=True),
            serving=Serving(memo_size=0),
        ).with_receipts()

    def play(self, runs: int) -> None:
        for _ in range(runs):
            total = sum(self.votes_of_a_stay())
            self.counts["above" if total > self.game.threshold else "below"] += 1

    def votes_of_a_stay(self) -> Iterator[float]:
        """Yields where the votes of each run stand that can have read the person: the first ends on the first day."""
        Clock.now, first_day = self.now, self.now - DAY
        person = f"{self.counts.total()}"
        self.stream.extend(
            {"at": first_day + day * DAY, "user": person, "text": vote} for day, vote in enumerate(self.units)
        )
        for week in range(STRETCH // EVERY):
            Clock.now = self.now
            if week < RUNS:
                scores = self.voter.invoke("which?").scores
                yield float(np.dot(self.game.direction or (), list(scores.values())))
            self.now += EVERY * DAY

    @property
    def played(self) -> int:
        return self.counts.total()

    def faults(self) -> Iterator[str]:
        if Clock.now == self.now:
            yield "clock: stands"


def game(adjacency: Adjacency, **options: Any) -> YearsGame:
    """Returns the worst case: the person speaks of one thing on all 30 days, which all nine runs read."""
    noise, is_replaced = 1.5, adjacency == "replace_one"
    direction = (1.0, -1.0) if is_replaced else (1.0, 0.0)
    length = float(np.linalg.norm(direction))
    # Noise of one run is the multiplier times the L2 sensitivity: 1, or the square root of 2 where a vote changes.
    scale = noise * length * length * RUNS**0.5
    shown = (float(RUNS), -float(RUNS)) if is_replaced else (float(RUNS), 0.0)
    middle = sum(shown) / 2
    return YearsGame(
        name=f"30 days of {adjacency}",
        units=("1,0",) * 30,
        neighbour=("0,1",) * 30 if is_replaced else (),
        runs=options.pop("runs", 260),
        options={"noise_multiplier": noise, "adjacency": adjacency, **options},
        direction=direction,
        threshold=middle,
        law=vector_law(shown, scale=scale, threshold=middle),
    )


@pytest.mark.audited
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_a_stay_of_one_window_is_charged_for_all_that_the_runs_say_of_it(adjacency: Adjacency) -> None:
    found = play(game(adjacency))
    assert found.verdict == "sound", found.details
    assert found.power is not None
    assert found.power >= POWER
    assert found.claimed == pytest.approx(2.0)  # mu of nine runs


@pytest.mark.audited
def test_half_of_the_noise_is_seen() -> None:
    assert control(game("add_remove")).verdict == "sound"


@pytest.mark.audited
def test_runs_that_are_not_priced_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a window is priced for two of the runs that touch it, and the ledger counts their last block alone.

    A mu of 2 against 0.94: 260 stays miss it with a chance of .1, 600 with one of 1e-9.
    """
    monkeypatch.setattr(RollingRange, "runs_per_window", lambda self, window: 2)
    monkeypatch.setattr(Windows, "touched", lambda self, extent: (extent[0], extent[0] if extent[1] else 10**6))
    assert play(game("add_remove", runs=600), looks=6).verdict == "violated"


def test_what_the_ledger_does_not_pay_for_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same price, with the real ledger: the third run is refused."""
    monkeypatch.setattr(RollingRange, "runs_per_window", lambda self, window: 2)
    side = game("add_remove").sides()[0]
    with pytest.raises(Exception, match="in one window"):
        side.play(1)


def test_the_game_would_see_its_fault() -> None:
    for adjacency in ("add_remove", "replace_one"):
        it = game(adjacency)  # type: ignore[arg-type]
        power = power_of(it, it.event(it.sides()[0]))
        assert power is not None
        assert power >= POWER
    assert isinstance(game("add_remove").sides()[0].voter.share, QueryShare)
