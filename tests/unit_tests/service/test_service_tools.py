"""The service as tools of MCP, asked by the official client: in process, over HTTP and over standard input and output."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp")
pytest.importorskip("fastapi")
import anyio
import httpx
import httpx2
import uvicorn
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

import langchain_dpicl
from langchain_dpicl.backends import sync_async
from langchain_dpicl.backends.sync_async import Call
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.cli.main import main
from langchain_dpicl.service import tools
from langchain_dpicl.service.service import Keys, Service, Tenant
from langchain_dpicl.service.tools import create_app, create_server
from langchain_dpicl.stores import open_store, sqlite_file
from tests import ledgers
from tests.faults.storms import free_form_component, retrieval_component, voting_component
from tests.free_form_doubles import budget_of
from tests.served import CANARY, FREE_ANSWERS, KEYS, change, new_folder, new_ledger, running
from tests.sqlite_ledgers import mount_of

ROOT = Path(__file__).resolve().parents[3]
TOOLS = {"ask", "demonstrations", "budget"}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return new_folder(tmp_path, monkeypatch, more='demonstrations = "demos.json"\n')


@pytest.fixture
def service(config: Path) -> Iterator[Service]:
    with running(config, new_ledger("budget.db")) as found:
        yield found.service


def answered(result: Any) -> Any:
    assert not result.is_error, result.structured_content
    return result.structured_content


def refused(result: Any) -> str:
    assert result.is_error
    assert result.content[0].text == result.structured_content["detail"]
    return str(result.structured_content["error"])


async def test_every_tool_answers_its_tenant(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with Client(create_server(service, Tenant("acme", 2))) as client:
        assert client.server_info is not None
        assert client.server_info.version == langchain_dpicl.__version__
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert {*tools} == TOOLS
        assert tools["ask"].input_schema["additionalProperties"] is False
        assert tools["ask"].input_schema["properties"]["question"]["maxLength"] == 2000
        answer = await client.call_tool("ask", {"question": "my card?"})
        assert answer.content[0].text == answered(answer)["answer"]
        assert answered(await client.call_tool("ask", {"question": "my card?"}))["source"] == "memo"
        assert answered(await client.call_tool("budget"))["components"]["ask"]["yours_used"] == 1
        assert answered(await client.call_tool("demonstrations"))["demonstrations"][0]["topic"] == "card"
        assert answered(await client.call_tool("ask", {"question": "another?"}))["source"] == "release"
        assert refused(await client.call_tool("ask", {"question": "a third?"})) == "tenant_spent"
    assert CANARY not in caplog.text
    charged = [record.message for record in caplog.records if record.name.endswith("service.charges")]
    assert len(charged) == 4
    assert not [line for line in charged if "card" in line]


async def test_a_tenant_in_the_arguments_is_refused_and_nothing_is_charged(service: Service) -> None:
    async with Client(create_server(service, Tenant("acme"))) as client:
        for door, more in (("ask", {"question": "?"}), ("budget", {}), ("demonstrations", {})):
            given = {**more, "tenant": "globex"}
            assert refused(await client.call_tool(door, given)) == "tenant_given"
            assert refused(await client.call_tool(door, {**more, "config": {"configurable": {}}})) == "no_question"
        for wrong in ({}, {"question": 3}, {"question": " "}, {"question": None}):
            assert refused(await client.call_tool("ask", wrong)) == "no_question"
        assert refused(await client.call_tool("ask", {"question": "x" * 2001})) == "too_long"
        assert refused(await client.call_tool("answer", {"question": "?"})) == "not_offered"
        shown = answered(await client.call_tool("budget"))
        assert (shown["tenant"], shown["components"]["ask"]["queries_left"]) == ("acme", 8)


@pytest.mark.parametrize("door", ["ask", "budget"])
async def test_the_words_of_a_foreign_error_are_nowhere(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, door: str
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ValueError(CANARY)

    monkeypatch.setattr(type(service.doors["ask"]), "_prepare", fails)
    monkeypatch.setattr(Service, "standing", fails)
    async with Client(create_server(service, Tenant("acme"))) as client:
        found = await client.call_tool(door, {"question": "card?"} if door == "ask" else {})
    assert refused(found) == "fault"
    assert "ValueError" in caplog.text
    assert CANARY not in str(found) + caplog.text


@pytest.mark.parametrize("how", ["cancelled", "closed"])
async def test_a_question_that_is_cancelled_behind_its_charge_is_logged_as_charged(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    caplog.set_level(logging.DEBUG)
    charged, loop = asyncio.Event(), asyncio.get_running_loop()

    def released(self: Any, query: str, prepared: Any, ticket: Any, *_: object) -> Iterator[Any]:
        ticket.burn()
        loop.call_soon_threadsafe(charged.set)
        yield Call(lambda: None, lambda: asyncio.sleep(3600))

    monkeypatch.setattr(type(service.doors["ask"]), "_released", released)
    # This mode speaks through streams, as over standard input; the other one calls the server's functions.
    async with Client(create_server(service, Tenant("acme")), mode="legacy") as client:
        asked = asyncio.ensure_future(client.call_tool("ask", {"question": "card?"}))
        await charged.wait()
        if how == "cancelled":
            asked.cancel()
            await asyncio.wait({asked})
    await asyncio.gather(asked, return_exceptions=True)
    assert service.budget.budget.tenants()["ask"] == {"acme": 1}
    (line,) = [json.loads(record.message) for record in caplog.records if record.name.endswith("service.charges")]
    assert (line["event"], line["error"], line["tickets"]) == ("charged", "CancelledError", 1)


async def test_a_cancelled_look_at_the_budget_waits_for_the_ledger_without_turning(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on, waits = threading.Event(), threading.Event(), list[object]()
    wait = sync_async.wait_for_thread

    def standing(*_: object) -> dict[str, Any]:
        begun.set()
        goes_on.wait(20)
        return {}

    def counted(future: Any) -> Any:
        waits.append(future)
        return wait(future)

    monkeypatch.setattr(Service, "standing", standing)
    monkeypatch.setattr(sync_async, "wait_for_thread", counted)
    threading.Timer(0.3, goes_on.set).start()
    with anyio.move_on_after(0.05) as scope:  # cancels at every turn of the loop until the call has ended
        await tools._answered(service, "budget", {}, Tenant("acme"))
    assert scope.cancelled_caught
    assert begun.is_set()
    assert len(waits) <= 3


async def test_free_answers_and_retrieved_ones_are_tools_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers.accounting, "epsilon_bound", ledgers.free_price)
    noted: list[int] = []
    budget = budget_of(epsilon=1e6, delta=1e-4)
    made = {"ask": voting_component, "answer": free_form_component, "retrieve_and_answer": retrieval_component}
    doors = {name: make(budget, lambda: noted.append(1)) for name, make in made.items()}
    service = Service(budget, doors, tenants=Keys({}))
    async with Client(create_server(service, Tenant("acme"))) as client:
        for number, door in enumerate(doors, start=1):
            found = answered(await client.call_tool(door, {"question": "cough"}))
            assert (found["source"], found["receipt"]["component"]) == ("release", doors[door].share.component)
            assert len(noted) == number
        assert {*answered(await client.call_tool("budget"))["components"]} == {*doors}


@asynccontextmanager
async def over_http(address: str, key: str) -> AsyncIterator[Client]:
    async with (
        httpx2.AsyncClient(headers={"Authorization": f"Bearer {key}"}, timeout=60) as http,
        Client(streamable_http_client(f"{address}/mcp", http_client=http)) as client,
    ):
        yield client


@pytest.fixture
def address(service: Service) -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(create_app(service), port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(60)


@pytest.mark.loopback
async def test_over_http_the_tenant_is_whose_token_it_is(service: Service, address: str) -> None:
    async with over_http(address, KEYS["acme"]) as acme, over_http(address, KEYS["globex"]) as globex:
        assert {tool.name for tool in (await acme.list_tools()).tools} == TOOLS
        asked = [client.call_tool("ask", {"question": "card?"}) for client in (acme, globex, acme)]
        sources = [answered(each)["source"] for each in await asyncio.gather(*asked)]
        assert sorted(sources) == ["memo", "release", "release"]
        assert answered(await globex.call_tool("budget"))["tenant"] == "globex"
        assert refused(await globex.call_tool("budget", {"tenant": "acme"})) == "tenant_given"
    used = service.budget.budget.tenants()["ask"]
    assert used == {"acme": 1, "globex": 1}


@pytest.mark.loopback
def test_the_command_says_at_which_port_it_listens_or_that_the_port_is_taken(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    new_ledger("budget.db")
    taken: list[int] = []

    def run(_: uvicorn.Server, sockets: list[socket.socket]) -> None:
        """Listens, and while it does, another command wants the same port."""
        sockets[0].listen()
        taken.append(sockets[0].getsockname()[1])
        assert capsys.readouterr().err.endswith(
            f"serving ask, demonstrations, budget at http://127.0.0.1:{taken[0]}/mcp\n"
        )
        assert main([*command, str(taken[0])]) == 2

    monkeypatch.setattr(uvicorn.Server, "run", run)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # those of this process stay
    command = ["mcp", "budget.db", "--config", str(config), "--http", "--port"]
    with contextlib.closing(logging.FileHandler(config.parent / "application.log")) as log:
        assert main([*command, "0"]) == 0
        assert log.stream is not None  # handlers of an application stay open
    assert len(taken) == 1
    said = capsys.readouterr().err
    assert "--port: expected a free address" in said
    assert "serving" not in said


@pytest.mark.loopback
def test_a_second_ctrl_c_ends_a_server_without_a_traceback(config: Path) -> None:
    stdio = over_standard_input(config)
    command = [stdio.command, *stdio.args[:2], "mcp", "budget.db", "--config", str(config), "--http", "--port", "0"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, env={**os.environ, **(stdio.env or {})}, text=True
    ) as process:
        assert process.stderr is not None
        said = next((line for line in process.stderr if "serving" in line), "")
        try:
            httpx.get(f"{said.split()[-1]}/", timeout=60)  # it answers now
            for _ in range(2):
                process.send_signal(signal.SIGINT)
                time.sleep(0.05)  # less than uvicorn waits for
            assert "Traceback" not in process.communicate(timeout=60)[1]
        finally:
            process.kill()


@pytest.mark.loopback
@pytest.mark.parametrize("command", [["serve"], ["mcp", "--http"]], ids=["serve", "mcp"])
def test_an_empty_host_is_refused_and_not_every_address_of_the_machine(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_, **__: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # those of this process stay
    new_ledger("budget.db")
    where = ["budget.db", "--config", str(config), "--port", "0", "--host", ""]
    assert main([command[0], *where, *command[1:]]) == 2
    assert "--host: expected an address of this machine" in capsys.readouterr().err


@pytest.mark.loopback
@pytest.mark.parametrize("command", [["serve"], ["mcp", "--http"]], ids=["serve", "mcp"])
def test_files_that_each_container_has_anew_are_warned_of(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    """Each container of an image that holds the ledger, each that is made anew, or each start would have all of it."""
    mounted = f"{mount_of(Path.cwd())} 1 0:21 / / rw - {{}} none rw\n"
    monkeypatch.setattr(sqlite_file, "_MOUNTS", Path("mountinfo"))
    new_ledger("budget.db")
    change(config, "[service]\n", '[service]\nanchor = "anchor.json"\n')
    for kind, where in (
        ("overlay", "in a container's own layer (overlay)"),
        ("tmpfs", "in memory (tmpfs)"),
        ("ext4", ""),
    ):
        Path("mountinfo").write_text(mounted.format(kind))
        assert main([command[0], "budget.db", "--config", str(config), "--host", "", *command[1:]]) == 2
        said = capsys.readouterr().err
        for name in ("budget.db", "anchor.json"):
            assert f"{name}: {where}" in said if where else f"{name}: in " not in said


@pytest.mark.loopback
def test_over_http_nothing_is_read_without_a_key(address: str) -> None:
    for headers in ({}, {"Authorization": "Bearer guessed"}, {"Authorization": f"Basic {KEYS['acme']}"}):
        answer = httpx.post(f"{address}/mcp", json={"jsonrpc": "2.0"}, headers=headers, timeout=300)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert answer.json()["error"] == "unknown_key"
    ours = {"Authorization": f"Bearer {KEYS['acme']}", "Host": "elsewhere.example"}
    assert httpx.post(f"{address}/mcp/", json={"jsonrpc": "2.0"}, headers=ours, timeout=300).status_code == 404
    both = [("Authorization", f"Bearer {KEYS[who]}") for who in ("acme", "globex")]
    assert httpx.post(f"{address}/mcp", json={"jsonrpc": "2.0"}, headers=both, timeout=300).status_code == 401


@pytest.mark.loopback
def test_a_proxy_may_hand_on_the_name_that_it_was_asked_by(address: str) -> None:
    headers = {"Authorization": f"Bearer {KEYS['acme']}", "Accept": "application/json, text/event-stream"}
    headers |= {"Host": "assistant.example", "Origin": "https://assistant.example"}
    asked = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    answer = httpx.post(f"{address}/mcp", json=asked, headers=headers, timeout=300)
    assert answer.status_code == 200, answer.text
    assert {tool["name"] for tool in answer.json()["result"]["tools"]} == TOOLS


def over_standard_input(config: Path, before: str = "") -> StdioServerParameters:
    """The command for acme, on a new ledger. Neither key is set there: none is needed."""
    new_ledger("budget.db")
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    # A shell starts jobs in the background with Ctrl-C ignored, which is inherited.
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code += f"; {before}from langchain_dpicl.cli.main import console; console()"
    arguments = ["-c", code, "mcp", "budget.db", "--config", str(config), "--tenant", "acme"]
    return StdioServerParameters(command=sys.executable, args=arguments, env={"PYTHONPATH": paths}, cwd=Path.cwd())


@pytest.mark.loopback
async def test_over_standard_input_the_command_says_for_whom_it_answers(config: Path) -> None:
    command = over_standard_input(config)
    async with Client(command, read_timeout_seconds=120) as client:
        assert {tool.name for tool in (await client.list_tools()).tools} == TOOLS
        assert answered(await client.call_tool("ask", {"question": "card?"}))["source"] == "release"
        shown = answered(await client.call_tool("budget"))
        assert (shown["tenant"], shown["components"]["ask"]["yours_used"]) == ("acme", 1)
        assert refused(await client.call_tool("ask", {"question": "?", "tenant": "globex"})) == "tenant_given"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_the_ledger_is_closed_where_a_signal_ends_the_command_before_its_standard_input(
    config: Path, number: signal.Signals, code: int
) -> None:
    command = over_standard_input(config)
    who = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    asked = {"name": "ask", "arguments": {"question": "card?"}}
    messages = [
        {"id": 1, "method": "initialize", "params": who},
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/call", "params": asked},
    ]
    with subprocess.Popen(
        [command.command, *command.args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=command.env, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.writelines(json.dumps({"jsonrpc": "2.0", **message}) + "\n" for message in messages)
        process.stdin.flush()
        assert [json.loads(process.stdout.readline())["id"] for _ in range(2)] == [1, 2]
        process.send_signal(number)
        try:
            assert process.wait(timeout=120) == code  # its standard input is still open
        finally:
            process.kill()
    with open_store("budget.db") as store:
        assert Budget.open(store).dangling() == ()


def test_a_client_that_leaves_before_its_answers_are_written_ends_the_command_well(config: Path) -> None:
    command = over_standard_input(config)
    who = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    messages: list[dict[str, Any]] = [{"id": 1, "method": "initialize", "params": who}]
    messages += [{"method": "notifications/initialized"}]
    messages += [{"id": 2 + place, "method": "tools/list"} for place in range(20)]
    messages += [{"id": 99, "method": "tools/call", "params": {"name": "ask", "arguments": {"question": "card?"}}}]
    with subprocess.Popen(
        [command.command, *command.args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=command.env,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stdin.writelines(json.dumps({"jsonrpc": "2.0", **message}) + "\n" for message in messages)
        process.stdin.close()
        try:
            said = process.stderr.read()
            assert process.wait(timeout=120) == 0, said
        finally:
            process.kill()
    assert "Traceback" not in said


def test_a_second_ctrl_c_ends_a_command_that_waits_for_its_ledger(config: Path) -> None:
    before = "import time; from langchain_dpicl.service.service import Service as S; "
    before += "S.close = lambda _: (open('closing', 'w').close(), time.sleep(600)); "
    command = over_standard_input(config, before)
    who = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    with subprocess.Popen(
        [command.command, *command.args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=command.env, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": who}) + "\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["id"] == 1
        try:
            process.send_signal(signal.SIGINT)
            until = time.monotonic() + 60
            while not Path("closing").exists() and time.monotonic() < until:
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == -signal.SIGINT
        finally:
            process.kill()


def test_over_standard_input_somebody_has_to_be_named(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new_ledger("budget.db")
    for more in ((), ("--tenant", "nobody")):
        assert main(["mcp", "budget.db", "--config", str(config), *more]) == 2
        assert "one of ['acme', 'globex']" in capsys.readouterr().err


def test_sessions_over_standard_input_share_the_balances_of_documents_or_are_refused(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    change(config, "[ask]", f"{FREE_ANSWERS}\n[ask]")
    new_ledger("budget.db")
    sessions: list[str] = []

    async def noted(_: Service, tenant: Tenant) -> None:
        sessions.append(tenant.name)

    monkeypatch.setattr("langchain_dpicl.service.tools.serve_stdio", noted)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # those of this process stay
    command = ["mcp", "budget.db", "--config", str(config), "--tenant", "acme"]
    assert main(command) == 2
    assert "balances: expected a file, which all processes share" in capsys.readouterr().err
    assert not sessions
    change(config, "slots = 4}", 'slots = 4, balances = "balances.db"}')
    change(config, "[data]", '[data]\nunit_key = "text"')  # a position is another document in another process
    assert main(command) == 0
    assert sessions == ["acme"]


def test_over_http_nobody_is_named(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mcp", "budget.db", "--config", str(config), "--http", "--tenant", "acme"]) == 2
    assert "--tenant: expected none with --http" in capsys.readouterr().err


def test_a_missing_package_is_named(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    assert main(["mcp", "budget.db", "--config", str(config)]) == 2
    assert "pip install 'langchain-dpicl[mcp]'" in capsys.readouterr().err
