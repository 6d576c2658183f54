"""PromptPATELabeler: what labels cost, what stops a run, what it keeps and resumes, and what is never paid twice."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.documents import Document
from scipy.optimize import brentq
from scipy.stats import norm

from langchain_dpicl import (
    Budget,
    FewShotTask,
    LabelledPool,
    Noise,
    PrivacyBudgetCallbackHandler,
    PrivateExamples,
    PromptPATELabeler,
    Rows,
    verify_report,
)
from langchain_dpicl.exceptions import (
    ConfigurationError,
    LedgerError,
    ModelCallError,
    PrivacyBudgetExceededError,
    RunInterruptedError,
)
from langchain_dpicl.options import ConfidentGNMax, LocalExecutor
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy.accounting.events import (
    BoundedRangeEvent,
    ComposedEvent,
    GaussianEvent,
    PureEvent,
    RepeatedEvent,
    SubsampledEvent,
)
from langchain_dpicl.privacy.ledger.shares import Reservation
from langchain_dpicl.privacy.mechanisms.release_plan import PoissonUnits
from langchain_dpicl.released import PoolEntry
from tests.contracts.front_room import (
    CANARY,
)
from tests.contracts.release_run import CANARY as RUN_CANARY
from tests.contracts.release_run import Calls, JournalContract, entries_in
from tests.contracts.store import in_child
from tests.labelling_doubles import (
    CARD,
    FIXED,
    GAUSSIAN,
    LABELS,
    MUTE,
    NOISES,
    ONCE,
    PLAIN,
    QUIET,
    SURE,
    TEACHERS,
    WIRE,
    Spy,
    counts,
    examples,
    fails,
    house,
    labeler,
    lines,
    told,
)
from tests.unit_tests.test_private_frames import locals_of_ours, shows_private

pytestmark = pytest.mark.usefixtures("remembered_prices")

WAYS = [
    pytest.param(teachers, mechanism, adjacency, id=f"{teachers}-{mechanism}-{adjacency}")
    for teachers in TEACHERS
    for mechanism in NOISES
    for adjacency in ("add_remove", "replace_one")
    if (teachers, adjacency) != ("fixed", "add_remove")
]


# -- every way to label, and what it costs -----------------------------------------------------------------------


def event_by_hand(teachers: str, mechanism: str, adjacency: str) -> Any:
    """Three inputs, noise 2 (confident: 3 and 4 votes), every second unit in a sample: written down from the papers."""
    l2 = 1.0 if adjacency == "add_remove" else math.sqrt(2)
    if mechanism == "confident_gnmax":
        test, answer = GaussianEvent(3.0), GaussianEvent(4.0 / l2)
        if teachers == "fixed":
            return ComposedEvent((RepeatedEvent(test, 3), RepeatedEvent(answer, 3)))
        each = 1 / 9 + l2**2 / 16  # squared means of the two normal releases add up
        inside = GaussianEvent(1 / math.sqrt(each if teachers == "fresh" else 3 * each))
        return RepeatedEvent(SubsampledEvent(inside, 0.5), 3) if teachers == "fresh" else SubsampledEvent(inside, 0.5)
    by_name = {"gumbel": BoundedRangeEvent(0.5), "permute_and_flip": PureEvent(0.5), "gaussian": GaussianEvent(2.0)}
    one = by_name[mechanism]
    if teachers == "fresh":
        return RepeatedEvent(SubsampledEvent(one, 0.5), 3)
    return RepeatedEvent(one, 3) if teachers == "fixed" else SubsampledEvent(RepeatedEvent(one, 3), 0.5)


def parts(event: Any) -> list[list[Any]]:
    """Kind and numbers of an event, given as JSON or as an object, and of every event in it, to twelve digits."""
    if not isinstance(event, Mapping):
        event = {"kind": event.kind, **{name: getattr(event, name) for name in event.__dataclass_fields__}}
    numbers = [round(value, 12) for key, value in sorted(event.items()) if key not in {"kind", "event", "events"}]
    inner = [*event.get("events", ()), *([event["event"]] if "event" in event else [])]
    return [[event["kind"], *numbers], *(part for one in inner for part in parts(one))]


def gaussian_delta(epsilon: float, mu: float, rate: float) -> float:
    """Of mixture and normal, whichever order loses more: one release of mean `mu` on a sample of this rate."""
    log_ratio: Callable[[float], float] = lambda x: np.log1p(rate * np.expm1(mu * x - mu * mu / 2))  # noqa: E731
    if rate == 1.0:
        return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu))
    at = brentq(lambda x: log_ratio(x) - epsilon, -50, 50)
    mixed = (1 - rate) * norm.sf(at) + rate * norm.sf(at, loc=mu)
    removed = mixed - math.exp(epsilon) * norm.sf(at)
    added = 0.0
    if epsilon < -math.log1p(-rate):
        low = brentq(lambda x: log_ratio(x) + epsilon, -50, 50)
        added = norm.cdf(low) - math.exp(epsilon) * ((1 - rate) * norm.cdf(low) + rate * norm.cdf(low, loc=mu))
    return float(max(removed, added))


def closed_form(teachers: str, mechanism: str) -> float | None:
    """The exact epsilon where one line gives it, at delta 1e-5; of pure losses, at delta 0."""
    if mechanism == "permute_and_flip":
        pure = {"fresh": 3 * math.log1p(0.5 * math.expm1(0.5)), "one_sample": math.log1p(0.5 * math.expm1(1.5))}
        return {**pure, "fixed": 1.5}[teachers]
    if teachers == "fresh" or mechanism == "gumbel":
        return None
    l2 = math.sqrt(2) if teachers == "fixed" else 1.0
    squares = 3 / 4 if mechanism == "gaussian" else 3 / 9 + 3 * l2**2 / 16
    rate = 1.0 if teachers == "fixed" else 0.5
    return float(brentq(lambda e: gaussian_delta(e, math.sqrt(squares), rate) - 1e-5, 0.01, 20, xtol=1e-12))


@pytest.mark.parametrize(("teachers", "mechanism", "adjacency"), WAYS)
def test_every_way_is_priced_from_its_own_tickets(teachers: str, mechanism: str, adjacency: str) -> None:
    budget = house(adjacency)
    noise: Noise | ConfidentGNMax = ConfidentGNMax(10.0, 3.0, 4.0)
    if isinstance(usual := NOISES[mechanism], Noise):
        noise = usual.replace(multiplier=2.0)
    made = labeler(
        budget=budget,
        rows=TEACHERS[teachers],
        noise=noise.replace(delta=1e-5),
        answers=PLAIN.replace(abstain_below="never"),
        epsilon=None,
        public_inputs=["a", "b", "c"],
    )
    made.run()
    [sealed] = [line.body for line in lines(budget) if line.kind == "seal"]
    by_hand = event_by_hand(teachers, mechanism, adjacency)
    assert parts(sealed["event"]) == parts(by_hand)
    gap = sealed["components"][0]["implementation_delta"]
    left = 1e-5 - gap
    assert gap == made.plan.implementation_delta > 0
    again = accounting.epsilon_upper_bound(by_hand, delta=left, adjacency=adjacency)
    assert sealed["epsilon"] == made.plan.epsilon == pytest.approx(again, rel=1e-6)
    assert sealed["delta"] == 1e-5
    exact = closed_form(teachers, mechanism)
    if exact is not None and (teachers == "fixed" or adjacency == "add_remove" or mechanism != "confident_gnmax"):
        assert sealed["epsilon"] == pytest.approx(exact, rel=2e-4)
    budget.verify()
    assert verify_report(made.result).ok
    assert verify_report(budget.report()).ok
    assert made.result.epsilon == sealed["epsilon"]


@pytest.mark.parametrize(("teachers", "mechanism", "adjacency"), WAYS)
def test_every_way_labels_what_the_votes_say_and_charges_what_it_says(
    teachers: str, mechanism: str, adjacency: str
) -> None:
    budget, spy = house(adjacency), Spy()
    reserved: list[int] = []
    spy.at_private = lambda: reserved.append(sum(n for name, n in counts(budget).items() if "reserve" in name))
    made = labeler(
        budget=budget,
        llm=spy,
        rows=TEACHERS[teachers],
        noise=NOISES[mechanism],
        public_inputs=[CARD, MUTE, WIRE],
        max_queries=4,
    )
    assert counts(budget) == {}
    pool = made.run()
    assert told(pool) == [("labelled", "card"), ("rejected", None), ("labelled", "transfer")]
    assert spy.asked == [CARD, MUTE, WIRE]
    if teachers == "one_sample":
        assert (counts(budget), made.queries_left) == ({"reserve labels": 1, "commit labels": 1}, 1)
        assert reserved == [1, 1, 1]
    elif teachers == "fixed" and mechanism == "confident_gnmax":
        tests = {"reserve test": 3, "commit test": 3}
        assert counts(budget) == {**tests, "reserve answer": 3, "commit answer": 2, "give_back answer": 1}
        assert (reserved, made.queries_left) == ([2, 4, 6], 1)
    else:
        assert (counts(budget), made.queries_left) == ({"reserve label": 3, "commit label": 3}, 1)
        assert reserved == [1, 2, 3]
    assert [entry.votes is not None for entry in pool.entries] == [mechanism == "gaussian"] * 3
    budget.verify()
    assert verify_report(pool).ok


def test_votes_that_leave_are_noisy_counts_by_label() -> None:
    made = labeler(noise=GAUSSIAN, rows=FIXED, public_inputs=[CARD, MUTE])
    first, second = made.run().entries
    assert first.votes is not None
    assert second.votes is not None
    # Noise of .05 * sqrt(2) per count: six deviations below 1e-8.
    assert first.votes == pytest.approx({"card": 20, "transfer": 0}, abs=0.5)
    assert second.votes == pytest.approx({"card": 0, "transfer": 0}, abs=0.5)
    assert all(vote * 2.0**32 == round(vote * 2.0**32) for vote in first.votes.values())


@pytest.mark.parametrize("mechanism", NOISES)
@pytest.mark.parametrize("teachers", TEACHERS)
def test_soft_votes_label_too(teachers: str, mechanism: str) -> None:
    made = labeler(
        rows=TEACHERS[teachers],
        noise=NOISES[mechanism],
        answers=PLAIN.replace(votes="soft"),
        public_inputs=[CARD, WIRE],
    )
    assert told(made.run()) == [("labelled", "card"), ("labelled", "transfer")]
    assert made.plan.release.aggregation.name == "probability_sum"


def test_soft_votes_are_the_sum_of_probabilities() -> None:
    made = labeler(rows=FIXED, noise=GAUSSIAN, answers=PLAIN.replace(votes="soft"), public_inputs=[CARD])
    [entry] = made.run().entries
    # Twenty rows of .9 and .1; noise of .05 * sqrt(2) per coordinate at most: six deviations below 1e-8.
    assert entry.votes == pytest.approx({"card": 18, "transfer": 2}, abs=0.5)


def test_noise_is_calibrated_to_the_share() -> None:
    made = labeler(epsilon=1.0, noise=None, budget=house(epsilon=4.0, delta=1e-4), max_queries=2)
    assert 0.9 < made.plan.epsilon <= 1.0
    assert made.plan.delta == pytest.approx(2.5e-5)
    assert made.result.epsilon == 1.0
    made.run()
    assert verify_report(made.result).ok


def test_rows_and_shots_are_the_plans_own() -> None:
    spy = Spy()
    labeler(llm=spy, rows=Rows(slots=10, shots=4, sampling="partition"), public_inputs=[CARD]).run()
    [prompts] = spy.private
    assert [prompt.count(CANARY) for prompt in prompts] == [4] * 10
    assert len({line for prompt in prompts for line in prompt.split("\n") if CANARY in line}) == 40


def test_fixed_teachers_are_the_same_for_every_input_and_no_unit_teaches_twice() -> None:
    spy = Spy()
    labeler(llm=spy, rows=FIXED, public_inputs=[CARD, WIRE]).run()
    first, second = ([prompt.rsplit("text: ", 1)[0] for prompt in prompts] for prompts in spy.private)
    assert first == second
    assert len(set(first)) == len(first) == 20


def test_one_sample_is_drawn_once_and_fresh_ones_for_every_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two fresh samples of forty coins agree with probability 2^-40."""
    draws: list[str] = []
    real = PoissonUnits.draw
    monkeypatch.setattr(PoissonUnits, "draw", lambda *args, **more: (draws.append("draw"), real(*args, **more))[1])

    def samples(teachers: str) -> list[set[str]]:
        spy = Spy()
        made = labeler(llm=spy, rows=TEACHERS[teachers], public_inputs=[CARD, WIRE, "third"], max_queries=4)
        made.run()
        made.label("fourth")
        return [{line for p in prompts for line in p.split("\n") if CANARY in line} for prompts in spy.private]

    one, same, third, fourth = samples("one_sample")
    assert one == same == third == fourth
    assert len(draws) == 1
    first, second, *_ = samples("fresh")
    assert first != second
    assert len(draws) == 5


