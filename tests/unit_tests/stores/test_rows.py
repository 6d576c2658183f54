from __future__ import annotations

import contextlib
from typing import Any

import pytest

from langchain_dpicl import stores
from langchain_dpicl.exceptions import LedgerError
from langchain_dpicl.privacy.ledger.store import next_record
from langchain_dpicl.stores.rows import LedgerHead, header_of, header_text, records_of, row_of
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
    with pytest.raises(LedgerError, match="no line"):
        records_of([row, ROWS[1]], after=0, head=HEAD)


@pytest.mark.parametrize("body", ["", "{", "[]", "7", "null", '"x"', "[" * 100_000], ids=range(7))
def test_a_body_that_is_no_object_is_no_line(body: str) -> None:
    with pytest.raises(LedgerError, match="no line") as caught:
        records_of([(*ROWS[0][:3], body, *ROWS[0][4:]), ROWS[1]], after=0, head=HEAD)
    assert caught.value.__context__ is None


@pytest.mark.parametrize(
    "value",
    ["NaN", "Infinity", "-Infinity", "1e400", "[-1e400]", r'"\ud800"', r'{"\udfff": 1}', "[" * 990 + "]" * 990],
    ids=range(8),
)
def test_a_body_without_a_hash_is_no_line(value: str) -> None:
    with pytest.raises(LedgerError, match="no line") as caught:
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


def test_a_row_of_another_width_is_no_line() -> None:
    with pytest.raises(LedgerError, match="no line"):
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
