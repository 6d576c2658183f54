from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.metadata
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.cli.main import main
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.generation.plan import Segment, plan_generation
from langchain_dpicl.planning.expected_utility import RowDesign
from langchain_dpicl.privacy.accounting.events import GaussianEvent, PureEvent, SubsampledEvent, canonical_json
from langchain_dpicl.privacy.ledger.store import InMemoryStore
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.reports import rendering
from langchain_dpicl.reports.report import PrivacyReport, verify_report
from tests.ledgers import use_simple_prices
from tests.sealed_files import at, report_by_hand, sealed, with_digest

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
    public = {"model": "tiny"}
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
    assert few_shot["components"][0]["public"] == {"model": "tiny"}
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
        "they SEE it",
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


def test_an_honest_report_verifies_in_every_form(report: PrivacyReport) -> None:
    text = report.to_json()
    for form in (report, text, text.encode(), report.to_json(indent=None), report.to_dict(), json.loads(text)):
        verified = verify_report(form)
        assert verified.problems == ()
        assert verified.ok
        assert 0 < verified.epsilon <= report.epsilon
        assert verified.delta == report.delta


def resigned(data: dict[str, Any]) -> dict[str, Any]:
    """What somebody does who knows the format: sums and digest made to fit the lie."""
    for name in ("epsilon", "delta"):
        data["promised"][name] = math.fsum(share[name] for share in data["shares"])
    return with_digest(data)


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
    assert any("promised epsilon" in problem for problem in verify_report(with_digest(data)).problems)


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


def test_a_text_that_two_readers_read_as_two_reports_is_refused(report: PrivacyReport, tmp_path: Path) -> None:
    """JSON text may repeat a key: Python takes the last, a person and other readers the first."""
    text = report.to_json()
    twice = '{"promised": {"epsilon": 0.1, "delta": 1e-9}, ' + text[1:]
    assert json.loads(twice) == json.loads(text)
    for given in (twice, twice.encode()):
        with pytest.raises(ConfigurationError, match="names a key twice"):
            verify_report(given)
    (path := tmp_path / "report.json").write_text(twice)
    assert main(["report", "verify", str(path)]) == 2


def test_the_version_is_unknown_where_the_package_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    rendering._installed_version.cache_clear()
    assert Budget(epsilon=1.0, delta=1e-6).report().version == "unknown"


def other_noise_shown(data: dict[str, Any]) -> None:
    share_named(data, "few-shot")["components"][0]["public"]["noise_multiplier"] = 4.0


def cheaper_pricing(data: dict[str, Any]) -> None:
    share_named(data, "few-shot")["pricing"]["epsilon"] /= 2


def delta_above_what_the_data_allow(data: dict[str, Any]) -> None:
    data["limits"]["delta"] = 0.9


def opinion_that_contradicts(data: dict[str, Any]) -> None:
    pricing = share_named(data, "few-shot")["pricing"]
    pricing["opinions"] = [{"name": "another", "lower": 2 * pricing["epsilon"], "upper": None}]


def opinion_that_is_no_interval(data: dict[str, Any]) -> None:
    share_named(data, "few-shot")["pricing"]["opinions"] = [{"name": "another", "lower": 0.9, "upper": 0.8}]


@pytest.mark.parametrize(
    "tamper",
    [
        other_noise_shown,
        cheaper_pricing,
        delta_above_what_the_data_allow,
        opinion_that_contradicts,
        opinion_that_is_no_interval,
    ],
)
def test_numbers_shown_beside_the_events_have_to_fit_them(
    tamper: Callable[[dict[str, Any]], None], report: PrivacyReport
) -> None:
    data = report.to_dict()
    tamper(data)
    assert not verify_report(resigned(data)).ok


@pytest.mark.parametrize("where", ["certified", "ledger.certified", "limits.certified", "promised.certified"])
def test_members_that_no_report_of_this_version_has_are_found(where: str, report: PrivacyReport) -> None:
    data = report.to_dict()
    holder, name = at(data, where)
    holder[name] = "epsilon is 0.01"
    assert any("certified" in problem for problem in verify_report(with_digest(data)).problems)
    assert verify_report(with_digest({**data, "version": "0.0.9"})).ok


@pytest.mark.parametrize("when", [-5, "last week"])
def test_a_share_is_sealed_at_a_time(when: Any, report: PrivacyReport) -> None:
    data = report.to_dict()
    share_named(data, "few-shot")["sealed_at"] = when
    assert not verify_report(with_digest(data)).ok


