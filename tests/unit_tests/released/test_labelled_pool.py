"""The labelled pool: what an entry may say, what counts as an example, and files that are read whole or not at all."""

from __future__ import annotations

import ast
import json
import math
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import langchain_dpicl.released.labelled_pool as room
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.options import ConfidentGNMax, Noise
from langchain_dpicl.privacy.accounting.events import PureEvent
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.released.labelled_pool import VERSION, LabelledPool, PoolEntry
from langchain_dpicl.reports.report import verify_report
from tests.labelling_doubles import TEACHERS, labeler
from tests.sealed_files import paid, report_by_hand, resealed

LABELLED = PoolEntry({"text": 'braces {"a": 1} and {q}'}, "card", "labelled", {"card": 12.5, "transfer": -3})
PUBLIC = PoolEntry({"text": "überweisung €"}, "transfer", "public")
REJECTED = PoolEntry({"text": "hm"}, None, "rejected", {"card": 1.0, "transfer": 2.0})
WAITING = PoolEntry({"text": ""}, None, "waiting")
ENTRIES = (LABELLED, REJECTED, PUBLIC, WAITING)
STUDENT = {"demonstrations": [0], "held_back": [2], "candidates": []}
REPORT = paid(1.5)
SHOWN = {"card": "Card", "transfer": "Transfer"}
HOSTILE = {"lc": 1, "type": "secret", "id": ["OPENAI_API_KEY"]}

text = st.text(st.characters(exclude_categories=["Cs"]))
numbers = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**9), 10**9)


def pool(**changes) -> LabelledPool:
    given_ = {"entries": ENTRIES, "label_key": "queue", "labels": ("card", "transfer"), "shown": SHOWN}
    given_ |= {"student": STUDENT}
    return LabelledPool(**(given_ | {"report": REPORT, "plan": {"steps": [1, {"deep": None}]}} | changes))


def state(**changes) -> str:
    return resealed(pool().to_json(), **changes)


def entry_state(**changes) -> str:
    """A file whose one entry differs from a right one."""
    return state(entries=[LABELLED.to_dict() | changes])


class TestEntries:
    @pytest.mark.parametrize("status", ["labelled", "public"])
    def test_what_is_labelled_or_public_has_a_label(self, status):
        assert PoolEntry({"text": "a"}, "card", status).label == "card"
        with pytest.raises(ConfigurationError, match="label"):
            PoolEntry({"text": "a"}, None, status)

    @pytest.mark.parametrize("status", ["rejected", "waiting"])
    def test_what_is_rejected_or_waiting_has_none(self, status):
        assert PoolEntry({"text": "a"}, None, status).label is None
        with pytest.raises(ConfigurationError, match="label"):
            PoolEntry({"text": "a"}, "card", status)

    @pytest.mark.parametrize(("status", "label"), [("public", "card"), ("waiting", None)])
    def test_votes_stand_only_where_something_was_released(self, status, label):
        with pytest.raises(ConfigurationError, match="votes"):
            PoolEntry({"text": "a"}, label, status, {"card": 1.0})

    @pytest.mark.parametrize("status", ["", "Labelled", None, ["public"], 1])
    def test_no_other_status_is_known(self, status):
        with pytest.raises(ConfigurationError, match="status"):
            PoolEntry({"text": "a"}, "card", status)

    @pytest.mark.parametrize("fields", [None, "text", {}, {"text": 1}, {1: "a"}, {"text": None}, {"text": HOSTILE}])
    def test_fields_are_text_under_text_keys(self, fields):
        with pytest.raises(ConfigurationError, match="fields"):
            PoolEntry(fields, "card", "public")

    @pytest.mark.parametrize(
        "votes", [[1.0], "x", {"card": "1"}, {"card": True}, {1: 1.0}, {"card": math.nan}, {"card": math.inf}]
    )
    def test_votes_are_finite_numbers(self, votes):
        with pytest.raises(ConfigurationError, match="votes"):
            PoolEntry({"text": "a"}, "card", "labelled", votes)

    def test_a_vote_beyond_every_float_is_refused(self):
        with pytest.raises(ConfigurationError, match="votes"):
            PoolEntry({"text": "a"}, "card", "labelled", {"card": 10**400})

    def test_a_refusal_tells_no_content(self):
        with pytest.raises(ConfigurationError) as caught:
            pool(entries=[PoolEntry({"text": "swordfish"}, "herring", "public")])
        assert "swordfish" not in str(caught.value)
        assert "herring" not in str(caught.value)


