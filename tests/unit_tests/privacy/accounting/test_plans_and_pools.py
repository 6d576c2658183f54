from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from scipy import integrate
from scipy.stats import norm

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import (
    ConfigurationError,
    PrivacyBudgetExceededError,
    SealedShareError,
)
from langchain_dpicl.generation.plan import plan_generation
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy.accounting.events import (
    ComposedEvent,
    Event,
    GaussianEvent,
    PureEvent,
    RepeatedEvent,
    ZCdpEvent,
)
from langchain_dpicl.privacy.ledger.shares import Share
from langchain_dpicl.privacy.ledger.store import InMemoryStore
from langchain_dpicl.privacy.ledger.tickets import Ticket
from tests.ledgers import budget, records, share_of, tickets, use_simple_prices

# --- joint plans ------------------------------------------------------------------------------------------------------


def test_components_of_a_plan_are_charged_together(simple_prices: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    real = accounting.epsilon_bound

    def cheaper_together(event: Event, **options: Any) -> Any:
        bound = real(event, **options)
        bound.epsilon *= 0.5 if isinstance(event, ComposedEvent) else 1.0
        return bound

    monkeypatch.setattr(accounting, "epsilon_bound", cheaper_together)
    store = InMemoryStore()
    ledger = budget(store=store)
    with ledger.plan() as plan:
        first = ledger.declare("c", tickets=tickets(0.1, 10), epsilon=1.0)
        second = ledger.declare("d", tickets=tickets(0.2, 10), epsilon=2.0)
        assert first.epsilon is None
        assert first.delta is None
        assert plan.epsilon is None
        assert plan.components == ("c", "d")
        assert ledger.remaining_epsilon == 4.0
    assert plan.epsilon == first.epsilon == second.epsilon == 1.5
    assert first.delta == pytest.approx(3.75e-7), "in proportion to the joint epsilon, not the sum of both"
    assert simple_prices[-1][0] == ComposedEvent((first.event, second.event))
    assert ledger.remaining_epsilon == 2.5
    first.reserve("t")
    assert [kind for kind, _ in records(store)] == ["seal", "reserve"]
    assert second.sealed
    second.reserve("t", count=10)
    assert ledger.remaining_epsilon == 2.5
    assert (first.remaining("t"), second.remaining("t")) == (9, 0)
    ledger.verify()


def test_a_plan_never_costs_more_than_its_shares(simple_prices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = accounting.epsilon_bound

    def loose_together(event: Event, **options: Any) -> Any:
        bound = real(event, **options)
        bound.epsilon *= 1.1 if isinstance(event, ComposedEvent) else 1.0
        return bound

    monkeypatch.setattr(accounting, "epsilon_bound", loose_together)
    ledger = budget()
    with ledger.plan() as plan:
        ledger.declare("c", tickets=tickets(0.1, 10), epsilon=1.0)
        ledger.declare("d", tickets=tickets(0.2, 10), epsilon=2.0)
    assert plan.epsilon == 3.0
    with ledger.plan(delta=1e-9) as tight:
        ledger.declare("c", tickets=tickets(0.1, 10), epsilon=1.0)
        ledger.declare("d", tickets=tickets(0.2, 10), epsilon=2.0)
    assert tight.epsilon == pytest.approx(3.3), "the sum of shares is no bound at a smaller delta"


def test_real_accountants_make_a_plan_cheaper_than_its_shares() -> None:
    noise = accounting.calibrate(
        lambda x: RepeatedEvent(GaussianEvent(x), 20), epsilon=1.0, delta=2.5e-7, adjacency="add_remove"
    )
    items = (Ticket("t", GaussianEvent(noise), max_count=20),)
    ledger = budget()
    with ledger.plan() as plan:
        for name in "abc":
            ledger.declare(name, tickets=items, epsilon=1.0)
    assert plan.epsilon is not None
    assert 1.0 < plan.epsilon < 2.0
    share = ledger.report().to_dict()["shares"][0]
    assert share["delta"] == pytest.approx(1e-6 * plan.epsilon / 4.0, rel=1e-3)
    together = accounting.gdp_epsilon(np.sqrt(60) / noise, share["delta"])
    assert plan.epsilon == pytest.approx(together, rel=1e-3)


def test_what_a_plan_saves_can_be_spent_at_the_default_delta() -> None:
    ledger = budget()
    noise = accounting.calibrate(
        lambda x: RepeatedEvent(GaussianEvent(x), 20), epsilon=1.0, delta=2.5e-7, adjacency="add_remove"
    )
    with ledger.plan():
        for name in "abc":
            ledger.declare(name, tickets=(Ticket("t", GaussianEvent(noise), max_count=20),), epsilon=1.0)
    rest = ledger.remaining_epsilon
    assert rest > 2.0
    pool = ledger.gdp_pool("rest", epsilon=rest)
    assert pool.delta == pytest.approx(1e-6 * rest / 4.0)


@pytest.mark.parametrize(
    ("mechanism", "epsilons"),
    [
        ("gumbel", (1.0,)),
        ("gumbel", (1.0, 2.0, 1.0)),
        ("gaussian", (2.0, 2.0)),
        ("gaussian", (0.7, 0.1, 0.01)),
        ("permute_and_flip", (1.0, 2.0)),
    ],
)
def test_all_that_a_plan_leaves_is_one_share_at_its_default_delta(mechanism: str, epsilons: tuple[float, ...]) -> None:
    ledger = budget()
    with ledger.plan() as plan:
        for number, epsilon in enumerate(epsilons):
            made = plan_generation(
                {None: 10_000},
                epsilon=epsilon,
                delta=ledger.default_delta(epsilon),
                mechanism=mechanism,
                redraw_every=1 + 3 * number,
            )
            ledger.declare(
                f"c{number}",
                tickets=made.tickets(),
                epsilon=epsilon,
                delta=made.delta,
                implementation_delta=made.implementation_delta,
            )
        began = time.process_time()
    assert time.process_time() - began < 60, "seconds, on a slow machine; about one on a fast one"
    assert plan.epsilon is not None
    assert plan.epsilon <= sum(epsilons)
    share = ledger.report().to_dict()["shares"][0]
    assert share["delta"] <= 1e-6 * sum(epsilons) / 4.0
    assert share["delta"] == pytest.approx(1e-6 * plan.epsilon / 4.0, rel=1e-5)
    rest = ledger.remaining_epsilon
    if rest > 0:
        assert ledger.gdp_pool("rest", epsilon=rest).delta == ledger.default_delta(rest)
    assert ledger.remaining_epsilon == 0.0


@pytest.mark.parametrize("cost", [lambda delta: 0.0, lambda delta: 40 * (1 - delta / 1e-6) ** 9, lambda delta: 1e-9])
def test_a_cost_that_falls_fast_or_is_none_leaves_the_rest_as_well(
    cost: Callable[[float], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = use_simple_prices(monkeypatch)
    simple = accounting.epsilon_bound

    def steep(event: Event, *, delta: float, **options: Any) -> Any:
        bound = simple(event, delta=delta, **options)
        bound.epsilon = cost(delta) if isinstance(event, ComposedEvent) else bound.epsilon
        return bound

    monkeypatch.setattr(accounting, "epsilon_bound", steep)
    ledger = budget()
    with ledger.plan() as plan:
        for name in "cd":
            ledger.declare(name, tickets=tickets(), epsilon=1.5)
    assert plan.epsilon is not None
    assert plan.epsilon <= 3.0
    joint = [delta for event, delta, _ in asked if isinstance(event, ComposedEvent)]
    assert len(set(joint)) <= 13
    assert min(joint) > 0
    assert max(joint) <= 7.5e-7
    rest = ledger.remaining_epsilon
    ledger.gdp_pool("rest", epsilon=rest)
    assert ledger.remaining_epsilon == 0.0


def test_a_plan_keeps_to_the_sum_of_deltas_where_its_components_ask_for_little(simple_prices: Any) -> None:
    ledger = budget()
    with ledger.plan() as plan:
        share = ledger.declare("c", tickets=tickets(), epsilon=1.0, delta=1e-9)
        ledger.declare("d", tickets=tickets(), epsilon=1.0, delta=2e-9)
    assert plan.epsilon == 2.0
    assert share.delta == 3e-9


def test_a_plan_with_an_epsilon_of_its_own_takes_its_proportion_if_that_suffices(
    simple_prices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = budget()
    with ledger.plan(epsilon=2.0) as plan:
        share = ledger.declare("c", tickets=tickets(), epsilon=1.0, delta=6e-7)
    assert (plan.epsilon, share.delta) == (2.0, 5e-7)
    simple = accounting.epsilon_bound

    def dear_below(event: Event, *, delta: float, **options: Any) -> Any:
        bound = simple(event, delta=delta, **options)
        bound.epsilon *= 1.0 if delta > 3e-7 else 3.0
        return bound

    monkeypatch.setattr(accounting, "epsilon_bound", dear_below)
    other = budget()
    with other.plan(epsilon=1.0):
        share = other.declare("c", tickets=tickets(), epsilon=1.0, delta=6e-7)
    assert share.delta == 6e-7


def test_declared_noise_gaps_are_left_out_of_the_search(simple_prices: list[Any]) -> None:
    ledger = budget()
    with ledger.plan():
        share = ledger.declare("c", tickets=tickets(1e-9, 1), epsilon=1.0, delta=1e-7, implementation_delta=9e-8)
    assert share.delta is not None
    assert 9e-8 < share.delta <= 1e-7
    with pytest.raises(ConfigurationError, match="implementation_delta"), ledger.plan():
        ledger.declare("d", tickets=tickets(), delta=1e-7, implementation_delta=1e-7)


def test_a_component_cannot_run_while_its_plan_is_open(simple_prices: Any) -> None:
    ledger = budget()
    other = share_of(ledger)
    with ledger.plan():
        share = ledger.declare("d", tickets=tickets(), epsilon=1.0)
        with pytest.raises(ConfigurationError, match="Leave the"):
            share.reserve("t")
        other.reserve("t")
    share.reserve("t")


def test_an_error_inside_a_plan_declares_nothing(simple_prices: Any) -> None:
    ledger = budget()
    with pytest.raises(ZeroDivisionError), ledger.plan():
        share = ledger.declare("c", tickets=tickets(), epsilon=1.0)
        raise ZeroDivisionError
    assert ledger.remaining_epsilon == 4.0
    with pytest.raises(SealedShareError, match="nothing was declared"):
        share.reserve("t")
    assert ledger.report().to_dict()["shares"] == []
    ledger.declare("c", tickets=tickets(), epsilon=1.0).reserve("t")


def test_a_plan_that_does_not_fit_declares_nothing(simple_prices: Any) -> None:
    ledger = budget(epsilon=1.5)
    with pytest.raises(PrivacyBudgetExceededError), ledger.plan():
        ledger.declare("c", tickets=tickets(), epsilon=1.0)
        ledger.declare("d", tickets=tickets(), epsilon=1.0)
    assert ledger.remaining_epsilon == 1.5
    with pytest.raises(PrivacyBudgetExceededError), ledger.plan(epsilon=0.9, delta=1e-7):
        ledger.declare("c", tickets=tickets(), epsilon=1.0)


def test_a_plan_inside_a_plan_is_refused_but_another_budgets_is_not(simple_prices: Any) -> None:
    ledger, other = budget(), budget()
    with ledger.plan() as outer:
        with pytest.raises(ConfigurationError, match="open plan"), ledger.plan():
            pass
        with other.plan() as inner:
            ledger.declare("c", tickets=tickets(), epsilon=1.0)
            other.declare("d", tickets=tickets(), epsilon=1.0)
        assert (outer.components, inner.components) == (("c",), ("d",))
        assert inner.epsilon == 1.0
    assert outer.epsilon == 1.0
    assert "components=['c']" in repr(outer)


def test_an_empty_plan_costs_nothing(simple_prices: Any) -> None:
    ledger = budget()
    with ledger.plan() as plan:
        pass
    assert plan.epsilon is None
    assert ledger.remaining_epsilon == 4.0


def test_a_plan_needs_a_delta_from_somewhere(simple_prices: Any) -> None:
    ledger = budget()
    with pytest.raises(ConfigurationError, match="plan"), ledger.plan():
        ledger.declare("c", tickets=tickets())
    with ledger.plan(epsilon=2.0, delta=5e-7) as plan:
        share = ledger.declare("c", tickets=tickets())
    assert (plan.epsilon, share.delta) == (2.0, 5e-7)


def test_names_and_prices_are_checked_inside_a_plan(simple_prices: Any) -> None:
    ledger = budget()
    with ledger.plan():
        ledger.declare("c", tickets=tickets(), epsilon=1.0)
        with pytest.raises(ConfigurationError, match="component"):
            ledger.declare("c", tickets=tickets(), epsilon=1.0)
        with pytest.raises(PrivacyBudgetExceededError):
            ledger.declare("d", tickets=tickets(), epsilon=0.5)
        with pytest.raises(ConfigurationError, match="pool"):
            ledger.gdp_pool("g", epsilon=1.0)
    assert ledger.remaining_epsilon == 3.0


def test_redeclaring_one_component_of_a_pending_plan_gives_the_plan_up(simple_prices: Any) -> None:
    ledger = budget()
    with ledger.plan():
        first = ledger.declare("c", tickets=tickets(), epsilon=1.0)
        second = ledger.declare("d", tickets=tickets(), epsilon=1.0)
    same = ledger.declare("c", tickets=tickets(), epsilon=1.0)
    assert same.epsilon == 2.0
    anew = ledger.declare("c", tickets=tickets(), epsilon=1.5)
    assert ledger.remaining_epsilon == 2.5
    for share in (first, second, same):
        with pytest.raises(SealedShareError):
            share.reserve("t")
    anew.reserve("t")
    ledger.declare("d", tickets=tickets(), epsilon=1.0).reserve("t")
    assert ledger.remaining_epsilon == 1.5


def test_a_plan_resumes_on_a_ledger_that_sealed_it(simple_prices: Any) -> None:
    store = InMemoryStore()

    def run(ledger: Budget) -> tuple[Share, Share]:
        with ledger.plan():
            shares = [ledger.declare(name, tickets=tickets(), epsilon=1.0) for name in "cd"]
        return shares[0], shares[1]

    run(budget(store=store))[0].reserve("t", count=4)
    again = Budget.open(store)
    first, second = run(again)
    assert (first.remaining("t"), second.remaining("t")) == (6, 10)
    second.reserve("t")
    assert again.remaining_epsilon == 2.0
    with again.plan():
        assert again.declare("c", tickets=tickets(), epsilon=1.0).epsilon == 2.0
        added = again.declare("e", tickets=tickets(), epsilon=1.0)
    added.reserve("t")
    assert again.remaining_epsilon == 1.0


def test_a_declaration_by_another_thread_is_not_part_of_the_plan(simple_prices: Any) -> None:
    ledger = budget()
    with ledger.plan() as plan, ThreadPoolExecutor(1) as pool:
        share = pool.submit(share_of, ledger).result()
    assert plan.components == ()
    assert share.epsilon == 1.0


async def test_a_plan_holds_across_awaits(simple_prices: Any) -> None:
    ledger = budget()

    async def declare() -> Share:
        await asyncio.sleep(0)
        return share_of(ledger)

    with ledger.plan() as plan:
        share = await declare()
        assert plan.components == ("c",)
    assert share.epsilon == 1.0


# --- pools ------------------------------------------------------------------------------------------------------------


def test_a_gaussian_pool_sums_mu_squared(simple_prices: Any) -> None:
    ledger = budget()
    pool = ledger.gdp_pool("g", epsilon=0.5)
    assert (pool.mu, ledger.remaining_epsilon) == (0.5, 3.5)
    reservation = pool.reserve(mu=0.3)
    assert (reservation.event, reservation.template, reservation.refundable) == (GaussianEvent(1 / 0.3), "gdp", True)
    with pytest.raises(PrivacyBudgetExceededError, match=r"mu\^2") as caught:
        pool.reserve(mu=0.4001)
    assert caught.value.remaining == 0.16
    pool.reserve(mu=0.4)
    assert pool.remaining_mu_squared == 0.0
    with pytest.raises(PrivacyBudgetExceededError):
        pool.reserve(mu=1e-9)
    assert reservation.give_back() == 1
    assert pool.remaining_mu_squared == pytest.approx(0.09)
    ledger.verify()


def test_a_zcdp_pool_sums_rho(simple_prices: Any) -> None:
    pool = budget().zcdp_pool("z", epsilon=1.0)
    reservation = pool.reserve(rho=0.1, count=10)
    assert reservation.event == ZCdpEvent(0.1)
    with pytest.raises(PrivacyBudgetExceededError, match="rho"):
        pool.reserve(rho=1e-12)
    reservation.burn(9)
    assert reservation.give_back() == 1
    assert (pool.rho, pool.remaining_rho) == (1.0, 0.1)


@pytest.mark.parametrize("amount", [0, -1, float("nan"), float("inf"), True, "1"])
def test_pool_amounts_are_finite_and_positive(amount: Any, simple_prices: Any) -> None:
    ledger = budget()
    with pytest.raises(ConfigurationError):
        ledger.gdp_pool("g", epsilon=1.0).reserve(mu=amount)
    with pytest.raises(ConfigurationError):
        ledger.zcdp_pool("z", epsilon=1.0).reserve(rho=amount)
    with pytest.raises(ConfigurationError):
        ledger.gdp_pool("h", epsilon=amount)


def test_real_pools_are_priced_by_their_own_notion() -> None:
    ledger = budget(epsilon=2.0, delta=1e-5)
    gdp = ledger.gdp_pool("g", epsilon=1.0)
    zcdp = ledger.zcdp_pool("z", epsilon=1.0, implementation_delta=1e-9)
    assert accounting.gdp_epsilon(gdp.mu, 5e-6) <= 1.0 < accounting.gdp_epsilon(gdp.mu * 1.001, 5e-6)
    assert accounting.zcdp_epsilon(zcdp.rho, 5e-6 - 1e-9) <= 1.0 < accounting.zcdp_epsilon(zcdp.rho * 1.001, 5e-6)
    mu = np.sqrt(2) / 40
    answered = 0
    with pytest.raises(PrivacyBudgetExceededError):
        while True:
            gdp.reserve(mu=mu).burn()
            answered += 1
    assert answered == int(gdp.mu**2 / mu**2)


@pytest.mark.parametrize("gap", [5e-6, 1e-5])
def test_a_pool_needs_some_delta(gap: float) -> None:
    with pytest.raises(ConfigurationError):
        budget(epsilon=2.0, delta=1e-5).gdp_pool("g", epsilon=1.0, implementation_delta=gap)


def test_a_pool_resumes_and_keeps_its_terms(simple_prices: Any) -> None:
    store = InMemoryStore()
    budget(store=store).gdp_pool("g", epsilon=0.5).reserve(mu=0.3)
    again = Budget.open(store)
    assert again.gdp_pool("g", epsilon=0.5).remaining_mu_squared == 0.16
    with pytest.raises(SealedShareError):
        again.gdp_pool("g", epsilon=0.6)
    with pytest.raises(SealedShareError):
        again.zcdp_pool("g", epsilon=0.5)


@pytest.mark.parametrize(("kind", "size"), [("gdp", "mu"), ("zcdp", "rho")])
def test_a_pool_resumes_where_a_processor_rounds_its_size_otherwise(
    kind: str, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pool(ledger: Budget) -> Any:
        return getattr(ledger, f"{kind}_pool")("g", epsilon=0.5)

    store = InMemoryStore()
    sealed = pool(budget(store=store))
    held = getattr(sealed, size)
    sealed.reserve(**{size: held / 2})
    monkeypatch.setattr(accounting, f"{kind}_{size}", lambda epsilon, delta: math.nextafter(held, math.inf))
    again = pool(Budget.open(store))
    again.reserve(**{size: held / 3})
    with pytest.raises(PrivacyBudgetExceededError):
        again.reserve(**{size: held})


# --- why there is no "go on while the numeric epsilon is below the limit" ---------------------------------------------


def test_adaptive_parameters_break_a_numeric_filter_and_our_shares_refuse_them(simple_prices: Any) -> None:
    """Two fixed plans of (3, 1e-5) each; choosing between them from the first output has almost twice the delta.

    First a Gaussian of mu 0.2, then either a Gaussian of mu 0.6907 or a pure step of 2.2794. Second source: the
    hockey-stick divergence, integrated over the loss of the first step.
    """
    epsilon, delta, mu0, mu, pure = 3.0, 1e-5, 0.2, 0.6907, 2.2794

    def gaussian_stick(e: float) -> float:
        return float(norm.cdf(mu / 2 - e / mu) - np.exp(e) * norm.cdf(-mu / 2 - e / mu))

    def pure_stick(e: float) -> float:
        if e <= -pure:
            return float(1 - np.exp(e))
        return float(max(0.0, (np.exp(pure) - np.exp(e)) / (1 + np.exp(pure))))

    def over_first_step(stick: Callable[[float], float]) -> float:
        def integrand(loss: float) -> float:
            return float(norm.pdf(loss, mu0**2 / 2, mu0)) * stick(epsilon - loss)

        return float(integrate.quad(integrand, -3, 3, points=[epsilon - pure], limit=400)[0])

    fixed = [over_first_step(gaussian_stick), over_first_step(pure_stick)]
    assert fixed == pytest.approx([delta, delta], rel=0.01)
    adaptive = over_first_step(lambda e: max(gaussian_stick(e), pure_stick(e)))
    assert adaptive == pytest.approx(1.99e-5, rel=0.01)

    ledger = budget(epsilon=3.0, delta=1e-5)
    ledger.declare("first", tickets=(Ticket("t", GaussianEvent(1 / mu0)),), epsilon=mu0).reserve("t").burn()
    with pytest.raises(PrivacyBudgetExceededError):
        ledger.declare("second", tickets=(Ticket("t", PureEvent(pure)),), epsilon=3.0)
