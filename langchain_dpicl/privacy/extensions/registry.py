"""The closed lists of proved classes, and the tickets and releases that are rebuilt from what plans show.

A class outside these lists and outside `privacy.mechanisms` is refused by every plan: what looks like a proved class
can do anything. A new class takes a proof page, the contract tests and an entry here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

from langchain_dpicl.privacy._validate import Adjacency, check_choice, check_int, fail
from langchain_dpicl.privacy.accounting.events import CORE_EVENTS, Event, canonical_json
from langchain_dpicl.privacy.extensions.confident_gnmax import ConfidentGNMaxMechanism
from langchain_dpicl.privacy.extensions.fixed_size_slots import BalancedSlots, PartitionedSlots
from langchain_dpicl.privacy.extensions.gradient_sums import ClippedGradientSum, SampledBallEvent
from langchain_dpicl.privacy.extensions.joint_exponential import JointExponentialMechanism, KeywordSum
from langchain_dpicl.privacy.extensions.logit_sums import ClippedDifferenceMean, ClippedLogitMean
from langchain_dpicl.privacy.extensions.normalized_sums import MaxNormalizedSum, UnitVectorSum, VoteVectorSum
from langchain_dpicl.privacy.extensions.permute_and_flip import PermuteAndFlipMechanism
from langchain_dpicl.privacy.extensions.random_allocation import AllocatedEvent, AllocatedSlots
from langchain_dpicl.privacy.extensions.sparse_vector import SparseVectorTest
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.privacy.mechanisms.bounded import Aggregation, ProbabilitySum, VoteSum
from langchain_dpicl.privacy.mechanisms.release_plan import (
    GaussianMechanism,
    GumbelMechanism,
    PoissonSlots,
    PoissonUnits,
    ReleasePlan,
    Sampler,
)

PROVED: dict[str, tuple[Any, ...]] = {
    "sampler": (BalancedSlots, PartitionedSlots, AllocatedSlots),
    "aggregation": (
        MaxNormalizedSum,
        ClippedLogitMean,
        ClippedDifferenceMean,
        UnitVectorSum,
        KeywordSum,
        VoteVectorSum,
        ClippedGradientSum,
    ),
    "mechanism": (PermuteAndFlipMechanism, JointExponentialMechanism, ConfidentGNMaxMechanism),
    "test": (SparseVectorTest,),
}
"""What a plan accepts beside the classes of `privacy.mechanisms`, by field."""

EVENT_TYPES: tuple[type[Event], ...] = (*CORE_EVENTS, SampledBallEvent, AllocatedEvent)
"""Every event that has a price and a JSON form."""

SAMPLERS: dict[str, type[Sampler]] = {cls.name: cls for cls in (PoissonSlots, PoissonUnits, *PROVED["sampler"])}
AGGREGATIONS: dict[str, type[Aggregation]] = {
    cls.name: cls for cls in (ProbabilitySum, VoteSum, *PROVED["aggregation"])
}
MECHANISMS: tuple[str, ...] = ("gumbel", "gaussian", "permute_and_flip")
"""Names of the mechanisms that every component takes, the default first."""
_BY_NAME: dict[str, type[GumbelMechanism | GaussianMechanism | PermuteAndFlipMechanism]] = {
    cls.name: cls for cls in (GumbelMechanism, GaussianMechanism, PermuteAndFlipMechanism)
}


def mechanism_by_name(name: str) -> type[GumbelMechanism | GaussianMechanism | PermuteAndFlipMechanism]:
    """Returns the class of a mechanism's public name.

    Raises:
      ConfigurationError: `name` is not one of `MECHANISMS`.

    >>> mechanism_by_name("gumbel").__name__
    'GumbelMechanism'
    """
    return _BY_NAME[check_choice("mechanism", name, MECHANISMS)]


Teachers: TypeAlias = Literal["fresh", "one_sample", "fixed"]
TEACHERS: tuple[Teachers, ...] = get_args(Teachers)
"""How private prompts are sampled: anew for every input, once in secret for all inputs, or not at all."""

LABEL_TEMPLATE = "label"
"""The ticket template of one label."""
SAMPLE_TEMPLATE = "labels"
"""The ticket template of all labels from one secret sample."""
TEST_TEMPLATE = "test"
"""The ticket template of one test of fixed teachers' agreement."""
ANSWER_TEMPLATE = "answer"
"""The ticket template of one label from fixed teachers that have passed the test."""

