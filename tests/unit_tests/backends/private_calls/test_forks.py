"""A forked process makes connections of its own: the answers on those of its parent are the parent's."""

from __future__ import annotations

import asyncio
import gc
import http.client
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import httpx2
import pytest
import requests
import urllib3
from langchain_core.embeddings import Embeddings

from langchain_dpicl.backends.langchain.texts import TextVoteBackend
from langchain_dpicl.backends.private_calls import forks
from langchain_dpicl.backends.private_calls.call import OpaqueValue, Request, RetryPolicy, silence
from langchain_dpicl.backends.private_calls.embeddings import SilentEmbeddings
from tests.contracts.store import in_child
from tests.hostile_provider import TARGET, hostile_provider, says_nothing
from tests.live import openai_model
from tests.scripted_models import Written
from tests.unit_tests.backends.private_calls.test_door import certificates
from tests.unit_tests.backends.private_calls.test_door_rows import ask, echo, serving

pytestmark = [
    pytest.mark.enable_socket,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.filterwarnings("ignore:This process"),
    pytest.mark.filterwarnings("ignore:unclosed"),
]

Act = Callable[[str], str]
RETRY = RetryPolicy(max_attempts=3, first_wait=0.0, deadline=20.0)


class AwaitedWritten(Written):
    """One whose awaited calls are awaited."""

    aact: Any

    async def _acall(self, prompt: str, *_: Any, **__: Any) -> str:
        return str(await self.aact(str(prompt)))


class Wrapped(httpx.BaseTransport):
    """A transport around that of httpx, as retries and caches are built."""

    def __init__(self) -> None:
        self._inner = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return self._inner.handle_request(request)


def by_client(client: Any) -> Callable[[str], Act]:
    if isinstance(client, urllib3.PoolManager):
        return lambda root: lambda text: client.request("POST", root, body=text).data.decode()
    return lambda root: lambda text: str(client.request("POST", root, **{_body(client): text}).text)


def _body(client: Any) -> str:
    return "data" if isinstance(client, requests.Session) else "content"


def by_http_client(root: str) -> Act:
    connection = http.client.HTTPConnection(root.removeprefix("http://"))

    def act(text: str) -> str:
        connection.request("POST", "/", text)
        return connection.getresponse().read().decode()

    return act


CLIENTS: dict[str, Callable[[], Callable[[str], Act]]] = {
    "httpx": lambda: by_client(httpx.Client()),
    "httpx2": lambda: by_client(httpx2.Client()),
    "a transport of one's own": lambda: by_client(httpx.Client(transport=Wrapped())),
    "requests": lambda: by_client(requests.Session()),
    "http.client": lambda: by_http_client,
}


@contextmanager
def recording(tls: ssl.SSLContext | None = None) -> Iterator[tuple[str, Callable[[str], list[int]]]]:
    """Gives the address of a server that echoes, and from which ports a text came; "slow" texts wait for another."""
    seen: list[tuple[str, int]] = []
    other = threading.Event()

    def answer(talk: Any, body: bytes) -> None:
        text = body.decode()
        seen.append((text, talk.getpeername()[1]))
        if "slow" in text:
            other.wait(20.0)
        echo(talk, body)
        if "slow" not in text:
            other.set()

    def ports(text: str) -> list[int]:
        return [port for said, port in seen if said == text]

    with serving(answer, tls) as port:
        other.clear()
        yield f"http{'s' if tls else ''}://127.0.0.1:{port}", ports


def holds_in_child(check: Callable[[], bool]) -> bool:
    def run() -> None:
        assert check()

    return in_child(run)


def said(act: Act, text: str) -> str:
    reply = ask(silence(Written(act=act)), text, retry=RETRY)
    assert reply.answer is not None
    return reply.answer.reveal().text