# -- where it stops ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", NOISES)
@pytest.mark.parametrize("teachers", TEACHERS)
def test_it_stops_exactly_when_the_share_does_and_says_what_waits(teachers: str, mechanism: str) -> None:
    spy = Spy()
    inputs = [CARD, MUTE, WIRE, "card", "wire"]
    made = labeler(llm=spy, rows=TEACHERS[teachers], noise=NOISES[mechanism], public_inputs=inputs, max_queries=3)
    pool = made.run()
    assert [entry.status for entry in pool.entries] == ["labelled", "rejected", "labelled", "waiting", "waiting"]
    assert [dict(entry.fields) for entry in pool.rejected] == [{"text": MUTE}]
    assert [dict(entry.fields) for entry in pool.waiting] == [{"text": "card"}, {"text": "wire"}]
    assert made.queries_left == 0
    before = (lines(made._budget), len(spy.private), len(spy.public))
    assert told(made.run()) == told(pool)
    with pytest.raises(PrivacyBudgetExceededError) as refusal:
        made.label("one more")
    assert (refusal.value.requested, refusal.value.remaining) == (1, 0)
    assert (lines(made._budget), len(spy.private), len(spy.public)) == before
    assert made.result.waiting[-1].fields == {"text": "one more"}


@pytest.mark.parametrize("teachers", ["one_sample", "fixed"])
def test_answers_that_are_used_up_stop_it_before_the_tests_are(teachers: str) -> None:
    made = labeler(
        rows=TEACHERS[teachers],
        noise=SURE.replace(max_answers=2),
        public_inputs=[MUTE, CARD, WIRE, "card"],
        max_queries=4,
    )
    assert [e.status for e in made.run().entries] == ["rejected", "labelled", "labelled", "waiting"]
    assert made.queries_left == 0
    if teachers == "fixed":
        assert made.share.remaining("test") == 1


