"""DPVotingRunnable through its doors: charges, receipts, memo, exhaustion, tenants, and LangChain citizenship."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import HumanMessage
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import ConfigurableField, RunnableConfig, RunnableLambda

from langchain_dpicl import (
    Budget,
    DPVotingRunnable,
    EmbeddedLLM,
    FewShotTask,
    LabelAnswers,
    Noise,
    PrivateExamples,
    Rows,
    Serving,
)
from langchain_dpicl.backends.fake import FakeBackend
from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
from langchain_dpicl.exceptions import (
    CapabilityError,
    ConfigurationError,
    LedgerError,
    ModelCallError,
    NoPrivacyBudgetError,
    PrivacyBudgetError,
    PrivacyBudgetExceededError,
    TenantCapExceededError,
)
from langchain_dpicl.options import LogitNoise
from langchain_dpicl.privacy.ledger.shares import Reservation, Share
from langchain_dpicl.privacy.mechanisms.release_plan import ReleasePlan
from langchain_dpicl.results import VotingResult
from langchain_dpicl.runs.query_runnable import RELEASE
from tests.contracts.front_room import (
    CANARY,
    CHARGED,
    REFUSED,
    ChargingRunnableContract,
    Observer,
    Room,
)

pytestmark = pytest.mark.usefixtures("remembered_prices")

LABELS = ("card", "transfer")
# Noise so small that the majority of a sample always wins; its cost is of no interest here. Each of forty units is in a
# sample with probability one half: three of one label outvote 37 of the other, or are as many, with probability 1e-8.
PLAIN = LabelAnswers(calibrate=False)
SCORED = PLAIN.replace(scores=True)
LOUD: dict[str, Any] = {"noise": Noise(multiplier=0.05), "epsilon": 2e4, "rows": Rows(units=20), "answers": PLAIN}


def copies_its_labels(prompt: str, prefix: tuple[bytes, ...]) -> Mapping[str, float]:
    """Says what most examples of its prompt say; the query's own word where it has no example."""
    lines = [line.removeprefix("queue: ") for line in prompt.split("\n") if line.startswith("queue: ")]
    votes = [sum(label == line for line in lines) + 1.0 for label in LABELS]
    return {f" {label}": vote / sum(votes) for label, vote in zip(LABELS, votes, strict=True)}


def engine(**options: Any) -> FakeBackend:
    return FakeBackend(copies_its_labels, vocabulary=[f" {label}" for label in LABELS], **options)


def examples(cards: int = 37, transfers: int = 3, **options: Any) -> PrivateExamples:
    texts = [("card", cards), ("transfer", transfers)]
    records = [{"text": f"{CANARY} {i}", "queue": queue} for queue, count in texts for i in range(count)]
    return PrivateExamples(records, label_key="queue", labels=LABELS, public_size=40, **options)


def house(**options: Any) -> PrivacyBudgetCallbackHandler:
    return PrivacyBudgetCallbackHandler(**{"epsilon": 1e5, "delta": 1e-4, "name": "house", **options})


def voter(private: PrivateExamples | None = None, *, budget: Any = None, **options: Any) -> DPVotingRunnable:
    given: dict[str, Any] = {"llm": engine(), "max_queries": 6, **LOUD, **options}
    return DPVotingRunnable.from_private_examples(private or examples(), budget=budget or house(), **given)


def test_other_shots_leave_the_number_of_rows_as_it_is() -> None:
    usual = voter(rows=None).plan.design
    assert (usual.rows, usual.num_slots) == ("slots", 20)
    assert voter(rows=Rows(shots=usual.shots_per_slot)).plan.design == usual
    assert voter(rows=Rows(shots=8)).plan.design.num_slots == usual.num_slots


