"""WordDiscovery as a user builds it: paid before it looks, released once for each label, and recomputed."""

from __future__ import annotations

import json
import re
import uuid
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from langchain_dpicl import Budget, Noise, PrivacyBudgetExceededError, PrivateExamples, WordDiscovery, verify_report
from langchain_dpicl import discovery as words_module
from langchain_dpicl.discovery import plan_words
from langchain_dpicl.exceptions import (
    ConfigurationError,
    LedgerError,
    ModelCallError,
    NoisyPlanWarning,
    PrivacyBudgetError,
    RunInterruptedError,
)
from langchain_dpicl.privacy.extensions.word_release import (
    PAIR_TEMPLATE,
    WORD_TEMPLATE,
    PublicWords,
    UnitPairs,
    UnitWords,
)
from langchain_dpicl.privacy.ledger.store import InMemoryStore
from langchain_dpicl.privacy.private_examples import Pool
from langchain_dpicl.released import ReleasedWords
from langchain_dpicl.released.counts import WordGroup
from langchain_dpicl.reports.claims import with_content_digest
from langchain_dpicl.reports.verify import public_words
from tests.contracts.neighbours import HOSTILE, WordNeighbourContract, owned
from tests.sealed_files import at

CANARY = "canaryword"
NO_WORDS = ("078-05-1120", "Mr Smith has it", "abc123", "Velda", "\uff56elda", "velda!", "x" * 31, "ab", " velda")
NOTES = ["the velda is a friend of the otter"] * 300 + ["a Gorgon SINGS at night"] * 200 + [f"my {CANARY}"]


def house(**limits: Any) -> Budget:
    return Budget(**{"epsilon": 8.0, "delta": 1e-6, **limits})


def notes(records: Any = NOTES, **declared: Any) -> PrivateExamples:
    return PrivateExamples(records, **{"public_size": 10_000, "dataset_id": "notes", **declared})


def by_kind() -> PrivateExamples:
    records = [{"text": text, "kind": "old" if "velda" in text else "new"} for text in NOTES]
    return notes(records, label_key="kind", labels=("new", "old", "none"))


def finder(private: PrivateExamples, budget: Any, **options: Any) -> WordDiscovery:
    return WordDiscovery.from_private_examples(private, budget=budget, **{"epsilon": 1.0, **options})


