"""Runs the leak matrix on the lowest and the newest langchain-core, prints it, and fails on a leak or an empty proof.

Lowest: the floors of pyproject.toml and what goes with them, in an environment made here that has all the rest from this
one. Newest: what this environment has, and the newest release laid over it where pip would not take it. Both are kept for
the next run.

With --ends each of the two runs half of the cells, and the installed release none where there is a newer one: every
channel on both, every cell on one of them. With --lowest the lowest alone runs half of the cells: every channel. The
suite runs a sample on the installed one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.leaks.channels import CHANNELS  # noqa: E402
from tests.leaks.matrix import Cell  # noqa: E402
from tests.leaks.table import Column, cell_from, column, faults, markdown, text  # noqa: E402

LOWEST = ROOT / ".venv-leaks-lowest"
NEWEST = ROOT / ".venv-leaks-newest"
LOCK = ROOT / "tests" / "constraints.txt"
TORCH = ROOT / "tests" / "torch.txt"
OUT = ROOT / "out" / "leaks.md"

PROCESSES = (("plain",), ("sdk", "telemetry"), ("sentry",))
"""Groups of channels that can share a process."""

FLOORS = ("langchain-core", "openai", "langchain-openai", "langchain-anthropic")
"""Installed at their floor in the lowest environment; pip picks what fits them."""

OBSERVERS = re.compile(r"^(langchain-|openai|langgraph|sentry-sdk|openinference-|opentelemetry-)")
IMPORTS = """
import langchain_core, langchain_openai, langchain_anthropic, langgraph.graph, langchain_dpicl
from importlib.metadata import version
print(version("langchain-core"))
"""
PACKAGES = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
PIP = (sys.executable, "-m", "pip")
QUICKLY = ("-q", "--disable-pip-version-check", "--no-compile")
WORKERS = os.cpu_count() or 2
LONGEST = 3_600  # a guard against hanging; on a busy machine half of the cells take more than ten minutes
A_DAY = 86_400


@dataclass(frozen=True)
class Core:
    """A langchain-core to run on.

    Attributes:
      python: the interpreter.
      overlay: a folder whose packages go before the interpreter's own; None: none.
    """

    python: Path
    overlay: Path | None = None


def run(*command: str | Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a command in the checkout; what it says is shown only when it matters."""
    first = [str(path)] if path else []
    return subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        # What pip leaves uncompiled is compiled where it is imported, and kept.
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*first, str(ROOT)]), "PYTHONDONTWRITEBYTECODE": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=LONGEST,
    )


def must(done: subprocess.CompletedProcess[str]) -> str:
    """Returns what a command said, or ends with it."""
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, done.args))}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def requirements() -> list[str]:
    """What the lowest environment has of its own: clients and observers, the named ones at their floors."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = [*project["project"]["dependencies"], *project["dependency-groups"]["test"]]
    wanted = [one for one in asked if OBSERVERS.match(one)]
    return [re.sub(r">=([\d.]+).*", r"==\1", one) if name_of(one) in FLOORS else one for one in wanted]


def name_of(requirement: str) -> str:
    """Returns the package that a requirement names."""
    return re.split(r"[<>=\[ ]", requirement)[0]


def lowest() -> Core:
    """Makes the environment of the floors, unless it is there."""
    return Core(environment(LOWEST, requirements()))


def environment(folder: Path, wanted: Sequence[str]) -> Path:
    """Makes an environment that has what is wanted of its own and the rest from this one, unless it is there.

    Returns:
      Its interpreter.
    """
    python, stamp = folder / "bin" / "python", folder / "made-of"
    contents = [(ROOT / "pyproject.toml").read_text(), LOCK.read_text(), sys.version, str(ROOT), *PACKAGES]
    made_of = hashlib.sha256("\n".join([*contents, *wanted]).encode()).hexdigest()
    if not stamp.exists() or stamp.read_text() != made_of:
        must(run(sys.executable, "-m", "venv", "--clear", "--without-pip", folder))
        own = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        (own / "others.pth").write_text("\n".join(PACKAGES))  # they come after its own, and pip leaves them alone
        must(run(*PIP, "--python", python, "install", *QUICKLY, "-c", TORCH, *wanted))
        stamp.write_text(made_of)
    return python


def newest() -> tuple[list[Core], str]:
    """Returns this environment's core and, where it is newer, the newest release over it; or why that does not work."""
    here, over = Core(Path(sys.executable)), Core(Path(sys.executable), NEWEST)
    trouble = _fetch_newest()
    if trouble:
        return [here], trouble
    tried = run(over.python, "-c", IMPORTS, path=NEWEST)
    if tried.returncode:
        return [here], f"the newest langchain-core cannot be imported here: {tried.stderr.strip()[-300:]}"
    return ([here] if tried.stdout.strip() == version("langchain-core") else [here, over]), ""


