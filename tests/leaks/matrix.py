"""Runs cells and judges them. Channels watch; rooms and the naive component are called."""

from __future__ import annotations

import asyncio
import functools
import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from langchain_core.runnables import Runnable

from langchain_dpicl.exceptions import DPICLError, UnsilencableModelError
from langchain_dpicl.privacy import accounting
from tests.canary import RECORD, VOTE, canaries_in
from tests.leaks.channels import CHANNELS, Channel
from tests.leaks.models import CALLS
from tests.leaks.naive import naive_voter
from tests.leaks.rooms import ROOMS, Room
from tests.leaks.scene import Scene, entries_of, settle

CLEAN = "-"
REFUSED = "x"
IDLE = "idle"
BROKEN = "broken"

_price = functools.cache(accounting.epsilon_bound)
# Of public numbers: it is the same in every run, and takes longer than the rest of most of them.


@dataclass(frozen=True)
class Verdict:
    """What a run showed."""

    mark: str
    note: str = ""


@dataclass(frozen=True)
class Cell:
    """One square of the table."""

    channel: str
    entry: str
    naive: Verdict | None = None
    ours: dict[str, Verdict] = field(default_factory=dict)
    needs: str = ""
    reason: str = ""

    @property
    def shown(self) -> str:
        """The cell as text: naive / ours."""
        return "n/a" if self.naive is None else f"{self.naive.mark}/{self.worst}"

    @property
    def worst(self) -> str:
        """The least good of our rooms' marks."""
        marks = [verdict.mark for verdict in self.ours.values()]
        bad = [mark for mark in marks if mark not in {CLEAN, REFUSED}]
        return bad[0] if bad else REFUSED if REFUSED in marks else CLEAN if marks else IDLE

    @property
    def fault(self) -> str:
        """What is wrong with the cell, or ""."""
        if self.naive is None:
            return "" if self.reason else "no reason"
        if not set(self.needs) <= set(self.naive.mark):
            return f"vacuous: naive shows {self.naive.mark} {self.naive.note}, expected {self.needs}"
        wrong = {name: v for name, v in self.ours.items() if v.mark not in {CLEAN, REFUSED}}
        if wrong:
            return "ours: " + ", ".join(f"{name} {v.mark} {v.note}".strip() for name, v in wrong.items())
        return "" if self.ours else "no room of ours ran"


def run_cell(channel: Channel, entry: str, rooms: Sequence[Room] = ROOMS) -> Cell:
    """Runs the naive component and every room of ours that has the entry point, each under a fresh observer."""
    reason = channel.unless(entry)
    if reason:
        return Cell(channel.name, entry, reason=reason)
    naive = run_once(channel, entry, None)
    ours = {room.name: run_once(channel, entry, room) for room in rooms if entry in room.entries}
    found = {name: verdict for name, verdict in ours.items() if verdict is not None}
    return Cell(channel.name, entry, naive, found, channel.needs)


def run_once(channel: Channel, entry: str, room: Room | None) -> Verdict | None:
    """Runs one component once; None: the channel's models are of no use to the room."""
    scene = Scene(entry, is_naive=room is None)
    CALLS.clear()
    with patch.object(accounting, "epsilon_bound", _price), channel.watch(scene):
        if room is not None and room.needs not in {"", *scene.offers}:
            return None
        _perform(scene, room)
    gc.collect(0)  # what a destructor would say is said in its own cell
    verdict = _verdict(scene, fails=channel.fails)
    if channel.may_abstain and verdict == Verdict(IDLE):
        return Verdict(REFUSED, "the rows abstain: no call is made")
    may_refuse = channel.may_refuse and (room is None or room.may_refuse)
    return Verdict(IDLE, verdict.note) if verdict.mark == REFUSED and not may_refuse else verdict


def _perform(scene: Scene, room: Room | None) -> None:
    try:
        component = _component(scene, room)
        scene.before_call()
        scene.drive(scene, component)
    except BaseException as error:  # a stop is one of the channels
        scene.error = error
    settle()


def _component(scene: Scene, room: Room | None) -> Runnable[Any, Any]:
    if room is not None:
        return room.build(scene)
    component = naive_voter(scene.model(), own_config=scene.own_config, ask=scene.ask)
    scene.objects.append(component)
    return component


def _verdict(scene: Scene, *, fails: bool) -> Verdict:
    found = canaries_in("\n".join(scene.texts))
    note = _note(scene.error)
    if found:
        return Verdict(("R" if RECORD in found else "") + ("V" if VOTE in found else ""), note)
    if "private" not in CALLS:
        return Verdict(REFUSED if isinstance(scene.error, UnsilencableModelError) else IDLE, note)
    wanted = (DPICLError, KeyboardInterrupt, asyncio.CancelledError) if fails else ()
    is_whole = scene.error is None or scene.is_naive or isinstance(scene.error, wanted)
    return Verdict(CLEAN if is_whole else BROKEN, note)


def _note(error: BaseException | None) -> str:
    """What is shown of an exception: its type, and the message of ours."""
    if error is None:
        return ""
    return f"{type(error).__name__}: {error}" if isinstance(error, DPICLError) else type(error).__name__


def run(groups: Iterable[str], half: int | None = None) -> list[Cell]:
    """Runs the cells of some groups, or one half of them."""
    wanted = set(groups)
    rows = [(row, channel) for row, channel in enumerate(CHANNELS) if channel.group in wanted]
    return [run_cell(channel, entry) for row, channel in rows for entry in entries_of(row, half)]
