"""What every release memo must do. Subclass `MemoContract`, and `SharedMemoContract` where processes take turns."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest

from langchain_dpicl.exceptions import MemoError
from langchain_dpicl.stores import MemoKey, ReleaseMemo
from langchain_dpicl.stores.memos import query_of, scope_of, tenant_of

KEY = MemoKey(scope_of({"ledger": "a", "plan": {"noise": 1.0}}), tenant_of("acme"), query_of(["which?"]))
TURN = 1_200.0
"""Seconds that a turn lasts in tests: no machine stands still for so long, and it ends long before an hour."""
TOLD = '["caf\\u00e9 {brace} \\ud800", null, 0.1]'


def others() -> list[MemoKey]:
    """Keys that differ from `KEY` in one thing each."""
    plans = [{"ledger": "b", "plan": {"noise": 1.0}}, {"ledger": "a", "plan": {"noise": 2.0}}]
    queries = [["which", "?"], ["Which?"], [""], ["\ud800"]]
    return [
        *(KEY._replace(scope=scope_of(plan)) for plan in plans),
        *(KEY._replace(tenant=tenant_of(name)) for name in ("", "other", "which?")),
        *(KEY._replace(query=query_of(values)) for values in queries),
    ]


class MemoContract:
    """The suite. `tmp_path` is there for memos that live in files."""

    def make_memo(self, tmp_path: Path, **options: Any) -> ReleaseMemo:
        """Returns an empty memo."""
        raise NotImplementedError

    def reopen(self, memo: ReleaseMemo) -> ReleaseMemo:
        """Returns another handle on the same memo."""
        return memo

    @pytest.fixture
    def memo(self, tmp_path: Path) -> ReleaseMemo:
        return self.make_memo(tmp_path)

    def test_it_is_a_memo_and_says_where_it_lives(self, memo: ReleaseMemo) -> None:
        assert isinstance(memo, ReleaseMemo)
        assert isinstance(memo.durable, bool)
        assert memo.description in repr(memo) or memo.description.split()[-1] in repr(memo)

    def test_what_was_remembered_is_recalled_by_every_handle(self, memo: ReleaseMemo) -> None:
        assert memo.recall(KEY) is None
        memo.remember(KEY, TOLD)
        assert memo.recall(KEY) == self.reopen(memo).recall(KEY) == TOLD

    def test_nothing_is_told_under_another_plan_tenant_or_query(self, memo: ReleaseMemo) -> None:
        memo.remember(KEY, TOLD)
        assert [memo.recall(key) for key in others()] == [None] * 9
        for number, key in enumerate(others()):
            memo.remember(key, str(number))
        assert memo.recall(KEY) == TOLD
        assert [memo.recall(key) for key in others()] == [str(number) for number in range(9)]

    def test_the_first_answer_stays(self, memo: ReleaseMemo) -> None:
        for told in ("first", "second", "second"):
            memo.remember(KEY, told)
        assert self.reopen(memo).recall(KEY) == "first"

    def test_an_answer_that_was_not_whole_is_completed_once(self, memo: ReleaseMemo) -> None:
        memo.remember(KEY, "owed")
        memo.remember(KEY, "whole", instead_of="owed")
        memo.remember(KEY, "late", instead_of="owed")
        assert self.reopen(memo).recall(KEY) == "whole"
        memo.remember(others()[0], "whole", instead_of="owed")
        assert self.reopen(memo).recall(others()[0]) == "whole"

    def test_whoever_asks_first_has_the_turn_and_may_leave_it(self, memo: ReleaseMemo) -> None:
        assert memo.claim(KEY, "one")
        memo.leave(KEY, "one")
        assert memo.claim(KEY, "two")

    def test_keys_show_neither_tenant_nor_query(self) -> None:
        assert "acme" not in "".join(KEY)
        assert all(len(part) == 64 and int(part, 16) for part in KEY)


class SharedMemoContract(MemoContract):
    """For memos of our own, which are bounded and keep turns."""

    END_OF_TURNS: ClassVar[str]
    """A statement after which every turn has been over for long."""
    CLOCK_BACK: ClassVar[str]
    """A statement after which every turn ends an hour later, as where the clock goes back by that."""

    def test_an_answer_that_was_changed_in_its_place_is_not_told(self, memo: ReleaseMemo) -> None:
        memo.remember(KEY, TOLD)
        self.change(memo, "UPDATE {answers} SET told = 'another'")
        with pytest.raises(MemoError, match="broken"):
            memo.recall(KEY)

    def test_an_answer_of_another_key_put_in_its_place_is_not_told(self, memo: ReleaseMemo) -> None:
        memo.remember(KEY, TOLD)
        self.change(memo, f"UPDATE {{answers}} SET tenant = '{tenant_of('other')}'")  # noqa: S608  a hash
        with pytest.raises(MemoError, match="broken"):
            memo.recall(KEY._replace(tenant=tenant_of("other")))

    def change(self, memo: ReleaseMemo, statement: str) -> list[tuple[Any, ...]]:
        """Runs a statement past our code; `{answers}` and `{turns}` are the tables."""
        raise NotImplementedError

    def test_a_turn_is_one_holders_until_it_leaves(self, memo: ReleaseMemo) -> None:
        again = self.reopen(memo)
        assert memo.claim(KEY, "one")
        assert not again.claim(KEY, "two")
        assert again.claim(others()[0], "two")
        again.leave(KEY, "two")  # not its own
        assert not again.claim(KEY, "two")
        memo.leave(KEY, "one")
        assert again.claim(KEY, "two")

    def test_a_turn_that_nobody_leaves_ends_by_itself(self, tmp_path: Path) -> None:
        memo = self.make_memo(tmp_path)
        assert memo.claim(KEY, "killed")
        assert not memo.claim(KEY, "next")
        self.change(memo, self.END_OF_TURNS)
        assert memo.claim(KEY, "next")
        memo.leave(KEY, "killed")  # late: the turn is no longer its own
        assert not memo.claim(KEY, "third")

    def test_a_turn_can_be_taken_again_by_its_holder_alone(self, tmp_path: Path) -> None:
        memo = self.make_memo(tmp_path)
        assert memo.claim(KEY, "one")
        self.change(memo, self.END_OF_TURNS)
        assert memo.claim(KEY, "one")
        assert not memo.claim(KEY, "two")
        assert memo.claim(KEY, "one")
        memo.leave(KEY, "one")
        assert memo.claim(KEY, "two")

    def test_a_turn_lasts_as_long_as_was_said(self, tmp_path: Path) -> None:
        memo = self.make_memo(tmp_path, turn_seconds=0.02)
        assert memo.claim(KEY, "killed")
        time.sleep(0.03)
        assert memo.claim(KEY, "next")

    def test_a_turn_taken_before_the_clock_went_back_does_not_last_until_then(self, memo: ReleaseMemo) -> None:
        assert memo.claim(KEY, "killed")
        self.change(memo, self.CLOCK_BACK)
        assert memo.claim(KEY, "next")
        memo.leave(KEY, "killed")  # late: the turn is no longer its own
        assert not memo.claim(KEY, "third")

    def test_a_turn_that_is_somewhat_longer_than_ones_own_is_left_to_its_holder(self, tmp_path: Path) -> None:
        assert self.make_memo(tmp_path, turn_seconds=7000.0).claim(KEY, "one")
        assert not self.make_memo(tmp_path, turn_seconds=6000.0).claim(KEY, "two")

    def test_short_turns_end_no_long_turn_of_another_question(self, tmp_path: Path) -> None:
        patient, hasty = (self.make_memo(tmp_path, turn_seconds=seconds) for seconds in (6000.0, 20.0))
        assert patient.claim(KEY, "one")
        assert hasty.claim(others()[0], "two")
        assert not patient.claim(KEY, "three")

    def test_threads_that_ask_at_once_get_one_turn(self, memo: ReleaseMemo) -> None:
        with ThreadPoolExecutor(8) as pool:
            taken = list(pool.map(lambda number: memo.claim(KEY, str(number)), range(24)))
        assert sum(taken) == 1

    def test_each_tenant_of_a_component_keeps_its_newest_answers(self, tmp_path: Path) -> None:
        memo = self.make_memo(tmp_path, size=3)
        mine = [KEY._replace(query=query_of([str(number)])) for number in range(5)]
        memo.remember(others()[0], "another component")
        memo.remember(others()[2], "another tenant")
        for number, key in enumerate(mine):
            memo.remember(key, str(number))
            memo.remember(key, str(number))  # again: no other answer has to go
        assert [memo.recall(key) for key in mine] == [None, None, "2", "3", "4"]
        assert memo.recall(others()[0]) == "another component"
        assert memo.recall(others()[2]) == "another tenant"

    def test_a_tenant_is_forgotten_in_all_components(self, memo: Any) -> None:
        for key in (KEY, *others()):
            memo.remember(key, TOLD)
        assert memo.forget("acme") == 7
        assert memo.recall(KEY) is None
        assert memo.recall(others()[2]) == TOLD
        assert memo.forget("acme") == 0

    def test_a_tenant_that_is_forgotten_leaves_no_turn_behind(self, memo: Any) -> None:
        assert memo.claim(KEY, "killed")
        assert memo.claim(others()[2], "another tenant")
        memo.forget("acme")
        assert memo.claim(KEY, "next")
        assert not memo.claim(others()[2], "next")

    def test_what_is_kept_holds_neither_tenant_nor_query(self, memo: ReleaseMemo) -> None:
        key = KEY._replace(query=query_of(["a question that is nobody's business"]))
        memo.remember(key, TOLD)
        memo.claim(key, "holder")
        kept = str(self.change(memo, "SELECT * FROM {answers}") + self.change(memo, "SELECT * FROM {turns}"))
        assert key.query in kept
        assert "acme" not in kept
        assert "business" not in kept
