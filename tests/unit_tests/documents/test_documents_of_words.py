"""Stores of released words: what leaves of each topic, what it costs, who looks through it, and what is kept."""

from __future__ import annotations

import asyncio
import itertools
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from langchain_dpicl import Budget, DocumentSynthesizer, PrivateExamples, SyntheticDocuments, verify_report
from langchain_dpicl.audit.suite import _checks, games_of
from langchain_dpicl.audit.targets import Subject
from langchain_dpicl.backends.fake import FakeBackend, word_copier
from langchain_dpicl.documents import DocumentsPlan, plan_documents
from langchain_dpicl.exceptions import ConfigurationError, ModelCallError, NoisyPlanWarning, RunInterruptedError
from langchain_dpicl.options import Decoding, Rows, Topics
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy.accounting.events import ComposedEvent, FailureEvent, GaussianEvent, ParallelEvent
from langchain_dpicl.privacy.extensions.value_counts import (
    PAIRS_OF_TOPIC_TEMPLATE,
    TOPIC_WORDS_TEMPLATE,
    WORDS_OF_TOPIC_TEMPLATE,
    places,
)
from langchain_dpicl.privacy.extensions.word_release import UnitWords, WordRelease
from langchain_dpicl.privacy.ledger import budget as ledger
from langchain_dpicl.privacy.ledger.store import InMemoryStore
from langchain_dpicl.runs.release_run import RunJournal
from langchain_dpicl.stores import SQLiteStore
from tests.canary import locals_in
from tests.contracts.neighbours import WordNeighbourContract, owned
from tests.contracts.release_run import entries_in
from tests.sealed_files import edited, rechained, shown

CANARY = "canaryvelkor"
NOTES = ["my card was declined by Grenko"] * 300 + ["the transfer is late at Wulbo"] * 250 + [f"a boat {CANARY}"]
VOCABULARY = ("boat", "card", "film", "transfer")


def house(**limits: Any) -> Budget:
    return Budget(**{"epsilon": 8.0, "delta": 1e-6, **limits})


def maker(budget: Any = None, notes: Any = NOTES, **options: Any) -> DocumentSynthesizer:
    given = {"topics": Topics(VOCABULARY, 3, min_units=100), "documents_per_topic": 0, "epsilon": 4.0, **options}
    private = notes if isinstance(notes, PrivateExamples) else PrivateExamples(notes, public_size=600)
    return DocumentSynthesizer.from_private_examples(private, budget=house() if budget is None else budget, **given)


def held(found: Any) -> dict[str, set[str]]:
    return {group.label: {word for word, _ in group.words} for group in found.words}


