"""The methods of the tables: their columns, knobs, quick settings and ablations."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from _tables_cells import INSTRUCTION, NOISELESS, NON_PRIVATE, ZERO, Cell, Task
from _tables_files import LABELS, SLOTS, DataFile
from _tables_free import FREE_KNOBS, free_form
from _tables_room import Result, Room
from _tables_soft import SOFT_KNOBS, SoftModels, soft_prompt
from _tables_texts import SLOT_KNOBS, TEXT_KNOBS, TEXT_OWN, generation, slots
from _tables_votes import PATE_KNOBS, VOTING_KNOBS, pate, voting

EMBEDDED, MATCH = "embedded", "longest_match"
REVISION = 2
"""Raised when a method's way of measuring changes, so that its cells are measured anew."""

Measure = Callable[[Room, Cell, Mapping[str, Any]], Result]


@dataclass(frozen=True)
class Method:
    """A method of the tables.

    Attributes:
      name: in cells and on the command line.
      title: in tables.
      kind: of the data sets it is for.
      measure: measures one cell.
      knobs: its settings.
      quick: what is smaller with --quick.
      columns: beside zero-shot, the epsilons and non-private.
      non_private: what its column without privacy is.
      ablations: by knob, the values that are compared; "paper" says whose ablation it is.
      ablation_at: epsilon columns of an ablation.
      model: the model's name in fingerprints, where it is not the engine's.
      own: settings that a paper has for one data set, by stem; quick ones and given ones come before them.
    """

    name: str
    title: str
    kind: str
    measure: Measure
    knobs: Mapping[str, Any]
    quick: Mapping[str, Any]
    columns: tuple[str, ...]
    non_private: str
    ablations: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    ablation_at: tuple[str, ...] = ("4",)
    model: str = ""
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def knobs_of(self, *, is_quick: bool, given: Mapping[str, Any], variant: str, stem: str = "") -> dict[str, Any]:
        """Returns the settings of a cell: the method's, the data set's, the quick ones, those given, the variant's."""
        own = {**self.knobs, **self.own.get(stem, {}), **(self.quick if is_quick else {})}
        own |= {name: value for name, value in given.items() if name in own and value is not None}
        if variant:
            name, _, value = variant.partition("=")
            own[name] = json.loads(value)
        return own

    def ats(self, epsilons: Sequence[float]) -> tuple[str, ...]:
        """Returns the columns, zero-shot first, non-private last."""
        private = tuple(f"{epsilon:g}" for epsilon in epsilons)
        first = tuple(one for one in self.columns if one == INSTRUCTION)
        last = tuple(one for one in self.columns if one != INSTRUCTION)
        return (ZERO, *first, *private, *last, NON_PRIVATE)

    def variants(self, usual: Mapping[str, Any]) -> Iterator[str]:
        """Yields the ablation's variants: every value but the usual one, which the main table has."""
        for knob, values in self.ablations.items():
            yield from (f"{knob}={json.dumps(value)}" for value in values if value != usual[knob])


_SHORT_MATCHES = (1, 2, 4)
"""Smaller relatives of the embedded model: tokens behind which it copies at most, instead of 8."""
_GENERATION = {
    "shots": (1, 2, 4, 8, 12),
    "num_slots": (10, 20, 40, 80),
    "shots_per_slot": (1, 2, 4),
    "public_top_k": (5, 20, 100, 500, None),
    "mechanism": ("gaussian", "gumbel", "permute_and_flip", "recentered_clip"),
    "redraw_every": (5, 15),
    MATCH: _SHORT_MATCHES,
}
_VOTING = {
    "shots": (1, 2, 8, 16),
    "num_slots": (5, 20, 40),
    "mechanism": ("gumbel", "permute_and_flip"),
    "queries": (100, 1_000, 100_000),
    "overfill": (0.5, 2.0, 4.0),
    "content_free": (1, 3),
    MATCH: _SHORT_MATCHES,
}
_PATE = {"content_free": (1, 3), "inputs": (20, 100), "teachers": (20, 40, 200), "shots": (1, 2), MATCH: _SHORT_MATCHES}
_FREE = {"shots": (1, 8), "num_slots": (10, 80), "queries": (10, 1_000), MATCH: _SHORT_MATCHES}
_SLOTS = {"shots": (1, 8, 12), "num_slots": (10, 40), "public_top_k": (20, 500, None), "mechanism": ("gaussian",)}
_SOFT = {"batch": (64, 256), "virtual_tokens": (2, 16)}
_QUICK_PATE = {"questions": 200, "inputs": 50, "teachers": 80, "candidates": 20, "validation": 40}
_VOTES = "the same votes without noise"
_REAL = "real records as demonstrations"


