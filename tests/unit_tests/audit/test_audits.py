"""The front door of the audits: what is taken, what is said, and that it can fail."""

from __future__ import annotations

import dataclasses
import functools
import json
import tracemalloc
import warnings
from pathlib import Path
from typing import Any, get_args

import pytest

from langchain_dpicl import Budget
from langchain_dpicl._calls import warn_caller
from langchain_dpicl.audit import (
    CANNOT_SEE,
    AuditReport,
    AuditResult,
    PrivacyAuditError,
    Subject,
    assert_private,
    audit,
    component_checks,
    control,
    games_of,
    play,
    suite,
)
from langchain_dpicl.audit import game as game_module
from langchain_dpicl.audit.component_games import VotingGame, evolution_of, retriever_of
from langchain_dpicl.audit.count_games import documents_of
from langchain_dpicl.audit.game import ALARM, HALF, AuditCheck, claimed_loss, index_law, power_of, refutation_power
from langchain_dpicl.audit.targets import (
    MARK,
    ReadGradients,
    ReadTokens,
    helper_of,
    labeler_of,
    plain_steps,
    share_of,
    synthesizer_of,
    training_of,
    voter_of,
)
from langchain_dpicl.cli.main import main
from langchain_dpicl.discovery import plan_discovery, plan_words
from langchain_dpicl.evaluation.plan import plan_choice, plan_evaluation
from langchain_dpicl.evolution import plan_evolution
from langchain_dpicl.exceptions import ConfigurationError, NoisyPlanWarning
from langchain_dpicl.generation.plan import TokenRule, plan_generation
from langchain_dpicl.generation.synthesizer import DemonstrationSynthesizer
from langchain_dpicl.options import Decoding, GenerationTask, Noise, NoiseName, Rows
from langchain_dpicl.pate.plan import plan_labelling
from langchain_dpicl.planning import expected_utility
from langchain_dpicl.planning.expected_utility import RowDesign
from langchain_dpicl.privacy.extensions.confident_gnmax import ConfidentGNMaxMechanism
from langchain_dpicl.privacy.extensions.registry import MECHANISMS
from langchain_dpicl.runs.query_plan import plan_queries
from langchain_dpicl.soft_prompts.plan import plan_training
from langchain_dpicl.streams import PrivateStream

SLOTS = RowDesign.choose(rows="slots", num_slots=5, shots_per_slot=2)
TERMS: dict[str, Any] = {"epsilon": None, "delta": 1e-6, "noise_multiplier": 1.5}
PLANS = {
    "voting": plan_queries(800, max_queries=20, width=3, design=SLOTS, **TERMS),
    "pate": plan_labelling(800, max_queries=20, width=3, teachers="one_sample", design=SLOTS, **TERMS),
    "confident": plan_labelling(
        50,
        **{**TERMS, "noise_multiplier": None},
        max_queries=5,
        width=3,
        teachers="fixed",
        adjacency="replace_one",
        mechanism=ConfidentGNMaxMechanism(2.0, 3.0, threshold=30.0),
        max_answers=3,
    ),
    "generation": plan_generation({"a": 500, "b": 700}, design=SLOTS, candidates=11, **TERMS),
    "logits": plan_generation(
        {None: 500}, mechanism=TokenRule("clip_and_blend", temperature=0.7), candidates=50, **TERMS
    ),
    "evolution": plan_evolution({"a": 500, "b": 700}, rounds=3, **TERMS),
    "dpsgd": plan_training(1000, expected_batch_size=50, l2_clip_norm=0.1, width=12, steps=5, **TERMS),
}


@pytest.mark.parametrize("name", PLANS)
def test_the_json_of_a_plan_is_rebuilt_at_the_same_price_and_a_smaller_claim_is_refuted(name: str) -> None:
    told = json.loads(json.dumps(PLANS[name].to_dict()))
    subject = Subject.of({"plan": told})
    assert subject.plan.event() == PLANS[name].event()
    assert subject.method == {"confident": "pate", "logits": "generation"}.get(name, name)
    assert suite.check_price(subject).verdict == "sound"
    assert suite.check_price(Subject.of({**told, "epsilon": 0.9 * told["epsilon"]})).verdict == "violated"
    assert suite.check_price(Subject.of({**told, "delta": told["delta"] / 1e3})).verdict == "violated"


