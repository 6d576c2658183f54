"""Selects demonstrations in a pool of public inputs that private teachers labelled (Duan et al. 2023)."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Self, get_args

from langchain_core.example_selectors import BaseExampleSelector

from langchain_dpicl._construction import awaitable, tells_how_to_build
from langchain_dpicl._opaque import SaysHowToBuild
from langchain_dpicl._templates import Template
from langchain_dpicl.backends.resolve import as_choice_backend
from langchain_dpicl.backends.rows.label_rows import LabelRows
from langchain_dpicl.backends.sync_async import Call, EffectGenerator, run_async, run_in_thread, run_sync
from langchain_dpicl.budget.handler import BudgetLike, describe_tickets_left
from langchain_dpicl.exceptions import ConfigurationError, ModelCallError, RunInterruptedError
from langchain_dpicl.options.answers import LabelAnswers, Votes
from langchain_dpicl.options.base import LLM, PublicInput, TemplateLike, Where, option_of
from langchain_dpicl.options.methods import Similar, StrategyLike, Student
from langchain_dpicl.options.rows import ConfidentGNMax, Noise, NoiseName, Rows
from langchain_dpicl.options.tasks import FewShotTask
from langchain_dpicl.pate.inputs import InputTemplate
from langchain_dpicl.pate.labeler import PromptPATELabeler
from langchain_dpicl.pate.selection_strategies import (
    Strategy,
    StudentChoice,
    check_strategy,
    choose_student,
    make_strategy,
)
from langchain_dpicl.privacy._validate import check_choice, fail, plain_or_type
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.rehearsal.rehearsal import Rehearsal
from langchain_dpicl.released.labelled_pool import LabelledPool, PoolEntry
from langchain_dpicl.runs.door import door
from langchain_dpicl.runs.release_run import carrying, new_bar, tick
from langchain_dpicl.tasks.labels import VotingTask, distinct_texts, reader_of, texts_of
from langchain_dpicl.tasks.templates import FewShotTemplate


@tells_how_to_build()
class PromptPATEExampleSelector(BaseExampleSelector, metaclass=SaysHowToBuild):
    r"""Selects demonstrations among public inputs whose labels private teachers released under DP.

    Private records become teacher prompts, which vote on the labels of public inputs; labels are released with noise.
    Some of the labelled inputs become demonstrations of student prompts, which are scored on the others. Everything
    after the labels is post-processing: selecting, scoring, saving and formatting cost nothing.

    Formal guarantees:
      - Contents and outputs of a selector are functions of public values and of labels released by its
        `PromptPATELabeler`, whose share of the budget bounds all of them together.
      - Only `from_private_examples`, `from_run` and `add_example` charge anything.

    Use it in `FewShotPromptTemplate` or `FewShotChatMessagePromptTemplate`. LangChain's string templates format the
    examples twice and fail on braces in an input: give `escape_braces=True` for them and only for them, or use
    `DPFewShotPromptTemplate`, which needs no escape.

    Example:
      >>> from langchain_dpicl import Budget, EmbeddedLLM, LabelAnswers, PrivateExamples
      >>> from langchain_dpicl.options import Student
      >>> tickets = [{"text": "my card was declined", "queue": "card"}, {"text": "send it abroad", "queue": "transfer"}]
      >>> private = PrivateExamples(tickets, label_key="queue", labels=("card", "transfer"), public_size=2_000)
      >>> selector = PromptPATEExampleSelector.from_private_examples(
      ...     private,
      ...     llm=EmbeddedLLM(),
      ...     budget=Budget(epsilon=2.0, delta=1e-6),
      ...     epsilon=1.0,
      ...     public_inputs=["where is my card?", "how do I send money?"],
      ...     answers=LabelAnswers(abstain_below="never"),
      ...     student=Student(shots=1),
      ... )
      >>> [sorted(example) for example in selector.select_examples({"input": "lost my card"})]
      [['queue', 'text']]
    """

    def __init__(
        self,
        pool: LabelledPool,
        *,
        strategy: StrategyLike = "validated",
        escape_braces: bool = False,
        labeler: PromptPATELabeler | None = None,
    ) -> None:
        """Builds a selector over a labelled pool, for instance a loaded one; free.

        Args:
          pool: public inputs with released or public labels.
          strategy: "validated" (the demonstrations of the student's prompt, as in the paper; if none was chosen, four
            examples with labels in turns), a `Similar`, or a `ByLength`; see there.
          escape_braces: whether braces in examples are doubled, which LangChain's string templates need.
          labeler: labels further inputs for `add_example`.

        Raises:
          ConfigurationError: an option is unknown, or does not fit the pool.
        """
        if not isinstance(pool, LabelledPool):
            raise fail("pool", "a LabelledPool", type(pool).__name__, "Load one with LabelledPool.load(path).")
        check_strategy(strategy)
        self.escape_braces = _checked_escape(escape_braces)
        self._how = strategy
        self._labels = pool
        self._student = _student_of(pool)
        self._labeler = None if labeler is None else _labeler_of(pool, labeler)
        self._lock = threading.Lock()
        self._strategy = self._made()

    @classmethod
    @door("PromptPATEExampleSelector")
    def from_private_examples(
        cls,
        private: PrivateExamples,
        *,
        llm: LLM,
        public_inputs: Sequence[PublicInput],
        max_queries: int | None = None,
        budget: BudgetLike | None = None,
        epsilon: float | None = None,
        example_prompt: TemplateLike | None = None,
        suffix: TemplateLike | None = None,
        task: FewShotTask | None = None,
        rows: Rows | Rehearsal | None = None,
        noise: Noise | ConfidentGNMax | NoiseName | None = None,
        answers: LabelAnswers | None = None,
        student: Student | None = None,
        strategy: StrategyLike = "validated",
        component: str | None = None,
    ) -> Self:
        """Labels the public inputs, charges the budget, chooses the student's prompt and returns the selector.

        All parameters are public and must not be chosen by looking at the records. For a checkpoint, workers, or a look
        at the labels before the choice, run a `PromptPATELabeler` and call `from_run`.

        Args:
          private: the examples; bound to the budget's ledger here.
          llm: the teachers' model. It receives the private prompts.
          public_inputs: the inputs to label: texts, documents, or dicts of fields; see `PromptPATELabeler`.
          max_queries: inputs that the share pays for; None: the number of distinct public inputs.
          budget: a PrivacyBudgetCallbackHandler, a Budget, or a RunnableConfig whose callbacks hold one; None: looked
            up in the context.
          epsilon: this component's share of the budget; see `PromptPATELabeler`.
          example_prompt: template of one record, short for `task=`.
          suffix: template of the public input, after the examples; short for `task=`.
          task: a `FewShotTask`: wording, labels and verbalizers; see there.
          rows: a `Rows`, or a `Rehearsal` that chooses: the teachers; see `PromptPATELabeler`.
          noise: a `Noise`, its mechanism's name, or a `ConfidentGNMax`; see there.
          answers: a `LabelAnswers`: how votes are read, and when an input is rejected; see there.
          student: a `Student`: the search for the student's prompt; see there. It makes up to
            `num_candidates * num_validation` public calls.
          strategy: which examples a query is shown; see the class. Only "validated" searches for a prompt.
          component: name in the ledger; the same name and plan find the same share, with its remaining tickets.

        Raises:
          ConfigurationError: a public fault; nothing was charged and no private call was made.
          PrivacyBudgetError: no budget, another budget, or one that does not suffice.
          RunInterruptedError: a public call failed; `error.run` holds the labels so far. Continue with
            `from_run(error.run)`.

        Source: Duan et al. (2023), Flocks of Stochastic Parrots; docs/prompt-pate.md explains the differences.
        """
        words = FewShotTask.of(task, example_prompt, suffix)
        reading = option_of("answers", answers, LabelAnswers)
        wanted = option_of("student", student, Student)
        engine: Any = as_choice_backend(llm, votes="text" if reading.votes == "text" else None)
        # Whether teachers are calibrated says nothing of the student.
        asked = VotingTask.of(private, words, reading.replace(calibrate=None) if reading.content_free else reading)
        wanted = _ready(strategy, wanted, engine, asked)
        run = PromptPATELabeler.from_private_examples(
            private,
            llm=engine,
            public_inputs=public_inputs,
            max_queries=max_queries,
            budget=budget,
            epsilon=epsilon,
            task=words,
            rows=rows,
            noise=noise,
            answers=reading,
            component=component,
        )
        return cls.from_run(run, student=wanted, strategy=strategy)

    afrom_private_examples = awaitable(from_private_examples)

    @classmethod
    def from_run(
        cls,
        run: PromptPATELabeler,
        *,
        student: Student | None = None,
        strategy: StrategyLike = "validated",
        escape_braces: bool = False,
        progress: bool | None = None,
    ) -> Self:
        """Labels the inputs of a run that still wait, chooses the student's prompt and returns the selector.

        Charges what the run charges: nothing if it is finished. A selector over the labels so far is
        `PromptPATEExampleSelector(run.result, labeler=run)`.

        Args:
          run: the labeler; the selector keeps it for `add_example`.
          student: a `Student`: the search for the student's prompt; see there.
          strategy: which examples a query is shown; see the class. Only "validated" searches for a prompt.
          escape_braces: see the class.
          progress: True shows bars, False hides them, None shows them on a terminal only.

        Raises:
          ConfigurationError: an option is out of range, or does not fit the student's model; nothing was charged.
          RunInterruptedError: a public call failed; as for `from_private_examples`.
        """
        wanted = _ready_for(run, strategy, student, escape_braces)
        run.run(progress=progress)
        return run_sync(cls._from(run, wanted, strategy, escape_braces, progress))

    @classmethod
    async def afrom_run(
        cls,
        run: PromptPATELabeler,
        *,
        student: Student | None = None,
        strategy: StrategyLike = "validated",
        escape_braces: bool = False,
        progress: bool | None = None,
    ) -> Self:
        """Asynchronous version of `from_run`; the teachers of one input are asked concurrently."""
        wanted = await run_in_thread(lambda: _ready_for(run, strategy, student, escape_braces))
        await run.arun(progress=progress)
        return await run_async(cls._from(run, wanted, strategy, escape_braces, progress))

    @classmethod
    def _from(
        cls,
        run: PromptPATELabeler,
        student: Student,
        strategy: StrategyLike,
        escape_braces: bool,
        progress: bool | None,
    ) -> EffectGenerator[Self]:
        """Builds the selector over a labeler's pool and searches the student's prompt (an effect generator)."""

        def make() -> Any:
            return cls(run.result, labeler=run, strategy=strategy, escape_braces=escape_braces)

        failure = ""
        with carrying(run=run):
            selector: Self = yield Call(make, lambda: run_in_thread(make))
            if selector._is_searched():
                try:
                    yield Call(
                        partial(selector.choose_student, student, progress=progress),
                        partial(selector.achoose_student, student, progress=progress),
                    )
                except ModelCallError as error:
                    failure = str(error)
        if failure:  # raised outside the handler, so that it has no cause
            msg = (
                f"The student's prompt was not chosen: {failure.rstrip('.')}. All labels are released and kept: call "
                "PromptPATEExampleSelector.from_run(error.run, ...), which is free."
            )
            raise RunInterruptedError(msg, run=run)
        return selector

    @classmethod
    def load(cls, path: Where, *, strategy: StrategyLike = "validated", escape_braces: bool = False) -> Self:
        """Reads what `save` of a selector or of a labelled pool wrote: labels, report and choice of the prompt; free.

        Args:
          path: the file.
          strategy: see the class.
          escape_braces: see the class.

        Raises:
          ConfigurationError: the content is not what `save` writes, or an option is out of range.
          OSError: the file is missing or unreadable.
        """
        return cls(LabelledPool.load(path), strategy=strategy, escape_braces=escape_braces)

    def save(self, path: Where) -> None:
        """Writes labels, report, plan and choice of the prompt as plain JSON; `load` reads it.

        Args:
          path: file to create or replace.

        Raises:
          OSError: the file cannot be written.
        """
        self.pool.save(path)

    @property
    def pool(self) -> LabelledPool:
        """Every input with its status and label; report, plan and choice of the prompt. Public."""
        return self._labels

    @property
    def examples(self) -> list[dict[str, str]]:
        """Every example that can be selected, as prompts show it."""
        return self._escape(self._labels.examples)

    @property
    def rejected(self) -> list[dict[str, str]]:
        """The inputs that were charged and got no label."""
        return [dict(entry.fields) for entry in self._labels.rejected]

    @property
    def waiting(self) -> list[dict[str, str]]:
        """The inputs that the share did not pay for."""
        return [dict(entry.fields) for entry in self._labels.waiting]

    @property
    def student(self) -> StudentChoice | None:
        """The choice of the student's prompt, with every candidate; None: no prompt was chosen."""
        return self._student

    @property
    def epsilon(self) -> float:
        """Upper bound on epsilon of all labels, rejections and votes; `math.inf` if no report claims one."""
        return self._labels.epsilon

    @property
    def privacy_report(self) -> dict[str, Any]:
        """Public report of what the labels cost; `verify_report(selector.pool)` recomputes it."""
        return dict(self._labels.report)

    @property
    def queries_left(self) -> int:
        """Number of further inputs that `add_example` can label."""
        return 0 if self._labeler is None else self._labeler.queries_left

    def select_examples(self, input_variables: dict[str, str]) -> list[dict[str, str]]:
        """Returns the demonstrations for a query; free.

        Args:
          input_variables: the query's variables. Those of `input_keys` are compared, by default those of the template
            that the inputs were labelled with, or else all; several are joined, sorted by name.

        Raises:
          ConfigurationError: a variable is missing, or is no text.
        """
        return self._escape(self._strategy.select(self._values(input_variables)))

    async def aselect_examples(self, input_variables: dict[str, str]) -> list[dict[str, str]]:
        """Asynchronous version of `select_examples`."""
        return self._escape(await self._strategy.aselect(self._values(input_variables)))

    def add_example(self, example: dict[str, str]) -> str | None:
        """Has the teachers label one more public input, at the cost of one query; free if it is answered already.

        The student's prompt does not change; `choose_student` searches for a better one.

        Args:
          example: fields of the input, without a label.

        Returns:
          The label; None if the input was rejected.

        Raises:
          PrivacyBudgetExceededError: the share is spent.
          ModelCallError: the public model call failed; nothing was charged.
          ConfigurationError: a field is missing, the example has its label already (`add_public_example` is free), or
            the selector was loaded and has no labeler.
        """
        return run_sync(self._grow(example))

    async def aadd_example(self, example: dict[str, str]) -> str | None:
        """Asynchronous version of `add_example`."""
        return await run_async(self._grow(example))

    def add_public_example(self, example: Mapping[str, str]) -> None:
        """Adds an example with a public label; free.

        Args:
          example: its fields, and its label (or the label's text) under the label's key. Must not come from the
            private records.

        Raises:
          ConfigurationError: no such label, other fields than the pool's, or an input that is in the pool already.
        """
        run_sync(self._learn(_public_entry(self._labels, example)))

    async def aadd_public_example(self, example: Mapping[str, str]) -> None:
        """Asynchronous version of `add_public_example`."""
        await run_async(self._learn(_public_entry(self._labels, example)))

    def choose_student(self, student: Student | None = None, *, progress: bool | None = None) -> StudentChoice:
        """Searches the best prompt among the current examples, and stores it; costs public calls only.

        Args:
          student: a `Student`: its model, by default the teachers', and the numbers of the search; see there.
          progress: see `from_run`.

        Raises:
          ConfigurationError: fewer than two examples have a label, or there is no model.
          ModelCallError: a call of the model failed.
        """
        return run_sync(self._search(option_of("student", student, Student), progress))

    async def achoose_student(self, student: Student | None = None, *, progress: bool | None = None) -> StudentChoice:
        """Asynchronous version of `choose_student`."""
        return await run_async(self._search(option_of("student", student, Student), progress))

    def with_strategy(self, strategy: StrategyLike | None = None, *, escape_braces: bool | None = None) -> Self:
        """Returns a selector over the current pool with other options; free.

        For instance `with_strategy(escape_braces=True)`: the same examples, for LangChain's string templates.

        Args:
          strategy: see the class; None: this one's.
          escape_braces: see the class; None: as here.

        Raises:
          ConfigurationError: an option is unknown, or does not fit the pool.
        """
        how = self._how if strategy is None else strategy
        escapes = self.escape_braces if escape_braces is None else escape_braces
        return type(self)(self._labels, strategy=how, escape_braces=escapes, labeler=self._labeler)

    def _is_searched(self) -> bool:
        """Returns whether to search for a prompt; warns if the pool has too few labels to search in."""
        if self._how != "validated":
            return False
        num_examples = len(self._labels.examples)
        if num_examples < 2:
            rejected = len(self._labels.rejected)
            counts = f"{num_examples} of {len(self._labels.entries)} inputs got a label, {rejected} were rejected"
            advice = "Lower abstain_below, give more epsilon, or add labelled examples with add_public_example."
            warnings.warn(f"PromptPATE: no student's prompt was chosen: {counts}. {advice}", stacklevel=5)
        return num_examples >= 2

    def _search(self, student: Student, progress: bool | None) -> EffectGenerator[StudentChoice]:
        """Searches the best prompt and stores it (an effect generator)."""
        pool = self._labels
        task, inputs = _task_of(pool)
        probe = partial(_scorer_of, self._model(student.llm), student, task)
        task, scorer = yield Call(probe, partial(asyncio.to_thread, probe))
        with new_bar(student.num_candidates, "prompt", "student prompts", progress=progress) as bar:
            choice = yield from choose_student(
                pool.entries,
                task=task,
                scorer=scorer,
                student=student,
                records_of=lambda entry: {**entry.fields, pool.label_key: entry.label or ""},
                query_of=lambda entry: inputs.query_of(entry.fields),
                tick=partial(tick, bar),
            )
        yield self._change(partial(self._keep, choice))
        return choice

    def _grow(self, example: dict[str, str]) -> EffectGenerator[str | None]:
        """Adds an example with the label of the teachers (an effect generator)."""
        if (public_one := self._given(example)) is not None:
            return public_one.label
        teachers = self._teachers()
        entry: PoolEntry = yield Call(partial(teachers.label, example), partial(teachers.alabel, example))
        yield from self._learn(entry)
        return entry.label

    def _learn(self, entry: PoolEntry) -> EffectGenerator[None]:
        """Puts an entry into the pool and, if it is a new example, into the strategy (an effect generator)."""
        news = yield self._change(partial(self._adopt, entry))
        if news is not None:
            yield Call(partial(self._strategy.add, *news), partial(self._strategy.aadd, *news))

    def _change(self, action: Callable[[], Any]) -> Call:
        """Returns the call of a change to the pool, which may wait for the labeler's ledger."""
        return Call(action, lambda: run_in_thread(action))

    def _keep(self, choice: StudentChoice) -> None:
        with self._lock:
            self._student = choice
            self._labels = replace(self._labels, student=choice.to_dict())
            if self._how == "validated":
                self._strategy = self._made()

    def _made(self) -> Strategy:
        """Returns the strategy over the current examples."""
        pool = self._labels
        shown = [place for place, entry in enumerate(pool.entries) if entry.label is not None]
        places = _balanced(pool, _USUAL_SHOTS) if self._student is None else self._student.demonstrations
        return make_strategy(
            self._how,
            pool_examples=pool.examples,
            input_texts=[_text_of(pool.entries[place]) for place in shown],
            # Strategies count positions among labelled entries, pools among all entries.
            chosen=[shown.index(place) for place in places],
            example_prompt=pool.plan.get("example_prompt"),
        )

    def _values(self, values: Any) -> Any:
        """Returns the query's values that are compared: of `input_keys`, or of the pool's query template."""
        if not isinstance(values, Mapping):
            raise fail("input_variables", "a dict of the query's variables", type(values).__name__)
        wanted = self._how.input_keys if isinstance(self._how, Similar) else None
        if wanted is not None:
            if missing := [name for name in wanted if name not in values]:
                raise fail("input_keys", f"variables among {sorted(map(str, values))}", missing)
            return {name: values[name] for name in wanted}
        known: tuple[str, ...] = ()
        with suppress(ConfigurationError):  # a pool that was loaded may show any text as its template, or none
            known = Template.of("suffix", self._labels.plan.get("suffix")).names
        own = {name: values[name] for name in known if name in values}
        return own or values

    def _model(self, llm: Any) -> Any:
        if llm is None and self._labeler is None:
            raise ConfigurationError("llm: expected the student's model (a loaded selector holds none), found None.")
        return self._labeler.engine if llm is None and self._labeler is not None else llm

    def _teachers(self) -> PromptPATELabeler:
        if self._labeler is None:
            raise ConfigurationError(
                "add_example: expected a selector with private teachers, found one that was loaded or copied from "
                "another process. add_public_example adds labelled examples for free; to label further inputs, build "
                "a PromptPATELabeler on the ledger and component that paid."
            )
        return self._labeler

    def _given(self, example: Any) -> PoolEntry | None:
        """Returns the entry of an input with a public label, which is not charged."""
        fields = self._teachers().inputs.fields_of(example)
        return next((entry for entry in self._labels.public if entry.fields == fields), None)

    def _adopt(self, entry: PoolEntry) -> tuple[dict[str, str], str] | None:
        """Puts an entry into the pool; returns the arguments of `Strategy.add`, or None if there is nothing to add."""
        with self._lock:
            places = [place for place, known in enumerate(self._labels.entries) if known.fields == entry.fields]
            is_news = not places or self._labels.entries[places[0]].label is None
            if is_news:
                self._labels = self._labels.with_entry(entry, place=places[0] if places else None)
            if self._labeler is not None:
                self._labels = replace(self._labels, report=self._labeler.result.report)
        return (self._labels.example_of(entry), _text_of(entry)) if is_news and entry.label is not None else None

    def _escape(self, examples: list[dict[str, str]]) -> list[dict[str, str]]:
        if not self.escape_braces:
            return examples
        doubled = str.maketrans({"{": "{{", "}": "}}"})
        return [{name: value.translate(doubled) for name, value in example.items()} for example in examples]

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for a pickle: everything public, without the labeler."""
        return {**self.__dict__, "_labeler": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def __copy__(self) -> Self:
        return self.with_strategy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.__copy__()

    def __repr__(self) -> str:
        queries_left = describe_tickets_left(lambda: self.queries_left)
        shown = f"strategy={self._how!r}, examples={len(self._labels.examples)}, queries_left={queries_left}"
        return f"{type(self).__name__}({shown})"


_USUAL_SHOTS = 4
"""Examples that are shown where no prompt was chosen."""


def _ready_for(
    run: PromptPATELabeler, strategy: StrategyLike, student: Student | None, escape_braces: object
) -> Student:
    """Checks the options of a selector over a run before the run charges anything; see `_ready`."""
    if not isinstance(run, PromptPATELabeler):
        raise fail("run", "a PromptPATELabeler", type(run).__name__)
    _checked_escape(escape_braces)
    return _ready(strategy, option_of("student", student, Student), run.engine, _task_of(run.result)[0])


def _ready(strategy: StrategyLike, student: Student, engine: Any, task: VotingTask) -> Student:
    """Checks strategy and student, and returns the student with its engine, which was called once."""
    check_strategy(strategy)
    if strategy != "validated":
        return student
    own = engine
    if student.llm is not None:
        own = as_choice_backend(student.llm, votes="text" if task.votes == "text" else None)
    _scorer_of(own, student, task)
    return student.replace(llm=own)


def _scorer_of(llm: Any, student: Student, task: VotingTask) -> tuple[VotingTask, LabelRows]:
    """Returns the task as the student is asked, and what scores its labels; calls the model once."""
    # Of several demonstrations the held-back labels choose; a prompt of one copies its label.
    is_usual = False if student.shots > 1 else None
    own, scorer, _ = reader_of(llm, task, is_wanted=is_usual if student.calibrate is None else student.calibrate)
    if student.calibrate and not scorer.calibrates:
        expected = "False or None where votes are texts, or no variable of the query is called 'input'"
        raise fail("Student.calibrate", expected, student.calibrate)
    return own, scorer


def _checked_escape(value: object) -> bool:
    if not isinstance(value, bool):
        raise fail("escape_braces", "True or False", plain_or_type(value))
    return value


def _task_of(pool: LabelledPool) -> tuple[VotingTask, InputTemplate]:
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


def _balanced(pool: LabelledPool, count: int) -> list[int]:
    """Returns the positions of up to `count` examples, with labels in turns, in the order of the pool."""
    turns: Counter[str | None] = Counter()
    ranked = []
    for place, entry in enumerate(pool.entries):
        if entry.label is not None:
            ranked.append((turns[entry.label], place))
            turns[entry.label] += 1
    return sorted(place for _, place in sorted(ranked)[:count])


def _labeler_of(pool: LabelledPool, labeler: PromptPATELabeler) -> PromptPATELabeler:
    """Returns the labeler if its share paid for the pool: one report must cover all labels."""
    if not isinstance(labeler, PromptPATELabeler):
        raise fail("labeler", "a PromptPATELabeler", type(labeler).__name__)
    if pool.report or pool.labelled or pool.rejected:
        paid, own = pool.report, labeler.result.report
        if other := [name for name in ("ledger_id", "component", "dataset_id") if paid.get(name) != own.get(name)]:
            advice = "Use a labeler of the same component, or save this pool and build another selector."
            raise fail("labeler", "the one whose share paid for the pool", f"differences in {other}", advice)
    return labeler


def _student_of(pool: LabelledPool) -> StudentChoice | None:
    """Returns the student choice of a pool, checked against its entries; None: there is none."""
    if pool.student is None:
        return None
    choice = StudentChoice.from_dict(pool.student)
    places = {*choice.held_back, *(place for candidate in choice.candidates for place in candidate.places)}
    if not all(place < len(pool.entries) and pool.entries[place].label is not None for place in places):
        raise ConfigurationError("student: expected places of labelled entries of this pool, found others.")
    return choice


def _text_of(entry: PoolEntry) -> str:
    """Returns the fields of an input as one text, for comparisons with queries."""
    return " ".join(entry.fields[name] for name in sorted(entry.fields))


def _public_entry(pool: LabelledPool, example: Mapping[str, str]) -> PoolEntry:
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
