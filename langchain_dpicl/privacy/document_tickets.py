"""Names the tickets of synthetic documents: one histogram over all units, then texts for each topic."""

from __future__ import annotations

from langchain_dpicl.privacy._validate import check_int

TOPIC_TEMPLATE = "topics: one noisy histogram of keywords"
"""The ticket template of the histogram."""
MOST_TOPICS = 1000
BY_COINS = frozenset({"poisson", "disjoint"})
"""Sampling methods that use no number of units, since the number in a topic is private."""


def places(num_topics: int) -> tuple[str, ...]:
    """Returns the declared places of so many topics, in order.

    Args:
      num_topics: at most 1,000.

    Raises:
      ConfigurationError: the number is out of range.

    >>> places(2)
    ('topic 1', 'topic 2')
    """
    check_int("num_topics", num_topics, low=1, high=MOST_TOPICS)
    return tuple(f"topic {place}" for place in range(1, num_topics + 1))
