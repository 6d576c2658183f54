"""Shows what a budget did as metrics: as text, for Prometheus, and for OpenTelemetry."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from langchain_core.callbacks import BaseCallbackHandler
from typing_extensions import override

from langchain_dpicl._opaque import PerProcess, Uncopyable
from langchain_dpicl.budget.budget import Budget, BudgetUse, TicketUse
from langchain_dpicl.budget.handler import CHARGED, REFUSED, RELEASE, BudgetLike, budget_of
from langchain_dpicl.exceptions import ConfigurationError, LedgerError

Labels = Mapping[str, str]
_FRESH = 1.0  # seconds for which one reading of the ledger serves all instruments of a collection


class Metric(NamedTuple):
    """One metric with its values.

    Attributes:
      name: without the prefix `dpicl_`.
      words: what it counts.
      rows: values by labels.
      kind: "gauge", "counter" or "summary".
    """

    name: str
    words: str
    rows: Sequence[tuple[Labels, float]]
    kind: str = "gauge"


class DPICLMetrics(Uncopyable, BaseCallbackHandler):
    """Counts what runs charged, answered and refused, and shows it beside what is spent, left and open of their ledger.

    Give it to runs as a callback beside the budget, and register it once:
    `prometheus_client.REGISTRY.register(metrics)`, or `metrics.observe()` for OpenTelemetry; `text()` needs no package.

    Formal guarantees:
      - It reads the custom events of budgets alone, which are public: no prompt, answer or error of a run.
      - A ledger that cannot be read shows as `dpicl_ledger_up 0`; no collection fails for it.

    Args:
      budget: whose ledger is shown.
      labels: of what this process counted, such as its name where several processes are asked by one address.

    Example:
      >>> from langchain_dpicl import PrivacyBudgetCallbackHandler
      >>> metrics = DPICLMetrics(PrivacyBudgetCallbackHandler(epsilon=4.0, delta=1e-6))
      >>> [line for line in metrics.text().splitlines() if line.startswith("dpicl_epsilon_limit")][0].split()[-1]
      '4.0'
    """

    run_inline = True

    def __init__(self, budget: BudgetLike, *, labels: Labels | None = None) -> None:
        super().__init__()
        self._budget: Budget = budget_of(budget, "budget")
        self._labels = dict(labels or {})
        self._lock: PerProcess[threading.Lock] = PerProcess(threading.Lock)
        self._counts: PerProcess[Counter[tuple[str, str, str]]] = PerProcess(Counter)
        self._recent: tuple[float, list[Metric]] | None = None

    @override
    def on_custom_event(self, name: str, data: Any, **kwargs: Any) -> None:
        counted, counts = list(_counted(name, data)), self._counts.here
        with self._lock.here:
            for key, count in counted:
                counts[key] += count

    def metrics(self) -> list[Metric]:
        """Returns all metrics as they stand; reads the ledger."""
        labels = {"ledger": self._budget.name, "ledger_id": self._budget.ledger_id}
        try:
            use = self._budget.use()
        except LedgerError:
            use = None
        up = Metric("ledger_up", "whether the ledger can be read", [(labels, float(use is not None))])
        own = labels | self._labels
        read = [] if use is None else [*_ledger_metrics(use, labels), *_process_metrics(use, own)]
        return [up, *read, *self._own(own)]

    def _own(self, labels: Labels) -> Iterator[Metric]:
        with self._lock.here:
            counts = dict(self._counts.here)
        for name, (words, first, second) in _COUNTERS.items():
            rows = [
                ({**labels, first: key[1], **({second: key[2]} if second else {})}, float(count))
                for key, count in sorted(counts.items())
                if key[0] == name
            ]
            yield Metric(name, words, rows, "counter")

    def text(self) -> str:
        """Returns all metrics in the text format of Prometheus."""
        return _text(self.metrics())

    def collect(self) -> Iterator[Any]:
        """Yields all metrics as `prometheus_client` takes them: `REGISTRY.register(metrics)`.

        Raises:
          ConfigurationError: the package is missing.
        """
        try:
            from prometheus_client import Metric as Family
        except ModuleNotFoundError:
            raise _missing("prometheus_client", "prometheus-client") from None
        for metric in self.metrics():
            name = f"dpicl_{metric.name}"
            # There a counter's samples alone end in `_total`.
            family = Family(name.removesuffix("_total"), metric.words, metric.kind)
            for labels, value in metric.rows:
                family.add_sample(name, dict(labels), value)
            yield family

    def observe(self, meter: Any = None) -> None:
        """Registers an observable instrument for each metric with OpenTelemetry.

        Args:
          meter: of OpenTelemetry; None: that of the global provider.

        Raises:
          ConfigurationError: the package is missing.
        """
        try:
            from opentelemetry import metrics as api
        except ModuleNotFoundError:
            raise _missing("opentelemetry", "opentelemetry-api") from None
        meter = api.get_meter("langchain_dpicl") if meter is None else meter

        def observed(name: str) -> Any:
            def read(_: Any) -> Iterable[Any]:
                return [
                    api.Observation(value, labels)
                    for each in self._fresh()
                    if each.name == name
                    for labels, value in each.rows
                ]

            return read

        for name, (words, kind) in INSTRUMENTS.items():
            make = meter.create_observable_counter if kind == "counter" else meter.create_observable_gauge
            make(f"dpicl_{name}", callbacks=[observed(name)], description=words)

    def _fresh(self) -> list[Metric]:
        """Returns the metrics, which all instruments of one collection share."""
        now = time.monotonic()
        with self._lock.here:
            recent = self._recent
        if recent is None or now - recent[0] > _FRESH:
            recent = now, self.metrics()
            with self._lock.here:
                self._recent = recent
        return recent[1]


def _counted(name: str, data: Any) -> Iterator[tuple[tuple[str, str, str], int]]:
    """Yields what an event adds to which counter."""
    if name == CHARGED:
        yield ("charged_total", str(data["share"]["name"]), ""), int(data["tickets"])
    elif name == REFUSED:
        yield ("refusals_total", str(data["error"]), ""), 1
    elif name == RELEASE and "receipt" in data:
        yield ("answers_total", str(data["receipt"]["component"]), str(data["receipt"]["source"])), 1


_COUNTERS = {
    "charged_total": ("tickets that runs of this process were charged", "component", ""),
    "answers_total": ("answers that runs of this process gave, by where they came from", "component", "source"),
    "refusals_total": ("refusals of a budget to runs of this process", "error", ""),
}


def _missing(name: str, package: str) -> ConfigurationError:
    return ConfigurationError(f"metrics: expected the package {name}, found none. Install it: pip install {package}.")


def prometheus_text(use: BudgetUse, *, ledger: str, ledger_id: str, process: bool = True) -> str:
    """Returns the use in the text format of Prometheus.

    Args:
      use: result of `Budget.use`.
      ledger: `Budget.name`.
      ledger_id: `Budget.ledger_id`.
      process: also what this process counted: waits, refusals, outages.
    """
    labels = {"ledger": ledger, "ledger_id": ledger_id}
    return _text([*_ledger_metrics(use, labels), *(_process_metrics(use, labels) if process else ())])


def _ledger_metrics(use: BudgetUse, ledger: Labels) -> Iterator[Metric]:
    for name in ("epsilon", "delta"):
        limit, spent = getattr(use, name), getattr(use, f"{name}_spent")
        yield Metric(f"{name}_limit", f"limit of {name}", [(ledger, limit)])
        yield Metric(f"{name}_spent", f"{name} charged for sealed shares", [(ledger, spent)])
    yield Metric("lines", "lines of the ledger", [(ledger, use.lines)])
    for state in TicketUse._fields:
        rows = [({**ledger, "component": name}, getattr(each, state)) for name, each in use.tickets.items()]
        yield Metric(f"tickets_{state}", f"tickets {_STATES[state]}", rows)
    rows_of_pools = [({**ledger, "component": name}, left) for name, left in use.pools.items()]
    yield Metric("pool_left", "mu squared or rho that a pool has left", rows_of_pools)


_STATES = {"left": "that can be reserved", "held": "reserved and not settled", "committed": "used and committed"}


def _process_metrics(use: BudgetUse, ledger: Labels) -> Iterator[Metric]:
    waits = {"0.5": use.wait_ms_p50, "0.99": use.wait_ms_p99}
    rows = [({**ledger, "quantile": part}, wait / 1e3) for part, wait in waits.items() if wait is not None]
    yield Metric("reserve_seconds", "wait for a reservation in this process", rows, "summary")
    yield Metric("waiting_commits", "commits not written yet", [(ledger, use.waiting_commits)])
    yield Metric("flushes_total", "waits for the disk", [(ledger, use.flushes)], "counter")
    yield Metric("refused_total", "reservations refused", [(ledger, use.refused)], "counter")
    yield Metric("outages_total", "turns without the store", [(ledger, use.outages)], "counter")


def _instruments() -> dict[str, tuple[str, str]]:
    nothing = BudgetUse(0.0, 0.0, 0.0, 0.0, {}, {}, 0, 0, 0, None, None, 0, 0)
    known = [*_ledger_metrics(nothing, {}), *_process_metrics(nothing, {})]
    named = {each.name: (each.words, each.kind) for each in known}
    own = {name: (words, "counter") for name, (words, *_) in _COUNTERS.items()}
    return {"ledger_up": ("whether the ledger can be read", "gauge"), **named, **own}


INSTRUMENTS: Mapping[str, tuple[str, str]] = _instruments()
"""Words and kind of every metric, by its name without the prefix."""


def _text(metrics: Iterable[Metric]) -> str:
    return "\n".join(line for metric in metrics for line in _lines(metric)) + "\n"


def _lines(metric: Metric) -> Iterator[str]:
    if not metric.rows:
        return
    yield f"# HELP dpicl_{metric.name} {metric.words}"
    yield f"# TYPE dpicl_{metric.name} {metric.kind}"
    for labels, value in metric.rows:
        named = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        yield f"dpicl_{metric.name}{{{named}}} {value!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