class TestContract(ChargingRunnableContract):
    told: ClassVar[list[str]] = [RELEASE, CHARGED]

    def make_private(self) -> PrivateExamples:
        return examples()

    def make_engine(self) -> FakeBackend:
        return engine()

    def make(self, room: Room, *, max_queries: int = 6, **options: Any) -> DPVotingRunnable:
        given = {
            "llm": room.engine,
            "budget": room.budget,
            "serving": Serving(memo_size=0),
            "max_queries": max_queries,
            **LOUD,
        }
        return DPVotingRunnable.from_private_examples(room.private, **{**given, **options})

    def faulty_constructions(self, room: Room) -> Sequence[Callable[[], Any]]:
        faults: list[Callable[[], dict[str, Any]]] = [
            lambda: {"max_queries": 0},
            lambda: {"task": FewShotTask(labels=("card",))},
            lambda: {"task": FewShotTask(labels=("card", "card"))},
            lambda: {"task": FewShotTask(verbalizers={"card": " a"})},
            lambda: {"task": FewShotTask(verbalizers={"card": " a", "transfer": " a"})},
            lambda: {"task": FewShotTask("text: {text}"), "suffix": "{input}"},
            lambda: {"task": {"prefix": "Sort."}},
            lambda: {"answers": {"votes": "hard"}},
            lambda: {"noise": "laplace"},
            lambda: {"noise": LogitNoise("recentered_clip")},
            lambda: {"noise": Noise("gumbel", multiplier=0.05), "answers": SCORED},
            lambda: {"answers": PLAIN.replace(min_votes=3.0)},
            lambda: {"answers": PLAIN.replace(other_label="none of them")},
            lambda: {"answers": PLAIN.replace(abstain_label="card")},
            lambda: {"answers": PLAIN.replace(abstain_label="")},
            lambda: {"rows": "units"},
            lambda: {"rows": Rows(slots=8, sampling="fixed")},
            lambda: {"rows": Rows(slots=8, sampling="partition")},
            lambda: {"rows": Rows(slots=8, sampling="disjoint")},
            lambda: {"rows": Rows(slots=8, redraw_every="run")},
            lambda: {"rows": Rows(slots=41)},
            lambda: {"serving": {"memo_size": 0}},
            lambda: {"example_prompt": "{unknown}"},
            lambda: {"example_prompt": "text: {text}"},
            lambda: {"suffix": "no variable"},
            lambda: {"prefix": 5},
            lambda: {"answers": LabelAnswers(content_free=(), calibrate=True)},
            lambda: {"suffix": "{a} {b}", "answers": LabelAnswers(calibrate=True)},
            lambda: {"epsilon": None, "noise": None},
            lambda: {"llm": FakeListChatModel(responses=["x"])},
        ]
        return [lambda fault=fault: self.make(room, **fault()) for fault in faults]  # type: ignore[misc]


@pytest.mark.parametrize("wordings", [(), (FewShotTask("{text}: {queue}", "{input}:"),)])
def test_examples_without_their_label_are_refused(wordings: tuple[FewShotTask, ...]) -> None:
    shown, hidden = FewShotTask("{text} {queue}", "{input}"), FewShotTask("Ticket: {text}", "{input}")
    for task in (hidden.replace(wordings=wordings), shown.replace(wordings=(hidden,))):
        with pytest.raises(ConfigurationError, match=r"shows {queue}, found 'Ticket: {text}'. An example without its"):
            voter(task=task)
    # Votes on other labels, or on another field of the same ones, read them there.
    assert voter(task=hidden.replace(labels=("yes", "no"))).labels == ("yes", "no")
    both = PrivateExamples(
        [{"text": "a", "queue": "card", "next": "transfer"}] * 40,
        label_key="queue", labels=["card", "transfer"], public_size=40, fields=("next",),
    )  # fmt: skip
    assert voter(both, task=FewShotTask("{text} {next}", "{input}")).labels == ("card", "transfer")
    with pytest.raises(ConfigurationError, match="teaches nothing"):
        voter(both, task=FewShotTask("{text} {next}", "{text} {next}"))


def test_the_majority_wins_where_noise_is_nothing() -> None:
    assert voter(examples(37, 3)).invoke("which?") == "card"
    assert voter(examples(3, 37)).invoke("which?") == "transfer"


@pytest.mark.parametrize("mechanism", ["gumbel", "gaussian", "permute_and_flip"])
@pytest.mark.parametrize("rows", [Rows(units=20), Rows(slots=20), Rows(slots=8, shots=3)])
@pytest.mark.parametrize("votes", ["hard", "soft"])
def test_every_design_answers(mechanism: Any, rows: Rows, votes: Any) -> None:
    noise, answers = Noise(mechanism, multiplier=0.05), PLAIN.replace(votes=votes)
    assert voter(examples(40, 0), rows=rows, noise=noise, answers=answers).invoke("which?") == "card"


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_it_works_under_replacement(sampling: Any) -> None:
    made = voter(budget=house(adjacency="replace_one"), rows=Rows(slots=8, shots=2, sampling=sampling))
    assert made.plan.release.adjacency == "replace_one"
    assert made.invoke("which?") in LABELS


def test_no_records_at_all_run_the_same_path() -> None:
    empty = PrivateExamples([], label_key="queue", labels=LABELS, public_size=40)
    made = voter(empty).with_receipts()
    assert made.invoke("which?").receipt.tickets == 1


def test_a_row_that_fails_votes_for_nothing() -> None:
    private = examples(12, 28)  # fewer than two of the 28 are in a sample with probability 1e-7
    made = voter(private, llm=engine(fail_rows_containing="queue: card"), answers=SCORED)
    scores = made.with_receipts().invoke("which?").scores
    assert scores is not None
    assert abs(scores["card"]) < 1.0 < scores["transfer"]


