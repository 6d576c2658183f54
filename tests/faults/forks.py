"""L13: forks and copies of handles. Parent and child spend one ledger; nothing that was reserved is used twice."""

from __future__ import annotations

import copy
import pickle
from typing import Any

from langchain_dpicl.exceptions import LedgerError, PrivacyBudgetExceededError, PrivateAccessError
from tests.faults.children import Child, Start, together
from tests.faults.counts import Count, require
from tests.faults.places import Places, Terms, reserved

TERMS = Terms(10)
CHILDREN = 6


def fork(places: Places, count: Count, *, trials: int) -> None:
    """Forks with everything open, then inside a transaction; then copies and pickles."""
    for number in range(trials):
        with count.trial(f"fork {number}"):
            _fork_between(places, count)
        with count.trial(f"fork inside {number}"):
            _fork_inside(places, count)
        with count.trial(f"copy {number}"):
            _copy(places)


def _fork_between(places: Places, count: Count) -> None:
    place = places()
    budget, share = TERMS.made(place)
    held = share.reserve("t", count=2)
    held.burn()

    def child(start: Start) -> dict[str, Any]:
        start()
        used = 0
        for use in (held.burn, held.commit):
            try:
                use()
            except LedgerError:
                continue
            used += 1
        used += held.give_back()
        granted = 0
        try:
            for _ in range(3):
                share.reserve("t").burn()
                granted += 1
        except PrivacyBudgetExceededError:
            pass
        return {"used": used, "granted": granted}

    told = together([child] * CHILDREN)
    granted = sum(one["granted"] for one in told)
    require(sum(one["used"] for one in told) == 0, "a child used its parent's reservation")
    require(granted == TERMS.count - 2, f"children were granted {granted}")
    held.burn()
    held.commit(2)
    budget.verify()
    budget.close()
    require(reserved(place.open()) == TERMS.count, "the ledger holds another number of tickets")
    count.seen["granted to children"] += granted


def _fork_inside(places: Places, count: Count) -> None:
    place = places()
    budget, share = TERMS.made(place)
    share.reserve("t")
    store = place.open()

    def child(_: Start) -> str:
        try:
            view.append("commit", {"reservation": 2, "count": 1})
        except LedgerError as error:
            return type(error).__name__
        return "written"

    with store.transaction() as view:
        told = Child(child).result()
        head = view.records()[-1].hash
    require(told == "LedgerError", f"a child writes in its parent's transaction: {told}")
    require(place.open().records()[-1].hash == head, "the ledger was changed")
    share.reserve("t")
    budget.verify()
    require(reserved(place.open()) == 2, "the ledger does not go on")
    count.seen["refused inside"] += 1


def _copy(places: Places) -> None:
    budget, share = TERMS.made(places())
    reservation = share.reserve("t")
    for held in (budget, share, reservation, budget._store):
        require(copy.copy(held) is held, "a copy")
        require(copy.deepcopy([held])[0] is held, "a deep copy")
        try:
            pickle.dumps(held)
        except PrivateAccessError:
            continue
        require(False, "pickled")
