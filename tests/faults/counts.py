"""What a fault counts: trials, violations, and what else was seen. Nothing that goes wrong inside a trial ends the run."""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


class Violation(Exception):  # noqa: N818  not an error of the program
    """What must not happen, happened."""


@dataclass
class Count:
    """Counts of one fault."""

    trials: int = 0
    violations: list[str] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    tick: Callable[[], object] = lambda: None

    @contextlib.contextmanager
    def trial(self, words: str) -> Iterator[None]:
        """Counts one trial; whatever it raises is a violation."""
        try:
            with self.watched(words):
                yield
        finally:
            self.trials += 1
            self.tick()

    @contextlib.contextmanager
    def watched(self, words: str) -> Iterator[None]:
        """Makes whatever is raised a violation."""
        try:
            yield
        except Violation as found:
            self.violations.append(f"{words}: {found}")
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{last.filename.rsplit('/', 1)[-1]}:{last.lineno}"
            self.violations.append(f"{words}: {type(error).__name__} at {where}: {error}")


def require(condition: object, words: str) -> None:
    """Makes the trial a violation unless `condition` holds; works without assertions."""
    if not condition:
        raise Violation(words)
