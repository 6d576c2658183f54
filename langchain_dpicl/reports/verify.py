"""Verifies a component's part of a report, and released values, against tickets, data set and price."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from langchain_dpicl.exceptions import DPICLError, LedgerRollbackError, PrivacyBudgetMismatchError
from langchain_dpicl.privacy._validate import Adjacency, check_choice, check_delta, check_int, check_real, fail
from langchain_dpicl.privacy.accounting.events import canonical_json
from langchain_dpicl.privacy.extensions.individual_filter import FILTER_TEMPLATE
from langchain_dpicl.privacy.extensions.joint_plans import share_price
from langchain_dpicl.privacy.extensions.outcome_counts import CHOICE_TEMPLATE, OUTCOME_TEMPLATE
from langchain_dpicl.privacy.extensions.redeclared import KEYWORDS
from langchain_dpicl.privacy.extensions.registry import STEP_TEMPLATE
from langchain_dpicl.privacy.extensions.stream_ledger import run_ticket, runs_touching
from langchain_dpicl.privacy.extensions.value_counts import (
    COUNT_TEMPLATE,
    PAIRS_OF_TOPIC_TEMPLATE,
    TOPIC_TEMPLATE,
    TOPIC_WORDS_TEMPLATE,
    UNITS,
    WORDS_OF_TOPIC_TEMPLATE,
    places,
    words_of,
)
from langchain_dpicl.privacy.extensions.word_release import (
    FIRST_WORDS_TEMPLATE,
    PAIR_TEMPLATE,
    WORD_TEMPLATE,
    PublicWords,
    WordRelease,
    may_leave,
    word_release,
)
from langchain_dpicl.privacy.ledger.state import RESERVE
from langchain_dpicl.privacy.ledger.store import LedgerHeader, LedgerRecord, LedgerStore
from langchain_dpicl.privacy.ledger.tickets import Component
from langchain_dpicl.privacy.mechanisms.release_plan import grid_step
from langchain_dpicl.privacy.private_examples import Declaration

# Prices are rounded up at the seventh digit, which another machine's order of summation may move by one.
RECOMPUTE_TOLERANCE = 2e-6
# What is not priced but shown: the same decimals, or the same quotient.
SHOWN_TOLERANCE = 1e-9

_PLANS = {
    "choice": ("langchain_dpicl.evaluation.plan", "ChoicePlan"),
    "counts": ("langchain_dpicl.discovery", "DiscoveryPlan"),
    "documents": ("langchain_dpicl.documents", "DocumentsPlan"),
    "evaluation": ("langchain_dpicl.evaluation.plan", "EvaluationPlan"),
    "evolution": ("langchain_dpicl.evolution", "EvolutionPlan"),
    "generation": ("langchain_dpicl.generation.plan", "GenerationPlan"),
    "labels": ("langchain_dpicl.pate.plan", "LabellingPlan"),
    "queries": ("langchain_dpicl.runs.query_plan", "QueryPlan"),
    "retrieval": ("langchain_dpicl.retrieval", "RetrievalPlan"),
    "training": ("langchain_dpicl.soft_prompts.plan", "TrainingPlan"),
    "words": ("langchain_dpicl.discovery", "WordsPlan"),
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
    """Compares what is declared again with the first declaration of the same units, where the report has it."""
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


def check_receipt(
    receipt: Any, header: LedgerHeader, store: LedgerStore, count: Callable[[], int]
) -> LedgerRecord | None:
    """Returns the line of a receipt, if it names one; refuses one that a ledger of `count()` lines does not hold."""
    ledger_id, entry, entry_hash, index = _read_receipt(receipt)
    if ledger_id != header.ledger_id:
        msg = f"receipt: expected one of ledger {header.ledger_id}, found one of {ledger_id!r}."
        raise PrivacyBudgetMismatchError(msg + " Open the ledger that it names.")
    last = count()
    if entry is None:
        return None
    line = next(iter(store.records(entry - 1, limit=1)), None) if entry <= last else None
    fault = ""
    if line is None:
        fault = f"{last} lines"
    elif line.hash != line.computed_hash or entry_hash not in {None, line.hash}:
        fault = f"another line with the hash {line.hash!r}"
    elif line.kind != RESERVE:
        fault = f"a line of the kind {line.kind!r}"
    elif not _is_place_of(index, line):
        fault = f"a line that reserved {line.body.get('count')} tickets, and so none with index {index}"
    if fault:
        msg = f"receipt: expected line {entry} with the hash {entry_hash!r} in ledger {ledger_id}, found {fault}."
        advice = "An older copy, or one that went on elsewhere, took the ledger's place. Bring the ledger itself back."
        raise LedgerRollbackError(f"{msg} {advice}")
    return line


def _is_place_of(index: object, line: LedgerRecord) -> bool:
    """Whether a reservation's line has a ticket of this place; a reservation names none."""
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


