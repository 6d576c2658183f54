"""Defines what an engine can do, as Protocols by capability, and the public candidates of one token; checks counts.

An engine maps prompts to rows, and each row depends on its own prompt only (plus the public prefix and domain).
A row whose call failed or cannot be read abstains (probabilities: all 0; log-likelihoods: all -inf; text: empty); an
engine never raises for the content of one prompt. Its errors concern public facts: a closed session, a token of
another engine, more top tokens than it reports, a failed public call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl._opaque import Opaque
from langchain_dpicl.exceptions import ConfigurationError, ModelCallError

Token: TypeAlias = Hashable
"""A vocabulary key: a token id (int) where the engine has ids, otherwise the token's bytes."""

Rows: TypeAlias = NDArray[np.float64]
"""float64[rows, d]: one row per prompt, in the order of the prompts."""

RealRows: TypeAlias = NDArray[np.float32] | NDArray[np.float64]
"""real[rows, d]: as a local model computes them."""


class TokenSession(Protocol):
    """A batch of prompts that grows by the same released tokens; holds private text until closed.

    Raises:
      ConfigurationError: any call but `close` on a closed session.
    """

    def score(self, domain: Sequence[Token]) -> Rows:
        """Returns float64[rows, len(domain)]: next-token probabilities on `domain`.

        Entries are >= 0 and each row sums to <= 1 (mass outside the domain is dropped, not renormalised).
        A token the provider did not report, a key the engine does not know, and every entry of a failed row, is 0.

        Args:
          domain: public keys, in the order of the columns.
        """

    async def ascore(self, domain: Sequence[Token]) -> Rows:
        """Async twin of `score`; rows of one call run concurrently."""

    def push(self, token: Token) -> None:
        """Appends one released token to every row's prefix.

        Args:
          token: what was released.

        Raises:
          ConfigurationError: not a token of this engine.
        """

    def close(self) -> None:
        """Drops prompts and caches; may be called again, and everything else then raises ConfigurationError."""


@runtime_checkable
class ReportSession(TokenSession, Protocol):
    """A session that asks its model the same whatever the candidates are, so that it can ask before they are known.

    `score(domain)` is `read(report(), domain)`.
    """

    def report(self) -> Any:
        """Asks the model; returns its PRIVATE reply, for `read` alone."""

    async def areport(self) -> Any:
        """Async twin of `report`."""

    def read(self, report: Any, domain: Sequence[Token]) -> Rows:
        """Returns what `score` returns, from a reply; asks nothing."""


@runtime_checkable
class NextTokenBackend(Protocol):
    """Scores next tokens: the top ones (black-box providers) or the whole vocabulary (local models)."""

    @property
    def name(self) -> str:
        """Public name of the model, for reports."""

    @property
    def max_top_k(self) -> int | None:
        """How many top tokens one call reports; None: the whole vocabulary."""

    @property
    def eos(self) -> Token:
        """The key of the end-of-sequence token; always part of a public domain."""

    def vocabulary(self) -> Sequence[Token]:
        """Returns every key, `eos` among them.

        Raises:
          CapabilityError: the engine reports top tokens only.
        """

    def top_tokens(self, prompt: str, prefix: Sequence[Token], *, top_k: int) -> list[tuple[Token, float]]:
        """Returns up to `top_k` (token, probability) pairs after a PUBLIC prompt, likeliest first.

        An engine whose prefix is sent as text leaves out tokens that are parts of a UTF-8 character.

        Args:
          prompt: public.
          prefix: released tokens that stand behind it.
          top_k: most pairs.

        Raises:
          ModelCallError: the call failed.
          CapabilityError: `top_k` is above `max_top_k`.
          ConfigurationError: the prefix holds a token of another engine.
        """

    async def atop_tokens(self, prompt: str, prefix: Sequence[Token], *, top_k: int) -> list[tuple[Token, float]]:
        """Async twin of `top_tokens`."""

    def open(self, prompts: Sequence[str], prefix: Sequence[Token]) -> TokenSession:
        """Starts a session on PRIVATE prompts, each continued by the same released `prefix`.

        Args:
          prompts: private.
          prefix: released tokens that stand behind each.

        Raises:
          ConfigurationError: the prefix holds a token of another engine.
        """

    def decode(self, tokens: Sequence[Token]) -> str:
        """Returns the text of tokens (EOS decodes to nothing; invalid UTF-8 is replaced).

        Args:
          tokens: keys of this engine.

        Raises:
          ConfigurationError: not tokens of this engine.
        """

    def count_tokens(self, text: str) -> int:
        """Returns the number of tokens of a PUBLIC text (an upper estimate where the tokenizer is unknown).

        Args:
          text: public.
        """


