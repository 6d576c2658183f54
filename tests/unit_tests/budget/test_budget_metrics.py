"""What DPICLMetrics counts, and how Prometheus and OpenTelemetry see it."""

from __future__ import annotations

import signal
import sys
from typing import Any

import pytest
from langchain_core.runnables import RunnableLambda

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.budget.handler import CHARGED, REFUSED, RELEASE
from langchain_dpicl.budget.metrics import INSTRUMENTS, DPICLMetrics
from langchain_dpicl.exceptions import ConfigurationError, LedgerUnavailableError
from tests.contracts.store import in_child
from tests.ledger_files import spend

SHOWN: dict[str, Any] = {
    CHARGED: {"component": "DPVotingRunnable", "tickets": 2, "share": {"name": "votes"}},
    REFUSED: {"component": "DPVotingRunnable", "error": "TenantCapExceededError"},
    RELEASE: {"receipt": {"component": "votes", "source": "memo"}},
}


@pytest.fixture
def budget() -> Budget:
    budget = Budget(epsilon=4.0, delta=1e-6)
    spend(budget)
    return budget


@pytest.fixture
def metrics(budget: Budget) -> DPICLMetrics:
    found = DPICLMetrics(budget, labels={"process": "7"})
    for _ in range(3):
        for name, data in SHOWN.items():
            found.on_custom_event(name, data)
    found.on_custom_event("somebody's", {"tickets": 100})
    found.on_custom_event(RELEASE, {"component": "of a release without a receipt"})
    return found


def test_events_of_budgets_are_counted_and_nothing_else(metrics: DPICLMetrics) -> None:
    lines = metrics.text().splitlines()
    counted = [line.partition("process=")[2] for line in lines if 'process="7",' in line and "quantile" not in line]
    assert counted == [
        '"7",component="votes"} 6.0',
        '"7",component="votes",source="memo"} 3.0',
        '"7",error="TenantCapExceededError"} 3.0',
    ]


def test_a_forked_child_counts_for_itself_whatever_another_thread_holds(metrics: DPICLMetrics) -> None:
    def count() -> None:
        signal.alarm(30)
        metrics.on_custom_event(CHARGED, SHOWN[CHARGED])
        assert 'component="votes"} 2.0' in metrics.text()

    assert in_child(count)
    with metrics._lock.here:  # as a thread that is asked for the text
        assert in_child(count)
    assert 'component="votes"} 6.0' in metrics.text()


def test_runs_tell_it_through_their_callbacks(budget: Budget) -> None:
    from langchain_core.callbacks import dispatch_custom_event

    metrics = DPICLMetrics(budget)
    RunnableLambda(lambda _: dispatch_custom_event(CHARGED, SHOWN[CHARGED])).invoke("x", {"callbacks": [metrics]})
    assert 'component="votes"} 2.0' in metrics.text()


def test_it_is_neither_copied_nor_keeps_what_a_run_was_asked(metrics: DPICLMetrics) -> None:
    import copy

    assert copy.deepcopy(metrics) is metrics
    RunnableLambda(lambda text: text).invoke("a question", {"callbacks": [metrics]})
    assert "a question" not in repr(vars(metrics))


def test_a_ledger_that_is_out_shows_as_such_and_what_was_counted_stays(
    metrics: DPICLMetrics, budget: Budget, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "dpicl_ledger_up" in metrics.text()
    assert metrics.text().splitlines()[2].endswith("} 1.0")

    def out(_: Budget) -> None:
        raise LedgerUnavailableError("away")

    monkeypatch.setattr(Budget, "use", out)
    lines = metrics.text().splitlines()
    assert lines[2].endswith("} 0.0")
    assert not [line for line in lines if line.startswith("dpicl_tickets")]
    assert [line for line in lines if line.startswith("dpicl_charged_total")]


def test_prometheus_collects_what_the_text_says(metrics: DPICLMetrics) -> None:
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    registry.register(metrics)
    ours, theirs = metrics.text().splitlines(), client.generate_latest(registry).decode().splitlines()

    def plain(lines: Any) -> set[tuple[str, frozenset[str], float]]:
        parts = [line.rpartition(" ") for line in lines if not line.startswith("#")]
        return {
            (place.partition("{")[0], frozenset(place.partition("{")[2].rstrip("}").split(",")), float(value))
            for place, _, value in parts
        }

    assert plain(theirs) == plain(ours)
    assert len(plain(ours)) > 10
    assert {line for line in ours if line.startswith("#")} <= set(theirs)


def test_openmetrics_of_what_prometheus_collects_can_be_read(metrics: DPICLMetrics) -> None:
    client = pytest.importorskip("prometheus_client")
    exposition = pytest.importorskip("prometheus_client.openmetrics.exposition")
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    registry = client.CollectorRegistry()
    registry.register(metrics)
    found = parser.text_string_to_metric_families(exposition.generate_latest(registry).decode())
    kinds = {f"{one.name}_total" if one.type == "counter" else one.name: one.type for one in found}
    assert kinds == {f"dpicl_{name}": kind for name, (_, kind) in INSTRUMENTS.items()}


def test_opentelemetry_observes_every_metric(metrics: DPICLMetrics, monkeypatch: pytest.MonkeyPatch) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.metrics")
    export = pytest.importorskip("opentelemetry.sdk.metrics.export")
    reader = export.InMemoryMetricReader()
    provider = sdk.MeterProvider([reader])
    read = Budget.use
    calls: list[int] = []

    def counted(budget: Budget) -> Any:
        calls.append(1)
        return read(budget)

    monkeypatch.setattr(Budget, "use", counted)
    metrics.observe(provider.get_meter("test"))
    found = reader.get_metrics_data()
    seen = {
        each.name: [(point.value, dict(point.attributes)) for point in each.data.data_points]
        for resource in found.resource_metrics
        for scope in resource.scope_metrics
        for each in scope.metrics
    }
    expected = {f"dpicl_{each.name}": each.rows for each in metrics.metrics() if each.rows}
    assert {*seen} == {*expected}
    for name, rows in expected.items():
        assert [(float(value), attributes) for value, attributes in seen[name]] == [
            (float(value), dict(labels)) for labels, value in rows
        ]
    assert {each.name for each in metrics.metrics()} == {*INSTRUMENTS}
    assert len(calls) == 3  # one collection, and the two readings of this test
    provider.shutdown()


@pytest.mark.parametrize(
    ("module", "use", "package"),
    [
        ("prometheus_client", lambda metrics: [*metrics.collect()], "prometheus-client"),
        ("opentelemetry", lambda metrics: metrics.observe(), "opentelemetry-api"),
    ],
)
def test_a_missing_package_is_named(
    metrics: DPICLMetrics, monkeypatch: pytest.MonkeyPatch, module: str, use: Any, package: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigurationError, match=f"pip install {package}"):
        use(metrics)
