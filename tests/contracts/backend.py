"""What every engine must do: a row is a sub-probability that depends on its own prompt, and a session forgets.

Subclass one suite per capability, implement `make`, and collect with pytest. "Bit-identical" means equal as bytes:
noise is scaled to one changed row, and a last bit that moves elsewhere is a change the noise does not cover.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import pytest

from langchain_dpicl.backends.base import ChoiceBackend, NextTokenBackend, TextBackend
from langchain_dpicl.exceptions import DPICLError

PROMPTS = (
    "Topic: red\nText: the apple is red\n\nTopic: red\nText:",
    "Topic: blue\nText: the sea is blue and wide\n\nTopic: blue\nText: a lake is blue\n\nTopic: blue\nText:",
    "Topic: red\nText:",
    "Text: one\n\nText: two {three} %s \\n\n\nText: naïve \U0001f600\n\nText:",
    "",
)
HOSTILE = ("", " ", "\n\n", "\x00\x00", "{0.__class__}", "\ud800 lone", "\u202e\u0301", "a" * 3000, "\n\n" * 500)


def same_bits(left, right) -> bool:
    """Whether two float arrays are equal as bytes."""
    left, right = np.ascontiguousarray(left), np.ascontiguousarray(right)
    return left.shape == right.shape and left.tobytes() == right.tobytes()


class Coupled:
    """A planted fault: the last bits of an engine's rows depend on how many rows there are."""

    def __init__(self, engine) -> None:
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def open(self, prompts, prefix):
        session = self._engine.open(prompts, prefix)
        score = session.score
        session.score = lambda domain: score(domain) * (1 - 2.0**-50 * len(prompts))
        return session


