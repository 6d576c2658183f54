"""Finds tests that noise fails now and then, long before it does: each runs several times with noise of heavier tails.

    python -m tests.heavy_tails tests/unit_tests                       every test that draws noise, nine times
    python -m tests.heavy_tails --power 2 --times 300 PATH::TEST       one test, nearer to its true chance

A draw beyond a tail of probability p is met with about p^(1/power) / 2 here: of power 4 (the default) one in a thousand
becomes one in ten, one in a million one in sixty. So what fails once in many runs here has a chance worth computing, and
what fails in nearly all of them tests the law of the noise itself, as it should. Two powers that fail with shares a and b
tell the chance of power 1: a straight line through log(share) over 1/power.

Noise, and how many units a Poisson sample has, are drawn so; which units it has are not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from decimal import Decimal, localcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _pytest.runner import runtestprotocol

from langchain_dpicl.privacy.mechanisms.randomness import DECIMALS, GaussianDraws, SecureRandom

HALF = Decimal("0.5")
LEAST = Decimal("1e-50")  # 1 - LEAST is below 1 in the arithmetic of `binomial`, as every level is
DESELECTED = "not planted and not audited and not benches"
SHOWN = 160
DRAWS = [0]


class Tails:
    """The methods of `SecureRandom` that draw noise or sizes, with heavier tails; every draw is counted."""

    def __init__(self, power: float) -> None:
        self.power = power

    def _heavier(self, half: Any) -> Any:
        return np.maximum(0.5 * (2.0 * half) ** self.power, 1e-300)

    def install(self) -> None:
        """Puts them in the place of the originals, for the rest of this process."""
        level, geometric = SecureRandom._level, SecureRandom.geometric

        def exponential(rng: SecureRandom, n: int) -> Any:
            DRAWS[0] += 1
            half, coin = rng._half(n)
            half = self._heavier(half)
            return -np.where(coin, np.log(half), np.log1p(-half))

        def gaussian_draws(rng: SecureRandom, n: int) -> GaussianDraws:
            DRAWS[0] += 1
            half, coin = rng._half(n)
            return GaussianDraws(self._heavier(half), coin, rng.entropy)

        def _level(rng: SecureRandom) -> Decimal:
            DRAWS[0] += 1
            place = level(rng)
            with localcontext(DECIMALS):
                tail = max(HALF * (2 * min(place, 1 - place)) ** Decimal(self.power), LEAST)
                return tail if place < HALF else 1 - tail

        def longer(rng: SecureRandom, scale: int) -> int:
            DRAWS[0] += 1
            return geometric(rng, scale if type(scale) is not int else max(1, int(scale * self.power / 2)))

        for name, method in {
            "exponential": exponential,
            "gaussian_draws": gaussian_draws,
            "_level": _level,
            "geometric": longer,
        }.items():
            setattr(SecureRandom, name, method)


def pytest_configure() -> None:
    Tails(float(os.environ["HEAVY_TAILS_POWER"])).install()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: Any, nextitem: Any) -> bool:
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    DRAWS[0] = runs = failed = 0
    said = ""
    while runs < int(os.environ["HEAVY_TAILS_TIMES"]) and (DRAWS[0] or not runs):
        if runs:
            item._initrequest()
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        runs += 1
        if faults := [str(report.longrepr).splitlines()[-1] for report in reports if report.failed]:
            failed, said = failed + 1, faults[0]
    if DRAWS[0]:
        line = json.dumps({"test": item.nodeid, "runs": runs, "failed": failed, "said": said})
        with Path(os.environ["HEAVY_TAILS_FOLDER"], f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as log:
            log.write(f"{line}\n")
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def lines(found: list[dict[str, Any]]) -> Iterator[str]:
    """Yields the tests that failed, those that fail seldom first."""
    failed = sorted((one for one in found if one["failed"]), key=lambda one: one["failed"] / one["runs"])
    for one in failed:
        yield f"failed {one['failed']} of {one['runs']}: {one['test']} {one['said'][:SHOWN]}"
    yield f"{len(found)} tests draw noise, {len(failed)} of them failed"


def main(arguments: list[str] | None = None) -> int:
    """Runs pytest with heavier tails; returns 0 if a test drew noise, 2 if none did."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--power", type=float, default=4.0, help="of the tails (4)")
    parser.add_argument("--times", type=int, default=9, help="that a test runs (9)")
    given, rest = parser.parse_known_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        settings = {"POWER": str(given.power), "TIMES": str(given.times), "FOLDER": folder}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.heavy_tails", "-m", DESELECTED, *rest]
        subprocess.run(command, env={**os.environ, **{f"HEAVY_TAILS_{k}": v for k, v in settings.items()}}, check=False)
        found = [
            json.loads(line) for path in Path(folder).glob("*.jsonl") for line in path.read_text("utf-8").splitlines()
        ]
    print(*lines(found), sep="\n")
    return 0 if found else 2


if __name__ == "__main__":
    sys.exit(main())
