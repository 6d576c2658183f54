"""What one row meets on a connection, in a thread or in a cookie stays with that row."""

from __future__ import annotations

import asyncio
import http.client
import queue
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpcore
import httpcore2
import httpx
import httpx2
import pytest
import requests

from langchain_dpicl.backends.private_calls import http_client
from langchain_dpicl.backends.private_calls.call import OpaqueValue, Reply, Request, RetryPolicy, SilentModel, silence
from langchain_dpicl.exceptions import UnsilencableModelError
from tests.hostile_provider import TARGET
from tests.scripted_models import Written
from tests.unit_tests.backends.private_calls.test_door import certificates

pytestmark = pytest.mark.enable_socket

RETRY = RetryPolicy(max_attempts=1)
SOON = RetryPolicy(max_attempts=1, deadline=0.5)
"""For rows that are never answered in time: one that is answered has all the time of a busy machine."""
Answering = Callable[[Any, bytes], None]
"""What a server does with a socket and the body of one request."""


def ask(model: SilentModel, text: str, explain: Any = "", *, retry: RetryPolicy = RETRY) -> Reply:
    return model.ask(Request(OpaqueValue(text), str, {}, explain=explain), retry=retry)


def said(model: SilentModel, text: str, explain: Any = "") -> str | None:
    reply = ask(model, text, explain)
    return None if reply.answer is None else reply.answer.reveal().text


async def asaid(model: SilentModel, text: str) -> str | None:
    reply = await model.aask(Request(OpaqueValue(text), str, {}), retry=RETRY)
    return None if reply.answer is None else reply.answer.reveal().text


@contextmanager
def serving(answer: Answering, tls: ssl.SSLContext | None = None, *, tunnels: bool = False) -> Iterator[int]:
    """Gives the port of a server that keeps its connections."""

    def serve(plain: socket.socket) -> None:
        try:
            if tunnels:
                body_of(plain.makefile("rb", buffering=0))
                plain.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            with tls.wrap_socket(plain, server_side=True) if tls else plain as talk, talk.makefile("rb") as file:
                while (body := body_of(file)) is not None:
                    answer(talk, body)
        except OSError:
            """The client hung up."""

    def accept() -> None:
        while True:
            try:
                threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
            except OSError:
                return

    with socket.create_server(("127.0.0.1", 0), backlog=32) as server:
        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]


def body_of(file: Any) -> bytes | None:
    if not file.readline():
        return None
    size = 0
    while line := file.readline().strip():
        size = int(line[15:]) if line.lower().startswith(b"content-length:") else size
    return bytes(file.read(size)) if size else b""


def echo(talk: Any, body: bytes, more: bytes = b"") -> None:
    talk.sendall(b"HTTP/1.1 200 OK\r\n%scontent-length: %d\r\n\r\n%s" % (more, len(body), body))


def by_requests(session: Any, port: int, **options: Any) -> SilentModel:
    return silence(Written(act=lambda text: str(session.post(f"http://127.0.0.1:{port}/", data=text, **options).text)))


