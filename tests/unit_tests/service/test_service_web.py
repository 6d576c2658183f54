"""The service over HTTP: exactly as many answers as there are tickets, refusals by status, nothing private on the wire."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import json
import logging
import os
import sqlite3
import threading
import traceback
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

pytest.importorskip("fastapi")

from langchain_dpicl.backends import sync_async
from langchain_dpicl.baselines import real_demonstrations_without_privacy
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
from langchain_dpicl.cli import serve
from langchain_dpicl.cli.main import main
from langchain_dpicl.cli.serve import _answered_at_end, read_app
from langchain_dpicl.exceptions import (
    ConfigurationError,
    LedgerUnavailableError,
    MemoError,
    ModelCallError,
    PrivacyBudgetError,
)
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.released.demonstrations import ReleasedDemonstrations
from langchain_dpicl.service.service import RateLimit, RefusalLog, Tenant
from langchain_dpicl.service.web import create_app
from langchain_dpicl.stores import FileAnchor, open_store
from tests.sealed_files import paid
from tests.served import (
    CANARY,
    EMBEDDINGS,
    FREE_ANSWERS,
    KEYS,
    LABELS,
    WRITER,
    Client,
    change,
    new_folder,
    new_ledger,
    running,
)


@contextlib.asynccontextmanager
async def asking(config: Path, ledger: str) -> AsyncIterator[Client]:
    with running(config, ledger) as found:
        client = Client(create_app(found))
        client.running = found
        async with client.http:
            yield client


@pytest.fixture
def ledger(tmp_path: Path) -> str:
    return new_ledger(str(tmp_path / "budget.db"))


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return new_folder(tmp_path, monkeypatch)


async def test_exactly_as_many_answers_are_given_as_there_are_tickets(
    config: Path, ledger: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with asking(config, ledger) as client:
        assert await client.ask_at_once("acme globex", 10) == {200: 8, 402: 12}
        refused = await client.ask("one more?")
        assert refused.json()["error"] == "budget_spent"
        used = [(await client.get("/budget", who))["components"]["ask"]["yours_used"] for who in ("acme", "globex")]
        assert sum(used) == 8
    with open_store(ledger) as store:
        assert [line.kind for line in store.records()].count("reserve") == 8
    logged = [json.loads(record.message) for record in caplog.records if record.name.endswith("service.charges")]
    assert [one["event"] for one in logged].count("charged") == 8
    assert [one["event"] for one in logged].count("refused") == 13
    assert {one["entry"] for one in logged if one["event"] == "charged"} >= {3}
    for hidden in (CANARY, ledger, "question ", "one more?", *KEYS.values()):
        assert hidden not in "".join(client.seen) + caplog.text


async def test_every_tenant_gets_its_own_number_and_no_more(
    tmp_path: Path, ledger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = new_folder(tmp_path, monkeypatch)
    change(config, 'key_env = "ACME_KEY"', 'key_env = "ACME_KEY"\nmax_queries = 3')
    async with asking(config, ledger) as client:
        assert await client.ask_at_once("acme", 6) == {200: 3, 429: 3}
        assert (await client.ask("another?")).json()["error"] == "tenant_spent"
        shown = await client.get("/budget")
        assert shown["tenant"] == "acme"
        assert shown["components"]["ask"] == {
            "epsilon": 2.0,
            "delta": pytest.approx(1e-5),
            "queries": 8,
            "queries_left": 5,
            "yours": 3,
            "yours_used": 3,
        }
        assert (await client.ask("question 0?", "globex")).status_code == 200  # the others have theirs


async def test_the_same_question_is_free_for_its_tenant_alone(config: Path, ledger: str) -> None:
    async with asking(config, ledger) as client:
        answers = [(await client.ask("card?", who)).json() for who in ("acme", "acme", "globex")]
        assert [one["source"] for one in answers] == ["release", "memo", "release"]
        assert [one["queries_left"] for one in answers] == [7, 7, 6]
        assert {one["answer"] for one in answers} <= {*LABELS}
        client.running.service.budget.budget.check_receipt(answers[0]["receipt"])
        with pytest.raises(PrivacyBudgetError):
            client.running.service.budget.budget.check_receipt({**answers[0]["receipt"], "entry_hash": "0" * 64})


async def test_the_key_decides_who_asks_and_nothing_else_does(config: Path, ledger: str) -> None:
    async with asking(config, ledger) as client:
        for who in ("guessed", None, "operator"):
            refused = await client.send("GET", "/budget", who)
            assert (refused.status_code, refused.json()["error"]) == (401, "unknown_key")
            assert (await client.ask("?", who or "")).status_code == 401
        body = {"question": "?", "tenant": "globex", "configurable": {"tenant": "globex"}}
        assert (await client.send("POST", "/ask?tenant=globex", json=body)).status_code == 200
        assert (await client.get("/budget", "globex"))["components"]["ask"]["yours_used"] == 0
        assert (await client.get("/budget"))["components"]["ask"]["yours_used"] == 1
    for key in KEYS.values():
        assert key not in repr(vars(client.running.service)) + repr(vars(client.running.service.tenants))


async def test_what_is_no_question_is_refused_before_anything_is_charged(config: Path, ledger: str) -> None:
    async with asking(config, ledger) as client:
        for wrong in ({"question": ""}, {"question": " "}, {"text": "?"}, {"question": 3}, ["?"]):
            refused = await client.send("POST", "/ask", json=wrong)
            assert (refused.status_code, refused.json()["error"]) == (422, "no_question")
        half = await client.send("POST", "/ask", content=b'{"question": "\\ud800"}')
        assert (half.status_code, half.json()["error"]) == (422, "no_question")
        for length, status in ((2000, 200), (2001, 413), (100_000, 413)):
            assert (await client.ask("x" * length)).status_code == status
        assert (await client.send("POST", "/answer", json={"question": "?"})).status_code == 404
        assert (await client.send("GET", "/ask")).status_code == 405
        assert (await client.get("/budget"))["components"]["ask"]["queries_left"] == 7


@pytest.mark.parametrize(
    "body", [b"[" * 20_000, b'{"question": ' + b"1" * 9000 + b"}", b'{"question": "\xff"}', b"\x1f\x8b"]
)
async def test_a_body_that_is_no_json_is_no_question(config: Path, ledger: str, body: bytes) -> None:
    async with asking(config, ledger) as client:
        refused = await client.send("POST", "/ask", content=body)
        assert (refused.status_code, refused.json()["error"]) == (422, "no_question")


async def test_a_request_of_two_keys_is_of_nobody(config: Path, ledger: str) -> None:
    async with asking(config, ledger) as client:
        for path, one, other in (("/budget", "acme", "globex"), ("/metrics", "operator", "acme")):
            both = [("Authorization", f"Bearer {KEYS[who]}") for who in (one, other)]
            assert (await client.http.get(path, headers=both)).status_code == 401


async def test_callers_are_sent_to_no_other_address(config: Path, ledger: str) -> None:
    async with asking(config, ledger) as client:
        for path in ("/ask/", "/metrics/"):
            answer = await client.send("POST", path, headers={"Host": "elsewhere.example"}, json={"question": "?"})
            assert (answer.status_code, answer.headers.get("location")) == (404, None)


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("/ask", "langchain_dpicl.voting.DPVotingRunnable._prepare"),
        ("/budget", "langchain_dpicl.service.service.Service.standing"),
    ],
)
async def test_the_words_of_a_foreign_error_are_nowhere(
    config: Path,
    ledger: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    path: str,
    place: str,
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ValueError(CANARY)

    monkeypatch.setattr(place, fails)
    async with asking(config, ledger) as client:
        method, body = ("POST", {"question": "card?"}) if path == "/ask" else ("GET", None)
        refused = await client.send(method, path, json=body)
        assert (refused.status_code, refused.json()["error"]) == (500, "fault")
        assert refused.headers["cache-control"] == "no-store"
    assert "ValueError" in caplog.text
    assert CANARY not in "".join(client.seen) + caplog.text


@pytest.mark.parametrize(
    ("before", "after", "key", "said"),
    [
        ("", "", "globex-key-00000001", "operator: expected a key of its own, found \"that of 'globex'\""),
        ("", "", "schl\u00fcssel-of-the-operators", "operator.key_env: expected a key of ASCII letters"),
        ("", "", "operator-key-000001\n", "operator.key_env: expected a key of ASCII letters"),
        ('key_env = "OPERATOR_KEY"', 'key_env = "OPERATOR_KEY"\nmax_queries = 1', None, "found 'max_queries'"),
        ("[tenants.acme]", '[tenants.""]', None, "tenants: expected names"),
        ("[tenants.acme]", '[tenants."a\\nb"]', None, "tenants: expected names"),
        ('key_env = "ACME_KEY"', f'key_env = "{CANARY}"', None, "Set the variable that tenants.acme.key_env names"),
        ('key_env = "ACME_KEY"', f'key = "{CANARY}"', None, "tenants.acme: expected options among ['key_env'"),
        (
            "[tenants.acme]",
            f'[tenants]\ninitech = "{CANARY}"\n[tenants.acme]',
            None,
            "initech: expected a table, found str",
        ),
        (
            '[operator]\nkey_env = "OPERATOR_KEY"',
            f'operator = "{CANARY}"',
            None,
            "operator: expected a table, found str",
        ),
    ],
)
def test_settings_that_let_the_wrong_ones_in_are_refused(
    config: Path, ledger: str, monkeypatch: pytest.MonkeyPatch, *, before: str, after: str, key: str | None, said: str
) -> None:
    change(config, before, after)
    if key is not None:
        monkeypatch.setenv("OPERATOR_KEY", key)
    with pytest.raises(ConfigurationError) as refused, running(config, ledger):
        pass
    shown = str(refused.value)
    assert said in shown
    assert CANARY not in shown
    assert key is None or key not in shown


async def test_a_body_is_refused_before_it_is_read_whole(config: Path, ledger: str) -> None:
    read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(1000):
            read += 10_000
            yield b"x" * 10_000

    async with asking(config, ledger) as client:
        assert (await client.send("POST", "/ask", content=endless())).status_code == 413
    assert read < 100_000


async def test_who_asks_too_often_is_told_when_to_ask_again(
    tmp_path: Path, ledger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = new_folder(tmp_path, monkeypatch, more="[service]\nqueries_per_minute = 2\nledger_timeout = 300\n")
    async with asking(config, ledger) as client:
        rate = client.running.service._rate = RateLimit(2, clock=lambda: now)
        now = 0.0
        assert [(await client.ask("card?")).status_code for _ in range(3)] == [200, 200, 429]
        refused = await client.ask("card?")
        assert (refused.json()["error"], refused.headers["retry-after"]) == ("too_often", "30")
        assert (await client.ask("card?", "globex")).status_code == 200
        now = 30.0
        assert [(await client.ask("card?")).status_code for _ in range(2)] == [200, 429]
        assert rate.wait("nobody") == 0


async def test_outages_are_503_and_charge_nothing(
    config: Path, ledger: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("langchain_dpicl.service.service._HEALTH_S", 0.0)
    async with asking(config, ledger) as client:
        assert await client.get("/health", None) == {"status": "ok"}
        assert (await client.send("HEAD", "/health", None)).status_code == 200  # as some probes ask
        kind = type(client.running.service.doors["ask"])
        errors = {
            "model_out": ModelCallError(CANARY),
            "ledger_out": LedgerUnavailableError(CANARY),
            "memo_out": MemoError(CANARY),
        }
        for code, error in errors.items():
            with monkeypatch.context() as patch:
                patch.setattr(kind, "_prepare", lambda *_, error=error: (_ for _ in ()).throw(error))
                refused = await client.ask("question?")
            assert (refused.status_code, refused.json()["error"]) == (503, code)
        assert (await client.ask("question?")).json()["queries_left"] == 7
        client.running.close()
        for path, method in (("/health", "GET"), ("/budget", "GET")):
            refused = await client.send(method, path)
            assert (refused.status_code, refused.json()["error"]) == (503, "ledger_out")
        assert (await client.send("HEAD", "/health", None)).status_code == 503
        assert (await client.ask("another?")).status_code == 503
        assert "dpicl_ledger_up" in (metrics := (await client.send("GET", "/metrics", "operator")).text)
        assert "} 0.0" in metrics.splitlines()[2]
        assert (await client.get("/standing", "operator"))["ledgers"][0]["readable"] is False
    for hidden in (CANARY, ledger):
        assert hidden not in "".join(client.seen) + caplog.text


@pytest.mark.parametrize("fault", ["lost", "ahead"])
async def test_health_is_503_where_the_anchor_lets_no_question_be_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr("langchain_dpicl.service.service._HEALTH_S", 0.0)
    where, anchor = str(tmp_path / "budget.db"), tmp_path / "anchor.json"
    config = new_folder(tmp_path, monkeypatch, more=f'[service]\nledger_timeout = 300\nanchor = "{anchor}"\n')
    made = PrivacyBudgetCallbackHandler.create(where, epsilon=20.0, delta=1e-4, anchor=FileAnchor.new(anchor))
    made.close()
    async with asking(config, where) as client:
        assert (await client.ask("a question?")).status_code == 200
        assert await client.get("/health", None) == {"status": "ok"}
        known = anchor.read_bytes()
        if fault == "lost":
            anchor.unlink()
        else:  # it knows lines that an older copy of the ledger lacks
            FileAnchor(anchor).write(made.budget.ledger_id, 1_000, "0" * 64)
        refused = await client.send("GET", "/health", None)
        assert (refused.status_code, refused.json()["error"]) == (503, "ledger_out")
        assert (await client.ask("another?")).status_code == 503
        anchor.write_bytes(known)
        assert await client.get("/health", None) == {"status": "ok"}
    assert str(anchor) not in "".join(client.seen)


async def test_many_callers_of_health_read_the_ledger_once(
    config: Path, ledger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("langchain_dpicl.service.service._HEALTH_S", 3600.0)
    looks, looking, may_go = [], threading.Event(), threading.Event()

    def check_ready(self: Any) -> None:
        looks.append(self)
        looking.set()
        may_go.wait()
        raise LedgerUnavailableError(CANARY)

    monkeypatch.setattr(Budget, "check_ready", check_ready)
    async with asking(config, ledger) as client:
        several = [asyncio.ensure_future(client.send("GET", "/health", None)) for _ in range(20)]
        await asyncio.to_thread(looking.wait)
        several.pop(0).cancel()
        may_go.set()
        answers = [*await asyncio.gather(*several), await client.send("GET", "/health", None)]
        assert {answer.status_code for answer in answers} == {503}
        assert len(looks) == 1
        assert CANARY not in "".join(client.seen)


async def test_neither_health_nor_a_refusal_waits_for_threads_that_models_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ledger: str
) -> None:
    config = new_folder(tmp_path, monkeypatch, queries=1)
    async with asking(config, ledger) as client:
        await client.ask("the only question")
        held = threading.Event()
        models = [asyncio.ensure_future(asyncio.to_thread(held.wait)) for _ in range(100)]  # on this machine
        try:
            for asked, status in ((client.send("GET", "/health", None), 200), (client.ask("another?"), 402)):
                assert (await asyncio.wait_for(asked, 60)).status_code == status
        finally:
            held.set()
            await asyncio.gather(*models)


async def test_only_who_reads_the_budget_waits_for_threads_that_others_hold_so(config: Path, ledger: str) -> None:
    async with asking(config, ledger) as client, contextlib.AsyncExitStack() as held:
        threads = anyio.to_thread.current_default_thread_limiter()
        for _ in range(int(threads.total_tokens)):  # as GET /budget does while it waits for the ledger
            await threads.acquire_on_behalf_of(who := object())
            held.callback(threads.release_on_behalf_of, who)
        asks = [(client.send("GET", "/health", None), 200), (client.ask("?"), 200), (client.ask("?", "guessed"), 401)]
        for asked, status in [*asks, (client.send("GET", "/metrics", "guessed"), 401)]:
            assert (await asyncio.wait_for(asked, 60)).status_code == status


async def test_a_locked_ledger_is_503_before_long_and_charges_only_what_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ledger: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    config = new_folder(tmp_path, monkeypatch, more="[service]\nledger_timeout = 0.1\n")
    async with asking(config, ledger) as client:
        await client.ask("the first question, which declares the share")
        with contextlib.closing(sqlite3.connect(ledger, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            found = await asyncio.gather(*(client.ask(f"question {number}") for number in range(4)))
            other.execute("ROLLBACK")
        assert [(each.status_code, each.json()["error"]) for each in found] == [(503, "ledger_out")] * 4
        assert [each.headers["retry-after"] for each in found] == ["5"] * 4
        assert (await client.ask("question 0")).json()["queries_left"] == 6
    logged = [json.loads(record.message) for record in caplog.records if record.name.endswith("service.charges")]
    assert [line["tickets"] for line in logged] == [1, 0, 0, 0, 0, 1]
    with open_store(ledger) as store:
        assert [line.kind for line in store.records()].count("reserve") == 2


@pytest.mark.parametrize("said", ["context", "cause"])
async def test_a_cancelled_request_keeps_quiet_about_the_error_that_it_was_cancelled_behind(
    config: Path, ledger: str, caplog: pytest.LogCaptureFixture, said: str
) -> None:
    """As servers do at the end of their grace; some log what a cancelled request ends with."""
    caplog.set_level(logging.DEBUG)
    reached = asyncio.Event()

    class Failing:
        async def ainvoke(self, *_: object) -> object:
            try:
                return int(CANARY)
            except ValueError as error:
                reached.set()
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError as stop:
                    if said == "cause":
                        stop.__cause__ = error
                    raise

    async with asking(config, ledger) as client:
        service = client.running.service
        service._answering["ask"] = Failing()
        request = asyncio.ensure_future(service.ask("ask", "?", Tenant("acme")))
        await reached.wait()
        request.cancel("by the server")
        with pytest.raises(asyncio.CancelledError, match="by the server") as ended:
            await request
    assert CANARY not in "".join(traceback.format_exception(ended.value)) + caplog.text
    (logged,) = [json.loads(record.message) for record in caplog.records if record.name.endswith("service.charges")]
    assert (logged["event"], logged["error"], logged["tickets"]) == ("failed", "CancelledError", 0)


async def test_only_a_request_that_an_ending_server_cancels_is_answered_as_json(
    config: Path, ledger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = iter([False, True])
    reached = asyncio.Event()

    async def waits(*_: object) -> None:
        reached.set()
        await asyncio.sleep(3600)

    with running(config, ledger) as found:
        monkeypatch.setattr(found.service, "ask", waits)
        client = Client(_answered_at_end(create_app(found), found.service, lambda: next(ends)))
        async with client.http:
            for stop in (pytest.raises(asyncio.CancelledError), contextlib.nullcontext()):
                reached.clear()
                request = asyncio.ensure_future(client.ask("?"))
                await reached.wait()
                request.cancel()
                with stop:
                    refused = await request
    assert (refused.status_code, refused.json()["error"]) == (500, "fault")


async def test_a_fault_behind_the_public_call_is_charged_and_logged_as_such(
    config: Path, ledger: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with asking(config, ledger) as client:
        with monkeypatch.context() as patch:
            patch.setattr("langchain_dpicl.release.curator.sum_rows", lambda *_: 1 / 0)
            refused = await client.ask("question?")
        assert (refused.status_code, refused.json()["error"]) == (503, "model_out")
        shown = (await client.get("/budget"))["components"]["ask"]
        assert (shown["queries_left"], shown["yours_used"]) == (7, 1)
    (logged,) = [json.loads(record.message) for record in caplog.records if record.name.endswith("service.charges")]
    assert (logged["event"], logged["tickets"], logged["status"]) == ("charged", 1, 503)


async def test_a_shortage_of_threads_is_no_fault_of_the_question(
    config: Path, ledger: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: str) -> Any:
        raise RuntimeError("can't start new thread")

    async with asking(config, ledger) as client:
        with monkeypatch.context() as patch:
            patch.setattr(sync_async, "_pool", full)
            refused = await client.ask("question?")
        assert (refused.status_code, refused.json()["error"]) == (500, "fault")
        assert (await client.get("/standing", "operator"))["refusals"][0]["error"] == "fault"
        assert (await client.ask("question?")).json()["queries_left"] == 7
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        "ask: ConfigurationError"
    ]


@pytest.mark.parametrize("given", [b"Basic \xe9", b"Basic \xe9\xe9\xe9\xe9", b"Basic !", b"Basic /w==", b"Basic"])
async def test_a_password_that_cannot_be_read_is_nobodys(
    config: Path, ledger: str, caplog: pytest.LogCaptureFixture, given: bytes
) -> None:
    async with asking(config, ledger) as client:
        for path in ("/", "/standing", "/metrics"):
            refused = await client.http.get(path, headers=[(b"authorization", given)])
            assert (refused.status_code, refused.json()["error"]) == (401, "unknown_key")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_question_that_says_nothing_to_the_embeddings_is_no_question(
    config: Path, ledger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(config, "[ask]", f"{FREE_ANSWERS}\n[ask]")
    embed = EMBEDDINGS.embed_documents
    zeros = [[0.0] * len(embed(["?"])[0])]
    monkeypatch.setattr(EMBEDDINGS, "embed_documents", lambda texts: zeros if texts == ["?!"] else embed(texts))
    async with asking(config, ledger) as client:
        refused = await client.ask("?!", door="retrieve_and_answer")
        assert (refused.status_code, refused.json()["error"]) == (422, "no_question")
        assert (await client.get("/budget"))["components"]["retrieve_and_answer"]["yours_used"] == 0


async def test_operators_see_every_tenant_and_tenants_do_not(config: Path, ledger: str) -> None:
    change(config, 'key_env = "ACME_KEY"', 'key_env = "ACME_KEY"\nmax_queries = 3')
    async with asking(config, ledger) as client:
        await client.ask("card?")
        await client.ask("?", "guessed")
        for path in ("/standing", "/metrics"):
            for who in ("acme", "guessed", None):
                refused = await client.send("GET", path, who)
                assert refused.status_code == 401
                assert refused.headers["www-authenticate"].startswith("Basic")
            basic = base64.b64encode(f"me:{KEYS['operator']}".encode()).decode()
            opened = await client.send("GET", path, None, headers={"Authorization": f"Basic {basic}"})
            assert opened.status_code == 200
        (found,) = (shown := await client.get("/standing", "operator"))["ledgers"]
        assert (found["epsilon"], found["epsilon_spent"]) == (20.0, 2.0)
        (component,) = found["components"]
        assert (component["left"], component["spent"], component["per_day"]) == (7, 0.125, 24.0)
        assert component["days_left"] == pytest.approx(7 / 24)
        assert found["tenants"] == [
            {"component": "ask", "tenant": "acme", "used": 1, "cap": 3, "left": 2},
            {"component": "ask", "tenant": "globex", "used": 0, "cap": None, "left": None},
        ]
        # The one of the tenant's address, and two at each address of the operators: no key at all is only asked for one.
        assert [one.get("door") for one in shown["refusals"]] == ["operators"] * 4 + [None]
        lines = (await client.send("GET", "/metrics", "operator")).text.splitlines()
        assert next(line for line in lines if line.startswith("dpicl_charged_total")).endswith('component="ask"} 1.0')


async def test_without_an_operators_key_nothing_is_shown(config: Path, ledger: str) -> None:
    change(config, '[operator]\nkey_env = "OPERATOR_KEY"', "")
    async with asking(config, ledger) as client:
        for path in ("/standing", "/metrics"):
            assert (await client.send("GET", path, "operator")).status_code == 404


async def test_what_is_offered_stands_in_the_description_and_nothing_else(config: Path, ledger: str) -> None:
    change(config, "[operator]", 'demonstrations = "demos.json"\n[operator]')
    async with asking(config, ledger) as client:
        described = await client.get("/openapi.json", None)
        assert {*described["paths"]} == {"/health", "/ask", "/demonstrations", "/budget"}
        assert {*described["paths"]["/ask"]["post"]["responses"]} == {
            str(status) for status in (200, 401, 402, 404, 413, 422, 429, 503)
        }
        assert (await client.get("/demonstrations"))["demonstrations"] == [{"text": "a made-up text", "topic": "card"}]
        assert (await client.send("GET", "/docs")).status_code == 404  # it would load scripts from elsewhere


async def test_half_of_a_surrogate_pair_in_an_answer_is_replaced(
    config: Path, ledger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(config, "[ask]", f"{FREE_ANSWERS}\n[ask]")
    change(config, "[operator]", 'demonstrations = "demos.json"\n[operator]')
    ReleasedDemonstrations(({"text": "tea\ud83d"},), paid(1.5), {}).save(config.parent / "demos.json")
    monkeypatch.setattr(WRITER, "answer", lambda _: "caf\ud83d")
    async with asking(config, ledger) as client:
        answers = [await client.ask("cough?", door="answer") for _ in range(2)]
        assert [(one.status_code, one.json().get("answer")) for one in answers] == [(200, "caf?")] * 2
        # Demonstrations were made sendable before.
        monkeypatch.setattr("langchain_dpicl.service.service._sendable", None)
        assert (await client.get("/demonstrations"))["demonstrations"] == [{"text": "tea?"}]


async def test_demonstrations_without_a_finite_epsilon_are_not_offered(config: Path, ledger: str) -> None:
    change(config, "[operator]", 'demonstrations = "demos.json"\n[operator]')
    records = [{"text": CANARY, "topic": topic} for topic in LABELS]
    private = PrivateExamples(records, label_key="topic", labels=LABELS, public_size=2)
    real_demonstrations_without_privacy(private, shots_per_label=1).save(config.parent / "demos.json")
    with pytest.raises(ConfigurationError, match="a release with a finite epsilon, found inf") as refused:
        async with asking(config, ledger):
            pass
    assert CANARY not in str(refused.value)


async def test_free_and_retrieved_answers_have_tables_of_their_own(config: Path, ledger: str) -> None:
    change(config, "[ask]", f"{FREE_ANSWERS}\n[ask]")
    async with asking(config, ledger) as client:
        for door in ("answer", "retrieve_and_answer"):
            answer = (await client.ask("cough?", door=door)).json()
            assert (answer["source"], answer["queries_left"], answer["receipt"]["component"]) == ("release", 3, door)
            assert answer["keywords"] is None or len(answer["keywords"]) <= 1
        assert {*(await client.get("/budget"))["components"]} == {"ask", "answer", "retrieve_and_answer"}
        assert {"/ask", "/answer", "/retrieve_and_answer"} < {*(await client.get("/openapi.json", None))["paths"]}
    assert CANARY not in "".join(client.seen)


def test_embeddings_of_the_model_are_those_of_free_answers_without_a_table(config: Path, ledger: str) -> None:
    table = FREE_ANSWERS.partition("\n\n")[0].replace('WRITER"', 'WRITER", embeddings = "tests.served:EMBEDDINGS"')
    change(config, "[ask]", "\n".join(line for line in table.splitlines() if "answers =" not in line) + "\n[ask]")
    with running(config, ledger) as found:
        assert "TopicEmbeddings" in found.service.doors["answer"].maker.space.embeddings.name


@pytest.mark.parametrize("entry", ["epsilon = 0.1", "delta = 1e-9", 'adjacency = "replace_one"', 'ledger = "other.db"'])
def test_a_component_has_no_budget_of_its_own(config: Path, ledger: str, entry: str) -> None:
    change(config, "[tenants.acme]", f"[ask.budget]\n{entry}\n[tenants.acme]")
    with pytest.raises(ConfigurationError, match=rf"\[ask\] budget: expected .*{entry.split(maxsplit=1)[0]}"):
        read_app(config, ledger)


@pytest.mark.parametrize("named", [{"ask": "shared", "answer": "shared"}, {"answer": "ask"}])
def test_two_components_of_one_name_are_refused(config: Path, ledger: str, named: dict[str, str]) -> None:
    change(config, "[ask]", f"{FREE_ANSWERS}\n[ask]")
    for door, name in named.items():
        change(config, f"[{door}]", f'[{door}]\ncomponent = "{name}"')
    with pytest.raises(ConfigurationError, match=r"component: expected a name of its own for each of .*'answer'.*"):
        read_app(config, ledger)


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ("[ask.guess]\nskill = 0.9", "guess.skill"),
        ("[ask.cost]\nprice_in = 3.0", "cost"),
        ('[ask.model]\nname = "m"\nembeddings = "e"', "model.embeddings"),
    ],
)
def test_settings_that_a_service_does_not_read_are_refused(config: Path, ledger: str, table: str, key: str) -> None:
    change(config, "[tenants.acme]", f"{table}\n[tenants.acme]")
    with pytest.raises(ConfigurationError, match=rf"\[ask\] settings: expected .*, found \['{key}'\]"):
        read_app(config, ledger)


@pytest.mark.parametrize("entry", ["[data]\nfilee = 3", "[model]\nprivate_proces = true"])
def test_a_shared_table_is_checked_where_no_component_takes_it(tmp_path: Path, entry: str) -> None:
    config = tmp_path / "app.toml"
    config.write_text(f'demonstrations = "demos.json"\n[tenants.acme]\nkey_env = "ACME_KEY"\n{entry}\n')
    with pytest.raises(ConfigurationError, match=rf"{entry[1:5]}.*: expected options among"):
        read_app(config, None)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_balances_of_documents_that_a_restart_loses_are_refused(
    config: Path, ledger: str, capsys: pytest.CaptureFixture[str], workers: str
) -> None:
    change(config, "[ask]", f"{FREE_ANSWERS}\n[ask]")
    assert main(["serve", ledger, "--config", str(config), "--workers", workers]) == 2
    assert "balances: expected a file, which all processes share" in capsys.readouterr().err


async def test_two_services_on_one_ledger_grant_what_one_would(
    tmp_path: Path, ledger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = new_folder(tmp_path, monkeypatch)
    async with asking(config, ledger) as one:
        monkeypatch.setattr("langchain_dpicl.privacy.ledger.budget._IDENTITIES", {})  # what another process knows
        async with asking(config, ledger) as other:
            both = await asyncio.gather(one.ask_at_once("acme", 6), other.ask_at_once("globex", 6))
            assert both[0] + both[1] == {200: 8, 402: 4}  # type: ignore[operator]
            left = [(await each.get("/budget"))["components"]["ask"]["queries_left"] for each in (one, other)]
            assert left == [0, 0]


async def test_callers_without_a_key_cannot_hide_the_refusals_of_tenants(config: Path, ledger: str) -> None:
    async with asking(config, ledger) as client:
        await client.ask("?" * 3000)
        for number in range(30):
            await client.ask("?", f"guess {number}")
        await client.ask("")
        for number in range(30):
            await client.send("GET", "/standing", f"guess {number}")
        shown = (await client.get("/standing", "operator"))["refusals"]
    assert [one["error"] for one in shown if one.get("tenant")] == ["no_question", "too_long"]
    assert [(one["error"], one.get("door")) for one in shown if not one.get("tenant")] == 5 * [
        ("unknown_key", "operators")
    ]


def test_what_cleans_temporary_folders_leaves_that_of_a_service_alone() -> None:
    """systemd-tmpfiles removes what nothing used for ten days, except where it cannot take a lock."""
    with serve.own_folder() as folder:
        number = os.open(folder, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(number, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.close(number)
    assert not folder.exists()


def test_refusals_of_many_processes_stay_in_a_small_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, other = RefusalLog(tmp_path / "refusals.jsonl"), RefusalLog(tmp_path / "refusals.jsonl")
    for number in range(6000):
        (one if number % 2 else other).add({"tenant": "acme", "number": number})
        one.add({"error": "unknown_key", "number": number})
    assert all(each.stat().st_size < 300_000 for each in tmp_path.iterdir())
    assert [each["number"] for each in one.last(3) if "tenant" in each] == [5999, 5998, 5997]
    assert [each["number"] for each in one.last(3) if "tenant" not in each] == [5999, 5998, 5997, 5996, 5995]
    (tmp_path / "refusals.strangers").unlink()
    (tmp_path / "refusals.jsonl").write_bytes(b"broken\n" + b'{"number": 1}\n')
    assert one.last() == [{"number": 1}]
    RefusalLog(tmp_path / "none" / "x").add({"error": "too_often"})
    assert caplog.messages == ["refusals are not shown: FileNotFoundError"]
    assert RefusalLog(tmp_path / "none" / "x").last() == []
