"""Checks sampling as the backend sees it: at most once per unit, at the charged rate, anew for each release."""

# The component itself runs, and its backend counts the prompts that hold a record. `parts` checks the sampler alone.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from langchain_dpicl.audit.cases import LOUD_A, YES
from langchain_dpicl.audit.components import QUERY, helper_of, labeler_of, synthesizer_of, training_of, voter_of
from langchain_dpicl.audit.parts import is_fair_and_fresh
from langchain_dpicl.audit.readers import ReadAnswers, ReadGradients, ReadLogits, ReadTokens, ReadVotes
from langchain_dpicl.audit.results import AuditResult
from langchain_dpicl.token_rules import LOGIT_MECHANISMS

Presences = Iterator[int]
"""How many prompts of each release hold the only unit."""


def _asked(engine: Any, ask: Callable[[], object], runs: int) -> Presences:
    for _ in range(runs):
        engine.present = 0
        ask()
        yield int(engine.present)


def of_voting(runs: int, **options: Any) -> Presences:
    """Yields presences of a voter's queries."""
    engine = ReadVotes()
    voter = voter_of((YES,), engine=engine, max_queries=runs, **options)
    return _asked(engine, lambda: voter.invoke(QUERY), runs)


def of_free_form(runs: int, **options: Any) -> Presences:
    """Yields presences of answers in free form."""
    engine = ReadAnswers()
    helper = helper_of(("yes",), engine=engine, max_queries=runs, **options)
    return _asked(engine, lambda: helper.invoke(QUERY), runs)


def of_pate(runs: int, **options: Any) -> Presences:
    """Yields presences of a labeler's inputs."""
    engine = ReadVotes()
    entries = labeler_of((YES,), runs, engine=engine, **options).stream(progress=False)
    return _asked(engine, lambda: next(entries), runs)


def of_generation(runs: int, **options: Any) -> Presences:
    """Yields presences of generated tokens."""
    kind = ReadLogits if options.get("mechanism") in LOGIT_MECHANISMS else ReadTokens
    engine = kind((0.0, 0.0, 0.0))
    texts = synthesizer_of((LOUD_A,), runs, engine=engine, **options).stream(progress=False)
    return _asked(engine, lambda: next(texts), runs)


def of_dpsgd(runs: int, **options: Any) -> Presences:
    """Yields presences of training steps."""
    engine = ReadGradients(1)
    size = options.pop("public_size")
    arguments = {key: value for key, value in options.items() if key in {"adjacency", "noise_multiplier"}}
    steps = training_of(("0:1",), runs, engine=engine, public_size=size, expected_batch_size=1, **arguments)
    made = steps.stream(progress=False)
    return _asked(engine, lambda: next(made), runs)


PRESENCES: Mapping[str, Callable[..., Presences]] = {
    "voting": of_voting,
    "free_form": of_free_form,
    "pate": of_pate,
    "generation": of_generation,
    "dpsgd": of_dpsgd,
}


def inclusion(method: str, options: Mapping[str, Any], *, runs: int = 160, name: str = "") -> AuditResult:
    """Checks that a unit is in half of the samples, by a fair coin for every release, and at most once in each."""
    presences = list(PRESENCES[method](runs, **{**options, "public_size": 2, "num_slots": 1}))
    return judged(presences, name=name or "samples: drawn anew, at the charged rate, as the engine sees them")


def judged(presences: Sequence[int], *, name: str) -> AuditResult:
    """Judges presences of a unit that is to be in every second sample; false alarm 1e-6."""
    problems = ["a unit stands in several prompts of one sample"] if max(presences) > 1 else []
    if not is_fair_and_fresh([bool(count) for count in presences]):
        present = sum(map(bool, presences))
        problems.append(f"in {present} of {len(presences)} samples, expected half of them, each by its own coin")
    return AuditResult(
        check=name,
        verdict="violated" if problems else "sound",
        runs=len(presences),
        details=tuple(problems),
        blind_to=("a rate that is wrong by less than a half: `sampler: rate` looks at it more closely",),
    )


def one_place(method: str, options: Mapping[str, Any], *, runs: int = 40, name: str = "") -> AuditResult:
    """Checks that a unit that is in every sample stands in one of three slots, and in one only."""
    presences = list(PRESENCES[method](runs, **{**options, "public_size": 3, "num_slots": 3}))
    problems = [f"a unit stands in {count} slots of one sample" for count in sorted(set(presences) - {1})]
    return AuditResult(
        check=name or "slots: a unit is seen in one prompt",
        verdict="violated" if problems else "sound",
        runs=runs,
        confidence=1.0,
        details=tuple(problems),
    )