@cache
def public_words() -> PublicWords:
    """Returns the words of the embedded model by how common they are in its public text, and English stop words."""
    from langchain_dpicl.backends.embedded import load_tables  # reports of other releases load no model
    from langchain_dpicl.backends.rows.answer_rows import STOP_WORDS

    tables = load_tables()
    common: dict[str, float] = {}
    for token, frequency in zip(tables.token_bytes, tables.unigram.tolist(), strict=True):
        piece = token.decode("utf-8", "ignore")
        if piece.startswith(" ") and piece[1:].isalpha():  # tokens that begin with a blank are whole words
            word = piece[1:].casefold()
            common[word] = max(frequency, common.get(word, 0.0))
    return PublicWords(tuple(sorted(common, key=lambda word: (-common[word], word))), STOP_WORDS)


_WITH_LABEL = {"labelled", "public"}
_RELEASED = {"labelled", "rejected"}
_STATUSES = _WITH_LABEL | _RELEASED | {"waiting"}


def _has_plan(component: Component | None, method: str) -> bool:
    return component is not None and component.public.get("method") == method


def pool_problems(pool: Mapping[str, Any], component: Component | None) -> Iterator[str]:
    """Compares a labelled pool with the component that its report charges.

    Formal guarantees:
      - No problem means: every entry that something was released for (labelled or rejected) is paid for by the
        component's tickets, which are those of labelling, and the pool's plan is what the component shows.
      - That a label said to be public is public, and which label an input got, is its sender's word.
    """
    counts = dict.fromkeys(_STATUSES, 0)
    has_votes = False
    for place, entry in enumerate(pool["entries"]):
        status, label, votes = (entry.get(name) for name in ("status", "label", "votes"))
        counts[check_choice(f"entries[{place}].status", status, _STATUSES)] += 1
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
    if canonical_json(pool.get("plan")) != canonical_json(shown):
        yield f"plan: expected what {component.name!r} shows, found another"
    if released and not _has_plan(component, "labels"):
        yield f"entries: {released} hold a release, but {component.name!r} shows no labelling"
    elif released:
        yield from _unpaid(counts, component)
        mechanism = shown_plan(shown).release.mechanism
        if has_votes and mechanism.releases != "vector":
            yield f"entries: votes are shown, which {mechanism.name} never releases"


def _unpaid(counts: Mapping[str, int], component: Component) -> Iterator[str]:
    """Compares the releases that a pool holds with what the tickets allow."""
    queries, answers = component.public["max_queries"], component.public["max_answers"]
    released, labelled = counts["labelled"] + counts["rejected"], counts["labelled"]
    if released > check_int("max_queries", queries, low=1):
        yield f"entries: {released} are labelled or rejected, its tickets allow {queries}"
    if answers is not None and labelled > check_int("max_answers", answers, low=1):
        yield f"entries: {labelled} are labelled, its tickets allow {answers}"