@pytest.mark.parametrize("teachers", ["one_sample", "fixed"])
def test_tests_that_are_used_up_stop_it_before_the_answers_are(teachers: str) -> None:
    inputs = [MUTE, f"{MUTE} {MUTE}", CARD, WIRE]
    noise = SURE.replace(max_answers=2)
    made = labeler(rows=TEACHERS[teachers], noise=noise, public_inputs=inputs, max_queries=3)
    assert [e.status for e in made.run().entries] == ["rejected", "rejected", "labelled", "waiting"]
    assert made.queries_left == 0
    if teachers == "fixed":
        assert (made.share.remaining("test"), made.share.remaining("answer")) == (0, 1)


@pytest.mark.parametrize("mechanism", NOISES)
@pytest.mark.parametrize("teachers", TEACHERS)
def test_nothing_but_an_unanswered_test_of_fixed_teachers_gives_a_ticket_back(teachers: str, mechanism: str) -> None:
    mutes = [f"{MUTE} {i}" for i in range(3)]
    made = labeler(rows=TEACHERS[teachers], noise=NOISES[mechanism], public_inputs=mutes)
    assert {entry.status for entry in made.run().entries} == {"rejected"}
    back = {name: n for name, n in counts(made._budget).items() if "give_back" in name}
    is_tested = (teachers, mechanism) == ("fixed", "confident_gnmax")
    assert back == ({"give_back answer": 3} if is_tested else {})


