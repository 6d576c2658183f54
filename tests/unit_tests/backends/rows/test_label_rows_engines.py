"""Label rows of the real engines: the embedded model, LangChain models with and without logprobs, decision models."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from langchain_core.language_models import FakeListChatModel
from scipy.special import softmax

from langchain_dpicl.backends.base import Rows, Token
from langchain_dpicl.backends.embedded import EmbeddedModel
from langchain_dpicl.backends.fake import FakeBackend
from langchain_dpicl.backends.langchain.backend import LangChainBackend
from langchain_dpicl.backends.langchain.texts import TextVoteBackend
from langchain_dpicl.backends.private_calls.call import RetryPolicy
from langchain_dpicl.backends.resolve import as_choice_backend
from langchain_dpicl.backends.rows.label_rows import LabelRows
from langchain_dpicl.exceptions import ConfigurationError, ModelCallError, NoisyPlanWarning
from tests.canary import RECORD, VOTE, describe, leaks, observe
from tests.contracts.backend import HOSTILE, same_bits
from tests.scripted_models import ScriptedChat, ScriptedLLM, StatusError, by_word

QUICK = RetryPolicy(first_wait=0.001, max_wait=0.001)
DRIVERS = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
LABELS = ((" colour",), (" number",), (" animal", " beast"))
PROMPT = "Word: red\nKind: colour\n\nWord: seven\nKind: number\n\nWord: {}\nKind:"
WORDS = ("blue", "nine", "horse", "blue wide {sea}", "N/A")


def asked(rows: LabelRows, prompts: Any, *, is_async: bool = False) -> Rows:
    ask = rows.ask(prompts)
    return (asyncio.run(ask.arun()) if is_async else ask.run()).take()


def asked_public(rows: LabelRows, prompts: Any, *, is_async: bool = False) -> Rows:
    ask = rows.request_public_rows([prompts])
    return (asyncio.run(ask.arun()) if is_async else ask.run())[0]


class TestEmbedded:
    engine = EmbeddedModel()
    prompts = tuple((PROMPT.format(word), PROMPT.format("N/A"), PROMPT.format("")) for word in WORDS)

    @DRIVERS
    def test_rows_are_likelihoods_calibrated_as_in_the_paper(self, is_async: bool) -> None:
        labels = ((" colour",), (" number",), (" animal",))
        rows = LabelRows(self.engine, labels, calibrate=True)
        assert rows.kind == "whole labels"
        found = asked(rows, self.prompts, is_async=is_async)
        texts = [text for (text,) in labels]
        for row, (query, *free) in zip(found, self.prompts, strict=True):
            base = softmax(self.engine.score_choices(free, texts), axis=1).mean(axis=0)
            ratios = softmax(self.engine.score_choices([query], texts)[0]) / base
            assert row == pytest.approx(ratios / ratios.sum(), rel=1e-9)

    def test_a_label_with_two_texts_has_the_likelihood_of_both(self) -> None:
        texts = [text for label in LABELS for text in label]
        found = asked(LabelRows(self.engine, LABELS, calibrate=False), self.prompts)
        likelihoods = np.exp(self.engine.score_choices([row[0] for row in self.prompts], texts))
        summed = np.stack([likelihoods[:, 0], likelihoods[:, 1], likelihoods[:, 2] + likelihoods[:, 3]], axis=1)
        assert found == pytest.approx(summed / summed.sum(axis=1, keepdims=True))
        assert found.argmax(axis=1)[:2].tolist() == [0, 1]

    @pytest.mark.parametrize("hostile", HOSTILE, ids=range(len(HOSTILE)))
    def test_a_hostile_row_moves_no_bit_of_another(self, hostile: str) -> None:
        rows = LabelRows(self.engine, LABELS, calibrate=True)
        before = asked(rows, self.prompts)
        for place in range(len(self.prompts)):
            for changed in ((hostile,), (hostile, hostile), (self.prompts[place][0], hostile), None):
                after = asked(rows, (*self.prompts[:place], changed, *self.prompts[place + 1 :]))
                others = np.arange(len(self.prompts)) != place
                assert same_bits(before[others], after[others])

    def test_a_row_does_not_know_how_many_stand_beside_it(self) -> None:
        rows = LabelRows(self.engine, LABELS, calibrate=True)
        alone = np.concatenate([asked(rows, (row,)) for row in self.prompts])
        assert same_bits(asked(rows, self.prompts), alone)
        assert same_bits(asked(rows, self.prompts * 9)[: len(alone)], alone)

    @DRIVERS
    def test_public_prompts_give_the_same_numbers(self, is_async: bool) -> None:
        rows = LabelRows(self.engine, LABELS, calibrate=True)
        found = asked_public(rows, self.prompts[0], is_async=is_async)
        assert same_bits(found, asked(rows, self.prompts[:1])[0])


QUEUES = (("card",), ("cash machine", "ATM"), ("fee",))
TOPS: Mapping[str, Mapping[str, float]] = {
    "aaa": {"card": 0.3, " Card": 0.1, "C": 0.2, "ATM": 0.05, "cash": 0.05, "the": 0.2},
    "bbb": {" fee": 0.5, "F": 0.1, " AT": 0.1, "\n": 0.2},
    "none": {"I": 0.9, "cannot": 0.05},
}
OTHER = {"card": 0.2, "cash": 0.2, "fee": 0.4, "w": 0.02, "x": 0.02, "y": 0.02, "z": 0.02}
RAISES = {"fails": StatusError("content", status_code=400)}


def reads(model: Callable[..., Any]) -> Any:
    return model(answer=by_word(TOPS, OTHER), raises=dict(RAISES))


class TestFirstTokens:
    @pytest.fixture(params=[ScriptedLLM, ScriptedChat], ids=["completion", "chat"])
    def engine(self, request: pytest.FixtureRequest) -> Any:
        made = as_choice_backend(reads(request.param))
        assert isinstance(made, LangChainBackend)
        return made

    @DRIVERS
    def test_rows_are_the_shares_of_the_labels_tokens(self, engine: Any, is_async: bool) -> None:
        rows = LabelRows(engine, QUEUES, calibrate=False)
        assert rows.kind == "first tokens"
        found = asked(rows, (("aaa",), ("bbb",), ("none",), ("fails",), None), is_async=is_async)
        expected = [[0.4 / 0.5, 0.1 / 0.5, 0.0], [0.0, 0.1 / 0.7, 0.6 / 0.7], [0.0] * 3, [0.0] * 3, [0.0] * 3]
        assert found == pytest.approx(np.array(expected))

    @DRIVERS
    def test_rows_are_calibrated_by_their_own_content_free_prompts(self, engine: Any, is_async: bool) -> None:
        rows = LabelRows(engine, QUEUES, calibrate=True)
        found = asked(rows, (("aaa", "N/A", "fails"), ("bbb", "none")), is_async=is_async)
        ratios = np.array([0.8 / 0.25, 0.2 / 0.25, 0.0])
        assert found == pytest.approx(np.array([ratios / ratios.sum(), [0.0, 1 / 7, 6 / 7]]))

    @DRIVERS
    def test_public_prompts_give_the_same_numbers_and_their_failure_is_an_error(
        self, engine: Any, is_async: bool
    ) -> None:
        rows = LabelRows(engine, QUEUES, calibrate=True)
        found = asked_public(rows, ("aaa", "N/A"), is_async=is_async)
        assert same_bits(found, asked(rows, (("aaa", "N/A"),))[0])
        assert asked_public(rows, ("none", "N/A"), is_async=is_async).tolist() == [0.0, 0.0, 0.0]
        with pytest.raises(ModelCallError, match="a public call"):
            asked_public(rows, ("fails", "N/A"), is_async=is_async)

    @pytest.mark.parametrize("model", [ScriptedLLM, ScriptedChat], ids=["completion", "chat"])
    def test_an_article_that_begins_any_answer_outweighs_no_label_that_is_named(self, model: Any) -> None:
        labels = (("asthma",), ("diabetes",), ("invoice",))
        answers = {"query": {" diabetes": 0.96, " a": 0.02, " I": 0.01}, "free": {" diabetes": 0.96, " a": 0.005}}
        named = as_choice_backend(model(answer=by_word(answers, OTHER)))
        for rows in (LabelRows(named, labels, calibrate=calibrate) for calibrate in (False, True)):
            assert asked(rows, (("query", "free"),)).tolist() == [[0.0, 1.0, 0.0]]
            assert asked_public(rows, ("query", "free")).tolist() == [0.0, 1.0, 0.0]

    @pytest.mark.parametrize(
        ("labels", "tokens", "read"),
        [
            ("Überweisung Überziehung Karte", (" Über", " Über", " Karte"), {2}),
            ("الدفع الشحن مرتجع", (" ال", " ال", " مر"), {2}),
            ("chargeback chargeoff refund", (" charge", " charge", " refund"), {2}),
            ("返品 配送 支払", ("\udce8\udcbf", "配送", "\udce6"), {0, 1, 2}),
            ("返品 配送 支払", ("\ufffd", "配送", "支払"), {1, 2}),
            ("U\u0308belkeit O\u0308dem Schmerz", (" Übel", " Öd", " Schmerz"), {0, 1, 2}),
            ("ılıman ilaç ağrı", (" Il", " İl", " ağ"), {1, 2}),
            ("Outage Billing Other", (" Out", " Billing", " Other"), {0, 1, 2}),
        ],
    )
    def test_a_token_names_its_label_or_none(self, labels: str, tokens: tuple[str, ...], read: set[int]) -> None:
        """Whatever is reported beside a token that tells no labels apart, no other label gets its mass."""
        answers = {f"<{place}>": {**dict.fromkeys(tokens, 0.01), token: 0.9} for place, token in enumerate(tokens)}
        engine = as_choice_backend(ScriptedChat(answer=by_word(answers, OTHER)))
        for place in range(len(tokens)):
            rows = LabelRows(engine, [(label,) for label in labels.split()], calibrate=False)
            row = asked(rows, ((f"<{place}>",),))[0]
            with contextlib.nullcontext() if place in read else pytest.warns(NoisyPlanWarning, match="tokenizer="):
                assert same_bits(asked_public(rows, (f"<{place}>",)), row)
            assert row[place] > 0.8 if place in read else not row.any(), row

    @pytest.mark.parametrize(
        "options", [{"max_top_k": 5}, {"vocabulary": [" invoice", " Überweisung", "\ufffd"]}], ids=str
    )
    def test_an_engine_that_decodes_what_it_scores_keeps_its_rows(self, options: dict[str, Any]) -> None:
        """No part of a character is asked of an engine that does not say that it reports them."""

        class Decoding(FakeBackend):
            score_choices: Any = None

            def open(self, prompts: Sequence[str], prefix: Sequence[Token]) -> Any:
                session: Any = super().open(prompts, prefix)
                score = session.score
                session.score = lambda domain: score([token.decode().encode() for token in domain])
                return session

        answers = {"a": {" invoice": 0.9, " Überweisung": 0.1}, "lost": {"\ufffd": 0.9, " invoice": 0.1}}
        engine = Decoding(lambda prompt, prefix: answers[prompt], **options)
        rows = LabelRows(engine, [("invoice",), ("Überweisung",)], calibrate=False)
        assert asked(rows, (("a",), ("lost",))) == pytest.approx(np.array([[0.9, 0.1], [0.0, 0.0]]))
        with pytest.warns(NoisyPlanWarning):
            assert not asked_public(rows, ("lost",)).any()

    def test_a_server_with_its_whole_vocabulary_is_read_by_that(self) -> None:
        table = {" card": 0.25, "CASH": 0.25, "fee": 0.125, "ca": 0.125, "x": 0.25}
        engine = LangChainBackend(ScriptedLLM(answer=lambda text: table), full_vocabulary=5, retry=QUICK)
        assert engine.max_top_k is None
        rows = LabelRows(engine, QUEUES, calibrate=False)
        assert asked(rows, (("a",),)) == pytest.approx(np.array([[0.4, 0.4, 0.2]]))
        assert asked_public(rows, ("a",)) == pytest.approx([0.4, 0.4, 0.2])
        with pytest.raises(ConfigurationError, match="no first token of its own"):
            LabelRows(engine, (("card",), ("unheard of",)), calibrate=False)
        table = {" sports": 0.05, " world": 0.1, " sport": 0.85}  # a part of the label's token, or another word
        engine = LangChainBackend(ScriptedLLM(answer=lambda text: table), full_vocabulary=3, retry=QUICK)
        assert not asked(LabelRows(engine, (("sports",), ("world",)), calibrate=False), (("a",),)).any()

    @pytest.mark.loopback
    def test_no_observer_sees_a_record_or_a_vote(self) -> None:
        answer = by_word({RECORD: {VOTE: 0.9, "y": 0.05}}, {"x": 0.5, "y": 0.2})
        engine = LangChainBackend(ScriptedLLM(answer=answer), retry=QUICK)
        rows = LabelRows(engine, ((VOTE,), ("x",)), calibrate=False)
        seen = observe(lambda: asked(rows, ((RECORD,),)).tolist())
        assert seen.result == [[1.0, 0.0]]
        assert leaks(seen) == set(), describe(seen.error)


class TestTextVotes:
    @DRIVERS
    def test_rows_are_votes_or_zeros(self, is_async: bool) -> None:
        # The first answer is for the probe.
        engine = TextVoteBackend(FakeListChatModel(responses=["black", "Card."]), max_concurrency=1, retry=QUICK)
        rows = LabelRows(engine, (("card", "Card"), ("cash machine", "ATM")), calibrate=False)
        assert rows.kind == "text votes"
        assert asked(rows, (("a",), None), is_async=is_async).tolist() == [[1.0, 0.0], [0.0, 0.0]]

    def test_several_names_of_a_label_are_its_votes(self) -> None:
        model = FakeListChatModel(responses=["black", "The ATM.", "atm", "cash machine", "card or atm"])
        engine = TextVoteBackend(model, max_concurrency=1, retry=QUICK)
        rows = LabelRows(engine, (("card",), ("cash machine", "ATM")), calibrate=False)
        found = asked(rows, (("a",), ("b",), ("c",), ("d",)))
        assert found.tolist() == [[0.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 0.0]]

    def test_public_votes(self) -> None:
        engine = TextVoteBackend(FakeListChatModel(responses=["black", "ATM", "no idea"]), retry=QUICK)
        rows = LabelRows(engine, (("card",), ("cash machine", "ATM")), calibrate=False)
        assert asked_public(rows, ("a",)).tolist() == [0.0, 1.0]
        assert asked_public(rows, ("a",)).tolist() == [0.0, 0.0]

    def test_labels_that_differ_in_case_alone_are_refused_at_construction(self) -> None:
        engine = TextVoteBackend(FakeListChatModel(responses=["black"]), retry=QUICK)
        with pytest.raises(ConfigurationError, match="other verbalizers"):
            LabelRows(engine, (("card",), ("CARD",)), calibrate=False)


class TestDecisions:
    @pytest.fixture
    def engine(self) -> Any:
        pytest.importorskip("langchain_openai.decisions")
        from langchain_openai.decisions import OpenAIDecisions
        from langchain_openai.decisions.types import DecisionResponse

        from langchain_dpicl.backends.langchain.logprobs import DecisionsBackend

        class Deciding(OpenAIDecisions):
            model: str = "deciding"
            api_key: Any = "none"

            def _decide(self, request: Any) -> Any:
                if "fails" in request["input"]:
                    raise StatusError("content", status_code=400)
                choices = [str(choice) for choice in request["questions"]["label"].choices]
                weights = {choice: len(choice) / (2 * sum(map(len, choices))) for choice in choices}
                answer = {"type": "choice", "choice": choices[0], "probabilities": weights, "confidence": 0.5}
                return DecisionResponse.model_validate({"model": "m", "answers": {"label": answer}})

            async def _adecide(self, request: Any) -> Any:
                return self._decide(request)

        return DecisionsBackend(Deciding(), retry=QUICK)

    @DRIVERS
    @pytest.mark.filterwarnings("ignore:.*OpenAIDecisions.*beta")
    def test_rows_are_the_model_s_probabilities_summed_per_label(self, engine: Any, is_async: bool) -> None:
        rows = LabelRows(engine, ((" card", " Card"), ("cash", "ATM"), ("fee",)), calibrate=False)
        assert rows.kind == "decisions"
        found = asked(
            rows, (("a",), ("fails",)), is_async=is_async
        )  # lengths 4, 4 + 3, 3 of 14, and half of it left out
        assert found == pytest.approx(np.array([[4 / 28, 7 / 28, 3 / 28], [0.0, 0.0, 0.0]]))
        assert asked_public(rows, ("a",), is_async=is_async) == pytest.approx(found[0], rel=1e-14)
        with pytest.raises(ModelCallError):
            asked_public(rows, ("fails",), is_async=is_async)

    @pytest.mark.filterwarnings("ignore:.*OpenAIDecisions.*beta")
    def test_calibrated_rows_are_normalised(self, engine: Any) -> None:
        rows = LabelRows(engine, (("card",), ("cash",), ("fee",)), calibrate=True)
        assert asked(rows, (("a", "N/A", "fails"),)) == pytest.approx(np.full((1, 3), 1 / 3))
        assert math.isclose(asked(rows, (("a", "fails"),)).sum(), 0.5)
