"""Defines the release memo, released answers that outlive the process, and keeps it in a LangChain store."""

from __future__ import annotations

import hashlib
import json
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from langchain_dpicl.exceptions import LedgerError, MemoError
from langchain_dpicl.privacy._validate import fail

# All content is released, hence public. Keys hold hashes only: they reveal neither tenant nor query but confirm a
# guess, so a memo is to be protected as its ledger is.


MOST_ANSWERS = 4096
"""Answers kept of one component for one tenant, by default."""

TURN_SECONDS = 30.0
"""How long others wait for the process that asked first, by default."""


class MemoKey(NamedTuple):
    """What an answer is found by: hashes of the plan, the tenant and the query; all three have to agree.

    Attributes:
      scope: of ledger, data set, component and all public parameters of the plan.
      tenant: of the tenant's name; the same in every scope, so that one tenant can be forgotten.
      query: of the public text of the query.
    """

    scope: str
    tenant: str
    query: str


def scope_of(plan: Mapping[str, Any]) -> str:
    """Returns the hash of public parameters, which are JSON values."""
    return _hash("scope", plan)


def tenant_of(name: str) -> str:
    """Returns the hash of a tenant's name."""
    return _hash("tenant", name)


def query_of(values: Sequence[str]) -> str:
    """Returns the hash of the public values of a query's variables."""
    return _hash("query", list(values))


