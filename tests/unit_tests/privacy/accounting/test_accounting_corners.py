"""Corners of the accountant that few plans reach: huge numbers of pure steps, tiny prices, costs that fall to nothing."""

from __future__ import annotations

import functools
import math
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from decimal import ROUND_CEILING, Context, Decimal, localcontext

import numpy as np
import pytest
from prv_accountant.accountant import PRVAccountant
from scipy import stats

from langchain_dpicl.exceptions import AccountantsDisagreeError
from langchain_dpicl.privacy import second_opinions as _opinions
from langchain_dpicl.privacy.accounting import calibration as _search
from langchain_dpicl.privacy.accounting import epsilon as accounting
from langchain_dpicl.privacy.accounting import epsilon_bound, epsilon_upper_bound
from langchain_dpicl.privacy.accounting import profiles as _profiles
from langchain_dpicl.privacy.accounting.calibration import gdp_mu, zcdp_rho
from langchain_dpicl.privacy.accounting.epsilon import Terms, readings
from langchain_dpicl.privacy.accounting.events import (
    BoundedRangeEvent,
    ComposedEvent,
    GaussianEvent,
    NoEvent,
    ParallelEvent,
    PureEvent,
    RepeatedEvent,
    SubsampledEvent,
    ZCdpEvent,
)
from langchain_dpicl.privacy.extensions.gradient_sums import SampledBallEvent
from langchain_dpicl.privacy.extensions.random_allocation import AllocatedEvent


@pytest.mark.parametrize(("epsilon", "count"), [(0.001, 250_000), (0.0005, 1_000_000)])
def test_a_crowd_of_pure_steps_costs_at_least_what_its_responses_add_up_to(epsilon, count):
    """Beyond a number the exact table is not made; the bound in its place lies above the normal limit of the steps."""
    (profile, times), *others = accounting.steps(Terms(pure=((epsilon, count),)), "add_remove")
    mu = epsilon * math.sqrt(count)
    x = np.linspace(0.0, 3.0 * mu, 7)
    limit = stats.norm.cdf(mu / 2 - x / mu) - np.exp(x) * stats.norm.cdf(-mu / 2 - x / mu)
    assert (times, others) == (1, [])
    assert (profile.up(x) >= limit - 1e-6).all()
    assert (profile.up(x) <= 1.001 * _profiles.zcdp(mu * mu / 2).up(x)).all()


@pytest.mark.parametrize("noise", [20.0, 37.0, 300.0])
def test_small_prices_are_rounded_up_to_seven_digits_too(noise):
    price = epsilon_upper_bound(GaussianEvent(noise), delta=1e-6, adjacency="add_remove")
    assert 0.0 < price < 1.0
    assert float(f"{price:.6e}") == price


def test_no_deal_is_left_in_a_branch_where_it_has_no_theorem():
    deal = AllocatedEvent(GaussianEvent(2.0), 8, 0.5)
    (read,) = readings(ParallelEvent("d", (("a", deal), ("b", GaussianEvent(3.0)))), "replace_one")
    (whole,) = readings(deal, "replace_one")
    assert dict(read.branches) == {"a": whole, "b": GaussianEvent(3.0)}
    assert not isinstance(whole, AllocatedEvent)
    assert readings(ComposedEvent((read,)), "replace_one") == (ComposedEvent((read,)),)


def test_a_cost_that_falls_to_nothing_is_searched_too():
    small, large = _search.narrow(lambda x: max(0.0, 1.0 - x), 0.25, (0.5, 4.0), tolerance=1e-6)
    assert small <= 0.75 <= large <= small * (1 + 1e-6)


def test_an_attack_that_shows_more_than_the_price_is_heard(monkeypatch):
    event = RepeatedEvent(BoundedRangeEvent(0.13), 60)
    price = epsilon_upper_bound(event, delta=1e-6, adjacency="add_remove")
    shown = _opinions.Opinion("attack", price + 0.01, math.inf)
    monkeypatch.setattr(_opinions, "attack_opinion", lambda ranges, *, delta: shown)
    accounting._cached_price.cache_clear()
    with pytest.raises(AccountantsDisagreeError, match="attack"):
        epsilon_bound(event, delta=1e-6, adjacency="add_remove")
    accounting._cached_price.cache_clear()


def test_what_many_pure_steps_cost_beside_noise_is_no_less_than_alone():
    crowd = RepeatedEvent(PureEvent(0.001), 300_000)
    alone = epsilon_upper_bound(GaussianEvent(1.0 / (0.001 * math.sqrt(300_000))), delta=1e-5, adjacency="add_remove")
    both = ComposedEvent((crowd, GaussianEvent(5.0)))
    assert epsilon_upper_bound(both, delta=1e-5, adjacency="add_remove") >= 0.999 * alone


