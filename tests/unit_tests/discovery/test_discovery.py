"""Counting and discovery as a user builds them: paid before they look, released once, and recomputed by the verifier."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl import (
    Budget,
    DPVotingRunnable,
    EmbeddedLLM,
    Noise,
    PrivacyBudgetCallbackHandler,
    PrivacyBudgetExceededError,
    PrivateExamples,
    ReleasedCounts,
    UnitCounter,
    ValueDiscovery,
    get_privacy_budget_callback,
    verify_report,
)
from langchain_dpicl.exceptions import (
    ConfigurationError,
    LedgerError,
    ModelCallError,
    NoisyPlanWarning,
    NoPrivacyBudgetError,
    PrivacyBudgetError,
    PrivacyBudgetMismatchError,
    PrivateAccessError,
)
from langchain_dpicl.privacy.accounting.events import PureEvent
from langchain_dpicl.privacy.extensions.value_counts import COUNT_TEMPLATE, UnitValues
from langchain_dpicl.privacy.ledger.store import InMemoryStore
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM, SecureRandom
from langchain_dpicl.privacy.private_examples import Pool
from tests.sealed_files import at

CANARY = "canary-7f3a"
FILMS = [{"text": "x", "director": name} for name in ["Christopher  Nolan"] * 300 + ["GRETA GERWIG"] * 200 + [CANARY]]


def house(**limits: Any) -> Budget:
    return Budget(**{"epsilon": 4.0, "delta": 1e-6, **limits})


def films(records: Any = FILMS, **declared: Any) -> PrivateExamples:
    return PrivateExamples(
        records, **{"fields": ("director",), "public_size": 10_000, "dataset_id": "films", **declared}
    )


def tickets(**declared: Any) -> PrivateExamples:
    records = [{"text": "x", "queue": queue} for queue in ["card"] * 400 + ["login"] * 150]
    return PrivateExamples(
        records, **{"label_key": "queue", "labels": ("login", "card", "Card"), "public_size": 10_000, **declared}
    )


def finder(private: PrivateExamples, budget: Any, **options: Any) -> ValueDiscovery:
    return ValueDiscovery.from_private_examples(private, field="director", budget=budget, **{"epsilon": 1.0, **options})


def counter(private: PrivateExamples, budget: Any, **options: Any) -> UnitCounter:
    return UnitCounter.from_private_examples(private, budget=budget, **{"epsilon": 1.0, **options})


BUILDERS: dict[str, Callable[[Any], Any]] = {
    "discovery": lambda budget: finder(films(), budget),
    "labels": lambda budget: counter(tickets(), budget),
    "units": lambda budget: counter(films(), budget),
    "values": lambda budget: counter(films(), budget, field="director", values=("Greta Gerwig", "nobody")),
}


@pytest.fixture(params=BUILDERS)
def build(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """One of the four ways to count."""
    return BUILDERS[request.param]


class TestWhatCannotBeFound:
    def test_a_declared_size_below_what_a_value_needs_warns_before_anything_is_spent(self) -> None:
        with pytest.warns(
            NoisyPlanWarning, match=r"A value is found .* if 18 units hold it, and only 17 are"
        ) as caught:
            made = finder(films(public_size=17), house())
        assert [warning.filename for warning in caught] == [__file__]
        assert made.plan.found_from() == 18
        assert made.share.remaining(COUNT_TEMPLATE) == 1

    def test_one_that_suffices_and_declared_values_do_not_warn(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            finder(films(public_size=18), house())
            counter(films(public_size=1), house(), field="director", values=("Greta Gerwig",))


class TestWhatIsReleased:
    def test_values_that_many_units_hold_are_found_and_those_of_one_are_not(self) -> None:
        found = finder(films(), house()).run()
        assert found.values == ("christopher nolan", "greta gerwig")
        assert abs(found.counts["greta gerwig"] - 200) < 60
        assert CANARY not in found.to_json()

    def test_every_declared_label_is_counted_also_one_that_nobody_has(self) -> None:
        found = counter(tickets(), house()).run()
        assert found.values == ("login", "card", "Card")
        for label, true in (("login", 150), ("card", 400), ("Card", 0)):
            assert abs(found.counts[label] - true) < 60

    def test_units_and_values_are_counted(self) -> None:
        assert abs(counter(films(), house()).run().public_size(side="middle") - 501) < 60
        found = BUILDERS["values"](house()).run()
        assert found.values == ("Greta Gerwig", "nobody")
        assert abs(found.counts["nobody"]) < 60

    def test_a_unit_counts_once_however_many_records_it_has(self) -> None:
        records = [{"text": "x", "director": "loud", "user": "one"}] * 500
        private = films(records, unit_key="user", records_per_unit=500)
        assert finder(private, house()).run().values == ()

    def test_removed_units_count_nothing(self) -> None:
        private = films(FILMS[:300])
        for place in range(300):
            private.remove(place)
        assert finder(private, house()).run().values == ()

    def test_noise_is_fresh_and_grows_with_the_values_of_a_unit(self) -> None:
        wide = finder(films(), house(), max_values=3)
        assert wide.plan.threshold > 2 * finder(films(), house()).plan.threshold
        assert len({counter(films(), house(), epsilon=0.05).run().public_size() for _ in range(8)}) > 2

    async def test_of_calls_at_once_one_counts_and_the_others_are_refused(self, build: Callable[[Any], Any]) -> None:
        made = build(house())
        results = await asyncio.gather(*(made.arun() for _ in range(4)), return_exceptions=True)
        found = [result for result in results if isinstance(result, ReleasedCounts)]
        assert all("no other run" in str(result) for result in results if result not in found)
        assert {result.to_json() for result in found} == {made.run().to_json()}
        assert made.share.remaining(COUNT_TEMPLATE) == 0


class TestWhatIsPaid:
    def test_nothing_is_read_before_the_ticket_stands_in_the_ledger(self, monkeypatch: pytest.MonkeyPatch) -> None:
        budget, seen = house(), []
        real = Pool.records

        def spied(self: Pool, position: int) -> Any:
            seen.append(budget.dangling()[0].count if budget.dangling() else None)
            return real(self, position)

        monkeypatch.setattr(Pool, "records", spied)
        made = finder(films(), budget)
        assert made.plan.threshold > 1
        assert seen == []
        made.run()
        assert set(seen) == {1}

    def test_building_spends_nothing_and_the_share_is_set_aside(self, build: Callable[[Any], Any]) -> None:
        made = build(budget := house())
        assert made.share.remaining(COUNT_TEMPLATE) == 1
        assert budget.remaining_epsilon == pytest.approx(3.0)
        assert made.plan.epsilon <= 1.0

    @pytest.mark.parametrize("fault", [RuntimeError, SystemExit, MemoryError])
    def test_a_count_that_fails_says_nothing_and_stays_paid(
        self, fault: type[BaseException], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(self: Any, records: Any) -> Any:
            raise fault(CANARY)

        made = finder(films(), budget := house())
        with monkeypatch.context() as patched:
            patched.setattr(UnitValues, "of", broken)
            with pytest.raises(ModelCallError) as caught:
                made.run()
        error: BaseException | None = caught.value
        while error is not None:
            assert CANARY not in str(error)
            error = error.__cause__ or error.__context__
        assert budget.dangling()[0].count == 1
        with pytest.raises(PrivacyBudgetExceededError):
            made.run()

    def test_ctrl_c_goes_on_without_what_was_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def stopped(self: Any, records: Any) -> Any:
            raise KeyboardInterrupt

        made = finder(films(), house())
        monkeypatch.setattr(UnitValues, "of", stopped)
        with pytest.raises(KeyboardInterrupt) as caught:
            made.run()
        frame = caught.value.__traceback__
        while frame is not None:
            if "langchain_dpicl" in frame.tb_frame.f_code.co_filename:
                assert CANARY not in repr(list(frame.tb_frame.f_locals.values()))
            frame = frame.tb_next

    def test_a_ledger_that_fails_at_the_commit_keeps_what_was_released(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = finder(films(), budget := house())

        def out(self: Any, count: int = 1) -> None:
            raise LedgerError("out")

        with monkeypatch.context() as patched:
            patched.setattr("langchain_dpicl.privacy.ledger.shares.Reservation.commit", out)
            with pytest.raises(LedgerError):
                made.run()
        assert made.run().values == ("christopher nolan", "greta gerwig")
        assert not budget.dangling()

    def test_a_ticket_goes_back_where_another_generator_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Mine(SecureRandom):
            pass

        made = finder(films(), house())
        monkeypatch.setattr("langchain_dpicl.release.curator.SYSTEM_RANDOM", Mine())
        with pytest.raises(PrivacyBudgetError, match="coins"):
            made.run()
        assert made.share.remaining(COUNT_TEMPLATE) == 1

    def test_the_same_name_and_plan_find_the_same_share_in_another_process_and_no_second_ticket(self) -> None:
        store = InMemoryStore()
        private, budget = films(), house(store=store)
        finder(private, budget, component="mine").run()
        with pytest.raises(PrivacyBudgetExceededError):
            finder(private, budget, component="mine").run()

    def test_a_ticket_of_other_parameters_is_refused_before_it_burns(self) -> None:
        private, budget = films(), house()
        made = finder(private, budget)
        made.plan = finder(private, budget, epsilon=2.0).plan
        with pytest.raises(PrivacyBudgetError, match="another event"):
            made.run()
        assert made.share.remaining(COUNT_TEMPLATE) == 1

    def test_examples_of_another_ledger_are_refused(self) -> None:
        private = films()
        finder(private, house())
        with pytest.raises(PrivacyBudgetMismatchError):
            finder(private, house())

    def test_more_than_is_left_is_refused_before_anything_is_bound(self) -> None:
        private = films()
        with pytest.raises(PrivacyBudgetExceededError):
            finder(private, house(epsilon=0.5))
        assert finder(private, house()).run().values

    def test_a_budget_is_found_in_the_config_and_in_the_context_and_needed(self) -> None:
        handler = PrivacyBudgetCallbackHandler(epsilon=4.0, delta=1e-6)
        made = finder(films(), {"callbacks": [handler]})
        assert made.report["ledger_id"] == handler.budget.ledger_id
        with get_privacy_budget_callback(epsilon=4.0, delta=1e-6) as active:
            assert finder(films(), None).report["ledger_id"] == active.budget.ledger_id
        with pytest.raises(NoPrivacyBudgetError):
            finder(films(), None)

    def test_counts_in_a_joint_plan_cost_less_than_alone(self) -> None:
        private, budget = films(), house()
        with budget.plan() as plan:
            for name in ("one", "two", "three"):
                counter(private, budget, component=name, epsilon=0.5)
            finder(private, budget, epsilon=0.5, component="four")
        assert 0 < plan.epsilon <= 2.0
        assert verify_report(budget.report()).ok

    def test_a_ledger_on_disk_holds_the_threshold_and_what_was_spent(self, tmp_path: Path) -> None:
        path = tmp_path / "films.db"
        handler = PrivacyBudgetCallbackHandler.create(path, epsilon=4.0, delta=1e-6)
        finder(films(), handler, component="mine").run()
        handler.budget.close()
        again = PrivacyBudgetCallbackHandler.open(path)
        again.budget.verify()
        assert verify_report(again.report()).ok
        assert again.budget.remaining_epsilon == pytest.approx(3.0)
        with pytest.raises(PrivacyBudgetMismatchError):  # other records under the same name, in one process
            finder(films(), again, component="mine")
        again.budget.close()


@pytest.mark.traced
class TestWhatTheReportSays:
    def test_everything_is_recomputed(self, build: Callable[[Any], Any]) -> None:
        made = build(budget := house())
        found = made.run()
        for shown in (found, found.to_json(), found.report, budget.report(), budget.report().to_json()):
            verified = verify_report(shown)
            assert verified.problems == ()
            assert verified.epsilon <= 1.0
        assert "counts" in budget.report().to_markdown()

    def test_no_epsilon_is_told_at_a_delta_that_the_threshold_alone_takes(self) -> None:
        finder(films(), budget := house()).run()
        table = budget.report().epsilons([1e-9, 1e-6]).to_dict()["rows"]
        assert table[0]["epsilon"] is None
        assert table[1]["epsilon"] <= 1.0
        assert verify_report(budget.report().with_epsilons([1e-9, 1e-6])).ok

    @pytest.mark.parametrize(
        ("path", "value", "said"),
        [
            ("public.counts.mechanism.threshold", 12, "other tickets"),
            ("public.counts.rule.max_values", 2, "as its parts show it"),
            ("public.counts.rule.field", "other", "other"),
            ("public.counts.scale", 3.0, "as its parts show it"),
            ("public.threshold_delta", 1e-9, "threshold_delta"),
            ("public.noise_multiplier", 0.5, "noise_multiplier"),
            ("public.epsilon", 0.5, "epsilon"),
            ("public.adjacency", "replace_one", "adjacency"),
            ("public.extra", 1, "extra"),
            ("implementation_delta", 1e-9, "implementation_delta"),
            ("tickets.0.max_count", 2, "tickets"),
            ("tickets.0.event.events.1.delta", 1e-12, "other tickets"),
        ],
    )
    def test_a_changed_number_is_a_problem(self, path: str, value: Any, said: str) -> None:
        budget = house()
        finder(films(), budget).run()
        data = json.loads(budget.report().to_json())
        holder, key = at(data["shares"][0]["components"][0], path)
        holder[key] = value
        verified = verify_report(data)
        assert not verified.ok
        assert any(said in problem for problem in verified.problems)

    def test_a_threshold_whose_chance_is_left_out_of_the_charge_is_a_problem(self) -> None:
        budget = house()
        finder(films(), budget).run()
        data = json.loads(budget.report().to_json())
        share = data["shares"][0]
        share["components"][0]["tickets"][0]["event"] = share["components"][0]["tickets"][0]["event"]["events"][0]
        share["event"] = share["event"]["events"][0]
        assert any("other tickets" in problem for problem in verify_report(data).problems)

    def test_counts_that_the_plan_cannot_release_are_a_problem(self) -> None:
        found = finder(films(), house()).run()
        data = json.loads(found.to_json())
        for counts, said in (([[CANARY, 3]], "below the threshold"), ([["a", 90], ["a", 91]], "one for each")):
            assert any(said in problem for problem in verify_report({**data, "counts": counts}).problems)
        declared = json.loads(counter(tickets(), house()).run().to_json())
        assert not verify_report({**declared, "counts": declared["counts"][:1]}).ok
        other = json.loads(finder(films(), house(), epsilon=0.5).run().to_json())
        assert not verify_report({**data, "plan": other["plan"]}).ok

    def test_counts_under_the_report_of_something_else_are_a_problem(self) -> None:
        other = house()
        other.bind(private := films(dataset_id="other"))
        other.declare("voter", tickets=[Ticket("query", PureEvent(0.5))], partition=private.dataset_id, epsilon=1.0)
        found = json.loads(finder(films(), house()).run().to_json())
        report = {**found["report"], "component": "voter", "budget": other.report().to_dict()}
        assert any("no component" in problem for problem in verify_report({**found, "report": report}).problems)


class TestWhatIsMadeOfIt:
    def test_found_values_become_labels_on_the_same_ledger(self) -> None:
        private, budget = films(), house()
        found = finder(private, budget).run()
        split = found.redeclare(private)
        assert split.labels == ("christopher nolan", "greta gerwig")
        assert split.dataset_id == "films by director"
        assert split.public_size == found.public_size()
        voter = DPVotingRunnable.from_private_examples(
            split, llm=EmbeddedLLM(), budget=budget, epsilon=1.0, max_queries=2, example_prompt="{text} {director}"
        )
        assert voter.invoke("who?") in split.labels
        with pytest.raises(PrivacyBudgetMismatchError):
            house().bind(split)
        assert verify_report(budget.report()).ok

    def test_counts_become_sizes(self) -> None:
        private, budget = tickets(), house()
        counts = counter(private, budget).run()
        sized = counts.redeclare(private, side="middle", dataset_id="sized")
        assert sized.public_size == {label: max(1, count) for label, count in counts.counts.items()}
        assert sized.labels == private.labels
        budget.bind(sized)
        units = counter(films(), house()).run()
        assert abs(units.redeclare(films()).public_size - 501) < 70

    def test_lower_and_upper_numbers_hold_with_their_confidence(self) -> None:
        runs, wrong = 300, {"lower": 0, "upper": 0}
        found = counter(films(FILMS[:1]), house(), epsilon=0.5).run()
        for _ in range(runs):
            drawn = dict(found.release.release([FILMS[:1]] * 40, rng=SYSTEM_RANDOM))
            found = dataclasses.replace(found, counts=drawn)
            wrong["lower"] += found.public_size(confidence=0.9) > 40
            wrong["upper"] += found.public_size(confidence=0.9, side="upper") < 40
        # At most a tenth each; 69 of 300 at a tenth has a chance below 1e-8.
        assert max(wrong.values()) < 70
        assert found.public_size(confidence=0.999999, side="lower") < found.public_size(side="middle")

    @pytest.mark.parametrize(
        "options", [{"side": "best"}, {"confidence": 0.0}, {"confidence": 1.0}, {"confidence": "x"}]
    )
    def test_numbers_out_of_range_are_refused(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError):
            counter(films(), house()).run().public_size(**options)

    def test_no_size_is_below_one(self) -> None:
        found = counter(tickets(), house(), epsilon=0.01).run()
        assert min(found.public_size(confidence=0.9999).values()) == 1

    def test_counts_that_another_ledger_paid_for_take_no_units_there(self) -> None:
        found = ReleasedCounts.from_json(finder(films(), paid := house()).run().to_json())
        (elsewhere := house()).bind(bound := films())
        with pytest.raises(PrivacyBudgetMismatchError, match="expected ledger"):
            found.redeclare(bound)
        split = found.redeclare(fresh := films())  # of another process, bound nowhere yet
        for examples in (split, fresh):
            with pytest.raises(PrivacyBudgetMismatchError):
                elsewhere.bind(examples)
            with pytest.raises(PrivacyBudgetMismatchError):
                house().bind(examples)
        assert fresh._ledger_id == paid.ledger_id
        opened = films()
        opened._pool(None, ledger_id=None)
        with pytest.raises(PrivateAccessError):
            found.redeclare(opened)

    def test_other_examples_and_no_values_are_refused(self) -> None:
        found = finder(films(), house()).run()
        with pytest.raises(ConfigurationError, match="films"):
            found.redeclare(films(dataset_id="other"))
        nothing = finder(private := films(FILMS[:2]), house()).run()
        with pytest.raises(ConfigurationError, match="at least one value"):
            nothing.redeclare(private)

    def test_it_is_saved_and_read_back_and_nothing_else_is(self, build: Callable[[Any], Any], tmp_path: Path) -> None:
        found = build(house()).run()
        found.save(tmp_path / "counts.json")
        assert ReleasedCounts.load(tmp_path / "counts.json") == found
        data = json.loads(found.to_json())
        for change in ({"counts": {}}, {"counts": [["a"]]}, {"counts": [["a", 1.5]]}, {"plan": {}}, {"version": 2}):
            with pytest.raises(ConfigurationError):
                ReleasedCounts.from_json(json.dumps({**data, **change}))
        with pytest.raises(ConfigurationError):
            ReleasedCounts.from_json("[]")
        twice = [*data["counts"], data["counts"][0]]
        with pytest.raises(ConfigurationError):
            ReleasedCounts.from_json(json.dumps({**data, "counts": twice}))


class TestPublicFaults:
    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"field": "unknown"}, "field"),
            ({"field": "director"}, "values"),
            ({"values": ("a",)}, "field"),
            ({"field": "director", "values": ("a", "A")}, "values"),
            ({"field": "director", "values": ("a",), "max_values": 0}, "max_values"),
            ({"epsilon": 0.0}, "epsilon"),
            ({"epsilon": 0.1, "noise": Noise(multiplier=1.0)}, "noise_multiplier"),
            ({"noise": "gaussian"}, "without a mechanism|mechanism 'gaussian'"),
            ({"delta": 1e-7}, r"Give noise=Noise\(delta=...\)"),
            ({"component": "\n"}, "component"),
        ],
    )
    def test_of_counts_are_refused_and_cost_nothing(self, options: dict[str, Any], said: str) -> None:
        private, budget = films(), house()
        with pytest.raises(ConfigurationError, match=said):
            counter(private, budget, **options)
        assert budget.remaining_epsilon == 4.0

    @pytest.mark.parametrize(("fold_case", "labels"), [(False, ("m\u00b2", "m2")), (True, ("Card", "card"))])
    def test_values_that_are_equal_are_refused_with_advice_that_helps(
        self, fold_case: bool, labels: tuple[str, ...]
    ) -> None:
        private = PrivateExamples([], fields=("queue",), public_size=100)
        values = ("a", *labels, "b")
        given: dict[str, Any] = {"field": "queue", "values": values, "fold_case": fold_case, "epsilon": 1.0}
        told = f"all distinct by the public rule, found {list(labels)}."
        with pytest.raises(ConfigurationError, match=re.escape(told)) as caught:
            UnitCounter.from_private_examples(private, budget=house(), **given)
        assert ("set fold_case=False" in str(caught.value)) is fold_case

    def test_of_a_discovery_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="declared"):
            ValueDiscovery.from_private_examples(tickets(), field="queue", budget=house(), epsilon=1.0)
        with pytest.raises(ConfigurationError, match="field"):
            ValueDiscovery.from_private_examples(films(), field="queue", budget=house(), epsilon=1.0)

    def test_nothing_private_is_shown_and_nothing_is_copied(self) -> None:
        made = finder(films(), house())
        made.run()
        assert "nolan" not in repr(made) + str(made)
        assert copy.deepcopy(made) is made


def test_neighbours_differ_in_nothing_but_the_noisy_counts() -> None:
    def shown(records: Any) -> str:
        made = finder(films(records), budget := house(), component="one")
        found = {**json.loads(made.run().to_json()), "counts": []}
        # Ledger, hashes and stamps are fresh in every run.
        return re.sub(r"[0-9a-f]{16,}|\d\d\d\d-\d\d-\d\dT[\d:+]+", "#", f"{json.dumps(found)} {budget.report()} {made}")

    hostile = {"text": "\ud800", "director": "\x00 NaN {director} " + "long " * 99}
    assert shown(FILMS) == shown([*FILMS, hostile]) == shown(FILMS[1:]) == shown([])
