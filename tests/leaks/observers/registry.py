"""The list of observers, and how one is run: the naive chain first, then ours, each followed by a public marker call."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import requests
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult

from tests.leaks.channels.registry import Channel, everywhere
from tests.leaks.channels.stock import anthropic_models, openai_models
from tests.leaks.matrix import CLEAN, REFUSED, Cell, Verdict, run_once
from tests.leaks.rooms import ROOMS, Room
from tests.leaks.scene import Scene, wait_for
from tests.leaks.sink import provider

ENTRIES = ("invoke", "abatch")
"""One entry point that blocks, one that awaits; both voters have them."""

VOTERS = tuple(room for room in ROOMS if room.name in {"voting", "voting by text"})

BLIND = "blind"
"""Mark of a run after which the observer records nothing of a public call: that run proves nothing."""

UNNAMED = "unnamed"
"""Mark of a refusal that does not name the observer."""

MARKER = "zx-marker-public"
"""Stands in the prompt and in the address of the public call."""

PATIENCE = 60.0
"""Seconds that an observer has to deliver a marker call."""

QUIET = 1.0
"""Seconds without anything new after which all is taken to be delivered: exporters with threads keep no order."""

LONGEST_QUIET = 10.0
"""Seconds after which an observer that is never quiet is not waited for."""


def nothing() -> None:
    """What an observer does to deliver, where it delivers at once."""


def as_it_is(scene: Scene) -> None:
    """What an observer needs of a scene, where it watches all clients of the process."""


Models = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class Eyes:
    """A running observer."""

    lines: Callable[[], Sequence[str]]
    flush: Callable[[], object] = nothing
    arrange: Callable[[Scene], None] = as_it_is


class PostingChat(BaseChatModel):
    """A model of a user's own, which posts to its provider by `requests` and so by `urllib3`."""

    address: str

    @property
    def _llm_type(self) -> str:
        return "posting"

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        body = {"model": "m", "messages": [{"role": "user", "content": messages[-1].text}]}
        answer = requests.post(f"{self.address}/v1/chat/completions", json=body, timeout=300)
        answer.raise_for_status()
        said = answer.json()["choices"][0]["message"]["content"]
        return ChatResult(generations=[ChatGeneration(message=AIMessage(said))])


@functools.cache
def requests_models(address: str) -> Models:
    """One `PostingChat` for an address; it is asked for texts."""
    return {"text": functools.cache(lambda: PostingChat(address=address))}


CASES: dict[str, Callable[[str], Models]] = {
    "OpenAI": openai_models,
    "OpenAI fails": openai_models,
    "Anthropic": anthropic_models,
    "requests": requests_models,
    "requests fails": requests_models,
}
"""Factories of the models that are watched, from the address of a provider, by column of the table."""

MODES = {"OpenAI fails": "fails", "requests fails": "fails"}
"""What the provider does with private prompts, where it does not answer them."""


@dataclass(frozen=True)
class Observer:
    """One row of the table."""

    name: str
    needs: tuple[str, ...]
    start: Callable[[], Eyes]
    called: tuple[str, ...]
    cases: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


OBSERVERS: list[Observer] = []


def observer(
    name: str,
    *needs: str,
    called: Sequence[str],
    cases: Sequence[str] = ("OpenAI", "OpenAI fails", "Anthropic"),
    environment: Mapping[str, str] | None = None,
) -> Callable[[Callable[[], Eyes]], Callable[[], Eyes]]:
    """Adds a row to the table."""

    def add(start: Callable[[], Eyes]) -> Callable[[], Eyes]:
        OBSERVERS.append(Observer(name, needs, start, tuple(called), tuple(cases), environment or {}))
        return start

    return add


def run_observer(one: Observer) -> list[Cell]:
    """Starts an observer in this process and runs its cells."""
    eyes = one.start()
    return [run_case(eyes, one, case, entry) for case in one.cases for entry in ENTRIES]


def run_case(eyes: Eyes, one: Observer, case: str, entry: str, rooms: Sequence[Room] = VOTERS) -> Cell:
    """Runs the naive chain and every voter that can use the models."""
    watch = _Watch(eyes, case)
    fails = MODES.get(case) == "fails"
    channel = Channel(case, watch, needs="", group="observers", unless=everywhere, fails=fails, may_refuse=True)
    naive = watch.judged(run_once(channel, entry, None))
    ours = {room.name: watch.judged(run_once(channel, entry, room)) for room in rooms}
    found = {name: named(verdict, one.called) for name, verdict in ours.items() if verdict is not None}
    return Cell(case, entry, naive, found)


def named(verdict: Verdict, called: Sequence[str]) -> Verdict:
    """Returns the verdict; a refusal that does not name the observer counts as none."""
    is_bare = verdict.mark == REFUSED and not any(name in verdict.note for name in called)
    return replace(verdict, mark=UNNAMED) if is_bare else verdict


class _Watch:
    """Watches one run after the other, and keeps whether the observer recorded the marker calls after the last one."""

    def __init__(self, eyes: Eyes, case: str) -> None:
        self._eyes, self._case = eyes, case
        self._is_heard, self._count = False, 0

    @contextmanager
    def __call__(self, scene: Scene) -> Iterator[None]:
        models, before = CASES[self._case], len(self._eyes.lines())
        scene.models = models(provider(MODES.get(self._case, "observed"))[0])
        self._eyes.arrange(scene)
        self._is_heard, self._count = False, 0
        yield
        # On a busy machine a second call takes longer too, and gives exporters time that seconds do not.
        self._is_heard = all(self._hears(scene) for _ in range(2))
        if self._is_heard:
            _wait_for_quiet(self._eyes)
        seen = self._eyes.lines()[before:]
        self._count = len(seen)
        scene.saw(*seen)

    def _hears(self, scene: Scene) -> bool:
        """Whether a public call is recorded."""
        marker = f"{MARKER}-{time.monotonic_ns()}"
        scene.models = CASES[self._case](provider(marker)[0])  # in the address as well, for observers that see no more
        _ask(scene, marker)
        return _delivered(self._eyes, marker)

    def judged(self, verdict: Verdict | None) -> Verdict | None:
        """Returns the verdict on the last run, or that it proves nothing."""
        if verdict is None or verdict.mark not in {CLEAN, REFUSED}:
            return verdict
        if not self._is_heard:
            return Verdict(BLIND, "a public call after it is not recorded")
        return verdict if verdict.mark == REFUSED else Verdict(verdict.mark, f"{self._count} records")


def _ask(scene: Scene, marker: str) -> None:
    """Asks a model in the open, so that the observer has something to record."""
    if scene.is_async:
        wait_for(scene.model().ainvoke(marker, scene.chain_config))
    else:
        scene.model().invoke(marker, scene.chain_config)


def _delivered(eyes: Eyes, marker: str) -> bool:
    """Whether the observer records the marker."""
    end = time.monotonic() + PATIENCE
    while not any(marker in line for line in [*eyes.lines()][-200:]):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
        eyes.flush()
    return True


def _wait_for_quiet(eyes: Eyes) -> None:
    """Waits until the observer has delivered nothing more for a while."""
    count, quiet_since = -1, time.monotonic()
    end = quiet_since + LONGEST_QUIET
    while time.monotonic() < min(quiet_since + QUIET, end):
        eyes.flush()
        if len(eyes.lines()) != count:
            count, quiet_since = len(eyes.lines()), time.monotonic()
        time.sleep(0.1)
