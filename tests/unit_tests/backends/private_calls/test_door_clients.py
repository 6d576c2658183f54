"""Which clients private calls are made through: the user's own with all settings, and none that cannot be limited."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import sys
import types
from collections.abc import Callable
from typing import Any

import httpx
import httpx2
import pytest
import urllib3
from langchain_core.embeddings import Embeddings
from langchain_core.messages import HumanMessage
from langchain_core.prompts import PromptTemplate
from langchain_core.rate_limiters import BaseRateLimiter

from langchain_dpicl.backends.langchain.texts import TextVoteBackend
from langchain_dpicl.backends.private_calls.call import OpaqueValue, Reply, Request, RetryPolicy, SilentModel, silence
from langchain_dpicl.backends.private_calls.embeddings import SilentEmbeddings
from langchain_dpicl.backends.resolve import recipients
from langchain_dpicl.backends.rows.answer_rows import AnswerRows
from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
from langchain_dpicl.exceptions import UnsilencableModelError
from langchain_dpicl.options import LabelAnswers
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.reports.rendering import text_of
from langchain_dpicl.reports.report import verify_report
from langchain_dpicl.serving import EmbeddedLLM
from langchain_dpicl.voting import DPVotingRunnable
from tests.hostile_provider import TARGET, Served, hostile_provider, redirect
from tests.live import anthropic_model, labelled, openai_model
from tests.scripted_models import ScriptedChat, Written, fixed

pytestmark = [
    pytest.mark.enable_socket,
    pytest.mark.filterwarnings("ignore:The class `OpenAIDecisions` is in beta"),
]

RETRY = RetryPolicy(max_attempts=2, first_wait=0.0, max_wait=0.0)
PRIVATE = labelled(f"{TARGET} my card was declined")


def request(model: SilentModel, explain: Any = "") -> Request:
    return Request(
        OpaqueValue(PRIVATE), lambda text: [HumanMessage(text)] if model.is_chat else text, {}, explain=explain
    )


def ask(model: Any, *, explain: Any = "") -> Reply:
    silent = silence(model)
    return silent.ask(request(silent, explain), retry=RETRY)


def aask(model: Any, *, explain: Any = "") -> Reply:
    silent = silence(model)
    return asyncio.run(silent.aask(request(silent, explain), retry=RETRY))


def served_as_usual() -> Any:
    return hostile_provider(None)


def chat(served: Served, **options: Any) -> Any:
    return openai_model("ChatOpenAI", f"{served.root}/v1", **options)


def by_httpx(root: str, package: Any) -> Callable[[str], str]:
    def act(prompt: str) -> str:
        with package.Client(follow_redirects=True) as client:
            return str(client.post(f"{root}/v1/completions", json={"prompt": prompt}).json()["choices"][0]["text"])

    return act


def by_httpx_stream(root: str) -> Callable[[str], str]:
    def act(prompt: str) -> str:
        body = {"prompt": prompt}
        with httpx.stream("POST", f"{root}/v1/completions", json=body, follow_redirects=True) as response:
            return str(json.loads("".join(response.iter_lines()))["choices"][0]["text"])

    return act


def by_urllib3(root: str) -> Callable[[str], str]:
    pool = urllib3.PoolManager()

    def act(prompt: str) -> str:
        response = pool.request("POST", f"{root}/v1/completions", json={"prompt": prompt})
        return str(response.json()["choices"][0]["text"])

    return act


def by_http_client(root: str) -> Callable[[str], str]:
    connection = http.client.HTTPConnection(root.removeprefix("http://"), timeout=77.0)

    def act(prompt: str) -> str:
        connection.request("POST", "/v1/completions", json.dumps({"prompt": prompt}))
        response = connection.getresponse()
        text = str(json.loads(response.read())["choices"][0]["text"])
        if connection.sock is not None:
            assert connection.sock.gettimeout() == 77.0  # as it was given
        return text

    return act


def by_socket(root: str) -> Callable[[str], str]:
    def act(prompt: str) -> str:
        host, port = root.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as plain:
            plain.sendall(b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(prompt.encode()) + prompt.encode())
            return "card"

    return act


LIMITED: dict[str, Callable[[str], Callable[[str], str]]] = {
    "httpx": lambda root: by_httpx(root, httpx),
    "httpx2": lambda root: by_httpx(root, httpx2),
    "httpx stream": by_httpx_stream,
    "urllib3": by_urllib3,
    "http.client": by_http_client,
}


class TestModelsOfUsers:
    @pytest.mark.parametrize("name", LIMITED)
    def test_any_client_that_can_be_limited_is(self, name: str) -> None:
        with served_as_usual() as served:
            model = Written(act=LIMITED[name](served.root))
            for _ in range(3):
                reply = ask(model)
                assert reply.answer is not None
                assert reply.answer.reveal().text
            served.manner = redirect(307)
            assert ask(model) == Reply(fault="content")
            assert served.elsewhere.seen == []
            assert len(served.private()) == 4

    def test_a_swallowed_refusal_is_no_answer_either(self) -> None:
        def act(prompt: str) -> str:
            try:
                return by_urllib3(served.root)(prompt)
            except Exception:
                return "card"

        with hostile_provider(redirect(307)) as served:
            assert ask(Written(act=act)) == Reply(fault="content")

    def test_a_connection_that_is_none_of_a_client_s_is_refused_before_anything_is_sent(self) -> None:
        with served_as_usual() as served:
            model = Written(act=by_socket(served.root))
            assert ask(model) == Reply(fault="content")
            assert aask(model) == Reply(fault="content")
            with pytest.raises(
                UnsilencableModelError, match=r"Written connects to 127\.0\.0\.1:\d+ by itself.*base_url"
            ):
                TextVoteBackend(model, retry=RETRY)
            assert served.seen == []

    def test_so_is_one_that_an_event_loop_opens(self) -> None:
        class Streams(ScriptedChat):
            async def _agenerate(self, *_: Any, **__: Any) -> Any:
                await asyncio.open_connection(*served.root.removeprefix("http://").split(":"))
                raise AssertionError("it was opened")

        is_refused = pytest.raises(UnsilencableModelError, match=r"Streams connects to 127\.0\.0\.1")
        with served_as_usual() as served, is_refused:
            aask(Streams(answer=fixed({"a": 1.0})), explain="text")

    def test_a_model_in_this_process_needs_no_connection(self) -> None:
        reply = ask(Written(act=lambda prompt: str(len(prompt))), explain="text")
        assert reply.answer is not None
        assert silence(Written(act=str)).hosts == ()

    def test_a_limiter_may_connect_as_it_likes(self) -> None:
        class Limiter(BaseRateLimiter):
            def acquire(self, *, blocking: bool = True) -> bool:
                host, port = served.root.removeprefix("http://").split(":")
                socket.create_connection((host, int(port))).close()
                return True

            async def aacquire(self, *, blocking: bool = True) -> bool:
                return self.acquire(blocking=blocking)

        with served_as_usual() as served:
            model = ScriptedChat(answer=fixed({"a": 1.0}), rate_limiter=Limiter())
            assert ask(model).answer is not None
            assert aask(model).answer is not None

    def test_a_client_that_is_first_imported_by_the_call_is_limited_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from langchain_dpicl.backends.private_calls import http_client

        late = types.ModuleType("late_client")

        class Client:
            def _send_single_request(self, *_: Any) -> Any:
                return socket.create_connection(("127.0.0.1", port))

        late.Client = late.AsyncClient = Client  # type: ignore[attr-defined]
        late.__spec__ = types.SimpleNamespace(_initializing=False)  # type: ignore[assignment]

        def act(_: str) -> str:
            sys.modules["late_client"] = late
            seen.append(1)
            late.Client()._send_single_request()  # type: ignore[attr-defined]
            return "card"

        def hooks(module: Any) -> Any:
            yield http_client._hook(module.Client, "_send_single_request", limited, 1)

        def limited(inner: Any, call: Any, *args: Any) -> Any:
            passed.append(call)
            return "sent"

        seen: list[int] = []
        passed: list[Any] = []
        monkeypatch.setitem(http_client._MODULES, "late_client", hooks)
        monkeypatch.setitem(sys.modules, "late_client", late)
        del sys.modules["late_client"]
        with served_as_usual() as served:
            port = int(served.root.rpartition(":")[2])
            try:
                assert ask(Written(act=act)).answer is not None
                assert (len(seen), len(passed)) == (2, 1)
                assert served.seen == []
            finally:
                http_client._hooks.pop("late_client", None)


class TestOtherTransports:
    @pytest.mark.parametrize("package", ["grpc", "aiohttp", "curl_cffi", "websockets"])
    @pytest.mark.parametrize("depth", [0, 1])
    def test_a_model_that_holds_one_is_refused(self, package: str, depth: int) -> None:
        held: Any = type("Channel", (), {"__module__": f"{package}._channel"})()
        for _ in range(depth):
            held = [types.SimpleNamespace(inner={"held": held})]
        model = ScriptedChat(answer=fixed({"a": 1.0}))
        vars(model)["client"] = held
        with pytest.raises(UnsilencableModelError, match=f"ScriptedChat calls through {package}.*httpx"):
            silence(model)

    def test_embeddings_that_hold_one_are_refused(self) -> None:
        class Remote(Embeddings):
            def __init__(self) -> None:
                self.channel = type("Channel", (), {"__module__": "grpc._channel"})()

            def embed_documents(self, texts: list[str]) -> list[list[float]]:
                raise AssertionError(texts)

            embed_query = embed_documents  # type: ignore[assignment]

        with pytest.raises(UnsilencableModelError, match="Remote calls through grpc"):
            SilentEmbeddings(Remote())

    def test_one_inside_an_httpx_client_is_its_transport(self) -> None:
        class Transport(httpx2.AsyncBaseTransport):
            session = type("ClientSession", (), {"__module__": "aiohttp.client"})()

            def __init__(self) -> None:
                self.held = self.session

            async def handle_async_request(self, sent: Any) -> Any:
                asked.append(sent.url.host)
                return httpx2.Response(307, headers={"location": "http://elsewhere.invalid/"})

        asked: list[str] = []
        with served_as_usual() as served:
            model = chat(served, http_async_client=httpx2.AsyncClient(transport=Transport(), follow_redirects=True))
            assert aask(model) == Reply(fault="content")
            assert asked == ["127.0.0.1"]


class TestSettingsOfTheUser:
    def test_clients_transports_hooks_headers_and_queries_go_on_working(self) -> None:
        class Transport(httpx2.HTTPTransport):
            def handle_request(self, sent: Any) -> Any:
                used.append("transport")
                return super().handle_request(sent)

        used: list[str] = []
        with served_as_usual() as served:
            client = httpx2.Client(
                transport=Transport(),
                event_hooks={"request": [lambda _: used.append("hook")]},
                headers={"x-own": "1"},
                follow_redirects=True,
                timeout=83.0,
            )
            model = chat(served, http_client=client, default_headers={"x-tag": "2"}, default_query={"q": "3"})
            before = dict(vars(model)), client.timeout, client._transport
            assert ask(model).answer is not None
            assert used == ["hook", "transport"]
            seen = served.seen[-1]
            assert (seen.headers["x-own"], seen.headers["x-tag"], seen.path) == ("1", "2", "/v1/chat/completions?q=3")
            assert (dict(vars(model)), client.timeout, client._transport) == before
            assert client.follow_redirects

    @pytest.mark.parametrize("is_async", [False, True])
    def test_mounts(self, *, is_async: bool) -> None:
        with served_as_usual() as served, served_as_usual() as other:

            class Rerouted(httpx2.HTTPTransport, httpx2.AsyncHTTPTransport):
                def __init__(self) -> None:
                    self._inner = httpx2.AsyncHTTPTransport() if is_async else httpx2.HTTPTransport()

                def handle_request(self, sent: Any) -> Any:
                    sent.url = sent.url.copy_with(port=int(other.root.rpartition(":")[2]))
                    return self._inner.handle_request(sent)

                async def handle_async_request(self, sent: Any) -> Any:
                    sent.url = sent.url.copy_with(port=int(other.root.rpartition(":")[2]))
                    return await self._inner.handle_async_request(sent)

            mounts = {"all://127.0.0.1": Rerouted()}
            given = {"http_async_client": httpx2.AsyncClient(mounts=mounts)} if is_async else {}
            model = chat(served, **(given or {"http_client": httpx2.Client(mounts=mounts)}))
            assert (aask if is_async else ask)(model).answer is not None
            assert (len(served.seen), len(other.seen)) == (0, 1)

    @pytest.mark.parametrize("is_async", [False, True])
    @pytest.mark.parametrize("way", ["openai_proxy", "environment", "client"])
    def test_proxies_are_used_and_named(self, monkeypatch: pytest.MonkeyPatch, way: str, *, is_async: bool) -> None:
        with served_as_usual() as proxy:
            options: dict[str, Any] = {}
            if way == "openai_proxy":
                options = {"openai_proxy": proxy.root}
            elif way == "client":
                options = {
                    "http_client": httpx2.Client(proxy=proxy.root),
                    "http_async_client": httpx2.AsyncClient(proxy=proxy.root),
                }
            else:
                monkeypatch.setenv("HTTP_PROXY", proxy.root)
                monkeypatch.setenv("NO_PROXY", "")
            host = f"{way.replace('_', '-')}-{is_async}.invalid:81".lower()  # LangChain keeps clients by address
            model = silence(openai_model("ChatOpenAI", f"http://{host}/v1", **options))

            async def both() -> list[Reply]:
                return [await model.aask(request(model, explain), retry=RETRY) for explain in ("text", "")]

            replies = [model.ask(request(model, explain), retry=RETRY) for explain in ("text", "") if not is_async]
            assert all(reply.answer is not None for reply in replies or asyncio.run(both()))
            assert len(proxy.seen) == 2
            assert set(model.hosts) == {host, proxy.root.removeprefix("http://")}

    def test_hosts_are_those_of_public_calls(self) -> None:
        with served_as_usual() as served:
            for made in (chat(served), Written(act=by_urllib3(served.root)), anthropic_model(served.root)):
                model = silence(made)
                model.ask(request(model), retry=RETRY)
                assert model.hosts == ()  # where a private call goes may depend on its prompt
                model.ask(request(model, "text"), retry=RETRY)
                assert model.hosts == (served.root.removeprefix("http://"),)


class TestReports:
    def report(self, model: Any, **options: Any) -> Any:
        budget = PrivacyBudgetCallbackHandler(epsilon=4.0, delta=1e-6)
        private = PrivateExamples(
            [{"text": TARGET, "label": "card"}], label_key="label", labels=("card", "transfer"), public_size=100
        )
        DPVotingRunnable.from_private_examples(
            private,
            llm=model,
            budget=budget,
            epsilon=1.0,
            max_queries=2,
            example_prompt=PromptTemplate.from_template("text: {text}\nqueue: {label}"),
            suffix="text: {input}\nqueue:",
            **options,
        )
        return budget.report()

    def test_name_the_host_and_the_proxy_that_private_text_is_sent_to(self) -> None:
        with served_as_usual() as proxy:
            model = openai_model("ChatOpenAI", "http://named.invalid:82/v1", openai_proxy=proxy.root)
            report = self.report(model, answers=LabelAnswers(votes="text"))
        hosts = sorted([proxy.root.removeprefix("http://"), "named.invalid:82"])
        assert report.to_dict()["shares"][0]["components"][0]["public"]["seen_by"] == hosts
        assert f"Private text is sent to: {', '.join(hosts)}." in report.to_text()
        assert f"Private text is sent to `{hosts[0]}`, `{hosts[1]}`." in report.to_markdown()
        assert verify_report(report).ok

    def test_say_so_where_it_stays_in_this_process(self) -> None:
        assert "Private text is sent to: this process." in self.report(EmbeddedLLM()).to_text()

    def test_of_earlier_versions_name_nobody_and_verify(self) -> None:
        data = self.report(EmbeddedLLM()).to_dict()
        del data["shares"][0]["components"][0]["public"]["seen_by"]
        assert "sent to" not in text_of(data)

    def test_an_engine_of_another_make_is_named(self) -> None:
        class Foreign:
            name = "foreign"

            def complete(self, prompts: Any, **_: Any) -> Any:
                return prompts

            async def acomplete(self, prompts: Any, **_: Any) -> Any:
                return prompts

        assert recipients(AnswerRows.__new__(AnswerRows), Foreign()) == ["wherever Foreign sends it"]
