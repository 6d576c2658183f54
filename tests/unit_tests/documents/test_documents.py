"""Synthetic documents as a user makes them: priced whole, paid before they look, released once, kept if stopped."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.document_loaders import BaseLoader
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore

from langchain_dpicl import (
    Budget,
    DocumentSynthesizer,
    PrivacyBudgetExceededError,
    PrivateExamples,
    SyntheticDocuments,
    documents,
    get_privacy_budget_callback,
    verify_report,
)
from langchain_dpicl.backends.fake import FakeBackend, word_copier
from langchain_dpicl.backends.rows.neighbour_rows import LocalEmbeddings
from langchain_dpicl.discovery import public_vocabulary
from langchain_dpicl.exceptions import (
    ConfigurationError,
    ModelCallError,
    NoisyPlanWarning,
    PrivacyBudgetError,
    PrivacyBudgetMismatchError,
    RecordError,
    RunInterruptedError,
)
from langchain_dpicl.options import Decoding, GenerationTask, Noise, OpenLabel, Rows, Topics
from langchain_dpicl.privacy.extensions.value_counts import (
    TOPIC_TEMPLATE,
    GaussianCountMechanism,
    TopicExamples,
    TopicSplit,
    UnitKeywords,
)
from langchain_dpicl.privacy.ledger import budget as ledger
from langchain_dpicl.privacy.ledger.shares import Reservation
from langchain_dpicl.privacy.mechanisms.randomness import SecureRandom
from langchain_dpicl.privacy.private_examples import Pool
from langchain_dpicl.released.documents import SyntheticText, release_id
from langchain_dpicl.runs.release_run import RunJournal
from langchain_dpicl.stores import SQLiteStore
from langchain_dpicl.tasks import GenerationTemplate
from tests.canary import locals_in
from tests.contracts.release_run import entries_in
from tests.sealed_files import rechained

CANARY = "canary-7f3a"
NOTES = ["my card was declined"] * 300 + ["the transfer is late"] * 200 + [f"a boat {CANARY}"]
VOCABULARY = ("boat", "card", "film", "transfer")
WORDS = [" my", " card", " was", " declined", " the", " transfer", " is", " late"]


def engine(words: list[str] | None = None) -> FakeBackend:
    return FakeBackend(word_copier(WORDS if words is None else words), vocabulary=WORDS if words is None else words)


def house(**limits: Any) -> Budget:
    return Budget(**{"epsilon": 8.0, "delta": 1e-6, **limits})


TOPICS = Topics(VOCABULARY, 3, min_units=100)  # beyond 8 deviations of the noise
# So many keywords of a unit that Gaussian noise deviates less.
WIDE = TOPICS.replace(vocabulary=(*VOCABULARY, *(f"word{place}" for place in range(60))), keywords_per_unit=60)
ALL = Decoding(candidates="all")
DEAL = Rows(slots=10, sampling="disjoint")


def maker(budget: Any = None, notes: Any = NOTES, **options: Any) -> DocumentSynthesizer:
    given = {
        "llm": engine(),
        "topics": TOPICS,
        "documents_per_topic": 2,
        "max_tokens": 3,
        "epsilon": 6.0,
        "rows": Rows(units=10),
        "decoding": ALL,
        **options,
    }
    private = notes if isinstance(notes, PrivateExamples) else PrivateExamples(notes, public_size=600)
    return DocumentSynthesizer.from_private_examples(private, budget=house() if budget is None else budget, **given)


class TestWhatIsReleased:
    def test_topics_are_the_keywords_of_most_units_and_texts_are_written_for_each(self) -> None:
        made = maker()
        found = made.run(progress=False)
        assert [topic for topic, _ in found.topics] == ["card", "transfer"]
        assert abs(dict(found.topics)["card"] - 300) < 60
        assert [(text.topic, text.number) for text in found.texts] == [
            ("transfer", 0),
            ("transfer", 1),
            ("card", 0),
            ("card", 1),
        ]
        assert all(text.text for text in found.texts)
        assert CANARY not in found.to_json()
        assert set(made.counts) == set(VOCABULARY)
        assert made.is_finished

    def test_a_topic_that_too_few_units_hold_gets_no_text(self) -> None:
        assert [topic for topic, _ in maker(topics=TOPICS.replace(min_units=250)).run(progress=False).topics] == [
            "card"
        ]
        nothing = maker(topics=TOPICS.replace(min_units=2_000)).run(progress=False)
        assert nothing.topics == nothing.texts == ()
        assert verify_report(nothing).ok

    def test_two_streams_side_by_side_yield_each_document_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = maker()
        other = made.stream(progress=False)
        between: list[Any] = []

        def show(self: Any, bar: Any) -> None:
            if not between:  # the other stream writes one while this one is about to yield its own
                between.append(None)
                between[0] = next(other)

        monkeypatch.setattr(type(made), "_show", show)
        found = [*made.stream(progress=False), *between, *other]
        assert sorted(str(each.id) for each in found) == sorted(str(each.id) for each in made.result.documents)

    def test_streams_and_awaits(self) -> None:
        made = maker()
        streamed = list(made.stream(progress=False))
        assert sorted(each.metadata["topic"] for each in streamed) == ["card", "card", "transfer", "transfer"]
        assert {each.id for each in streamed} == {each.id for each in made.result.documents}

        async def awaited() -> tuple[SyntheticDocuments, list[Document]]:
            other = await DocumentSynthesizer.afrom_private_examples(
                PrivateExamples(NOTES, public_size=600),
                llm=engine(),
                topics=Topics(VOCABULARY, 2),
                budget=house(),
                epsilon=6.0,
                documents_per_topic=1,
                max_tokens=2,
                decoding=ALL,
            )
            return await other.arun(progress=False), [each async for each in other.astream(progress=False)]

        found, again = asyncio.run(awaited())
        assert len(found) == 2
        assert again == []

    def test_the_rarest_topic_of_a_unit_is_its_own(self) -> None:
        both = ["my card was declined"] * 300 + ["my card transfer is late"] * 200
        made = maker(notes=both)
        made.run(progress=False)
        pool = made._private._pool("topic 1", ledger_id=made._budget.ledger_id)
        assert {record["topic"] for place in range(pool.num_units) for record in pool.records(place)} == {"transfer"}

    def test_removed_units_count_nothing_and_are_in_no_text(self) -> None:
        private = PrivateExamples(NOTES, public_size=600)
        for place in range(len(NOTES)):
            private.remove(place)
        with pytest.warns(NoisyPlanWarning, match=r"no topic was found.*units hold it. The result is empty, and paid"):
            assert maker(notes=private).run(progress=False).topics == ()

    def test_a_unit_casts_no_more_than_its_keywords_however_much_it_writes(self) -> None:
        records = [{"text": "card transfer film boat", "user": "one"}] * 500
        private = PrivateExamples(records, unit_key="user", records_per_unit=500, public_size=600)
        made = maker(notes=private, topics=TOPICS.replace(keywords_per_unit=2))
        assert made.plan.topics.rule.of(records) == ("boat", "card")
        assert made.plan.topics.l1_sensitivity == 2
        assert made.run(progress=False).topics == ()

    @pytest.mark.parametrize(
        "writing",
        [{"rows": DEAL}, {"rows": Rows(units=10, redraw_every="run")}, {"noise": "gaussian"}],
        ids=["disjoint", "run", "gaussian"],
    )
    def test_texts_are_written_by_every_design(self, writing: dict[str, Any]) -> None:
        found = maker(**writing).run(progress=False)
        assert len(found) == 4
        assert verify_report(found).ok

    @pytest.mark.parametrize(("topics", "noise"), [(TOPICS, "discrete_laplace"), (WIDE, "gaussian")])
    def test_both_noises_are_verified(self, topics: Topics, noise: str) -> None:
        made = maker(topics=topics)
        assert made.plan.topics.mechanism.name == noise
        found = made.run(progress=False)
        assert verify_report(found).ok
        assert verify_report(found.to_json()).epsilon == pytest.approx(made.plan.epsilon)


class TestWhatIsPaid:
    def test_one_share_is_set_aside_before_anything_is_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[float] = []
        read = Pool.records

        def spying(self: Pool, position: int) -> Any:
            seen.append(budget.remaining_epsilon)
            return read(self, position)

        monkeypatch.setattr(Pool, "records", spying)
        budget = house()
        made = maker(budget)
        assert budget.remaining_epsilon == 2.0
        assert not seen
        made.run(progress=False)
        assert set(seen) == {2.0}
        assert made.plan.epsilon <= 6.0

    def test_neighbours_differ_in_nothing_but_what_is_released(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without the noise, so that both release the same topics: calls, tickets and report are the same then."""
        monkeypatch.setattr(SecureRandom, "geometric", lambda self, scale: 0)
        walked: list[Any] = []
        for notes in (NOTES, [*NOTES, f"a film {CANARY}"], NOTES[:-1], [*NOTES, "\x00{card}"], [*NOTES[:-1], ""]):
            llm, budget = engine(), house()
            made = maker(budget, notes, llm=llm, topics=TOPICS.replace(keywords_per_unit=1), component="store")
            made.run(progress=False)
            shares = [{**share, "sealed_at": ""} for share in budget.report().to_dict()["shares"]]
            left = [made.share.remaining(each.template, label=each.label) for each in made.plan.tickets()]
            walked.append((llm.calls["public"], made.topics[1:], shares, left))
        assert all(each == walked[0] for each in walked)

    def test_topics_run_in_parallel_and_texts_compose(self) -> None:
        few, many = maker(topics=TOPICS.replace(num_topics=2)).plan, maker(topics=TOPICS.replace(num_topics=6)).plan
        assert few.generation.noise_multiplier < many.generation.noise_multiplier * 1.5  # rates differ, not the count
        wide = (
            maker(notes=PrivateExamples(NOTES, public_size=200), topics=TOPICS.replace(num_topics=2)).plan,
            maker(topics=TOPICS.replace(num_topics=6)).plan,
        )
        assert wide[0].generation.noise_multiplier == wide[1].generation.noise_multiplier
        longer = maker(topics=TOPICS.replace(num_topics=6), documents_per_topic=4).plan
        assert longer.generation.noise_multiplier > wide[0].generation.noise_multiplier

    def test_the_histogram_is_released_once_in_the_life_of_a_ledger(self) -> None:
        budget = house()
        private = PrivateExamples(NOTES, public_size=600)
        first = maker(budget, private, component="store")
        first.run(progress=False)
        second = maker(budget, private, component="store")
        with pytest.raises(PrivacyBudgetExceededError):
            second.run(progress=False)

    def test_a_joint_plan_with_another_component_costs_less_than_alone(self) -> None:
        budget, private = house(), PrivateExamples(NOTES, public_size=600)
        with budget.plan():
            one = maker(budget, private, epsilon=4.0)
            other = maker(budget, private, epsilon=4.0)
        assert budget.remaining_epsilon > 0.0
        found = one.run(progress=False)
        other.run(progress=False)
        assert verify_report(found).ok

    def test_two_stores_of_one_data_set_add_up(self) -> None:
        budget = house()
        private = PrivateExamples(NOTES, public_size=600)
        maker(budget, private, epsilon=4.0).run(progress=False)
        other = maker(budget, private, epsilon=3.0)
        assert other.run(progress=False).report["component"] == "documents-2"
        with pytest.raises(PrivacyBudgetExceededError):
            maker(budget, private, epsilon=2.0)
        assert verify_report(budget.report()).ok

    @pytest.mark.traced
    def test_a_histogram_that_fails_stays_paid_and_says_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = maker()

        def broken(*_: Any) -> Any:
            raise ValueError(CANARY)

        monkeypatch.setattr(UnitKeywords, "of", broken)
        with pytest.raises(ModelCallError) as caught:
            made.run(progress=False)
        assert CANARY not in str(caught.value)
        assert caught.value.run is made  # type: ignore[attr-defined]
        assert made.share.remaining(TOPIC_TEMPLATE) == 0
        assert made.topics == ()

    def test_a_stop_before_the_histogram_gives_its_ticket_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def stop(*_: Any, **__: Any) -> Any:
            raise KeyboardInterrupt

        made = maker()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("langchain_dpicl.documents.release_counts", stop)
            made.run(progress=False)
        assert made.share.remaining(TOPIC_TEMPLATE) == 1
        assert made.run(progress=False).topics
        assert made.share.remaining(TOPIC_TEMPLATE) == 0
        assert made.share.committed(TOPIC_TEMPLATE) == 1

    def test_a_split_that_fails_is_tried_again_for_free(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = maker()
        monkeypatch.setattr("langchain_dpicl.privacy.extensions.redeclared.split_units", None)
        with pytest.raises(RecordError):
            made.run(progress=False)
        monkeypatch.undo()
        assert made.run(progress=False).topics

    def test_the_budget_is_found_in_the_context(self) -> None:
        with get_privacy_budget_callback(epsilon=6.0, delta=1e-6) as budget:
            DocumentSynthesizer.from_private_examples(
                PrivateExamples([Document("my card")] * 50, public_size=600),
                llm=engine(),
                topics=Topics(("card",), 1),
                documents_per_topic=1,
                epsilon=6.0,
                decoding=ALL,
            )
            assert budget.remaining_epsilon == 0.0


class TestAStop:
    @pytest.mark.traced
    @pytest.mark.parametrize(
        ("owner", "name"),
        [(UnitKeywords, "of"), (GaussianCountMechanism, "release"), (TopicSplit, "of"), (GenerationTemplate, "record")],
        ids=["casting", "noising", "splitting", "rendering"],
    )
    def test_carries_no_frame_with_records_or_counts(
        self, owner: type, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def stop(*_: Any, **__: Any) -> Any:
            raise KeyboardInterrupt

        made = maker(topics=WIDE)
        monkeypatch.setattr(owner, name, stop)
        with pytest.raises(KeyboardInterrupt) as caught:
            made.run(progress=False)
        held = locals_in(caught.value)
        assert not any(text in held for text in (CANARY, "my card was", "array("))
        monkeypatch.undo()
        if made._found.topics:
            assert caught.value.run.run(progress=False).topics  # type: ignore[attr-defined]

    def test_a_loader_that_fails_is_in_no_frame_of_ours_and_one_that_does_not_is_read(self) -> None:
        class Notes(BaseLoader):
            def __init__(self, fails: bool) -> None:
                self.fails = fails

            def lazy_load(self) -> Iterator[Document]:
                yield Document(CANARY, metadata={"source": "one"})
                if self.fails:
                    raise OSError(CANARY)

        with pytest.raises(RecordError) as caught:
            PrivateExamples(Notes(fails=True), public_size=600, unit_key="source")
        assert CANARY not in locals_in(caught.value) + str(caught.value)
        made = maker(notes=PrivateExamples(Notes(fails=False), public_size=600, unit_key="source"))
        assert made._private._pool(None, ledger_id=made._budget.ledger_id).num_units == 1

    def test_documents_that_cannot_be_read_are_in_no_frame_of_ours(self) -> None:
        documents = [Document(CANARY), Document("x", metadata={"source": 1.5})]
        with pytest.raises(RecordError) as caught:
            PrivateExamples(documents, public_size=10, unit_key="source")
        assert CANARY not in locals_in(caught.value) + str(caught.value)


class TestWhatIsKept:
    def test_a_model_that_goes_away_leaves_what_was_released_and_the_run_goes_on(self) -> None:
        # The public call of a token in the third text.
        made = maker(llm=FakeBackend(word_copier(WORDS), vocabulary=WORDS, fail_public_call=8))
        with pytest.raises(RunInterruptedError, match="documents are released") as caught:
            made.run(progress=False)
        assert caught.value.run is made
        assert len(made.result.texts) >= 1
        assert verify_report(made.result).ok
        assert not made.is_finished
        assert len(caught.value.run.run(progress=False)) == 4

    @pytest.mark.parametrize(
        ("owner", "name", "is_kept"),
        [
            (documents, "choose_topics", False),
            (RunJournal, "append", True),
            (Reservation, "commit", True),
            (TopicExamples, "name_topics", True),
        ],
        ids=["released", "saved", "committed", "named"],
    )
    def test_a_process_that_is_killed_has_its_topics_once_they_are_saved(
        self, owner: Any, name: str, is_kept: bool, tmp_path: Path
    ) -> None:
        """Killed right after each step: before the file there is nothing to go on with, from then on everything."""
        path, kept, real = tmp_path / "ledger.db", tmp_path / "kept.json", getattr(owner, name)

        def killed() -> None:
            made = maker(house(store=SQLiteStore.new(path)), checkpoint=kept, component="store")
            setattr(owner, name, lambda *a, **k: (real(*a, **k), os._exit(9)))
            made.run(progress=False)

        child = multiprocessing.get_context("fork").Process(target=killed)
        child.start()
        child.join(60)
        assert child.exitcode == 9
        assert len(entries_in(kept)) == is_kept
        other = maker(Budget.open(SQLiteStore(path)), checkpoint=kept, component="store")
        if not is_kept:
            with pytest.raises(PrivacyBudgetExceededError):
                other.run(progress=False)
            return
        assert [topic for topic, _ in other.topics] == ["card", "transfer"]
        found = other.run(progress=False)
        assert len(found) == 4
        assert verify_report(found).ok

    def test_a_deal_that_is_gone_leaves_out_the_texts_it_was_for(self, tmp_path: Path) -> None:
        path, kept = tmp_path / "ledger.db", tmp_path / "kept.json"
        budget = house(store=SQLiteStore.new(path))
        next(maker(budget, checkpoint=kept, component="store", rows=DEAL).stream(progress=False))
        budget.close()
        ledger._IDENTITIES.clear()
        other = maker(Budget.open(SQLiteStore(path)), checkpoint=kept, component="store", rows=DEAL)
        places = [(text.topic, text.number) for text in other.run(progress=False).texts]
        assert places == [("transfer", 0), ("card", 0), ("card", 1)]

    def test_a_file_of_topics_that_nobody_released_is_refused(self, tmp_path: Path) -> None:
        """A file can be wrong: it names no topic before the histogram, nor one that this cannot have released."""
        kept, budget, private = tmp_path / "kept.json", house(), PrivateExamples(NOTES, public_size=600)
        made = maker(budget, private, checkpoint=kept, component="store")
        made._journal.append({"topics": [["card", 300]]})  # type: ignore[union-attr]
        with pytest.raises(ConfigurationError, match="a ledger on which none was"):
            maker(budget, private, checkpoint=kept, component="store")
        kept.unlink()
        maker(budget, private, checkpoint=kept, component="store").run(progress=False)
        for topic, count in (("canary", 300), ("card", 99)):
            kept.write_bytes(rechained(kept.read_bytes(), [{"topics": [[topic, count]]}]))
            with pytest.raises(ConfigurationError, match="topics of the vocabulary, of 100 units or more"):
                maker(budget, private, component="store", checkpoint=kept)

    def test_a_finished_run_needs_its_checkpoint_no_more(self, tmp_path: Path) -> None:
        kept = tmp_path / "kept.json"
        run = maker(house(), checkpoint=kept, component="store")
        found = run.run(progress=False)
        kept.unlink()
        assert run.run(progress=False) == found
        assert list(run.stream(progress=False)) == []
        assert not kept.exists()

    def test_texts_whose_tickets_are_gone_are_left_out(self, tmp_path: Path) -> None:
        path, kept = tmp_path / "ledger.db", tmp_path / "kept.json"
        budget = house(store=SQLiteStore.new(path))
        made = maker(budget, checkpoint=kept, component="store")
        next(made.stream(progress=False))
        made.share.reserve("text: 1 token on one sample", label="topic 2", count=4)  # a process that was killed
        budget.close()
        ledger._IDENTITIES.clear()
        other = maker(Budget.open(SQLiteStore(path)), checkpoint=kept, component="store")
        places = [(text.topic, text.number) for text in other.run(progress=False).texts]
        assert places == [("transfer", 0), ("transfer", 1), ("card", 0)]  # the last one is two tokens long

    @pytest.mark.parametrize("words", [0, 8])
    def test_a_store_whose_texts_are_all_gone_is_an_error_unless_it_has_words(self, words: int, tmp_path: Path) -> None:
        path, kept = tmp_path / "ledger.db", tmp_path / "kept.json"
        given: dict[str, Any] = {"checkpoint": kept, "component": "store", "topics": TOPICS.replace(words=words)}
        budget = house(store=SQLiteStore.new(path))
        made = maker(budget, **given, llm=FakeBackend(word_copier(WORDS), vocabulary=WORDS, fail_public_call=1))
        with pytest.raises(RunInterruptedError):
            made.run(progress=False)
        for place in ("topic 1", "topic 2"):  # a process that was killed
            made.share.reserve("text: 1 token on one sample", label=place, count=6)
        budget.close()
        ledger._IDENTITIES.clear()
        other = maker(Budget.open(SQLiteStore(path)), **given)
        lost = pytest.raises(
            PrivacyBudgetExceededError, match="4 documents, found none; remaining tickets: 6"
        )  # of a third topic
        with contextlib.nullcontext() if words else lost:
            found = other.run(progress=False)
            assert found.words
            assert not found.texts
        assert len(other.result.topics) == 2

    def test_a_checkpoint_with_other_topics_is_refused_by_the_ledger(self, tmp_path: Path) -> None:
        path, kept = tmp_path / "ledger.db", tmp_path / "kept.json"
        budget = house(store=SQLiteStore.new(path))
        maker(budget, checkpoint=kept, component="store").run(progress=False)
        budget.close()
        ledger._IDENTITIES.clear()
        kept.write_bytes(rechained(kept.read_bytes(), [{"topics": [["boat", 199]]}]))
        with pytest.raises(PrivacyBudgetMismatchError, match="topics named"):
            maker(Budget.open(SQLiteStore(path)), checkpoint=kept, component="store")

    @pytest.mark.parametrize(
        ("place", "changed"),
        [
            (0, {"topics": [["card", 300], ["film", 300], ["boat", 300], ["transfer", 300]]}),
            (0, {"topics": [["card"]]}),
            (0, {"topics": [["card", "many"]]}),
            (0, {"topics": 7}),
            (1, {"label": "topic 3"}),
            (1, {"label": []}),
            (1, {"number": 9}),
            (1, {"values": {"text": 3}}),
            (1, {"values": {"more": "x"}}),
            (1, {"values": 7}),
            (1, {"segment": 2}),
            (1, {"segment": 1, "values": {}}),
            (1, {"at": 1}),
            (1, {"tokens": [["bytes", "card"]]}),
            (1, {"tokens": [["text", 3]]}),
            (1, {"spent": [[0, 1]]}),
            (1, {"spent": [[0, 1, -1]]}),
            (1, {"done": ...}),
        ],
    )
    def test_a_checkpoint_of_another_form_is_refused(self, tmp_path: Path, place: int, changed: dict[str, Any]) -> None:
        kept = tmp_path / "kept.jsonl"
        budget, private = house(), PrivateExamples(NOTES, public_size=600)
        maker(budget, private, checkpoint=kept, component="store").run(progress=False)
        entries = entries_in(kept)
        entries[place] = {key: value for key, value in {**entries[place], **changed}.items() if value is not ...}
        kept.write_bytes(rechained(kept.read_bytes(), entries))
        with pytest.raises(ConfigurationError):
            maker(budget, private, checkpoint=kept, component="store")

    def test_a_checkpoint_needs_a_place(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="checkpoint"):
            maker(checkpoint=tmp_path / "nowhere" / "kept.json")
        with pytest.raises(ConfigurationError, match="checkpoint"):
            maker(checkpoint=7)


class TestWhatIsRefused:
    @pytest.mark.traced
    @pytest.mark.parametrize(
        "wrong",
        [
            lambda: {"topics": "card"},
            lambda: {"topics": []},
            lambda: {"topics": ["card", "Card"]},
            lambda: {"topics": TOPICS.replace(num_topics=2_000)},
            lambda: {"max_tokens": 0},
            lambda: {"documents_per_topic": -1},
            lambda: {"documents_per_topic": 0},  # with rows and decoding of texts
            lambda: {"documents_per_topic": 0, "topics": TOPICS.replace(words=0)},
            lambda: {"llm": None},
            lambda: {"deny": ("card",)},  # no words leave
            lambda: {"topics": TOPICS.replace(pairs=True)},
            lambda: {"topics": TOPICS.replace(review=tuple)},
            lambda: {"topics": TOPICS.replace(vocabulary=None)},  # min_units
            lambda: {"task": GenerationTask(record_prompt="{text} and {topic}")},
            lambda: {"task": GenerationTask(open_label=OpenLabel("topic"))},
            lambda: {"task": GenerationTask(hints=("Shout.",))},
            lambda: {"noise": "loud"},
            lambda: {"strange": 1},
            lambda: {"epsilon": None},
            lambda: {"noise": Noise(multiplier=0.1)},
            lambda: {"rows": "slots"},
            lambda: {"rows": Rows(slots=10, sampling="fixed")},
            lambda: {"rows": Rows(slots=10, sampling="partition")},
            lambda: {"decoding": "greedy"},
        ],
    )
    def test_public_faults_are_refused_before_anything_is_bound_or_spent(
        self, wrong: Callable[[], dict[str, Any]]
    ) -> None:
        budget, private = house(), PrivateExamples(NOTES, public_size=600)
        with pytest.raises(ConfigurationError):
            maker(budget, private, **wrong())
        assert budget.remaining_epsilon == 8.0
        assert private._ledger_id is None

    @pytest.mark.parametrize("num_topics", [1, 2])
    def test_a_sample_of_fixed_size_of_topics_whose_sizes_are_private(self, num_topics: int) -> None:
        """A unit that is replaced may leave its topic: texts of 500 units and of 499 would be distinguished at once."""
        budget = house(adjacency="replace_one")
        private = PrivateExamples(NOTES[:500], public_size=500)
        with pytest.raises(ConfigurationError, match="no topic has a known size"):
            maker(
                budget,
                private,
                rows=Rows(slots=10, sampling="fixed"),
                topics=TOPICS.replace(num_topics=num_topics),
            )
        assert budget.remaining_epsilon == 8.0
        assert private._ledger_id is None

    def test_what_are_no_private_examples(self) -> None:
        with pytest.raises(ConfigurationError, match="PrivateExamples"):
            DocumentSynthesizer.from_private_examples(["text"], llm=engine(), documents_per_topic=1, budget=house())  # type: ignore[arg-type]
        with pytest.raises(RecordError):
            PrivateExamples([7], public_size=10)

    def test_a_share_that_does_not_fit(self) -> None:
        with pytest.raises(PrivacyBudgetError):
            maker(house(epsilon=1.0))


def released() -> SyntheticDocuments:
    texts = (
        SyntheticText("my card was declined", "card", 0),
        SyntheticText("card lost", "card", 1),
        SyntheticText("the transfer is late", "transfer", 0),
    )
    return SyntheticDocuments(texts, (("card", 300), ("transfer", 200)), {"private": True, "epsilon": 1.0}, {})


class TestTheReleasedStore:
    def test_goes_into_any_vector_store_once(self) -> None:
        store = InMemoryVectorStore(LocalEmbeddings())
        assert released().to_vector_store(store) is store
        released().to_vector_store(store)
        assert len(store.store) == 3
        assert asyncio.run(released().ato_vector_store()).similarity_search("a late transfer", k=1)[0].metadata == {
            "topic": "transfer",
            "number": 0,
            "release": released().release_id,
        }
        assert released().filtered(lambda _: False).to_vector_store().similarity_search("x") == []
        assert asyncio.run(released().filtered(lambda _: False).ato_vector_store()).similarity_search("x") == []

    @pytest.mark.parametrize("question", ["", "???", "\U0001f44d"])
    def test_nothing_is_near_a_question_without_a_word(self, question: str) -> None:
        for search in ({}, {"search_type": "mmr"}):
            retriever = released().as_retriever(**search)
            assert retriever.invoke(question) == asyncio.run(retriever.ainvoke(question)) == []
            assert len(retriever.invoke("card")) == 3

    @pytest.mark.parametrize("search", ["similarity", "mmr"])
    def test_no_document_without_a_word_is_near_a_question(self, search: str) -> None:
        store = released().to_vector_store()
        store.add_documents([Document("?!", id="wordless")])
        assert [found.id for found in store.search("card", search, filter=lambda one: one.id == "wordless")] == []
        store.delete([one for one in store.store if one != "wordless"])
        assert store.search("card", search) == []

    @pytest.mark.parametrize("is_asked", [True, False])
    def test_a_store_that_takes_an_id_once_is_given_what_it_lacks(self, is_asked: bool) -> None:
        """As FAISS does; one that cannot say what it holds is given everything, as before."""

        class Once(InMemoryVectorStore):
            def add_documents(self, documents: list[Document], ids: Any = None, **given: Any) -> list[str]:
                if is_asked and set(ids) & set(self.store):
                    raise ValueError("an id stands there already")
                return super().add_documents(documents, ids=ids, **given)

            async def aadd_documents(self, documents: list[Document], ids: Any = None, **given: Any) -> list[str]:
                return self.add_documents(documents, ids=ids, **given)

            def get_by_ids(self, ids: Any, /) -> list[Document]:
                if not is_asked:
                    raise NotImplementedError
                return super().get_by_ids(ids)

            async def aget_by_ids(self, ids: Any, /) -> list[Document]:
                return self.get_by_ids(ids)

        store, few = Once(LocalEmbeddings()), released().filtered(lambda found: found.metadata["number"] == 0)
        few.to_vector_store(store)
        assert len(store.store) == 2
        for _ in range(2):
            released().to_vector_store(store)
            asyncio.run(released().ato_vector_store(store))
        assert len(store.store) == 3

    def test_is_named_by_what_it_is_of_and_by_its_topics(self) -> None:
        found = released()
        named = {"ledger_id": "a", "component": "store", "dataset_id": "notes"}
        others = [{**named, name: "another"} for name in named]
        assert len({release_id(told, found.topics) for told in (named, *others)}) == 4
        counted_anew = dataclasses.replace(found, topics=(("card", 301), ("transfer", 200)))
        assert counted_anew.release_id != found.release_id  # as of two runs on the same blocks of a stream

    def test_has_a_stock_retriever(self) -> None:
        retriever = released().as_retriever(search_kwargs={"k": 1})
        assert retriever.invoke("my card is lost")[0].page_content == "card lost"

    def test_is_filtered_for_free(self) -> None:
        kept = released().filtered(lambda document: "declined" not in document.page_content)
        assert [text.text for text in kept.texts] == ["card lost", "the transfer is late"]
        assert kept.release_id == released().release_id

    @pytest.mark.parametrize(
        "wrong",
        [
            {"texts": "text"},
            {"texts": ("text",)},
            {"texts": (SyntheticText("x", "film", 0),)},
            {"texts": (SyntheticText("x", "card", 0), SyntheticText("y", "card", 0))},
            {"topics": (("card", 1), ("card", 2))},
            {"topics": ("card",)},
            {"topics": (("card", "many"),)},
            {"report": {"epsilon": -1}},
            {"plan": 7},
        ],
    )
    def test_refuses_what_is_no_release(self, wrong: dict[str, Any]) -> None:
        state: dict[str, Any] = {
            "texts": released().texts,
            "topics": released().topics,
            "report": released().report,
            "plan": {},
        }
        with pytest.raises(ConfigurationError):
            SyntheticDocuments(**{**state, **wrong})

    def test_refuses_other_stores(self) -> None:
        with pytest.raises(ConfigurationError, match="vector store"):
            released().to_vector_store(InMemoryVectorStore)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="embedding"):
            released().to_vector_store(InMemoryVectorStore(LocalEmbeddings()), embedding=LocalEmbeddings())
        with pytest.raises(ConfigurationError, match="documents"):
            SyntheticDocuments.from_json(released().to_json().replace('"number": 0', '"other": 0'))
        with pytest.raises(ConfigurationError, match="text"):
            SyntheticText(7, "card", 0)  # type: ignore[arg-type]

    def test_leaves_out_texts_that_say_nothing(self) -> None:
        found = released()
        texts = (*found.texts, SyntheticText(" ", "transfer", 1))
        assert len(SyntheticDocuments(texts, found.topics, found.report, {}).documents) == 3


class TestThePublicVocabulary:
    def test_holds_words_of_public_texts_or_of_the_embedded_model(self) -> None:
        assert public_vocabulary(["Lost card", "a lost phone"], size=2) == ("lost", "phone")
        assert public_vocabulary(["The company's 3 new TV shows, show_s shows_, Th\u1ebf gi\u1edbi"]) == (
            "company",
            "shows",
            "gi\u1edbi",
            "show",
            "new",
            "th\u1ebf",
        )
        words = public_vocabulary(size=300)
        assert len(set(words)) == 300
        assert {"card", "money"} <= set(words)
        assert not {"with", "the"} & set(words)
        assert public_vocabulary(size=300) == words
        UnitKeywords("text", 10, words)

    @pytest.mark.parametrize(
        ("page", "record"),
        [
            ("\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645", None),  # Persian, with a joiner
            ("Tax\u2060es", None),
            ("loan_rate", None),
            ("x" * 201 + " loan", None),
            ("Konto\u00adgeb\u00fchr", "kontogeb\u00fchr"),
        ],
        ids=ascii,
    )
    def test_its_keywords_are_found_where_the_words_of_the_page_are(self, page: str, record: str | None) -> None:
        found = public_vocabulary([page])
        assert set(UnitKeywords("text", 9, found).of([{"text": record or page}])) == set(found)

    def test_refuses_public_faults(self) -> None:
        for wrong in ({"size": 0}, {"texts": ["the"]}, {"texts": "text"}, {"texts": ["7 TV"]}, {"texts": ["card", 7]}):
            with pytest.raises(ConfigurationError):
                public_vocabulary(**wrong)
        for words in (None, "the", 5, [5]):
            with pytest.raises(ConfigurationError, match="stop_words: expected a list of texts, found "):
                public_vocabulary(["a lost card"], stop_words=words)  # type: ignore[arg-type]