def test_texts_stand_for_labels_in_prompts_and_answers() -> None:
    prompts: list[str] = []

    def watched(prompt: str, prefix: tuple[bytes, ...]) -> Mapping[str, float]:
        prompts.append(prompt)
        return {" plastic": 0.9, " wire": 0.1}

    made = voter(
        llm=FakeBackend(watched, vocabulary=[" plastic", " wire"]),
        task=FewShotTask(verbalizers={"card": [" plastic", " Plastic"], "transfer": " wire"}),
    )
    assert made.invoke("which?") == "card"
    assert all("queue: card" not in prompt and "queue: transfer" not in prompt for prompt in prompts)
    assert any("queue: plastic" in prompt for prompt in prompts)


def test_rows_are_calibrated_by_their_own_content_free_answers() -> None:
    def leaning(prompt: str, prefix: tuple[bytes, ...]) -> Mapping[str, float]:
        return (
            {" card": 0.6, " transfer": 0.4}
            if prompt.endswith("text: which?\nqueue:")
            else {
                " card": 0.9,
                " transfer": 0.1,
            }
        )

    leans = FakeBackend(leaning, vocabulary=[" card", " transfer"])
    assert voter(llm=leans, answers=PLAIN).invoke("which?") == "card"
    assert voter(llm=leans, answers=LabelAnswers(calibrate=True)).invoke("which?") == "transfer"


def test_text_is_a_vote_where_a_model_only_writes() -> None:
    made = voter(llm=FakeListChatModel(responses=["Transfer."]), answers=PLAIN.replace(votes="text"))
    assert made.invoke("which?") == "transfer"


def test_a_decision_by_text_alone_has_to_be_asked_for() -> None:
    with pytest.raises(CapabilityError, match='votes="text"'):
        voter(llm=FakeListChatModel(responses=["card"]))


# -- results -----------------------------------------------------------------------------------------------------


def test_scores_are_noisy_votes_on_a_public_grid_with_a_receipt() -> None:
    made = voter(answers=SCORED, max_queries=7)
    result = made.with_receipts().invoke("which?")
    assert isinstance(result, VotingResult)
    assert result.scores is not None
    assert (str(result), result.abstained) == ("card", False)
    assert set(result.scores) == set(LABELS)
    assert abs(sum(result.scores.values()) - 20) < 20
    assert all(score * 2.0**32 == round(score * 2.0**32) for score in result.scores.values())
    receipt = result.receipt
    assert (receipt.source, receipt.tickets, receipt.queries_left) == ("release", 1, 6)
    assert (receipt.component, receipt.dataset_id, receipt.mechanism) == ("voting", "private-examples", "gaussian")
    assert receipt.ledger_id == made.budget.ledger_id
    assert isinstance(receipt.entry, int)
    assert result.expected_votes == pytest.approx(20)
    assert VotingResult.model_validate_json(result.model_dump_json()) == result


def test_scores_are_released_by_nothing_but_normal_noise() -> None:
    assert voter(answers=SCORED).plan.release.mechanism.name == "gaussian"
    assert voter().plan.release.mechanism.name == "gumbel"
    assert voter(noise=Noise("gaussian", multiplier=0.05)).with_receipts().invoke("which?").scores is None


@pytest.mark.parametrize("mechanism", ["gumbel", "gaussian", "permute_and_flip"])
@pytest.mark.parametrize(("below", "label"), [(0.05, "card"), (0.99, "nobody knows")])
def test_it_abstains_where_no_label_has_enough_votes(mechanism: str, below: float, label: str) -> None:
    private = examples(24, 16)
    given = {
        "answers": PLAIN.replace(abstain_below=below, abstain_label="nobody knows"),
        "noise": Noise(mechanism, multiplier=0.05),
    }
    result = voter(private, **given, rows=Rows(units=40)).with_receipts().invoke("which?")
    assert (result.label, result.abstained) == (label, label == "nobody knows")


def test_abstaining_costs_nothing() -> None:
    plain, careful = voter(), voter(answers=PLAIN.replace(abstain_below=0.5))
    assert plain.plan.epsilon == pytest.approx(careful.plan.epsilon, rel=1e-6)
    assert careful.plan.release.constants == (pytest.approx(10),)
    assert (
        voter(answers=PLAIN.replace(abstain_below=0.5), noise=Noise("gaussian", multiplier=0.05)).plan.release.constants
        == ()
    )


# -- what follows when the budget is spent -----------------------------------------------------------------------


def test_a_query_too_many_is_refused_with_what_is_left() -> None:
    made = voter(max_queries=1)
    made.invoke("one")
    with pytest.raises(PrivacyBudgetExceededError) as refusal:
        made.invoke("two")
    assert (refusal.value.requested, refusal.value.remaining) == (1, 0)
    assert "Its one query cost epsilon 2e+04 at delta 2e-05. Build" in str(refusal.value)
    assert "zero_shot" in str(refusal.value)


