"""Plans of private evolution: published noise, tickets, parallel labels, costs."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl import Budget, EmbeddedLLM, PrivateExamples
from langchain_dpicl.cli.main import main
from langchain_dpicl.evolution import ROUND_TEMPLATE, PrivateEvolution, plan_evolution
from langchain_dpicl.exceptions import ConfigurationError, NoisyPlanWarning
from langchain_dpicl.options import Evolution
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy.accounting.events import GaussianEvent, ParallelEvent, RepeatedEvent
from langchain_dpicl.released.demonstrations import ReleasedDemonstrations

# Xie et al. (2024): noise of ten rounds at delta = 1 / (n ln n), for epsilon 1, 2 and 4.
PUBLISHED = {
    "Yelp": (1_939_290, (15.34, 8.03, 4.24)),
    "OpenReview": (8_396, (11.60, 6.22, 3.38)),
    "PubMed": (75_316, (13.26, 7.01, 3.75)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_noise_comes_out(name: str) -> None:
    """Their noise is rounded to two digits, and Yelp's at epsilon 1 is .4 % short of what we charge for."""
    size, published = PUBLISHED[name]
    delta = 1 / (size * math.log(size))
    for epsilon, noise in zip((1.0, 2.0, 4.0), published, strict=True):
        plan = plan_evolution({None: size}, epsilon=epsilon, delta=delta, rounds=10)
        assert plan.noise_multiplier == pytest.approx(noise, rel=0.005)
        assert plan.epsilon <= epsilon
        assert plan.event() == RepeatedEvent(GaussianEvent(plan.noise_multiplier), 10)


def test_rounds_compose_to_one_gaussian_of_root_rounds_over_noise() -> None:
    """mu = sqrt(T) / sigma, to the accountant's own digits."""
    plan = plan_evolution({None: 5_000}, epsilon=None, delta=1e-6, noise_multiplier=8.0, rounds=16)
    one = accounting.epsilon_upper_bound(GaussianEvent(2.0), delta=1e-6, adjacency="add_remove")
    assert plan.epsilon == pytest.approx(one, rel=1e-3)


def test_labels_run_in_parallel_and_cost_nothing_more_until_one_can_be_replaced() -> None:
    terms = {"epsilon": None, "delta": 1e-6, "noise_multiplier": 4.0, "rounds": 3}
    alone = plan_evolution({None: 100}, **terms)
    split = plan_evolution({"a": 100, "b": 900}, **terms)
    assert isinstance(split.event(), ParallelEvent)
    assert split.epsilon == alone.epsilon
    assert [(ticket.label, ticket.max_count, ticket.template) for ticket in split.tickets()] == [
        ("a", 3, ROUND_TEMPLATE),
        ("b", 3, ROUND_TEMPLATE),
    ]
    replaced = plan_evolution({"a": 100, "b": 900}, adjacency="replace_one", **terms)
    assert replaced.epsilon > split.epsilon
    assert replaced.implementation_delta == 2 * split.implementation_delta


def test_costs_are_public_calls_alone_and_count_every_candidate() -> None:
    plan = plan_evolution(
        {"a": 300, "b": 900}, epsilon=1.0, delta=1e-6, rounds=3, num_survivors=5, num_variations=2, num_candidates=40
    )
    cost = plan.cost()
    assert cost.private_calls == 0
    assert cost.public_calls == 2 * (40 + 2 * 5 * 2)
    assert plan.embedded == {"private": 1_200, "public": 2 * (40 + 2 * 15)}
    assert plan.width == 40
    signal = plan.expected()
    assert signal["units"] == 300.0
    assert signal["share_to_be_seen"] == pytest.approx(3 * plan.noise_multiplier / 300)


def test_a_label_whose_votes_do_not_stand_out_of_the_noise_warns_before_anything_is_spent() -> None:
    sizes = {"card": 60, "transfer": 20}
    private = PrivateExamples([], public_size=sizes, label_key="queue", labels=tuple(sizes))
    given: dict[str, Any] = {"llm": EmbeddedLLM(), "epsilon": 1.0, "budget": Budget(epsilon=2.0, delta=1e-6)}
    said = "three deviations of it are 30 votes, and only 20 units of the smallest label are declared"
    with pytest.warns(NoisyPlanWarning, match=said) as caught:
        made = PrivateEvolution.from_private_examples(private, **given)
    assert [warning.filename for warning in caught] == [__file__]
    assert made.plan.expected()["share_to_be_seen"] == pytest.approx(3 * made.plan.noise_multiplier / 20)
    assert made.plan.expected()["share_to_be_seen"] > 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        enough = private.redeclared(dataset_id="more", public_size=60)  # 30 of each label
        PrivateEvolution.from_private_examples(enough, **given)


@pytest.mark.parametrize(
    "fault",
    [
        {"rounds": 0},
        {"shots_per_label": 11},
        {"num_survivors": 0},
        {"num_variations": 0},
        {"num_candidates": 1},
        {"num_candidates": 2**20 + 1},
        {"num_survivors": 2**19, "num_candidates": 40},
        {"delta": 0.0},
        {"epsilon": None},
        {"adjacency": "swap"},
    ],
    ids=lambda fault: next(iter(fault)),
)
def test_public_faults_raise(fault: dict[str, object]) -> None:
    terms: dict[str, object] = {"epsilon": 1.0, "delta": 1e-6, **fault}
    with pytest.raises(ConfigurationError):
        plan_evolution({None: 100}, **terms)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="public_size"):
        plan_evolution({None: 0}, epsilon=1.0, delta=1e-6)


