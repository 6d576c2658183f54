"""Stores released answers in a LangChain `BaseStore` or a LangGraph store."""

# Such stores have no compare-and-swap: two processes that ask the same question at the same moment may both pay.

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from langchain_dpicl.exceptions import MemoError
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.stores.memos import MemoKey, ReleaseMemo, checked, digest_of

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
        stored = self._asked(lambda: self._read(key))
        if stored is None:
            return None
        fields = stored if isinstance(stored, dict) else {}
        return checked(key, fields.get("told"), fields.get("digest"), where=self.description)

    def remember(self, key: MemoKey, told: str, *, instead_of: str | None = None) -> None:
        """Keeps an answer where none stands, as far as this process can see; see `ReleaseMemo`."""
        if self.recall(key) in {None, instead_of}:
            self._asked(lambda: self._write(key, {"told": told, "digest": digest_of(key, told)}))

    def claim(self, key: MemoKey, holder: str) -> bool:  # noqa: ARG002  the store has no turns
        """Is always granted, as such a store cannot keep turns, where it can be written: before a ticket is taken."""
        self._asked(lambda: self._write(_PROBE, {"told": "", "digest": ""}))
        return True

    def leave(self, key: MemoKey, holder: str) -> None:
        """Does nothing: there are no turns."""

    def _asked(self, action: Callable[[], Any]) -> Any:
        """Asks the store; of what it raises only the kind is told, as its text may hold a password."""
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
