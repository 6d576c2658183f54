"""An engine of single letters that copies from its own prompt: the example of docs/extending.md, with its contract.

It has the whole vocabulary, so that the contract can add it up. `Coupled` is the planted fault: a row that knows how many
stand beside it.
"""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from langchain_dpicl import Decoding, DemonstrationSynthesizer, PrivacyBudgetCallbackHandler, PrivateExamples
from langchain_dpicl.exceptions import ConfigurationError
from tests.contracts.backend import Coupled, NextTokenContract

LETTERS = [bytes([code]) for code in b" abcdefghijklmnopqrstuvwxyz\n"]
END = b""  # the key of the end of a text


def follow(text, tokens):
    """How often each letter stands behind the last one in `text`, and one more for each: probability by letter."""
    written = b"".join(tokens).decode("ascii", "replace")
    last = (text + written)[-1:]
    seen = Counter(after for before, after in itertools.pairwise(text) if before == last)
    weights = {letter: 1.0 + 5.0 * seen[letter.decode()] for letter in LETTERS} | {END: 1.0}
    total = sum(weights.values()) * (1 + 1e-12)  # no rounding may lift a sum above 1
    return {letter: weight / total for letter, weight in weights.items()}


class LetterSession:
    """A batch of private prompts, until it is closed."""

    def __init__(self, prompts, prefix, max_chars):
        self._prompts, self._prefix, self._max_chars = tuple(prompts), list(prefix), max_chars

    def score(self, domain):
        return np.array([self._row(prompt, domain) for prompt in self._open()]).reshape(-1, len(domain))

    async def ascore(self, domain):
        return self.score(domain)

    def push(self, token):
        self._open()
        self._prefix.append(checked(token))

    def close(self):
        self._prompts = None

    def _open(self):
        if self._prompts is None:
            raise ConfigurationError("this session is closed; open a new one")
        return self._prompts

    def _row(self, prompt, domain):
        if len(prompt) > self._max_chars:
            return [0.0] * len(domain)  # too long: it abstains, silently
        found = follow(prompt, self._prefix)
        return [found.get(token, 0.0) for token in domain]


def checked(token):
    if not isinstance(token, bytes):
        raise ConfigurationError(f"expected a token of this engine, found {type(token).__name__}")
    return token


class LetterBackend:
    """The engine itself: public, and holds no prompt."""

    name = "letters"
    max_top_k = None  # the whole vocabulary
    eos = END

    def __init__(self, max_chars=5_000):
        self._max_chars = max_chars

    def vocabulary(self):
        return [*LETTERS, END]

    def top_tokens(self, prompt, prefix, *, top_k):
        found = follow(prompt, [checked(token) for token in prefix])
        return sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))[:top_k]

    async def atop_tokens(self, prompt, prefix, *, top_k):
        return self.top_tokens(prompt, prefix, top_k=top_k)

    def open(self, prompts, prefix):
        return LetterSession(prompts, map(checked, prefix), self._max_chars)

    def decode(self, tokens):
        return b"".join(map(checked, tokens)).decode("utf-8", "replace")

    def count_tokens(self, text):
        return len(text)


class TestLetterBackend(NextTokenContract):
    unknown_token = b"?"
    failing_prompt = "a" * 6_000

    def make(self):
        return LetterBackend()


def test_a_row_that_knows_how_many_stand_beside_it_turns_the_contract_red():
    with pytest.raises(AssertionError):
        TestLetterBackend().test_a_row_does_not_know_how_many_stand_beside_it(Coupled(LetterBackend()))


def test_it_writes_demonstrations():
    private = PrivateExamples(["the card was declined"] * 300, public_size=300)
    budget = PrivacyBudgetCallbackHandler(epsilon=4.0, delta=1e-6)
    made = DemonstrationSynthesizer.from_private_examples(
        private, llm=LetterBackend(), budget=budget, epsilon=4.0, max_tokens=6, decoding=Decoding(candidates="all")
    )
    [written] = made.run().examples
    assert set(written["text"].encode()) <= {letter[0] for letter in LETTERS}
    assert budget.remaining_epsilon == 0.0
