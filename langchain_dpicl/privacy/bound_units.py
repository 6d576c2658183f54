"""Keeps the label of every unit that this process has bound, as keyed digests, so that a moved label is refused."""

from __future__ import annotations

import gc
import json
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any, Final, TypeAlias

from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.privacy.units import Declaration, Units

# Labels of one data set are priced in parallel, which holds only while each unit keeps its label.

Found: TypeAlias = "str | Counter[str]"
LabelsByUnit: TypeAlias = Mapping[bytes, Found]
"""The label of each unit by its digest; how often each label occurs where several records cannot be told apart."""

# A child of a fork keeps the key and what is bound: it may go on with the parent's ledger.
_KEY: Final = SYSTEM_RANDOM.entropy(32)
_BOUND: dict[tuple[Any, ...], dict[str, tuple[LabelsByUnit, Callable[[], object]]]] = {}
"""By declared name and ledger: the labels, and what tells whether the ledger still exists."""
_WRITING = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_WRITING.acquire, after_in_parent=_WRITING.release, after_in_child=_WRITING.release)


def labels_by_unit(units: Units, declared: Declaration) -> LabelsByUnit:
    """Returns the label of each unit; nothing where labels do not split the units.

    With `unit_key` a unit is known by its name. Without it a unit is one record, known by all its declared fields but
    the label; its position would change where records are put before it.
    """
    found: dict[bytes, Found] = {}
    key = declared.label_key
    if key is None:
        return found
    others = [field for field in declared.fields if field != key]
    for name, position in units.positions.items():
        record = units.contents[position][0]
        known_by = name if declared.unit_key is not None else json.dumps([record[field] for field in others])
        _count(found, _digest(known_by), record[key])
    return found


def has_moved(labels: LabelsByUnit, declared: Declaration) -> bool:
    """Returns whether a unit has another label than this process has bound for it under the same declared name."""
    if not _moved_on_one(labels, declared):
        return False
    gc.collect()  # a ledger in memory that nobody holds any more may wait for the collector
    return _moved_on_one(labels, declared)


def keep_bound(labels: LabelsByUnit, declared: Declaration, ledger_id: str, ledger: object | None) -> None:
    """Keeps the labels of examples that a ledger took, as long as the ledger exists; removed units stay known."""
    if not labels:
        return
    alive = (lambda: True) if ledger is None else weakref.ref(ledger)
    with _WRITING:
        ledgers = {key: kept for key, kept in _BOUND.get(_name_of(declared), {}).items() if kept[1]() is not None}
        before = ledgers[ledger_id][0] if ledger_id in ledgers else {}
        # New mappings: another thread may be reading the old ones.
        kept = labels if labels == before or not before else {**before, **labels, **_unions(before, labels)}
        _BOUND[_name_of(declared)] = {**ledgers, ledger_id: (kept, alive)}


def _moved_on_one(labels: LabelsByUnit, declared: Declaration) -> bool:
    """Returns whether a unit has moved since a ledger took it that still exists."""
    kept = _BOUND.get(_name_of(declared), {}).values()
    others = [bound for bound, alive in kept if alive() is not None and bound != labels]
    return any(_moved(bound[unit], label) for bound in others for unit, label in labels.items() if unit in bound)


def _name_of(declared: Declaration) -> tuple[Any, ...]:
    """Returns what a ledger would have to hold too before two data sets could be read as one split."""
    return declared.dataset_id, declared.label_key, declared.labels, declared.unit_key


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), key=_KEY, digest_size=16).digest()


def _count(found: dict[bytes, Found], unit: bytes, label: str) -> None:
    known = found.get(unit)
    if known is None:
        found[unit] = label
    elif isinstance(known, str):
        found[unit] = Counter((known, label))
    else:
        known[label] += 1


def _moved(before: Found, now: Found) -> bool:
    """Returns whether one label lost a unit and another gained one."""
    if isinstance(before, str) and isinstance(now, str):
        return before != now
    old, new = _counter(before), _counter(now)
    return bool(old - new) and bool(new - old)


def _unions(bound: LabelsByUnit, labels: LabelsByUnit) -> dict[bytes, Found]:
    """Returns, for every unit in both whose labels differ, the larger count of each label."""
    changed = [unit for unit, label in labels.items() if bound.get(unit, label) != label]
    return {unit: _counter(bound[unit]) | _counter(labels[unit]) for unit in changed}


def _counter(found: Found) -> Counter[str]:
    return Counter((found,)) if isinstance(found, str) else found
