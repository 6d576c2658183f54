"""The engine of tests and docs keeps the contract of engines and fails where it was asked to."""

from __future__ import annotations

import math

import numpy as np
import pytest

from langchain_dpicl.backends.base import ChoiceBackend, NextTokenBackend, TextBackend
from langchain_dpicl.backends.fake import FakeBackend, scripted, word_copier
from langchain_dpicl.backends.resolve import as_backend
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError, ModelCallError
from tests.contracts.backend import PROMPTS as CONTRACT_PROMPTS
from tests.contracts.backend import ChoiceContract, Coupled, NextTokenContract, TextContract
from tests.spy_backend import SpyBackend

WORDS = [" card", " cash", " top", " up", " declined"]
PROMPTS = ["card declined\nMy card", "cash\nMy cash", "nothing in common"]


def full(**options: object) -> FakeBackend:
    return FakeBackend(word_copier(WORDS), vocabulary=WORDS, **options)  # type: ignore[arg-type]


def top(k: int = 3, **options: object) -> FakeBackend:
    return FakeBackend(word_copier(WORDS), max_top_k=k, **options)  # type: ignore[arg-type]


CONTRACT_WORDS = [
    f" {word}" for word in ["the", "apple", "is", "red", "sea", "blue", "and", "wide", "a", "lake", "one", "naïve"]
]
CONTRACT_WORDS += [f" filler{number}" for number in range(10)]


class TestFullVocabulary(NextTokenContract):
    unknown_token = b"never"
    failing_prompt = "this one fails"

    def make(self) -> FakeBackend:
        return FakeBackend(word_copier(CONTRACT_WORDS), vocabulary=CONTRACT_WORDS, fail_rows_containing="fails")


class TestTopK(NextTokenContract):
    unknown_token = b"never"
    failing_prompt = "this one fails"

    def make(self) -> FakeBackend:
        return FakeBackend(word_copier(CONTRACT_WORDS), max_top_k=5, fail_rows_containing="fails")


class TestChoices(ChoiceContract):
    def make(self) -> FakeBackend:
        return FakeBackend(word_copier(CONTRACT_WORDS), vocabulary=CONTRACT_WORDS)


class TestText(TextContract):
    def make(self) -> FakeBackend:
        return FakeBackend(word_copier(CONTRACT_WORDS), max_top_k=5)


def test_the_contract_notices_rows_that_know_of_each_other() -> None:
    coupled = Coupled(FakeBackend(word_copier(CONTRACT_WORDS), vocabulary=CONTRACT_WORDS))
    with pytest.raises(AssertionError):
        TestFullVocabulary().test_a_row_does_not_know_how_many_stand_beside_it(coupled)
    assert coupled.open(CONTRACT_PROMPTS, []).score([b" red"]).any()


def test_it_has_every_capability() -> None:
    for fake in (full(), top()):
        assert isinstance(fake, NextTokenBackend)
        assert isinstance(fake, ChoiceBackend)
        assert isinstance(fake, TextBackend)
        assert as_backend(fake) is fake


def test_the_prompt_is_read_in_context() -> None:
    row = full().open(PROMPTS[:1], []).score([b" declined", b" cash"])[0]
    assert row[0] > 0.9
    assert row[1] < 0.1


def test_a_session_continues_with_what_was_pushed() -> None:
    fake = FakeBackend(scripted({"a": 1.0}, {"b": 1.0}), vocabulary=["a", "b"])
    session = fake.open(["x", "y"], [])
    assert session.score([b"a", b"b", b""]).tolist() == [[1.0, 0.0, 0.0]] * 2
    session.push(b"a")
    assert session.score([b"a", b"b", b""]).tolist() == [[0.0, 1.0, 0.0]] * 2
    session.push(b"b")
    assert session.score([b"a", b"b", b""]).tolist() == [[0.0, 0.0, 1.0]] * 2
    assert fake.open(["x"], [b"a"]).score([b"b"]).tolist() == [[1.0]]


def test_a_top_k_engine_reports_no_more_than_k_in_private_rows_either() -> None:
    fake = top(2)
    assert np.count_nonzero(fake.open(PROMPTS, []).score([*map(str.encode, WORDS), b""]), axis=1).tolist() == [2, 2, 2]
    assert len(fake.top_tokens(PROMPTS[0], [], top_k=2)) == 2
    with pytest.raises(CapabilityError, match="top_k <= 2"):
        fake.top_tokens("a", [], top_k=3)
    with pytest.raises(CapabilityError, match="no vocabulary"):
        fake.vocabulary()


