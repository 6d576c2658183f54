"""Audits one configuration: which checks it needs, played one after the other. The room's front door.

The records are made up and the model is a fake that tells them apart as well as can be, so nothing private is read and
nothing of the budget is spent.
"""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from langsmith.run_helpers import tracing_context

from langchain_dpicl.audit import cases, ledgers, parts, sampled, vectors
from langchain_dpicl.audit.answering import VotingGame
from langchain_dpicl.audit.components import QUERY, labeler_of, voter_of
from langchain_dpicl.audit.games import Game, control, play
from langchain_dpicl.audit.labelling import LabelGame
from langchain_dpicl.audit.results import AuditReport, AuditResult, PrivacyAuditError
from langchain_dpicl.audit.subjects import Subject
from langchain_dpicl.audit.training import can_refute, canaries
from langchain_dpicl.planning import GenerationPlan
from langchain_dpicl.privacy.confident import ConfidentGNMaxMechanism
from langchain_dpicl.training_planning import TrainingPlan

Check = Callable[[], AuditResult]
T = TypeVar("T")


def audit(
    subject: Any,
    *,
    controls: bool = False,
    progress: Callable[[AuditResult], object] | None = None,
    name: str | None = None,
) -> AuditReport:
    """Audits a configuration offline, on made-up records and with a fake model, in well under a minute.

    Formal guarantees:
      - Sound code is called violated with probability at most 1e-6 per result; the report adds them up.
      - A result of "sound" with a `power` would have been "violated", with at least that chance, under the fault that
        `power_for` names: half of the noise, twice the sampling rate. "undecided" results did not reach .99; of "sound"
        results without a `power` no such chance was computed, and "skipped" results say why they were not played.
      - No record of the subject is read, no ticket of its budget is spent.
      - It runs in a context of its own, untraced: budgets, handlers and tracers of the caller's context see none of it.

    Args:
      subject: a component, a plan, or the JSON of `dpicl plan --json` as a mapping; see `Subject`.
      controls: also plays every game at half of the noise against the same claim, which is then false, to show that the
        audit can fail: results named "control", "sound" where the false claim was refuted.
      progress: called with every result as soon as there is one.
      name: of the subject, for the report.

    Returns:
      The report; `report.ok` is false where something was refuted.

    Raises:
      ConfigurationError: the subject is none that can be audited.
    """
    start, results = time.monotonic(), list[AuditResult]()
    made = Subject.of(subject, name=name)
    checks = _checks(made, controls=controls)
    while (check := _alone(lambda: next(checks, None))) is not None:
        results.append(_alone(check))
        if progress is not None:
            progress(results[-1])
    return AuditReport(subject=made.name, results=tuple(results), seconds=time.monotonic() - start)


def assert_private(subject: Any, *, allow_undecided: bool = False, **options: Any) -> AuditReport:
    """Audits a configuration and raises where a claim is refuted: for the tests of a project that uses this package.

    Args:
      subject: as for `audit`.
      allow_undecided: whether a check that is too small to tell may pass.
      options: of `audit`.

    Returns:
      The report.

    Raises:
      PrivacyAuditError: a claim is refuted, or undecided; an AssertionError, so that pytest shows it as a failure.
    """
    report = audit(subject, **options)
    if report.verdict == "violated" or (report.verdict == "undecided" and not allow_undecided):
        raise PrivacyAuditError(str(report), report=report)
    return report


def _alone(action: Callable[[], T]) -> T:
    """Runs something away from the caller's context, which may hold a budget and handlers that count every run."""

    def untraced() -> T:
        with tracing_context(enabled=False):
            return action()

    return contextvars.Context().run(untraced)


def _checks(subject: Subject, *, controls: bool) -> Iterator[Check]:
    release = subject.plan.release
    yield lambda: ledgers.price(subject)
    if subject.component is not None:
        yield lambda: ledgers.tickets(subject)
        yield lambda: ledgers.report(subject)
    for label, branch in getattr(subject.plan, "branches", ((None, release),)):
        of_label = "" if label is None else f", label {label!r}"
        yield lambda it=branch, of=of_label: parts.sampler_rate(it, name=f"sampler: rate{of}")  # type: ignore[misc]
        yield lambda it=branch, of=of_label: parts.places(it, name=f"slots: one unit, one place{of}")  # type: ignore[misc]
    yield lambda: parts.contribution(release)
    yield lambda: parts.noise(release)
    yield from _sample_checks(subject)
    if (coin := _coin_of(subject)) is not None:
        yield lambda: parts.freshness(coin)
    else:
        why_not = "played for votes alone, and not of Confident-GNMax"
        yield lambda: parts.skipped("noise: fresh for every answer", why_not)
    if subject.options.get("with_scores"):
        yield lambda: vectors.released_scores(rows=release.row_shape, adjacency=release.adjacency)
    elif subject.method == "voting" and subject.component is None and release.mechanism.name == "gaussian":
        why = "a plan does not say whether scores leave; the label alone is looked at: audit the component"
        yield lambda: parts.skipped("scores: noisy votes that leave", why)
    for game in games_of(subject):
        yield lambda game=game: play(game)  # type: ignore[misc]
        if controls:
            yield lambda game=game: control(game)  # type: ignore[misc]
    if isinstance(subject.plan, TrainingPlan):
        yield lambda: _one_run(_run_options(subject))


