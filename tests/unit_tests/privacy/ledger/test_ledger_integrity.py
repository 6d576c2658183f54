from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import (
    LedgerError,
    PrivacyBudgetExceededError,
    PrivacyBudgetMismatchError,
    SealedShareError,
)
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy.accounting.events import Event, PureEvent, canonical_json
from langchain_dpicl.privacy.extensions.joint_plans import JointPlan
from langchain_dpicl.privacy.ledger.shares import Share
from langchain_dpicl.privacy.ledger.state import LedgerState
from langchain_dpicl.privacy.ledger.store import InMemoryStore, LedgerRecord, _StoredLine
from langchain_dpicl.privacy.ledger.tickets import Component, ShareTerms
from langchain_dpicl.reports.ledger_audit import check_ledger
from tests.contracts.store import forged
from tests.ledgers import budget, private, records, share_of, tickets

# --- many processes, broken ledgers -----------------------------------------------------------------------------------


def test_a_ledger_opens_with_its_own_limits_only(simple_prices: Any) -> None:
    store = InMemoryStore()
    with pytest.raises(LedgerError, match="found none"):
        Budget.open(store)
    first = budget(store=store, adjacency="replace_one", name="ours")
    again = Budget.open(store)
    assert (again.ledger_id, again.epsilon, again.delta, again.adjacency, again.name) == (
        first.ledger_id,
        4.0,
        1e-6,
        "replace_one",
        "ours",
    )
    assert again.durable is False
    for change in ({"epsilon": 5.0}, {"delta": 1e-7}, {"adjacency": "add_remove"}):
        with pytest.raises(PrivacyBudgetMismatchError):
            Budget(**{"epsilon": 4.0, "delta": 1e-6, "adjacency": "replace_one", "store": store, **change})


def test_shares_of_other_processes_are_seen_when_sealing(simple_prices: Any) -> None:
    store = InMemoryStore()
    one, other = budget(store=store), Budget.open(store)
    mine = one.declare("mine", tickets=tickets(), epsilon=3.0)
    theirs = other.declare("theirs", tickets=tickets(), epsilon=3.0)
    theirs.reserve("t")
    assert one.remaining_epsilon == 1.0  # what is declared here and no longer fits takes no room
    with pytest.raises(PrivacyBudgetExceededError) as caught:
        mine.reserve("t")
    assert (caught.value.requested, caught.value.remaining) == (3.0, 1.0)
    assert [kind for kind, _ in records(store)] == ["seal", "reserve"]


def test_deltas_of_other_processes_are_seen_when_sealing(simple_prices: Any) -> None:
    store = InMemoryStore()
    one, other = budget(store=store), Budget.open(store)
    mine = one.declare("mine", tickets=tickets(), epsilon=1.0, delta=6e-7)
    other.declare("theirs", tickets=tickets(), epsilon=1.0, delta=6e-7).reserve("t")
    with pytest.raises(PrivacyBudgetExceededError, match="delta"):
        mine.reserve("t")


def test_two_processes_share_one_component(simple_prices: Any) -> None:
    store = InMemoryStore()
    shares = [share_of(ledger) for ledger in (budget(store=store), Budget.open(store))]
    shares[0].reserve("t", count=7)
    shares[1].reserve("t", count=3)
    for share in shares:
        with pytest.raises(PrivacyBudgetExceededError):
            share.reserve("t")
    assert Budget.open(store).remaining_epsilon == 3.0


def test_a_name_sealed_elsewhere_on_other_terms_is_refused(simple_prices: Any) -> None:
    store = InMemoryStore()
    one, other = budget(store=store), Budget.open(store)
    mine = share_of(one)
    other.declare("c", tickets=tickets(), epsilon=2.0).reserve("t")
    with pytest.raises(SealedShareError):
        mine.reserve("t")
    with one.plan():
        joint = [one.declare(name, tickets=tickets(0.01), epsilon=0.5) for name in "de"]
    other.declare("e", tickets=tickets(0.01), epsilon=0.5).reserve("t")
    with pytest.raises(SealedShareError, match="another process"):
        joint[0].reserve("t")