# -- the command -------------------------------------------------------------------------------------------------

ASKED = ["--public-size", "card=400", "--public-size", "transfer=800", "--epsilon", "1", "--delta", "1e-5"]


def sets(*items: str) -> list[str]:
    return [part for item in items for part in ("--set", item)]


def evolved(*items: str) -> list[str]:
    return ["plan", *ASKED, *sets("method=evolution", "evolution.rounds=3", *items)]


def generated(*items: str) -> list[str]:
    return ["generate", "FILE", "--out", "out.json", *ASKED, "--label-key", "queue", *sets(*items)]


def test_the_command_prices_it_as_the_planner_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*evolved("evolution.num_survivors=5", "cost.price_out=1000"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    plan = plan_evolution(
        {"card": 400, "transfer": 800}, epsilon=1.0, delta=1e-5, rounds=3, num_survivors=5, shots_per_label=4
    )
    assert found["plan"] == plan.to_dict()
    assert found["cost"]["private_calls"] == 0
    assert found["cost"]["public_calls"] == plan.cost().public_calls
    assert found["cost"]["money"] > 0
    assert main([*evolved("noise.multiplier=20.0"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["noise_multiplier"] == 20.0
    assert main(evolved()) == 0
    assert "no private call" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "search", "size"),
    [
        (['data.labels=["card","transfer"]', "data.label_key=queue"], {"rounds": 3}, 1000),
        (['evolution.candidates=["a card","a boat","hello"]'], {"rounds": 1, "num_variations": 0}, 900),
        (['evolution.candidates=["a card","a boat","hello"]'], {"rounds": 3}, 900),
    ],
    ids=["one size over labels", "given candidates alone", "given first candidates"],
)
def test_the_command_plans_what_a_run_does(
    settings: list[str], search: dict[str, int], size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = ["plan", "--method", "evolution", "--public-size", str(size), "--epsilon", "1", "--delta", "1e-5"]
    asked = [*settings, *(f"evolution.{name}={value}" for name, value in search.items()), "shots_per_label=1"]
    assert main([*typed, *sets(*asked), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    has_labels, has_candidates = "labels" in settings[0], "candidates" in settings[0]
    declared: dict[str, Any] = {"label_key": "queue", "labels": ("card", "transfer")} if has_labels else {}
    run = PrivateEvolution.from_private_examples(
        PrivateExamples([], public_size=size, **declared),
        llm=EmbeddedLLM(),
        budget=Budget(epsilon=1.0, delta=1e-5),
        epsilon=1.0,
        shots_per_label=1,
        evolution=Evolution(candidates=("a card", "a boat", "hello") if has_candidates else None, **search),
    )
    assert found["plan"] == run.plan.to_dict()
    first = 0 if has_candidates else 40
    assert found["cost"]["public_calls"] == len(run.plan.labels) * (first + (search["rounds"] - 1) * 30)


def test_more_given_candidates_than_declared_are_refused_by_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    given = ['evolution.candidates=["a card","a boat","hello"]', "evolution.num_candidates=2"]
    assert main(evolved(*given)) == 2
    assert "num_candidates: expected at least the 3 given candidates" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (evolved("rows.slots=40"), "found 'rows'"),
        (evolved("evolution.rounds=0"), "Evolution.rounds: "),
        (["plan", *ASKED, *sets("evolution.rounds=3")], "found 'evolution'"),
        (evolved("method=voting", "max_queries=9"), "found 'evolution'"),
        (evolved("evolution.num_variations=0"), "num_variations"),
        (evolved("noise=gumbel"), "Noise.mechanism: "),
        (generated("method=evolution", 'decoding.grammar.regex="a"'), "grammar"),
        (generated('task.hints=["Shout."]'), "hints"),
        (generated("method=evolution", "model.embeddings=json:dumps"), "embeddings"),
    ],
    ids=[
        "slots",
        "no rounds",
        "rounds alone",
        "voting",
        "no variations",
        "noise",
        "grammar",
        "hint alone",
        "no embeddings",
    ],
)
def test_options_that_change_nothing_are_refused(
    typed: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    records = tmp_path / "records.jsonl"
    records.write_text('{"text": "zx-canary", "queue": "card"}\n')
    labels = ["--label", "card", "--label", "transfer"] if typed[0] == "generate" else []
    assert main([str(records) if part == "FILE" else part for part in typed] + labels) == 2
    shown = capsys.readouterr()
    assert "zx-canary" not in shown.out + shown.err
    assert shown.err.startswith("dpicl: ")
    assert said in shown.err


def test_the_command_evolves_with_the_offline_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records, out = tmp_path / "records.jsonl", tmp_path / "out.json"
    records.write_text('{"text": "my card was declined"}\n' * 60)
    typed = ["generate", str(records), "--out", str(out), "--public-size", "60", "--epsilon", "4", "--delta", "1e-4"]
    search = [
        "method=evolution",
        "evolution.rounds=1",
        "evolution.num_survivors=3",
        "shots_per_label=2",
        "max_tokens=8",
    ]
    assert main([*typed, *sets(*search, "instruction=Questions of bank customers.")]) == 0
    released = ReleasedDemonstrations.load(out)
    assert len(released.examples) == 2
    assert released.epsilon <= 4.0
    assert released.plan["embeddings"] == "LocalEmbeddings"
    assert json.loads(capsys.readouterr().out.splitlines()[0]) == released.examples[0]
