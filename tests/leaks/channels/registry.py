"""The list of channels and how one is written: a generator that sets an observer up, yields, and says what it saw."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from tests.leaks.scene import Scene

GROUPS = ("plain", "sdk", "telemetry", "sentry")
"""Channels that belong together: "plain" needs LangChain alone, "sdk" the stock clients; the other two change global
state for good, and so need a process of their own."""


@dataclass(frozen=True)
class Channel:
    """One way out."""

    name: str
    watch: Callable[[Scene], AbstractContextManager[None]]
    needs: str
    group: str
    unless: Callable[[str], str]
    fails: bool = False
    may_refuse: bool = False
    may_abstain: bool = False


CHANNELS: list[Channel] = []


def everywhere(entry: str) -> str:
    """The channel exists for every entry point."""
    return ""


def channel(
    name: str,
    *,
    needs: str = "RV",
    group: str = "plain",
    unless: Callable[[str], str] = everywhere,
    fails: bool = False,
    may_refuse: bool = False,
    may_abstain: bool = False,
) -> Callable[[Callable[[Scene], Iterator[None]]], Callable[[Scene], Iterator[None]]]:
    """Adds a row to the table."""

    def add(watch: Callable[[Scene], Iterator[None]]) -> Callable[[Scene], Iterator[None]]:
        switches = {"fails": fails, "may_refuse": may_refuse, "may_abstain": may_abstain}
        CHANNELS.append(Channel(name, contextmanager(watch), needs, group, unless, **switches))
        return watch

    return add