class TestPool:
    def test_examples_are_the_entries_with_a_label_in_order_with_the_label_as_it_is_shown(self):
        assert pool().examples == [
            {"text": 'braces {"a": 1} and {q}', "queue": "Card"},
            {"text": "überweisung €", "queue": "Transfer"},
        ]

    def test_each_entry_stands_under_its_status(self):
        found = pool()
        assert (found.labelled, found.public) == ((LABELLED,), (PUBLIC,))
        assert (found.rejected, found.waiting) == ((REJECTED,), (WAITING,))

    def test_one_entry_is_an_example_only_with_a_label(self):
        assert pool().example_of(PUBLIC) == {"text": "überweisung €", "queue": "Transfer"}
        with pytest.raises(ConfigurationError, match="label"):
            pool().example_of(WAITING)
        with pytest.raises(ConfigurationError, match="label"):
            pool().example_of(PoolEntry({"text": "a"}, "coin", "public"))

    @pytest.mark.parametrize("entry", [PoolEntry({"text": "a"}, "coin", "public"), {"text": "a"}, None])
    def test_an_entry_has_a_label_of_the_pool(self, entry):
        with pytest.raises(ConfigurationError, match=r"entries\[1\]"):
            pool(entries=[PUBLIC, entry])

    def test_an_input_with_the_labels_field_would_overwrite_it_and_is_refused(self):
        with pytest.raises(ConfigurationError, match="queue"):
            pool(entries=[PoolEntry({"text": "a", "queue": "b"}, None, "waiting")])

    @pytest.mark.parametrize("labels", [(), ("card",), "card", ("card", "card"), ("card", ""), ("card", 1), None])
    def test_labels_are_distinct_texts(self, labels):
        with pytest.raises(ConfigurationError, match="labels"):
            pool(labels=labels)

    @pytest.mark.parametrize(
        "shown", [None, {}, {"card": "Card"}, SHOWN | {"x": "X"}, {"card": "A", "transfer": "A"}, SHOWN | {"card": 1}]
    )
    def test_every_label_is_shown_as_a_text_of_its_own(self, shown):
        with pytest.raises(ConfigurationError, match="shown"):
            pool(shown=shown)

    @pytest.mark.parametrize("value", [None, [], "x", {"epsilon": 1, "a": math.nan}, {"epsilon": 1, "a": object()}])
    def test_plan_and_report_are_finite_json_objects(self, value):
        for name in ("plan", "report"):
            with pytest.raises(ConfigurationError, match=name):
                pool(**{name: value})

    def test_the_choice_of_a_prompt_is_a_json_object_or_none(self):
        chosen = {"demonstrations": [0]}
        kept = pool(student=chosen)
        chosen["demonstrations"].append(1)
        assert kept.student == {"demonstrations": [0]}
        assert pool(student=None).student is None
        assert kept.with_entry(PUBLIC).student == kept.student
        with pytest.raises(ConfigurationError, match="student"):
            pool(student={"accuracy": math.nan})

    def test_more_entries_make_another_pool(self):
        first = pool(entries=[PUBLIC])
        assert first.with_entry(LABELLED).entries == (PUBLIC, LABELLED)
        assert first.with_entries(iter([WAITING, REJECTED])).entries == (PUBLIC, WAITING, REJECTED)
        assert first.entries == (PUBLIC,)
        assert first.with_entry(LABELLED) == replace(first, entries=[PUBLIC, LABELLED])
        for wrong in (None, 5, "ab"):
            with pytest.raises(ConfigurationError, match="entries"):
                first.with_entries(wrong)

    def test_a_waiting_entry_gives_its_place_to_what_was_released_for_it(self):
        done = PoolEntry(WAITING.fields, "card", "labelled")
        assert pool().with_entry(done, place=3).entries == (*ENTRIES[:3], done)
        assert pool().with_entry(done, place=0).entries == (done, *ENTRIES[1:])

    @pytest.mark.parametrize("place", [4, -1, True, "1"])
    def test_there_is_no_other_place(self, place):
        with pytest.raises(ConfigurationError, match="place"):
            pool().with_entry(PUBLIC, place=place)

    def test_what_does_not_fit_is_not_added(self):
        with pytest.raises(ConfigurationError, match=r"entries\[4\]"):
            pool().with_entry(PoolEntry({"text": "a"}, "coin", "public"))

    def test_nobody_keeps_a_second_handle(self):
        fields, votes, report, entries = {"text": "a"}, {"card": 1}, {"epsilon": 1.0, "list": [1]}, []
        entries.append(PoolEntry(fields, "card", "labelled", votes))
        kept = pool(entries=entries, report=report)
        fields["text"], votes["card"] = "changed", 2
        report["list"].append(2)
        entries.clear()
        kept.examples[0]["text"] = "changed"
        assert kept.entries == (PoolEntry({"text": "a"}, "card", "labelled", {"card": 1.0}),)
        assert kept.examples == [{"text": "a", "queue": "Card"}]
        assert kept.report == {"epsilon": 1.0, "list": [1]}
        with pytest.raises(FrozenInstanceError):
            kept.entries = ()
        with pytest.raises(FrozenInstanceError):
            kept.entries[0].label = "transfer"


