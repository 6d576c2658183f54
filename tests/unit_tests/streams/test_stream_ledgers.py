"""Operators make a ledger for windows and ask what is left for a day, from Python and from the command line."""

from __future__ import annotations

import json
import re
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl import Budget, PrivacyBudgetCallbackHandler
from langchain_dpicl.cli.main import main
from langchain_dpicl.exceptions import ConfigurationError, SealedShareError
from langchain_dpicl.privacy.accounting.events import GaussianEvent
from langchain_dpicl.privacy.extensions.stream_ledger import ORIGIN, StreamTerms, runs_touching
from langchain_dpicl.privacy.ledger.tickets import Ticket
from tests.stream_times import DAY, START

pytestmark = pytest.mark.traced


TODAY = (datetime.fromtimestamp(START, UTC) - ORIGIN).days


def day_of(block: int) -> str:
    terms = StreamTerms.parse("1 day")
    assert terms is not None
    return terms.name_of(block)


def declared(budget: Any, name: str, extent: tuple[int, int | None], epsilon: float) -> Any:
    ticket = Ticket("run", GaussianEvent(50.0))
    return getattr(budget, "budget", budget).declare(name, tickets=[ticket], epsilon=epsilon, delta=1e-7, extent=extent)


def test_what_is_left_for_a_day_is_what_its_windows_have_left() -> None:
    budget = PrivacyBudgetCallbackHandler(4.0, 1e-6, per="30 days")
    declared(budget, "dated", (100, 109), 1.0).reserve("run", blocks=(100, 105))
    share = declared(budget, "standing", (200, None), 2.0)
    share.reserve("run", blocks=(200, 205))
    left = {block: budget.remaining_at(day_of(block))[0] for block in (70, 71, 105, 138, 139, 170, 171, 10_000)}
    # A window with day 71 may reach day 100, one with day 70 does not; after day 138 none touches the dated share.
    assert left == {70: 4.0, 71: 3.0, 105: 3.0, 138: 3.0, 139: 4.0, 170: 4.0, 171: 2.0, 10_000: 2.0}
    assert budget.remaining_at(date(2001, 4, 11)) == (3.0, pytest.approx(9e-7))
    budget.retire("standing")
    assert budget.remaining_at(day_of(10_000))[0] == 4.0
    assert budget.remaining_at(day_of(205))[0] == 2.0
    with pytest.raises(SealedShareError):
        budget.retire("nobody")


def one_year(budget: Budget, clock: list[float]) -> None:
    """A run on 30 days of long ago, then one on the last 30 days every week, of which at most nine touch a window."""
    dated, weekly = shares_of_a_year(budget)
    dated.reserve("run", blocks=(TODAY - 400, TODAY - 371))
    for today in range(TODAY, TODAY + 365, 7):
        clock[0] = START + (today - TODAY) * DAY
        reservation = weekly.reserve("run", blocks=(today - 30, today - 1))
        reservation.burn()
        reservation.commit()


def shares_of_a_year(budget: Budget) -> tuple[Any, Any]:
    dated = declared(budget, "dated", (TODAY - 400, TODAY - 371), 3.0)
    ticket = Ticket("run", GaussianEvent(50.0), max_count=runs_touching(30, every=7, window=30))
    return dated, budget.declare("weekly", tickets=[ticket], epsilon=1.0, delta=1e-7, extent=(TODAY - 30, None))


def test_what_operators_see_counts_the_windows_that_are_not_over(clock: list[float]) -> None:
    budget, called = Budget(epsilon=4.0, delta=1e-6, per="30 days"), list[str]()
    shares_of_a_year(budget)
    for name, part in ((None, 0.7), ("weekly", 0.6), ("dated", 1.0), ("weekly", 0.5)):
        budget.on_spent(part, lambda _, what=f"{name} {part}": called.append(what), component=name)
    one_year(budget, clock)
    # In windows that are not over are 5 of 9 runs, and 1.0 of 4.
    assert called == ["dated 1.0", "weekly 0.5"]
    use = budget.use()
    assert use.tickets == {"dated": (0, 1, 0), "weekly": (4, 0, 53)}  # what is dated has no other window
    assert (use.epsilon_spent, use.delta_spent) == (1.0, 1e-7)
    assert use.epsilon_spent == budget.epsilon - budget.remaining_epsilon
    assert budget.spent_parts() == {None: 0.25, "dated": 1.0, "weekly": pytest.approx(5 / 9)}
    clock[0] += 29 * DAY
    assert budget.use().tickets["weekly"].left == 9
    assert budget.spent_parts()["weekly"] == 0.0
    budget.retire("weekly")
    assert budget.use().tickets["weekly"].left == 0


