"""Changes the vault's source, one small change at a time, and fails unless enough changes turn a test red.

First the 19 bugs of published code, planted in ours (`tests/mutation/privacy_mutants.py`): all have to be seen. Then a
random sample of every group of modules, the same in every run; with --all every change, which takes many hours.
With --kept it continues where it stopped, with --again it tries those that survived once more; with --only TEXT
those whose name matches. At most --seconds of tests,
the quickest first, run against one change: a change that a longer test would have killed counts as survived.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import random
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.mutation import covering as cover  # noqa: E402
from tests.mutation import running  # noqa: E402
from tests.mutation.groups import GROUPS, PRELOADED, VAULT  # noqa: E402
from tests.mutation.operators import RULES, Mutant, mutants_of  # noqa: E402
from tests.mutation.running import KILLED, SURVIVED, TIMEOUT, UNTESTED, Job, Outcome  # noqa: E402

OUT = ROOT / "out" / "mutation"
FLOOR = 90.0
NEAR = 10
"""Lines around a change whose tests are tried where no test runs the change itself."""
SEED = 20240229


def is_harmless(mutant: Mutant, entries: Iterable[dict[str, str]]) -> bool:
    where = mutant.name.partition("#")[0]
    for entry in entries:
        # A word of it has to be there before a whole text is made and compared.
        words = re.findall(r"\w+", entry["change"])
        if fnmatch.fnmatchcase(where, entry["at"]) and mutant.mentions(words[0]) and entry["change"] in mutant.change:
            return True
    return False


def watched(files: Sequence[str]) -> int:
    """Runs all tests once and notes which lines they run. In a process of its own: coverage stays in it."""
    import pytest

    watch = cover.Watch(files)
    running.prepare_hypothesis()
    code = pytest.main([*running.ARGUMENTS, *cover.TESTS], plugins=[running.Chosen(), watch])
    if watch.failed:
        print(f"left out, as they fail without any change: {sorted(set(watch.failed))}", flush=True)
    if code in {0, 1}:
        cover.save(OUT / "covering.json", watch.to_covering(), cover.stamp(files))
    return int(code not in {0, 1})


def planted() -> int:
    """Plants the bugs of published code; prints which were seen. In a process of its own, which imports the package."""
    import pytest

    class Seen:
        def __init__(self) -> None:
            self.bugs: dict[str, bool] = {}

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if "[" in report.nodeid and report.when == "call":
                bug = report.nodeid.partition("[")[2].rstrip("]")
                self.bugs[bug] = report.passed
                print(f"  {bug:48} {'seen' if report.passed else 'NOT SEEN'}", flush=True)

    seen = Seen()
    print("bugs of published code, planted:", flush=True)
    where = "tests/mutation/test_privacy_mutants.py"
    code = pytest.main(["-p", "no:cacheprovider", "-p", "no:terminal", "-n", "0", where], plugins=[seen])
    print(f"{sum(seen.bugs.values())} of {len(seen.bugs)} seen", flush=True)
    return int(code)


def covering(files: Sequence[str], *, is_kept: bool) -> cover.Covering:
    """Returns what is known of the tests, from an earlier run where nothing has changed since."""
    path = OUT / "covering.json"
    found = cover.load(path, None if is_kept else cover.stamp(files))
    if found is None:
        print("which test runs which lines: all tests of the vault, once", flush=True)
        subprocess.run([sys.executable, __file__, "--watch"], check=True)
        found = cover.load(path)
    assert found is not None
    return found


def job_of(mutant: Mutant, known: cover.Covering, most: float, *, is_long: bool) -> Job:
    """Chooses tests: those that run the changed statement; outside of functions those that run a line with its name.

    With `is_long` also the long tests of the files that these are in.
    """
    if mutant.names:
        using = known.using(mutant.names[0])
        near = known.of({mutant.file: using.get(mutant.file, ())})
        tests = [*near, *(test for test in known.of(using) if test not in set(near))]
    else:
        tests = known.of({mutant.file: mutant.lines})
    if not tests:  # run by nobody, or in forked processes only, which are not watched
        tests = known.of({mutant.file: range(mutant.line - NEAR, mutant.line + NEAR)}) or known.of_file(mutant.file)
    chosen, seconds = [], 0.0
    for test in tests:
        if chosen and seconds + known.seconds[test] > most:
            break
        chosen.append(test)
        seconds += known.seconds[test]
    return Job(mutant, tuple(chosen), seconds, frozenset(test.partition("::")[0] for test in tests if is_long))


def interval(good: int, count: int) -> tuple[float, float]:
    """Returns Wilson's 95 % interval of a share, in percent."""
    if not count:
        return 0.0, 100.0
    share, z = good / count, 1.959964
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return 100 * (middle - half), 100 * (middle + half)


