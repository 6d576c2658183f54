"""What a hostile provider sends back costs a private call nothing but its own row: no redirect, no hang, no memory."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import requests
from langchain_core.language_models import LLM
from langchain_core.messages import HumanMessage

from langchain_dpicl.backends.langchain.backend import LangChainBackend
from langchain_dpicl.backends.langchain.logprobs import DecisionsBackend
from langchain_dpicl.backends.langchain.texts import TextVoteBackend
from langchain_dpicl.backends.private_calls.call import OpaqueValue, Reply, Request, RetryPolicy, silence
from langchain_dpicl.backends.private_calls.embeddings import SilentEmbeddings
from langchain_dpicl.exceptions import ConfigurationError, ModelCallError
from tests.hostile_provider import (
    TARGET,
    Served,
    bomb,
    dripped_body,
    dripped_headers,
    endless_chunks,
    endless_status,
    hostile_provider,
    packed,
    redirect,
    says_nothing,
)
from tests.live import anthropic_model, decision_model, labelled, openai_model

pytestmark = [
    pytest.mark.enable_socket,
    pytest.mark.filterwarnings("ignore:The class `OpenAIDecisions` is in beta"),
]

PATIENT = RetryPolicy(max_attempts=3, first_wait=0.0, max_wait=0.0)
PRIVATE = labelled(f"{TARGET} my card was declined")
CHOICES = (" card", " transfer")
SOON = RetryPolicy(max_attempts=3, first_wait=0.0, max_wait=0.0, deadline=0.3)
SMALL = RetryPolicy(max_attempts=3, first_wait=0.0, max_wait=0.0, max_reply_bytes=300_000)

Row = Callable[[], Any]
Engine = Callable[[str], tuple[Row, Callable[[], Any]]]
"""Builds an engine on an address; returns what gives a private row, blocking and awaitable."""


def tokens(kind: str, **options: Any) -> Engine:
    def build(root: str) -> tuple[Row, Row]:
        more = {"continuation": "instruct"} if kind == "ChatOpenAI" else {}
        engine = LangChainBackend(openai_model(kind, f"{root}/v1", **options), retry=PATIENT, **more)
        domain = [token for token, _ in engine.top_tokens(labelled("a card"), [], top_k=3)]
        return lambda: engine.open([PRIVATE], []).score(domain), lambda: engine.open([PRIVATE], []).ascore(domain)

    return build


def text_votes(make: Callable[[str], Any]) -> Engine:
    def build(root: str) -> tuple[Row, Row]:
        engine = TextVoteBackend(make(root), retry=PATIENT)
        return (
            lambda: np.exp(engine.score_choices([PRIVATE], CHOICES)),
            lambda: engine.ascore_choices([PRIVATE], CHOICES),
        )

    return build


def decisions(root: str) -> tuple[Row, Row]:
    engine = DecisionsBackend(decision_model(f"{root}/v1"), retry=PATIENT)
    return (
        lambda: np.exp(engine.score_choices([PRIVATE], CHOICES)),
        lambda: engine.ascore_choices([PRIVATE], CHOICES),
    )


def embeddings(root: str) -> tuple[Row, Row]:
    made = pytest.importorskip("langchain_openai").OpenAIEmbeddings
    options = {"check_embedding_ctx_length": False, "max_retries": 0}
    engine = SilentEmbeddings(made(base_url=f"{root}/v1", api_key="none", **options), retry=PATIENT)
    return lambda: engine.rows([OpaqueValue(PRIVATE)]), lambda: engine.arows([OpaqueValue(PRIVATE)])


ENGINES: dict[str, Engine] = {
    "chat log-probabilities": tokens("ChatOpenAI"),
    "chat text votes": text_votes(lambda root: openai_model("ChatOpenAI", f"{root}/v1")),
    "completions": tokens("OpenAI"),
    "messages": text_votes(anthropic_model),
    "decisions": decisions,
    "embeddings": embeddings,
}


def empty(row: Any) -> bool:
    found = np.asarray(row)
    return bool((found == 0.0).all() or np.isneginf(found).all())


def request(text: str = PRIVATE, *, explain: Any = "") -> Request:
    return Request(OpaqueValue(text), lambda prompt: [HumanMessage(prompt)], {}, explain=explain)


def ask(model: Any, retry: RetryPolicy, *, is_async: bool, explain: Any = "") -> Reply:
    if is_async:
        return asyncio.run(silence(model).aask(request(explain=explain), retry=retry))
    return silence(model).ask(request(explain=explain), retry=retry)


def chat(served: Served, **options: Any) -> Any:
    return openai_model("ChatOpenAI", f"{served.root}/v1", **options)


CLIENTS: dict[str, Callable[[Served], Any]] = {
    "openai": chat,
    "anthropic": lambda served: anthropic_model(served.root),
    "requests": lambda served: ByRequests(root=served.root),
}


class ByRequests(LLM):
    """A completion model of a user's own that asks by requests."""

    root: str

    @property
    def _llm_type(self) -> str:
        return "requests"

    def _call(self, prompt: str, *_: Any, **__: Any) -> str:
        body = {"model": "m", "prompt": str(prompt), "max_tokens": 4}
        return str(requests.post(f"{self.root}/v1/completions", json=body).json()["choices"][0]["text"])  # noqa: S113


