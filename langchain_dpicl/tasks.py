"""What a prompt of a task looks like: templates, labels and their spellings, public records, rules of writing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import numpy as np
from langchain_core.documents import Document
from langchain_core.messages import BaseMessage, ChatMessage
from langchain_core.prompt_values import ChatPromptValue, PromptValue

from langchain_dpicl._templates import Template, is_field_name
from langchain_dpicl.backends.base import NextTokenBackend, Token, cut_at_stop, row_hint_of
from langchain_dpicl.backends.resolve import as_choice_backend
from langchain_dpicl.backends.rows.label_rows import LabelRows
from langchain_dpicl.options import Decoding, FewShotTask, LabelAnswers, Votes
from langchain_dpicl.privacy._validate import check_written, fail, plain_or_type
from langchain_dpicl.privacy.private_examples import PrivateExamples, label_text
from langchain_dpicl.release.curator import Record, Render, SlotRenderers

Query: TypeAlias = tuple[str, ...]
"""The public values of the query's variables, in the order of `FewShotTemplate.input_variables`."""
_TEXTS = (str, BaseMessage, Document)


@dataclass(frozen=True, slots=True)
class FewShotTemplate:
    r"""A few-shot prompt: prefix, one formatted example per record, suffix with the query.

    Attributes:
      example_prompt: template of one record, for instance `"Ticket: {text}\nQueue: {queue}"`.
      suffix: template of the query, for instance `"Ticket: {input}\nQueue:"`; the model answers right after it.
      prefix: template before the examples; may use the query's variables too.
      separator: stands between the parts.
      fields: the declared fields of the private records.
      shown: by field, how declared values read in a prompt (labels as their verbalizers).
      others: further wordings of the same query, which slots read in turn after this one.

    Raises:
      ConfigurationError: unknown fields, no query variable or others in another wording, or anything but plain
        `{field}` names in the templates.
    """

    example_prompt: str
    suffix: str
    prefix: str
    separator: str
    fields: tuple[str, ...]
    shown: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    others: tuple[FewShotTemplate, ...] = ()
    _example: Template = field(init=False, repr=False)
    _prefix: Template = field(init=False, repr=False)
    _suffix: Template = field(init=False, repr=False)
    _variables: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.separator, str):
            raise fail("example_separator", "text", type(self.separator).__name__)
        check_written("example_separator", self.separator)
        for name in ("example_prompt", "prefix", "suffix"):
            parsed = Template.of(name, getattr(self, name))
            check_written(name, parsed.text)
            object.__setattr__(self, f"_{name.removesuffix('_prompt')}", parsed)
        object.__setattr__(self, "_variables", tuple(dict.fromkeys((*self._prefix.names, *self._suffix.names))))
        used = self._example.names
        if not used or (unknown := sorted(set(used) - set(self.fields))):
            wrong = unknown if used else self.example_prompt
            advice = (
                "Declare further fields with PrivateExamples(fields=...), the label's with label_key=...; a settings "
                "file has data.fields and data.label_key."
            )
            advice = advice if used else "Write a field in single braces."
            raise fail("example_prompt", f"a template with fields among {sorted(self.fields)}", wrong, advice)
        if not self.input_variables:
            raise fail("suffix", "a template with the query's variable, such as {input}", self.suffix)
        for other in self.others:
            if set(other.input_variables) != set(self.input_variables):
                expected = f"the query's variables {sorted(self.input_variables)} in every wording"
                raise fail("wordings", expected, sorted(other.input_variables))

    @property
    def num_wordings(self) -> int:
        """Wordings that slots read in turn, this one included."""
        return 1 + len(self.others)

    @property
    def input_variables(self) -> tuple[str, ...]:
        """The query's variables, in the order in which they appear."""
        return self._variables

    @property
    def example_fields(self) -> tuple[str, ...]:
        """The fields that an example shows, in the order in which they appear."""
        return self._example.names

    def check_shows(self, label_key: str, *, or_another: bool = False) -> None:
        """Refuses examples, of any wording, without their label, or `or_another` field that the query lacks."""
        for wording in (self, *self.others):
            shown = wording.example_fields
            if label_key not in shown and not (or_another and len(shown) > len(wording.input_variables)):
                advice = "An example without its label teaches nothing."
                raise fail("example_prompt", f"a template that shows {{{label_key}}}", wording.example_prompt, advice)

    def query(self, value: Any) -> Query:
        """Returns the public values of a caller's input: text, a message, a prompt value, or a dict of these.

        Lists, such as retrieved documents, are joined by blank lines. Roles are written if there are several messages.
        """
        names = self.input_variables
        if not isinstance(value, Mapping):
            if len(names) > 1:
                raise fail("input", f"a dict with {list(names)}", type(value).__name__)
            if isinstance(value, Sequence) and not value and not isinstance(value, str):
                raise fail("input", "text", value)
            return (public_text("input", value),)
        missing = [name for name in names if name not in value]
        if missing:
            raise fail("input", f"a dict with {list(names)}", [*value])
        return tuple(public_text(f"input[{name!r}]", value[name]) for name in names)

    def with_content(self, query: Query, text: str) -> Query:
        """Returns the query with `text` as its only variable or, of several, as the one called `input`."""
        names = self.input_variables
        if len(names) == 1:
            return (text,)
        if "input" not in names:
            raise fail("suffix", "one variable, or one called 'input', to calibrate", list(names))
        return tuple(text if name == "input" else value for name, value in zip(names, query, strict=True))

    def renderer(self, queries: Sequence[Query]) -> SlotRenderers[tuple[str, ...]]:
        """Returns the function from a row's records to its prompts, one per query; no records: the public prompts.

        All prompts of one row read the same wording.
        """
        named = [dict(zip(self.input_variables, query, strict=True)) for query in queries]
        return SlotRenderers(tuple([wording.own_renderer(named) for wording in (self, *self.others)]))

    def own_renderer(self, queries: Sequence[Mapping[str, str]]) -> Callable[[Sequence[Record]], tuple[str, ...]]:
        """Returns the renderer of this wording alone; queries hold values by name, which each wording orders anew."""
        ends = [(self._prefix.fill(values), self._suffix.fill(values)) for values in queries]
        around = [([prefix] if prefix else [], suffix) for prefix, suffix in ends]

        def render(records: Sequence[Record]) -> tuple[str, ...]:
            examples = [self._example.fill(record, self.shown) for record in records]
            return tuple([self.separator.join([*before, *examples, suffix]) for before, suffix in around])

        return render

    def to_dict(self) -> dict[str, Any]:
        """Returns the public wording as JSON values."""
        others = {"wordings": [other.to_dict() for other in self.others]} if self.others else {}
        return {
            "example_prompt": self.example_prompt,
            "prefix": self.prefix,
            "suffix": self.suffix,
            "example_separator": self.separator,
            **others,
        }


