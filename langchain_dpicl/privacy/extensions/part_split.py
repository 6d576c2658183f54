"""Splits private examples in two halves by a public hash of each unit, so that releases about both compose in parallel.

Proof: docs/proofs/outcome-counts.md.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.privacy.data.private_examples import OpenPool, Pool, PrivateExamples
from langchain_dpicl.privacy.data.units import SPLIT_RULE, make_declaration
from langchain_dpicl.privacy.extensions.redeclared import PARTS

Part: TypeAlias = Literal["choose", "test"]
"""The two halves."""

_KEY = "part by hash"


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
                self._places = self._split(whole)
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
