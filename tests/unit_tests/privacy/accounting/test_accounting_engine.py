"""Inside the accountant: loss distributions, rounding, and who is asked for a second opinion."""

from __future__ import annotations

import dataclasses
import math
import warnings

import numpy as np
import pytest
from scipy import fft

from langchain_dpicl.exceptions import AccountantsDisagreeError, ConfigurationError
from langchain_dpicl.privacy import second_opinions as _opinions
from langchain_dpicl.privacy import second_opinions as _second_opinions
from langchain_dpicl.privacy.accounting import calibrate, epsilon_bound, epsilon_upper_bound
from langchain_dpicl.privacy.accounting import epsilon as accounting
from langchain_dpicl.privacy.accounting import profiles as _profiles
from langchain_dpicl.privacy.accounting.calibration import delta_of
from langchain_dpicl.privacy.accounting.epsilon import UnitTerms, normal_form
from langchain_dpicl.privacy.accounting.events import (
    BoundedRangeEvent,
    ComposedEvent,
    Event,
    GaussianEvent,
    NoEvent,
    PureEvent,
    RepeatedEvent,
    SubsampledEvent,
)


def sampled_gaussian(rate: float, noise: float, count: int) -> Event:
    return RepeatedEvent(SubsampledEvent(GaussianEvent(noise), rate), count)


def sampled_pure(rate: float, epsilon: float, count: int) -> Event:
    return RepeatedEvent(SubsampledEvent(PureEvent(epsilon), rate), count)