class TestWhatLeaves:
    def test_each_topic_is_a_document_of_the_words_that_many_of_its_units_write(self) -> None:
        found = maker().run(progress=False)
        assert held(found) == {"card": {"declined", "grenko"}, "transfer": {"late", "wulbo"}}
        transfer, card = found.documents
        assert set(card.page_content.split()) == {"card", "declined", "grenko"}
        assert card.metadata == {"topic": "card", "kind": "words", "release": found.release_id}
        assert transfer.id != card.id
        assert len(found) == 2
        assert CANARY not in found.to_json()
        assert verify_report(found).ok
        assert SyntheticDocuments.from_json(found.to_json()) == found
        assert found.as_retriever(search_kwargs={"k": 1}).invoke("who is Wulbo?")[0].metadata["topic"] == "transfer"

    def test_topics_are_words_that_many_units_write_where_no_vocabulary_is_given(self) -> None:
        made = maker(topics=Topics(num_topics=4))
        found = made.run(progress=False)
        names = {topic for topic, _ in found.topics}
        assert len(names) == 4
        assert names <= {"card", "declined", "grenko", "transfer", "late", "wulbo"}
        assert all(weight >= made.plan.topics.mechanism.threshold for _, weight in found.topics)
        assert all(topic not in words for topic, words in held(found).items())
        assert made.share.remaining(TOPIC_WORDS_TEMPLATE) == 0
        assert verify_report(found).ok

    def test_pairs_tell_who_has_what(self) -> None:
        notes = ["the card of Grenko is Wulbo green, Wulbo"] * 400
        found = maker(notes=notes, topics=Topics(("card",), 1, pairs=True)).run(progress=False)
        (group,) = found.words
        assert {pair for pair, _ in group.pairs} == {"grenko wulbo", "wulbo green", "green wulbo"}
        assert set(found.documents[0].page_content.splitlines()[2:]) == {pair for pair, _ in group.pairs}
        assert verify_report(found).ok

    def test_words_and_texts_leave_together(self) -> None:
        words = [" my", " card"]
        made = maker(
            llm=FakeBackend(word_copier(words), vocabulary=words),
            topics=Topics(VOCABULARY, 3, min_units=100, words=4),
            documents_per_topic=2,
            max_tokens=2,
            rows=Rows(units=10),
            decoding=Decoding(candidates="all"),
        )
        streamed = list(made.stream(progress=False))
        assert [each.metadata.get("kind") for each in streamed] == ["words"] * 2 + [None] * 4
        found = made.result
        assert {each.id for each in found.documents} == {each.id for each in streamed}
        assert len(found) == 6
        assert len(found.filtered(lambda document: "kind" in document.metadata).documents) == 2
        assert verify_report(found).ok

    def test_denied_words_leave_neither_as_words_nor_as_topics(self) -> None:
        made = maker(topics=Topics(num_topics=4), deny=["Grenko", "wulbo, late"])
        found = made.run(progress=False)
        assert {"grenko", "wulbo", "late"}.isdisjoint({*dict(found.topics), *set().union(*held(found).values())})
        assert verify_report(found).ok

    def test_keywords_with_denied_words_are_no_topics(self) -> None:
        topics = Topics((*VOCABULARY, "card declined"), 3, min_units=100)
        made = maker(topics=topics, deny=["Card, boat"])
        assert made.plan.topics.rule.declared == ("film", "transfer")
        found = made.run(progress=False)
        assert held(found) == {"transfer": {"late", "wulbo"}}
        assert verify_report(found).ok
        with pytest.raises(ConfigurationError, match="vocabulary: expected 1 to"):
            maker(deny=VOCABULARY)

    def test_a_topic_without_words_is_its_name(self) -> None:
        found = maker(notes=["my card"] * 400).run(progress=False)
        assert [document.page_content for document in found.documents] == ["card"]

    def test_awaited_it_is_the_same(self) -> None:
        found = asyncio.run(maker().arun(progress=False))
        assert held(found) == {"card": {"declined", "grenko"}, "transfer": {"late", "wulbo"}}