BATCHES: dict[str, Callable[..., Any]] = {
    "batch": lambda made, asked, **how: made.batch(asked, **how),
    "abatch": lambda made, asked, **how: asyncio.run(made.abatch(asked, **how)),
    "as completed": lambda made, asked, **how: [one for _, one in made.batch_as_completed(asked, **how)],
    "awaited as completed": lambda made, asked, **how: asyncio.run(_completed(made, asked, how)),
}


async def _completed(made: Any, asked: list[Any], how: dict[str, Any]) -> list[Any]:
    return [one async for _, one in made.abatch_as_completed(asked, **how)]


@pytest.mark.parametrize("door", BATCHES)
def test_a_batch_of_more_queries_than_are_left_is_refused_before_the_first_is_charged(door: str) -> None:
    made, ask = voter(max_queries=3), BATCHES[door]
    with pytest.raises(PrivacyBudgetExceededError, match=r"at most 3 queries without an answer.*found 4.*Its 3") as e:
        ask(made, ["a", "b", "c", "d"])
    assert (e.value.requested, e.value.remaining, made.queries_left) == (4, 3, 3)
    assert len(ask(made, ["a", "b", "b", "a", "b"])) == 5, "equal ones are charged once"
    assert len(ask(made, ["b", "a", "c"])) == 3, "answers of before are free"
    assert made.queries_left == 0
    assert len(ask(made, ["a", "b", "c"])) == 3
    with pytest.raises(PrivacyBudgetExceededError, match="requested 1, remaining 0"):
        ask(made, ["a", "d"])
    made = voter(max_queries=3)
    found = ask(made, ["a", "b", "c", "d", "e"], return_exceptions=True)
    assert sum(isinstance(one, PrivacyBudgetExceededError) for one in found) == 2
    made = voter(max_queries=3, serving=Serving(on_exhausted="zero_shot"))
    assert len(ask(made, ["a", "b", "c", "d", "e"])) == 5
    made = voter(max_queries=3, serving=Serving(memo_size=0))
    with pytest.raises(PrivacyBudgetExceededError, match="at most 3 queries"):
        ask(made, ["a"] * 4)
    assert made.queries_left == 3


@pytest.mark.parametrize("door", BATCHES)
def test_a_batch_beyond_a_tenants_cap_is_refused_before_the_first_is_charged(door: str) -> None:
    made, ask = voter(max_queries=9, serving=Serving(tenant_max_queries=2)), BATCHES[door]
    with pytest.raises(TenantCapExceededError, match=r"at most 2 queries of tenant 'acme' without.*found 3") as e:
        ask(made, ["a", "b", "c"], config=acme())
    assert (e.value.requested, e.value.remaining, made.queries_left) == (3, 2, 9)
    assert len(ask(made, ["a", "b", "c"], config=[acme(), acme(), {"configurable": {"tenant": "other"}}])) == 3
    assert len(ask(made, ["b", "a"], config=acme())) == 2, "answers of before are free"
    other: Any = {"configurable": {"tenant": "other"}}
    with pytest.raises(TenantCapExceededError, match="at most 0 queries of tenant 'acme'"):
        ask(made, ["d", "d"], config=[other, acme()])
    lower: Any = {"configurable": {"tenant": "other", "tenant_max_queries": 1}}
    with pytest.raises(TenantCapExceededError, match="at most 1 queries of tenant 'other'"):
        ask(made, ["d", "e"], config=[other, lower])
    assert made.queries_left == 6


@pytest.mark.parametrize(
    ("asked", "caps", "refused"),
    [
        ("abc", [1, None, None], "at most 1 .* found 3"),
        ("abc", [None, 2, 1], "at most 2 .* found 3"),
        ("ab", [None, 0], "at most 0 .* found 2"),
        ("ab", [None, 2], ""),
        ("aab", [2, 1, 2], ""),
        ("aaa", [None, 5, 1], ""),
    ],
)
def test_each_cap_of_a_tenants_queries_holds_for_them_all_as_they_are_asked_at_once(
    asked: str, caps: list[int | None], refused: str
) -> None:
    made = voter(max_queries=max(2, len(set(asked))))
    configs = [acme(tenant_max_queries=cap) for cap in caps]
    with pytest.raises(TenantCapExceededError, match=refused) if refused else nullcontext():
        made._refuse_too_many(list(asked), configs)


