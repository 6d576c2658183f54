"""Reports of labels for public inputs: what is shown of teachers, noise and counts has to make the tickets charged."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import ConfigurationError, SealedShareError
from langchain_dpicl.options import ConfidentGNMax, FewShotTask, Noise, Rows
from langchain_dpicl.pate.plan import LabellingPlan, plan_labelling
from langchain_dpicl.planning.expected_utility import RowDesign
from langchain_dpicl.planning.share_plan import SharePlan
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy.accounting import epsilon_bound
from langchain_dpicl.privacy.accounting.events import Event
from langchain_dpicl.privacy.extensions.registry import shown_release
from langchain_dpicl.privacy.mechanisms.bounded import ProbabilitySum
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.rehearsal.choice import ChosenRows
from langchain_dpicl.release.declare_share import declare_share
from langchain_dpicl.released.labelled_pool import LabelledPool
from langchain_dpicl.reports.report import VerifiedReport, verify_report
from tests.labelling_doubles import CARD, NOISES, TEACHERS, WIRE, Spy, counts, examples, house, labeler
from tests.sealed_files import assert_found, with_digest

Public = dict[str, Any]
COMBINATIONS = [
    (teachers, mechanism, adjacency)
    for teachers in TEACHERS
    for mechanism in NOISES
    for adjacency in ("add_remove", "replace_one")
    if (teachers, adjacency) != ("fixed", "add_remove")
]
# Tests and answers on one sample are one Gaussian event, so no ticket tells their noises apart.
PROVED = [made for made in COMBINATIONS if made[0] == "fixed" or made[1] != "confident_gnmax"]


own_price = functools.cache(functools.partial(epsilon_bound, opinions=False))


def price(event: Event, *, opinions: bool = True, **terms: Any) -> Any:
    """The accountant's own number; whether a second opinion is asked for moves no price."""
    assert opinions in {True, False}
    return own_price(event, **terms)


@pytest.fixture(autouse=True)
def _prices_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "epsilon_bound", price)


@functools.cache
def made(teachers: str, mechanism: str, adjacency: str) -> LabelledPool:
    """What a labeler leaves behind: two inputs, labelled."""
    noise: Noise | ConfidentGNMax = ConfidentGNMax(5.0, 0.7, 0.9, max_answers=None if teachers == "fresh" else 1)
    if isinstance(usual := NOISES[mechanism], Noise):
        noise = usual.replace(multiplier=0.5)
    made = labeler(budget=house(adjacency), rows=TEACHERS[teachers], noise=noise, epsilon=2e3)
    return made.run(progress=False)


def public_of(data: Public, place: int = 0) -> Public:
    components = [component for share in data["budget"]["shares"] for component in share["components"]]
    return components[place]["public"]


def forged(report: Any, change: Callable[[Public], object]) -> VerifiedReport:
    """What the verifier says of a report after `change` of what its component shows."""
    data = copy.deepcopy(dict(report))
    change(public_of(data))
    data["plan"] = public_of(data)
    found = verify_report({**data, "budget": with_digest(data["budget"])})
    assert not any("digest" in problem for problem in found.problems)
    return found


def with_values(**values: Any) -> Callable[[Public], None]:
    return lambda public: public.update(values)


# --- right reports ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
def test_what_a_labeler_leaves_behind_verifies_in_every_form(combination: tuple[str, str, str]) -> None:
    pool = made(*combination)
    assert {entry.status for entry in pool.entries} <= {"labelled", "rejected", "waiting"}
    for form in (pool, pool.to_json(), pool.to_json().encode(), json.loads(pool.to_json()), pool.report):
        verified = verify_report(form)
        assert verified.problems == ()
        assert 0 < verified.epsilon <= pool.epsilon