class NextTokenContract(ABC):
    """Suite of `NextTokenBackend` and the sessions it opens."""

    prompts: tuple[str, ...] = PROMPTS
    failing_prompt: str | None = None
    """A prompt whose call fails, where failures can be scripted."""

    @abstractmethod
    def make(self) -> NextTokenBackend:
        """Returns the engine."""

    @property
    @abstractmethod
    def unknown_token(self):
        """Returns a key that the engine never reports."""

    @pytest.fixture
    def engine(self):
        return self.make()

    def domain(self, engine, top_k=20):
        """A public domain: the top tokens of a public prompt, and EOS."""
        tokens = [token for token, _ in engine.top_tokens(self.prompts[2], [], top_k=self.k(engine, top_k))]
        return tokens if engine.eos in tokens else [*tokens, engine.eos]

    @staticmethod
    def k(engine, wanted):
        return wanted if engine.max_top_k is None else min(wanted, engine.max_top_k)

    def test_it_satisfies_the_protocol(self, engine):
        assert isinstance(engine, NextTokenBackend)
        assert isinstance(engine.name, str)
        assert engine.name

    def test_rows_are_sub_probabilities_in_the_order_of_prompts_and_domain(self, engine):
        domain = self.domain(engine)
        rows = engine.open(self.prompts, []).score(domain)
        assert rows.shape == (len(self.prompts), len(domain))
        assert rows.dtype == np.float64
        assert (rows >= 0).all()
        assert (rows.sum(axis=1) <= 1).all()
        backwards = engine.open(self.prompts[::-1], []).score(domain[::-1])
        assert same_bits(backwards[::-1, ::-1], rows)

    def test_a_smaller_domain_drops_mass_and_does_not_renormalise(self, engine):
        domain = self.domain(engine)
        rows = engine.open(self.prompts, []).score(domain)
        assert same_bits(engine.open(self.prompts, []).score(domain[:3]), rows[:, :3])

    def test_a_missing_token_is_zero(self, engine):
        domain = self.domain(engine)
        rows = engine.open(self.prompts, []).score([*domain, self.unknown_token])
        assert (rows[:, -1] == 0).all()
        assert same_bits(rows[:, :-1], engine.open(self.prompts, []).score(domain))

    def test_replacing_one_prompt_moves_one_row(self, engine):
        domain = self.domain(engine)
        rows = engine.open(self.prompts, []).score(domain)
        for place in range(len(self.prompts)):
            changed = list(self.prompts)
            changed[place] = "Topic: red\nText: " + "something else entirely " * 40 + "\n\nTopic: red\nText:"
            others = np.arange(len(self.prompts)) != place
            assert same_bits(engine.open(changed, []).score(domain)[others], rows[others])

    def test_a_row_does_not_know_how_many_stand_beside_it(self, engine):
        domain = self.domain(engine)
        alone = np.concatenate([engine.open([prompt], []).score(domain) for prompt in self.prompts])
        assert same_bits(engine.open(self.prompts, []).score(domain), alone)
        assert same_bits(engine.open(self.prompts * 9, []).score(domain)[: len(alone)], alone)

    def test_no_prompts_give_no_rows(self, engine):
        session = engine.open([], [])
        domain = self.domain(engine)
        assert session.score(domain).shape == (0, len(domain))
        session.push(domain[0])
        assert session.score(domain).shape == (0, len(domain))

    def test_pushing_equals_reopening_with_the_longer_prefix(self, engine):
        prefix: list = []
        session = engine.open(self.prompts, [])
        for _ in range(4):
            domain = [t for t, _ in engine.top_tokens(self.prompts[2], prefix, top_k=self.k(engine, 20))] or [
                engine.eos
            ]
            assert same_bits(session.score(domain), engine.open(self.prompts, prefix).score(domain))
            prefix.append(domain[0])
            session.push(domain[0])

    def test_scoring_twice_is_scoring_once(self, engine):
        domain = self.domain(engine)
        session = engine.open(self.prompts, [])
        assert same_bits(session.score(domain), session.score(domain))

    async def test_ascore_is_score(self, engine):
        domain = self.domain(engine)
        rows = await engine.open(self.prompts, []).ascore(domain)
        assert same_bits(rows, engine.open(self.prompts, []).score(domain))

    async def test_a_closed_session_refuses_and_shows_nothing(self, engine):
        domain = self.domain(engine)
        session = engine.open(["a very private prompt"], [])
        session.close()
        for call in (lambda: session.score(domain), lambda: session.push(domain[0])):
            with pytest.raises((DPICLError, RuntimeError)) as caught:
                call()
            assert "private" not in str(caught.value)
        with pytest.raises((DPICLError, RuntimeError)):
            await session.ascore(domain)
        session.close()

    def test_a_session_shows_no_prompt(self, engine):
        session = engine.open(["a very private prompt"], [])
        assert "very private" not in f"{session!r} {session}"

    def test_no_content_of_a_prompt_raises_or_moves_another_row(self, engine):
        domain = self.domain(engine)
        rows = engine.open([*HOSTILE, *self.prompts], []).score(domain)
        assert np.isfinite(rows).all()
        assert (rows >= 0).all()
        assert (rows.sum(axis=1) <= 1).all()
        assert same_bits(rows[len(HOSTILE) :], engine.open(self.prompts, []).score(domain))

    def test_a_failed_row_is_zero_and_alone(self, engine):
        if self.failing_prompt is None:
            pytest.skip("this engine has no scripted failure")
        domain = self.domain(engine)
        rows = engine.open([self.failing_prompt, *self.prompts], []).score(domain)
        assert (rows[0] == 0).all()
        assert same_bits(rows[1:], engine.open(self.prompts, []).score(domain))

    def test_top_tokens_are_the_likeliest_first_and_agree_with_rows(self, engine):
        found = engine.top_tokens(self.prompts[2], [], top_k=self.k(engine, 12))
        probabilities = [probability for _, probability in found]
        assert 0 < len(found) <= 12
        assert probabilities == sorted(probabilities, reverse=True)
        assert all(0 < probability <= 1 for probability in probabilities)
        assert len({token for token, _ in found}) == len(found)
        row = engine.open([self.prompts[2]], []).score([token for token, _ in found])[0]
        assert row == pytest.approx(probabilities, abs=1e-12)

    async def test_atop_tokens_is_top_tokens(self, engine):
        found = await engine.atop_tokens(self.prompts[2], [], top_k=self.k(engine, 5))
        assert found == engine.top_tokens(self.prompts[2], [], top_k=self.k(engine, 5))

    def test_the_end_of_the_text_decodes_to_nothing(self, engine):
        tokens = [token for token, _ in engine.top_tokens(self.prompts[2], [], top_k=self.k(engine, 3))]
        assert engine.decode([engine.eos]) == ""
        assert engine.decode([]) == ""
        assert engine.decode([*tokens, engine.eos]) == engine.decode(tokens)

    def test_tokens_are_counted(self, engine):
        assert engine.count_tokens("") == 0
        assert 0 < engine.count_tokens("one two") <= engine.count_tokens("one two three four five")

    def test_the_vocabulary_holds_all_the_mass(self, engine):
        if engine.max_top_k is not None:
            pytest.skip("a top-k engine has no vocabulary")
        vocabulary = engine.vocabulary()
        assert engine.eos in vocabulary
        assert len(set(vocabulary)) == len(vocabulary)
        rows = engine.open(self.prompts, []).score(vocabulary)
        assert rows.sum(axis=1) == pytest.approx(np.ones(len(rows)), abs=1e-9)
        assert (rows.sum(axis=1) <= 1).all()


