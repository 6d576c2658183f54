"""Turns the cells of observers into words, a table and a list of faults. Runs nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.leaks.matrix import CLEAN, REFUSED, Cell

NOT_RUN = "not run"
NO_PROOF = "no proof"
NOTHING = "nothing seen"
LEGEND = """\
naive / ours: the canaries that the observer got of the naive chain (R record, V vote, - none), and what it got of ours.
LEAKED       a canary of ours, whatever the naive chain showed
nothing seen a private call was made, the naive chain leaked, and nothing of ours showed
refused      UnsilencableModelError that names the package, before any private call; the naive chain leaked
no proof     the naive chain showed nothing, so that nothing follows about ours
After every run a public call has to reach the observer: otherwise that run proves nothing."""


@dataclass(frozen=True)
class Row:
    """What an observer's process found."""

    observer: str
    versions: Mapping[str, str] = field(default_factory=dict)
    cells: Sequence[Cell] = ()
    trouble: str = ""


def word(cell: Cell) -> str:
    """Returns what a cell shows. "nothing seen" and "refused" need a naive chain that leaked and was still watched."""
    leaked = {canary for verdict in cell.ours.values() for canary in _canaries(verdict.mark)}
    if leaked:
        return f"LEAKED {''.join(sorted(leaked))}"
    if cell.naive is None or not _canaries(cell.naive.mark):
        return NO_PROOF
    unclear = [f"{v.mark} ({name})" for name, v in cell.ours.items() if v.mark not in {CLEAN, REFUSED}]
    if unclear or not cell.ours:
        return f"unclear: {', '.join(unclear) or 'no voter ran'}"
    return "refused" if any(verdict.mark == REFUSED for verdict in cell.ours.values()) else NOTHING


def shown(cell: Cell) -> str:
    """The cell as text: naive / ours."""
    return f"{cell.naive.mark if cell.naive else '-'} / {word(cell)}"


def faults(rows: Sequence[Row]) -> list[str]:
    """Returns what is wrong: leaks, runs of ours that are neither silent nor refused, and a table that proves nothing."""
    found, proofs = [], 0
    for row in rows:
        for cell in row.cells:
            said = word(cell)
            proofs += said in {NOTHING, "refused"}
            if said.startswith(("LEAKED", "unclear")):
                notes = sorted({f"{name}: {v.note}" for name, v in cell.ours.items() if v.note})
                found.append(f"{row.observer}, {cell.channel}, {cell.entry}: {said} {'; '.join(notes)}".rstrip())
    return found or ([] if proofs else ["expected at least one cell that proves something, found none"])


def text(rows: Sequence[Row]) -> str:
    """The table for a terminal and for a file."""
    entries = list(dict.fromkeys(cell.entry for row in rows for cell in row.cells))
    table = [["observer", "model", *entries]]
    for row in rows:
        table += _lines(row, entries)
    sizes = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    lines = ["  ".join(part.ljust(size) for part, size in zip(line, sizes, strict=True)).rstrip() for line in table]
    parts = {"Versions": _versions(rows), "No proof, refused, not run": _reasons(rows)}
    notes = [line for title, found in parts.items() if found for line in ("", f"{title}:", *found)]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:], "", LEGEND, *notes])


def _lines(row: Row, entries: Sequence[str]) -> list[list[str]]:
    if row.trouble:
        return [[row.observer, NOT_RUN, *("" for _ in entries)]]
    by_place = {(cell.channel, cell.entry): shown(cell) for cell in row.cells}
    models = dict.fromkeys(cell.channel for cell in row.cells)
    return [
        ["" if number else row.observer, model, *(by_place.get((model, entry), "") for entry in entries)]
        for number, model in enumerate(models)
    ]


def _versions(rows: Sequence[Row]) -> list[str]:
    return [
        f"  {row.observer}: {', '.join(f'{name} {version}' for name, version in row.versions.items())}"
        for row in rows
        if row.versions
    ]


def _reasons(rows: Sequence[Row]) -> list[str]:
    """How refusals are worded, without the advice; what the naive chain showed without a proof; what went wrong."""
    told: dict[str, None] = {}
    for row in rows:
        if row.trouble:
            told[f"  {row.observer}: {row.trouble}"] = None
        for cell in row.cells:
            place = f"  {row.observer}, {cell.channel}"
            if word(cell) == NO_PROOF and cell.naive is not None:
                told[f"{place}: no proof, naive: {cell.naive.note or cell.naive.mark}"] = None
            for verdict in cell.ours.values():
                if verdict.mark == REFUSED:
                    told[f"{place}: {verdict.note.partition(' and would see')[0]}"] = None
    return [*told]


def _canaries(mark: str) -> set[str]:
    """The canaries that a mark names."""
    return set(mark) if set(mark) <= {"R", "V"} else set()
