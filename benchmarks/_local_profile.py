"""Where the time of one private generation goes: the model, and everything beside it. Looks on; changes no result."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from _local_runs import Place, Ready

from langchain_dpicl.backends.hf import batches, engine
from langchain_dpicl.backends.hf.vocabulary import LogitReader, OutputHead
from langchain_dpicl.generation.decoding_loop import DecodingSpec
from langchain_dpicl.privacy.mechanisms.release_plan import GumbelMechanism, ReleasePlan

MODEL, REST = "model", "all other Python"
PARTS = {
    MODEL: "the model's forward passes and its output layer",
    "engine": "batches, masks, cache, sessions around them",
    "reading": "candidates' logits, out of the model and off the device",
    "aggregation": "clip and sum of the rows",
    "noise": "private coins and the choice of a token",
    "candidates": "public top K",
    REST: "samples, prompts, tickets, text, callbacks",
}


class Watch:
    """Adds up the time of parts; a part within another one is not counted twice.

    Args:
      wait: waits for the device, before a clock is read.
    """

    def __init__(self, wait: Callable[[], None] = lambda: None) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._wait = wait
        self._open: list[str] = []
        self._last = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Counts what happens within as this part's."""
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function, counted."""

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return function(*args, **kwargs)

        return counted

    def _turn(self) -> None:
        """Gives the time since the last turn to the innermost open part."""
        self._wait()
        now = time.perf_counter()
        if self._open:
            self.spent[self._open[-1]] += now - self._last
        self._last = now


@contextmanager
def replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Puts something in a name's place for a while."""
    kept = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, kept)


_PLACES: tuple[tuple[str, Any, str], ...] = (
    ("engine", engine.LocalSession, "_read"),
    ("reading", engine, "select_logits"),
    ("reading", engine, "probabilities"),
    ("reading", LogitReader, "settle"),
    ("reading", LogitReader, "settle_some"),
    (MODEL, batches.ModelBody, "forward"),
    (MODEL, OutputHead, "logits"),
    (MODEL, OutputHead, "some"),
    ("aggregation", ReleasePlan, "bound"),
    ("noise", GumbelMechanism, "release"),
    ("candidates", DecodingSpec, "_narrow_candidates"),
)


def shares(place: Place, ready: Ready) -> dict[str, float]:
    """Returns the seconds that each part of one run took."""
    job = ready()
    watch = Watch(place.wait)
    with ExitStack() as stack:
        for name, holder, attribute in _PLACES:
            stack.enter_context(replaced(holder, attribute, watch.wrapped(name, getattr(holder, attribute))))
        with watch.part(REST):
            job()
    return {name: watch.spent[name] for name in PARTS}


def table(spent: dict[str, float], *, tokens: int) -> str:
    """Returns the parts, as shares and milliseconds per token."""
    total = sum(spent.values())
    lines = [f"{'part':<14}{'share %':>8}{'ms/token':>10}  what"]
    lines += [
        f"{name:<14}{100 * spent[name] / total:>8.2f}{1000 * spent[name] / tokens:>10.3f}  {what}"
        for name, what in PARTS.items()
    ]
    return "\n".join(lines)


def beyond_model(spent: dict[str, float]) -> float:
    """Returns the share of the time that is not the model's."""
    return 1.0 - spent[MODEL] / sum(spent.values())
