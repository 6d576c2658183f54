"""The service of `examples/`: exactly as many answers as there are tickets, refusals by status, nothing private on the
wire, and a ledger that outlives it, in SQLite and in PostgreSQL.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("fastapi")
import httpx

from langchain_dpicl import PrivacyBudgetCallbackHandler
from langchain_dpicl.exceptions import LedgerError, LedgerUnavailableError, ModelCallError, PrivacyBudgetError
from langchain_dpicl.stores import open_store
from tests.example_files import example
from tests.loopback_provider import provider
from tests.postgres import PostgresServer

CANARY = "Quxbadger"
SMALL = {"SIZE": 60, "NUM_SLOTS": 8, "MAX_QUERIES": 8, "TENANT_QUERIES": 5}
KEYS = {"acme": "key-1", "globex": "key-2"}


@pytest.fixture
def service() -> Iterator[ModuleType]:
    with example("voting_service", **SMALL) as module:
        records = module.bank_questions(60)
        module.load_records = lambda: [{**one, "text": f"{CANARY} {one['text']}"} for one in records]
        yield module


@pytest.fixture(params=["sqlite", "postgres"])
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where an empty ledger is, in either database."""
    where = str(tmp_path / "budget.db")
    if request.param == "postgres":
        server: PostgresServer = request.getfixturevalue("postgres")
        where = f"postgresql://owner:{CANARY}@/{server.new_database()}?host={server.folder}&port=5432"
    PrivacyBudgetCallbackHandler.create(where, epsilon=4.0, delta=1e-5).close()
    return where


@pytest.fixture
def sqlite(tmp_path: Path) -> str:
    where = str(tmp_path / "budget.db")
    PrivacyBudgetCallbackHandler.create(where, epsilon=4.0, delta=1e-5).close()
    return where


class Client:
    """Asks an application as a tenant would, and keeps every byte that comes back."""

    def __init__(self, app: Any, seen: list[str]) -> None:
        self.app, self.seen = app, seen
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test")

    async def ask(self, question: str, tenant: str = "acme") -> httpx.Response:
        return await self.send("POST", "/answers", tenant, json={"question": question})

    async def send(self, method: str, path: str, tenant: str | None = "acme", **options: Any) -> httpx.Response:
        headers = {"content-type": "application/json"}
        if tenant is not None:
            headers["X-API-Key"] = KEYS.get(tenant, tenant)
        response = await self.http.request(method, path, headers=headers, **options)
        self.seen.append(f"{response.headers} {response.text}")
        return response

    async def ask_at_once(self, tenants: str, count: int) -> Counter[int]:
        """Asks `count` different questions for each tenant, all at the same time; counts the answers by status."""
        asked = [self.ask(f"question {number}?", tenant) for number in range(count) for tenant in tenants.split()]
        return Counter(response.status_code for response in await asyncio.gather(*asked))


@contextlib.asynccontextmanager
async def running(module: ModuleType, where: str, seen: list[str] | None = None) -> AsyncIterator[Client]:
    """Runs the application from start to shutdown."""
    app = module.create_app(module.Settings.of(where, KEYS))
    async with app.router.lifespan_context(app):
        client = Client(app, [] if seen is None else seen)
        async with client.http:
            yield client


async def test_exactly_as_many_answers_are_given_as_there_are_tickets(service: ModuleType, ledger: str) -> None:
    service.TENANT_QUERIES = 10
    seen: list[str] = []
    async with running(service, ledger, seen) as client:
        statuses = await client.ask_at_once("acme globex", 10)
        assert statuses == {200: 8, 402: 12}
        refused = await client.ask("one more?")
        assert (refused.status_code, "all 8 private answers" in refused.json()["detail"]) == (402, True)
        used = [(await client.send("GET", "/budget", tenant)).json()["tenant"]["answers_used"] for tenant in KEYS]
        assert sum(used) == 8
    with open_store(ledger) as store:
        assert [line.kind for line in store.records()].count("reserve") == 8
    assert CANARY not in "".join(seen)
    assert str(ledger) not in "".join(seen)


async def test_every_tenant_gets_its_own_number_and_no_more(service: ModuleType, ledger: str) -> None:
    service.MAX_QUERIES, service.TENANT_QUERIES = 20, 3
    async with running(service, ledger) as client:
        assert await client.ask_at_once("acme", 8) == {200: 3, 429: 5}
        shown = (await client.send("GET", "/budget")).json()
        assert shown["tenant"] == {"name": "acme", "answers": 3, "answers_used": 3}
        assert shown["service"] == {"epsilon": 2.0, "delta": 5e-6, "answers": 20, "answers_left": 17}
        assert shown["ledger"] == {"epsilon": 4.0, "delta": 1e-5, "adjacency": "add_remove"}
        assert (await client.ask("question 0?", "globex")).status_code == 200  # the others have theirs


