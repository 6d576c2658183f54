"""Few-shot prompt templates that carry released demonstrations and their report."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, TypedDict, Unpack, cast

from langchain_core.example_selectors import BaseExampleSelector
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import BaseOutputParser
from langchain_core.prompts import (
    BasePromptTemplate,
    ChatPromptTemplate,
    FewShotChatMessagePromptTemplate,
    FewShotPromptTemplate,
    HumanMessagePromptTemplate,
    PromptTemplate,
    SystemMessagePromptTemplate,
)
from langchain_core.prompts.string import get_template_variables
from langchain_core.utils.formatting import formatter
from pydantic import ConfigDict, Field, model_validator
from typing_extensions import override

from langchain_dpicl._calls import did_you_mean, how_to_build
from langchain_dpicl._construction import HidesInput
from langchain_dpicl._templates import Template, formats_in
from langchain_dpicl.budget.handler import await_refusals
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import check_int, fail
from langchain_dpicl.released.base import epsilon_of
from langchain_dpicl.released.demonstrations import ReleasedDemonstrations
from langchain_dpicl.runs.door import awaits, door

if TYPE_CHECKING:
    from langchain_core.runnables import RunnableConfig

    from langchain_dpicl.budget.handler import BudgetLike
    from langchain_dpicl.generation.synthesizer import DemonstrationSynthesizer
    from langchain_dpicl.options import (
        LLM,
        Decoding,
        GenerationTask,
        LogitNoise,
        LogitNoiseName,
        Noise,
        NoiseName,
        Rows,
        TemplateLike,
        Where,
    )
    from langchain_dpicl.privacy.extensions.private_streams import RollingRange
    from langchain_dpicl.privacy.private_examples import PrivateExamples
    from langchain_dpicl.runs.release_run import ReleaseRun


TEMPLATE_CONFIG = ConfigDict(arbitrary_types_allowed=True, extra="forbid", hide_input_in_errors=True)
_FROM_THE_RELEASE = ("examples", "example_selector", "privacy_report", "plan")


class TemplateFields(TypedDict, total=False):
    """The fields of the stock classes that `from_run` and `from_released` take besides the template's text."""

    example_separator: str
    input_types: dict[str, Any]
    input_variables: list[str]
    metadata: dict[str, Any] | None
    optional_variables: list[str]
    output_parser: BaseOutputParser[Any] | None
    partial_variables: Mapping[str, Any]
    tags: list[str] | None
    template_format: Literal["f-string"]


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
        """Refuses templating languages that can run code, and says what LangChain refuses; then as the stock class."""
        _refuse_other_formats(kwargs.get("template_format", "f-string"), kwargs.get("example_prompt"))
        if "example_prompt" in kwargs:
            kwargs["example_prompt"] = self._example_template(kwargs["example_prompt"])
        known = type(self).model_fields
        if not args and not {"examples", "example_selector"} & set(kwargs):
            near = filter(None, [did_you_mean(name, known) for name in set(kwargs) - set(known)])
            advice = " ".join([*near, how_to_build(type(self))])
            raise fail("examples", "a list of demonstrations, or an example_selector", None, advice)
        for name in ("prefix", "suffix"):
            if "stop" in _variables_in(kwargs.get(name)):
                raise fail(name, "variables other than 'stop', which LangChain uses itself", "stop", "Rename it.")
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

    def save_released(self, path: Where) -> None:
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
          ConfigurationError: `released` is something else, or a demonstration lacks a variable.
        """
        if not isinstance(released, ReleasedDemonstrations):
            advice = "Read a file with ReleasedDemonstrations.load(path)."
            raise fail("released", "ReleasedDemonstrations", type(released).__name__, advice)
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

    @abstractmethod
    def to_stock(self) -> BasePromptTemplate[Any]:
        """Returns a stock template with the released demonstrations written out; LangChain can dump and load it.

        The privacy report stays here: keep `released` beside it.

        Raises:
          ConfigurationError: there is no example list.
        """

    @classmethod
    def from_released(
        cls,
        released: ReleasedDemonstrations | Where,
        *,
        example_prompt: TemplateLike,
        suffix: str | None = None,
        prefix: str = "",
        **template: Unpack[TemplateFields],
    ) -> Self:
        """Builds the template from a release, or from a file written by `save_released`.

        Args:
          released: the demonstrations, or the path of their file.
          example_prompt: template of one demonstration; its variables are fields of the demonstrations.
          suffix: public text after them, with the query's variable (required by the string template).
          prefix: public text before the demonstrations; an f-string template.
          template: other fields of the stock class, such as `example_separator` or `partial_variables`.

        Raises:
          ConfigurationError: a template argument is unusable, or the file is not what `save_released` writes.
        """
        made = cls._without_examples(example_prompt, prefix, suffix, template)
        if not isinstance(released, ReleasedDemonstrations):
            released = ReleasedDemonstrations.load(released)
        return made.with_released(released)

    @classmethod
    @door("DPFewShotPromptTemplate", streams=True)
    def from_private_examples(
        cls,
        private: PrivateExamples | RollingRange,
        *,
        llm: LLM,
        example_prompt: TemplateLike,
        suffix: str | None = None,
        prefix: str = "",
        budget: BudgetLike | None = None,
        epsilon: float | None = None,
        instruction: str | None = None,
        task: GenerationTask | None = None,
        shots_per_label: int = 1,
        max_tokens: int = 60,
        rows: Rows | None = None,
        noise: Noise | LogitNoise | NoiseName | LogitNoiseName | None = None,
        decoding: Decoding | None = None,
        component: str | None = None,
    ) -> Self:
        """Generates demonstrations from private examples, charges the budget, and returns the template that shows them.

        For other fields of the template, and for demonstrations of `PrivateEvolution`, see `from_run`.

        Formal guarantees:
          - The template holds released demonstrations and public arguments; nothing else of `private`.
          - Every template argument is checked before the budget is touched.

        Args:
          private: the examples; bound to the budget's ledger. The model `llm` SEES their text. Or a range of a stream:
            `stream.rolling(...)` makes the demonstrations of now, and the next call with the same `component` the next.
          llm: an engine, or a LangChain model with token log-probabilities; best a local one.
          example_prompt: template of one demonstration; its variables are among the fields that are generated.
          suffix: public text after the demonstrations, with the query's variable (required by the string template).
          prefix: public text before the demonstrations.
          budget: a PrivacyBudgetCallbackHandler, a Budget or a RunnableConfig that holds one; None: the context's.
          epsilon: share of the budget to spend here.
          instruction: public task description for generation.
          task: a `GenerationTask`: the wording of generation, and open labels.
          shots_per_label: demonstrations per label; their costs compose.
          max_tokens: cap of a demonstration's text, in tokens.
          rows: a `Rows`: how many prompts a token reads, of how many records, and how often they are drawn anew.
          noise: a `Noise`, a `LogitNoise`, or the name of a mechanism; None: "gumbel".
          decoding: a `Decoding`: candidates, stops, sampling, grammar.
          component: name in the ledger.

        Raises:
          ConfigurationError: a public argument is out of range; nothing was spent.
          PrivacyBudgetError: no budget, another budget, or one that does not suffice.
          RunInterruptedError: the model failed; continue with `from_run(error.run, ...)`.
        """
        made, run = cls._planned(
            private,
            example_prompt=example_prompt,
            suffix=suffix,
            prefix=prefix,
            llm=llm,
            budget=budget,
            epsilon=epsilon,
            instruction=instruction,
            task=task,
            shots_per_label=shots_per_label,
            max_tokens=max_tokens,
            rows=rows,
            noise=noise,
            decoding=decoding,
            component=component,
        )
        return made.with_released(run.run())

    @classmethod
    @awaits(from_private_examples, streams=True)
    async def afrom_private_examples(cls, private: PrivateExamples | RollingRange, **options: Any) -> Self:
        """Async version of `from_private_examples`: it is planned in a thread; rows are scored concurrently."""
        given = options.get("budget")
        config = cast("RunnableConfig", given) if isinstance(given, Mapping) else None
        made, run = await await_refusals(lambda: cls._planned(private, **options), config, is_slow=True)
        return made.with_released(await run.arun())

    @classmethod
    def from_run(
        cls,
        run: ReleaseRun[Any, ReleasedDemonstrations],
        *,
        example_prompt: TemplateLike,
        suffix: str | None = None,
        prefix: str = "",
        **template: Unpack[TemplateFields],
    ) -> Self:
        """Runs or continues a run that releases demonstrations, and returns the template that shows them.

        Args:
          run: a `DemonstrationSynthesizer` or `PrivateEvolution`, also one of a `RunInterruptedError`; a
            finished one releases nothing more.
          example_prompt: template of one demonstration.
          suffix: public text after the demonstrations, with the query's variable (required by the string template).
          prefix: public text before the demonstrations.
          template: other fields of the stock class, such as `example_separator` or `partial_variables`.

        Raises:
          ConfigurationError: a template argument is unusable; checked before anything runs.
          RunInterruptedError: the model failed again; what was released is kept.
        """
        made = cls._before(run, example_prompt, prefix, suffix, template)
        return made.with_released(run.run())

    @classmethod
    async def afrom_run(
        cls,
        run: ReleaseRun[Any, ReleasedDemonstrations],
        *,
        example_prompt: TemplateLike,
        suffix: str | None = None,
        prefix: str = "",
        **template: Unpack[TemplateFields],
    ) -> Self:
        """Async version of `from_run`."""
        made = cls._before(run, example_prompt, prefix, suffix, template)
        return made.with_released(await run.arun())

    # -- inside ----------------------------------------------------------------------------------------------------

    @classmethod
    def _planned(
        cls,
        private: PrivateExamples | RollingRange,
        *,
        example_prompt: TemplateLike,
        suffix: str | None = None,
        prefix: str = "",
        task: GenerationTask | None = None,
        **generation: Any,
    ) -> tuple[Self, DemonstrationSynthesizer]:
        """Checks the template, then declares the share; nothing is spent yet."""
        # Imported here: a released template loads neither models nor accountants.
        from langchain_dpicl.generation.decoding_loop import generated_fields
        from langchain_dpicl.generation.synthesizer import DemonstrationSynthesizer
        from langchain_dpicl.release.declare_share import range_of

        made = cls._without_examples(example_prompt, prefix, suffix, {})
        examples = range_of(private)
        _check_shown(made, generated_fields(examples, task), text_key=examples.text_key)
        return made, DemonstrationSynthesizer.from_private_examples(private, task=task, **generation)

    @classmethod
    def _before(
        cls, run: object, example_prompt: TemplateLike, prefix: str, suffix: str | None, fields: TemplateFields
    ) -> Self:
        """Returns the template without demonstrations; checks it and the run before that releases more."""
        from langchain_dpicl.evolution import PrivateEvolution
        from langchain_dpicl.generation.synthesizer import DemonstrationSynthesizer

        if not isinstance(run, DemonstrationSynthesizer | PrivateEvolution):
            raise fail("run", "a DemonstrationSynthesizer or PrivateEvolution", type(run).__name__)
        made = cls._without_examples(example_prompt, prefix, suffix, fields)
        _check_shown(made, run.fields, text_key=run.fields[0])
        return made

    @classmethod
    def _without_examples(
        cls, example_prompt: TemplateLike, prefix: str, suffix: str | None, fields: TemplateFields
    ) -> Self:
        """Returns the template without demonstrations, so that its arguments are checked before anything is spent."""
        if refused := sorted(set(fields) & set(_FROM_THE_RELEASE)):
            raise ConfigurationError(f"{refused}: expected none of these here; they come with the release.")
        if suffix is None and cls.model_fields["suffix"].is_required():
            raise fail("suffix", "text after the demonstrations, with the query's variable, such as {input}", suffix)
        ends = {"prefix": prefix} if suffix is None else {"prefix": prefix, "suffix": suffix}
        texts = {name: Template.text_of(name, template) for name, template in ends.items()}
        return cls(examples=[], example_prompt=example_prompt, **texts, **fields)

    @classmethod
    def _example_template(cls, example_prompt: object) -> object:
        """Returns the template of one demonstration, of a text too; refuses what this class cannot show."""
        if hasattr(cls, "format_messages") and not hasattr(example_prompt, "format_messages"):
            advice = 'Write ChatPromptTemplate.from_messages([("human", "{text}"), ("ai", "{label}")]).'
            found = type(example_prompt).__name__
            raise fail("example_prompt", "a ChatPromptTemplate of one demonstration", found, advice)
        if hasattr(example_prompt, "format_messages") and not hasattr(cls, "format_messages"):
            advice = "For messages take DPFewShotChatMessagePromptTemplate."
            raise fail("example_prompt", "text or a PromptTemplate", type(example_prompt).__name__, advice)
        if isinstance(example_prompt, str):
            example = Template.of("example_prompt", example_prompt)
            if "stop" in example.names:
                advice = "Rename the field of the records."
                raise fail("example_prompt", "fields other than 'stop', which LangChain uses itself", "stop", advice)
            return PromptTemplate.from_template(example.text)
        if not hasattr(example_prompt, "input_variables"):
            raise fail("example_prompt", "a prompt template", type(example_prompt).__name__)
        return example_prompt

    def _stock_fields(self) -> dict[str, Any]:
        names = ("input_types", "metadata", "output_parser", "partial_variables", "tags")
        return {name: getattr(self, name) for name in names}

    def _rebuilt(self, **changes: Any) -> Self:
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**(fields | changes))

    def _list_examples(self) -> list[dict[str, Any]]:
        if self.examples is None:
            raise ConfigurationError("examples: expected a list of released demonstrations, found an example selector.")
        return self.examples


def _check_shown(made: Any, fields: Collection[str], *, text_key: str) -> None:
    """Refuses, before anything is charged, a template that would not show what is released, or the query."""
    from langchain_dpicl.generation.decoding_loop import check_example_prompt

    check_example_prompt(made.example_prompt, fields, text_key=text_key)
    if made.suffix and not (made.input_variables or made.partial_variables):
        advice = 'Where another part of a prompt shows the query, give suffix="".'
        raise fail("suffix", "a template with the query's variable, such as {input}", made.suffix, advice)


def _variables_in(text: object) -> Collection[str]:
    """Returns the variables of a template's text; none of one that LangChain cannot read, and refuses."""
    try:
        return get_template_variables(text, "f-string") if isinstance(text, str) else ()
    except ValueError:
        return ()


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _refuse_other_formats(template_format: object, example_prompt: object) -> None:
    """Refuses jinja2 and mustache, which read attributes or run code, anywhere in a template."""
    for language in (template_format, *formats_in(example_prompt)):
        if language != "f-string":
            raise ConfigurationError(
                f"template_format: expected 'f-string', found {language!r}. Rewrite {{{{ name }}}} as {{name}}."
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

    @override
    def to_stock(self) -> PromptTemplate:
        shown = [self.example_prompt.format(**self._fields_of(e)) for e in self._list_examples()]
        parts = (self.prefix, *map(_escaped, shown), self.suffix)
        template = _escaped(self.example_separator).join(part for part in parts if part)
        return PromptTemplate(template=template, **self._stock_fields())

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

    @override
    def to_stock(self) -> ChatPromptTemplate:
        self._list_examples()  # raises for a selector
        system = [SystemMessagePromptTemplate.from_template(self.prefix)] if self.prefix else []
        human = [HumanMessagePromptTemplate.from_template(self.suffix)] if self.suffix else []
        return ChatPromptTemplate([*system, *super().format_messages(), *human], **self._stock_fields())

    @property
    def _prompt_type(self) -> str:
        return "dp_few_shot_chat"

    def _frame(self, shown: list[BaseMessage], values: dict[str, Any]) -> list[BaseMessage]:
        system = [SystemMessage(formatter.format(self.prefix, **values))] if self.prefix else []
        human = [HumanMessage(formatter.format(self.suffix, **values))] if self.suffix else []
        return [*system, *shown, *human]