def public_text(name: str, value: Any) -> str:
    """Returns the text of a public value: text, a number, a LangChain text object, or a list of these."""
    if isinstance(value, str):
        return check_written(name, value)
    expected = "text, a message, a prompt value, a document, or a list of these"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if isinstance(value, float) and np.isnan(value):  # a table's mark of a text that is missing
            raise fail(name, expected, value, "Leave out what has no text.")
        return str(value)
    if isinstance(value, Sequence) and value and all(isinstance(item, BaseMessage) for item in value):
        value = ChatPromptValue(messages=value)
    if isinstance(value, Sequence) and all(isinstance(item, _TEXTS) for item in value):
        return "\n\n".join(public_text(name, item) for item in value)
    if unread := unread_parts(value):
        raise fail(name, "text alone", unread, "A row is a prompt of text: say it in words.")
    text = _content(value)
    if text is None:
        raise fail(name, expected, type(value).__name__)
    return check_written(name, text)


_READ = frozenset(
    {
        *("text", "reasoning", "thinking", "redacted_thinking", "refusal"),
        *("tool_call", "tool_call_chunk", "invalid_tool_call", "tool_use", "function_call"),
    }
)
"""Kinds of content of a message that are its text, or a model's steps, which ask nothing. Its text lacks all others."""


def unread_parts(value: Any) -> list[str]:
    """Returns the kinds of content of messages that hold a part of what is asked and are no text."""
    messages = value.to_messages() if isinstance(value, PromptValue) else [value]
    blocks = [block for each in messages if isinstance(each, BaseMessage) for block in each.content]
    kinds = [str(block.get("type", "a part without a type")) for block in blocks if isinstance(block, dict)]
    return [kind for kind in kinds if kind not in _READ]


