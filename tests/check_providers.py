"""Runs a private vote and a private text through LangChain's classes of providers, and prints a row for each.

Each class talks to a loopback server that speaks its format, in a process of its own and in an environment with its
package alone beside the tests' own: once with the newest release, once with the floor. Environments are made here and
kept for the next run. A class fails if it votes or writes otherwise than expected, if a record shows anywhere but in the
server's requests, if none arrives there, or if a redirect, a slow body or one without an end is not refused. With --write
the table of benchmarks/results/providers.md is written anew, from this run and the last of the others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.canary import RECORD  # noqa: E402
from tests.check_leaks import environment  # noqa: E402
from tests.hostile_provider import dripped_body, endless_chunks, hostile_provider, redirect  # noqa: E402
from tests.loopback_provider import Fault, provider  # noqa: E402
from tests.providers.listed import CASES, ENVIRONMENT, Case  # noqa: E402

PAGE = ROOT / "benchmarks" / "results" / "providers.md"
OUT = ROOT / "out" / "providers.json"
HOSTILE = {"a redirect": redirect(307), "a body without an end": endless_chunks, "a slow body": dripped_body}
"""Servers that no private call may follow, wait for or read to the end."""
START, END = "<!-- written by make providers ARGS=--write -->", "<!-- end of what make providers wrote -->"
WORKERS = os.cpu_count() or 2
LONGEST = 300


@dataclass(frozen=True)
class Run:
    """One class at one release: what it did, or why it was not run, and what is wrong with that."""

    name: str
    is_floor: bool
    found: Mapping[str, Any] = field(default_factory=dict)
    trouble: str = ""
    wrong: tuple[str, ...] = ()


def python_of(case: Case, *, is_floor: bool) -> Path | str:
    """Returns the interpreter of an environment, which is made unless it is there; or why there is none."""
    wanted = [f"{case.package}=={case.floor}" if is_floor else case.package, *case.needs]
    folder = ROOT / f".venv-providers-{case.package.removeprefix('langchain-')}{'-floor' if is_floor else ''}"
    try:
        return environment(folder, wanted)
    except (SystemExit, subprocess.TimeoutExpired) as error:
        return f"not installed: {_last_line(str(error))}"


def run_case(case: Case, python: Path | str, *, is_floor: bool) -> Run:
    """Runs a class in a process of its own, with an empty home and none of this process's variables."""
    if isinstance(python, str):
        return Run(case.name, is_floor, trouble=python)
    with (
        tempfile.TemporaryDirectory() as folder,
        provider(dialect=case.dialect) as served,
        contextlib.ExitStack() as running,
    ):
        served.script(lambda request: Fault(spoil=case.spoil))
        hostile = {name: running.enter_context(hostile_provider(manner)) for name, manner in HOSTILE.items()}
        out = Path(folder) / "found.json"
        given = {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "PYTHONPATH": str(ROOT), **ENVIRONMENT}
        roots = json.dumps({name: one.root for name, one in hostile.items()})
        command = [str(python), "-m", "tests.providers", "--url", served.root, "--hostile", roots, "--out", str(out)]
        try:
            done = subprocess.run(
                [*command, *(["--floor"] if is_floor else []), case.name],
                cwd=folder,
                env=given,
                capture_output=True,
                text=True,
                check=False,
                timeout=LONGEST,
            )
        except subprocess.TimeoutExpired:
            return Run(case.name, is_floor, trouble=f"no end within {LONGEST} s")
        if not out.exists():
            return Run(case.name, is_floor, trouble=_last_line(done.stderr) or f"exit status {done.returncode}")
        found = json.loads(out.read_text())
        num_private = sum(RECORD.encode() in request.raw for request in served.received)
        wrong = [*faults(case, found, num_private, f"{done.stdout}{done.stderr}", is_floor=is_floor)]
        if any(one.elsewhere.private() for one in hostile.values()):
            wrong.append("a private call followed a redirect")
        if found["votes"] != "refused" and not all(one.private() for one in hostile.values()):
            wrong.append("no private call arrived at a hostile server, so its limits prove nothing")
    return Run(case.name, is_floor, found, wrong=tuple(wrong))


def faults(case: Case, found: Mapping[str, Any], num_private: int, said: str, *, is_floor: bool) -> Iterable[str]:
    """Yields what is wrong with what a class did; `num_private`: requests with a record, one of them the control's."""
    votes, writes = case.expected(is_floor=is_floor)
    if found["votes"] != votes:
        yield f"expected it to vote by {votes}, found {found['votes']}: {' '.join(found['refusals'])}"
    if found["writes"] != writes:
        yield f"expected it to write by {writes or 'nothing'}, found {found['writes'] or 'nothing'}"
    if found["leaked"]:
        yield f"a record shows in {', '.join(found['leaked'])}"
    if found["unlimited"]:
        yield f"the answer of a hostile server counted: {'; '.join(found['unlimited'])}"
    if RECORD in said:
        yield "a record shows in what the process prints"
    if votes != "refused" and num_private < 2:
        yield "no private call arrived at the server"
    if case.is_in_readme and not is_floor and "epsilon left: 0 of 1" not in found["readme"]:
        yield "README's first program did not run to its end"
    if votes != "refused" and not found["control"]:
        yield "the usual call shows nowhere either, so the run proves nothing"