def test_a_limit_beyond_the_proof_of_the_noise_gap_is_said() -> None:
    assert "32" in Budget(epsilon=33.0, delta=1e-6).report().to_text()


# --- reports of real generations --------------------------------------------------------------------------------------

DESIGNS: list[dict[str, Any]] = [
    {"mechanism": mechanism, "adjacency": adjacency, "redraw_every": redraw_every, **design}
    for mechanism in ("gumbel", "gaussian", "permute_and_flip")
    for adjacency in ("add_remove", "replace_one")
    for redraw_every, design in ((1, {}), (7, {"shots_per_slot": 2}), (20, {"rows": "slots"}))
]
FIXED = {"mechanism": "gumbel", "adjacency": "replace_one", "redraw_every": 4, "sampling": "fixed"}


def generation(
    *,
    mechanism: str,
    adjacency: Any,
    redraw_every: int,
    joint: bool = False,
    sizes: Any = None,
    noise_multiplier: float | None = None,
    **design: Any,
) -> PrivacyReport:
    """The report of a share as the synthesizer declares it, planned and priced for real; at epsilon 2, or given noise."""
    ledger = Budget(epsilon=8.0, delta=1e-6, adjacency=adjacency)
    size = sizes or {"a": 9_000, "b": 4_000}
    split: dict[str, Any] = {"label_key": "label", "labels": LABELS} if isinstance(size, dict) else {}
    private = PrivateExamples([], public_size=size, dataset_id="letters", **split)
    ledger.bind(private)
    plan = plan_generation(
        {label: private.public_size_of(label) for label in (private.labels or (None,))},
        epsilon=2.0,
        delta=ledger.default_delta(2.0),
        adjacency=adjacency,
        mechanism=mechanism,
        design=RowDesign.choose(num_slots=20, **design),
        redraw_every=redraw_every,
        segments=(Segment("text", 20),),
        partition="letters",
        noise_multiplier=noise_multiplier,
    )

    def declare(name: str) -> None:
        ledger.declare(
            name,
            tickets=plan.tickets(),
            partition="letters",
            epsilon=2.0 if noise_multiplier is None else plan.epsilon,
            delta=plan.delta,
            implementation_delta=plan.implementation_delta,
            public=plan.to_dict(),
        )

    with ledger.plan() if joint else contextlib.nullcontext():
        for name in ("few-shot", "another") if joint else ("few-shot",):
            declare(name)
    return ledger.report()


@pytest.mark.parametrize("design", [*DESIGNS, {**FIXED, "sizes": 3_000}, {**DESIGNS[0], "sizes": 12_001}], ids=str)
def test_every_design_of_a_generation_verifies(design: dict[str, Any]) -> None:
    report = generation(**design, noise_multiplier=2.0)
    verified = verify_report(report)
    assert verified.problems == ()
    assert 0.95 * report.epsilon < verified.epsilon <= report.epsilon


def test_a_generation_whose_noise_was_calibrated_verifies() -> None:
    verified = verify_report(generation(**DESIGNS[0]))
    assert verified.problems == ()
    assert 1.9 < verified.epsilon <= 2.0


@pytest.fixture(scope="module", params=[False, True], ids=["one share", "joint plan"])
def generated(request: pytest.FixtureRequest) -> PrivacyReport:
    return generation(mechanism="gumbel", adjacency="add_remove", redraw_every=4, joint=request.param)


