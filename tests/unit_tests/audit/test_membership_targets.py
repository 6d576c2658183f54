"""What membership attacks ask: real prompts, released prompts, answers and scores, read as the attacker reads them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from langchain_core.language_models import FakeListChatModel, FakeListLLM
from langchain_core.messages import AIMessage
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnableLambda

from langchain_dpicl import Budget, DPFewShotPromptTemplate, DPVotingRunnable, EmbeddedLLM, PrivateExamples, Rows
from langchain_dpicl.audit.membership import (
    Claim,
    Target,
    answer_target,
    few_shot_without_privacy,
    membership_attack,
    prompt_target,
    score_target,
)
from langchain_dpicl.backends.fake import FakeBackend
from langchain_dpicl.exceptions import ConfigurationError, ModelCallError, NoisyPlanWarning
from langchain_dpicl.results import Receipt, VotingResult
from tests.doubles import RepeatableCoins

LABELS = ("card", "cash")
WORDING: dict[str, Any] = {"example_prompt": "Q: {text}\nA: {label}", "suffix": "Q: {input}\nA:"}
RECORDS = [{"text": "lost {it}", "label": "card"}, {"text": "no notes", "label": "cash"}]


class Reader(FakeBackend):
    """Says the label of the shown example whose text is asked again; without one, cash in three of four cases."""

    def __init__(self, **options: Any) -> None:
        self.prompts: list[str] = []
        super().__init__(self.read, vocabulary=[" card", " cash", " card!"], **options)

    def read(self, prompt: str, prefix: tuple[bytes, ...]) -> dict[str, float]:
        self.prompts.append(prompt)
        *shown, asked = prompt.split("Q: ")
        text = asked.removesuffix("\nA:")
        known = dict(example.strip().split("\nA: ") for example in shown if "\nA: " in example)
        if text in known:
            return {f" {known[text]}": 0.9, " card" if known[text] == "cash" else " cash": 0.1}
        return {" card": 0.25, " cash": 0.75}


class TestRealPrompts:
    def test_they_hold_the_records_byte_for_byte_and_are_read_at_the_labels(self) -> None:
        engine = Reader()
        target = few_shot_without_privacy(engine, labels=LABELS, **WORDING)
        rows = target.build(RECORDS)(["lost {it}", "{x}"])
        assert rows == pytest.approx(np.array([[0.9, 0.1], [0.25, 0.75]]))
        expected = "Q: lost {it}\nA: card\n\nQ: no notes\nA: cash\n\nQ: lost {it}\nA:"
        assert set(engine.prompts) >= {
            expected,
            expected.replace("lost {it}\nA:", "{x}\nA:").replace("{x}\nA: card", "lost {it}\nA: card"),
        }
        assert (target.labels, target.reads, target.claim) == (LABELS, "label probabilities (whole labels)", None)

    def test_prefix_separator_fields_and_words_are_as_given(self) -> None:
        engine = Reader()
        target = few_shot_without_privacy(
            engine,
            labels=LABELS,
            example_prompt=PromptTemplate.from_template("Q: {body}\nA: {queue}"),
            suffix="Q: {input}\nA:",
            prefix="Sort.",
            example_separator="\n",
            fields=("body", "queue"),
            label_key="queue",
            verbalizers={"card": " card!", "cash": " cash"},
            name="mine",
        )
        target.build([{"body": "b", "queue": "card"}])(["b"])
        assert set(engine.prompts) == {"Sort.\nQ: b\nA: card!\nQ: b\nA:"}
        assert target.name == "mine"

    def test_calibration_divides_by_what_nothing_gets(self) -> None:
        target = few_shot_without_privacy(Reader(), labels=LABELS, **WORDING, calibrate=True, content_free=("N/A",))
        rows = target.build(RECORDS[1:])(["no notes", "new"])
        odds = (0.1 / 0.25) / (0.9 / 0.75)
        assert rows[0, 0] == pytest.approx(odds / (1 + odds))
        assert rows[1].tolist() == pytest.approx([0.5, 0.5])

    def test_text_alone_counts_one_for_the_label_that_is_named_and_nothing_where_none_is(self) -> None:
        model = FakeListChatModel(responses=["to the probe", "Card.", "who knows?", "**cash**"])
        target = few_shot_without_privacy(model, labels=LABELS, **WORDING, votes="text", max_concurrency=1)
        assert target.reads == "answered text"
        with warnings.catch_warnings():
            warnings.simplefilter("error", NoisyPlanWarning)  # which is about public prompts and charged rows
            assert target.build(RECORDS)(["a", "b", "c"]).tolist() == [[1, 0], [0, 0], [0, 1]]

    def test_text_can_be_asked_for_where_there_are_probabilities(self) -> None:
        target = few_shot_without_privacy(EmbeddedLLM(), labels=LABELS, **WORDING, votes="text")
        assert target.reads == "answered text"
        assert set(target.build(RECORDS * 2)(["no notes"]).ravel().tolist()) <= {0.0, 1.0}

    def test_an_outage_is_no_answer_without_a_label(self) -> None:
        class Down(FakeListLLM):
            def _call(self, prompt: str, *args: Any, **kwargs: Any) -> str:
                if "Q: a" in prompt:  # not the probe
                    raise OSError("down")
                return super()._call(prompt, *args, **kwargs)

        target = few_shot_without_privacy(Down(responses=["card"]), labels=LABELS, **WORDING, votes="text")
        with pytest.raises(ModelCallError):
            target.build(RECORDS)(["a"])

    def test_a_prompt_that_the_engine_would_cut_is_refused(self) -> None:
        class Short(Reader):
            def check_public(self, prompt: str) -> None:
                if len(prompt) > 60:
                    raise ModelCallError("expected a shorter prompt")

        target = few_shot_without_privacy(Short(), labels=LABELS, **WORDING)
        assert len(target.build(RECORDS)(["a"])) == 1
        with pytest.raises(ModelCallError, match="a shorter prompt"):  # a record that is cut out looks like no member
            target.build(RECORDS * 2)(["a"])

    @pytest.mark.parametrize("make", ["real", "released"])
    def test_text_votes_are_not_calibrated(self, make: str) -> None:
        model = FakeListChatModel(responses=["card"])
        with pytest.raises(ConfigurationError, match="a text vote has no probabilities"):
            if make == "real":
                few_shot_without_privacy(model, labels=LABELS, **WORDING, votes="text", calibrate=True)
            else:
                prompt_target(lambda _: None, model, labels=LABELS, votes="text", calibrate=True)  # type: ignore[arg-type,return-value]


class TestReleasedPrompts:
    def test_a_template_is_built_of_the_records_and_asked_without_them(self) -> None:
        engine, seen = Reader(), []

        def make(records: Sequence[Any]) -> DPFewShotPromptTemplate:
            seen.extend(records)
            return DPFewShotPromptTemplate(
                examples=[{"text": "made up", "label": "card"}],
                example_prompt=PromptTemplate.from_template(WORDING["example_prompt"]),
                suffix=WORDING["suffix"],
            )

        claim = Claim(1.0, 0.0, "replace_one")
        target = prompt_target(make, engine, labels=LABELS, claim=claim)
        rows = target.build(RECORDS)(["made up", "no notes"])
        assert rows == pytest.approx(np.array([[0.9, 0.1], [0.25, 0.75]]))
        assert seen == RECORDS
        assert not any("A: cash" in prompt or "lost" in prompt for prompt in engine.prompts)
        assert target.claim is claim

    def test_calibration_is_of_the_template(self) -> None:
        template = PromptTemplate.from_template(WORDING["suffix"])
        target = prompt_target(lambda _: template, Reader(), labels=LABELS, calibrate=True)
        assert target.build(RECORDS)(["new"])[0].tolist() == pytest.approx([0.5, 0.5])

    def test_a_conversation_is_read_where_the_model_begins(self) -> None:
        engine = Reader()
        template = ChatPromptTemplate.from_messages([("human", "Q: {input}")])
        prompt_target(lambda _: template, engine, labels=LABELS).build(RECORDS)(["new"])
        assert set(engine.prompts) == {"Human: Q: new\nAI:"}

    def test_a_template_of_two_variables_is_refused(self) -> None:
        template = PromptTemplate.from_template("{a} {b}")
        with pytest.raises(ConfigurationError, match="one variable"):
            prompt_target(lambda _: template, Reader(), labels=LABELS).build(RECORDS)


def voted(label: str, scores: dict[str, float] | None, *, abstained: bool = False) -> VotingResult:
    numbers: dict[str, Any] = {"entry": 1, "epsilon": 1.0, "delta": 0.0, "noise_multiplier": 1.0, "queries_left": 0}
    texts = {"component": "c", "dataset_id": "d", "ledger_id": "l", "adjacency": "add_remove", "mechanism": "gaussian"}
    receipt = Receipt(source="release", tickets=1, **texts, **numbers)
    return VotingResult(label=label, abstained=abstained, scores=scores, expected_votes=4.0, receipt=receipt)


class TestAnswers:
    @pytest.mark.parametrize(
        ("answer", "row"),
        [
            ("cash", [0, 1]),
            ("The label is: **Card**.", [1, 0]),
            (AIMessage("cash, surely"), [0, 1]),
            ("neither", [0, 0]),
            (voted("cash", None), [0, 1]),
            (voted("abstain", None, abstained=True), [0, 0]),
            (voted("card", {"cash": 3.5, "card": -0.5}), [-0.5, 3.5]),
        ],
        ids=["label", "words", "message", "none", "voted", "abstained", "noisy votes"],
    )
    def test_a_runnables_answer_is_read_as_text_or_as_its_noisy_votes(self, answer: Any, row: list[float]) -> None:
        target = answer_target(lambda _: RunnableLambda(lambda _: answer), labels=LABELS)
        assert target.build(RECORDS)(["a", "b"]).tolist() == [row, row]
        assert target.reads == "answered text"

    def test_it_is_made_of_the_records_and_asked_in_one_batch(self) -> None:
        def make(records: Sequence[Any]) -> RunnableLambda[str, str]:
            known = {record["text"]: record["label"] for record in records}
            return RunnableLambda(lambda text: f"is {known.get(text, 'open')}.")

        target = answer_target(make, labels=LABELS, verbalizers={"card": " is card", "cash": " is cash"})
        assert target.build(RECORDS)(["no notes", "new"]).tolist() == [[0, 1], [0, 0]]

    def test_scores_are_read_in_the_order_of_the_labels(self) -> None:
        def make(records: Sequence[Any]) -> Any:
            return lambda texts: [{"cash": len(text), "card": len(records)} for text in texts]

        target = score_target(make, labels=LABELS, name="soft", claim=None)
        assert target.build(RECORDS)(["a", "bcd"]).tolist() == [[2, 1], [2, 3]]

    def test_labels_that_an_answer_cannot_tell_apart_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="differ in more than case"):
            answer_target(lambda _: RunnableLambda(str), labels=("Card", "card"))


def test_a_target_can_be_named_anew_and_shows_nothing_it_is_built_by() -> None:
    claim = Claim(2.0, 0.0, "replace_one")
    target = Target("old", LABELS, "text", lambda _: lambda _: np.zeros((0, 2))).named("new", claim)
    assert (target.name, target.claim) == ("new", claim)
    assert not re.search("lambda|function", repr(target))


PLACES = ("a shop", "the market", "my bank", "a hotel", "the station", "an airport", "a museum", "the library")
QUESTIONS = [
    {"text": f"{verb} {number} in {place} {when}", "label": label}
    for label, verb in (("card", "why was my payment of"), ("cash", "may I withdraw"))
    for number, place in zip(range(11, 107, 12), PLACES, strict=True)
    for when in ("today", "on Monday", "last week", "in July")
]


class TestEndToEnd:
    """On made-up questions with the embedded model."""

    def test_a_prompt_of_real_records_leaks_them(self) -> None:
        target = few_shot_without_privacy(EmbeddedLLM(), labels=LABELS, **WORDING)
        shape: dict[str, Any] = {"num_records": 4, "num_prompts": 30, "num_nonmembers": 10, "progress": False}
        found = membership_attack(QUESTIONS, target, **shape, rng=RepeatableCoins(2))
        assert found.auc > 0.8  # the same every time: neither the coins nor the model change

    def test_a_private_voter_is_attacked_through_its_answers(self) -> None:
        def make(records: Sequence[Any]) -> DPVotingRunnable:
            private = PrivateExamples(
                [dict(record) for record in records], label_key="label", labels=LABELS, public_size=20
            )
            return DPVotingRunnable.from_private_examples(
                private,
                llm=EmbeddedLLM(),
                budget=Budget(epsilon=1.0, delta=1e-5),
                epsilon=1.0,
                max_queries=8,
                rows=Rows(units=4),
                **WORDING,
            )

        target = answer_target(make, labels=LABELS, claim=Claim(1.0, 1e-5, "add_remove"))
        found = membership_attack(
            QUESTIONS, target, num_records=20, num_prompts=1, num_members=4, num_nonmembers=4, progress=False
        )
        assert set(np.concatenate([found.member_scores, found.nonmember_scores]).ravel().tolist()) <= {0.0, 1.0}
        assert found.claim == Claim(1.0, 1e-5, "add_remove")
