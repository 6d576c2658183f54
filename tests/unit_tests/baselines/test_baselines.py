"""Baselines say what they protect, and the unprotected ones refuse protected examples."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from langchain_dpicl.backends.fake import FakeBackend, scripted, word_copier
from langchain_dpicl.baselines import (
    demonstrations_from_instruction,
    demonstrations_without_privacy,
    label_votes_without_privacy,
    real_demonstrations_without_privacy,
)
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import ConfigurationError, PrivateAccessError
from langchain_dpicl.options import Decoding, FewShotTask, GenerationTask, LabelAnswers, Rows
from langchain_dpicl.privacy.private_examples import PrivateExamples
from tests.doubles import WORDS

RECORDS = [{"text": "my card was declined", "topic": "card"}] * 40 + [
    {"text": "my transfer is late", "topic": "transfer"}
] * 40


def private_examples() -> PrivateExamples:
    return PrivateExamples(RECORDS, label_key="topic", labels=("card", "transfer"), public_size=80)


def engine() -> FakeBackend:
    return FakeBackend(word_copier(WORDS), vocabulary=WORDS)


def without_noise(private: PrivateExamples, **options: Any) -> Any:
    given: dict[str, Any] = {"max_tokens": 6, "task": GenerationTask(record_prompt="{topic}: {text}"), **options}
    return demonstrations_without_privacy(private, llm=engine(), rows=Rows(units=20), **given)


UNPROTECTED = [
    without_noise,
    real_demonstrations_without_privacy,
]


@pytest.mark.parametrize("baseline", UNPROTECTED, ids=["no noise", "real"])
class TestUnprotected:
    def test_reports_infinite_epsilon_and_shows_the_records(self, baseline: Any) -> None:
        released = baseline(private_examples())
        assert released.epsilon == math.inf
        assert released.report["private"] is False
        assert [dict(example) for example in released.examples] == [RECORDS[0], RECORDS[-1]]

    def test_refuses_examples_that_a_ledger_protects(self, baseline: Any) -> None:
        private = private_examples()
        Budget(epsilon=1.0, delta=1e-6).bind(private)
        with pytest.raises(PrivateAccessError):
            baseline(private)

    def test_leaves_the_examples_unfit_for_a_ledger(self, baseline: Any) -> None:
        private = private_examples()
        baseline(private)
        with pytest.raises(PrivateAccessError):
            Budget(epsilon=1.0, delta=1e-6).bind(private)


def test_records_are_no_private_examples_and_one_question_is_no_list_of_them() -> None:
    baseline: Any
    for baseline in UNPROTECTED:
        with pytest.raises(ConfigurationError, match="private: expected PrivateExamples"):
            baseline(RECORDS)
    for queries in ("my card", {"input": "my card"}, None):
        with pytest.raises(ConfigurationError, match="queries: expected a sequence"):
            label_votes_without_privacy(private_examples(), queries, llm=engine())  # type: ignore[arg-type]


def test_a_text_that_says_nothing_is_left_out() -> None:
    released = without_noise(private_examples(), decoding=Decoding(stop=(" my card",)))
    assert [dict(example) for example in released.examples] == [RECORDS[-1]]


def test_real_demonstrations_refuse_more_shots_than_there_are() -> None:
    with pytest.raises(ConfigurationError):
        real_demonstrations_without_privacy(private_examples(), shots_per_label=41)


def test_instruction_only_costs_nothing_and_calls_nothing_private() -> None:
    llm = FakeBackend(scripted({" my": 1.0}, {" card": 0.9, " top": 0.1}, {"\n": 1.0}), vocabulary=[*WORDS, "\n"])
    released = demonstrations_from_instruction(
        llm=llm,
        label_key="topic",
        labels=("a", "b"),
        instruction="Write.",
        decoding=Decoding(top_k=1),
        max_tokens=9,
        shots_per_label=2,
    )
    assert released.epsilon == 0.0
    assert [dict(e) for e in released.examples] == [{"text": "my card", "topic": x} for x in ("a", "b", "a", "b")]
    assert llm.calls["private_rows"] == 0


def test_instruction_only_works_without_labels() -> None:
    llm = FakeBackend(scripted({" my": 1.0}), vocabulary=WORDS)
    assert demonstrations_from_instruction(llm=llm, instruction="Write.").examples == ({"text": "my"},)


def test_instruction_only_leaves_blank_texts_out_and_refuses_those_without_room() -> None:
    llm: Any = FakeBackend(scripted({" ": 1.0}), vocabulary=[" "])
    assert demonstrations_from_instruction(llm=llm, instruction="Write.").examples == ()
    llm.room = 3
    with pytest.raises(ConfigurationError, match="max_tokens: expected at most 3"):
        demonstrations_from_instruction(llm=llm, instruction="Write.", max_tokens=9)


def leaning(prompt: str, prefix: tuple[bytes, ...]) -> dict[str, float]:
    """Likes the label of the example above, and "transfer" after the question "b?"."""
    card = 0.4 if "topic: card" in prompt else 0.1
    return {" card": card, " transfer": 0.6 if "b?" in prompt else 0.1}


CARD_A, TRANSFER_A = np.array([0.8, 0.2]), np.array([0.5, 0.5])
CARD_B, TRANSFER_B = np.array([0.4, 0.6]), np.array([1 / 7, 6 / 7])


PLAIN = LabelAnswers(calibrate=False)


def voted(private: PrivateExamples, **options: Any) -> Any:
    """Every one of the 80 records is a row of its own: nothing is left to chance."""
    backend = FakeBackend(leaning, vocabulary=[" card", " transfer"])
    given = {"rows": Rows(units=80), "answers": PLAIN, **options}
    return label_votes_without_privacy(private, ["a?", "b?"], llm=backend, **given)


class TestLabelVotes:
    def test_are_the_sums_over_rows_without_noise(self) -> None:
        assert voted(private_examples()).totals.tolist() == [[80.0, 0.0], [0.0, 80.0]]
        soft = voted(private_examples(), answers=PLAIN.replace(votes="soft"))
        assert np.allclose(soft.totals, [40 * (CARD_A + TRANSFER_A), 40 * (CARD_B + TRANSFER_B)], atol=1e-6)

    def test_are_calibrated_row_by_row(self) -> None:
        # Without content a row says what it says after "a?", so that question leaves every row undecided.
        soft = voted(private_examples(), answers=LabelAnswers(votes="soft", calibrate=True))
        card, transfer = CARD_B / CARD_A, TRANSFER_B / TRANSFER_A
        expected = [[40.0, 40.0], 40 * (card / card.sum() + transfer / transfer.sum())]
        assert np.allclose(soft.totals, expected, atol=1e-6)
        assert soft.plan["content_free"] == ["N/A"]

    def test_name_the_first_of_the_best_labels(self) -> None:
        assert voted(private_examples()).answers == ("card", "transfer")
        turned = voted(private_examples(), task=FewShotTask(labels=("transfer", "card")))
        assert turned.totals.tolist() == [[40.0, 40.0], [80.0, 0.0]]
        assert turned.answers == ("transfer", "transfer")

    def test_say_that_nothing_is_protected(self) -> None:
        found = voted(private_examples())
        assert found.epsilon == math.inf
        assert (found.plan["private"], found.plan["epsilon"]) == (False, "infinity")
        assert "without noise" in found.plan["baseline"]
        assert "totals" not in repr(found)

    def test_refuse_examples_that_a_ledger_protects(self) -> None:
        private = private_examples()
        Budget(epsilon=1.0, delta=1e-6).bind(private)
        with pytest.raises(PrivateAccessError):
            voted(private)

    def test_leave_the_examples_unfit_for_a_ledger(self) -> None:
        private = private_examples()
        voted(private)
        with pytest.raises(PrivateAccessError):
            Budget(epsilon=1.0, delta=1e-6).bind(private)

    def test_refuse_options_of_another_kind(self) -> None:
        with pytest.raises(ConfigurationError, match="answers"):
            voted(private_examples(), answers={"votes": "soft"})
