"""Ledgers of a few public lines for tests of files and commands, and forgeries of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.cli.main import main
from langchain_dpicl.privacy.accounting.events import GaussianEvent, SubsampledEvent
from langchain_dpicl.privacy.ledger.shares import Reservation
from langchain_dpicl.privacy.ledger.store import LedgerHeader, LedgerRecord, LedgerStore, next_record
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.reports.ledger_audit import export_lines

Change = Callable[[list[dict[str, Any]]], object]


def spend(budget: Budget) -> list[Reservation]:
    """Binds a data set, seals two shares, and leaves one ticket of the first open: eight lines."""
    budget.bind(PrivateExamples([], public_size=900, dataset_id="letters"))
    step = SubsampledEvent(GaussianEvent(2.0), 0.01)
    share = budget.declare("few-shot", tickets=[Ticket("token", step, None, 50, refundable=True)], epsilon=1.0)
    first = share.reserve("token", count=4)
    first.burn(2)
    first.commit(1)
    first.give_back()
    pool = budget.gdp_pool("labels", epsilon=0.5)
    second = pool.reserve(mu=pool.mu / 2)
    second.burn()
    second.commit(wait=True)
    return [first, second]


def exported(store: LedgerStore, path: Path) -> Path:
    """Writes a ledger as `dpicl ledger export` does."""
    path.write_text("\n".join(export_lines(store)) + "\n")
    return path


def parsed(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def written(path: Path, lines: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def rehashed(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a forger does who knows the format: numbers, hashes and the last line made to fit."""
    header = LedgerHeader.from_dict(lines[0]["header"])
    seq, head, out = 0, header.digest, [lines[0]]
    for line in lines[1:-1]:
        body, kind, stamp = (line["record"][name] for name in ("body", "kind", "stamp"))
        fresh = next_record(seq, head, kind, body)
        record = LedgerRecord(fresh.seq, fresh.prev, kind, body, stamp, "")
        seq, head = record.seq, record.computed_hash
        out.append({"record": {**record.to_dict(), "hash": head}})
    return [*out, {"end": {"records": seq, "head": head}}]


def forged(source: Path, target: Path, change: Change, *, refit: bool = True) -> Path:
    """Writes a changed copy of an exported ledger, with fitting hashes where `refit`."""
    lines = parsed(source)
    change(lines)
    return written(target, rehashed(lines) if refit else lines)


def body_of(lines: Sequence[dict[str, Any]], kind: str) -> Any:
    return next(line["record"]["body"] for line in lines if line.get("record", {}).get("kind") == kind)


class Shell:
    """Runs `dpicl ledger` in this process, and keeps what it said."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = self.err = ""

    def __call__(self, *arguments: object) -> int:
        try:
            code = main(["ledger", *map(str, arguments)])
        except SystemExit as stop:
            code = int(str(stop.code))
        self.out, self.err = self._capsys.readouterr()
        assert "Traceback" not in self.err
        return code