class TestEpsilon:
    def test_it_is_what_the_report_says(self):
        assert pool().epsilon == 1.5
        assert pool(report={"epsilon": "infinity"}).epsilon == math.inf
        assert pool(entries=[PUBLIC], report={"epsilon": 0.25}).epsilon == 0.25

    def test_without_a_report_only_public_entries_cost_nothing(self):
        assert pool(entries=[PUBLIC, PUBLIC], report={}).epsilon == 0.0
        assert pool(entries=[], report={}).epsilon == 0.0

    @pytest.mark.parametrize("entry", [LABELLED, REJECTED, WAITING], ids=lambda entry: entry.status)
    def test_without_a_report_anything_else_is_unbounded(self, entry):
        assert pool(entries=[PUBLIC, entry], report={}).epsilon == math.inf

    @pytest.mark.parametrize("epsilon", [-0.1, True, None, "1.5", [1]])
    def test_a_report_states_it_or_is_refused(self, epsilon):
        with pytest.raises(ConfigurationError, match="epsilon"):
            pool(report={"epsilon": epsilon})
        with pytest.raises(ConfigurationError, match="epsilon"):
            pool(report={"private": True})


class TestFiles:
    def test_json_gives_an_equal_pool_back(self):
        again = LabelledPool.from_json(pool().to_json())
        assert again == pool()
        assert again.entries == ENTRIES
        assert (again.labels, again.plan) == (("card", "transfer"), {"steps": [1, {"deep": None}]})
        assert again.student == STUDENT
        assert LabelledPool.from_json(pool(student=None).to_json()).student is None

    @settings(deadline=None)
    @given(
        made=st.lists(
            st.tuples(st.dictionaries(text.map("f{}".format), text, min_size=1, max_size=3), st.sampled_from(ENTRIES))
        ),
        votes=st.dictionaries(text, numbers, max_size=3),
    )
    def test_any_text_and_any_votes_survive_a_round_trip(self, made, votes):
        entries = [replace(kind, fields=fields, votes=kind.votes and votes) for fields, kind in made]
        first = pool(entries=entries)
        assert LabelledPool.from_json(first.to_json()) == first

    @given(st.text())
    def test_any_other_text_is_refused_with_our_error(self, content):
        with pytest.raises(ConfigurationError):
            LabelledPool.from_json(content)

    @pytest.mark.parametrize(
        "content",
        [
            state(format="langchain-dpicl/released-demonstrations"),
            state(version=VERSION + 1),
            state(entries={"text": "a"}),
            state(entries=["text"]),
            state(label_key=None),
            state(labels="ab"),
            state(shown=None),
            state(report=[]),
            state(plan=None),
            state(student=[]),
            entry_state(status="unknown"),
            entry_state(label="coin"),
            entry_state(label=None),
            entry_state(extra=1),
            entry_state(votes={"card": "many"}),
            entry_state(votes=[1, 2]),
            entry_state(fields={"text": HOSTILE}),
            entry_state(fields={"queue": "card"}),
            state().replace('"card": 12.5', '"card": 1e999'),
            state().replace('"card": 12.5', '"card": 1' + "0" * 400),
            state().replace('"status": "waiting"', '"status": "public", "status": "waiting"'),
        ],
    )
    def test_a_malformed_file_is_refused_whole(self, content, tmp_path):
        path = tmp_path / "pool.json"
        path.write_text(content)
        with pytest.raises(ConfigurationError) as caught:
            LabelledPool.load(path)
        assert len(str(caught.value)) < 400

    def test_the_file_that_the_malformed_ones_differ_from_is_right(self):
        assert LabelledPool.from_json(state()) == pool()
        assert LabelledPool.from_json(entry_state()).entries == (LABELLED,)

    def test_a_refusal_names_the_entry(self):
        wrong = state(entries=[PUBLIC.to_dict(), PUBLIC.to_dict() | {"label": 3}])
        with pytest.raises(ConfigurationError, match=r"entries\[1\].*label"):
            LabelledPool.from_json(wrong)

    def test_a_lone_surrogate_survives_a_file(self, tmp_path):
        first = pool(entries=[PoolEntry({"text": "\ud800 \x00 \u202e"}, None, "waiting")])
        first.save(tmp_path / "a.json")
        assert LabelledPool.load(tmp_path / "a.json") == first


