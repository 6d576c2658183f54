"""Verifies what a report shows of a component against tickets, data set and price, and a receipt against the ledger."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from langchain_dpicl.exceptions import DPICLError, LedgerRollbackError, PrivacyBudgetMismatchError
from langchain_dpicl.privacy._validate import Adjacency, check_choice, check_delta, check_int, check_real, fail
from langchain_dpicl.privacy.accounting.events import canonical_json
from langchain_dpicl.privacy.data.units import Declaration
from langchain_dpicl.privacy.extensions.count_histograms import COUNT_TEMPLATE
from langchain_dpicl.privacy.extensions.individual_filter import FILTER_TEMPLATE
from langchain_dpicl.privacy.extensions.joint_plans import share_price
from langchain_dpicl.privacy.extensions.method_tickets import STEP_TEMPLATE
from langchain_dpicl.privacy.extensions.outcome_counts import CHOICE_TEMPLATE, OUTCOME_TEMPLATE
from langchain_dpicl.privacy.extensions.redeclared import KEYWORDS
from langchain_dpicl.privacy.extensions.run_tickets import run_ticket
from langchain_dpicl.privacy.extensions.stream_blocks import runs_touching
from langchain_dpicl.privacy.extensions.topic_partition import (
    PAIRS_OF_TOPIC_TEMPLATE,
    TOPIC_TEMPLATE,
    TOPIC_WORDS_TEMPLATE,
    WORDS_OF_TOPIC_TEMPLATE,
    places,
)
from langchain_dpicl.privacy.extensions.word_release import FIRST_WORDS_TEMPLATE, PAIR_TEMPLATE, WORD_TEMPLATE
from langchain_dpicl.privacy.ledger.state import RESERVE
from langchain_dpicl.privacy.ledger.store import LedgerHeader, LedgerRecord, LedgerStore
from langchain_dpicl.privacy.ledger.tickets import Component

# Prices are rounded up at the seventh digit, which another machine's order of summation may move by one.
RECOMPUTE_TOLERANCE = 2e-6
# What is not priced but shown: the same decimals, or the same quotient.
SHOWN_TOLERANCE = 1e-9

_PLANS = {
    "choice": ("langchain_dpicl.evaluation.plan", "ChoicePlan"),
    "counts": ("langchain_dpicl.discovery", "DiscoveryPlan"),
    "documents": ("langchain_dpicl.documents.plan", "DocumentsPlan"),
    "evaluation": ("langchain_dpicl.evaluation.plan", "EvaluationPlan"),
    "evolution": ("langchain_dpicl.evolution.plan", "EvolutionPlan"),
    "generation": ("langchain_dpicl.generation.plan", "GenerationPlan"),
    "labels": ("langchain_dpicl.pate.plan", "LabellingPlan"),
    "queries": ("langchain_dpicl.runs.query_plan", "QueryPlan"),
    "retrieval": ("langchain_dpicl.retrieval.plan", "RetrievalPlan"),
    "training": ("langchain_dpicl.soft_prompts.plan", "TrainingPlan"),
    "words": ("langchain_dpicl.words", "WordsPlan"),
}
"""The plan of each method, loaded where a report shows one: reports stand below the methods."""
_BY_TEMPLATE = {
    CHOICE_TEMPLATE: "choice",
    COUNT_TEMPLATE: "counts",
    FILTER_TEMPLATE: "retrieval",
    OUTCOME_TEMPLATE: "evaluation",
    STEP_TEMPLATE: "training",
    **dict.fromkeys(
        (TOPIC_TEMPLATE, TOPIC_WORDS_TEMPLATE, WORDS_OF_TOPIC_TEMPLATE, PAIRS_OF_TOPIC_TEMPLATE), "documents"
    ),
    FIRST_WORDS_TEMPLATE: "generation",
    WORD_TEMPLATE: "words",
    PAIR_TEMPLATE: "words",
}
"""Tickets that only a plan of one method makes."""
_NUMBERS = frozenset(
    {
        *("adjacency", "candidates", "counts", "delta", "epsilon", "generation", "implementation_delta", "labels"),
        *("max_queries", "max_tokens", "noise_multiplier", "noise_scale", "noise_stddev", "num_slots"),
        *("outcomes", "participation", "public_size", "release", "rounds", "sampling_rate", "steps", "teachers"),
        *("topics", "words"),
    }
)
"""What only a component with a plan may show: nothing else can be compared with its tickets."""
_WITHOUT_OTHERS = frozenset({"counts", "documents", "words"})
"""Methods whose components show their plan and nothing else."""

# What a value of another form than ours brings about, wherever it is read.
UNREADABLE = (DPICLError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class VerificationContext:
    """What every share of a report is compared with."""

    adjacency: Adjacency
    datasets: Mapping[str, Declaration]
    this_version: bool
    window: int | None = None
    """Blocks of a window; None: the promise is for life."""

    def is_misstated(self, stated: Any, cost: float) -> bool:
        """Whether a price is not the recomputed one; another version's may be higher, never lower."""
        value = check_real("epsilon", stated, low=0.0)
        too_high = self.this_version and value > cost * (1 + RECOMPUTE_TOLERANCE)
        return too_high or value < cost * (1 - RECOMPUTE_TOLERANCE)

    def dataset_of(self, component: Component) -> Declaration | None:
        """Returns the declaration of the data set that a component reads, or None."""
        return self.datasets.get(component.partition or "")

    def dataset(self, component: Component) -> Declaration:
        """Returns the declaration of the data set that a component reads; refuses a component without one."""
        declared = self.dataset_of(component)
        if declared is None:
            raise fail("partition", "the dataset_id of a data set of the report", component.partition)
        return declared


