"""The part of a share that released words take: noise and threshold of releases of words that other releases follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy._validate import Adjacency
from langchain_dpicl.privacy.accounting.events import ComposedEvent, Event, FailureEvent, GaussianEvent
from langchain_dpicl.privacy.extensions.word_release import (
    FIRST_WORDS_TEMPLATE,
    ThresholdedGaussianMechanism,
    UnitWords,
    WordRelease,
    least_threshold,
)
from langchain_dpicl.privacy.ledger.amounts import effective_delta
from langchain_dpicl.privacy.ledger.tickets import Ticket, event_of_tickets
from langchain_dpicl.reports.public_words import public_words

FOR_THRESHOLDS = 0.5
"""Part of a share's delta for the thresholds of released words."""
WORD_SHARE = 0.5
"""Part of epsilon that words cost alone where texts leave too. At a half the texts' noise grows by 6 to 12 %, at .7 by
14 to 25 % for words of a quarter fewer units; at a fifth a word needs more than twice the units (`word_shares`)."""
WORDS_BEFORE_TEXTS = 32
"""Words that a unit casts where they open the vocabulary of texts. Of 4 to 64, the most words of other texts are found
at 16 to 64, on public trivia and questions to a bank (`bench_facts.py --breadth`)."""
_GAPS_OF_WORDS = 2.0**-80
"""More than the declared gaps of all releases of words together, for the search of their noise."""


def num_branches(labels: int, adjacency: Adjacency) -> int:
    """Returns how many labels one change of a unit can concern: a unit that is replaced may change its label.

    Args:
      labels: that split the units; one or none: all units together.
      adjacency: neighbouring relation.
    """
    return 2 if adjacency == "replace_one" and labels > 1 else 1


def one_release(noise: float, failure: float) -> Event:
    """Returns what a release costs at most whose threshold `words_with` found.

    Args:
      noise: multiplier.
      failure: the chance that its threshold is for.
    """
    return ComposedEvent((GaussianEvent(noise), FailureEvent(failure)))


def words_with(rule: UnitWords, noise: float, failure: float, adjacency: Adjacency) -> WordRelease:
    """Returns a release with the least threshold that lets words of one unit alone through with at most a chance.

    Args:
      rule: what a unit casts.
      noise: multiplier.
      failure: the chance, which is a part of delta.
      adjacency: neighbouring relation.
    """
    threshold = least_threshold(noise, rule.max_words, adjacency, failure)
    return WordRelease(rule, ThresholdedGaussianMechanism(noise, threshold), adjacency)


def noise_of_words(event: Callable[[float], Event], *, epsilon: float, delta: float, adjacency: Adjacency) -> float:
    """Returns the least noise at which releases of words cost so much by themselves.

    Args:
      event: of all of them, at a noise.
      epsilon: what they may cost.
      delta: of the share.
      adjacency: neighbouring relation.
    """
    left = effective_delta(delta, _GAPS_OF_WORDS)
    return accounting.calibrate(event, epsilon=epsilon, delta=left, adjacency=adjacency)


def words_before_texts(text_key: str) -> UnitWords:
    """Returns what a unit casts where released words open the vocabulary of texts.

    Args:
      text_key: field of the records that holds the text.
    """
    return UnitWords(text_key, WORDS_BEFORE_TEXTS, (), public_words().digest)


def plan_first_words(
    rule: UnitWords,
    labels: Iterable[str | None],
    *,
    epsilon: float,
    delta: float,
    adjacency: Adjacency,
    share: float = WORD_SHARE,
) -> WordRelease:
    """Returns the release of words of each label that costs a part of epsilon by itself, before texts.

    Args:
      rule: what a unit casts.
      labels: that split the units; None alone: all units together.
      epsilon: of words and texts.
      delta: of the share; half of it goes to the thresholds.
      adjacency: neighbouring relation.
      share: part of epsilon, in (0, 1).
    """
    split = tuple(labels)
    failure = delta * FOR_THRESHOLDS / num_branches(len(split), adjacency)

    def event(noise: float) -> Event:
        one = one_release(noise, failure)
        return event_of_tickets([Ticket(FIRST_WORDS_TEMPLATE, one, label=label) for label in split], partition="labels")

    noise = noise_of_words(event, epsilon=epsilon * share, delta=delta, adjacency=adjacency)
    return words_with(rule, noise, failure, adjacency)
