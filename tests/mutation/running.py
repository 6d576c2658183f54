"""Runs tests against mutants, each in a process forked for it. Knows which tests to run, not why.

A mutant inside a function is put into functions that are imported already: their code is exchanged, in decorated
functions too. Where a statement outside of functions changes, the package is imported anew with the changed text.
A mutant that needs far more processor time than its tests, or waits without end, has timed out; load on the machine does
not count, as no wall clock decides.
"""

from __future__ import annotations

import functools
import importlib.machinery
import json
import os
import resource
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

from tests.mutation.exchanging import Live
from tests.mutation.operators import Mutant
from tests.traced import is_traced

ROOT = Path(__file__).resolve().parents[2]

KILLED, SURVIVED, TIMEOUT, UNTESTED = "killed", "survived", "timeout", "no tests"
PATIENCE = 90.0
"""Seconds that a process may wait without using the processor."""
GENEROUS = 5.0
"""Times the processor seconds of its tests that a mutant may use, and `SPARE` seconds beside."""
SPARE = 15
MEMORY = 6 * 2**30


@dataclass(frozen=True)
class Job:
    """A mutant and the tests to run, in order."""

    mutant: Mutant
    tests: tuple[str, ...]
    seconds: float
    files: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant, and by which test."""

    status: str
    test: str
    seconds: float


Tell = Callable[[str, Outcome | None], None]

# -- children --------------------------------------------------------------------------------------------------------


class FirstFailure:
    """A pytest plugin that ends the process at the first failure and tells its test."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._tell(report.nodeid)
            os._exit(1)


def processor_seconds(pid: int) -> float:
    """Returns the processor seconds of a process and of its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def in_child(job: Job, body: Callable[[Callable[[str], None]], int]) -> Outcome:
    """Runs `body` in a fork of this process and says what became of it; it returns 0 if all tests passed."""
    readable, writable = os.pipe()
    began = time.monotonic()
    pid = os.fork()
    if not pid:
        status = 3
        try:
            os.setsid()
            os.close(readable)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            most = int(job.seconds * GENEROUS) + SPARE * (1 + 9 * bool(job.files))
            resource.setrlimit(resource.RLIMIT_CPU, (most, most))
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
            status = body(lambda name: (os.write(writable, name.encode()), None)[1])
        except BaseException as error:
            os.write(writable, f"{type(error).__name__} outside of tests".encode())
        finally:
            os._exit(status)
    os.close(writable)
    try:
        code = _code_of(pid)
    finally:
        end_group(pid)
    said = os.read(readable, 4096).decode(errors="replace")
    os.close(readable)
    status = TIMEOUT if code in {-signal.SIGXCPU, -signal.SIGKILL} else KILLED if code else SURVIVED
    return Outcome(status, said or (f"exit {code}" if code else ""), time.monotonic() - began)


def _code_of(pid: int) -> int:
    """Waits for a child, as long as it works, and returns its exit code."""
    began = moved = time.monotonic()
    used = 0.0
    while True:
        ended, word = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(word)
        now = time.monotonic()
        if (so_far := processor_seconds(pid)) > used:
            used, moved = so_far, now
        if now - moved > PATIENCE:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return -signal.SIGKILL
        time.sleep(0.01 if now - began < 1 else 0.05)


def end_group(pid: int) -> None:
    """Ends what a child's tests may have left running; the group is the child's own."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


class Warm:
    """A pytest plugin that runs all jobs from one process, in which the package and the tests are imported."""

    def __init__(self, jobs: Sequence[Job], tell: Tell) -> None:
        self._jobs, self._tell = jobs, tell
        self._killers: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        live = Live(ROOT / "langchain_dpicl")
        for job in self._jobs:
            exchange = live.plan(ROOT / job.mutant.file, job.mutant.before, job.mutant.after)
            chosen = [items[test] for test in job.tests if test in items]
            chosen += [item for test, item in items.items() if is_long(item) and test.partition("::")[0] in job.files]
            if exchange is None or not chosen:
                self._tell(job.mutant.name, None)
                continue
            found = in_child(job, functools.partial(self._run, session, live, exchange, chosen))
            self._killers |= {found.test} & set(items)
            self._tell(job.mutant.name, found)
        if self._jobs:
            self._control(session, live, [items[test] for test in sorted(self._killers)])
        return True

    def _control(self, session: pytest.Session, live: Live, killers: Sequence[pytest.Item]) -> None:
        """Runs every test that killed without any change: one that fails then has killed nothing."""
        found = in_child(Job(self._jobs[0].mutant, (), 600.0), functools.partial(self._run, session, live, (), killers))
        if found.status != SURVIVED:
            raise RuntimeError(f"expected tests that pass without a change, found {found.test}. Nothing counts.")

    @staticmethod
    def _run(
        session: pytest.Session,
        live: Live,
        exchange: Sequence[tuple[FunctionType, CodeType]],
        chosen: Sequence[pytest.Item],
        tell: Callable[[str], None],
    ) -> int:
        live.clear()
        for function, code in exchange:
            function.__code__ = code
        session.config.pluginmanager.register(FirstFailure(tell))
        for item, after in zip(chosen, [*chosen[1:], None], strict=True):
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
        return 0