@pytest.mark.parametrize("name", PLANS)
def test_every_game_of_a_plan_states_its_power(name: str) -> None:
    games = games_of(Subject.of(PLANS[name]))
    assert games
    assert all(game.law is not None for game in games)


COMPONENTS = {
    "DPVotingRunnable": lambda: voter_of((), max_queries=3, with_scores=True, mechanism="gaussian"),
    "DPFreeFormRunnable": lambda: helper_of((), max_queries=3),
    "PromptPATELabeler": lambda: labeler_of((), 3),
    "DemonstrationSynthesizer": lambda: synthesizer_of((), 3),
    "PrivateEvolution": lambda: evolution_of((), 3),
    "PromptDPSGD": lambda: training_of((), engine=ReadGradients(2), training=plain_steps(3)),
}


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_component_is_audited_by_its_plan_and_its_ledger(name: str) -> None:
    component = COMPONENTS[name]()
    subject = Subject.of(component)
    assert subject.name == name
    assert subject.plan is component.plan
    assert [check(subject).verdict for check in (suite.check_price, suite.check_tickets, suite.check_report)] == [
        "sound"
    ] * 3
    other = dataclasses.replace(subject, plan=COMPONENTS_OTHER[name]().plan)
    assert suite.check_tickets(other).verdict == "violated"


COMPONENTS_OTHER = {
    "DPVotingRunnable": lambda: voter_of((), max_queries=4, with_scores=True, mechanism="gaussian"),
    "DPFreeFormRunnable": lambda: helper_of((), max_queries=3, noise_multiplier=0.4),
    "PromptPATELabeler": lambda: labeler_of((), 3, noise_multiplier=0.4),
    "DemonstrationSynthesizer": lambda: synthesizer_of((), 4),
    "PrivateEvolution": lambda: evolution_of((), 4),
    "PromptDPSGD": lambda: training_of(
        (), engine=ReadGradients(2), training=plain_steps(3), noise=Noise(multiplier=0.4)
    ),
}


def test_a_report_that_does_not_add_up_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject.of(COMPONENTS["DPVotingRunnable"]())
    real = subject.component.budget.report().to_dict()
    real["shares"][0]["epsilon"] = 0.1
    monkeypatch.setattr(type(subject.component.budget), "report", lambda self: real)
    assert suite.check_report(subject).verdict == "violated"


@pytest.mark.parametrize(
    "wrong",
    [{}, {"plan": 3}, {"plan": {"max_queries": 3}}, 7, "voter", object()],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_audited_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="audit: expected"):
        audit(wrong)


@pytest.mark.parametrize("value", [None, "x", [], {}, -1], ids=repr)
@pytest.mark.parametrize("field", ["epsilon", "delta", "noise_multiplier", "adjacency", "num_slots", "constants"])
def test_a_plan_with_a_field_of_another_kind_is_refused(field: str, value: Any) -> None:
    if (field == "constants" and not value and value is not None) or (field, value) == ("num_slots", None):
        return  # no constants, and the planner's own number
    with pytest.raises(ConfigurationError):
        Subject.of({**PLANS["voting"].to_dict(), field: value})


# --- what is said -----------------------------------------------------------------------------------------------------

SMALL = VotingGame(
    units=("1,0",),
    neighbour=(),
    runs=30,
    options={"mechanism": "gaussian", "noise_multiplier": 0.5},
    law=next(suite.vote_cases(VotingGame, mechanism="gaussian", rows="slots", adjacency="add_remove")).law,
)


def test_a_game_that_is_too_small_is_undecided_and_says_so() -> None:
    result = play(SMALL)
    assert result.verdict == "undecided"
    assert result.power is not None
    assert result.power < 0.99
    assert "give more runs" in str(result)
    almost = component_checks.result_of("x", (), runs=1, blind=(), power=0.9896)
    assert str(almost).endswith(
        "power 0.989 (half of the noise); half of the noise would be seen with a chance of 0.98 only"
    )


@pytest.mark.parametrize("kind", ["keywords", "secret sample"])
def test_a_control_is_skipped_where_half_of_the_noise_is_not_what_a_game_can_show(kind: str) -> None:
    given = {"rows": "units", "adjacency": "add_remove"}
    found = [*suite.vote_cases(VotingGame, mechanism="gumbel", **given)]
    found += suite.free_form_cases(aggregation="keywords", **given)
    (game,) = (game for game in found if kind in game.name)
    result = control(game)
    assert (result.verdict, result.runs, result.confidence) == ("skipped", 0, 1.0)


