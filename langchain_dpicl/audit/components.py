"""Builds the audited components over made-up records and adversarial backends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_dpicl.audit.readers import (
    MARK,
    TOKENS,
    Opposite,
    ReadAnswers,
    ReadGradients,
    ReadLogits,
    ReadTokens,
    ReadVotes,
)
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.free_form import DPFreeFormRunnable
from langchain_dpicl.labelling import PromptPATELabeler
from langchain_dpicl.privacy.examples import PrivateExamples
from langchain_dpicl.privacy.shares import Share
from langchain_dpicl.soft_prompts import PromptDPSGD
from langchain_dpicl.synthesis import DemonstrationSynthesizer
from langchain_dpicl.token_rules import LOGIT_MECHANISMS
from langchain_dpicl.training_run import TrainingRun
from langchain_dpicl.voting import DPVotingRunnable

QUERY = "which one?"
BEYOND = 2
"""Inputs of a labelling beyond those that its share pays for: they have to wait."""

# What a game costs in all is of no interest: its events are compared one by one. No budget is in its way.
_EPSILON, _DELTA = 1e12, 1e-6
_LABELS = ("yes", "no")


def share_of(component: Any) -> Share:
    """Returns what a component may spend, with the tickets it has left."""
    share: Share = component.share if hasattr(component, "share") else component._share  # noqa: SLF001  to be audited
    return share


def _budget(adjacency: Any) -> Budget:
    return Budget(epsilon=_EPSILON, delta=_DELTA, adjacency=adjacency)


def _declared(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[dict[str, Any], int, str]:
    """Returns the constructor's options, the declared size and the adjacency."""
    arguments = {**defaults, "num_slots": options.get("public_size", 1), **options}
    return arguments, arguments.pop("public_size", 1), arguments.pop("adjacency", "add_remove")


def voter_of(units: Sequence[str], *, engine: Any = None, **options: Any) -> DPVotingRunnable:
    """Builds a voter over units that vote as their texts say (`ReadVotes`); every query is charged."""
    usual = {"labels": _LABELS, "rows": "slots", "overfill": 1.0, "noise_multiplier": 0.5, "memo_size": 0}
    arguments, size, adjacency = _declared(options, {**usual, "max_queries": 1_000})
    return DPVotingRunnable.from_private_examples(
        PrivateExamples(units, public_size=size),
        llm=ReadVotes() if engine is None else engine,
        budget=_budget(adjacency),
        epsilon=_EPSILON / 2,
        example_prompt=MARK + "{text}",
        suffix="{input}",
        calibrate=False,
        **arguments,
    )


def helper_of(units: Sequence[str], *, engine: Any = None, **options: Any) -> DPFreeFormRunnable:
    """Builds a free-form component over units that answer what their texts say, "yes" or "no"; see `ReadAnswers`."""
    usual: dict[str, Any] = {"rows": "slots", "overfill": 1.0, "noise_multiplier": 0.5, "memo_size": 0}
    arguments, size, adjacency = _declared(options, {**usual, "max_queries": 1_000, "aggregation": "embedding"})
    space: dict[str, Any] = {"embeddings": Opposite(), "candidates": _LABELS}
    if arguments["aggregation"] == "keywords":
        space = {"keyword_domain": _LABELS, "num_keywords": 1, "with_receipt": True}
    return DPFreeFormRunnable.from_private_examples(
        PrivateExamples(units, public_size=size),
        llm=ReadAnswers() if engine is None else engine,
        budget=_budget(adjacency),
        epsilon=_EPSILON / 2,
        example_prompt=MARK + "{text}",
        suffix="{input}",
        **{**space, **arguments},
    )


def labeler_of(units: Sequence[str], paid: int, *, engine: Any = None, **options: Any) -> PromptPATELabeler:
    """Builds a labeler over units that vote as their texts say, with more inputs than its share pays for."""
    arguments, size, adjacency = _declared(options, {"noise_multiplier": 0.5, "abstain_below": None, "labels": _LABELS})
    labels = arguments.pop("labels")
    if arguments.get("teachers") != "fixed":
        arguments = {"rows": "slots", "overfill": 1.0, **arguments}
    if "confident" in arguments:
        arguments |= {"mechanism": "confident_gnmax", "noise_multiplier": None}
    records = [{"text": unit, "answer": labels[-1]} for unit in units]
    return PromptPATELabeler.from_private_examples(
        PrivateExamples(records, label_key="answer", labels=labels, public_size=size),
        llm=ReadVotes() if engine is None else engine,
        budget=_budget(adjacency),
        epsilon=_EPSILON / 2,
        public_inputs=[f"which one, {place}?" for place in range(paid + BEYOND)],
        max_queries=paid,
        example_prompt=MARK + "{text}\n\n{answer}",
        suffix="{input}",
        calibrate=False,
        **arguments,
    )


def synthesizer_of(
    units: Sequence[str],
    tokens: int,
    *,
    public: Sequence[float] = (0.0,) * len(TOKENS),
    engine: Any = None,
    **options: Any,
) -> DemonstrationSynthesizer:
    """Builds a generation of one-token texts over units whose texts are logits (`ReadTokens`)."""
    usual: dict[str, Any] = {"rows": "slots", "overfill": 1.0, "noise_multiplier": 0.5, "mechanism": "gumbel"}
    arguments, size, adjacency = _declared(options, {**usual, "max_tokens": 1, "public_top_k": None})
    reader = ReadLogits if arguments["mechanism"] in LOGIT_MECHANISMS else ReadTokens
    return DemonstrationSynthesizer.from_private_examples(
        PrivateExamples(units, public_size=size),
        llm=reader(public) if engine is None else engine,
        budget=_budget(adjacency),
        epsilon=_EPSILON / 2,
        generation_prompt=MARK + "{text}",
        shots_per_label=tokens,
        **arguments,
    )


def training_of(units: Sequence[str], steps: int, *, engine: ReadGradients, **options: Any) -> TrainingRun:
    """Prepares a training on the gradients that units ask for, with plain steps of size 1: weights show averages."""
    arguments, size, adjacency = _declared(options, {"noise_multiplier": 0.5, "l2_clip_norm": 0.1, "optimizer": "sgd"})
    del arguments["num_slots"]
    arguments = {"learning_rate": 1.0, "expected_batch_size": size, "epsilon": _EPSILON / 2, **arguments}
    labels = engine.task.labels
    records = [{"text": unit, "label": labels[0]} for unit in units]
    private = PrivateExamples(records, label_key="label", labels=labels, public_size=size)
    return PromptDPSGD(engine).prepare(private, budget=_budget(adjacency), steps=steps, **arguments)