class TestWhatIsReleased:
    def test_words_of_many_units_are_found_and_those_of_one_are_not(self) -> None:
        found = finder(notes(), house()).run()
        assert set(found.words) == {"velda", "friend", "otter", "gorgon", "sings", "night"}
        assert set(found.words[:3]) == {"velda", "friend", "otter"}
        assert (found.pairs, len(found), set(found.by_label)) == ((), 6, {None})
        assert CANARY not in found.to_json()

    def test_each_label_has_words_of_its_own_for_the_price_of_one(self) -> None:
        made = finder(by_kind(), house())
        assert made.plan.noise_multiplier == finder(notes(), house()).plan.noise_multiplier
        found = made.run()
        assert {label: set(words) for label, words in found.by_label.items()} == {
            "new": {"gorgon", "sings", "night"},
            "old": {"velda", "friend", "otter"},
            "none": set(),
        }
        assert verify_report(found).ok

    def test_labels_that_a_unit_may_change_cost_two(self) -> None:
        replaced = house(adjacency="replace_one")
        plan = finder(by_kind(), replaced).plan
        assert plan.release.failure <= 2.5e-7 * (plan.delta / 1e-6)
        assert plan.implementation_delta == 2 * plan.release.implementation_delta
        assert plan.noise_multiplier > finder(notes(), house(adjacency="replace_one")).plan.noise_multiplier

    def test_pairs_tell_which_words_stand_together(self) -> None:
        found = finder(notes(), house(), pairs=True, epsilon=2.0).run()
        assert {"velda friend", "friend otter", "gorgon sings", "sings night"} == set(found.pairs)
        assert set(" ".join(found.pairs).split()) <= set(found.words)

    def test_pairs_are_of_the_words_of_their_label(self) -> None:
        found = finder(by_kind(), house(), pairs=True, epsilon=2.0).run()
        new, old, none = found.groups
        assert {pair for pair, _ in new.pairs} == {"gorgon sings", "sings night"}
        assert {pair for pair, _ in old.pairs} == {"velda friend", "friend otter"}
        assert none.pairs == ()

    def test_denied_words_are_never_found(self) -> None:
        found = finder(notes(), house(), deny=["VELDA", "the gorgon"]).run()
        assert set(found.words) == {"friend", "otter", "sings", "night"}
        assert found.report["plan"]["words"]["rule"]["denied"] == ["gorgon", "the", "velda"]

    def test_frequent_words_of_another_language_take_no_vote_where_they_are_denied(self) -> None:
        german, budget = notes(["geehrte damen, lieferung und rechnung, mit freundlichen"] * 400), house()
        assert set(finder(german, budget, max_values=2).run().words) == {"damen", "freundlichen"}
        found = finder(german, budget, max_values=2, deny=["geehrte damen", "und mit freundlichen"]).run()
        assert set(found.words) == {"lieferung", "rechnung"}

    def test_a_unit_counts_once_however_many_records_it_has(self) -> None:
        records = [{"text": f"{CANARY} again", "user": "loud"}] * 500
        private = notes(records, unit_key="user", records_per_unit=500)
        assert finder(private, house()).run().words == ()

    def test_removed_units_count_nothing(self) -> None:
        private = notes(NOTES[:300])
        for place in range(300):
            private.remove(place)
        assert finder(private, house()).run().words == ()

    def test_a_field_of_its_own_can_be_named(self) -> None:
        records = [{"text": "x", "remark": "velda hums"}] * 300
        private = notes(records, fields=("remark",))
        assert set(finder(private, house(), field="remark").run().words) == {"velda", "hums"}

    def test_noise_is_fresh(self) -> None:
        private = notes(NOTES[:120])
        found = {
            finder(private, budget, component=f"no {place}").run().groups for budget in [house()] for place in (1, 2)
        }
        assert len(found) == 2