def _one_run(options: dict[str, Any]) -> AuditResult:
    """Trains with canaries where they could refute the claim."""
    if not can_refute(options):
        why = "more is claimed than its guesses could refute, even without any noise"
        return parts.skipped("one run, many canaries", why)
    return canaries(options)


def _sample_checks(subject: Subject) -> Iterator[Check]:
    """Yields what an engine sees of samples; fixed teachers have none, and one deal or sample serves many releases."""
    release, design = subject.plan.release, getattr(subject.plan, "design", None)
    if getattr(subject.plan, "teachers", "fresh") != "fresh" or (design is not None and design.sampling != "poisson"):
        why = "played only where every release draws a Poisson sample of its own"
        yield lambda: parts.skipped("samples: drawn anew, as the engine sees them", why)
        return
    options: dict[str, Any] = {"rows": release.row_shape, "adjacency": release.adjacency}
    name = subject.plan.rule.mechanism if isinstance(subject.plan, GenerationPlan) else release.mechanism.name
    if subject.method == "free_form":
        options["aggregation"] = _space(subject)
    elif name == ConfidentGNMaxMechanism.name:
        options["confident"] = (0.5, 1.0, 1.0)
    else:
        options["mechanism"] = name
    yield lambda: sampled.inclusion(subject.method, options)
    if release.row_shape == "slots":
        yield lambda: sampled.one_place(subject.method, options)


def games_of(subject: Subject) -> tuple[Game, ...]:
    """Returns the worst cases of a configuration.

    Args:
      subject: as of `audit`.
    """
    release, options = subject.plan.release, subject.options
    design = getattr(subject.plan, "design", None)
    shape: dict[str, Any] = {"rows": release.row_shape, "adjacency": release.adjacency}
    if subject.method == "dpsgd" or design is None:
        return tuple(cases.step_cases(adjacency=release.adjacency))
    sampling = design.sampling if design.sampling in {"fixed", "partition"} else "poisson"
    if subject.method == "free_form":
        return tuple(cases.free_form_cases(aggregation=_space(subject), sampling=sampling, **shape))
    if subject.method == "generation":
        rule = subject.plan.rule  # type: ignore[union-attr]
        given = {"blend_weight": rule.blend_weight, "center": rule.center, "clip": 2.0} if rule.is_logit else {}
        kept = {key: value for key, value in given.items() if value is not None}
        return tuple(cases.token_cases(mechanism=rule.mechanism, sampling=sampling, rule=kept, **shape))
    return tuple(_vote_games(subject, sampling=sampling, shape=shape, options=options))


def _vote_games(
    subject: Subject, *, sampling: str, shape: Mapping[str, Any], options: Mapping[str, Any]
) -> Iterator[Game]:
    mechanism = subject.plan.release.mechanism
    teachers = getattr(subject.plan, "teachers", None)
    if isinstance(mechanism, ConfidentGNMaxMechanism):
        yield from cases.confident_cases(teachers=str(teachers), sampling=sampling, **shape)
        return
    # Where one sample serves a whole run and holds everybody, an input has its part of the one ticket.
    more = {} if teachers is None else {"teachers": teachers}
    is_vector = mechanism.name == "gaussian"
    yield from cases.vote_cases(
        VotingGame if teachers is None else LabelGame,
        mechanism=mechanism.name,
        sampling="poisson" if teachers == "fixed" else sampling,
        has_vectors=is_vector and (teachers is not None or bool(options.get("with_scores"))),
        abstains=bool(options.get("abstain_below") or subject.plan.release.constants),
        options=more,
        **shape,
    )


def _space(subject: Subject) -> str:
    return str(subject.options.get("aggregation") or "embedding")


def _coin_of(subject: Subject) -> Callable[[], bool] | None:
    """Returns what asks a component with two equal candidates once; None where its games tell as much."""
    mechanism = subject.plan.release.mechanism.name
    if subject.method not in {"voting", "pate"} or mechanism == ConfidentGNMaxMechanism.name:
        return None
    runs = 200
    given = {"mechanism": mechanism, "rows": "units", "adjacency": subject.plan.release.adjacency}
    if subject.method == "voting":
        voter = voter_of((), max_queries=runs, **given)
        return lambda: voter.invoke(QUERY) == "yes"
    entries = labeler_of((), runs, **given).stream(progress=False)
    return lambda: next(entries).label == "yes"


def _run_options(subject: Subject) -> dict[str, Any]:
    """Returns a run at the subject's rate, steps and noise."""
    plan: Any = subject.plan
    options = {"sampling_rate": plan.sampling_rate, "steps": min(plan.steps, 100), "adjacency": plan.release.adjacency}
    return {**options, "noise_multiplier": plan.noise_multiplier}
