"""Records the label of every bound unit as keyed digests, so that a unit whose label changed is refused."""

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

# The labels of one data set are priced in parallel, which is valid only while each unit keeps its label.

Found: TypeAlias = "str | Counter[str]"
LabelsByUnit: TypeAlias = Mapping[bytes, Found]
"""The label of each unit by its digest; how often each label occurs where several records cannot be told apart."""

# A forked child keeps the key and the records: it may go on with the parent's ledger.
_KEY: Final = SYSTEM_RANDOM.entropy(32)
_BOUND: dict[tuple[Any, ...], dict[str, tuple[LabelsByUnit, Callable[[], object]]]] = {}
"""By declared name and ledger: the labels, and a reference that is dead once the ledger is gone."""
_WRITING = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_WRITING.acquire, after_in_parent=_WRITING.release, after_in_child=_WRITING.release)


def labels_by_unit(units: Units, declared: Declaration) -> LabelsByUnit:
    """Returns the label of each unit; an empty mapping if labels do not split the units.

    With `unit_key` a unit is identified by its name. Without it a unit is one record, identified by all its declared
    fields but the label: its position changes if records are inserted before it.
    """
    by_unit: dict[bytes, Found] = {}
    key = declared.label_key
    if key is None:
        return by_unit
    others = [field for field in declared.fields if field != key]
    for name, position in units.positions.items():
        record = units.contents[position][0]
        identity = name if declared.unit_key is not None else json.dumps([record[field] for field in others])
        _count(by_unit, _digest(identity), record[key])
    return by_unit


def has_moved(labels: LabelsByUnit, declared: Declaration) -> bool:
    """Returns whether a unit has another label than this process has bound for it under the same declared name."""
    if not _moved_on_one(labels, declared):
        return False
    gc.collect()  # an unreferenced ledger in memory may wait for the collector
    return _moved_on_one(labels, declared)


def keep_bound(labels: LabelsByUnit, declared: Declaration, ledger_id: str, ledger: object | None) -> None:
    """Records the labels of examples that were bound to a ledger, while the ledger exists; removed units included."""
    if not labels:
        return
    alive = (lambda: True) if ledger is None else weakref.ref(ledger)
    with _WRITING:
        ledgers = {key: bound for key, bound in _BOUND.get(_name_of(declared), {}).items() if bound[1]() is not None}
        before = ledgers[ledger_id][0] if ledger_id in ledgers else {}
        # New mappings: another thread may be reading the old ones.
        merged = labels if labels == before or not before else {**before, **labels, **_unions(before, labels)}
        _BOUND[_name_of(declared)] = {**ledgers, ledger_id: (merged, alive)}


def _moved_on_one(labels: LabelsByUnit, declared: Declaration) -> bool:
    """Returns whether a unit has another label than in a ledger that still exists."""
    ledgers = _BOUND.get(_name_of(declared), {}).values()
    others = [bound for bound, alive in ledgers if alive() is not None and bound != labels]
    return any(_moved(bound[unit], label) for bound in others for unit, label in labels.items() if unit in bound)


def _name_of(declared: Declaration) -> tuple[Any, ...]:
    """Returns the declared values that two data sets share if a ledger can read them as one split."""
    return declared.dataset_id, declared.label_key, declared.labels, declared.unit_key


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), key=_KEY, digest_size=16).digest()


def _count(by_unit: dict[bytes, Found], unit: bytes, label: str) -> None:
    # A Counter only for records that cannot be told apart: one for every unit would cost much memory.
    before = by_unit.get(unit)
    by_unit[unit] = label if before is None else _counter(before) + Counter((label,))


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


def _counter(labels: Found) -> Counter[str]:
    return Counter((labels,)) if isinstance(labels, str) else labels
