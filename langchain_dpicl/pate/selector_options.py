"""Checks the options of a selector over a labelled pool, and sets up the search for the student's prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from string import Formatter
from typing import Any, get_args

from langchain_dpicl.backends.resolve import as_choice_backend
from langchain_dpicl.backends.rows.label_rows import LabelRows
from langchain_dpicl.backends.sync_async import EffectGenerator
from langchain_dpicl.exceptions import ConfigurationError, LabellingInterruptedError
from langchain_dpicl.options.answers import Votes
from langchain_dpicl.pate.labeler import PromptPATELabeler
from langchain_dpicl.pate.options import InputTemplate
from langchain_dpicl.pate.selection_strategies import (
    Strategy,
    StrategyName,
    StudentChoice,
    choose_student,
    make_strategy,
)
from langchain_dpicl.privacy._validate import check_choice, check_int, fail
from langchain_dpicl.released.labelled_pool import LabelledPool, PoolEntry
from langchain_dpicl.runs.streamed_run import new_bar, tick
from langchain_dpicl.tasks.labels import VotingTask, distinct_texts, reader_of, texts_of
from langchain_dpicl.tasks.templates import FewShotTemplate


@dataclass(frozen=True, slots=True)
class StudentOptions:
    """Options of the search for a student's prompt. Public.

    Attributes:
      num_shots: demonstrations of a prompt.
      num_candidates: prompts to score.
      num_validation: labelled inputs that are held back to score them on.
      seed: public; selects the candidates.
      calibrate: whether the student is calibrated contextually; None: as `DPVotingRunnable` decides.
    """

    num_shots: int = 4
    num_candidates: int = 20
    num_validation: int = 50
    seed: int = 0
    calibrate: bool | None = None

    def __post_init__(self) -> None:
        for name in ("num_shots", "num_candidates", "num_validation"):
            check_int(name, getattr(self, name), low=1)
        check_int("seed", self.seed, low=0)
        if self.calibrate is not None and not isinstance(self.calibrate, bool):
            raise fail("calibrate_student", "True, False or None", self.calibrate)

    def as_options(self) -> dict[str, Any]:
        """Returns the options by name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class StudentSetup:
    """A student model and its task.

    Attributes:
      task: labels and prompt templates.
      scorer: scores labels with the student model.
      inputs: templates of public inputs.
    """

    task: VotingTask
    scorer: LabelRows
    inputs: InputTemplate

    @classmethod
    def of(cls, llm: Any, task: VotingTask, inputs: InputTemplate, options: StudentOptions) -> StudentSetup:
        """Calls the student model once to find out how it scores labels."""
        own, scorer, _ = reader_of(llm, task, is_wanted=options.calibrate, shots=options.num_shots)
        made = cls(own, scorer, inputs)
        made.check(options)
        return made

    def check(self, options: StudentOptions) -> None:
        """Refuses a requested calibration that the student does not support."""
        if options.calibrate and not self.scorer.calibrates:
            expected = "False or None where votes are texts, or no variable of the query is called 'input'"
            raise fail("calibrate_student", expected, options.calibrate)

    def choose(
        self, pool: LabelledPool, options: StudentOptions, *, progress: bool | None
    ) -> EffectGenerator[StudentChoice]:
        """Searches the best prompt (an effect generator); see `choose_student`."""
        with new_bar(options.num_candidates, "prompt", "student prompts", progress=progress) as bar:
            return (
                yield from choose_student(
                    pool.entries,
                    task=self.task,
                    scorer=self.scorer,
                    shots=options.num_shots,
                    num_candidates=options.num_candidates,
                    num_validation=options.num_validation,
                    seed=options.seed,
                    records_of=lambda entry: {**entry.fields, pool.label_key: entry.label or ""},
                    query_of=lambda entry: self.inputs.query_of(entry.fields),
                    tick=partial(tick, bar),
                )
            )


def task_of(pool: LabelledPool) -> tuple[VotingTask, InputTemplate]:
    """Returns task and templates from a pool's plan, so that a loaded pool can choose a student."""
    plan: Mapping[str, Any] = pool.plan
    names = ("example_prompt", "prefix", "suffix", "example_separator", "verbalizers", "votes", "text_key")
    if missing := sorted(name for name in names if name not in plan):
        advice = "Use a pool of a PromptPATELabeler."
        raise fail("pool.plan", "the templates that its labels were asked with", f"{missing} missing", advice)
    texts = texts_of(pool.labels, plan["verbalizers"])
    check_choice("votes", plan["votes"], get_args(Votes))
    if not isinstance(plan["text_key"], str):
        raise fail("pool.plan", "text under 'text_key'", type(plan["text_key"]).__name__)
    fields = {plan["text_key"], pool.label_key, *(name for entry in pool.entries for name in entry.fields)}
    wording = FewShotTemplate(
        example_prompt=plan["example_prompt"],
        suffix=plan["suffix"],
        prefix=plan["prefix"],
        separator=plan["example_separator"],
        fields=tuple(sorted(fields)),
        shown={pool.label_key: dict(pool.shown)},
    )
    variables = wording.input_variables
    is_possible = plan["votes"] != "text" and (len(variables) == 1 or "input" in variables)
    # Calibration replaces the query by a content-free input, which needs one variable or one called `input`.
    content_free: tuple[str, ...] = ()
    if is_possible:
        content_free = distinct_texts("content_free", plan.get("content_free_inputs", ()), least=0, empty=True)
    task = VotingTask(pool.labels, texts, wording, plan["votes"], content_free)
    return task, InputTemplate(wording, plan["text_key"], pool.label_key)


