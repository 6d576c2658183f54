"""Records that go on arriving: a record's block is its own, a person is one unit of a range, and nothing is shown."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models.fake import FakeListLLM
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate

from langchain_dpicl import DPFreeFormRunnable, PrivacyBudgetCallbackHandler, PrivateExamples
from langchain_dpicl.backends.fake import FakeBackend, scripted
from langchain_dpicl.baselines import demonstrations_without_privacy, real_demonstrations_without_privacy
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.cli.main import main
from langchain_dpicl.evaluation import Pure, Score, dp_choose, dp_evaluate
from langchain_dpicl.exceptions import (
    ConfigurationError,
    PrivacyBudgetMismatchError,
    PrivateAccessError,
    RecordError,
)
from langchain_dpicl.privacy.accounting.events import GaussianEvent
from langchain_dpicl.privacy.extensions.outcome_counts import split_in_parts
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.release.curator import opened
from langchain_dpicl.streams import PrivateRange, PrivateStream
from tests.stream_times import DAY, START
from tests.windows.oracle import Entry, one_row_each

pytestmark = pytest.mark.traced

CANARY = "ANNS-CARD-4711"


def stream(**declared: Any) -> PrivateStream:
    sizes = {7: 400, 30: 1200}
    return PrivateStream(**{"dataset_id": "d", "time_key": "at", "unit_key": "user", "public_size": sizes, **declared})


def record(user: object = "ann", text: str = "x", *, days: float = 5, **fields: Any) -> dict[str, Any]:
    return {"user": user, "text": text, "at": START - days * DAY, **fields}


def texts(some: PrivateExamples) -> list[tuple[str, ...]]:
    pool = some._open(None)
    return sorted(tuple(each["text"] for each in pool.records(place)) for place in range(pool.num_units))


@pytest.mark.parametrize("sizes", [{7: CANARY}, {CANARY: 400}])
def test_what_was_passed_for_public_sizes_is_not_shown(sizes: dict[Any, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"expected an integer >= 1, found 'str'") as refused:
        stream(public_size=sizes)
    assert CANARY not in "".join(traceback.format_exception(refused.value))


def test_a_person_is_one_unit_of_a_range_with_the_newest_records_in_whatever_order_they_came() -> None:
    records = [record(text=f"{days} days ago", days=days) for days in range(2, 20)] + [record("bob", "b", days=3)]
    for seed in range(5):
        random.Random(seed).shuffle(records)
        some = stream(records_per_unit=2)
        some.extend(records[:7])
        some.extend(iter(records[7:]))
        some.extend(records)  # again changes nothing
        assert texts(some.last(10)) == [("2 days ago", "3 days ago"), ("b",)]
        assert texts(some.between("2026-05-20", "2026-05-22")) == [("10 days ago", "11 days ago")]


def test_a_persons_label_is_the_most_frequent_one_of_the_range() -> None:
    some = stream(label_key="queue", labels=("a", "b"))
    some.extend([record(days=days, queue=queue, text=queue) for days, queue in [(2, "a"), (20, "b"), (21, "b")]])
    wide, late = some.last(30), some.last(7)
    assert [wide._open(label).num_units for label in "ab"] == [0, 1]
    assert [late._open(label).num_units for label in "ab"] == [1, 0]


@pytest.mark.parametrize("seed", range(4))
def test_ranges_read_what_an_oracle_reads(seed: int) -> None:
    rng = random.Random(seed)
    entries = [
        Entry(rng.randrange(6), rng.randrange(10), 0, rng.randrange(2), rng.randrange(3), number)
        for number in range(40)
    ]
    some = stream(label_key="queue", labels=("0", "1"))
    first = some._terms.block_at(START) - 12
    start = some._terms.start_of(first).timestamp()
    some.extend(
        {"user": e.person, "text": str(e.vote), "queue": str(e.label), "at": start + e.block * DAY + e.order}
        for e in entries
    )
    for low in range(10):
        for high in range(low, 10):
            span = [some._terms.start_of(first + block).date() for block in (low, high)]
            pool = some.between(*span)._open(None)
            rows = [pool.records(place) for place in range(pool.num_units)]
            newest = one_row_each(entries, low, high)
            assert len(rows) == sum(newest.values())  # one row a person
            assert all(len(row) == 1 for row in rows)


def test_a_records_block_is_a_function_of_its_time_alone() -> None:
    east = timezone(timedelta(hours=9))
    same = [
        "2026-05-20T23:30:00+00:00",
        "2026-05-20T23:30:00Z",
        datetime(2026, 5, 21, 8, 30, tzinfo=east),
        datetime(2026, 5, 20, tzinfo=UTC),
        date(2026, 5, 20),
        "2026-05-20",
        datetime(2026, 5, 20, 1, tzinfo=UTC).timestamp(),
    ]
    some = stream()
    some.extend([{"user": number, "text": "x", "at": at} for number, at in enumerate(same)])
    assert len(texts(some.between("2026-05-20", date(2026, 5, 20)))) == len(same)
    assert texts(some.between("2026-05-21", "2026-05-22")) == []


@pytest.mark.parametrize(("block", "length"), [("hour", 1), ("day", 24), ("week", 168)])
def test_blocks_are_hours_days_or_weeks(block: str, length: int) -> None:
    some = stream(block=block, grace=0)
    first, last = some.last(3).blocks
    assert last - first == 2
    assert some._terms.start_of(last + 1) - some._terms.start_of(last) == timedelta(hours=length)
    assert some._terms.start_of(last + 1).timestamp() <= START < some._terms.start_of(last + 2).timestamp()


def test_blocks_are_read_when_their_grace_is_over(clock: list[float]) -> None:
    some = stream(grace=2)
    assert repr(some.last(1)) == "PrivateRange(dataset_id='d', 2026-05-29 to 2026-05-29, content=<private>)"
    with pytest.raises(ConfigurationError, match="expected blocks that are closed"):
        some.between("2026-05-20", "2026-05-30")
    clock[0] += DAY
    some.between("2026-05-20", "2026-05-30")


def test_late_records_are_dropped_and_old_ones_are_forgotten(clock: list[float]) -> None:
    some = stream(retention=20)
    some.extend([record("old", "o", days=19), record("new", "n", days=10)])
    some.between("2026-05-12", "2026-05-25")
    some.extend([record("late", "l", days=9), record("fresh", "f", days=4)])
    assert texts(some.last(18)) == [("f",), ("n",), ("o",)]
    clock[0] += 5 * DAY
    with pytest.raises(ConfigurationError, match="which are kept"):
        some.between("2026-05-12", "2026-05-25")
    assert texts(some.last(18)) == [("f",), ("n",)]


def test_a_removed_person_is_gone_from_every_range_and_brings_nothing_back() -> None:
    some = stream()
    some.extend([record(), record("bob", "b"), record(7, "seven")])
    before = some.last(10)
    some.remove("ann")
    some.remove("7")  # as 7
    some.remove("nobody")
    assert texts(before) == [(), (), ("b",)]  # their places stay
    assert texts(some.last(11)) == [("b",)]
    with pytest.raises(ConfigurationError, match="person"):
        some.remove(1.5)  # type: ignore[arg-type]


def test_a_person_removed_through_a_range_is_gone_from_the_stream() -> None:
    some = stream()
    some.extend([record(), record("bob", "b")])
    one, other = some.last(10), some.last(11)
    one.remove("ann")
    assert texts(one) == texts(other) == [(), ("b",)]
    del one, other
    gc.collect()  # a range is made anew once nobody holds it
    assert texts(some.last(10)) == [("b",)]
    with pytest.raises(ConfigurationError, match="unit"):
        some.last(10).remove(1.5)  # type: ignore[arg-type]


class Raising(tzinfo):
    """A zone that raises."""

    def utcoffset(self, _: Any) -> Any:
        raise ValueError(CANARY)


BAD = [
    [record(text=CANARY, at="2026-05-20T10:00:00")],
    [record(text=CANARY, at=None)],
    [record(text=CANARY, at=float("nan"))],
    [record(text=CANARY, at=1e300)],
    [record(text=CANARY, at="soon")],
    [record(text=CANARY, at=True)],
    [{"user": CANARY, "text": "x"}],
    [{"text": CANARY, "at": START}],
    [record(text=CANARY, at="0001-01-01T00:00:00+14:00"), record(text=CANARY, at="9999-12-31T23:59:59-14:00")],
    [CANARY],
    [1],
    [record(10**5000)],
    [record(text=CANARY, at=datetime(2026, 5, 20, tzinfo=Raising()))],
]


@pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
def test_what_is_no_record_is_left_out_alone_and_not_shown(bad: list[Any]) -> None:
    """One person's record must not decide whether those of all others are read."""
    others = [record(), record("bob", "b")]
    for records in ([*bad, *others], [*others, *bad], [others[0], *bad, others[1]]):
        some = stream()
        with pytest.raises(RecordError, match="left out, and all else was added") as found:
            some.extend(records)
        shown = "".join(traceback.format_exception(found.value))
        assert CANARY not in shown
        assert found.value.__cause__ is None
        assert texts(some.last(30)) == [("b",), ("x",)]