@pytest.mark.parametrize("name", CLIENTS)
class TestClients:
    def test_private_calls_of_parent_and_child_never_share_a_connection(self, name: str) -> None:
        with recording() as (root, ports):
            act = CLIENTS[name]()(root)
            assert said(act, "before") == "before"
            assert holds_in_child(lambda: [said(act, text) for text in ("child", "again")] == ["child", "again"])
            assert said(act, "after") == "after"
            assert ports("child") != ports("before")
            assert ports("child") == ports("again")  # kept as usual
            assert ports("after") == ports("before")  # the child disturbed nothing

    def test_a_connection_that_the_application_opened_before_is_not_shared_either(self, name: str) -> None:
        with recording() as (root, ports):
            act = CLIENTS[name]()(root)
            assert act("before") == "before"
            assert holds_in_child(lambda: said(act, "child") == "child")
            assert act("after") == "after"
            assert ports("child") != ports("before") == ports("after")

    def test_its_calls_on_that_in_the_child_read_no_private_answer_of_the_parent(self, name: str) -> None:
        with recording() as (root, ports):
            act = CLIENTS[name]()(root)
            assert act("before") == "before"
            assert said(act, "parent") == "parent"
            assert holds_in_child(lambda: act("child") == "child")
            assert ports("child") != ports("parent") != ports("before")

    def test_the_applications_own_calls_in_the_child_read_no_private_answer(self, name: str) -> None:
        with recording() as (root, ports):
            act = CLIENTS[name]()(root)
            assert said(act, "before") == "before"
            assert holds_in_child(lambda: act("child") == "child")
            assert said(act, "after") == "after"
            assert ports("child") != ports("before") == ports("after")

    def test_a_fork_that_runs_no_hooks_of_python_shares_none_either(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As that of a server written in C, which runs Python inside: another number tells it."""
        with recording() as (root, ports):
            act = CLIENTS[name]()(root)
            said(act, "before")
            other = -os.getpid()
            monkeypatch.setattr("os.getpid", lambda: other)
            assert said(act, "child") == "child"
            assert ports("child") != ports("before")

    def test_an_application_that_calls_in_the_child_costs_no_attempt(self, name: str) -> None:
        with recording() as (root, ports):
            act = CLIENTS[name]()(root)
            said(act, "before")

            def calls_first() -> bool:
                assert act("public") == "public"
                once = RetryPolicy(max_attempts=1, deadline=20.0)
                return ask(silence(Written(act=act)), "child", retry=once).answer is not None

            assert holds_in_child(calls_first)
            assert ports("child") != ports("before")

    def test_a_fork_of_a_fork_has_connections_of_its_own(self, name: str) -> None:
        with recording() as (root, ports):
            act = CLIENTS[name]()(root)
            said(act, "before")
            assert holds_in_child(
                lambda: said(act, "child") == "child" and holds_in_child(lambda: said(act, "grandchild") != "")
            )
            assert len({*ports("before"), *ports("child"), *ports("grandchild")}) == 3


@pytest.mark.parametrize("name", sorted(CLIENTS.keys() - {"http.client"}))  # a single connection is for one thread
def test_a_fork_while_a_call_waits_leaves_the_child_able_to_call(name: str) -> None:
    with recording() as (root, ports):
        act = CLIENTS[name]()(root)
        answers: list[str] = []
        waiting = threading.Thread(target=lambda: answers.append(said(act, "slow")))
        waiting.start()
        while not ports("slow"):
            time.sleep(0.01)
        assert holds_in_child(lambda: said(act, "child") == "child")
        waiting.join()
        assert answers == ["slow"]
        assert ports("child") != ports("slow")


@pytest.mark.parametrize("name", ["httpx", "urllib3"])
def test_leaving_a_connection_with_tls_disturbs_the_parent_in_nothing(name: str, tmp_path: Path) -> None:
    server, trusting = certificates(tmp_path)
    with recording(server) as (root, ports):
        clients = {"httpx": httpx.Client(verify=trusting), "urllib3": urllib3.PoolManager(ssl_context=trusting)}
        act = by_client(clients[name])(root)
        assert said(act, "before") == "before"
        assert holds_in_child(lambda: said(act, "child") == "child")
        assert said(act, "after") == "after"
        assert ports("child") != ports("before") == ports("after")


def test_a_pool_with_a_single_place_that_threads_of_the_parent_wait_for_has_it_in_the_child() -> None:
    transport = httpx.HTTPTransport(limits=httpx.Limits(max_connections=1))
    with recording() as (root, ports):
        act = by_client(httpx.Client(transport=transport))(root)
        answers: list[str] = []
        waiting = [threading.Thread(target=lambda: answers.append(said(act, "slow"))) for _ in range(2)]
        for thread in waiting:
            thread.start()
        while "1 active, 1 queued" not in repr(vars(transport)["_pool"]) or not ports("slow"):
            time.sleep(0.01)
        assert holds_in_child(lambda: said(act, "child") == "child")
        for thread in waiting:
            thread.join()
        assert answers == ["slow", "slow"]


@pytest.mark.parametrize("warms", ["privately", "by the application"])
def test_awaited_calls_of_parent_and_child_never_share_a_connection(warms: str) -> None:
    async def act(text: str) -> str:
        return (await client.post(root, content=text)).text

    async def asaid(text: str) -> str:
        model = silence(AwaitedWritten(act=str, aact=act))
        reply = await model.aask(Request(OpaqueValue(text), str, {}), retry=RETRY)
        assert reply.answer is not None
        return reply.answer.reveal().text

    loop = asyncio.new_event_loop()
    with recording() as (root, ports):
        client = httpx.AsyncClient()
        try:
            assert loop.run_until_complete((asaid if warms == "privately" else act)("before")) == "before"
            assert holds_in_child(lambda: asyncio.run(asaid("child")) == "child")
            assert loop.run_until_complete(asaid("after")) == "after"
            used = {*ports("before"), *ports("child"), *ports("after")}
            assert len(used) == (2 if warms == "privately" else 3)
        finally:
            loop.run_until_complete(client.aclose())
            loop.close()


async def test_what_was_left_of_a_pool_goes_with_it() -> None:
    async def kept_by(root: str) -> int:
        async def act(text: str) -> str:
            return (await client.post(root, content=text)).text

        async with httpx.AsyncClient() as client:
            await act("before")
            model = silence(AwaitedWritten(act=str, aact=act))
            assert (await model.aask(Request(OpaqueValue("private"), str, {}), retry=RETRY)).answer is not None
            return len(forks._kept)

    gc.collect()
    before = len(forks._kept)
    with recording() as (root, _):
        assert await kept_by(root) == before + 1
    gc.collect()
    assert len(forks._kept) == before


def test_a_socket_that_a_connection_was_given_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection's own host is another one, and nobody to be trusted."""
    asked, real = [], socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda *whom, **more: asked.append(whom) or real(*whom, **more))
    ends = socket.socketpair(socket.AF_UNIX)
    connection = http.client.HTTPConnection("127.0.0.1", 9)
    connection.sock = ends[0]
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    with ends[0], ends[1]:

        def act(text: str) -> str:
            ends[1].sendall(answer)
            connection.request("POST", "/", text)
            return connection.getresponse().read().decode()

        assert act("public") == said(act, "private") == "ok"
        assert b"private" in ends[1].recv(10_000)
        asked.clear()
        assert holds_in_child(lambda: not asked and ask(silence(Written(act=act)), "child", retry=RETRY).answer is None)
        assert said(act, "parent") == "ok"
        assert b"parent" in (sent := ends[1].recv(10_000))
        assert b"child" not in sent


