from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy.events import GaussianEvent, PureEvent, SubsampledEvent, canonical_json
from langchain_dpicl.privacy.examples import PrivateExamples
from langchain_dpicl.privacy.ledger import Budget, Ticket
from langchain_dpicl.privacy.report import PrivacyReport, verify_report
from langchain_dpicl.privacy.stores import InMemoryStore
from tests.ledgers import use_simple_prices

CANARY = "zx-report-canary-12"
LABELS = ("a", "b")


def filled(**options: Any) -> Budget:
    """A ledger with a labelled share, a joint plan and both pools; some of it used."""
    ledger = Budget(epsilon=8.0, delta=1e-6, name="ours", **options)
    records = [{"text": f"{CANARY} {i}", "label": "a", "user": i % 3} for i in range(7)]
    size = {"a": 700, "b": 300}
    ledger.bind(
        PrivateExamples(
            records, public_size=size, label_key="label", labels=LABELS, unit_key="user", dataset_id="letters"
        )
    )
    step = SubsampledEvent(GaussianEvent(2.0), 0.01)
    labelled = [Ticket("token", step, label, 20, refundable=True) for label in LABELS]
    public = {"noise_multiplier": 2.0, "model": "tiny"}
    share = ledger.declare("few-shot", tickets=labelled, partition="letters", epsilon=1.0, public=public)
    reservation = share.reserve("token", label="a", count=9)
    reservation.burn(4)
    reservation.commit(3)
    reservation.give_back()
    with ledger.plan():
        for name in ("vote", "select"):
            ledger.declare(name, tickets=[Ticket("query", PureEvent(0.05), None, 10)], epsilon=0.6)
    ledger.gdp_pool("mu pool", epsilon=1.0).reserve(mu=0.01)
    ledger.zcdp_pool("rho pool", epsilon=1.0)
    return ledger


@pytest.fixture(scope="module")
def ledger() -> Budget:
    return filled()


@pytest.fixture(scope="module")
def report(ledger: Budget) -> PrivacyReport:
    return ledger.report()


def test_a_report_says_what_is_promised_to_whom(report: PrivacyReport) -> None:
    data = report.to_dict()
    assert data["adjacency"] == "add_remove"
    assert data["limits"] == {"epsilon": 8.0, "delta": 1e-6}
    assert data["ledger"]["name"] == "ours"
    assert data["ledger"]["durable"] is False
    assert data["datasets"][0]["unit"] == "all records of one 'user'"
    assert data["version"] == report.version
    shares = {tuple(c["name"] for c in share["components"]): share for share in data["shares"]}
    assert set(shares) == {("few-shot",), ("vote", "select"), ("mu pool",), ("rho pool",)}
    few_shot = shares["few-shot",]
    assert few_shot["epsilon"] == 1.0
    assert few_shot["event"]["kind"] == "parallel"
    assert few_shot["components"][0]["public"] == {"noise_multiplier": 2.0, "model": "tiny"}
    assert [ticket["max_count"] for ticket in few_shot["components"][0]["tickets"]] == [20, 20]
    assert few_shot["sealed_at"] is not None
    assert few_shot["pricing"]["engine"]
    assert shares["vote", "select"]["joint"] is True
    assert shares["vote", "select"]["sealed_at"] is None
    assert data["promised"]["epsilon"] == pytest.approx(sum(share["epsilon"] for share in data["shares"]))
    assert data["promised"]["epsilon"] == report.epsilon == pytest.approx(8.0 - filled().remaining_epsilon)
    assert data["promised"]["delta"] == report.delta


def test_a_report_reads_well(report: PrivacyReport) -> None:
    text = str(report)
    for words in (
        "'ours'",
        "limit     epsilon 8, delta 1e-06",
        "add_remove",
        "all records of one 'user', size = a: 700, b: 300",
        "few-shot",
        "token x 40 over 2 labels; sealed ",
        "(joint plan)",
        "    vote",
        "query x 10",
        "pool, mu = ",
        "pool, rho = ",
        "it SEES the private prompts",
        "dies with its process",
    ):
        assert words in text
    assert max(map(len, text.split("\n\n")[1].splitlines())) < 120


def test_an_empty_report_reads_well() -> None:
    empty = Budget(epsilon=1.0, delta=1e-6).report()
    assert "(none)" in str(empty)
    assert verify_report(empty.to_json()).ok
    assert (empty.epsilon, empty.delta) == (0.0, 0.0)