def test_the_power_of_a_game_on_a_secret_sample_is_named_and_is_not_for_half_of_the_noise() -> None:
    game = [*suite.vote_cases(VotingGame, mechanism="gumbel", rows="units", adjacency="add_remove")][1]
    event = game.event(game.sides()[0])
    assert power_of(game, event) >= 0.99
    assert game.law(2.0)[0] > 0.9  # everybody
    assert "power 0.999 (everybody in every sample)" in str(play(game))
    half = index_law("gumbel", ((1.0, 0.0), (0.0, 0.0)), scale=1 / 6)(1.0)
    sampled_half = 0.25 * half[0] + 0.75 * half[1], half[1]
    assert refutation_power(event, sampled_half, runs=game.runs, alarm=ALARM / 4) < 0.01


def test_a_control_that_was_not_seen_is_undecided_and_one_that_was_is_sound() -> None:
    assert control(SMALL).verdict == "undecided"
    game = dataclasses.replace(SMALL, runs=400, law=None)  # missed with a chance of 1e-14
    found = control(game)
    assert found.verdict == "sound"
    assert found.found > found.claimed
    assert power_of(game, None) is None


PLANS_OF_COUNTS = {
    "counts": plan_discovery("value", values=("mine", "other"), epsilon=1.0, delta=1e-6),
    "words": plan_words(epsilon=1.0, delta=1e-6, max_values=3),
    "documents": documents_of(()).plan,
    "evaluation": plan_evaluation(500, widths=[2], epsilon=1.0, delta=1e-6),
    "choice": plan_choice(500, candidates=2, epsilon=1.0, delta=1e-6),
    "retrieval": retriever_of(()).plan,
}


@pytest.mark.parametrize("name", [*PLANS, *PLANS_OF_COUNTS])
def test_what_an_audit_makes_up_warns_nobody(name: str) -> None:
    """Its records are few; where a project's tests take warnings for errors, the audit would fail."""
    subject = Subject.of({**PLANS, **PLANS_OF_COUNTS}[name])
    small = (dataclasses.replace(game, runs=4) for game in games_of(subject))
    checks = (AuditCheck(game.name, functools.partial(play, game, looks=1)) for game in small)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        verdicts = {result.verdict for result in suite._play_checks(checks)}
    assert verdicts <= {"sound", "undecided", "skipped"}


def test_an_audit_leaves_the_warnings_of_other_threads_alone() -> None:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        filters = list(warnings.filters)
        assert suite._alone(lambda: (warn_caller(NoisyPlanWarning("made up")), list(warnings.filters))[1]) == filters
        warn_caller(NoisyPlanWarning("of a component"))
    assert [str(one.message) for one in heard] == ["of a component"]


@pytest.mark.parametrize("name", [*PLANS, *PLANS_OF_COUNTS])
def test_a_control_plays_every_game_at_half_of_its_noise_against_the_claim_of_all_of_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = []

    def play(game: Any, *, claim: Any) -> AuditResult:
        losses.append((claimed_loss(game.event(game.sides()[0])), claimed_loss(claim)))
        return AuditResult(check=game.name, verdict="violated")

    monkeypatch.setattr(game_module, "play", play)
    verdicts = {control(game).verdict for game in games_of(Subject.of({**PLANS, **PLANS_OF_COUNTS}[name]))}
    assert verdicts <= {"sound", "skipped"}
    assert losses
    assert [halved for halved, _ in losses] == pytest.approx([2.0 * claim for _, claim in losses])


def test_a_false_claim_is_violated_with_a_lower_bound_above_it() -> None:
    from langchain_dpicl.privacy.accounting.events import GaussianEvent

    # A mu of 2 is lost and 0.5 is claimed; missed with a chance below 1e-9.
    result = play(dataclasses.replace(SMALL, runs=400, law=None), claim=GaussianEvent(2.0))
    assert result.verdict == "violated"
    assert result.lower_bound > result.claimed_epsilon
    assert result.details