class TestTheGrid:
    @pytest.mark.parametrize(
        "profile",
        [
            _profiles.gaussian(0.3),
            _profiles.gaussian(9.0),
            _profiles.randomised_response(0.7, 5),
            _profiles.randomised_response(3.0, 1),
            _profiles.bounded_range(2.5),
            _profiles.minimum(_profiles.zcdp(1.8)),
            _profiles.minimum(_profiles.zcdp(0.01), _profiles.randomised_response(0.1, 2)),
            _profiles.amplify_poisson(_profiles.gaussian(1.5), 0.01),
            _profiles.amplify_poisson(_profiles.gaussian(1.5), 0.01).reversed(),
            _profiles.symmetrise(_profiles.minimum(_profiles.zcdp(1.8)), 0.3),
        ],
    )
    @pytest.mark.parametrize("fraction", [0.5, 0.05, 0.01])
    def test_loss_distributions_are_distributions_above_the_profile(
        self, profile: _profiles.Profile, fraction: float
    ) -> None:
        step = fraction * _profiles.spread(profile)
        lowest, masses, infinite = _profiles.loss_masses(profile, step)
        assert masses.sum() + infinite == pytest.approx(1.0, abs=1e-9)
        losses = (lowest + np.arange(len(masses))) * step
        assert (masses * np.exp(-losses)).sum() <= 1 + 1e-9
        for x in np.linspace(0, profile.top_up, 37):
            hockey_stick = infinite + float(np.maximum(-np.expm1(np.minimum(x - losses, 0)), 0) @ masses)
            assert hockey_stick >= profile.up(np.array([x]))[0] * (1 - 1e-9) - 1e-14

    def test_the_minorant_of_two_bounds_is_convex_and_below_both(self) -> None:
        zcdp, pure = _profiles.zcdp(0.05), _profiles.randomised_response(0.35, 3)
        best = _profiles.minimum(zcdp, pure)
        x = np.linspace(0, 1.0, 400)
        assert (best.up(x) <= np.minimum(zcdp.up(x), pure.up(x)) * (1 + 1e-2)).all()
        t, y = np.exp(x), best.up(x)
        assert (np.diff(np.diff(y) / np.diff(t)) >= -1e-9).all()

    @pytest.mark.parametrize(("rate", "noise", "count"), [(0.01, 1.0, 1000), (0.001, 0.6, 1000), (0.1, 2.0, 10_000)])
    def test_declared_rounding_covers_what_the_transform_loses(self, rate: float, noise: float, count: int) -> None:
        """dp-accounting's transform against ours, which is tilted so that the tail is where the digits are."""
        terms = normal_form(sampled_gaussian(rate, noise, count))
        ((profile, _),) = accounting.steps(terms, "add_remove")
        (bound,) = accounting.bounds(terms, "add_remove", is_coarse=False)
        assert isinstance(bound, _profiles.GridBound)
        (price, _) = bound.epsilons(1e-9)
        losses, masses, _ = _opinions._loss_masses(profile, bound.step)
        parts = [(losses, _opinions._log(masses), count)]
        tilted = _opinions._tilted_sum(parts, _opinions._tilt(parts, price), step=bound.step, price=price)
        above = tilted.losses > price
        weights = np.exp(tilted.log_scale - tilted.tilt * (tilted.losses[above] - price)) * tilted.weights[above]
        exact = float(weights @ -np.expm1(price - tilted.losses[above]))
        lost = abs(float(bound.up.pmf().get_delta_for_epsilon(price)) - exact)
        assert lost < bound.lost
        if noise == 1.0:  # and it does lose something: a bound without the allowance would be too low
            assert float(bound.up.pmf().get_delta_for_epsilon(price)) < exact

    def test_tiny_deltas_are_priced_by_moments(self) -> None:
        event = sampled_gaussian(0.01, 1.0, 1000)
        coarse = epsilon_bound(event, delta=1e-13, adjacency="add_remove")
        assert coarse.engine == "moments of the PLD"
        assert 4.2 < coarse.epsilon < 4.8  # the tilted transform says 4.2298
        assert any("below what a transform resolves" in reason for reason in coarse.skipped) or coarse.opinions
        for delta in (1e-6, 1e-9):
            (bound,) = [accounting.last_resort(normal_form(event), "add_remove")]
            assert max(bound.epsilons(delta)) >= epsilon_upper_bound(event, delta=delta, adjacency="add_remove")
            assert delta_of(bound, max(bound.epsilons(delta))) == pytest.approx(delta, rel=1e-3)
        removed, added = accounting.last_resort(normal_form(event), "add_remove").epsilons(1e-300)
        assert removed == math.inf  # less than what was cut off at infinite loss
        assert 0 < added < math.inf  # an added unit's losses are bounded

    @pytest.mark.parametrize("count", [2, 50, 1000])
    @pytest.mark.parametrize(
        "profile",
        [
            _profiles.gaussian(0.7),
            _profiles.amplify_poisson(_profiles.gaussian(1.0), 0.01),
            _profiles.bounded_range(0.3),
            _profiles.symmetrise(_profiles.randomised_response(0.1), 0.01),
        ],
        ids=["gaussian", "sampled gaussian", "bounded range", "sampled pure, replaced"],
    )
    def test_a_repeated_step_is_what_dp_accounting_makes_of_it(self, profile: _profiles.Profile, count: int) -> None:
        losses = _profiles.connect_dots(profile, _profiles.grid_step([(profile, count)], is_coarse=True))
        own, theirs = _profiles._self_compose(losses, count).pmf(), losses.pmf().self_compose(count, _profiles._CUT)
        assert (own._infinity_mass, own._pessimistic_estimate) == (theirs._infinity_mass, theirs._pessimistic_estimate)
        assert own._discretization == theirs._discretization
        first = max(own._lower_loss, theirs._lower_loss)
        kept = min(own._lower_loss + own.size, theirs._lower_loss + theirs.size) - first
        both = [pmf._probs[first - pmf._lower_loss :][:kept] for pmf in (own, theirs)]
        np.testing.assert_allclose(*both, rtol=0.0, atol=1e-15)
        # What only one of them keeps is below what may be cut, and we keep hardly more.
        assert all(float(pmf._probs.sum() - part.sum()) < 5e-15 for pmf, part in zip((own, theirs), both, strict=True))
        assert own.size <= 1.03 * theirs.size

    def test_losses_too_large_for_an_exponential_raise_no_warning(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert _profiles.amplify_poisson(_profiles.gaussian(0.05), 0.1).down(np.array([0.0, 800.0]))[1] == 0.0

    def test_a_million_steps_compose_as_a_thousand_times_a_thousand(self) -> None:
        profile = _profiles.amplify_poisson(_profiles.bounded_range(0.37), 0.00125)
        losses = _profiles.connect_dots(profile, 0.3 * _profiles.spread(profile))
        whole = _profiles._self_compose(losses, 1_000_000)
        staged = _profiles._self_compose(_profiles._self_compose(losses, 1_000), 1_000)
        for delta in (1e-3, 1e-6):
            assert _profiles.least_epsilon(staged, delta) == pytest.approx(
                _profiles.least_epsilon(whole, delta), rel=1e-5
            )

    @pytest.mark.parametrize(
        ("profile", "count"),
        [
            (_profiles.gaussian(0.7), 40),
            (_profiles.amplify_poisson(_profiles.gaussian(1.0), 0.01), 3),
            (_profiles.amplify_poisson(_profiles.gaussian(1.0), 0.01).reversed(), 100_000),
            (_profiles.bounded_range(30.0), 40),
        ],
        ids=["gaussian", "few", "many", "losses of which e^-loss is 0"],
    )
    def test_epsilons_are_what_dp_accounting_reads_from_the_same_distribution(
        self, profile: _profiles.Profile, count: int
    ) -> None:
        losses = _profiles._self_compose(
            _profiles.connect_dots(profile, _profiles.grid_step([(profile, count)], is_coarse=True)), count
        )
        for delta in (1e-14, 1e-9, 1e-5, 0.1, 0.9, 1.0):
            found, expected = _profiles.least_epsilon(losses, delta), losses.pmf().get_epsilon_for_delta(delta)
            assert found == pytest.approx(expected, rel=1e-12, abs=1e-15)

    def test_remembered_prices_hold_no_distributions(self) -> None:
        price = accounting._price(sampled_gaussian(0.01, 1.0, 100), 1e-5, "add_remove", is_coarse=False)
        fields = [getattr(price, field.name) for field in dataclasses.fields(price)]
        assert all(isinstance(value, (float, str, UnitTerms)) for value in fields)

    def test_what_is_not_a_number_is_no_bound(self) -> None:
        masses = np.array([0.5, 0.5, math.nan])
        assert _profiles._epsilon(_profiles.Losses(0.1, -1, masses, 0.0), 1e-6) == math.inf

    @pytest.mark.parametrize("pure", [1e3, 5e6, 9e8])
    @pytest.mark.parametrize("is_coarse", [True, False])
    def test_losses_of_millions_have_an_upper_bound_too(self, pure: float, is_coarse: bool) -> None:
        event = ComposedEvent((PureEvent(pure), GaussianEvent(1.0)))
        price = accounting._price(event, 1e-6, "add_remove", is_coarse=is_coarse).epsilon
        assert pure + 4.0 < price < 1.001 * pure + 10.0

    def test_lengths_of_transforms_are_those_that_scipy_finds_fast(self) -> None:
        for least in (*range(1, 3_000), *range(3_000, 200_000, 997)):
            assert _profiles._fast_length(least) == fft.next_fast_len(least, real=True), least


class TestSecondOpinions:
    def test_gaussians_are_checked_by_prv_accountant(self) -> None:
        bound = epsilon_bound(sampled_gaussian(0.01, 1.0, 200), delta=1e-5, adjacency="add_remove")
        assert [opinion.name for opinion in bound.opinions] == ["prv-accountant"]
        assert bound.engine == "PLD"

    @pytest.mark.parametrize(
        "event",
        [
            RepeatedEvent(PureEvent(1.0), 50),
            ComposedEvent((sampled_gaussian(0.01, 1.0, 20), PureEvent(0.1))),
            sampled_pure(0.01, 1.0, 20),
            RepeatedEvent(SubsampledEvent(ComposedEvent((GaussianEvent(2.0), PureEvent(0.1))), 0.1), 5),
        ],
    )
    def test_prv_accountant_is_never_asked_about_pure_steps(
        self, event: Event, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def forbidden(*args: object, **kwargs: object) -> None:
            raise AssertionError("asked")

        monkeypatch.setattr(_opinions, "_ask_prv", forbidden)
        bound = epsilon_bound(event, delta=1e-5, adjacency="add_remove")
        assert [opinion.name for opinion in bound.opinions] == ["independent FFT"]

    def test_prv_accountant_is_not_asked_under_replace_one(self) -> None:
        bound = epsilon_bound(sampled_gaussian(0.01, 1.0, 20), delta=1e-5, adjacency="replace_one")
        assert [opinion.name for opinion in bound.opinions] == ["independent FFT"]

    @pytest.mark.parametrize(
        ("event", "reason"),
        [
            (sampled_gaussian(0.001, 3.0, 30_000), "compositions are beyond"),
            (sampled_gaussian(0.3, 0.4, 50), "refused"),
            (sampled_gaussian(0.01, 0.1, 50), "is beyond it"),
        ],
    )
    def test_prv_accountant_is_skipped_with_a_reason(self, event: Event, reason: str) -> None:
        bound = epsilon_bound(event, delta=1e-6, adjacency="add_remove")
        assert any(reason in text for text in bound.skipped)
        assert [opinion.name for opinion in bound.opinions] == ["independent FFT"]

    def test_prv_accountant_is_skipped_where_its_grid_would_be_unreasonable(self) -> None:
        answer = _opinions.prv_opinion([(3.3, 0.001, 20_000)], delta=1e-12, price=1.0)
        assert isinstance(answer, str)
        assert "leaves an error" in answer

    def test_choices_are_checked_by_an_attack(self) -> None:
        bound = epsilon_bound(RepeatedEvent(BoundedRangeEvent(0.1), 100), delta=1e-6, adjacency="add_remove")
        attack = next(o for o in bound.opinions if o.name.startswith("attack"))
        assert attack.lower == pytest.approx(2.2453, abs=1e-3)
        assert attack.upper == math.inf
        assert isinstance(_opinions.attack_opinion(((0.1, 10**7),), delta=1e-6), str)

    @pytest.mark.parametrize("factor", [0.7, 1.3])
    def test_a_wrong_engine_is_refused(self, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
        right = _profiles.GridBound.epsilons
        monkeypatch.setattr(
            _profiles.GridBound, "epsilons", lambda self, delta: tuple(factor * e for e in right(self, delta))
        )
        accounting._cached_price.cache_clear()
        try:
            for event in (sampled_gaussian(0.011, 1.0, 200), sampled_pure(0.05, 1.0, 100)):
                with pytest.raises(AccountantsDisagreeError, match="engine's bound"):
                    epsilon_bound(event, delta=1e-5, adjacency="add_remove")
        finally:
            accounting._cached_price.cache_clear()

    def test_a_wrong_sampling_theorem_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Plants the bug of pricing half the rate; prv-accountant, which has its own theorem, notices."""
        right = _profiles.amplify_poisson
        monkeypatch.setattr(_profiles, "amplify_poisson", lambda base, rate: right(base, rate / 2))
        for cache in (accounting.steps, accounting._sampled_step, accounting.bounds, accounting._cached_price):
            cache.cache_clear()
        try:
            with pytest.raises(AccountantsDisagreeError):
                epsilon_bound(sampled_gaussian(0.013, 1.0, 150), delta=1e-5, adjacency="add_remove")
        finally:
            for cache in (accounting.steps, accounting._sampled_step, accounting.bounds, accounting._cached_price):
                cache.cache_clear()

    def test_none_are_asked_when_told_so_or_when_nothing_is_spent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_second_opinions, "_ask_all", lambda *a, **k: pytest.fail("asked"))
        assert epsilon_bound(GaussianEvent(1.0), delta=1e-5, adjacency="add_remove", opinions=False).opinions == ()
        assert epsilon_bound(NoEvent(), delta=1e-5, adjacency="add_remove").epsilon == 0.0
        free = epsilon_bound(GaussianEvent(1000.0), delta=0.01, adjacency="add_remove")
        assert free.epsilon == 0.0
        assert free.skipped == ("all: epsilon is 0 at this delta",)

    def test_a_window_that_is_too_small_is_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        right = _opinions._near_price
        monkeypatch.setattr(_opinions, "_near_price", lambda *a, **k: dataclasses.replace(right(*a, **k), leak=1.0))
        steps = accounting.steps(normal_form(sampled_gaussian(0.01, 1.0, 50)), "add_remove")
        answer = _opinions.fft_opinion(steps, delta=1e-8, price=1.6)
        assert isinstance(answer, str)
        assert "window" in answer

    def test_a_price_far_from_the_truth_still_gives_an_interval(self) -> None:
        steps = accounting.steps(normal_form(sampled_pure(0.05, 1.0, 100)), "add_remove")
        for price in (0.5, 2.17, 6.0):
            answer = _opinions.fft_opinion(steps, delta=1e-5, price=price)
            assert isinstance(answer, _opinions.Opinion)
            assert answer.lower <= 2.1695
            assert answer.upper >= 2.1694

    def test_pure_steps_below_the_resolution_of_a_transform_get_no_second_opinion(self) -> None:
        bound = epsilon_bound(sampled_pure(0.05, 1.0, 100), delta=1e-13, adjacency="add_remove")
        assert bound.engine == "moments of the PLD"
        assert bound.opinions == ()
        assert any("below what a transform resolves" in reason for reason in bound.skipped)

    def test_additions_are_recomputed_where_they_cost_more(self) -> None:
        """No event of ours has costlier additions, so the two orders are swapped by hand."""
        price = accounting._price(sampled_pure(0.05, 1.0, 100), 1e-5, "add_remove", is_coarse=False)
        swapped = dataclasses.replace(price, removed=price.added, added=price.removed)
        with pytest.raises(AccountantsDisagreeError):
            _second_opinions._own_transform(swapped, adjacency="add_remove")

    def test_the_transform_weakens_its_tilt_down_to_none(self) -> None:
        ((profile, count),) = accounting.steps(normal_form(sampled_pure(0.05, 1.0, 100)), "add_remove")
        losses, masses, _ = _opinions._loss_masses(profile, 0.01)
        composed = _opinions._near_price([(losses, _opinions._log(masses), count)], step=0.01, price=2.17, delta=1e-300)
        assert composed.tilt == 0.0

    def test_a_curve_that_never_falls_has_no_root(self) -> None:
        assert _profiles.solve(lambda x: np.full_like(x, 0.5), 0.1, 1.0) == math.inf


class TestRoughCalibration:
    @pytest.mark.parametrize("epsilon", [0.3, 3.0])
    def test_costs_at_most_the_target_and_adds_at_most_three_percent(self, epsilon: float) -> None:
        def event_at(noise: float) -> RepeatedEvent:
            return RepeatedEvent(SubsampledEvent(GaussianEvent(noise), 0.01), 500)

        terms = {"epsilon": epsilon, "delta": 1e-5, "adjacency": "add_remove"}
        rough = calibrate(event_at, **terms, is_rough=True)
        assert epsilon_upper_bound(event_at(rough), delta=1e-5, adjacency="add_remove") <= epsilon
        assert 1.0 <= rough / calibrate(event_at, **terms) < 1.03

    @pytest.mark.parametrize("near", [1e-3, 0.3, 0.7, 2.0, 1e5])
    def test_a_guess_good_or_bad_ends_as_near_in_fewer_prices(self, near: float) -> None:
        priced: list[float] = []

        def event_at(noise: float) -> RepeatedEvent:
            priced.append(noise)
            return RepeatedEvent(SubsampledEvent(GaussianEvent(noise), 0.01), 500)

        terms = {"epsilon": 1.0, "delta": 1e-5, "adjacency": "add_remove"}
        rough = calibrate(event_at, **terms, is_rough=True, near=near)
        steps = len(priced)
        assert epsilon_upper_bound(event_at(rough), delta=1e-5, adjacency="add_remove") <= 1.0
        exact = calibrate(event_at, **terms)
        assert 1.0 <= rough / exact < 1.03
        assert steps <= 5 or not 0.5 < near / exact < 2.0
        assert calibrate(event_at, **terms, near=near) == pytest.approx(exact, rel=3e-4)

    @pytest.mark.parametrize("near", [0.03, 64.5, 3e4])
    def test_noise_that_hardly_changes_the_price_leads_to_an_end_of_the_range(self, near: float) -> None:
        def event_at(noise: float) -> ComposedEvent:
            return ComposedEvent((GaussianEvent(19.3), GaussianEvent(noise)))

        terms = {"delta": 1e-5, "adjacency": "add_remove", "is_rough": True, "near": near}
        with pytest.raises(ConfigurationError, match="epsilon: expected at least"):
            calibrate(event_at, epsilon=4e-5, **terms)

    def test_knows_the_ends_of_its_range(self) -> None:
        def event_at(noise: float) -> RepeatedEvent:
            return RepeatedEvent(SubsampledEvent(GaussianEvent(noise), 0.01), 10)

        terms = {"delta": 1e-5, "adjacency": "add_remove", "is_rough": True}
        for near in (None, 0.3, 6.0):
            assert calibrate(event_at, epsilon=10.0, low=5.0, near=near, **terms) == 5.0
            with pytest.raises(ConfigurationError, match="epsilon"):
                calibrate(event_at, epsilon=0.01, high=0.5, near=near, **terms)
