"""Few-shot prompt templates that carry released demonstrations and their report."""

from __future__ import annotations

import asyncio
import copy
import math
import os
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn, Self

from langchain_core.example_selectors import BaseExampleSelector
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from langchain_core.prompts import FewShotChatMessagePromptTemplate, FewShotPromptTemplate
from langchain_core.prompts.string import get_template_variables
from langchain_core.runnables import RunnableConfig
from langchain_core.utils.formatting import formatter
from pydantic import ConfigDict, Field, model_validator
from typing_extensions import override

from langchain_dpicl._construction import HidesInput
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import check_int, fail
from langchain_dpicl.released.base import epsilon_of
from langchain_dpicl.released.demonstrations import ReleasedDemonstrations

if TYPE_CHECKING:
    from langchain_dpicl.evolution.evolution import PrivateEvolution
    from langchain_dpicl.generation.synthesizer import DemonstrationSynthesizer
    from langchain_dpicl.privacy.data.private_examples import PrivateExamples


TEMPLATE_CONFIG = ConfigDict(arbitrary_types_allowed=True, extra="forbid", hide_input_in_errors=True)
_EVOLUTION = "private_evolution"  # `evolution.plan.MECHANISM`, whose import would load the accountants
_FROM_THE_RELEASE = ("examples", "example_selector", "privacy_report", "plan")
# Options of `from_private_examples` for the template; all others go to the synthesizer.
_TEMPLATE_OPTIONS = (
    "example_separator",
    "input_types",
    "input_variables",
    "metadata",
    "optional_variables",
    "output_parser",
    "partial_variables",
    "tags",
    "template_format",
    "validate_template",
)


