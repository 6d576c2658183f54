from __future__ import annotations

import copy
import gc
import inspect
import json
import math
import os
import pickle
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from langchain_core.documents import Document

from langchain_dpicl import Budget, verify_report
from langchain_dpicl.exceptions import (
    ConfigurationError,
    ExactSizeWarning,
    LargeDeltaWarning,
    PrivacyBudgetMismatchError,
    PrivateAccessError,
    RecordError,
)
from langchain_dpicl.privacy.private_examples import Pool, PrivateExamples
from langchain_dpicl.reports.rendering import page_of

CANARY = "zx-example-canary-58"
QUEUES = ("billing", "login")


def examples(records: Any = None, **changes: Any) -> PrivateExamples:
    found = [{"text": f"{CANARY} {i}", "queue": QUEUES[i % 2]} for i in range(7)] if records is None else records
    given: dict[str, Any] = {"public_size": 500, "label_key": "queue", "labels": QUEUES, **changes}
    return PrivateExamples(found, **given)


def texts(private: PrivateExamples, label: str | None = None) -> list[list[str]]:
    private._attach("ledger")
    pool = private._pool(label, ledger_id="ledger")
    return [[record["text"] for record in pool.records(position)] for position in range(pool.num_units)]


def shown_by(error: BaseException | None) -> str:
    """Everything an error report may print: text, chain, and the locals of our own frames."""
    lines: list[str] = []
    while error is not None:
        lines += [repr(error), str(error), repr(error.args), repr(vars(error))]
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if f"{os.sep}langchain_dpicl{os.sep}" in frame.f_code.co_filename:
                lines += [repr(value) for value in frame.f_locals.values()]
        error = error.__cause__ or error.__context__
    return "\n".join(lines)


# --- opacity ----------------------------------------------------------------------------------------------------


def test_nothing_python_shows_of_the_examples_holds_content_or_counts() -> None:
    few, many = examples(), examples([{"text": f"{CANARY}{i}", "queue": "login"} for i in range(90)])
    for show in (repr, str, format, lambda p: f"{p:>80}", dir, lambda p: repr(p.declaration), lambda p: p.fields):
        assert CANARY not in str(show(few))
        assert str(show(few)) == str(show(many))
    for slot in PrivateExamples.__slots__:
        assert CANARY not in repr(getattr(few, slot))
    assert few.__sizeof__() == many.__sizeof__()
    with pytest.raises(TypeError):
        vars(few)


def test_the_content_is_reachable_through_closures_only() -> None:
    private = examples()
    direct = [value for value in gc.get_referents(private) if not inspect.isfunction(value)]
    assert CANARY not in repr(direct)
    assert CANARY not in repr(inspect.getmembers(private))


@pytest.mark.parametrize(
    "ask", [len, iter, list, dict, lambda p: p[0], lambda p: p["text"], lambda p: CANARY in p, sorted, json.dumps]
)
def test_there_is_no_length_iteration_or_lookup(ask: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError) as caught:
        ask(examples())
    assert CANARY not in shown_by(caught.value)


def test_equality_and_hash_are_identity() -> None:
    one, other = examples(), examples()
    assert one == one  # noqa: PLR0124
    assert one != other
    assert len({one, other, one}) == 2
    assert bool(examples([])) is True


def test_a_copy_is_the_same_object_and_a_pickle_is_refused() -> None:
    private = examples()
    assert copy.copy(private) is private
    assert copy.deepcopy({"held": private})["held"] is private
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(PrivateAccessError) as caught:
            pickle.dumps(private, protocol)
        assert CANARY not in shown_by(caught.value)


def test_a_pool_shows_nothing_either() -> None:
    private = examples()
    private._attach("ledger")
    pool = private._pool(None, ledger_id="ledger")
    assert repr(pool) == str(pool) == "Pool(<private>)"
    assert copy.deepcopy(pool) is pool
    with pytest.raises(PrivateAccessError):
        pickle.dumps(pool)
    for position in (-1, 7, 10**9):
        with pytest.raises(PrivateAccessError) as caught:
            pool.records(position)
        assert CANARY not in shown_by(caught.value)


# --- record faults ----------------------------------------------------------------------------------------------