def test_two_labelers_of_one_share_take_its_tickets_together() -> None:
    private, budget = examples(), house()
    inputs = [f"card {i}" for i in range(5)]
    one, two = (labeler(private, budget=budget, component="pate", public_inputs=inputs, max_queries=3) for _ in "12")
    one.label("card 0")
    assert two.queries_left == 2
    assert len(two.run().labelled) == 2
    assert len(one.run().labelled) == 1
    assert counts(budget) == {"reserve label": 3, "commit label": 3}


def test_the_last_ticket_taken_by_another_meanwhile_ends_a_run_quietly() -> None:
    private, budget, spy = examples(), house(), Spy()
    other = labeler(private, budget=budget, component="pate", max_queries=1, public_inputs=[CARD])
    made = labeler(private, budget=budget, component="pate", max_queries=1, public_inputs=[CARD], llm=spy)
    spy.at_public = lambda: None if counts(budget) else other.run()  # while the public model answers
    assert told(made.run()) == [("waiting", None)]
    assert told(other.result) == [("labelled", "card")]
    assert counts(budget) == {"reserve label": 1, "commit label": 1}


def test_streaming_yields_each_input_as_it_is_done() -> None:
    made = labeler(public_inputs=[CARD, MUTE, WIRE])
    stream = made.stream()
    assert (next(stream).label, made.queries_left) == ("card", 2)
    assert (next(stream).status, made.queries_left) == ("rejected", 1)
    assert made.label(WIRE).label == "transfer"
    assert list(stream) == []  # answered meanwhile
    assert [entry.status for entry in made.run().entries] == ["labelled", "rejected", "labelled"]
    assert counts(made._budget)["reserve label"] == 3


@pytest.mark.parametrize("teachers", TEACHERS)
def test_sync_and_async_agree(teachers: str) -> None:
    async def both() -> list[Any]:
        awaited = labeler(rows=TEACHERS[teachers], public_inputs=inputs, max_queries=4)
        streamed = [entry async for entry in labeler(rows=TEACHERS[teachers], public_inputs=inputs).astream()]
        pool = await awaited.arun()
        return [told(pool), [(e.status, e.label) for e in streamed], await awaited.alabel("last card"), awaited]

    inputs = [CARD, MUTE, WIRE]
    blocking = labeler(rows=TEACHERS[teachers], public_inputs=inputs, max_queries=4)
    expected = told(blocking.run())
    ran, streamed, last, awaited = asyncio.run(both())
    assert ran == streamed == expected
    blocked = blocking.label("last card")
    assert (last.fields, last.status, last.label) == (blocked.fields, blocked.status, blocked.label)
    assert counts(awaited._budget) == counts(blocking._budget)