@pytest.fixture(scope="module")
def bought() -> LabelledPool:
    """What a labeler with two queries leaves behind, a public example and one more input that waits."""
    found = labeler().run(progress=False).with_entries([PUBLIC, WAITING])
    assert [entry.status for entry in found.entries] == ["labelled", "labelled", "public", "waiting"]
    return found


def forms(found: LabelledPool) -> list:
    return [found, found.to_json(), found.to_json().encode(), json.loads(found.to_json())]


def assert_refused(found: LabelledPool, problem: str) -> None:
    for form in forms(found):
        verified = verify_report(form)
        assert (verified.ok, verified.epsilon) == (False, math.inf)
        assert any(problem in one for one in verified.problems), verified.problems


class TestVerification:
    def test_a_pool_and_its_file_are_verified_by_their_report(self, bought, tmp_path):
        bought.save(tmp_path / "a.json")
        content = (tmp_path / "a.json").read_bytes()
        for form in (*forms(bought), bought.report, LabelledPool.load(tmp_path / "a.json"), content):
            verified = verify_report(form)
            assert verified.problems == ()
            assert 0 < verified.epsilon <= bought.epsilon
        with pytest.raises(ConfigurationError):
            verify_report(pool(report={}))

    def test_a_pool_claims_what_its_share_is_charged(self, bought):
        for name, value in {"epsilon": 0.1, "delta": 1e-12, "component": "nobody"}.items():
            forged = replace(bought, report={**bought.report, name: value})
            assert not any(verify_report(form).ok for form in forms(forged))

    @pytest.mark.parametrize("entry", [LABELLED, REJECTED], ids=lambda entry: entry.status)
    def test_no_baseline_pays_for_a_release(self, entry):
        baseline = {"private": False, "baseline": "instruction only", "epsilon": 0, "delta": 0}
        free = pool(entries=[PUBLIC, WAITING], report=baseline)
        for form in forms(free):
            assert (verify_report(form).ok, verify_report(form).epsilon) == (True, 0.0)
        assert_refused(free.with_entry(entry), "which no component of the report pays for")

    def test_the_report_of_a_whole_ledger_pays_for_no_release(self, bought):
        assert_refused(
            replace(bought, report={"epsilon": 0.0, **bought.report["budget"]}), "no component of the report"
        )

    @pytest.mark.parametrize(
        "change", [{"epsilon": 1e-3}, {"mechanism": "magic"}, {"teachers": "fixed"}, {"other_label": "none"}], ids=str
    )
    def test_the_plan_of_a_pool_is_what_its_component_shows(self, bought, change):
        assert_refused(replace(bought, plan={**bought.plan, **change}), "plan: expected what 'pate' shows")

    @pytest.mark.parametrize("name", ["teachers", "model", "abstain_below"])
    def test_no_part_of_the_plan_is_left_out(self, bought, name):
        kept = {key: value for key, value in bought.plan.items() if key != name}
        assert_refused(replace(bought, plan=kept), "plan: expected what 'pate' shows")

    def test_a_component_that_shows_no_labelling_pays_for_no_label(self):
        ledger = Budget(epsilon=1.0, delta=1e-6)
        ledger.declare("labels", tickets=[Ticket("label", PureEvent(0.25), max_count=2)], epsilon=0.5)
        report = report_by_hand(ledger.report().to_dict(), "labels")
        shown = pool(entries=[PUBLIC], report=report, plan={})
        assert verify_report(shown).problems == ()
        assert_refused(shown.with_entry(replace(LABELLED, votes=None)), "'labels' shows no labelling")

    @pytest.mark.parametrize("status", ["labelled", "rejected"])
    def test_more_releases_than_tickets_are_refused(self, bought, status):
        more = PoolEntry({"text": "one more"}, "card" if status == "labelled" else None, status)
        assert_refused(bought.with_entry(more), "3 are labelled or rejected, its tickets allow 2")
        fewer = replace(bought, entries=[*bought.entries[1:], more])
        assert verify_report(fewer).problems == ()

    @pytest.mark.parametrize("teachers", ["one_sample", "fixed"])
    def test_more_labels_than_answers_are_refused(self, teachers):
        noise = ConfidentGNMax(0.0, 1.0, 1.0, max_answers=1)
        run = labeler(rows=TEACHERS[teachers], noise=noise).run(progress=False)
        done = replace(run, entries=[PoolEntry({"text": "a"}, "card", "labelled"), replace(REJECTED, votes=None)])
        assert verify_report(done).problems == ()
        again = replace(done, entries=[done.entries[0]] * 2)
        assert_refused(again, "2 are labelled, its tickets allow 1")

    def test_votes_are_told_only_by_a_mechanism_that_releases_them(self, bought):
        votes = {"card": 3.0, "transfer": 1.0}
        told = labeler(noise=Noise("gaussian", multiplier=1.0)).run(progress=False)
        assert told.entries[0].votes is not None
        assert verify_report(told).problems == ()
        assert_refused(
            replace(bought, entries=[replace(bought.entries[0], votes=votes)]), "which gumbel never releases"
        )

    @pytest.mark.parametrize(
        "entries",
        [
            None,
            5,
            "labelled",
            ["labelled"],
            [None],
            [{}],
            [{"status": "Labelled", "label": "card", "fields": {}, "votes": None}],
            [{"status": ["labelled"], "label": "card"}],
            [{"status": "waiting", "label": "card"}],
            [{"status": "rejected", "label": "card"}],
            [{"status": "labelled", "label": None}],
            [{"status": "labelled", "label": ["card"]}],
            [{"status": "public", "label": "card", "votes": {"card": 1.0}}],
            {"text": "a"},
        ],
        ids=str,
    )
    def test_entries_of_another_form_are_a_problem_and_never_an_error(self, bought, entries):
        whole = json.loads(bought.to_json())
        for form in ({**whole, "entries": entries}, json.dumps({**whole, "entries": entries})):
            verified = verify_report(form)
            assert (verified.ok, verified.epsilon) == (False, math.inf)
            assert any("entries" in problem for problem in verified.problems)

    @pytest.mark.parametrize("plan", [None, 5, [], "plan", {"epsilon": object()}], ids=lambda plan: type(plan).__name__)
    def test_a_plan_of_another_form_is_a_problem_and_never_an_error(self, bought, plan):
        assert not verify_report({**json.loads(bought.to_json()), "plan": plan}).ok


def test_the_room_knows_no_records_no_ledger_and_no_framework():
    tree = ast.parse(Path(room.__file__).read_text(encoding="utf-8"))
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    ours = {name for name in names if name.startswith("langchain")}
    known = {"exceptions", "privacy._validate", "released.base"}
    assert ours == {f"langchain_dpicl.{name}" for name in known}
