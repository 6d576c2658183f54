"""Reads label probabilities from one row of scores, and finds the first tokens that distinguish labels."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from langchain_dpicl.backends.base import Token
from langchain_dpicl.exceptions import ConfigurationError

# All readers take one row alone and compute in plain Python numbers, in order: a row's numbers cannot depend on its
# place or on other rows. No number makes a reader raise.
LEAST_WEIGHT = sys.float_info.min
"""Least content-free probability to divide by, where every label has a likelihood."""

LEAST_REPORTED = 1e-6
"""The same where labels may go unreported: that is no proof that they are impossible."""

# Tokenizers cut before white space and before a sign inside a word; what is behind the cut is never in a first token.
_FIRST_WORD = re.compile(r".[^\s!-/:-@\[-`{-~]*", re.DOTALL)


def checked(verbalizers: object) -> tuple[tuple[str, ...], ...]:
    """Returns the distinct texts of each label, or raises ConfigurationError; two labels may not share a text."""
    groups = _listed(verbalizers)
    rows = [_listed(texts) for texts in groups or ()]
    if groups is None or len(groups) < 2 or not all(row and all(map(_is_text, row)) for row in rows):
        raise ConfigurationError(
            "expected verbalizers as one list of non-empty texts for each of at least two labels, found "
            f"{verbalizers!r}; a label with a single text is a list of one"
        )
    labels = tuple(tuple(dict.fromkeys(str(text) for text in row or ())) for row in rows)
    known: dict[str, int] = {}
    for place, text in ((place, text.strip()) for place, texts in enumerate(labels) for text in texts):
        if known.setdefault(text, place) != place:
            raise ConfigurationError(
                f"expected verbalizers that differ between labels, found {text!r} for two of them; give others"
            )
    return labels


def softmax(row: Sequence[float]) -> list[float]:
    """Returns the probability of each text from its log-likelihood; NaN and infinities count as impossible."""
    if -math.inf < sum(row) < math.inf:
        top = max(row)
        weights = [math.exp(value - top) for value in row]
    else:  # or finite numbers add up to more than a float holds, which comes to the same here
        top = max((value for value in row if math.isfinite(value)), default=0.0)
        weights = [math.exp(value - top) if math.isfinite(value) else 0.0 for value in row]
    total = sum(weights)  # >= 1 unless all are impossible: the likeliest text counts 1
    return [weight / total for weight in weights] if total > 0.0 else weights


def kept(row: Sequence[float]) -> list[float]:
    """Returns the exponentials of log-probabilities, scaled down where they sum to more than 1."""
    weights = [math.exp(min(value, 0.0)) if math.isfinite(value) else 0.0 for value in row]
    total = sum(weights)
    return [weight / total for weight in weights] if total > 1.0 else weights


def per_label(texts: Sequence[float], places: Sequence[int], width: int) -> list[float]:
    """Returns [width] label probabilities: the sums over each label's texts."""
    out = [0.0] * width
    for value, place in zip(texts, places, strict=True):
        out[place] += value
    return out


def shares(reported: Iterable[tuple[int, float]], width: int) -> list[float]:
    """Returns [width] the labels' shares of their common mass, zeros if there is none; non-numbers count as 0."""
    out = [0.0] * width
    for place, value in reported:
        if 0.0 < value < math.inf:
            out[place] += min(value, 1.0)
    total = sum(out)
    return [value / total for value in out] if total > 0.0 else out


def calibrated(own: list[float], content_free: Sequence[list[float]], *, least: float) -> list[float]:
    """Returns `own` divided by the mean of `content_free`, renormalised.

    Content-free rows of zeros (their calls failed) are left out of the mean; without any other, or where `own` is
    zeros, `own` is returned as it is.

    Source: Zhao et al. (2021), section 4: W = diag(p_cf)^-1, b = 0.
    """
    answered = [row for row in content_free if any(row)] if content_free and any(own) else []
    if not answered:
        return own
    means = [sum(column) / len(answered) for column in zip(*answered, strict=True)]
    ratios = [value / max(mean, least) for value, mean in zip(own, means, strict=True)]  # finite: own <= 1
    top = max(ratios)
    weights = [ratio / top for ratio in ratios]
    total = sum(weights)
    return [weight / total for weight in weights]


def tokens_of_vocabulary(labels: Sequence[Sequence[str]], decoded: Iterable[tuple[Token, str]]) -> dict[Token, int]:
    """Returns the tokens that begin texts of exactly one label, with that label's place; case does not count."""
    begun = _beginnings(labels)
    label_of: dict[Token, int] = {}
    for token, text in decoded:
        place = begun.get(text.lstrip().casefold())
        if place is not None:
            label_of[token] = place
    return _each_has_one(labels, label_of, set(label_of.values()))


def tokens_of_bytes(labels: Sequence[Sequence[str]]) -> dict[Token, int]:
    """Returns what `tokens_of_vocabulary` does for an unknown vocabulary: every byte string that may be such a token.

    With and without a space in front; as written, lower, upper and capitalised; whole characters only. Beginnings that
    run beyond the first word are included, but do not count as distinguishing, as tokens hardly ever do.
    """
    begun = _beginnings(labels)
    label_of: dict[Token, int] = {}
    served: set[int] = set()
    for text in chain.from_iterable(map(_spellings, chain.from_iterable(labels))):
        word = _FIRST_WORD.match(text)
        for length in range(1, len(text) + 1):
            place = begun.get(text[:length].casefold())
            if place is not None:
                token = text[:length].encode()
                label_of[token] = label_of[b" " + token] = place
                if word is not None and length <= word.end():
                    served.add(place)
    return _each_has_one(labels, label_of, served)


def _each_has_one(labels: Sequence[Sequence[str]], label_of: dict[Token, int], served: set[int]) -> dict[Token, int]:
    missing = [texts for place, texts in enumerate(labels) if place not in served]
    if missing:
        raise ConfigurationError(
            "expected verbalizers whose first tokens distinguish the labels (this model reports next tokens only), "
            f"found no first token of its own for {missing!r}; give other verbalizers, of which none begins with "
            'the first word of another, or take votes="text"'
        )
    return label_of


def _beginnings(labels: Sequence[Sequence[str]]) -> dict[str, int | None]:
    """Returns every beginning of a case-folded text and its label; None where texts of several labels begin so."""
    begun: dict[str, int | None] = {}
    for place, texts in enumerate(labels):
        for text in texts:
            folded = text.strip().casefold()
            for length in range(1, len(folded) + 1):
                beginning = folded[:length]
                begun[beginning] = place if begun.get(beginning, place) == place else None
    return begun


def _spellings(text: str) -> Iterator[str]:
    plain = text.strip()
    yield from dict.fromkeys((plain, plain.lower(), plain.capitalize(), plain.upper()))


def _listed(values: object) -> Sequence[object] | None:
    return values if isinstance(values, Sequence) and not isinstance(values, str | bytes) else None


def _is_text(text: object) -> bool:
    """Whether it is a non-blank text that can be encoded (a lone surrogate cannot)."""
    return (
        isinstance(text, str)
        and bool(text.strip())
        and not any("\ud800" <= character <= "\udfff" for character in text)
    )