# -- outages, stops and what is kept -----------------------------------------------------------------------------


def down() -> ModelCallError:
    return ModelCallError("the model is down")


@pytest.mark.parametrize("teachers", TEACHERS)
@pytest.mark.parametrize("awaited", [False, True])
def test_an_outage_costs_nothing_and_run_goes_on_without_paying_twice(teachers: str, awaited: bool) -> None:
    spy = Spy()
    made = labeler(llm=spy, rows=TEACHERS[teachers], public_inputs=[CARD, WIRE, "third"])

    def run() -> LabelledPool:
        return asyncio.run(made.arun()) if awaited else made.run()

    spy.at_public = fails(*[down()] * 5)
    with pytest.raises(RunInterruptedError, match="0 of 3 inputs are released") as first:
        run()
    assert counts(made._budget) == {}
    assert spy.private == []
    assert first.value.run is made
    assert (first.value.__cause__, first.value.__context__) == (None, None)
    spy.at_public = fails(*[None, *[down()] * 5])  # type: ignore[list-item]
    with pytest.raises(RunInterruptedError, match="1 of 3 inputs are released"):
        run()
    paid = counts(made._budget)
    assert [e.status for e in made.result.entries] == ["labelled", "waiting", "waiting"]
    spy.at_public = fails()
    pool = run()
    assert [e.label for e in pool.entries] == ["card", "transfer", "transfer"]
    assert spy.asked == [CARD, WIRE, "third"]
    name = "labels" if teachers == "one_sample" else "label"
    total = 1 if teachers == "one_sample" else 3
    assert paid[f"reserve {name}"] == 1
    assert counts(made._budget) == {f"reserve {name}": total, f"commit {name}": total}


def test_an_outage_of_one_label_costs_nothing() -> None:
    spy = Spy()
    made = labeler(llm=spy, max_queries=2)
    for label in (made.label, lambda given: asyncio.run(made.alabel(given))):
        spy.at_public = fails(*[down()] * 5)
        with pytest.raises(ModelCallError) as caught:
            label("what?")
        assert caught.value.run is made  # type: ignore[attr-defined]
    assert (counts(made._budget), spy.private) == ({}, [])


@pytest.mark.parametrize("mechanism", ["gumbel", "confident_gnmax"])
@pytest.mark.parametrize("teachers", TEACHERS)
@pytest.mark.parametrize("awaited", [False, True])
def test_ctrl_c_keeps_what_is_done_and_leaves_the_ticket_burnt(teachers: str, mechanism: str, awaited: bool) -> None:
    spy = Spy()
    inputs = [CARD, WIRE, "third card"]
    made = labeler(llm=spy, rows=TEACHERS[teachers], noise=NOISES[mechanism], public_inputs=inputs, max_queries=4)
    spy.at_private = fails(None, KeyboardInterrupt())  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt) as caught:
        asyncio.run(made.arun()) if awaited else made.run()
    again: PromptPATELabeler = caught.value.run  # type: ignore[attr-defined]
    assert again is made
    assert told(again.result) == [("labelled", "card"), ("waiting", None), ("waiting", None)]
    assert again.queries_left == 2
    assert [e.label for e in again.run().entries] == ["card", "transfer", "card"]
    assert again.queries_left == 0
    assert not [name for name in counts(made._budget) if "give_back" in name]
    made._budget.verify()


def test_a_cancelled_task_leaves_its_ticket_burnt_and_the_labeler_free() -> None:
    class Waits(Spy):
        async def ascore_choices(self, prompts: Sequence[str], choices: Sequence[str]) -> Any:
            if CANARY in prompts[0]:
                started.set()
                await asyncio.sleep(60)
            return self.score_choices(prompts, choices)

    made = labeler(llm=Waits(), public_inputs=[CARD], max_queries=2)

    async def cancelled() -> None:
        nonlocal started
        started = asyncio.Event()
        task = asyncio.ensure_future(made.arun())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert shows_private(caught.value) == []
        assert CANARY not in repr(locals_of_ours(caught.value))

    started = asyncio.Event()
    asyncio.run(cancelled())
    assert counts(made._budget) == {"reserve label": 1}
    assert told(made.run()) == [("labelled", "card")]


