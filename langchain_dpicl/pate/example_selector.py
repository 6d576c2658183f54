"""Selects demonstrations in a pool of public inputs that private teachers labelled (Duan et al. 2023)."""

from __future__ import annotations

import asyncio
import os
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Self

from langchain_core.example_selectors import BaseExampleSelector

from langchain_dpicl._construction import tells_how_to_build
from langchain_dpicl.backends.sync_async import Call, EffectGenerator, run_async, run_in_thread, run_sync
from langchain_dpicl.budget.handler import describe_tickets_left
from langchain_dpicl.exceptions import ConfigurationError, ModelCallError
from langchain_dpicl.pate.labeler import PromptPATELabeler
from langchain_dpicl.pate.selection_strategies import Strategy, StrategyName, StudentChoice
from langchain_dpicl.pate.selector_options import (
    DEFAULT_K,
    StudentOptions,
    StudentSetup,
    balance_labels,
    build_strategy,
    check_searched,
    check_selection,
    complete_options,
    early_check,
    labeler_of,
    public_entry,
    query_values,
    split_options,
    student_engine,
    student_of,
    task_of,
    text_of,
)
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.released.labelled_pool import LabelledPool, PoolEntry
from langchain_dpicl.runs.streamed_run import carrying


@tells_how_to_build()
class PoolSelector(BaseExampleSelector):
    """Base of selectors over a labelled pool, which is public and can grow."""

    def __init__(
        self,
        pool: LabelledPool,
        *,
        strategy: StrategyName = "validated",
        escape_braces: bool = False,
        labeler: PromptPATELabeler | None = None,
        **strategy_options: Any,
    ) -> None:
        """Builds a selector over a labelled pool, for instance a loaded one; free.

        Args:
          pool: public inputs with released or public labels.
          strategy: "validated" (the demonstrations of the student's prompt, as in the paper; if none was chosen, `k`
            examples with labels in turns), "similarity" (the nearest to the query), "mmr" (near it and unlike each
            other) or "length" (as many as fit).
          escape_braces: whether braces in examples are doubled, which LangChain's string templates need.
          labeler: labels further inputs for `add_example`.
          strategy_options: `k` examples to select (4); `embeddings` or `vectorstore`, any of LangChain's, and
            `input_keys` (variables of the query that are compared) for "similarity" and "mmr"; `fetch_k` for "mmr";
            `example_prompt` (by default that of the labels), `max_length` and `get_text_length` for "length".

        Raises:
          ConfigurationError: an option is out of range, unknown, or missing for the strategy.
        """
        if not isinstance(pool, LabelledPool):
            raise fail("pool", "a LabelledPool", type(pool).__name__, "Load one with LabelledPool.load(path).")
        shown = check_selection(strategy, escape_braces, strategy_options)
        self.escape_braces = shown.pop("escape_braces")
        self._options = complete_options(shown, pool)
        self._labels = pool
        self._student = student_of(pool)
        self._labeler = None if labeler is None else labeler_of(pool, labeler)
        self._lock = threading.Lock()
        self._strategy = self._made()

    @classmethod
    def load(cls, path: str | os.PathLike[str], **options: Any) -> Self:
        """Reads what `save` (or a labeler's checkpoint) wrote: labels, report and choice of the prompt; free.

        Args:
          path: the file.
          options: those of the class.

        Raises:
          ConfigurationError: the content is not what `save` writes, or an option is out of range.
          OSError: the file is missing or unreadable.
        """
        return cls(LabelledPool.load(path), **options)

    def save(self, path: str | os.PathLike[str]) -> None:
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
        return self._escape(self._strategy.select(query_values(input_variables, self._options, self._labels)))

    async def aselect_examples(self, input_variables: dict[str, str]) -> list[dict[str, str]]:
        """Asynchronous version of `select_examples`."""
        values = query_values(input_variables, self._options, self._labels)
        return self._escape(await self._strategy.aselect(values))

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
        run_sync(self._learn(public_entry(self._labels, example)))

    async def aadd_public_example(self, example: Mapping[str, str]) -> None:
        """Asynchronous version of `add_public_example`."""
        await run_async(self._learn(public_entry(self._labels, example)))

    def choose_student(
        self, llm: Any = None, *, calibrate: bool | None = None, progress: bool | None = None, **numbers: int
    ) -> StudentChoice:
        """Searches the best prompt among the current examples, and stores it; costs public calls only.

        Args:
          llm: the student's model; by default the teachers'.
          calibrate: see `calibrate_student` of `from_private_examples`.
          progress: see `from_private_examples`.
          numbers: `num_shots`, `num_candidates`, `num_validation` and `seed`; see `from_private_examples`.

        Raises:
          ConfigurationError: fewer than two examples have a label, or there is no model.
          ModelCallError: a call of the model failed.
        """
        return run_sync(self._search(llm, StudentOptions(calibrate=calibrate, **numbers), progress))

    async def achoose_student(
        self, llm: Any = None, *, calibrate: bool | None = None, progress: bool | None = None, **numbers: int
    ) -> StudentChoice:
        """Asynchronous version of `choose_student`."""
        return await run_async(self._search(llm, StudentOptions(calibrate=calibrate, **numbers), progress))

    def with_strategy(self, strategy: StrategyName | None = None, **options: Any) -> Self:
        """Returns a selector over the current pool with other options; free.

        For instance `with_strategy(escape_braces=True)`: the same examples, for LangChain's string templates.

        Args:
          strategy: see the class; None: this one's, with its options.
          options: those of the class; `escape_braces` is kept unless given.

        Raises:
          ConfigurationError: an option is out of range, unknown, or missing for the strategy.
        """
        common = {"escape_braces": self.escape_braces, "labeler": self._labeler, **options}
        same = {**self._options} if strategy is None else {"strategy": strategy}
        return type(self)(self._labels, **{**same, **common})

    def is_searched(self) -> bool:
        """Returns whether to search for a prompt; warns if the pool has too few labels to search in."""
        if self._options["strategy"] != "validated":
            return False
        num_examples = len(self._labels.examples)
        if num_examples < 2:
            rejected = len(self._labels.rejected)
            counts = f"{num_examples} of {len(self._labels.entries)} inputs got a label, {rejected} were rejected"
            advice = "Lower abstain_below, give more epsilon, or add labelled examples with add_public_example."
            warnings.warn(f"PromptPATE: no student's prompt was chosen: {counts}. {advice}", stacklevel=5)
        return num_examples >= 2

    def _search(self, llm: Any, wanted: StudentOptions, progress: bool | None) -> EffectGenerator[StudentChoice]:
        """Searches the best prompt and stores it (an effect generator)."""
        probe = partial(StudentSetup.of, self._model(llm), *task_of(self._labels), wanted)
        work: StudentSetup = yield Call(probe, partial(asyncio.to_thread, probe))
        choice = yield from work.choose(self._labels, wanted, progress=progress)
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
        return Call(action, lambda: run_in_thread(action, is_slow=self._may_wait))

    def _keep(self, choice: StudentChoice) -> None:
        with self._lock:
            self._student = choice
            self._labels = replace(self._labels, student=choice.to_dict())
            if self._options["strategy"] == "validated":
                self._strategy = self._made()

    def _made(self) -> Strategy:
        """Returns the strategy over the current examples."""
        shown = [place for place, entry in enumerate(self._labels.entries) if entry.label is not None]
        # Strategies count positions among labelled entries, pools among all entries.
        if self._student is None:
            places = balance_labels(self._labels, self._options.get("k", DEFAULT_K))
            chosen = [shown.index(place) for place in places]
        else:
            chosen = [shown.index(place) for place in self._student.demonstrations]
        texts = [text_of(self._labels.entries[place]) for place in shown]
        return build_strategy(self._options, self._labels.examples, texts, chosen)

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
                self._labels = replace(self._labels, report=self._labeler.pool.report)
        return (self._labels.example_of(entry), text_of(entry)) if is_news and entry.label is not None else None

    @property
    def _may_wait(self) -> bool:
        """Whether a change of the pool may wait for the labeler's ledger."""
        return self._labeler is not None and self._labeler.may_wait

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
        strategy, count = self._options["strategy"], len(self._labels.examples)
        queries_left = describe_tickets_left(lambda: self.queries_left)
        return f"{type(self).__name__}(strategy={strategy!r}, examples={count}, queries_left={queries_left})"