class TestThePublicRanking:
    def test_knows_common_words_from_rare_ones(self) -> None:
        known = public_words()
        assert known is public_words()
        assert known.rarest({"night", "government", "velda", "people"}, 2)[0] == "velda"
        assert known.ranked.index("people") < known.ranked.index("wader")

    def test_of_another_version_is_refused_before_a_ticket_burns(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = finder(notes(), house())
        monkeypatch.setattr("langchain_dpicl.discovery.public_words", lambda: PublicWords(("a",), frozenset()))
        with pytest.raises(ConfigurationError, match="public_words"):
            made.run()
        assert made.share.remaining(WORD_TEMPLATE) == 1


class TestWhatIsPaid:
    def test_nothing_is_read_before_the_ticket_stands_in_the_ledger(self, monkeypatch: pytest.MonkeyPatch) -> None:
        budget, seen = house(), []
        real = Pool.records

        def spied(self: Pool, position: int) -> Any:
            seen.append(sum(ticket.count for ticket in budget.dangling()))
            return real(self, position)

        monkeypatch.setattr(Pool, "records", spied)
        made = finder(by_kind(), budget, pairs=True)
        assert seen == []
        made.run()
        assert set(seen) == {1}

    def test_building_spends_nothing_and_the_share_is_set_aside(self) -> None:
        made = finder(notes(), budget := house(), pairs=True)
        assert (made.share.remaining(WORD_TEMPLATE), made.share.remaining(PAIR_TEMPLATE)) == (1, 1)
        assert budget.remaining_epsilon == pytest.approx(7.0)
        assert made.plan.epsilon <= 1.0

    @pytest.mark.parametrize("error", [RuntimeError, SystemExit, MemoryError])
    def test_a_release_that_fails_says_nothing_and_stays_paid(
        self, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(self: Any, records: Any, known: Any, gone: Any) -> Any:
            raise error(CANARY)

        made = finder(notes(), budget := house())
        with monkeypatch.context() as patched:
            patched.setattr(UnitWords, "of", broken)
            with pytest.raises(ModelCallError) as caught:
                made.run()
        found: BaseException | None = caught.value
        while found is not None:
            assert CANARY not in str(found)
            found = found.__cause__ or found.__context__
        assert budget.dangling()[0].count == 1
        with pytest.raises(PrivacyBudgetExceededError):
            made.run()

    def test_labels_that_were_released_are_kept_where_another_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made, real, calls = finder(by_kind(), house()), UnitWords.of, []

        def once(self: Any, records: Any, known: Any, gone: Any) -> Any:
            calls.append(1)
            if len(calls) == 202:  # the first unit of the second label: the first one has 201 with the canary
                raise RuntimeError(CANARY)
            return real(self, records, known, gone)

        monkeypatch.setattr(UnitWords, "of", once)
        with pytest.raises(RunInterruptedError) as caught:
            made.run()
        assert caught.value.run is made
        assert CANARY not in str(caught.value)
        assert {word for word, _ in made._items[0].words} == {"gorgon", "sings", "night"}
        assert [made.share.remaining(WORD_TEMPLATE, label=label) for label in ("new", "old", "none")] == [0, 0, 1]

    @pytest.mark.parametrize("rule", [UnitWords, UnitPairs])
    def test_a_ticket_that_burnt_without_a_result_takes_nothing_else_away_and_is_told(
        self, rule: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Stopped in the words of the second label, or in the pairs of the first one."""
        lost, of_old, pairs = "words (old)", set[str](), [True, False, False]
        if rule is UnitPairs:
            lost, of_old, pairs = "pairs of words (new)", {"velda", "friend", "otter"}, [False, True, False]
        released = {"new": {"gorgon", "sings", "night"}, "old": of_old, "none": set()}
        made, real = finder(by_kind(), budget := house(), pairs=True, epsilon=2.0), words_module.release_words

        def stopped(private: Any, ticket: Any, *, plan: Any, known: Any) -> Any:
            if type(plan.rule) is rule and ticket.label == ("old" if rule is UnitWords else "new"):
                ticket.burn()
                raise KeyboardInterrupt
            return real(private, ticket, plan=plan, known=known)

        with monkeypatch.context() as patched:
            patched.setattr(words_module, "release_words", stopped)
            with pytest.raises(KeyboardInterrupt) as caught:
                made.run()
        assert caught.value.run is made  # type: ignore[attr-defined]
        assert set(made.result.by_label["new"]) == released["new"]
        assert not made.is_finished
        found = made.run()
        assert {label: set(found.by_label[label]) for label in released} == released
        assert [bool(group.pairs) for group in found.groups] == pairs
        assert made.is_finished
        assert found == made.run() == made.result
        assert [f"the {lost} are left out" in message for message in caplog.messages] == [True]
        assert verify_report(found).ok
        assert sum(ticket.count for ticket in budget.dangling()) == 1  # it stays charged, and open

    def test_nothing_is_read_where_nothing_was_released(self) -> None:
        with pytest.raises(ConfigurationError, match=r"Call run\(\) first"):
            _ = finder(notes(), house()).result

    def test_a_ledger_that_fails_at_a_commit_keeps_what_was_released(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = finder(notes(), budget := house(), pairs=True, epsilon=2.0)

        def out(self: Any, count: int = 1) -> None:
            raise LedgerError("out")

        for _ in range(2):  # at the words, and at the words again
            with monkeypatch.context() as patched:
                patched.setattr("langchain_dpicl.privacy.ledger.shares.Reservation.commit", out)
                with pytest.raises(LedgerError):
                    made.run()
        assert "velda" in made.run().words
        assert made.result.pairs
        assert not budget.dangling()

    def test_the_same_name_and_plan_find_the_same_share_in_another_process_and_no_second_ticket(self) -> None:
        private, budget = notes(), house(store=InMemoryStore())
        finder(private, budget, component="mine").run()
        with pytest.raises(PrivacyBudgetExceededError, match="other processes hold"):
            finder(private, budget, component="mine").run()

    def test_where_all_tickets_are_gone_every_door_raises_what_the_ledger_says(self) -> None:
        private, budget = by_kind(), house()
        others = finder(private, budget, component="mine").share
        held = [others.reserve(WORD_TEMPLATE, label=label) for label in ("new", "old", "none")]
        made = finder(private, budget, component="mine")
        for ask in (made.run, lambda: list(made.stream())):
            with pytest.raises(PrivacyBudgetExceededError, match="other processes hold") as caught:
                ask()
            assert caught.value.held == 1
        held[1].give_back()
        assert "velda" in made.run().by_label["old"]

    def test_a_label_whose_ticket_came_back_is_released_by_the_next_run(self) -> None:
        private, budget = by_kind(), house()
        held = finder(private, budget, component="mine").share.reserve(WORD_TEMPLATE, label="new")
        made = finder(private, budget, component="mine")
        first = made.run().by_label
        assert not first["new"]
        assert "velda" in first["old"]
        assert not made.is_finished
        held.give_back()
        second = made.run().by_label
        assert second["old"] == first["old"]
        assert "gorgon" in second["new"]
        assert made.is_finished

    @pytest.mark.parametrize("pairs", [False, True])
    def test_another_process_uses_the_tickets_that_are_left(
        self, pairs: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        private, budget = by_kind(), house(store=InMemoryStore())
        options: dict[str, Any] = {"component": "mine", "pairs": pairs, "epsilon": 2.0}
        stopped = finder(private, budget, **options).stream(progress=False)
        next(stopped)
        stopped.close()
        found = finder(private, budget, **options).run()
        assert {label: set(words) for label, words in found.by_label.items()} == {
            "new": set(),
            "old": {"velda", "friend", "otter"},
            "none": set(),
        }
        assert [bool(group.pairs) for group in found.groups] == [False, pairs, False]
        assert ["the words (new) are left out" in message for message in caplog.messages] == [True]
        assert verify_report(found).ok

    def test_a_ticket_of_other_parameters_is_refused_before_it_burns(self) -> None:
        private, budget = notes(), house()
        made = finder(private, budget)
        made.plan = finder(private, budget, epsilon=2.0).plan
        with pytest.raises(PrivacyBudgetError, match="another event"):
            made.run()
        assert made.share.remaining(WORD_TEMPLATE) == 1


@pytest.mark.traced
class TestWhatTheReportSays:
    @pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
    def test_everything_is_recomputed(self, adjacency: Any) -> None:
        budget = house(adjacency=adjacency)
        found = finder(by_kind(), budget, pairs=True).run()
        for shown in (found, found.to_json(), found.report, budget.report(), budget.report().to_json()):
            verified = verify_report(shown)
            assert verified.problems == ()
            assert verified.epsilon <= 1.0
        assert "words" in budget.report().to_markdown()

    @pytest.mark.parametrize(
        ("path", "value", "said"),
        [
            ("public.words.mechanism.threshold", 12.0, "as its parts show it"),
            ("public.words.mechanism.noise_multiplier", 1.0, "as its parts show it"),
            ("public.words.rule.max_values", 2, "as its parts show it|noise, threshold and field"),
            ("public.words.rule.field", "other", "noise, threshold and field"),
            ("public.words.failure", 1e-9, "as its parts show it"),
            ("public.pairs", None, "other tickets"),
            ("public.labels", ["new"], "other tickets"),
            ("public.labels", [], "other tickets"),
            ("public.epsilon", 0.5, "epsilon"),
            ("public.adjacency", "replace_one", "adjacency"),
            ("public.extra", 1, "extra"),
            ("implementation_delta", 1e-9, "implementation_delta"),
            ("tickets.0.max_count", 2, "tickets"),
            ("tickets.0.event.events.1.delta", 1e-12, "other tickets"),
        ],
    )
    def test_a_changed_number_is_a_problem(self, path: str, value: Any, said: str) -> None:
        budget = house()
        finder(by_kind(), budget, pairs=True).run()
        data = json.loads(budget.report().to_json())
        holder, key = at(data["shares"][0]["components"][0], path)
        holder[key] = value
        verified = verify_report(data)
        assert not verified.ok
        assert any(re.search(said, problem) for problem in verified.problems)

    def test_words_that_the_plan_cannot_release_are_a_problem(self) -> None:
        found = finder(notes(), house(), deny=["denied"]).run()
        data = json.loads(found.to_json())

        def with_words(words: Any, pairs: Any = (), label: Any = None) -> list[str]:
            state = {**data, "words": [{"label": label, "words": words, "pairs": list(pairs)}]}
            return list(verify_report(state).problems)

        for words, said in (
            ([[CANARY, 3.0]], "below the threshold"),
            ([["denied", 90.0]], "no denied word"),
            ([["velda", 90.0], ["velda", 90.0]], "each once"),
            ([["velda", "b"]], "words"),
            ([["the", 90.0]], "no public stop word"),
            *(([[text, 90.0]], "single words") for text in NO_WORDS),
            ([["velda", 90.123456789]], "the grid of the noise"),
            ([["otter", 90.0], ["velda", 91.0]], "largest weight first"),
            ([["velda", 90.0], ["otter", 90.0]], "ties by spelling"),
        ):
            assert any(said in problem for problem in with_words(words)), words
        assert any("releases no pairs" in problem for problem in with_words([["velda", 90.0]], [["velda x", 90.0]]))
        assert any("one group for each" in problem for problem in with_words([["velda", 90.0]], label="x"))
        assert (
            verify_report({**data, "words": [{"label": None, "words": [], "pairs": []}]}).problems != ()
        )  # the digest

    def test_what_the_plan_cannot_release_is_not_made_or_read_either(self) -> None:
        found = finder(notes(), house(), deny=["denied"], pairs=True).run()

        def refused(words: Any, pairs: Any = ()) -> None:
            group = WordGroup(None, tuple(words), tuple(pairs))
            with pytest.raises(ConfigurationError, match=r"words: expected|pairs: expected"):
                ReleasedWords((group,), found.report, found.plan)
            # A file whose digest was made for it.
            state = {**json.loads(found.to_json()), "words": [{**group._asdict()}]}
            state["report"].pop("content_digest")
            with pytest.raises(ConfigurationError, match=r"words: expected|pairs: expected"):
                ReleasedWords.from_json(json.dumps(with_content_digest(state)))

        for text in (*NO_WORDS, "the", "denied"):
            refused([(text, 90.0)])
        refused([("velda", 90.123456789)])
        refused([("otter", 90.0), ("velda", 91.0)])
        refused([("otter", 90.0), ("velda", 90.0)], [("velda velda", 90.0)])
        refused([("otter", 90.0), ("velda", 90.0)], [("otter velda", 90.0), ("velda otter", 91.0)])
        group = WordGroup(None, (("otter", 90.0), ("velda", 90.0)), (("otter velda", 90.0),))
        assert ReleasedWords((group,), found.report, found.plan).pairs == ("otter velda",)

    def test_stop_words_of_another_version_are_not_compared_with_those_of_this_one(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = finder(notes(), house()).run()
        monkeypatch.setattr(
            "langchain_dpicl.reports.verify.public_words", lambda: PublicWords((), frozenset({"velda"}))
        )
        assert verify_report(found).ok

    def test_words_under_the_report_of_something_else_are_a_problem(self) -> None:
        found = json.loads(finder(notes(), house()).run().to_json())
        other = json.loads(finder(notes(dataset_id="other"), house(), epsilon=0.5, component="other").run().to_json())
        assert not verify_report({**found, "plan": other["plan"]}).ok
        assert any(
            "no component" in p
            for p in verify_report({**found, "report": {**other["report"], "component": "x"}}).problems
        )


class TestWhatIsMadeOfIt:
    def test_words_are_taken_out_with_their_pairs_for_free(self) -> None:
        found = finder(notes(), house(), pairs=True, epsilon=2.0).run()
        left = found.without(["Friend", "gorgon"])
        assert set(left.words) == {"velda", "otter", "sings", "night"}
        assert set(left.pairs) == {"sings night"}
        assert verify_report(left).ok
        assert ReleasedWords.from_json(left.to_json()) == left

    @pytest.mark.parametrize("given", ["raven", ["---"], [3], None])
    def test_faults_of_words_to_take_out_name_the_argument(self, given: Any) -> None:
        with pytest.raises(ConfigurationError, match=r"^words: expected"):
            finder(notes(), house()).run().without(given)

    def test_it_is_saved_and_read_back_and_nothing_else_is(self, tmp_path: Path) -> None:
        found = finder(by_kind(), house(), pairs=True).run()
        found.save(tmp_path / "words.json")
        assert ReleasedWords.load(tmp_path / "words.json") == found
        data = json.loads(found.to_json())
        for words in ({}, [["a"]], [{"label": None}], [{"label": None, "words": [["a", 1.5]], "pairs": []}], 7):
            with pytest.raises(ConfigurationError):
                ReleasedWords.from_json(json.dumps({**data, "words": words}))
        for groups in (7, "x", (7,), (WordGroup(None, "x"),), (WordGroup(None, (("a",),)),)):  # type: ignore[arg-type]
            with pytest.raises(ConfigurationError):
                ReleasedWords(groups, found.report, found.plan)  # type: ignore[arg-type]
        for plan in ({}, {**found.plan, "words": 7}):
            with pytest.raises(ConfigurationError, match="plan"):
                ReleasedWords(found.groups, found.report, plan)


class TestThePlan:
    def test_a_declared_size_below_what_a_word_needs_warns_before_anything_is_spent(self) -> None:
        with pytest.warns(
            NoisyPlanWarning, match=r"A word is found .* if \d+ units hold it among 8 words each, and only 20 are"
        ) as caught:
            made = finder(notes(public_size=20), house())
        assert [warning.filename for warning in caught] == [__file__]
        assert made.share.remaining(WORD_TEMPLATE) == 1
        sizes = {"new": 20, "old": 10}
        with pytest.warns(NoisyPlanWarning, match="A word of a label .* and only 20 are"):
            finder(notes([], label_key="kind", labels=("new", "old"), public_size=sizes), house())

    def test_one_label_that_has_enough_units_is_enough(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # One number for all labels: one of them may hold nearly all units.
            for size in ({"new": 1_000, "old": 1}, 100):
                finder(notes([], label_key="kind", labels=("new", "old"), public_size=size), house())

    def test_says_how_many_units_a_word_needs(self) -> None:
        needed = {
            (epsilon, most): plan_words(epsilon=epsilon, delta=1e-6, max_values=most).found_from(0.95)
            for epsilon in (0.5, 1.0, 2.0)
            for most in (1, 8, 32)
        }
        assert [needed[1.0, most] for most in (1, 8, 32)] == [30, 87, 179]
        assert needed[0.5, 8] == 165
        assert plan_words(epsilon=1.0, delta=1e-6, adjacency="replace_one").found_from(0.95) == 123
        assert plan_words(epsilon=1.0, delta=1e-6).expected()["found_from"] == 87

    def test_takes_half_of_delta_for_the_thresholds_of_all_releases(self) -> None:
        for pairs, adjacency, labels, parts in (
            (False, "add_remove", ("a", "b"), 1),
            (True, "add_remove", (), 2),
            (True, "replace_one", ("a", "b"), 4),
            (True, "replace_one", ("a",), 2),
        ):
            plan = plan_words(epsilon=1.0, delta=1e-6, pairs=pairs, labels=labels, adjacency=adjacency)  # type: ignore[arg-type]
            assert 4.9e-7 / parts < plan.release.failure <= 5e-7 / parts
            assert plan.epsilon <= 1.0

    def test_of_a_given_noise_is_priced_and_held_against_epsilon(self) -> None:
        assert plan_words(epsilon=None, delta=1e-6, noise_multiplier=10.0).epsilon < 0.5
        with pytest.raises(ConfigurationError, match="noise_multiplier"):
            plan_words(epsilon=0.1, delta=1e-6, noise_multiplier=1.0)

    @pytest.mark.parametrize("labels", [None, "ab", 5])
    def test_refuses_what_is_no_list_of_labels(self, labels: Any) -> None:
        with pytest.raises(ConfigurationError, match="labels: expected a list of texts, found "):
            plan_words(epsilon=1.0, delta=1e-6, labels=labels)

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"field": "unknown"}, "field"),
            ({"max_values": 0}, "max_values"),
            ({"deny": "velda"}, "deny"),
            ({"pairs": "yes"}, "pairs"),
            ({"epsilon": 0.0}, "epsilon"),
            ({"epsilon": None}, "epsilon"),
            ({"noise": "gaussian"}, "mechanism"),
            ({"epsilon": 0.1, "noise": Noise(multiplier=1.0)}, "noise_multiplier"),
            ({"component": "\n"}, "component"),
        ],
    )
    def test_public_faults_are_refused_and_cost_nothing(self, options: dict[str, Any], said: str) -> None:
        budget = house()
        with pytest.raises(ConfigurationError, match=said):
            finder(notes(), budget, **options)
        assert budget.remaining_epsilon == 8.0

    def test_a_label_is_no_text(self) -> None:
        with pytest.raises(ConfigurationError, match="field"):
            finder(by_kind(), house(), field="kind")


class TestNeighbours(WordNeighbourContract):
    """Words, their number and their weights are what the noise decides; all else is the same for all records."""

    designs: ClassVar[Any] = {
        "words": {},
        "pairs": {"pairs": True, "max_values": 2},
        "labels": {"labels": ("yes", "no")},
        "replaced": {"adjacency": "replace_one"},
    }
    owned_designs: ClassVar[Any] = ("words", "pairs")
    left_out: ClassVar[Any] = ("words",)

    @classmethod
    def scene(cls, texts: tuple[str, ...], *, design: str, path: Path, users: str | None) -> Any:
        del path
        options = dict(cls.designs[design])
        budget = house(store=(store := InMemoryStore()), adjacency=options.pop("adjacency", "add_remove"))
        labels = options.pop("labels", ())
        records = owned([{"text": text, **({"kind": "no"} if labels else {})} for text in texts], users)
        split = {"label_key": "kind", "labels": labels} if labels else {}
        private = notes(records, unit_key=None if users is None else "user", **split)
        made = finder(private, budget, component="one", **options)
        return SimpleNamespace(store=store, budget=budget, made=made, private=private)

    @classmethod
    def public(cls, made: Any, found: Any) -> Any:
        return made.share.remaining(WORD_TEMPLATE, label=found.groups[0].label)


def test_hostile_texts_are_texts_like_others() -> None:
    hostile = [text for text in HOSTILE.values() if isinstance(text, str)]
    found = finder(notes([*NOTES, *hostile]), house()).run()
    assert set(found.words) == {"velda", "friend", "otter", "gorgon", "sings", "night"}


def test_each_label_with_words_is_a_document_of_any_store() -> None:
    found = finder(by_kind(), house(), pairs=True, epsilon=2.0).run()
    new, old = found.documents
    assert [document.metadata["label"] for document in (new, old)] == ["new", "old"]
    assert new.page_content.splitlines()[0] == "new"
    assert set(new.page_content.splitlines()[1].split()) == {"gorgon", "sings", "night"}
    assert {"gorgon sings", "sings night"} == set(new.page_content.splitlines()[2:])
    assert new.id != old.id
    assert str(uuid.UUID(new.id)) == new.id  # some stores accept no other ids
    assert found.documents == found.documents
    (alone,) = finder(notes(), house()).run().documents
    assert set(alone.page_content.split()) == {"velda", "friend", "otter", "gorgon", "sings", "night"}
    assert alone.metadata["label"] is None
    assert found.without(["gorgon", "sings", "night"]).documents == [old]
    other, same = found.without(["gorgon"]).documents
    assert (same.id, other.metadata) == (old.id, new.metadata)
    assert other.id != new.id
