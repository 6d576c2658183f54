"""Shows operators every ledger and tenant: what is spent and left, for how long it lasts, what is open and refused."""

# For operators alone: open reservations tell when a model failed, and every tenant's use stands here.

from __future__ import annotations

import json
import logging
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import LedgerError
from langchain_dpicl.privacy.ledger.store import LedgerRecord

logger = logging.getLogger(__name__)

_LINES = 20_000
_WEEK, _HOUR = timedelta(days=7), timedelta(hours=1)
_OPEN_SHOWN, _REFUSALS_SHOWN, _STRANGERS_SHOWN = 20, 20, 5
_MOST_BYTES = 256 * 1024
_TAIL = 16 * 1024


@dataclass
class Pace:
    """How many tickets of each component a ledger gives a day: those of the last week, or of its last 20,000 lines.

    Reads each line once, also for several readers at the same time; a ticket that was given back counts for nothing.

    Attributes:
      budget: whose ledger is read.
    """

    budget: Budget
    _seen: int = 0
    _start: datetime | None = None
    _taken: deque[tuple[datetime, str, int]] = field(default_factory=deque)
    _names: dict[int, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def per_day(self, lines: int, now: datetime) -> dict[str, float]:
        """Returns tickets a day by component; the first hour of a ledger counts as a whole one."""
        with self._lock:
            return self._per_day(lines, now)

    def _per_day(self, lines: int, now: datetime) -> dict[str, float]:
        for line in self.budget.lines(after=max(self._seen, lines - _LINES)):
            self._follow(line)
        while self._taken and now - self._taken[0][0] > _WEEK:
            self._taken.popleft()
        if self._start is None:
            return {}
        days = min(max(now - self._start, _HOUR), _WEEK) / timedelta(days=1)
        taken: dict[str, int] = {}
        for _, component, count in self._taken:
            taken[component] = taken.get(component, 0) + count
        return {component: max(count, 0) / days for component, count in taken.items()}

    def _follow(self, line: LedgerRecord) -> None:
        self._seen = line.seq
        try:
            stamp = datetime.fromisoformat(line.stamp)
        except ValueError:
            return
        if stamp.tzinfo is None:
            return
        self._start = self._start or stamp
        if line.kind == "reserve":
            self._names[line.seq] = name = str(line.body["component"])
            self._taken.append((stamp, name, int(line.body["count"])))
            if len(self._names) > _LINES:
                del self._names[next(iter(self._names))]
        elif line.kind == "give_back" and (owner := self._names.get(line.body["reservation"])) is not None:
            self._taken.append((stamp, owner, -int(line.body["count"])))


class RefusalLog:
    """The last refusals of all processes of one host, in two small files of JSON lines.

    Refusals without a tenant have a file of their own: callers without a key can cause any number of them.

    Args:
      path: of the file, which is made if it is missing; the other one is beside it.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._strangers = path, path.with_suffix(".strangers")

    def add(self, refusal: Mapping[str, Any]) -> None:
        """Appends a refusal, and drops old ones where there are many; a fault of the disk changes no answer."""
        line = json.dumps({**refusal, "process": os.getpid()}).encode() + b"\n"
        path = self._path if "tenant" in refusal else self._strangers
        try:
            with path.open("ab") as file:
                file.write(line)  # one write of an appended line: processes do not mix theirs
                size = file.tell()
            if size > _MOST_BYTES:
                kept = path.with_suffix(f"{path.suffix}.kept")
                kept.write_bytes(_tail(path))
                kept.replace(path)
        except OSError as error:
            logger.warning("refusals are not shown: %s", type(error).__name__)

    def last(self, most: int = _REFUSALS_SHOWN) -> list[dict[str, Any]]:
        """Returns the newest refusals, the newest first: of tenants, and a few of callers without a key."""
        found = _newest(self._path, most) + _newest(self._strangers, _STRANGERS_SHOWN)
        return sorted(found, key=lambda refusal: str(refusal.get("time")), reverse=True)


def _newest(path: Path, most: int) -> list[dict[str, Any]]:
    found = []
    for line in reversed(_tail(path).splitlines()):
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
        if len(found) == most:
            break
    return found


def _tail(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _TAIL, 0))
            return file.read()
    except OSError:
        return b""


class OperatorView:
    """What the page for operators shows.

    Args:
      budgets: opened ledgers, that of the service first.
      refusals: of all processes.
      caps: of the service's ledger: what each tenant may be charged, by share and tenant; None: as much as there is.
    """

    def __init__(
        self, budgets: Sequence[Budget], refusals: RefusalLog, caps: Mapping[tuple[str, str], int | None]
    ) -> None:
        self._refusals, self._caps = refusals, caps
        self._paces = [(budget, Pace(budget)) for budget in budgets]

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as JSON values; reads the ledgers, and shows which of them cannot be read."""
        now = datetime.now(UTC)
        known = [self._caps, *({} for _ in self._paces[1:])]
        ledgers = [_ledger(budget, pace, now, caps) for (budget, pace), caps in zip(self._paces, known, strict=True)]
        return {"time": now.isoformat(timespec="seconds"), "ledgers": ledgers, "refusals": self._refusals.last()}


def _ledger(budget: Budget, pace: Pace, now: datetime, caps: Mapping[tuple[str, str], int | None]) -> dict[str, Any]:
    head = {"name": budget.name, "ledger_id": budget.ledger_id, "adjacency": budget.adjacency}
    try:
        use, tenants, parts = budget.use(), budget.tenants(), budget.spent_parts()
        per_day = pace.per_day(use.lines, now)
        opened = budget.dangling(limit=1000)
    except LedgerError:
        return {**head, "readable": False}
    components = []
    for name, tickets in use.tickets.items():
        rate = per_day.get(name, 0.0)
        shown = {"name": name, **tickets._asdict(), "spent": parts[name], "per_day": rate}
        components.append({**shown, "days_left": tickets.left / rate if rate else None})
    components += [
        {"name": name, "pool_left": left, "spent": parts[name], "per_day": None, "days_left": None}
        for name, left in use.pools.items()
    ]
    used = {
        (component, tenant): count for component, each in tenants.items() for tenant, count in each.items() if count
    }
    users = [
        {"component": component, "tenant": tenant, "used": count, "cap": (cap := caps.get((component, tenant)))}
        | {"left": None if cap is None else max(cap - count, 0)}
        for (component, tenant), count in sorted((dict.fromkeys(caps, 0) | used).items())
    ]
    fields = ("entry", "component", "template", "count", "stamp", "holder")
    return {
        **head,
        "readable": True,
        **{name: getattr(use, name) for name in ("epsilon", "epsilon_spent", "delta", "delta_spent", "lines")},
        "components": components,
        "tenants": list(islice(users, 1000)),
        "open": len(opened),
        "oldest_open": [{name: getattr(each, name) for name in fields} for each in opened[:_OPEN_SHOWN]],
    }
