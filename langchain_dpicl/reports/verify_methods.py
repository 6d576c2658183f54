"""Verifies what reports show of labels, training, documents and counts, and the releases that carry the reports."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from langchain_dpicl.privacy._validate import check_choice, check_int, check_positive, check_real, fail
from langchain_dpicl.privacy.accounting.events import ComposedEvent, FailureEvent, canonical_json
from langchain_dpicl.privacy.data.units import KEYWORDS
from langchain_dpicl.privacy.extensions.confident_gnmax import ConfidentGNMaxMechanism
from langchain_dpicl.privacy.extensions.count_histograms import COUNT_TEMPLATE, CountPlan, count_release
from langchain_dpicl.privacy.extensions.fixed_size_slots import BalancedSlots, PartitionedSlots
from langchain_dpicl.privacy.extensions.gradient_sums import MAX_GRADIENT_WIDTH
from langchain_dpicl.privacy.extensions.method_tickets import (
    STEP_TEMPLATE,
    TEACHERS,
    Teachers,
    label_release,
    label_tickets,
    training_release,
    training_tickets,
)
from langchain_dpicl.privacy.extensions.topic_partition import BY_COINS, TOPIC_TEMPLATE, places
from langchain_dpicl.privacy.extensions.unit_values import UNITS, UnitKeywords
from langchain_dpicl.privacy.ledger.tickets import Component, Ticket
from langchain_dpicl.privacy.mechanisms.bounded import GRID
from langchain_dpicl.privacy.mechanisms.randomness import SecureRandom
from langchain_dpicl.privacy.mechanisms.release_plan import ReleasePlan
from langchain_dpicl.privacy.mechanisms.sampling import PoissonUnits
from langchain_dpicl.reports.verify import (
    VerificationContext,
    has_members,
    is_same_number,
    member,
    parameter_problems,
    plan_problems,
    shows_labels,
    terms_problems,
)

_WITH_LABEL = {"labelled", "public"}
_RELEASED = {"labelled", "rejected"}
_STATUSES = _WITH_LABEL | _RELEASED | {"waiting"}


@dataclass(frozen=True, slots=True)
class _LabelVerification:
    """The labels that a component shows, rebuilt."""

    release: ReleasePlan
    teachers: Teachers
    max_queries: int
    max_answers: int | None
    candidates: int
    public_size: int

    @classmethod
    def of(cls, component: Component, book: VerificationContext) -> _LabelVerification:
        """Reads what is shown through the checks it passed at first."""
        shown, release = component.public, label_release(component.public["release"])
        teachers: Any = check_choice("teachers", shown["teachers"], TEACHERS)
        queries = check_int("max_queries", shown["max_queries"], low=1)
        answers = shown["max_answers"]
        if isinstance(release.mechanism, ConfidentGNMaxMechanism) and teachers != "fresh":
            check_int("max_answers", answers, low=1, high=queries)
        elif answers is not None:
            raise fail("max_answers", "None where nothing is paid for apart", answers)
        candidates = check_int("candidates", shown["candidates"], low=1)
        return cls(release, teachers, queries, answers, candidates, book.dataset(component).total_size)

    @property
    def tickets(self) -> tuple[Ticket, ...]:
        """The tickets that it takes."""
        counts: dict[str, Any] = {"max_queries": self.max_queries, "max_answers": self.max_answers}
        return label_tickets(self.release, teachers=self.teachers, **counts)

    @property
    def sampling_rate(self) -> float:
        """The rate that a label is priced at."""
        return float(self.release.sampler.sampling_rate)

    @property
    def rows(self) -> float:
        """The expected number of rows of one label."""
        slots = self.release.sampler.num_rows
        return self.public_size * self.sampling_rate if slots is None else float(slots)


def label_problems(component: Component, book: VerificationContext) -> Iterator[str]:
    """Compares the labelling that a component shows with its tickets, its data set, its share and its price.

    Formal guarantees:
      - No problem means: the release, teachers and counts shown make exactly the tickets that are charged, and
        every number shown beside them is the release's, the data set's or the share's.
      - Where Confident-GNMax tests and answers on one sample ("fresh", "one_sample"), a ticket holds one Gaussian
        event, which many pairs of noises and counts make: there the tickets prove the combination only, and
        `max_queries` as far as the declared gap of the noise does.
      - Post-processing (the threshold of a released histogram, the words of a prompt) leaves no trace in a ticket.
    """
    shown, run = component.public, _LabelVerification.of(component, book)
    if run.release.redraw_every != (run.max_queries if run.teachers == "one_sample" else 1):
        yield f"shows redraw_every {run.release.redraw_every!r}, which {run.teachers} teachers have not"
    yield from _design_problems(run, shown)
    gap = run.release.implementation_delta(run.max_queries, width=run.candidates)
    # A name that stands in both, such as "constants", is compared with both values.
    numbers = (*_flat(run).items(), *_rejection(run, shown).items(), ("implementation_delta", gap))
    plan = f"labelling by {run.teachers} teachers with max_queries={run.max_queries}, max_answers={run.max_answers}"
    yield from plan_problems(component, book, plan, tickets=run.tickets, gap=gap, numbers=numbers)


def _flat(run: _LabelVerification) -> dict[str, Any]:
    """Returns what plans show beside a release."""
    release, mechanism = run.release, run.release.mechanism
    test = mechanism.test_noise_multiplier if isinstance(mechanism, ConfidentGNMaxMechanism) else None
    return {
        "adjacency": release.adjacency,
        "aggregation": release.aggregation.name,
        "constants": list(release.constants),
        "mechanism": mechanism.name,
        "noise_multiplier": mechanism.noise_multiplier,
        "noise_scale": mechanism.noise_multiplier * release.sensitivity.require(mechanism.norm),
        "test_noise_multiplier": test,
        "test_noise_scale": None if test is None else test * release.sensitivity.require("linf"),
        "rows": release.row_shape,
        "sampling_rate": run.sampling_rate,
        "public_size": run.public_size,
    }


def _design_problems(run: _LabelVerification, shown: Mapping[str, Any]) -> Iterator[str]:
    """Compares the shape of rows with the sampler, the declared size and the way teachers are drawn."""
    sampler, size = run.release.sampler, run.public_size
    slots = check_int("num_slots", shown["num_slots"], low=1, high=size)
    shots = check_int("shots_per_slot", shown["shots_per_slot"], low=1)
    sampling = {BalancedSlots: "fixed", PartitionedSlots: "partition"}.get(type(sampler), "poisson")
    if shown["sampling"] != sampling or (sampling == "partition") != (run.teachers == "fixed"):
        yield f"shows sampling {shown['sampling']!r} of {run.teachers} teachers, its release is {sampling!r}"
    # A unit row is one shot; how many are expected follows from the rate.
    drawn = (slots, 1) if isinstance(sampler, PoissonUnits) else (sampler.num_slots, sampler.shots_per_slot)
    if drawn != (slots, shots):
        yield f"shows num_slots {slots!r} and shots_per_slot {shots!r}, its release has {drawn!r}"
    if isinstance(sampler, BalancedSlots | PartitionedSlots):
        if sampler.public_size != size:
            yield f"shows public_size {sampler.public_size!r} in its release, its data set declares {size!r}"
    else:
        rate = min(1.0, slots * shots * check_positive("overfill", shown["overfill"]) / size)
        if not is_same_number(run.sampling_rate, rate):
            yield f"shows sampling_rate {run.sampling_rate!r}, its rows and public_size make {rate!r}"
    labels = shown.get("labels")
    if isinstance(labels, list):
        width = len(labels) + (shown.get("other_label") is not None) + len(run.release.constants)
        if width != run.candidates:
            yield f"shows {run.candidates!r} candidates, its labels make {width!r}"


def _rejection(run: _LabelVerification, shown: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the threshold and constants that inputs are rejected by."""
    mechanism = run.release.mechanism
    if isinstance(mechanism, ConfidentGNMaxMechanism):
        return {"threshold": mechanism.threshold, "abstain_below": None}
    is_vector = mechanism.releases == "vector"
    if "abstain_below" not in shown:
        threshold = shown["threshold"] if is_vector else None
        return {"threshold": None if threshold is None else check_real("threshold", threshold)}
    if shown["abstain_below"] is None:
        return {"threshold": None, "constants": []}
    votes = check_real("abstain_below", shown["abstain_below"], low=0.0, high=1.0, low_open=True) * run.rows
    if is_vector:
        return {"threshold": votes, "constants": []}
    return {"threshold": None, "constants": [round(votes * GRID) / GRID]}


