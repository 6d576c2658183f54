"""Retries, fallbacks, other wrappers and payments of Runnables that charge, on the smallest one there is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from langchain_core.runnables import ConfigurableField, RunnableConfig, RunnableGenerator, RunnableLambda
from pydantic import Field

from langchain_dpicl import DPVotingRunnable
from langchain_dpicl.backends.sync_async import Call, EffectGenerator
from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
from langchain_dpicl.exceptions import (
    CapabilityError,
    ConfigurationError,
    DPICLError,
    LedgerError,
    ModelCallError,
    PrivacyBudgetError,
    PrivacyBudgetExceededError,
    RunInterruptedError,
    TenantCapExceededError,
)
from langchain_dpicl.privacy.ledger.store import InMemoryStore
from langchain_dpicl.runs.query_runnable import RELEASE, TicketCharge
from tests.contracts.front_room import CHARGED, REFUSED, Observer, Plain, wrappings
from tests.tiny_vote import LABELS, tiny_private, tiny_vote

pytestmark = pytest.mark.usefixtures("remembered_prices")


def exceeded() -> PrivacyBudgetExceededError:
    return PrivacyBudgetExceededError("tickets: requested 2, remaining 1.", requested=2.0, remaining=1.0)


# -- a component that can fail after its release -----------------------------------------------------------------


class Flaky(DPVotingRunnable):
    """Raises the given errors, in turn, after it paid and before it answers."""

    errors: list[Any] = Field(default_factory=list)

    def _answer_effects(self, *args: Any) -> EffectGenerator[Any]:
        answer = yield from super()._answer_effects(*args)
        if self.errors:
            raise self.errors.pop(0)
        return answer


def flaky(*errors: BaseException, max_queries: int = 9) -> tuple[Flaky, InMemoryStore]:
    store = InMemoryStore()
    budget = PrivacyBudgetCallbackHandler(epsilon=1e5, delta=1e-4, store=store)
    made = tiny_vote(Flaky, tiny_private(), budget=budget, max_queries=max_queries)
    made.errors = list(errors)
    return made, store


def charged(store: InMemoryStore) -> int:
    signs = {"reserve": 1, "give_back": -1}
    return sum(signs.get(line.kind, 0) * line.body.get("count", 0) for line in store.records())


NO_WAIT: dict[str, Any] = {"wait_exponential_jitter": False}
ASK: dict[str, Callable[[Any, Any], Any]] = {
    "invoke": lambda c, q: c.invoke(q),
    "ainvoke": lambda c, q: asyncio.run(c.ainvoke(q)),
    "batch": lambda c, q: c.batch([q])[0],
    "abatch": lambda c, q: asyncio.run(c.abatch([q]))[0],
}
STREAMS: dict[str, Callable[[Any, Any], Any]] = {
    "stream": lambda c, q: next(c.stream(q)),
    "transform": lambda c, q: next(c.transform(iter([q]))),
    "astream": lambda c, q: asyncio.run(_first_of(c, q)),
}


async def _first_of(component: Any, question: Any) -> Any:
    return await anext(component.astream(question))


# -- with_retry --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ASK)
def test_a_retry_follows_errors_that_are_not_ours_and_every_attempt_pays(way: str) -> None:
    component, store = flaky(ConnectionError("x"), OSError("y"))
    assert ASK[way](component.with_retry(**NO_WAIT), "question") in LABELS
    assert charged(store) == 3


@pytest.mark.parametrize("error", [ConfigurationError("x"), ModelCallError("x"), CapabilityError("x")], ids=repr)
@pytest.mark.parametrize("way", ASK)
def test_a_retry_does_not_follow_our_errors_unasked(way: str, error: DPICLError) -> None:
    for named in ((Exception,), (ValueError, KeyError), (BaseException,)):
        component, store = flaky(error)
        with pytest.raises(type(error)):
            ASK[way](component.with_retry(retry_if_exception_type=named, **NO_WAIT), "question")
        assert charged(store) == 1


@pytest.mark.parametrize("named", [(ModelCallError,), ModelCallError, lambda error: isinstance(error, ModelCallError)])
@pytest.mark.parametrize("way", ASK)
def test_a_retry_follows_an_error_of_ours_that_is_named(way: str, named: Any) -> None:
    component, store = flaky(RunInterruptedError("x", run=None), ModelCallError("y"))
    assert ASK[way](component.with_retry(retry_if_exception_type=named, **NO_WAIT), "question") in LABELS
    assert charged(store) == 3


def test_a_retry_gives_up_as_langchain_does() -> None:
    component, store = flaky(*[ConnectionError(str(number)) for number in range(5)])
    with pytest.raises(ConnectionError, match="1"):
        component.with_retry(stop_after_attempt=2, **NO_WAIT).invoke("question")
    assert charged(store) == 2


@pytest.mark.parametrize(
    "named",
    [(PrivacyBudgetError,), (ConnectionError, PrivacyBudgetExceededError), (DPICLError,), LedgerError],
    ids=["base", "one of several", "all of ours", "bare"],
)
def test_a_retry_that_names_a_refusal_is_refused(named: Any) -> None:
    component, _ = flaky()
    for wrapped in wrappings(component):
        with pytest.raises(ConfigurationError, match="a retry cannot help"):
            wrapped.with_retry(retry_if_exception_type=named)


@pytest.mark.parametrize("named", [5, "ValueError", [ValueError], (5,), (int,)], ids=str)
def test_a_retry_takes_exception_classes_or_a_function(named: Any) -> None:
    component, _ = flaky()
    with pytest.raises(ConfigurationError, match="tuple of exception classes"):
        component.with_retry(retry_if_exception_type=named)
    with pytest.raises(ConfigurationError, match="tuple of exception classes"):
        component.with_fallbacks([RunnableLambda(len)], exceptions_to_handle=named)


def test_a_function_is_not_asked_about_refusals_nor_stops() -> None:
    asked: list[BaseException] = []

    def always(error: BaseException) -> bool:
        asked.append(error)
        return True

    for stop in (KeyboardInterrupt(), PrivacyBudgetExceededError("x", requested=1, remaining=0)):
        component, store = flaky(stop)
        with pytest.raises(type(stop)):
            component.with_retry(retry_if_exception_type=always, **NO_WAIT).invoke("question")
        assert charged(store) == 1
    assert asked == []


@pytest.mark.parametrize("is_async", [False, True])
def test_a_batch_with_retries_keeps_answers_beside_one_that_fails_for_good(is_async: bool) -> None:
    component, store = flaky(ConfigurationError("x"))
    retried, config = component.with_retry(**NO_WAIT), {"max_concurrency": 1}
    if is_async:
        answers = asyncio.run(retried.abatch(["a", "b", "c"], config, return_exceptions=True))
    else:
        answers = retried.batch(["a", "b", "c"], config, return_exceptions=True)
    assert [type(answer) for answer in answers] == [ConfigurationError, str, str]
    assert charged(store) == 3


# -- with_fallbacks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [*ASK, *STREAMS])
def test_a_fallback_stands_in_for_errors_that_are_not_ours(way: str) -> None:
    component, _ = flaky(ConnectionError("x"))
    guarded = component.with_fallbacks([RunnableLambda(lambda _: 1 / 0), Plain()])
    assert {**ASK, **STREAMS}[way](guarded, "question") == "not private"


@pytest.mark.parametrize("error", [ConfigurationError("x"), ModelCallError("x"), exceeded()], ids=repr)
@pytest.mark.parametrize("way", [*ASK, *STREAMS])
def test_no_fallback_stands_in_for_our_errors_unasked(way: str, error: DPICLError) -> None:
    for named in ((Exception,), (ValueError, KeyError), (BaseException,)):
        (component, _), plain = flaky(error), Plain()
        with pytest.raises(type(error)):
            {**ASK, **STREAMS}[way](component.with_fallbacks([plain], exceptions_to_handle=named), "question")
        assert plain.asked == []


@pytest.mark.parametrize("named", [PrivacyBudgetExceededError, (PrivacyBudgetError,), (OSError, DPICLError)], ids=str)
@pytest.mark.parametrize("way", [*ASK, *STREAMS])
def test_a_fallback_stands_in_for_a_refusal_that_is_named_and_it_is_told(way: str, named: Any) -> None:
    component, store = flaky(max_queries=1)
    guarded, observer = component.with_fallbacks([Plain()], exceptions_to_handle=named), Observer()
    asked = {**ASK, **STREAMS}[way]
    assert asked(guarded, "question") in LABELS
    assert asked(guarded.with_config(callbacks=[observer]), "question") == "not private"
    assert len(observer.named(REFUSED)) == 1
    assert charged(store) == 1


@pytest.mark.parametrize("way", [*ASK, *STREAMS])
def test_errors_that_are_not_named_are_raised_at_once(way: str) -> None:
    (component, _), plain = flaky(KeyError("x")), Plain()
    with pytest.raises(KeyError):
        {**ASK, **STREAMS}[way](component.with_fallbacks([plain], exceptions_to_handle=(OSError,)), "question")
    assert plain.asked == []


@pytest.mark.parametrize("way", ["invoke", "ainvoke", *STREAMS])
def test_if_every_fallback_fails_the_first_error_is_raised(way: str) -> None:
    component, _ = flaky(ConnectionError("first"))
    guarded = component.with_fallbacks([RunnableLambda(lambda _: 1 / 0)])
    with pytest.raises(ConnectionError, match="first"):
        {**ASK, **STREAMS}[way](guarded, "question")


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_our_error_inside_a_group_is_ours(way: str) -> None:
    def group() -> BaseException:
        return ExceptionGroup("several", [OSError("x"), exceeded()])

    (component, store), plain = flaky(group()), Plain()
    with pytest.raises(ExceptionGroup):
        ASK[way](component.with_fallbacks([plain]), "question")
    assert plain.asked == []
    with pytest.raises(ExceptionGroup):
        ASK[way](flaky(group())[0].with_retry(**NO_WAIT), "question")
    assert charged(store) == 1


def test_our_error_from_a_fallback_goes_through_as_well() -> None:
    component, _ = flaky(ConnectionError("x"))
    spent, _ = flaky(exceeded())
    plain = Plain()
    with pytest.raises(PrivacyBudgetExceededError):
        component.with_fallbacks([spent, plain]).invoke("question")
    assert plain.asked == []


@pytest.mark.parametrize("way", [*ASK, *STREAMS])
def test_the_error_is_handed_on_under_its_key(way: str) -> None:
    component, _ = flaky(ConnectionError("x"))
    guarded = component.with_fallbacks([RunnableLambda(lambda given: repr(given["error"]))], exception_key="error")
    assert {**ASK, **STREAMS}[way](guarded, {"input": "question"}) == "ConnectionError('x')"
    with pytest.raises(ValueError, match="dict"):
        {**ASK, **STREAMS}[way](guarded, "question")


@pytest.mark.parametrize("way", STREAMS)
def test_a_stream_that_began_does_not_fall_back(way: str) -> None:
    def begins(_: Any) -> Any:
        yield "begun"
        raise ConnectionError("later")

    async def abegins(_: Any) -> Any:
        yield "begun"
        raise ConnectionError("later")

    component, _ = flaky(ConnectionError("x"))
    guarded = component.with_fallbacks([RunnableGenerator(begins, abegins), Plain()])

    async def everything() -> list[Any]:
        return [chunk async for chunk in guarded.astream("question")]

    with pytest.raises(ConnectionError, match="later"):
        asyncio.run(everything()) if way == "astream" else list(getattr(guarded, way)(_given(way)))


def _given(way: str) -> Any:
    return iter(["question"]) if way == "transform" else "question"


def test_a_run_with_fallbacks_ends_in_the_error_its_observers_see() -> None:
    component, _ = flaky(exceeded())
    observer = Observer()
    with pytest.raises(PrivacyBudgetExceededError):
        component.with_fallbacks([Plain()]).invoke("question", {"callbacks": [observer]})
    assert observer.failed == 2  # the component's run and the run around it


# -- fields ------------------------------------------------------------------------------------------------------


def test_configured_fields_keep_the_handles() -> None:
    component, store = flaky()
    configured = component.configurable_fields(on_exhausted=ConfigurableField(id="spent"))
    assert configured.invoke("question", {"configurable": {"spent": "zero_shot"}}) in LABELS
    prepared, _ = configured.prepare({"configurable": {"spent": "zero_shot"}})
    assert prepared.on_exhausted == "zero_shot"
    for name in ("private", "budget", "share"):
        assert getattr(prepared, name) is getattr(component, name)
    for guarded in (configured, configured.with_config(configurable={"spent": "zero_shot"}), configured.bind()):
        spent, plain = guarded.with_fallbacks([Plain()]), Plain()
        assert spent.invoke("question") in LABELS
        component.errors.append(exceeded())
        with pytest.raises(PrivacyBudgetExceededError):
            guarded.with_fallbacks([plain]).invoke("question")
        assert plain.asked == []
        component.errors.clear()  # a configured copy has used up its own list
    assert charged(store) == 7


def test_alternatives_keep_our_errors_out_of_fallbacks() -> None:
    component, store = flaky()
    chosen = component.configurable_alternatives(ConfigurableField(id="who"), default_key="votes", plain=Plain())
    assert chosen.invoke("question") in LABELS
    assert chosen.invoke("question", {"configurable": {"who": "plain"}}) == "not private"
    component.errors.append(exceeded())
    plain = Plain()
    with pytest.raises(PrivacyBudgetExceededError):
        chosen.with_fallbacks([plain]).invoke("question")
    assert plain.asked == []
    assert charged(store) == 2


def test_receipts_keep_what_is_bound_around_a_component() -> None:
    component, store = flaky()
    bound = component.with_config(configurable={"tenant": "acme", "tenant_max_queries": 1})
    assert bound.with_receipts().invoke("question").receipt.source == "release"  # type: ignore[attr-defined]
    for again in (bound, bound.with_receipts(), bound.with_config(tags=["a"]).with_receipts()):  # type: ignore[attr-defined]
        with pytest.raises(TenantCapExceededError):
            again.invoke("another")
    assert charged(store) == 1
    spent = component.configurable_fields(on_exhausted=ConfigurableField(id="spent")).with_receipts()  # type: ignore[attr-defined]
    component.errors.append(exceeded())
    assert spent.prepare({"configurable": {"spent": "zero_shot"}})[0].on_exhausted == "zero_shot"
    assert spent.default.gives_receipts
    chosen = component.configurable_alternatives(ConfigurableField(id="who"), default_key="votes", plain=Plain())
    with pytest.raises(ConfigurationError, match="configurable_alternatives: expected receipts before"):
        chosen.with_receipts()  # type: ignore[attr-defined]


def test_a_map_keeps_our_errors_out_of_fallbacks() -> None:
    component, _ = flaky(exceeded())
    plain = Plain()
    with pytest.raises(PrivacyBudgetExceededError):
        component.map().with_fallbacks([plain]).invoke(["question"])
    assert plain.asked == []


def test_wrappers_do_what_langchains_do() -> None:
    component, _ = flaky()
    ended: list[Any] = []

    async def aended(run: Any) -> None:
        ended.append(run.outputs["output"])

    component.with_listeners(on_end=lambda run: ended.append(run.outputs["output"])).invoke("question")
    asyncio.run(component.with_alisteners(on_end=aended).ainvoke("question"))
    assert len(ended) == 2
    assert set(ended) <= set(LABELS)
    assert component.with_types(output_type=int).OutputType is int
    seen = Observer()
    component.with_config({"tags": ["one"]}, callbacks=[seen]).invoke("question")
    assert [name for name, _ in seen.heard] == [RELEASE, CHARGED]


# -- paying ------------------------------------------------------------------------------------------------------


class Pays(DPVotingRunnable):
    """Pays for tickets and does with them what it is asked."""

    act: Any = Field(exclude=True)

    def _answer_effects(
        self, value: Any, pay: TicketCharge, config: RunnableConfig, kwargs: Mapping[str, Any]
    ) -> EffectGenerator[Any]:
        with pay("query", count=3) as reservation:
            yield Call(lambda: None, lambda: asyncio.sleep(0))
            return self.act(reservation)


def pays(act: Callable[[Any], Any]) -> tuple[Pays, InMemoryStore]:
    made, store = flaky()
    fields = {name: value for name, value in vars(made).items() if name != "errors"}
    return Pays(**fields, act=act), store


@pytest.mark.parametrize("error", [None, ValueError("x"), KeyboardInterrupt(), asyncio.CancelledError()], ids=repr)
@pytest.mark.parametrize("is_async", [False, True])
def test_tickets_that_did_not_burn_go_back_however_the_answer_ends(is_async: bool, error: Any) -> None:
    def act(reservation: Any) -> str:
        reservation.burn(1)
        if error is not None:
            raise error
        return "answer"

    component, store = pays(act)
    observer = Observer()
    config: RunnableConfig = {"callbacks": [observer]}
    with contextlib.nullcontext() if error is None else pytest.raises(type(error)):
        asyncio.run(component.ainvoke("q", config)) if is_async else component.invoke("q", config)
    assert charged(store) == 1
    assert [data["tickets"] for data in observer.named(CHARGED)] == [1]


def test_tickets_that_all_go_back_are_no_charge() -> None:
    component, store = pays(lambda reservation: "answer")
    observer = Observer()
    component.invoke("question", {"callbacks": [observer]})
    assert (charged(store), observer.heard) == (0, [])


def test_a_ledger_that_breaks_is_told_as_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    component, store = flaky()

    def broken(*args: Any) -> Any:
        raise LedgerError("the ledger is gone")

    monkeypatch.setattr(store, "transaction", broken)
    observer = Observer()
    with pytest.raises(LedgerError):
        component.invoke("question", {"callbacks": [observer]})
    assert [data["error"] for data in observer.named(REFUSED)] == ["LedgerError"]


def test_a_component_inside_a_component_tells_its_own_news_once() -> None:
    inner, _ = flaky(max_queries=1)
    outer, _ = pays(lambda reservation: reservation.burn(1) or inner.invoke("question"))
    observer = Observer()
    outer.invoke("question", {"callbacks": [observer]})
    assert [data["component"] for data in observer.named(CHARGED)] == ["Flaky", "Pays"]
    with pytest.raises(PrivacyBudgetExceededError):
        outer.invoke("question", {"callbacks": [observer]})
    assert [data["component"] for data in observer.named(REFUSED)] == ["Flaky"]
    assert [data["component"] for data in observer.named(CHARGED)] == ["Flaky", "Pays", "Pays"]
