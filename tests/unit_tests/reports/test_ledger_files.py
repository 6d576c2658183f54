"""Exported ledgers, and the check of any ledger from its entries alone."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import ConfigurationError, DPICLError, LedgerError
from langchain_dpicl.privacy.ledger import state as states
from langchain_dpicl.privacy.ledger.shares import Reservation
from langchain_dpicl.privacy.ledger.store import InMemoryStore, LedgerStore
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.reports.ledger_audit import (
    ExportedLedger,
    check_ledger,
    export_lines,
    is_export,
    read_export,
    read_receipts,
)
from langchain_dpicl.results import Receipt
from langchain_dpicl.stores import new_store
from tests.ledger_files import body_of, exported, forged, parsed, rehashed, spend, written

Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def made() -> tuple[InMemoryStore, list[Reservation]]:
    store = InMemoryStore()
    return store, spend(Budget(epsilon=4.0, delta=1e-6, store=store))


@pytest.fixture
def store(made: tuple[InMemoryStore, list[Reservation]]) -> InMemoryStore:
    return made[0]


@pytest.fixture
def reservations(made: tuple[InMemoryStore, list[Reservation]]) -> list[Reservation]:
    return made[1]


@pytest.fixture
def file(store: LedgerStore, tmp_path: Path) -> Path:
    return exported(store, tmp_path / "ledger.jsonl")


def receipt_of(reservation: Reservation, store: LedgerStore, **changes: Any) -> dict[str, Any]:
    header = store.header()
    assert header is not None
    known = {"ledger_id": header.ledger_id, "entry": reservation.entry, "entry_hash": reservation.entry_hash}
    return {**known, "component": "few-shot", **changes}


# --- files ------------------------------------------------------------------------------------------------------------


def test_an_exported_ledger_is_the_same_ledger(store: LedgerStore, file: Path) -> None:
    assert is_export(file)
    found = read_export(file)
    assert isinstance(found, LedgerStore)
    assert found.header() == store.header()
    assert list(found.records()) == list(store.records())
    assert list(found.records(3)) == list(store.records(3))
    assert list(export_lines(found)) == file.read_text().splitlines()
    assert len(found.records()) == 8


def test_a_ledger_whose_snapshot_holds_the_fractions_of_a_pool_is_exported_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "SNAPSHOT_LINES", 20)
    store = new_store(tmp_path / "budget.db")
    pool = Budget(epsilon=1.0, delta=1e-6, store=store).gdp_pool("labels", epsilon=0.5)
    for _ in range(20):
        (reservation := pool.reserve(mu=1e-3)).burn()
        reservation.commit(wait=True)
    assert max(max(pair) for line in store.records() if line.kind == "snapshot" for pair in line.body["left"]) > 2**63
    found = read_export(exported(store, tmp_path / "x.jsonl"))
    assert list(found.records()) == list(store.records())
    assert check_ledger(found) == check_ledger(store)
    assert check_ledger(found).problems == ()


def test_an_exported_ledger_can_be_looked_at_and_not_spent(store: LedgerStore, file: Path) -> None:
    budget = Budget.open(read_export(file))
    assert budget.remaining_epsilon == Budget.open(store).remaining_epsilon == 2.5
    with pytest.raises(LedgerError, match="grants nothing"):
        budget.bind(PrivateExamples([], public_size=900, dataset_id="others"))
    with pytest.raises(LedgerError, match="grants nothing"):
        budget.gdp_pool("more", epsilon=0.5).reserve(mu=0.001)
    header = store.header()
    assert header is not None
    with pytest.raises(LedgerError, match="grants nothing"):
        read_export(file).create(header)


def test_a_store_without_a_ledger_is_not_exported() -> None:
    with pytest.raises(LedgerError, match="found none"):
        list(export_lines(InMemoryStore()))


def test_a_ledger_without_lines_is_exported_and_read(tmp_path: Path) -> None:
    store = InMemoryStore()
    Budget(epsilon=1.0, delta=1e-6, store=store)
    found = check_ledger(read_export(exported(store, tmp_path / "x.jsonl")))
    assert (found.problems, found.lines, found.epsilon) == ((), 0, 0.0)


@pytest.mark.parametrize("number", range(10))
def test_a_file_that_was_cut_off_is_refused(number: int, file: Path, tmp_path: Path) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    assert len(lines) == 10
    for rest in (b"", lines[number][: len(lines[number]) // 2]):
        part = tmp_path / "part.jsonl"
        part.write_bytes(b"".join(lines[:number]) + rest)
        with pytest.raises(LedgerError):
            read_export(part)


def test_a_line_that_was_left_out_of_a_file_shows(file: Path, tmp_path: Path) -> None:
    for number in range(1, 9):
        with pytest.raises(LedgerError):
            found = read_export(forged(file, tmp_path / "x", lambda lines, at=number: lines.pop(at), refit=False))
            assert check_ledger(found).problems
            raise LedgerError("found in the chain")


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"{}", b"null", b"\xff\xfe", b'{"dpicl_ledger_export": 2}', b"{" * 9999]
)
def test_what_is_no_export_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(data)
    with pytest.raises(LedgerError):
        read_export(path)


def test_a_database_and_a_missing_file_are_no_exports(tmp_path: Path) -> None:
    path = tmp_path / "x"
    assert not is_export(path)
    path.write_bytes(b"SQLite format 3\0")
    assert not is_export(path)
    assert not is_export(tmp_path)


# --- checks -----------------------------------------------------------------------------------------------------------


def test_a_whole_ledger_is_found_whole(store: LedgerStore, file: Path) -> None:
    for source in (store, read_export(file)):
        found = check_ledger(source)
        assert found.problems == ()
        assert (found.lines, found.shares) == (8, 2)
        assert (found.promised, found.delta) == (1.5, pytest.approx(3.75e-7))
        assert 0.65 < found.epsilon < 0.7  # the first share was charged more than it costs
        assert found.to_dict()["ok"] is True
        assert json.loads(json.dumps(found.to_dict())) == found.to_dict()


def change_body(lines: Lines) -> None:
    body_of(lines, "reserve")["count"] = 3


def change_stamp(lines: Lines) -> None:
    lines[4]["record"]["stamp"] = "2020-01-01T00:00:00+00:00"


def swap(lines: Lines) -> None:
    lines[3], lines[4] = lines[4], lines[3]


def higher_limit(lines: Lines) -> None:
    lines[0]["header"]["epsilon"] = 400.0


@pytest.mark.parametrize("change", [change_body, change_stamp, swap, higher_limit])
def test_a_change_breaks_the_chain(change: Callable[[Lines], object], file: Path, tmp_path: Path) -> None:
    found = check_ledger(read_export(forged(file, tmp_path / "x", change, refit=False)))
    assert any("does not follow" in problem for problem in found.problems)
    assert found.to_dict()["recomputed"]["epsilon"] is None


def cheaper_share(lines: Lines) -> None:
    seal = body_of(lines, "seal")
    seal["epsilon"] = seal["pricing"]["epsilon"] = seal["components"][0]["epsilon"] = 0.01


def more_tickets_at_the_old_price(lines: Lines) -> None:
    """The whole seal is made to fit: tickets, event, but not the charge."""
    seal = body_of(lines, "seal")
    seal["components"][0]["tickets"][0]["max_count"] = 50_000
    seal["event"]["count"] = 50_000


def less_noise(lines: Lines) -> None:
    seal = body_of(lines, "seal")
    for event in (seal["components"][0]["tickets"][0]["event"], seal["event"]["event"]):
        event["event"]["noise_multiplier"] = 0.3


def larger_pool(lines: Lines) -> None:
    pool = [line for line in lines if line.get("record", {}).get("kind") == "seal"][1]["record"]["body"]
    pool["components"][0]["limit"] *= 2
    pool["event"]["noise_multiplier"] /= 2


@pytest.mark.parametrize("change", [cheaper_share, more_tickets_at_the_old_price, less_noise, larger_pool])
def test_a_forged_price_is_found_behind_fitting_hashes(
    change: Callable[[Lines], object], file: Path, tmp_path: Path
) -> None:
    found = check_ledger(read_export(forged(file, tmp_path / "x", change)))
    assert found.lines == 8  # the chain itself is in order
    assert any("cost up to" in problem for problem in found.problems), found.problems


def event_of_other_tickets(lines: Lines) -> None:
    body_of(lines, "seal")["event"]["count"] = 5


def reserve_too_many(lines: Lines) -> None:
    body_of(lines, "reserve")["count"] = 51


def settle_twice(lines: Lines) -> None:
    body_of(lines, "commit")["count"] = 4


def above_the_limit(lines: Lines) -> None:
    lines[0]["header"]["epsilon"] = 1.2


@pytest.mark.parametrize("change", [event_of_other_tickets, reserve_too_many, settle_twice, above_the_limit])
def test_a_line_that_breaks_a_rule_is_found_behind_fitting_hashes(
    change: Callable[[Lines], object], file: Path, tmp_path: Path
) -> None:
    found = check_ledger(read_export(forged(file, tmp_path / "x", change)))
    assert any("breaks the rules" in problem for problem in found.problems), found.problems


def test_a_delta_that_the_data_do_not_allow_is_found(file: Path, tmp_path: Path) -> None:
    def larger(lines: Lines) -> None:
        body_of(lines, "bind")["public_size"] = 10_000_000

    found = check_ledger(read_export(forged(file, tmp_path / "x", larger)))
    assert any("1/(10 * public_size)" in problem for problem in found.problems)


class Anchor:
    description = "a note on paper"

    def __init__(self, known: tuple[int, str] | None) -> None:
        self.known = known

    def read(self, ledger_id: str) -> tuple[int, str] | None:
        return self.known

    def write(self, ledger_id: str, seq: int, head: str) -> None:
        raise AssertionError("a check writes nothing")


def test_the_anchored_line_has_to_be_on_the_chain(store: InMemoryStore) -> None:
    header, lines = store.header(), store.records()
    assert header is not None
    good = [(0, header.digest), (3, lines[2].hash), (8, lines[7].hash)]
    bad = [(0, lines[0].hash), (3, lines[3].hash), (9, lines[7].hash), (-1, lines[7].hash), (10**9, "")]
    for known in good:
        assert check_ledger(store, anchor=Anchor(known)).problems == ()
    for known in bad:
        (problem,) = check_ledger(store, anchor=Anchor(known)).problems
        assert f"line {known[0]}" in problem
    assert "never seen" in check_ledger(store, anchor=Anchor(None)).problems[0]
    empty = InMemoryStore()
    Budget(epsilon=1.0, delta=1e-6, store=empty)
    assert "never seen" in check_ledger(empty, anchor=Anchor(None)).problems[0]


def test_a_shorter_ledger_is_whole_and_only_an_anchor_or_a_receipt_tells(
    store: InMemoryStore, reservations: list[Reservation], file: Path, tmp_path: Path
) -> None:
    def shorter(lines: Lines) -> None:
        del lines[7:9]

    older = read_export(forged(file, tmp_path / "x", shorter))
    assert check_ledger(older).problems == ()
    assert check_ledger(older, anchor=Anchor(store.head())).problems
    assert check_ledger(older, receipts=[receipt_of(reservations[0], store)]).problems == ()
    assert "found 6 lines" in check_ledger(older, receipts=[receipt_of(reservations[1], store)]).problems[0]


def test_receipts_are_held_against_their_lines(store: InMemoryStore, reservations: list[Reservation]) -> None:
    first, second = reservations
    good = [
        receipt_of(first, store),
        receipt_of(second, store, component="labels"),
        receipt_of(first, store, entry=None, entry_hash=None),  # free: answered from a memo
        receipt_of(first, store, entry_hash=None),
    ]
    assert check_ledger(store, receipts=good).problems == ()
    bad = [
        (receipt_of(first, store, entry_hash="0" * 64), "another line with the hash"),
        (receipt_of(first, store, entry=9), "found 8 lines"),
        (receipt_of(first, store, entry=0), "expected ledger_id, entry, entry_hash, index"),
        (receipt_of(first, store, entry=True), "expected ledger_id, entry, entry_hash, index"),
        (receipt_of(first, store, ledger_id="other"), "found one of 'other'"),
        (receipt_of(first, store, component="labels"), "no reservation of 'labels'"),
        (receipt_of(first, store, entry=1, entry_hash=None), "a line of the kind 'bind'"),
    ]
    found = check_ledger(store, receipts=[receipt for receipt, _ in bad])
    assert len(found.problems) == len(bad)
    for number, (problem, (_, words)) in enumerate(zip(found.problems, bad, strict=True), start=1):
        assert problem.startswith(f"receipt {number}: ")
        assert words in problem


def test_receipts_are_read_in_every_form(store: InMemoryStore, reservations: list[Reservation], tmp_path: Path) -> None:
    receipt = receipt_of(reservations[0], store)
    full = Receipt(
        source="release",
        tickets=1,
        dataset_id="letters",
        adjacency="add_remove",
        epsilon=1.0,
        delta=2.5e-7,
        mechanism="gumbel",
        noise_multiplier=1.0,
        queries_left=3,
        **receipt,
    )
    path = tmp_path / "receipts"
    for text, count in (
        (json.dumps(receipt), 1),
        (json.dumps([receipt, receipt]), 2),
        (json.dumps(receipt) + "\n\n" + json.dumps(receipt) + "\n", 2),
        (full.model_dump_json(), 1),
        (json.dumps({"label": "a", "receipt": receipt}), 1),
    ):
        path.write_text(text)
        found = read_receipts(path)
        assert len(found) == count
        assert check_ledger(store, receipts=found).problems == ()
    for text in ("", "[]", "7", "{}", '{"receipt": 3}', '[{"ledger_id": "a"}]', "[" * 99999, "\x00", '{"entry": 3}'):
        path.write_text(text)
        with pytest.raises(ConfigurationError, match="receipt"):
            read_receipts(path)


WEIRD: tuple[Any, ...] = (None, True, 0, -1, 1.5, 10**400, "", "x", "\ud800", [], [[]], {}, {"x": {}}, float("nan"))


def places(value: Any, path: tuple[Any, ...] = ()) -> Any:
    """Every place of a JSON value, the value itself included."""
    yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


def put(lines: Lines, path: tuple[Any, ...], value: Any) -> None:
    at: Any = lines
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value


INFORMATIVE = {"hash", "prev", "seq", "stamp", "end", "records", "head"}  # made to fit, or said to decide nothing


def test_whatever_a_forger_writes_is_a_problem_or_a_refusal_and_never_another_exception(
    file: Path, tmp_path: Path
) -> None:
    """Each place of the first half of the file gets a value of another kind, with and without fitting hashes."""
    honest = [*parsed(file)[:5], {"end": {"records": 4, "head": parsed(file)[4]["record"]["hash"]}}]
    assert check_ledger(read_export(written(tmp_path / "x", honest))).problems == ()
    values = itertools.cycle(WEIRD)
    trials = refused = 0
    for path, refit in itertools.product([p for p in places(honest) if p], (False, True)):
        if refit and path[-1] in INFORMATIVE:
            continue
        lines, value = json.loads(json.dumps(honest)), next(values)
        put(lines, path, value)
        trials += 1
        try:
            lines = rehashed(lines) if refit else lines
        except (DPICLError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            continue  # a value that has no canonical text: nobody can write such a line
        try:
            found = check_ledger(read_export(written(tmp_path / "x", lines)))
        except DPICLError:
            refused += 1
            continue
        refused += bool(found.problems)
        if not refit:
            assert found.problems or json.dumps(lines) == json.dumps(honest), path
    assert trials > 180
    assert refused > trials / 2


@pytest.mark.parametrize("kind", ["gdp", "other", ["tickets"], None])
def test_tickets_are_not_taken_for_a_pool(kind: Any, file: Path, tmp_path: Path) -> None:
    def change(lines: Lines) -> None:
        body_of(lines, states.SEAL)["components"][0]["kind"] = kind

    export = read_export(forged(file, tmp_path / "x", change))
    with pytest.raises(LedgerError, match="kind: expected one of"):
        Budget.open(export).use()


def test_numbers_beyond_every_float_are_refused_wherever_they_stand(file: Path, tmp_path: Path) -> None:
    def read_with(*path: Any, refit: bool = False) -> ExportedLedger:
        return read_export(forged(file, tmp_path / "x", lambda lines: put(lines, path, 10**400), refit=refit))

    for path in ((0, "header", "epsilon"), (0, "header", "delta"), (9, "end", "records")):
        with pytest.raises(LedgerError):
            read_with(*path)
    for refit in (False, True):
        assert check_ledger(read_with(3, "record", "body", "count", refit=refit)).problems