DEFAULT_K = 4
_USERS: dict[str, tuple[str, ...]] = {
    "k": ("validated", "similarity", "mmr"),
    "fetch_k": ("mmr",),
    "embeddings": ("similarity", "mmr"),
    "vectorstore": ("similarity", "mmr"),
    "input_keys": ("similarity", "mmr"),
    "example_prompt": ("length",),
    "max_length": ("length",),
    "get_text_length": ("length",),
}
PLAIN_OPTIONS = tuple(name for name in _USERS if name != "example_prompt")
"""Options of strategies whose names differ from all options of `PromptPATELabeler`."""


def check_selection(strategy: Any, escape_braces: Any, options: Any) -> dict[str, Any]:
    """Returns the options of a selector, checked as far as possible without a pool."""
    if options is not None and not isinstance(options, Mapping):
        raise fail("strategy_options", "a dict of options, or None", type(options).__name__)
    chosen = dict(options or {})
    if unknown := sorted(set(chosen) - set(_USERS)):
        raise fail("strategy_options", f"some of {list(_USERS)}", unknown)
    check_choice("strategy", strategy, get_args(StrategyName))
    if useless := [name for name in chosen if strategy not in _USERS[name] and chosen[name] is not None]:
        users = {name: _USERS[name] for name in useless}
        raise fail("strategy", f"one that uses its options ({users})", strategy, "Leave the others out.")
    keys = chosen.get("input_keys")
    if keys is not None and (isinstance(keys, str) or not all(isinstance(key, str) for key in keys)):
        raise fail("input_keys", "a list of names of the query's variables, or None", keys)
    if not isinstance(escape_braces, bool):
        raise fail("escape_braces", "True or False", escape_braces)
    check_int("k", chosen.get("k", DEFAULT_K), low=1)
    if strategy != "length":  # its template may come from the pool
        build_strategy({"strategy": strategy, **chosen}, [], [], ())
    return {"strategy": strategy, **chosen, "escape_braces": escape_braces}


def build_strategy(
    options: Mapping[str, Any], examples: Sequence[dict[str, str]], texts: Sequence[str], chosen: Sequence[int]
) -> Strategy:
    """Returns the strategy of a selector's options."""
    own = {name: value for name, value in options.items() if name not in {"strategy", "input_keys"}}
    return make_strategy(options["strategy"], pool_examples=examples, input_texts=texts, chosen=chosen, **own)