def _content(value: Any) -> str | None:
    """Returns the text of a LangChain message, prompt value or document; None for anything else."""
    if isinstance(value, ChatPromptValue) and len(value.messages) == 1:
        return str(value.messages[0].text)
    if isinstance(value, ChatPromptValue):
        # Not LangChain's `to_string`: it writes calls of tools, with ids that no second run has, and raises for others.
        return "\n".join(f"{_speaker(one)}: {one.text}" for one in value.messages if str(one.text).strip())
    if isinstance(value, PromptValue):
        return value.to_string()
    if isinstance(value, BaseMessage):
        return str(value.text)
    if isinstance(value, Document):
        return value.page_content
    return None


def _speaker(message: BaseMessage) -> str:
    """Returns who says a message, as LangChain writes it."""
    kind = message.role if isinstance(message, ChatMessage) else message.type.removesuffix("MessageChunk")
    return {"ai": "AI", "human": "Human", "system": "System", "tool": "Tool", "function": "Function"}.get(kind, kind)


@dataclass(frozen=True, slots=True)
class GenerationTemplate:
    r"""How private records become a generation prompt, and where the model continues.

    A prompt is the instruction, the row's records, and a stub that ends where the next record's text (or label)
    begins, separated by blank lines. A row without records gives the public prompt.

    Attributes:
      instruction: public task description; `{label_key}` fields are not substituted here.
      template: one record, for instance `"topic: {topic}\nquestion: {question}"`; must end with the text field.
      text_key: the field that is generated.
      label_key: the label's field; None where records have no label.
      fields: the declared fields of the private records.

    Raises:
      ConfigurationError: unknown fields, format specs, or a template that does not end with the text field.
    """

    instruction: str
    template: str
    text_key: str
    label_key: str | None
    fields: tuple[str, ...]
    _record: Template = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.instruction, str):
            raise fail("instruction", "text", type(self.instruction).__name__)
        check_written("instruction", self.instruction)
        parsed = Template.of("record_prompt", self.template)
        check_written("record_prompt", parsed.text)
        object.__setattr__(self, "_record", parsed)
        names = [name for _, name in parsed.pieces]
        if self.text_key not in names or names.index(self.text_key) != len(names) - 1:
            expected = f"a template with {{{self.text_key}}} once, at its very end (the model continues there)"
            raise fail("record_prompt", expected, self.template)
        if unknown := sorted(set(parsed.names) - set(self.fields)):
            advice = "Declare them with PrivateExamples(fields=...)."
            raise fail("record_prompt", f"fields among {sorted(self.fields)}", unknown, advice)
        if self.label_key is not None and self.label_key not in names:
            raise fail("record_prompt", f"the label field {{{self.label_key}}}", sorted(parsed.names))

    @classmethod
    def default_template(cls, text_key: str, label_key: str | None) -> str:
        """Returns `label: ...` and `text: ...` on two lines, or the text line alone."""
        _check_readable(text_key, label_key)
        text = f"{text_key}: {{{text_key}}}"
        return text if label_key is None else f"{label_key}: {{{label_key}}}\n{text}"

    @property
    def generated_fields(self) -> frozenset[str]:
        """The fields a released demonstration has."""
        return frozenset({self.text_key} | ({self.label_key} if self.label_key else set()))

    def record(self, record: Record) -> str:
        """Returns one record in its template; values are never parsed as templates."""
        return self._record.fill(record)

    def stub(self, upto: str, values: Mapping[str, str]) -> str:
        """Returns the template up to (not including) field `upto`, other fields filled from public `values`."""
        return self._record.fill_before(upto, values).rstrip(" ")

    def renderer(self, upto: str, values: Mapping[str, str]) -> Render:
        """Returns the function from a row's records to its prompt; it says with which public text all prompts start."""
        return _Prompts(self, self.stub(upto, values))


@dataclass(frozen=True, slots=True)
class _Prompts:
    """Renders the prompts of one field; holds public text only."""

    wording: GenerationTemplate
    stub: str

    def __call__(self, records: Sequence[Record]) -> str:
        return "\n\n".join([self.wording.instruction, *(self.wording.record(record) for record in records), self.stub])

    @property
    def shared(self) -> str:
        """What every prompt starts with, whatever its records."""
        return self.wording.instruction + "\n\n"


