from __future__ import annotations

import contextlib
from typing import Any

import pytest

from langchain_dpicl import stores
from langchain_dpicl.exceptions import ConfigurationError, LedgerError
from langchain_dpicl.privacy.ledger.state import LedgerState
from langchain_dpicl.privacy.ledger.store import LineBlock, next_record
from langchain_dpicl.stores.rows import (
    LedgerHead,
    check_bindings,
    check_seconds,
    header_of,
    header_text,
    record_of,
    records_of,
    row_of,
)
from tests.contracts.store import header

FIRST = next_record(0, header().digest, "note", {"x": 0.1, "text": "é\0\N{SNOWMAN}"})
SECOND = next_record(1, FIRST.hash, "note", {})
ROWS = [row_of(FIRST), row_of(SECOND)]
HEAD = LedgerHead(2, SECOND.hash)


def test_a_line_survives_its_row() -> None:
    assert records_of(ROWS, after=0, head=HEAD) == (FIRST, SECOND)
    assert records_of(ROWS[1:], after=1, head=HEAD) == (SECOND,)
    assert records_of([], after=2, head=HEAD) == ()


@pytest.mark.parametrize("column", range(6))
@pytest.mark.parametrize("value", [None, b"1", 1.0, True, ["x"]], ids=repr)
def test_a_value_of_another_type_is_no_line(column: int, value: Any) -> None:
    row = [*ROWS[0][:column], value, *ROWS[0][column + 1 :]]
    with pytest.raises(LedgerError, match="found another row"):
        records_of([row, ROWS[1]], after=0, head=HEAD)


@pytest.mark.parametrize("body", ["", "{", "[]", "7", "null", '"x"', "[" * 100_000], ids=range(7))
def test_a_body_that_is_no_object_is_no_line(body: str) -> None:
    with pytest.raises(LedgerError, match="found another row") as caught:
        records_of([(*ROWS[0][:3], body, *ROWS[0][4:]), ROWS[1]], after=0, head=HEAD)
    assert caught.value.__context__ is None


@pytest.mark.parametrize(
    "value",
    ["NaN", "Infinity", "-Infinity", "1e400", "[-1e400]", r'"\ud800"', r'{"\udfff": 1}', "[" * 100_000 + "]" * 100_000],
    ids=range(8),
)
def test_a_body_without_a_hash_is_no_line(value: str) -> None:
    with pytest.raises(LedgerError, match="found another row") as caught:
        records_of([(*ROWS[0][:3], f'{{"x": {value}}}', *ROWS[0][4:]), ROWS[1]], after=0, head=HEAD)
    assert caught.value.__context__ is None
    with pytest.raises(LedgerError, match="header is broken"):
        header_of(f'{{"x": {value}}}', header().digest)


@pytest.mark.parametrize(
    ("rows", "after", "head"),
    [
        (ROWS[:1], 0, HEAD),
        (ROWS[1:], 0, HEAD),
        (ROWS[::-1], 0, HEAD),
        ([*ROWS, ROWS[1]], 0, HEAD),
        (ROWS, 0, LedgerHead(1, FIRST.hash)),
        (ROWS, 0, LedgerHead(2, FIRST.hash)),
        ([], 1, HEAD),
        (ROWS, 1, HEAD),
    ],
    ids=range(8),
)
def test_lines_that_are_missing_or_too_many_are_found(rows: Any, after: int, head: LedgerHead) -> None:
    with pytest.raises(LedgerError, match="with no gap"):
        records_of(rows, after=after, head=head)


def many(*rows: Any) -> list[Any]:
    """So many rows that they are read at once, with the given ones behind the first."""
    seq, head, lines = 0, header().digest, []
    for number in range(20):
        body = {"dataset_id": f"{number}", "x": number / 4, "text": "é" if number % 2 else "a"}
        lines.append(next_record(seq, head, "bind", body))
        seq, head = seq + 1, lines[-1].hash
    made = [row_of(line) for line in lines]
    made[1 : 1 + len(rows)] = rows
    return made


def test_many_rows_are_read_at_once_and_are_the_lines_that_each_of_them_is() -> None:
    rows = many()
    found = records_of(rows, after=0, head=LedgerHead(20, rows[-1][-1]))
    assert isinstance(found, LineBlock)
    assert found == tuple(record_of(row) for row in rows)
    assert found[3:5] == tuple(found)[3:5]
    assert (found[-1], found[::-7]) == (record_of(rows[-1]), tuple(found)[::-7])
    assert found.follow(0, header().digest)
    assert found[4:].follow(4, found[3].hash)
    assert not found.follow(1, header().digest)
    assert not found.follow(0, found[0].hash)
    assert found[2].computed_hash == found[2].hash


@pytest.mark.parametrize("column", range(6))
@pytest.mark.parametrize("value", [None, b"1", 1.0, True, ["x"]], ids=repr)
def test_a_value_of_another_type_is_found_among_many(column: int, value: Any) -> None:
    row = many()[1]
    with pytest.raises(LedgerError, match="found another row"):
        records_of(many((*row[:column], value, *row[column + 1 :])), after=0, head=HEAD)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("{", "}"),
        ('{"a":1},{"b":[2', "3]}"),
        ("{},{}", ""),
        ('{"a":[{}', "{}]}"),
        ("{}]", "{}"),
        ("{}", "[]"),
        ("{}", '{"x":1e400}'),
        ("{}", '{"x":NaN}'),
        ("{}", '{"x":"\\ud800"}'),
        ("{}", '{"x":' + "[" * 100_000 + "]" * 100_000 + "}"),
    ],
    ids=range(10),
)
def test_no_row_completes_another_one(first: str, second: str) -> None:
    rows = [(*row[:3], body, *row[4:]) for row, body in zip(many()[1:], (first, second), strict=False)]
    with pytest.raises(LedgerError, match="found another row") as caught:
        records_of(many(*rows), after=0, head=HEAD)
    assert caught.value.__context__ is None