def is_pool(holder: object) -> bool:
    """Returns whether what was given to the verifier is a labelled pool."""
    return has_members(holder, "entries", *(("report",) if isinstance(holder, Mapping) else ()))


def pool_problems(pool: object, component: Component | None) -> Iterator[str]:
    """Compares a labelled pool with the component that its report charges.

    Formal guarantees:
      - No problem means: every entry that something was released for (labelled or rejected) is paid for by the
        component's tickets, which are those of labelling, and the pool's plan is what the component shows.
      - That a label said to be public is public, and which label an input got, is its sender's word.
    """
    counts = dict.fromkeys(_STATUSES, 0)
    has_votes = False
    for place, entry in enumerate(member(pool, "entries")):
        status, votes = member(entry, "status"), member(entry, "votes")
        counts[check_choice(f"entries[{place}].status", status, _STATUSES)] += 1
        label = member(entry, "label")
        fits = isinstance(label, str) if status in _WITH_LABEL else label is None
        if not fits or (votes is not None and status not in _RELEASED):
            yield f"entries[{place}]: its label or votes do not go with status {status!r}"
        has_votes |= votes is not None
    released = counts["labelled"] + counts["rejected"]
    if component is None:
        if released:
            yield f"entries: {released} hold a release, which no component of the report pays for"
        return
    shown = component.parameters
    if canonical_json(member(pool, "plan")) != canonical_json(shown):
        yield f"plan: expected what {component.name!r} shows, found another"
    if released and not shows_labels(component):
        yield f"entries: {released} hold a release, but {component.name!r} shows no labelling"
    elif released:
        yield from _unpaid(counts, component)
        mechanism = label_release(shown["release"]).mechanism
        if has_votes and mechanism.releases != "vector":
            yield f"entries: votes are told, which {mechanism.name} never releases"