def test_top_tokens_are_sorted() -> None:
    fake = FakeBackend(lambda prompt, prefix: {b"a": 0.25, b"\xe2": 0.5, b"b": 0.125, b"": 0.125}, max_top_k=4)
    assert fake.top_tokens("x", [], top_k=3) == [(b"\xe2", 0.5), (b"a", 0.25), (b"", 0.125)]


def test_scripted_failures_are_quiet_in_private_and_loud_in_public() -> None:
    fake = full(fail_rows_containing="My cash", fail_public_call=2)
    rows = fake.open(PROMPTS, []).score([*map(str.encode, WORDS), b""])
    assert rows.sum(axis=1) == pytest.approx([1.0, 0.0, 1.0])
    assert np.isneginf(fake.score_choices(PROMPTS, [" card"])[1, 0])
    assert fake.complete(PROMPTS, max_tokens=3)[1] == ""
    fake.top_tokens("My cash", [], top_k=1)
    with pytest.raises(ModelCallError, match="public call 2"):
        fake.top_tokens("x", [], top_k=1)
    assert fake.top_tokens("x", [], top_k=1)


def test_choices_are_scored_by_the_tokens_that_spell_them() -> None:
    fake = FakeBackend(
        scripted({" top": 0.5, " card": 0.25, " ": 0.125}, {" up": 0.5}), vocabulary=[" top", " up", " card"]
    )
    scores = fake.score_choices(["x"], [" top up", " card", " cash", ""])
    assert scores[0].tolist() == [math.log(0.5) + math.log(0.5), math.log(0.25), -math.inf, 0.0]


def test_completions_stop_at_the_end_the_cap_and_the_stop_string() -> None:
    fake = FakeBackend(scripted({"a": 1.0}, {" b\n": 1.0}, {"c": 1.0}), max_top_k=1)
    assert fake.complete(["x"], max_tokens=9) == ["a b\nc"]
    assert fake.complete(["x"], max_tokens=2) == ["a b\n"]
    assert fake.complete(["x"], max_tokens=9, stop=["\n"]) == ["a b"]


def test_calls_are_counted_and_prompts_are_not_kept() -> None:
    fake = full()
    session = fake.open(PROMPTS, [])
    session.score([b""])
    session.score([b""])
    session.close()
    fake.top_tokens("x", [], top_k=1)
    assert fake.calls == {"sessions": 1, "private_rows": 6, "public": 1}
    assert PROMPTS[0] not in repr(vars(fake)) + repr(vars(session))


@pytest.mark.parametrize("given", [{"a": 0.75, "b": 0.75}, {"a": -0.1}, {"a": math.nan}])
def test_a_distribution_outside_the_simplex_is_refused(given: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match="sum to <= 1"):
        FakeBackend(lambda prompt, prefix: given, max_top_k=2).top_tokens("x", [], top_k=1)


def test_the_kind_of_engine_must_be_said() -> None:
    with pytest.raises(ConfigurationError, match="max_top_k="):
        FakeBackend(scripted())
    with pytest.raises(ConfigurationError, match="max_top_k="):
        FakeBackend(scripted(), vocabulary=["a"], max_top_k=1)


def test_tokens_of_another_engine_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="as bytes"):
        full().decode([3])


def test_text_of_tokens_is_joined_before_it_is_decoded() -> None:
    fake = full()
    assert fake.decode([b"caf", b"\xc3", b"\xa9", fake.eos]) == "café"
    assert fake.decode([b"\xc3"]) == "\ufffd"
    assert fake.count_tokens("three words here") == 3


def test_the_vocabulary_ends_with_the_end() -> None:
    assert full().vocabulary() == (*map(str.encode, WORDS), b"")


async def test_the_spy_sees_prompts_and_rows_and_changes_nothing() -> None:
    fake = full()
    spy = SpyBackend(fake)
    session = spy.open(PROMPTS, [])
    session.push(b" card")
    rows = await session.ascore([b" card"])
    assert spy.opened == [tuple(PROMPTS)]
    assert spy.scored[0][:2] == (tuple(PROMPTS), " card")
    assert np.array_equal(rows, spy.scored[0][2])
    spy.top_tokens("public", [b" cash"], top_k=1)
    assert spy.public == [("public", " cash")]