def test_one_number_is_shown_as_the_size() -> None:
    ledger = Budget(epsilon=1.0, delta=1e-6)
    ledger.bind(PrivateExamples([], public_size=123))
    assert "unit = one record, size = 123" in str(ledger.report())


def test_a_durable_ledger_is_not_said_to_die() -> None:
    class Durable(InMemoryStore):
        durable = True
        description = "in a file"

    text = str(Budget(epsilon=1.0, delta=1e-6, store=Durable()).report())
    assert "in a file" in text
    assert "dies" not in text


def test_a_report_depends_on_no_record_and_on_no_use(report: PrivacyReport, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CANARY not in report.to_json() + str(report) + repr(report)
    use_simple_prices(monkeypatch)
    texts = set()
    for records, used in (([], 1), ([CANARY] * 50, 7)):
        ledger = Budget(epsilon=1.0, delta=1e-6)
        ledger.bind(PrivateExamples(records, public_size=100))
        share = ledger.declare("c", tickets=[Ticket("t", PureEvent(0.1), None, 10, refundable=True)], epsilon=1.0)
        reservation = share.reserve("t", count=used)
        reservation.burn(used)
        reservation.commit(used)
        data = ledger.report().to_dict()
        del data["digest"], data["ledger"]["ledger_id"], data["shares"][0]["sealed_at"]
        texts.add(canonical_json(data))
    assert len(texts) == 1


def test_a_report_is_frozen_and_detached(ledger: Budget, report: PrivacyReport) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.shares = ()  # type: ignore[misc]
    before = report.to_json()
    report.to_dict()["shares"][0]["components"][0]["public"]["model"] = "changed"
    report.to_dict()["datasets"][0]["labels"].append("c")
    ledger.report().datasets[0]["labels"].append("d")
    assert report.to_json() == before == ledger.report().to_json()


def test_an_honest_report_verifies(report: PrivacyReport) -> None:
    for form in (report.to_json(), report.to_json(indent=None), report.to_dict(), json.loads(report.to_json())):
        verified = verify_report(form)
        assert verified.problems == ()
        assert verified.ok
        assert 0 < verified.epsilon <= report.epsilon
        assert verified.delta == report.delta


def resigned(data: dict[str, Any]) -> dict[str, Any]:
    """What somebody does who knows the format: sums and digest made to fit the lie."""
    for name in ("epsilon", "delta"):
        data["promised"][name] = math.fsum(share[name] for share in data["shares"])
    body = {key: value for key, value in data.items() if key != "digest"}
    return {**body, "digest": hashlib.sha256(canonical_json(body).encode()).hexdigest()}


def share_named(data: dict[str, Any], name: str) -> dict[str, Any]:
    return next(share for share in data["shares"] if share["components"][0]["name"] == name)


def lower(name: str, factor: float) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        share_named(data, name)["epsilon"] *= factor

    return change


def more_noise_in_event(data: dict[str, Any]) -> None:
    for _, branch in share_named(data, "few-shot")["event"]["branches"]:
        branch["event"]["event"]["noise_multiplier"] = 200.0


def fewer_tickets(data: dict[str, Any]) -> None:
    for ticket in share_named(data, "few-shot")["components"][0]["tickets"]:
        ticket["max_count"] = 1


def larger_delta(data: dict[str, Any]) -> None:
    share_named(data, "few-shot")["delta"] = 1e-5


def fewer_labels(data: dict[str, Any]) -> None:
    data["datasets"][0]["labels"] = ["a"]


def no_data_set(data: dict[str, Any]) -> None:
    data["datasets"] = []


def cheaper_parts_of_a_plan(data: dict[str, Any]) -> None:
    share = share_named(data, "vote")
    for component in share["components"]:
        component["epsilon"] = 0.1
    share["epsilon"] = 0.2


def lower_limit(data: dict[str, Any]) -> None:
    data["limits"]["epsilon"] = 1.0


TAMPERINGS: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (lower("few-shot", 0.1), "charged epsilon"),
    (lower("vote", 0.5), "charged epsilon"),
    (lower("mu pool", 0.9), "charged epsilon"),
    (lower("rho pool", 0.9), "charged epsilon"),
    (more_noise_in_event, "not the one of its tickets"),
    (fewer_tickets, "not the one of its tickets"),
    (cheaper_parts_of_a_plan, "charged epsilon"),
    (larger_delta, "limits"),
    (fewer_labels, "labels"),
    (no_data_set, "labels"),
    (lower_limit, "limits"),
]