class FullSession(TokenSession, Protocol):
    """A session that sees the whole vocabulary and carries the public prompt as one more row of its batch.

    Columns are places in the engine's `vocabulary()`. Logits are known up to one constant per row.

    Raises:
      ConfigurationError: any call but `close` on a closed session, or more tokens than the session has room for.
    """

    def public(self) -> NDArray[np.float64]:
        """Returns float64[V]: next-token logits after the PUBLIC prompt and the prefix."""

    async def apublic(self) -> NDArray[np.float64]:
        """Async twin of `public`."""

    def logits(self, columns: NDArray[np.int64] | None = None) -> Rows:
        """Returns float64[rows, d]: next-token logits of the private rows, on `columns` or (None) on all of them.

        A failed row is NaN everywhere; a token that cannot follow is -inf.

        Args:
          columns: int64[d], places in the vocabulary; None: all.
        """

    async def alogits(self, columns: NDArray[np.int64] | None = None) -> Rows:
        """Async twin of `logits`."""


@runtime_checkable
class FullBackend(NextTokenBackend, Protocol):
    """Scores private prompts and the public one together, over the whole vocabulary: local models."""

    def open_full(
        self,
        prompts: Sequence[str | None],
        prefix: Sequence[Token],
        *,
        public: str,
        num_rows: int | None,
        shared: str = "",
        max_new_tokens: int | None = None,
    ) -> FullSession:
        """Starts a session on PRIVATE prompts and the public one, each continued by the same released `prefix`.

        Every row is computed at public shapes, so that its logits do not depend, to the last bit, on other rows.

        Args:
          prompts: private; None is a row that could not be rendered: it keeps its place and fails.
          prefix: released tokens.
          public: the public prompt.
          num_rows: `len(prompts)` where that is public (slots); None where it is secret (unit rows).
          shared: public text that all prompts start with; read once for all rows. A prompt without it fails.
          max_new_tokens: how many tokens will be pushed at most; None: the engine's own guess, which grows.

        Raises:
          ConfigurationError: the prefix holds a token of another engine, or public lengths do not fit the model.
        """


@runtime_checkable
class GroupBackend(FullBackend, Protocol):
    """A `FullBackend` on which the sessions of several texts can share one batch and advance together."""

    @property
    def rows_at_once(self) -> int:
        """Rows of several texts that share a batch; public."""

    def join(self, sessions: Sequence[FullSession]) -> None:
        """Lets sessions share one batch: a step of it answers all of them.

        Whether a session takes part, and what else is in its batch, follows from public facts alone: shapes, the number
        of its rows and of the tokens that were pushed. Its rows keep their bits whatever the other rows are. A session
        that is pushed another number of tokens than the others goes on alone.

        Args:
          sessions: from which nothing was asked; those that do not fit together stay on their own.
        """


@runtime_checkable
class ChoiceBackend(Protocol):
    """Scores complete, possibly multi-token, continuations."""

    def score_choices(self, prompts: Sequence[str], choices: Sequence[str]) -> Rows:
        """Returns float64[prompts, choices]: log-likelihood of each choice as the continuation of each prompt.

        Entries are <= 0 and never NaN; a choice that cannot follow is -inf. A failed row is -inf everywhere.

        Args:
          prompts: private or public.
          choices: public continuations, white space included.
        """

    async def ascore_choices(self, prompts: Sequence[str], choices: Sequence[str]) -> Rows:
        """Async twin of `score_choices`."""


