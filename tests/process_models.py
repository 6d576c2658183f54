"""Models that tests have made in another process, by their names."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatResult

from langchain_dpicl.backends.fake import FakeBackend, scripted, word_copier
from langchain_dpicl.backends.langchain.texts import TextVoteBackend
from langchain_dpicl.backends.private_calls.call import RetryPolicy
from langchain_dpicl.exceptions import ModelCallError
from tests.full_doubles import FullFake
from tests.leaks.models import BusyInsideChat
from tests.scripted_models import ScriptedChat, ScriptedLLM

WORDS = [
    f" {word}" for word in ["the", "apple", "is", "red", "sea", "blue", "and", "wide", "a", "lake", "one", "naïve"]
]
WORDS += [f" filler{number}" for number in range(10)]
ONCE = RetryPolicy(max_attempts=1)
QUOTA = "48231 tokens of this account were used"


def copier(max_top_k: int | None = None, fails: str | None = "fails") -> FakeBackend:
    vocabulary = None if max_top_k else WORDS
    return FakeBackend(word_copier(WORDS), vocabulary=vocabulary, max_top_k=max_top_k, fail_rows_containing=fails)


def full(public_fails_at: int | None = None) -> FullFake:
    return FullFake(word_copier(WORDS), vocabulary=WORDS, fail_rows_containing="fails", public_fails_at=public_fails_at)


def deadly(prompt: str, prefix: tuple[bytes, ...]) -> Mapping[str, float]:
    """Ends the process at "die", never answers "hang", and copies words otherwise."""
    del prefix
    if "die" in prompt:
        os.kill(os.getpid(), signal.SIGKILL)
    if "hang" in prompt:
        time.sleep(3600)
    return {" red": 0.5, " blue": 0.25} if "red" in prompt else {" blue": 0.75, " red": 0.125}


def ended_from_outside(folder: str) -> FakeBackend:
    """Says in a file that it is asked about "slow", and answers once another file is there, or its process anew."""
    begun, goes_on = Path(folder) / "begun", Path(folder) / "goes on"

    def answer(prompt: str, prefix: tuple[bytes, ...]) -> Mapping[str, float]:
        if "slow" in prompt and not begun.exists():
            begun.touch()
            while not goes_on.exists():
                time.sleep(0.02)
        return deadly(prompt, prefix)

    return FakeBackend(answer, vocabulary=[" red", " blue"])


class Cutter(FakeBackend):
    """A chat that cuts text after two letters, with room for ten behind prompts, public ones of a hundred at most."""

    room, is_chat = 10, True

    def continued(self, text: str) -> list[bytes]:
        return [text[:2].encode(), text[2:].encode()]

    def check_public(self, prompt: str) -> None:
        if len(prompt) > 100:
            raise ModelCallError("too long")


def cutter() -> FakeBackend:
    return Cutter(deadly, vocabulary=[" red", " blue"])


def with_few_threads(room: int) -> FakeBackend:
    """Takes its time, in a process in which so many threads start that answer calls."""
    start, started = threading.Thread.start, list[str]()

    def start_few(thread: threading.Thread) -> None:
        if thread.name.startswith(("dpicl-process", "dpicl-engine", "asyncio")):
            if len(started) == room:
                raise RuntimeError("can't start new thread")
            started.append(thread.name)
        start(thread)

    threading.Thread.start = start_few  # type: ignore[method-assign]

    def answer(prompt: str, prefix: tuple[bytes, ...]) -> Mapping[str, float]:
        time.sleep(0.2)
        return deadly(prompt, prefix)

    return FakeBackend(answer, vocabulary=[" red", " blue"])


def mortal() -> FakeBackend:
    return FakeBackend(deadly, vocabulary=[" red", " blue"])


def mortal_full() -> FullFake:
    return FullFake(deadly, vocabulary=[" red", " blue"])


def tops(text: str) -> dict[str, float]:
    return (
        {" red": 0.6, " blue": 0.3, " a": 0.05} if text.count("red") > text.count("blue") else {" blue": 0.9, " a": 0.1}
    )


def chat(**fields: Any) -> ScriptedChat:
    return ScriptedChat(answer=tops, **fields)


def completion() -> ScriptedLLM:
    return ScriptedLLM(answer=tops)


def writer() -> TextVoteBackend:
    return TextVoteBackend(chat(), max_concurrency=2, retry=ONCE)


class LoudChat(ScriptedChat):
    """Prints what it is asked, and raises it."""

    answer: Any = tops

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        print(messages)
        print(messages, file=sys.stderr)
        if "raises" in str(messages):
            raise ValueError(str(messages))
        return super()._generate(messages, *args, **kwargs)


def failing(reason: str = "no key") -> Any:
    raise RuntimeError(f"{reason}\nsecond line")


def environment(names: str) -> FakeBackend:
    """An engine that answers with which of some environment variables it sees."""
    seen = {f" {name}": 0.1 for name in names.split(",") if name in os.environ}
    return FakeBackend(scripted(seen or {" none": 1.0}), max_top_k=8)


def closes_the_current_loop() -> FakeBackend:
    """Takes the event loop that there is while it is made; newer versions of Python make none."""
    with contextlib.suppress(RuntimeError):
        asyncio.get_event_loop().close()
    return mortal()


def only_once(mark: str) -> FakeBackend:
    """Ends the process as it starts, except for the first time."""
    if Path(mark).exists():
        os._exit(1)
    Path(mark).touch()
    return mortal()


def never_made(mark: str) -> Any:
    Path(mark).touch()
    time.sleep(3600)


def quota_used_up(mark: str) -> Any:
    """A model whose probe fails from the second start on, with what a provider says of private calls."""
    if Path(mark).exists():
        return LoudChat(answer=_refuse)
    Path(mark).touch()
    return chat()


def _refuse(text: str) -> Any:
    raise RuntimeError(f"429 quota: {QUOTA}")


class Unreadable:
    """Completes texts with what no frame can carry, and with what no reader of frames understands."""

    name = "unreadable"

    def complete(self, prompts: Sequence[str], *, max_tokens: int, stop: Sequence[str] = ()) -> list[Any]:
        del max_tokens, stop
        if "object" in prompts[0]:
            return [np.array([object()])]
        return [{"$array": ["nonsense", [1]]}] if "array" in prompts[0] else ["read"]

    async def acomplete(self, prompts: Sequence[str], *, max_tokens: int, stop: Sequence[str] = ()) -> list[Any]:
        return self.complete(prompts, max_tokens=max_tokens, stop=stop)


class Sleeper:
    """Completes texts awaited alone, and never; leaves a file when it starts, and another when it is cancelled."""

    name = "sleeper"

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def complete(self, prompts: Sequence[str], *, max_tokens: int, stop: Sequence[str] = ()) -> list[str]:
        del max_tokens, stop
        return ["awake" for _ in prompts]

    async def acomplete(self, prompts: Sequence[str], *, max_tokens: int, stop: Sequence[str] = ()) -> list[str]:
        (self.folder / "begun").touch()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            (self.folder / "cancelled").touch()
            raise
        return self.complete(prompts, max_tokens=max_tokens, stop=stop)


def busy_inside() -> Any:
    return BusyInsideChat()


def local() -> Any:
    """A Hugging Face model with random weights, the same each time."""
    from langchain_dpicl.backends.hf.backend import HuggingFaceBackend
    from tests import tiny_hf

    return HuggingFaceBackend(tiny_hf.llama(), tiny_hf.byte_tokenizer(), max_prompt_tokens=64, max_new_tokens=8)


class PickyEmbeddings(DeterministicFakeEmbedding):
    """Embeds what does not raise."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        if "raises" in texts:
            raise ValueError(str(texts))
        return super().embed_documents(texts)


def embeddings(size: int) -> PickyEmbeddings:
    return PickyEmbeddings(size=size)


def decisions() -> Any:
    from tests.unit_tests.backends.langchain.test_decisions import ScriptedDecisions, telling

    return ScriptedDecisions(answer=telling({"red": {"red": 0.75, "blue": 0.25}, "sea": {"red": 0.25, "blue": 0.75}}))


def text_only() -> ScriptedChat:
    return chat(payload=lambda _: None)
