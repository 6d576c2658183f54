"""Selects demonstrations among public inputs whose labels private teachers released (Duan et al. 2023)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any, Self

from langchain_dpicl._pool_selector import PoolSelector
from langchain_dpicl._progress import carrying
from langchain_dpicl._selector_options import (
    StudentOptions,
    check_searched,
    check_selection,
    early_check,
    probed,
    split,
)
from langchain_dpicl._strategies import StrategyName
from langchain_dpicl.backends.aside import aside
from langchain_dpicl.backends.walk import Call, Walk, adrive, drive
from langchain_dpicl.exceptions import ModelCallError
from langchain_dpicl.labelling import PromptPATELabeler
from langchain_dpicl.privacy.examples import PrivateExamples


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
        shown, options = split(strategy, escape_braces, strategy_options, options)
        wanted = StudentOptions(num_shots, num_candidates, num_validation, seed, calibrate_student)
        student = probed(student_llm, strategy, options.get("votes"))
        options |= {"llm": llm, "public_inputs": public_inputs, "check": early_check(student, wanted, shown)}
        labeler = PromptPATELabeler.from_private_examples(private, **options)
        labeler.run(progress=progress)
        return drive(cls._from(labeler, student, wanted, shown, progress))

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
        shown, options = split(strategy, escape_braces, strategy_options, options)
        wanted = StudentOptions(num_shots, num_candidates, num_validation, seed, calibrate_student)
        student = await asyncio.to_thread(probed, student_llm, strategy, options.get("votes"))
        options |= {"llm": llm, "public_inputs": public_inputs, "check": early_check(student, wanted, shown)}
        labeler = await PromptPATELabeler.afrom_private_examples(private, **options)
        await labeler.arun(progress=progress)
        return await adrive(cls._from(labeler, student, wanted, shown, progress))

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
        student = probed(student_llm, strategy, labeler.task.votes)
        return drive(cls._from(labeler, student, wanted, shown, progress))

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
    ) -> Walk[Self]:
        """Builds the selector over a labeler's pool and searches the student's prompt (a walk)."""

        def make() -> Any:
            return cls(labeler.pool, labeler=labeler, **shown)

        failure = ""
        with carrying(labeler=labeler):
            selector: Self = yield Call(make, lambda: aside(make, is_slow=labeler.may_wait))
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