class Wraps(http.client.HTTPConnection):
    """Puts another socket in place of that which it connected, as TLS does; it may have checked it."""

    def connect(self) -> None:
        super().connect()
        self.sock = socket.socket(fileno=self.sock.detach())


def test_a_socket_that_a_model_opened_and_checked_is_used() -> None:
    checked: list[int] = []

    def act(text: str) -> str:
        connection = Wraps(root.removeprefix("http://"))
        connection.connect()
        checked.append(connection.sock.getsockname()[1])
        connection.request("POST", "/", text)
        answer = connection.getresponse().read().decode()
        connection.close()
        return answer

    with recording() as (root, ports):
        assert said(act, "one") == "one"
        assert holds_in_child(lambda: said(act, "child") == "child")
        assert ports("one") == checked


def test_a_socket_to_another_place_than_the_connections_own_stays() -> None:
    """A pinned address, or the end of a tunnel, at the same port."""
    with recording() as (root, ports):
        port = int(root.rpartition(":")[2])
        connection = http.client.HTTPConnection("127.0.0.2", port)
        connection.sock = socket.create_connection(("127.0.0.1", port))

        def act(text: str) -> str:
            connection.request("POST", "/", text)
            return connection.getresponse().read().decode()

        assert [act("public"), said(act, "private")] == ["public", "private"]
        assert ports("public") == ports("private")
        connection.close()


def test_embeddings_of_parent_and_child_never_share_a_connection() -> None:
    class Lengths(Embeddings):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            return [[float(len(client.post(root, content=text).text)), 1.0] for text in texts]

        def embed_query(self, text: str) -> list[float]:
            return self.embed_documents([text])[0]

    with recording() as (root, ports), httpx.Client() as client:
        silent = SilentEmbeddings(Lengths())  # its probe opens a connection
        assert silent.public(["before"]).tolist() == [[6.0, 1.0]]
        assert holds_in_child(lambda: silent.rows([OpaqueValue("child")]).tolist() == [[5.0, 1.0]])
        assert silent.public(["after"]).tolist() == [[5.0, 1.0]]
        assert ports("child") != ports("before") == ports("after")


def test_a_public_call_reads_no_private_answer_of_a_child_that_died() -> None:
    with hostile_provider(says_nothing) as served:
        model = openai_model("ChatOpenAI", f"{served.root}/v1")
        backend = TextVoteBackend(model, max_concurrency=1, retry=RetryPolicy(max_attempts=1, deadline=20.0))
        child = os.fork()
        if not child:
            backend.complete([TARGET], max_tokens=4)
            os._exit(0)
        assert served.arrived(1) == 1
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert backend.complete_public("a public question", max_tokens=4)