def _hash(kind: str, value: Any) -> str:
    # Not the ledger's canonical JSON: a query may hold half of a character. Two halves are not the whole one.
    text = json.dumps([kind, value], sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def digest_of(key: MemoKey, told: str) -> str:
    """Returns the hash that stands beside an answer: it tells a broken one, and one of another key."""
    return _hash("answer", [*key, told])


def check_stored_answer(key: MemoKey, told: object, digest: object, *, where: str) -> str:
    """Returns an answer as it was read, if it is the one that was kept under this key."""
    if isinstance(told, str) and digest == digest_of(key, told):
        return told
    raise MemoError(
        f"memo {where}: expected the answer that was kept, found a broken one. It is not returned, and nothing was "
        "charged. Restore a copy; or start a new memo, and what is asked again is charged again."
    )


@runtime_checkable
class ReleaseMemo(Protocol):
    """Where a component keeps what it answered, beside the ledger and outside of any graph's state.

    An implementation has to hold what the docstrings say; then an answer that stands in the memo is never charged
    again, and a process that is killed loses at most the ticket that was under way.
    """

    @property
    def durable(self) -> bool:
        """Whether what is kept survives this process."""

    @property
    def description(self) -> str:
        """Public words on where it lives."""

    def recall(self, key: MemoKey) -> str | None:
        """Returns what was kept under exactly this key, or None.

        Args:
          key: of the answer.

        Raises:
          MemoError: it cannot be read, or is broken.
        """

    def remember(self, key: MemoKey, told: str, *, instead_of: str | None = None) -> None:
        """Keeps an answer, unless another one stands under this key; when it returns, an answer stands.

        Args:
          key: of the answer.
          told: the answer, as text.
          instead_of: an answer that was kept before it was whole; this one takes its place, if it stands.

        Raises:
          MemoError: it cannot be written.
        """

    def claim(self, key: MemoKey, holder: str) -> bool:
        """Takes the turn to answer, unless somebody else has it; a turn ends by `leave`, or after a while by itself.

        Its holder may take it again, before it ends, and then has it for as long once more.

        Args:
          key: of the answer.
          holder: who asks for the turn; a name that nobody else has.

        Raises:
          MemoError: it cannot be written.
        """

    def leave(self, key: MemoKey, holder: str) -> None:
        """Ends the turn, if `holder` still has it.

        Args:
          key: of the answer.
          holder: who took the turn.

        Raises:
          MemoError: it cannot be written.
        """


class KeptMemo(ReleaseMemo):
    """A memo in a file or database of our own, which bounds its answers and its turns.

    A subclass says where the rows are (`_row`, `_written`), and the commands as its database spells them; the values of
    a command stand in the same order everywhere.
    """

    durable = True
    _size: int
    _turn: float
    _REMEMBER: ClassVar[str]
    """Takes the key, the answer, its digest, and the answer that this one may replace."""
    _DROP_OLDEST: ClassVar[str]
    """Takes scope, tenant, and how many answers to keep."""
    _LEAVE: ClassVar[str]
    """Takes the key and the holder."""
    _FORGET: ClassVar[tuple[str, str]]
    """Drop the answers, and the turns, of a tenant."""

    @property
    def size(self) -> int:
        """Answers kept of one component for one tenant."""
        return self._size

    @property
    def turn_seconds(self) -> float:
        """How long a turn lasts that is not taken again."""
        return self._turn

    def recall(self, key: MemoKey) -> str | None:
        """Returns what was kept under this key, or None; see `ReleaseMemo`."""
        with memo_faults():
            row = self._row(key)
        return None if row is None else check_stored_answer(key, *row, where=self.description)

    def remember(self, key: MemoKey, told: str, *, instead_of: str | None = None) -> None:
        """Keeps an answer, durably, where none stands; see `ReleaseMemo`."""
        kept = (*key, told, digest_of(key, told), instead_of)
        self._written((self._REMEMBER, kept), (self._DROP_OLDEST, (key.scope, key.tenant, self._size)))

    def leave(self, key: MemoKey, holder: str) -> None:
        """Ends a turn; see `ReleaseMemo`."""
        self._written((self._LEAVE, (*key, holder)))

    def forget(self, tenant: str) -> int:
        """Drops every answer of a tenant; what it asks again is charged again.

        Components that are at work continue to return what they know; those that are built from now on do not. Agents'
        tools ask under the name of a thread: that is `thread_tenant(thread_id, tenant=...)`, and is dropped by itself.

        Args:
          tenant: its name; "": no tenant.

        Returns:
          How many there were.

        Raises:
          MemoError: the memo cannot be reached or written.
        """
        return self._written(*((command, (tenant_of(tenant),)) for command in self._FORGET))[0]

    @abstractmethod
    def _row(self, key: MemoKey) -> tuple[object, object] | None:
        """Returns the answer and its digest that stand under a key."""

    @abstractmethod
    def _written(self, *commands: tuple[str, Sequence[Any]]) -> list[int]:
        """Runs commands in one transaction, durably; returns how many rows each wrote."""


_WORDS = {
    "expected the ledger": "expected the memo",
    "expected a server for ledgers": "expected a server for memos",
    "expected an open store": "expected an open memo",
}


@contextmanager
def memo_faults() -> Iterator[None]:
    """Turns what the shared parts of stores raise into errors of a memo."""
    try:
        yield
    except LedgerError as error:
        words = re.sub(r"^(ledger:?|memo) ", "", str(error).replace(" Nothing is granted.", ""))
        for ledgers, memos in _WORDS.items():
            words = words.replace(ledgers, memos)
        raise MemoError(f"memo {words}") from None


# Such stores have no compare-and-swap: two processes that ask the same question at the same moment may both pay.


_PROBE = MemoKey("probe", "probe", "probe")
"""What is written to hear whether anything can be; no answer has this key."""


class StoreMemo(ReleaseMemo):
    """Keeps released answers in a LangChain `BaseStore` (`mget`, `mset`) or a LangGraph one (`get`, `put`).

    What holds between processes, after a kill and on a full disk is the store's word; a file or a PostgreSQL database
    of our own (`SQLiteMemo`, `PostgresMemo`) says more. The memo's size is bounded by the tickets of the components:
    each answer cost one.

    Formal guarantees:
      - An answer is found by its own plan, tenant and query alone, and only unbroken.
      - A store that cannot be written is noticed before a ticket is taken.
      - Threads of one process that ask the same pay once; processes that ask the same at the same moment may each pay.

    Args:
      store: the store. A LangGraph store keeps under the namespace `("dpicl", "memo", ...)`, without embedding.
      durable: whether it survives this process.

    Raises:
      ConfigurationError: it is no such store.

    Example:
      >>> from langchain_core.stores import InMemoryByteStore
      >>> StoreMemo(InMemoryByteStore()).description
      'InMemoryByteStore'
    """

    def __init__(self, store: Any, *, durable: bool = False) -> None:
        self._read: Callable[[MemoKey], Any]
        self._write: Callable[[MemoKey, dict[str, str]], Any]
        if isinstance(store, type):
            raise fail("store", "a store", f"the class {store.__name__}")
        if callable(getattr(store, "mget", None)) and callable(getattr(store, "mset", None)):
            self._read = lambda key: _from_bytes(store.mget([_path(key)])[0])
            self._write = lambda key, kept: store.mset([(_path(key), json.dumps(kept).encode())])
        elif callable(getattr(store, "get", None)) and callable(getattr(store, "put", None)):
            self._read = lambda key: getattr(store.get(_namespace(key), key.query), "value", None)
            self._write = lambda key, kept: store.put(_namespace(key), key.query, kept, index=False)
        else:
            expected = "a LangChain BaseStore (mget, mset) or a LangGraph one (get, put)"
            raise fail("store", expected, type(store).__name__)
        self._durable = bool(durable)
        self._name = type(store).__name__

    @property
    def durable(self) -> bool:
        """Whether what is kept survives this process, as its maker says."""
        return self._durable

    @property
    def description(self) -> str:
        """Public words on where it lives: the kind of store."""
        return self._name

    def recall(self, key: MemoKey) -> str | None:
        """Returns what was kept under this key, or None; see `ReleaseMemo`."""
        stored = self._ask_store(lambda: self._read(key))
        if stored is None:
            return None
        fields = stored if isinstance(stored, dict) else {}
        return check_stored_answer(key, fields.get("told"), fields.get("digest"), where=self.description)

    def remember(self, key: MemoKey, told: str, *, instead_of: str | None = None) -> None:
        """Keeps an answer where none stands, as far as this process can see; see `ReleaseMemo`."""
        if self.recall(key) in {None, instead_of}:
            self._ask_store(lambda: self._write(key, {"told": told, "digest": digest_of(key, told)}))

    def claim(self, key: MemoKey, holder: str) -> bool:  # noqa: ARG002  the store has no turns
        """Is always granted, as such a store cannot keep turns, where it can be written: before a ticket is taken."""
        self._ask_store(lambda: self._write(_PROBE, {"told": "", "digest": ""}))
        return True

    def leave(self, key: MemoKey, holder: str) -> None:
        """Does nothing: there are no turns."""

    def _ask_store(self, action: Callable[[], Any]) -> Any:
        """Asks the store; of what it raises only the class is named, as its text may hold a password."""
        try:
            return action()
        except Exception as error:  # noqa: BLE001  whatever the store raises
            kind = type(error).__name__
        raise MemoError(f"memo {self.description}: expected a store that answers, found {kind}. Try again later.")

    def __repr__(self) -> str:
        return f"StoreMemo({self.description})" if hasattr(self, "_name") else "StoreMemo(not made)"


def _path(key: MemoKey) -> str:
    return f"dpicl-memo/{key.tenant}/{key.scope}/{key.query}"


def _namespace(key: MemoKey) -> tuple[str, ...]:
    return "dpicl", "memo", key.tenant, key.scope


def _from_bytes(data: Any) -> Any:
    """Returns what the bytes say; a text that is none is no answer, and is found out as such."""
    try:
        return None if data is None else json.loads(data)
    except (ValueError, TypeError):
        return "broken"
