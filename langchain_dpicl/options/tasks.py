"""Options of wording: few-shot prompts, prompts of synthetic records, and how texts are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Strict

from langchain_dpicl.options.base import LISTED, Count, Live, Option, Positive, Share, TemplateLike, Texts, option_of
from langchain_dpicl.privacy._validate import fail, plain_or_type

if TYPE_CHECKING:
    from langchain_core.prompts import FewShotPromptTemplate


@dataclass(frozen=True, slots=True, repr=False)
class FewShotTask(Option):
    r"""The wording of a few-shot prompt over private records, and the names of its answers.

    Args:
      example_prompt: template of one record, such as `"Ticket: {text}\nQueue: {queue}"`; None: text and label on a line
        each.
      suffix: template of the query after the records, such as `"Ticket: {input}\nQueue:"`; None: as the example.
      prefix: template before the records.
      example_separator: text between the parts.
      labels: the answers; None: the declared labels of the examples.
      verbalizers: label to the text or texts that stand for it, taken verbatim; the first one is shown in examples.
        None: a space and the label.
      wordings: further public wordings of the same task, with the same variables of the query; this one is the first.
        Of n, slot i reads wording i mod n. They cost no privacy, and need rows of slots; see `SlotRenderers`. Their
        labels and verbalizers are the task's own.
    """

    example_prompt: TemplateLike | None = None
    suffix: TemplateLike | None = None
    _: KW_ONLY
    prefix: TemplateLike = ""
    example_separator: str = "\n\n"
    labels: Texts | None = None
    verbalizers: Mapping[str, str | Texts] | None = None
    wordings: Annotated[tuple[FewShotTask, ...], Strict(strict=False), LISTED] = ()

    def _check_together(self) -> None:
        for wording in self.wordings:
            if shared := sorted({"labels", "verbalizers", "wordings"} & set(wording.to_dict())):
                advice = "Labels and verbalizers are those of the task itself."
                raise fail("FewShotTask.wordings", "templates alone", shared, advice)

    @classmethod
    def of(
        cls,
        task: Self | None,
        example_prompt: TemplateLike | None = None,
        suffix: TemplateLike | None = None,
        prefix: TemplateLike = "",
    ) -> Self:
        """Returns the wording that a caller gave: as `task`, or by its templates.

        Args:
          task: the wording.
          example_prompt: of a wording without `task`.
          suffix: of a wording without `task`.
          prefix: of a wording without `task`.

        Raises:
          ConfigurationError: both are given, or `task` is something else.
        """
        if task is None:
            return cls(example_prompt, suffix, prefix=prefix)
        if example_prompt is not None or suffix is not None or prefix != "":
            advice = "Put the templates into the task."
            raise fail("task", "task=, or example_prompt=, suffix= and prefix=", "both", advice)
        return option_of("task", task, cls)

    @classmethod
    def from_template(cls, template: FewShotPromptTemplate, **changes: Any) -> Self:
        """Takes the wording of a LangChain few-shot template, without its examples.

        Args:
          template: the template, in f-string format and without partial variables.
          changes: further fields.

        Raises:
          ConfigurationError: it is no such template.
        """
        kind = getattr(template, "template_format", None)
        if (
            not hasattr(template, "example_prompt")
            or kind != "f-string"
            or getattr(template, "partial_variables", None)
        ):
            expected = "a FewShotPromptTemplate in f-string format without partial variables"
            raise fail("template", expected, kind or type(template))
        return cls(
            template.example_prompt,
            template.suffix,
            prefix=template.prefix,
            example_separator=template.example_separator,
            **changes,
        )


@dataclass(frozen=True, slots=True, repr=False)
class OpenLabel(Option):
    """A label without declared values: written first under the same privacy, or drawn from a public list.

    Args:
      key: field of the label.
      values: public list to draw from; None: the label is written.
      max_tokens: most tokens of a written label.
    """

    key: str
    values: Texts | None = None
    max_tokens: Count = 10


@dataclass(frozen=True, slots=True, repr=False)
class GenerationTask(Option):
    """The prompt of synthetic records.

    Args:
      instruction: task description, the first paragraph of every prompt.
      record_prompt: template of one record that ends with the text field; None: label and text on a line each.
      open_label: a label without declared values.
      variation_prompt: of `PrivateEvolution`: asks for a variation of a text.
      hints: of `PrivateEvolution`: sentences after the instruction, one per prompt in turn.
    """

    instruction: str | None = None
    record_prompt: TemplateLike | None = None
    _: KW_ONLY
    open_label: OpenLabel | None = None
    variation_prompt: TemplateLike | None = None
    hints: Texts = ()

    @classmethod
    def of(cls, task: Self | None, instruction: str | None) -> Self:
        """Returns the wording that a caller gave: as `task`, by its instruction, or by both.

        Args:
          task: the wording.
          instruction: of a wording whose task has none.

        Raises:
          ConfigurationError: both have an instruction, or `task` is something else.
        """
        given = option_of("task", task, cls)
        if instruction is None:
            return given
        if given.instruction is not None:
            raise fail("instruction", "it once, as instruction= or in task=", "both")
        return given.replace(instruction=instruction)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Decoding(Option):
    """How a text is written from released tokens.

    Args:
      candidates: tokens per step, the public prompt's likeliest; "all": the whole vocabulary.
      stop: texts that end a field; None: a line break, or nothing under a grammar.
      temperature: of the released token's softmax; None: the mechanism's own.
      top_k: sample among so many noised candidates ("gaussian" only).
      top_p: nucleus sampling on the noised vector ("gaussian" only).
      grammar: a `Grammar`: what a text may be; what it forces is free.
      released_words: a `ReleasedWords`, whose words may be written too although the public model does not foresee them;
        a word that is begun is finished for free. True: the words of each label, released before its texts for a part
        of the same share, or of a `DocumentSynthesizer` those of each topic. None: no such words.
    """

    candidates: Count | Literal["all"] = 100
    stop: Texts | None = None
    temperature: Positive | None = None
    top_k: Count | None = None
    top_p: Share = 1.0
    grammar: Live = None
    released_words: Live = None

    def _check_together(self) -> None:
        given = self.released_words
        if given is not None and given is not True and not hasattr(given, "by_label"):
            # A file of settings can say true only: another value there would leave words out of the plan.
            raise fail("Decoding.released_words", "a ReleasedWords, True (true in TOML) or None", plain_or_type(given))
