"""Audits of synthetic documents: sound ones pass, and each of the known mistakes is called by its name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from langchain_dpicl.audit import Subject, count_games, suite
from langchain_dpicl.audit.game import play, power_of
from langchain_dpicl.audit.suite import _checks, games_of
from langchain_dpicl.documents import plan_documents
from langchain_dpicl.privacy.accounting.events import PureEvent
from langchain_dpicl.privacy.extensions import redeclared as resplit
from langchain_dpicl.privacy.extensions.value_counts import (
    CountPlan,
    DiscreteLaplaceMechanism,
    GaussianCountMechanism,
    TopicSplit,
    UnitKeywords,
)
from langchain_dpicl.privacy.private_examples import Pool

VOCABULARY = ("card", "transfer", "fee", "boat", "film", "app")


def plan(noise: Any = "gaussian", **options: Any) -> Any:
    given: dict[str, Any] = {"public_size": 600, "epsilon": 4.0, "delta": 1e-6, "num_topics": 2, "max_tokens": 4}
    given["documents_per_topic"] = 4
    return plan_documents(VOCABULARY, topic_noise=noise, keywords_per_unit=3, **{**given, **options})


@pytest.mark.parametrize("noise", ["gaussian", "discrete_laplace"])
def test_a_plan_is_rebuilt_at_its_price_and_every_check_has_a_name(noise: str) -> None:
    made = plan(noise)
    told = json.loads(json.dumps(made.to_dict()))
    subject = Subject.of({"plan": told})
    assert (subject.method, subject.plan.epsilon) == ("documents", made.epsilon)
    assert suite.check_price(subject).verdict == "sound"
    assert suite.check_price(Subject.of({**told, "epsilon": 0.9})).verdict == "violated"
    names = [check.name for check in _checks(subject, controls=False)]
    assert {"keywords: one unit adds no more than charged", "topics: one unit has one, by itself", "rows"} <= set(names)
    histogram, token = games_of(subject)
    assert "histogram" in histogram.name
    assert "token" in token.name


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_the_game_would_see_half_of_the_noise(adjacency: str) -> None:
    (game,) = count_games.document_games(adjacency=adjacency)
    event = game.event(game.sides()[0])
    assert isinstance(event, PureEvent)
    assert event.epsilon == pytest.approx(2.0, rel=1e-3)
    assert power_of(game, event) >= 0.99


def test_a_component_is_audited_by_its_ledger_too() -> None:
    made = count_games.documents_of(("mine",))
    made.run(progress=False)
    subject = Subject.of(made)
    assert [check(subject).verdict for check in (suite.check_price, suite.check_tickets, suite.check_report)] == [
        "sound"
    ] * 3
    assert subject.plan is made.plan
    assert subject.texts.plan is made.plan.generation
    assert Subject.of(made.plan.generation).texts.method == "generation"


def test_sound_parts_are_sound() -> None:
    """The one unit's keyword is the topic of sixteen runs with a chance below 1e-9: each of four is in a quarter of them."""
    assert count_games.check_topic_choice(plan(), runs=16).verdict == "sound"
    found = count_games.check_noise(plan().topics)
    assert (found.verdict, found.power > 0.999) == ("sound", True)


# --- what others have got wrong -------------------------------------------------------------------------------------


def all_keywords(patch: pytest.MonkeyPatch) -> None:
    """A unit casts every keyword that it writes."""
    real = UnitKeywords.of
    patch.setattr(
        UnitKeywords, "of", lambda self, records: real(UnitKeywords(self.name, 10**6, self.declared), records)
    )


def every_word(patch: pytest.MonkeyPatch) -> None:
    """A unit casts a keyword as often as it writes it."""
    patch.setattr(
        UnitKeywords,
        "of",
        lambda self, records: tuple(k for r in records for k in self._reader.found(r.get(self.name)))[:3],
    )


def words_of_the_records(patch: pytest.MonkeyPatch) -> None:
    """The vocabulary is what the records say."""
    patch.setattr(
        UnitKeywords, "of", lambda self, records: tuple(dict.fromkeys(f"{r.get(self.name)}."[:9] for r in records))[:3]
    )


def several_topics(patch: pytest.MonkeyPatch) -> None:
    """A unit stands in the texts of every topic that it holds."""

    def redeclared(units: Any, labels: Any, split: Any) -> Any:
        each: TopicSplit = split.__self__
        alone = [
            (label, dataclasses.replace(each, topics=(topic,), labels=(label,)))
            for topic, label in zip(each.topics, labels, strict=False)
        ]
        held = {label: [place for place, unit in enumerate(units.contents) if one.of(unit)[1]] for label, one in alone}

        def open_pool(label: str | None) -> Any:
            index = range(len(units.contents)) if label is None else held.get(label, [])
            return Pool(lambda: len(index), lambda position: units.contents[index[position]])

        return open_pool

    patch.setattr(resplit, "split_units", redeclared)