def released_demonstration_problems(holder: Mapping[str, Any], component: Component | None) -> Iterator[str]:
    """Compares released demonstrations with the component that their report charges.

    Formal guarantees:
      - No problem means: the component's tickets pay for as many demonstrations of each of its labels, on a stream in
        each run; and what the file's plan shows of the component's plan is the same. Of a baseline nothing is paid for.
      - What the file's plan shows beside that (the model, the wording, the declared field of an open label: another
        process may write on with others), and that the texts are those that were released, is their sender's word; some
        may have been taken out.
    """
    report, examples = holder["report"], holder["examples"]
    if component is None and {"budget", "report_format"}.isdisjoint(report):
        return
    if component is None or component.public.get("method") not in {"generation", "evolution"}:
        yield f"examples: {len(examples)} were released, which no component of the report pays for"
        return
    shown, told = component.parameters, holder["plan"]
    plan = shown_plan(shown)
    own = {name: shown[name] for name in plan.to_dict()}
    if canonical_json({name: told.get(name, value) for name, value in own.items()}) != canonical_json(own):
        yield f"plan: expected what {component.name!r} shows, found another"
    declared = {item["dataset_id"]: item for item in report["budget"]["datasets"]}[component.partition]
    # An open label is of a declared field that does not split the units.
    key, own_label = declared["label_key"], told.get("label_key", declared["label_key"])
    fields = {declared["text_key"], *({own_label} & {key, *declared["extra_fields"]} - {None})}
    if not all(set(one) <= fields and all(isinstance(text, str) for text in one.values()) for one in examples):
        yield f"examples: expected texts under {sorted(fields)} alone, found others"
    counts = Counter(None if None in plan.sizes else example.get(key) for example in examples)
    if not set(counts) <= set(plan.sizes):
        yield f"examples: expected the labels {list(plan.sizes)}, found others"
    most = plan.shots_per_label // shown.get("stream", {"runs_per_window": 1})["runs_per_window"]
    for label, number in counts.items():
        if number > most:
            of_label = "" if label is None else f" of label {label!r}"
            yield f"examples: {number}{of_label} were released, its tickets allow {most}"


PROMPT_FORMAT = "langchain-dpicl/soft-prompt"
PROMPT_VERSION = 1

# What a component shows under "training" where a prompt was trained: by the part of it, "" for all of it.
_TRAINED: Mapping[str, frozenset[str]] = {
    "": frozenset({"init_text", "method", "model", "num_virtual_tokens", "optimizer", "pair_key", "target_key"})
    | {"task", "text_key", "tokenizer", "weights"},
    "optimizer": frozenset({"learning_rate", "name", "schedule", "weight_grid"}),
    "task": frozenset({"kind", "labels", "max_input_tokens", "max_target_tokens", "template", "words"}),
}
# Where the training names what a prompt says of its base model; weights that nothing names are in neither place.
_OF_BASE = {"name": "model", "tokenizer": "tokenizer", "weights": "base_weights"}
_OF_RUN = frozenset({"ledger_id", "step", "steps"})


def prompt_problems(holder: Mapping[str, Any], report: Mapping[str, Any], component: Component | None) -> Iterator[str]:
    """Compares a trained prompt with the component that its report charges.

    Formal guarantees:
      - No problem means: the numbers of the prompt are said to be paid for by training steps (of which `step_problems`
        says how many); and the prompt is for the method, the length, the task, the model and the tokenizer that the
        component shows.
      - That the numbers are the ones that those steps released, that the steps were made, and what the component shows
        of the training beside (rule, fields, digest of the model) is their sender's word.
      - What is no prompt has no problem.
    """
    is_prompt = {"arrays", "report"} <= set(holder)
    if component is None or not _has_plan(component, "training"):
        if is_prompt and component is None:
            yield "arrays: they were trained, which no component of the report pays for"
        elif is_prompt and component is not None:
            yield f"arrays: they were trained, but {component.name!r} shows no training steps"
        return
    if is_prompt:
        if missing := sorted(_OF_RUN - set(report)):
            yield f"report: expected the ledger and the steps of a training, found no {missing}"
        yield from _prompt_problems(holder, component)