def _unpaid(counts: Mapping[str, int], component: Component) -> Iterator[str]:
    """Compares the releases that a pool holds with what the tickets allow."""
    queries, answers = component.public["max_queries"], component.public["max_answers"]
    released, labelled = counts["labelled"] + counts["rejected"], counts["labelled"]
    if released > check_int("max_queries", queries, low=1):
        yield f"entries: {released} are labelled or rejected, its tickets allow {queries}"
    if answers is not None and labelled > check_int("max_answers", answers, low=1):
        yield f"entries: {labelled} are labelled, its tickets allow {answers}"


PROMPT_FORMAT = "langchain-dpicl/soft-prompt"
PROMPT_VERSION = 1

# What the report of a training shows.
_TRAINING = {"steps", "expected_batch_size", "l2_clip_norm"}
# What it shows under "training" where a prompt was trained: by the part of it, "" for all of it.
_TRAINED: Mapping[str, frozenset[str]] = {
    "": frozenset({"init_text", "method", "model", "num_virtual_tokens", "optimizer", "pair_key", "target_key"})
    | {"task", "text_key", "tokenizer", "weights"},
    "optimizer": frozenset({"learning_rate", "name", "schedule", "weight_grid"}),
    "task": frozenset({"kind", "labels", "max_input_tokens", "max_target_tokens", "template", "words"}),
}
# Where the training names what a prompt says of its base model; weights that nothing told are in neither place.
_OF_BASE = {"name": "model", "tokenizer": "tokenizer", "weights": "base_weights"}
_OF_RUN = frozenset({"ledger_id", "step", "steps"})


def shows_training(component: Component) -> bool:
    """Returns whether a component shows the parameters of training steps, or has tickets of them."""
    has_steps = any(ticket.template == STEP_TEMPLATE for ticket in component.tickets)
    return has_steps or set(component.public) >= _TRAINING


