"""Checks the options of labelling, fills in their defaults, and turns public inputs into queries."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_core.documents import Document

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.pate.plan import DEFAULT_FIXED_TEACHERS, LabellingPlan, plan_labelling, rejection
from langchain_dpicl.planning.expected_utility import RowDesign
from langchain_dpicl.privacy._validate import Adjacency, RowShape, check_choice, check_int, check_real, fail
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.privacy.extensions.confident_gnmax import ConfidentGNMaxMechanism
from langchain_dpicl.privacy.extensions.method_tickets import TEACHERS, Teachers
from langchain_dpicl.privacy.extensions.registry import MECHANISMS, mechanism_by_name
from langchain_dpicl.privacy.mechanisms.noise import Mechanism
from langchain_dpicl.privacy.mechanisms.vote_sums import ProbabilitySum, VoteSum
from langchain_dpicl.released.labelled_pool import LabelledPool, PoolEntry
from langchain_dpicl.runs.query_plan import recommended_design
from langchain_dpicl.tasks.labels import VotingTask
from langchain_dpicl.tasks.templates import FewShotTemplate, Query, public_text

Fields = dict[str, str]


@dataclass(frozen=True, slots=True)
class InputTemplate:
    """Templates of public inputs: as queries, and as demonstrations once they are labelled. Public.

    Attributes:
      wording: the prompt templates.
      text_key: field of the examples that holds the text.
      label_key: field of the examples that holds the label.
    """

    wording: FewShotTemplate
    text_key: str
    label_key: str

    @classmethod
    def of(cls, private: PrivateExamples, wording: FewShotTemplate) -> InputTemplate:
        """Uses the field names of the private examples."""
        if private.label_key is None:
            advice = "Declare PrivateExamples(label_key=..., labels=...)."
            raise fail("private", "examples with a label field, which demonstrations show", None, advice)
        if private.label_key not in wording.example_fields:
            raise fail("example_prompt", f"a template that shows {{{private.label_key}}}", wording.example_prompt)
        return cls(wording, private.text_key, private.label_key)

    @property
    def field_of(self) -> dict[str, str]:
        """The field that fills each variable of the query: the one of that name, or the text for `input`."""
        names = self.wording.input_variables
        if self.label_key in names:
            raise fail("suffix", "a template of the query without its label", f"{{{self.label_key}}}")
        known = set(self.wording.example_fields)
        return {
            name: self.text_key if name not in known and (name == "input" or len(names) == 1) else name
            for name in names
        }

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of a public input: those of a demonstration without the label, and those of the query."""
        shown = (name for name in self.wording.example_fields if name != self.label_key)
        return tuple(dict.fromkeys((*shown, *self.field_of.values())))

    def fields_of(self, public_input: Any) -> Fields:
        """Returns the fields of a public input: text, a document, or a dict of fields (or of the query's variables).

        Other keys of a dict are left out.
        """
        names = self.fields
        if isinstance(public_input, Document) and len(names) == 1:
            public_input = public_input.page_content
        if isinstance(public_input, str) and len(names) == 1:
            return {names[0]: public_input}
        if not isinstance(public_input, Mapping):
            expected = "text" if len(names) == 1 else f"a dict with {list(names)}"
            raise fail("public_inputs", expected, type(public_input).__name__)
        if self.label_key in public_input:
            advice = "Labelled examples are added with add_public_example, which is free."
            raise fail("public_inputs", f"inputs without {self.label_key!r}", sorted(map(str, public_input)), advice)
        variables = {field: name for name, field in self.field_of.items()}
        keys = {name: name if name in public_input else variables.get(name, name) for name in names}
        if missing := [name for name, key in keys.items() if key not in public_input]:
            raise fail("public_inputs", f"a dict with {list(names)}", f"{missing} missing")
        return {name: public_text(f"public_inputs[{name!r}]", public_input[key]) for name, key in keys.items()}

    def query_of(self, fields: Mapping[str, str]) -> Query:
        """Returns the query that asks for the label of a public input."""
        return tuple(fields[field] for field in self.field_of.values())

    def text_of(self, fields: Mapping[str, str]) -> str:
        """Returns the values of an input's query as one text, for comparisons."""
        return "\n".join(self.query_of(fields))

    def waiting(self, inputs: Iterable[Any]) -> list[PoolEntry]:
        """Returns the distinct inputs as waiting entries: equal inputs are charged once."""
        if isinstance(inputs, str | Mapping) or not isinstance(inputs, Iterable):
            raise fail("public_inputs", "a list of inputs", type(inputs).__name__)
        every = [self.fields_of(public_input) for public_input in inputs]
        distinct = {key_of(fields): fields for fields in reversed(every)}  # of equal inputs the first is kept
        return [
            PoolEntry(fields=distinct[key], label=None, status="waiting") for key in dict.fromkeys(map(key_of, every))
        ]