@runtime_checkable
class PublicChoiceBackend(ChoiceBackend, Protocol):
    """Scores the choices of PUBLIC prompts too: there a failed call is an error and not an abstention."""

    @property
    def kind(self) -> str:
        """How choices are scored, for reports."""

    def score_public(self, prompt: str, choices: Sequence[str]) -> NDArray[np.float64]:
        """Returns float64[choices] as `score_choices` does; -inf everywhere: the answer names no choice.

        Args:
          prompt: public.
          choices: public continuations.

        Raises:
          ModelCallError: the call failed.
        """

    async def ascore_public(self, prompt: str, choices: Sequence[str]) -> NDArray[np.float64]:
        """Async twin of `score_public`."""


@dataclass(frozen=True, slots=True)
class RowHint:
    """The shape of rows that an engine declares for votes, taken where neither caller nor rehearsal asks for another.

    An engine declares it as its attribute `row_hint`. The usual shape has less regret than 40 one-shot rows on rows
    like those of real models, at half the calls.

    Attributes:
      slots: prompts of one release.
      shots: records of a prompt.
      calibrate: whether rows are divided by those on content-free inputs, where there are probabilities.
    """

    slots: int = 20
    shots: int = 4
    calibrate: bool = True


def row_hint_of(engine: object) -> RowHint:
    """Returns what an engine declares, or the usual shape."""
    hint = getattr(engine, "row_hint", None)
    return hint if isinstance(hint, RowHint) else RowHint()


@runtime_checkable
class TextBackend(Protocol):
    """Completes text."""

    def complete(self, prompts: Sequence[str], *, max_tokens: int, stop: Sequence[str] = ()) -> list[str]:
        """Returns one completion per prompt, cut before the first stop string; "" where the call failed.

        Args:
          prompts: private or public.
          max_tokens: most tokens of a completion.
          stop: strings that end a completion.
        """

    async def acomplete(self, prompts: Sequence[str], *, max_tokens: int, stop: Sequence[str] = ()) -> list[str]:
        """Async twin of `complete`."""


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class TrainingExample(Opaque):
    """One example that a prompt is trained on; private unless stated, and shows nothing.

    Attributes:
      text: the input.
      pair: the second input, where there is one.
      target: a declared label, or the text to write.
    """

    text: str
    pair: str | None = None
    target: str = ""