SAMPLED = SubsampledEvent(GaussianEvent(2.0), 0.1)
ENGINES = {
    "nothing released": (NoEvent(), 0.0),
    "Gaussian closed form": (GaussianEvent(3.0), 1.447989),
    "zCDP conversion": (ZCdpEvent(0.02), 0.8999353),
    "optimal composition of pure steps": (RepeatedEvent(PureEvent(0.1), 7), 0.6999091),
    "bounded-range block": (BoundedRangeEvent(0.3), 0.2989816),
    "one sampled release, closed form": (SampledBallEvent(2.0, 0.1), 0.4909199),
    "random allocation": (AllocatedEvent(GaussianEvent(2.0), 4, 1.0), 1.199847),
    "sum of pure losses": (RepeatedEvent(SubsampledEvent(PureEvent(3.0), 0.9), 2), 5.800312),
    "PLD": (RepeatedEvent(SAMPLED, 9), 0.9242304),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_price_says_what_proved_it(engine):
    event, price = ENGINES[engine]
    bound = epsilon_bound(event, delta=1e-6, adjacency="add_remove", opinions=False)
    assert bound.engine == engine
    assert bound.epsilon == pytest.approx(price, rel=1e-5)


def test_a_price_at_a_tiny_delta_says_that_moments_proved_it():
    bound = epsilon_bound(RepeatedEvent(SAMPLED, 9), delta=1e-15, adjacency="add_remove", opinions=False)
    assert bound.engine == "moments of the PLD"


@pytest.mark.parametrize("rho", [1e-6, 0.02, 0.5, 1.5, 5.0])
def test_two_worlds_are_no_further_apart_than_pinsker_says_nor_than_bretagnolle_and_huber_do(rho):
    apart = _profiles.zcdp(rho).up(np.array([0.0]))[0]
    assert 0.5 * min(math.sqrt(rho / 2), 1.0) < apart <= math.sqrt(rho / 2) * (1 + 1e-9)
    assert apart <= math.sqrt(1 - math.exp(-rho)) * (1 + 1e-9)


@pytest.mark.parametrize("count", [5, 190_006, 190_007])
def test_many_pure_steps_are_never_priced_below_the_truth(count: int) -> None:
    """Binomials of such counts are differences of numbers near 2e6, and lose their last digits."""
    low, high = 0.0, 1.0
    for _ in range(60):  # `low`: the largest step that is priced at 1
        profile = _profiles.randomised_response(middle := (low + high) / 2, count)
        low, high = (middle, high) if _profiles.solve(profile.up, 1e-6, profile.top_up) <= 1.0 else (low, middle)
    with localcontext(Context(prec=60, Emin=-(10**15), Emax=10**15)):
        decay = (-Decimal(low)).exp()
        share, delta = (1 / (1 + decay)) ** count, Decimal(0)
        fall, grow = (1 - count * Decimal(low)).exp(), (2 * Decimal(low)).exp()  # e^(1 - loss)
        for minority in range(count + 1):
            if fall >= 1:
                break
            delta += share * (1 - fall)
            share, fall = share * (count - minority) / (minority + 1) * decay, fall * grow
    assert delta <= Decimal("1e-6")
    assert delta > Decimal("0.999e-6")


def test_a_pure_price_is_the_first_of_seven_digits_that_is_not_below_its_event() -> None:
    digits = Context(prec=7, rounding=ROUND_CEILING)
    numbers = [step / 1000 for step in range(1, 5000)]
    numbers += [math.nextafter(number, 9.0) for number in numbers] + [0.9820667000000001]
    for number in numbers:
        price = epsilon_upper_bound(PureEvent(number), delta=0.0, adjacency="add_remove")
        assert repr(price) == repr(float(digits.create_decimal(repr(number))))


@pytest.mark.parametrize("search", [zcdp_rho, gdp_mu])
def test_the_largest_share_of_a_tiny_epsilon_is_found_at_once(search: Callable[[float, float], float]) -> None:
    made = {zcdp_rho: ZCdpEvent, gdp_mu: lambda mu: GaussianEvent(1 / mu)}[search]
    for epsilon, delta in ((1e-6, 1e-12), (1e-9, 1e-15), (1.0, 1e-6)):
        found = search(epsilon, delta)
        assert epsilon_upper_bound(made(found), delta=delta, adjacency="add_remove") <= epsilon
        assert epsilon_upper_bound(made(1.01 * found), delta=delta, adjacency="add_remove") > epsilon


def test_two_opinions_at_once_leave_the_filters_of_warnings_as_they_were(monkeypatch):
    compute = PRVAccountant.compute_epsilon

    def slowly(*args, **kwargs):
        time.sleep(0.05)
        return compute(*args, **kwargs)

    monkeypatch.setattr(PRVAccountant, "compute_epsilon", slowly)
    asked = [
        threading.Thread(target=_opinions._ask_prv, args=([(5.0, 1.0, 1)],), kwargs={"delta": 1e-5, "eps_error": 0.1})
        for _ in range(2)
    ]
    with warnings.catch_warnings():
        filters = list(warnings.filters)
        for thread in asked:
            thread.start()
            time.sleep(0.02)
        for thread in asked:
            thread.join()
        assert list(warnings.filters) == filters


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_forked_while_another_thread_asks_asks_too(monkeypatch):
    compute, began = PRVAccountant.compute_epsilon, threading.Event()

    def slowly(*args, **kwargs):
        began.set()
        time.sleep(0.1)
        return compute(*args, **kwargs)

    monkeypatch.setattr(PRVAccountant, "compute_epsilon", slowly)
    ask = functools.partial(_opinions._ask_prv, [(5.0, 1.0, 1)], delta=1e-5, eps_error=0.1)
    thread = threading.Thread(target=ask)
    thread.start()
    assert began.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        ask()
        os._exit(0)
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