class TestRedirects:
    @pytest.mark.parametrize("name", ENGINES)
    @pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
    def test_are_not_followed_and_the_row_abstains(self, name: str, status: int) -> None:
        with hostile_provider(redirect(status)) as served:
            row, arow = ENGINES[name](served.root)
            assert empty(row())
            assert empty(asyncio.run(arow()))
            assert len(served.private()) == 2  # one call each: nobody tried again
            assert served.elsewhere.seen == []

    @pytest.mark.parametrize("name", ENGINES)
    def test_loops_end_at_once(self, name: str) -> None:
        with hostile_provider(redirect(307, loops=True)) as served:
            row, arow = ENGINES[name](served.root)
            assert empty(row())
            assert empty(asyncio.run(arow()))
            assert len(served.private()) == 2

    @pytest.mark.parametrize("is_async", [False, True])
    def test_from_tls_to_clear_text(self, tmp_path: Path, *, is_async: bool) -> None:
        server, client = certificates(tmp_path)
        with hostile_provider(redirect(307), tls=server) as served:
            model = chat(
                served,
                http_client=httpx2.Client(verify=client, follow_redirects=True),
                http_async_client=httpx2.AsyncClient(verify=client, follow_redirects=True),
            )
            assert ask(model, PATIENT, is_async=is_async) == Reply(fault="content")
            assert len(served.private()) == 1
            assert served.elsewhere.seen == []
            served.manner = None
            assert ask(model, PATIENT, is_async=is_async).answer is not None

    @pytest.mark.parametrize("name", CLIENTS)
    def test_a_probe_names_the_host_that_it_was_pointed_to(self, name: str) -> None:
        with hostile_provider(redirect(307)) as served:
            reply = ask(CLIENTS[name](served), PATIENT, is_async=False, explain="text")
            assert reply.fault == "refused"
            assert reply.detail == f"a redirect (HTTP 307) to {served.elsewhere.root}"
            later = ask(CLIENTS[name](served), PATIENT, is_async=False, explain="kind")
            assert later.detail == "a redirect (HTTP 307)"  # the address may quote what private calls sent

    def test_an_engine_is_not_built_on_one(self) -> None:
        with hostile_provider(lambda *_: None) as served:
            served.manner = redirect(308)
            model = chat(served, model=TARGET)  # in the body of its probe
            with pytest.raises(ModelCallError, match=f"HTTP 308.*to {served.elsewhere.root}.*base_url"):
                TextVoteBackend(model, retry=PATIENT)
            with pytest.raises(ModelCallError, match=f"HTTP 308.*to {served.elsewhere.root}.*base_url"):
                LangChainBackend(model, retry=PATIENT, continuation="instruct")

    def test_the_clients_own_retries_send_nothing_more(self) -> None:
        with hostile_provider(redirect(307)) as served:
            assert ask(chat(served, max_retries=2), PATIENT, is_async=False) == Reply(fault="content")
            assert len(served.private()) == 1


ENDLESS = {
    "body": dripped_body,
    "headers": dripped_headers,
    "continue": endless_status(100),
    "early hints": endless_status(103),
    "silence": says_nothing,
}


