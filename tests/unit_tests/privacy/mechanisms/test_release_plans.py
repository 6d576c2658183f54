"""The plan of a release: what fits together, what is refused, and constants that cost nothing."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy.accounting import epsilon, events
from langchain_dpicl.privacy.accounting.events import BoundedRangeEvent, SubsampledEvent
from langchain_dpicl.privacy.extensions.confident_gnmax import ConfidentGNMaxMechanism
from langchain_dpicl.privacy.extensions.gradient_sums import ClippedGradientSum
from langchain_dpicl.privacy.extensions.joint_exponential import JointExponentialMechanism, KeywordSum
from langchain_dpicl.privacy.extensions.logit_sums import ClippedDifferenceMean, ClippedLogitMean
from langchain_dpicl.privacy.extensions.normalized_sums import MaxNormalizedSum, UnitVectorSum
from langchain_dpicl.privacy.extensions.permute_and_flip import PermuteAndFlipMechanism
from langchain_dpicl.privacy.mechanisms import release_plan
from langchain_dpicl.privacy.mechanisms.bounded import Aggregation, ProbabilitySum, VoteSum
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.privacy.mechanisms.release_plan import (
    GaussianMechanism,
    GumbelMechanism,
    PoissonSlots,
    PoissonUnits,
    ReleasePlan,
)

CONFIDENT = ConfidentGNMaxMechanism(1.0, 1.0, threshold=2.0)
JOINT = JointExponentialMechanism(2.0, num_choices=3)
AGGREGATIONS = (
    ProbabilitySum(),
    VoteSum(),
    MaxNormalizedSum(),
    ClippedLogitMean(3.0, 10),
    ClippedDifferenceMean(0.3, 10),
    UnitVectorSum(),
    KeywordSum(),
    ClippedGradientSum(1.0),
)
SCORES = {
    "probability_sum",
    "vote_sum",
    "max_normalized_sum",
    "clipped_logit_mean",
    "clipped_difference_mean",
    "keyword_sum",
}
VECTORS = {"unit_vector_sum", "clipped_gradient_sum"}
FITTING = {
    GaussianMechanism: {"probability_sum", "vote_sum", *VECTORS},
    GumbelMechanism: SCORES,
    PermuteAndFlipMechanism: SCORES,
    JointExponentialMechanism: {"keyword_sum"},
    ConfidentGNMaxMechanism: {"probability_sum", "vote_sum"},
}


def plan(aggregation=None, mechanism=None, **options):
    """Returns a plan over expected forty unit rows of a thousand."""
    return ReleasePlan(
        sampler=PoissonUnits(0.04),
        aggregation=aggregation or VoteSum(),
        mechanism=mechanism or GumbelMechanism(1.0),
        adjacency="add_remove",
        **options,
    )


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda x: x.name)
@pytest.mark.parametrize("mechanism", [GaussianMechanism(1.0), GumbelMechanism(1.0), PermuteAndFlipMechanism(1.0), JOINT,
                                       CONFIDENT], ids=lambda x: x.name)  # fmt: skip
def test_a_mechanism_takes_the_sums_that_its_proof_covers_and_no_other(aggregation, mechanism):
    if aggregation.name in FITTING[type(mechanism)]:
        made = plan(aggregation, mechanism)
        width = 5 * (1 + (mechanism is JOINT))
        rows = np.eye(width)[[0, 0, 3]]
        out = made.mechanism.release(made.bound(rows, width=width), rng=SYSTEM_RANDOM)
        assert out.event == mechanism.event
    else:
        with pytest.raises(ConfigurationError, match=r"mechanism|aggregation"):
            plan(aggregation, mechanism)


@pytest.mark.parametrize("part", ["sampler", "aggregation", "mechanism", "test"])
def test_what_only_looks_like_a_proved_part_is_refused(part):
    proved = {"sampler": PoissonUnits(0.04), "aggregation": VoteSum(), "mechanism": GumbelMechanism(1.0), "test": None}

    class LooksAlike:
        def __getattr__(self, name):
            return getattr(proved[part], name)

    with pytest.raises(ConfigurationError, match=rf"^{part}: expected one of .*, found LooksAlike\. docs/extending"):
        ReleasePlan(adjacency="add_remove", **{**proved, part: LooksAlike()})


def test_joint_choices_from_other_sums_are_refused_with_advice():
    with pytest.raises(ConfigurationError, match=r"whole-number gaps; choose KeywordSum\(\)"):
        plan(VoteSum(), JOINT)


def test_the_joint_mechanism_is_charged_and_calibrated_like_any_other():
    made = plan(KeywordSum(), JOINT)
    assert made.event(7).event == SubsampledEvent(BoundedRangeEvent(0.5), 0.04)
    louder = made.with_noise(5.0)
    assert louder.mechanism == JointExponentialMechanism(5.0, num_choices=3)
    assert louder.aggregation == made.aggregation
    assert made.implementation_delta(10, width=100) == 10 * (2.0**-90 + 2.0**-90)
    with pytest.raises(ConfigurationError, match="num_choices"):
        made.implementation_delta(10, width=2)
    described = json.loads(json.dumps(made.to_dict()))
    assert described["mechanism"] == {"name": "joint_exponential", "noise_multiplier": 2.0, "num_choices": 3}
    assert "constants" not in described


# --- constants --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", AGGREGATIONS[:3], ids=lambda x: x.name)
def test_constants_stand_behind_the_sum_and_change_neither_price_nor_sensitivity(aggregation):
    without, made = plan(aggregation), plan(aggregation, constants=(2.5, -1.0))
    rows = np.array([[0.0, 1.0, 0.0], [0.25, 0.25, 0.5]])
    total = made.bound(rows, width=3)
    assert total.value.tolist() == [*without.bound(rows, width=3).value.tolist(), 2.5, -1.0]
    assert total.sensitivity == without.sensitivity == made.sensitivity
    assert (total.row_shape, total.adjacency) == ("units", "add_remove")
    assert made.event(100) == without.event(100)
    assert made.to_dict() == {**without.to_dict(), "constants": [2.5, -1.0]}
    assert made.with_noise(3.0).constants == (2.5, -1.0)


def test_slots_keep_their_shape():
    made = ReleasePlan(
        sampler=PoissonSlots(0.04, num_slots=2, shots_per_slot=1),
        aggregation=VoteSum(),
        mechanism=GaussianMechanism(1.0),
        adjacency="add_remove",
        constants=(0.5,),
    )
    total = made.bound(np.eye(2), width=2)
    assert (total.row_shape, total.sensitivity.l2) == ("slots", math.sqrt(2))
    out = made.mechanism.release(total, rng=SYSTEM_RANDOM)
    assert out.values.shape == (3,)


def test_constants_are_rounded_to_the_grid_of_sums_and_are_a_tuple():
    made = plan(constants=[0.1, 2.0**20, -0.0])
    assert made.constants == (round(0.1 * 2**32) / 2**32, 2.0**20, 0.0)
    assert math.copysign(1.0, made.constants[2]) == 1.0
    assert made.bound(np.zeros((0, 2)), width=2).value.tolist() == [0.0, 0.0, *made.constants]
    assert plan(constants=made.constants) == made
    assert hash(made) == hash(plan(constants=(0.1, 2.0**20, 0.0)))


@pytest.mark.parametrize(
    "bad", [(math.nan,), (math.inf,), (2.0**20 + 1,), (-(2.0**21),), (True,), ("1",), (None,), "1", 1.0, None]
)
def test_a_constant_that_is_no_bounded_number_is_refused(bad):
    with pytest.raises(ConfigurationError, match="constants"):
        plan(constants=bad)


@pytest.mark.parametrize("aggregation", AGGREGATIONS[3:], ids=lambda x: x.name)
def test_constants_beside_logits_embeddings_or_keywords_are_refused(aggregation):
    mechanism = GaussianMechanism(1.0) if aggregation.name in VECTORS else GumbelMechanism(1.0)
    with pytest.raises(ConfigurationError, match="votes or probabilities"):
        plan(aggregation, mechanism, constants=(0.0,))


def test_an_abstain_candidate_wins_where_no_row_votes_and_loses_where_many_do():
    """Gumbel noise of scale 0.01 about scores that differ by 3 or more: wrong with probability below 1e-100."""
    made = plan(mechanism=GumbelMechanism(0.01), constants=(3.0,))
    empty, many = (made.bound(rows, width=2) for rows in (np.zeros((4, 2)), np.tile([0.0, 1.0], (9, 1))))
    assert made.mechanism.release(empty, rng=SYSTEM_RANDOM).index == 2
    assert made.mechanism.release(many, rng=SYSTEM_RANDOM).index == 1


# --- public logits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda x: x.name)
def test_public_logits_reach_the_sums_that_they_belong_to_and_no_other(aggregation):
    mechanism = GaussianMechanism(1.0) if aggregation.name in VECTORS else GumbelMechanism(1.0)
    made, rows = plan(aggregation, mechanism), np.array([[0.0, 1.0, 0.25], [0.25, 0.25, 0.5]])
    shown = made.bound(rows, width=3, public=np.array([5.0, 0.0, -2.0]))
    assert shown.sensitivity == made.sensitivity
    if isinstance(aggregation, ClippedDifferenceMean):
        direct = aggregation.bound(
            rows, row_shape="units", adjacency="add_remove", width=3, public=np.array([5.0, 0.0, -2.0])
        )
        assert shown.value.tolist() == direct.value.tolist() != made.bound(rows, width=3).value.tolist()
    else:  # without a blend, clipped logits ignore the public ones
        assert shown.value.tolist() == made.bound(rows, width=3).value.tolist()
    blend = plan(ClippedLogitMean(3.0, 10, blend_weight=0.5))
    assert blend.bound(rows, width=3, public=np.array([5.0, 0.0, -2.0])).value.argmax() == 0


def test_a_plan_of_the_core_is_made_priced_and_read_without_any_extension(monkeypatch):
    def loaded(name: str):
        pytest.fail(name)

    for module in (release_plan, events, epsilon):
        monkeypatch.setattr(module, "provided", loaded)
    made = ReleasePlan(
        PoissonSlots(0.125, num_slots=7, shots_per_slot=3), VoteSum(), GumbelMechanism(3.0), "add_remove"
    )
    event = events.event_from_dict(events.event_to_dict(made.event(5)))
    assert event == made.event(5)
    assert 0 < epsilon.epsilon_upper_bound(event, delta=1e-6, adjacency="add_remove") < math.inf


def test_a_sibling_that_calls_itself_proved_is_refused():
    look_alike = type("VoteSum", (Aggregation,), {"__module__": VoteSum.__module__, "name": "vote_sum"})
    with pytest.raises(
        ConfigurationError, match=r"aggregation: expected one of ProbabilitySum, VoteSum, .*found VoteSum"
    ):
        ReleasePlan(PoissonUnits(0.5), look_alike(), GumbelMechanism(1.0), "add_remove")
