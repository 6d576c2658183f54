"""The adapter against a real llama.cpp server through `langchain-openai`, on a tiny random model made on the spot.

Skipped where `xllamacpp`, `gguf` or `langchain-openai` is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import time
import urllib.request
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pytest
import tiktoken
from langchain_core.prompts import PromptTemplate

from langchain_dpicl.backends.base import TextBackend
from langchain_dpicl.backends.langchain.backend import LangChainBackend, PublicTokenizer
from langchain_dpicl.backends.langchain.logprobs import EOS, first_position, next_token
from langchain_dpicl.backends.private_calls.call import Reply, Request, SilentModel
from langchain_dpicl.backends.resolve import as_backend
from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
from langchain_dpicl.exceptions import CapabilityError, ModelCallError
from langchain_dpicl.options import Decoding, LogitNoise, Rows
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.prompts import DPFewShotPromptTemplate
from langchain_dpicl.reports.report import verify_report
from tests.canary import CHANNELS, RECORD, aobserve, leaks, observe
from tests.llama_server import ServerDidNotStartError, running_server
from tests.tiny_gguf import EOS as END
from tests.tiny_gguf import SPECIALS, byte_alphabet, vocabulary

pytest.importorskip("xllamacpp")
pytest.importorskip("gguf")
openai = pytest.importorskip("langchain_openai")
pytestmark = pytest.mark.loopback

Kind = Literal["chat", "completion"]
KINDS: tuple[Kind, ...] = ("chat", "completion")
QUESTIONS = [f"{start} my card number {i} ?" for i in range(10) for start in ("why was", "how do i top up")]
PROMPTS = ["why was my card payment declined ?", "the transfer to my account is pending", "how do i top up by card ?"]


class Server:
    """A running server: its address, and the size of its model's vocabulary."""

    def __init__(self, url: str, size: int) -> None:
        self.url = url
        self.size = size

    def post(self, path: str, **body: Any) -> Any:
        """Asks the server without LangChain and without an SDK: the second source of every number here."""
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)  # noqa: S310
        with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310
            return json.load(response)

    def model(self, kind: Kind, **options: Any) -> Any:
        """A stock LangChain client; the prompt cache is off, as it moves probabilities by up to 1e-3."""
        shared = {"model": "tiny", "base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, **options}
        made = openai.ChatOpenAI(**shared) if kind == "chat" else openai.OpenAI(**shared)
        return made.bind(extra_body={"cache_prompt": False})

    def full(self, kind: Kind, **options: Any) -> LangChainBackend:
        return LangChainBackend(self.model(kind), full_vocabulary=self.size, **options)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with contextlib.ExitStack() as stack:
        try:
            found = stack.enter_context(running_server())
        except ServerDidNotStartError as error:
            pytest.skip(str(error))
        yield Server(found.url, found.size)


@pytest.mark.parametrize("kind", KINDS)
class TestFullVocabulary:
    def test_rows_are_distributions_over_the_readable_vocabulary(self, server: Server, kind: Kind) -> None:
        backend = server.full(kind)
        domain = backend.vocabulary()
        assert EOS in domain
        assert 200 < len(domain) < server.size  # single bytes beyond ASCII are no complete characters
        rows = backend.open(PROMPTS, []).score(domain)
        assert rows.min() >= 0.0
        assert rows.sum(axis=1).max() <= 1.0 + 1e-9
        assert rows.sum(axis=1).min() > 0.5

    def test_rows_equal_what_the_server_says_without_langchain(self, server: Server, kind: Kind) -> None:
        backend = server.full(kind)
        row = backend.open(PROMPTS[:1], [b" card"]).score(backend.vocabulary())[0]
        prompt = PROMPTS[0] if kind == "completion" else f"<|user|>{PROMPTS[0]}\n<|assistant|>"
        raw = server.post("/completion", prompt=f"{prompt} card", n_predict=1, n_probs=server.size, cache_prompt=False)
        top = raw["completion_probabilities"][0]["top_logprobs"]
        assert math.fsum(math.exp(entry["logprob"]) for entry in top) == pytest.approx(1.0, abs=1e-4)
        expected = next_token({"content": [{"top_logprobs": top}]})
        assert len(top) == server.size
        assert row == pytest.approx(np.array([expected.get(token, 0.0) for token in backend.vocabulary()]), abs=1e-6)

    def test_the_end_collects_the_control_tokens(self, server: Server, kind: Kind) -> None:
        backend = server.full(kind)
        raw = server.post("/v1/completions", prompt=PROMPTS[0], max_tokens=1, logprobs=server.size, cache_prompt=False)
        if kind == "completion":
            entries = first_position(raw["choices"][0]["logprobs"])
            mass = math.fsum(math.exp(e["logprob"]) for e, _ in entries if e["id"] < 5)  # type: ignore[index]
            assert backend.open(PROMPTS[:1], []).score([EOS])[0, 0] == pytest.approx(mass, abs=1e-6)
        assert 0.0 < backend.open(PROMPTS[:1], []).score([EOS])[0, 0] < 0.5


@pytest.mark.parametrize("kind", KINDS)
class TestTopTwenty:
    def test_rows_are_the_full_rows_on_the_top_and_zero_elsewhere(self, server: Server, kind: Kind) -> None:
        full, top = server.full(kind), as_backend(server.model(kind))
        domain = full.vocabulary()
        whole, reported = full.open(PROMPTS, []).score(domain), top.open(PROMPTS, []).score(domain)
        seen = reported > 0.0
        assert ((seen.sum(axis=1) >= 1) & (seen.sum(axis=1) <= 20)).all()
        # Control tokens share the key of the end; the top list holds some of them only.
        inner = [j for j, token in enumerate(domain) if token != EOS]
        assert np.abs(np.where(seen, reported - whole, 0.0)[:, inner]).max() < 1e-5

    async def test_public_tokens_come_in_order(self, server: Server, kind: Kind) -> None:
        backend = as_backend(server.model(kind))
        found = backend.top_tokens(PROMPTS[0], [], top_k=10)
        assert 1 <= len(found) <= 10
        assert [probability for _, probability in found] == sorted((p for _, p in found), reverse=True)
        assert [token for token, _ in await backend.atop_tokens(PROMPTS[0], [], top_k=10)] == [t for t, _ in found]

    def test_demonstrations_can_be_written_token_by_token(self, server: Server, kind: Kind) -> None:
        backend = as_backend(server.model(kind))
        written: list[Any] = []
        session = backend.open(PROMPTS, [])
        for _ in range(4):
            domain = [token for token, _ in backend.top_tokens("how", written, top_k=10)]
            released = domain[int(session.score([*domain, backend.eos]).sum(axis=0)[:-1].argmax())]
            session.push(released)
            written.append(released)
        assert backend.decode(written)


@pytest.mark.parametrize("kind", KINDS)
class TestRowsStandAlone:
    def test_one_call_at_a_time_repeats_to_the_bit(self, server: Server, kind: Kind) -> None:
        backend = server.full(kind, max_concurrency=1)
        domain = backend.vocabulary()
        first, again = (backend.open(PROMPTS, []).score(domain) for _ in range(2))
        assert np.array_equal(first, again)
        moved = backend.open([PROMPTS[0], "another", PROMPTS[2]], []).score(domain)
        assert np.array_equal(first[[0, 2]], moved[[0, 2]])
        assert np.abs(first[1] - moved[1]).max() > 1e-3

    async def test_concurrent_calls_agree_to_rounding(self, server: Server, kind: Kind) -> None:
        backend = server.full(kind)
        session, domain = backend.open(PROMPTS * 2, []), backend.vocabulary()
        serial = server.full(kind, max_concurrency=1).open(PROMPTS * 2, []).score(domain)
        assert np.abs(session.score(domain) - serial).max() < 1e-4
        assert np.abs(await session.ascore(domain) - serial).max() < 1e-4

    async def test_a_prompt_beyond_the_context_abstains_alone(self, server: Server, kind: Kind) -> None:
        backend = server.full(kind, max_concurrency=1)
        session, domain = backend.open([PROMPTS[0], "card " * 6000, PROMPTS[2]], []), backend.vocabulary()
        good = backend.open([PROMPTS[0], PROMPTS[2]], []).score(domain)
        for rows in (session.score(domain), await session.ascore(domain)):
            assert not rows[1].any()
            assert np.abs(rows[[0, 2]] - good).max() < 1e-4


def test_prefill_equals_completion_of_the_same_rendered_prompt(server: Server) -> None:
    chat, completion = server.full("chat"), server.full("completion")
    domain = chat.vocabulary()
    for prefix in ([], [b" card"], [b" the", b" transfer", b" "]):
        rendered = [f"<|user|>{prompt}\n<|assistant|>" for prompt in PROMPTS]
        rows = chat.open(PROMPTS, prefix).score(domain)
        assert np.abs(rows - completion.open(rendered, prefix).score(domain)).max() < 1e-5


def test_a_message_is_continued_by_itself_and_its_echo_is_not_read(server: Server) -> None:
    """llama.cpp repeats the prefix in the text; the row is that of the new token."""
    backend = server.full("chat")
    assert backend.prefill == "plain"
    asked = [{"role": "user", "content": PROMPTS[0]}, {"role": "assistant", "content": " card"}]
    raw = server.post(
        "/v1/chat/completions",
        messages=asked,
        max_tokens=1,
        logprobs=True,
        top_logprobs=server.size,
        cache_prompt=False,
    )
    assert raw["choices"][0]["message"]["content"].startswith(" card")
    expected = next_token(raw["choices"][0]["logprobs"])
    row = backend.open(PROMPTS[:1], [b" card"]).score(backend.vocabulary())[0]
    assert row == pytest.approx(np.array([expected.get(token, 0.0) for token in backend.vocabulary()]), abs=1e-6)
    nothing_new = server.post("/v1/chat/completions", messages=asked, max_tokens=1, logit_bias={str(END): 100})
    assert nothing_new["choices"][0]["message"]["content"] == " card"
    assert nothing_new["choices"][0]["finish_reason"] == "stop"


def test_instruct_is_another_distribution_and_says_so(server: Server) -> None:
    prefill, instruct = server.full("chat"), server.full("chat", continuation="instruct")
    domain = prefill.vocabulary()
    assert instruct.continuation == "instruct"
    first = [engine.open(PROMPTS, []).score(domain) for engine in (prefill, instruct)]
    then = [engine.open(PROMPTS, [b" card"]).score(domain) for engine in (prefill, instruct)]
    assert np.abs(first[0] - first[1]).max() < 1e-4
    assert np.abs(then[0] - then[1]).max() > 1e-2


@pytest.mark.parametrize("kind", KINDS)
async def test_completions_are_the_servers_own_texts_cut_at_the_first_stop_string(server: Server, kind: Kind) -> None:
    backend = as_backend(server.model(kind))
    assert isinstance(backend, TextBackend)
    rendered = PROMPTS if kind == "completion" else [f"<|user|>{prompt}\n<|assistant|>" for prompt in PROMPTS]
    options = {"max_tokens": 12, "temperature": 0, "cache_prompt": False}
    raw = [server.post("/v1/completions", prompt=prompt, **options)["choices"][0]["text"] for prompt in rendered]
    assert min(map(len, raw)) > 3
    assert backend.complete(PROMPTS, max_tokens=12) == raw
    assert await backend.acomplete(PROMPTS, max_tokens=12) == raw
    stop = raw[0][3]
    said = [text.lstrip() if kind == "chat" else text for text in raw]  # what a chat begins with is no text
    assert backend.complete(PROMPTS, max_tokens=12, stop=["never", stop]) == [text.split(stop)[0] for text in said]
    assert backend.complete(["card " * 6000, PROMPTS[1]], max_tokens=12) == ["", raw[1]]


def local_encoding() -> tiktoken.Encoding:
    """The tokenizer of the tiny model, built from the tables it is made from: no network."""
    tokens, _ = vocabulary()
    place = {letter: byte for byte, letter in enumerate(byte_alphabet())}
    ranks = {
        bytes(place[letter] for letter in token): number
        for number, token in enumerate(tokens)
        if number >= len(SPECIALS)
    }
    words = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    special = {token: number for number, token in enumerate(SPECIALS)}
    return tiktoken.Encoding("tiny", pat_str=words, mergeable_ranks=ranks, special_tokens=special)


class TestTokenizer:
    def test_counts_as_the_server_does(self, server: Server) -> None:
        backend = LangChainBackend(server.model("completion"), tokenizer=local_encoding())
        for text in (*PROMPTS, "", "card 4711 ?\n\n naïve \U0001f600  the", "x" * 50):
            assert backend.count_tokens(text) == len(server.post("/tokenize", content=text)["tokens"])
        assert as_backend(server.model("completion")).count_tokens(PROMPTS[0]) == len(PROMPTS[0])

    def test_spells_every_id_in_the_bytes_that_the_server_reports(self, server: Server) -> None:
        tokenizer = PublicTokenizer(local_encoding())
        raw = server.post("/v1/completions", prompt=PROMPTS[0], max_tokens=1, logprobs=server.size)
        entries = [entry for entry, _ in first_position(raw["choices"][0]["logprobs"])]
        assert len(entries) == server.size
        assert all(tokenizer.spelled(entry["id"]) == bytes(entry["bytes"]) for entry in entries)  # type: ignore[index]


def test_one_client_serves_one_event_loop_after_another(server: Server) -> None:
    # Its own timeout gives this client connections of its own: they die with the first loop.
    backend = LangChainBackend(server.model("chat", timeout=310.0), full_vocabulary=server.size)
    domain = backend.vocabulary()
    rows = [asyncio.run(backend.open(PROMPTS, []).ascore(domain)) for _ in range(3)]
    assert np.abs(rows[0] - rows[1]).max() < 1e-4
    assert np.abs(rows[0] - rows[2]).max() < 1e-4
    assert rows[0].sum(axis=1).min() > 0.5


@pytest.mark.parametrize("kind", KINDS)
async def test_nobody_overhears_the_stock_clients(server: Server, kind: Kind) -> None:
    model = server.model(kind)
    session = as_backend(model).open([f"a ticket: {RECORD}"], [])
    assert leaks(observe(lambda: session.score([b" card"]))) == set()
    assert leaks(await aobserve(lambda: session.ascore([b" card"]))) == set()
    naive = leaks(observe(lambda: model.invoke(f"a ticket: {RECORD}", max_tokens=1)))
    assert naive >= {*CHANNELS} - {"model callbacks", "usage callback", "astream_events"}
    # LangChain's awaited completion models send fewer events when a cache is set.
    naive = leaks(await aobserve(lambda: model.ainvoke(f"a ticket: {RECORD}", max_tokens=1)))
    assert naive >= {"LangSmith", "global cache"} | ({"astream_events"} if kind == "chat" else set())


OPTIONS: dict[str, Any] = {
    "example_prompt": PromptTemplate.from_template("text: {text}"),
    "suffix": "text: {input}",
    "epsilon": 4.0,
    "instruction": "Questions of bank customers.",
    "shots_per_label": 2,
    "rows": Rows(slots=4, shots=2),
    "decoding": Decoding(candidates=20),
    "max_tokens": 3,
}


class PrivateCalls:
    """Counts the private calls that reached the server, and how many of them brought no logprobs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = self.failed = self.awaited = 0
        ask, aask = SilentModel.ask, SilentModel.aask

        def counted(model: SilentModel, request: Request, **options: Any) -> Reply:
            return self.note(request, ask(model, request, **options))

        async def acounted(model: SilentModel, request: Request, **options: Any) -> Reply:
            self.awaited += 1
            return self.note(request, await aask(model, request, **options))

        monkeypatch.setattr(SilentModel, "ask", counted)
        monkeypatch.setattr(SilentModel, "aask", acounted)

    def note(self, request: Request, reply: Reply) -> Reply:
        if not request.explain:
            self.made += 1
            self.failed += reply.answer is None or not first_position(reply.answer.reveal().logprobs)
        return reply


@pytest.mark.parametrize("whole", [False, True], ids=["top 20", "whole vocabulary"])
class TestDemonstrations:
    """The main job, end to end: private records, a stock client, a real server, a template."""

    def check(self, template: DPFewShotPromptTemplate, budget: PrivacyBudgetCallbackHandler, *, whole: bool) -> None:
        assert [sorted(example) for example in template.examples] == [["text"], ["text"]]
        assert template.format(input="is it pending ?").endswith("text: is it pending ?")
        assert template.epsilon <= 4.0
        assert budget.remaining_epsilon == pytest.approx(2.0)
        report = json.loads(budget.report().to_json())
        assert verify_report(report).ok
        public = report["shares"][0]["components"][0]["public"]
        assert public["public_top_k"] == (None if whole else 20)
        assert public["num_slots"] == 4
        assert not any(question in json.dumps(report) for question in QUESTIONS)

    def given(self, server: Server, kind: Kind, *, whole: bool) -> dict[str, Any]:
        """The stock client itself, or the engine that asks it for every token."""
        if whole:
            return {**OPTIONS, "llm": server.full(kind), "decoding": Decoding(candidates="all")}
        return {**OPTIONS, "llm": server.model(kind)}

    def test_are_written_by_a_chat_model(self, server: Server, monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
        calls = PrivateCalls(monkeypatch)
        budget = PrivacyBudgetCallbackHandler(epsilon=6.0, delta=1e-4)
        private = PrivateExamples([{"text": text} for text in QUESTIONS], public_size=len(QUESTIONS))
        template = DPFewShotPromptTemplate.from_private_examples(
            private, budget=budget, **self.given(server, "chat", whole=whole)
        )
        self.check(template, budget, whole=whole)
        assert 2 * 4 <= calls.made <= 2 * 3 * 4
        assert calls.made % 4 == 0
        assert (calls.failed, calls.awaited) == (0, 0)

    async def test_are_written_by_an_awaited_completion_model(
        self, server: Server, monkeypatch: pytest.MonkeyPatch, whole: bool
    ) -> None:
        calls = PrivateCalls(monkeypatch)
        budget = PrivacyBudgetCallbackHandler(epsilon=6.0, delta=1e-4)
        private = PrivateExamples([{"text": text} for text in QUESTIONS], public_size=len(QUESTIONS))
        template = await DPFewShotPromptTemplate.afrom_private_examples(
            private, budget=budget, **self.given(server, "completion", whole=whole)
        )
        self.check(template, budget, whole=whole)
        assert 2 * 4 <= calls.made <= 2 * 3 * 4
        assert calls.failed == 0
        assert calls.awaited >= calls.made


@pytest.mark.parametrize("kind", KINDS)
def test_an_unreachable_server_is_named_soon(kind: Kind) -> None:
    with socket.socket() as taken:  # bound but not listening: every connection is refused
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        stock = openai.ChatOpenAI if kind == "chat" else openai.OpenAI
        started = time.monotonic()
        with pytest.raises(ModelCallError, match=r"could not be reached.*Connection"):
            as_backend(stock(model="tiny", base_url=address, api_key="none"))
    assert time.monotonic() - started < 120.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_dress_rehearsal_shows_that_the_longest_prompt_does_not_fit(server: Server, kind: Kind) -> None:
    backend = as_backend(server.model(kind))
    assert backend.top_tokens("card " * 50, [], top_k=2)
    with pytest.raises(ModelCallError, match="HTTP 400"):
        backend.top_tokens("card " * 6000, [], top_k=2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {"noise": LogitNoise("recentered_clip")},
        {"noise": LogitNoise("difference_clip"), "decoding": Decoding(candidates="all")},
        {
            "noise": LogitNoise("clip_and_blend", clip=8.0),
            "decoding": Decoding(candidates=20, temperature=1.0),
            "epsilon": 300.0,
        },
        {"noise": LogitNoise("recentered_clip", free_below=0.2, max_private_tokens=2)},
        {
            "noise": LogitNoise("recentered_clip"),
            "rows": Rows(slots=3, shots=2, sampling="disjoint", redraw_every="run"),
        },
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_logit_mechanisms_write_from_a_server_that_shows_its_vocabulary(
    server: Server, kind: Kind, options: dict[str, Any]
) -> None:
    budget = PrivacyBudgetCallbackHandler(epsilon=400.0, delta=1e-5)
    given = {**OPTIONS, "rows": Rows(slots=3, shots=2, redraw_every="run"), "max_tokens": 4, **options}
    private = PrivateExamples(QUESTIONS, public_size=len(QUESTIONS))
    prompt = DPFewShotPromptTemplate.from_private_examples(private, llm=server.full(kind), budget=budget, **given)
    assert len(prompt.examples) == 2
    assert prompt.released.plan["mechanism"] == options["noise"].mechanism
    assert prompt.released.plan["temperature"] == pytest.approx(1.0)
    assert verify_report(budget.report().to_dict()).ok


def test_logit_mechanisms_refuse_a_server_of_top_tokens(server: Server) -> None:
    budget = PrivacyBudgetCallbackHandler(epsilon=4.0, delta=1e-5)
    with pytest.raises(CapabilityError, match="whole vocabulary"):
        DPFewShotPromptTemplate.from_private_examples(
            PrivateExamples(QUESTIONS, public_size=20),
            llm=server.model("chat"),
            budget=budget,
            noise="recentered_clip",
            **OPTIONS,
        )
    assert budget.report().to_dict()["shares"] == []