@pytest.mark.parametrize(("tamper", "problem"), TAMPERINGS, ids=lambda x: getattr(x, "__name__", ""))
def test_tampering_is_found_even_if_sums_and_digest_are_made_to_fit(
    tamper: Callable[[dict[str, Any]], None], problem: str, report: PrivacyReport
) -> None:
    data = json.loads(report.to_json())
    tamper(data)
    verified = verify_report(resigned(data))
    assert not verified.ok
    assert any(problem in found for found in verified.problems), verified.problems


def test_sums_that_do_not_fit_are_found(report: PrivacyReport) -> None:
    data = json.loads(report.to_json())
    data["promised"]["epsilon"] = 0.5
    body = {key: value for key, value in data.items() if key != "digest"}
    data["digest"] = hashlib.sha256(canonical_json(body).encode()).hexdigest()
    assert any("promised epsilon" in problem for problem in verify_report(data).problems)


@pytest.mark.parametrize("key", ["trust", "version", "assumed_public", "ledger"])
def test_any_other_change_breaks_the_digest(key: str, report: PrivacyReport) -> None:
    data = json.loads(report.to_json())
    data[key] = "trust everybody"
    assert any("digest" in problem for problem in verify_report(data).problems)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.pop("shares"),
        lambda data: data.pop("digest"),
        lambda data: data.update(shares=7),
        lambda data: data.update(adjacency="zero_out"),
        lambda data: data["shares"][0].pop("event"),
        lambda data: data["shares"][0].update(event={"kind": "magic"}),
        lambda data: data["shares"][0].update(epsilon="much"),
        lambda data: data["shares"][0].update(epsilon=float("nan")),
        lambda data: data["shares"][0].update(components=[{}]),
        lambda data: data["shares"][0]["components"][0].update(implementation_delta=1.0),
    ],
)
def test_a_report_that_cannot_be_read_is_not_ok(change: Callable[[Any], Any], report: PrivacyReport) -> None:
    data = json.loads(report.to_json())
    change(data)
    verified = verify_report(data)
    assert not verified.ok
    assert verified.epsilon == math.inf


def test_a_newer_format_is_not_ok(report: PrivacyReport) -> None:
    data = {**report.to_dict(), "report_format": 2}
    assert any("report_format" in problem for problem in verify_report(data).problems)


@pytest.mark.parametrize("report_", ["", "[]", "nonsense", "3", None, 7])
def test_what_is_no_report_is_refused(report_: Any) -> None:
    with pytest.raises(ConfigurationError):
        verify_report(report_)


def test_the_version_is_unknown_where_the_package_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert Budget(epsilon=1.0, delta=1e-6).report().version == "unknown"


def other_noise_shown(data: dict[str, Any]) -> None:
    share_named(data, "few-shot")["components"][0]["public"]["noise_multiplier"] = 4.0


def cheaper_pricing(data: dict[str, Any]) -> None:
    share_named(data, "few-shot")["pricing"]["epsilon"] /= 2


def delta_above_what_the_data_allow(data: dict[str, Any]) -> None:
    data["limits"]["delta"] = 0.9


@pytest.mark.parametrize("tamper", [other_noise_shown, cheaper_pricing, delta_above_what_the_data_allow])
def test_numbers_shown_beside_the_events_have_to_fit_them(
    tamper: Callable[[dict[str, Any]], None], report: PrivacyReport
) -> None:
    data = report.to_dict()
    tamper(data)
    assert not verify_report(resigned(data)).ok


@pytest.mark.parametrize(
    "form", [lambda r: r, lambda r: r.to_json(), lambda r: r.to_json().encode(), lambda r: r.to_dict()]
)
def test_a_report_verifies_in_every_form(form: Callable[[PrivacyReport], Any], report: PrivacyReport) -> None:
    assert verify_report(form(report)).ok


def test_a_limit_beyond_the_proof_of_the_noise_gap_is_said() -> None:
    assert "32" in Budget(epsilon=33.0, delta=1e-6).report().to_text()