class TestDeadlines:
    @pytest.mark.parametrize("manner", ENDLESS)
    @pytest.mark.parametrize("is_async", [False, True])
    @pytest.mark.parametrize("name", CLIENTS)
    def test_nothing_that_drips_outlives_them(self, name: str, manner: str, *, is_async: bool) -> None:
        with hostile_provider(ENDLESS[manner]) as served:
            began = time.monotonic()
            assert ask(CLIENTS[name](served), SOON, is_async=is_async) == Reply(fault="content")
            is_over = (name, manner) == ("requests", "early hints")  # http.client takes that for the answer
            assert is_over or 0.3 <= time.monotonic() - began < 60.0  # without them it would not end
            assert served.arrived(1) <= 1  # none where a busy machine took all of the time to send it

    @pytest.mark.parametrize("is_async", [False, True])
    def test_a_public_call_says_which(self, *, is_async: bool) -> None:
        with hostile_provider(dripped_body) as served:
            reply = ask(chat(served), SOON, is_async=is_async, explain="kind")
            assert (reply.fault, reply.detail) == ("refused", "no whole reply within the deadline of 0.3 seconds")

    def test_they_hold_where_the_client_has_a_timeout_of_its_own(self) -> None:
        with hostile_provider(dripped_body) as served:
            assert ask(chat(served, timeout=20), SOON, is_async=False) == Reply(fault="content")

    def test_a_shorter_timeout_of_the_client_is_still_waited_out(self) -> None:
        with hostile_provider(says_nothing) as served:
            assert ask(chat(served, timeout=0.05), PATIENT, is_async=False).fault == "busy"
            assert served.arrived(3) == 3

    def test_public_calls_of_the_same_client_have_none(self) -> None:
        with hostile_provider(lambda *_: None) as served:
            model = chat(served)
            ask(model, SOON, is_async=False)
            served.manner = redirect(307)
            model.root_client._client.follow_redirects = True
            assert model.invoke(f"{TARGET} in public").content
            assert len(served.elsewhere.seen) == 1


class TestSizes:
    @pytest.mark.parametrize("encoding", ["gzip", "deflate", "raw deflate", "zstd", "br"])
    @pytest.mark.parametrize("is_async", [False, True])
    @pytest.mark.parametrize("name", CLIENTS)
    def test_a_bomb_costs_no_memory(self, name: str, encoding: str, *, is_async: bool) -> None:
        needs(encoding)
        with hostile_provider(bomb(encoding, 40)) as served:
            model = CLIENTS[name](served)
            ask(model, SMALL, is_async=is_async)  # imports
            tracemalloc.start()
            try:
                assert ask(model, SMALL, is_async=is_async) == Reply(fault="content")
                assert tracemalloc.get_traced_memory()[1] < (40e6 if encoding == "br" else 8e6)
            finally:
                tracemalloc.stop()

    @pytest.mark.parametrize("is_async", [False, True])
    @pytest.mark.parametrize("name", CLIENTS)
    def test_a_body_without_an_end_is_not_read_on(self, name: str, *, is_async: bool) -> None:
        with hostile_provider(endless_chunks) as served:
            assert ask(CLIENTS[name](served), SMALL, is_async=is_async) == Reply(fault="content")
            reply = ask(CLIENTS[name](served), SMALL, is_async=is_async, explain="kind")
            assert (reply.fault, reply.detail) == ("refused", "more than 300000 bytes of a reply")

    @pytest.mark.parametrize("encoding", ["gzip", "deflate", "raw deflate", "zstd", "br"])
    @pytest.mark.parametrize("is_async", [False, True])
    @pytest.mark.parametrize("name", CLIENTS)
    def test_an_answer_that_is_compressed_is_read(self, name: str, encoding: str, *, is_async: bool) -> None:
        needs(encoding)
        with hostile_provider(packed(encoding)) as served:
            reply = ask(CLIENTS[name](served), SMALL, is_async=is_async)
            assert reply.answer is not None
            assert reply.answer.reveal().text

    @pytest.mark.parametrize("name", CLIENTS)
    def test_an_encoding_that_nobody_can_read_abstains(self, name: str) -> None:
        with hostile_provider(packed("other")) as served:
            assert ask(CLIENTS[name](served), SMALL, is_async=False) == Reply(fault="content")

    @pytest.mark.parametrize("wrong", [{"deadline": 0.0}, {"deadline": float("inf")}, {"max_reply_bytes": 0}])
    def test_limits_that_are_none_are_refused(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match="max_reply_bytes"):
            RetryPolicy(**wrong)


def needs(encoding: str) -> None:
    """Skips where nobody could read the encoding, so that no client asks for it."""
    package = {"zstd": "zstandard", "br": "brotli"}.get(encoding)
    if package:
        pytest.importorskip(package)


def certificates(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's context with a certificate of its own, and a client's that trusts it."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    names = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
    made = (
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    )
    subprocess.run([*made, "-keyout", str(key), "-out", str(certificate), *names], check=True, capture_output=True)
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server.load_cert_chain(certificate, key)
    client.load_verify_locations(certificate)
    return server, client