async def test_two_services_on_one_ledger_grant_what_one_would(
    service: ModuleType, ledger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.MAX_QUERIES, service.TENANT_QUERIES = 20, 3
    async with running(service, ledger) as one:
        monkeypatch.setattr("langchain_dpicl.privacy.ledger.budget._IDENTITIES", {})  # what another process knows
        async with running(service, ledger) as other:
            both = await asyncio.gather(one.ask_at_once("acme", 5), other.ask_at_once("acme", 5))
            assert both[0] + both[1] == {200: 3, 429: 7}
            left = [(await client.send("GET", "/budget")).json()["service"]["answers_left"] for client in (one, other)]
            assert left == [17, 17]


async def test_a_restart_goes_on_where_the_ledger_stands(
    service: ModuleType, ledger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(service, ledger) as client:
        receipt = (await client.ask("question?")).json()["receipt"]
    monkeypatch.setattr("langchain_dpicl.privacy.ledger.budget._IDENTITIES", {})  # what another process knows
    async with running(service, ledger) as client:
        assert (await client.send("GET", "/budget")).json()["service"]["answers_left"] == 7
        client.app.state.service.budget.budget.check_receipt(receipt)
        forged = {**receipt, "entry_hash": "0" * 64}
        with pytest.raises(PrivacyBudgetError):
            client.app.state.service.budget.budget.check_receipt(forged)


async def test_the_same_question_is_free_for_its_tenant_alone(service: ModuleType, sqlite: str) -> None:
    async with running(service, sqlite) as client:
        answers = [(await client.ask("card?", tenant)).json() for tenant in ("acme", "acme", "globex")]
        assert [answer["source"] for answer in answers] == ["release", "memo", "release"]
        assert [answer["queries_left"] for answer in answers] == [7, 7, 6]
        assert answers[0]["label"] == answers[1]["label"]
        assert {answer["label"] for answer in answers} <= set(service.LABELS)


async def test_the_key_decides_who_asks_and_nothing_else_does(service: ModuleType, sqlite: str) -> None:
    async with running(service, sqlite) as client:
        assert (await client.send("GET", "/budget", "guessed")).status_code == 401
        assert (await client.send("GET", "/budget", None)).status_code == 422
        assert (await client.ask("?", "guessed")).status_code == 401
        body = {"question": "?", "tenant": "globex"}
        assert (await client.send("POST", "/answers", "acme", json=body)).status_code == 200
        shown = (await client.send("GET", "/budget", "globex")).json()
        assert shown["tenant"]["answers_used"] == 0
        for wrong in ({"question": ""}, {"question": "x" * 2001}, {"text": "?"}, {"question": 3}, ["?"]):
            refused = await client.send("POST", "/answers", json=wrong)
            assert (refused.status_code, refused.json()["detail"][:8]) == (422, "Expected")
        half = await client.send("POST", "/answers", content=b'{"question": "\\ud800"}')
        assert (half.status_code, half.json()["detail"][-15:]) == (422, " body.question.")
        assert shown["service"]["answers_left"] == 7
        assert "key-" not in repr(client.app.state.service.settings)


async def test_outages_are_503_and_charge_nothing(service: ModuleType, sqlite: str) -> None:
    async with running(service, sqlite) as client:
        assert (await client.send("GET", "/health", None)).json() == {"status": "ok"}
        voter = client.app.state.service.voter
        prepared = type(voter)._prepare
        for error, said in ((ModelCallError(CANARY), "model"), (LedgerUnavailableError(CANARY), "ledger")):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(type(voter), "_prepare", lambda *_, error=error: (_ for _ in ()).throw(error))
                refused = await client.ask("question?")
            assert (refused.status_code, said in refused.json()["detail"]) == (503, True)
        assert type(voter)._prepare is prepared
        assert (await client.ask("question?")).json()["queries_left"] == 7
        assert CANARY not in "".join(client.seen)
        client.app.state.service.stop()
        for response in (
            await client.send("GET", "/health", None),
            await client.send("GET", "/budget"),
            await client.ask("another?"),
        ):
            assert response.status_code == 503
        assert sqlite not in "".join(client.seen)


async def test_a_release_that_fails_behind_the_public_call_is_charged_and_nobody_is_told_otherwise(
    service: ModuleType, sqlite: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(service, sqlite) as client:
        with monkeypatch.context() as patch:
            patch.setattr("langchain_dpicl.release.sample.sum_rows", lambda *_: 1 / 0)
            refused = await client.ask("question?")
        assert refused.status_code == 503
        assert "nothing was charged" not in refused.text.lower()
        assert "GET /budget" in refused.text
        shown = (await client.send("GET", "/budget")).json()
        assert (shown["service"]["answers_left"], shown["tenant"]["answers_used"]) == (7, 1)


async def test_a_ledger_that_is_not_there_stops_the_start(service: ModuleType, tmp_path: Path) -> None:
    place = tmp_path / "missing.db"
    with pytest.raises(LedgerUnavailableError, match="ledger"):
        async with running(service, str(place)):
            raise AssertionError("it started")
    assert not place.exists()


def test_settings_come_from_the_environment(service: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPICL_TENANTS", " acme=key-1, globex = a=b ")
    monkeypatch.setenv("DPICL_LEDGER", f"postgresql://u:{CANARY}@db/app")
    settings = service.Settings.from_environment()
    assert settings.ledger.startswith("postgresql://")
    assert settings.tenants == {service.digest("key-1"): "acme", service.digest("a=b"): "globex"}
    assert CANARY not in repr(settings)
    for wrong in ("", "acme", "acme=", "=key", "acme=key,globex"):
        monkeypatch.setenv("DPICL_TENANTS", wrong)
        with pytest.raises(SystemExit, match="DPICL_TENANTS"):
            service.Settings.from_environment()


def test_create_makes_a_ledger_once_and_the_rehearsal_shows_answers(
    service: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DPICL_LEDGER", str(tmp_path / "made.db"))
    service.main(["create"])
    made = PrivacyBudgetCallbackHandler.open(tmp_path / "made.db")
    assert (made.epsilon, made.delta) == (4.0, 1e-5)
    made.close()
    with pytest.raises(PrivacyBudgetError):
        service.main(["create"])
    capsys.readouterr()
    service.main([])
    shown = capsys.readouterr().out
    assert shown.count("(release)") == 4
    assert shown.count("(memo)") == 2
    assert "'answers_left': 4" in shown
    assert "401" in shown
    assert CANARY not in shown


@pytest.mark.loopback
async def test_a_provider_votes_and_only_it_sees_the_records(sqlite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with provider() as served, example("voting_service", provider=True, **SMALL) as module:
        monkeypatch.setenv("OPENAI_BASE_URL", served.url)
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        records = module.bank_questions(60)
        module.load_records = lambda: [{**one, "text": f"{CANARY} {one['text']}"} for one in records]
        async with running(module, sqlite) as client:
            answer = (await client.ask("Where is my transfer?")).json()
        bodies = [json.dumps(request.body) for request in served.received]
    assert answer["label"] in module.LABELS
    assert {request.body["model"] for request in served.received} == {"gpt-4.1-mini"}
    assert sum(CANARY in body for body in bodies) > 1
    assert CANARY not in "".join(client.seen)


class Held:
    """A voter whose answers wait until they are let go."""

    def __init__(self, voter: Any) -> None:
        self.voter, self.share = voter.with_receipts(), voter.share
        self.asked, self.let_go = threading.Event(), threading.Event()

    def with_receipts(self) -> Held:
        return self

    async def ainvoke(self, *given: Any) -> Any:
        self.asked.set()
        await asyncio.to_thread(self.let_go.wait, 30)
        return await self.voter.ainvoke(*given)


@pytest.mark.loopback
def test_a_real_server_finishes_what_runs_before_it_closes_the_ledger(service: ModuleType, sqlite: str) -> None:
    uvicorn = pytest.importorskip("uvicorn")
    app = service.create_app(service.Settings.of(sqlite, KEYS))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=60))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    held = app.state.service.voter = Held(app.state.service.voter)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/answers"
    answers: list[httpx.Response] = []
    ask = threading.Thread(
        target=lambda: answers.append(
            httpx.post(url, json={"question": "?"}, headers={"X-API-Key": "key-1"}, timeout=60)
        )
    )
    ask.start()
    assert held.asked.wait(60)
    server.should_exit = True
    time.sleep(0.15)  # it has seen that by now, and waits
    assert thread.is_alive()
    held.let_go.set()
    thread.join(60)
    ask.join(60)
    assert [answer.status_code for answer in answers] == [200]
    with pytest.raises(LedgerError, match="closed"):
        held.share.remaining("query")
    reopened = PrivacyBudgetCallbackHandler.open(sqlite)
    assert not reopened.budget.dangling()
    reopened.budget.check_receipt(answers[0].json()["receipt"])
    reopened.close()
