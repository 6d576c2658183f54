"""Recomputes a ledger from its lines alone: chain, rules, prices, anchor, receipts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_dpicl._plain_files import MAX_TEXT, read_plain
from langchain_dpicl.exceptions import ConfigurationError, LedgerError
from langchain_dpicl.privacy.extensions.ledger_anchor import LedgerAnchor
from langchain_dpicl.privacy.ledger_state import RESERVE, LedgerState
from langchain_dpicl.privacy.report import PrivacyReport, ShareEntry, verify_report
from langchain_dpicl.privacy.shown import UNREADABLE, why
from langchain_dpicl.privacy.stores import LedgerHeader, LedgerRecord, LedgerStore

Receipts = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class CheckedLedger:
    """The result of `check_ledger`."""

    header: LedgerHeader
    lines: int  # valid lines from the first on
    head: str  # hash of the last of them
    shares: int  # shares that were priced again
    epsilon: float  # sum of their prices; infinite if one could not be computed, or the chain is broken
    promised: float  # sum of their charges
    delta: float
    checked: tuple[str, ...]  # what else was compared, in words
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON form; epsilon is null where it is infinite."""
        return {
            "ok": not self.problems,
            "ledger": self.header.to_dict(),
            "lines": self.lines,
            "head": self.head,
            "shares": self.shares,
            "recomputed": {"epsilon": self.epsilon if math.isfinite(self.epsilon) else None, "delta": self.delta},
            "charged": {"epsilon": self.promised, "delta": self.delta},
            "checked": list(self.checked),
            "problems": list(self.problems),
        }


def check_ledger(store: LedgerStore, *, anchor: LedgerAnchor | None = None, receipts: Receipts = ()) -> CheckedLedger:
    """Recomputes a ledger and compares it with its anchor and receipts; refuses what cannot be read at all."""
    header = store.header()
    if header is None:
        raise LedgerError("ledger: expected one, found none. Create it with `dpicl ledger create`.")
    records = list(store.records())
    state, problems, checked = LedgerState(header), [], []
    try:
        for record in records:
            state.apply(record)
    except LedgerError as error:
        problems.append(str(error))
    if anchor is not None:
        problems.extend(anchor_problems(anchor, header, records))
        checked.append(f"anchor: {anchor.description}")
    for number, receipt in enumerate(receipts, start=1):
        problems.extend(f"receipt {number}: {problem}" for problem in _receipt_problems(receipt, header, records))
    if receipts:
        checked.append(f"receipts: {len(receipts)}")
    report, epsilon, wrong = _priced(store, header, state)
    return CheckedLedger(
        header=header,
        lines=state.seq,
        head=state.head,
        shares=len(state.sealed),
        epsilon=math.inf if state.seq < len(records) else epsilon,
        promised=report.epsilon,
        delta=report.delta,
        checked=tuple(checked),
        problems=(*problems, *wrong),
    )


def _priced(store: LedgerStore, header: LedgerHeader, state: LedgerState) -> tuple[PrivacyReport, float, list[str]]:
    """Prices every sealed share again, and compares the shown parameters with its tickets."""
    shares, wrappers = [ShareEntry(share.terms, share.stamp) for share in state.sealed], sorted(state.allowed_wrappers)
    try:
        report = PrivacyReport.build(header, store, state.bindings, shares, wrappers)
        verified = verify_report(report)
    except UNREADABLE as error:
        report = PrivacyReport.build(header, store, {}, shares, wrappers)
        return report, math.inf, [f"entries cannot be read: {why(error)}"]
    return report, verified.epsilon, list(verified.problems)


def anchor_problems(anchor: LedgerAnchor, header: LedgerHeader, records: Sequence[LedgerRecord]) -> Iterator[str]:
    """Yields a problem unless the chain holds the anchor's line."""
    known = anchor.read(header.ledger_id)
    if known is None:
        advice = "If this ledger never had an anchor, `dpicl ledger anchor` adds one, once"
        yield f"anchor: {anchor.description} has never seen ledger {header.ledger_id}: it proves nothing. {advice}"
        return
    seq, head = known
    if _hash_of(seq, header, records) != head:
        yield f"anchor: {anchor.description} has seen line {seq}, which is gone or changed: an older copy, or a fork"


def _hash_of(seq: int, header: LedgerHeader, records: Sequence[LedgerRecord]) -> str | None:
    if seq == 0:
        return header.digest
    return records[seq - 1].hash if 0 < seq <= len(records) else None


def _receipt_problems(
    receipt: Mapping[str, Any], header: LedgerHeader, records: Sequence[LedgerRecord]
) -> Iterator[str]:
    ledger_id, entry, entry_hash = (receipt.get(name) for name in ("ledger_id", "entry", "entry_hash"))
    if ledger_id != header.ledger_id:
        yield f"expected one of ledger {header.ledger_id}, found one of {ledger_id!r}"
        return
    if entry is None:  # a cached answer, or one without private records: nothing was charged
        return
    is_there = type(entry) is int and 0 < entry <= len(records)
    if not is_there or (entry_hash is not None and records[entry - 1].hash != entry_hash):
        yield f"line {entry!r}, which it was given for, is gone or changed: an older copy, or a fork"
        return
    record = records[entry - 1]
    is_paid = record.kind == RESERVE and isinstance(record.body, Mapping)
    paid_by = record.body.get("component") if is_paid else None
    if paid_by is None or paid_by != receipt.get("component", paid_by):
        yield f"line {entry} is no reservation of {receipt.get('component')!r}"


def read_receipts(path: Path) -> list[Mapping[str, Any]]:
    """Reads receipts, or results that hold one: a JSON object or list, or one JSON value per line."""
    from langchain_dpicl.stores._sqlite_logs import check_free

    check_free(path, "--receipt")
    text = read_plain(path, MAX_TEXT)
    try:
        try:
            value = json.loads(text)
        except ValueError:
            value = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError, MemoryError):
        value = None
    items = [_receipt_in(item) for item in (value if isinstance(value, list) else [value])]
    if not items or None in items:
        raise ConfigurationError(
            f"--receipt: expected receipts as JSON (`ledger_id`, `entry`, `entry_hash`), found others in {path}."
        )
    return [item for item in items if item is not None]


def _receipt_in(item: Any) -> Mapping[str, Any] | None:
    receipt = item.get("receipt", item) if isinstance(item, Mapping) else None
    return receipt if isinstance(receipt, Mapping) and {"ledger_id", "entry"} <= set(receipt) else None
