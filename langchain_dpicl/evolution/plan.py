"""Plans, calibrates and prices a private evolution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from langchain_dpicl.planning.expected_utility import noise_scale
from langchain_dpicl.planning.share_plan import Cost, SharePlan, with_noise_for
from langchain_dpicl.privacy._validate import Adjacency, check_adjacency, check_int, check_positive_delta, fail
from langchain_dpicl.privacy.extensions.unit_vector_sums import VoteVectorSum
from langchain_dpicl.privacy.ledger.amounts import check_name
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.privacy.mechanisms.noise import GaussianMechanism
from langchain_dpicl.privacy.mechanisms.release_plan import ReleasePlan
from langchain_dpicl.privacy.mechanisms.sampling import PoissonUnits

MECHANISM = "private_evolution"
"""Name of private evolution among the generation mechanisms."""
ROUND_TEMPLATE = "round: one noisy histogram of votes"
"""The ticket template of one round."""


@dataclass(frozen=True, slots=True)
class EvolutionPlan(SharePlan):
    """The public plan of one private evolution: the release, its tickets and its cost.

    Attributes:
      release: plan of one histogram of votes; the same for every label.
      public_sizes: (label, declared units) pairs; one pair with label None without declared labels.
      rounds: histograms per label.
      shots_per_label: demonstrations per label.
      num_candidates: maximum number of candidates of the first round.
      num_survivors: candidates that survive a round.
      num_variations: variations of each survivor.
    """

    method: ClassVar[str] = "evolution"

    release: ReleasePlan
    public_sizes: tuple[tuple[str | None, int], ...]
    rounds: int
    shots_per_label: int
    num_candidates: int
    num_survivors: int
    num_variations: int

    @property
    def labels(self) -> tuple[str | None, ...]:
        """The declared labels, or (None,)."""
        return tuple(label for label, _ in self.public_sizes)

    @property
    def width(self) -> int:
        """Maximum number of candidates of a round."""
        return max(self.num_candidates, self.num_survivors * (1 + self.num_variations))

    @property
    def sizes(self) -> Mapping[str | None, int]:
        """Declared units by label."""
        return dict(self.public_sizes)

    @property
    def implementation_delta(self) -> float:
        """Declared gap between ideal and drawn noise, over the releases that one unit takes part in."""
        # Under replace_one a unit may change label and take part in two branches.
        branches = 2 if self.release.adjacency == "replace_one" and len(self.labels) > 1 else 1
        return branches * self.release.implementation_delta(self.rounds, width=self.width)

    def tickets(self) -> tuple[Ticket, ...]:
        """Returns the tickets of the share: one per round and label."""
        event = self.release.block_event(1)
        return tuple(
            Ticket(template=ROUND_TEMPLATE, event=event, label=label, max_count=self.rounds, refundable=True)
            for label in self.labels
        )

    def cost(self, *, record_tokens: int = 60, instruction_tokens: int = 30) -> Cost:
        """Returns the model calls from public caps; none of them is private."""
        check_int("record_tokens", record_tokens, low=1)
        check_int("instruction_tokens", instruction_tokens, low=0)
        first = len(self.labels) * self.num_candidates
        varied = len(self.labels) * (self.rounds - 1) * self.num_survivors * self.num_variations
        tokens_in = first * instruction_tokens + varied * (instruction_tokens + record_tokens)
        return Cost(0, first + varied, tokens_in, (first + varied) * record_tokens)

    @property
    def embedded(self) -> dict[str, int]:
        """Texts passed to the embeddings: each record once, and the maximum number of candidates."""
        # Survivors are embedded again in every round.
        later = (self.rounds - 1) * self.num_survivors * (1 + self.num_variations)
        return {
            "private": sum(size for _, size in self.public_sizes),
            "public": len(self.labels) * (self.num_candidates + later),
        }

    def expected(self) -> dict[str, float]:
        """Returns how the votes of the smallest declared label compare with the noise on each candidate.

        `share_to_be_seen` is the share of the label's units that must be nearest to one candidate for its votes to
        reach three standard deviations of the noise.
        """
        smallest = min(size for _, size in self.public_sizes)
        scale = noise_scale(self.release)
        return {
            "units": float(smallest),
            "votes_per_candidate": smallest / self.width,
            "noise_scale": scale,
            "share_to_be_seen": min(1.0, 3.0 * scale / smallest),
        }

    def _numbers(self) -> dict[str, Any]:
        return {
            "mechanism": MECHANISM,
            "noise_scale": noise_scale(self.release),
            "rounds": self.rounds,
            "shots_per_label": self.shots_per_label,
            "num_candidates": self.num_candidates,
            "num_survivors": self.num_survivors,
            "num_variations": self.num_variations,
            "candidates": self.width,
            "labels": [
                {"label": label, "public_size": size, "sampling_rate": 1.0} for label, size in self.public_sizes
            ],
        }

    @classmethod
    def rebuild(cls, shown: Mapping[str, Any]) -> EvolutionPlan:
        """Returns the plan of the parameters shown, see `SharePlan.rebuild`."""
        names = ("rounds", "shots_per_label", "num_candidates", "num_survivors", "num_variations")
        return plan_evolution(
            {branch["label"]: branch["public_size"] for branch in shown["labels"]},
            epsilon=None,
            delta=shown["delta"],
            adjacency=shown["adjacency"],
            noise_multiplier=shown["noise_multiplier"],
            partition=shown["dataset_id"],
            **{name: shown[name] for name in names},
        )


def plan_evolution(
    public_sizes: Mapping[str | None, int],
    *,
    epsilon: float | None,
    delta: float,
    adjacency: Adjacency = "add_remove",
    noise_multiplier: float | None = None,
    rounds: int = 5,
    shots_per_label: int = 4,
    num_candidates: int | None = None,
    num_survivors: int = 10,
    num_variations: int = 3,
    partition: str = "private-examples",
) -> EvolutionPlan:
    """Calibrates the noise of all rounds to `epsilon`, or prices a given noise.

    Args:
      public_sizes: declared number of units per label ({None: n} where labels do not split).
      epsilon: target; the plan's epsilon is an upper bound at most this. None needs `noise_multiplier`.
      delta: the share's delta.
      adjacency: neighbouring relation.
      noise_multiplier: given noise; None calibrates.
      rounds: histograms of votes, per label.
      shots_per_label: demonstrations per label, taken from the last round's survivors.
      num_candidates: maximum number of candidates of the first round; None: that of later rounds.
      num_survivors: candidates that survive a round.
      num_variations: variations of each survivor; 0 only with one round, which then chooses among given candidates.
      partition: the data set's public id.

    Raises:
      ConfigurationError: a public parameter is out of range.

    >>> plan = plan_evolution({None: 12_000}, epsilon=1.0, delta=1e-6, rounds=10)
    >>> round(plan.noise_multiplier, 1), plan.cost().public_calls
    (13.4, 310)
    """
    check_adjacency(adjacency)
    check_positive_delta(delta)
    check_name("partition", partition)
    for name, value in (("rounds", rounds), ("shots_per_label", shots_per_label), ("num_survivors", num_survivors)):
        check_int(name, value, low=1)
    check_int("num_variations", num_variations, low=0 if rounds == 1 else 1)
    usual = max(2, num_survivors * (1 + num_variations))
    first = check_int("num_candidates", usual if num_candidates is None else num_candidates, low=2)
    if shots_per_label > num_survivors:
        advice = "Demonstrations are taken from the survivors of the last round."
        raise fail("shots_per_label", f"at most num_survivors={num_survivors}", shots_per_label, advice)
    for label, size in public_sizes.items():
        check_int("public_size" if label is None else f"public_size of {label!r}", size, low=1)
    release = ReleasePlan(
        sampler=PoissonUnits(sampling_rate=1.0),  # all units vote in every round: no amplification
        aggregation=VoteVectorSum(),
        mechanism=GaussianMechanism(1.0),
        adjacency=adjacency,
    )
    draft = EvolutionPlan(
        release=release,
        public_sizes=tuple(public_sizes.items()),
        rounds=rounds,
        shots_per_label=shots_per_label,
        num_candidates=first,
        num_survivors=num_survivors,
        num_variations=num_variations,
        partition=partition,
        epsilon=0.0,
        delta=delta,
    )
    return with_noise_for(draft, epsilon=epsilon, noise_multiplier=noise_multiplier)