def own_cost(component: Component, book: VerificationContext) -> float:
    """Returns what a component's tickets cost by themselves, at its own delta."""
    return share_price((component,), delta=check_delta(component.delta), adjacency=book.adjacency, opinions=False)[0]


def describe_fault(error: BaseException) -> str:
    """Returns what is wrong with a value that could not be read."""
    return f"{error} is missing" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"


def problems_in(problems: Iterable[str], subject: str) -> list[str]:
    """Returns all problems; a value of an unexpected form ends the comparison and is one problem."""
    try:
        return list(problems)
    except UNREADABLE as error:
        return [f"{subject} cannot be read: {describe_fault(error)}"]


def has_members(holder: object, *names: str) -> bool:
    """Returns whether a JSON object has these keys, or another object these attributes."""
    if isinstance(holder, Mapping):
        return set(names) <= set(holder)
    return all(hasattr(holder, name) for name in names)


def member(holder: object, name: str) -> Any:
    """Returns a member of a JSON object, or an attribute of another object; None where there is none."""
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)


def shown_plan(shown: Mapping[str, Any]) -> Any:
    """Returns the plan that a component or a file shows, rebuilt by its planner.

    Raises:
      ConfigurationError: an unknown method, or parameters that no such plan has.
      LookupError, TypeError, AttributeError: `shown` has another form.
    """
    module, name = _PLANS[check_choice("method", shown["method"], _PLANS)]
    return getattr(import_module(module), name).rebuild(shown)


def component_problems(component: Component, book: VerificationContext) -> Iterator[str]:
    """Compares what a component shows with its tickets, its data set and its share.

    Formal guarantees:
      - No problem means: the planner makes exactly these tickets, and every number that the plan shows, of what the
        component shows; declared sizes are the data set's; adjacency and delta are the share's.
      - What tickets leave no trace of is its author's word: what a component shows beside its plan, the threshold of a
        released histogram, and what `rebuild` of a plan names. Where Confident-GNMax tests and answers on one sample,
        a ticket holds one Gaussian event, which many pairs of noises and counts make: there the tickets prove the
        combination only, and `max_queries` as far as the declared gap of the noise does.
    """
    if component.limit is not None and (component.tickets or component.kind == "tickets"):
        yield "has tickets and is charged as a pool"
    if "method" in component.public:
        yield from problems_in(_plan_problems(component, book), "its plan")
        return
    if claimed := sorted(_NUMBERS & set(component.public)):
        yield f"shows {', '.join(claimed)} and no method, so nothing tells what they should be"
    for ticket in component.tickets:
        if ticket.template in _BY_TEMPLATE:
            yield f"has a ticket {ticket.template!r} and shows no plan of {_BY_TEMPLATE[ticket.template]}"


def _plan_problems(component: Component, book: VerificationContext) -> Iterator[str]:
    shown = component.parameters
    plan = shown_plan(shown)
    made = plan.to_dict()
    runs, of_runs = (None, set()) if component.extent is None else (component.public["stream"], {"stream"})
    if runs is not None:
        yield from _run_problems(component, plan, runs, book)
    yield from _ticket_problems(component, plan, runs, book.adjacency)
    if not is_same_number(component.implementation_delta, gap := plan.implementation_delta):
        yield f"implementation_delta: expected {gap!r}, found {component.implementation_delta!r}"
    if plan.method in _WITHOUT_OTHERS and (others := sorted(set(shown) - set(made) - of_runs)):
        yield f"shows {others} beside its plan"
    yield from shown_differences(shown, made, book.is_misstated)
    if (plan.adjacency, plan.delta) != (book.adjacency, component.delta):
        own = f"the ledger's adjacency is {book.adjacency!r}, the share's delta {component.delta!r}"
        yield f"shows adjacency {plan.adjacency!r} and delta {plan.delta!r}; {own}"
    declared = book.dataset(component)
    if plan.partition != component.partition:
        yield f"shows dataset_id {plan.partition!r}, its tickets are of {component.partition!r}"
    for label, size in plan.sizes.items():
        if size != (known := _size_of(declared, label, runs)):
            of_label = "" if label is None else f" of label {label!r}"
            yield f"shows public_size {size!r}{of_label}, its data set declares {known!r}"
    if (check := _OF_DATASETS.get(plan.method)) is not None:
        yield from check(plan, declared)


