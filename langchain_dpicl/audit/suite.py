"""Selects and runs the checks of one configuration."""

# Records are made up and the model is a fake that distinguishes them perfectly: nothing private is read, and nothing of
# the budget is spent.

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

from langsmith.run_helpers import tracing_context

from langchain_dpicl.audit import cases, counting, documenting, evolving, ledgers, parts, retrieving, sampled, vectors
from langchain_dpicl.audit.answering import VotingGame
from langchain_dpicl.audit.components import QUERY, labeler_of, voter_of
from langchain_dpicl.audit.games import Game, control, play
from langchain_dpicl.audit.labelling import LabelGame
from langchain_dpicl.audit.results import AuditReport, AuditResult, PrivacyAuditError
from langchain_dpicl.audit.subjects import Subject
from langchain_dpicl.audit.training import can_refute, canaries
from langchain_dpicl.documents_planning import DocumentsPlan
from langchain_dpicl.planning import GenerationPlan
from langchain_dpicl.privacy.extensions.confident_gnmax import ConfidentGNMaxMechanism
from langchain_dpicl.privacy.extensions.count_histograms import CountPlan
from langchain_dpicl.privacy.extensions.individual_filter import ParticipationPlan
from langchain_dpicl.privacy.mechanisms.release_plan import ReleasePlan
from langchain_dpicl.training_planning import TrainingPlan

T = TypeVar("T")

FRESH = "noise: fresh for every answer"
ONE_RUN = "one run, many canaries"


class Check(NamedTuple):
    """One check: the name of its result, and the function that makes it."""

    name: str
    play: Callable[[], AuditResult]


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
      - A check that ends with an exception is a result, "failed", and the others are played. Of the exception only the
        name of its class is told; its text may quote anything.

    Args:
      subject: a component, a plan, or the JSON of `dpicl plan --json` as a mapping; see `Subject`.
      controls: also plays every game at half of the noise against the same claim, which is then false, to show that the
        audit can fail: results named "control", "sound" where the false claim was refuted.
      progress: called with every result as soon as there is one.
      name: of the subject, for the report.

    Returns:
      The report; `report.ok` is false where something was refuted, or a check failed.

    Raises:
      ConfigurationError: the subject is none that can be audited.
    """
    start, results = time.monotonic(), list[AuditResult]()
    made = Subject.of(subject, name=name)
    for result in _played(_checks(made, controls=controls)):
        results.append(result)
        if progress is not None:
            progress(result)
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
      PrivacyAuditError: a claim is refuted or undecided, or a check ended with an exception; an AssertionError, so that
        pytest shows it as a failure.
    """
    report = audit(subject, **options)
    if not report.ok or (report.verdict == "undecided" and not allow_undecided):
        raise PrivacyAuditError(str(report), report=report)
    return report


def _played(checks: Iterator[Check]) -> Iterator[AuditResult]:
    """Runs the checks one after the other; an exception in one leaves the results of the others."""
    while True:
        try:
            check = _alone(lambda: next(checks, None))
        except Exception as error:  # noqa: BLE001  told in the result
            yield _failed("the next check, and all that would have followed", error)
            return
        if check is None:
            return
        try:
            result = _alone(check.play)
        except Exception as error:  # noqa: BLE001  told in the result
            result = _failed(check.name, error)
        yield result


def _failed(check: str, error: Exception) -> AuditResult:
    """Returns the result of a check that raised: the class of the exception, none of its text."""
    why = f"it raised {type(error).__name__}, so nothing is known of what it looks at"
    return AuditResult(check=check, verdict="failed", confidence=1.0, details=(why,))


def _alone(action: Callable[[], T]) -> T:
    """Runs an action outside the caller's context, which may hold a budget and handlers that count runs."""

    def untraced() -> T:
        with tracing_context(enabled=False):
            return action()

    return contextvars.Context().run(untraced)


