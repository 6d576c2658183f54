"""Verifies the parameters that a report shows of labels for public inputs, and the pool that carries the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from langchain_dpicl.privacy._validate import check_choice, check_int, check_positive, check_real, fail
from langchain_dpicl.privacy.accounting.events import canonical_json
from langchain_dpicl.privacy.extensions.confident_gnmax import ConfidentGNMaxMechanism
from langchain_dpicl.privacy.extensions.fixed_size_slots import BalancedSlots, PartitionedSlots
from langchain_dpicl.privacy.extensions.label_tickets import TEACHERS, Teachers, label_release, label_tickets
from langchain_dpicl.privacy.mechanisms.bounded import GRID
from langchain_dpicl.privacy.mechanisms.release_plan import ReleasePlan
from langchain_dpicl.privacy.mechanisms.sampling import PoissonUnits
from langchain_dpicl.privacy.shown import (
    Book,
    has_members,
    member,
    plan_problems,
    same,
    shows_labels,
)
from langchain_dpicl.privacy.tickets import Component, Ticket

_WITH_LABEL = {"labelled", "public"}
_RELEASED = {"labelled", "rejected"}
_STATUSES = _WITH_LABEL | _RELEASED | {"waiting"}


@dataclass(frozen=True, slots=True)
class _Run:
    """The labels that a component shows, rebuilt."""

    release: ReleasePlan
    teachers: Teachers
    max_queries: int
    max_answers: int | None
    candidates: int
    public_size: int

    @classmethod
    def of(cls, component: Component, book: Book) -> _Run:
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


def label_problems(component: Component, book: Book) -> Iterator[str]:
    """Compares the labelling that a component shows with its tickets, its data set, its share and its price.

    Formal guarantees:
      - No problem means: the release, teachers and counts shown make exactly the tickets that are charged, and
        every number shown beside them is the release's, the data set's or the share's.
      - Where Confident-GNMax tests and answers on one sample ("fresh", "one_sample"), a ticket holds one Gaussian
        event, which many pairs of noises and counts make: there the tickets prove the combination only, and
        `max_queries` as far as the declared gap of the noise does.
      - Post-processing (the threshold of a released histogram, the words of a prompt) leaves no trace in a ticket.
    """
    shown, run = component.public, _Run.of(component, book)
    if run.release.redraw_every != (run.max_queries if run.teachers == "one_sample" else 1):
        yield f"shows redraw_every {run.release.redraw_every!r}, which {run.teachers} teachers have not"
    yield from _design_problems(run, shown)
    gap = run.release.implementation_delta(run.max_queries, width=run.candidates)
    # A name that stands in both, such as "constants", is compared with both values.
    numbers = (*_flat(run).items(), *_rejection(run, shown).items(), ("implementation_delta", gap))
    plan = f"labelling by {run.teachers} teachers with max_queries={run.max_queries}, max_answers={run.max_answers}"
    yield from plan_problems(component, book, plan, tickets=run.tickets, gap=gap, numbers=numbers)


def _flat(run: _Run) -> dict[str, Any]:
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


def _design_problems(run: _Run, shown: Mapping[str, Any]) -> Iterator[str]:
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
        if not same(run.sampling_rate, rate):
            yield f"shows sampling_rate {run.sampling_rate!r}, its rows and public_size make {rate!r}"
    labels = shown.get("labels")
    if isinstance(labels, list):
        width = len(labels) + (shown.get("other_label") is not None) + len(run.release.constants)
        if width != run.candidates:
            yield f"shows {run.candidates!r} candidates, its labels make {width!r}"


def _rejection(run: _Run, shown: Mapping[str, Any]) -> dict[str, Any]:
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