def split_options(
    strategy: Any, escape_braces: Any, strategy_options: Any, options: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits options into those of the selector, checked, and those of the labeler."""
    beside = {name: value for name, value in options.items() if name in PLAIN_OPTIONS}
    if isinstance(strategy_options, Mapping) and (twice := sorted(set(beside) & set(strategy_options))):
        raise fail("strategy_options", "each option once", twice)
    both = {**strategy_options, **beside} if isinstance(strategy_options, Mapping) else strategy_options or beside
    shown = check_selection(strategy, escape_braces, both)
    return shown, {name: value for name, value in options.items() if name not in beside}


def early_check(student: Any, wanted: StudentOptions, shown: Mapping[str, Any]) -> Callable[[Any, LabelledPool], None]:
    """Returns a check of strategy and student that a labeler calls before it declares its share."""
    options = {name: value for name, value in shown.items() if name != "escape_braces"}

    def check(engine: Any, pool: LabelledPool) -> None:
        complete_options(options, pool)
        if options["strategy"] == "validated":
            StudentSetup.of(engine if student is None else student, *task_of(pool), wanted)

    return check


def complete_options(options: Mapping[str, Any], pool: LabelledPool) -> dict[str, Any]:
    """Returns the options with defaults from the pool's plan, checked on the pool's fields."""
    strategy_options = dict(options)
    if strategy_options["strategy"] == "length" and strategy_options.get("example_prompt") is None:
        strategy_options["example_prompt"] = pool.plan.get("example_prompt")
    fields = dict.fromkeys(pool.entries[0].fields if pool.entries else (), "")
    if fields:
        build_strategy(strategy_options, [{**fields, pool.label_key: ""}], [""], ())
    return strategy_options


def balance_labels(pool: LabelledPool, count: int) -> list[int]:
    """Returns the positions of up to `count` examples, with labels in turns, in the order of the pool."""
    turns: Counter[str | None] = Counter()
    ranked = []
    for place, entry in enumerate(pool.entries):
        if entry.label is not None:
            ranked.append((turns[entry.label], place))
            turns[entry.label] += 1
    return sorted(place for _, place in sorted(ranked)[:count])


def query_values(values: Any, options: Mapping[str, Any], pool: LabelledPool) -> Any:
    """Returns the query's values of `input_keys`, or of the variables in the pool's query template."""
    if not isinstance(values, Mapping):
        raise fail("input_variables", "a dict of the query's variables", type(values).__name__)
    wanted = options.get("input_keys")
    if wanted is not None:
        if missing := [name for name in wanted if name not in values]:
            raise fail("input_keys", f"variables among {sorted(map(str, values))}", missing)
        return {name: values[name] for name in wanted}
    suffix = pool.plan.get("suffix")
    known = [name for _, name, _, _ in Formatter().parse(suffix) if name] if isinstance(suffix, str) else []
    own = {name: values[name] for name in known if name in values}
    return own or values


def student_engine(llm: Any, strategy: str, votes: str | None) -> Any:
    """Returns the student's engine, called once before anything is spent; None: the teachers' engine is used."""
    if llm is None or strategy != "validated":
        return None
    return as_choice_backend(llm, votes="text" if votes == "text" else None)


def labeler_of(pool: LabelledPool, labeler: PromptPATELabeler) -> PromptPATELabeler:
    """Returns the labeler if its share paid for the pool: one report must cover all labels."""
    if not isinstance(labeler, PromptPATELabeler):
        raise fail("labeler", "a PromptPATELabeler", type(labeler).__name__)
    if pool.report or pool.labelled or pool.rejected:
        paid, own = pool.report, labeler.pool.report
        if other := [name for name in ("ledger_id", "component", "dataset_id") if paid.get(name) != own.get(name)]:
            advice = "Use a labeler of the same component, or save this pool and build another selector."
            raise fail("labeler", "the one whose share paid for the pool", f"differences in {other}", advice)
    return labeler


def student_of(pool: LabelledPool) -> StudentChoice | None:
    """Returns the student choice of a pool, checked against its entries; None: there is none."""
    if pool.student is None:
        return None
    choice = StudentChoice.from_dict(pool.student)
    places = {*choice.held_back, *(place for candidate in choice.candidates for place in candidate.places)}
    if not all(place < len(pool.entries) and pool.entries[place].label is not None for place in places):
        raise ConfigurationError("student: expected places of labelled entries of this pool, found others.")
    return choice


def text_of(entry: PoolEntry) -> str:
    """Returns the fields of an input as one text, for comparisons with queries."""
    return " ".join(entry.fields[name] for name in sorted(entry.fields))


def public_entry(pool: LabelledPool, example: Mapping[str, str]) -> PoolEntry:
    """Returns an example with its public label as an entry of the pool."""
    key = pool.label_key
    if not isinstance(example, Mapping) or key not in example:
        shown = sorted(map(str, example)) if isinstance(example, Mapping) else type(example).__name__
        raise fail("example", f"a dict with the input's fields and its label under {key!r}", shown)
    fields = {name: value for name, value in example.items() if name != key}
    wanted = sorted(pool.entries[0].fields) if pool.entries else sorted(map(str, fields))
    if sorted(map(str, fields)) != wanted:
        raise fail("example", f"the fields {[*wanted, key]}", sorted(map(str, example)))
    known = {text: label for label, text in pool.shown.items()} | {label: label for label in pool.labels}
    value = example[key]
    label = known.get(value) if isinstance(value, str) else None
    if label is None:
        raise fail(f"example[{key!r}]", f"one of {pool.labels!r}", value)
    if any(entry.fields == fields and entry.label is not None for entry in pool.entries):
        raise fail("example", "an input without a label", "one that has a label in the pool already")
    return PoolEntry(fields=fields, label=label, status="public")


def check_searched(failure: str, labeler: PromptPATELabeler) -> None:
    """Raises the interruption outside the handler of the failed call, so that it has no cause."""
    if failure:
        msg = (
            f"The student's prompt was not chosen: {failure.rstrip('.')}. All labels are released and kept: call "
            "PromptPATEExampleSelector.from_labeler(error.labeler, ...), which is free."
        )
        raise LabellingInterruptedError(msg, labeler=labeler)
