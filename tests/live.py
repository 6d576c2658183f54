"""What the tests of live providers share: servers, models, records, and a count of private calls. All text is invented."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from langchain_core.prompts import PromptTemplate

from langchain_dpicl import Rows
from langchain_dpicl.backends.private_calls import http_client
from langchain_dpicl.backends.private_calls.call import Reply, Request, SilentModel
from langchain_dpicl.privacy.private_examples import PrivateExamples
from tests.canary import RECORD
from tests.llama_server import MODEL, RunningServer, running_server
from tests.loopback_provider import Provider, provider

LABELS = ("card", "transfer")
PUBLIC = "text: my card was declined\nqueue: card\n\ntext: the transfer is pending\nqueue: transfer"
GENERATION: dict[str, Any] = {
    "example_prompt": PromptTemplate.from_template("text: {text}"),
    "suffix": "text: {input}",
    "epsilon": 4.0,
    "instruction": "Questions of bank customers.",
    "shots_per_label": 1,
    "rows": Rows(slots=4, shots=2),
    "max_tokens": 3,
}


def give_up_soon(monkeypatch: pytest.MonkeyPatch, served: Provider) -> None:
    """Private calls wait 0.3 seconds for an answer that the provider holds back; other waits stay as they are."""
    prepare = http_client._prepare

    def hasty(limits: Any, client: Any, request: Any) -> None:
        prepare(limits, client, request)
        if served.would_be_late(request.content):
            request.extensions["timeout"]["read"] = 0.3

    monkeypatch.setattr(http_client, "_prepare", hasty)


class Servers:
    """Servers of this machine, started when they are asked for."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._llama: RunningServer | None = None
        self._served: dict[str, Provider] = {}

    @property
    def llama(self) -> RunningServer:
        """A real llama.cpp server."""
        for needed in ("xllamacpp", "gguf"):
            pytest.importorskip(needed)
        if self._llama is None:
            self._llama = self._stack.enter_context(running_server())
        return self._llama

    def served(self, **options: Any) -> Provider:
        """A loopback provider with these manners, its requests and faults forgotten."""
        name = repr(sorted(options.items()))
        if name not in self._served:
            self._served[name] = self._stack.enter_context(provider(**options))
        self._served[name].clear()
        return self._served[name]


@contextmanager
def servers_of_this_machine() -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(stack)


def openai_model(kind: str, url: str, **options: Any) -> Any:
    """A stock client of an OpenAI endpoint: "ChatOpenAI" or "OpenAI"."""
    made = getattr(pytest.importorskip("langchain_openai"), kind)
    return made(base_url=url, api_key="none", **{"model": MODEL, "max_retries": 0, **options})


def decision_model(url: str, **options: Any) -> Any:
    made = pytest.importorskip("langchain_openai.decisions").OpenAIDecisions
    return made(model="gpt-6-luna", base_url=url, api_key="none", max_retries=0, **options)


def anthropic_model(root: str, **options: Any) -> Any:
    made = pytest.importorskip("langchain_anthropic").ChatAnthropic
    return made(base_url=root, api_key="none", **{"model": MODEL, "max_retries": 0, "max_tokens": 8, **options})


def records() -> PrivateExamples:
    """Records with the canary in each."""
    texts = [f"{RECORD} my card number {number} was declined ?" for number in range(16)]
    return PrivateExamples([{"text": text} for text in texts], public_size=len(texts))


def labelled(text: str, *, label: str = "card") -> str:
    """A prompt that asks for the label of a text, after two public examples."""
    return f"{PUBLIC.replace('queue: card', f'queue: {label}')}\n\ntext: {text}\nqueue:"


class PrivateCalls:
    """Counts the private calls of one kind of engine, and those of them that brought no answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = self.failed = self.awaited = 0
        ask, aask = SilentModel.ask, SilentModel.aask

        def counted(model: SilentModel, request: Request, **options: Any) -> Reply:
            return self._note(request, ask(model, request, **options))

        async def acounted(model: SilentModel, request: Request, **options: Any) -> Reply:
            self.awaited += not request.explain
            return self._note(request, await aask(model, request, **options))

        monkeypatch.setattr(SilentModel, "ask", counted)
        monkeypatch.setattr(SilentModel, "aask", acounted)

    def _note(self, request: Request, reply: Reply) -> Reply:
        if not request.explain:
            self.made += 1
            self.failed += reply.answer is None or reply.fault is not None
        return reply


Model = Callable[[Servers], Any]
