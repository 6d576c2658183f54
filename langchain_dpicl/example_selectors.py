"""PromptPATEExampleSelector: demonstrations from labels that private teachers released (Duan et al. 2023).

Holds a labelled pool, which is public, and what selects from it. Private examples only pass through
`from_private_examples` to the labeler, an opaque handle that `add_example` charges. Knows no record, row or noise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any, Self

from langchain_dpicl._pool_selector import PoolSelector
from langchain_dpicl._selector_options import (
    StudentOptions,
    carrying,
    check_searched,
    check_selection,
    early_check,
    probed,
    split,
)
from langchain_dpicl._strategies import StrategyName
from langchain_dpicl.backends.aside import aside
from langchain_dpicl.exceptions import ModelCallError
from langchain_dpicl.labelling import PromptPATELabeler
from langchain_dpicl.privacy.examples import PrivateExamples


class PromptPATEExampleSelector(PoolSelector):
    r"""Selects demonstrations that private prompts have taught: public inputs with labels released under DP.

    Private records become teacher prompts, which vote on the labels of public inputs; noise decides. Some of the inputs
    that got a label make student prompts, the others tell which prompt is best. Everything after the labels is
    post-processing: selecting, scoring, saving and formatting cost nothing.

    Formal guarantees:
      - What a selector holds and gives is a function of public values and of labels released by its
        `PromptPATELabeler`, whose share of the budget bounds all of them together.
      - Only `from_private_examples` and `add_example` charge anything.

    Drop it into `FewShotPromptTemplate` or `FewShotChatMessagePromptTemplate`. Stock string templates run what they
    show through the formatter a second time and fail on braces in an input: take `escape_braces=True` there and only
    there, or `DPFewShotPromptTemplate`, which needs no escape.

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
          llm: the teachers' model. It SEES the private prompts.
          public_inputs: what is labelled: texts, documents, or dicts of fields; see `PromptPATELabeler`.
          student_llm: the model that the prompt is for; by default `llm`. It sees public text only.
          num_shots: demonstrations of the student's prompt.
          num_candidates: prompts that are tried.
          num_validation: labelled inputs that are held back to try them on, at most half of those with a label. The
            search makes up to `num_candidates * num_validation` public calls.
          seed: public, of the choice of candidates: it moves no noise and no sample.
          calibrate_student: whether the student is calibrated contextually; None: see `DPVotingRunnable`.
          strategy: see the class; only for "validated" a prompt is searched for.
          strategy_options: options of the strategy, see the class; all but `example_prompt` may stand beside the others
            as well.
          escape_braces: see the class.
          progress: True shows bars, False hides them, None shows them on a terminal only.
          options: what `PromptPATELabeler.from_private_examples` takes: budget, epsilon, wording, teachers, mechanism,
            shape of rows, component, checkpoint.

        Raises:
          ConfigurationError: a public fault; nothing was charged and no private call was made.
          PrivacyBudgetError: no budget, another budget, or one that does not suffice.
          LabellingInterruptedError: a public call failed half-way; `error.labeler` holds the labels so far, and goes
            on: `error.labeler.run()`, then `from_labeler`.

        Source: Duan et al. (2023), Flocks of Stochastic Parrots; docs/prompt-pate.md says what differs, and why.
        """
        shown, options = split(strategy, escape_braces, strategy_options, options)
        wanted = StudentOptions(num_shots, num_candidates, num_validation, seed, calibrate_student)
        student = probed(student_llm, strategy, options.get("votes"))
        options |= {"llm": llm, "public_inputs": public_inputs, "check": early_check(student, wanted, shown)}
        labeler = PromptPATELabeler.from_private_examples(private, **options)
        labeler.run(progress=progress)
        return cls._from(labeler, student, wanted, shown, progress)

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
        """Is `from_private_examples`, awaitable; the teachers of one input are asked concurrently."""
        shown, options = split(strategy, escape_braces, strategy_options, options)
        wanted = StudentOptions(num_shots, num_candidates, num_validation, seed, calibrate_student)
        student = await asyncio.to_thread(probed, student_llm, strategy, options.get("votes"))
        options |= {"llm": llm, "public_inputs": public_inputs, "check": early_check(student, wanted, shown)}
        labeler = await PromptPATELabeler.afrom_private_examples(private, **options)
        await labeler.arun(progress=progress)
        return await cls._afrom(labeler, student, wanted, shown, progress)

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
        """Returns the selector over what a labeler has released so far; charges nothing.

        For labelers that were interrupted, and for those who want to look at the labels first. Arguments and errors
        as for `from_private_examples`.

        Args:
          labeler: who released the labels; the selector keeps it for `add_example`.
          student_llm: the model that the prompt is for; by default the teachers'.
          num_shots: demonstrations of the student's prompt.
          num_candidates: prompts that are tried.
          num_validation: labelled inputs that are held back to try them on.
          seed: public, of the choice of candidates.
          calibrate_student: whether the student is calibrated contextually.
          strategy: see the class.
          strategy_options: options of the strategy.
          escape_braces: see the class.
          progress: True shows bars, False hides them, None shows them on a terminal only.
        """
        shown = check_selection(strategy, escape_braces, strategy_options)
        wanted = StudentOptions(num_shots, num_candidates, num_validation, seed, calibrate_student)
        return cls._from(labeler, probed(student_llm, strategy, labeler.task.votes), wanted, shown, progress)

    @classmethod
    async def afrom_labeler(cls, labeler: PromptPATELabeler, **options: Any) -> Self:
        """Is `from_labeler`, awaitable, in a thread: it asks nothing private."""
        return await asyncio.to_thread(cls.from_labeler, labeler, **options)

    @classmethod
    def _of(cls, labeler: PromptPATELabeler, **shown: Any) -> Self:
        return cls(labeler.pool, labeler=labeler, **shown)

    @classmethod
    def _from(
        cls,
        labeler: PromptPATELabeler,
        llm: Any,
        wanted: StudentOptions,
        shown: Mapping[str, Any],
        progress: bool | None,
    ) -> Self:
        failure = ""
        with carrying(labeler):
            selector = cls._of(labeler, **shown)
            if selector.is_searched():
                try:
                    selector.choose_student(llm, progress=progress, **wanted.as_options())
                except ModelCallError as error:
                    failure = str(error)
        check_searched(failure, labeler)
        return selector

    @classmethod
    async def _afrom(
        cls,
        labeler: PromptPATELabeler,
        llm: Any,
        wanted: StudentOptions,
        shown: Mapping[str, Any],
        progress: bool | None,
    ) -> Self:
        failure = ""
        with carrying(labeler):
            make = partial(cls._of, labeler, **shown)
            selector = await aside(make, is_slow=labeler.may_wait)
            if selector.is_searched():
                try:
                    await selector.achoose_student(llm, progress=progress, **wanted.as_options())
                except ModelCallError as error:
                    failure = str(error)
        check_searched(failure, labeler)
        return selector