def edit(path: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    """Changes the value at a dotted path of a report."""

    def apply(data: Any) -> None:
        holder, key = at(data, path)
        holder[key] = change(holder[key])

    apply.__name__ = path
    return apply


def times(factor: float) -> Callable[[float], float]:
    return lambda value: type(value)(value * factor)


SHARE, COMPONENT = "shares.0", "shares.0.components.0"
EDITS: list[tuple[Callable[[Any], None], str]] = [
    (edit("limits.delta", lambda _: 0.9), "1/(10 * public_size)"),
    (edit("limits.delta", lambda _: 1e-5), "1/(10 * public_size)"),
    (edit("limits.delta", lambda _: 1.5), "cannot be read"),
    (edit("limits.epsilon", lambda _: 0.5), "limits"),
    (edit("datasets.0.public_size.a", times(0.5)), "public_size 9000 of label 'a'"),
    (edit("datasets.0.public_size.a", times(2)), "public_size 9000 of label 'a'"),
    (edit("datasets.0.unit", lambda _: "one word"), "not described by its own declaration"),
    (edit("datasets", lambda _: []), "labels"),
    (edit(f"{COMPONENT}.public.noise_multiplier", times(2)), "other tickets"),
    (edit(f"{COMPONENT}.public.noise_multiplier", str), "noise_multiplier"),
    (edit(f"{COMPONENT}.public.labels.1.sampling_rate", times(0.5)), "sampling_rate"),
    (edit(f"{COMPONENT}.public.labels.1.public_size", times(2)), "public_size 8000 of label 'b'"),
    (edit(f"{COMPONENT}.public.labels.1.label", lambda _: "c"), "other tickets"),
    (edit(f"{COMPONENT}.public.num_slots", times(2)), "sampling_rate"),
    (edit(f"{COMPONENT}.public.mechanism", lambda _: "gaussian"), "other tickets"),
    (edit(f"{COMPONENT}.public.max_tokens.text", times(2)), "other tickets"),
    (edit(f"{COMPONENT}.public.candidates", times(2)), "implementation_delta"),
    (edit(f"{COMPONENT}.public.epsilon", times(0.99)), "shows epsilon"),
    (edit(f"{COMPONENT}.public.epsilon", times(1.01)), "shows epsilon"),
    (edit(f"{COMPONENT}.public.delta", times(0.5)), "shows adjacency"),
    (edit(f"{COMPONENT}.public.adjacency", lambda _: "replace_one"), "shows adjacency"),
    (edit(f"{COMPONENT}.implementation_delta", times(0)), "implementation_delta"),
    (edit(f"{COMPONENT}.implementation_delta", times(0.5)), "implementation_delta"),
    (edit(f"{COMPONENT}.implementation_delta", times(2)), "implementation_delta"),
    (edit(f"{COMPONENT}.epsilon", times(0.5)), "asked for epsilon"),
    (edit(f"{COMPONENT}.delta", times(0.5)), "delta"),
    (edit(f"{SHARE}.pricing.epsilon", times(0.9)), "pricing"),
    (edit(f"{SHARE}.pricing.epsilon", times(1.1)), "pricing"),
    (edit(f"{SHARE}.delta", times(0.5)), "few-shot"),
    (edit("trust", lambda _: "everybody"), "trust"),
    (edit("adjacency_means", lambda _: "nothing"), "adjacency_means"),
]


@pytest.mark.parametrize(("change", "problem"), EDITS, ids=lambda x: getattr(x, "__name__", None))
def test_an_edit_of_a_generations_report_is_found_behind_a_fitting_digest(
    change: Callable[[Any], None], problem: str, generated: PrivacyReport
) -> None:
    data = json.loads(generated.to_json())
    change(data)
    verified = verify_report(resigned(data))
    assert not verified.ok
    assert any(problem in found for found in verified.problems), verified.problems
    assert not any("digest" in found for found in verified.problems)


def test_what_was_asked_for_is_what_a_single_share_is_charged() -> None:
    data = generation(**DESIGNS[0]).to_dict()
    data["shares"][0]["components"][0]["epsilon"] = 4.0
    assert any("asked for epsilon 4.0, charged 2.0" in found for found in verify_report(resigned(data)).problems)


def test_a_plan_said_to_be_one_share_is_found() -> None:
    data = generation(**DESIGNS[0], joint=True).to_dict()
    data["shares"][0]["joint"] = False
    assert any("joint plan" in found for found in verify_report(resigned(data)).problems)


def test_another_version_may_have_priced_higher_but_not_lower() -> None:
    data = generation(**DESIGNS[0]).to_dict()
    data["version"] = "0.0.1"
    data["shares"][0]["pricing"]["epsilon"] = 1.99999999
    assert verify_report(resigned(data)).problems == ()
    data["shares"][0]["pricing"]["epsilon"] = 1.9
    assert any("pricing" in found for found in verify_report(resigned(data)).problems)


def test_a_forger_who_rewrites_the_whole_report_is_not_found_and_the_report_says_so() -> None:
    forged = generation(mechanism="gumbel", adjacency="add_remove", redraw_every=1, sizes={"a": 90_000, "b": 4_000})
    assert verify_report(forged).ok
    for words in (forged.to_text(), forged.to_dict()["digest_means"]):
        assert "no signature" in words


@pytest.mark.parametrize(("epsilon", "covered"), [(32.0, True), (32.1, False)])
def test_the_report_says_whether_float_effects_are_covered(epsilon: float, covered: bool) -> None:
    made = Budget(epsilon=epsilon, delta=1e-6).report()
    for words in (made.to_text(), made.to_dict()["noise_gap"]):
        assert "at most 32" in words
        assert ("NOT covered" in words) is not covered
    assert verify_report(made).ok
    data = made.to_dict()
    data["noise_gap"] = "all is covered"
    assert any("noise_gap" in found for found in verify_report(resigned(data)).problems)


# --- what travels with a release --------------------------------------------------------------------------------------


def release(report: PrivacyReport, **changes: Any) -> dict[str, Any]:
    """The report that the synthesizer puts beside what it released."""
    return report_by_hand(report.to_dict(), "few-shot", **changes)


class Released:
    def __init__(self, report: Any) -> None:
        self.report = report


def test_a_release_is_held_against_its_own_share(report: PrivacyReport, generated: PrivacyReport) -> None:
    for made in (report, generated):
        data = release(made)
        forms: list[Any] = [data, Released(data), json.dumps(data), json.dumps(data).encode()]
        if made is generated:  # the other component has no plan of texts
            forms.append(json.dumps(sealed({"examples": [], "report": data, "plan": {}})))
        for form in forms:
            verified = verify_report(form)
            assert verified.problems == ()
            assert (verified.ok, verified.delta) == (True, data["delta"])
            assert verified.epsilon == pytest.approx(share_named(made.to_dict(), "few-shot")["pricing"]["epsilon"])
            assert 0 < verified.epsilon <= data["epsilon"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"epsilon": 0.001}, "epsilon: expected 1.0"),
        ({"epsilon": "infinity"}, "epsilon"),
        ({"epsilon": None}, "epsilon"),
        ({"delta": 1e-12}, "delta"),
        ({"adjacency": "replace_one"}, "adjacency"),
        ({"private": False}, "private"),
        ({"dataset_id": "mails"}, "dataset_id"),
        ({"component": "nobody"}, "component"),
        ({"component": ["few-shot"]}, "component"),
        ({"component": "vote"}, "epsilon"),
        ({"budget": {}}, "cannot be read: 'report_format' is missing"),
    ],
)
def test_a_release_that_claims_something_else_is_not_ok(
    changes: dict[str, Any], problem: str, report: PrivacyReport
) -> None:
    verified = verify_report(release(report, **changes))
    assert not verified.ok
    assert any(problem in found for found in verified.problems), verified.problems


