"""The record fields that an engine is trained on, and the public validation records."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_dpicl.backends.base import GradientBackend, TrainingExample
from langchain_dpicl.backends.tuning.tasks import PromptTask
from langchain_dpicl.backends.walk import public_failure
from langchain_dpicl.exceptions import ConfigurationError, DPICLError
from langchain_dpicl.privacy._validate import check_int, fail
from langchain_dpicl.privacy.examples import PrivateExamples
from langchain_dpicl.release.sample import Record

_DEFAULT_ROUNDS = 20
"""Validations of a run, by default."""


@dataclass(frozen=True, slots=True)
class ExampleFields:
    """The record fields of a training example; public.

    Attributes:
      text: field of the input.
      target: field of the answer.
      pair: field of the second input, or None.
    """

    text: str
    target: str
    pair: str | None = None

    @classmethod
    def of(
        cls, private: PrivateExamples, task: PromptTask, *, text_key: Any, target_key: Any, pair_key: Any
    ) -> ExampleFields:
        """Checks the field names against the declared fields; by default text and label."""
        text = private.text_key if text_key is None else text_key
        target = private.label_key if target_key is None else target_key
        if target is None:
            advice = "Declare PrivateExamples(label_key=..., labels=...), or fields=(...) and give target_key=."
            raise fail("target_key", "the field that holds the answer", target, advice)
        if task.writes_text and private.labels and target_key is None:
            advice = (
                "Give labels=[...] or verbalizers={...} to choose among labels, or target_key= to write the label as "
                "text."
            )
            raise fail(
                "labels", "a task with labels, because the examples have labels", "one that writes texts", advice
            )
        keys = {"text_key": text, "target_key": target} | ({} if pair_key is None else {"pair_key": pair_key})
        for name, key in keys.items():
            if key not in private.fields:
                advice = "Declare further fields with PrivateExamples(fields=...)."
                raise fail(name, f"a declared field among {list(private.fields)}", key, advice)
        if len(set(keys.values())) != len(keys):
            raise fail(", ".join(keys), "different fields", list(keys.values()))
        cls._check_labels(private, task, target)
        if task.kind != "sequence_classification" and task.takes_pair != (pair_key is not None):
            expected = "the field that fills {pair}" if task.takes_pair else "None: the template has no {pair}"
            raise fail("pair_key", expected, pair_key)
        return cls(text, target, pair_key)

    @staticmethod
    def _check_labels(private: PrivateExamples, task: PromptTask, target: str) -> None:
        # Only the declared label has a closed list of values.
        declared = private.labels if target == private.label_key else None
        if task.labels and declared and (unknown := sorted(set(declared) - set(task.labels))):
            advice = "Give the task the declared labels of the examples."
            raise fail("labels", f"labels of the task: {list(task.labels)}", unknown, advice)

    def examples_of(self, records: Sequence[Record]) -> tuple[TrainingExample, ...]:
        """Returns the examples of one unit. Runs on private records: keeps nothing."""
        return tuple(
            [
                TrainingExample(
                    record[self.text], None if self.pair is None else record[self.pair], record[self.target]
                )
                for record in records
            ]
        )

    def examples_in(self, name: str, records: Any, *, labels: Sequence[str] = ()) -> tuple[TrainingExample, ...]:
        """Returns the examples of records that no ledger protects; messages name index and field, no content.

        With `labels` every answer must be one of them, because the loss would silently ignore others.
        """
        if isinstance(records, PrivateExamples):
            advice = "Train on private examples with PromptDPSGD.train and a budget."
            raise fail(name, "records that no ledger protects", type(records).__name__, advice)
        if isinstance(records, str | bytes | Mapping) or not isinstance(records, Iterable):
            raise fail(name, "a list of mappings", type(records).__name__)
        wanted = [key for key in (self.text, self.pair, self.target) if key is not None]
        listed = list(records)
        for place, record in enumerate(listed):
            is_whole = isinstance(record, Mapping) and all(isinstance(record.get(key), str) for key in wanted)
            if not is_whole:
                raise ConfigurationError(f"{name}[{place}]: expected a mapping with text under {wanted}.")
            if labels and record[self.target] not in labels:
                raise ConfigurationError(
                    f"{name}[{place}]: expected one of {list(labels)} under {self.target!r}, found another label. "
                    "Correct or leave out the record."
                )
        if not listed:
            raise fail(name, "at least one record", [])
        return self.examples_of(listed)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        return {"text_key": self.text, "pair_key": self.pair, "target_key": self.target}


@dataclass(frozen=True, slots=True)
class Validation:
    """PUBLIC examples whose loss is shown in training, and how often.

    Attributes:
      examples: public.
      every: steps between two validations; the last step is validated too.
    """

    examples: tuple[TrainingExample, ...] = field(repr=False)
    every: int

    @classmethod
    def of(
        cls, fields: ExampleFields, records: Any, *, labels: Sequence[str] = (), every: Any, steps: int
    ) -> Validation | None:
        """Reads public records; None without records."""
        if records is None:
            if every is not None:
                raise fail("validate_every", "None without validation=", every)
            return None
        apart = max(1, math.ceil(steps / _DEFAULT_ROUNDS)) if every is None else every
        return cls(fields.examples_in("validation", records, labels=labels), check_int("validate_every", apart, low=1))

    def is_due(self, step: int, *, steps_left: int) -> bool:
        """Whether the current step is validated."""
        return step % self.every == 0 or steps_left == 0


@dataclass(frozen=True, slots=True)
class AskLoss:
    """Request for the mean loss of PUBLIC examples at released weights; NaN if none has a finite loss.

    Attributes:
      backend: the engine.
      weights: float64[width], released.
      examples: public.
    """

    backend: GradientBackend = field(repr=False)
    weights: Any = field(repr=False)
    examples: tuple[TrainingExample, ...] = field(repr=False)

    def run(self) -> float:
        """Computes the loss."""
        try:
            losses = [float(loss) for loss in self.backend.losses(self.weights, self.examples)]
        except DPICLError:
            raise
        except Exception as error:  # noqa: BLE001  engines may raise anything
            kind = type(error).__name__
        else:
            known = [loss for loss in losses if math.isfinite(loss)]
            return math.fsum(known) / len(known) if known else math.nan
        raise public_failure(kind)

    async def arun(self) -> float:
        """Async version of `run`."""
        return await asyncio.to_thread(self.run)