def training_problems(component: Component, book: VerificationContext) -> Iterator[str]:
    """Compares the training that a component shows with its tickets, its data set, its share and its price.

    Formal guarantees:
      - No problem means: the release and steps shown make exactly the tickets that are charged, and every number shown
        beside them is the release's, the data set's or the share's.
      - The clip and the width leave no trace in a ticket: noise is measured in clips, and a gradient is released as a
        whole. They are its author's word (the width as far as the declared gap of the noise does not tell it).
    """
    shown, size = component.public, book.dataset(component).total_size
    release = training_release(shown["release"])
    steps = check_int("steps", shown["steps"], low=1)
    width = check_int("width", shown["width"], low=1, high=MAX_GRADIENT_WIDTH)
    batch = check_int("expected_batch_size", shown["expected_batch_size"], low=1, high=size)
    rate, clip = batch / size, release.aggregation.to_dict()["l2_clip_norm"]
    if not is_same_number(release.sampler.sampling_rate, rate):
        yield (
            f"shows sampling_rate {release.sampler.sampling_rate!r} in its release, its expected_batch_size and "
            f"public_size make {rate!r}"
        )
    noise, gap = release.mechanism.noise_multiplier, release.implementation_delta(steps, width=width)
    numbers = {
        "adjacency": release.adjacency,
        "aggregation": release.aggregation.name,
        "epochs": steps * batch / size,
        "implementation_delta": gap,
        "l2_clip_norm": clip,
        "mechanism": release.mechanism.name,
        "noise_multiplier": noise,
        "noise_scale": noise * release.sensitivity.require("l2") * clip / batch,
        "public_size": size,
        "rows": release.row_shape,
        "sampling": "poisson",
        "sampling_rate": rate,
    }
    plan, tickets = f"a training of {steps} steps", training_tickets(release, steps)
    yield from plan_problems(component, book, plan, tickets=tickets, gap=gap, numbers=numbers.items())


def prompt_problems(holder: object, report: Mapping[str, Any], component: Component | None) -> Iterator[str]:
    """Compares a trained prompt, or its report alone, with the component that the report charges.

    Formal guarantees:
      - No problem means: the numbers of the prompt are said to be paid for by training steps; the steps said to be made
        are no more than those; and the prompt is for the method, the length, the task, the model and the tokenizer
        that the component shows.
      - That the numbers are the ones that those steps released, that the steps were made, and what the component shows
        of the training beside (rule, fields, digest of the model) is their sender's word.
      - What is neither a prompt nor the report of one has no problem.
    """
    is_prompt = has_members(holder, "arrays", *(("report",) if isinstance(holder, Mapping) else ()))
    if component is None or not shows_training(component):
        if is_prompt and component is None:
            yield "arrays: they were trained, which no component of the report pays for"
        elif is_prompt and component is not None:
            yield f"arrays: they were trained, but {component.name!r} shows no training steps"
        return
    yield from _run_problems(report, component, has_all=is_prompt)
    if is_prompt:
        yield from _prompt_problems(holder, component)


def _run_problems(report: Mapping[str, Any], component: Component, *, has_all: bool) -> Iterator[str]:
    """Compares what a report says of a run with the steps that were charged."""
    if has_all and (missing := sorted(_OF_RUN - set(report))):
        yield f"report: expected the ledger and the steps of a training, found no {missing}"
    most = check_int("steps", component.public["steps"], low=1)
    steps, step = report.get("steps", most), report.get("step", 0)
    if canonical_json(steps) != canonical_json(most):
        yield f"report.steps: expected {most}, as {component.name!r} shows, found {steps!r}"
    if type(step) is not int or not 0 <= step <= most:
        yield f"report.step: expected a whole number of at most {most} steps, found {step!r}"


def _prompt_problems(prompt: object, component: Component) -> Iterator[str]:
    """Compares what a prompt says of itself with the training that its component shows."""
    if isinstance(prompt, Mapping):
        for name, value in (("format", PROMPT_FORMAT), ("version", PROMPT_VERSION)):
            if canonical_json(prompt.get(name)) != canonical_json(value):
                yield f"{name}: expected {value!r}, found {prompt.get(name)!r}"
    training = component.public["training"]
    for part, names in _TRAINED.items():
        if missing := sorted(names - set(training[part] if part else training)):
            yield f"{component.name!r} shows no {missing} of its {part or 'training'}"
    shown = {
        "method": training["method"],
        "num_virtual_tokens": training["num_virtual_tokens"],
        **{f"base.{name}": training[where] for name, where in _OF_BASE.items() if where in training},
        **{f"task.{name}": value for name, value in training["task"].items()},
    }
    claims = _prompt_claims(prompt)
    for name in sorted({*shown, *claims}):
        wanted, claimed = (canonical_json(of[name]) if name in of else "nothing" for of in (shown, claims))
        if wanted != claimed:
            yield f"{name}: expected {wanted}, as {component.name!r} shows, found {claimed}"