_MECHANISMS = {cls.name: cls for cls in (GumbelMechanism, GaussianMechanism, *PROVED["mechanism"])}


def label_tickets(
    release: ReleasePlan, *, teachers: Teachers, max_queries: int, max_answers: int | None = None
) -> tuple[Ticket, ...]:
    """Returns the refundable tickets of labels for `max_queries` public inputs.

    Formal guarantees:
      - "fresh": a ticket of `release.block_event(1)` for each input.
      - "one_sample": one ticket of `release.block_event(max_queries, max_answers)`.
      - "fixed": as "fresh", on teachers that nothing amplifies; with Confident-GNMax a ticket of its test for each
        input, and `max_answers` tickets of its answer.
    """
    mechanism = release.mechanism
    if teachers == "one_sample":
        return (_ticket(SAMPLE_TEMPLATE, release.block_event(max_queries, max_answers), 1),)
    if teachers == "fixed" and isinstance(mechanism, ConfidentGNMaxMechanism):
        answers = max_queries if max_answers is None else max_answers
        return (
            _ticket(TEST_TEMPLATE, mechanism.test_event, max_queries),
            _ticket(ANSWER_TEMPLATE, mechanism.answer_event, answers),
        )
    return (_ticket(LABEL_TEMPLATE, release.block_event(1), max_queries),)


def _ticket(template: str, event: Event, count: int) -> Ticket:
    return Ticket(template=template, event=event, max_count=count, refundable=True)


def shown_release(shown: Mapping[str, Any]) -> ReleasePlan:
    """Rebuilds a release from the JSON of `ReleasePlan.to_dict`, from the closed lists of parts.

    Formal guarantees:
      - The `to_dict` of the result equals `shown`, its sensitivity included.

    Raises:
      ConfigurationError: an unknown part, or parameters that no part has or that do not fit together.
      LookupError, TypeError: `shown` has another form.
    """
    release = ReleasePlan(
        sampler=_part("sampler", shown["sampler"], SAMPLERS),
        aggregation=_part("aggregation", shown["aggregation"], AGGREGATIONS),
        mechanism=_part("mechanism", shown["mechanism"], _MECHANISMS),
        adjacency=shown["adjacency"],
        redraw_every=shown["redraw_every"],
        constants=tuple(shown.get("constants", ())),
    )
    if canonical_json(release.to_dict()) != canonical_json(dict(shown)):
        raise fail("release", f"as its parts show it: {release.to_dict()}", dict(shown))
    return release


def _part(kind: str, shown: Mapping[str, Any], known: Mapping[str, Any]) -> Any:
    """Returns the sampler, aggregation or mechanism with this name and these parameters."""
    parameters = dict(shown)
    return known[check_choice(kind, parameters.pop("name"), known)](**parameters)


STEP_TEMPLATE = "step"
"""The ticket template of one training step."""


def step_release(
    *, sampling_rate: float, l2_clip_norm: float, noise_multiplier: float, adjacency: Adjacency
) -> ReleasePlan:
    """Returns the release of one training step: the noisy sum of the clipped gradients of a fresh Poisson sample."""
    return ReleasePlan(
        sampler=PoissonUnits(sampling_rate),
        aggregation=ClippedGradientSum(l2_clip_norm),
        mechanism=GaussianMechanism(noise_multiplier),
        adjacency=adjacency,
    )


def training_tickets(release: ReleasePlan, steps: int) -> tuple[Ticket, ...]:
    """Returns the refundable tickets of `steps` training steps.

    Formal guarantees:
      - One ticket of `release.block_event(1)` for each step: a fresh secret sample every time.
    """
    return (_ticket(STEP_TEMPLATE, release.block_event(1), check_int("steps", steps, low=1)),)