def key_of(fields: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Returns the key of an input: equal inputs have equal keys."""
    return tuple(sorted(fields.items()))


def teacher_design(
    private: PrivateExamples,
    *,
    teachers: str,
    rows: str | None,
    num_slots: int | None,
    shots_per_slot: int | None,
    sampling: str,
    overfill: float | None,
) -> RowDesign | None:
    """Returns the requested shape of the teachers; None: the planner chooses."""
    check_choice("teachers", teachers, TEACHERS)
    if teachers == "fixed":
        if sampling not in {"poisson", "partition"} or rows not in {None, "slots"} or overfill is not None:
            expected = "their defaults with teachers='fixed' (a public partition into slots)"
            raise fail("sampling, rows, overfill", expected, (sampling, rows, overfill))
        if (num_slots, shots_per_slot) == (None, None):
            return None
        sampling = "partition"
    shape: dict[str, Any] = {"num_slots": num_slots, "shots_per_slot": shots_per_slot, "overfill": overfill}
    if (rows, num_slots, shots_per_slot, overfill) == (None,) * 4 and sampling == "poisson":
        return None
    return RowDesign.choose(rows=rows, sampling=sampling, smallest_size=private.public_size_of(None), **shape)


def check_rejection(
    abstain_below: float | str | None, mechanism: str, other_label: Any, labels: Sequence[str], *, has_other: bool
) -> float | None:
    """Returns the share of the expected votes that a label needs; checks `other_label` too."""
    if other_label is not None and (not isinstance(other_label, str) or not other_label):
        raise fail("other_label", "a non-empty text, or None", other_label)
    if has_other and other_label in labels:
        raise fail("other_label", "a text that is none of the labels, or None", other_label)
    is_confident = mechanism == "confident_gnmax"
    if abstain_below is None or abstain_below == "auto":
        return None if abstain_below is None or is_confident else 0.5 / len(labels)
    if is_confident:
        raise fail("abstain_below", "None with confident_gnmax, which has a threshold of its own", abstain_below)
    return check_real("abstain_below", abstain_below, low=0.0, high=1.0, low_open=True)


def labelling_mechanism(mechanism: str, confident: Any, *, row_shape: RowShape, adjacency: Adjacency) -> Mechanism:
    """Returns the mechanism; `confident` gives the noise of Confident-GNMax, the plan calibrates the others."""
    check_choice("mechanism", mechanism, (*MECHANISMS, "confident_gnmax"))
    if (mechanism == "confident_gnmax") != (confident is not None):
        raise fail(
            "confident", "(threshold, sigma1, sigma2) with mechanism='confident_gnmax', and only there", confident
        )
    if confident is None:
        return mechanism_by_name(mechanism)(noise_multiplier=1.0)
    if not isinstance(confident, tuple | list) or len(confident) != 3:
        raise fail("confident", "(threshold, sigma1, sigma2), in votes", confident)
    threshold, test, votes = (check_real("confident", value) for value in confident)
    return ConfidentGNMaxMechanism.of_votes(
        threshold=threshold, sigma_threshold=test, sigma_votes=votes, row_shape=row_shape, adjacency=adjacency
    )


def read_checkpoint(checkpoint: Any) -> tuple[Path | None, LabelledPool | None]:
    """Returns the path of a checkpoint, and the pool in it if the file exists."""
    if checkpoint is None:
        return None, None
    if not isinstance(checkpoint, str | os.PathLike):
        raise fail("checkpoint", "the path of a file, or None", type(checkpoint).__name__)
    path = Path(checkpoint)
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK) or path.is_dir():
        raise fail("checkpoint", "a file in a folder that exists and can be written", str(path))
    return path, LabelledPool.load(path) if path.exists() else None


def query_count(max_queries: int | None, entries: Sequence[PoolEntry], saved_pool: LabelledPool | None) -> int:
    """Returns how many inputs the share pays for: as given, as in the checkpoint, or one for each input."""
    if max_queries is not None:
        return check_int("max_queries", max_queries, low=1)
    if saved_pool is not None:
        return check_int("max_queries of the checkpoint", saved_pool.plan.get("max_queries"), low=1)
    if not entries:
        raise fail("public_inputs", "at least one input, or max_queries= for later inputs", [])
    return len(entries)


def resume_entries(
    saved_pool: LabelledPool | None,
    entries: Sequence[PoolEntry],
    *,
    component: str | None,
    payer: tuple[PrivateExamples, Budget],
    public: Mapping[str, Any],
) -> tuple[str | None, list[PoolEntry]]:
    """Returns the component's name and all entries of a run, those of a checkpoint first."""
    if saved_pool is None:
        return component, list(entries)
    name = saved_pool.report.get("component") if component is None else component
    private, budget = payer
    expected: dict[str, Any] = {
        "dataset_id": private.dataset_id,
        "ledger_id": budget.ledger_id,
        "adjacency": budget.adjacency,
    }
    expected["component"] = name
    differing = [key for key, value in expected.items() if saved_pool.report.get(key) != value]
    plain = json.loads(json.dumps(dict(public)))  # tuples are lists in files
    differing += sorted(key for key in {*saved_pool.plan, *plain} if saved_pool.plan.get(key) != plain.get(key))
    if differing:
        advice = (
            "Labels of a lost ledger stay usable for free: PromptPATEExampleSelector.load(path). Or give "
            "another file for this run."
        )
        raise fail("checkpoint", "labels of the same run", f"differences in {differing}", advice)
    known = {key_of(entry.fields) for entry in saved_pool.entries}
    return name, [*saved_pool.entries, *(entry for entry in entries if key_of(entry.fields) not in known)]


def check_paid(entries: Sequence[PoolEntry], *, used: int) -> None:
    """Refuses a checkpoint with more releases than the share has paid for."""
    released = sum(entry.status in {"labelled", "rejected"} for entry in entries)
    if released > used:
        expected = f"at most the {used} labels that this component has paid for on this ledger"
        raise fail("checkpoint", expected, released, "Give the component that paid, or another file.")


def draft_pool(
    entries: Sequence[PoolEntry], *, inputs: InputTemplate, task: VotingTask, report: Mapping[str, Any], public: Any
) -> LabelledPool:
    """Returns the pool of a run."""
    shown = {label: texts[0].strip() for label, texts in task.texts.items()}
    return LabelledPool(
        tuple(entries), label_key=inputs.label_key, labels=task.labels, shown=shown, report=report, plan=public
    )


def labelling_plan(
    private: PrivateExamples,
    task: VotingTask,
    design: RowDesign | None,
    *,
    teachers: Teachers,
    mechanism: str,
    confident: tuple[float, float, float] | None,
    noise_multiplier: float | None,
    abstain_below: float | None,
    width: int,
    **terms: Any,
) -> LabellingPlan:
    """Plans the labels; `terms` are epsilon, delta, adjacency, max_queries and max_answers."""
    size = private.public_size_of(None)
    if design is None and teachers == "fixed":
        design = RowDesign.choose(num_slots=min(DEFAULT_FIXED_TEACHERS, size), sampling="partition")
    if design is None:
        chosen = {name: terms[name] for name in ("epsilon", "delta", "max_queries", "adjacency")}
        is_searched = teachers == "fresh" and confident is None and noise_multiplier is None
        is_searched = is_searched and mechanism in MECHANISMS
        design = (
            recommended_design(size, labels=len(task.labels), mechanism=mechanism, **chosen)
            if is_searched
            else RowDesign.choose(smallest_size=size)
        )
    built = labelling_mechanism(mechanism, confident, row_shape=design.rows, adjacency=terms["adjacency"])
    rejects = rejection(abstain_below, design, public_size=size, mechanism=built)
    return plan_labelling(
        size,
        teachers=teachers,
        aggregation=ProbabilitySum() if task.votes == "soft" else VoteSum(),
        mechanism=built,
        noise_multiplier=noise_multiplier,
        design=design,
        width=width + len(rejects["constants"]),
        partition=private.dataset_id,
        **rejects,
        **terms,
    )