def step_problems(report: Mapping[str, Any], component: Component | None) -> Iterator[str]:
    """Compares the steps of a training, or the rounds of an evolution, that a report tells with those charged."""
    if component is not None and _has_plan(component, "training"):
        most = check_int("steps", component.public["steps"], low=1)
    elif component is not None and _has_plan(component, "evolution"):
        plan = shown_plan(component.parameters)
        most = plan.rounds * len(plan.labels)
    else:
        return
    steps, step = report.get("steps", most), report.get("step", 0)
    if canonical_json(steps) != canonical_json(most):
        yield f"report.steps: expected {most}, as {component.name!r} shows, found {steps!r}"
    if type(step) is not int or not 0 <= step <= most:
        yield f"report.step: expected a whole number of at most {most} steps, found {step!r}"


def _prompt_problems(prompt: Mapping[str, Any], component: Component) -> Iterator[str]:
    """Compares what a prompt says of itself with the training that its component shows."""
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


def _prompt_claims(prompt: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a prompt says that it was trained for, by where it says so."""
    claims = {name: prompt[name] for name in ("method", "num_virtual_tokens", "task", "base") if name in prompt}
    parts = {part: claims.pop(part, {}) for part in ("task", "base")}
    return claims | {f"{part}.{name}": value for part, held in parts.items() for name, value in held.items()}


def released_document_problems(holder: Mapping[str, Any], component: Component | None) -> Iterator[str]:
    """Compares released documents with the component that their report charges.

    Formal guarantees:
      - No problem means: the component's tickets pay for as many topics, of its vocabulary and with counts from
        `least_units` on, or words that its release can hold; for words and pairs of each that theirs can hold; and for
        as many texts of each; the plan shown is the component's.
      - That topics, words and texts are those that were released is their sender's word; some may have been taken out.
    """
    texts = [(item["topic"], item["number"]) for item in holder["documents"]]
    if any(set(item) != {"text", "topic", "number"} for item in holder["documents"]):
        yield "documents: expected a text, a topic and a number of each, found others"
    if component is None or not _has_plan(component, "documents"):
        yield f"documents: {len(texts)} were released, which no component of the report pays for"
        return
    shown = component.parameters
    plan = shown_plan(shown)
    if canonical_json(holder["plan"]) != canonical_json(shown):
        yield f"plan: expected what {component.name!r} shows, found another"
    topics = [(name, count) for name, count in holder["topics"]]
    names = [name for name, _ in topics]
    if len(set(names)) != len(names) or len(names) > plan.num_topics:
        yield f"topics: expected at most {plan.num_topics} distinct ones, found {names}"
    yield from topic_problems(topics, plan)
    yield from _group_problems(holder["topic_words"], names, plan)
    planned = plan.documents_per_topic
    numbers = [check_int("number", number, low=0) for _, number in texts]
    if len(set(texts)) != len(texts) or any(number >= planned for number in numbers):
        yield f"documents: expected at most {planned} of each topic, each once"
    if not {topic for topic, _ in texts} <= set(names):
        yield "documents: expected ones of the released topics, found others"


_GROUP = ("label", "words", "pairs")


def _group_problems(words: Any, topics: Sequence[Any], plan: Any) -> Iterator[str]:
    """Compares the words of all topics with what their releases can hold."""
    groups = [tuple(item[key] for key in _GROUP) for item in words]
    if any(set(item) != set(_GROUP) for item in words):
        yield f"topic_words: expected {', '.join(_GROUP)} of each group, found others"
    labels = [label for label, _, _ in groups]
    if len(set(labels)) != len(labels) or not set(labels) <= set(topics):
        yield "topic_words: expected one group of a released topic each, found others"
    for label, *found in groups:
        yield from topic_word_problems(label, *found, plan=plan)


def topic_problems(topics: Sequence[tuple[Any, Any]], plan: Any) -> Iterator[str]:
    """Compares topics and their noisy counts or weights with what the release of topics can hold."""
    if isinstance(plan.topics, WordRelease):
        found = sorted(topics, key=lambda pair: (-pair[1], pair[0]))
        for problem in word_problems([(None, found, ())], _words_alone(plan.topics, None, None)):
            yield problem.replace("words:", "topics:", 1)
        return
    if not {name for name, _ in topics} <= set(plan.topics.rule.declared):
        yield "topics: expected keywords of its vocabulary, found others"
    if any(check_int("topics", count, low=-(2**53)) < plan.least_units for _, count in topics):
        yield f"topics: expected counts from {plan.least_units} on, found fewer units"


def topic_word_problems(topic: str, words: Any, pairs: Any, *, plan: Any) -> Iterator[str]:
    """Compares the words and pairs of one topic with what their releases can hold."""
    if plan.words is None:
        if words or pairs:
            yield "words: expected none, as the plan releases none"
        return
    if not {word for word, _ in words}.isdisjoint(words_of(topic)):
        yield "words: expected others than those of the topic, which leave before"
    yield from word_problems([(topic, words, pairs)], _words_alone(plan.words, plan.pairs, topic))


def _words_alone(words: WordRelease, pairs: WordRelease | None, label: str | None) -> dict[str, Any]:
    """Returns the plan of one release of words and one of pairs, as `word_problems` reads it."""
    return {
        "words": words.to_dict(),
        "pairs": None if pairs is None else pairs.to_dict(),
        "labels": [] if label is None else [label],
    }


def first_word_problems(groups: Sequence[Sequence[Any]], plan: Any) -> Iterator[str]:
    """Compares words that left before texts with what the plan of a generation can release.

    Args:
      groups: of each label, or of some, its name, its words and no pairs.
      plan: of the generation.
    """
    labels = [label for label, _, _ in groups]
    if plan.words is None:
        yield "words: expected none, as the plan releases none"
    elif len(set(labels)) != len(labels) or not set(labels) <= set(plan.sizes):
        yield "words: expected one group of a label each, found others"
    else:
        for label, *found in groups:
            yield from word_problems([(label, *found)], _words_alone(plan.words, None, label))


def released_first_word_problems(report: Mapping[str, Any], component: Component | None) -> Iterator[str]:
    """Compares words that left before demonstrations with the component that their report charges.

    Formal guarantees:
      - No problem means: the component's tickets pay for one release of words of each label that has some, with the
        plan that is shown, and what is there is what that plan may release.
      - That the words are those that were released is their sender's word.
    """
    groups = [tuple(item[key] for key in _GROUP) for item in report["released_words"]]
    if component is None or not _has_plan(component, "generation"):
        yield f"words: of {len(groups)} labels were released, which no component of the report pays for"
        return
    yield from first_word_problems(groups, shown_plan(component.parameters))


def released_count_problems(holder: Mapping[str, Any], component: Component | None) -> Iterator[str]:
    """Compares released counts with the component that their report charges.

    Formal guarantees:
      - No problem means: the component's ticket pays for one release of counts, with the plan that is shown, and what
        left is what that plan may release: all declared values, or others that reach the threshold.
      - That the counts are those that were released is their sender's word.
    """
    pairs = [(value, count) for value, count in holder["counts"]]
    if component is None or not _has_plan(component, "counts"):
        yield f"counts: {len(pairs)} were released, which no component of the report pays for"
        return
    if canonical_json(holder.get("plan")) != canonical_json(component.parameters):
        yield f"plan: expected what {component.name!r} shows, found another"
    release = shown_plan(component.parameters).release
    values, threshold = [value for value, _ in pairs], release.mechanism.threshold
    expected = [UNITS] if release.rule.name is None else release.rule.declared
    if len(set(values)) != len(values) or (expected is not None and values != list(expected)):
        yield f"counts: expected one for each of {list(expected or ())}, found {values}"
    least = min((check_int("counts", count, low=-(2**53)) for _, count in pairs), default=threshold)
    if threshold is not None and least is not None and least < threshold:
        yield f"counts: expected none below the threshold, {threshold}, found {least}"


def released_word_problems(holder: Mapping[str, Any], component: Component | None) -> Iterator[str]:
    """Compares released words with the component that their report charges.

    Formal guarantees:
      - No problem means: the component's tickets pay for one release of words of each label, with the plan that is
        shown, and what is there is what that plan may release: words in the form in which they are counted, none of
        them denied or (for the public words of this version) left out, pairs of two of them, and noisy weights that
        reach the threshold, on the grid of the noise, the largest first.
      - That the words are those that were released is their sender's word; some may have been taken out since.
    """
    groups = [tuple(item[key] for key in _GROUP) for item in holder["words"]]
    if any(set(item) != set(_GROUP) for item in holder["words"]):
        yield f"words: expected {', '.join(_GROUP)} of each group, found others"
    if component is None or not _has_plan(component, "words"):
        count = sum(len(words) for _, words, _ in groups)
        yield f"words: {count} were released, which no component of the report pays for"
        return
    if canonical_json(holder.get("plan")) != canonical_json(component.parameters):
        yield f"plan: expected what {component.name!r} shows, found another"
    yield from word_problems(groups, component.parameters)


def word_problems(groups: Sequence[Sequence[Any]], plan: Mapping[str, Any]) -> Iterator[str]:
    """Compares groups of released words with what their plan can release: labels, weights, words and pairs.

    Args:
      groups: of each label its name, its words and its pairs; the latter two with noisy weights.
      plan: JSON-able public plan of a release of words.
    """
    words = word_release(plan["words"])
    releases = (words, None if plan["pairs"] is None else word_release(plan["pairs"]))
    labels = plan["labels"] or [None]
    if [label for label, _, _ in groups] != labels:
        yield f"words: expected one group for each of {plan['labels'] or 'all units'}, found others"
    known, shown = public_words(), words.rule.to_dict()
    left_out = known.left_out if shown["public_words"] == known.digest else frozenset[str]()
    never = left_out.union(shown["denied"])
    for _, *found in groups:
        for name, items, release in zip(("words", "pairs"), found, releases, strict=True):
            if release is not None:
                yield from _weight_problems(name, items, release)
            elif items:
                yield f"{name}: expected none, as the plan releases no pairs"
        held = {word for word, _ in found[0]}
        if not never.isdisjoint(held):
            yield "words: expected no denied word and no public stop word, found one"
        if not all(map(may_leave, held)):
            yield "words: expected single words as they are counted, lower case and of letters, found another"
        both = [pair.split(" ") for pair, _ in found[1]]
        if any(len(pair) != 2 or pair[0] == pair[1] or not held.issuperset(pair) for pair in both):
            yield "pairs: expected two different ones of the group's words each, found others"


def _weight_problems(name: str, items: Sequence[Any], release: WordRelease) -> Iterator[str]:
    """Compares noisy weights with the noise and the threshold that made them."""
    weights = [check_real(name, weight, low=0.0) for _, weight in items]
    least, step = release.mechanism.threshold, grid_step(release.scale)
    if len({item for item, _ in items}) != len(items):
        yield f"{name}: expected each once, found one twice"
    if any(weight < least for weight in weights):
        yield f"{name}: expected none below the threshold, {least:g}"
    if any(weight % step for weight in weights):
        yield f"{name}: expected multiples of {step:g}, the grid of the noise, found another weight"
    if [item for item, _ in items] != [item for item, _ in sorted(items, key=lambda pair: (-pair[1], pair[0]))]:
        yield f"{name}: expected the largest weight first, ties by spelling, found another order"
