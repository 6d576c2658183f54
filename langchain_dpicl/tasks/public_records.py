"""Reads public labelled examples, and refuses private ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from langchain_core.documents import Document

from langchain_dpicl._templates import Template
from langchain_dpicl.options import FewShotTask
from langchain_dpicl.privacy._validate import fail, plain_or_type
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.tasks.labels import distinct_texts


@dataclass(frozen=True, slots=True)
class PublicRecords:
    """Public labelled records, checked: each holds text in every field that prompts show.

    Attributes:
      records: the fields that prompts show, and the label.
      text_key: the field that holds the text.
      label_key: the field that holds the label.
      labels: the labels that an answer can have.
      fields: the fields of each record.
    """

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
        records = read_public(examples, fields, text_key=text_key)
        found = [record[label_key] for record in records]
        wanted = task.labels if labels is None else labels
        known = distinct_texts("labels", sorted(set(found)) if wanted is None else wanted, least=2)
        check_known(found, known, key=label_key)
        return cls(records, text_key, label_key, known, fields)


_OTHER_NAMES = "Name a field of yours: text_key=, label_key= (--text-key, --label-key), or templates of several fields."


def refuse_private(examples: object, instead: str) -> None:
    """Refuses private examples where public ones are expected; `instead` says what the caller should do."""
    if isinstance(examples, PrivateExamples):
        raise fail("public_examples", "public examples", PrivateExamples, instead)


def read_public(examples: object, fields: Sequence[str], *, text_key: str) -> tuple[Mapping[str, str], ...]:
    """Returns the fields of every example, which have to be text; a Document's content is its `text_key`."""
    if isinstance(examples, (str, bytes)) or not isinstance(examples, Sequence):
        raise fail("public_examples", "a list of dicts or Documents", type(examples))
    if not examples:
        raise fail("public_examples", "at least one example", 0)
    return tuple(_record(place, example, text_key, fields) for place, example in enumerate(examples))


def check_known(found: Sequence[str], known: Sequence[str], *, key: str) -> None:
    """Refuses an example whose label is not among the known ones."""
    if (wrong := next((place for place, label in enumerate(found) if label not in known), None)) is not None:
        raise fail(f"public_examples[{wrong}]", f"a label among {tuple(known)!r} under {key!r}", "another")


def _record(place: int, example: object, text_key: str, fields: Sequence[str]) -> dict[str, str]:
    """Returns the fields of one example, which have to be text."""
    values = {**example.metadata, text_key: example.page_content} if isinstance(example, Document) else example
    if not isinstance(values, Mapping):
        raise fail(f"public_examples[{place}]", "a dict or a Document", type(example))
    for name in fields:
        if name not in values:
            raise fail(f"public_examples[{place}]", f"text under {name!r}", list(values), _OTHER_NAMES)
        if not isinstance(values[name], str):
            raise fail(f"public_examples[{place}]", f"text under {name!r}", type(values[name]))
    return {name: values[name] for name in fields}