def _run_problems(component: Component, plan: Any, runs: Any, book: VerificationContext) -> Iterator[str]:
    """Compares what is shown of the runs on a stream with the blocks of the component and the ledger's window."""
    first, last = component.extent or (0, None)
    if last is None:
        length, every = (check_int(name, runs[name], low=1) for name in ("length", "every"))
        number = runs_touching(length, every=every, window=check_int("window", book.window, low=1))
        made: dict[str, Any] = {"length": length, "every": every, "runs_per_window": number}
    else:
        made = {"length": last - first + 1, "every": None, "runs_per_window": 1}
    if plan.method == "queries":
        made["queries_per_run"] = check_int("queries_per_run", runs["queries_per_run"], low=1)
    if canonical_json(dict(runs)) != canonical_json(made):
        yield f"shows {dict(runs)} of its runs, its blocks and the window make them {made}"


def _ticket_problems(component: Component, plan: Any, runs: Any, adjacency: Adjacency) -> Iterator[str]:
    """Compares tickets with those of the plan; on a stream they are of the runs of a window, or of their queries."""
    expected = plan.tickets()
    each = None if runs is None else runs.get("queries_per_run")
    if each is not None and each * runs["runs_per_window"] != plan.max_queries:
        yield f"shows {each!r} queries per run, its plan has {plan.max_queries!r} per window"
    if component.extent is not None and runs is not None and each is None:
        expected = (run_ticket(expected, runs=runs["runs_per_window"], adjacency=adjacency),)
    if component.tickets != expected:
        yield f"shows a plan of {plan.method} that makes other tickets than it has"


def shown_differences(
    shown: Mapping[str, Any], made: Mapping[str, Any], is_misstated: Callable[[Any, float], bool], *, where: str = ""
) -> Iterator[str]:
    """Compares what is shown with the `to_dict` of the plan that was rebuilt from it; prices by `is_misstated`."""
    for name, value in made.items():
        if name not in shown:
            yield f"{where}{name!r} is missing"
            continue
        found, place = shown[name], f"{where}{name}"
        if isinstance(value, Mapping) and isinstance(found, Mapping):
            if "method" not in value and (others := sorted(set(found) - set(value))):
                yield f"shows {others} beside its {place}"
            yield from shown_differences(found, value, is_misstated, where=f"{place}.")
        elif name == "epsilon" and "method" in made:
            if is_misstated(found, value):
                yield f"shows {place} {found!r}, its tickets cost up to {value!r}"
        elif not _is_same(found, value):
            yield f"shows {place} {found!r}, its plan makes it {value!r}"


def _is_same(found: Any, value: Any) -> bool:
    is_number = isinstance(value, float) and math.isfinite(value)
    return is_same_number(found, value) if is_number else canonical_json(found) == canonical_json(value)


def _field_problems(plan: Any, declared: Declaration) -> Iterator[str]:
    """A counted field is one that the data set declares."""
    if plan.release.rule.name not in {None, *declared.fields}:
        yield f"shows counts of {plan.release.rule.name!r}, which its data set does not declare"


def _word_problems(plan: Any, declared: Declaration) -> Iterator[str]:
    """Words are of a field that the data set declares, and of labels that split it: all of them, or none."""
    yield from _field_problems(plan, declared)
    if plan.labels not in {(), declared.labels}:
        yield f"shows words of the labels {list(plan.labels)}, its data set declares {list(declared.labels)}"


def _place_problems(plan: Any, declared: Declaration) -> Iterator[str]:
    """Texts are of the places of topics, which are released later and split the units."""
    if declared.by != KEYWORDS or declared.labels != places(len(declared.labels)):
        yield "its data set is not split by topics that are released later"
    if plan.topics.rule.name != declared.text_key:
        yield f"shows keywords of {plan.topics.rule.name!r}, the texts of its data set are {declared.text_key!r}"
    if declared.labels != places(plan.num_topics):
        yield f"has words or texts of other places than {list(declared.labels)}"


