"""Addresses of databases: one spelling is understood, every other is refused, and no password is shown."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl import PrivacyBudgetCallbackHandler, get_privacy_budget_callback
from langchain_dpicl.exceptions import ConfigurationError, LedgerUnavailableError
from langchain_dpicl.privacy.ledger.store import InMemoryStore
from langchain_dpicl.stores import as_place, new_store, open_store

LIMITS: dict[str, Any] = {"epsilon": 4.0, "delta": 1e-6}
SECRET = "open-sesame"
ADDRESSES: dict[str, str | Path] = {
    "driver": f"postgresql+psycopg://u:{SECRET}@127.0.0.1:1/db",
    "capitals": f"POSTGRESQL://u:{SECRET}@127.0.0.1:1/db",
    "blank": f" postgresql://u:{SECRET}@127.0.0.1:1/db",
    "line": f"\npostgres://u:{SECRET}@127.0.0.1:1/db",
    "slash": f"postgresql:/u:{SECRET}@127.0.0.1:1/db",
    "words": f"port=1 dbname=x password={SECRET}",
    "host": f"HOST=h secret={SECRET}",
    "blanks": f"password = {SECRET}",
    "other": f"sqlite:///{SECRET}.db",
    "path": Path(f"postgresql://u:{SECRET}@127.0.0.1:1/db"),
}
HANDLER = PrivacyBudgetCallbackHandler
DOORS: dict[str, Callable[[Any], Any]] = {
    "open": HANDLER.open,
    "create": lambda place: HANDLER.create(place, **LIMITS),
    "handler": lambda place: HANDLER(**LIMITS, store=place),
    "block": lambda place: get_privacy_budget_callback(store=place).__enter__(),
    "block-limits": lambda place: get_privacy_budget_callback(**LIMITS, store=place).__enter__(),
    "create-anchor": lambda place: HANDLER.create("budget.db", **LIMITS, anchor=place),
    "open-anchor": lambda place: HANDLER.open(InMemoryStore(), anchor=place),
    "handler-anchor": lambda place: HANDLER(**LIMITS, anchor=place),
    "open_store": open_store,
    "new_store": new_store,
}


def shown_in(error: BaseException) -> str:
    """What a crash reporter shows of an error: messages, and the variables of our frames."""
    found = traceback.TracebackException.from_exception(error, capture_locals=True)
    ours = [frame for frame in found.stack if "langchain_dpicl" in frame.filename]
    assert ours
    return "".join([*found.format_exception_only(), *(str(frame.locals) for frame in ours)])


@pytest.mark.parametrize("door", [*DOORS, "as_place"])
@pytest.mark.parametrize("spelling", ADDRESSES)
def test_an_address_that_is_spelled_otherwise_is_refused_unquoted_and_makes_no_file(
    spelling: str, door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="postgresql://user@host") as caught:
        DOORS.get(door, as_place)(ADDRESSES[spelling])
    assert SECRET not in shown_in(caught.value)
    assert list(tmp_path.iterdir()) == []


class _Server:
    """A database that is out; it keeps the address out of its own frames."""

    def __init__(self, where: str, **options: Any) -> None:
        asked, where = SECRET in where, ""
        assert asked
        raise LedgerUnavailableError("the server is down")

    @classmethod
    def open(cls, where: str, **options: Any) -> Any:
        secret, where = [where], ""
        return cls(secret.pop())

    @classmethod
    def new(cls, where: str, **options: Any) -> Any:
        secret, where = [where], ""
        return cls(secret.pop())


@pytest.mark.parametrize("door", DOORS)
def test_no_frame_shows_the_password_of_a_server_that_is_down(
    door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import langchain_dpicl.stores as rooms

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rooms, "_postgres", lambda: _Server)
    monkeypatch.setattr(rooms, "_postgres_anchor", lambda: _Server)
    with pytest.raises(LedgerUnavailableError) as caught:
        DOORS[door](f"postgresql://u:{SECRET}@127.0.0.1:1/db")
    assert SECRET not in shown_in(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["budget.db", "a user/budget.db", "./user=5/budget.db", "C:/budget.db", "hosts=2.db"])
def test_a_path_is_a_path(name: str) -> None:
    assert as_place(name) == name
    assert as_place(Path("/user=5") / name) == Path("/user=5") / name


@pytest.mark.parametrize("address", ["postgres://h/db?user=u", "postgresql://u:p@h/db"])
def test_an_address_that_is_spelled_as_it_should_is_taken(address: str) -> None:
    assert as_place(address) == address
