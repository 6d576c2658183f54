"""Selects and runs the checks of one configuration, with the worst-case games of its mechanism, rows and relation."""

from __future__ import annotations

import contextvars
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from langsmith.run_helpers import tracing_context
from numpy.typing import NDArray
from scipy import stats

from langchain_dpicl._calls import IS_MADE_UP
from langchain_dpicl.audit import component_checks, component_games, count_games
from langchain_dpicl.audit.component_checks import FRESH, is_fair_and_fresh
from langchain_dpicl.audit.component_games import (
    CANARY_LENGTH,
    CLIP,
    ONE_RUN,
    FreeFormGame,
    LabelGame,
    StepGame,
    TokenGame,
    VotingGame,
    can_refute,
    canaries,
)
from langchain_dpicl.audit.game import (
    ALARM,
    AuditCheck,
    AuditReport,
    AuditResult,
    Game,
    PrivacyAuditError,
    control,
    gaussian_epsilon,
    index_law,
    mu_squared,
    odds_law,
    play,
    result_of,
    vector_law,
)
from langchain_dpicl.audit.targets import (
    QUERY,
    TOKENS,
    ReadAnswers,
    ReadGradients,
    ReadLogits,
    ReadTokens,
    ReadVotes,
    Subject,
    helper_of,
    labeler_of,
    plain_steps,
    share_of,
    synthesizer_of,
    training_of,
    voter_of,
)
from langchain_dpicl.discovery import WordsPlan
from langchain_dpicl.documents import DocumentsPlan
from langchain_dpicl.evaluation.plan import ChoicePlan, EvaluationPlan
from langchain_dpicl.generation.plan import GenerationPlan
from langchain_dpicl.options import Noise
from langchain_dpicl.planning.expected_utility import entry_of
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy._validate import effective_delta
from langchain_dpicl.privacy.accounting.events import Event
from langchain_dpicl.privacy.extensions.confident_gnmax import ConfidentGNMaxMechanism
from langchain_dpicl.privacy.extensions.individual_filter import ParticipationPlan
from langchain_dpicl.privacy.extensions.logit_sums import LOGIT_MECHANISMS
from langchain_dpicl.privacy.extensions.outcome_counts import OutcomePlan
from langchain_dpicl.privacy.extensions.registry import MECHANISMS
from langchain_dpicl.privacy.extensions.stream_ledger import RunShare, run_ticket
from langchain_dpicl.privacy.extensions.value_counts import CountPlan
from langchain_dpicl.privacy.extensions.word_release import WordRelease
from langchain_dpicl.privacy.mechanisms.release_plan import ReleasePlan
from langchain_dpicl.reports.rendering import format_rounded_up
from langchain_dpicl.reports.report import verify_report
from langchain_dpicl.soft_prompts.plan import TrainingPlan

# The noise is the audit's own: one release has a mu, range or epsilon of about 2, where few answers reveal a wrong
# scale; logits have clip 2 and the default temperature. Everything else is the user's. Every sample holds the target:
# amplification would hide a wrong noise in any affordable number of runs, so `sampled` and `parts` audit sampling.


YES, NO = "1,0", "0,1"
LOUD_A, LOUD_B, LEANS_B = "40,-40,0", "-39,39,0", f"{math.log(0.25)},{math.log(0.75)},-40"
_SURE_B, _BYSTANDER = (-40.0, 40.0, -40.0), (0.0, 0.0, math.log(2.0))
_ROOT = math.sqrt(2.0)
_NEVER_REJECTS = -100.0
_VOTES = {"gumbel": (0.5, 340, 680), "permute_and_flip": (0.6, 760, 760), "gaussian": (0.5, 200, 2_600)}
"""The noise, and the runs of each side at which half of it is seen with a chance of .99: for slots, for units."""


def _votes_of(mechanism: str) -> tuple[float, int, int]:
    return entry_of(_VOTES, mechanism, "audit/suite._VOTES")


def shape_of(rows: str, adjacency: str, sampling: str = "poisson") -> dict[str, Any]:
    """Returns the options of a shape of rows, at which every sample holds everybody."""
    return {"rows": rows, "adjacency": adjacency, **({} if sampling == "poisson" else {"sampling": sampling})}


def _is_moved(rows: str, adjacency: str) -> bool:
    """Returns whether the target's vote changes, instead of appearing."""
    return rows == "slots" or adjacency == "replace_one"


def _two(mechanism: str, rows: str, adjacency: str, *, sampling: str) -> dict[str, Any]:
    """Returns data sets and noise-free sums of two candidates where the mechanism tells most.

    Gumbel and Gaussian noise: the vote of the only slot changes, or comes alone. Permute-and-flip: a tie against a gap.
    An empty slot is asked too, and votes for the second.
    """
    is_fixed = sampling in {"fixed", "partition"}
    if not _is_moved(rows, adjacency):
        return {"units": (YES,), "neighbour": (), "sums": ((1.0, 0.0), (0.0, 0.0)), "size": 1}
    ties = mechanism == "permute_and_flip"
    beside = (NO,) if ties and (rows == "units" or is_fixed) else ()
    gone = (NO,) if adjacency == "replace_one" else ()
    sums = ((1.0, 1.0), (0.0, 2.0)) if ties else ((1.0, 0.0), (0.0, 1.0))
    return {"units": (YES, *beside), "neighbour": (*gone, *beside), "sums": sums, "size": 1 + ties}