@pytest.mark.parametrize(
    ("column", "old", "new"),
    [(1, "", "0"), (2, "bind", "seal"), (3, "0.75", "0.76"), (4, "+00", "+01"), (5, "", "0")],
    ids=range(5),
)
def test_a_changed_value_among_many_breaks_the_chain(column: int, old: str, new: str) -> None:
    rows = many()
    rows[3] = (*rows[3][:column], rows[3][column].replace(old, new, 1), *rows[3][column + 1 :])
    found = records_of(rows, after=0, head=LedgerHead(20, rows[-1][-1]))
    assert isinstance(found, LineBlock)
    assert not found.follow(0, header().digest)
    state = LedgerState(header())
    with pytest.raises(LedgerError, match="line 4 does not follow"):
        state.apply_all(found)
    assert state.seq == 3


def test_a_line_that_breaks_a_rule_is_named_among_many() -> None:
    first = many()
    lines = list(records_of(first, after=0, head=LedgerHead(20, first[-1][-1])))[:9]
    lines.append(next_record(9, lines[-1].hash, "bind", {"dataset_id": "3"}))
    rows = [row_of(line) for line in lines]
    state = LedgerState(header())
    with pytest.raises(LedgerError, match=r"line 10 \(bind\) breaks the rules of this version .* not yet bound"):
        state.apply_all(records_of(rows, after=0, head=LedgerHead(10, rows[-1][-1])))
    assert (state.seq, state.head) == (9, lines[8].hash)


def test_a_row_of_another_width_is_no_line() -> None:
    with pytest.raises(LedgerError, match="found another row"):
        records_of([ROWS[0][:-1], ROWS[1]], after=0, head=HEAD)


def test_a_header_survives_its_text() -> None:
    made = header()
    assert header_of(header_text(made), made.digest) == made
    assert header_of(None, None) is None


@pytest.mark.parametrize(
    ("text", "digest"),
    [
        (None, "x"),
        (b"{}", "x"),
        ("{", "x"),
        ("[]", "x"),
        ("{}", "x"),
        (header_text(header()), None),
        (header_text(header()), "x"),
        (header_text(header("b")), header("a").digest),
        (header_text(header()).replace("4.0", "9.0"), header().digest),
        (header_text(header()).replace("4.0", "-4.0"), header().digest),
    ],
    ids=range(10),
)
def test_a_header_that_was_changed_is_refused(text: Any, digest: Any) -> None:
    with pytest.raises(LedgerError):
        header_of(text, digest)


def test_stores_of_both_databases_are_found_where_their_packages_are() -> None:
    with contextlib.suppress(ImportError):
        import psycopg  # noqa: F401

        assert stores.PostgresStore.durable
        assert stores.PostgresAnchor.__name__ == "PostgresAnchor"
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        stores.Other  # noqa: B018


@pytest.mark.parametrize("count", [2, 200])
@pytest.mark.parametrize("column", [1, 2, 4, 5])
def test_half_of_a_character_outside_of_a_body_breaks_the_chain(column: int, count: int) -> None:
    lines = [FIRST]
    while len(lines) < count:
        lines.append(next_record(len(lines), lines[-1].hash, "note", {}))
    rows: list[Any] = [row_of(line) for line in lines]
    rows[1] = (*rows[1][:column], "\ud800", *rows[1][column + 1 :])
    found = records_of(rows, after=0, head=LedgerHead(count, rows[-1][5]))
    state = LedgerState(header())
    with pytest.raises(LedgerError) as caught:
        state.apply_all(found)
    assert caught.value.__context__ is None
    if column != 5:
        with pytest.raises(LedgerError, match="surrogate"):
            _ = found[1].computed_hash


def test_a_data_set_that_lines_of_old_bind_twice_has_one_ledger() -> None:
    check_bindings([("d", 1), ("e", 2)], [("d", 2), ("d", 1), ("e", 2)], "here")
    check_bindings([], [], "here")


@pytest.mark.parametrize(
    "stored", [[], [("d", 1)], [("d", 1), ("e", 1)], [("d", 1), ("d", 2), ("e", 2)], [("d", 1), ("e", 2), ("f", 1)]]
)
def test_bindings_that_are_not_those_of_the_lines_are_refused(stored: list[tuple[str, int]]) -> None:
    with pytest.raises(LedgerError, match=r"^here: expected for each data set the ledger that has it"):
        check_bindings(stored, [("d", 1), ("d", 2), ("e", 2)], "here")


@pytest.mark.parametrize("seconds", [0, -1.0, 1e6 + 1, float("inf"), float("nan")])
def test_a_wait_that_databases_cannot_count_is_refused(seconds: float) -> None:
    assert check_seconds("timeout", 1e6) == 1e6
    with pytest.raises(ConfigurationError, match=r"timeout: expected a number in \(0\.0, 1000000\.0\]"):
        check_seconds("timeout", seconds)
