from __future__ import annotations

import hashlib
import json
import tracemalloc
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.privacy.accounting.events import ComposedEvent, GaussianEvent, PureEvent, canonical_json
from langchain_dpicl.privacy.ledger import store as stores
from langchain_dpicl.privacy.ledger.store import InMemoryStore, LedgerHeader, LedgerRecord, next_record
from langchain_dpicl.privacy.ledger.tickets import Ticket
from tests.ledgers import budget, private, share_of, use_simple_prices

STAMP = "2026-01-02T03:04:05+00:00"
HEADER = LedgerHeader(
    ledger_id="f0" * 16,
    name="Bücher \N{SNOWMAN}",
    epsilon=4.0,
    delta=1e-6,
    adjacency="add_remove",
    stamp=STAMP,
)
HEAD = "8d071e33dab3d64a4587676225be67db0b57af6288c165972c28e020018bd4d6"
TEXT = "b861dca9177a8ce5c6d5f184b9cd0d65db295eb50987d7147db90be3a3c2edcf"


def golden_ledger(monkeypatch: pytest.MonkeyPatch) -> InMemoryStore:
    """Returns a ledger with every kind of line, the same one every time."""
    use_simple_prices(monkeypatch)
    monkeypatch.setattr(stores, "_now", lambda: STAMP)
    store = InMemoryStore()
    store.create(HEADER)
    budget = Budget.open(store)
    budget.bind(private("d/\N{SNOWMAN}"))
    query = ComposedEvent((PureEvent(0.03), PureEvent(0.02)))
    share = budget.declare(
        "votes", tickets=[Ticket("query", query, max_count=9, refundable=True)], epsilon=1.0, delta=1e-7
    )
    labels = [Ticket("t", GaussianEvent(4.0), label=label) for label in "ab"]
    budget.declare("by label", tickets=labels, partition="d/\N{SNOWMAN}", epsilon=1.0, delta=1e-7).reserve(
        "t", label="b"
    )
    for _ in range(2):
        reservation = share.reserve("query", count=2)
        reservation.burn()
        reservation.commit()
        reservation.give_back()
    budget.gdp_pool("pool", epsilon=0.5).reserve(mu=0.1, count=3).give_back()
    return store


def test_the_format_and_the_hashes_of_a_ledger_never_change(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line.to_dict() for line in golden_ledger(monkeypatch).records()]
    query = ["reserve", "commit", "give_back"]
    pool = ["seal", "reserve", "give_back"]
    assert [line["kind"] for line in lines] == ["bind", "seal", "reserve", "seal", *query, *query, *pool]
    assert lines[-1]["hash"] == HEAD
    assert hashlib.sha256(json.dumps(lines, ensure_ascii=False).encode()).hexdigest() == TEXT


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seq=JSON, prev=JSON, kind=JSON, body=st.dictionaries(st.text(), JSON, max_size=4), stamp=JSON)
def test_a_hash_is_that_of_the_canonical_text_of_the_other_members(
    seq: Any, prev: Any, kind: Any, body: Any, stamp: Any
) -> None:
    line = {"seq": seq, "prev": prev, "kind": kind, "body": body, "stamp": stamp}
    text = json.dumps(line, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    expected = hashlib.sha256(text.encode()).hexdigest()
    assert LedgerRecord(**line, hash="").computed_hash == expected


@given(body=st.dictionaries(st.text(), JSON, max_size=4), seq=st.integers(0, 10**9))
def test_lines_are_written_as_they_are_read(body: Any, seq: int) -> None:
    line = next_record(seq, HEADER.digest, "note", body)
    assert (line.seq, line.prev, line.kind, line.hash) == (seq + 1, HEADER.digest, "note", line.computed_hash)
    assert LedgerRecord.from_dict(json.loads(canonical_json(line.to_dict()))) == line
    assert canonical_json(line.body) == canonical_json(body)


def test_stamps_are_the_time_in_whole_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    stamp = next_record(0, "", "note", {}).stamp
    assert before <= datetime.fromisoformat(stamp) <= datetime.now(UTC)
    assert len(stamp) == len(STAMP)
    for second, text in ((1_767_323_045.999, STAMP), (1_767_323_046.0, "2026-01-02T03:04:06+00:00")):
        monkeypatch.setattr(stores, "time", SimpleNamespace(time=lambda second=second: second))
        assert next_record(0, "", "note", {}).stamp == text


def test_a_query_adds_a_few_hundred_bytes_to_a_ledger_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    use_simple_prices(monkeypatch)
    share = share_of(budget(), epsilon=1e-6, count=2000)

    def query() -> None:
        reservation = share.reserve("t")
        reservation.burn()
        reservation.commit()
        reservation.give_back()

    query()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(1000):
            query()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 100 <= grown / 1000 <= 600