def test_reports_say_the_worst_and_add_up_their_alarms() -> None:
    def result(verdict: Any, confidence: float = 1 - 1e-6) -> AuditResult:
        return AuditResult(check="one", verdict=verdict, confidence=confidence, found=float("inf"))

    assert AuditReport(subject="x", results=()).verdict == "undecided"
    assert AuditReport(subject="x", results=(result("skipped"),)).verdict == "undecided"
    assert AuditReport(subject="x", results=(result("skipped"), result("sound"))).verdict == "sound"
    assert "(1 checks, 1 skipped" in AuditReport(subject="x", results=(result("skipped"), result("sound"))).summary()
    assert AuditReport(subject="x", results=(result("sound"), result("undecided"))).verdict == "undecided"
    report = AuditReport(subject="x", results=(result("sound"), result("violated"), result("sound", 1.0)))
    assert (report.verdict, report.ok) == ("violated", False)
    assert report.false_alarm == pytest.approx(2e-6)
    told = json.loads(report.to_json())
    assert told["results"][0]["found"] == "inf"
    assert told["cannot_see"] == list(CANNOT_SEE)
    assert all(line in str(report) for line in CANNOT_SEE)


# --- the whole, on the quick methods ------------------------------------------------------------------------------------


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the games and the samples to the slow tests."""
    monkeypatch.setattr(suite, "games_of", lambda subject: ())
    monkeypatch.setattr(suite, "_sample_checks", lambda subject: ())
    monkeypatch.setattr(suite, "_coin_of", lambda subject: None)


def test_a_sound_component_passes_and_is_neither_read_nor_charged() -> None:
    voter = voter_of(("1,0",), public_size=100, num_slots=5, max_queries=20, mechanism="gaussian", with_scores=True)
    seen: list[AuditResult] = []
    report = assert_private(voter, progress=seen.append)
    assert list(report.results) == seen
    assert {result.verdict for result in seen} == {"sound"}, [str(result) for result in seen]
    assert len(seen) >= 10
    assert report.false_alarm < 1e-5
    assert share_of(voter).remaining("query") == 20


def test_a_violation_is_an_assertion_that_pytest_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    claimed = {**PLANS["voting"].to_dict(), "epsilon": 0.01}
    with pytest.raises(PrivacyAuditError, match=r"claimed is epsilon 0\.01") as caught:
        assert_private(claimed)
    assert isinstance(caught.value, AssertionError)
    assert float(str(caught.value).split("it costs ", 1)[1].split()[0]) >= PLANS["voting"].epsilon
    assert caught.value.report.violations()[0].check == "price: computed again"


def test_what_is_proved_is_rounded_down_and_what_is_claimed_up() -> None:
    result = AuditResult(check="one", verdict="sound", lower_bound=1.2399, claimed_epsilon=1.2301)
    assert "epsilon at least 1.23, claimed 1.24" in str(result)


def test_what_is_undecided_fails_unless_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    monkeypatch.setattr(suite, "games_of", lambda subject: (SMALL,))
    with pytest.raises(PrivacyAuditError):
        assert_private(PLANS["voting"])
    assert assert_private(PLANS["voting"], allow_undecided=True).verdict == "undecided"


@pytest.mark.parametrize("bug", ["drawn twice", "wrong rate", "noise", "sum"])
def test_a_planted_part_of_a_users_plan_is_caught_by_the_whole(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from langchain_dpicl.privacy.mechanisms import release_plan as mechanisms
    from langchain_dpicl.privacy.mechanisms.bounded import Sensitivity, VoteSum
    from langchain_dpicl.privacy.mechanisms.release_plan import PoissonSlots

    quick(monkeypatch)
    real = PoissonSlots.draw
    if bug == "drawn twice":
        monkeypatch.setattr(PoissonSlots, "draw", lambda self, n, *, rng: (*real(self, n, rng=rng)[:-1], (0, 0)))
    elif bug == "wrong rate":
        wrong = PoissonSlots(0.1, 5, 2)
        monkeypatch.setattr(PoissonSlots, "draw", lambda self, n, *, rng: real(wrong, n, rng=rng))
    elif bug == "noise":
        monkeypatch.setattr(mechanisms, "ROUND_UP", 0.7)
    else:
        monkeypatch.setattr(VoteSum, "sensitivity", lambda self, **_: Sensitivity(l2=1.0, range=1.0, linf=1.0))
    assert audit(PLANS["voting"]).verdict == "violated"


def test_reused_coins_and_samples_are_violations() -> None:
    assert component_checks.check_freshness(lambda: True).verdict == "violated"
    coins = iter([True, False] * 100)
    assert component_checks.check_freshness(lambda: next(coins)).verdict == "violated"
    assert suite.judge_presences([1, 0] * 80).verdict == "violated"
    assert suite.judge_presences([1] * 160).verdict == "violated"
    assert suite.judge_presences([2, 0, 0, 1] * 40).verdict == "violated"


@pytest.mark.parametrize("shots", [1, 3])
@pytest.mark.parametrize("slots", [5, 60, 400])
def test_a_deal_in_turn_is_caught_at_any_number_of_slots(
    slots: int, shots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units that never share a slot as often as by chance; missed with a chance of 2e-9."""
    from langchain_dpicl.privacy.mechanisms.release_plan import PoissonSlots, assign

    release = dataclasses.replace(PLANS["voting"].release, sampler=PoissonSlots(0.02, slots, shots))
    assert component_checks.check_unit_places(release).verdict == "sound"

    def draw(self: Any, n: int, *, rng: Any) -> Any:
        places = rng.choice_without_replacement(self.num_slots, min(n, self.num_slots)).tolist()
        return assign(range(len(places)), places, num_slots=self.num_slots, shots_per_slot=self.shots_per_slot)

    monkeypatch.setattr(PoissonSlots, "draw", draw)
    assert component_checks.check_unit_places(release).verdict == "violated"