ARGUMENTS = ("-p", "no:cacheprovider", "-n", "0", "-q", "--timeout=0", "-s")


def prepare_hypothesis() -> None:
    """The same examples in every run, and none made smaller: only whether a test fails counts."""
    from hypothesis import HealthCheck, Phase, settings

    phases = [Phase.explicit, Phase.generate]
    settings.register_profile(
        "mutation",
        derandomize=True,
        database=None,
        phases=phases,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("mutation")


def is_long(item: pytest.Item) -> bool:
    return not is_traced(item.nodeid.split("::", 1)[-1])


EXAMPLES = 40
LEFT_OUT = ("planted", "audited", "slow")


def few_examples(items: Iterable[pytest.Item]) -> None:
    """Cuts properties that ask for more examples."""
    from hypothesis import settings

    for item in items:
        function = getattr(item, "obj", None)
        wanted = getattr(function, "_hypothesis_internal_use_settings", None)
        if wanted is not None and wanted.max_examples > EXAMPLES:
            plain = getattr(function, "__func__", function)
            plain._hypothesis_internal_use_settings = settings(wanted, max_examples=EXAMPLES)


class Chosen:
    """A pytest plugin that leaves out tests of tests, and long ones unless they are wanted, and makes properties short."""

    def __init__(self, *, long: bool = False) -> None:
        self._long = long

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        kept = [item for item in items if not any(map(item.get_closest_marker, LEFT_OUT))]
        items[:] = [item for item in kept if self._long or not is_long(item)]
        few_examples(items)


def warm(jobs: Sequence[Job], tell: Tell) -> int:
    """Runs what can be run by exchange of code; `tell` hears None for the rest."""
    prepare_hypothesis()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    files = sorted({test.partition("::")[0] for job in jobs for test in job.tests})
    is_long_too = any(job.files for job in jobs)
    return int(pytest.main([*ARGUMENTS, *files], plugins=[Chosen(long=is_long_too), Warm(jobs, tell)]))


def cold(jobs: Sequence[Job], tell: Tell) -> int:
    """Imports the package anew for each job, with the changed text, and runs the tests."""

    def body(job: Job, say: Callable[[str], None]) -> int:
        target, real = str(ROOT / job.mutant.file), importlib.machinery.SourceFileLoader.get_code

        def get_code(self: Any, fullname: str) -> CodeType | None:
            if self.path == target:
                return compile(job.mutant.after, target, "exec", dont_inherit=True)
            return real(self, fullname)

        importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
        prepare_hypothesis()
        return int(pytest.main([*ARGUMENTS, *job.tests], plugins=[Chosen(), FirstFailure(say)]))

    for job in jobs:
        tell(job.mutant.name, in_child(job, functools.partial(body, job)))
    return 0


def in_workers(work: Callable[[Sequence[Job], Tell], int], jobs: Sequence[Job], tell: Tell, *, processes: int) -> None:
    """Divides jobs among forks of this process, and hears what becomes of them."""
    workers: dict[int, int] = {}
    with selectors.DefaultSelector() as ears:
        for part in filter(None, (jobs[first::processes] for first in range(processes))):
            readable, pid = _worker(work, part)
            workers[pid] = readable
            ears.register(os.fdopen(readable), selectors.EVENT_READ)
        while ears.get_map():
            for key, _ in ears.select():
                line = key.fileobj.readline()  # type: ignore[union-attr]
                if not line:
                    ears.unregister(key.fileobj)
                    continue
                name, found = json.loads(line)
                tell(name, Outcome(**found) if found else None)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in workers]
    if any(codes):
        raise SystemExit(f"mutation: expected workers that run to their end, found exit {codes}.")


def _worker(work: Callable[[Sequence[Job], Tell], int], jobs: Sequence[Job]) -> tuple[int, int]:
    """Forks one worker; returns where it is heard, and its number."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writable)
        return readable, pid
    status = 3
    try:
        os.close(readable)

        def send(name: str, found: Outcome | None) -> None:
            os.write(writable, (json.dumps([name, found and vars(found)]) + "\n").encode())

        status = work(jobs, send)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        os._exit(status)


def preload(modules: Iterable[str]) -> None:
    """Imports what is not ours, once for all forks."""
    for name in modules:
        __import__(name)


def totals(found: Mapping[str, Outcome]) -> dict[str, int]:
    """Returns how many mutants there are of each status."""
    counts = dict.fromkeys((KILLED, SURVIVED, TIMEOUT, UNTESTED), 0)
    for outcome in found.values():
        counts[outcome.status] += 1
    return counts