def _checks(subject: Subject, *, controls: bool) -> Iterator[Check]:
    release = subject.plan.release
    yield Check("price", lambda: ledgers.price(subject))
    if subject.component is not None:
        yield Check("ledger: tickets", lambda: ledgers.tickets(subject))
        yield Check("ledger: report", lambda: ledgers.report(subject))
    if isinstance(subject.plan, DocumentsPlan):
        yield from (Check(*named) for named in documenting.document_checks(subject.plan))
        yield from _row_checks(subject.texts, _rows_of(subject.texts))
    elif isinstance(release, CountPlan):
        yield from (Check(*named) for named in counting.count_checks(release))
    elif isinstance(release, ParticipationPlan):
        yield Check("balances: none is shown", lambda: retrieving.nothing_shown(release.row_shape))
    else:
        yield from _row_checks(subject, release)
    for game in games_of(subject):
        yield Check(game.name, partial(play, game))
        if controls:
            yield Check(f"control: {game.name}", partial(control, game))
    if isinstance(subject.plan, TrainingPlan):
        yield Check(ONE_RUN, lambda: _one_run(_run_options(subject)))


def _rows_of(subject: Subject) -> ReleasePlan:
    release: Any = subject.plan.release  # of everything but counts
    rows: ReleasePlan = release
    return rows


def _row_checks(subject: Subject, release: ReleasePlan) -> Iterator[Check]:
    """Yields the checks of samples, rows and noise."""
    for label, branch in getattr(subject.plan, "branches", ((None, release),)):
        rate, place = (
            name if label is None else f"{name}, label {label!r}"
            for name in ("sampler: rate", "slots: one unit, one place")
        )
        yield Check(rate, partial(parts.sampler_rate, branch, name=rate))
        yield Check(place, partial(parts.places, branch, name=place))
    yield Check("rows", lambda: parts.contribution(release))
    yield Check("noise: scale", lambda: parts.noise(release))
    yield from _sample_checks(subject)
    yield Check(FRESH, lambda: _freshness(subject))
    yield from _score_checks(subject)


def _freshness(subject: Subject) -> AuditResult:
    """Asks a component with two equal candidates again and again, where that tells more than its games."""
    if (coin := _coin_of(subject)) is not None:
        return parts.freshness(coin)
    return parts.skipped(FRESH, "played for votes alone, and not of Confident-GNMax")


def _score_checks(subject: Subject) -> Iterator[Check]:
    """Yields the checks of released scores."""
    release = _rows_of(subject)
    if subject.options.get("with_scores"):
        shape: dict[str, Any] = {"rows": release.row_shape, "adjacency": release.adjacency}
        yield Check("scores", lambda: vectors.released_scores(**shape))
    elif subject.method == "voting" and subject.component is None and release.mechanism.name == "gaussian":
        why = "a plan does not say whether scores leave; the label alone is looked at: audit the component"
        yield Check("scores", lambda: parts.skipped("scores: noisy votes that leave", why))


def _one_run(options: dict[str, Any]) -> AuditResult:
    """Trains with canaries if they could refute the claim."""
    if not can_refute(options):
        why = "more is claimed than its guesses could refute, even without any noise"
        return parts.skipped(ONE_RUN, why)
    return canaries(options)


def _sample_checks(subject: Subject) -> Iterator[Check]:
    """Yields the checks of samples as the backend sees them, if every release draws a sample of its own."""
    release, design = _rows_of(subject), getattr(subject.plan, "design", None)
    is_kept = getattr(subject.plan, "teachers", "fresh") != "fresh" or subject.method == "evolution"
    if is_kept or (design is not None and design.sampling != "poisson"):
        why = "played only where every release draws a Poisson sample of its own"
        yield Check("samples", lambda: parts.skipped("samples: drawn anew, as the engine sees them", why))
        return
    options: dict[str, Any] = {"rows": release.row_shape, "adjacency": release.adjacency}
    name = subject.plan.rule.mechanism if isinstance(subject.plan, GenerationPlan) else release.mechanism.name
    if subject.method == "free_form":
        options["aggregation"] = _space(subject)
    elif name == ConfidentGNMaxMechanism.name:
        options["confident"] = (0.5, 1.0, 1.0)
    else:
        options["mechanism"] = name
    yield Check("samples", lambda: sampled.inclusion(subject.method, options))
    if release.row_shape == "slots":
        yield Check("slots, as the engine sees them", lambda: sampled.one_place(subject.method, options))