def test_a_row_that_fails_votes_for_nothing_and_stops_nothing() -> None:
    spy = Spy(fail_rows_containing="queue: card")
    made = labeler(llm=spy, rows=Rows(slots=40, sampling="partition"), noise=GAUSSIAN, public_inputs=[CARD])
    [entry] = made.run().entries
    # Half of the forty rows hold a card. Six deviations of .05 * sqrt(2): below 1e-8.
    assert entry.votes == pytest.approx({"card": 20, "transfer": 0}, abs=0.5)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_copy_of_one_sample_releases_nothing() -> None:
    made = labeler(rows=ONCE, public_inputs=[CARD], max_queries=3)
    made.run()
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            made.label(WIRE)
            os.write(writable, b"released")
        except BaseException as error:  # the child must not go on
            os.write(writable, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(writable)
    with os.fdopen(readable, "rb") as pipe:
        assert pipe.read() == LedgerError.__name__.encode()
    os.waitpid(child, 0)
    assert made.label(WIRE).label == "transfer"


# -- checkpoints -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("teachers", TEACHERS)
def test_a_label_is_in_the_file_before_its_ticket_is_committed(
    teachers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, private = tmp_path / "labels.json", examples()
    budget = house("replace_one")
    options: dict[str, Any] = {"budget": budget, "rows": TEACHERS[teachers], "checkpoint": path, "max_queries": 4}
    made = labeler(private, public_inputs=[CARD, WIRE], **options)
    real, kept = Reservation.commit, []

    def killed(ticket: Reservation, count: int = 1) -> None:
        kept.append([(entry["status"], entry["label"]) for entry in entries_in(path)])
        if len(kept) == 1:
            raise KeyboardInterrupt
        real(ticket, count)

    monkeypatch.setattr(Reservation, "commit", killed)
    with pytest.raises(KeyboardInterrupt):
        made.run()
    assert kept == [[("labelled", "card")]]
    assert not [name for name in counts(budget) if "commit" in name]
    spy = Spy()
    again = labeler(private, public_inputs=[CARD, WIRE], llm=spy, **options)
    pool = again.run()
    rest = ("waiting", None) if teachers == "one_sample" else ("labelled", "transfer")  # its sample is gone
    assert told(pool) == [("labelled", "card"), rest]
    assert spy.asked == ([] if teachers == "one_sample" else [WIRE])
    assert sum(n for name, n in counts(budget).items() if "reserve" in name) == (1 if teachers == "one_sample" else 2)


@pytest.mark.parametrize("mechanism", ["gumbel", "gaussian", "confident_gnmax"])
def test_a_new_labeler_pays_for_what_is_not_done_yet(mechanism: str, tmp_path: Path) -> None:
    path, private, budget = tmp_path / "labels.json", examples(), house()
    options: dict[str, Any] = {"budget": budget, "checkpoint": path, "noise": NOISES[mechanism], "max_queries": 4}
    first = labeler(private, public_inputs=[CARD, MUTE, WIRE], **options)
    stream = first.stream()
    before = [next(stream), next(stream)]
    stream.close()
    spy = Spy()
    second = labeler(private, llm=spy, public_inputs=[WIRE, MUTE, "new card", CARD], **options)
    assert second.queries_left == 2
    assert [entry for entry in second.result.entries if entry.status != "waiting"] == before[::-1]
    pool = second.run()
    assert spy.asked == [WIRE, "new card"]
    assert [e.fields["text"] for e in pool.entries] == [WIRE, MUTE, "new card", CARD]
    assert second.share.component == first.share.component
    assert counts(budget) == {"reserve label": 4, "commit label": 4}
    assert len(entries_in(path)) == 4


def test_a_run_that_died_in_its_first_input_is_found_again(tmp_path: Path) -> None:
    path, private, budget, spy = tmp_path / "labels.json", examples(), house(), Spy()
    options: dict[str, Any] = {"budget": budget, "checkpoint": path, "max_queries": 2}
    made = labeler(private, llm=spy, **options)
    assert not path.exists()
    spy.at_private = fails(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        made.run()
    again = labeler(private, **options)
    assert again.share.component == made.share.component
    assert [e.status for e in again.run().entries] == ["labelled", "waiting"]
    assert len([line for line in lines(budget) if line.kind == "seal"]) == 1


def test_a_checkpoint_of_another_run_is_refused_for_free(tmp_path: Path) -> None:
    path, private, budget = tmp_path / "labels.json", examples(), house()
    labeler(private, budget=budget, checkpoint=path, component="pate").run()
    before, left = lines(budget), budget.remaining_epsilon
    others: list[dict[str, Any]] = [
        {"noise": QUIET.replace(multiplier=0.06)},
        {"rows": ONCE},
        {"answers": PLAIN.replace(abstain_below=0.6)},
        {"component": "other"},
        {"task": FewShotTask(prefix="Sort the mail.")},
        {"rows": Rows(units=21)},
        {"noise": GAUSSIAN},
    ]
    for other in others:
        options = {"budget": budget, "checkpoint": path, "max_queries": 2, **other}
        with pytest.raises(ConfigurationError, match="another run's: differences in"):
            labeler(private, **options)
        assert (lines(budget), budget.remaining_epsilon) == (before, left)
    for elsewhere in (house(), house("replace_one")):
        fresh = examples()
        with pytest.raises(ConfigurationError, match="ledger_id"):
            labeler(fresh, budget=elsewhere, checkpoint=path, max_queries=2)
        assert lines(elsewhere) == []
        labeler(fresh, budget=house())  # nothing was bound either
    with pytest.raises(ConfigurationError, match="dataset_id"):
        labeler(examples(dataset_id="others"), budget=budget, checkpoint=path, max_queries=2)
    path.write_text("{}\n")
    with pytest.raises(ConfigurationError, match="checkpoint"):
        labeler(private, budget=budget, checkpoint=path)
    assert lines(budget) == before


@pytest.mark.parametrize("teachers", TEACHERS)
def test_a_full_disk_loses_no_label(teachers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, spy = tmp_path / "labels.json", Spy()
    made = labeler(rows=TEACHERS[teachers], checkpoint=path, public_inputs=[CARD, WIRE], llm=spy)
    real, writes = os.fsync, []

    def full(number: int) -> None:
        writes.append(number)
        if len(writes) == 3:  # the terms, the first label, the second
            raise OSError("no space left on device")
        real(number)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space") as caught:
        made.run()
    assert caught.value.run is made  # type: ignore[attr-defined]
    assert told(made.result) == [("labelled", "card"), ("labelled", "transfer")]
    assert sum(number for name, number in counts(made._budget).items() if "commit" in name) == 1
    assert told(made.run()) == [("labelled", "card"), ("labelled", "transfer")]
    assert len(entries_in(path)) == 2  # nothing was left to label, and the file caught up
    assert spy.asked == [CARD, WIRE]


def test_a_folder_that_is_missing_is_found_before_anything_is_paid_for(tmp_path: Path) -> None:
    spy, folder, budget = Spy(), tmp_path / "folder", house()
    with pytest.raises(ConfigurationError, match="folder that exists"):
        labeler(llm=spy, checkpoint=folder / "labels.json", budget=budget)
    assert lines(budget) == []
    folder.mkdir()
    made = labeler(llm=spy, checkpoint=folder / "labels.json")
    folder.rmdir()
    with pytest.raises(OSError, match="folder"):
        made.run()
    assert (counts(made._budget), spy.private) == ({}, [])


def test_a_longer_list_goes_on_with_the_tickets_of_the_checkpoint(tmp_path: Path) -> None:
    path, private, budget = tmp_path / "labels.json", examples(), house()
    labeler(private, budget=budget, checkpoint=path, public_inputs=[CARD], max_queries=2).run()
    with pytest.raises(ConfigurationError, match="differences in"):  # three inputs would be another plan
        labeler(private, budget=budget, checkpoint=path, public_inputs=[CARD, WIRE, MUTE])
    longer = labeler(private, budget=budget, checkpoint=path, public_inputs=[CARD, WIRE, MUTE], max_queries=2)
    assert longer.queries_left == 1
    assert told(longer.run()) == [("labelled", "card"), ("labelled", "transfer"), ("waiting", None)]


# -- the same input is never paid for twice ----------------------------------------------------------------------


def test_an_input_that_comes_again_is_answered_for_free() -> None:
    spy = Spy()
    again = [CARD, {"text": CARD}, {"input": CARD}, Document(CARD), {"text": CARD, "id": 7}]
    made = labeler(llm=spy, public_inputs=[*again, MUTE, CARD, MUTE], max_queries=5)
    assert [e.fields for e in made.result.entries] == [{"text": CARD}, {"text": MUTE}]
    made.run()
    for given in (*again, MUTE):
        assert made.label(given).status == ("rejected" if given == MUTE else "labelled")
        assert asyncio.run(made.alabel(given)) == made.label(given)
    made.run()
    assert spy.asked == [CARD, MUTE]
    assert counts(made._budget) == {"reserve label": 2, "commit label": 2}


@pytest.mark.parametrize("awaited", [False, True])
def test_one_more_label_commits_the_ticket_of_its_sample(awaited: bool) -> None:
    made = labeler(rows=ONCE, public_inputs=[], max_queries=3)
    for text in (CARD, WIRE):
        _ = asyncio.run(made.alabel(text)) if awaited else made.label(text)
        assert counts(made._budget) == {"reserve labels": 1, "commit labels": 1}


@pytest.mark.parametrize("awaited", [False, True])
def test_an_answer_that_came_meanwhile_is_not_paid_for_again(awaited: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = labeler(public_inputs=[CARD], max_queries=3)
    real, first = PromptPATELabeler._events, [True]

    def events(self: PromptPATELabeler, config: Any) -> Any:
        """Another caller is faster, between this one's look at the input and its turn."""
        if first:
            first.clear()
            self.label(CARD)
        return real(self, config)

    monkeypatch.setattr(PromptPATELabeler, "_events", events)
    assert (asyncio.run(made.alabel(CARD)) if awaited else made.label(CARD)).label == "card"
    assert counts(made._budget) == {"reserve label": 1, "commit label": 1}


def test_a_local_executor_labels_here() -> None:
    made = labeler(executor=LocalExecutor(max_concurrency=2))
    assert told(made.run()) == [("labelled", "card"), ("labelled", "transfer")]


def test_by_default_the_share_pays_for_the_distinct_inputs() -> None:
    assert labeler(public_inputs=[CARD, WIRE, CARD]).queries_left == 2


def test_threads_that_ask_the_same_pay_once() -> None:
    made = labeler(public_inputs=[], max_queries=8)
    answers: list[Any] = []

    def ask() -> None:
        answers.append(made.label(CARD).label)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == ["card"] * 8
    assert counts(made._budget) == {"reserve label": 1, "commit label": 1}
    assert len(made.result.entries) == 1


@pytest.mark.parametrize("teachers", TEACHERS)
def test_tasks_at_the_same_time_never_pay_more_than_they_get(teachers: str) -> None:
    spy = Spy()
    made = labeler(llm=spy, public_inputs=[], max_queries=4, rows=TEACHERS[teachers])
    questions = [CARD, WIRE, CARD, "third card", "fourth"]

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*map(made.alabel, questions), return_exceptions=True)

    answers = asyncio.run(all_of_them())
    assert len(spy.asked) == len(made.result.labelled)
    assert [a.label for a in answers] == ["card", "transfer", "card", "card", "transfer"]
    assert sorted(spy.asked) == sorted(set(questions))
    expected = 1 if teachers == "one_sample" else 4
    assert sum(n for name, n in counts(made._budget).items() if "reserve" in name) == expected


def test_a_call_from_within_a_call_is_refused_before_it_pays() -> None:
    spy = Spy()
    made = labeler(llm=spy, public_inputs=[CARD, WIRE])
    seen: list[str] = []

    def within() -> None:
        with pytest.raises(ConfigurationError, match="inside another"):
            made.label("in between")
        seen.append("refused")

    spy.at_private = within
    made.run()
    assert seen == ["refused"] * 2
    assert counts(made._budget)["reserve label"] == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_forked_while_an_input_is_labelled_labels_others(tmp_path: Path) -> None:
    spy, asked, goes_on = Spy(), threading.Event(), threading.Event()
    budget = PrivacyBudgetCallbackHandler.create(tmp_path / "ledger.db", epsilon=1e6, delta=1e-4)
    made = labeler(llm=spy, budget=budget, public_inputs=[CARD, WIRE])

    def wait() -> None:
        asked.set()
        goes_on.wait(60.0)

    def labelled() -> None:
        signal.alarm(60)
        goes_on.set()
        assert made.label(WIRE).label == "transfer"

    spy.at_private = wait
    thread = threading.Thread(target=made.label, args=[CARD])
    thread.start()
    asked.wait(60.0)
    assert in_child(labelled)
    goes_on.set()
    thread.join()
    assert made.label(CARD).label == "card"


class TestContract(JournalContract):
    """Acts at the public calls, which come before a ticket burns."""

    @pytest.fixture(autouse=True)
    def _examples(self) -> None:
        self._bound: dict[str, PrivateExamples] = {}  # a ledger knows a data set by its object

    def build(self, budget: Budget, calls: Calls, *, component: str = "mine", checkpoint: Any = None) -> Any:
        spy = Spy()
        spy.at_public = calls
        records = [{"text": f"{RUN_CANARY} {CANARY} {i}", "queue": LABELS[i % 2]} for i in range(40)]
        private = PrivateExamples(records, label_key="queue", labels=LABELS, public_size=40, dataset_id="letters")
        return labeler(
            self._bound.setdefault(budget.ledger_id, private),
            budget=budget,
            llm=spy,
            public_inputs=[CARD, MUTE, WIRE, "third card"],
            component=component,
            checkpoint=checkpoint,
        )

    def parts(self, result: LabelledPool) -> list[PoolEntry]:
        return [entry for entry in result.entries if entry.status != "waiting"]