class TestConnections:
    @pytest.mark.parametrize("status", [102, 103])
    def test_an_interim_reply_does_not_give_the_next_row_the_answer_of_this_one(self, status: int) -> None:
        def answer(talk: Any, body: bytes) -> None:
            if TARGET.encode() in body:
                talk.sendall(b"HTTP/1.1 %d X\r\nx: y\r\n\r\n" % status)
                time.sleep(0.3)
            echo(talk, body)

        with serving(answer) as port, requests.Session() as session:
            model = by_requests(session, port)
            assert ask(model, TARGET) == Reply(fault="content")
            assert [said(model, "second"), said(model, "third")] == ["second", "third"]
            detail = ask(model, TARGET, "text").detail
            assert detail == f"an interim reply instead of an answer (HTTP {status})"

    def test_a_body_that_ends_early_is_no_answer(self) -> None:
        def answer(talk: Any, _: bytes) -> None:
            talk.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")
            talk.shutdown(socket.SHUT_RDWR)

        with serving(answer) as port:
            assert ask(by_requests(requests, port), "x").fault == "busy"

    def test_a_late_reply_leaves_a_connection_that_the_next_row_can_use(self) -> None:
        def answer(talk: Any, body: bytes) -> None:
            if TARGET.encode() in body:
                time.sleep(1.0)
            echo(talk, body)

        with serving(answer) as port:
            connection = http.client.HTTPConnection("127.0.0.1", port)

            def act(text: str) -> str:
                connection.request("POST", "/", text)
                return connection.getresponse().read().decode()

            model = silence(Written(act=act))
            assert ask(model, TARGET, retry=SOON) == Reply(fault="content")
            assert said(model, "second") == "second"

    @pytest.mark.parametrize("package", [httpx, httpx2])
    @pytest.mark.parametrize("is_async", [False, True])
    def test_bytes_behind_a_reply_are_not_the_next_row_s(self, package: Any, *, is_async: bool) -> None:
        def answer(talk: Any, body: bytes) -> None:
            # In one write: the bytes behind the reply are there when it is read, however busy the machine is.
            reply = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok" if TARGET.encode() in body else b""
            talk.sendall(b"%sHTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (reply, len(body), body))

        class Awaited(Written):
            async def _acall(self, prompt: str, *_: Any, **__: Any) -> str:
                return str((await aclient.post(url, content=prompt)).text)

        async def each() -> list[str | None]:
            async with aclient:
                return [await asaid(awaited, text) for text in (TARGET, "second")]

        with serving(answer) as port, package.Client() as client:
            url, aclient = f"http://127.0.0.1:{port}/", package.AsyncClient()
            model = silence(Written(act=lambda text: client.post(url, content=text).text))
            awaited = silence(Awaited(act=str))
            found = asyncio.run(each()) if is_async else [said(model, text) for text in (TARGET, "second")]
            assert found == ["ok", "second"]


class TestSharedConnections:
    """Stand for HTTP/2, which gives what one row's read or write raised to all rows on the connection."""

    @pytest.mark.parametrize("package", [httpcore, httpcore2])
    @pytest.mark.parametrize("way", ["read", "write"])
    def test_a_row_that_is_late_raises_what_others_wait_out(self, package: Any, way: str) -> None:
        raised: list[BaseException] = []
        left, right = socket.socketpair()
        stream = package._backends.sync.SyncStream(left)

        def act(_: str) -> str:
            time.sleep(0.05)  # the clock runs since the first read
            try:
                while True:
                    stream.read(1, 9.0) if way == "read" else stream.write(b"x" * 9_000_000, 9.0)
            except BaseException as error:
                raised.append(error)
                try:
                    stream.read(1, 9.0) if way == "read" else stream.write(b"x", 9.0)
                except BaseException as later:
                    raised.append(later)
            return "swallowed"

        assert ask(silence(Written(act=act)), "x", retry=SOON) == Reply(fault="content")
        assert [type(error).__name__ for error in raised] == [f"{way.title()}Timeout"] * 2
        left.close()
        right.close()


class TestTls:
    @pytest.mark.parametrize("client", ["requests", "httpx", "http.client"])
    def test_a_handshake_without_an_end_does_not_outlive_the_deadline(self, client: str) -> None:
        ended = threading.Event()

        def act(text: str) -> str:
            if client == "requests":
                return str(requests.post(f"https://127.0.0.1:{port}/", data=text).text)  # noqa: S113
            if client == "httpx":
                return httpx.post(f"https://127.0.0.1:{port}/", content=text, timeout=None).text  # noqa: S113
            connection = http.client.HTTPSConnection("127.0.0.1", port)
            connection.connect()
            raise AssertionError("it is connected")

        def waits() -> None:
            silent.append(ask(silence(Written(act=act)), "x", retry=SOON))

        silent: list[Reply] = []
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            waiting = threading.Thread(target=waits, daemon=True)
            waiting.start()
            waiting.join(60.0)
            assert silent == [Reply(fault="content")]
        ended.set()

    def test_reads_of_tls_in_tls_end_with_the_deadline(self, tmp_path: Path) -> None:
        """A read there takes many waits, one for each part of a record that comes."""
        server, client = certificates(tmp_path)
        left, right = socket.socketpair()

        def drip() -> None:
            with server.wrap_socket(right, server_side=True) as outer:
                incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
                inner = server.wrap_bio(incoming, outgoing, server_side=True)
                shake(inner, incoming, outgoing, outer)
                inner.write(b"x" * 4000)
                try:
                    for byte in outgoing.read():
                        outer.sendall(bytes([byte]))
                        time.sleep(0.1)
                except OSError:
                    """The client hung up."""

        threading.Thread(target=drip, daemon=True).start()
        streams = httpcore._backends.sync
        wrapped = client.wrap_socket(left, server_hostname="localhost")
        stream = streams.TLSinTLSStream(wrapped, client, "localhost", 60.0)

        def act(_: str) -> str:
            return str(stream.read(100, 30.0))

        began = time.monotonic()
        assert ask(silence(Written(act=act)), "x", retry=SOON) == Reply(fault="content")
        assert time.monotonic() - began < 60.0  # all of it takes 400
        wrapped.close()

    def test_http_client_goes_through_a_tunnel(self, tmp_path: Path) -> None:
        server, client = certificates(tmp_path)
        with serving(echo, server, tunnels=True) as port:

            def act(text: str) -> str:
                connection = http.client.HTTPSConnection("127.0.0.1", port, context=client)
                connection.set_tunnel("localhost", 443)
                connection.request("POST", "/", text)
                return connection.getresponse().read().decode()

            model = silence(Written(act=act))
            assert said(model, "through", "text") == "through"
            assert model.hosts == (f"127.0.0.1:{port}", "localhost:443")


def shake(inner: ssl.SSLObject, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, outer: ssl.SSLSocket) -> None:
    while True:
        try:
            inner.do_handshake()
        except ssl.SSLWantReadError:
            outer.sendall(outgoing.read())
            incoming.write(outer.recv(20_000))
        else:
            outer.sendall(outgoing.read())
            return


class TestThreads:
    def test_one_that_a_model_keeps_is_not_stopped_by_what_one_row_met(self, monkeypatch: pytest.MonkeyPatch) -> None:
        passed = 0.0
        monkeypatch.setattr(http_client, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed))
        work: queue.Queue[tuple[str, Future[str]]] = queue.Queue()
        started: list[threading.Thread] = []

        def serve() -> None:
            while True:
                text, future = work.get()
                try:
                    future.set_result(requests.post(f"http://127.0.0.1:{port}/", data=text, timeout=60.0).text)
                except Exception as error:
                    future.set_exception(error)

        def act(text: str) -> str:
            if not started:
                started.append(threading.Thread(target=serve, daemon=True))
                started[0].start()
            future: Future[str] = Future()
            work.put((text, future))
            return future.result(60.0)

        def answer(talk: Any, body: bytes) -> None:
            if TARGET.encode() in body:
                talk.sendall(b"HTTP/1.1 302 X\r\nlocation: http://elsewhere.invalid/\r\ncontent-length: 0\r\n\r\n")
            else:
                echo(talk, body)

        with serving(answer) as port:
            model = silence(Written(act=act))
            assert said(model, "probe", "text") == "probe"
            assert ask(model, TARGET) == Reply(fault="content")
            passed = RETRY.deadline  # that of the call that started the thread is over
            assert said(model, "second") == "second"

    @pytest.mark.parametrize("package", [httpx, httpx2])
    def test_transports_of_users_may_work_in_threads(self, package: Any) -> None:
        class Threaded(package.HTTPTransport):  # type: ignore[misc]
            def handle_request(self, sent: Any) -> Any:
                with ThreadPoolExecutor(1) as pool:
                    return pool.submit(super().handle_request, sent).result()

        with serving(echo) as port, package.Client(transport=Threaded()) as client:
            model = silence(Written(act=lambda text: client.post(f"http://127.0.0.1:{port}/", content=text).text))
            assert said(model, "x") == "x"