class Results:
    """What became of the mutants, kept on disk as it comes in."""

    def __init__(self, path: Path, mutants: Sequence[Mutant]) -> None:
        self.found: dict[str, Outcome] = {}
        self._path, self._total, self.waiting = path, len(mutants), list[str]()
        self._mutants = {mutant.name: mutant for mutant in mutants}

    def tell(self, name: str, outcome: Outcome | None) -> None:
        if outcome is None:
            self.waiting.append(name)
            return
        self.found[name] = outcome
        counts = running.totals(self.found)
        line = f"{len(self.found)} of {self._total}: {counts[KILLED]} killed, {counts[SURVIVED]} survived, "
        line += f"{counts[TIMEOUT]} timed out, {counts[UNTESTED]} without tests"
        if sys.stderr.isatty():
            print(f"\r{line}  {name[:50]}\x1b[K", end="", file=sys.stderr, flush=True)
        elif len(self.found) % 25 == 0 or outcome.status == SURVIVED:
            print(f"{line}  {name if outcome.status == SURVIVED else ''}", file=sys.stderr, flush=True)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        known = json.loads(self._path.read_text()) if self._path.is_file() else {}
        self._path.write_text(
            json.dumps({**known, name: {**vars(outcome), "change": self._mutants[name].signature}}, indent=0)
        )


def outcomes_kept(mutants: Sequence[Mutant]) -> dict[str, Outcome]:
    """Returns what became of the same changes the last time."""
    path = OUT / "results.json"
    last = json.loads(path.read_text()) if path.is_file() else {}
    same = [mutant.name for mutant in mutants if last.get(mutant.name, {}).get("change") == mutant.signature]
    return {name: Outcome(last[name]["status"], last[name]["test"], last[name]["seconds"]) for name in same}


def run(
    mutants: Sequence[Mutant], known: cover.Covering, most: float, *, is_long: bool, processes: int
) -> dict[str, Outcome]:
    results = Results(OUT / "results.json", mutants)
    jobs = {mutant.name: job_of(mutant, known, most, is_long=is_long) for mutant in mutants}
    for name, job in jobs.items():
        if not job.tests:
            results.tell(name, Outcome(UNTESTED, "", 0.0))
    running.preload(PRELOADED)
    fast = [job for job in jobs.values() if job.tests and not job.mutant.names]
    running.in_workers(running.warm, fast, results.tell, processes=processes)
    slow = {*results.waiting, *(name for name, job in jobs.items() if job.tests and job.mutant.names)}
    running.in_workers(running.cold, [jobs[name] for name in jobs if name in slow], results.tell, processes=processes)
    return results.found


def shown(mutant: Mutant, outcome: Outcome) -> str:
    return f"{outcome.status}: {mutant.name}  {mutant.file}:{mutant.line}\n{mutant.diff}\n"


