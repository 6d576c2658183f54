"""The audits of the package, played against all of it: sound everywhere, and every part of them finds a planted bug.

Each sound check fails by chance with probability at most 1e-6. Each planted bug is missed with a probability below 1e-3,
most of them far below, and is looked for again where it was missed. `make audit` runs them; they are too slow for `make test`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import stats

from langchain_dpicl.audit import Game, audit, component_checks, component_games, play, suite
from langchain_dpicl.audit.component_games import LabelGame, VotingGame
from langchain_dpicl.audit.game import ALARM, POWER, power_of
from langchain_dpicl.privacy.extensions.confident_gnmax import ConfidentGNMaxMechanism
from langchain_dpicl.privacy.extensions.gradient_sums import ClippedGradientSum
from langchain_dpicl.privacy.extensions.joint_exponential import JointExponentialMechanism, KeywordSum
from langchain_dpicl.privacy.extensions.logit_sums import LOGIT_MECHANISMS, ClippedDifferenceMean, ClippedLogitMean
from langchain_dpicl.privacy.extensions.permute_and_flip import PermuteAndFlipMechanism
from langchain_dpicl.privacy.extensions.registry import MECHANISMS, PROVED
from langchain_dpicl.privacy.mechanisms import release_plan as mechanisms
from langchain_dpicl.privacy.mechanisms.bounded import ProbabilitySum, VoteSum
from langchain_dpicl.privacy.mechanisms.randomness import SecureRandom
from langchain_dpicl.privacy.mechanisms.release_plan import (
    GaussianMechanism,
    GumbelMechanism,
    PoissonSlots,
    PoissonUnits,
    Release,
    ReleasePlan,
)
from tests import audit_plants as plant
from tests import pate_plants as pate

pytestmark = pytest.mark.audited

SHAPES = (("slots", "add_remove"), ("slots", "replace_one"), ("units", "add_remove"), ("units", "replace_one"))


def every_game() -> dict[str, Game]:
    found: list[Game] = []
    for rows, adjacency in SHAPES:
        shape = {"rows": rows, "adjacency": adjacency}
        for mechanism in MECHANISMS:
            for vector in (False, True) if mechanism == "gaussian" else (False,):
                given = {"mechanism": mechanism, "has_vectors": vector, "abstains": True}
                found += suite.vote_cases(VotingGame, **given, **shape)
                found += suite.vote_cases(LabelGame, **given, **shape) if vector or mechanism != "gaussian" else ()
        for mechanism in (*MECHANISMS, *LOGIT_MECHANISMS):
            found += suite.token_cases(mechanism=mechanism, **shape)
        for aggregation in ("embedding", "keywords"):
            found += suite.free_form_cases(aggregation=aggregation, **shape)
        found += suite.confident_cases(teachers="fresh", **shape)
    found += suite.confident_cases(teachers="fixed", rows="slots", adjacency="replace_one")
    for mechanism in MECHANISMS:
        given = {"mechanism": mechanism, "rows": "slots", "adjacency": "replace_one", "sampling": "fixed"}
        found += suite.vote_cases(VotingGame, **given)
        found += suite.token_cases(**given)
    for adjacency in ("add_remove", "replace_one"):
        found += suite.step_cases(adjacency=adjacency)
    names = [
        f"{type(game).__name__}, {game.name}{', ' + str(game.options['sampling']) if 'sampling' in game.options else ''}"
        f"{', fixed teachers' if game.options.get('teachers') == 'fixed' else ''}{', vector' if game.direction else ''}"
        for game in found
    ]
    assert len(set(names)) == len(names)
    return dict(zip(names, found, strict=True))


GAMES = every_game()


@pytest.mark.parametrize("name", GAMES)
def test_a_worst_case_is_sound_and_its_outcomes_have_the_chances_of_the_closed_form(name: str) -> None:
    """Both at a false alarm of 1e-6; the closed forms are a second source for what the game is about, and its power."""
    game = GAMES[name]
    sides = game.sides()
    for side in sides:
        side.play(game.runs)
    assert [fault for side in sides for fault in side.faults()] == []
    outcome = game.outcomes()[0]
    for side, chance in zip(sides, game.law(1.0), strict=True):
        assert stats.binomtest(side.counts[outcome], side.counts.total(), chance).pvalue > ALARM / 2
        assert side.counts.total() >= game.share * game.runs - 5 * math.sqrt(game.share * game.runs)
    assert play(dataclasses.replace(game, runs=16)).verdict in {"undecided", "sound"}


# --- bugs, each planted in the package -------------------------------------------------------------------------------

HALF, THIRD = plant.scaled(0.5), plant.scaled(1 / 3)


def no_clip_of_gradients(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ClippedGradientSum, "_rates", lambda self, rows: np.full((len(rows), 1), 2.0**32 / self.l2_clip_norm))


def no_clip_of_logits(patch: pytest.MonkeyPatch) -> None:
    for kind in (ClippedLogitMean, ClippedDifferenceMean):
        patch.setattr(
            kind, "bounded_rows", lambda self, rows, **_: np.clip(np.array(rows, float), -30.0, 30.0) / self.num_slots
        )


def plant_no_choice(patch: pytest.MonkeyPatch) -> None:
    """The largest counts leave, without noise."""

    def release(self: Any, total: Any, *, rng: Any) -> Release:
        best = tuple(int(place) for place in np.argsort(-total.value, kind="stable")[: self.num_choices])
        return Release(index=None, values=None, event=self.event, indices=best)

    patch.setattr(JointExponentialMechanism, "release", release)


def sharper_keywords(patch: pytest.MonkeyPatch) -> None:
    """Half of the scale."""
    real = JointExponentialMechanism.release

    def release(self: Any, total: Any, *, rng: Any) -> Release:
        return real(dataclasses.replace(self, noise_multiplier=self.noise_multiplier / 2), total, rng=rng)

    patch.setattr(JointExponentialMechanism, "release", release)


def among_the_first_keywords(patch: pytest.MonkeyPatch) -> None:
    """No keyword behind the 32nd is ever chosen."""
    real = JointExponentialMechanism.release

    def release(self: Any, total: Any, *, rng: Any) -> Release:
        return real(self, dataclasses.replace(total, value=total.value[:32]), rng=rng)

    patch.setattr(JointExponentialMechanism, "release", release)


GAME_PLANTS: dict[str, tuple[str, plant.Plant]] = {
    **{
        f"{kind}, half of the noise": (name, HALF)
        for kind, name in {
            "token, gumbel": "TokenGame, one token: gumbel, slots, add_remove",
            "token, gaussian": "TokenGame, one token: gaussian, slots, add_remove",
            "token, permute and flip": "TokenGame, one token: permute_and_flip, slots, add_remove",
            **{f"token, {m}": f"TokenGame, one token: {m}, slots, add_remove" for m in LOGIT_MECHANISMS},
            "token, units": "TokenGame, one token: gumbel, units, add_remove",
            "embedding": "FreeFormGame, one answer: embedding, slots, add_remove",
            "embedding, units": "FreeFormGame, one answer: embedding, units, add_remove",
            "step": "StepGame, one training step: gaussian, add_remove, vector",
            "step, replaced": "StepGame, one training step: gaussian, replace_one, vector",
            "vote": "VotingGame, one answer: gumbel, slots, replace_one",
            "vote, fixed sample": "VotingGame, one answer: gaussian, slots, replace_one, fixed",
            "answer of confident": "LabelGame, one answer: confident_gnmax, slots, replace_one",
        }.items()
    },
    "test of confident, half of the noise": (
        "LabelGame, one test: confident_gnmax, units, add_remove",
        pate.noise_of_the_test_scaled(0.5),
    ),
    "test of confident, no noise": (
        "LabelGame, one test: confident_gnmax, slots, replace_one, fixed teachers",
        pate.threshold_without_noise,
    ),
    "token, no clip": ("TokenGame, one token: clip_and_blend, units, add_remove", no_clip_of_logits),
    "step, no clip": ("StepGame, one training step: gaussian, add_remove, vector", no_clip_of_gradients),
    "vote, everybody charged as a sample": (
        "VotingGame, one answer on a secret sample: gumbel, units, add_remove",
        plant.always_sampled,
    ),
    "token, no noise": ("TokenGame, one token: gumbel, slots, add_remove", plant.gumbel(np.zeros_like)),
    "keywords, no noise": ("FreeFormGame, one answer: keywords, slots, add_remove", plant_no_choice),
}


@pytest.mark.parametrize("bug", GAME_PLANTS)
def test_a_planted_bug_is_caught_by_a_worst_case(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, plants = GAME_PLANTS[bug]
    plants(monkeypatch)
    game = GAMES[name]
    # At its plain size a game may miss half of the noise with a chance of .01.
    assert plant.seen_in_two(lambda: play(dataclasses.replace(game, runs=2 * game.runs)).verdict == "violated")


@pytest.mark.parametrize("name", GAMES)
def test_what_a_power_is_for_would_be_seen_with_the_stated_chance(name: str) -> None:
    """Exact binomial sums, of the fault that the power is for: half of the noise, but for games on secret samples."""
    game = GAMES[name]
    power = power_of(game, game.event(game.sides()[0]))
    assert (power is None and not game.is_tight) or power >= POWER
    assert (game.power_for == "half of the noise") == ("secret sample" not in game.name)


# --- parts --------------------------------------------------------------------------------------------------------------

SLOTS, UNITS = PoissonSlots(0.02, 5, 4), PoissonUnits(0.02)
PLANS = {
    "slots, gumbel": ReleasePlan(SLOTS, VoteSum(), GumbelMechanism(0.4), "add_remove"),
    "units, gaussian": ReleasePlan(UNITS, ProbabilitySum(), GaussianMechanism(1.7), "add_remove"),
    "slots, permute and flip": ReleasePlan(SLOTS, VoteSum(), PermuteAndFlipMechanism(3.0), "replace_one"),
    "slots, logits": ReleasePlan(SLOTS, ClippedLogitMean(2.0, 5), GumbelMechanism(0.4), "add_remove"),
    "units, differences": ReleasePlan(UNITS, ClippedDifferenceMean(2.0, 5), GumbelMechanism(0.4), "add_remove"),
    "gradients": ReleasePlan(UNITS, ClippedGradientSum(0.1), GaussianMechanism(1.7), "replace_one"),
    "keywords": ReleasePlan(UNITS, KeywordSum(), JointExponentialMechanism(0.7, 3), "add_remove"),
    "confident": ReleasePlan(SLOTS, VoteSum(), ConfidentGNMaxMechanism(1.0, 1.0, threshold=3.0), "add_remove"),
}
WIDE = 101


def test_every_mechanism_is_audited_and_those_of_every_component_have_a_planted_bug() -> None:
    assert {type(plan.mechanism) for plan in PLANS.values()} == {
        GumbelMechanism,
        GaussianMechanism,
        *PROVED["mechanism"],
    }
    assert all(any(f": {name}, " in game for game, _ in GAME_PLANTS.values()) for name in MECHANISMS)


PARTS: dict[str, Callable[[ReleasePlan], Any]] = {
    "rate": component_checks.check_sampler_rate,
    "places": component_checks.check_unit_places,
    "contribution": component_checks.check_row_contribution,
    "noise": lambda release: component_checks.check_noise_scale(release, width=WIDE),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("plan", PLANS)
def test_every_part_of_a_plan_is_sound(plan: str, part: str) -> None:
    is_none = (part == "places" and plan not in {"confident", *(name for name in PLANS if "slots" in name)}) or (
        (plan, part) == ("confident", "noise")
    )
    assert PARTS[part](PLANS[plan]).verdict == ("skipped" if is_none else "sound")


@pytest.mark.parametrize("rate", [0.002, 2e-4, 1e-5])
@pytest.mark.parametrize("kind", [PoissonUnits, lambda rate: PoissonSlots(rate, 1, 1)], ids=["units", "slots"])
def test_a_small_rate_is_looked_at_long_enough(kind: Callable[[float], Any], rate: float) -> None:
    plan = ReleasePlan(kind(rate), VoteSum(), GumbelMechanism(0.4), "add_remove")
    assert component_checks.check_sampler_rate(plan).verdict == "sound"


def thrice_the_rate(patch: pytest.MonkeyPatch) -> None:
    for kind in (PoissonSlots, PoissonUnits):
        real = kind.draw
        patch.setattr(
            kind,
            "draw",
            lambda self, n, *, rng, real=real: real(
                dataclasses.replace(self, sampling_rate=min(1.0, 3 * self.sampling_rate)), n, rng=rng
            ),
        )


def few_of_many(patch: pytest.MonkeyPatch) -> None:
    """As many units as there should be, all of them of one half: the middle bit of their places is set."""

    def poisson(count: int, rate: float, rng: Any) -> Any:
        known = [unit for unit in range(count) if unit & 2]
        chosen = rng.choice_without_replacement(len(known), min(rng.binomial(count, rate), len(known)))
        return [known[place] for place in chosen]

    patch.setattr(mechanisms, "poisson", poisson)


def one_draw_for_the_rest(patch: pytest.MonkeyPatch) -> None:
    """The candidates behind the fourth share a draw, so that the choice among them has no noise."""

    def choose(self: Any, total: Any, standard_noise: Any) -> Any:
        noise, scores = standard_noise(total.value.size), total.value - total.value.max()
        noise[4:] = noise[4:].mean() if noise.size > 4 else noise[4:]
        index = int((scores + self._scale(total) * noise).argmax())
        return mechanisms.Release(index=index, values=None, event=self.event)

    patch.setattr(mechanisms.NoisyMax, "_choose", choose)


def first_alone(noise: np.ndarray) -> np.ndarray:
    """The numbers behind the 32nd have no noise: the draws are too few, or a loop ends early."""
    return np.where(np.arange(noise.size) < 32, noise, 0.0)


def in_blocks(noise: np.ndarray) -> np.ndarray:
    """Every 32 numbers have the noise of the first ones."""
    return np.resize(noise[:32], noise.shape)


def no_bound_on_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ProbabilitySum, "bounded_rows", lambda self, rows, **_: np.array(rows, float))


def only_finite(patch: pytest.MonkeyPatch) -> None:
    """Rows are made finite, and no more."""
    patch.setattr(
        ProbabilitySum, "bounded_rows", lambda self, rows, **_: np.nan_to_num(np.array(rows, float), posinf=2**10)
    )


PART_PLANTS: dict[str, tuple[str, str, plant.Plant]] = {
    "thrice the rate, slots": ("slots, gumbel", "rate", thrice_the_rate),
    "thrice the rate, units": ("units, gaussian", "rate", thrice_the_rate),
    "few of many, slots": ("slots, gumbel", "rate", few_of_many),
    "few of many, units": ("units, gaussian", "rate", few_of_many),
    "everybody": ("units, gaussian", "rate", plant.always_sampled),
    "one sample for all": ("units, gaussian", "rate", plant.one_sample_for_all_queries),
    "with replacement": ("units, gaussian", "rate", plant.unit_drawn_with_replacement),
    "a unit in every slot": ("slots, gumbel", "places", plant.overlapping_slots),
    "slots in order": ("slots, gumbel", "places", plant.slots_in_order),
    "no bound on rows": ("units, gaussian", "contribution", no_bound_on_rows),
    "rows made finite": ("units, gaussian", "contribution", only_finite),
    "no clip of logits": ("slots, logits", "contribution", no_clip_of_logits),
    "no clip of gradients": ("gradients", "contribution", no_clip_of_gradients),
    "sensitivity of one": ("slots, gumbel", "contribution", lambda p: _smaller(p, VoteSum)),
    "one draw for many candidates": ("slots, gumbel", "noise", one_draw_for_the_rest),
    "a third of the gumbel noise missing": ("slots, gumbel", "noise", plant.scaled(0.65)),
    "a tenth of the gaussian noise missing": ("units, gaussian", "noise", plant.scaled(0.9)),
    "a third of the exponential noise missing": ("slots, permute and flip", "noise", plant.scaled(0.65)),
    "gaussian noise for the first alone": ("gradients", "noise", plant.gaussian(first_alone)),
    "gumbel noise for the first alone": ("slots, gumbel", "noise", plant.gumbel(first_alone)),
    "gaussian noise in blocks": ("gradients", "noise", plant.gaussian(in_blocks)),
    "gumbel noise in blocks": ("slots, gumbel", "noise", plant.gumbel(in_blocks)),
    "choice among the first keywords": ("keywords", "noise", among_the_first_keywords),
    "noise used twice": ("units, gaussian", "noise", plant.used_twice(plant.gaussian)),
    "one noise for all coordinates": ("units, gaussian", "noise", plant.gaussian(lambda x: np.full_like(x, x[0]))),
    "keywords at half of the scale": ("keywords", "noise", sharper_keywords),
    "noise of a step missing": ("gradients", "noise", plant.scaled(0.9)),
}


def _smaller(patch: pytest.MonkeyPatch, kind: type) -> None:
    from langchain_dpicl.privacy.mechanisms.bounded import Sensitivity

    patch.setattr(kind, "sensitivity", lambda self, **_: Sensitivity(l2=1.0, range=1.0, linf=1.0))


@pytest.mark.parametrize("bug", PART_PLANTS)
def test_a_planted_bug_is_caught_in_a_part(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, part, plants = PART_PLANTS[bug]
    plants(monkeypatch)
    assert plant.seen_in_two(lambda: PARTS[part](PLANS[plan]).verdict == "violated")


# --- samples as the engine sees them --------------------------------------------------------------------------------------

SAMPLED = {
    "voting": {"mechanism": "gumbel"},
    "free_form": {"aggregation": "embedding"},
    "pate": {"mechanism": "gumbel"},
    "generation": {"mechanism": "gumbel"},
    "dpsgd": {},
}


@pytest.mark.parametrize("rows", ["slots", "units"])
@pytest.mark.parametrize("method", SAMPLED)
def test_samples_are_drawn_anew_at_the_charged_rate(method: str, rows: str) -> None:
    options = {**SAMPLED[method], "rows": rows, "adjacency": "add_remove"}
    assert suite.check_inclusion(method, options).verdict == "sound"
    if rows == "slots" and method != "dpsgd":
        assert suite.check_one_place(method, options).verdict == "sound"


SAMPLE_PLANTS = {
    "always": plant.always_sampled,
    "one for all": plant.one_sample_for_all_queries,
    "with replacement": plant.unit_drawn_with_replacement,
}


@pytest.mark.parametrize("bug", SAMPLE_PLANTS)
@pytest.mark.parametrize("method", SAMPLED)
def test_a_planted_sampler_is_caught_as_the_engine_sees_it(
    method: str, bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    SAMPLE_PLANTS[bug](monkeypatch)
    options = {**SAMPLED[method], "rows": "units", "adjacency": "add_remove"}
    assert plant.seen_in_two(lambda: suite.check_inclusion(method, options).verdict == "violated")


@pytest.mark.parametrize("method", ["voting", "free_form", "pate", "generation"])
def test_planted_overlapping_slots_are_caught_as_the_engine_sees_them(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant.overlapping_slots(monkeypatch)
    options = {**SAMPLED[method], "rows": "slots", "adjacency": "add_remove"}
    assert plant.seen_in_two(lambda: suite.check_one_place(method, options).verdict == "violated")


TEXT_CHECKS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "samples": lambda options: suite.check_inclusion("generation", options),
    "noise": lambda options: component_checks.judge_freshness(*suite.token_coins(options)),
}


@pytest.mark.parametrize("mechanism", ["gumbel", "gaussian", "permute_and_flip", "clip_and_blend"])
@pytest.mark.parametrize("redraw_every", [1, 3])
@pytest.mark.parametrize("check", TEXT_CHECKS)
def test_tokens_of_one_text_have_samples_and_noise_of_their_own(check: str, redraw_every: int, mechanism: str) -> None:
    for rows in ("slots", "units"):
        options = {"rows": rows, "adjacency": "add_remove", "mechanism": mechanism, "redraw_every": redraw_every}
        assert TEXT_CHECKS[check](options).verdict == "sound"


TEXT_PLANTS = {
    "one sample for a text": ("samples", plant.one_sample_per_text),
    "one sample for the same start": ("samples", plant.one_sample_for_the_same_start),
    "one noise for a text": ("noise", plant.one_noise_per_text),
}


@pytest.mark.parametrize("redraw_every", [1, 3])
@pytest.mark.parametrize("bug", TEXT_PLANTS)
def test_a_planted_bug_within_a_text_is_caught(bug: str, redraw_every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check, plants = TEXT_PLANTS[bug]
    plants(monkeypatch)
    options = {"rows": "units", "adjacency": "add_remove", "mechanism": "gumbel", "redraw_every": redraw_every}
    assert plant.seen_in_two(lambda: TEXT_CHECKS[check](options).verdict == "violated")


# --- one run with many canaries -------------------------------------------------------------------------------------------

RUN = {"noise_multiplier": None, "epsilon": 1.5, "delta": 1e-8, "steps": 8}


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_canaries_of_one_run_tell_no_more_than_it_is_charged(rate: float) -> None:
    found = component_games.canaries({**RUN, "sampling_rate": rate})
    assert found.verdict == "sound"
    assert found.delta == (1e-8 if rate == 1.0 else 1e-12)
    assert found.claimed_epsilon > 0.95 * 1.5
    assert (found.claimed_epsilon <= 1.5) == (rate == 1.0)


def no_noise(patch: pytest.MonkeyPatch) -> None:
    from tests.contracts.doubles import FixedDraws

    patch.setattr(SecureRandom, "gaussian_draws", lambda self, n: FixedDraws(np.zeros(n)))


@pytest.mark.parametrize("rate", [1.0, 0.5])
@pytest.mark.parametrize("bug", [no_noise, plant.scaled(0.04), no_clip_of_gradients], ids=["none", "little", "no clip"])
def test_a_planted_bug_is_caught_by_canaries(bug: plant.Plant, rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    assert plant.seen_in_two(lambda: component_games.canaries({**RUN, "sampling_rate": rate}).verdict == "violated")


def test_an_eighth_of_the_noise_is_planted_and_caught_without_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    plant.scaled(0.125)(monkeypatch)
    assert plant.seen_in_two(lambda: component_games.canaries({**RUN, "epsilon": 3.0}).verdict == "violated")


def test_a_claim_beyond_what_guesses_can_prove_is_undecided_and_a_whole_audit_leaves_it_out() -> None:
    found = component_games.canaries({**RUN, "epsilon": 30.0, "steps": 2})
    assert found.verdict == "undecided"
    assert "proves too little to tell" in str(found)


# --- whole audits -----------------------------------------------------------------------------------------------------------


def test_a_whole_audit_with_a_planted_bug_is_violated_and_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from langchain_dpicl.audit.targets import voter_of

    voter = voter_of(("1,0",), public_size=400, num_slots=10, shots_per_slot=2, max_queries=20)
    report = audit(voter, controls=True)  # a control is missed with a chance of 1e-6
    assert report.verdict == "sound"
    assert {result.verdict for result in report.results if result.check.startswith("control")} == {"sound", "skipped"}
    monkeypatch.setattr(mechanisms, "ROUND_UP", 0.5)
    wanted = {"noise: scale, at your own size", "one answer: gumbel, slots, add_remove"}
    assert plant.seen_in_two(lambda: wanted <= {result.check for result in audit(voter).violations()})
