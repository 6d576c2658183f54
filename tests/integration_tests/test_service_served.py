"""`dpicl serve` as a process of its own: workers, signals, PostgreSQL, a provider that alone sees the records."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")
import httpx
import uvicorn

from langchain_dpicl import PrivacyBudgetCallbackHandler
from langchain_dpicl.cli import serve
from langchain_dpicl.cli.serve import ServiceLimits, _bound, _listen
from langchain_dpicl.exceptions import ConfigurationError, LedgerError
from langchain_dpicl.service.web import create_app
from langchain_dpicl.stores import open_store
from tests.loopback_provider import provider
from tests.postgres import PostgresServer
from tests.served import CANARY, KEYS, Client, change, new_folder, new_ledger, running, served


@pytest.fixture(params=["sqlite", "postgres"])
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where an empty ledger is, in either database."""
    where = str(tmp_path / "budget.db")
    if request.param == "postgres":
        server: PostgresServer = request.getfixturevalue("postgres")
        where = f"postgresql://owner:{CANARY}@/{server.new_database()}?host={server.folder}&port=5432"
    return new_ledger(where)


@pytest.mark.loopback
def test_a_server_grants_what_the_ledger_has_and_ends_in_order(
    tmp_path: Path, ledger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_folder(tmp_path, monkeypatch)
    kept = tmp_path / "tmp"
    kept.mkdir()
    with served(tmp_path, DPICL_LEDGER=ledger, TMPDIR=str(kept)) as server:
        with ThreadPoolExecutor(6) as pool:
            asked = [(f"question {number}?", who) for number in range(6) for who in ("acme", "globex")]
            answers = [*pool.map(lambda one: server.ask(*one), asked)]
        assert Counter(answer.status_code for answer in answers) == {200: 8, 402: 4}
        code, said = server.stop()
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert (code, sum(line["tickets"] for line in lines)) == (0, 8)
    assert "Traceback" not in said
    for hidden in (CANARY, "question 0", *KEYS.values(), ledger):
        assert hidden not in said + "".join(answer.text for answer in answers)
    assert not [*kept.glob("dpicl-serve-*")]
    budget = PrivacyBudgetCallbackHandler.open(ledger)
    assert not budget.budget.dangling()
    for answer in answers:
        if answer.status_code == 200:
            budget.budget.check_receipt(answer.json()["receipt"])
    budget.budget.close()


_SOON = "import threading; from langchain_dpicl.cli import serve; serve._GRACE = serve._CLOSING = 1; "
_CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "


@pytest.mark.loopback
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_call_that_hangs_in_a_thread_does_not_keep_a_process_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    new_folder(tmp_path, monkeypatch)
    hangs = "threading.Thread(target=threading.Event().wait).start(); "
    with served(tmp_path, before=_SOON + _CTRL_C + hangs, DPICL_LEDGER=new_ledger("budget.db")) as server:
        assert server.stop(number)[0] == code


@pytest.mark.loopback
def test_a_program_that_serves_goes_on_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new_folder(tmp_path, monkeypatch)
    end = "main(); [each.join() for each in threading.enumerate() if each.daemon]; sys.exit(7)"
    with served(tmp_path, before=_SOON + _CTRL_C, end=end, DPICL_LEDGER=new_ledger("budget.db")) as server:
        assert server.stop(signal.SIGINT)[0] == 7


@pytest.mark.parametrize(
    ("stopped_by", "ends", "codes"), [(signal.SIGTERM, False, [0]), (signal.SIGINT, False, [130]), (2, True, [])]
)
def test_a_server_that_does_not_end_in_its_time_is_ended(
    monkeypatch: pytest.MonkeyPatch, stopped_by: int, *, ends: bool, codes: list[int]
) -> None:
    has_ended, found = threading.Event(), list[int]()
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        return bool(found) or (ends and len(waits) > 1)

    monkeypatch.setattr(has_ended, "wait", wait)
    monkeypatch.setattr(os, "_exit", found.append)
    server = SimpleNamespace(should_exit=True, _captured_signals=[stopped_by])
    serve._end_in_time(server, has_ended, serve._closing(SimpleNamespace(limits=ServiceLimits(ledger_timeout=300))))  # type: ignore[arg-type]
    assert (found, waits[1]) == (codes, 330)


async def test_either_database_grants_exactly_its_tickets(
    tmp_path: Path, ledger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = new_folder(tmp_path, monkeypatch)
    with running(config, ledger) as found:
        client = Client(create_app(found))
        assert await client.ask_at_once("acme globex", 6) == {200: 8, 402: 4}
        await client.http.aclose()
    with open_store(ledger) as store:
        assert [line.kind for line in store.records()].count("reserve") == 8
    monkeypatch.setattr("langchain_dpicl.privacy.ledger.budget._IDENTITIES", {})  # what another process knows
    with running(config, ledger) as found:
        client = Client(create_app(found))
        assert (await client.get("/budget"))["components"]["ask"]["queries_left"] == 0
        await client.http.aclose()


@pytest.mark.loopback
@pytest.mark.parametrize(
    "case",
    [
        (("[ask]", "[asked]"), 2, "settings: expected keys and tables among"),
        (("epsilon = 2.0", "epsilon = 200.0"), 3, "epsilon"),
        (("epsilon = 2.0", "eps = 2.0"), 2, "[ask]"),
        (('key_env = "ACME_KEY"', 'key_sha256 = "a-key-in-plain-text"'), 2, "64 hexadecimal digits"),
        (('key_env = "ACME_KEY"', 'key_env = "GLOBEX_KEY"'), 2, "a key of its own"),
        (('key_env = "ACME_KEY"', 'key_env = "NOT_SET"'), 2, "at least 16 characters"),
        (('key_env = "ACME_KEY"', ""), 2, "key_env or key_sha256"),
        (("tests.served:MODEL", "tests.served:NONE"), 2, "no attribute"),
        (("records.jsonl", "none.jsonl"), 2, "none.jsonl"),
    ],
)
def test_what_is_wrong_stops_the_start_with_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    case: tuple[tuple[str, str], int, str],
) -> None:
    from langchain_dpicl.cli.main import main

    fault, code, said = case
    config = new_folder(tmp_path, monkeypatch)
    change(config, *fault)
    new_ledger("budget.db")
    assert main(["serve", "budget.db", "--config", "app.toml", "--port", "0"]) == code
    out = capsys.readouterr().err.splitlines()[-1]
    assert said in out
    assert "a-key-in-plain-text" not in out
    assert CANARY not in out


@pytest.mark.loopback
def test_a_ledger_that_is_not_there_stops_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from langchain_dpicl.cli.main import main

    new_folder(tmp_path, monkeypatch)
    monkeypatch.delenv("DPICL_LEDGER", raising=False)
    assert main(["serve", "missing.db", "--config", "app.toml", "--port", "0"]) == 2
    assert not Path("missing.db").exists()
    assert main(["serve", "--config", "app.toml", "--port", "0"]) == 2
    assert "set DPICL_LEDGER" in capsys.readouterr().err


@pytest.mark.loopback
def test_an_address_that_is_taken_stops_the_start_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from langchain_dpicl.cli.main import main

    new_folder(tmp_path, monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "none.db", "--config", "app.toml", "--port", port]) == 2
    assert f"127.0.0.1:{port} (Address already in use)" in capsys.readouterr().err
    assert main(["serve", "none.db", "--config", "app.toml", "--port", "70000"]) == 2
    assert "127.0.0.1:70000 (no such port)" in capsys.readouterr().err