def test_what_holds_no_records_is_refused_and_not_shown() -> None:
    some = stream()
    with pytest.raises(RecordError, match="Nothing was added") as found:
        some.extend(CANARY)
    assert CANARY not in "".join(traceback.format_exception(found.value))
    assert texts(some.last(30)) == []


def test_an_error_of_the_source_is_not_shown() -> None:
    def broken() -> Iterator[Any]:
        yield record()
        raise ValueError(CANARY)

    some = stream()
    with pytest.raises(RecordError, match="could not be read") as found:
        some.extend(broken())
    assert CANARY not in "".join(traceback.format_exception(found.value))
    assert texts(some.last(30)) == []


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ({"public_size": 400}, "people by the length"),
        ({"public_size": {}}, "people by the length"),
        ({"public_size": {0: 5}}, "public_size"),
        ({"public_size": {7: 400, 30: "x"}}, "public_size: expected an integer >= 1, found 'str'"),
        ({"public_size": {7: 400, "x": 500}}, "length of a range in public_size"),
        ({"public_size": {7: 500, 30: 400}}, "no fewer people"),
        ({"unit_key": None}, "unit_key"),
        ({"block": "month"}, "block"),
        ({"grace": -1}, "grace"),
        ({"retention": 0}, "retention"),
        ({"time_key": ""}, "time_key"),
        ({"label_key": "queue"}, "labels"),
    ],
)
def test_what_is_declared_wrongly_is_refused(declared: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        stream(**declared)


@pytest.mark.parametrize("span", [("2026-05-22", "2026-05-20"), ("soon", "2026-05-20"), ("1999-01-01", "1999-01-02")])
def test_what_is_no_range_of_days_is_refused(span: tuple[str, str]) -> None:
    with pytest.raises(ConfigurationError):
        stream().between(*span)


def test_runs_that_can_touch_a_window_are_counted() -> None:
    for length, every, window, runs in [
        (90, 7, 1, 13),
        (90, 7, 30, 17),
        (30, 1, 30, 59),
        (7, 7, 30, 6),
        (30, 30, 30, 2),
    ]:
        assert stream().rolling(length, every=every).runs_per_window(window) == runs
        touched = [end for end in range(0, 2000, every) if end >= 1000 and end - length + 1 <= 1000 + window - 1]
        assert len(touched) <= runs


def test_neither_a_stream_nor_a_range_is_copied_or_shown() -> None:
    some = stream()
    some.extend([record(CANARY, CANARY)])
    for each in (some, some.last(30), some.rolling(30, every=7)):
        assert CANARY not in repr(each) + str(each) + f"{each}"
        assert copy.deepcopy(each) is each
        with pytest.raises(PrivateAccessError):
            pickle.dumps(each)
    with pytest.raises(PrivateAccessError):
        len(some.last(30))


# -- budgets ----------------------------------------------------------------------------------------------------------


def test_a_budget_for_windows_takes_ranges_and_one_for_life_takes_none() -> None:
    windows, life = Budget(epsilon=1.0, delta=1e-6, per="30 days"), Budget(epsilon=1.0, delta=1e-6)
    some = stream()
    windows.bind(some.last(30))
    windows.bind(some.last(7))  # the same stream
    (line,) = windows._store.records()
    assert line.body["stream"] == {"time_key": "at", "block": "P1D", "grace": 1, "sizes": {"7": 400, "30": 1200}}
    assert line.body["public_size"] == 1200
    with pytest.raises(ConfigurationError, match="whose promise is for windows"):
        life.bind(stream(dataset_id="e").last(7))
    with pytest.raises(ConfigurationError, match="ranges of a stream"):
        windows.bind(PrivateExamples(["x"], public_size=100, dataset_id="f"))
    with pytest.raises(ConfigurationError, match="block"):
        windows.bind(stream(dataset_id="g", block="week").last(2))
    with pytest.raises(PrivacyBudgetMismatchError, match="already names other examples"):
        windows.bind(stream().last(7))
    with pytest.raises(ConfigurationError, match="longest range"):
        Budget(epsilon=1.0, delta=1e-4, per="30 days").bind(stream(dataset_id="h").last(7))
    with pytest.raises(PrivacyBudgetMismatchError):
        Budget(epsilon=1.0, delta=1e-6, per="30 days").bind(some.last(7))


def test_a_ticket_reads_the_blocks_that_it_was_charged_for_and_no_others() -> None:
    budget, some = Budget(epsilon=1.0, delta=1e-6, per="30 days"), stream()
    budget.bind(some.last(7))
    event = GaussianEvent(50.0)
    share = budget.declare("c", tickets=[Ticket("run", event, max_count=2)], epsilon=1.0, extent=(0, None))
    ticket = share.reserve("run", blocks=some.last(7).blocks)
    with pytest.raises(PrivacyBudgetMismatchError, match="the blocks that are read"):
        opened(some.last(8), ticket, event, "add_remove", gap=0.0)
    assert ticket.unburnt == 1
    opened(some.last(7), ticket, event, "add_remove", gap=0.0)
    ordinary = Budget(epsilon=1.0, delta=1e-6)
    private = PrivateExamples(["x"], public_size=100, dataset_id="d")
    ordinary.bind(private)
    with pytest.raises(PrivacyBudgetMismatchError, match="the blocks that are read"):
        opened(private, ticket, event, "add_remove", gap=0.0)


@pytest.mark.parametrize("kind", ["last", "rolling", "stream"])
def test_a_component_that_reads_no_streams_says_so(kind: str) -> None:
    some = stream()
    given: Any = {"last": some.last(7), "rolling": some.rolling(7, every=7), "stream": some}[kind]
    engine = FakeBackend(scripted({" a": 0.6}), max_top_k=5)
    budget = Budget(epsilon=1.0, delta=1e-6, per="30 days")
    with pytest.raises(ConfigurationError, match="only DPFewShotPromptTemplate"):
        DPFreeFormRunnable.from_private_examples(given, llm=engine, budget=budget, epsilon=1.0, max_queries=3)
    assert not budget._store.records()


def test_a_range_is_made_by_a_stream_alone_and_is_not_split_anew() -> None:
    with pytest.raises(ConfigurationError, match="range of one"):
        stream().last(7).redeclared(dataset_id="e", public_size=3)
    with pytest.raises(ConfigurationError, match=r"stream\.last"):
        PrivateRange()


def other_readers() -> dict[str, Callable[[Any, Budget], object]]:
    """What reads private examples through no constructor, each with what it needs beside them and a budget."""
    engine = FakeBackend(scripted({" a": 0.6}), max_top_k=5)
    chain = PromptTemplate.from_template("{text}") | FakeListLLM(responses=["x"]) | StrOutputParser()
    same = Score(Pure(lambda answer: 0.0), marks=(0.0, 1.0))
    return {
        "evaluate": lambda some, budget: dp_evaluate(chain, some, evaluators=same, budget=budget, epsilon=0.1),
        "choose": lambda some, budget: dp_choose({"a": chain, "b": chain}, some, evaluator=same, budget=budget),
        "parts": lambda some, _: split_in_parts(some),
        "without privacy": lambda some, _: demonstrations_without_privacy(some, llm=engine, instruction="Write."),
        "real": lambda some, _: real_demonstrations_without_privacy(some),
    }


@pytest.mark.parametrize("reader", other_readers())
@pytest.mark.parametrize("per", ["30 days", "life"])
def test_what_reads_no_streams_refuses_a_range_before_a_line_is_written_or_a_pool_is_opened(
    reader: str, per: str
) -> None:
    budget, some = Budget(epsilon=1.0, delta=1e-6, per=per), stream()
    some.extend([record()])
    with pytest.raises(ConfigurationError, match=r"no stream|Of a stream"):
        other_readers()[reader](some.last(7), budget)
    assert not budget._store.records()
    Budget(epsilon=1.0, delta=1e-6, per="30 days").bind(some.last(7))  # nothing was read without a charge


def test_a_limit_is_not_shown_without_the_window_that_it_is_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for per, shown in (("30 days", True), ("life", False)):
        place = tmp_path / f"{per[:2]}.db"
        budget = PrivacyBudgetCallbackHandler.create(place, epsilon=1.0, delta=1e-6, per=per)
        assert ("per='30 days'" in repr(budget)) is shown
        budget.budget.close()
        assert main(["ledger", "verify", str(place)]) == 0
        assert ("per 30 days" in capsys.readouterr().out) is shown