def _prompt_claims(prompt: object) -> dict[str, Any]:
    """Returns what a prompt says that it was trained for, by where it says so."""
    if isinstance(prompt, Mapping):
        claims = {name: prompt[name] for name in ("method", "num_virtual_tokens", "task", "base") if name in prompt}
    else:
        holder: Any = prompt
        claims = {"method": holder.method, "num_virtual_tokens": holder.num_virtual_tokens}
        claims |= {"task": holder.task.to_dict(), "base": holder.base}
    parts = {part: claims.pop(part, {}) for part in ("task", "base")}
    return claims | {f"{part}.{name}": value for part, held in parts.items() for name, value in held.items()}


_KEYS = frozenset({"adjacency", "delta", "epsilon", "generation", "least_units", "topics"})


def shows_documents(component: Component) -> bool:
    """Returns whether a component has the ticket of topics."""
    return any(ticket.template == TOPIC_TEMPLATE for ticket in component.tickets)


def document_problems(component: Component, book: VerificationContext) -> Iterator[str]:
    """Compares the store that a component shows with its tickets, its data set, its share and its price.

    Formal guarantees:
      - No problem means: the histogram shown makes exactly the one ticket over all units; the texts shown make the
        other ones, each of a place that the data set declares; topics split that data set; and every number shown is
        that of the release, of the share or of its price.
    """
    shown, histogram = component.parameters, _histogram(component)
    if set(shown) != _KEYS:
        yield f"shows {sorted(set(shown) ^ _KEYS)} beside or instead of what synthetic documents show"
    check_int("least_units", shown["least_units"], low=1)
    declared = book.dataset(component)
    if declared.by != KEYWORDS or declared.labels != places(len(declared.labels)):
        yield "its data set is not split by topics that are released later"
    if histogram.rule.name != declared.text_key:
        yield f"shows keywords of {histogram.rule.name!r}, the texts of its data set are {declared.text_key!r}"
    first = tuple(ticket for ticket in component.tickets if ticket.label is None)
    if first != histogram.tickets(TOPIC_TEMPLATE):
        yield "shows a histogram that makes other tickets than it has"
    texts = _texts(component, histogram)
    if {ticket.label for ticket in texts.tickets} != set(declared.labels):
        yield f"has texts of other places than {list(declared.labels)}"
    if texts.public.get("sampling") not in BY_COINS:
        yield "shows texts on samples of a fixed size, of topics whose sizes are private"
    yield from (f"texts: {problem}" for problem in parameter_problems(texts, book))
    if histogram.adjacency != book.adjacency:
        yield f"shows a histogram under {histogram.adjacency!r}, the ledger's adjacency is {book.adjacency!r}"
    yield from terms_problems(component, book)


def _histogram(component: Component) -> CountPlan:
    release = count_release(component.public["topics"])
    if not isinstance(release.rule, UnitKeywords):
        raise fail("topics", "a histogram of keywords", release.rule.kind)
    return release


def _texts(component: Component, histogram: CountPlan) -> Component:
    """Returns the texts as a component of their own, whose noise gap is what the histogram leaves of the whole one."""
    shown = component.public["generation"]
    if not isinstance(shown, Mapping) or not {"candidates", "labels", "shots_per_label", "max_tokens"} <= set(shown):
        raise fail("generation", "the plan of a generation token by token", type(shown).__name__)
    gap = component.implementation_delta - histogram.implementation_delta
    tickets = tuple(ticket for ticket in component.tickets if ticket.label is not None)
    per_release = SecureRandom.implementation_delta("binomial")  # below every gap of a token
    if gap < per_release:
        raise fail("implementation_delta", "that of the histogram and of the texts", component.implementation_delta)
    return dataclasses.replace(component, tickets=tickets, public=shown, implementation_delta=gap)


def are_documents(holder: object) -> bool:
    """Returns whether what was given to the verifier is released documents."""
    return has_members(holder, "documents" if isinstance(holder, Mapping) else "texts")