def test_of_the_many_slots_of_a_deal_few_draws_are_looked_at() -> None:
    """Each of them makes all slots: 600 of 10,000 batches took minutes."""
    from langchain_dpicl.privacy.extensions.random_allocation import AllocatedSlots

    release = dataclasses.replace(PLANS["voting"].release, sampler=AllocatedSlots(1.0, 200, 20, 4))
    found = component_checks.check_unit_places(release)
    assert (found.verdict, found.runs) == ("sound", 20)


def test_the_samples_of_every_label_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    from langchain_dpicl.privacy.mechanisms.release_plan import PoissonSlots

    quick(monkeypatch)
    wrong = PLANS["generation"].branches[1][1].sampler
    real = PoissonSlots.draw

    def draw(self: Any, n: int, *, rng: Any) -> Any:
        is_wrong = self.sampling_rate == wrong.sampling_rate
        return real(dataclasses.replace(self, sampling_rate=1.0) if is_wrong else self, n, rng=rng)

    monkeypatch.setattr(PoissonSlots, "draw", draw)
    assert [result.check for result in audit(PLANS["generation"]).violations()] == ["sampler: rate, label 'b'"]


def test_what_is_not_played_is_skipped_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "games_of", lambda subject: ())

    def skipped(plan: Any) -> set[str]:
        return {result.check for result in audit(plan).results if result.verdict == "skipped" and result.details}

    shared = {"sampler: rate", "noise: scale, at your own size", "samples: drawn anew, as the engine sees them"}
    assert skipped(PLANS["confident"]) == {*shared, "noise: fresh for every answer"}
    assert skipped(PLANS["pate"]) == {"samples: drawn anew, as the engine sees them"}
    assert "one run, many canaries" in skipped(PLANS["dpsgd"])
    votes = plan_queries(800, max_queries=20, width=3, design=SLOTS, mechanism="gaussian", **TERMS)
    assert skipped(votes) == {"scores: noisy votes that leave"}