def _generation_problems(plan: Any, declared: Declaration) -> Iterator[str]:
    """Words are of the texts that are read, all of their labels, and a sample of fixed size needs units that stay.

    One of several labels may leave it, and so may one of labels that were split later.
    """
    if plan.words is not None and plan.words.rule.name != declared.text_key:
        yield f"shows words of {plan.words.rule.name!r}, the texts of its data set are {declared.text_key!r}"
    if plan.words is not None and tuple(plan.sizes) != (declared.labels or (None,)):
        yield f"shows words of {list(plan.sizes)}, its data set declares {list(declared.labels)}"
    is_split_anew = declared.origin is not None and declared.origin[1] is not None
    may_leave = len(plan.sizes) > 1 or (is_split_anew and None not in plan.sizes)
    if may_leave and plan.design.sampling in {"fixed", "partition"}:
        yield "shows a sample of fixed size of labels whose sizes are private: a unit that is replaced may leave one"


_OF_DATASETS: dict[str, Callable[[Any, Declaration], Iterator[str]]] = {
    "counts": _field_problems,
    "documents": _place_problems,
    "generation": _generation_problems,
    "words": _word_problems,
}
"""What a plan of each method asks of its data set beside sizes."""


def origin_problems(datasets: Mapping[str, Declaration]) -> Iterator[str]:
    """Compares what is declared again with the first declaration of the same units, where the report has it.

    Args:
      datasets: declarations by `dataset_id`.
    """
    unchanged = ("text_key", "unit_key", "extra_fields", "max_chars", "records_per_unit")
    for name, declared in datasets.items():
        first = datasets.get(declared.origin[0]) if declared.origin is not None else None
        others = [key for key in unchanged if first is not None and getattr(declared, key) != getattr(first, key)]
        if others:
            yield f"datasets: {name!r} declares the units again, with another {', '.join(others)}"


def _size_of(declared: Declaration, label: str | None, runs: Any = None) -> int | None:
    size = declared.public_size
    if declared.stream is not None and runs is not None:
        size = int(declared.stream.size_of(runs["length"]))
        return size if label is None else max(1, size // max(1, len(declared.labels)))
    if label is None:
        return declared.total_size
    return max(1, size // max(1, len(declared.labels))) if isinstance(size, int) else dict(size).get(label)


def is_same_number(left: Any, right: Any) -> bool:
    """Returns whether both are numbers, and the same."""
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (left, right))
    return numbers and math.isclose(left, right, rel_tol=SHOWN_TOLERANCE)


# A ledger cannot detect that an older copy of it was restored; the holder of a receipt can.

_FIELDS = ("ledger_id", "entry", "entry_hash", "index")


def check_receipt(receipt: Any, header: LedgerHeader, store: LedgerStore, count: Callable[[], int]) -> None:
    """Refuses a receipt that names no line of a ledger of `count()` lines; see `Budget.check_receipt`."""
    ledger_id, entry, entry_hash, index = _read_receipt(receipt)
    if ledger_id != header.ledger_id:
        msg = f"receipt: expected one of ledger {header.ledger_id}, found one of {ledger_id}."
        raise PrivacyBudgetMismatchError(msg + " Open the ledger that it names.")
    last = count()
    if entry is None:
        return
    line = next(iter(store.records(entry - 1, limit=1)), None) if entry <= last else None
    fault = ""
    if line is None:
        fault = f"{last} lines"
    elif line.hash != line.computed_hash or entry_hash not in {None, line.hash}:
        fault = f"another line with the hash {line.hash}"
    elif line.kind != RESERVE:
        fault = f"a line of the kind {line.kind!r}"
    elif not is_place_of(index, line):
        fault = f"a line that reserved {line.body.get('count')} tickets, and so none with index {index}"
    if fault:
        msg = f"receipt: expected line {entry} with the hash {entry_hash} in ledger {ledger_id}, found {fault}."
        advice = "An older copy, or one that went on elsewhere, took the ledger's place. Bring the ledger itself back."
        raise LedgerRollbackError(f"{msg} {advice}")


def is_place_of(index: object, line: LedgerRecord) -> bool:
    """Whether a reservation's line has a ticket of this place; receipts of older versions name none."""
    count = line.body.get("count")
    return index is None or (type(index) is int and type(count) is int and 0 <= index < count)


def _read_receipt(receipt: Any) -> tuple[str, int | None, str | None, object]:
    if isinstance(receipt, Mapping):
        ledger_id, entry, entry_hash, index = (receipt.get(name) for name in _FIELDS)
    else:
        ledger_id, entry, entry_hash, index = (getattr(receipt, name, None) for name in _FIELDS)
        index = None if callable(index) else index  # the method of a tuple
    is_number = isinstance(entry, int) and not isinstance(entry, bool) and entry >= 1
    if not isinstance(ledger_id, str) or not (entry is None or is_number) or not isinstance(entry_hash, str | None):
        advice = "Give a receipt, a reservation, or a dict of these."
        raise fail("receipt", f"{', '.join(_FIELDS)}", type(receipt).__name__, advice)
    return ledger_id, entry, entry_hash, index