def released_document_problems(holder: Any, component: Component | None) -> Iterator[str]:
    """Compares released documents with the component that their report charges.

    Formal guarantees:
      - No problem means: the component's tickets pay for as many topics, of its vocabulary and with counts from
        `least_units` on, and for as many texts of each; the plan shown is the component's.
      - That topics and texts are those that were released is their sender's word.
    """
    if isinstance(holder, Mapping):
        texts = [(item["topic"], item["number"]) for item in holder["documents"]]
        if any(set(item) != {"text", "topic", "number"} for item in holder["documents"]):
            yield "documents: expected a text, a topic and a number of each, found others"
    else:
        texts = [(item.topic, item.number) for item in holder.texts]
    if component is None or not shows_documents(component):
        yield f"documents: {len(texts)} were released, which no component of the report pays for"
        return
    shown, histogram = component.parameters, _histogram(component)
    if canonical_json(dict(member(holder, "plan"))) != canonical_json(shown):
        yield f"plan: expected what {component.name!r} shows, found another"
    topics = member(holder, "topics")
    names = [name for name, _ in topics]
    most = len({ticket.label for ticket in component.tickets} - {None})
    if len(set(names)) != len(names) or len(names) > most or not set(names) <= set(histogram.rule.declared or ()):
        yield f"topics: expected at most {most} distinct keywords of its vocabulary, found {names}"
    if any(check_int("topics", count, low=-(2**53)) < shown["least_units"] for _, count in topics):
        yield f"topics: expected counts from {shown['least_units']} on, found fewer units"
    planned = shown["generation"]["shots_per_label"]
    numbers = [check_int("number", number, low=0) for _, number in texts]
    if len(set(texts)) != len(texts) or any(number >= planned for number in numbers):
        yield f"documents: expected at most {planned} of each topic, each once"
    if not {topic for topic, _ in texts} <= set(names):
        yield "documents: expected ones of the released topics, found others"


_FLAT = frozenset({"adjacency", "counts", "delta", "epsilon", "noise_multiplier", "threshold_delta"})


def shows_counts(component: Component) -> bool:
    """Returns whether a component shows the parameters of counts of values, or has the ticket of them."""
    return "counts" in component.public or any(ticket.template == COUNT_TEMPLATE for ticket in component.tickets)


def count_problems(component: Component, book: VerificationContext) -> Iterator[str]:
    """Compares the counts that a component shows with its tickets, its data set, its share and its price.

    Formal guarantees:
      - No problem means: the rule, noise and threshold shown make exactly the one ticket that is charged, the failure
        of the threshold included, and every number shown beside them is the release's or the share's.
    """
    shown, release = component.public, count_release(component.public["counts"])
    if set(shown) != _FLAT:
        yield f"shows {sorted(set(shown) ^ _FLAT)} beside or instead of what counts show"
    if release.rule.name not in {None, *book.dataset(component).fields}:
        yield f"shows counts of {release.rule.name!r}, which its data set does not declare"
    numbers = {
        "adjacency": release.adjacency,
        "noise_multiplier": release.mechanism.noise_multiplier,
        "threshold_delta": _failure(release),
    }
    yield from plan_problems(component, book, "counts", tickets=release.tickets(), gap=0.0, numbers=numbers.items())


def _failure(release: CountPlan) -> float:
    event = release.event
    parts = event.events if isinstance(event, ComposedEvent) else ()
    return math.fsum(part.delta for part in parts if isinstance(part, FailureEvent))


def are_counts(holder: object) -> bool:
    """Returns whether what was given to the verifier is released counts."""
    return has_members(holder, "counts", "report" if isinstance(holder, Mapping) else "plan")


def released_count_problems(holder: object, component: Component | None) -> Iterator[str]:
    """Compares released counts with the component that their report charges.

    Formal guarantees:
      - No problem means: the component's ticket pays for one release of counts, with the plan that is shown, and what
        left is what that plan may release: all declared values, or others that reach the threshold.
      - That the counts are those that were released is their sender's word.
    """
    counts = member(holder, "counts")
    pairs = list(counts.items()) if isinstance(counts, Mapping) else [(value, count) for value, count in counts]
    if component is None or not shows_counts(component):
        yield f"counts: {len(pairs)} were released, which no component of the report pays for"
        return
    if canonical_json(member(holder, "plan")) != canonical_json(dict(component.public)):
        yield f"plan: expected what {component.name!r} shows, found another"
    release = count_release(component.public["counts"])
    values, threshold = [value for value, _ in pairs], release.mechanism.threshold
    expected = [UNITS] if release.rule.name is None else release.rule.declared
    if len(set(values)) != len(values) or (expected is not None and values != list(expected)):
        yield f"counts: expected one for each of {list(expected or ())}, found {values}"
    least = min((check_int("counts", count, low=-(2**53)) for _, count in pairs), default=threshold)
    if threshold is not None and least is not None and least < threshold:
        yield f"counts: expected none below the threshold, {threshold}, found {least}"