@pytest.mark.loopback
def test_of_two_that_start_at_one_time_the_second_says_that_the_port_is_taken() -> None:
    async def app(*_: Any) -> None:
        raise NotImplementedError

    said: list[str] = []
    asked = argparse.Namespace(host="127.0.0.1", port=0)
    with _bound(asked) as first:
        asked.port = first.getsockname()[1]
        with _bound(asked) as second:  # which the system lets both have, until one listens
            first.listen()
            with pytest.raises(ConfigurationError, match=f"--port: .*:{asked.port} .Address already in use"):
                _listen(app, SimpleNamespace(offered=["ask"]), second, said.append, closing=1)  # type: ignore[arg-type]
    assert not said


def test_a_missing_package_is_named_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from langchain_dpicl.cli.main import main

    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert main(["serve", "x.db", "--config", str(tmp_path / "none.toml")]) == 2
    assert "pip install 'langchain-dpicl[serve]'" in capsys.readouterr().err


@pytest.mark.loopback
async def test_a_provider_votes_and_only_it_sees_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every record has the canary, and 20 are drawn on average: fewer than two in less than one run of ten million."""
    config = new_folder(tmp_path, monkeypatch)
    change(config, "tests.served:MODEL", "openai:gpt-4.1-mini")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with provider() as at_provider:
        monkeypatch.setenv("OPENAI_BASE_URL", at_provider.url)
        with running(config, new_ledger("budget.db")) as found:
            client = Client(create_app(found))
            answer = (await client.ask("Where is my transfer?")).json()
            await client.http.aclose()
        bodies = [json.dumps(request.body) for request in at_provider.received]
    assert answer["answer"] in {"card", "transfer"}
    assert sum(CANARY in body for body in bodies) > 1
    assert CANARY not in "".join(client.seen)


class Held:
    """A component whose answers wait until they are let go."""

    def __init__(self, component: Any) -> None:
        self.component, self.asked, self.let_go = component, threading.Event(), threading.Event()

    async def ainvoke(self, *given: Any) -> Any:
        self.asked.set()
        await asyncio.to_thread(self.let_go.wait, 60)
        return await self.component.ainvoke(*given)


@pytest.mark.loopback
def test_a_server_finishes_what_runs_before_it_closes_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, ledger = new_folder(tmp_path, monkeypatch), new_ledger("budget.db")
    with running(config, ledger) as found:
        app = create_app(found)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=60))
        thread = threading.Thread(target=server.run)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        service = found.service
        held = service._answering["ask"] = Held(service._answering["ask"])
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/ask"
        with ThreadPoolExecutor(1) as pool:
            headers = {"Authorization": f"Bearer {KEYS['acme']}"}
            asking = pool.submit(httpx.post, url, json={"question": "?"}, headers=headers, timeout=120)
            assert held.asked.wait(60)
            server.should_exit = True
            time.sleep(0.15)  # it has seen that by now, and waits
            assert thread.is_alive()
            held.let_go.set()
            thread.join(60)
            answer = asking.result(60)
        assert answer.status_code == 200
        with pytest.raises(LedgerError, match="closed"):
            _ = service.doors["ask"].queries_left
    reopened = PrivacyBudgetCallbackHandler.open(ledger)
    assert not reopened.budget.dangling()
    reopened.budget.check_receipt(answer.json()["receipt"])
    reopened.budget.close()