@pytest.mark.parametrize(
    ("name", "table"), [("_LAWS", expected_utility._LAWS), ("WINS", game_module.WINS), ("_VOTES", suite._VOTES)]
)
def test_a_mechanism_that_a_table_of_laws_lacks_is_refused_with_the_name_of_the_table(
    name: str, table: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(MECHANISMS) == set(get_args(NoiseName)) <= set(table)
    plan = plan_queries(800, max_queries=20, width=3, mechanism="permute_and_flip", **TERMS)
    monkeypatch.delitem(table, "permute_and_flip")
    with pytest.raises(ConfigurationError, match=rf"found 'permute_and_flip'\. Add it to \w+/\w+\.{name}"):
        [act() for act in (plan.expected, lambda: audit(plan))]


@pytest.mark.parametrize("multiplier", [0.4, 2.0**25])
def test_noise_beyond_what_sums_can_show_is_undecided_and_half_of_it_has_a_power(multiplier: float) -> None:
    from langchain_dpicl.privacy.mechanisms.release_plan import GumbelMechanism

    found = component_checks.check_noise_scale(
        dataclasses.replace(PLANS["voting"].release, mechanism=GumbelMechanism(multiplier)), width=3
    )
    assert found.verdict == ("sound" if multiplier < 1 else "undecided")
    assert (found.power >= 0.99) == (multiplier < 1)
    assert found.power_for == HALF
    assert found.blind_to[0] == "noise of which less than about 25 % is missing"


# --- dpicl audit --------------------------------------------------------------------------------------------------------

MODULE = """
from langchain_dpicl.audit.targets import voter_of
def make():
    return voter_of((), max_queries=3)
voter = make()
def broken():
    raise ValueError("a secret in a message")
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    quick(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "audited_project.py").write_text(MODULE)
    (tmp_path / "plan.json").write_text(json.dumps({"plan": PLANS["voting"].to_dict()}))
    (tmp_path / "wrong.json").write_text(json.dumps({**PLANS["voting"].to_dict(), "epsilon": 0.01}))
    return tmp_path


@pytest.mark.parametrize("what", ["plan.json", "audited_project:voter", "audited_project:make()"])
def test_the_command_audits_a_plan_or_an_object(what: str, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", what, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["subject"], told["verdict"]) == (what, "sound")


def test_the_command_fails_on_a_violation(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "wrong.json"]) == 1
    said = capsys.readouterr().out
    assert "violated  price: computed again" in said
    assert "No audit sees:" in said


def test_the_command_fails_on_the_undecided_if_it_is_strict(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "games_of", lambda subject: (SMALL,))
    assert main(["audit", "plan.json"]) == 0
    assert main(["audit", "plan.json", "--strict"]) == 1


@pytest.mark.parametrize(
    "what", ["audited_project:broken()", "audited_project:nothing", "no_such_module:x", "missing.json", "a b:c"]
)
def test_the_command_says_what_it_could_not_find_and_quotes_no_message(
    what: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", what]) == 2
    assert "secret" not in capsys.readouterr().err


def test_rows_of_an_allocation_are_those_of_one_batch() -> None:
    design = dataclasses.replace(SLOTS, sampling="disjoint")
    rule = TokenRule("recentered_clip", temperature=0.7)
    plan = plan_generation({None: 800}, mechanism=rule, candidates=50, design=design, shots_per_label=3, **TERMS)
    assert component_checks.check_row_contribution(plan.release).verdict == "sound"


def test_a_fixed_sample_of_many_people_is_checked_in_little_memory() -> None:
    design = RowDesign.choose(rows="slots", num_slots=20, shots_per_slot=4, sampling="fixed")
    plan = plan_queries(5_000, max_queries=20, width=3, design=design, adjacency="replace_one", **TERMS)
    tracemalloc.start()
    try:
        assert component_checks.check_sampler_rate(plan.release).verdict == "sound"
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 5_000_000  # a table of draws and people takes 25 MB


@pytest.mark.parametrize("every", [30, 7])
def test_a_component_on_a_stream_was_charged_for_what_it_runs(every: int) -> None:
    stream = PrivateStream(dataset_id="d", time_key="at", unit_key="u", public_size={30: 100})
    component = DemonstrationSynthesizer.from_private_examples(
        stream.rolling(30, every=every),
        llm=ReadTokens(),
        budget=Budget(epsilon=8.0, delta=1e-4, per="30 days"),
        epsilon=8.0,
        component="x",
        task=GenerationTask(record_prompt=MARK + "{text}"),
        shots_per_label=2,
        max_tokens=1,
        rows=Rows(slots=5, shots=1),
        noise=Noise("gumbel"),
        decoding=Decoding(candidates="all"),
    )
    subject = Subject.of(component)
    assert suite.check_tickets(subject).verdict == "sound"
    shots = subject.plan.shots_per_label
    for other in (2 * shots, shots + 1):  # also one that its runs do not divide
        wrong = dataclasses.replace(subject, plan=dataclasses.replace(subject.plan, shots_per_label=other))
        assert suite.check_tickets(wrong).verdict == "violated"
    share: Any = share_of(component)
    for key, part in share._parts.items():  # a run that grants twice what its ticket pays
        share._parts[key] = dataclasses.replace(part, max_count=2 * part.max_count)
        share._parts_left[key] *= 2
    assert suite.check_tickets(subject).verdict == "violated"
