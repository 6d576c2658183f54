"""Local models as engines: the contract, bits that do not move, lengths, memory, faults, and what is refused."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from langchain_dpicl import LabelClassifier  # noqa: E402
from langchain_dpicl.backends.base import FullBackend  # noqa: E402
from langchain_dpicl.exceptions import ConfigurationError  # noqa: E402
from tests import tiny_hf  # noqa: E402
from tests.contracts.backend import ChoiceContract, NextTokenContract, TextContract  # noqa: E402
from tests.unit_tests.backends.hf_doubles import engine  # noqa: E402

torch.set_num_threads(1)


LLAMA = engine()
GPT2 = engine(tiny_hf.gpt2())
SLIDING = engine(tiny_hf.sliding())
EXPERTS = engine(tiny_hf.experts())
HALF = engine(tiny_hf.llama(dtype=torch.bfloat16))
CHAT = engine(tokenizer=tiny_hf.byte_tokenizer(chat=True), max_prompt_tokens=64)  # room for its frame


class TestNextTokens(NextTokenContract):
    unknown_token = 0  # the start of a text is a special token

    def make(self):
        return LLAMA


class TestNextTokensSliding(TestNextTokens):
    def make(self):
        return SLIDING


class TestNextTokensExperts(TestNextTokens):
    def make(self):
        return EXPERTS


class TestNextTokensHalf(TestNextTokens):
    def make(self):
        return HALF


class TestNextTokensChat(TestNextTokens):
    def make(self):
        return CHAT


class TestChoices(ChoiceContract):
    def make(self):
        return LLAMA


class TestChoicesSliding(ChoiceContract):
    def make(self):
        return SLIDING


class TestText(TextContract):
    def make(self):
        return LLAMA


class TestTextGPT2(TextContract):
    def make(self):
        return GPT2


def test_the_engine_sees_the_whole_vocabulary():
    assert isinstance(LLAMA, FullBackend)


@pytest.mark.parametrize("label", ["refund", "card refund", "\U0001f4b3"])
def test_a_label_with_a_word_that_the_tokenizer_does_not_know_is_refused(label):
    made = engine(tokenizer=tiny_hf.word_tokenizer("my card was late transfer"))
    assert made.score_choices(["my card was late"], [" card", " transfer"]).shape == (1, 2)
    classifier = LabelClassifier(made, labels=("card", "transfer", label))
    with pytest.raises(ConfigurationError, match="unknown or special token"):
        classifier.batch(["my card was late"])