class TestCookies:
    @pytest.mark.parametrize("package", [httpx, httpx2, requests])
    def test_those_of_private_replies_are_not_kept(self, package: Any) -> None:
        seen: list[bytes] = []

        def answer(talk: Any, body: bytes) -> None:
            seen.append(body)
            echo(talk, body, b"set-cookie: given=%s\r\n" % body)

        client = package.Session() if package is requests else package.Client()
        client.cookies.set("own", "1")
        key = "data" if package is requests else "content"
        with serving(answer) as port, client:
            model = silence(
                Written(act=lambda text: client.post(f"http://127.0.0.1:{port}/", **{key: text.encode()}).text)
            )
            assert said(model, "public", "text") == "public"
            assert said(model, TARGET) == TARGET
            assert dict(client.cookies) == {"own": "1", "given": "public"}
        assert len(seen) == 2


class TestWhatIsSaid:
    def test_a_refused_redirect_does_not_quote_a_password(self) -> None:
        def answer(talk: Any, _: bytes) -> None:
            talk.sendall(b"HTTP/1.1 302 X\r\nlocation: /elsewhere\r\ncontent-length: 0\r\n\r\n")

        with serving(answer) as port:
            url = f"http://me:secret@127.0.0.1:{port}/"
            reply = ask(silence(Written(act=lambda text: httpx.post(url, content=text).text)), "x", "text")
            assert reply.detail == f"a redirect (HTTP 302) to 127.0.0.1:{port} itself"


class TestGuards:
    @pytest.mark.parametrize(
        ("client", "missing", "floor"),
        [(httpcore, "AsyncConnectionPool", r" \(httpcore>=1\.0\.3\)"), (httpx, "AsyncClient", "")],
    )
    def test_a_client_without_the_methods_is_refused_with_what_to_install(
        self, monkeypatch: pytest.MonkeyPatch, client: Any, missing: str, floor: str
    ) -> None:
        monkeypatch.delitem(http_client._hooks, client.__name__, raising=False)
        monkeypatch.delattr(client, missing)
        monkeypatch.setattr(client, "__version__", "1.0.2")
        with pytest.raises(UnsilencableModelError, match=rf"found 1\.0\.2; install .* tested with{floor}$"):
            http_client.look_after_door()

    def test_are_set_on_the_clients_own_classes_also_below_a_cassette(self, tmp_path: Path) -> None:
        """In a process of its own, as the first call is made below the cassette."""
        pytest.importorskip("vcr")
        script = """
import sys, vcr
from tests.unit_tests.backends.private_calls.test_door_rows import *

with serving(echo) as port, requests.Session() as session:
    model = by_requests(session, port)
    with vcr.use_cassette(sys.argv[1]):
        assert said(model, "below", "text") == "below"
    assert said(model, "after", "text") == "after"
"""
        made = [sys.executable, "-c", script, str(tmp_path / "cassette.yaml")]
        run = subprocess.run(made, cwd=Path(__file__).parents[4], capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr

    def test_are_set_where_another_socket_class_stands_in_its_place(self) -> None:
        other = type("socket", (), {"__module__": "other", "connect": print, "connect_ex": print})
        assert [hook.owner for hook in http_client._of_socket(type("module", (), {"socket": other}))] == [other, other]