def _check_readable(text_key: str, label_key: str | None) -> None:
    """Refuses names of fields that a template made of them could not read."""
    for option, name in (("text_key", text_key), ("label_key", label_key)):
        if name is not None and not is_field_name(name):
            expected = "a name with a letter first, no space last, and none of {}[].!:\\ and quotes, for templates"
            raise fail(option, expected, name, "Rename the field.")


def distinct_texts(name: str, values: Sequence[str], *, least: int, empty: bool = False) -> tuple[str, ...]:
    """Returns distinct texts as a tuple, or raises ConfigurationError."""
    expected = f"a sequence of at least {least} distinct {'' if empty else 'non-empty '}texts"
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence) or len(values) < least:
        raise fail(name, expected, values)
    if not all(isinstance(text, str) and (text or empty) for text in values) or len(set(values)) < len(values):
        raise fail(name, expected, type(values).__name__)  # a column of records, given by mistake, repeats
    return tuple([check_written(name, text) for text in values])


class RecordFields(Protocol):
    """What prompts and votes need to know of records, all of it public; `PrivateExamples` declare it."""

    @property
    def text_key(self) -> str:
        """The field that holds the text."""

    @property
    def label_key(self) -> str | None:
        """The field that holds the label, or None."""

    @property
    def labels(self) -> tuple[str, ...] | None:
        """The declared labels, or None."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Every field that prompts may show."""


VoteOutcome: TypeAlias = tuple[int | None, tuple[float, ...] | None]
"""Place of the label (None: abstained) and the noisy votes, if they were released."""


def wording_digest(task: VotingTask) -> str:
    """Returns the digest of what a prompt says besides its examples: templates, labels and their texts."""
    shown = {name: value for name, value in task.to_dict().items() if name not in {"content_free", "votes"}}
    shown["labels"] = sorted(shown["labels"])
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class VotingTask:
    """What is voted on, and how it reads. Public.

    Attributes:
      labels: every label an answer can have.
      texts: what stands for each label in prompts and answers.
      wording: how prompts read.
      votes: "hard", "soft", or "text".
      content_free: inputs that rows are, or may be, calibrated with; none: no calibration.
    """

    labels: tuple[str, ...]
    texts: Mapping[str, tuple[str, ...]]
    wording: FewShotTemplate
    votes: Votes
    content_free: tuple[str, ...]

    @classmethod
    def of(
        cls, records: RecordFields, task: FewShotTask, answers: LabelAnswers, *, are_documents: bool = False
    ) -> VotingTask:
        """Fills in defaults, and checks the options against the fields of the records.

        Examples have to show what is voted on; documents, the context of a question, need not.
        """
        labels = labels_of(records, task.labels)
        texts = texts_of(labels, task.verbalizers)
        words = wording_of(records, task, texts=texts)
        if not are_documents and records.label_key is not None and set(labels) <= set(records.labels or ()):
            words.check_shows(records.label_key, or_another=True)
        names = words.input_variables
        can_calibrate = answers.votes != "text" and (len(names) == 1 or "input" in names)
        is_wanted = can_calibrate if answers.calibrate is None else answers.calibrate
        inputs = distinct_texts("content_free", answers.content_free, least=1, empty=True) if is_wanted else ()
        if inputs:
            words.with_content(("",) * len(names), "")
        return cls(labels, texts, words, answers.votes, inputs)

    def queries(self, query: Query) -> list[Query]:
        """Returns the query and, where rows are calibrated, its content-free versions."""
        return [query, *(self.wording.with_content(query, text) for text in self.content_free)]

    def to_dict(self) -> dict[str, Any]:
        """Returns the task as JSON values, for reports."""
        return {
            **self.wording.to_dict(),
            "labels": list(self.labels),
            "verbalizers": {label: list(shown) for label, shown in self.texts.items()},
            "votes": self.votes,
            "content_free": list(self.content_free),
        }


def labels_of(records: RecordFields, labels: Sequence[str] | None) -> tuple[str, ...]:
    """Returns the labels that an answer can have: `labels`, or the declared ones."""
    if labels is None and records.labels is None:
        advice = (
            'The examples declare none: give PrivateExamples(..., label_key="label", labels=[...]), every label that '
            "may occur."
        )
        raise fail("labels", "the labels an answer can have", None, advice)
    return distinct_texts("labels", tuple(records.labels or ()) if labels is None else labels, least=2)


