"""Runs every observability package that people switch on beside LangChain, prints what it saw, and fails on a leak.

Each observer has a process of its own, and each package an environment of its own, made here from the dependency group
`observers`: their requirements exclude each other. An environment has the packages that this one lacks, and is kept for
the next run. A package that cannot be installed or started is shown as "not run".
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.check_leaks import environment, name_of  # noqa: E402
from tests.leaks.observers.listed import OBSERVERS  # noqa: E402
from tests.leaks.observers.registry import Observer  # noqa: E402
from tests.leaks.observers.words import NO_PROOF, Row, faults, text, word  # noqa: E402
from tests.leaks.table import cell_from  # noqa: E402

FOLDER = ROOT / ".venv-leaks-observers"
OUT = ROOT / "out" / "leaks-observers.txt"
WORKERS = os.cpu_count() or 2
LONGEST = 3_600  # a guard against hanging
CLIENTS = ("langchain-openai", "langchain-anthropic")
"""Asked for beside each package, so that what it pins is taken back to a version that goes with them."""


def requirements(one: Observer) -> list[str]:
    """What an observer's environment is asked for, as the groups of pyproject.toml spell it."""
    asked = {name_of(line): line for group in ("test", "observers") for line in groups()[group]}
    return [asked[name] for name in (*one.needs, *CLIENTS)]


def groups() -> dict[str, list[str]]:
    """Returns the dependency groups of pyproject.toml."""
    found: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    return found


def python_of(one: Observer) -> Path | str:
    """Returns the interpreter of an observer's environment, which is made unless it is there; or why there is none."""
    try:
        return environment(FOLDER / one.needs[0], requirements(one))
    except (SystemExit, subprocess.TimeoutExpired) as error:
        return f"not installed: {_last_line(str(error))}"


def observe(one: Observer, python: Path) -> Row:
    """Runs an observer in a process of its own, with an empty home and none of this process's variables."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        given = {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "PYTHONPATH": str(ROOT), **one.environment}
        command = [str(python), "-m", "tests.leaks.observers", "--out", str(out), one.name]
        try:
            done = subprocess.run(
                command, cwd=folder, env=given, capture_output=True, text=True, check=False, timeout=LONGEST
            )
        except subprocess.TimeoutExpired:
            return Row(one.name, trouble=f"no end within {LONGEST} s")
        if done.returncode or not out.exists():
            return Row(one.name, trouble=_last_line(done.stderr) or f"exit status {done.returncode}")
        found = json.loads(out.read_text())
        return Row(one.name, found["versions"], [cell_from(cell) for cell in found["cells"]])


def _last_line(said: str) -> str:
    """The last line that names an error, or the last."""
    lines = said.strip().splitlines() or [""]
    return next((line for line in reversed(lines) if "error" in line.lower()), lines[-1]).strip()[:200]


def run_all(asked: Sequence[Observer]) -> list[Row]:
    """Makes the environments, then runs the observers, some at a time."""
    first = {one.needs[0]: one for one in asked}
    with ThreadPoolExecutor(WORKERS) as pool:
        pythons = dict(zip(first, pool.map(python_of, first.values()), strict=True))

        def row(one: Observer) -> Row:
            python = pythons[one.needs[0]]
            return observe(one, python) if isinstance(python, Path) else Row(one.name, trouble=python)

        return list(pool.map(row, asked))


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs observability packages beside private calls.")
    parser.add_argument("--only", default="", help="run the observers whose name contains this")
    asked = parser.parse_args().only
    started = time.monotonic()
    rows = run_all([one for one in OBSERVERS if asked in one.name])
    table, wrong = text(rows), faults(rows)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(f"{table}\n")
    words = [word(cell) for row in rows for cell in row.cells]
    missing = sum(bool(row.trouble) for row in rows)
    print(f"{table}\n\n{len(rows)} observers, {len(words)} cells, {time.monotonic() - started:.0f} s.", end=" ")
    print(f"{words.count(NO_PROOF)} cells prove nothing, {missing} observers did not run.", end=" ")
    print(f"Written to {os.path.relpath(OUT, ROOT)}")
    print("\n".join(["", *wrong]) if wrong else "No leak.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