class TestTheReview:
    def test_sees_all_released_words_once_and_takes_some_out(self) -> None:
        seen: list[tuple[str, ...]] = []

        def look(words: tuple[str, ...]) -> list[str]:
            seen.append(words)
            return [word for word in words if word == "grenko"]

        made = maker(topics=Topics(VOCABULARY, 3, min_units=100, review=look))
        found = made.run(progress=False)
        assert made.run(progress=False) == found
        assert [set(words) for words in seen] == [{"declined", "grenko", "late", "wulbo"}]
        assert held(found)["card"] == {"declined"}
        assert found.report["review"] == {"words_dropped": 1}
        assert "grenko" not in found.to_json()
        assert verify_report(found).ok
        assert maker().run(progress=False).report["review"] is None

    def test_takes_out_topics_that_were_released_with_all_they_hold(self) -> None:
        made = maker(topics=Topics(num_topics=2, review=lambda words: [words[-1]]))
        found = made.run(progress=False)
        assert len(found.topics) == len(found.words) == 1
        assert verify_report(found).ok

    @pytest.mark.parametrize("wrong", ["grenko", 7, ["another"], ["Grenko"], [["grenko"]], [7, "grenko"]])
    def test_can_add_nothing_and_a_wrong_one_is_tried_again_for_free(self, wrong: Any) -> None:
        answers = [wrong, []]
        budget = house()
        made = maker(budget, topics=Topics(VOCABULARY, 3, min_units=100, review=lambda _: answers.pop(0)))
        with pytest.raises(ConfigurationError, match=r"Topics\.review"):
            made.run(progress=False)
        left = budget.remaining_epsilon
        assert held(made.run(progress=False))["card"] == {"declined", "grenko"}
        assert budget.remaining_epsilon == left

    def test_of_words_that_an_earlier_run_went_on_with_is_refused_and_never_reported(self, tmp_path: Path) -> None:
        path, kept = tmp_path / "ledger.db", tmp_path / "kept.jsonl"
        budget = house(store=SQLiteStore.new(path))
        maker(budget, checkpoint=kept, component="store").run(progress=False)
        budget.close()
        ledger._IDENTITIES.clear()
        topics = Topics(VOCABULARY, 3, min_units=100, review=lambda _: ["grenko"])
        with pytest.raises(ConfigurationError, match=r"Topics\.review"):
            maker(Budget.open(SQLiteStore(path)), topics=topics, checkpoint=kept, component="store")

    def test_of_topics_alone_is_gone_on_with_by_runs_without_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, kept = tmp_path / "ledger.db", tmp_path / "kept.jsonl"

        def opened(budget: Budget, review: Any = None) -> DocumentSynthesizer:
            topics = Topics(num_topics=4, review=review)
            return maker(budget, topics=topics, checkpoint=kept, component="store")

        def stop(*_: Any) -> None:
            raise KeyboardInterrupt

        budget = house(store=SQLiteStore.new(path))
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(DocumentSynthesizer, "_release_words", stop)
            opened(budget, lambda words: words[:1]).run(progress=False)
        found = []
        for _ in range(2):
            budget.close()
            ledger._IDENTITIES.clear()
            budget = Budget.open(SQLiteStore(path))
            found.append(opened(budget).run(progress=False))
        assert found[0].documents == found[1].documents
        assert len(found[0].topics) == 3
        assert found[1].report["review"] is None  # nobody saw the words

    def test_of_a_run_that_could_not_store_it_is_stored_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, kept, real = tmp_path / "ledger.db", tmp_path / "kept.jsonl", RunJournal.flush
        budget, is_full = house(store=SQLiteStore.new(path)), [True]

        def flush(self: Any) -> None:
            if is_full and b"dropped" in self._pending:
                is_full.clear()
                raise OSError(28, "full")
            real(self)

        monkeypatch.setattr(RunJournal, "flush", flush)
        topics = Topics(VOCABULARY, 3, min_units=100, review=lambda _: ["grenko"])
        made = maker(budget, topics=topics, checkpoint=kept, component="store")
        with pytest.raises((OSError, RunInterruptedError)):
            made.run(progress=False)
        found = made.run(progress=False)
        budget.close()
        ledger._IDENTITIES.clear()
        again = maker(Budget.open(SQLiteStore(path)), topics=topics, checkpoint=kept, component="store")
        assert again.run(progress=False).documents == found.documents
        assert kept.read_text().count('"dropped"') == 1
        assert again.report["review"] == {"words_dropped": 1}

    def test_takes_out_topics_before_the_ledger_and_the_report_name_them(self, tmp_path: Path) -> None:
        path, kept, seen = tmp_path / "ledger.db", tmp_path / "kept.jsonl", list[tuple[str, ...]]()

        def look(words: tuple[str, ...]) -> list[str]:
            seen.append(words)
            return [word for word in words if word in {"card", "declined"}]

        budget, topics = house(store=SQLiteStore.new(path)), Topics(num_topics=6, review=look)
        found = maker(budget, topics=topics, checkpoint=kept, component="store").run(progress=False)
        assert {"card", "declined"} <= set(seen[0])
        assert {"grenko", "late", "transfer", "wulbo"} == {topic for topic, _ in found.topics}
        assert found.report["review"] == {"words_dropped": 2}
        assert "declined" not in found.to_json() + repr(budget.report().to_dict())
        assert verify_report(found).ok
        budget.close()
        ledger._IDENTITIES.clear()
        asked = len(seen)
        again = maker(Budget.open(SQLiteStore(path)), topics=topics, checkpoint=kept, component="store")
        assert again.run(progress=False).documents == found.documents
        assert len(seen) == asked

    def test_leaves_no_word_that_it_has_not_seen_or_took_out_in_the_counts(self) -> None:
        made = maker(topics=Topics(num_topics=2, review=lambda words: [words[-1]]))
        found = made.run(progress=False)
        assert made.counts == dict(found.topics)
        assert len(made.counts) == 1

    def test_is_a_function(self) -> None:
        with pytest.raises(ConfigurationError, match="review"):
            Topics(review="grenko")