def _last_line(said: str) -> str:
    """Returns the last line that names an error, or the last."""
    lines = said.strip().splitlines() or [""]
    return next((line for line in reversed(lines) if "error" in line.lower()), lines[-1]).strip()[:300]


def run_all(asked: Sequence[Case]) -> list[Run]:
    """Makes the environments, one for each package and release, then runs the classes, some at a time."""
    places = {(case.package, is_floor): case for case in asked for is_floor in (False, True)}
    with ThreadPoolExecutor(WORKERS) as pool:
        made = pool.map(lambda place: python_of(places[place], is_floor=place[1]), places)
        pythons = dict(zip(places, made, strict=True))
        jobs = [(case, is_floor) for case in asked for is_floor in (False, True)]
        return list(pool.map(lambda job: run_case(job[0], pythons[job[0].package, job[1]], is_floor=job[1]), jobs))


def row(case: Case, runs: Mapping[bool, Run]) -> list[str]:
    """Returns the cells of a class: what is known of it, and what its runs did."""
    newest, floor = runs.get(False), runs.get(True)
    if newest is None or newest.trouble:
        why = f"not run ({newest.trouble})" if newest else "not run"
        return [f"`{case.name}`", why, case.reports, "", "", "", case.missing]
    release = str(newest.found["release"])
    votes, writes = str(newest.found["votes"]), str(newest.found["writes"]) or "no"
    passes = "yes" if votes == "first tokens" or case.spoil is not bytes else "no" if votes == "text" else "not tried"
    if floor is None or floor.trouble:
        release += f" (floor {case.floor} not run)"
    elif (lowest := str(floor.found["release"])) != release:
        release += f", {lowest}"
        votes += f" ({lowest}: {floor.found['votes']})" if floor.found["votes"] != votes else ""
        writes += f" ({lowest}: {floor.found['writes'] or 'no'})" if (floor.found["writes"] or "no") != writes else ""
    return [f"`{case.name}`", release, case.reports, passes, votes, writes, case.missing]


def table(runs: Iterable[Run]) -> str:
    """Returns the table of benchmarks/results/providers.md."""
    by_name: dict[str, dict[bool, Run]] = {}
    for one in runs:
        by_name.setdefault(one.name, {})[one.is_floor] = one
    head = ["class", "releases run", "the API reports", "passed on", "votes by", "writes by", "missing"]
    rows = [head, ["---"] * len(head), *(row(case, by_name.get(case.name, {})) for case in CASES)]
    return "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |") for cells in rows)


def write_page(text: str) -> None:
    """Puts the table between the marks of the page."""
    page = PAGE.read_text()
    pattern = re.compile(f"{re.escape(START)}.*?{re.escape(END)}", re.DOTALL)
    PAGE.write_text(pattern.sub(lambda _: f"{START}\n{text}\n{END}", page))


def known_runs(fresh: Sequence[Run]) -> list[Run]:
    """Returns these runs and the last of all others, and keeps them."""
    kept = [Run(**one) for one in json.loads(OUT.read_text())] if OUT.exists() else []
    done = {(one.name, one.is_floor) for one in fresh}
    runs = [*fresh, *(one for one in kept if (one.name, one.is_floor) not in done)]
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps([asdict(one) for one in runs], indent=1))
    return runs


def main() -> int:
    parser = argparse.ArgumentParser(description="Private calls through LangChain's classes of providers.")
    parser.add_argument("--only", default="", help="run the classes whose name or package contains this")
    parser.add_argument("--write", action="store_true", help="write the table of benchmarks/results/providers.md")
    asked = parser.parse_args()
    started = time.monotonic()
    word = asked.only.lower()
    runs = run_all([case for case in CASES if word in case.name.lower() or word in case.package])
    for one in runs:
        did = f"votes: {one.found['votes']}, writes: {one.found['writes'] or 'no'}" if one.found else "not run"
        release = one.found.get("release", "floor" if one.is_floor else "newest")
        print(f"{one.name} {release}: {did}" + "".join(f"\n    {text}" for text in (one.trouble, *one.wrong) if text))
    known = known_runs(runs)
    if asked.write:
        write_page(table(known))
    wrong = [one for one in runs if one.wrong]
    print(f"{len(runs)} runs, {sum(bool(one.trouble) for one in runs)} not run, {len(wrong)} wrong, ", end="")
    print(f"{time.monotonic() - started:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
