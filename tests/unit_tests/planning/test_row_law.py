"""The law of votes of rows that are alike: what is estimated from votes, and what votes follow from it."""

from __future__ import annotations

import numpy as np
import pytest

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.planning.row_law import RowFacts, RowGuess, VoteCounts, estimate_facts

LAWS = [
    RowFacts(0.6, 0.55, 0.7, 4),
    RowFacts(0.45, 0.1, 0.4, 5),
    RowFacts(0.3, 0.05, 0.3, 14),
    RowFacts(0.9, 0.8, 1.0, 2),
    RowFacts(0.5, 0.4, 0.5, 6, silent=0.5),
]


def drawn(facts: RowFacts, *, questions: int, rows: int) -> np.ndarray:
    """int[questions, rows] votes, right label 0; from the definition of the law alone."""
    generator = np.random.default_rng(5)
    strength = (1 - facts.correlation) / facts.correlation
    right = generator.beta(facts.right * strength, (1 - facts.right) * strength, size=questions)
    others = facts.labels - 1
    total = (1 - facts.rival) / (facts.rival - 1 / others) if others > 1 else 1.0
    spread = generator.dirichlet(np.full(others, total / others), size=questions)
    votes = np.empty((questions, rows), dtype=int)
    for question in range(questions):
        is_right = generator.random(rows) < right[question]
        wrong = generator.choice(np.arange(1, facts.labels), size=rows, p=spread[question])
        wrong = np.where(generator.random(rows) < facts.silent, -1, wrong)
        votes[question] = np.where(is_right, 0, wrong)
    return votes


@pytest.mark.parametrize("facts", LAWS)
def test_two_thousand_questions_give_the_numbers_back(facts: RowFacts) -> None:
    """Errors of 2,000 x 6 votes: under .011 for `right`, .02 for the others; the bounds are above 4 of them."""
    votes = drawn(facts, questions=2_000, rows=6)
    found = estimate_facts(votes, np.zeros(2_000, dtype=int), labels=facts.labels)
    assert found.right == pytest.approx(facts.right, abs=0.045)
    assert found.correlation == pytest.approx(facts.correlation, abs=0.05)
    assert found.rival == pytest.approx(facts.rival, abs=0.05)
    assert found.silent == pytest.approx(facts.silent, abs=0.04)


def test_the_right_label_may_be_any() -> None:
    votes = drawn(LAWS[0], questions=300, rows=4)
    turned = (votes + 1) % 4
    assert estimate_facts(turned, np.ones(300, dtype=int), labels=4) == estimate_facts(
        votes, np.zeros(300, dtype=int), labels=4
    )


def test_weights_are_repetitions() -> None:
    votes, gold = drawn(LAWS[1], questions=40, rows=4), np.zeros(40, dtype=int)
    twice = estimate_facts(votes, gold, labels=5, weights=np.repeat([1.0, 0.0], 20))
    alone = estimate_facts(votes[:20], gold[:20], labels=5)
    assert twice.right == pytest.approx(alone.right)
    assert twice.correlation == pytest.approx(alone.correlation)
    assert twice.rival == pytest.approx(alone.rival)


def test_few_questions_lean_on_what_is_usual() -> None:
    votes, gold = np.array([[0, 0], [1, 1]]), np.array([0, 0])
    counts = VoteCounts.of(votes, gold, labels=4, deals=None, within=True)
    [[_, alone, _, _]], [[_, correlation, rival, _]] = (
        counts.numbers(np.ones((1, 2)), invented=n) for n in (0.0, 400.0)
    )
    assert alone > 0.9
    assert correlation == pytest.approx(0.55, abs=0.02)
    assert rival == pytest.approx(0.7, abs=0.02)


def test_rows_of_one_deal_and_of_different_deals_are_told_apart() -> None:
    """Two rows of each deal; those of different deals are the same row twice, so they are always alike."""
    generator = np.random.default_rng(3)
    first = generator.integers(0, 2, size=(4_000, 2))
    votes = np.concatenate([first, first], axis=1)
    gold, deals = np.zeros(4_000, dtype=int), [0, 0, 1, 1]
    both = (VoteCounts.of(votes, gold, labels=2, deals=deals, within=own) for own in (True, False))
    within, across = (counts.numbers(np.ones((1, 4_000)))[0, 1] for counts in both)
    assert within == pytest.approx(0.0, abs=0.05)
    assert across == pytest.approx(0.5, abs=0.05)  # half of these pairs are one row


@pytest.mark.parametrize("facts", LAWS)
@pytest.mark.parametrize(("trials", "used"), [(20, 0.98), (8_000, 0.005), (6, 1.0)])
def test_votes_follow_the_law(facts: RowFacts, trials: int, used: float) -> None:
    votes = facts.votes(trials, used)
    rows = trials * used
    assert votes[:, 0].mean() == pytest.approx(rows * facts.right, rel=0.01)
    cast = rows * (facts.right + (1 - facts.right) * (1 - facts.silent))
    assert votes.sum(axis=1).mean() == pytest.approx(cast, rel=0.01)
    assert (votes >= 0).all()
    assert (votes == np.round(votes)).all()
    again = facts.votes(trials, used)
    assert again.tobytes() == votes.tobytes()


def test_one_rival_takes_all_wrong_votes_where_rivals_are_alike() -> None:
    """Gamma numbers of so small a shape are below every float; drawn as they are, they would share evenly."""
    votes = RowFacts(0.3, 0.2, 0.9999, 10).votes(40, 1.0)
    top = votes[:, 1:].max(axis=1) / np.maximum(votes[:, 1:].sum(axis=1), 1)
    assert top.mean() > 0.99


def test_no_number_of_rows_lifts_the_ceiling() -> None:
    for facts in LAWS:
        votes = facts.votes(2_000, 1.0)
        top = votes >= votes.max(axis=1, keepdims=True)
        assert (top[:, 0] / top.sum(axis=1)).mean() == pytest.approx(facts.ceiling(), abs=0.02)
    alike = RowFacts(0.6, 0.98, 0.7, 4)
    assert alike.ceiling() == pytest.approx(0.6, abs=0.02)
    assert RowFacts(0.6, 0.0, 0.5, 4).ceiling() > 0.99


def test_facts_are_a_source_for_their_labels_alone() -> None:
    facts = LAWS[0]
    assert facts.facts(labels=4, shots=7) is facts
    with pytest.raises(ConfigurationError, match="labels: expected 4, as of the facts, found 5"):
        facts.facts(labels=5, shots=1)


@pytest.mark.parametrize("name", ["right", "correlation", "rival", "silent"])
def test_numbers_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        RowFacts(**{"right": 0.5, "correlation": 0.5, "rival": 0.5, "labels": 3, name: 1.1})


def test_a_guess_is_wider_on_its_poor_side_than_what_it_says() -> None:
    guess = RowGuess()
    low, high = guess.interval(lambda facts: facts.right, labels=4, law=((1, 1.0),))
    assert low < guess.facts(labels=4, shots=1).right < high
    assert guess.facts(labels=4, shots=10**9).right == pytest.approx(0.25 + 0.75 * 0.95)


def test_a_mean_of_facts_at_an_end_of_their_range_stays_in_it() -> None:
    """A weighted mean of ones is 1.0000000000000002 with some weights, these among them."""
    weights = np.random.default_rng([8, 3]).random(8)
    assert np.average(np.ones((8, 4)), axis=0, weights=weights)[0] > 1.0
    assert RowFacts.mean([RowFacts(1.0, 0.0, 1.0, 2)] * 8, weights.tolist()) == RowFacts(1.0, 0.0, 1.0, 2)