def test_what_is_labelled_under_a_plan_that_is_priced_anew_verifies(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = house("add_remove")
    noise = Noise("gaussian", multiplier=0.5)
    given: Public = {"private": examples(), "rows": TEACHERS["fresh"], "noise": noise, "component": "labels"}
    labeler(budget=budget, **given).run(progress=False)
    whole = SharePlan.to_dict
    with monkeypatch.context() as patch:
        patch.setattr(SharePlan, "to_dict", lambda self: {**whole(self), "epsilon": whole(self)["epsilon"] * 0.99})
        pool = labeler(budget=budget, **given).result
    assert pool.plan["epsilon"] == public_of(pool.report)["epsilon"] > 0
    assert verify_report(pool).problems == ()


SLOTS: Public = {"rows": Rows(slots=20)}
TWO = {**SLOTS, "task": FewShotTask(wordings=(FewShotTask("{text}\n{queue}", "{input}"),))}


@pytest.mark.parametrize(
    ("first", "change"),
    [
        ({}, {"suffix": "Q: {input}\nqueue:"}),
        ({}, {"llm": Spy(name="another")}),
        (SLOTS, TWO),
        (TWO, {"task": None, **SLOTS}),
    ],
    ids=["suffix", "llm", "two wordings", "one wording"],
)
def test_another_wording_or_model_of_a_labelling_is_refused_before_a_ticket(first: Public, change: Public) -> None:
    budget, private = house("add_remove"), examples()
    given: Public = {"budget": budget, "component": "labels", "max_queries": 3, **first}
    other = {**given, "budget": Budget.open(budget._store), "public_inputs": [WIRE], **change}
    built = labeler(private, **other)
    labeler(private, **given).label(CARD)
    before = counts(budget)
    for ask in (lambda: labeler(private, **other), built.run):
        with pytest.raises(SealedShareError, match="found others in"):
            ask()
    assert counts(budget) == before
    assert verify_report(labeler(private, **given).run(progress=False)).problems == ()


def test_a_labelling_without_the_rehearsal_that_the_first_run_showed_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budget, private = house("add_remove"), examples()
    with monkeypatch.context() as patch:
        patch.setattr(ChosenRows, "reported", {"rehearsal": {"questions": 100}})
        labeler(private, budget=budget, component="labels").label(CARD)
    with pytest.raises(SealedShareError, match=r"found others in \['rehearsal'\]"):
        labeler(private, budget=budget, component="labels")


def declared(plan: LabellingPlan, *, joint: bool = False, **shown: Any) -> Budget:
    """A ledger with the share, or the joint plan of two shares, that labellings by `plan` declare."""
    ledger = house(plan.release.adjacency)
    private = examples(dataset_id=plan.partition)
    for name in ("first", "second") if joint else ("first",):
        share: Public = {"component": name, "epsilon": None if joint else 2e3, "public": {**plan.to_dict(), **shown}}
        if not joint:
            declare_share(private, ledger, plan, **share)
    if joint:
        ledger.bind(private)
        with ledger.plan():
            for name in ("first", "second"):
                ledger.declare(
                    name,
                    tickets=plan.tickets(),
                    partition=plan.partition,
                    epsilon=plan.epsilon,
                    delta=plan.delta,
                    implementation_delta=plan.implementation_delta,
                    public={**plan.to_dict(), **shown},
                )
    return ledger


def planned(**options: Any) -> LabellingPlan:
    """Labels for three of forty units' inputs."""
    terms = {"epsilon": None, "delta": 1e-5, "max_queries": 3, "width": 3, "noise_multiplier": 2.0}
    return plan_labelling(40, partition="letters", **{**terms, **options})


@pytest.mark.parametrize(
    "options",
    [
        {"design": RowDesign.choose(rows="slots", num_slots=5, shots_per_slot=2)},
        {"design": RowDesign.choose(num_slots=5, sampling="fixed"), "adjacency": "replace_one"},
        {"design": RowDesign.choose(num_slots=40)},
        {"aggregation": ProbabilitySum(), "constants": (2.5,)},
        {"mechanism": "gaussian", "threshold": 1.5},
    ],
    ids=["slots", "balanced", "every unit", "soft", "threshold"],
)
@pytest.mark.parametrize("teachers", ["fresh", "one_sample"])
def test_every_shape_of_rows_verifies(options: Public, teachers: Any) -> None:
    plan = planned(teachers=teachers, **options)
    labels = ["card", "transfer"] if plan.release.constants else ["card", "transfer", "fee"]
    assert verify_report(declared(plan, labels=labels).report()).problems == ()


def test_a_column_for_answers_that_name_no_label_is_a_candidate() -> None:
    ledger = declared(planned(), labels=["card", "transfer"], other_label="other")
    assert verify_report(ledger.report()).problems == ()
    assert_found(
        verify_report(declared(planned(), labels=["card", "transfer"]).report()),
        "shows candidates 3, its plan makes it 2",
    )


def test_a_labelling_whose_noise_was_calibrated_verifies() -> None:
    pool = labeler(noise=None, epsilon=4.0).result
    verified = verify_report(pool.to_json())
    assert verified.problems == ()
    assert 3.8 < verified.epsilon <= 4.0


def test_labellings_of_a_joint_plan_verify_and_each_is_held_against_its_own_tickets() -> None:
    data = declared(planned(), joint=True).report().to_dict()
    assert len(data["shares"]) == 1
    assert verify_report(data).problems == ()
    release = {"budget": copy.deepcopy(data)}
    public_of(release, 1)["max_queries"] = 2
    found = verify_report(with_digest(release["budget"]))
    assert_found(found, "second: shows a plan of labels")
    assert not any(problem.startswith("first") for problem in found.problems)


# --- forged ones ------------------------------------------------------------------------------------------------------

ONE_VALUE: Public = {
    "adjacency": "x",
    "aggregation": "keyword_sum",
    "candidates": 2000,
    "delta": 1e-12,
    "epsilon": 0.01,
    "implementation_delta": 0.0,
    "max_answers": 7,
    "max_queries": 1,
    "noise_multiplier": 50.0,
    "noise_scale": 100.0,
    "num_slots": 10**5,
    "public_size": 10**6,
    "rows": "columns",
    "sampling": "none",
    "sampling_rate": 0.001,
    "shots_per_slot": 9,
    "test_noise_multiplier": 50.0,
    "test_noise_scale": 50.0,
    "threshold": 999.0,
}


@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
def test_no_value_shown_beside_the_release_can_be_another(combination: tuple[str, str, str]) -> None:
    for name, value in ONE_VALUE.items():
        problems = forged(made(*combination).report, with_values(**{name: value})).problems
        assert any(part in each for each in problems for part in (name, "other tickets", "be read")), (name, problems)


@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
def test_other_teachers_and_mechanisms_are_found(combination: tuple[str, str, str]) -> None:
    report = made(*combination).report
    for teachers in set(TEACHERS) - {combination[0]}:
        found = forged(report, with_values(teachers=teachers))
        assert not found.ok
        assert any(part in each for each in found.problems for part in ("other tickets", "be read")), found.problems
    for mechanism in set(NOISES) - {combination[1]}:
        assert_found(forged(report, with_values(mechanism=mechanism)), f"shows mechanism {mechanism!r}")


def louder(public: Public) -> None:
    """Twenty times the noise, wherever it is shown."""
    for name in ("noise_multiplier", "noise_scale"):
        public[name] *= 20
    public["release"]["mechanism"]["noise_multiplier"] *= 20


def another_mechanism(public: Public) -> None:
    name = "gaussian" if public["mechanism"] != "gaussian" else "gumbel"
    public.update(mechanism=name, max_answers=None, test_noise_multiplier=None, test_noise_scale=None)
    public["release"]["mechanism"] = {"name": name, "noise_multiplier": public["noise_multiplier"]}


def another_count(public: Public) -> None:
    public["max_queries"] = 1
    public["release"]["redraw_every"] = 1


def another_pool(public: Public) -> None:
    """A hundred times the units, and so a hundredth of the rate."""
    sampler = public["release"]["sampler"]
    for where in (public, sampler):
        where.update({"public_size": 4000} if "public_size" in where else {})
    if "sampling_rate" in sampler:
        sampler["sampling_rate"] /= 100
        public["sampling_rate"] /= 100


@pytest.mark.parametrize("change", [louder, another_mechanism, another_count], ids=lambda change: change.__name__)
@pytest.mark.parametrize("combination", PROVED, ids="-".join)
def test_a_release_forged_along_makes_other_tickets(
    combination: tuple[str, str, str], change: Callable[[Public], None]
) -> None:
    assert_found(forged(made(*combination).report, change), "other tickets")


@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
def test_a_larger_pool_than_the_declared_one_is_found(combination: tuple[str, str, str]) -> None:
    assert_found(forged(made(*combination).report, another_pool), "public_size 4000")


def test_a_size_that_only_the_release_shows_is_the_declared_one() -> None:
    def change(public: Public) -> None:
        public["release"]["sampler"]["public_size"] = 4000

    assert_found(forged(made("fixed", "gumbel", "replace_one").report, change), "release.sampler.public_size 4000")


@pytest.mark.parametrize("values", [{"num_slots": 10}, {"overfill": 2.0}], ids=str)
@pytest.mark.parametrize("teachers", ["fresh", "one_sample"])
def test_rows_make_the_rate_that_is_charged(teachers: str, values: Public) -> None:
    found = forged(made(teachers, "confident_gnmax", "add_remove").report, with_values(**values))
    assert_found(found, "shows sampling_rate")


def test_another_adjacency_than_the_ledgers_is_found_where_the_whole_release_is_under_it() -> None:
    def change(public: Public) -> None:
        there = dataclasses.replace(shown_release(public["release"]), adjacency="replace_one")
        scale = there.mechanism.noise_multiplier * there.sensitivity.range
        public.update(release=there.to_dict(), adjacency="replace_one", noise_scale=scale)

    found = forged(made("fresh", "gumbel", "add_remove").report, change)
    assert_found(found, "the ledger's adjacency is 'add_remove'")
    assert len(found.problems) == 1


def test_a_test_is_not_paid_with_the_noise_of_an_answer() -> None:
    report = made("fixed", "confident_gnmax", "replace_one").report
    public = public_of(dict(report))
    noises = {"noise_multiplier": public["test_noise_multiplier"], "test_noise_multiplier": public["noise_multiplier"]}
    assert noises["noise_multiplier"] != noises["test_noise_multiplier"]
    for values in (noises, {"test_noise_multiplier": 1e6, "test_noise_scale": 1e6}):
        along = {**public["release"], "mechanism": {**public["release"]["mechanism"], **values}}
        along["mechanism"].pop("test_noise_scale", None)
        assert_found(forged(report, with_values(**values)), "shows test_noise_multiplier")
        assert_found(forged(report, with_values(**values, release=along)), "other tickets")


@pytest.mark.parametrize(
    "values",
    [
        {"teachers": "fresh", "mechanism": "gumbel", "public_size": 10**6, "max_queries": 1, "epsilon": 0.01},
        {"noise_multiplier": 0.7, "test_noise_multiplier": 0.9},
        {"max_queries": 200, "max_answers": 200, "noise_multiplier": 9.0, "test_noise_multiplier": 7.0},
    ],
    ids=["another labelling", "noises swapped", "more inputs with more noise"],
)
@pytest.mark.parametrize("teachers", ["one_sample", "fixed"])
def test_several_values_that_would_cost_the_same_are_found(teachers: str, values: Public) -> None:
    assert not forged(made(teachers, "confident_gnmax", "replace_one").report, with_values(**values)).ok


def test_more_inputs_with_as_much_more_noise_are_given_away_by_the_gap_of_the_noise() -> None:
    def change(public: Public) -> None:
        public.update(max_queries=200, max_answers=100)
        for name in ("noise_multiplier", "test_noise_multiplier"):
            public[name] *= 10
            public["release"]["mechanism"][name] *= 10
        public["release"]["redraw_every"] = 200

    found = forged(made("one_sample", "confident_gnmax", "add_remove").report, change)
    assert_found(found, "implementation_delta: expected")
    assert not any("other tickets" in problem for problem in found.problems)


def test_of_a_test_and_an_answer_on_one_sample_only_the_combination_is_proved() -> None:
    def swap(public: Public) -> None:
        linf = public["test_noise_scale"] / public["test_noise_multiplier"]
        l2 = public["noise_scale"] / public["noise_multiplier"]
        answer, test = public["test_noise_multiplier"], public["noise_multiplier"]
        public.update(noise_multiplier=answer, noise_scale=answer * l2)
        public.update(test_noise_multiplier=test, test_noise_scale=test * linf)
        public["release"]["mechanism"].update(noise_multiplier=answer, test_noise_multiplier=test)

    assert forged(made("fresh", "confident_gnmax", "add_remove").report, swap).ok
    assert not forged(made("one_sample", "confident_gnmax", "add_remove").report, swap).ok  # 2 tests, 1 answer
    assert not forged(made("fixed", "confident_gnmax", "replace_one").report, swap).ok


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("redraw_every",), 2, "redraw_every 2"),
        (("adjacency",), "replace_one", "'replace_one'"),
        (("sensitivity", "range"), 0.5, "as its parts show it"),
        (("constants",), [7.0], "shows release.constants"),
        (("sampler", "name"), "poisson_rows", "sampler: expected one of"),
        (("mechanism", "name"), "joint_exponential", "num_choices"),
        (("aggregation", "name"), "unit_vector_sum", "UnitVectorSum"),
        (("mechanism", "threshold"), 1.0, "threshold"),
        (("remark",), "trust me", "as its parts show it"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else None,
)
def test_a_release_is_built_of_known_parts_that_fit(path: tuple[str, ...], value: Any, problem: str) -> None:
    def change(public: Public) -> None:
        inner = public["release"]
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = value

    assert_found(forged(made("fresh", "gumbel", "add_remove").report, change), problem)


