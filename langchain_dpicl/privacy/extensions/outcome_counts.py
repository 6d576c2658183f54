"""Counts of declared outcomes over a secret Poisson sample, or over halves, with two-sided geometric noise.

Every unit has one outcome of each declared table, so all counts together cost what one count costs. The halves are
split by a public hash of each unit, so releases about both compose in parallel. Proof:
docs/proofs/outcome-counts.md.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, Self, TypeAlias, final, get_args

import numpy as np
import numpy.typing as npt

from langchain_dpicl._opaque import run_guarded
from langchain_dpicl.exceptions import RecordError
from langchain_dpicl.privacy._validate import Adjacency, check_adjacency, check_int, fail
from langchain_dpicl.privacy.accounting.events import Event, PureEvent
from langchain_dpicl.privacy.extensions.redeclared import PARTS
from langchain_dpicl.privacy.extensions.value_counts import MAX_SCALE, DiscreteLaplaceMechanism
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.privacy.mechanisms.bounded import ClosedClass
from langchain_dpicl.privacy.mechanisms.randomness import SecureRandom
from langchain_dpicl.privacy.mechanisms.release_plan import PoissonUnits, Sample
from langchain_dpicl.privacy.private_examples import SPLIT_RULE, OpenPool, Pool, PrivateExamples, make_declaration

OUTCOME_TEMPLATE = "outcomes: noisy counts of one sample"
"""The ticket template of one release of counts of outcomes."""
CHOICE_TEMPLATE = "choice: the best of several on one sample"
"""The ticket template of one choice by counts of right answers."""
MOST_CELLS = 16_384
"""Most outcomes of all tables together."""

Tables: TypeAlias = tuple[tuple[int, ...], ...]
"""Noisy counts: one inner tuple per table, one count per outcome."""


@final
@dataclass(frozen=True, slots=True)
class OutcomeTable(ClosedClass):
    """Tables of declared outcomes: a unit has at most one outcome of each.

    Formal guarantees:
      - `counts` adds 1 to at most one cell of each table per row, whatever the rows hold, and raises for none of
        them; it refuses rows with more or fewer places than there are tables.
      - Between neighbours all counts together move by at most `l1_sensitivity`.

    Args:
      widths: how many outcomes each table has, public; together at most 16,384.

    Raises:
      ConfigurationError: no table, or one without outcomes, or too many of them.

    Source: docs/proofs/outcome-counts.md.
    """

    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.widths, tuple) or not self.widths:
            raise fail("widths", "a tuple with the number of outcomes of each table", self.widths)
        for width in self.widths:
            check_int("widths", width, low=1)
        if sum(self.widths) > MOST_CELLS:
            raise fail("widths", f"at most {MOST_CELLS} outcomes in all", sum(self.widths), "Declare fewer outcomes.")

    def l1_sensitivity(self, adjacency: Adjacency) -> int:
        """Returns how far all counts together move between neighbours: 1 per table, or 2 where a unit changes.

        Args:
          adjacency: neighbouring relation.
        """
        return len(self.widths) * (2 if check_adjacency(adjacency) == "replace_one" else 1)

    def counts(self, cells: npt.NDArray[Any]) -> Tables:
        """Returns how many rows have each outcome.

        Args:
          cells: float64[rows, tables], private: the place of a row's outcome in each table; what is no place of a table
            (NaN, a fraction, a negative or too large number) counts nowhere.

        Raises:
          ConfigurationError: rows of another form: a unit would count several times in a table.
        """
        rows = np.asarray(cells, dtype=np.float64)
        if rows.ndim != 2 or rows.shape[1] != len(self.widths):
            raise fail("cells", f"rows of {len(self.widths)} places, one of each table", "others")
        found: list[tuple[int, ...]] = []
        for table, width in enumerate(self.widths):
            places = rows[:, table]
            with np.errstate(all="ignore"):
                is_place = (places >= 0) & (places < width) & (np.floor(places) == places)
            found.append(tuple(np.bincount(places[is_place].astype(np.int64), minlength=width).tolist()))
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """Returns the public parameters, for reports."""
        return {"widths": list(self.widths)}


@dataclass(frozen=True, slots=True)
class OutcomePlan:
    """How counts of outcomes are released, once: sample, tables, noise and neighbouring relation.

    Formal guarantees:
      - `event` bounds the privacy loss of one `draw` with one `release`; it is computed from what runs.

    Attributes:
      sampler: which units are read.
      table: the declared outcomes; holds the sensitivity.
      mechanism: adds the noise.
      adjacency: the neighbouring relation all of it is stated under.

    Raises:
      ConfigurationError: a part of another class, a threshold, or noise beyond what counts can hold.
    """

    sampler: PoissonUnits
    table: OutcomeTable
    mechanism: DiscreteLaplaceMechanism
    adjacency: Adjacency

    def __post_init__(self) -> None:
        check_adjacency(self.adjacency)
        proved = {"sampler": PoissonUnits, "table": OutcomeTable, "mechanism": DiscreteLaplaceMechanism}
        for name, kind in proved.items():
            if type(getattr(self, name)) is not kind:  # what looks like one can do anything
                raise fail(name, f"{kind.__name__}, which a proof covers", type(getattr(self, name)).__name__)
        if self.mechanism.threshold is not None:
            raise fail("threshold", "none: every declared outcome has a count", self.mechanism.threshold)
        if self.scale > MAX_SCALE:
            raise fail("noise_multiplier", f"noise of a scale up to {MAX_SCALE}", self.mechanism.noise_multiplier)

    @property
    def scale(self) -> Fraction:
        """Scale of the noise of one count, in units."""
        return self.mechanism.scale(self.l1_sensitivity)

    @property
    def l1_sensitivity(self) -> int:
        """How far all counts together move between neighbours."""
        return self.table.l1_sensitivity(self.adjacency)

    @property
    def event(self) -> Event:
        """What one release on one secret sample costs."""
        return self.sampler.amplify(PureEvent(1.0 / self.mechanism.noise_multiplier))

    @property
    def implementation_delta(self) -> float:
        """Declared gap between the ideal mechanism and what runs: that of the coins of the sample, 0 without one."""
        is_sampled = self.sampler.sampling_rate < 1.0
        return SecureRandom.implementation_delta("binomial") if is_sampled else 0.0

    def with_noise(self, noise_multiplier: float) -> Self:
        """Returns the same plan with other noise.

        Args:
          noise_multiplier: scale of the noise over the L1 sensitivity.
        """
        return dataclasses.replace(self, mechanism=DiscreteLaplaceMechanism(noise_multiplier))

    def tickets(self) -> tuple[Ticket, ...]:
        """Returns the one ticket of the share; unburnt, it can be handed back."""
        return (Ticket(template=OUTCOME_TEMPLATE, event=self.event, refundable=True),)

    def draw(self, num_units: int, *, rng: SecureRandom) -> Sample:
        """Draws the secret sample, one unit per row.

        Args:
          num_units: the private number of units.
          rng: source of coins.
        """
        return self.sampler.draw(num_units, rng=rng)

    def release(self, cells: npt.NDArray[Any], *, rng: SecureRandom) -> Tables:
        """Counts the outcomes of the sampled units and adds the noise.

        Args:
          cells: see `OutcomeTable.counts`.
          rng: source of noise.
        """
        held = {
            f"{table}:{place}": count
            for table, counts in enumerate(self.table.counts(cells))
            for place, count in enumerate(counts)
        }
        noisy = iter(self.mechanism.release(held, declared=list(held), l1_sensitivity=self.l1_sensitivity, rng=rng))
        return tuple(tuple(count for _, count in itertools.islice(noisy, width)) for width in self.table.widths)

    def to_dict(self) -> dict[str, Any]:
        """Returns the public parameters, for plans and reports."""
        return {
            "sampler": self.sampler.to_dict(),
            "table": self.table.to_dict(),
            "mechanism": {"name": self.mechanism.name, "noise_multiplier": self.mechanism.noise_multiplier},
            "adjacency": self.adjacency,
            "scale": float(self.scale),
        }


Part: TypeAlias = Literal["choose", "test"]
"""The two halves."""

_KEY = "part by hash"
_NO_HALVES = "records: the units could not be split into halves. The cause is hidden; the ticket stays charged."


class _HashedPools:
    """Opens the pools of both halves; a unit is in one of them, by its name or its records alone."""

    __slots__ = ("_has_names", "_lock", "_open", "_places")

    def __init__(self, open_all: OpenPool, *, has_names: bool) -> None:
        self._open, self._has_names = open_all, has_names
        self._lock = threading.Lock()
        self._places: Mapping[str, list[int]] | None = None

    def __call__(self, label: str | None) -> Pool:
        whole = self._open(None)
        if label is None:
            return whole
        with self._lock:  # read when a pool is opened, which a ticket was burnt for
            if self._places is None:
                self._places = run_guarded(lambda: self._split(whole))
            if self._places is None:
                raise RecordError(_NO_HALVES)
            index = self._places[label]
        return Pool(lambda: len(index), lambda position: whole.records(index[position]))

    def _split(self, whole: Pool) -> Mapping[str, list[int]]:
        places: dict[str, list[int]] = {part: [] for part in get_args(Part)}
        for position in range(whole.num_units):
            name = whole.name(position) if self._has_names else json.dumps(whole.records(position), sort_keys=True)
            places[part_of(name)].append(position)
        return places


def part_of(name: str) -> Part:
    """Returns the half of a unit, the same in every process.

    Args:
      name: of the unit; without `unit_key` its record as JSON text.
    """
    digest = hashlib.sha256(b"langchain-dpicl part\x00" + name.encode("utf-8", "surrogatepass")).digest()
    parts: tuple[Part, ...] = get_args(Part)
    return parts[digest[0] & 1]


def sizes_of_parts(total: int) -> Mapping[Part, int]:
    """Returns the declared units of each half.

    Args:
      total: declared units of both.
    """
    return {"choose": (total + 1) // 2, "test": total // 2}


def name_of_parts(dataset_id: str) -> str:
    """Returns the declared name of data that are split in halves.

    Args:
      dataset_id: their name before.
    """
    return f"{dataset_id}, in parts"


def split_in_parts(private: PrivateExamples) -> PrivateExamples:
    """Declares the same units again, split in the halves "choose" and "test".

    Formal guarantees:
      - A unit is in one half, by a public hash of its name, or of its record where each record is a unit: a unit more
        or less moves no other. So under `add_remove` releases about different halves compose in parallel. Under
        `replace_one` a unit may leave one half and join the other, so they compose in sequence.
      - The same units on the same ledger; no record is read before a pool of a half is opened.
      - The same declaration again is the same object.

    Args:
      private: the examples, at least two declared units.

    Raises:
      ConfigurationError: `private` is something else, or one unit is declared.
    """
    if not isinstance(private, PrivateExamples):
        raise fail("private", "PrivateExamples", type(private).__name__)
    if private.blocks is not None:  # the halves would name no blocks
        advice = "Who is in a range differs from run to run: build PrivateExamples of the records instead."
        raise fail("private", "examples that are of no stream", type(private).__name__, advice)
    old, total = private._declared, private.public_size_of(None)  # noqa: SLF001  its own family
    if total < 2:
        raise fail("public_size", "at least 2 units, for two parts", total)
    root, bond = private._root or private, private._bond  # noqa: SLF001
    origin: dict[str, Any] = {"from": root.dataset_id, "fold_case": None, "rule": SPLIT_RULE, "by": PARTS}
    declared = make_declaration(
        dataset_id=name_of_parts(old.dataset_id),
        public_size=sizes_of_parts(total),
        text_key=old.text_key,
        label_key=_KEY,
        labels=get_args(Part),
        unit_key=old.unit_key,
        fields=old.extra_fields,
        max_chars=old.max_chars,
        records_per_unit=old.records_per_unit,
        allow_large_delta=old.allow_large_delta,
        redeclared=origin,
    )
    with bond.lock:
        made = bond.by_declaration.get(declared)
        if made is None:
            made = PrivateExamples.__new__(PrivateExamples)
            pools = _HashedPools(private._open, has_names=old.unit_key is not None)  # noqa: SLF001
            made._adopt(declared, (pools, private._remove, private._redeclare), bond, root)  # noqa: SLF001
            bond.by_declaration[declared] = made
    return made