def test_a_release_is_no_better_than_the_ledgers_report_inside(report: PrivacyReport) -> None:
    data = release(report)
    data["budget"] = resigned(copy.deepcopy(data["budget"]))
    more_noise_in_event(data["budget"])
    data["budget"] = resigned(data["budget"])
    assert any("not the one of its tickets" in found for found in verify_report(data).problems)
    del data["budget"]["shares"]
    verified = verify_report(data)
    assert (verified.ok, verified.epsilon) == (False, math.inf)


@pytest.mark.parametrize("private", [True, False])
def test_instruction_only_is_ok_at_epsilon_zero(private: bool) -> None:
    verified = verify_report({"private": private, "epsilon": 0.0, "delta": 0.0, "baseline": "instruction only"})
    assert (verified.ok, verified.epsilon, verified.delta) == (True, 0.0, 0.0)


@pytest.mark.parametrize(
    "data",
    [
        {"private": False, "epsilon": "infinity", "delta": 0.0, "baseline": "real private records"},
        {"private": True, "epsilon": 0.0, "delta": 0.0, "baseline": "generation without noise"},
        {"private": True, "epsilon": 1.0, "delta": 0.0, "baseline": "instruction only"},
        {"private": False, "epsilon": "infinity"},
    ],
)
def test_baselines_without_protection_are_not_private(data: dict[str, Any]) -> None:
    verified = verify_report(data)
    assert (verified.ok, verified.epsilon) == (False, math.inf)
    assert verified.problems[0].startswith("not private")


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"private": True, "epsilon": 1.0, "delta": 1e-6},
        {"budget": None},
        {"budget": [1]},
        {"examples": [], "report": 5},
        Released(None),
        Released(dict),
        b"\xff\xfe\xfa",
        "[" * 100_000,
        object(),
    ],
    ids=lambda form: type(form).__name__,
)
def test_what_has_no_report_is_refused_with_what_to_give(form: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"budget\.report"):
        verify_report(form)


def test_a_missing_part_is_named(report: PrivacyReport) -> None:
    data = report.to_dict()
    del data["shares"]
    assert any("'shares' is missing" in found for found in verify_report(data).problems)