@pytest.mark.parametrize("name", ["release", "candidates", "max_answers", "sampling", "overfill", "epsilon"])
def test_a_labelling_without_its_parameters_is_not_ok(name: str) -> None:
    found = forged(made("fresh", "gumbel", "add_remove").report, lambda public: public.pop(name))
    assert_found(found, f"'{name}' is missing")


MALFORMED = [[], {}, "x", -1, 10**400, True, [[[]]], {"name": []}, {"name": "vote_sum", "name2": 1}]


@pytest.mark.parametrize(
    "combination",
    [("fresh", "gumbel", "add_remove"), ("fixed", "confident_gnmax", "replace_one")],
    ids="-".join,
)
def test_values_of_another_form_are_a_problem_and_never_an_error(combination: tuple[str, str, str]) -> None:
    pool = made(*combination)
    names = set(planned().to_dict()) - ({"overfill"} if combination[0] == "fixed" else set())
    for name in sorted(names):
        for value in MALFORMED[name == "constants" :]:  # no constants at all are constants
            assert not forged(pool.report, with_values(**{name: value})).ok, (name, value)
    for name in ("sampler", "aggregation", "mechanism", "adjacency", "redraw_every", "sensitivity", "constants"):
        for value in (*MALFORMED[1:], None):
            change = with_values(release={**public_of(dict(pool.report))["release"], name: value})
            assert not forged(pool.report, change).ok, (name, value)


