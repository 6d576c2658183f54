"""The closed lists of proved classes, by the names that plans and reports show.

A class outside these lists and outside `privacy.mechanisms` is refused by every plan: what looks like a proved class
can do anything. A new class takes a proof page, the contract tests and an entry here.
"""

from __future__ import annotations

from langchain_dpicl.privacy._validate import check_choice
from langchain_dpicl.privacy.accounting.events import CORE_EVENTS, Event
from langchain_dpicl.privacy.extensions.confident_gnmax import ConfidentGNMaxMechanism
from langchain_dpicl.privacy.extensions.fixed_size_slots import BalancedSlots, PartitionedSlots
from langchain_dpicl.privacy.extensions.gradient_sums import ClippedGradientSum, SampledBallEvent
from langchain_dpicl.privacy.extensions.joint_exponential import JointExponentialMechanism, KeywordSum
from langchain_dpicl.privacy.extensions.logit_sums import ClippedDifferenceMean, ClippedLogitMean
from langchain_dpicl.privacy.extensions.max_normalized_sum import MaxNormalizedSum
from langchain_dpicl.privacy.extensions.permute_and_flip import PermuteAndFlipMechanism
from langchain_dpicl.privacy.extensions.random_allocation import AllocatedEvent, AllocatedSlots
from langchain_dpicl.privacy.extensions.sparse_vector import SparseVectorTest
from langchain_dpicl.privacy.extensions.unit_vector_sums import UnitVectorSum, VoteVectorSum
from langchain_dpicl.privacy.mechanisms.bounded import Aggregation
from langchain_dpicl.privacy.mechanisms.noise import GaussianMechanism, GumbelMechanism
from langchain_dpicl.privacy.mechanisms.sampling import PoissonSlots, PoissonUnits, Sampler
from langchain_dpicl.privacy.mechanisms.vote_sums import ProbabilitySum, VoteSum

PROVED: dict[str, tuple[type, ...]] = {
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

SAMPLERS: dict[str, type[Sampler]] = {
    cls.name: cls for cls in (PoissonSlots, PoissonUnits, BalancedSlots, PartitionedSlots, AllocatedSlots)
}
AGGREGATIONS: dict[str, type[Aggregation]] = {
    cls.name: cls
    for cls in (
        ProbabilitySum,
        VoteSum,
        MaxNormalizedSum,
        ClippedLogitMean,
        ClippedDifferenceMean,
        UnitVectorSum,
        KeywordSum,
        VoteVectorSum,
        ClippedGradientSum,
    )
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
