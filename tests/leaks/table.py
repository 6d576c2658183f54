"""Puts cells of several langchain-core versions into one table and says what is wrong with it. Runs nothing."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.leaks.matrix import REFUSED, Cell, Verdict
from tests.leaks.scene import ENTRIES, entries_of

FEWEST_CHANNELS = 22
WIDTH = 150
SHORT = {"invoke": "inv", "ainvoke": "ainv", "batch": "bat", "abatch": "abat", "stream": "str", "astream": "astr"}

LEGEND = """\
naive/ours: what shows there of the component as people write it, and of ours.
R record text   V raw votes   - nothing   x refused with an error of ours before any private call   n/a see below
Empty where only another version ran the cell."""


@dataclass(frozen=True)
class Column:
    """The cells of one langchain-core version."""

    core: str
    cells: Mapping[tuple[str, str], Cell]
    half: int | None = None

    @property
    def channels(self) -> list[str]:
        """Names of the channels that exist here for some entry point."""
        return list(dict.fromkeys(name for (name, _), cell in self.cells.items() if cell.naive is not None))


def cell_from(data: Mapping[str, Any]) -> Cell:
    """Reads a cell that was written as JSON."""
    naive = Verdict(**data["naive"]) if data["naive"] else None
    return Cell(**{**data, "naive": naive, "ours": {name: Verdict(**v) for name, v in data["ours"].items()}})


def column(core: str, cells: Sequence[Cell], half: int | None = None) -> Column:
    """Returns a version's column."""
    return Column(core, {(cell.channel, cell.entry): cell for cell in cells}, half)


def faults(columns: Sequence[Column], *, expected: Sequence[str], is_half_enough: bool = False) -> list[str]:
    """Returns what is wrong: leaks, cells that prove nothing, cells and channels that are missing."""
    found = []
    for one in columns:
        for row, name in enumerate(expected):
            for entry in entries_of(row, one.half):
                cell = one.cells.get((name, entry))
                fault = "did not run" if cell is None else cell.fault
                if fault:
                    found.append(f"{one.core}, {name}, {entry}: {fault}")
        if len(one.channels) < FEWEST_CHANNELS:
            found.append(f"{one.core}: expected at least {FEWEST_CHANNELS} channels, found {len(one.channels)}")
    left_out = [] if is_half_enough else _halves_left_out(columns)
    found += [f"half {half} of the cells: no version ran it" for half in left_out]
    return found or ([] if columns else ["expected at least one version, found none"])


def _halves_left_out(columns: Sequence[Column]) -> set[int]:
    halves = {one.half for one in columns}
    return set() if None in halves or not halves else {0, 1} - halves


def text(columns: Sequence[Column], names: Sequence[str]) -> str:
    """The table for a terminal."""
    most = max(map(len, names))
    size = 1 + max(len(shown) for one in columns for shown in [*SHORT.values(), *(c.shown for c in one.cells.values())])
    block = size * len(ENTRIES)
    heads = "".join(f"| {'langchain-core ' + one.core:{block}}" for one in columns)
    entries = ("| " + "".join(f"{SHORT[entry]:{size}}" for entry in ENTRIES)) * len(columns)
    lines = [
        f"{'':{most}} {heads}",
        f"{'channel':{most}} {entries}",
        "-" * (most + 1) + ("+-" + "-" * block) * len(columns),
    ]
    for name in names:
        blocks = ("| " + "".join(f"{_shown(one, name, entry):{size}}" for entry in ENTRIES) for one in columns)
        lines.append(f"{name:{most}} {''.join(blocks)}")
    said = [part for note in notes(columns) for part in textwrap.wrap(note, WIDTH, subsequent_indent="    ")]
    return "\n".join(line.rstrip() for line in [*lines, "", *LEGEND.splitlines(), "", *said])


def markdown(columns: Sequence[Column], names: Sequence[str]) -> str:
    """The table as a page."""
    heads = [f"{one.core} {entry}" for one in columns for entry in ENTRIES]
    rows = [[name, *(_shown(one, name, entry) for one in columns for entry in ENTRIES)] for name in names]
    table = [["channel", *heads], ["---", *[":-:"] * len(heads)], *rows]
    lines = ["# Leak matrix", "", *LEGEND.splitlines(), "", *("| " + " | ".join(row) + " |" for row in table)]
    said = [f"-{note[1:]}" if note.startswith(" ") else f"\n{note}\n" for note in notes(columns)]
    return "\n".join([*lines, *said]) + "\n"


def notes(columns: Sequence[Column]) -> list[str]:
    """What was refused with which words, and why channels do not exist."""
    refused = _told(columns, lambda cell: [verdict.note for verdict in cell.ours.values() if verdict.mark == REFUSED])
    missing = _told(columns, lambda cell: [cell.reason] if cell.reason else [])
    return ["Refused, with these words:", *refused, "Not applicable:", *missing]


def _told(columns: Sequence[Column], tell: Callable[[Cell], list[str]]) -> list[str]:
    """The distinct notes of each channel."""
    cells = [cell for one in columns for cell in one.cells.values()]
    return list(dict.fromkeys(f"  {cell.channel}: {note}" for cell in cells for note in tell(cell)))


def _shown(one: Column, name: str, entry: str) -> str:
    cell = one.cells.get((name, entry))
    return "" if cell is None else cell.shown
