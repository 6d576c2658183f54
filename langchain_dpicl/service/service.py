"""Answers the questions of tenants from components that share one ledger, and shows operators what is spent."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from typing_extensions import override

from langchain_dpicl.backends.sync_async import run_in_thread
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.budget.handler import CHARGED, PrivacyBudgetCallbackHandler
from langchain_dpicl.exceptions import (
    ConfigurationError,
    LedgerError,
    MemoError,
    ModelCallError,
    PrivacyBudgetExceededError,
    TenantCapExceededError,
)
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.privacy.ledger.store import LedgerRecord

# Whatever leaves this module is public: answers, receipts, names of tenants, numbers of tickets. Questions are public
# too, but belong to who asked them: no log line and no refusal repeats one.


logger = logging.getLogger(__name__)
charges = logging.getLogger("langchain_dpicl.service.charges")
"""One JSON line for each question, at level INFO: its tenant, its component, what was charged, what was refused."""

DOORS: Mapping[str, str] = {
    "ask": "Answers a question with one of the declared labels, by a private vote of prompts of private records.",
    "answer": "Answers a question in free text, from private answers that are aggregated with noise.",
    "retrieve_and_answer": "Answers a question from the private documents that are near to it, with noise.",
}
"""The questions that a service can offer, and what is said of them."""
DEMONSTRATIONS = "Returns the demonstrations that were released once. They cost nothing."
BUDGET = "Shows what was promised, what is left, and what the tenant has used. It costs nothing."

_HEALTH_S = 1.0
"""Seconds for which the answer about the ledger's health stands."""
_OUTAGE_S = 5
"""Seconds after which callers may ask again whether the ledger is back."""
LEAST_KEY = 16
"""Characters of the shortest key: a key that can be guessed protects nothing, as its hash is not salted."""


class RefusedError(Exception):
    """A request that is not answered.

    Attributes:
      status: of HTTP.
      code: one word for programs.
      detail: a sentence for people; public.
      retry_after: seconds after which asking again may work; None: unknown.
    """

    def __init__(self, status: int, code: str, detail: str, *, retry_after: int | None = None) -> None:
        super().__init__(detail)
        self.status, self.code, self.detail, self.retry_after = status, code, detail, retry_after

    def to_dict(self) -> dict[str, Any]:
        """Returns what callers get."""
        return {"error": self.code, "detail": self.detail}


@dataclass(frozen=True, slots=True)
class Tenant:
    """A caller that is known by its key.

    Attributes:
      name: public; the ledger's lines hold it.
      max_queries: charged questions that the tenant may ask of each component; None: as many as there are tickets.
    """

    name: str
    max_queries: int | None = None


class Keys:
    """Whose a key is. Holds SHA-256 digests, no key.

    Args:
      owners: by the hexadecimal digest of a key.

    Example:
      >>> keys = Keys({digest("a key of sixteen."): Tenant("acme")})
      >>> keys.owner("a key of sixteen.").name, keys.owner("another one")
      ('acme', None)
    """

    def __init__(self, owners: Mapping[str, Tenant]) -> None:
        self._owners = dict(owners)

    def owner(self, key: str | None) -> Tenant | None:
        """Returns whose key it is; None: nobody's."""
        if not key:
            return None
        given, found = digest(key), None
        for known, tenant in self._owners.items():  # all of them, in the same time wherever the key stands
            if hmac.compare_digest(known, given):
                found = tenant
        return found

    def tenants(self) -> list[Tenant]:
        """Returns all who have a key."""
        return list(self._owners.values())


def digest(key: str) -> str:
    """Returns the SHA-256 of a key in hexadecimal digits, as settings files hold it."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def authorization_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Returns the header `Authorization`; empty: there is none, or several, of which a proxy may know another."""
    found = [value for name, value in headers if name == b"authorization"]
    return found[0].decode("latin-1") if len(found) == 1 else ""


def bearer_of(header: str) -> str | None:
    """Returns the key in a header `Authorization: Bearer KEY`; None: it holds none."""
    kind, _, key = header.partition(" ")
    return key.strip() or None if kind.lower() == "bearer" else None


