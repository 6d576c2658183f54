"""Units that are split by topics which come later: one split that stays, on one ledger, by each unit alone."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from langchain_dpicl import Budget, PrivateExamples, verify_report
from langchain_dpicl.exceptions import ConfigurationError, PrivacyBudgetMismatchError, PrivateAccessError, RecordError
from langchain_dpicl.privacy.extensions import redeclared
from langchain_dpicl.privacy.extensions.value_counts import TopicExamples, split_by_topics
from langchain_dpicl.privacy.ledger import budget as ledger
from langchain_dpicl.privacy.ledger.store import InMemoryStore
from langchain_dpicl.stores import SQLiteStore

CANARY = "canary-7f3a"
NOTES = ["my card", "a transfer", "card and transfer", f"a boat {CANARY}"]


def notes(records: Any = None, **declared: Any) -> PrivateExamples:
    return PrivateExamples(NOTES if records is None else records, **{"public_size": 100, **declared})


def by_topics(private: PrivateExamples, **options: Any) -> TopicExamples:
    given = {"dataset_id": "by topic", "topic_key": "topic", "public_size": {"topic 1": 50, "topic 2": 50}, **options}
    return split_by_topics(private, **given)


def texts_in(private: PrivateExamples, label: str | None) -> list[str]:
    pool = private._pool(label, ledger_id=private._ledger_id)
    return [record["text"] for place in range(pool.num_units) for record in pool.records(place)]


def test_all_units_can_be_read_at_once_and_those_of_a_topic_once_it_has_a_name() -> None:
    made = by_topics(notes())
    made._attach("ledger")
    assert texts_in(made, None) == NOTES
    with pytest.raises(PrivateAccessError, match="none yet"):
        texts_in(made, "topic 1")
    named = made.name_topics(["transfer", "card"])
    assert texts_in(made, "topic 1") == ["a transfer", "card and transfer"]
    assert texts_in(made, "topic 2") == ["my card"]
    assert texts_in(made, None) == NOTES
    assert named.labels == ("transfer", "card")
    assert named.public_size == {"transfer": 50, "card": 50}
    assert texts_in(named, "card") == ["my card"]
    assert texts_in(named, None) == NOTES


def test_a_split_by_an_earlier_rule_is_refused_and_may_be_declared_anew_under_another_name() -> None:
    store = InMemoryStore()
    budget = Budget(epsilon=1.0, delta=1e-6, store=store)
    # Rule 1 read no word inside of a clause: it put this unit in topic 2, priced beside topic 1 as one event.
    private = notes(["\u6211\u7684\u5361 card"])
    made = by_topics(private)
    shown = made.declaration
    with store.transaction() as view:
        view.append("bind", private.declaration)
        view.append("bind", {**shown, "redeclared": {**shown["redeclared"], "rule": 1}})
    said = r"'by topic': .* found another in \['redeclared'\]\. Another version .* another rule"
    with pytest.raises(PrivacyBudgetMismatchError, match=said):
        budget.bind(made)
    anew = by_topics(private, dataset_id="by topic, again")
    budget.bind(anew)
    anew.name_topics(["\u5361", "card"])
    assert len(texts_in(anew, "topic 1")) == 1
    assert texts_in(anew, "topic 2") == []


def test_fewer_topics_than_places_leave_places_empty() -> None:
    made = by_topics(notes())
    made._attach("ledger")
    made.name_topics(["card"])
    assert texts_in(made, "topic 1") == ["my card", "card and transfer"]
    assert texts_in(made, "topic 2") == []


def test_topics_are_named_once_and_the_same_declaration_is_the_same_object() -> None:
    private = notes()
    made = by_topics(private)
    assert by_topics(private) is made
    named = made.name_topics(["card"])
    assert made.name_topics(["card"]) is named
    with pytest.raises(PrivateAccessError, match="found others"):
        made.name_topics(["transfer"])
    assert by_topics(private, dataset_id="another") is not made


def test_a_removed_unit_is_gone_from_its_topic() -> None:
    private = notes()
    made = by_topics(private)
    made._attach("ledger")
    made.name_topics(["card"])
    private.remove(0)
    assert texts_in(made, "topic 1") == ["card and transfer"]
    assert "my card" not in texts_in(made, None)


def test_the_units_stay_on_their_ledger_and_the_ledger_keeps_the_topics(tmp_path: Any) -> None:
    path = tmp_path / "ledger.db"
    budget = Budget(epsilon=1.0, delta=1e-6, store=SQLiteStore.new(path))
    private = notes()
    made = by_topics(private)
    budget.bind(made)
    budget.bind(made.name_topics(["card"]))
    assert private._ledger_id == budget.ledger_id
    report = budget.report()
    assert [each["dataset_id"] for each in report.datasets] == [
        "by topic",
        "by topic, topics named",
        "private-examples",
    ]
    assert verify_report(report).ok
    budget.close()
    # Another process, with the records read again and other topics.
    again = Budget.open(SQLiteStore(path))
    other = by_topics(notes())
    ledger._IDENTITIES.clear()
    again.bind(other)
    with pytest.raises(PrivacyBudgetMismatchError, match="topics named"):
        again.bind(other.name_topics(["transfer"]))
    with pytest.raises(PrivacyBudgetMismatchError):
        Budget(epsilon=1.0, delta=1e-6).bind(made)


def test_another_declaration_of_the_split_is_refused_and_hides_no_second_one() -> None:
    private = notes()
    made = by_topics(private)
    made.name_topics(["card", "transfer"])
    with pytest.raises(ConfigurationError, match="declared first"):
        made.redeclared(dataset_id="again", public_size={"topic 1": 50, "topic 2": 50})
    assert private.redeclared(dataset_id="again", public_size=100).dataset_id == "again"


def test_what_splits_is_hidden_where_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    made = by_topics(notes())

    def broken(*_: Any) -> Any:
        raise MemoryError(CANARY)

    monkeypatch.setattr(redeclared, "split_units", broken)
    with pytest.raises(RecordError) as caught:
        made.name_topics(["card"])
    assert CANARY not in str(caught.value)
    assert caught.value.__context__ is None
    monkeypatch.undo()
    made.name_topics(["card"])


def test_shows_nothing_and_is_no_copy() -> None:
    made = by_topics(notes())
    named = made.name_topics(["card"])
    for each in (made, named):
        assert CANARY not in repr(each)
        assert copy.deepcopy(each) is each
        with pytest.raises(PrivateAccessError):
            pickle.dumps(each)
    assert made.declaration["redeclared"] == {
        "from": "private-examples",
        "fold_case": True,
        "rule": 2,
        "by": "keywords",
    }


@pytest.mark.parametrize(
    "wrong",
    [
        {"dataset_id": "private-examples"},
        {"dataset_id": "x" * 195},
        {"topic_key": "text"},
        {"topic_key": "more"},
        {"public_size": 7},
        {"public_size": {}},
        {"public_size": {"topic 1": 0}},
    ],
)
def test_refuses_public_faults(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        by_topics(notes([{"text": "x", "more": "y"}], fields=("more",)), **wrong)


def test_refuses_examples_with_labels_and_what_is_none() -> None:
    labelled = PrivateExamples(
        [{"text": "x", "queue": "a"}], label_key="queue", labels=("a",), public_size=10, dataset_id="labelled"
    )
    with pytest.raises(ConfigurationError, match="without labels"):
        by_topics(labelled)
    with pytest.raises(ConfigurationError, match="PrivateExamples"):
        by_topics("notes")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="at most 2"):
        by_topics(notes()).name_topics(["a", "b", "c"])
    with pytest.raises(ConfigurationError, match="vocabulary"):
        by_topics(notes()).name_topics([])
    odd = TopicExamples(NOTES, public_size=10)
    with pytest.raises(ConfigurationError, match="split_by_topics"):
        odd.name_topics(["card"])