@pytest.mark.parametrize("count", [10, 9])
def test_a_share_sealed_elsewhere_while_it_is_priced_is_the_same_share_or_refused(
    simple_prices: Any, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    store = InMemoryStore()
    one, other = budget(store=store, epsilon=1.0), Budget.open(store)
    real = accounting.epsilon_bound

    def meanwhile(event: Event, **options: Any) -> Any:
        monkeypatch.setattr(accounting, "epsilon_bound", real)
        share_of(other, count=count).reserve("t")
        return real(event, **options)

    monkeypatch.setattr(accounting, "epsilon_bound", meanwhile)
    if count == 10:  # what workers that come up together see
        assert share_of(one).remaining("t") == 9
    else:
        with pytest.raises(SealedShareError, match="expected the terms sealed"):
            share_of(one)


def plan_of(ledger: Budget, *names: str, count: int = 10) -> list[Share]:
    with ledger.plan():
        return [ledger.declare(name, tickets=tickets(0.05, count), epsilon=0.5) for name in names]


@pytest.mark.parametrize("count", [10, 9])
@pytest.mark.parametrize("first", [("c", "d"), ("d",)], ids=str)
def test_a_plan_sealed_elsewhere_while_it_is_priced_is_the_same_plan_or_refused(
    simple_prices: Any, monkeypatch: pytest.MonkeyPatch, first: tuple[str, ...], count: int
) -> None:
    store = InMemoryStore()
    one, other = budget(store=store, epsilon=1.0), Budget.open(store)
    real = JointPlan._close

    def meanwhile(plan: JointPlan, components: Any) -> None:
        monkeypatch.setattr(JointPlan, "_close", real)
        plan_of(other, *first, count=count)[-1].reserve("t")
        real(plan, components)

    monkeypatch.setattr(JointPlan, "_close", meanwhile)
    if count == 9:
        with pytest.raises(SealedShareError, match="expected the terms sealed"):
            plan_of(one, "c", "d")
        return
    shares = plan_of(one, "c", "d")  # of the whole budget: a second one of this size does not fit
    assert [share.remaining("t") for share in shares] == [10, 9]
    for share in shares:
        share.reserve("t")
    assert one.remaining_epsilon == pytest.approx(0.0)
    one.verify()


def test_a_plan_that_does_not_fit_is_refused_where_nobody_sealed_it(simple_prices: Any) -> None:
    store = InMemoryStore()
    one, other = budget(store=store, epsilon=1.0), Budget.open(store)
    share_of(other).reserve("t")
    with pytest.raises(PrivacyBudgetExceededError):
        plan_of(one, "a", "b")


def test_room_taken_while_a_share_is_priced_is_seen(simple_prices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = budget()
    real = accounting.epsilon_bound

    def meanwhile(event: Event, **options: Any) -> Any:
        monkeypatch.setattr(accounting, "epsilon_bound", real)
        ledger.declare("other", tickets=tickets(), epsilon=3.5)
        return real(event, **options)

    monkeypatch.setattr(accounting, "epsilon_bound", meanwhile)
    with pytest.raises(PrivacyBudgetExceededError):
        share_of(ledger)
    assert ledger.remaining_epsilon == 0.5


@pytest.mark.parametrize("other", [{"epsilon": 5e-13, "delta": 1e-9}, {"epsilon": 0.1, "delta": 5e-19}], ids=str)
def test_a_share_that_just_fits_no_longer_does_if_room_shrinks_meanwhile(
    other: dict[str, float], simple_prices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_delta = other["epsilon"] > 1e-6
    ledger = budget(epsilon=2.0 if by_delta else 1.0)
    real = accounting.epsilon_bound

    def meanwhile(event: Event, **options: Any) -> Any:
        monkeypatch.setattr(accounting, "epsilon_bound", real)
        ledger.declare("other", tickets=tickets(1e-14, 1), **other)
        return real(event, **options)

    monkeypatch.setattr(accounting, "epsilon_bound", meanwhile)
    with pytest.raises(PrivacyBudgetExceededError, match="a little"):
        ledger.declare("c", tickets=tickets(), epsilon=1.0, delta=1e-6 if by_delta else 1e-7)
    assert ledger.remaining_epsilon == pytest.approx(ledger.epsilon - other["epsilon"], rel=1e-15)


class Tampered(InMemoryStore):
    """Changes the ledger behind the budget's back."""

    def replace(self, change: Callable[[list[LedgerRecord]], list[LedgerRecord]]) -> None:
        changed = change(list(self.records()))
        self._lines = [_StoredLine(line.kind, canonical_json(line.body), line.stamp, line.hash) for line in changed]


def used_ledger() -> tuple[Tampered, Budget, Share]:
    store = Tampered()
    ledger = budget(store=store)
    share = ledger.declare("c", tickets=tickets(refundable=True), epsilon=1.0)
    reservation = share.reserve("t", count=3)
    reservation.burn()
    reservation.commit()
    reservation.give_back()
    return store, ledger, share


def edit(number: int, **changes: Any) -> Callable[[list[LedgerRecord]], list[LedgerRecord]]:
    def change(lines: list[LedgerRecord]) -> list[LedgerRecord]:
        line = lines[number].to_dict()
        body = {**line["body"], **changes}
        return [*lines[:number], LedgerRecord.from_dict({**line, "body": body}), *lines[number + 1 :]]

    return change


TAMPERINGS: dict[str, Callable[[list[LedgerRecord]], list[LedgerRecord]]] = {
    "cheaper share": edit(0, epsilon=0.1),
    "fewer reserved": edit(1, count=1),
    "last line dropped": lambda lines: lines[:-1],
    "first line dropped": lambda lines: lines[1:],
    "all dropped": lambda lines: [],
    "order changed": lambda lines: [lines[0], lines[2], lines[1], lines[3]],
    "line repeated": lambda lines: [*lines, lines[-1]],
}


def test_a_receipt_is_held_against_its_own_line_in_a_damaged_ledger(simple_prices: Any) -> None:
    store, _, share = used_ledger()
    held = share.reserve("t")
    receipt = {name: getattr(held, name) for name in ("ledger_id", "entry", "entry_hash", "index")}
    whole = list(store.records())
    for changed, said in ((1, []), (held.entry - 1, ["receipt 1"])):  # another line, and its own beside the old hash
        store.replace(edit(changed, count=2))
        problems = check_ledger(store, receipts=[receipt]).problems
        assert [problem.split(":")[0] for problem in problems if "receipt" in problem] == said
        store.replace(lambda _: whole)


@pytest.mark.parametrize("name", TAMPERINGS)
def test_a_changed_ledger_is_found_and_grants_nothing(name: str, simple_prices: Any) -> None:
    store, ledger, _ = used_ledger()
    ledger.verify()
    store.replace(TAMPERINGS[name])
    with pytest.raises(LedgerError):
        ledger.verify()
    if name not in {"last line dropped", "all dropped", "cheaper share", "fewer reserved"}:
        with pytest.raises(LedgerError):
            Budget.open(store)


@pytest.mark.parametrize("keep", [(0, 2, 3), (0, 2, 1, 3), (0, 1, 1, 2, 3), (0, 3)])
def test_lines_that_fit_the_rules_must_also_follow_each_other(keep: tuple[int, ...], simple_prices: Any) -> None:
    store = Tampered()
    share = share_of(budget(store=store))
    for _ in range(3):
        share.reserve("t")
    store.replace(lambda lines: [lines[number] for number in keep])
    with pytest.raises(LedgerError, match="does not follow"):
        Budget.open(store)


@pytest.mark.parametrize("name", ["last line dropped", "all dropped", "line repeated"])
def test_a_ledger_that_went_back_in_time_grants_nothing(name: str, simple_prices: Any) -> None:
    store, _, share = used_ledger()
    store.replace(TAMPERINGS[name])
    before = len(store.records())
    for attempt in (lambda: share.reserve("t"), lambda: share.remaining("t")):
        with pytest.raises(LedgerError):
            attempt()
    assert len(store.records()) == before


FORGERIES: list[tuple[str, dict[str, Any]]] = [
    ("reserve", {"component": "c", "template": "t", "label": None, "count": 99, "amount": 1.0}),
    ("reserve", {"component": "c", "template": "t", "label": None, "count": -1, "amount": 1.0}),
    ("reserve", {"component": "x", "template": "t", "label": None, "count": 1, "amount": 1.0}),
    ("reserve", {"component": "c", "template": "x", "label": None, "count": 1, "amount": 1.0}),
    ("reserve", {"component": "c", "template": "t", "label": None, "count": True, "amount": 1.0}),
    ("give_back", {"reservation": 99, "count": 1}),
    ("give_back", {"reservation": 2, "count": 1}),
    ("commit", {"reservation": 2, "count": 2}),
    ("bind", {"no": "name"}),
    ("refund", {"count": 3}),
    ("seal", {"epsilon": 0.1}),
]


@pytest.mark.parametrize(("kind", "body"), FORGERIES, ids=str)
def test_a_line_that_breaks_the_rules_is_found_although_its_hash_fits(
    kind: str, body: dict[str, Any], simple_prices: Any
) -> None:
    store, ledger, _ = used_ledger()
    with store.transaction() as view:
        view.append(kind, body)
    with pytest.raises(LedgerError, match="breaks the rules"):
        ledger.verify()
    with pytest.raises(LedgerError):
        Budget.open(store)


@pytest.mark.parametrize(("kind", "count"), [("give_back", 1), ("commit", 4)])
def test_no_line_returns_what_is_not_refundable_or_settles_more_than_was_reserved(
    kind: str, count: int, simple_prices: Any
) -> None:
    store = InMemoryStore()
    ledger = budget(store=store)
    share_of(ledger).reserve("t", count=3)
    with store.transaction() as view:
        view.append(kind, {"reservation": 2, "count": count})
    with pytest.raises(LedgerError, match="breaks the rules"):
        ledger.verify()


@pytest.mark.parametrize(
    "change",
    [
        {"epsilon": 4.5},
        {"epsilon": -1.0},
        {"delta": 1e-3},
        {"event": PureEvent(0.1)},
        {"components": None},
    ],
    ids=str,
)
def test_a_share_that_cannot_be_is_found_although_its_hash_fits(change: dict[str, Any], simple_prices: Any) -> None:
    store, ledger, _ = used_ledger()
    component = Component(name="d", kind="tickets", tickets=tickets(), epsilon=1.0, delta=1e-7)
    terms = ShareTerms((component,), 1.0, 1e-7, False, component.event, {})
    body = {
        **terms.to_dict(),
        **{k: v if k != "event" else {"kind": "pure", "epsilon": 0.1} for k, v in change.items()},
    }
    with store.transaction() as view:
        view.append("seal", terms.to_dict())
    ledger.verify()
    store.replace(lambda lines: lines[:-1])
    with store.transaction() as view:
        view.append("seal", body)
    with pytest.raises(LedgerError):
        Budget.open(store)


def test_a_component_sealed_twice_is_found(simple_prices: Any) -> None:
    store, _, _ = used_ledger()
    sealed = store.records()[0].body
    with store.transaction() as view:
        view.append("seal", sealed)
    with pytest.raises(LedgerError, match="not yet sealed"):
        Budget.open(store)


def test_a_data_set_bound_twice_is_found(simple_prices: Any) -> None:
    store = InMemoryStore()
    budget(store=store).bind(private())
    with store.transaction() as view:
        view.append("bind", private().declaration)
    with pytest.raises(LedgerError):
        Budget.open(store)


def test_a_refused_line_leaves_the_state_as_it_was(simple_prices: Any) -> None:
    store, ledger, _ = used_ledger()
    state = LedgerState(ledger._desk.header)
    for record in store.records():
        state.apply(record)
    seen = state.seq, state.head, state.promised(), state.left("c", ("t", None))
    for kind, body in FORGERIES:
        with pytest.raises(LedgerError):
            state.apply(forged(LedgerRecord(state.seq + 1, state.head, kind, body, "now", "")))
    assert (state.seq, state.head, state.promised(), state.left("c", ("t", None))) == seen


def test_a_changed_header_is_found(simple_prices: Any) -> None:
    store, ledger, _ = used_ledger()
    store._header = budget(epsilon=40.0)._desk.header
    with pytest.raises(LedgerError, match="header"):
        ledger.verify()


class Failing(InMemoryStore):
    """Loses the answer of a commit: the lines may or may not stand."""

    def __init__(self, *, written: bool) -> None:
        super().__init__()
        self.written = written
        self.broken = False

    def transaction(self) -> Any:
        return _Failing(self, super().transaction())


class _Failing:
    def __init__(self, store: Failing, inner: Any) -> None:
        self.store, self.inner = store, inner

    def __enter__(self) -> Any:
        return self.inner.__enter__()

    def __exit__(self, *error: object) -> None:
        if not self.store.broken:
            self.inner.__exit__(*error)
            return
        failure = LedgerError("ledger: the disk is full")
        if self.store.written:
            self.inner.__exit__(None, None, None)
            raise failure
        self.inner.__exit__(LedgerError, failure, None)
        raise failure


@pytest.mark.parametrize("written", [True, False])
def test_after_a_failed_write_the_store_has_the_last_word(written: bool, simple_prices: Any) -> None:
    store = Failing(written=written)
    ledger = budget(store=store)
    share = share_of(ledger)
    share.reserve("t", count=2)
    store.broken = True
    with pytest.raises(LedgerError, match="disk"):
        share.reserve("t", count=3)
    store.broken = False
    assert share.remaining("t") == (5 if written else 8)
    share.reserve("t")
    ledger.verify()


def test_a_failed_give_back_leaves_the_tickets_spent(simple_prices: Any) -> None:
    store = Failing(written=False)
    share = share_of(budget(store=store), refundable=True)
    reservation = share.reserve("t", count=5)
    store.broken = True
    with pytest.raises(LedgerError):
        reservation.give_back()
    store.broken = False
    assert share.remaining("t") == 5
    with pytest.raises(PrivacyBudgetExceededError):
        reservation.burn()


def test_a_stop_while_lines_of_others_are_read_applies_none_of_them_twice(
    simple_prices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = InMemoryStore()
    one, other = share_of(budget(store=store), refundable=True), share_of(Budget.open(store), refundable=True)
    reservation = one.reserve("t", count=4)
    reservation.burn(2)
    assert other.remaining("t") == 6
    reservation.give_back()
    real = LedgerState._RULES["give_back"]

    def stopped(state: LedgerState, *line: Any) -> Any:
        real(state, *line)
        raise KeyboardInterrupt

    with monkeypatch.context() as stopping, pytest.raises(KeyboardInterrupt):
        stopping.setitem(LedgerState._RULES, "give_back", stopped)
        other.remaining("t")
    assert one.remaining("t") == other.remaining("t") == 8
    with pytest.raises(PrivacyBudgetExceededError):
        other.reserve("t", count=9)


@pytest.mark.parametrize("is_empty", [False, True])
@pytest.mark.parametrize("written", [True, False])
def test_an_older_copy_is_refused_also_after_a_failed_write(written: bool, is_empty: bool, simple_prices: Any) -> None:
    store = Failing(written=written)
    share = share_of(budget(store=store))
    share.reserve("t")
    older = [] if is_empty else list(store._lines)
    share.reserve("t", count=5)
    store.broken = True
    with pytest.raises(LedgerError, match="disk"):
        share.reserve("t")
    store.broken = False
    store._lines[:] = older
    for attempt in (lambda: share.remaining("t"), lambda: share.reserve("t"), lambda: share.remaining("t")):
        with pytest.raises(LedgerError, match="gone or changed"):
            attempt()
    assert store._lines == older


@pytest.mark.parametrize("written", [True, False])
def test_after_failed_writes_every_desk_of_an_intact_ledger_goes_on_and_then_refuses_an_older_copy(
    written: bool, simple_prices: Any
) -> None:
    store = Failing(written=written)
    ledgers = [budget(store=store), Budget.open(store), Budget.open(store)]
    shares = [share_of(ledger) for ledger in ledgers]
    left = 10
    for failing, writing in ((0, 1), (1, 1), (2, 0), (0, 0)):
        older = list(store._lines)
        store.broken = True
        with pytest.raises(LedgerError, match="disk"):
            shares[failing].reserve("t")
        store.broken = False
        shares[writing].reserve("t")
        left -= 2 if written else 1
        assert [share.remaining("t") for share in shares] == [left] * 3
    for ledger in ledgers:
        ledger.verify()
    store._lines[:] = older
    for share in shares:
        with pytest.raises(LedgerError, match="gone or changed"):
            share.reserve("t")


# --- stores of others ------------------------------------------------------------------------------------------------


class Plain:
    """A store of somebody else: no `head`, and lines as its own code returns them."""

    durable = True
    description = "elsewhere"

    def __init__(self, spoil: Callable[[LedgerRecord], LedgerRecord] = lambda line: line) -> None:
        self._inner = InMemoryStore()
        self.create, self.header, self.records = self._inner.create, self._inner.header, self._inner.records
        self._spoil = spoil

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        with self._inner.transaction() as view:
            append = lambda kind, body: self._spoil(view.append(kind, body))  # noqa: E731
            yield SimpleNamespace(records=view.records, append=append)


def test_a_store_without_a_head_is_read(simple_prices: Any) -> None:
    store = Plain()
    shares = [share_of(Budget(epsilon=4.0, delta=1e-6, store=store)), share_of(Budget.open(store))]
    shares[0].reserve("t", count=7)
    assert shares[1].remaining("t") == 3
    shares[1].reserve("t", count=3)
    with pytest.raises(PrivacyBudgetExceededError):
        shares[0].reserve("t")


@pytest.mark.parametrize(
    "change",
    [{"hash": "0" * 64}, {"kind": "bind"}, {"stamp": "never"}, {"body": {"count": 1}}, {"seq": 9}, {"prev": "0" * 64}],
    ids=str,
)
def test_what_a_store_of_others_says_it_wrote_is_checked(change: dict[str, Any], simple_prices: Any) -> None:
    store = Plain(lambda line: replace(line, **change) if line.kind == "reserve" else line)
    share = share_of(Budget(epsilon=4.0, delta=1e-6, store=store))
    with pytest.raises(LedgerError, match="does not follow"):
        share.reserve("t")
    assert store.records() == ()
    assert share.remaining("t") == 10


@pytest.mark.parametrize("keep", [(0, 2, 3), (0, 2, 1, 3), (0, 1, 1, 2, 3), (0, 3), (1, 2, 3)])
def test_lines_that_a_store_of_others_returns_must_follow_each_other(keep: tuple[int, ...], simple_prices: Any) -> None:
    store = Plain()
    share = share_of(Budget(epsilon=4.0, delta=1e-6, store=store))
    for _ in range(3):
        share.reserve("t")
    lines = tuple(store.records()[number] for number in keep)
    assert all(line.hash == line.computed_hash for line in lines)
    store.records = lambda after=0, *, limit=None: lines[after:][:limit]  # type: ignore[method-assign]
    with pytest.raises(LedgerError, match="does not follow"):
        Budget.open(store)


def test_a_ledger_as_long_as_the_one_seen_before_but_another_grants_nothing(simple_prices: Any) -> None:
    store, _, share = used_ledger()
    store.replace(lambda lines: lines[:-1])
    with store.transaction() as view:
        view.append("give_back", {"reservation": 2, "count": 1})
    Budget.open(store).verify()
    for attempt in (lambda: share.reserve("t"), lambda: share.remaining("t")):
        with pytest.raises(LedgerError, match="gone or changed"):
            attempt()


def test_a_store_derived_from_ours_is_checked_as_well(simple_prices: Any) -> None:
    class Forgetful(InMemoryStore):
        @contextmanager
        def transaction(self) -> Iterator[Any]:
            with super().transaction() as view:
                forget = lambda kind, body: replace(view.append(kind, body), stamp="never")  # noqa: E731
                yield SimpleNamespace(records=view.records, head=view.head, append=forget)

    with pytest.raises(LedgerError, match="does not follow"):
        share_of(budget(store=Forgetful())).reserve("t")


def test_lines_written_by_others_in_between_are_read_although_our_own_are_known(simple_prices: Any) -> None:
    store = InMemoryStore()
    one, other = share_of(budget(store=store)), share_of(Budget.open(store))
    for left in range(9, 0, -2):
        one.reserve("t")
        assert (one.remaining("t"), other.remaining("t")) == (left, left)
        other.reserve("t")
        assert (one.remaining("t"), other.remaining("t")) == (left - 1, left - 1)


def test_terms_are_compared_again_for_another_declaration(simple_prices: Any) -> None:
    store = InMemoryStore()
    ledger = budget(store=store)
    share_of(ledger).reserve("t")
    share_of(ledger).reserve("t")
    assert share_of(Budget.open(store)).reserve("t").count == 1
    standing = share_of(ledger)._standing
    changed = Component(name="c", kind="tickets", tickets=tickets(0.2), epsilon=1.0, delta=2.5e-7)
    with pytest.raises(SealedShareError, match="tickets"):
        ledger._desk.reserve(standing, changed, ("t", None), count=1)