def evened_out(patch: pytest.MonkeyPatch) -> None:
    """Topics are filled evenly: who comes first decides where the others go."""
    real = resplit.split_units

    def redeclared(units: Any, labels: Any, split: Any) -> Any:
        taken: list[str] = []

        def even(unit: Any) -> Any:
            kept, label = split(unit)
            if label and taken.count(label) >= 2:
                label = labels[-1]
            taken.append(label)
            return kept, label

        return real(units, labels, even)

    patch.setattr(resplit, "split_units", redeclared)


def noise_for_many_alone(patch: pytest.MonkeyPatch) -> None:
    """What one unit holds gets no noise."""
    real = GaussianCountMechanism.release

    def release(self: Any, counts: Any, **given: Any) -> Any:
        made = real(self, counts, **given)
        return tuple((name, 1 if counts.get(name) == 1 else count) for name, count in made)

    patch.setattr(GaussianCountMechanism, "release", release)


def noise_of_one_keyword(patch: pytest.MonkeyPatch) -> None:
    """The noise is that of one keyword, however many a unit casts."""
    real = GaussianCountMechanism.release

    def release(self: Any, counts: Any, *, rule: Any, **given: Any) -> Any:
        return real(self, counts, rule=UnitKeywords("text", 1, ("card",)), **given)

    patch.setattr(GaussianCountMechanism, "release", release)


def noise_of_the_other_relation(patch: pytest.MonkeyPatch) -> None:
    """A unit that is replaced moves twice as many counts as one that comes, and the noise is that of one that comes."""
    real = GaussianCountMechanism.release
    patch.setattr(
        GaussianCountMechanism,
        "release",
        lambda self, counts, **given: real(self, counts, **{**given, "adjacency": "add_remove"}),
    )


def exact_topics(patch: pytest.MonkeyPatch) -> None:
    """Topics are chosen by the counts without noise."""
    real = CountPlan.release
    seen: dict[str, int] = {}

    def release(self: Any, units: Any, *, rng: Any) -> Any:
        kept = [tuple(records) for records in units]
        seen.clear()
        for unit in kept:
            for keyword in self.rule.of(unit):
                seen[keyword] = seen.get(keyword, 0) + 1
        return real(self, kept, rng=rng)

    def chosen(counts: Any, made: Any) -> Any:
        most = sorted(counts, key=lambda pair: -seen.get(pair[0], 0))[: made.num_topics]
        return tuple(reversed([pair for pair in most if seen.get(pair[0], 0) >= made.least_units]))

    patch.setattr(CountPlan, "release", release)
    patch.setattr("langchain_dpicl.documents.choose_topics", chosen)


def keywords(made: Any) -> Any:
    return count_games.check_keywords(made.topics)


PARTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[Any], Any]]] = {
    "all keywords": (all_keywords, keywords),
    "every word": (every_word, keywords),
    "words of the records": (words_of_the_records, keywords),
    "several topics": (several_topics, count_games.check_topics),
    "evened out": (evened_out, count_games.check_topics),
    "noise for many alone": (noise_for_many_alone, lambda made: count_games.check_noise(made.topics)),
    "noise of one keyword": (noise_of_one_keyword, lambda made: count_games.check_noise(made.topics)),
    "exact topics": (exact_topics, lambda made: count_games.check_topic_choice(made, runs=20)),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_planted_mistake_is_found_in_the_part_it_is_in(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, check = PARTS[name]
    assert check(plan()).verdict == "sound"
    plant(monkeypatch)
    assert check(plan()).verdict == "violated"


def test_noise_of_the_other_relation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    release = plan(adjacency="replace_one").topics
    assert count_games.check_noise(release).verdict == "sound"
    noise_of_the_other_relation(monkeypatch)
    assert count_games.check_noise(release).verdict == "violated"


def half_of_the_noise(patch: pytest.MonkeyPatch) -> None:
    real = DiscreteLaplaceMechanism.scale
    patch.setattr(DiscreteLaplaceMechanism, "scale", lambda self, l1: real(self, l1) / 2)


@pytest.mark.planted
@pytest.mark.parametrize(
    ("plant", "adjacency"),
    [
        (None, "add_remove"),
        (half_of_the_noise, "add_remove"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_game_against_the_component_refutes_what_is_planted(
    plant: Any, adjacency: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its plain size the game misses half of the noise with a chance of 2e-4, at twice that with one of 6e-16."""
    (game,) = count_games.document_games(adjacency=adjacency)
    if plant is None:
        assert play(game).verdict != "violated"
        return
    plant(monkeypatch)
    assert play(dataclasses.replace(game, runs=2 * game.runs), looks=8).verdict == "violated"