class ReleasedPrompt(HidesInput):
    """Base of both templates: the release they carry, and how to build them."""

    examples: list[dict[str, Any]] | None = None
    """Released demonstrations: field name to text."""

    example_selector: BaseExampleSelector | None = None
    """Instead of `examples`: a selector, as in the stock class. The template's report does not cover its selections."""

    privacy_report: dict[str, Any] = Field(default_factory=dict, repr=False)
    """Public privacy report of the demonstrations; empty for a template built by hand."""

    plan: dict[str, Any] = Field(default_factory=dict, repr=False)
    """Public plan of the release; empty for a template built by hand."""

    model_config = TEMPLATE_CONFIG

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Refuses templating languages that can run code; then as the stock class."""
        _refuse_other_formats(kwargs.get("template_format", "f-string"), kwargs.get("example_prompt"))
        super().__init__(*args, **kwargs)
        if self.privacy_report:
            epsilon_of(self.privacy_report)
            if self.example_selector is not None:
                raise ConfigurationError(
                    "privacy_report: expected none beside an example_selector (the report covers `examples` only)."
                )

    @model_validator(mode="before")
    @classmethod
    def _forget_cached_properties(cls, values: dict[str, Any]) -> dict[str, Any]:
        # Stock `partial` rebuilds from `__dict__`, where `invoke` has cached `_serialized`, which is not a field.
        return {key: value for key, value in values.items() if key != "_serialized"}

    @property
    def epsilon(self) -> float:
        """Upper bound on epsilon of the demonstrations, or the selector's `epsilon`; else `math.inf`."""
        if self.privacy_report:
            return epsilon_of(self.privacy_report)
        return float(getattr(self.example_selector, "epsilon", math.inf))

    @property
    def released(self) -> ReleasedDemonstrations:
        """The demonstrations with report and plan, to save or to build another template."""
        if not self.privacy_report:
            raise ConfigurationError(
                "released: expected a template with a privacy report, found none. Build it with from_released or "
                "from_private_examples."
            )
        return ReleasedDemonstrations(tuple(self._list_examples()), self.privacy_report, self.plan)

    def save_released(self, path: str | os.PathLike[str]) -> None:
        """Writes demonstrations, report and plan as plain JSON; `from_released(path, ...)` reads it.

        Args:
          path: file to create or replace.

        Raises:
          ConfigurationError: there is no release to save.
          OSError: the file cannot be written.
        """
        self.released.save(path)

    def save(self, file_path: object) -> NoReturn:
        """Always raises ConfigurationError: stock files drop the privacy report and load as a stock class."""
        raise ConfigurationError(
            f"save: expected save_released, which keeps the privacy report, found save (path {file_path!r}); "
            "use save_released and from_released."
        )

    def with_shots(self, n_per_label: int, *, label_key: str | None = None) -> Self:
        """Returns a template with the first demonstrations of each label.

        Formal guarantees:
          - Post-processing of the release: free; `privacy_report` (the cost of the whole release) is unchanged.

        Args:
          n_per_label: demonstrations to keep per label; at most those released.
          label_key: field that holds the label; by default `plan["label_key"]`. If that is None, all
            demonstrations count as one label.

        Raises:
          ConfigurationError: the label field is unknown, or there is no example list.
        """
        check_int("n_per_label", n_per_label, low=0)
        examples = self._list_examples()
        key = self.plan.get("label_key") if label_key is None else label_key
        if (key is None and "label_key" not in self.plan) or not all(key is None or key in e for e in examples):
            raise ConfigurationError(f"label_key: expected a field of every demonstration, found {key!r}.")
        seen: Counter[Any] = Counter()
        shown = []
        for example in examples:
            label = None if key is None else example[key]
            seen[label] += 1
            if seen[label] <= n_per_label:
                shown.append(example)
        return self._rebuilt(examples=shown)

    def with_released(self, released: ReleasedDemonstrations) -> Self:
        """Returns the same template over another release, with that release's report and plan.

        Args:
          released: demonstrations that have every variable of `example_prompt`.

        Raises:
          ConfigurationError: a demonstration lacks a variable.
        """
        wanted = set(vars(self)["example_prompt"].input_variables)
        for example in released.examples:
            if missing := sorted(wanted - set(example)):
                raise ConfigurationError(
                    f"example_prompt: expected variables among the released fields {sorted(example)}, found {missing}."
                )
        return self._rebuilt(
            examples=list(released.examples),
            privacy_report=copy.deepcopy(dict(released.report)),
            plan=copy.deepcopy(dict(released.plan)),
            example_selector=None,
        )

    @classmethod
    def from_released(
        cls,
        released: ReleasedDemonstrations | str | os.PathLike[str],
        *,
        example_prompt: Any,
        prefix: str = "",
        suffix: str | None = None,
        **template_options: Any,
    ) -> Self:
        """Builds the template from a release, or from a file written by `save_released`.

        Args:
          released: the demonstrations, or the path of their file.
          example_prompt: template of one demonstration; its variables are fields of the demonstrations.
          prefix: public text before the demonstrations; an f-string template.
          suffix: public text after them, with the query's variable (required by the string template).
          template_options: other fields of the stock class, such as `example_separator` or `partial_variables`.

        Raises:
          ConfigurationError: a template argument is unusable, or the file is not what `save_released` writes.
        """
        template = cls._without_examples(example_prompt, prefix, suffix, template_options)
        if not isinstance(released, ReleasedDemonstrations):
            released = ReleasedDemonstrations.load(released)
        return template.with_released(released)

    @classmethod
    def from_private_examples(
        cls,
        private: PrivateExamples,
        *,
        llm: Any,
        example_prompt: Any,
        suffix: str | None = None,
        prefix: str = "",
        budget: Any = None,
        epsilon: float | None = None,
        instruction: str | None = None,
        config: RunnableConfig | None = None,
        progress: bool | None = None,
        **options: Any,
    ) -> Self:
        """Generates demonstrations from private examples, charges the budget, and returns the template that shows them.

        Formal guarantees:
          - The template holds released demonstrations and public arguments; nothing else of `private`.
          - Every template argument is checked before the budget is touched.

        Args:
          private: the examples; bound to the budget's ledger. The model `llm` SEES their text, except with
            `mechanism="private_evolution"`.
          llm: an engine, or a LangChain model with token log-probabilities; best a local one. With
            `mechanism="private_evolution"` any model that writes text, which then sees no private text.
          example_prompt: template of one demonstration; its variables are among `private.fields`.
          suffix: public text after the demonstrations, with the query's variable (required by the string template).
          prefix: public text before the demonstrations.
          budget: where to charge; otherwise looked up in `config`, then in the context.
          epsilon: share of the budget to spend here.
          instruction: public task description for generation.
          config: a RunnableConfig whose callbacks may hold the budget.
          progress: True shows a bar, False hides it, None shows it on a terminal only.
          options: fields of the stock template (`example_separator`, ...); all others are generation options of
            `DemonstrationSynthesizer.from_private_examples` (`shots_per_label`, `max_tokens`, `mechanism`, ...), or,
            with `mechanism="private_evolution"`, of `PrivateEvolution.from_private_examples` (`rounds`, `embeddings`).

        Raises:
          ConfigurationError: a public argument is out of range; nothing was spent.
          PrivacyBudgetError: no budget, another budget, or one that does not suffice.
          SynthesisInterruptedError: the model failed; continue with `from_synthesizer(error.synthesizer, ...)`.
        """
        options |= {"budget": budget, "epsilon": epsilon, "instruction": instruction, "config": config}
        template, generation = cls._checked(private, example_prompt, (prefix, suffix), options)
        synthesizer = _synthesizer(private, llm, example_prompt, generation)
        return template.with_released(synthesizer.run(progress=progress))

    @classmethod
    async def afrom_private_examples(
        cls,
        private: PrivateExamples,
        *,
        llm: Any,
        example_prompt: Any,
        suffix: str | None = None,
        prefix: str = "",
        budget: Any = None,
        epsilon: float | None = None,
        instruction: str | None = None,
        config: RunnableConfig | None = None,
        progress: bool | None = None,
        **options: Any,
    ) -> Self:
        """Async version of `from_private_examples`; the rows of one token are scored concurrently.

        A LangChain model is probed in a thread, so that the event loop is not blocked.
        """
        from langchain_dpicl.budget.events import await_refusals
        from langchain_dpicl.budget.handler import may_wait

        options |= {"budget": budget, "epsilon": epsilon, "instruction": instruction, "config": config}
        template, generation = cls._checked(private, example_prompt, (prefix, suffix), options)
        engine, generation = await asyncio.to_thread(_probe_engine, llm, generation)
        synthesizer = await await_refusals(
            lambda: _synthesizer(private, engine, example_prompt, generation),
            config,
            is_slow=may_wait(budget, config),
        )
        return template.with_released(await synthesizer.arun(progress=progress))

    @classmethod
    def from_synthesizer(
        cls,
        synthesizer: DemonstrationSynthesizer | PrivateEvolution,
        *,
        example_prompt: Any,
        prefix: str = "",
        suffix: str | None = None,
        progress: bool | None = None,
        **template_options: Any,
    ) -> Self:
        """Runs or continues a synthesizer and returns the template.

        Args:
          synthesizer: a `DemonstrationSynthesizer` or `PrivateEvolution`, also one of a `SynthesisInterruptedError`.
          example_prompt: template of one demonstration.
          prefix: public text before the demonstrations.
          suffix: public text after them, with the query's variable (required by the string template).
          progress: True shows a bar, False hides it, None shows it on a terminal only.
          template_options: other fields of the stock class.

        Raises:
          ConfigurationError: a template argument is unusable; checked before anything runs.
          SynthesisInterruptedError: the model failed again; what was released is kept.
        """
        template = cls._without_examples(example_prompt, prefix, suffix, template_options)
        return template.with_released(synthesizer.run(progress=progress))

    @classmethod
    async def afrom_synthesizer(
        cls,
        synthesizer: DemonstrationSynthesizer | PrivateEvolution,
        *,
        example_prompt: Any,
        prefix: str = "",
        suffix: str | None = None,
        progress: bool | None = None,
        **template_options: Any,
    ) -> Self:
        """Async version of `from_synthesizer`."""
        template = cls._without_examples(example_prompt, prefix, suffix, template_options)
        return template.with_released(await synthesizer.arun(progress=progress))

    # -- inside ----------------------------------------------------------------------------------------------------

    @classmethod
    def _without_examples(cls, example_prompt: Any, prefix: str, suffix: str | None, options: dict[str, Any]) -> Self:
        """Returns the template without demonstrations, so that its arguments are checked before anything is spent."""
        _refuse_release_fields(options)
        if not hasattr(example_prompt, "input_variables"):
            raise fail("example_prompt", "a prompt template", type(example_prompt).__name__)
        ends = {"prefix": prefix} if suffix is None else {"prefix": prefix, "suffix": suffix}
        return cls(examples=[], example_prompt=example_prompt, **ends, **options)

    @classmethod
    def _checked(
        cls, private: PrivateExamples, example_prompt: Any, ends: tuple[str, str | None], options: dict[str, Any]
    ) -> tuple[Self, dict[str, Any]]:
        """Returns the checked template without demonstrations, and the generation options."""
        _refuse_release_fields(options)
        own = {key: value for key, value in options.items() if key in _TEMPLATE_OPTIONS}
        generation = {key: value for key, value in options.items() if key not in _TEMPLATE_OPTIONS}
        template = cls._without_examples(example_prompt, *ends, own)
        _check_variables(example_prompt, private)
        return template, generation

    def _rebuilt(self, **changes: Any) -> Self:
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**(fields | changes))

    def _list_examples(self) -> list[dict[str, Any]]:
        if self.examples is None:
            raise ConfigurationError("examples: expected a list of released demonstrations, found an example selector.")
        return self.examples