class RateLimit:
    """Lets each tenant ask so often a minute in this process, all at once or spread out.

    Args:
      per_minute: questions; None: any number.
      clock: seconds that never go back.
    """

    def __init__(self, per_minute: int | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock, self._lock = per_minute, clock, threading.Lock()
        self._left: dict[str, tuple[float, float]] = {}

    def wait(self, tenant: str) -> int:
        """Counts a question and returns 0, or counts none and returns the seconds until one is let in."""
        if self._most is None:
            return 0
        with self._lock:
            now = self._clock()
            left, since = self._left.get(tenant, (float(self._most), now))
            left = min(float(self._most), left + (now - since) * self._most / 60)
            granted = left >= 1
            self._left[tenant] = (left - granted, now)
        return 0 if granted else max(1, math.ceil((1 - left) * 60 / self._most))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a question.

    Attributes:
      max_query_chars: characters.
      queries_per_minute: of each tenant and process, free ones included; None: any number.
    """

    max_query_chars: int = 2000
    queries_per_minute: int | None = None


class _Charge(BaseCallbackHandler):
    """Counts the tickets of one question, whatever becomes of it."""

    run_inline = True

    def __init__(self) -> None:
        super().__init__()
        self.tickets = 0

    @override
    def on_custom_event(self, name: str, data: Any, **_: Any) -> None:
        if name == CHARGED:
            self.tickets += data["tickets"]


_OF_THE_QUESTION = ("input: ", "keywords: ", "candidates: ")
"""How errors begin of a question, and of what its public answers lack to be answered privately."""


class Service:
    """Answers tenants, within their caps, from components of one ledger.

    Formal guarantees:
      - A question is answered for the tenant whose name the caller of `ask` vouches for; nothing in a question, a
        configuration of a run or an environment changes it.
      - What is refused here, for its length or rate, is refused before any call and any charge.
      - Log lines, refusals and `standing` hold no question, no key, no address and nothing of a record.

    Args:
      budget: the opened ledger, which the service closes.
      doors: built components by the names of `DOORS`.
      tenants: who may ask.
      limits: of a question.
      demonstrations: released ones, with a finite epsilon; None: none are offered.
      metrics: hears of every question; None: nobody does.
      on_refusal: is given the public facts of each refusal.

    Raises:
      ConfigurationError: nothing is offered, or something that cannot be.
    """

    def __init__(
        self,
        budget: PrivacyBudgetCallbackHandler,
        doors: Mapping[str, Any],
        *,
        tenants: Keys,
        limits: Limits | None = None,
        demonstrations: Any = None,
        metrics: BaseCallbackHandler | None = None,
        on_refusal: Callable[[dict[str, Any]], object] | None = None,
    ) -> None:
        if not doors and demonstrations is None:
            raise fail("service", f"a component among {list(DOORS)}, or demonstrations", "none")
        for name, component in doors.items():
            if len(variables := component.wording.input_variables) != 1:
                raise fail(name, "a wording with one variable, the question", variables)
        if demonstrations is not None and not math.isfinite(demonstrations.epsilon):
            advice = "A baseline without privacy is not served. Make the file with dpicl generate."
            raise fail("demonstrations", "a release with a finite epsilon", demonstrations.epsilon, advice)
        self.budget, self.tenants, self.limits = budget, tenants, limits or Limits()
        self.doors = {name: doors[name] for name in DOORS if name in doors}
        self.demonstrations = demonstrations
        self._released: dict[str, Any] = {}  # made once: there may be many
        if demonstrations is not None:
            shown = {"demonstrations": list(demonstrations.examples), "epsilon": demonstrations.epsilon}
            self._released = _sendable({**shown, "delta": demonstrations.delta})
        self._answering = {name: component.with_receipts() for name, component in self.doors.items()}
        self._rate = RateLimit(self.limits.queries_per_minute)
        self._metrics, self._on_refusal = metrics, on_refusal
        self._look: asyncio.Future[Exception | None] | None = None  # the last one for `check`
        self._looked = 0.0  # when it ended

    def close(self) -> None:
        """Closes the ledger; what is asked afterwards is refused."""
        self.budget.budget.close()

    @property
    def offered(self) -> list[str]:
        """The names of what it answers, of what is free too."""
        return [*self.doors, *(["demonstrations"] if self.demonstrations is not None else []), "budget"]

    def tenant_of(self, key: str | None) -> Tenant:
        """Returns whose key it is."""
        tenant = self.tenants.owner(key)
        if tenant is None:
            raise self._noted(
                RefusedError(401, "unknown_key", "Expected the key of a tenant: Authorization: Bearer KEY.")
            )
        return tenant

    async def ask(self, door: str, question: Any, tenant: Tenant) -> dict[str, Any]:
        """Answers a question of a tenant, and logs what it cost.

        Raises:
          RefusedError: nothing was answered; whether something was charged stands in the log and in `standing`.
        """
        charge = _Charge()
        facts: dict[str, Any] = {"door": door, "tenant": tenant.name}
        try:
            result = await self._asked(door, question, tenant, charge)
        except RefusedError as refused:
            facts |= {"event": "charged" if charge.tickets else "refused", "error": refused.code}
            self._log({**facts, "status": refused.status, "tickets": charge.tickets})
            raise self._noted(refused, door=door, tenant=tenant.name) from None
        except BaseException as error:  # a cancelled request, or a fault: what was charged is logged all the same
            facts |= {"event": "charged" if charge.tickets else "failed", "error": type(error).__name__}
            self._log({**facts, "tickets": charge.tickets})
            if isinstance(error, asyncio.CancelledError):
                # The server logs it with the errors that it came behind, whose words may be private.
                raise asyncio.CancelledError(*error.args) from None
            raise
        receipt = result.receipt
        facts |= {"event": "charged" if receipt.tickets else "free", "status": 200, "tickets": receipt.tickets}
        self._log({**facts, **{name: getattr(receipt, name) for name in _LOGGED}})
        return _shown(result)

    async def _asked(self, door: str, question: Any, tenant: Tenant, charge: _Charge) -> Any:
        component = self._answering.get(door)
        if component is None:
            raise not_offered(door, self.offered)
        self._check(question)
        if wait := self._rate.wait(tenant.name):
            most = self.limits.queries_per_minute
            raise RefusedError(
                429, "too_often", f"Expected at most {most} questions a minute. Ask again later.", retry_after=wait
            )
        callbacks = [charge] if self._metrics is None else [charge, self._metrics]
        named = {"tenant": tenant.name, "tenant_max_queries": tenant.max_queries}
        try:
            return await component.ainvoke(question, {"configurable": named, "callbacks": callbacks})
        except Exception as error:  # noqa: BLE001  the words of a foreign error may be private
            reads = isinstance(error, TenantCapExceededError)  # the ledger
            refused = await run_in_thread(partial(self._refusal_of, error, door), is_slow=reads)
        raise refused

    def _check(self, question: Any) -> None:
        if not isinstance(question, str) or not question.strip():
            raise RefusedError(422, "no_question", "Expected a question, as text that is not empty.")
        if len(question) > (most := self.limits.max_query_chars):
            raise RefusedError(413, "too_long", f"Expected at most {most:,} characters, found {len(question):,}.")
        if not question.isascii() and any("\ud800" <= letter <= "\udfff" for letter in question):
            raise RefusedError(422, "no_question", "Expected valid Unicode text, found half of a surrogate pair.")

    def _refusal_of(self, error: Exception, door: str) -> RefusedError:
        """Returns what an error of a component means to who asked; its words may be of the operator's configuration."""
        if isinstance(error, LedgerError):
            return RefusedError(
                503, "ledger_out", "The ledger cannot be used. Nothing is answered until it can.", retry_after=_OUTAGE_S
            )
        if isinstance(error, PrivacyBudgetExceededError):
            return self._spent(error, door)
        if isinstance(error, MemoError):
            return RefusedError(
                503, "memo_out", "The memo of answers cannot be used. Ask again later.", retry_after=_OUTAGE_S
            )
        if isinstance(error, ModelCallError):
            # Nearly always the public call, which costs nothing; behind it the ticket is burnt.
            return RefusedError(503, "model_out", "The model gave no answer. The budget shows what was charged.")
        if isinstance(error, ConfigurationError) and str(error).startswith(_OF_THE_QUESTION):
            return RefusedError(422, "no_question", "The question cannot be asked of this component.")
        return self.fault(error, door)

    @staticmethod
    def fault(error: BaseException, where: str) -> RefusedError:
        """Logs the class of an error that nobody foresaw, and returns what callers get in its place."""
        logger.warning("%s: %s", where, type(error).__name__)
        return RefusedError(500, "fault", "The request could not be answered. The budget shows what was charged.")

    def _spent(self, error: PrivacyBudgetExceededError, door: str) -> RefusedError:
        if isinstance(error, TenantCapExceededError):
            try:
                has_left = self.doors[door].queries_left > 0
            except LedgerError:
                has_left = True
            if has_left:
                return RefusedError(429, "tenant_spent", "All private answers of this tenant are used.")
        return RefusedError(402, "budget_spent", "The privacy budget is spent: all private answers are given.")

    def standing(self, tenant: Tenant) -> dict[str, Any]:
        """Returns the budget as a tenant may see it; reads the ledger."""
        budget = self.budget
        try:
            components = {name: self._standing_of(name, tenant) for name in self.doors}
        except LedgerError:
            raise self._noted(self._refusal_of(LedgerError(""), "budget"), tenant=tenant.name) from None
        limits = {"epsilon": budget.epsilon, "delta": budget.delta, "adjacency": budget.adjacency}
        return {"ledger": limits, "tenant": tenant.name, "components": components}

    def _standing_of(self, name: str, tenant: Tenant) -> dict[str, Any]:
        component = self.doors[name]
        return {
            "epsilon": component.share.epsilon,
            "delta": component.share.delta,
            "queries": component.plan.max_queries,
            "queries_left": component.queries_left,
            "yours": _cap_of(component, tenant),
            "yours_used": component.share.used_by(tenant.name),
        }

    def caps(self) -> dict[tuple[str, str], int | None]:
        """Returns what each tenant may be charged of each share; None: as much as there is."""
        known = self.tenants.tenants()
        return {
            (component.share.component, tenant.name): _cap_of(component, tenant)
            for component in self.doors.values()
            for tenant in known
        }

    def released(self, tenant: Tenant) -> dict[str, Any]:
        """Returns the demonstrations, which are free."""
        if self.demonstrations is None:
            raise self._noted(not_offered("demonstrations", self.offered), tenant=tenant.name)
        return self._released

    async def check(self) -> None:
        """Reads the ledger and its anchor, without which nothing private is answered.

        Anybody may ask: all who ask at once, or within a second, share one look, and none of them holds a thread.
        """
        last = self._look
        if last is None or (last.done() and time.monotonic() - self._looked >= _HEALTH_S):
            last = self._look = asyncio.ensure_future(self._look_at_ledger())
        if (found := await asyncio.shield(last)) is not None:
            raise self._refusal_of(found, "health") from None

    async def _look_at_ledger(self) -> Exception | None:
        """Returns why nothing can be charged now, without the words of the ledger, or None."""
        try:
            await run_in_thread(self.budget.budget.check_ready)  # no model's call holds these threads
        except Exception as error:  # noqa: BLE001  a task that nobody awaits would log it
            return LedgerError("") if isinstance(error, LedgerError) else error
        finally:
            self._looked = time.monotonic()
        return None

    def refuse(self, refused: RefusedError, **public: Any) -> RefusedError:
        """Notes a refusal that a protocol made, and returns it."""
        return self._noted(refused, **public)

    def _noted(self, refused: RefusedError, **public: Any) -> RefusedError:
        if self._on_refusal is not None:
            self._on_refusal({"time": _now(), **public, "status": refused.status, "error": refused.code})
        return refused

    @staticmethod
    def _log(facts: Mapping[str, Any]) -> None:
        charges.info("%s", json.dumps({"time": _now(), **facts}))


_LOGGED = ("component", "source", "entry", "index", "queries_left")


def not_offered(name: str, offered: list[str]) -> RefusedError:
    """Returns the refusal of what this service does not do."""
    return RefusedError(404, "not_offered", f"{name} is not offered here. Offered: {', '.join(offered)}.")


def _cap_of(component: Any, tenant: Tenant) -> int | None:
    caps = [each for each in (component.tenants.max_queries, tenant.max_queries) if each is not None]
    return min(caps, default=None)


def _shown(result: Any) -> dict[str, Any]:
    """Returns an answer as JSON values, whichever component gave it."""
    rest = result.model_dump(mode="json", exclude={"label", "answer"})
    receipt = rest.pop("receipt")
    head = {"answer": str(result), "abstained": rest.pop("abstained"), "source": receipt["source"]}
    more = {name: value for name, value in rest.items() if value is not None}
    return _sendable({**head, "queries_left": receipt["queries_left"], **more, "receipt": receipt})


def _sendable(shown: dict[str, Any]) -> dict[str, Any]:
    """Returns JSON values with a question mark for each half of a surrogate pair, which has no bytes in UTF-8."""
    sent: dict[str, Any] = json.loads(json.dumps(shown, ensure_ascii=False).encode("utf-8", "replace"))
    return sent


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


# For operators alone: open reservations tell when a model failed, and every tenant's use stands here.


_LINES = 20_000
_WEEK, _HOUR = timedelta(days=7), timedelta(hours=1)
_OPEN_SHOWN, _REFUSALS_SHOWN, _STRANGERS_SHOWN, _TENANTS_SHOWN = 20, 20, 5, 1000
_MOST_BYTES = 256 * 1024
_TAIL = 16 * 1024


@dataclass
class Pace:
    """How many tickets of each component a ledger gives a day: those of the last week, or of its last 20,000 lines.

    Reads each line once, also for several readers at the same time; a ticket that was given back counts for nothing.
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
        written, later = list[tuple[LedgerRecord, datetime]](), now
        for line in reversed(self.budget.lines(after=max(self._seen, lines - _LINES))):
            # A line that has no time, or was stamped ahead of it, counts as of the line behind it.
            later = _stamp_of(line, now) or later
            written.append((line, later))
        for line, stamp in reversed(written):
            self._follow(line, stamp)
        while self._taken and now - self._taken[0][0] > _WEEK:
            self._taken.popleft()
        if self._start is None:
            return {}
        days = min(max(now - self._start, _HOUR), _WEEK) / timedelta(days=1)
        taken: dict[str, int] = {}
        for _, component, count in self._taken:
            taken[component] = taken.get(component, 0) + count
        return {component: max(count, 0) / days for component, count in taken.items()}

    def _follow(self, line: LedgerRecord, stamp: datetime) -> None:
        self._seen = line.seq
        self._start = self._start or stamp
        if line.kind == "reserve":
            self._names[line.seq] = name = str(line.body["component"])
            self._taken.append((stamp, name, int(line.body["count"])))
            if len(self._names) > _LINES:
                del self._names[next(iter(self._names))]
        elif line.kind == "give_back" and (owner := self._names.get(line.body["reservation"])) is not None:
            self._taken.append((stamp, owner, -int(line.body["count"])))


def _stamp_of(line: LedgerRecord, now: datetime) -> datetime | None:
    """Returns when a line was written, unless its stamp is no time or one to come."""
    try:
        stamp = datetime.fromisoformat(line.stamp)
    except ValueError:
        return None
    return stamp if stamp.tzinfo is not None and stamp <= now else None


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


def _standing(budget: Budget, components: Iterable[str]) -> set[str]:
    """Returns the components of a stream that read longer than a window: each window brings their tickets again."""
    window = budget.window
    if window is None:
        return set()
    extents = {name: budget.sealed_extent(name) for name in components}
    return {
        name
        for name, extent in extents.items()
        if extent is not None and (extent[1] is None or extent[1] - extent[0] >= window)
    }


def _ledger(budget: Budget, pace: Pace, now: datetime, caps: Mapping[tuple[str, str], int | None]) -> dict[str, Any]:
    head = {"name": budget.name, "ledger_id": budget.ledger_id, "adjacency": budget.adjacency}
    try:
        use, tenants, parts = budget.use(), budget.tenants(), budget.spent_parts()
        per_day = pace.per_day(use.lines, now)
        opened = budget.dangling(limit=1000)
        standing = _standing(budget, use.tickets)
    except LedgerError:
        return {**head, "readable": False}
    components = []
    for name, tickets in use.tickets.items():
        rate = per_day.get(name, 0.0)
        shown = {"name": name, **tickets._asdict(), "spent": parts[name], "per_day": rate}
        components.append({**shown, "days_left": tickets.left / rate if rate and name not in standing else None})
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
        for (component, tenant), count in sorted(  # the settings' own first: there may be many threads of agents
            (dict.fromkeys(caps, 0) | used).items(), key=lambda one: (one[0] not in caps, one)
        )
    ]
    fields = ("entry", "component", "template", "count", "stamp", "holder")
    return {
        **head,
        "readable": True,
        **{name: getattr(use, name) for name in ("epsilon", "epsilon_spent", "delta", "delta_spent", "lines")},
        "components": components,
        "tenants": list(islice(users, _TENANTS_SHOWN)),
        "open": len(opened),
        "oldest_open": [{name: getattr(each, name) for name in fields} for each in opened[:_OPEN_SHOWN]],
    }
