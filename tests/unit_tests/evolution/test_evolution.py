"""Private evolution: what survives, what is asked, what is charged, and how it goes on after a stop."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.prompts import PromptTemplate

from langchain_dpicl.backends.fake import FakeBackend, scripted
from langchain_dpicl.backends.rows.neighbour_rows import LocalEmbeddings
from langchain_dpicl.evolution import PrivateEvolution, SurvivalRule
from langchain_dpicl.exceptions import (
    CapabilityError,
    ConfigurationError,
    LedgerError,
    ModelCallError,
    NoPrivacyBudgetError,
    PrivacyBudgetError,
    PrivacyBudgetExceededError,
    RunInterruptedError,
)
from langchain_dpicl.options import Decoding, GenerationTask, Noise, OpenLabel
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.prompts import DPFewShotPromptTemplate
from langchain_dpicl.released.demonstrations import ReleasedDemonstrations
from langchain_dpicl.reports.report import verify_report
from tests.evolution_doubles import RECORDS, SEARCH, Muse, Topical, budget_of, charged, evolution
from tests.example_files import example
from tests.sealed_files import assert_found

pytestmark = pytest.mark.usefixtures("remembered_prices")

LABELLED = [{"text": f"my card {n}", "queue": "bank"} for n in range(20)] + [
    {"text": f"a film {n}", "queue": "arts"} for n in range(12)
]
BY_QUEUE = {"label_key": "queue", "labels": ("bank", "arts"), "public_size": {"bank": 20, "arts": 12}}


# -- what comes out ----------------------------------------------------------------------------------------------


def test_the_candidate_that_most_units_are_nearest_to_survives() -> None:
    made = evolution(evolution=SEARCH.replace(rounds=1, num_survivors=3), shots_per_label=2)
    released = made.run(progress=False)
    assert released.examples == ({"text": "a card"}, {"text": "a boat"})
    assert made.votes[None] == pytest.approx((14.0, 6.0, 0.0), abs=0.02)
    assert made.is_finished


def test_survivors_are_varied_and_compete_with_their_variations() -> None:
    muse = Muse(says=lambda prompt: "card card card boat" if "Rewrite" in prompt else "a boat")
    records = ["card card card boat"] * 20
    made = evolution(records, llm=muse, evolution=SEARCH.replace(candidates=["a boat", "a card"]), shots_per_label=1)
    assert made.run(progress=False).examples == ({"text": "card card card boat"},)
    first = next(asked for asked in muse.asked if "a card" in asked)
    assert first == (
        "Rewrite the following text: say something similar in other words. Write nothing else.\n\n"
        "text: a card\n\nAnother text:"
    )


def test_each_label_has_rounds_of_its_own_and_its_own_units_vote() -> None:
    muse = Muse(says=["a card", "a film"] * 2)
    made = evolution(LABELLED, declared=BY_QUEUE, llm=muse, evolution=SEARCH.replace(rounds=1))
    released = made.run(progress=False)
    assert released.examples == ({"queue": "bank", "text": "a card"}, {"queue": "arts", "text": "a film"})
    assert made.votes["bank"][0] == pytest.approx(20.0, abs=0.02)
    assert made.votes["arts"][0] == pytest.approx(12.0, abs=0.02)
    assert muse.asked[0] == "Write a text for the given queue.\n\nqueue: bank\ntext:"
    assert muse.asked[-1] == "Write a text for the given queue.\n\nqueue: arts\ntext:"


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_sync_and_async_give_the_same_and_stream_label_by_label(is_async: bool) -> None:
    made = evolution(LABELLED, declared=BY_QUEUE, llm=Muse(says=["a card", "a film"] * 9))

    async def streamed() -> list[dict[str, str]]:
        return [example async for example in made.astream(progress=False)]

    found = asyncio.run(streamed()) if is_async else list(made.stream(progress=False))
    assert [example["queue"] for example in found] == ["bank", "arts"]
    assert found == made.demonstrations
    assert (asyncio.run(made.arun()) if is_async else made.run()).examples == tuple(found)


def test_a_unit_with_many_records_has_one_vote_of_length_one() -> None:
    records = [{"text": "a boat", "user": "one"} for _ in range(50)]
    records += [{"text": "a card", "user": "two"}, {"text": "a card", "user": "three"}]
    records += [{"text": text, "user": "four"} for text in ("a film",) * 3 + ("the rain",) * 4]
    declared = {"public_size": 4, "unit_key": "user", "records_per_unit": 100}
    made = evolution(records, declared=declared, evolution=SEARCH.replace(rounds=1, num_survivors=4, num_variations=0))
    made.run(progress=False)
    assert made.votes[None] == pytest.approx((2.0, 1.0, 0.8, 0.6), abs=0.02)


def test_an_engine_that_completes_text_writes_as_well() -> None:
    engine = FakeBackend(scripted({"Write": 1.0}, {" card": 1.0}), max_top_k=1)
    made = evolution(llm=engine, evolution=SEARCH.replace(candidates=["a boat", "a card"]), max_tokens=1)
    assert made.run(progress=False).examples == ({"text": "a card"},)


def test_hints_come_in_turn_behind_the_instruction() -> None:
    muse = Muse()
    evolution(
        llm=muse,
        evolution=SEARCH.replace(rounds=1),
        instruction="Say it.",
        task=GenerationTask(hints=("Shout.", "Whisper.")),
    ).run(progress=False, config={"max_concurrency": 1})  # two threads may be asked in any order
    assert muse.asked[:3] == ["Say it. Shout.\n\ntext:", "Say it. Whisper.\n\ntext:", "Say it. Shout.\n\ntext:"]


def test_own_templates_are_filled_once_and_braces_of_texts_stay() -> None:
    muse = Muse(says=lambda prompt: "card {q} {text}")
    made = evolution(
        llm=muse,
        evolution=SEARCH.replace(candidates=["card {text}", "a boat"]),
        task=GenerationTask(variation_prompt="{text} -> {text}?"),
        instruction="{x}",
    )
    made.run(progress=False)
    assert "card {text} -> card {text}?" in muse.asked


# -- what is asked and charged -----------------------------------------------------------------------------------


def test_nothing_is_embedded_and_nothing_charged_before_the_first_ticket_burns() -> None:
    embeddings, budget = Topical(), budget_of()
    made = evolution(embeddings=embeddings, budget=budget)
    assert charged(budget) == 0
    public = list(embeddings.asked)  # the probe
    made.share = _Refusing(made.share)
    with pytest.raises(PrivacyBudgetError):
        made.run(progress=False)
    assert not set(embeddings.asked) & set(RECORDS)
    assert set(embeddings.asked) - set(public) == {"a card", "a boat", "a film", "the rain"}


class _Refusing:
    """A share whose tickets cannot be reserved."""

    def __init__(self, share: Any) -> None:
        self._share = share

    def __getattr__(self, name: str) -> Any:
        return getattr(self._share, name)

    def reserve(self, *args: Any, **kwargs: Any) -> Any:
        raise PrivacyBudgetExceededError("none left", requested=1.0, remaining=0.0)


def test_every_round_is_a_ticket_and_every_private_text_is_embedded_once() -> None:
    embeddings, budget = Topical(), budget_of()
    evolution(embeddings=embeddings, budget=budget, evolution=SEARCH.replace(rounds=4)).run(progress=False)
    assert charged(budget) == 4
    assert [embeddings.asked.count(record) for record in RECORDS] == [1] * len(RECORDS)


def test_private_directions_are_gone_when_all_is_done() -> None:
    made = evolution(evolution=SEARCH.replace(rounds=1))
    made.run(progress=False)
    assert made._nearest._held.reveal() == {}


def test_the_report_verifies_and_the_result_survives_its_file() -> None:
    made = evolution(LABELLED, declared=BY_QUEUE, llm=Muse(says=["a card", "a film"] * 9), noise=Noise(multiplier=2.0))
    released = made.run(progress=False)
    assert verify_report(released).ok
    for name, value in (("steps", 2), *(("step", step) for step in (-1, 99, True, "x", None))):
        told = {**released.report, name: value}
        for claim in (told, dataclasses.replace(released, report=told)):
            assert_found(verify_report(claim), f"report.{name}: expected")
    older = {name: value for name, value in released.report.items() if name not in {"step", "steps"}}
    assert verify_report(older).ok
    more = ReleasedDemonstrations(released.examples * 2, released.report, released.plan)
    assert_found(more.verify(), "of label 'bank' were released, its tickets allow")
    assert ReleasedDemonstrations.from_json(released.to_json()) == released
    assert released.plan["mechanism"] == "private_evolution"
    assert released.plan["embeddings"] == "Topical"
    assert released.plan["label_key"] == "queue"


# -- stops and outages -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_an_outage_keeps_what_was_released_and_the_rest_of_the_rounds(is_async: bool) -> None:
    said = iter(["a card", "a boat", "a film", "the rain"])
    muse, budget = Muse(says=lambda prompt: next(said, OSError("out"))), budget_of()
    made = evolution(llm=muse, budget=budget, evolution=SEARCH.replace(rounds=3))
    with pytest.raises(RunInterruptedError, match="1 of 3 rounds are released") as caught:
        asyncio.run(made.arun(progress=False)) if is_async else made.run(progress=False)
    assert caught.value.run is made
    assert charged(budget) == 1
    assert made.demonstrations == [{"text": "a card"}]
    assert not made.is_finished
    muse.says = ("a card, and more",)
    made.run(progress=False)
    assert charged(budget) == 3
    assert made.is_finished


def test_a_round_whose_commit_fails_is_kept_and_committed_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    made = evolution(budget=(budget := budget_of()))

    def out(self: Any, count: int = 1) -> None:
        raise LedgerError("out")

    with monkeypatch.context() as patched, pytest.raises(LedgerError):
        patched.setattr("langchain_dpicl.privacy.ledger.shares.Reservation.commit", out)
        made.run(progress=False)
    made.run(progress=False)
    assert charged(budget) == made.plan.rounds
    assert not budget.budget.dangling()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_the_config_of_a_call_goes_to_the_model(is_async: bool) -> None:
    tags: list[list[str]] = []

    class Listener(BaseCallbackHandler):
        def on_chat_model_start(self, *_: Any, **told: Any) -> None:
            tags.append(told["tags"])

    made = evolution(evolution=SEARCH)
    config: Any = {"callbacks": [Listener()], "tags": ["mine"]}
    asyncio.run(made.arun(progress=False, config=config)) if is_async else made.run(progress=False, config=config)
    assert len(tags) == len(made._writer.model._llm.asked)
    assert all("mine" in each for each in tags)


def test_an_outage_before_the_first_round_costs_nothing() -> None:
    budget = budget_of()
    with pytest.raises(RunInterruptedError):
        evolution(llm=Muse(says=[OSError("out")]), budget=budget).run(progress=False)
    assert charged(budget) == 0


def test_a_stop_while_units_vote_burns_that_ticket_and_the_others_stay() -> None:
    class Stopping(Topical):
        is_stopping = True

        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            if self.is_stopping and texts[0] in RECORDS:
                raise KeyboardInterrupt
            return super().embed_documents(texts)

    embeddings, budget = Stopping(), budget_of()
    made = evolution(embeddings=embeddings, budget=budget, evolution=SEARCH)
    with pytest.raises(KeyboardInterrupt) as caught:
        made.run(progress=False)
    assert caught.value.run is made  # type: ignore[attr-defined]
    assert charged(budget) == 1
    embeddings.is_stopping = False
    made.run(progress=False)
    assert charged(budget) == 2
    assert made._items[0].rounds == 1  # the other one was lost


def test_where_every_ticket_was_lost_the_run_says_so() -> None:
    class Stopping(Topical):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            if texts[0] in RECORDS:
                raise KeyboardInterrupt
            return super().embed_documents(texts)

    made = evolution(embeddings=Stopping(), evolution=SEARCH.replace(rounds=1))
    with pytest.raises(KeyboardInterrupt):
        made.run(progress=False)
    with pytest.raises(RunInterruptedError, match="declare another component"):
        made.run(progress=False)


async def test_a_cancelled_run_goes_on_where_it_stood() -> None:
    budget, made = budget_of(), None
    made = evolution(LABELLED, declared=BY_QUEUE, llm=Muse(says=["a card", "a film"] * 9), budget=budget)
    stream = made.astream(progress=False)
    assert (await anext(stream))["queue"] == "bank"
    await stream.aclose()
    assert charged(budget) == 2
    assert len((await made.arun(progress=False)).examples) == 2
    assert charged(budget) == 4


def test_the_same_component_name_and_plan_is_the_same_share() -> None:
    budget, private = budget_of(), PrivateExamples(RECORDS, public_size=len(RECORDS))
    evolution(private=private, budget=budget, component="texts").run(progress=False)
    again = evolution(private=private, budget=budget, component="texts")
    with pytest.raises(PrivacyBudgetExceededError):
        again.run(progress=False)


def test_the_same_component_opened_again_has_the_rounds_that_came_back() -> None:
    budget, private = budget_of(), PrivateExamples(RECORDS, public_size=len(RECORDS))
    given = {"private": private, "budget": budget, "component": "texts", "evolution": SEARCH.replace(rounds=4)}
    said = iter(["a card", "a boat", "a film", "the rain"])
    with pytest.raises(RunInterruptedError, match="1 of 4 rounds"):
        evolution(llm=Muse(says=lambda prompt: next(said, OSError("out"))), **given).run(progress=False)
    again = evolution(**given)
    assert again.run(progress=False).examples == ({"text": "a card"},)
    assert len(again.history[None]) == 3
    assert again.is_finished
    assert charged(budget) == 4


def test_a_label_that_lost_every_ticket_keeps_no_other_from_its_rounds() -> None:
    class Stopping(Topical):
        is_stopping = True

        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            if self.is_stopping and texts[0] == LABELLED[0]["text"]:
                raise KeyboardInterrupt
            return super().embed_documents(texts)

    embeddings, budget = Stopping(), budget_of()
    muse = Muse(says=["a card", "a film"] * 9)
    search = SEARCH.replace(rounds=1)
    made = evolution(LABELLED, declared=BY_QUEUE, llm=muse, embeddings=embeddings, budget=budget, evolution=search)
    with pytest.raises(KeyboardInterrupt):
        made.run(progress=False)
    embeddings.is_stopping = False
    with pytest.raises(RunInterruptedError, match="declare another component"):
        made.run(progress=False)
    assert [example["queue"] for example in made.demonstrations] == ["arts"]
    assert charged(budget) == 2


def test_rounds_of_a_label_that_came_back_run_before_a_label_without_any_is_refused() -> None:
    budget, private = budget_of(), PrivateExamples(LABELLED, **BY_QUEUE)
    given = {"private": private, "budget": budget, "component": "texts", "evolution": SEARCH.replace(rounds=3)}
    numbers = itertools.count()

    def says(prompt: str) -> Any:
        return OSError("out") if "Rewrite" in prompt and "queue: arts" in prompt else f"a card {next(numbers)}"

    with pytest.raises(RunInterruptedError, match="4 of 6 rounds"):
        evolution(llm=Muse(says=says), **given).run(progress=False)
    with pytest.raises(PrivacyBudgetExceededError, match="label 'bank'") as caught:
        evolution(**given).run(progress=False)
    assert charged(budget) == 6
    assert [example["queue"] for example in caught.value.run.result.examples] == ["arts"]  # type: ignore[attr-defined]


def test_a_removed_unit_votes_no_more_and_its_text_is_forgotten() -> None:
    private = PrivateExamples(RECORDS, public_size=len(RECORDS))
    made = evolution(private=private, evolution=SEARCH.replace(rounds=3))
    said = iter(["a card", "a boat", "a film", "the rain"])
    made._writer.model._llm.says = lambda prompt: next(said, OSError("out"))
    with pytest.raises(RunInterruptedError):
        made.run(progress=False)
    assert made._nearest._name(RECORDS[0]) in made._nearest._held.reveal()
    private.remove(0)
    made._writer.model._llm.says = ("a card!",)
    kept: list[Any] = []
    real = made._nearest.forget
    made._nearest.forget = lambda: (kept.extend(made._nearest._held.reveal()), real())[1]  # type: ignore[method-assign]
    made.run(progress=False)
    assert made._nearest._name(RECORDS[0]) not in kept
    assert made._nearest._name(RECORDS[1]) in kept


# -- faults ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("says", "told"),
    [
        (("\n ",), "no variation with text.*stop="),
        (("?!", "..."), "no new text that the embeddings tell something about.*other embeddings="),
    ],
    ids=["no text", "nothing that the embeddings know"],
)
def test_a_round_without_a_variation_to_vote_for_costs_nothing(says: Any, told: str, is_async: bool) -> None:
    search = SEARCH.replace(rounds=3, candidates=("a card", "a boat"))
    muse, budget = Muse(says=says), budget_of()
    made = evolution(llm=muse, budget=budget, evolution=search, embeddings=LocalEmbeddings())
    with pytest.raises(RunInterruptedError, match=told):
        asyncio.run(made.arun(progress=False)) if is_async else made.run(progress=False)
    assert charged(budget) == 1
    muse.says = ("a card, and more",)
    made.run(progress=False)
    assert charged(budget) == 3


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_texts_that_the_embeddings_know_nothing_of_are_no_candidates(is_async: bool) -> None:
    muse, budget = Muse(says=("?!", "a card", "!!", "...")), budget_of()
    made = evolution(llm=muse, budget=budget, embeddings=LocalEmbeddings())
    with pytest.raises(ConfigurationError, match=r"found 1.*other embeddings="):
        asyncio.run(made.arun(progress=False)) if is_async else made.run(progress=False)
    assert charged(budget) == 0
    muse.says = ("?!", "a card", "!!", "a boat", "...", "one more card")
    asyncio.run(made.arun(progress=False)) if is_async else made.run(progress=False)
    known = {"a card", "a boat", "one more card"}
    assert [set(votes) <= known for votes in made.history[None]] == [True, True]


FAULTS: dict[str, Callable[[], dict[str, Any]]] = {
    "no instruction": lambda: {"instruction": 3},
    "two instructions": lambda: {"instruction": "Write.", "task": GenerationTask("Say.")},
    "stub without the text": lambda: {"task": GenerationTask(record_prompt="{queue}:")},
    "variation without the text": lambda: {"task": GenerationTask(variation_prompt="again")},
    "variation of another field": lambda: {"task": GenerationTask(variation_prompt="{text} {other}")},
    "an open label": lambda: {"task": GenerationTask(open_label=OpenLabel("queue"))},
    "candidates of other labels": lambda: {"evolution": SEARCH.replace(candidates={"other": ("a",)})},
    "a candidate without a direction": lambda: {
        "evolution": SEARCH.replace(candidates=("a card", "?!")),
        "embeddings": LocalEmbeddings(),
    },
    "fewer candidates than given": lambda: {"evolution": SEARCH.replace(candidates=("a", "b", "c"), num_candidates=2)},
    "fewer candidates than shots": lambda: {
        "evolution": SEARCH.replace(candidates=("a", "b"), num_survivors=3),
        "shots_per_label": 3,
    },
    "more shots than survivors": lambda: {"shots_per_label": 3},
    "rounds without variations": lambda: {"evolution": SEARCH.replace(num_variations=0)},
    "a search by name": lambda: {"evolution": "rank"},
    "other noise": lambda: {"noise": Noise("gumbel")},
    "noise by name": lambda: {"noise": "gumbel"},
    "decoding of tokens": lambda: {"decoding": Decoding(temperature=1.0)},
    "no tokens": lambda: {"max_tokens": 0},
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_public_faults_raise_before_anything_is_bound(fault: Callable[[], dict[str, Any]]) -> None:
    private, embeddings = PrivateExamples(RECORDS, public_size=len(RECORDS)), Topical()
    with pytest.raises(ConfigurationError):
        evolution(**{"private": private, "embeddings": embeddings, **fault()})
    assert private._ledger_id is None
    assert not set(embeddings.asked) & set(RECORDS)


def test_other_faults_are_named() -> None:
    with pytest.raises(CapabilityError):
        evolution(llm=object())
    with pytest.raises(ConfigurationError, match="PrivateExamples"):
        evolution(private=RECORDS)
    with pytest.raises(NoPrivacyBudgetError):
        evolution(budget=None)
    with pytest.raises(ConfigurationError, match="at least 2 distinct public texts"):
        evolution(llm=Muse(says=["always this"])).run(progress=False)


def test_whatever_the_records_are_the_same_path_is_walked() -> None:
    for records in ([], [""], ["\x00\ud800"], ["x" * 30_000]):
        made = evolution(records, evolution=SEARCH.replace(rounds=1), noise=Noise(multiplier=1.0))
        assert len(made.run(progress=False).examples) == 1


# -- survival ----------------------------------------------------------------------------------------------------


def test_rank_takes_the_most_votes_and_the_first_of_equals() -> None:
    assert SurvivalRule(3, 1).of(np.array([1.0, 5.0, 5.0, -2.0])) == [1, 2, 0]


def test_a_threshold_stops_all_but_the_best() -> None:
    assert SurvivalRule(3, 2, threshold=9.0).of(np.array([1.0, 5.0, 4.0])) == [1, 2]
    assert SurvivalRule(3, 1, threshold=4.0).of(np.array([1.0, 5.0, 4.0])) == [1, 2]


# -- in a template -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_prompt_template_shows_what_was_evolved(is_async: bool) -> None:
    made = evolution(
        LABELLED,
        declared=BY_QUEUE,
        llm=Muse(says=["a card", "a film"] * 9),
        noise=Noise(multiplier=0.1),
        evolution=SEARCH.replace(rounds=1),
    )
    shown: dict[str, Any] = {
        "example_prompt": PromptTemplate.from_template("{text} -> {queue}"),
        "suffix": "{input} ->",
    }
    if is_async:
        prompt = asyncio.run(DPFewShotPromptTemplate.afrom_run(made, **shown))
    else:
        prompt = DPFewShotPromptTemplate.from_run(made, **shown)
    assert prompt.format(input="{x}") == "a card -> bank\n\na film -> arts\n\n{x} ->"
    assert prompt.privacy_report["private"] is True
    assert prompt.with_shots(0).format(input="x") == "x ->"


def test_it_says_what_it_is_without_showing_a_record() -> None:
    made = evolution()
    assert isinstance(made, PrivateEvolution)
    assert "number" not in repr(made)
    with pytest.raises((TypeError, ModelCallError, PrivacyBudgetError, ConfigurationError, AttributeError)):
        PrivateEvolution.from_private_examples(RECORDS, llm=Muse(), budget=budget_of(), epsilon=1.0)  # type: ignore[arg-type]


def test_the_example_shows_rounds_and_a_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    with example("private_evolution", SIZE=10, ROUNDS=1, SURVIVORS=2) as module:
        module.main()
    shown = capsys.readouterr().out
    assert "the model is asked 32 public prompts, and sees no record" in shown
    assert shown.count("\ntopic: ") == 8