def vote_cases(
    kind: type[VotingGame | LabelGame],
    *,
    mechanism: str,
    rows: str,
    adjacency: str,
    sampling: str = "poisson",
    has_vectors: bool = False,
    abstains: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Iterator[Game]:
    """Yields the worst cases of votes for labels; `has_vectors` where noisy votes leave as well."""
    (noise, *runs), moved = _votes_of(mechanism), _is_moved(rows, adjacency)
    pair = _two(mechanism, rows, adjacency, sampling=sampling)
    terms = {
        **shape_of(rows, adjacency, sampling),
        "mechanism": mechanism,
        "noise_multiplier": noise,
        **(options or {}),
    }
    terms["public_size"] = pair["size"]
    name = f"one answer: {mechanism}, {rows}, {adjacency}"
    range_, length = (2.0, _ROOT) if moved else (1.0, 1.0)
    sides: dict[str, Any] = {"units": pair["units"], "neighbour": pair["neighbour"]}
    if has_vectors:
        direction = (1.0, -1.0) if moved else (1.0, 0.0)
        ends = tuple(sum(a * b for a, b in zip(direction, sums, strict=True)) for sums in pair["sums"])
        middle = sum(ends) / 2
        scale = noise * length * (_ROOT if moved else 1.0)
        law = vector_law((ends[0], ends[1]), scale=scale, threshold=middle)
        yield kind(name=name, **sides, runs=200, options=terms, direction=direction, threshold=middle, law=law)
        return
    law = index_law(mechanism, pair["sums"], scale=noise * (length if mechanism == "gaussian" else range_))
    yield kind(name=name, **sides, runs=runs[0 if moved else 1], options=terms, law=law)
    if sampling == "poisson" and adjacency == "add_remove" and "teachers" not in terms and mechanism == "gumbel":
        yield _on_a_sample(kind, terms, moved=moved)
    if abstains and mechanism == "gumbel":
        yield _abstaining(kind, terms, noise=noise, moved=moved, mechanism=mechanism)


def _on_a_sample(kind: type[VotingGame | LabelGame], terms: Mapping[str, Any], *, moved: bool) -> Game:
    """Returns the game on a secret sample that holds the target every fourth time.

    Its law is about the rate, of a factor of 2 alone: everybody is in every sample. With half of the noise, or at twice
    the rate, a game of this size shows nothing: other checks look at those.
    """
    noise, rate = 1 / 3, 0.25
    with_target = index_law("gumbel", ((1.0, 0.0), (0.0, float(moved))), scale=noise * (2.0 if moved else 1.0))

    def law(factor: float) -> tuple[float, float]:
        given_in, without = with_target(1.0)
        in_sample = 1.0 if factor > 1.0 else rate
        return in_sample * given_in + (1.0 - in_sample) * without, without

    return kind(
        name=f"one answer on a secret sample: gumbel, {terms['rows']}, add_remove",
        units=(YES,),
        neighbour=(),
        runs=300,
        options={**terms, "public_size": 4, "num_slots": 1, "noise_multiplier": noise},
        law=law,
        power_for="everybody in every sample",
    )


def _abstaining(
    kind: type[VotingGame | LabelGame], terms: Mapping[str, Any], *, noise: float, moved: bool, mechanism: str
) -> Game:
    """Returns the game about the candidate to abstain: a constant between what the label has with and without."""
    units: tuple[str, ...]
    neighbour: tuple[str, ...]
    if moved:
        sums, size, units, neighbour = ((1.0, 0.0, 0.5), (0.0, 1.0, 0.5)), 1, (YES,), ()
        neighbour = (NO,) if terms["adjacency"] == "replace_one" else neighbour
    else:
        sums, size, units, neighbour = ((2.0, 0.0, 1.5), (1.0, 0.0, 1.5)), 3, (YES, YES), (YES,)
    return kind(
        name=f"one answer or none: {mechanism}, {terms['rows']}, {terms['adjacency']}",
        units=units,
        neighbour=neighbour,
        runs=1_400 if moved else 700,
        options={**terms, "public_size": size, "abstain_below": 0.5},
        law=index_law(mechanism, sums, scale=noise * (2.0 if moved else 1.0)),
    )


def confident_cases(*, rows: str, adjacency: str, teachers: str, sampling: str = "poisson") -> Iterator[Game]:
    """Yields the worst cases of Confident-GNMax: its test, and its answer."""
    noise = 0.5
    sampled = {} if teachers == "fixed" else {**shape_of(rows, adjacency, sampling)}
    terms = {**sampled, "adjacency": adjacency, "teachers": teachers}
    moved = _is_moved(rows, adjacency)
    is_dealt = rows == "units" or teachers == "fixed" or sampling == "fixed"
    # Between a tie and two votes for the other, or none and one, the largest count moves by one.
    beside = (NO,) if moved and is_dealt else ()
    counts = (1.0, 2.0) if moved else (1.0, 0.0)
    middle = sum(counts) / 2
    law = vector_law((-counts[0], -counts[1]), scale=noise, threshold=-middle)
    yield LabelGame(
        name=f"one test: confident_gnmax, {rows}, {adjacency}",
        units=(YES, *beside),
        neighbour=((NO,) if adjacency == "replace_one" else ()) + beside,
        runs=200,
        options={**terms, "public_size": 2 if moved else 1, "confident": (middle, noise, noise)},
        question="test",
        law=law,
    )
    pair = _two("gaussian", rows, adjacency, sampling="partition" if teachers == "fixed" else sampling)
    scale = noise * (_ROOT if moved else 1.0)
    yield LabelGame(
        name=f"one answer: confident_gnmax, {rows}, {adjacency}",
        units=pair["units"],
        neighbour=pair["neighbour"],
        runs=200 if moved else 2_600,
        options={**terms, "public_size": pair["size"], "confident": (_NEVER_REJECTS, noise, scale)},
        question="answer",
        law=index_law("gaussian", pair["sums"], scale=scale),
    )


def free_form_cases(*, aggregation: str, rows: str, adjacency: str, sampling: str = "poisson") -> Iterator[Game]:
    """Yields the worst case of answers in free form: opposite answers, or one keyword."""
    moved = _is_moved(rows, adjacency)
    gone = ("no",) if adjacency == "replace_one" else ()
    terms = {**shape_of(rows, adjacency, sampling), "aggregation": aggregation, "noise_multiplier": 0.5}
    beside: tuple[str, ...] = ()
    if aggregation == "keywords":
        # The gap to the largest count, over twice the multiplier times the range, is what one keyword loses: that is
        # half of what a sequence of several may lose, and is charged.
        law = index_law("gumbel", ((1.0, 0.0), (0.0, float(moved))), scale=2.0 * 0.5 * (2.0 if moved else 1.0))
        runs = 400
    elif moved:
        law, runs = vector_law((1.0, -1.0), scale=0.5 * 2.0, threshold=0.0), 200
    else:
        # One vector of length 1 comes to two that lean the other way by half of it.
        beside, terms["public_size"] = ("up", "down"), 3
        law, runs = vector_law((0.5, -0.5), scale=0.5, threshold=0.0), 200
    yield FreeFormGame(
        name=f"one answer: {aggregation}, {rows}, {adjacency}",
        units=("yes", *beside),
        neighbour=(*gone, *beside),
        runs=runs,
        options=terms,
        law=law,
        is_tight=aggregation != "keywords",
    )


def token_cases(
    *, mechanism: str, rows: str, adjacency: str, sampling: str = "poisson", rule: Mapping[str, Any] | None = None
) -> Iterator[Game]:
    """Yields the worst case of one generated token; `rule` holds the parameters of a logit mechanism."""
    moved = _is_moved(rows, adjacency)
    is_logit = mechanism in LOGIT_MECHANISMS
    noise = 0.5 if is_logit else _votes_of(mechanism)[0]
    terms = {**shape_of(rows, adjacency, sampling), "mechanism": mechanism, "noise_multiplier": noise, **(rule or {})}
    name = f"one token: {mechanism}, {rows}, {adjacency}"
    gone = (LOUD_B,) if adjacency == "replace_one" else ()
    sides: dict[str, Any] = {"units": (LOUD_A,), "neighbour": gone, "public": _SURE_B}
    odds = odds_law((1.0, -1.0) if moved else (2.0, 0.0))
    if is_logit:
        sides["public"] = _BYSTANDER
        if moved and adjacency == "add_remove":
            # Of a slot's two records the loudest speaks; without the target the other does.
            sides |= {"units": (LOUD_A, LOUD_B), "neighbour": (LOUD_B,)}
            terms |= {"shots_per_slot": 2, "public_size": 2, "num_slots": 1}
        runs = 1_100 if moved else 2_100
        yield TokenGame(name=name, **sides, runs=runs, options=terms, kept=("a", "b"), share=0.4, law=odds)
        return
    if mechanism == "gumbel":
        runs = 640 if moved else 1_400
        yield TokenGame(
            name=name, **sides, runs=runs, options=terms, kept=("a", "b"), share=0.7 if moved else 0.6, law=odds
        )
        return
    sums: Any = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0))
    runs = 340
    if mechanism == "permute_and_flip":
        runs, terms["public_size"] = 1_600, 2
        if moved:
            beside = (LOUD_B,) if rows == "units" or sampling == "fixed" else ()
            sums = ((1.0, 1.0, 0.0), (0.0, 2.0, 0.0))
            sides |= {"units": (LOUD_A, *beside), "neighbour": (*gone, *beside)}
        else:
            sums, terms["public_size"] = ((1.0, 0.0, 0.0), (0.0, 0.0, 0.0)), 1
    elif not moved:
        sums, terms["public_size"], runs = ((1.25, 0.75, 0.0), (0.25, 0.75, 0.0)), 2, 2_000
        sides |= {"units": (LOUD_A, LEANS_B), "neighbour": (LEANS_B,)}
    length = (_ROOT if moved else 1.0) if mechanism == "gaussian" else (2.0 if moved else 1.0)
    yield TokenGame(name=name, **sides, runs=runs, options=terms, law=index_law(mechanism, sums, scale=noise * length))