def methods_of(models: SoftModels) -> dict[str, Method]:
    """Returns the methods by name."""
    writing, both = "few-shot generation", ("4", NON_PRIVATE)
    found = [
        Method(
            name="generation",
            title=writing,
            kind=LABELS,
            measure=generation,
            knobs=TEXT_KNOBS,
            own=TEXT_OWN,
            quick={"questions": 200, "max_tokens": 15, "public_top_k": 100},
            columns=(INSTRUCTION, NOISELESS),
            non_private=_REAL,
            ablations=_GENERATION,
        ),
        Method(
            name="voting",
            title="votes per query",
            kind=LABELS,
            measure=voting,
            knobs=VOTING_KNOBS,
            quick={"questions": 200, "draws": 20},
            columns=(INSTRUCTION,),
            non_private=_VOTES,
            ablations=_VOTING,
            ablation_at=both,
        ),
        Method(
            name="pate",
            title="PromptPATE",
            kind=LABELS,
            measure=pate,
            knobs=PATE_KNOBS,
            quick={**_QUICK_PATE, "upper_candidates": 50},
            columns=(INSTRUCTION,),
            non_private="the best of many prompts of real records",
            ablations=_PATE,
        ),
        Method(
            name="free-form",
            title="free-form answers",
            kind=SLOTS,
            measure=free_form,
            knobs=FREE_KNOBS,
            quick={"questions": 100},
            columns=(INSTRUCTION,),
            non_private=_VOTES,
            ablations=_FREE,
            ablation_at=both,
        ),
        Method(
            name="slots",
            title=writing,
            kind=SLOTS,
            measure=slots,
            knobs=SLOT_KNOBS,
            quick={"questions": 200},
            columns=(),
            non_private=_REAL,
            ablations=_SLOTS,
        ),
        Method(
            name="promptdpsgd",
            title="PromptDPSGD",
            kind=LABELS,
            measure=partial(soft_prompt, models=models),
            knobs=SOFT_KNOBS,
            quick={"questions": 200, "steps": 30, "batch": 64},
            columns=(),
            non_private="the prompt trained without clip and noise",
            ablations=_SOFT,
            model=models.name,
        ),
    ]
    return {one.name: one for one in found}


@dataclass(frozen=True)
class Grid:
    """What is asked for.

    Attributes:
      methods: in the order in which they run.
      files: the data sets.
      epsilons: of the private columns.
      seeds: how many, by method where one has fewer.
      is_quick: whether settings are small.
      given: knobs of the command line.
      model: the engine's name in fingerprints.
      has_ablations: whether those are asked for.
      ablation_files: stems of the data sets that they are about.
      ablation_seeds: how many seeds they have.
      fewer: seeds of methods that have fewer.
      ablation_knobs: the knobs that they change; None: all.
    """

    methods: Sequence[Method]
    files: Sequence[DataFile]
    epsilons: Sequence[float]
    seeds: int
    is_quick: bool
    given: Mapping[str, Any]
    model: str
    has_ablations: bool
    ablation_files: Sequence[str]
    ablation_seeds: int
    fewer: Mapping[str, int] = field(default_factory=dict)
    ablation_knobs: Sequence[str] | None = None

    def tasks(self) -> list[Task]:
        """Returns every cell with its settings: seed by seed, so that what stops early has all data sets."""
        found = [
            self.task(method, file, Cell(method.name, file.stem, at, seed))
            for seed in range(self.seeds)
            for method in self.methods
            if seed < self.fewer.get(method.name, self.seeds)
            for file in self.files
            if file.kind == method.kind
            for at in method.ats(self.epsilons)
        ]
        return found + list(self._ablations()) if self.has_ablations else found

    def task(self, method: Method, file: DataFile, cell: Cell) -> Task:
        """Returns a cell with every setting that its number depends on."""
        knobs = self.knobs(method, file, variant=cell.variant)
        about = {
            "revision": REVISION,
            "data": file.digest,
            "words": dict(file.words),
            "model": method.model or self.model,
        }
        return Task(cell, {**about, "knobs": knobs})

    def knobs(self, method: Method, file: DataFile | None = None, *, variant: str = "") -> dict[str, Any]:
        """Returns the settings of a method, of it on a data set, or of a variant."""
        stem = "" if file is None else file.stem
        return method.knobs_of(is_quick=self.is_quick, given=self.given, variant=variant, stem=stem)

    def variants(self, method: Method, file: DataFile) -> list[str]:
        """Returns the variants of a method's ablation; only the embedded model has smaller relatives."""
        found = method.variants(self.knobs(method, file)) if self.has_ablations else ()
        return [
            one
            for one in found
            if (self.model == EMBEDDED or not one.startswith(MATCH))
            and (self.ablation_knobs is None or one.partition("=")[0] in self.ablation_knobs)
        ]

    def _ablations(self) -> Iterator[Task]:
        for seed in range(self.ablation_seeds):
            for method in self.methods:
                for file in self.files:
                    if file.kind == method.kind and file.stem in self.ablation_files:
                        yield from (
                            self.task(method, file, Cell(method.name, file.stem, at, seed, variant))
                            for variant in self.variants(method, file)
                            for at in method.ablation_at
                        )