def texts_of(
    labels: tuple[str, ...], verbalizers: Mapping[str, str | Sequence[str]] | None
) -> dict[str, tuple[str, ...]]:
    """Returns the texts that stand for each label, in the order of the labels."""
    if verbalizers is None:
        if len({label.strip() for label in labels}) < len(labels):
            advice = "Write them alike in the records, or give verbalizers."
            raise fail("labels", "labels that differ in more than spaces around them", list(labels), advice)
        return {label: (f" {label}",) for label in labels}
    if not isinstance(verbalizers, Mapping) or set(verbalizers) != set(labels):
        shown = list(verbalizers) if isinstance(verbalizers, Mapping) else type(verbalizers)
        raise fail("verbalizers", f"one text, or several, for each of {labels!r}", shown)
    listed = {label: verbalizers[label] for label in labels}
    return {
        label: distinct_texts("verbalizers", [texts] if isinstance(texts, str) else texts, least=1)
        for label, texts in listed.items()
    }


def wording_of(
    records: RecordFields, task: FewShotTask, *, texts: Mapping[str, tuple[str, ...]] | None = None
) -> FewShotTemplate:
    """Returns the few-shot template; by default text and label on one line each, labels shown as their first text.

    A query without a template of its own is asked as the example shows its text, up to the label.
    """
    example_prompt, suffix = task.example_prompt, task.suffix
    text_key, label_key = records.text_key, records.label_key
    if (example_prompt is None or suffix is None) and label_key is None:
        raise fail("example_prompt, suffix", "both (the examples have no label field)", (example_prompt, suffix))
    if example_prompt is None:
        _check_readable(text_key, label_key)
        example_prompt = f"{text_key}: {{{text_key}}}\n{label_key}: {{{label_key}}}"
    if suffix is None:
        usual = f"{text_key}: {{input}}\n{label_key}:"
        suffix = _asked_as(Template.of("example_prompt", example_prompt), text_key, str(label_key)) or usual
    read = {label: words[0].strip() for label, words in (texts or {}).items()}
    return FewShotTemplate(
        example_prompt=Template.of("example_prompt", example_prompt).text,
        suffix=Template.of("suffix", suffix).text,
        prefix=Template.of("prefix", task.prefix).text,
        separator=task.example_separator,
        fields=records.fields,
        shown={} if label_key is None else {label_key: read},
        others=tuple([wording_of(records, other, texts=texts) for other in task.wordings]),
    )


def _asked_as(example: Template, text_key: str, label_key: str) -> str | None:
    """Returns an example up to its label, with the query in place of the text; None: the text is not before it.

    None, too, if the example shows another field called `input` there: both would be filled with the query's text.
    """
    names = [name for _, name in example.pieces]
    end = names.index(label_key) if label_key in names else 0
    if text_key not in names[:end] or (text_key != "input" and "input" in names[:end]):
        return None
    literals = [literal.replace("{", "{{").replace("}", "}}") for literal, _ in example.pieces]
    fields = ["input" if name == text_key else name for name in names[:end]]
    asked = "".join(f"{literal}{{{name}}}" for literal, name in zip(literals, fields, strict=False))
    return asked + literals[end].rstrip(" ")


def abstention_of(answers: LabelAnswers, labels: tuple[str, ...]) -> float | None:
    """Returns the share of the expected votes that an answer needs; None: the most noisy votes are enough.

    Raises:
      ConfigurationError: `min_votes` is given, or the answer of abstentions is a label.
    """
    if answers.min_votes is not None:
        raise fail(
            "LabelAnswers.min_votes", "None where votes can be expected", answers.min_votes, "Use abstain_below."
        )
    check_abstain_label(answers, labels)
    below = answers.abstain_below or "never"
    if below == "never":
        return None
    return 0.5 / len(labels) if below == "auto" else below


def check_abstain_label(answers: LabelAnswers, labels: tuple[str, ...]) -> None:
    """Refuses an abstention text that is also a label."""
    if not answers.abstain_label or answers.abstain_label in labels:
        raise fail("LabelAnswers.abstain_label", f"a text that is none of {labels!r}", answers.abstain_label)


def check_other_label(answers: LabelAnswers) -> None:
    """Refuses a name of votes that name no label, for components that do not count them."""
    if answers.other_label not in {"", LabelAnswers().other_label}:
        advice = "A vote that names no label counts for none."
        raise fail("LabelAnswers.other_label", "the default", answers.other_label, advice)