def step_cases(*, adjacency: str) -> Iterator[Game]:
    """Yields the worst case of a training step: the longest gradient, which goes or turns round."""
    moved = adjacency == "replace_one"
    ends, scale = (1.0, -1.0 if moved else 0.0), 0.5 * (2.0 if moved else 1.0)
    yield StepGame(
        name=f"one training step: gaussian, {adjacency}",
        units=(f"0:{CANARY_LENGTH * CLIP}",),
        neighbour=(f"0:{-CANARY_LENGTH * CLIP}",) if moved else (),
        runs=220,
        options={"adjacency": adjacency, "noise_multiplier": 0.5},
        direction=(1.0, 0.0, 0.0, 0.0),
        threshold=sum(ends) / 2,
        far=1.0 + 2.0 * scale,
        law=vector_law((-ends[0], -ends[1]), scale=scale, threshold=-sum(ends) / 2),
    )


# The component itself runs, and its backend counts the prompts that hold a record. `parts` checks the sampler alone.


Presences = Iterator[int]
"""How many prompts of each release hold the only unit."""


def _count_presences(engine: Any, ask: Callable[[], object], runs: int) -> Presences:
    for _ in range(runs):
        engine.present = {}
        ask()
        yield sum(engine.present.values())


def voting_presences(runs: int, **options: Any) -> Presences:
    """Yields presences of a voter's queries."""
    engine = ReadVotes()
    voter = voter_of((YES,), engine=engine, max_queries=runs, **options)
    return _count_presences(engine, lambda: voter.invoke(QUERY), runs)


