"""Words that leave before the texts of a label, in one share: price, order, what a checkpoint keeps, what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from langchain_dpicl import Budget, DPFewShotPromptTemplate, PrivateExamples, verify_report
from langchain_dpicl.audit.suite import _checks, check_price, check_tickets, games_of
from langchain_dpicl.audit.targets import Subject
from langchain_dpicl.backends.fake import FakeBackend
from langchain_dpicl.exceptions import (
    ConfigurationError,
    DPICLError,
    LedgerUnavailableError,
    ModelCallError,
    PrivacyBudgetExceededError,
    RunInterruptedError,
)
from langchain_dpicl.generation import plan as planning
from langchain_dpicl.generation import synthesizer as rooms
from langchain_dpicl.generation.decoding_loop import MOST_COLUMNS
from langchain_dpicl.generation.grammars import Grammar
from langchain_dpicl.generation.plan import GenerationPlan, Segment, plan_generation, word_shares
from langchain_dpicl.generation.synthesizer import DemonstrationSynthesizer
from langchain_dpicl.options import Decoding, LocalExecutor, LogitNoise, Rows
from langchain_dpicl.planning.share_plan import WORD_SHARE, words_before_texts
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy.accounting.events import ComposedEvent, ParallelEvent
from langchain_dpicl.privacy.extensions.word_release import FIRST_WORDS_TEMPLATE, UnitWords, WordRelease
from langchain_dpicl.privacy.ledger import budget as ledger
from langchain_dpicl.privacy.ledger.store import InMemoryStore
from langchain_dpicl.privacy.ledger.tickets import event_of_tickets
from langchain_dpicl.released.demonstrations import ReleasedDemonstrations
from langchain_dpicl.runs import release_run
from langchain_dpicl.runs.release_run import RunJournal
from langchain_dpicl.stores import SQLiteStore
from tests.canary import locals_in
from tests.contracts.neighbours import WordNeighbourContract, owned
from tests.contracts.release_run import entries_in
from tests.crews import Crew
from tests.sealed_files import edited, rechained, shown
from tests.unit_tests.generation.test_word_tree import api
from tests.unit_tests.streams.test_stream_demonstrations import ENGINE, stream
from tests.unit_tests.streams.test_stream_demonstrations import ledger as windows

CANARY = "canaryvelkor"
LABELS = ("a", "b")
SAID = {"a": "my velda is kilnor", "b": "my orsk is kilnor"}
RECORDS = [{"text": SAID[kind], "kind": kind} for kind in LABELS] * 300 + [{"text": f"a boat {CANARY}", "kind": "a"}]
TRUE = Decoding(released_words=True)


def house(**limits: Any) -> Budget:
    return Budget(**{"epsilon": 300.0, "delta": 1e-6, **limits})


def examples(records: Any = RECORDS) -> PrivateExamples:
    return PrivateExamples(records, label_key="kind", labels=LABELS, public_size=600)


def maker(budget: Any = None, private: Any = None, **options: Any) -> DemonstrationSynthesizer:
    given = {"llm": api(), "epsilon": 100.0, "max_tokens": 2, "rows": Rows(units=20), "decoding": TRUE, **options}
    return DemonstrationSynthesizer.from_private_examples(
        examples() if private is None else private, budget=house() if budget is None else budget, **given
    )


def held(groups: Any) -> dict[str | None, set[str]]:
    return {group.label: {word for word, _ in group.words} for group in groups}


WORDS = {"a": {"velda", "kilnor"}, "b": {"orsk", "kilnor"}}


class TestWhatLeaves:
    def test_words_of_each_label_open_the_vocabulary_of_its_texts(self) -> None:
        made = maker()
        assert made.words == ()
        released = made.run(progress=False)
        assert held(made.words) == WORDS
        assert released.examples[0] == {"text": "velda kilnor", "kind": "a"}
        assert "velda" not in released.examples[1]["text"]
        assert made.plan.candidates == 3 + 1 + MOST_COLUMNS
        assert [group["label"] for group in released.report["released_words"]] == ["a", "b"]
        assert CANARY not in released.to_json()
        assert released.verify().ok
        assert verify_report(made.report).ok
        assert ReleasedDemonstrations.from_json(released.to_json()) == released

    def test_words_of_all_units_where_no_labels_split_them(self) -> None:
        made = maker(private=PrivateExamples([SAID["a"]] * 400, public_size=400))
        assert made.run(progress=False).examples[0]["text"] == "velda kilnor"
        assert held(made.words) == {None: WORDS["a"]}

    @pytest.mark.parametrize(
        "options",
        [
            {"rows": Rows(slots=10, sampling="disjoint"), "shots_per_label": 2},
            {"noise": LogitNoise("clip_and_blend", clip=20.0), "llm": None},
            {"executor": LocalExecutor(max_concurrency=2)},
        ],
    )
    def test_in_every_way_to_write(self, options: dict[str, Any]) -> None:
        if "llm" in options:
            vocabulary = [" a", " the", " of", " vel", "da", " kil", "nor"]
            options = {**options, "llm": FakeBackend(lambda *_: {" a": 0.6, " of": 0.4}, vocabulary=vocabulary)}
        made = maker(**options)
        released = made.run(progress=False)
        assert len(released.examples) == len(LABELS) * made.plan.shots_per_label
        assert held(made.words) == WORDS
        assert released.verify().ok
        assert verify_report(made._budget.report()).ok

    def test_streamed_and_awaited_it_yields_texts_alone(self) -> None:
        made = maker()
        assert [each["kind"] for each in made.stream(progress=False)] == ["a", "b"]
        waited = maker()
        assert asyncio.run(waited.arun(progress=False)).examples[0]["text"] == "velda kilnor"

    def test_a_template_reports_them(self) -> None:
        prompt = DPFewShotPromptTemplate.from_private_examples(
            examples(),
            llm=api(),
            example_prompt="{text} -> {kind}",
            suffix="{input} ->",
            budget=house(),
            epsilon=100.0,
            max_tokens=2,
            rows=Rows(units=20),
            decoding=TRUE,
        )
        assert "velda kilnor" in prompt.format(input="x")
        assert prompt.privacy_report["released_words"][0]["label"] == "a"
        assert prompt.released.verify().ok


def planned(adjacency: Any = "add_remove", **options: Any) -> GenerationPlan:
    given: dict[str, Any] = {"epsilon": 4.0, "delta": 1e-6, "segments": (Segment("text", 10),), **options}
    return plan_generation({"a": 2_000, "b": 2_000}, adjacency=adjacency, words=words_before_texts("text"), **given)


class TestThePlan:
    @pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
    def test_words_and_texts_of_all_labels_are_one_event_within_epsilon(self, adjacency: Any) -> None:
        plan = planned(adjacency)
        event = plan.event()
        assert isinstance(event, ParallelEvent)
        assert [label for label, _ in event.branches] == ["a", "b"]
        assert all(isinstance(branch, ComposedEvent) for _, branch in event.branches)
        assert 3.99 < plan.epsilon <= 4.0
        assert GenerationPlan.rebuild(json.loads(json.dumps(plan.to_dict()))) == plan
        assert plan.words is not None
        branches = 2 if adjacency == "replace_one" else 1
        assert 4.9e-7 < plan.words.failure * branches <= 5e-7
        first = [ticket for ticket in plan.tickets() if ticket.template == FIRST_WORDS_TEMPLATE]
        assert [ticket.label for ticket in first] == ["a", "b"]
        alone = accounting.epsilon_upper_bound(
            event_of_tickets(first, partition="p"), delta=1e-6 * (1 - 1e-6), adjacency=adjacency
        )
        assert alone == pytest.approx(4.0 * WORD_SHARE, rel=1e-3)

    def test_without_words_is_as_before(self) -> None:
        plan = plan_generation({"a": 2_000, "b": 2_000}, epsilon=4.0, delta=1e-6)
        assert "words" not in plan.to_dict()
        assert plan.words_from() is None
        assert word_shares(plan, epsilon=4.0) == []

    def test_shows_the_cliff(self) -> None:
        plan = planned()
        rows = word_shares(plan, epsilon=4.0)
        needed, noise = ([row[name] for row in rows] for name in ("words_from", "noise_multiplier"))
        assert needed[0] is None
        assert needed[1:] == sorted(needed[1:], reverse=True)
        assert noise == sorted(noise)
        assert {row["share"]: row["words_from"] for row in rows}[WORD_SHARE] == plan.words_from()
        assert needed[1] > 4 * needed[4]  # a tenth of epsilon for words: four times the units of a half of it

    def test_words_need_an_epsilon_to_be_a_part_of(self) -> None:
        with pytest.raises(ConfigurationError, match="epsilon"):
            planned(epsilon=None, noise_multiplier=1.0)
        with pytest.raises(ConfigurationError, match="words"):
            plan_generation({None: 100}, epsilon=1.0, delta=1e-6, adjacency="replace_one", words=planned().words)

    def test_every_check_of_words_is_played_in_an_audit(self) -> None:
        made = maker()
        subject = Subject.of(made)
        names = [check.name for check in _checks(subject, controls=False)]
        assert {"words: the threshold's chance is charged", "words: one unit alone", "rows"} <= set(names)
        assert games_of(subject)[0].name == "one word that others hold: thresholded_gaussian, add_remove"
        assert [check(subject).verdict for check in (check_price, check_tickets)] == ["sound"] * 2


def words_not_in_the_event(patch: pytest.MonkeyPatch) -> None:
    """The noise is calibrated on texts alone, and the words are charged to nobody."""
    patch.setattr(
        planning.GenerationPlan, "event", lambda self: event_of_tickets(self.text_tickets(), partition=self.partition)
    )


def words_without_tickets(patch: pytest.MonkeyPatch) -> None:
    """The share is declared without the tickets of words."""
    patch.setattr(planning.GenerationPlan, "tickets", planning.GenerationPlan.text_tickets)


@pytest.mark.parametrize("plant", [words_not_in_the_event, words_without_tickets])
def test_words_that_are_not_in_the_joint_price_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    maker().run(progress=False)
    plant(monkeypatch)
    read = list[int]()
    monkeypatch.setattr(WordRelease, "weights", lambda *_, **__: read.append(1))
    with pytest.raises(DPICLError):
        maker().run(progress=False)
    assert read == []


class TestWhatIsRefused:
    """Before the examples are bound, a share is declared or a call is made."""

    @pytest.mark.parametrize(
        ("options", "named"),
        [
            ({"executor": "crew"}, "executor"),
            ({"decoding": TRUE.replace(grammar=Grammar.regex("[a-z ]+"))}, "grammar"),
        ],
    )
    def test_workers_and_grammars(self, options: dict[str, Any], named: str, tmp_path: Path) -> None:
        if "executor" in options:
            options = {"executor": Crew(lambda: None, num_workers=1)}  # type: ignore[arg-type]
        budget = house(store=SQLiteStore.new(tmp_path / "ledger.db"))
        with pytest.raises(ConfigurationError, match=named):
            maker(budget, component="texts", **options)
        assert [line.kind for line in budget._store.records()] == []
        budget.close()

    def test_streams(self) -> None:
        budget = windows()
        with pytest.raises(ConfigurationError, match="on a stream"):
            DemonstrationSynthesizer.from_private_examples(
                stream().rolling(30, every=7),
                llm=ENGINE,
                budget=budget,
                epsilon=2.0,
                max_tokens=3,
                component="shots",
                decoding=TRUE,
            )
        assert not list(budget.budget._store.records())


class TestWhatIsKept:
    @pytest.fixture
    def places(self, tmp_path: Path) -> Iterator[Any]:
        path, kept, opened = tmp_path / "ledger.db", tmp_path / "kept.jsonl", list[Budget]()
        house(store=SQLiteStore.new(path)).close()

        def start(**options: Any) -> DemonstrationSynthesizer:
            if opened:
                opened.pop().close()
            ledger._IDENTITIES.clear()
            opened.append(Budget.open(SQLiteStore(path)))
            return maker(opened[-1], checkpoint=kept, component="texts", **options)

        yield SimpleNamespace(start=start, kept=kept)
        for budget in opened:
            budget.close()

    def releases(self, patch: pytest.MonkeyPatch) -> list[str]:
        seen, real = list[str](), WordRelease.release

        def release(self: Any, *given: Any, **named: Any) -> Any:
            seen.append("release")
            return real(self, *given, **named)

        patch.setattr(WordRelease, "release", release)
        return seen

    def test_another_process_goes_on_with_the_same_words(self, places: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = self.releases(monkeypatch)
        first = places.start()
        next(first.stream(progress=False))
        again = places.start()
        assert again.words == first.words
        released = again.run(progress=False)
        assert len(released.examples) == 2
        assert len(seen) == len(LABELS)
        assert CANARY not in places.kept.read_text()
        assert released.verify().ok
        assert places.start().is_finished

    def test_a_second_release_after_a_resume_is_found(self, places: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Planted: the words of a checkpoint are forgotten, and nobody asks whether a ticket is left."""
        next(places.start().stream(progress=False))

        def words_once(self: Any, item: Any, template: str, label: Any, events: Any, **how: Any) -> Any:
            item.ticket = self.share.reserve(template, label=label)
            return rooms.release_words(self._private, item.ticket, **how), (item.ticket,)

        monkeypatch.setattr(rooms.DemonstrationSynthesizer, "_restore", lambda self, entry: None)
        monkeypatch.setattr(rooms.DemonstrationSynthesizer, "_words_once", words_once)
        seen = self.releases(monkeypatch)
        with pytest.raises(DPICLError, match="ticket"):
            places.start().run(progress=False)
        assert seen == []

    def test_words_that_were_not_released_are_in_no_checkpoint(
        self, places: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Planted: the run stores the sums of all words beside those that passed."""
        places.start().run(progress=False)
        assert CANARY not in places.kept.read_text()
        places.kept.unlink()
        real, summed = WordRelease.weights, dict[str, int]()

        def weights(self: Any, *given: Any, **named: Any) -> Any:
            summed.update(found := real(self, *given, **named))
            return found

        def record(self: Any, entry: Any, *tickets: Any, **named: Any) -> None:
            kept = {**entry, "words": [*entry["words"], *summed.items()]} if "words_of" in entry else entry
            release_run.ReleaseRun._record(self, kept, *tickets, **named)

        monkeypatch.setattr(WordRelease, "weights", weights)
        monkeypatch.setattr(DemonstrationSynthesizer, "_record", record)
        maker(checkpoint=places.kept, component="others").run(progress=False)
        assert CANARY in places.kept.read_text()

    def test_words_whose_ticket_burnt_without_a_result_are_left_out(
        self, places: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        real, runs = WordRelease.weights, list[int]()

        def once(self: Any, *given: Any, **named: Any) -> Any:
            runs.append(1)
            if len(runs) == 1:
                raise RuntimeError(CANARY)
            return real(self, *given, **named)

        monkeypatch.setattr(WordRelease, "weights", once)
        made = places.start()
        with pytest.raises((ModelCallError, RunInterruptedError)) as caught:
            made.run(progress=False)
        assert CANARY not in str(caught.value) + locals_in(caught.value)
        again = places.start()  # as a process that was killed between ticket and file
        released = again.run(progress=False)
        assert held(again.words) == {"a": set(), "b": WORDS["b"]}
        assert [each["kind"] for each in released.examples] == ["a", "b"]
        assert "velda" not in released.examples[0]["text"]
        assert released.verify().ok
        last = places.start()
        last.run(progress=False)
        assert last.words == again.words
        said = "texts: the words before texts (a) are left out: their ticket was lost, or used by another run."
        assert [text for text in caplog.messages if "left out" in text] == [said]

    def test_the_same_call_after_an_interruption_writes_no_texts_without_the_words_that_were_paid_for(self) -> None:
        budget, private, asked = house(), PrivateExamples([SAID["a"]] * 400, public_size=400), {"component": "shots"}
        failing = api(fail_public_call=1)
        with pytest.raises(RunInterruptedError) as caught:
            maker(budget, private, llm=failing, **asked).run(progress=False)
        with pytest.raises(PrivacyBudgetExceededError, match=r"'shots': expected .*words.*error\.run"):
            maker(budget, private, **asked).run(progress=False)
        assert caught.value.run.run(progress=False).examples[0]["text"] == "velda kilnor"

    def test_a_run_whose_reservation_was_charged_without_an_answer_goes_on_without_words(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = maker(house(), PrivateExamples([SAID["a"]] * 400, public_size=400))
        reserve = type(run.share).reserve

        def unanswered(share: Any, template: str, **options: Any) -> Any:
            reserve(share, template, **options)
            raise LedgerUnavailableError("no word came whether it stands")

        with monkeypatch.context() as patch, pytest.raises(LedgerUnavailableError):
            patch.setattr(type(run.share), "reserve", unanswered)
            run.run(progress=False)
        assert run.run(progress=False).report["released_words"] == [{"label": None, "pairs": [], "words": []}]

    def test_a_run_whose_ticket_another_took_meanwhile_writes_no_texts_without_words(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        budget, private = house(), PrivateExamples([SAID["a"]] * 400, public_size=400)
        run, other = (maker(budget, private, component="same") for _ in range(2))
        reserve = type(run.share).reserve

        def late(share: Any, template: str, **options: Any) -> Any:
            reserve(other.share, template, **options)
            return reserve(share, template, **options)

        with monkeypatch.context() as patch, pytest.raises(PrivacyBudgetExceededError):
            patch.setattr(type(run.share), "reserve", late)
            run.run(progress=False)
        with pytest.raises(PrivacyBudgetExceededError, match="used by another run"):
            run.run(progress=False)

    def test_a_checkpoint_that_was_lost_writes_no_texts_without_the_words_that_were_paid_for(self, places: Any) -> None:
        next(places.start().stream(progress=False))
        places.kept.rename(places.kept.with_name("moved.jsonl"))
        with pytest.raises(PrivacyBudgetExceededError, match=r"'texts': expected .*words.*checkpoint"):
            places.start().run(progress=False)

    def test_a_stop_while_units_cast_carries_no_record(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def stop(*_: Any, **__: Any) -> Any:
            raise KeyboardInterrupt

        made = maker()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as caught:
            patch.setattr(UnitWords, "of", stop)
            made.run(progress=False)
        assert not any(text in locals_in(caught.value) for text in (CANARY, SAID["a"]))
        assert held(made.run(progress=False).report and made.words)["b"] == WORDS["b"]

    def test_words_that_could_not_be_stored_are_stored_by_the_next_call(
        self, places: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real, is_full = RunJournal.flush, [True]

        def flush(self: Any) -> None:
            if is_full and b"words_of" in self._pending:
                is_full.clear()
                raise OSError(28, "full")
            real(self)

        monkeypatch.setattr(RunJournal, "flush", flush)
        made = places.start()
        with pytest.raises((OSError, RunInterruptedError)):
            made.run(progress=False)
        made.run(progress=False)
        assert held(made.words) == WORDS
        assert places.start().words == made.words

    def test_a_stop_between_the_words_and_their_line_leaves_a_checkpoint_to_go_on_from(
        self, places: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made, seen = places.start(), self.releases(monkeypatch)

        def stop(*_: Any, **__: Any) -> Any:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(DemonstrationSynthesizer, "_record", stop)
            made.run(progress=False)
        made.run(progress=False)
        assert held(made.words) == WORDS
        again = places.start()
        assert again.words == made.words
        assert again.is_finished
        assert len(seen) == len(LABELS)

    @pytest.mark.parametrize(
        "changed",
        [
            {"words_of": "c"},
            {"words_of": 7},
            {"words_of": "b"},
            {"words": [["velda", 1.0]]},
            {"words": [["the", 300.0]]},
            {"words": [["velda", "many"]]},
            {"words": 7},
            None,
        ],
    )
    def test_a_checkpoint_that_nobody_released_is_refused(self, tmp_path: Path, changed: Any) -> None:
        kept, budget, private = tmp_path / "kept.jsonl", house(), examples()
        maker(budget, private, checkpoint=kept, component="texts").run(progress=False)
        entries = entries_in(kept)
        if changed is None:  # texts whose words are missing
            entries = [entry for entry in entries if "words_of" not in entry]
        else:
            entries[0] = {**entries[0], **changed}
        kept.write_bytes(rechained(kept.read_bytes(), entries))
        with pytest.raises(ConfigurationError, match="checkpoint"):
            maker(budget, private, checkpoint=kept, component="texts")

    def test_words_before_their_ticket_is_used_are_refused(self, tmp_path: Path) -> None:
        kept, budget, private = tmp_path / "kept.jsonl", house(), examples()
        made = maker(budget, private, checkpoint=kept, component="texts")
        made._record({"words_of": "a", "words": []})
        with pytest.raises(ConfigurationError, match="a ledger on which none was"):
            maker(budget, private, checkpoint=kept, component="texts")


EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a word below the threshold": lambda s: s["report"]["released_words"][0]["words"][-1].__setitem__(1, 0.5),
    "a stop word": lambda s: s["report"]["released_words"][0]["words"][0].__setitem__(0, "the"),
    "words of another label": lambda s: s["report"]["released_words"][0].update(label="c"),
    "a label's words twice": lambda s: s["report"]["released_words"].append(s["report"]["released_words"][0]),
    "pairs": lambda s: s["report"]["released_words"][0].update(pairs=[["kilnor velda", 300.0]]),
    "no words in the plan": lambda s: shown(s).pop("words"),
    "another noise": lambda s: shown(s)["words"]["mechanism"].update(noise_multiplier=99.0),
    "words of another field": lambda s: shown(s)["words"]["rule"].update(field="kind"),
}


@pytest.fixture(scope="module")
def saved() -> dict[str, Any]:
    return json.loads(maker().run(progress=False).to_json())  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_of_words_is_seen(saved: dict[str, Any], name: str) -> None:
    assert not verify_report(edited(saved, EDITS[name])).ok


class TestNeighbours(WordNeighbourContract):
    """Six units release no word but with a chance below 1e-6; what the noise decides of texts is left out."""

    designs: ClassVar[Any] = {"words": {}, "replaced": {"adjacency": "replace_one"}}
    left_out: ClassVar[Any] = ("examples",)

    @classmethod
    def scene(cls, texts: tuple[str, ...], *, design: str, path: Path, users: str | None) -> Any:
        options = dict(cls.designs[design])
        budget = house(store=(store := InMemoryStore()), adjacency=options.pop("adjacency", "add_remove"))
        records = owned([{"text": text} for text in texts], users)
        private = PrivateExamples(records, unit_key=None if users is None else "user", public_size=600)
        llm = FakeBackend(lambda *_: {" a": 1.0}, vocabulary=[" a", "b"])
        given = {"llm": llm, "epsilon": 4.0, "component": "one", "checkpoint": path / "kept"}
        made = maker(budget, private, **given, decoding=TRUE.replace(candidates=1), **options)
        return SimpleNamespace(store=store, budget=budget, made=made, private=private)

    @classmethod
    def public(cls, made: Any, found: Any) -> Any:
        del found
        return made.share.remaining(FIRST_WORDS_TEMPLATE), made.words