class TestWhatIsKept:
    def test_another_process_goes_on_and_asks_the_review_no_more(self, tmp_path: Path) -> None:
        path, kept, calls = tmp_path / "ledger.db", tmp_path / "kept.jsonl", list[int]()

        def look(words: tuple[str, ...]) -> list[str]:
            calls.append(len(words))
            return ["grenko"]

        topics = Topics(VOCABULARY, 3, min_units=100, pairs=True, review=look)
        budget = house(store=SQLiteStore.new(path))
        found = maker(budget, topics=topics, checkpoint=kept, component="store").run(progress=False)
        budget.close()
        ledger._IDENTITIES.clear()
        again = maker(Budget.open(SQLiteStore(path)), topics=topics, checkpoint=kept, component="store")
        assert (again.topics, again.words) == (found.topics, found.words)
        assert again.run(progress=False).documents == found.documents
        assert len(calls) == 1
        assert CANARY not in kept.read_text()

    @pytest.mark.parametrize("line", range(5))
    def test_a_stop_before_any_line_leaves_a_checkpoint_to_go_on_from(
        self, line: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, kept = tmp_path / "ledger.db", tmp_path / "kept.json"
        topics = Topics(num_topics=2, pairs=True, review=lambda words: words[:1])
        budget = house(store=SQLiteStore.new(path))
        made = maker(budget, topics=topics, checkpoint=kept, component="store")
        real, lines = DocumentSynthesizer._record, itertools.count()

        def stop(run: Any, *what: Any, **how: Any) -> None:
            if next(lines) == line:
                raise KeyboardInterrupt
            real(run, *what, **how)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(DocumentSynthesizer, "_record", stop)
            made.run(progress=False)
        found = made.run(progress=False)
        budget.close()
        ledger._IDENTITIES.clear()
        again = maker(Budget.open(SQLiteStore(path)), topics=topics, checkpoint=kept, component="store")
        assert held(again.run(progress=False)) == held(found)

    def test_words_whose_ticket_burnt_without_a_result_are_left_out(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        made, real, runs = maker(), WordRelease.weights, list[int]()

        def once(self: Any, units: Any, known: Any, gone: Any) -> Any:
            runs.append(1)
            if len(runs) == 1:
                raise RuntimeError(CANARY)
            return real(self, units, known, gone)

        monkeypatch.setattr(WordRelease, "weights", once)
        with pytest.raises((ModelCallError, RunInterruptedError)) as caught:
            made.run(progress=False)
        assert CANARY not in str(caught.value) + locals_in(caught.value)
        found = made.run(progress=False)
        assert made.run(progress=False).words == found.words
        (said,) = (text for text in caplog.messages if "left out" in text)
        assert "the words of a topic (topic 1) are left out: their ticket was lost" in said
        assert held(found) == {"transfer": set(), "card": {"declined", "grenko"}}
        assert made.share.remaining(WORDS_OF_TOPIC_TEMPLATE, label="topic 1") == 0
        assert verify_report(found).ok

    def test_a_stop_while_units_cast_carries_no_record(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def stop(*_: Any, **__: Any) -> Any:
            raise KeyboardInterrupt

        made = maker()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as caught:
            patch.setattr(UnitWords, "of", stop)
            made.run(progress=False)
        assert not any(text in locals_in(caught.value) for text in (CANARY, "my card was"))
        assert held(made.run(progress=False))["card"] == {"declined", "grenko"}

    @pytest.mark.parametrize(
        ("at", "changed"),
        [
            (0, {"topics": [["card", 3]]}),
            (1, {"place": "topic 3"}),
            (1, {"place": 7}),
            (1, {"words": [["x", 300.0]]}),
            (1, {"words": [["transfer", 300.0]]}),
            (1, {"words": [["late", 1.0]]}),
            (1, {"words": [["late", "many"]]}),
            (1, {"words": 7}),
            (2, {"pairs": [["late boat", 300.0]]}),
            (-1, {"dropped": "late"}),
            (-1, {"dropped": [7]}),
            (-1, {"dropped": ["late"]}),  # by no review
            (-1, {"is_reviewed": None}),
        ],
    )
    def test_a_checkpoint_that_nobody_released_is_refused(
        self, tmp_path: Path, at: int, changed: dict[str, Any]
    ) -> None:
        kept, budget, private = tmp_path / "kept.jsonl", house(), PrivateExamples(NOTES, public_size=600)
        given = {"topics": Topics(VOCABULARY, 3, min_units=100, pairs=True), "checkpoint": kept, "component": "store"}
        maker(budget, private, **given).run(progress=False)
        entries = entries_in(kept)
        entries[at] = {**entries[at], **changed}
        kept.write_bytes(rechained(kept.read_bytes(), entries))
        with pytest.raises(ConfigurationError, match="checkpoint"):
            maker(budget, private, **given)

    def test_words_before_their_ticket_is_used_are_refused(self, tmp_path: Path) -> None:
        kept, budget, private = tmp_path / "kept.jsonl", house(), PrivateExamples(NOTES, public_size=600)
        made = maker(budget, private, checkpoint=kept, component="store")
        made._record({"topics": [["card", 300]]})
        made.share.reserve(made.plan.topic_template)
        made._record({"place": "topic 1", "words": []})
        with pytest.raises(ConfigurationError, match="a ledger on which none was"):
            maker(budget, private, checkpoint=kept, component="store")


class TestThePlan:
    @pytest.mark.parametrize(
        ("topics", "size", "said"),
        [
            (Topics(("card", "film"), 2), 9, r"A topic is found .* units hold it, and only 9 are declared"),
            (Topics(num_topics=2), 9, r"A topic is found .* among \d+ words each, and only 9 are declared"),
            (Topics(("card", "film"), 2), 30, r"A word of a topic is found .* words each, and only 30 are declared"),
        ],
    )
    def test_declared_units_below_what_it_needs_warn_before_anything_is_spent(
        self, topics: Topics, size: int, said: str
    ) -> None:
        with pytest.warns(NoisyPlanWarning, match=said) as caught:
            maker(notes=PrivateExamples([], public_size=size), topics=topics)
        assert [warning.filename for warning in caught] == [__file__]

    def test_enough_of_them_do_not_warn(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            maker(topics=Topics(VOCABULARY, 3))
            # One topic may hold all of them, however many places are declared.
            maker(notes=PrivateExamples([], public_size=600), topics=Topics(("card", "film"), 50))

    def test_topics_and_all_places_are_one_event(self) -> None:
        plan = plan_documents(
            None, public_size=4_000, documents_per_topic=0, epsilon=2.0, delta=1e-6, num_topics=3, pairs=True
        )
        topics, places_of_it = plan.event().events
        assert {type(part) for part in topics.events} == {GaussianEvent, FailureEvent}
        assert isinstance(places_of_it, ParallelEvent)
        assert [label for label, _ in places_of_it.branches] == list(places(3))
        assert all(isinstance(branch, ComposedEvent) for _, branch in places_of_it.branches)
        noise = plan.words.mechanism.noise_multiplier
        mu = (3 / noise**2) ** 0.5  # topics, words and pairs at one noise
        assert plan.epsilon == pytest.approx(accounting.gdp_epsilon(mu, 5e-7), rel=2e-3)
        failures = plan.topics.failure + plan.words.failure + plan.pairs.failure
        assert 4.9e-7 < failures <= 5e-7
        assert {ticket.template for ticket in plan.tickets()} == {
            TOPIC_WORDS_TEMPLATE,
            WORDS_OF_TOPIC_TEMPLATE,
            PAIRS_OF_TOPIC_TEMPLATE,
        }
        assert plan.cost().private_calls == 0

    @pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
    @pytest.mark.parametrize("vocabulary", [None, VOCABULARY])
    @pytest.mark.parametrize("more", [{"documents_per_topic": 0}, {"documents_per_topic": 2, "words": 8}])
    def test_is_rebuilt_from_what_it_shows_at_no_more_than_its_epsilon(
        self, adjacency: Any, vocabulary: Any, more: dict[str, Any]
    ) -> None:
        given: dict[str, Any] = {"public_size": 4_000, "epsilon": 2.0, "delta": 1e-6, "max_tokens": 10}
        plan = plan_documents(vocabulary, num_topics=4, adjacency=adjacency, **given, **more)
        assert DocumentsPlan.rebuild(json.loads(json.dumps(plan.to_dict()))) == plan
        assert 1.99 < plan.epsilon <= 2.0
        wide = plan_documents(vocabulary, num_topics=4, adjacency=adjacency, pairs=True, **given, **more)
        assert wide.words_from() > plan.words_from()

    @pytest.mark.parametrize("changed", [{"denied": []}, {"public_words": "others"}])
    def test_words_of_topics_are_denied_and_ranked_as_topics_are(self, changed: dict[str, Any]) -> None:
        given: dict[str, Any] = {"public_size": 4_000, "documents_per_topic": 0, "epsilon": 2.0, "delta": 1e-6}
        shown = json.loads(json.dumps(plan_documents(None, deny=["velda"], **given).to_dict()))
        shown["words"]["rule"] |= changed
        with pytest.raises(ConfigurationError, match="denied words"):
            DocumentsPlan.rebuild(shown)

    def test_words_beside_texts_cost_half_of_epsilon_alone(self) -> None:
        given: dict[str, Any] = {"public_size": 4_000, "epsilon": 2.0, "delta": 1e-6, "max_tokens": 10}
        plan = plan_documents(VOCABULARY, documents_per_topic=1, words=8, **given)
        alone = accounting.epsilon_upper_bound(plan.words.event, delta=1e-6, adjacency="add_remove")
        assert alone == pytest.approx(1.0, rel=1e-3)
        less = plan_documents(VOCABULARY, documents_per_topic=1, **given)
        assert plan.generation.noise_multiplier > less.generation.noise_multiplier

    def test_a_caller_says_whether_texts_leave(self) -> None:
        with pytest.raises(ConfigurationError) as caught:
            DocumentSynthesizer.from_private_examples(PrivateExamples(NOTES, public_size=600), budget=house())
        assert "0 releases words of each topic alone: no text and no model" in str(caught.value)
        assert "1 or more writes so many texts of each topic" in str(caught.value)

    def test_a_plan_that_never_ran_fixes_no_number_of_topics(self, tmp_path: Path) -> None:
        private = PrivateExamples(NOTES, public_size=600)
        house(store=SQLiteStore.new(path := tmp_path / "ledger.db")).close()
        for number in (2, 3):
            budget = Budget.open(SQLiteStore(path))
            made = maker(budget, private, topics=Topics(VOCABULARY, number, min_units=100))
            assert (made.component, made.plan.num_topics) == ("documents", number)
            budget.close()

    def test_a_document_may_have_a_field_named_topic(self) -> None:
        private = PrivateExamples([{"text": note, "topic": "x"} for note in NOTES], fields=("topic",), public_size=600)
        assert held(maker(notes=private).run(progress=False))["card"] == {"declined", "grenko"}


EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a word below the threshold": lambda s: s["topic_words"][0]["words"][-1].__setitem__(1, 0.5),
    "a stop word": lambda s: s["topic_words"][0]["words"].append(["the", s["topic_words"][0]["words"][-1][1]]),
    "a word of its topic": lambda s: s["topic_words"][0]["words"][0].__setitem__(0, s["topic_words"][0]["label"]),
    "words of no topic": lambda s: s["topic_words"][0].update(label="film"),
    "a topic's words twice": lambda s: s["topic_words"].append(s["topic_words"][0]),
    "pairs that were not paid for": lambda s: s["topic_words"][0].update(pairs=[["late wulbo", 300.0]]),
    "more beside": lambda s: s["topic_words"][0].update(more=1),
    "no words in the plan": lambda s: shown(s).update(words=None),
    "other words in the plan": lambda s: shown(s)["words"]["rule"].update(max_values=9),
    "another noise": lambda s: shown(s)["words"]["mechanism"].update(noise_multiplier=99.0),
    "fewer topics": lambda s: shown(s).update(num_topics=1),
    "a text": lambda s: s["documents"].append({"text": "x", "topic": "card", "number": 0}),
}


@pytest.fixture(scope="module")
def saved() -> dict[str, Any]:
    return json.loads(maker().run(progress=False).to_json())  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_of_words_is_seen(saved: dict[str, Any], name: str) -> None:
    assert not verify_report(edited(saved, EDITS[name])).ok


def test_every_check_of_words_is_played_in_an_audit() -> None:
    made = maker(topics=Topics(num_topics=2, pairs=True))
    names = [check.name for check in _checks(Subject.of(made), controls=False)]
    for what in ("topics", "words", "pairs"):
        assert f"{what}: the threshold's chance is charged" in names
    assert "topics: one unit has one, by itself" in names
    assert "rows" not in names
    assert [game.name for game in games_of(Subject.of(made))] == [
        "one word that others hold: thresholded_gaussian, add_remove"
    ]


class TestNeighbours(WordNeighbourContract):
    """Topics, words and their weights are what the noise decides; all else is the same for all records."""

    # So little that noise lets a word of six units pass with a chance of 1e-9; at epsilon 4 it is .9 %.
    designs: ClassVar[Any] = {
        "words": {"topics": Topics(num_topics=2), "epsilon": 0.1},
        "keywords": {"topics": Topics(VOCABULARY, 2, min_units=10**6)},
        "replaced": {"topics": Topics(num_topics=2, pairs=True), "epsilon": 0.1, "adjacency": "replace_one"},
    }
    left_out: ClassVar[Any] = ("topics", "topic_words")

    @classmethod
    def scene(cls, texts: tuple[str, ...], *, design: str, path: Path, users: str | None) -> Any:
        del path
        options = dict(cls.designs[design])
        budget = house(store=(store := InMemoryStore()), adjacency=options.pop("adjacency", "add_remove"))
        records = owned([{"text": text} for text in texts], users)
        private = PrivateExamples(records, unit_key=None if users is None else "user", public_size=600)
        made = maker(budget, private, component="one", **options)
        return SimpleNamespace(store=store, budget=budget, made=made, private=private)

    @classmethod
    def public(cls, made: Any, found: Any) -> Any:
        del found
        return made.share.remaining(made.plan.topic_template)