def test_a_dated_share_that_is_read_in_parts_has_left_what_its_windows_to_come_have(clock: list[float]) -> None:
    budget = Budget(epsilon=4.0, delta=1e-6, per="30 days")
    once = [Ticket("run", GaussianEvent(50.0), max_count=1)]
    share = budget.declare("dated", tickets=once, epsilon=1.0, delta=1e-7, extent=(TODAY - 200, TODAY + 200))
    share.reserve("run", blocks=(TODAY - 200, TODAY - 171))
    assert budget.use().tickets["dated"].left == 1
    share.reserve("run", blocks=(TODAY, TODAY))
    assert budget.use().tickets["dated"].left == 0
    clock[0] += 300 * DAY
    assert budget.use().tickets["dated"].left == 0


def test_the_command_line_counts_the_windows_that_are_not_over(
    clock: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = str(tmp_path / "l.db")
    budget = PrivacyBudgetCallbackHandler.create(place, epsilon=4.0, delta=1e-6, per="30 days").budget
    one_year(budget, clock)
    budget.close()
    assert main(["ledger", "show", place]) == 0
    assert "of weekly: 4 tickets" in capsys.readouterr().out
    assert main(["ledger", "check", place, "--warn", "0.8", "--component", "weekly"]) == 0
    assert "55.6%  share 'weekly'" in capsys.readouterr().out
    assert main(["ledger", "metrics", place]) == 0
    shown = capsys.readouterr().out
    assert re.search(r'dpicl_tickets_left\{[^}]*component="weekly"\} 4\n', shown)
    assert re.search(r"dpicl_epsilon_spent\{[^}]*\} 1.0\n", shown)


def test_hours_and_weeks_have_days_too() -> None:
    for per in ("48 hours", "2 weeks"):
        budget = Budget(epsilon=4.0, delta=1e-6, per=per)
        assert budget.remaining_at("2026-11-23") == (4.0, 1e-6)


@pytest.mark.parametrize("day", ["yesterday", "2000-12-31", "2026-11-23T10:00", 20261123, None])
def test_what_is_no_day_is_refused(day: Any) -> None:
    with pytest.raises(ConfigurationError, match="a day"):
        Budget(epsilon=4.0, delta=1e-6, per="30 days").remaining_at(day)


def test_a_budget_for_life_has_no_days() -> None:
    with pytest.raises(ConfigurationError, match="remaining_epsilon"):
        Budget(epsilon=4.0, delta=1e-6).remaining_at("2026-11-23")


def test_the_command_line_makes_a_ledger_for_windows_and_shows_a_day(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = str(tmp_path / "l.db")
    limits = ["--epsilon", "4", "--delta", "1e-6"]
    assert main(["ledger", "create", place, *limits, "--per", "30 days"]) == 0
    assert "delta 1e-06 per 30 days of the records' time" in capsys.readouterr().out
    budget = PrivacyBudgetCallbackHandler.open(place)
    assert budget.budget.per == "30 days"
    declared(budget, "dated", (100, 109), 1.0).reserve("run", blocks=(100, 105))
    budget.budget.close()
    assert main(["ledger", "show", place, "--day", day_of(105)]) == 0
    assert re.search(rf"every window with {day_of(105)}: epsilon 3\b", capsys.readouterr().out)
    assert main(["ledger", "show", place, "--day", day_of(105), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["remaining"]["at"]["epsilon"] == 3.0
    assert main(["ledger", "show", place, "--day", "soon"]) != 0
    other = str(tmp_path / "life.db")
    assert main(["ledger", "create", other, *limits, "--per", "30 moons"]) != 0
    assert not Path(other).exists()
    assert main(["ledger", "create", other, *limits]) == 0
    assert "per" not in capsys.readouterr().out.split("limit")[1].split("anchor")[0]
    assert main(["ledger", "show", other, "--day", "2026-11-23"]) != 0
