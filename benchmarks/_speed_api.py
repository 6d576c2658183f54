"""Voting and generation over an API: a server of this machine that waits so long, beside the client's own calls.

The server has a process of its own and answers every call after the same wait. All of it runs in one event loop of one
process, turn by turn, so that a busy machine is busy for both sides.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import socket
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from _speed_goals import Goal
from langchain_core.messages import convert_to_messages

from langchain_dpicl import (
    Budget,
    Decoding,
    DemonstrationSynthesizer,
    DPVotingRunnable,
    LabelAnswers,
    Noise,
    PrivateExamples,
    Rows,
    Serving,
)
from langchain_dpicl.backends import LangChainBackend, TextVoteBackend

LATENCY = 0.05
"""Seconds that the server waits before it answers."""
ROWS = 10
LABELS = ("card", "transfer", "top up", "cash")
WORDS = [" my", " card", " was", " declined", " transfer", " is", " late", *(f" w{place}" for place in range(20))]


def _answer(body: dict[str, Any]) -> dict[str, Any]:
    """Returns a chat completion: the same top tokens, or a label, for every prompt."""
    wanted = body.get("top_logprobs") or 0
    tops = [{"token": word, "logprob": -1.0 - place, "bytes": list(word.encode())} for place, word in enumerate(WORDS)]
    told = {"content": [{**tops[0], "top_logprobs": tops[:wanted]}]} if body.get("logprobs") else None
    message = {"role": "assistant", "content": WORDS[0] if told else LABELS[0]}
    choice = {"index": 0, "message": message, "finish_reason": "length" if told else "stop", "logprobs": told}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}


def _serve(sock: socket.socket) -> None:
    waves: list[list[Any]] = []
    in_flight = 0

    async def answer(head: bytes, reader: asyncio.StreamReader) -> Any:
        """Keeps what is asked: calls that begin before the first of them has ended are one wave."""
        nonlocal in_flight
        if head.startswith(b"GET"):
            seen = waves.copy()
            waves.clear()
            return seen
        sizes = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-len")]
        body = json.loads(await reader.readexactly(int(sizes[0])))
        if not in_flight:
            waves.append([])
        in_flight += 1
        waves[-1].append(body)
        await asyncio.sleep(LATENCY)
        in_flight -= 1
        return _answer(body)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                out = json.dumps(await answer(head, reader)).encode()
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
                    % (len(out), out)
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def serve() -> None:
        async with await asyncio.start_server(handle, sock=sock, backlog=1024) as server:
            await server.serve_forever()

    asyncio.run(serve())


@contextmanager
def server() -> Iterator[str]:
    """Starts the server; yields its base URL."""
    sock = socket.create_server(("127.0.0.1", 0), backlog=1024)
    child = multiprocessing.get_context("fork").Process(target=_serve, args=(sock,), daemon=True)
    child.start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
    finally:
        child.kill()
        child.join()
        sock.close()


def _model(url: str) -> Any:
    from langchain_openai import ChatOpenAI  # not every environment has it

    return ChatOpenAI(model="m", base_url=url, api_key="none", max_retries=0)  # type: ignore[arg-type]


def _private(num: int = 4_000) -> PrivateExamples:
    records = [
        {"text": f"question number {place} about my money " + "and more words " * 20, "queue": LABELS[place % 4]}
        for place in range(num)
    ]
    return PrivateExamples(records, label_key="queue", labels=LABELS, public_size=dict.fromkeys(LABELS, num // 4))


def _voter(llm: Any, *, max_queries: int) -> DPVotingRunnable:
    return DPVotingRunnable.from_private_examples(
        _private(),
        llm=llm,
        budget=Budget(epsilon=1.0, delta=1e-5),
        epsilon=1.0,
        max_queries=max_queries,
        rows=Rows(slots=ROWS, shots=4),
        answers=LabelAnswers(votes="text", calibrate=False),
        serving=Serving(memo_size=0),
    )


def _synthesizer(llm: Any, *, tokens: int) -> DemonstrationSynthesizer:
    return DemonstrationSynthesizer.from_private_examples(
        _private(),
        llm=llm,
        budget=Budget(epsilon=1e4, delta=1e-5),
        epsilon=5e3,
        instruction="Write a question.",
        rows=Rows(slots=ROWS, shots=2, redraw_every=1),
        noise=Noise(multiplier=0.001),
        decoding=Decoding(candidates=5, stop=("no text stops here",)),
        max_tokens=tokens,
    )


async def _seconds(action: Callable[[], Awaitable[Any]]) -> float:
    before = time.perf_counter()
    await action()
    return time.perf_counter() - before


async def _one_answer(llm: Any, *, turns: int) -> Goal:
    """One voting answer beside one raw call: how many round trips it waits."""
    voter = _voter(llm, max_queries=turns + 1)
    await voter.ainvoke("warm up")
    ours, raw = [], []
    for turn in range(turns):
        ours.append(await _seconds(lambda turn=turn: voter.ainvoke(f"query {turn}")))  # type: ignore[misc]
        raw.append(await _seconds(lambda turn=turn: llm.ainvoke(f"query {turn}")))  # type: ignore[misc]
    took, trip = min(ours) * 1e3, min(raw) * 1e3
    return Goal(f"one answer of {ROWS} rows over an API / one call of the client", took, trip, took / trip, 1.3)


async def _many_answers(llm: Any, *, answers: int, at_once: int, turns: int) -> Goal:
    """Answers per second beside the same number of calls by the client alone, both with so many calls in flight."""
    calls = answers * (ROWS + 1)
    voter = _voter(TextVoteBackend(llm, max_concurrency=at_once), max_queries=answers * (turns + 1))
    prompts = ["x " * 300] * calls
    questions = [f"query {place}" for place in range(answers)]
    ours, theirs = [], []
    for _ in range(turns + 1):
        ours.append(await _seconds(lambda: voter.abatch(questions)))
        theirs.append(await _seconds(lambda: llm.abatch(prompts, {"max_concurrency": at_once})))
    took, alone = calls / min(ours[1:]), calls / min(theirs[1:])
    name = f"abatch of {answers} answers, {at_once} calls in flight: ours / the client's own abatch of the calls"
    return Goal(name, took, alone, took / alone, 0.9, at_least=True, unit="calls/s")


async def _waves(llm: Any) -> list[list[dict[str, Any]]]:
    """Returns what was asked since the last question, wave by wave."""
    url = f"{llm.openai_api_base}/waves"
    found: list[list[dict[str, Any]]] = await asyncio.to_thread(lambda: json.load(urllib.request.urlopen(url)))  # noqa: S310  a loopback
    return found


async def _texts(llm: Any, *, tokens: int, turns: int) -> Goal:
    """Texts beside the same calls, made by the model's own `agenerate` in the same waves."""
    engine = LangChainBackend(llm, continuation="instruct", max_concurrency=4 * (ROWS + 1))
    await _waves(llm)
    await _synthesizer(engine, tokens=tokens).arun(progress=False)
    waves = await _waves(llm)
    options = {name: value for name, value in waves[-1][-1].items() if name not in {"model", "messages", "stream"}}
    asked = [[convert_to_messages(body["messages"]) for body in wave] for wave in waves]

    async def the_same_calls() -> None:
        for prompts in asked:
            await llm.agenerate(prompts, **options)

    ours, theirs = [], []
    for _ in range(turns):
        run = _synthesizer(engine, tokens=tokens)
        ours.append(await _seconds(lambda run=run: run.arun(progress=False)))  # type: ignore[misc]
        theirs.append(await _seconds(the_same_calls))
    took, alone = min(ours) * 1e3, min(theirs) * 1e3
    size = f"{sum(map(len, waves))} calls in {len(waves)} waves"
    name = f"4 texts x {tokens} tokens over an API ({size}) / agenerate of the same"
    return Goal(name, took, alone, took / alone, 1.15)


async def _all(url: str, *, turns: int, answers: int, tokens: int) -> list[Goal]:
    llm = _model(url)  # one for all: its client belongs to the loop that used it first
    return [
        await _one_answer(llm, turns=5 * turns),
        await _many_answers(llm, answers=answers, at_once=32, turns=turns),
        await _texts(llm, tokens=tokens, turns=turns),
    ]


def goals(*, turns: int = 4, answers: int = 100, tokens: int = 10) -> list[Goal]:
    """Measures items 1 and 2 of the speed goals over an API."""
    with server() as url:
        return asyncio.run(_all(url, turns=turns, answers=answers, tokens=tokens))


if __name__ == "__main__":
    from _speed_goals import table_of

    print(table_of(goals()))