class ChoiceContract(ABC):
    """Suite of `ChoiceBackend`."""

    prompts: tuple[str, ...] = PROMPTS
    choices: tuple[str, ...] = (" red", " blue", " red and blue")

    @abstractmethod
    def make(self) -> ChoiceBackend:
        """Returns the engine."""

    @pytest.fixture
    def engine(self):
        return self.make()

    def test_it_satisfies_the_protocol(self, engine):
        assert isinstance(engine, ChoiceBackend)

    def test_scores_are_log_likelihoods_in_order(self, engine):
        scores = engine.score_choices(self.prompts, self.choices)
        assert scores.shape == (len(self.prompts), len(self.choices))
        assert scores.dtype == np.float64
        assert not np.isnan(scores).any()
        assert (scores <= 0).all()
        assert same_bits(engine.score_choices(self.prompts, self.choices[::-1]), scores[:, ::-1])

    def test_a_longer_choice_is_no_likelier_than_its_beginning(self, engine):
        scores = engine.score_choices(self.prompts, self.choices)
        assert (scores[:, 2] <= scores[:, 0]).all()

    def test_a_row_depends_on_its_own_prompt_alone(self, engine):
        scores = engine.score_choices(self.prompts, self.choices)
        alone = [engine.score_choices([prompt], self.choices) for prompt in self.prompts]
        assert same_bits(np.concatenate(alone), scores)
        assert same_bits(engine.score_choices(self.prompts[::-1], self.choices)[::-1], scores)

    def test_no_content_of_a_prompt_raises(self, engine):
        assert not np.isnan(engine.score_choices(HOSTILE, self.choices)).any()

    def test_no_prompts_give_no_rows(self, engine):
        assert engine.score_choices([], self.choices).shape == (0, len(self.choices))

    async def test_ascore_choices_is_score_choices(self, engine):
        scores = await engine.ascore_choices(self.prompts, self.choices)
        assert same_bits(scores, engine.score_choices(self.prompts, self.choices))


class TextContract(ABC):
    """Suite of `TextBackend`."""

    prompts: tuple[str, ...] = PROMPTS

    @abstractmethod
    def make(self) -> TextBackend:
        """Returns the engine."""

    @pytest.fixture
    def engine(self):
        return self.make()

    def test_it_satisfies_the_protocol(self, engine):
        assert isinstance(engine, TextBackend)

    def test_there_is_one_completion_per_prompt_each_its_own(self, engine):
        texts = engine.complete(self.prompts, max_tokens=6)
        assert len(texts) == len(self.prompts)
        assert texts == [engine.complete([prompt], max_tokens=6)[0] for prompt in self.prompts]
        assert engine.complete([], max_tokens=6) == []

    def test_a_completion_ends_before_the_first_stop_string(self, engine):
        whole = engine.complete(self.prompts[:2], max_tokens=6)
        for prompt, text in zip(self.prompts[:2], whole, strict=True):
            assert len(text) > 2, "the suite needs a prompt with a completion"
            stop = [text[2], "\x07"]
            assert engine.complete([prompt], max_tokens=6, stop=stop)[0] == text[: text.index(text[2])]

    def test_fewer_tokens_give_a_beginning(self, engine):
        for longer, shorter in zip(
            engine.complete(self.prompts, max_tokens=6), engine.complete(self.prompts, max_tokens=3), strict=True
        ):
            assert longer.startswith(shorter)

    def test_no_content_of_a_prompt_raises(self, engine):
        assert len(engine.complete(HOSTILE, max_tokens=3)) == len(HOSTILE)

    async def test_acomplete_is_complete(self, engine):
        assert await engine.acomplete(self.prompts, max_tokens=6) == engine.complete(self.prompts, max_tokens=6)