@runtime_checkable
class GradientBackend(Protocol):
    """Gives the gradient of each unit's loss with respect to the unit's own copy of a prompt: local models.

    A loss that is not finite, a gradient with such an entry, and an example that cannot be read count as zero.
    """

    @property
    def name(self) -> str:
        """Public name of the model, for reports."""

    @property
    def width(self) -> int:
        """Parameters of the prompt; public."""

    def gradients(
        self,
        parameters: NDArray[np.float64],
        groups: Sequence[Sequence[TrainingExample] | None],
        *,
        add: Callable[[RealRows], None],
    ) -> None:
        """Hands `add` the rows of PRIVATE groups, one group per unit: real[k, width], in as many calls as it likes.

        A group's row is the mean of its examples' gradients, and depends, to the last bit, on that group alone and on
        public facts. Groups that are None or empty have no row.

        Args:
          parameters: float64[width], public.
          groups: private.
          add: takes rows and keeps no reference to them.

        Raises:
          ModelCallError: memory ran out for public text, or the model failed on it.
          ConfigurationError: parameters of another width.
        """

    async def agradients(
        self,
        parameters: NDArray[np.float64],
        groups: Sequence[Sequence[TrainingExample] | None],
        *,
        add: Callable[[RealRows], None],
    ) -> None:
        """Async twin of `gradients`."""

    def check(self, parameters: NDArray[np.float64]) -> object:
        """Tests the engine at public weights with made-up text, in the way private text is processed.

        Called before the first ticket is burnt and after the rows of every step: a failing device, or weights without
        finite losses, would otherwise look like units that all fail. A public fault for which `gradients` raises an
        error of ours is raised here too: no row is asked for where no unit was drawn, and nobody may see that.

        Args:
          parameters: float64[width], public.

        Raises:
          ModelCallError: it fails, or has no numbers.
        """

    def losses(self, parameters: NDArray[np.float64], examples: Sequence[TrainingExample]) -> NDArray[np.float64]:
        """Returns float64[n]: the losses of PUBLIC examples; NaN where one cannot be read.

        Args:
          parameters: float64[width], public.
          examples: public.

        Raises:
          ModelCallError: the model failed.
          ConfigurationError: parameters of another width.
        """


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Domain:
    """Candidates of one token, and what the public model thinks of them; all of it is public.

    Attributes:
      tokens: the candidates; with `columns`, the vocabulary that they are taken from.
      logits: float64[d] public logits of the candidates, up to a constant; None where nobody asked for them.
      columns: int64[d] places of the candidates in `tokens`, for engines that see the whole vocabulary; else None.
    """

    tokens: Sequence[Token]
    logits: NDArray[np.float64] | None = None
    columns: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.tokens) if self.columns is None else len(self.columns)

    def __repr__(self) -> str:
        return f"Domain({len(self)} candidates)"

    def token(self, index: int) -> Token:
        """Returns the candidate at `index`."""
        return self.tokens[index if self.columns is None else int(self.columns[index])]

    @property
    def keys(self) -> tuple[Token, ...]:
        """The candidates."""
        return tuple(self.tokens) if self.columns is None else tuple(self.tokens[i] for i in self.columns.tolist())

    def only(self, chosen: NDArray[Any]) -> Domain:
        """Returns the candidates at int[k] places, or where bool[d] is true."""
        places = np.flatnonzero(chosen) if chosen.dtype == np.bool_ else chosen
        logits = None if self.logits is None else self.logits[places]
        if self.columns is not None:
            return Domain(self.tokens, logits, self.columns[places])
        return Domain([self.tokens[i] for i in places.tolist()], logits)

    def joined(self, other: Domain) -> Domain:
        """Returns these candidates followed by those of `other`."""
        if not len(other):
            return self
        logits = None if self.logits is None or other.logits is None else np.concatenate([self.logits, other.logits])
        if self.columns is not None and other.columns is not None:
            return Domain(self.tokens, logits, np.concatenate([self.columns, other.columns]))
        return Domain([*self.keys, *other.keys], logits)

    def likeliest(self, top_k: int, *, margin: float = 0.0) -> Domain:
        """Returns the `top_k` publicly likeliest candidates and those within `margin` of the last of them (Top-k+).

        A function of the public logits alone; equals keep their order.

        Source: InvisibleInk (2025), Top-k+.
        """
        if self.logits is None or top_k >= len(self):
            return self
        # NaN and -inf, which cannot follow, come last.
        scores = np.nan_to_num(self.logits, nan=-np.inf, posinf=np.inf, neginf=-np.inf)
        last = np.partition(scores, len(scores) - top_k)[len(scores) - top_k]
        if margin > 0.0 and np.isfinite(last):
            return self.only(scores >= last - margin)
        above = np.flatnonzero(scores > last)
        equal = np.flatnonzero(scores == last)[: top_k - len(above)]
        return self.only(np.sort(np.concatenate([above, equal])))


class BlankAnswerError(ModelCallError):
    """A public answer ended before its text began, as of a model that thinks first and has no room left."""


def check_whole(name: str, value: object) -> int:
    """Returns a public whole number >= 1, or raises ConfigurationError."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ConfigurationError(f"{name}: expected a whole number >= 1, found {value!r}")
    return int(value)


def row_coins(rng: np.random.Generator | Sequence[np.random.Generator], count: int) -> NDArray[np.float64]:
    """Returns float64[count, 1]: the next coin of each row of PUBLIC sampling, from one source for all or for each."""
    sources = rng if isinstance(rng, Sequence) else [rng] * count
    return np.array([source.random() for source in sources]).reshape(count, 1)


def cut_at_stop(text: str, stop: Sequence[str], *, is_stripped: bool = False) -> str:
    """Returns the text before the first stop string.

    With `is_stripped` white space that it begins with does not count: a stop string that is nothing else ends nothing.
    """
    begin = len(text) - len(text.lstrip()) if is_stripped else 0
    places = [place for word in stop if word and (place := text.find(word, max(0, begin - len(word) + 1))) >= 0]
    cut = text[: min(places)] if places else text
    return cut.lstrip() if is_stripped else cut
