"""Deterministic engines for tests and documentation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from langchain_dpicl.backends.base import Rows, Token, TokenSession
from langchain_dpicl.backends.langchain.logprobs import EOS, Probabilities, to_rows
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError, ModelCallError

Distribution: TypeAlias = Callable[[str, tuple[bytes, ...]], Mapping[str, float] | Mapping[bytes, float]]
"""(prompt, prefix) -> probability by token, as text or bytes; the empty token is the end of the text."""


class FakeBackend:
    """An engine whose next-token distribution is a function you give.

    Formal guarantees:
      - Row i of a session is a function of prompt i, the prefix and the domain; it is >= 0 and sums to <= 1.
      - A prompt that contains `fail_rows_containing` gives a zero row (-inf for choices, "" for text), never an error.
      - Nothing a caller passes in is kept after the call or, for sessions, after `close`; `calls` holds numbers only.

    Args:
      distribution: (prompt, prefix) -> probability by token; what is left to 1 is mass outside the vocabulary.
      vocabulary: tokens of the full vocabulary, without the end of the text. None: a top-k engine.
      max_top_k: how many top tokens one call reports; must be None exactly when `vocabulary` is given.
      name: public name for reports.
      fail_rows_containing: private prompts that contain this text fail quietly.
      fail_public_call: the public call (counted from 1) that raises ModelCallError; later ones work again.

    Raises:
      ConfigurationError: `vocabulary` and `max_top_k` are both given, or neither is.

    >>> fake = FakeBackend(lambda prompt, prefix: {" card": 0.75, " cash": 0.25}, vocabulary=[" card", " cash"])
    >>> session = fake.open(["one prompt"], prefix=[])
    >>> session.score([b" cash", fake.eos]).tolist()
    [[0.25, 0.0]]
    >>> fake.calls["private_rows"]
    1
    """

    def __init__(
        self,
        distribution: Distribution,
        *,
        vocabulary: Sequence[str | bytes] | None = None,
        max_top_k: int | None = None,
        name: str = "fake",
        fail_rows_containing: str | None = None,
        fail_public_call: int | None = None,
    ) -> None:
        if (vocabulary is None) == (max_top_k is None):
            raise ConfigurationError(
                f"give either vocabulary= (full-vocabulary engine) or max_top_k= (top-k engine), found "
                f"vocabulary={'given' if vocabulary is not None else None}, max_top_k={max_top_k}"
            )
        self.calls: Counter[str] = Counter()
        self._distribution = distribution
        self._vocabulary = None if vocabulary is None else tuple(dict.fromkeys([*map(_key, vocabulary), EOS]))
        self._max_top_k = max_top_k
        self._name = name
        self._fail_rows_containing = fail_rows_containing
        self._fail_public_call = fail_public_call

    @property
    def name(self) -> str:
        """Public name of the model, for reports."""
        return self._name

    @property
    def max_top_k(self) -> int | None:
        """How many top tokens one call reports; None: the whole vocabulary."""
        return self._max_top_k

    @property
    def eos(self) -> Token:
        """The key of the end-of-sequence token."""
        return EOS

    def vocabulary(self) -> Sequence[Token]:
        """Returns every key, the end of the text last."""
        if self._vocabulary is None:
            raise CapabilityError("a top-k engine has no vocabulary; use top_tokens, or build it with vocabulary=")
        return self._vocabulary

    def top_tokens(self, prompt: str, prefix: Sequence[Token], *, top_k: int) -> list[tuple[Token, float]]:
        """Returns up to `top_k` (token, probability) pairs after a public prompt, likeliest first."""
        if self._max_top_k is not None and top_k > self._max_top_k:
            raise CapabilityError(f"expected top_k <= {self._max_top_k}, found {top_k}; ask for fewer tokens")
        self.calls["public"] += 1
        if self.calls["public"] == self._fail_public_call:
            raise ModelCallError(f"public call {self._fail_public_call} failed, as scripted; call again")
        by_token = self._probabilities(prompt, _prefix(prefix))
        pairs: list[tuple[Token, float]] = [(token, by_token[token]) for token in _rank_tokens(by_token)]
        return pairs[:top_k]

    async def atop_tokens(self, prompt: str, prefix: Sequence[Token], *, top_k: int) -> list[tuple[Token, float]]:
        """Async twin of `top_tokens`."""
        return self.top_tokens(prompt, prefix, top_k=top_k)

    def open(self, prompts: Sequence[str], prefix: Sequence[Token]) -> TokenSession:
        """Starts a session on private prompts, each continued by the same released prefix."""
        self.calls["sessions"] += 1
        return _FakeSession(self._row, self.calls, prompts, _prefix(prefix))

    def decode(self, tokens: Sequence[Token]) -> str:
        """Returns the text of tokens; the end decodes to nothing, invalid UTF-8 is replaced."""
        return b"".join(_prefix(tokens)).decode("utf-8", "replace")

    def count_tokens(self, text: str) -> int:
        """Returns the number of whitespace-separated words."""
        return len(text.split())

    def score_choices(self, prompts: Sequence[str], choices: Sequence[str]) -> Rows:
        """Returns float64[prompts, choices]: log-likelihood of each choice; -inf where it cannot follow."""
        self.calls["choice_rows"] += len(prompts)
        rows = [[self._log_likelihood(prompt, choice) for choice in choices] for prompt in prompts]
        return np.asarray(rows, dtype=np.float64).reshape(len(prompts), len(choices))

    async def ascore_choices(self, prompts: Sequence[str], choices: Sequence[str]) -> Rows:
        """Async twin of `score_choices`."""
        return self.score_choices(prompts, choices)

    def complete(self, prompts: Sequence[str], *, max_tokens: int, stop: Sequence[str] = ()) -> list[str]:
        """Returns the greedy completion of each prompt, cut before the first stop string."""
        self.calls["text_rows"] += len(prompts)
        return [self._greedy(prompt, max_tokens, stop) for prompt in prompts]

    async def acomplete(self, prompts: Sequence[str], *, max_tokens: int, stop: Sequence[str] = ()) -> list[str]:
        """Async twin of `complete`."""
        return self.complete(prompts, max_tokens=max_tokens, stop=stop)

    def _probabilities(self, prompt: str, prefix: tuple[bytes, ...]) -> Probabilities:
        entries = self._distribution(prompt, prefix).items()
        by_token = {_key(token): float(probability) for token, probability in entries}
        if min(by_token.values(), default=0.0) < 0.0 or not math.fsum(by_token.values()) <= 1.0 + 1e-9:
            raise ConfigurationError("the distribution of a FakeBackend must be >= 0 and sum to <= 1")
        known = by_token if self._vocabulary is None else self._vocabulary
        return {token: by_token[token] for token in known if token in by_token}

    def _fails(self, prompt: str) -> bool:
        return self._fail_rows_containing is not None and self._fail_rows_containing in prompt

    def _row(self, prompt: str, prefix: tuple[bytes, ...]) -> Probabilities:
        """A private row: only what the engine would report."""
        if self._fails(prompt):
            return {}
        by_token = self._probabilities(prompt, prefix)
        return {token: by_token[token] for token in _rank_tokens(by_token)[: self._max_top_k]}

    def _log_likelihood(self, prompt: str, choice: str) -> float:
        """Spells the choice with the longest token that fits at each step."""
        rest, total = choice.encode(), 0.0
        prefix: tuple[bytes, ...] = ()
        if self._fails(prompt):
            return -math.inf
        while rest:
            by_token = self._probabilities(prompt, prefix)
            fitting = [token for token in by_token if token and by_token[token] > 0.0 and rest.startswith(token)]
            if not fitting:
                return -math.inf
            token = max(fitting, key=len)
            rest, prefix, total = rest[len(token) :], (*prefix, token), total + math.log(by_token[token])
        return total

    def _greedy(self, prompt: str, max_tokens: int, stop: Sequence[str]) -> str:
        prefix: tuple[bytes, ...] = ()
        while not self._fails(prompt) and len(prefix) < max_tokens:
            by_token = self._probabilities(prompt, prefix)
            token = max(by_token, key=lambda key: (by_token[key], key), default=EOS)
            prefix = (*prefix, token)
            if token == EOS or any(mark in self.decode(prefix) for mark in stop):
                break
        text = self.decode(prefix)
        return text[: min((text.index(mark) for mark in stop if mark in text), default=len(text))]


class _FakeSession:
    def __init__(
        self,
        row: Callable[[str, tuple[bytes, ...]], Probabilities],
        calls: Counter[str],
        prompts: Sequence[str],
        prefix: tuple[bytes, ...],
    ) -> None:
        self._row = row
        self._calls = calls
        self._prompts: tuple[str, ...] | None = tuple(prompts)
        self._prefix = prefix

    def score(self, domain: Sequence[Token]) -> Rows:
        prompts = self._opened()
        self._calls["private_rows"] += len(prompts)
        return to_rows([self._row(prompt, self._prefix) for prompt in prompts], domain)

    async def ascore(self, domain: Sequence[Token]) -> Rows:
        return self.score(domain)

    def push(self, token: Token) -> None:
        self._opened()
        self._prefix = (*self._prefix, *_prefix([token]))

    def close(self) -> None:
        self._prompts = None

    def _opened(self) -> tuple[str, ...]:
        if self._prompts is None:
            raise ConfigurationError("this session is closed; open a new one")
        return self._prompts


def scripted(*steps: Mapping[str, float]) -> Distribution:
    """Returns a distribution that ignores the prompt: step i after i tokens, then the end of the text.

    >>> fake = FakeBackend(scripted({"a": 0.75, "b": 0.25}, {" c": 1.0}), max_top_k=2)
    >>> fake.complete(["anything"], max_tokens=5)
    ['a c']
    """

    def distribution(prompt: str, prefix: tuple[bytes, ...]) -> Mapping[str, float]:  # noqa: ARG001
        return steps[len(prefix)] if len(prefix) < len(steps) else {"": 1.0}

    return distribution


def word_copier(words: Sequence[str], *, copy_prob: float = 0.9) -> Distribution:
    r"""Returns a toy in-context learner over `words`: it continues as its own prompt's lines did after the same word.

    Args:
      words: the vocabulary, each word with its leading space (" card"); the end of the text is added.
      copy_prob: probability of continuing like the prompt; the rest is uniform over the words and the end.

    >>> distribution = word_copier([" card", " declined"])
    >>> round(distribution("My card declined\nMy", (b" card",))[" declined"], 3)
    0.933
    """
    known = [*dict.fromkeys(words), ""]

    def distribution(prompt: str, prefix: tuple[bytes, ...]) -> Mapping[str, float]:
        *examples, own = prompt.split("\n")
        last = [*own.split(), *b"".join(prefix).decode("utf-8", "replace").split()][-1:]
        lines = [[*line.split(), None] for line in examples]
        after = [follower for line in lines for word, follower in pairwise(line) if [word] == last]
        seen = Counter("" if follower is None else f" {follower}" for follower in after)
        copied = {word: count for word, count in seen.items() if word in known}
        share = copy_prob / sum(copied.values()) if copied else 0.0
        uniform = (1.0 - (copy_prob if copied else 0.0)) / len(known)
        return {word: uniform + share * copied.get(word, 0) for word in known}

    return distribution


def _key(token: str | bytes) -> bytes:
    return token.encode("utf-8") if isinstance(token, str) else bytes(token)


def _prefix(tokens: Sequence[Token]) -> tuple[bytes, ...]:
    unknown = [token for token in tokens if not isinstance(token, bytes)]
    if unknown:
        raise ConfigurationError(
            f"expected tokens as bytes, found {type(unknown[0]).__name__}; pass keys of this engine"
        )
    return tuple(token for token in tokens if isinstance(token, bytes))


def _rank_tokens(by_token: Probabilities) -> list[bytes]:
    return sorted(by_token, key=lambda token: (-by_token[token], token))