@pytest.mark.parametrize("door", BATCHES)
def test_a_batch_of_known_answers_needs_no_ledger(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, ask = voter(max_queries=3), BATCHES[door]
    known = ask(made, ["a", "b"])

    def away(*_: Any, **__: Any) -> int:
        raise LedgerError("away")

    monkeypatch.setattr(Share, "remaining", away)
    assert ask(made, ["a", "b"]) == known


def test_what_is_refused_makes_no_public_call_either() -> None:
    asked = engine()
    made = voter(llm=asked, max_queries=1, serving=Serving(tenant_max_queries=1))
    made.invoke("one", acme())
    before = dict(asked.calls)
    for config in (acme(), {"configurable": {"tenant": "other"}}):
        with pytest.raises(PrivacyBudgetExceededError):
            made.invoke("two", config)
    assert dict(asked.calls) == before
    assert made.tenants.used("acme") == 1


def test_zero_shot_answers_only_when_asked_for_and_says_so() -> None:
    private, budget, observer = examples(10, 30), house(), Observer()
    made = voter(private, budget=budget, max_queries=1, serving=Serving(on_exhausted="zero_shot"))
    whole = made.with_receipts()
    assert whole.invoke("one").receipt.source == "release"
    before = made.queries_left
    assert made.invoke("two", {"callbacks": [observer]}) == "card"
    assert [data["receipt"]["source"] for data in observer.named(RELEASE)] == ["zero-shot"]
    result = whole.invoke("two", {"callbacks": [observer]})
    assert (result.label, result.receipt.source, result.receipt.tickets) == ("card", "zero-shot", 0)
    assert result.receipt.entry is None
    assert made.queries_left == before == 0
    assert [data["answered"] for data in observer.named(REFUSED)] == ["zero-shot"] * 2
    assert [data["tickets"] for data in observer.named(RELEASE)] == [0, 0]
    assert observer.named(CHARGED) == []


def test_zero_shot_reads_no_private_record(monkeypatch: pytest.MonkeyPatch) -> None:
    made = voter(max_queries=1, serving=Serving(on_exhausted="zero_shot")).with_receipts()
    made.invoke("one")
    monkeypatch.setattr(PrivateExamples, "_pool", lambda *_, **__: pytest.fail("a private record was read"))
    assert made.invoke("two").receipt.source == "zero-shot"


def test_a_mismatch_is_never_answered_zero_shot() -> None:
    made = voter(serving=Serving(on_exhausted="zero_shot"))
    with pytest.raises(PrivacyBudgetError):
        made.invoke("one", {"callbacks": [house()]})


def test_an_outage_costs_nothing() -> None:
    made = voter(llm=_Down(), max_queries=2)
    for _ in range(3):
        with pytest.raises(ModelCallError):
            made.invoke("which?")
    assert made.share.remaining("query") == 2


class _Down:
    """An engine whose public calls fail."""

    name = "down"
    kind = "whole labels"

    def score_choices(self, prompts: Sequence[str], choices: Sequence[str]) -> np.ndarray:
        return np.full((len(prompts), len(choices)), -np.inf)

    async def ascore_choices(self, prompts: Sequence[str], choices: Sequence[str]) -> np.ndarray:
        return self.score_choices(prompts, choices)


# -- memo and tenants --------------------------------------------------------------------------------------------


def acme(**more: Any) -> Any:
    return {"configurable": {"tenant": "acme", **more}}


def test_who_asks_again_is_told_again_for_free() -> None:
    made = voter(answers=SCORED, max_queries=5)
    whole = made.with_receipts()
    first, again, other = whole.invoke("which?"), whole.invoke({"input": "which?"}), whole.invoke("which?", acme())
    assert (first.receipt.source, again.receipt.source, other.receipt.source) == ("release", "memo", "release")
    assert again.scores == first.scores != other.scores
    assert again.receipt.tickets == 0
    assert made.queries_left == 3


@pytest.mark.parametrize("awaited", [False, True])
def test_who_asks_the_same_at_the_same_time_is_told_the_same(awaited: bool) -> None:
    made = voter(max_queries=5).with_receipts()
    asked = ["which?"] * 12
    answers = asyncio.run(made.abatch(asked)) if awaited else made.batch(asked)
    assert sorted(answer.receipt.source for answer in answers) == ["memo"] * 11 + ["release"]
    assert made.share.remaining("query") == 4
    assert made.tenants._turns.here == {}


def test_one_that_fails_leaves_its_turn_to_the_next() -> None:
    down = _Down()
    made = voter(llm=down, max_queries=5)
    answers = made.batch(["which?"] * 3, return_exceptions=True)
    assert [type(answer) for answer in answers] == [ModelCallError] * 3
    assert made.share.remaining("query") == 5
    assert made.tenants._turns.here == {}


def test_a_blocking_call_below_a_running_loop_does_not_wait_for_that_loop() -> None:
    made = voter(
        llm=_Slow(responses=["card"]), answers=PLAIN.replace(votes="text"), max_queries=5
    )  # no unit is drawn with probability 2**-40

    async def both() -> list[Any]:
        first = asyncio.ensure_future(made.ainvoke("which?"))
        await asyncio.sleep(0.01)
        return [made.invoke("which?"), await first]

    assert asyncio.run(asyncio.wait_for(both(), 60)) == ["card", "card"]


def test_what_is_told_again_is_told_also_when_nothing_is_left() -> None:
    made = voter(max_queries=1)
    answer = made.invoke("which?")
    assert made.invoke("which?") == answer
    with pytest.raises(PrivacyBudgetExceededError):
        made.invoke("else?")


def test_tenants_have_caps_and_the_data_set_has_the_last_word() -> None:
    made = voter(max_queries=3, serving=Serving(tenant_max_queries=2))
    for text in ("a", "b"):
        made.invoke(text, acme())
    with pytest.raises(PrivacyBudgetExceededError, match="tenant 'acme'"):
        made.invoke("c", acme(serving=Serving(tenant_max_queries=100)))
    assert made.share.remaining("query") == 1
    made.invoke("c", {"configurable": {"tenant": "other"}})
    with pytest.raises(PrivacyBudgetExceededError, match="tickets"):
        made.invoke("c", {"configurable": {"tenant": "third", "tenant_max_queries": 100}})


def test_a_refusal_by_the_ledger_takes_no_place_of_the_tenant() -> None:
    made = voter(max_queries=1, serving=Serving(tenant_max_queries=2))
    made.invoke("a", acme())
    with pytest.raises(PrivacyBudgetExceededError):
        made.invoke("b", acme())
    assert made.tenants.used("acme") == 1


def test_a_stop_as_a_charged_query_is_settled_leaves_the_place_of_its_tenant_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = voter(max_queries=5, serving=Serving(tenant_max_queries=1))
    real, stops = Reservation.unburnt, [KeyboardInterrupt()]

    def unburnt(ticket: Reservation) -> int:
        if stops:
            raise stops.pop()
        return real.fget(ticket)

    monkeypatch.setattr(Reservation, "unburnt", property(unburnt))
    with pytest.raises(KeyboardInterrupt):
        made.invoke("one", acme())
    with pytest.raises(PrivacyBudgetExceededError, match="tenant 'acme'"):
        made.invoke("two", acme())
    assert (made.tenants.used("acme"), made.share.remaining("query")) == (1, 4)


def test_copies_share_caps_and_memos() -> None:
    made = voter(serving=Serving(tenant_max_queries=1)).with_receipts()
    made.with_config(tags=["x"]).invoke("a")
    assert made.bind().invoke("a").receipt.source == "memo"
    with pytest.raises(PrivacyBudgetExceededError):
        made.model_copy().invoke("b")


def test_the_config_says_which_keys_it_takes() -> None:
    assert {spec.id for spec in voter().config_specs} == {"tenant", "tenant_max_queries"}


@pytest.mark.parametrize("bad", [{"tenant": 5}, {"tenant_max_queries": "many"}])
def test_a_config_that_is_none_is_refused_for_free(bad: dict[str, Any]) -> None:
    made = voter(max_queries=2)
    with pytest.raises(ConfigurationError):
        made.invoke("a", {"configurable": bad})
    assert made.share.remaining("query") == 2


# -- a citizen of LangChain --------------------------------------------------------------------------------------


def test_it_takes_texts_messages_and_dicts() -> None:
    made = voter()
    for given in (
        "which?",
        HumanMessage("which?"),
        {"input": "which?"},
        PromptTemplate.from_template("which?").invoke({}),
    ):
        assert made.invoke(given) == "card"
    assert made.share.remaining("query") == 5  # one question, one ticket


def test_a_bad_input_costs_nothing() -> None:
    made = voter(max_queries=2)
    for bad in (None, {"question": "which?"}, 3.5j):
        with pytest.raises(ConfigurationError):
            made.invoke(bad)
    for bad in ("3", 0, True):
        with pytest.raises(ConfigurationError, match="max_concurrency"):
            made.invoke("which?", {"max_concurrency": bad})
    with pytest.raises(ConfigurationError, match="no further arguments"):
        made.invoke("which?", temperature=1)
    assert made.share.remaining("query") == 2


def test_schemas_say_what_goes_in_and_out() -> None:
    assert voter().output_schema.model_json_schema()["type"] == "string"
    assert "scores" in voter().with_receipts().get_output_jsonschema()["properties"]
    assert "on_exhausted" in DPVotingRunnable.model_json_schema()["properties"]
    assert {"type": "string"} in voter().input_schema.model_json_schema()["anyOf"]
    assert set(voter(suffix="{context} {input}").input_schema.model_json_schema()["properties"]) == {"context", "input"}


def test_it_is_a_tool() -> None:
    tool = voter().as_tool(name="queue_of", description="Which queue?")
    assert tool.name == "queue_of"
    assert set(tool.args) == {"input"}
    assert tool.invoke({"input": "which?"}) == "card"
    assert asyncio.run(tool.ainvoke({"input": "which?"})) == "card"


@pytest.mark.parametrize("how", ["with_config", "with_retry", "map", "configurable_fields"])
def test_a_wrapper_is_no_tool_with_an_allowance(how: str) -> None:
    wrapped = getattr(voter(), how)()
    for options in ({}, {"queries_per_thread": 2, "arg_types": {"input": str}}):
        with pytest.raises(ConfigurationError, match=r"as_tool: expected .*Leave wrappers .*out.*arg_types"):
            wrapped.as_tool(name="queue_of", description="Which queue?", **options)


def test_a_wrapper_is_a_tool_of_langchain_s_that_is_told_what_it_takes() -> None:
    tool = voter().with_config(tags=["x"]).as_tool(name="queue_of", description="?", arg_types={"input": str})
    assert tool.invoke({"input": "which?"}) == "card"


def test_pipes_work_on_both_sides() -> None:
    chain = {"input": RunnableLambda(lambda given: given["q"])} | voter() | RunnableLambda(str.upper)
    assert chain.invoke({"q": "which?"}) == "CARD"
    assert asyncio.run(chain.ainvoke({"q": "which?"})) == "CARD"


def test_documents_of_a_retriever_become_part_of_the_query() -> None:
    made = voter(suffix="Notes: {context}\ntext: {input}\nqueue:")
    pages = RunnableLambda(lambda given: [Document("a public page")])
    chain = {"context": pages, "input": RunnableLambda(lambda given: given)} | made
    assert chain.invoke("which?") == "card"


def test_it_is_a_node_of_a_graph() -> None:
    graphs = pytest.importorskip("langgraph.graph")
    made, observer = voter().with_receipts(), Observer()

    def vote(state: dict[str, Any], config: RunnableConfig) -> dict[str, Any]:
        return {"found": made.invoke(state["asked"], config)}

    graph = graphs.StateGraph(dict)
    graph.add_node("vote", vote)
    graph.add_edge(graphs.START, "vote")
    graph.add_edge("vote", graphs.END)
    compiled = graph.compile()
    found = compiled.invoke({"asked": "which?"}, {"callbacks": [observer], **acme()})
    assert found["found"].label == "card"
    assert made.tenants.used("acme") == 1
    assert [data["tickets"] for data in observer.named(RELEASE)] == [1]


def test_public_fields_are_configurable_and_no_others() -> None:
    made = voter(max_queries=1).configurable_fields(on_exhausted=ConfigurableField(id="spent"))
    assert made.invoke("a") == "card"
    with pytest.raises(PrivacyBudgetExceededError):
        made.invoke("b")
    assert made.with_config(configurable={"spent": "zero_shot"}).invoke("b") == "card"
    for name in (
        "plan",
        "task",
        "answers",
        "gives_receipts",
        "rows",
        "wording",
        "tenants",
        "private",
        "budget",
        "share",
        "abstain_below",
    ):
        with pytest.raises(ConfigurationError):
            voter().configurable_fields(**{name: ConfigurableField(id=name)})


def test_an_event_tells_of_the_release_and_its_receipt() -> None:
    observer = Observer()
    made = voter(max_queries=3)
    made.invoke("a", {"callbacks": [observer]})
    made.invoke("a", {"callbacks": [observer]})
    first, again = observer.named(RELEASE)
    assert (first["tickets"], first["receipt"]["source"]) == (1, "release")
    assert (again["tickets"], again["receipt"]["source"]) == (0, "memo")
    assert set(first) == {"component", "tickets", "receipt"}
    assert len(observer.named(CHARGED)) == 1


def test_an_event_holds_the_scores_that_a_plain_answer_leaves_out() -> None:
    observer, made = Observer(), voter(answers=SCORED)
    assert made.invoke("a", {"callbacks": [observer]}) == "card"
    assert set(observer.named(RELEASE)[0]["scores"]) == set(LABELS)


@pytest.mark.parametrize("awaited", [False, True])
@pytest.mark.parametrize("limit", [1, 2])
def test_rows_of_a_query_keep_to_max_concurrency(limit: int, awaited: bool) -> None:
    made = voter(
        llm=_Slow(responses=["card"]),
        answers=PLAIN.replace(votes="text"),
        rows=Rows(slots=6, shots=4),
        serving=Serving(memo_size=0),
    )
    _Slow.most, _Slow.wanted = 0, limit
    config: Any = {"max_concurrency": limit}
    if awaited:
        asyncio.run(made.ainvoke("a", config))
    else:
        made.invoke("a", config)
    assert _Slow.most == limit
    _Slow.wanted = 0


class _Slow(FakeListChatModel):
    """Counts, over all its copies, how many calls run at once; private ones wait until as many did as are wanted."""

    now: ClassVar[int] = 0
    most: ClassVar[int] = 0
    wanted: ClassVar[int] = 0
    lock: ClassVar[threading.Condition] = threading.Condition()

    def _call(self, messages: Any, *args: Any, **kwargs: Any) -> str:
        with _Slow.lock:
            _Slow.now += 1
            _Slow.most = max(_Slow.most, _Slow.now)
            _Slow.lock.notify_all()
            if CANARY in str(messages):
                _Slow.lock.wait_for(lambda: _Slow.most >= _Slow.wanted, 60)
        time.sleep(0.02)  # one too many gets in here
        with _Slow.lock:
            _Slow.now -= 1
        return "card"


def test_sync_and_async_agree() -> None:
    made = voter(examples(40, 0), max_queries=9).with_receipts()
    assert asyncio.run(made.ainvoke("a")).label == made.invoke("b").label == "card"
    answers = asyncio.run(made.abatch(["c", "d"]))
    assert [answer.label for answer in answers] == ["card", "card"]


def test_the_budget_is_looked_up_where_it_always_is() -> None:
    given: dict[str, Any] = {"llm": engine(), "max_queries": 2, **LOUD}
    with pytest.raises(NoPrivacyBudgetError):
        DPVotingRunnable.from_private_examples(examples(), **given)
    made = DPVotingRunnable.from_private_examples(examples(), budget={"callbacks": [house()]}, **given)
    assert made.invoke("which?") == "card"


def test_a_share_is_found_again_by_its_name() -> None:
    private, budget = examples(), house()
    first = voter(private, budget=budget, component="votes", max_queries=3)
    first.invoke("a")
    assert voter(private, budget=budget, component="votes", max_queries=3).share.remaining("query") == 2


def test_a_plan_of_several_components_costs_less_together() -> None:
    budget, private = Budget(epsilon=3.0, delta=1e-4), examples()
    shape: dict[str, Any] = {"rows": Rows(units=4), "answers": PLAIN, "max_queries": 10}
    with budget.plan():
        made = [
            DPVotingRunnable.from_private_examples(private, llm=engine(), budget=budget, epsilon=1.0, **shape)
            for _ in range(2)
        ]
    assert budget.epsilon - budget.remaining_epsilon < 2.0
    assert {one.invoke("which?") for one in made} <= set(LABELS)


def test_the_report_recomputes() -> None:
    from langchain_dpicl import verify_report

    budget = house(epsilon=4.0, delta=1e-4)
    made = voter(budget=budget, epsilon=1.0, noise=None, rows=Rows(units=4))
    made.invoke("which?")
    report = budget.report()
    verify_report(report.to_dict())
    shown = report.to_dict()["shares"][0]
    assert CANARY not in str(shown)


def test_it_shows_what_is_left() -> None:
    made = voter(max_queries=3)
    made.invoke("a")
    assert repr(made) == str(made) == "DPVotingRunnable(component='voting', queries_left=2 of 3)"


def test_its_cost_counts_calibration() -> None:
    plain, twice = voter(max_queries=5), voter(max_queries=5, answers=LabelAnswers(calibrate=True))
    assert (plain.cost().private_calls, twice.cost().private_calls) == (100, 200)


def test_the_public_plan_is_what_runs() -> None:
    made = voter(epsilon=1.0, noise=None, rows=Rows(units=10), max_queries=20)
    assert isinstance(made.plan.release, ReleasePlan)
    assert made.plan.epsilon <= 1.0
    assert made.share.event == made.plan.event()
    assert made.plan.tickets()[0].max_count == 20


def test_a_batch_shows_progress_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    voter().batch(["a", "b", "c"])
    assert "private answers" not in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    voter().batch(["a", "b", "c"])
    assert "private answers" in capsys.readouterr().err
    voter().invoke("a")
    monkeypatch.setenv("TQDM_DISABLE", "1")
    voter().batch(["a", "b", "c"])
    assert "private answers" not in capsys.readouterr().err


def test_the_embedded_model_votes_offline() -> None:
    private = PrivateExamples(
        [{"text": text, "queue": queue} for text, queue in [("my card", "card"), ("my transfer", "transfer")] * 60],
        label_key="queue",
        labels=LABELS,
        public_size=120,
    )
    # A row without a record of the label that is asked for errs: one of fifty, and eight of 15 with probability below 1e-9.
    made = voter(private, llm=EmbeddedLLM(), rows=Rows(slots=15, shots=8))
    assert made.batch(["my card", "my transfer"]) == ["card", "transfer"]