def free_form_presences(runs: int, **options: Any) -> Presences:
    """Yields presences of answers in free form."""
    engine = ReadAnswers()
    helper = helper_of(("yes",), engine=engine, max_queries=runs, **options)
    return _count_presences(engine, lambda: helper.invoke(QUERY), runs)


def pate_presences(runs: int, **options: Any) -> Presences:
    """Yields presences of a labeler's inputs."""
    engine = ReadVotes()
    entries = labeler_of((YES,), runs, engine=engine, **options).stream(progress=False)
    return _count_presences(engine, lambda: next(entries), runs)


def text_presences(runs: int, *, redraw_every: int = 1, **options: Any) -> Iterator[list[int]]:
    """Yields presences of the secret samples of each text, of four samples at most and one at least."""
    kind = ReadLogits if options.get("mechanism") in LOGIT_MECHANISMS else ReadTokens
    engine, longest = kind((0.0, 0.0, 0.0)), _SAMPLES_PER_TEXT * redraw_every
    made = synthesizer_of(
        (LOUD_A,), runs, engine=engine, max_tokens=longest, redraw_every=redraw_every, **options
    ).stream(progress=False)
    for _ in range(runs):
        engine.present = {}
        written = len(next(made)["text"].split())
        tokens = min(written + 1, longest)  # the end of the text is released as well
        present = [0] * math.ceil(tokens / redraw_every)
        for place, count in engine.present.items():
            present[min(place // redraw_every, len(present) - 1)] += count
        yield present


def generation_presences(runs: int, **options: Any) -> Presences:
    """Yields presences of the secret samples of generated texts, as many of them."""
    return itertools.islice(itertools.chain.from_iterable(text_presences(runs, **options)), runs)


def dpsgd_presences(runs: int, **options: Any) -> Presences:
    """Yields presences of training steps."""
    engine = ReadGradients(1)
    run = training_of(
        ("0:1",),
        engine=engine,
        training=plain_steps(runs),
        noise=Noise(multiplier=options["noise_multiplier"]) if "noise_multiplier" in options else None,
        public_size=options["public_size"],
        adjacency=options.get("adjacency", "add_remove"),
    )
    made = run.stream(progress=False)
    return _count_presences(engine, lambda: next(made), runs)


_SAMPLES, _SAMPLES_PER_TEXT = 320, 4
"""Samples of texts that are looked at, and most of one text: there are a fourth as many texts, or more."""
_MOST_TOKENS = 3
"""Tokens of a sample: plans that keep one for longer are played with so many."""
_TEXTS = 100
"""Texts whose tokens are coins."""


PRESENCES: Mapping[str, Callable[..., Presences]] = {
    "voting": voting_presences,
    "free_form": free_form_presences,
    "pate": pate_presences,
    "generation": generation_presences,
    "dpsgd": dpsgd_presences,
}


def check_inclusion(method: str, options: Mapping[str, Any]) -> AuditResult:
    """Checks that a unit is in half of the samples, by a fair coin for every one, and at most once in each.

    Of texts, those of every text and the first ones of all texts are looked at.
    """
    terms = {**options, "public_size": 2, "num_slots": 1}
    if method != "generation":
        return judge_presences(list(PRESENCES[method](160, **terms)))
    # Who is in a sample has a say in where its text ends, so that the numbers that are looked at are fixed before.
    texts, presences, firsts = text_presences(_SAMPLES, **terms), list[int](), list[int]()
    while len(presences) < _SAMPLES:
        presences += (text := next(texts))
        firsts.append(text[0])
    return judge_presences(presences[:_SAMPLES], firsts[: _SAMPLES // _SAMPLES_PER_TEXT])


def judge_presences(*runs: Sequence[int]) -> AuditResult:
    """Judges presences of a unit that is to be in every second sample, in one order or more; false alarm 1e-6."""
    problems = ["a unit stands in several prompts of one sample"] if max(map(max, runs)) > 1 else []
    if not is_fair_and_fresh(*([bool(count) for count in run] for run in runs)):
        present = ", ".join(f"{sum(map(bool, run))} of {len(run)}" for run in runs)
        problems.append(f"in {present} samples, expected half of them, each by its own coin")
    blind = ["a rate that is wrong by less than a half: `sampler: rate` looks at it more closely"]
    if len(runs) > 1:
        blind.append(f"texts of more than {_SAMPLES_PER_TEXT} samples, and samples of more than {_MOST_TOKENS} tokens")
    check = "samples: drawn anew, at the charged rate, as the engine sees them"
    return result_of(check, problems, runs=len(runs[0]), blind=tuple(blind))


def check_one_place(method: str, options: Mapping[str, Any]) -> AuditResult:
    """Checks that a unit that is in every sample stands in one of three slots, and in one only."""
    presences = list(PRESENCES[method](40, **{**options, "public_size": 3, "num_slots": 3}))
    problems = [f"a unit stands in {count} slots of one sample" for count in sorted(set(presences) - {1})]
    return result_of("slots: a unit is seen in one prompt", problems, runs=40, blind=(), is_certain=True)


# Shown epsilons are rounded; a claim may be short by this much.
_ROUNDING = 1e-6
_BLIND = ("an error that the accountant makes here as well: other accountants check it, in tests of the package",)
_OLDER = ("a ledger that was put back to an older copy: keep an anchor",)


def check_price(subject: Subject) -> AuditResult:
    """Checks that the claimed epsilon covers what the plan's releases cost.

    The price is the package's own, computed now. Where all releases are Gaussian on everybody it is also compared with
    the exact curve, which is written apart.
    """
    plan: Any = subject.plan
    event = plan.event()
    gap, cost = plan.implementation_delta, math.inf
    remaining = effective_delta(subject.delta, gap)
    if remaining > 0.0 or gap == 0.0:  # a pure price at delta 0
        cost = accounting.epsilon_upper_bound(event, delta=remaining, adjacency=plan.release.adjacency)
    faults = []
    claimed, costs = format_rounded_up(subject.epsilon), f"{format_rounded_up(cost)} at delta {subject.delta:g}"
    if subject.epsilon * (1.0 + _ROUNDING) < cost:
        faults.append(f"claimed is epsilon {claimed}, it costs {costs}")
    exact = exact_epsilon(event, subject.delta)
    if exact is not None and cost < exact * (1.0 - _ROUNDING):
        faults.append(f"the accountant says epsilon {cost}, the exact curve {exact}")
    return AuditResult(
        check="price: computed again",
        verdict="violated" if faults else "sound",
        claimed_epsilon=subject.epsilon,
        lower_bound=exact,
        delta=subject.delta,
        confidence=1.0,
        details=tuple(faults) or (f"claimed {claimed}, costs {costs}",),
        blind_to=_BLIND,
    )


def exact_epsilon(event: Event, delta: float) -> float | None:
    """Returns the exact epsilon of Gaussian releases on everybody; None for any other event."""
    total = mu_squared(event)
    return None if total is None else gaussian_epsilon(math.sqrt(total), delta)


def check_tickets(subject: Subject) -> AuditResult:
    """Checks that the ledger's share holds the tickets of the plan that runs, and no share is used up beyond them."""
    share, plan, faults = share_of(subject.component), subject.plan, list[str]()
    tickets = plan.tickets()
    if isinstance(share, RunShare):  # one ticket pays for all the parts of a run, as `declare_share` made it
        (run,), parts = share._component.tickets, tuple(share._parts.values())  # noqa: SLF001  to be audited
        of_all_runs = {dataclasses.replace(part, max_count=part.max_count * run.max_count) for part in parts}
        paid = run_ticket(parts, runs=1, adjacency=plan.release.adjacency)
        are_its, tickets = run.event == paid.event and of_all_runs == set(tickets), parts
    else:
        are_its = share.event == plan.event()
    if not are_its:
        faults.append("the share was charged for other releases than the plan runs")
    for ticket in tickets:
        remaining = share.remaining(ticket.template, label=ticket.label)
        if not 0 <= remaining <= ticket.max_count:
            faults.append(f"{remaining} tickets of {ticket.template!r} are left of {ticket.max_count}")
    said = ("the tickets of the plan",)
    return result_of("ledger: what was charged is what runs", faults, runs=0, said=said, blind=_OLDER, is_certain=True)


def check_report(subject: Subject) -> AuditResult:
    """Checks the report of the component's budget: events from tickets, prices from events, and their sum."""
    component = subject.component
    budget = component.budget if hasattr(component, "budget") else component._budget  # noqa: SLF001  to be audited
    verified = verify_report(budget.report())
    faults = [] if verified.ok else [f"it does not add up: {problem}" for problem in verified.problems]
    said = ("recomputed from its tickets",)
    return result_of("ledger: its report adds up", faults, runs=0, said=said, blind=_OLDER, is_certain=True)


_FOUR = ("a", "b", "c", "d")


def score_faults(answers: Sequence[Any], votes: Sequence[float], scale: float) -> set[str]:
    """Returns what is wrong with scores that were released again and again for one query; false alarm `ALARM` in all.

    "scale": a label's variance, or that of all, is not the claimed one (chi-square, exact). "law": the noise is not
    normal (Kolmogorov-Smirnov). "links": labels, or one query and the next, correlate (t test, exact). "repeats": a
    noise vector came twice; by chance below 1e-12 for four labels, 2^16 steps to a scale and 4,000 answers. "grid":
    scores off the public grid. "label": the label is not made of the scores.
    """
    values = np.array([list(answer.scores.values()) for answer in answers])  # [runs, labels]
    noise = values - np.array(votes)
    step = 2.0 ** (math.floor(math.log2(scale)) - 16)
    best = [max(answer.scores, key=answer.scores.get) for answer in answers]
    names = {name for name, pvalues in _pvalues(noise / scale).items() if min(pvalues) < ALARM / (3 * len(pvalues))}
    names |= {"repeats"} if len({row.tobytes() for row in noise}) < len(noise) else set()
    names |= {"grid"} if (values % step).any() else set()
    return names | ({"label"} if [answer.label for answer in answers] != best else set())


def _pvalues(noise: NDArray[np.float64]) -> dict[str, list[float]]:
    even, odd = noise[: len(noise) // 2 * 2 : 2], noise[1::2]  # disjoint pairs of queries: independent samples
    pairs = [(noise[:, i], noise[:, j]) for i, j in itertools.combinations(range(noise.shape[1]), 2)]
    pairs += [(even[:, i], odd[:, j]) for i, j in itertools.product(range(noise.shape[1]), repeat=2)]
    constant = [pair for pair in pairs if not (np.ptp(pair[0]) and np.ptp(pair[1]))]
    return {
        "scale": [_variance(column) for column in (*noise.T, noise.ravel())],
        "law": [float(stats.kstest(noise.ravel(), "norm").pvalue)],
        "links": [0.0] if constant else [float(stats.pearsonr(*pair).pvalue) for pair in pairs],
    }


def _variance(noise: NDArray[np.float64]) -> float:
    total = float(np.square(noise).sum())
    return float(2 * min(stats.chi2.cdf(total, noise.size), stats.chi2.sf(total, noise.size)))


def check_released_scores(*, rows: str, adjacency: str) -> AuditResult:
    """Checks the scores that a voter releases: scale, law, links, repeats, grid and label."""
    runs, options = 200, {"rows": rows, "adjacency": adjacency, "with_scores": True, "noise_multiplier": 0.7}
    voter = voter_of(("1,0,0,0",), labels=_FOUR, max_queries=runs, **options)
    problems = score_faults(
        [voter.with_receipts().invoke(QUERY) for _ in range(runs)],
        (1, 0, 0, 0),
        0.7 * (_ROOT if _is_moved(rows, adjacency) else 1.0),
    )
    check, blind = (
        "scores: the claimed noise on every label, fresh for every answer",
        ("scales that are wrong by less than about 15 %",),
    )
    return result_of(check, sorted(problems), runs=runs, blind=blind)


# Records are made up and the model is a fake that distinguishes them perfectly: nothing private is read, and nothing of
# the budget is spent.


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
      - A check that ends with an exception is a result, "failed", and the others are played. Of the exception only the
        name of its class is shown; its text may quote anything.

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
    if isinstance(release := made.plan.release, ReleasePlan) and release.mechanism.name in MECHANISMS:
        index_law(release.mechanism.name, ((), ()), scale=1.0)
        _votes_of(release.mechanism.name)
    for result in _play_checks(_checks(made, controls=controls)):
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


def _play_checks(checks: Iterator[AuditCheck]) -> Iterator[AuditResult]:
    """Runs the checks one after the other; an exception in one leaves the results of the others."""
    while True:
        try:
            check = _alone(lambda: next(checks, None))
        except Exception as error:  # noqa: BLE001  shown in the result
            yield _failed_result("the next check, and all that would have followed", error)
            return
        if check is None:
            return
        try:
            result = _alone(check.play)
        except Exception as error:  # noqa: BLE001  shown in the result
            result = _failed_result(check.name, error)
        yield result


def _failed_result(check: str, error: Exception) -> AuditResult:
    """Returns the result of a check that raised: the class of the exception, none of its text."""
    why = f"it raised {type(error).__name__}, so nothing is known of what it looks at"
    return AuditResult(check=check, verdict="failed", confidence=1.0, details=(why,))


def _alone(action: Callable[[], T]) -> T:
    """Runs an action outside the caller's context, which may hold a budget and handlers that count runs."""

    def untraced() -> T:
        IS_MADE_UP.set(True)
        with tracing_context(enabled=False):
            return action()

    return contextvars.Context().run(untraced)


def _checks(subject: Subject, *, controls: bool) -> Iterator[AuditCheck]:
    release = subject.plan.release
    yield AuditCheck("price", lambda: check_price(subject))
    if subject.component is not None:
        yield AuditCheck("ledger: tickets", lambda: check_tickets(subject))
        yield AuditCheck("ledger: report", lambda: check_report(subject))
    if isinstance(subject.plan, EvaluationPlan | ChoicePlan):
        yield from count_games.checks(subject.plan)
    elif isinstance(subject.plan, DocumentsPlan):
        yield from _document_checks(subject, subject.plan)
    elif isinstance(release, CountPlan):
        yield from count_games.count_checks(release)
    elif isinstance(subject.plan, WordsPlan):
        yield from count_games.word_checks(words=subject.plan.release, pairs=subject.plan.pairs)
    elif isinstance(release, ParticipationPlan):
        yield AuditCheck("balances: none is shown", lambda: component_games.check_nothing_else_shown(release.row_shape))
    else:
        yield from _row_checks(subject, _rows_of(subject))
    for game in games_of(subject):
        yield AuditCheck(game.name, partial(play, game))
        if controls:
            yield AuditCheck(f"control: {game.name}", partial(control, game))
    if isinstance(subject.plan, TrainingPlan):
        yield AuditCheck(ONE_RUN, lambda: _one_run(_run_options(subject)))


def _document_checks(subject: Subject, plan: DocumentsPlan) -> Iterator[AuditCheck]:
    topics = plan.topics if isinstance(plan.topics, WordRelease) else None
    yield from count_games.document_checks(plan)
    yield from count_games.word_checks(topics=topics, words=plan.words, pairs=plan.pairs)
    if plan.generation is not None:
        yield from _row_checks(subject.texts, _rows_of(subject.texts))


def _rows_of(subject: Subject) -> ReleasePlan:
    release: Any = subject.plan.release  # of everything but counts
    rows: ReleasePlan = release
    return rows


def _row_checks(subject: Subject, release: ReleasePlan) -> Iterator[AuditCheck]:
    """Yields the checks of samples, rows and noise, and of words that leave before texts."""
    if isinstance(subject.plan, GenerationPlan):
        yield from count_games.word_checks(words=subject.plan.words)
    for label, branch in getattr(subject.plan, "branches", ((None, release),)):
        rate, place = (
            name if label is None else f"{name}, label {label!r}"
            for name in ("sampler: rate", "slots: one unit, one place")
        )
        yield AuditCheck(rate, partial(component_checks.check_sampler_rate, branch, name=rate))
        yield AuditCheck(place, partial(component_checks.check_unit_places, branch, name=place))
    yield AuditCheck("rows", lambda: component_checks.check_row_contribution(release))
    plan: Any = subject.plan
    width = plan.candidates if isinstance(plan, GenerationPlan) else plan.width
    yield AuditCheck("noise: scale", lambda: component_checks.check_noise_scale(release, width=width))
    yield from _sample_checks(subject)
    yield AuditCheck(FRESH, lambda: _freshness(subject))
    yield from _score_checks(subject)


def _freshness(subject: Subject) -> AuditResult:
    """Asks a component with two equal candidates again and again, where that tells more than its games."""
    if isinstance(subject.plan, GenerationPlan):
        return component_checks.judge_freshness(*token_coins(_text_options(subject)))
    if (coin := _coin_of(subject)) is not None:
        return component_checks.check_freshness(coin)
    return component_checks.skipped_result(FRESH, "played for votes and texts alone, and not of Confident-GNMax")


def _text_options(subject: Subject) -> dict[str, Any]:
    """Returns the shape of a generation's texts."""
    plan: Any = subject.plan
    return {
        "rows": plan.release.row_shape,
        "adjacency": plan.release.adjacency,
        "mechanism": plan.rule.mechanism,
        "redraw_every": min(plan.release.redraw_every, _MOST_TOKENS),
    }


def token_coins(options: Mapping[str, Any]) -> tuple[list[bool], list[bool]]:
    """Returns whether tokens of texts over no unit are the first of two equal candidates, and the first ones of texts.

    Given that a token is one of the two, it is a fair coin, whatever else could have been written.
    """
    two = [token.strip() for token in TOKENS[:2]]
    made = synthesizer_of((), _TEXTS, max_tokens=_SAMPLES_PER_TEXT * options["redraw_every"], **options)
    texts = [text["text"].split() for text in made.stream(progress=False)]
    whole, starts = itertools.chain.from_iterable(texts), (token for text in texts for token in text[:1])
    tokens, firsts = ([token == two[0] for token in order if token in two] for order in (whole, starts))
    return tokens, firsts


def _score_checks(subject: Subject) -> Iterator[AuditCheck]:
    release = _rows_of(subject)
    if subject.options.get("with_scores"):
        shape: dict[str, Any] = {"rows": release.row_shape, "adjacency": release.adjacency}
        yield AuditCheck("scores", lambda: check_released_scores(**shape))
    elif subject.method == "voting" and subject.component is None and release.mechanism.name == "gaussian":
        why = "a plan does not say whether scores leave; the label alone is looked at: audit the component"
        yield AuditCheck("scores", lambda: component_checks.skipped_result("scores: noisy votes that leave", why))


def _one_run(options: dict[str, Any]) -> AuditResult:
    """Trains with canaries if they could refute the claim."""
    if not can_refute(options):
        why = "more is claimed than its guesses could refute, even without any noise"
        return component_checks.skipped_result(ONE_RUN, why)
    return canaries(options)


def _sample_checks(subject: Subject) -> Iterator[AuditCheck]:
    """Yields the checks of samples as the backend sees them, if every release draws a sample of its own."""
    release, design = _rows_of(subject), getattr(subject.plan, "design", None)
    is_kept = getattr(subject.plan, "teachers", "fresh") != "fresh" or subject.method == "evolution"
    if is_kept or (design is not None and design.sampling != "poisson"):
        why = "played only where every release draws a Poisson sample of its own"
        yield AuditCheck(
            "samples", lambda: component_checks.skipped_result("samples: drawn anew, as the engine sees them", why)
        )
        return
    options: dict[str, Any] = {"rows": release.row_shape, "adjacency": release.adjacency}
    name = release.mechanism.name
    if isinstance(subject.plan, GenerationPlan):
        options = _text_options(subject)
    elif subject.method == "free_form":
        options["aggregation"] = _space(subject)
    elif name == ConfidentGNMaxMechanism.name:
        options["confident"] = (0.5, 1.0, 1.0)
    else:
        options["mechanism"] = name
    yield AuditCheck("samples", lambda: check_inclusion(subject.method, options))
    if release.row_shape == "slots":
        yield AuditCheck("slots, as the engine sees them", lambda: check_one_place(subject.method, options))


def games_of(subject: Subject) -> tuple[Game, ...]:
    """Returns the worst cases of a configuration.

    Args:
      subject: as of `audit`.
    """
    release, options = subject.plan.release, subject.options
    if isinstance(subject.plan, ChoicePlan) or isinstance(
        release, CountPlan | ParticipationPlan | OutcomePlan | WordRelease
    ):
        return _other_games(subject)
    design = getattr(subject.plan, "design", None)
    shape: dict[str, Any] = {"rows": release.row_shape, "adjacency": release.adjacency}
    if subject.method == "evolution":
        return tuple(component_games.evolution_cases(adjacency=release.adjacency))
    if subject.method == "dpsgd" or design is None:
        return tuple(step_cases(adjacency=release.adjacency))
    sampling = design.sampling if design.sampling in {"fixed", "partition"} else "poisson"
    if subject.method == "free_form":
        return tuple(free_form_cases(aggregation=_space(subject), sampling=sampling, **shape))
    if isinstance(subject.plan, GenerationPlan):
        rule = subject.plan.rule
        terms = {"blend_weight": rule.blend_weight, "center": rule.center, "clip": 2.0} if rule.is_logit else {}
        rule_terms = {key: value for key, value in terms.items() if value is not None}
        words = () if subject.plan.words is None else count_games.word_games(adjacency=release.adjacency)
        texts = token_cases(mechanism=rule.mechanism, sampling=sampling, rule=rule_terms, **shape)
        return (*words, *texts)
    return tuple(_vote_games(subject, sampling=sampling, shape=shape, options=options))


def _other_games(subject: Subject) -> tuple[Game, ...]:
    """Returns the games of what is no sampled row; of synthetic documents, those of their texts as well."""
    plan, release = subject.plan, subject.plan.release
    if isinstance(plan, EvaluationPlan | ChoicePlan):
        return tuple(count_games.games(plan))
    if isinstance(release, ParticipationPlan):
        return tuple(component_games.retrieval_cases(rows=release.row_shape))
    if isinstance(plan, DocumentsPlan):
        return tuple(_document_games(subject, plan))
    if isinstance(release, WordRelease):
        return tuple(count_games.word_games(adjacency=release.adjacency))
    return tuple(count_games.count_games(adjacency=plan.adjacency))


def _document_games(subject: Subject, plan: DocumentsPlan) -> Iterator[Game]:
    if isinstance(plan.topics, CountPlan):
        yield from count_games.document_games(adjacency=plan.adjacency)
    if plan.releases_words:
        yield from count_games.word_games(adjacency=plan.adjacency)
    if plan.generation is not None:
        yield from games_of(subject.texts)


def _vote_games(
    subject: Subject, *, sampling: str, shape: Mapping[str, Any], options: Mapping[str, Any]
) -> Iterator[Game]:
    mechanism = _rows_of(subject).mechanism
    teachers = getattr(subject.plan, "teachers", None)
    if isinstance(mechanism, ConfidentGNMaxMechanism):
        yield from confident_cases(teachers=str(teachers), sampling=sampling, **shape)
        return
    # Where one sample serves a whole run and holds everybody, an input has its part of the one ticket.
    more = {} if teachers is None else {"teachers": teachers}
    is_vector = mechanism.name == "gaussian"
    yield from vote_cases(
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
    arguments: dict[str, Any] = {"mechanism": mechanism, "rows": "units", "adjacency": _rows_of(subject).adjacency}
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