class Broken(Mapping[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise ValueError(f"{CANARY} {key}")

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def failing() -> Iterator[Any]:
    yield {"text": CANARY, "queue": "login"}
    raise UnicodeDecodeError("utf-8", CANARY.encode(), 0, 1, "bad byte")


class Loud:
    """An iterator whose repr shows what it holds."""

    def __init__(self) -> None:
        self.left = [{"text": CANARY}, {"text": CANARY}]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self.left.pop()

    def __repr__(self) -> str:
        return f"Loud({self.left})"


GOOD = {"text": f"good {CANARY}", "queue": "login"}
RECORD_FAULTS: list[Any] = [
    [GOOD, {"text": CANARY}],
    [GOOD, {"queue": "login", "other": CANARY}],
    [GOOD, {"text": CANARY, "queue": CANARY}],
    [GOOD, {"text": [CANARY], "queue": "login"}],
    [GOOD, {"text": None, "queue": "login", "x": CANARY}],
    [GOOD, {"text": CANARY.encode(), "queue": "login"}],
    [GOOD, {"text": CANARY, "queue": 7}],
    [GOOD, CANARY],
    [GOOD, [CANARY]],
    [GOOD, None],
    [GOOD, Broken()],
    failing(),
    Loud(),
]


@pytest.mark.parametrize("records", RECORD_FAULTS, ids=lambda r: type(r).__name__)
def test_a_record_fault_hides_index_value_and_cause(records: Any) -> None:
    with pytest.raises(RecordError) as caught:
        examples(records)
    assert CANARY not in shown_by(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    assert "1" not in str(caught.value)


@pytest.mark.parametrize("user", [None, True, 1.5, ("u",)])
def test_a_record_without_a_unit_is_a_record_fault(user: Any) -> None:
    with pytest.raises(RecordError) as caught:
        examples([{**GOOD, "user": user}], unit_key="user")
    assert CANARY not in shown_by(caught.value)


def test_the_same_fault_reads_the_same_wherever_it_stands() -> None:
    messages = set()
    for position in (0, 5, 30):
        records = [GOOD] * 40
        records[position] = {"text": CANARY, "queue": "other"}
        with pytest.raises(RecordError) as caught:
            examples(records)
        messages.add(str(caught.value))
    assert len(messages) == 1


@pytest.mark.parametrize("records", [CANARY, CANARY.encode(), {"text": CANARY}, 7, None, SimpleNamespace(iloc=CANARY)])
def test_a_wrong_container_is_refused_by_its_type_alone(records: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        PrivateExamples(records, public_size=5)
    assert CANARY not in shown_by(caught.value)


def test_a_public_fault_shows_no_record_either() -> None:
    with pytest.raises(ConfigurationError) as caught:
        examples([GOOD], public_size=0)
    assert CANARY not in shown_by(caught.value)


def test_public_size_has_no_default() -> None:
    with pytest.raises(ConfigurationError, match=r"public_size: expected the declared number .* Give PrivateExamples"):
        PrivateExamples([GOOD])


# --- content ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("records", [[], (), iter([]), (x for x in [])])
def test_no_records_at_all_are_fine(records: Any) -> None:
    private = examples(records)
    assert texts(private) == []
    assert texts(private, "login") == []


def test_plain_texts_are_records_of_the_text_key() -> None:
    assert texts(PrivateExamples(["one {x}", "two"], public_size=9)) == [["one {x}"], ["two"]]
    with pytest.raises(RecordError):
        PrivateExamples(["one"], public_size=9, unit_key="user")


def test_labels_split_the_units_and_none_is_all_of_them() -> None:
    private = examples([{"text": t, "queue": q} for t, q in (("a", "login"), ("b", "billing"), ("c", "login"))])
    assert texts(private, "login") == [["a"], ["c"]]
    assert texts(private, "billing") == [["b"]]
    assert texts(private) == [["a"], ["b"], ["c"]]
    for label in ("other", 1, ["login"]):
        with pytest.raises(ConfigurationError):
            private._pool(label, ledger_id="ledger")  # type: ignore[arg-type]


def test_a_user_goes_to_one_label_as_a_whole() -> None:
    rows = [("u", "a", "login"), ("v", "b", "billing"), ("u", "c", "billing"), ("u", "d", "login")]
    records = [{"user": user, "text": text, "queue": queue} for user, text, queue in rows]
    private = examples(records, unit_key="user", records_per_unit=5)
    assert texts(private, "login") == [["a", "d"]]
    assert texts(private, "billing") == [["b"]]


def test_records_handed_out_are_copies() -> None:
    private = examples([GOOD])
    private._attach("ledger")
    pool = private._pool("login", ledger_id="ledger")
    pool.records(0)[0]["text"] = "changed"
    assert pool.records(0)[0]["text"] == GOOD["text"]


def test_documents_become_records() -> None:
    documents = [
        SimpleNamespace(page_content="a", metadata={"queue": "login", "text": "metadata loses"}),
        SimpleNamespace(page_content="b", metadata={"queue": "billing"}),
    ]
    private = PrivateExamples(documents, public_size=9, label_key="queue", labels=QUEUES)
    assert texts(private, "login") == [["a"]]
    renamed = PrivateExamples(iter(documents), public_size=9, text_key="body")
    renamed._attach("ledger")
    assert renamed._pool(None, ledger_id="ledger").records(1) == ({"body": "b"},)


@pytest.mark.parametrize(
    "document",
    [
        SimpleNamespace(page_content=CANARY),
        SimpleNamespace(page_content=CANARY, metadata=[CANARY]),
        SimpleNamespace(metadata={"text": CANARY}),
        SimpleNamespace(page_content=None, metadata={"text": CANARY}),
        SimpleNamespace(page_content=[CANARY], metadata={}),
    ],
)
def test_what_is_no_document_is_a_record_fault(document: Any) -> None:
    with pytest.raises(RecordError) as caught:
        PrivateExamples([document], public_size=9)
    assert CANARY not in shown_by(caught.value)


class PolarsFrame:
    """As much of a polars frame as is asked of one."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows
        self.columns = list(rows[0])

    def __iter__(self) -> Iterator[Any]:
        return iter(self.columns)  # as in polars: no records

    def iter_rows(self, *, named: bool) -> Iterator[Any]:
        return (row if named else tuple(row.values()) for row in self._rows)


class PandasFrame:
    """As much of a pandas frame as is asked of one."""

    iloc = None

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows
        self.columns = list(rows[0])

    def __iter__(self) -> Iterator[Any]:
        return iter(self.columns)

    def to_dict(self, orient: str) -> list[dict[str, Any]]:
        assert orient == "records"
        return self._rows


class PandasSeries(list[str]):
    """As much of a pandas series as is asked of one."""

    iloc = None

    def to_dict(self) -> dict[int, str]:
        return dict(enumerate(self))


class WithPages(PandasFrame):
    """A frame with columns called page_content and readline, which are attributes too."""

    page_content = readline = None


NOTES = [{"text": "a", "queue": "login"}, {"text": "b", "queue": "billing"}, {"text": "c", "queue": "login"}]


@pytest.mark.parametrize(
    "source",
    [
        tuple(NOTES),
        (note for note in NOTES),
        PandasFrame(NOTES),
        WithPages(NOTES),
        PolarsFrame(NOTES),
        [Document(note["text"], id="7", metadata={"queue": note["queue"], "page": 3}) for note in NOTES],
        SimpleNamespace(lazy_load=lambda: iter(NOTES)),
    ],
    ids=["tuple", "iterator", "pandas", "pandas of pages", "polars", "documents", "loader"],
)
def test_any_container_of_records_is_read(source: Any) -> None:
    private = examples(source)
    assert texts(private, "login") == [["a"], ["c"]]
    assert texts(private) == [["a"], ["b"], ["c"]]


def test_a_column_of_texts_is_read() -> None:
    assert texts(PrivateExamples(PandasSeries(["x", "y"]), public_size=9)) == [["x"], ["y"]]


@pytest.mark.parametrize(
    ("label", "as_text"),
    [(0, "0"), (1, "1"), (True, "true"), (False, "false"), (np.int64(1), "1"), (np.True_, "true"), ("yes", "yes")],
)
def test_integer_and_boolean_labels_are_read_as_text_where_that_was_asked_for(label: Any, as_text: str) -> None:
    private = PrivateExamples(
        [{"text": "a", "label": label}],
        label_key="label",
        labels=(label, "other"),
        public_size={label: 30, "other": 20},
        labels_as_text=True,
    )
    assert private.labels == (as_text, "other")
    assert private.public_size == {as_text: 30, "other": 20}
    assert texts(private, as_text) == [["a"]]


def test_sizes_of_labels_that_are_one_text_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="public_size: expected one number per label"):
        PrivateExamples(
            [], label_key="label", labels=(1, "other"), public_size={1: 30, "1": 20, "other": 10}, labels_as_text=True
        )


@pytest.mark.parametrize(("label", "kind"), [(4711, "an integer"), (True, "a boolean")])
def test_without_it_the_error_names_the_kind_and_the_option_and_no_value(label: Any, kind: str) -> None:
    with pytest.raises(RecordError, match=f"a record has {kind}. Give labels_as_text=True") as caught:
        examples([{"text": "a", "queue": label}])
    assert "4711" not in shown_by(caught.value)
    with pytest.raises(ConfigurationError, match=r"labels: expected text, found .*labels_as_text=True"):
        examples([], labels=[label, "login"])


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, r"none\. Leave out records without one"),
        (math.nan, r"none\. Leave out records without one"),
        (1.5, r"another number\. Write str\(\.\.\.\) around it"),
        ([CANARY], r"a value of another type\. Put its text, such as 2026-03-02 for a date, into a field of its own"),
        (7, r"an integer\. Write str\(\.\.\.\) around it"),
    ],
)
def test_what_stands_in_the_place_of_a_text_is_said_by_its_kind(value: Any, kind: str) -> None:
    with pytest.raises(RecordError, match=f"expected text under 'text'; a record has {kind}. Index") as caught:
        PrivateExamples([{"text": value}], public_size=9)
    assert CANARY not in shown_by(caught.value)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("", r"none\. Leave out records without one: under one text they would be one unit"),
        (" \t", r"none\. Leave out records without one: under one text they would be one unit"),
        (5.0, r"neither\. Make it an integer: a column with gaps holds 1\.0 for 1"),
        (True, r"neither\. Write str\(\.\.\.\) around it"),
    ],
)
def test_what_names_no_unit_is_refused_as_a_missing_name_is(value: Any, said: str) -> None:
    records = [{"text": CANARY, "user": "ann"}, {"text": CANARY, "user": value}]
    with pytest.raises(RecordError, match=f"expected text or an integer under 'user'; a record has {said}") as caught:
        PrivateExamples(records, unit_key="user", public_size=9)
    assert CANARY not in shown_by(caught.value)


@pytest.mark.parametrize("ask", [len, list, lambda private: private[0], lambda private: "a" in private, sorted])
def test_length_index_and_iteration_say_why_there_is_none(ask: Callable[[Any], object]) -> None:
    messages = set()
    for records in ([], None):
        with pytest.raises(PrivateAccessError, match="has no length, index or iteration, because") as caught:
            ask(examples(records))
        messages.add(str(caught.value))
        assert CANARY not in shown_by(caught.value)
    assert len(messages) == 1
    assert bool(examples([])) is bool(examples()) is True


# --- sizes and delta ----------------------------------------------------------------------------------------------


def test_sizes_are_what_was_declared() -> None:
    one = examples(public_size=501, exact_size_is_public=True)
    assert one.public_size == 501
    assert (one.public_size_of(None), one.public_size_of("login")) == (501, 250)
    per_label = examples(public_size={"login": 20, "billing": 5})
    assert per_label.public_size == {"billing": 5, "login": 20}
    assert (per_label.public_size_of(None), per_label.public_size_of("login")) == (25, 20)
    assert examples(public_size=1).public_size_of("login") == 1
    with pytest.raises(ConfigurationError):
        one.public_size_of("other")


@pytest.mark.parametrize("size", [1, 7, 99, 120, 900, 12_000, 650_000])
def test_a_round_size_is_not_warned_about(size: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        examples(public_size=size)


def test_a_size_that_reads_like_a_count_is_warned_about_once_whatever_the_records_are() -> None:
    for records, size in ([], 17_293), (None, 17_294):
        with pytest.warns(ExactSizeWarning, match=f"public_size: {size} reads like .* such as 17000") as caught:
            assert examples(records, public_size=size).public_size == size
        assert [warning.filename for warning in caught] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            examples(records, public_size=size)


def test_sizes_of_labels_are_read_one_by_one_and_an_exact_size_may_be_public() -> None:
    sizes = {"login": 1_731, "billing": 300}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        examples(public_size=sizes, exact_size_is_public=True)
    with pytest.warns(ExactSizeWarning, match="1731"):
        examples(public_size=sizes)
    with pytest.raises(ConfigurationError, match="exact_size_is_public: expected True or False, found 'yes'"):
        examples(exact_size_is_public="yes")


def test_declared_values_are_read_only_and_detached() -> None:
    private = examples(public_size={"login": 20, "billing": 5}, unit_key=None, fields=("text",), max_chars=9)
    size = private.public_size
    assert isinstance(size, dict)
    size["login"] = 1
    assert private.public_size_of("login") == 20
    with pytest.raises(AttributeError):
        private.public_size = 3  # type: ignore[misc]
    assert (private.text_key, private.label_key, private.labels) == ("text", "queue", QUEUES)
    assert (private.unit_key, private.fields, private.max_chars) == (None, ("text", "queue"), 9)
    assert (private.records_per_unit, private.dataset_id) == (1, "private-examples")
    assert PrivateExamples([], public_size=1).labels is None


def test_delta_above_a_tenth_of_a_unit_is_refused() -> None:
    private = examples(public_size={"login": 900, "billing": 100})
    private.check_delta(1e-4)
    with pytest.raises(ConfigurationError, match=r"1/\(10 \* public_size\)"):
        private.check_delta(1.01e-4)
    with pytest.raises(ConfigurationError, match=rf"= {1 / 1370} for .*, found 0\.00073\."):
        examples(public_size=137).check_delta(0.00073)  # as much in three digits
    for delta in (-1e-9, 1.0, float("nan"), True):
        with pytest.raises(ConfigurationError):
            private.check_delta(delta)


def test_a_declaration_allows_a_delta_of_one_in_the_size_and_warns() -> None:
    private = examples(public_size=1000, allow_large_delta=True)
    assert private.declaration["allow_large_delta"] is True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        private.check_delta(1e-4)
    with pytest.warns(LargeDeltaWarning, match=r"with a chance of 100%"):
        private.check_delta(1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        private.check_delta(1e-3)  # once is enough
    with pytest.raises(ConfigurationError, match=r"at most 1/public_size = 0\.001"):
        private.check_delta(1.01e-3)
    assert "allow_large_delta" not in examples(public_size=1000).declaration  # lines of ledgers stay as they were
    with pytest.raises(ConfigurationError, match="allow_large_delta"):
        examples(public_size=1000, allow_large_delta="yes")


def test_a_large_delta_stands_in_the_report_and_is_verified() -> None:
    private = examples(public_size=1000, allow_large_delta=True)
    budget = Budget(epsilon=1.0, delta=1e-3)
    with pytest.warns(LargeDeltaWarning):
        budget.bind(private)
    shown = budget.report()
    for text in (shown.to_text(), shown.to_markdown(), page_of(shown.to_dict(), ())):
        assert "a delta of up to 1/size is allowed" in text
    report = shown.to_dict()
    assert report["datasets"][0]["allow_large_delta"] is True
    assert verify_report(report).ok
    del report["datasets"][0]["allow_large_delta"]
    assert any("delta is above 1/(10 * public_size)" in problem for problem in verify_report(report).problems)


# --- removal ------------------------------------------------------------------------------------------------------


def test_removing_a_record_leaves_a_hole_and_every_position() -> None:
    private = examples([{"text": t, "queue": "login"} for t in "abc"])
    opened_before = texts(private)
    private.remove(1)
    assert opened_before == [["a"], ["b"], ["c"]]
    assert texts(private) == [["a"], [], ["c"]]
    assert texts(private, "login") == [["a"], [], ["c"]]
    assert private.public_size == 500


def test_a_pool_opened_before_sees_the_removal() -> None:
    private = examples([GOOD])
    private._attach("ledger")
    pool = private._pool("login", ledger_id="ledger")
    private.remove(0)
    assert (pool.num_units, pool.records(0)) == (1, ())


def test_removing_a_user_removes_all_of_that_user() -> None:
    records = [{"text": t, "queue": "login", "user": u} for t, u in (("a", 1), ("b", 2), ("c", 1))]
    private = examples(records, unit_key="user", records_per_unit=9)
    private.remove("1")
    assert texts(private) == [[], ["b"]]


def test_removal_does_not_say_whether_the_unit_was_there() -> None:
    keyed = examples([{**GOOD, "user": 1}], unit_key="user")
    answers = [keyed.remove(1), keyed.remove(1), keyed.remove("nobody"), examples().remove(10**9)]
    assert answers == [None] * 4


def test_only_the_type_of_a_unit_is_checked() -> None:
    keyed, counted = examples([{**GOOD, "user": 1}], unit_key="user"), examples()
    for unit in (True, 1.5, None):
        with pytest.raises(ConfigurationError):
            keyed.remove(unit)  # type: ignore[arg-type]
    for unit in (-1, True, "0"):
        with pytest.raises(ConfigurationError):
            counted.remove(unit)


def test_removed_content_is_forgotten() -> None:
    private = examples([{"text": "only-this-unit-" + CANARY, "queue": "login"}])
    cells = [cell.cell_contents for cell in private._open.__closure__ or ()]
    assert "only-this-unit" in repr([cell.contents for cell in cells])
    private.remove(0)
    assert "only-this-unit" not in repr([(cell.contents, cell.positions) for cell in cells])


# --- binding ------------------------------------------------------------------------------------------------------


def test_examples_bind_to_one_ledger_once() -> None:
    private = examples()
    private._attach("ledger")
    private._attach("ledger")
    with pytest.raises(PrivacyBudgetMismatchError):
        private._attach("other")
    assert isinstance(private._pool(None, ledger_id="ledger"), Pool)
    with pytest.raises(PrivacyBudgetMismatchError):
        private._pool(None, ledger_id="other")


def test_examples_open_for_no_ledger_before_they_are_bound() -> None:
    with pytest.raises(PrivacyBudgetMismatchError):
        examples()._pool(None, ledger_id="ledger")


def test_bound_examples_refuse_every_path_without_a_charge() -> None:
    private = examples()
    private._attach("ledger")
    with pytest.raises(PrivateAccessError):
        private._pool(None, ledger_id=None)


def test_examples_opened_without_privacy_can_never_be_bound() -> None:
    private = examples([GOOD])
    assert private._pool("login", ledger_id=None).records(0)[0]["text"] == GOOD["text"]
    with pytest.raises(PrivateAccessError):
        private._attach("ledger")
    with pytest.raises(PrivacyBudgetMismatchError):
        private._pool(None, ledger_id="ledger")


def test_of_two_ledgers_at_once_one_wins() -> None:
    for _ in range(20):
        private = examples([])

        def attach(number: int, private: PrivateExamples = private) -> int:
            try:
                private._attach(f"ledger {number}")
            except PrivacyBudgetMismatchError:
                return 0
            return 1

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(attach, range(8))) == 1


@pytest.mark.parametrize(
    "slip",
    [
        {"label_key": "q", "labels": ["CANARY 1", "CANARY 1", "CANARY 2"]},
        {"fields": ["CANARY", "CANARY"]},
        {"public_size": ["CANARY"]},
        {"public_size": "CANARY"},
    ],
    ids=["the label column", "a text column", "the records", "a record"],
)
def test_a_private_column_passed_by_mistake_is_not_printed(slip: dict) -> None:
    given = {"public_size": 10, **slip}
    with pytest.raises(ConfigurationError) as caught:
        PrivateExamples([{"text": "x", "q": "y"}], **given)
    assert "CANARY" not in str(caught.value)


def test_removing_by_text_where_units_are_positions_does_not_print_it() -> None:
    with pytest.raises(ConfigurationError) as caught:
        PrivateExamples(["x"], public_size=10).remove("CANARY")
    assert "CANARY" not in str(caught.value)
