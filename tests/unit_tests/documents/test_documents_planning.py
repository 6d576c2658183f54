"""Plans of synthetic documents: one price for both steps, against closed forms, and what a keyword needs to be found."""

from __future__ import annotations

import math
from typing import Any

import pytest
from scipy import stats

from langchain_dpicl.documents import DocumentsPlan, keyword_margin, plan_documents
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.generation.plan import TokenRule
from langchain_dpicl.planning.expected_utility import RowDesign
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy._validate import effective_delta
from langchain_dpicl.privacy.accounting.events import ComposedEvent, GaussianEvent, ParallelEvent
from langchain_dpicl.privacy.extensions.value_counts import TOPIC_TEMPLATE, GaussianCountMechanism, places

VOCABULARY = tuple(f"word{place}" for place in range(200))


def plan(**options: Any) -> DocumentsPlan:
    given: dict[str, Any] = {"public_size": 4_000, "epsilon": 2.0, "delta": 1e-6, "num_topics": 4, "max_tokens": 10}
    given["documents_per_topic"] = 4
    return plan_documents(VOCABULARY, **{**given, **options})


def test_both_steps_are_one_event_and_topics_run_in_parallel() -> None:
    made = plan(topic_noise="gaussian")
    event = made.event()
    assert isinstance(event, ComposedEvent)
    histogram, texts = event.events
    assert isinstance(histogram, GaussianEvent)
    assert isinstance(texts, ParallelEvent)
    assert [label for label, _ in texts.branches] == list(places(4))
    assert len({branch for _, branch in texts.branches}) == 1
    first, *others = made.tickets()
    assert (first.template, first.label, first.max_count) == (TOPIC_TEMPLATE, None, 1)
    assert {ticket.label for ticket in others} == set(places(4))


def test_the_price_is_that_of_a_closed_form_where_nothing_is_sampled() -> None:
    """Everybody in every row, Gaussian noise everywhere: mu^2 adds up."""
    made = plan(
        topic_noise="gaussian",
        mechanism="gaussian",
        topic_size=40,
        design=RowDesign.choose(num_slots=40, smallest_size=40),
        documents_per_topic=2,
    )
    tokens = 2 * 10 / made.generation.noise_multiplier**2
    mu = math.sqrt(1.0 / made.topics.mechanism.noise_multiplier**2 + tokens)
    left = effective_delta(made.delta, made.implementation_delta)
    assert made.epsilon == pytest.approx(accounting.gdp_epsilon(mu, left), rel=2e-3)
    assert 1.99 < made.epsilon <= 2.0


@pytest.mark.parametrize("noise", ["gaussian", "discrete_laplace"])
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_what_a_keyword_needs_is_that_of_the_law(noise: Any, adjacency: Any) -> None:
    made = plan(topic_noise=noise, adjacency=adjacency)
    scale, margin = float(made.topics.scale), keyword_margin(made.topics, 0.95)
    if noise == "gaussian":
        beyond = lambda least: float(stats.norm(0, scale).sf(least - 0.5))  # noqa: E731
        assert made.deviation == scale
    else:
        beyond = lambda least: float(stats.dlaplace(1.0 / scale).sf(least - 1))  # noqa: E731
        assert made.deviation == pytest.approx(stats.dlaplace(1.0 / scale).std())
    assert beyond(margin + 1) <= 0.05 < beyond(margin)
    assert len(VOCABULARY) * beyond(made.least_units) <= 0.05 * (1 + 1e-9)
    assert made.found_from(0.95) == made.least_units + margin
    assert made.epsilon <= 2.0


def test_the_gaps_of_both_noises_are_declared_and_left_out_of_the_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """The histogram's gap is below what a float shows beside that of tokens, so here it is made larger."""
    made = plan(topic_noise="gaussian", noise_multiplier=5.0)
    with monkeypatch.context() as patch:
        patch.setattr(GaussianCountMechanism, "implementation_delta", lambda self, num_values: num_values * 1e-9)
        wide = plan(topic_noise="gaussian", noise_multiplier=5.0)
        gap = len(VOCABULARY) * 1e-9
        assert wide.implementation_delta == gap + wide.generation.implementation_delta
        assert wide.epsilon > made.epsilon
    assert plan(topic_noise="discrete_laplace").topics.implementation_delta == 0.0 < made.topics.implementation_delta


@pytest.mark.parametrize("sampling", ["fixed", "partition"])
@pytest.mark.parametrize("num_topics", [1, 2])
def test_no_sample_of_a_topic_has_a_fixed_size(sampling: str, num_topics: int) -> None:
    """A unit that is replaced may leave its topic, also where there is one only, and so its size is private."""
    design = RowDesign.choose(sampling=sampling, num_slots=5)
    with pytest.raises(ConfigurationError, match="no topic has a known size"):
        plan(design=design, adjacency="replace_one", num_topics=num_topics)


def test_the_noise_that_deviates_less_is_taken() -> None:
    assert plan(keywords_per_unit=1, epsilon=8.0).topics.mechanism.name == "discrete_laplace"
    assert plan(keywords_per_unit=100, epsilon=8.0).topics.mechanism.name == "gaussian"
    for many in (1, 10, 100):
        made, *others = (
            plan(keywords_per_unit=many, topic_noise=noise) for noise in (None, "gaussian", "discrete_laplace")
        )
        assert made.deviation == min(other.deviation for other in others)


def test_nobody_casts_more_keywords_than_there_are() -> None:
    made = plan_documents(
        ["card", "fee"], public_size=100, documents_per_topic=4, epsilon=2.0, delta=1e-6, num_topics=1
    )
    assert made.topics.rule.max_values == 2


def test_a_mechanism_that_fixes_its_noise_is_priced_or_refused() -> None:
    fixed = TokenRule("difference_clip", clip=0.05, temperature=1.0)
    made = plan(mechanism=fixed, candidates=1_000)
    assert made.epsilon < 2.0
    with pytest.raises(ConfigurationError, match="cost together"):
        plan(mechanism=TokenRule("difference_clip", clip=40.0, temperature=0.1), candidates=1_000)
    with pytest.raises(ConfigurationError, match="cost together"):
        plan(noise_multiplier=0.2)
    with pytest.raises(ConfigurationError, match="expected None where clip and temperature are both given"):
        plan(mechanism=fixed, candidates=1_000, noise_multiplier=50.0)
    assert plan(noise_multiplier=5.0).generation.noise_multiplier == 5.0


@pytest.mark.parametrize("wrong", [{"delta": 1e-300}, {"delta": 0.0}, {"epsilon": -1.0}, {"public_size": 0}])
def test_public_faults_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        plan(**wrong)
