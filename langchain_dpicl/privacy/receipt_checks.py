"""Compares a receipt with the ledger, which must hold the line that the receipt names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from langchain_dpicl.exceptions import LedgerRollbackError, PrivacyBudgetMismatchError
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.privacy.ledger_state import RESERVE
from langchain_dpicl.privacy.stores import LedgerHeader, LedgerStore

# A ledger cannot detect that an older copy of it was restored; the holder of a receipt can.

_FIELDS = ("ledger_id", "entry", "entry_hash")


def check_receipt(receipt: Any, header: LedgerHeader, store: LedgerStore, count: Callable[[], int]) -> None:
    """Refuses a receipt that names no line of a ledger of `count()` lines; see `Budget.check_receipt`."""
    ledger_id, entry, entry_hash = _read(receipt)
    if ledger_id != header.ledger_id:
        msg = f"receipt: expected one of ledger {header.ledger_id}, found one of {ledger_id}."
        raise PrivacyBudgetMismatchError(msg + " Open the ledger that it names.")
    last = count()
    if entry is None:
        return
    line = next(iter(store.records(entry - 1)), None) if entry <= last else None
    fault = ""
    if line is None:
        fault = f"{last} lines"
    elif line.hash != line.computed_hash or entry_hash not in {None, line.hash}:
        fault = f"another line with the hash {line.hash}"
    elif line.kind != RESERVE:
        fault = f"a line of the kind {line.kind!r}"
    if fault:
        msg = f"receipt: expected line {entry} with the hash {entry_hash} in ledger {ledger_id}, found {fault}."
        advice = "An older copy, or one that went on elsewhere, took the ledger's place. Bring the ledger itself back."
        raise LedgerRollbackError(f"{msg} {advice}")


def _read(receipt: Any) -> tuple[str, int | None, str | None]:
    if isinstance(receipt, Mapping):
        ledger_id, entry, entry_hash = (receipt.get(name) for name in _FIELDS)
    else:
        ledger_id, entry, entry_hash = (getattr(receipt, name, None) for name in _FIELDS)
    is_number = isinstance(entry, int) and not isinstance(entry, bool) and entry >= 1
    if not isinstance(ledger_id, str) or not (entry is None or is_number) or not isinstance(entry_hash, str | None):
        advice = "Give a receipt, a reservation, or a dict of these three."
        raise fail("receipt", f"{', '.join(_FIELDS)}", type(receipt).__name__, advice)
    return ledger_id, entry, entry_hash