# Imported inside: a released template loads neither models nor accountants.
def _probe_engine(llm: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Probes the model in public and returns the engine and the options."""
    if options.get("mechanism") == _EVOLUTION:
        from langchain_dpicl.backends.private_calls.embeddings import SilentEmbeddings

        embeddings = options.get("embeddings")
        probed = (
            {}
            if embeddings is None or isinstance(embeddings, SilentEmbeddings)
            else {"embeddings": SilentEmbeddings(embeddings)}
        )
        return llm, {**options, **probed}
    from langchain_dpicl.backends.resolve import as_backend

    return as_backend(llm), options


def _synthesizer(
    private: PrivateExamples, llm: Any, example_prompt: Any, options: dict[str, Any]
) -> DemonstrationSynthesizer | PrivateEvolution:
    if options.get("mechanism") == _EVOLUTION:
        from langchain_dpicl.evolution.evolution import PrivateEvolution

        others = {key: value for key, value in options.items() if key != "mechanism"}
        return PrivateEvolution.from_private_examples(private, llm=llm, example_prompt=example_prompt, **others)
    from langchain_dpicl.generation.synthesizer import DemonstrationSynthesizer

    return DemonstrationSynthesizer.from_private_examples(private, llm=llm, example_prompt=example_prompt, **options)


def _refuse_release_fields(options: dict[str, Any]) -> None:
    if refused := sorted(set(options) & set(_FROM_THE_RELEASE)):
        raise ConfigurationError(f"{refused}: expected none of these here; they come with the release.")


def _refuse_other_formats(template_format: object, example_prompt: object) -> None:
    """Refuses jinja2 and mustache, which read attributes or run code, anywhere in a template."""
    for language in (template_format, *_formats_in(example_prompt)):
        if language != "f-string":
            raise ConfigurationError(
                f"template_format: expected 'f-string', found {language!r}. Rewrite {{{{ name }}}} as {{name}}."
            )


def _formats_in(template: object) -> Iterator[object]:
    """Yields the template formats used in a (chat) template, whatever its nesting."""
    if isinstance(template, (list, tuple)):
        for part in template:
            yield from _formats_in(part)
        return
    if (language := getattr(template, "template_format", None)) is not None:
        yield language
    for name in ("messages", "prompt", "example_prompt"):
        if (inner := getattr(template, name, None)) is not None:
            yield from _formats_in(inner)


def _check_variables(example_prompt: Any, private: PrivateExamples) -> None:
    """Refuses an object without declared fields (without showing it), and variables that are not fields."""
    fields = getattr(private, "fields", None)
    if not isinstance(fields, (tuple, list, frozenset)):
        raise ConfigurationError(f"private: expected PrivateExamples, found {type(private).__name__}.")
    if unknown := sorted(set(example_prompt.input_variables) - set(fields)):
        raise ConfigurationError(
            f"example_prompt: expected variables among the declared fields {sorted(fields)}, found {unknown}."
        )


class DPFewShotPromptTemplate(ReleasedPrompt, FewShotPromptTemplate):
    r"""A `FewShotPromptTemplate` over released demonstrations, with their privacy report.

    Works as the stock class, except: braces in demonstrations and queries are kept (the stock class formats them a
    second time), `example_separator` is not formatted, `partial` also works after an `invoke`, and only f-string
    templates are accepted.

    Formal guarantees:
      - Formatting reads released demonstrations and the caller's own values only, so it costs nothing.

    Raises:
      ConfigurationError: a template is not an f-string template, or the privacy report is malformed.

    Example:
      >>> from langchain_core.prompts import PromptTemplate
      >>> prompt = DPFewShotPromptTemplate(
      ...     examples=[{"text": "where is {it}?", "queue": "delivery"}],
      ...     example_prompt=PromptTemplate.from_template("Ticket: {text}\nQueue: {queue}"),
      ...     suffix="Ticket: {input}\nQueue:",
      ... )
      >>> print(prompt.format(input="{"))
      Ticket: where is {it}?
      Queue: delivery
      <BLANKLINE>
      Ticket: {
      Queue:
    """

    model_config = TEMPLATE_CONFIG

    @override
    def format(self, **kwargs: Any) -> str:
        values = self._merge_partial_and_user_variables(**kwargs)
        shown = [self.example_prompt.format(**self._fields_of(e)) for e in self._get_examples(**values)]
        return self._joined(shown, values)

    @override
    async def aformat(self, **kwargs: Any) -> str:
        values = self._merge_partial_and_user_variables(**kwargs)
        examples = await self._aget_examples(**values)
        shown = [await self.example_prompt.aformat(**self._fields_of(e)) for e in examples]
        return self._joined(shown, values)

    @property
    def _prompt_type(self) -> str:
        return "dp_few_shot"

    def _fields_of(self, example: dict[str, Any]) -> dict[str, Any]:
        return {name: example[name] for name in self.example_prompt.input_variables}

    def _joined(self, shown: list[str], values: dict[str, Any]) -> str:
        # As in the stock class, an empty template adds no separator, but one that formats to "" does.
        prefix = [formatter.format(self.prefix, **values)] if self.prefix else []
        suffix = [formatter.format(self.suffix, **values)] if self.suffix else []
        return self.example_separator.join([*prefix, *(text for text in shown if text), *suffix])


class DPFewShotChatMessagePromptTemplate(ReleasedPrompt, FewShotChatMessagePromptTemplate):
    """A `FewShotChatMessagePromptTemplate` over released demonstrations, with their privacy report.

    Works as the stock class: alone it formats the demonstrations' messages, inside a `ChatPromptTemplate` it is one of
    the parts. With `prefix` (a system message) and `suffix` (a human message) it is a complete prompt.

    Formal guarantees:
      - Formatting reads released demonstrations and the caller's own values only, so it costs nothing.

    Raises:
      ConfigurationError: a template is not an f-string template, or the privacy report is malformed.
    """

    prefix: str = ""
    """Template of a system message before the demonstrations; empty: none."""

    suffix: str = ""
    """Template of a human message after the demonstrations; empty: none."""

    model_config = TEMPLATE_CONFIG

    @model_validator(mode="after")
    def _infer_input_variables(self) -> Self:
        used = set(get_template_variables(self.prefix, "f-string")) | set(
            get_template_variables(self.suffix, "f-string")
        )
        self.input_variables = sorted((used | set(self.input_variables)) - set(self.partial_variables))
        return self

    @override
    def format_messages(self, **kwargs: Any) -> list[BaseMessage]:
        values = self._merge_partial_and_user_variables(**kwargs)
        return self._frame(super().format_messages(**values), values)

    @override
    async def aformat_messages(self, **kwargs: Any) -> list[BaseMessage]:
        values = self._merge_partial_and_user_variables(**kwargs)
        return self._frame(await super().aformat_messages(**values), values)

    @property
    def _prompt_type(self) -> str:
        return "dp_few_shot_chat"

    def _frame(self, shown: list[BaseMessage], values: dict[str, Any]) -> list[BaseMessage]:
        system = [SystemMessage(formatter.format(self.prefix, **values))] if self.prefix else []
        human = [HumanMessage(formatter.format(self.suffix, **values))] if self.suffix else []
        return [*system, *shown, *human]