def table(chosen: dict[str, list[Mutant]], sizes: dict[str, int], found: dict[str, Outcome]) -> bool:
    """Prints the scores; returns whether all are high enough."""
    fine = True
    for mutants in chosen.values():
        for mutant in mutants:
            if found[mutant.name].status != KILLED:
                print(shown(mutant, found[mutant.name]))
    print(
        f"{'group':12} {'changes':>8} {'tried':>6} {'killed':>7} {'timeout':>8} {'survived':>9} {'no tests':>9} {'score':>8}  95 %"
    )
    for group, mutants in chosen.items():
        counts = running.totals({mutant.name: found[mutant.name] for mutant in mutants})
        good = counts[KILLED] + counts[TIMEOUT]
        score = 100 * good / len(mutants) if mutants else 100.0
        low, high = interval(good, len(mutants))
        numbers = f"{sizes[group]:8,} {len(mutants):6,} {counts[KILLED]:7,} {counts[TIMEOUT]:8,} {counts[SURVIVED]:9,}"
        around = f"{low:.1f}-{high:.1f}" if len(mutants) < sizes[group] else "(all)"
        print(f"{group:12} {numbers} {counts[UNTESTED]:9,} {score:6.1f} %  {around}")
        fine &= score >= FLOOR
    print(f"score: (killed + timeout) / tried; at least {FLOOR:.0f} % is asked of every group. Not counted:")
    print(
        *(f"  - {rule}" for rule in [*RULES, "what tests/mutation/harmless.toml lists, each with its reason"]), sep="\n"
    )
    return fine


def chosen_mutants(
    given: argparse.Namespace, harmless: Sequence[dict[str, str]]
) -> tuple[dict[str, list[Mutant]], dict[str, int]]:
    chosen, sizes = {}, {}
    for group, modules in GROUPS.items():
        if given.group and group not in given.group:
            continue
        every = [mutant for module in modules for mutant in mutants_of(ROOT, f"{VAULT}/{module}.py")]
        sizes[group] = len(every)
        if given.only:
            every = [mutant for mutant in every if re.search(given.only, mutant.name)]
        elif not given.all:
            every = sorted(every, key=lambda mutant: random.Random(f"{SEED} {mutant.name}").random())
            every = every[: given.sample * 2]
        every = [mutant for mutant in every if not is_harmless(mutant, harmless)]
        every = every if given.all or given.only else every[: given.sample]
        chosen[group] = sorted(every, key=lambda mutant: (mutant.file, mutant.line, mutant.name))
    return chosen, sizes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--sample", type=int, default=150)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--group", action="append")
    parser.add_argument("--only", default="")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--long", action="store_true", help="with the long tests, too")
    parser.add_argument("--kept", action="store_true", help="continues where the last run stopped, with what it knew")
    parser.add_argument("--planted", action="store_true", help="the bugs of published code alone")
    parser.add_argument("--changes", action="store_true", help="the small changes alone")
    parser.add_argument("--watch", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not hasattr(os, "fork"):
        raise SystemExit("mutation: expected a system with fork, found none.")
    files = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / VAULT).rglob("*.py"))]
    if given.watch:
        return watched(files)
    if given.planted:
        return planted()
    is_seen = given.changes or not subprocess.run([sys.executable, __file__, "--planted"], check=False).returncode
    known = covering(files, is_kept=given.kept)
    harmless = tomllib.loads((ROOT / "tests/mutation/harmless.toml").read_text()).get("change", [])
    chosen, sizes = chosen_mutants(given, harmless)
    mutants = [mutant for group in chosen.values() for mutant in group]
    done = outcomes_kept(mutants) if given.kept or given.again else {}
    if given.again:
        done = {name: outcome for name, outcome in done.items() if outcome.status in {KILLED, TIMEOUT}}
    found = done | run(
        [mutant for mutant in mutants if mutant.name not in done],
        known,
        given.seconds,
        is_long=given.long,
        processes=given.processes,
    )
    print(file=sys.stderr)
    return int(not table(chosen, sizes, found) or not is_seen)


if __name__ == "__main__":
    raise SystemExit(main())
