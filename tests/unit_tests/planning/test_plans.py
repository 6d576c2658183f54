"""Every plan keeps the contract of plans."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import Any

import pytest

from langchain_dpicl.discovery import plan_discovery, plan_words
from langchain_dpicl.documents import plan_documents
from langchain_dpicl.evolution import plan_evolution
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.generation.plan import Segment, TokenRule, plan_generation
from langchain_dpicl.pate.plan import plan_labelling
from langchain_dpicl.planning.expected_utility import RowDesign, search_designs
from langchain_dpicl.privacy.extensions.confident_gnmax import ConfidentGNMaxMechanism
from langchain_dpicl.privacy.extensions.joint_exponential import JointExponentialMechanism, KeywordSum
from langchain_dpicl.privacy.extensions.normalized_sums import UnitVectorSum
from langchain_dpicl.privacy.extensions.registry import MECHANISMS
from langchain_dpicl.privacy.extensions.value_counts import DiscreteLaplaceMechanism, count_release
from langchain_dpicl.privacy.extensions.word_release import ThresholdedGaussianMechanism, word_release
from langchain_dpicl.privacy.mechanisms.bounded import ProbabilitySum
from langchain_dpicl.reports.verify import shown_plan
from langchain_dpicl.retrieval import plan_retrieval
from langchain_dpicl.runs.query_plan import plan_queries
from langchain_dpicl.soft_prompts.plan import plan_training
from tests.contracts.plan import PlanContract, shown_by

NOISE: dict[str, Any] = {"epsilon": None, "delta": 1e-6, "noise_multiplier": 2.0}
SLOTS = RowDesign.choose(num_slots=10, shots_per_slot=2)
FIXED = RowDesign.choose(num_slots=10, shots_per_slot=2, sampling="fixed")
DEAL = RowDesign.choose(num_slots=10, shots_per_slot=2, sampling="disjoint")
BY_LABEL = {"card": 2_000, "transfer": 1_000}


class TestQueries(PlanContract):
    plans = (
        plan_queries(900, **NOISE, max_queries=9, width=4, constants=(2.5,)),
        *(plan_queries(900, **NOISE, max_queries=9, width=3, mechanism=name, design=SLOTS) for name in MECHANISMS),
        plan_queries(900, **NOISE, max_queries=9, width=3, design=FIXED, adjacency="replace_one"),
        plan_queries(900, **NOISE, max_queries=9, width=3, aggregation=ProbabilitySum()),
        plan_queries(900, **NOISE, max_queries=9, width=64, aggregation=UnitVectorSum(), mechanism="gaussian"),
        plan_queries(
            900,
            **NOISE,
            max_queries=9,
            width=30,
            aggregation=KeywordSum(),
            mechanism=JointExponentialMechanism(1.0, num_choices=5),
        ),
    )


class TestLabels(PlanContract):
    plans = (
        plan_labelling(900, **NOISE, max_queries=9, width=3, teachers="one_sample", design=SLOTS, mechanism="gumbel"),
        plan_labelling(900, **NOISE, max_queries=9, width=3, mechanism="gaussian", threshold=4.0),
        plan_labelling(900, **NOISE, max_queries=9, width=3, teachers="fixed", adjacency="replace_one"),
    )


class TestConfidentLabels(PlanContract):
    plans = tuple(
        plan_labelling(
            900,
            epsilon=None,
            delta=1e-6,
            max_queries=9,
            width=3,
            teachers=teachers,
            adjacency=adjacency,
            max_answers=answers,
            mechanism=ConfidentGNMaxMechanism(noise_multiplier=9.0, test_noise_multiplier=11.0, threshold=5.0),
        )
        for teachers, adjacency, answers in (
            ("one_sample", "add_remove", 4),
            ("fresh", "add_remove", None),
            ("fixed", "replace_one", 4),
        )
    )


class TestGeneration(PlanContract):
    plans = (
        plan_generation(BY_LABEL, **NOISE, shots_per_label=2, segments=(Segment("text", 12), Segment("more", 5))),
        plan_generation(BY_LABEL, **NOISE, shots_per_label=2, design=DEAL, mechanism="gaussian"),
        plan_generation({None: 900}, **NOISE, design=FIXED, adjacency="replace_one", redraw_every=7),
    )


class TestLogits(PlanContract):
    plans = (
        *(
            plan_generation(
                BY_LABEL,
                **NOISE,
                mechanism=TokenRule("difference_clip", 2.0, free_tokens=0.3, private_tokens=4),
                **deal,
            )
            for deal in ({"design": DEAL, "shots_per_label": 2}, {"redraw_every": 60})
        ),
        plan_generation({None: 900}, **NOISE, mechanism=TokenRule("recentered_clip"), design=SLOTS),
        plan_generation({None: 900}, **NOISE, mechanism=TokenRule("clip_and_blend", blend_weight=0.4, center="none")),
        plan_generation(
            {None: 900}, epsilon=None, delta=1e-6, mechanism=TokenRule("clip_and_blend", clip=3.0, temperature=9.0)
        ),
    )


class TestDocuments(PlanContract):
    plans = tuple(
        plan_documents(
            ("card", "loan"),
            public_size=5_000,
            epsilon=8.0,
            delta=1e-6,
            num_topics=2,
            max_tokens=9,
            topic_noise=noise,
            documents_per_topic=4,
        )
        for noise in ("gaussian", "discrete_laplace")
    )

    def louder(self, shown: dict[str, Any]) -> dict[str, Any]:
        return {**shown, "generation": super().louder(shown["generation"])}


class TestEvolution(PlanContract):
    plans = (plan_evolution(BY_LABEL, **NOISE, rounds=3), plan_evolution({None: 900}, **NOISE, adjacency="replace_one"))


class TestRetrieval(PlanContract):
    guesses = MappingProxyType({"participants": 9})
    plans = (
        plan_retrieval(900, **NOISE, participations=9, width=3),
        plan_retrieval(900, **NOISE, participations=9, width=3, num_slots=None, aggregation=ProbabilitySum()),
    )


class TestTraining(PlanContract):
    plans = tuple(
        plan_training(900, **NOISE, expected_batch_size=30, l2_clip_norm=0.1, width=70, steps=20, adjacency=adjacency)
        for adjacency in ("add_remove", "replace_one")
    )


class TestCounts(PlanContract):
    plans = (
        plan_discovery("queue", epsilon=9.0, delta=1e-6, values=("card", "loan"), noise_multiplier=2.0),
        plan_discovery("queue", epsilon=9.0, delta=1e-6, noise_multiplier=2.0),
        plan_discovery(None, epsilon=9.0, delta=1e-6, noise_multiplier=2.0),
    )

    def louder(self, shown: dict[str, Any]) -> dict[str, Any]:
        """Twice the noise, and a threshold that goes with it."""
        release = count_release(shown["counts"])
        threshold = None if release.mechanism.threshold is None else 3 * release.mechanism.threshold
        noise = DiscreteLaplaceMechanism(4.0, threshold)
        return {**shown, "counts": dataclasses.replace(release, mechanism=noise).to_dict()}


class TestWords(PlanContract):
    plans = tuple(
        plan_words(epsilon=9.0, delta=1e-6, noise_multiplier=2.0, pairs=pairs, labels=labels, adjacency=adjacency)
        for pairs, labels, adjacency in (
            (False, (), "add_remove"),
            (True, ("card", "loan"), "add_remove"),
            (True, ("card", "loan"), "replace_one"),
        )
    )

    def louder(self, shown: dict[str, Any]) -> dict[str, Any]:
        """Twice the noise, and a threshold that goes with it."""
        releases = {name: shown[name] and word_release(shown[name]) for name in ("words", "pairs")}
        noise = ThresholdedGaussianMechanism(4.0, 3 * releases["words"].mechanism.threshold)
        changed = {
            name: release and dataclasses.replace(release, mechanism=noise).to_dict()
            for name, release in releases.items()
        }
        return {**shown, **changed}


@pytest.mark.parametrize("method", ["magic", None, [], 7])
def test_an_unknown_method_is_refused(method: object) -> None:
    with pytest.raises(ConfigurationError, match="method: expected one of"):
        shown_plan({**shown_by(TestQueries.plans[0]), "method": method})


class Planned:
    """A design of some rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank


def test_a_search_goes_on_from_the_best_and_plans_nothing_twice() -> None:
    asked: list[int] = []

    def option(rank: int) -> Planned | None:
        asked.append(rank)
        return Planned(rank) if rank != 5 else None

    found = search_designs(option, lambda _: (3, 2, 5), lambda best: (best[0].rank - 1, 3))
    assert [one.rank for one in found] == [1, 2, 3]
    assert asked == [3, 2, 5, 1]