def test_a_threshold_that_nothing_releases_is_found() -> None:
    plan = planned(mechanism="gaussian")
    for threshold, is_right in ((3.0, True), (None, True), ("many", False)):
        assert verify_report(declared(plan, threshold=threshold).report()).ok is is_right
    assert_found(
        verify_report(declared(planned(mechanism="gumbel"), threshold=3.0).report()), "releases no noisy vector"
    )


def test_the_share_of_votes_that_is_told_is_the_one_that_rejects() -> None:
    for mechanism in ("gumbel", "gaussian"):
        report = made("fresh", mechanism, "add_remove").report
        for value in (0.2, None, 7, "half"):
            assert not forged(report, with_values(abstain_below=value)).ok, (mechanism, value)


def test_labels_of_a_data_set_that_no_report_declares_are_found() -> None:
    ledger = house()
    plan = planned()
    terms = {"epsilon": 2e3, "delta": plan.delta, "implementation_delta": plan.implementation_delta}
    ledger.declare("first", tickets=plan.tickets(), public=plan.to_dict(), **terms)
    ledger.bind(PrivateExamples([], public_size=40))
    assert_found(verify_report(ledger.report()), "partition: expected the dataset_id")


def test_tickets_are_never_charged_as_a_pool() -> None:
    data = copy.deepcopy(dict(made("fixed", "gaussian", "replace_one").report))
    share = data["budget"]["shares"][0]
    for kind, found in (("gdp", "charged as a pool"), ("tickets", "expected one of ('gdp', 'zcdp'), with the limit")):
        share["components"][0] |= {"kind": kind, "limit": 0.001}
        assert_found(verify_report({**data, "budget": with_digest(data["budget"])}), found)


def test_a_release_is_read_back_as_it_was() -> None:
    for combination in COMBINATIONS:
        shown = public_of(dict(made(*combination).report))["release"]
        assert shown_release(shown).to_dict() == shown
    with pytest.raises(ConfigurationError, match="adjacency"):
        shown_release({**shown, "adjacency": "zero_out"})
