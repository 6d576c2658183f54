"""A budget with delta 0: exact counts run, everything whose noise, threshold or sample has a gap is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models import FakeListLLM
from langchain_core.prompts import PromptTemplate

from langchain_dpicl import (
    Budget,
    DPFewShotPromptTemplate,
    DPVotingRunnable,
    PrivacyBudgetCallbackHandler,
    verify_report,
)
from langchain_dpicl.cli.main import main
from langchain_dpicl.discovery import UnitCounter, ValueDiscovery
from langchain_dpicl.evaluation import Exact, dp_evaluate
from langchain_dpicl.exceptions import ConfigurationError, PrivacyBudgetError, PrivacyBudgetExceededError
from langchain_dpicl.options import Noise
from langchain_dpicl.privacy.accounting import calibrate, epsilon_bound
from langchain_dpicl.privacy.accounting.events import (
    BoundedRangeEvent,
    ComposedEvent,
    Event,
    FailureEvent,
    GaussianEvent,
    ParallelEvent,
    PureEvent,
    RepeatedEvent,
    SubsampledEvent,
    ZCdpEvent,
)
from langchain_dpicl.privacy.extensions.joint_exponential import KeywordSum
from langchain_dpicl.privacy.ledger.store import InMemoryStore
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.privacy.mechanisms.release_plan import GumbelMechanism, PoissonUnits, ReleasePlan
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.release.curator import open_sample
from tests.tiny_vote import LABELS, tiny_engine

QUESTION = PromptTemplate.from_template("{text}")
RECORDS = [{"text": f"message {number}", "label": LABELS[number % 2]} for number in range(60)]


def private() -> PrivateExamples:
    return PrivateExamples(RECORDS, label_key="label", labels=LABELS, public_size=60, dataset_id="d")


@pytest.mark.parametrize(
    ("event", "epsilon"),
    [
        (PureEvent(1.0), 1.0),
        (RepeatedEvent(PureEvent(0.1), 10), 1.0),
        (ComposedEvent((PureEvent(0.25), BoundedRangeEvent(0.5))), 0.75),
        (ParallelEvent("p", (("a", PureEvent(0.5)), ("b", PureEvent(0.25)))), 0.5),
        (RepeatedEvent(PureEvent(1e-3), 1_000_000), 1000.0),
        (GaussianEvent(100.0), math.inf),
        (ZCdpEvent(1e-9), math.inf),
        (SubsampledEvent(GaussianEvent(1e6), 1e-6), math.inf),
        (SubsampledEvent(PureEvent(1.0), 0.5), math.inf),
        (ComposedEvent((PureEvent(0.5), FailureEvent(1e-30))), math.inf),
    ],
)
def test_at_delta_0_pure_steps_add_up_and_nothing_else_has_a_price(event: Event, epsilon: float) -> None:
    bound = epsilon_bound(event, delta=0.0, adjacency="add_remove")
    assert bound.epsilon == epsilon
    assert epsilon_bound(event, delta=1e-6, adjacency="add_remove").epsilon <= epsilon * (1.0 + 1e-6)


def test_the_order_of_a_replaced_unit_counts_both_labels() -> None:
    event = ParallelEvent("p", (("a", PureEvent(0.5)), ("b", PureEvent(0.25))))
    assert epsilon_bound(event, delta=0.0, adjacency="replace_one").epsilon == 0.75


def test_noise_is_calibrated_at_delta_0() -> None:
    assert calibrate(lambda noise: PureEvent(1.0 / noise), epsilon=0.5, delta=0.0, adjacency="add_remove") <= 2.001
    with pytest.raises(ConfigurationError, match="costs"):
        calibrate(GaussianEvent, epsilon=0.5, delta=0.0, adjacency="add_remove")


def test_a_pure_ledger_counts_and_evaluates_and_its_report_is_verified(tmp_path: Path) -> None:
    budget = PrivacyBudgetCallbackHandler.create(tmp_path / "pure.db", epsilon=2.0, delta=0.0)
    records = private()
    counts = UnitCounter.from_private_examples(records, field="label", values=LABELS, budget=budget, epsilon=1.0)
    assert tuple(counts.run().counts) == LABELS
    assert UnitCounter.from_private_examples(records, budget=budget, epsilon=0.5).run() is not None
    result = dp_evaluate(_chain(), records, evaluators=Exact(), budget=budget, epsilon=0.25)
    assert result.plan.delta == 0.0
    assert (budget.remaining_epsilon, budget.remaining_delta) == (0.25, 0.0)
    found = PrivacyBudgetCallbackHandler.open(tmp_path / "pure.db").report()
    assert verify_report(found).ok
    assert found.to_dict()["limits"]["delta"] == 0.0
    rows = found.with_epsilons().table.rows  # pure shares cost no more at a delta above 0
    assert [row.epsilon for row in rows] == sorted((row.epsilon for row in rows), reverse=True)
    assert rows[0].epsilon <= 1.75


def _vote(budget: Budget) -> Any:
    return DPVotingRunnable.from_private_examples(
        private(), llm=tiny_engine(), budget=budget, epsilon=0.5, max_queries=2
    )


def _write(budget: Budget) -> Any:
    return DPFewShotPromptTemplate.from_private_examples(
        private(), llm=tiny_engine(), budget=budget, epsilon=0.5, example_prompt=QUESTION, suffix="{text}"
    )


def _unknown_values(budget: Budget) -> Any:
    return ValueDiscovery.from_private_examples(private(), field="text", budget=budget, epsilon=0.5)


def _sampled_evaluation(budget: Budget) -> Any:
    return dp_evaluate(_chain(), private(), evaluators=Exact(), budget=budget, epsilon=0.5, sample=5)


def _chain() -> Any:
    return QUESTION | FakeListLLM(responses=["card"])


@pytest.mark.parametrize("build", [_vote, _write, _unknown_values, _sampled_evaluation])
def test_what_is_drawn_with_a_gap_is_refused_with_the_reason(build: Callable[[Budget], Any]) -> None:
    budget = Budget(epsilon=2.0, delta=0.0)
    with pytest.raises(ConfigurationError, match=r"delta: .* found 0\.0\. At delta 0 only exact releases run"):
        build(budget)
    assert budget.remaining_epsilon == 2.0


def test_a_ticket_of_gaussian_noise_does_not_fit_a_pure_share() -> None:
    budget = Budget(epsilon=2.0, delta=0.0)
    with pytest.raises(PrivacyBudgetExceededError, match="epsilon"):
        budget.declare("c", tickets=(Ticket("t", GaussianEvent(50.0)),), epsilon=1.0)
    assert budget.declare("d", tickets=(Ticket("t", PureEvent(0.5), max_count=4),)).epsilon == 2.0


def test_the_handler_takes_delta_0() -> None:
    handler = PrivacyBudgetCallbackHandler(epsilon=1.0, delta=0.0)
    UnitCounter.from_private_examples(private(), field="label", values=LABELS, budget=handler, epsilon=1.0).run()
    assert handler.remaining_epsilon == 0.0


@pytest.mark.parametrize("ledger", [0.0, 1e-4])
@pytest.mark.parametrize("terms", [{}, {"epsilon": 1.5}, {"delta": 0.0}], ids=str)
def test_a_joint_plan_of_pure_components_costs_their_sum(terms: dict[str, float], ledger: float) -> None:
    budget, records = Budget(epsilon=2.0, delta=ledger), private()
    how: dict[str, Any] = {"budget": budget, "epsilon": 0.5, "noise": Noise(delta=0.0)}
    with budget.plan(**terms) as joint:
        counters = [UnitCounter.from_private_examples(records, **how) for _ in range(2)]
    for counter in counters:
        counter.run()
    assert budget.remaining_delta == ledger
    assert joint.epsilon == pytest.approx(terms.get("epsilon", 1.0), rel=1e-3)
    assert verify_report(budget.report()).ok


def test_a_hook_is_called_when_a_pure_budget_is_spent() -> None:
    budget, seen = Budget(epsilon=2.0, delta=0.0), list[float]()
    budget.on_spent(0.5, lambda use: seen.append(use.epsilon_spent))
    UnitCounter.from_private_examples(private(), budget=budget, epsilon=1.5).run()
    assert seen == [1.5]


@pytest.mark.parametrize(("ledger", "share"), [(0.0, None), (1e-4, 0.0)])
def test_tickets_declared_by_hand_without_their_gap_open_no_sample_on_a_pure_share(
    ledger: float, share: float | None
) -> None:
    plan = ReleasePlan(
        sampler=PoissonUnits(1.0), aggregation=KeywordSum(), mechanism=GumbelMechanism(2.0), adjacency="add_remove"
    )
    budget, records = Budget(epsilon=2.0, delta=ledger), private()
    budget.bind(records)
    by_hand = budget.declare("c", tickets=(Ticket("t", plan.block_event(1)),), epsilon=0.5, delta=share)
    ticket = by_hand.reserve("t")
    with pytest.raises(PrivacyBudgetError, match=r"declared gap .* found delta 0\. At delta 0 only exact"):
        open_sample(records, ticket, plan=plan)
    assert ticket.unburnt == 1


def test_a_ticket_has_the_delta_of_the_share_that_another_process_sealed() -> None:
    store, terms = InMemoryStore(), {"tickets": (Ticket("t", PureEvent(0.1), max_count=2),), "delta": 0.0}
    mine, others = (Budget(epsilon=2.0, delta=1e-4, store=store) for _ in range(2))
    with mine.plan(delta=1e-6):
        planned = mine.declare("c", epsilon=0.5, **terms)
    alone = others.declare("c", epsilon=0.5, **terms)
    assert [share.reserve("t").delta for share in (alone, planned)] == [0.0, 0.0]
    assert planned.delta == 0.0


def test_a_share_of_a_larger_ledger_may_be_pure() -> None:
    budget = Budget(epsilon=2.0, delta=1e-4)
    run = UnitCounter.from_private_examples(private(), budget=budget, epsilon=0.5, noise=Noise(delta=0.0))
    run.run()
    assert (run.share.delta, budget.remaining_delta) == (0.0, 1e-4)
    found = budget.report()
    assert verify_report(found).ok
    with pytest.raises(ConfigurationError, match="At delta 0 only exact releases run"):
        ValueDiscovery.from_private_examples(private(), field="text", budget=budget, epsilon=0.5, noise=Noise(delta=0))


def test_the_commands_count_at_delta_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger, records = str(tmp_path / "pure.db"), tmp_path / "records.jsonl"
    records.write_text("".join(json.dumps(record) + "\n" for record in RECORDS), encoding="utf-8")
    counting = ["discover", str(records), "--epsilon", "0.5"]
    assert main([*counting, "--delta", "0", "--public-size", "60"]) == 0
    assert "epsilon  0.5 at delta 0" in capsys.readouterr().out
    assert main(["ledger", "create", ledger, "--epsilon", "1", "--delta", "0"]) == 0
    paid = [*counting, "--ledger", ledger, "--component", "c", "--out", str(tmp_path / "counts.json")]
    assert main(paid) == 2
    assert "--public-size: expected the declared number of units, at delta 0" in capsys.readouterr().err
    assert main([*paid, "--public-size", "60"]) == 0
    assert "remaining epsilon 0.5, delta 0" in capsys.readouterr().out
    assert main(["plan", "--public-size", "1000", "--epsilon", "1", "--delta", "0"]) == 2
    assert "At delta 0 only exact releases run" in capsys.readouterr().err


def test_a_plan_takes_the_delta_that_the_settings_allow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text("[data]\npublic_size = 1000\n[budget]\nepsilon = 2.0\ndelta = 1e-3\n", encoding="utf-8")
    plan = ["plan", "--config", str(settings), "--no-compare"]
    assert main(plan) == 2
    assert "at most 1/(10 * public_size)" in capsys.readouterr().err
    assert main([*plan, "--set", "data.allow_large_delta=true"]) == 0
