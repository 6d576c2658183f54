"""Few-shot prompt templates that format released demonstrations."""

from __future__ import annotations

from typing import Any, Self

from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from langchain_core.prompts import FewShotChatMessagePromptTemplate, FewShotPromptTemplate
from langchain_core.prompts.string import get_template_variables
from langchain_core.utils.formatting import formatter
from pydantic import model_validator
from typing_extensions import override

from langchain_dpicl._released_prompt import TEMPLATE_CONFIG, ReleasedPrompt


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
        return self._framed(super().format_messages(**values), values)

    @override
    async def aformat_messages(self, **kwargs: Any) -> list[BaseMessage]:
        values = self._merge_partial_and_user_variables(**kwargs)
        return self._framed(await super().aformat_messages(**values), values)

    @property
    def _prompt_type(self) -> str:
        return "dp_few_shot_chat"

    def _framed(self, shown: list[BaseMessage], values: dict[str, Any]) -> list[BaseMessage]:
        system = [SystemMessage(formatter.format(self.prefix, **values))] if self.prefix else []
        human = [HumanMessage(formatter.format(self.suffix, **values))] if self.suffix else []
        return [*system, *shown, *human]
