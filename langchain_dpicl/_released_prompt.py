"""What both few-shot templates share: the release they carry and the ways to get one. Knows no noise, no accountant.

Everything a template holds is public. Private examples only pass through `from_private_examples` on their way to the
synthesizer and are kept nowhere.
"""

from __future__ import annotations

import asyncio
import copy
import math
import os
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn, Self

from langchain_core.example_selectors import BaseExampleSelector
from langchain_core.runnables import RunnableConfig
from pydantic import ConfigDict, Field, model_validator

from langchain_dpicl._constructing import HidesInput
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import check_int, fail
from langchain_dpicl.released import ReleasedDemonstrations, epsilon_of

if TYPE_CHECKING:
    from langchain_dpicl.evolution import PrivateEvolution
    from langchain_dpicl.privacy.examples import PrivateExamples
    from langchain_dpicl.synthesis import DemonstrationSynthesizer

TEMPLATE_CONFIG = ConfigDict(arbitrary_types_allowed=True, extra="forbid", hide_input_in_errors=True)
_EVOLUTION = "private_evolution"  # as `evolution_planning` names it, which would import the accountants
_FROM_THE_RELEASE = ("examples", "example_selector", "privacy_report", "plan")
# Options of `from_private_examples` that belong to the template; `name` and all others go to the synthesizer.
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
    """What both templates share: the release they carry, and the ways to get one."""

    examples: list[dict[str, Any]] | None = None
    """Released demonstrations: field name to text."""

    example_selector: BaseExampleSelector | None = None
    """Instead of `examples`: a selector, as in the stock class. No report of this template covers what it selects."""

    privacy_report: dict[str, Any] = Field(default_factory=dict, repr=False)
    """Public report of what the demonstrations cost; empty where the template was built by hand."""

    plan: dict[str, Any] = Field(default_factory=dict, repr=False)
    """Public plan of the release; empty where the template was built by hand."""

    model_config = TEMPLATE_CONFIG

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Refuses templating languages that can run code, then does what the stock class does."""
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
        # Stock `partial` rebuilds from `__dict__`, where `invoke` has cached `_serialized`: "extra inputs".
        return {key: value for key, value in values.items() if key != "_serialized"}

    @property
    def epsilon(self) -> float:
        """Upper bound on epsilon of the demonstrations, or what the selector says of its own; else `math.inf`."""
        if self.privacy_report:
            return epsilon_of(self.privacy_report)
        return float(getattr(self.example_selector, "epsilon", math.inf))

    @property
    def released(self) -> ReleasedDemonstrations:
        """The demonstrations with report and plan, to save or to build another template from.

        Raises:
          ConfigurationError: the template has an example selector, or no privacy report to hand on.
        """
        if not self.privacy_report:
            raise ConfigurationError(
                "released: expected a template with a privacy report, found none. Build it with from_released or "
                "from_private_examples."
            )
        return ReleasedDemonstrations(tuple(self._listed_examples()), self.privacy_report, self.plan)

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
        """Refuses: stock files drop the privacy report and are read back as a stock class.

        Raises:
          ConfigurationError: always.
        """
        raise ConfigurationError(f"save: not offered here (path {file_path!r}). Use save_released and from_released.")

    def with_shots(self, n_per_label: int, *, label_key: str | None = None) -> Self:
        """Returns a template with the first demonstrations of each label.

        Formal guarantees:
          - Post-processing of the release: free, and `privacy_report` (the cost of the whole release) stays.

        Args:
          n_per_label: demonstrations to keep per label; fewer stay where fewer were released.
          label_key: field that holds the label; by default `plan["label_key"]`. With no labels in the plan (None
            there), all demonstrations count as one label.

        Raises:
          ConfigurationError: the label field is unknown, or there is no example list.
        """
        check_int("n_per_label", n_per_label, low=0)
        examples = self._listed_examples()
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
          - The template holds what `DemonstrationSynthesizer` released and public arguments; nothing else of `private`.
          - Every template argument is checked before the budget is touched.

        Args:
          private: the examples; bound to the budget's ledger. The model `llm` SEES their text, but for
            `mechanism="private_evolution"`.
          llm: an engine, or a LangChain model with token log-probabilities; best one you run yourself. With
            `mechanism="private_evolution"` any model that writes text, which then sees none of theirs.
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
          SynthesisInterruptedError: the model failed half-way; go on with `from_synthesizer(error.synthesizer, ...)`.
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
        """Is `from_private_examples`, awaitable; the rows of one token are scored concurrently.

        A LangChain model is probed in a thread, so the event loop goes on meanwhile.
        """
        from langchain_dpicl.callbacks import may_wait
        from langchain_dpicl.run_events import refusals_awaited

        options |= {"budget": budget, "epsilon": epsilon, "instruction": instruction, "config": config}
        template, generation = cls._checked(private, example_prompt, (prefix, suffix), options)
        engine, generation = await asyncio.to_thread(_probed, llm, generation)
        synthesizer = await refusals_awaited(
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
        """Runs a synthesizer to its end (or continues an interrupted one) and returns the template.

        Args:
          synthesizer: declared on its own, inside `with budget.plan():`, or taken from a SynthesisInterruptedError; a
            `PrivateEvolution` does as well.
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
        """Is `from_synthesizer`, awaitable."""
        template = cls._without_examples(example_prompt, prefix, suffix, template_options)
        return template.with_released(await synthesizer.arun(progress=progress))

    # -- inside ----------------------------------------------------------------------------------------------------

    @classmethod
    def _without_examples(cls, example_prompt: Any, prefix: str, suffix: str | None, options: dict[str, Any]) -> Self:
        """Returns the template before its demonstrations exist: every check of its arguments, before any spend."""
        _refuse_release_fields(options)
        if not hasattr(example_prompt, "input_variables"):
            raise fail("example_prompt", "a prompt template", type(example_prompt).__name__)
        ends = {"prefix": prefix} if suffix is None else {"prefix": prefix, "suffix": suffix}
        return cls(examples=[], example_prompt=example_prompt, **ends, **options)

    @classmethod
    def _checked(
        cls, private: PrivateExamples, example_prompt: Any, ends: tuple[str, str | None], options: dict[str, Any]
    ) -> tuple[Self, dict[str, Any]]:
        """Returns the checked template without demonstrations, and the options that concern their generation."""
        _refuse_release_fields(options)
        own = {key: value for key, value in options.items() if key in _TEMPLATE_OPTIONS}
        generation = {key: value for key, value in options.items() if key not in _TEMPLATE_OPTIONS}
        template = cls._without_examples(example_prompt, *ends, own)
        _check_variables(example_prompt, private)
        return template, generation

    def _rebuilt(self, **changes: Any) -> Self:
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**(fields | changes))

    def _listed_examples(self) -> list[dict[str, Any]]:
        if self.examples is None:
            raise ConfigurationError("examples: expected a list of released demonstrations, found an example selector.")
        return self.examples


# Imported inside: serving a release needs neither models nor the vault and its accountants.
def _probed(llm: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns the engine and the options, with all that is probed in public behind them."""
    if options.get("mechanism") == _EVOLUTION:
        from langchain_dpicl.backends.embeddings import SilentEmbeddings

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
        from langchain_dpicl.evolution import PrivateEvolution

        others = {key: value for key, value in options.items() if key != "mechanism"}
        return PrivateEvolution.from_private_examples(private, llm=llm, example_prompt=example_prompt, **others)
    from langchain_dpicl.synthesis import DemonstrationSynthesizer

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
    """Refuses what is not a holder of private examples (without showing it), and variables that are not its fields."""
    fields = getattr(private, "fields", None)
    if not isinstance(fields, (tuple, list, frozenset)):
        raise ConfigurationError(f"private: expected PrivateExamples, found {type(private).__name__}.")
    if unknown := sorted(set(example_prompt.input_variables) - set(fields)):
        raise ConfigurationError(
            f"example_prompt: expected variables among the declared fields {sorted(fields)}, found {unknown}."
        )