def choice_engine(llm: Any, task: VotingTask) -> Any:
    """Returns what a model has for choosing among labels; errors as `reader_of`."""
    return as_choice_backend(llm, votes="text" if task.votes == "text" else None)


def reader_of(
    llm: Any, task: VotingTask, *, is_wanted: bool | None, other: bool = False
) -> tuple[VotingTask, LabelRows, dict[str, str]]:
    """Returns the task as it will run, the source of label rows, and what reports say about the model.

    Args:
      llm: the model.
      task: with the content-free inputs that there would be.
      is_wanted: whether to calibrate; None: where the model reports probabilities of tokens and declares nothing else.
      other: whether answers in text that name no label are a candidate of their own.

    Raises:
      CapabilityError: the model cannot choose among labels.
      ModelCallError: it could not be reached.
      ConfigurationError: it cannot tell the labels apart.
    """
    engine = choice_engine(llm, task)
    texts = list(task.texts.values())
    scorer = LabelRows(engine, texts, calibrate=False, other=other)
    reports_tokens = scorer.kind in {"whole labels", "first tokens"}
    wanted = reports_tokens and row_hint_of(engine).calibrate if is_wanted is None else is_wanted
    if task.content_free and wanted:
        scorer = LabelRows(engine, texts, calibrate=True)
    else:
        task = replace(task, content_free=())
    return task, scorer, {"model": getattr(engine, "name", type(engine).__name__), "reads": scorer.kind}


def outcome_to_json(outcome: VoteOutcome) -> list[Any]:
    """Returns an outcome as JSON values."""
    place, votes = outcome
    return [None if place is None else int(place), votes]


def outcome_from_json(stored: Any, *, width: int) -> VoteOutcome:
    """Returns an outcome from its JSON values; ValueError or TypeError for anything else."""
    place, votes = stored
    if not (place is None or (type(place) is int and 0 <= place < width)):
        raise ValueError("no label")
    if votes is None:
        return place, None
    scores = tuple(float(vote) for vote in votes)
    if len(scores) != width or not np.isfinite(scores).all():
        raise ValueError("no votes")
    return place, scores


@dataclass(frozen=True, slots=True)
class PublicRecords:
    """Public labelled records, checked: each holds text in every field that prompts show."""

    records: tuple[Mapping[str, str], ...] = field(repr=False)
    text_key: str
    label_key: str
    labels: tuple[str, ...]
    fields: tuple[str, ...]

    @classmethod
    def of(
        cls,
        examples: object,
        task: FewShotTask,
        *,
        text_key: str,
        label_key: str,
        labels: Sequence[str] | None,
        instead: str,
    ) -> PublicRecords:
        """Reads the examples that a caller gave: dicts, or Documents.

        Args:
          examples: public, by the caller's word.
          task: whose template says which fields prompts show.
          text_key: field of the text, and of a Document's content.
          label_key: field of the label.
          labels: the labels; None: those of the task, or of the examples, sorted.
          instead: what the caller of private examples should do.

        Raises:
          ConfigurationError: private examples, or examples that cannot be read; no value is shown.
        """
        refuse_private(examples, instead)
        for name, key in (("text_key", text_key), ("label_key", label_key)):
            if not isinstance(key, str) or not key:
                raise fail(name, "the name of a field", plain_or_type(key))
        if labels is not None and task.labels is not None:
            raise fail("labels", "labels=, or FewShotTask(labels=)", "both")
        prompts = [one.example_prompt for one in (task, *task.wordings)]
        named = [() if prompt is None else Template.of("example_prompt", prompt).names for prompt in prompts]
        usual = (text_key,) if None in prompts else ()
        fields = tuple(dict.fromkeys((*usual, *(name for names in named for name in names), label_key)))
        records = read_public(examples, fields, text_key=text_key, label_key=label_key)
        found = [record[label_key] for record in records]
        wanted = task.labels if labels is None else labels
        known = distinct_texts("labels", sorted(set(found)) if wanted is None else wanted, least=2)
        check_known(found, known, key=label_key)
        return cls(records, text_key, label_key, known, fields)


