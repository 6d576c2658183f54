"""The base class of selectors over a labelled pool: selects, escapes and adds examples."""

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

from langchain_dpicl._constructing import tells_how_to_build
from langchain_dpicl._selector_options import (
    DEFAULT_K,
    StudentOptions,
    StudentWork,
    asked_values,
    balanced,
    check_selection,
    completed,
    labeler_of,
    made,
    public_entry,
    student_of,
    task_of,
    text_of,
)
from langchain_dpicl._strategies import Strategy, StrategyName
from langchain_dpicl.backends.aside import aside
from langchain_dpicl.backends.walk import Call, Walk, adrive, drive
from langchain_dpicl.callbacks import shown_left
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.labelled_pool import LabelledPool, PoolEntry
from langchain_dpicl.labelling import PromptPATELabeler
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.student import StudentChoice


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
        self._options = completed(shown, pool)
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
        return self._escaped(self._labels.examples)

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
        return self._escaped(self._strategy.select(asked_values(input_variables, self._options, self._labels)))

    async def aselect_examples(self, input_variables: dict[str, str]) -> list[dict[str, str]]:
        """Asynchronous version of `select_examples`."""
        values = asked_values(input_variables, self._options, self._labels)
        return self._escaped(await self._strategy.aselect(values))

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
        return drive(self._grow(example))

    async def aadd_example(self, example: dict[str, str]) -> str | None:
        """Asynchronous version of `add_example`."""
        return await adrive(self._grow(example))

    def add_public_example(self, example: Mapping[str, str]) -> None:
        """Adds an example with a public label; free.

        Args:
          example: its fields, and its label (or the label's text) under the label's key. Must not come from the
            private records.

        Raises:
          ConfigurationError: no such label, other fields than the pool's, or an input that is in the pool already.
        """
        drive(self._learn(public_entry(self._labels, example)))

    async def aadd_public_example(self, example: Mapping[str, str]) -> None:
        """Asynchronous version of `add_public_example`."""
        await adrive(self._learn(public_entry(self._labels, example)))

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
        return drive(self._search(llm, StudentOptions(calibrate=calibrate, **numbers), progress))

    async def achoose_student(
        self, llm: Any = None, *, calibrate: bool | None = None, progress: bool | None = None, **numbers: int
    ) -> StudentChoice:
        """Asynchronous version of `choose_student`."""
        return await adrive(self._search(llm, StudentOptions(calibrate=calibrate, **numbers), progress))

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

    def _search(self, llm: Any, wanted: StudentOptions, progress: bool | None) -> Walk[StudentChoice]:
        """Searches the best prompt and stores it (a walk)."""
        probe = partial(StudentWork.of, self._model(llm), *task_of(self._labels), wanted)
        work: StudentWork = yield Call(probe, partial(asyncio.to_thread, probe))
        choice = yield from work.choose(self._labels, wanted, progress=progress)
        yield self._change(partial(self._keep, choice))
        return choice

    def _grow(self, example: dict[str, str]) -> Walk[str | None]:
        """Adds an example with the label of the teachers (a walk)."""
        if (public_one := self._given(example)) is not None:
            return public_one.label
        teachers = self._teachers()
        entry: PoolEntry = yield Call(partial(teachers.label, example), partial(teachers.alabel, example))
        yield from self._learn(entry)
        return entry.label

    def _learn(self, entry: PoolEntry) -> Walk[None]:
        """Puts an entry into the pool and, if it is a new example, into the strategy (a walk)."""
        news = yield self._change(partial(self._adopt, entry))
        if news is not None:
            yield Call(partial(self._strategy.add, *news), partial(self._strategy.aadd, *news))

    def _change(self, action: Callable[[], Any]) -> Call:
        """Returns the call of a change to the pool, which may wait for the labeler's ledger."""
        return Call(action, lambda: aside(action, is_slow=self._may_wait))

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
            places = balanced(self._labels, self._options.get("k", DEFAULT_K))
            chosen = [shown.index(place) for place in places]
        else:
            chosen = [shown.index(place) for place in self._student.demonstrations]
        texts = [text_of(self._labels.entries[place]) for place in shown]
        return made(self._options, self._labels.examples, texts, chosen)

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

    def _escaped(self, examples: list[dict[str, str]]) -> list[dict[str, str]]:
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
        queries_left = shown_left(lambda: self.queries_left)
        return f"{type(self).__name__}(strategy={strategy!r}, examples={count}, queries_left={queries_left})"