def _fetch_newest() -> str:
    """Lays the newest release into its folder, once a day; returns why there is none, or ""."""
    stamp = NEWEST / "made-at"
    if stamp.exists() and stamp.stat().st_mtime > time.time() - A_DAY:
        return ""
    fresh = NEWEST.with_name(f"{NEWEST.name}-fresh")
    shutil.rmtree(fresh, ignore_errors=True)
    done = run(*PIP, "install", *QUICKLY, "--no-deps", "--target", fresh, "langchain-core")
    if done.returncode:
        return "" if stamp.exists() else f"the newest langchain-core could not be fetched: {done.stderr.strip()[-300:]}"
    shutil.rmtree(NEWEST, ignore_errors=True)
    fresh.rename(NEWEST)
    stamp.touch()
    return ""


def cells(core: Core, groups: tuple[str, ...], folder: Path, half: int | None) -> tuple[str, list[Cell]]:
    """Runs some groups on a core, or half of them, in a process of their own; returns the version and the cells."""
    out = folder / f"{abs(hash((core, groups)))}.json"
    part = () if half is None else ("--half", str(half))
    must(run(core.python, "-m", "tests.leaks", "--out", out, *part, *groups, path=core.overlay))
    found = json.loads(out.read_text())
    return found["core"], [cell_from(cell) for cell in found["cells"]]


def run_all(folder: Path, *, ends: bool, is_lowest_enough: bool) -> tuple[list[Column], str]:
    """Runs every group on every core, some at a time; the lowest environment is made meanwhile."""
    ends = ends or is_lowest_enough

    def start(core: Core, half: int) -> list[Future[tuple[str, list[Cell]]]]:
        return [pool.submit(cells, core, groups, folder, half if ends else None) for groups in PROCESSES]

    with ThreadPoolExecutor(WORKERS) as pool, ThreadPoolExecutor(1) as maker:
        making = maker.submit(lowest)
        cores, trouble = ([], "") if is_lowest_enough else newest()
        later = [start(core, 1) for core in (cores[-1:] if ends else cores)]
        parts = [start(making.result(), 0), *later]
        done = [[future.result() for future in futures] for futures in parts]
    halves = (0, 1)[: len(done)] if ends else [None] * len(done)
    found = zip(done, halves, strict=True)
    return [column(some[0][0], [c for _, part in some for c in part], half) for some, half in found], trouble


def main() -> int:
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        asked = sys.argv[1:]
        columns, trouble = run_all(Path(folder), ends="--ends" in asked, is_lowest_enough="--lowest" in asked)
    names = [one.name for one in CHANNELS]
    print(text(columns, names))
    if trouble:
        print(f"\nOnly the installed core counts as the newest: {trouble}")
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(markdown(columns, names))
    wrong = faults(columns, expected=names, is_half_enough="--lowest" in asked)
    found = [cell for one in columns for cell in one.cells.values()]
    runs = sum(1 + len(cell.ours) for cell in found if cell.naive is not None)
    print(
        f"\n{len(names)} channels, {runs} runs, {time.monotonic() - started:.0f} s. Written to {os.path.relpath(OUT, ROOT)}"
    )
    print("\n".join(["", *wrong]) if wrong else "No leak, no empty proof.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