_OTHER_NAMES = (
    "Name a field of yours: text_key=, label_key= (--text-key, --label-key), or templates of several fields. "
    "To rehearse for records whose fields have these names, rename yours instead."
)


def refuse_private(examples: object, instead: str) -> None:
    """Refuses private examples where public ones are expected; `instead` says what the caller should do."""
    if isinstance(examples, PrivateExamples):
        raise fail("public_examples", "public examples", PrivateExamples, instead)


def read_public(
    examples: object, fields: Sequence[str], *, text_key: str, label_key: str | None
) -> tuple[Mapping[str, str], ...]:
    """Returns the fields of every example, which have to be text; a Document's content is its `text_key`.

    A label may be an integer or a boolean too: it becomes the text that `labels_as_text` makes of private ones.
    """
    if isinstance(examples, (str, bytes)) or not isinstance(examples, Sequence):
        raise fail("public_examples", "a list of dicts or Documents", type(examples))
    if not examples:
        raise fail("public_examples", "at least one example", 0)
    return tuple(_record(place, example, text_key, label_key, fields) for place, example in enumerate(examples))


def check_known(found: Sequence[str], known: Sequence[str], *, key: str) -> None:
    """Refuses an example whose label is not among the known ones."""
    if (wrong := next((place for place, label in enumerate(found) if label not in known), None)) is not None:
        raise fail(f"public_examples[{wrong}]", f"a label among {tuple(known)!r} under {key!r}", "another")


def _record(place: int, example: object, text_key: str, label_key: str | None, fields: Sequence[str]) -> dict[str, str]:
    """Returns the fields of one example, which have to be text."""
    values = {**example.metadata, text_key: example.page_content} if isinstance(example, Document) else example
    if not isinstance(values, Mapping):
        raise fail(f"public_examples[{place}]", "a dict or a Document", type(example))
    record: dict[str, str] = {}
    for name in fields:
        if name not in values:
            raise fail(f"public_examples[{place}]", f"text under {name!r}", list(values), _OTHER_NAMES)
        record[name] = label_text(values[name]) if name == label_key else values[name]
        if not isinstance(record[name], str):
            raise fail(f"public_examples[{place}]", f"text under {name!r}", type(values[name]))
    return record


DEFAULT_STOP = ("\n",)


def has_ended(backend: NextTokenBackend, tokens: Sequence[Token], stop: Sequence[str]) -> bool:
    """Whether released tokens end a text: the end of the text, or a stop string."""
    if tokens and tokens[-1] == backend.eos:
        return True
    text = backend.decode(tokens)
    return cut_at_stop(text, stop, is_stripped=True) != text.lstrip()


def check_rules(backend: NextTokenBackend, decoding: Decoding) -> tuple[int | None, tuple[str, ...]]:
    """Returns the candidates per token, at most what the engine reports (None: all), and the stop strings."""
    limit, wanted, stop = backend.max_top_k, decoding.candidates, decoding.stop
    if wanted == "all" and limit is not None:
        raise fail("Decoding.candidates", f"a number up to {limit} (this model reports top tokens only)", wanted)
    top_k = None if wanted == "all" else wanted if limit is None else min(wanted, limit)
    if stop is None:
        stop = DEFAULT_STOP if decoding.grammar is None else ()
    return top_k, check_texts("Decoding.stop", stop, least=0)


def check_texts(name: str, values: Sequence[str], *, least: int = 1) -> tuple[str, ...]:
    """Returns a sequence of at least `least` non-empty texts; a single text is refused."""
    ok = isinstance(values, Sequence) and not isinstance(values, (str, bytes)) and len(values) >= least
    if not ok or not all(isinstance(item, str) and item for item in values):
        raise fail(name, "a sequence of non-empty texts", values)
    return tuple(values)


def generation_wording(
    text_key: str, label_key: str | None, fields: Sequence[str], instruction: str | None, generation_prompt: Any
) -> GenerationTemplate:
    """Returns the prompts of a generation, with defaults for instruction and template."""
    usual = GenerationTemplate.default_template(text_key, label_key)
    of_label = "" if label_key is None else f" for the given {label_key}"
    return GenerationTemplate(
        instruction=f"Write a {text_key}{of_label}." if instruction is None else instruction,
        template=usual if generation_prompt is None else Template.of("record_prompt", generation_prompt).text,
        text_key=text_key,
        label_key=label_key,
        fields=tuple(fields),
    )