def games_of(subject: Subject) -> tuple[Game, ...]:
    """Returns the worst cases of a configuration.

    Args:
      subject: as of `audit`.
    """
    release, options = subject.plan.release, subject.options
    if isinstance(release, CountPlan | ParticipationPlan):
        return _other_games(subject, release)
    design = getattr(subject.plan, "design", None)
    shape: dict[str, Any] = {"rows": release.row_shape, "adjacency": release.adjacency}
    if subject.method == "evolution":
        return tuple(evolving.evolution_cases(adjacency=release.adjacency))
    if subject.method == "dpsgd" or design is None:
        return tuple(cases.step_cases(adjacency=release.adjacency))
    sampling = design.sampling if design.sampling in {"fixed", "partition"} else "poisson"
    if subject.method == "free_form":
        return tuple(cases.free_form_cases(aggregation=_space(subject), sampling=sampling, **shape))
    if subject.method == "generation":
        rule = subject.plan.rule  # type: ignore[union-attr]
        terms = {"blend_weight": rule.blend_weight, "center": rule.center, "clip": 2.0} if rule.is_logit else {}
        rule_terms = {key: value for key, value in terms.items() if value is not None}
        return tuple(cases.token_cases(mechanism=rule.mechanism, sampling=sampling, rule=rule_terms, **shape))
    return tuple(_vote_games(subject, sampling=sampling, shape=shape, options=options))


def _other_games(subject: Subject, release: CountPlan | ParticipationPlan) -> tuple[Game, ...]:
    """Returns the games of what is no sampled row; of synthetic documents, those of their texts as well."""
    if isinstance(release, ParticipationPlan):
        return tuple(retrieving.retrieval_cases(rows=release.row_shape))
    if isinstance(subject.plan, DocumentsPlan):
        return (*documenting.document_games(adjacency=release.adjacency), *games_of(subject.texts))
    return tuple(counting.count_games(adjacency=release.adjacency))


def _vote_games(
    subject: Subject, *, sampling: str, shape: Mapping[str, Any], options: Mapping[str, Any]
) -> Iterator[Game]:
    mechanism = _rows_of(subject).mechanism
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
        abstains=bool(options.get("abstain_below") or _rows_of(subject).constants),
        options=more,
        **shape,
    )


def _space(subject: Subject) -> str:
    return str(subject.options.get("aggregation") or "embedding")


def _coin_of(subject: Subject) -> Callable[[], bool] | None:
    """Returns a query with two equal candidates; None where the games reveal as much."""
    mechanism = _rows_of(subject).mechanism.name
    if subject.method not in {"voting", "pate"} or mechanism == ConfidentGNMaxMechanism.name:
        return None
    runs = 200
    arguments = {"mechanism": mechanism, "rows": "units", "adjacency": _rows_of(subject).adjacency}
    if subject.method == "voting":
        voter = voter_of((), max_queries=runs, **arguments)
        return lambda: voter.invoke(QUERY) == "yes"
    entries = labeler_of((), runs, **arguments).stream(progress=False)
    return lambda: next(entries).label == "yes"


def _run_options(subject: Subject) -> dict[str, Any]:
    """Returns a run at the subject's rate, steps and noise."""
    plan: Any = subject.plan
    options = {"sampling_rate": plan.sampling_rate, "steps": min(plan.steps, 100), "adjacency": plan.release.adjacency}
    return {**options, "noise_multiplier": plan.noise_multiplier}
