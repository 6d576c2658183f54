"""Audits of answers from retrieved documents: sound as they are, and every planted bug is seen.

Sound checks fail by chance with probability at most 1e-6 each; a planted bug is missed with a probability below 1e-3,
and looked for again where it was missed. `make audit` runs them; they are too slow for `make test`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from langchain_dpicl.audit import audit, play
from langchain_dpicl.audit.component_games import check_nothing_else_shown, retrieval_cases, retriever_of
from langchain_dpicl.audit.game import POWER, Game
from langchain_dpicl.backends.rows.neighbour_rows import Near, SimilarTexts
from langchain_dpicl.privacy.extensions.individual_filter import MemoryBalances, ParticipationPlan
from langchain_dpicl.release import samples as module
from langchain_dpicl.release.samples import FilteredSample
from langchain_dpicl.retrieval import RetrievalRunnable
from tests import audit_plants as plant
from tests.audit_games import refutations

pytestmark = pytest.mark.audited

GAMES: dict[str, Game] = {game.name: game for rows in ("units", "slots") for game in retrieval_cases(rows=rows)}
Patch = pytest.MonkeyPatch


def seen_by(name: str) -> list[str]:
    """Returns what refutes the charge, in either shape of rows that plays the game, at up to twice its plain size.

    At that one a game may miss what its power is for with a chance of .001 and more.
    """
    games = [dataclasses.replace(game, runs=2 * game.runs) for game in GAMES.values() if name in game.name]
    return [found for game in games for found in refutations(game, looks=8)]


@pytest.mark.parametrize("name", GAMES)
def test_every_game_is_sound_and_would_see_its_fault(name: str) -> None:
    found = play(GAMES[name])
    assert found.verdict == "sound", found
    assert found.power is not None
    assert found.power >= POWER


def test_a_component_and_its_plan_are_audited_by_the_front_door() -> None:
    made = retriever_of(("1,0 a 1",), participations=4, rows="slots", noise_multiplier=3.0)
    report = audit(made)
    assert report.verdict == "sound", str(report)
    assert audit(made.plan.to_dict()).ok


# -- planted ---------------------------------------------------------------------------------------------------------


def top_k(patch: Patch) -> None:
    """The nearest unit that has a participation left is asked, and it alone is debited."""
    real = MemoryBalances.debit

    def debit(self: MemoryBalances, units: Sequence[str], settled: int) -> list[bool]:
        found, is_filled = [], False
        for unit in units:  # in the order of the crowd: nearest first
            found.append(False if is_filled else real(self, [unit], settled)[0])
            is_filled |= found[-1]
        return found

    patch.setattr(MemoryBalances, "debit", debit)


def everybody_decides(patch: Patch) -> None:
    """A unit that is not near votes as well, and is not debited."""
    real = FilteredSample._assign_rows

    def seated(self: FilteredSample, near: Any, settled: int) -> list[tuple[int, Near]]:
        found = near.take()
        balanced = real(self, module.OpaqueRows(found), settled)
        return [*balanced, *((place, (0,)) for place in range(len(self._units)) if place not in found)]

    patch.setattr(FilteredSample, "_assign_rows", seated)


def never_exhausted(patch: Patch) -> None:
    patch.setattr(MemoryBalances, "debit", lambda self, units, settled: [True] * len(units))


def once_more(patch: Patch) -> None:
    """A balance of n lets a unit in n + 1 times."""
    real = MemoryBalances.__init__
    patch.setattr(MemoryBalances, "__init__", lambda self, participations: real(self, participations + 1))


def nearest_of_all(patch: Patch) -> None:
    """A unit is near if it is nearly as near as the nearest one."""
    real = SimilarTexts._compare

    def compared(self: SimilarTexts, matrix: Any, query: Any) -> dict[int, Near]:
        cosines = matrix.cosines(query)
        first = {place: cosines[row] for place, number, row in matrix.owners.T.tolist() if number == 0}
        best = max(cosines.tolist(), default=0.0)
        return {place: own for place, own in real(self, matrix, query).items() if first[place] >= 0.95 * best}

    patch.setattr(SimilarTexts, "_compare", compared)


def price_of_one(patch: Patch) -> None:
    """A filter is charged as one of its participations."""
    real = ParticipationPlan.event.fget  # type: ignore[attr-defined]
    one = {"participations": 1}

    def event(self: ParticipationPlan) -> Any:
        return real(with_changes(self, **one))

    patch.setattr(ParticipationPlan, "event", property(event))


def with_changes(plan: ParticipationPlan, **changed: Any) -> ParticipationPlan:
    whole = {name: getattr(plan, name) for name in ("aggregation", "mechanism", "num_slots", "adjacency")}
    return ParticipationPlan(**whole, **changed)


def test_top_k_instead_of_a_threshold_is_seen(monkeypatch: Patch) -> None:
    top_k(monkeypatch)
    assert plant.seen_in_two(lambda: seen_by("in front of a crowd"))


def test_non_participants_who_decide_are_seen(monkeypatch: Patch) -> None:
    everybody_decides(monkeypatch)
    assert plant.seen_in_two(lambda: seen_by("not near"))


def test_units_that_are_never_exhausted_are_seen(monkeypatch: Patch) -> None:
    never_exhausted(monkeypatch)
    assert plant.seen_in_two(lambda: seen_by("exhausted"))


def test_one_participation_too_many_is_seen(monkeypatch: Patch) -> None:
    """With one participation declared, two show a mu of sqrt(2) times what is charged: more runs than usual."""
    once_more(monkeypatch)
    (game,) = (game for name, game in GAMES.items() if "exhausted" in name and "units" in name)
    longer = dataclasses.replace(game, runs=1_400, weights=(1.0, 1.0), threshold=1.0)
    assert plant.seen_in_two(lambda: refutations(longer, looks=6))


def test_nearness_that_depends_on_other_documents_is_seen(monkeypatch: Patch) -> None:
    nearest_of_all(monkeypatch)
    assert plant.seen_in_two(lambda: seen_by("nearer than a crowd"))


def test_a_filter_charged_as_one_release_is_seen(monkeypatch: Patch) -> None:
    price_of_one(monkeypatch)
    (game,) = (game for name, game in GAMES.items() if "as often as one unit may" in name)
    assert plant.seen_in_two(lambda: refutations(dataclasses.replace(game, runs=1_000), looks=4))


def test_half_of_the_noise_is_seen(monkeypatch: Patch) -> None:
    plant.scaled(0.5)(monkeypatch)
    assert plant.seen_in_two(lambda: seen_by("as often as one unit may"))


def test_a_balance_that_is_shown_is_seen(monkeypatch: Patch) -> None:
    real = MemoryBalances.debit
    left: dict[int, int] = {}

    def debit(self: MemoryBalances, units: Sequence[str], settled: int) -> list[bool]:
        found = real(self, units, settled)
        left[id(self)] = left.get(id(self), 0) + sum(found)
        return found

    monkeypatch.setattr(MemoryBalances, "debit", debit)
    monkeypatch.setattr(RetrievalRunnable, "__repr__", lambda self: f"voter, {sum(left.values())} documents took part")
    assert check_nothing_else_shown("slots").verdict == "violated"


def test_an_exhausted_house_that_stops_answering_is_seen(monkeypatch: Patch) -> None:
    """Answers that end when nobody is left tell that nobody is: the game on tickets, or the error itself, says so."""
    real = MemoryBalances.debit

    def debit(self: MemoryBalances, units: Sequence[str], settled: int) -> list[bool]:
        found = real(self, units, settled)
        if units and not any(found):
            raise module.LedgerError("balances: nobody is left")
        return found

    monkeypatch.setattr(MemoryBalances, "debit", debit)
    with pytest.raises(module.LedgerError):
        check_nothing_else_shown("slots")
