"""Audits of joint plans of a discovery and labelled releases: the chance of the discovery to fail is in their charge."""

from __future__ import annotations

import pytest
from scipy import stats

from langchain_dpicl import Budget, Decoding, DemonstrationSynthesizer, Noise, PrivateExamples, ValueDiscovery
from langchain_dpicl.audit.game import ALARM, clopper_pearson_lower
from langchain_dpicl.backends.fake import FakeBackend
from langchain_dpicl.exceptions import AccountantsDisagreeError, PrivacyBudgetExceededError
from langchain_dpicl.privacy.accounting import delta_upper_bound
from langchain_dpicl.privacy.accounting import epsilon as accounting
from langchain_dpicl.privacy.accounting.epsilon import unit_terms
from langchain_dpicl.privacy.ledger.tickets import ShareTerms
from tests import audit_plants as plant

ADJACENCIES = ("add_remove", "replace_one")
MINE = "only mine"
SIZES = {
    "both below rate 1": {"rare": 2, "common": 3},
    "one at rate 1": {"rare": 1, "common": 3},
    "two at rate 1": {"rare": 1, "other": 1, "common": 2},
    "all at rate 1": {"rare": 1, "common": 1},
}
SEVERAL_WORLDS = {"add_remove": SIZES["one at rate 1"], "replace_one": SIZES["two at rate 1"]}
"""Sizes that leave several worlds where labels that read a sample are kept."""

TOO_LITTLE = 1e-5
"""A delta far below the chance of the discovery to fail, which is .016 (.013 under replace_one)."""


def declared(sizes: dict[str, int], adjacency: str, **plan: float) -> tuple[ValueDiscovery, ShareTerms]:
    """A joint plan over one unit with a value of its own: one text of two tokens for a label, and the values found."""
    fake = FakeBackend(lambda prompt, text: {" a": 0.5, " b": 0.5}, vocabulary=[" a", " b"])
    records = [{"text": "t", "queue": "rare", "city": MINE}]
    private = PrivateExamples(records, label_key="queue", labels=tuple(sizes), fields=("city",), public_size=sizes)
    budget = Budget(epsilon=60.0, delta=0.02, adjacency=adjacency)
    with budget.plan(**plan) as joint:
        finder = ValueDiscovery.from_private_examples(
            private, field="city", budget=budget, epsilon=2.0, noise=Noise(delta=0.0165)
        )
        DemonstrationSynthesizer.from_private_examples(
            private,
            llm=fake,
            budget=budget,
            epsilon=20.0,
            noise=Noise(delta=0.003),
            max_tokens=2,
            decoding=Decoding(candidates="all"),
        )
    return finder, joint.standing.terms


def chance(finder: ValueDiscovery) -> float:
    """That a unit's value passes the threshold alone, by scipy's law."""
    rate = 1.0 / float(finder.plan.release.scale)
    least = finder.plan.release.mechanism.threshold - 1
    return float(stats.dlaplace(rate).sf(least - 1))


def faults(finder: ValueDiscovery, terms: ShareTerms) -> list[str]:
    """What of the charge is refuted by the discovery's own failure, and by the other direction of the accountant."""
    passes, adjacency = chance(finder), finder.plan.release.adjacency
    found = []
    if passes > terms.delta:
        found.append(f"a value of one unit leaves with chance {passes:.3g}, charged is delta {terms.delta:.3g}")
    cost = delta_upper_bound(terms.event, epsilon=terms.epsilon, adjacency=adjacency)
    if cost > terms.delta:
        found.append(f"delta is {cost:.6g} at the charged epsilon, charged is {terms.delta:.6g}")
    return found


@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize("name", SIZES)
def test_a_joint_plan_charges_the_failure_of_its_discovery(name: str, adjacency: str) -> None:
    for delta in (0.0175, 0.02):
        finder, terms = declared(SIZES[name], adjacency, delta=delta)
        assert faults(finder, terms) == []
        assert chance(finder) == pytest.approx(finder.plan.threshold_delta, rel=1e-5)
    with pytest.raises(PrivacyBudgetExceededError, match="requested inf"):
        declared(SIZES[name], adjacency, delta=chance(finder) * 0.99)


def test_the_sizes_are_what_they_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    plant.sampled_labels_kept(monkeypatch)
    for adjacency, sizes in SEVERAL_WORLDS.items():
        _, terms = declared(sizes, adjacency, delta=0.02)
        assert len(unit_terms(terms.event, adjacency)) > 1


def forgotten(patch: pytest.MonkeyPatch) -> None:
    """Failures are not charged where labels leave several worlds, as they once did, and nobody reads the event again."""
    plant.sampled_labels_kept(patch)
    plant.failures_forgotten(patch)
    patch.setattr(accounting, "second_opinions", lambda *_, **__: ((), ()))


@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_a_failure_that_is_forgotten_is_caught(adjacency: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten(monkeypatch)
    for delta, expected in ((TOO_LITTLE, ["a", "delta"]), (0.0175, ["delta"])):
        found = faults(*declared(SEVERAL_WORLDS[adjacency], adjacency, delta=delta))
        assert [problem.split(" ")[0] for problem in found] == expected, found


@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize("delta", [TOO_LITTLE, 0.0175])
def test_a_failure_that_is_forgotten_is_caught_by_the_second_reading(
    delta: float, adjacency: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant.sampled_labels_kept(monkeypatch)
    plant.failures_forgotten(monkeypatch)
    with pytest.raises(AccountantsDisagreeError, match="second reading"):
        declared(SEVERAL_WORLDS[adjacency], adjacency, delta=delta)


# --- played ---------------------------------------------------------------------------------------------------------


def refuted(runs: int, *, delta: float) -> bool:
    """Whether the value of the one unit leaves too often; without the unit it cannot, so its chance is at most delta."""
    hits = 0
    for run in range(1, runs + 1):
        finder, terms = declared(SIZES["one at rate 1"], "add_remove", delta=delta)
        hits += MINE in finder.run().counts
        if clopper_pearson_lower(hits, run, ALARM / runs) > terms.delta:
            return True
    return False


def test_the_value_of_one_unit_leaves_no_more_often_than_charged() -> None:
    assert not refuted(200, delta=0.0175)


@pytest.mark.planted
def test_a_failure_that_is_forgotten_is_seen_to_happen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five values that leave are too many in 2,000 runs, and fewer leave with a chance below 1e-9."""
    forgotten(monkeypatch)
    assert refuted(2_000, delta=TOO_LITTLE)