class PromptPATEExampleSelector(PoolSelector):
    r"""Selects demonstrations among public inputs whose labels private teachers released under DP.

    Private records become teacher prompts, which vote on the labels of public inputs; labels are released with noise.
    Some of the labelled inputs become demonstrations of student prompts, which are scored on the others. Everything
    after the labels is post-processing: selecting, scoring, saving and formatting cost nothing.

    Formal guarantees:
      - Contents and outputs of a selector are functions of public values and of labels released by its
        `PromptPATELabeler`, whose share of the budget bounds all of them together.
      - Only `from_private_examples` and `add_example` charge anything.

    Use it in `FewShotPromptTemplate` or `FewShotChatMessagePromptTemplate`. LangChain's string templates format the
    examples twice and fail on braces in an input: give `escape_braces=True` for them and only for them, or use
    `DPFewShotPromptTemplate`, which needs no escape.

    Example:
      >>> from langchain_dpicl import Budget, EmbeddedLLM, PrivateExamples
      >>> tickets = [{"text": "my card was declined", "queue": "card"}, {"text": "send it abroad", "queue": "transfer"}]
      >>> private = PrivateExamples(tickets, label_key="queue", labels=("card", "transfer"), public_size=2_000)
      >>> selector = PromptPATEExampleSelector.from_private_examples(
      ...     private,
      ...     llm=EmbeddedLLM(),
      ...     budget=Budget(epsilon=2.0, delta=1e-6),
      ...     epsilon=1.0,
      ...     public_inputs=["where is my card?", "how do I send money?"],
      ...     abstain_below=None,
      ...     num_shots=1,
      ... )
      >>> [sorted(example) for example in selector.select_examples({"input": "lost my card"})]
      [['queue', 'text']]
    """

    @classmethod
    def from_private_examples(
        cls,
        private: PrivateExamples,
        *,
        llm: Any,
        public_inputs: Any,
        student_llm: Any = None,
        num_shots: int = 4,
        num_candidates: int = 20,
        num_validation: int = 50,
        seed: int = 0,
        calibrate_student: bool | None = None,
        strategy: StrategyName = "validated",
        strategy_options: Mapping[str, Any] | None = None,
        escape_braces: bool = False,
        progress: bool | None = None,
        **options: Any,
    ) -> Self:
        """Labels the public inputs, charges the budget, chooses the student's prompt and returns the selector.

        All parameters are public and must not be chosen by looking at the records.

        Args:
          private: the examples; bound to the budget's ledger here.
          llm: the teachers' model. It receives the private prompts.
          public_inputs: the inputs to label: texts, documents, or dicts of fields; see `PromptPATELabeler`.
          student_llm: the model that the prompt is for; by default `llm`. It receives public text only.
          num_shots: demonstrations of the student's prompt.
          num_candidates: prompts to score.
          num_validation: labelled inputs that are held back to score them on, at most half of those with a label. The
            search makes up to `num_candidates * num_validation` public calls.
          seed: public; selects the candidates and has no effect on noise or samples.
          calibrate_student: whether the student is calibrated contextually; None: see `DPVotingRunnable`.
          strategy: see the class; only "validated" searches for a prompt.
          strategy_options: options of the strategy, see the class; all but `example_prompt` may also be given as
            arguments.
          escape_braces: see the class.
          progress: True shows bars, False hides them, None shows them on a terminal only.
          options: those of `PromptPATELabeler.from_private_examples`: budget, epsilon, wording, teachers, mechanism,
            shape of rows, component, checkpoint.

        Raises:
          ConfigurationError: a public fault; nothing was charged and no private call was made.
          PrivacyBudgetError: no budget, another budget, or one that does not suffice.
          LabellingInterruptedError: a public call failed; `error.labeler` holds the labels so far. Continue with
            `error.labeler.run()`, then `from_labeler`.

        Source: Duan et al. (2023), Flocks of Stochastic Parrots; docs/prompt-pate.md explains the differences.
        """
        shown, options = split_options(strategy, escape_braces, strategy_options, options)
        wanted = StudentOptions(num_shots, num_candidates, num_validation, seed, calibrate_student)
        student = student_engine(student_llm, strategy, options.get("votes"))
        options |= {"llm": llm, "public_inputs": public_inputs, "check": early_check(student, wanted, shown)}
        labeler = PromptPATELabeler.from_private_examples(private, **options)
        labeler.run(progress=progress)
        return run_sync(cls._from(labeler, student, wanted, shown, progress))

    @classmethod
    async def afrom_private_examples(
        cls,
        private: PrivateExamples,
        *,
        llm: Any,
        public_inputs: Any,
        student_llm: Any = None,
        num_shots: int = 4,
        num_candidates: int = 20,
        num_validation: int = 50,
        seed: int = 0,
        calibrate_student: bool | None = None,
        strategy: StrategyName = "validated",
        strategy_options: Mapping[str, Any] | None = None,
        escape_braces: bool = False,
        progress: bool | None = None,
        **options: Any,
    ) -> Self:
        """Asynchronous version of `from_private_examples`; the teachers of one input are asked concurrently."""
        shown, options = split_options(strategy, escape_braces, strategy_options, options)
        wanted = StudentOptions(num_shots, num_candidates, num_validation, seed, calibrate_student)
        student = await asyncio.to_thread(student_engine, student_llm, strategy, options.get("votes"))
        options |= {"llm": llm, "public_inputs": public_inputs, "check": early_check(student, wanted, shown)}
        labeler = await PromptPATELabeler.afrom_private_examples(private, **options)
        await labeler.arun(progress=progress)
        return await run_async(cls._from(labeler, student, wanted, shown, progress))

    @classmethod
    def from_labeler(
        cls,
        labeler: PromptPATELabeler,
        *,
        student_llm: Any = None,
        num_shots: int = 4,
        num_candidates: int = 20,
        num_validation: int = 50,
        seed: int = 0,
        calibrate_student: bool | None = None,
        strategy: StrategyName = "validated",
        strategy_options: Mapping[str, Any] | None = None,
        escape_braces: bool = False,
        progress: bool | None = None,
    ) -> Self:
        """Returns a selector over the labels that a labeler has released so far; charges nothing.

        For interrupted labelers, and for inspecting labels before the search. Arguments and errors as for
        `from_private_examples`.

        Args:
          labeler: the labeler; the selector keeps it for `add_example`.
          student_llm: the model that the prompt is for; by default the teachers'.
          num_shots: demonstrations of the student's prompt.
          num_candidates: prompts to score.
          num_validation: labelled inputs that are held back to score them on.
          seed: public; selects the candidates.
          calibrate_student: whether the student is calibrated contextually.
          strategy: see the class.
          strategy_options: options of the strategy.
          escape_braces: see the class.
          progress: True shows bars, False hides them, None shows them on a terminal only.
        """
        shown = check_selection(strategy, escape_braces, strategy_options)
        wanted = StudentOptions(num_shots, num_candidates, num_validation, seed, calibrate_student)
        student = student_engine(student_llm, strategy, labeler.task.votes)
        return run_sync(cls._from(labeler, student, wanted, shown, progress))

    @classmethod
    async def afrom_labeler(cls, labeler: PromptPATELabeler, **options: Any) -> Self:
        """Asynchronous version of `from_labeler`, in a thread: it makes no private call."""
        return await asyncio.to_thread(cls.from_labeler, labeler, **options)

    @classmethod
    def _from(
        cls,
        labeler: PromptPATELabeler,
        llm: Any,
        wanted: StudentOptions,
        shown: Mapping[str, Any],
        progress: bool | None,
    ) -> EffectGenerator[Self]:
        """Builds the selector over a labeler's pool and searches the student's prompt (an effect generator)."""

        def make() -> Any:
            return cls(labeler.pool, labeler=labeler, **shown)

        failure = ""
        with carrying(labeler=labeler):
            selector: Self = yield Call(make, lambda: run_in_thread(make, is_slow=labeler.may_wait))
            if selector.is_searched():
                options = {"progress": progress, **wanted.as_options()}
                try:
                    yield Call(
                        partial(selector.choose_student, llm, **options),
                        partial(selector.achoose_student, llm, **options),
                    )
                except ModelCallError as error:
                    failure = str(error)
        check_searched(failure, labeler)
        return selector
