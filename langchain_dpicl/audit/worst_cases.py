"""Lists the worst-case games for each mechanism, row shape and neighbouring relation."""

# The noise is the audit's own: one release has a mu, range or epsilon of about 2, where few answers reveal a wrong
# scale; logits have clip 2 and the default temperature. Everything else is the user's. Every sample holds the target:
# amplification would hide a wrong noise in any affordable number of runs, so `sampled` and `parts` audit sampling.

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from langchain_dpicl.audit.closed_forms import index_law, odds_law, vector_law
from langchain_dpicl.audit.game import Game
from langchain_dpicl.audit.generation_games import CANARY_LENGTH, CLIP, StepGame, TokenGame
from langchain_dpicl.audit.query_games import FreeFormGame, LabelGame, VotingGame
from langchain_dpicl.privacy.extensions.logit_sums import LOGIT_MECHANISMS

YES, NO = "1,0", "0,1"
LOUD_A, LOUD_B, LEANS_B = "40,-40,0", "-39,39,0", f"{math.log(0.25)},{math.log(0.75)},-40"
_SURE_B, _BYSTANDER = (-40.0, 40.0, -40.0), (0.0, 0.0, math.log(2.0))
_TEST_NOISE = {"gumbel": 0.5, "permute_and_flip": 0.6, "gaussian": 0.5, "joint_exponential": 0.5}
_ROOT = math.sqrt(2.0)
_NEVER_REJECTS = -100.0

# Runs of each side at which half of the noise is seen with a chance of .99 and more; see tests of the powers.
_RUNS = {
    ("gumbel", "slots"): 340,
    ("gumbel", "units"): 680,
    ("permute_and_flip", "slots"): 760,
    ("permute_and_flip", "units"): 760,
    ("gaussian", "slots"): 200,
    ("gaussian", "units"): 2_600,
}


def shape_of(rows: str, adjacency: str, sampling: str = "poisson") -> dict[str, Any]:
    """Returns the options of a shape of rows, at which every sample holds everybody."""
    return {"rows": rows, "adjacency": adjacency, **({} if sampling == "poisson" else {"sampling": sampling})}


def _is_moved(rows: str, adjacency: str) -> bool:
    """Returns whether the target's vote changes, instead of appearing."""
    return rows == "slots" or adjacency == "replace_one"


def _two(mechanism: str, rows: str, adjacency: str, *, sampling: str) -> dict[str, Any]:
    """Returns data sets and noise-free sums of two candidates where the mechanism tells most.

    Gumbel and Gaussian noise: the vote of the only slot changes, or comes alone. Permute-and-flip: a tie against a gap.
    An empty slot is asked too, and votes for the second.
    """
    is_fixed = sampling in {"fixed", "partition"}
    if not _is_moved(rows, adjacency):
        return {"units": (YES,), "neighbour": (), "sums": ((1.0, 0.0), (0.0, 0.0)), "size": 1}
    ties = mechanism == "permute_and_flip"
    beside = (NO,) if ties and (rows == "units" or is_fixed) else ()
    gone = (NO,) if adjacency == "replace_one" else ()
    sums = ((1.0, 1.0), (0.0, 2.0)) if ties else ((1.0, 0.0), (0.0, 1.0))
    return {"units": (YES, *beside), "neighbour": (*gone, *beside), "sums": sums, "size": 1 + ties}


def vote_cases(
    kind: type[VotingGame | LabelGame],
    *,
    mechanism: str,
    rows: str,
    adjacency: str,
    sampling: str = "poisson",
    has_vectors: bool = False,
    abstains: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Iterator[Game]:
    """Yields the worst cases of votes for labels; `has_vectors` where noisy votes leave as well."""
    noise, moved = _TEST_NOISE[mechanism], _is_moved(rows, adjacency)
    pair = _two(mechanism, rows, adjacency, sampling=sampling)
    terms = {
        **shape_of(rows, adjacency, sampling),
        "mechanism": mechanism,
        "noise_multiplier": noise,
        **(options or {}),
    }
    terms["public_size"] = pair["size"]
    name = f"one answer: {mechanism}, {rows}, {adjacency}"
    range_, length = (2.0, _ROOT) if moved else (1.0, 1.0)
    sides: dict[str, Any] = {"units": pair["units"], "neighbour": pair["neighbour"]}
    if has_vectors:
        direction = (1.0, -1.0) if moved else (1.0, 0.0)
        ends = tuple(sum(a * b for a, b in zip(direction, sums, strict=True)) for sums in pair["sums"])
        middle = sum(ends) / 2
        scale = noise * length * (_ROOT if moved else 1.0)
        law = vector_law((ends[0], ends[1]), scale=scale, threshold=middle)
        yield kind(name=name, **sides, runs=200, options=terms, direction=direction, threshold=middle, law=law)
        return
    law = index_law(mechanism, pair["sums"], scale=noise * (length if mechanism == "gaussian" else range_))
    runs = _RUNS[mechanism, "slots" if moved else "units"]
    yield kind(name=name, **sides, runs=runs, options=terms, law=law)
    if sampling == "poisson" and adjacency == "add_remove" and "teachers" not in terms and mechanism == "gumbel":
        yield _on_a_sample(kind, terms, moved=moved)
    if abstains and mechanism == "gumbel":
        yield _abstaining(kind, terms, noise=noise, moved=moved, mechanism=mechanism)


def _on_a_sample(kind: type[VotingGame | LabelGame], terms: Mapping[str, Any], *, moved: bool) -> Game:
    """Returns the game on a secret sample that holds the target every fourth time.

    Its law is about the rate, of a factor of 2 alone: everybody is in every sample. With half of the noise, or at twice
    the rate, a game of this size shows nothing: other checks look at those.
    """
    noise, rate = 1 / 3, 0.25
    with_target = index_law("gumbel", ((1.0, 0.0), (0.0, float(moved))), scale=noise * (2.0 if moved else 1.0))

    def law(factor: float) -> tuple[float, float]:
        given_in, without = with_target(1.0)
        in_sample = 1.0 if factor > 1.0 else rate
        return in_sample * given_in + (1.0 - in_sample) * without, without

    return kind(
        name=f"one answer on a secret sample: gumbel, {terms['rows']}, add_remove",
        units=(YES,),
        neighbour=(),
        runs=300,
        options={**terms, "public_size": 4, "num_slots": 1, "noise_multiplier": noise},
        law=law,
        power_for="everybody in every sample",
    )


def _abstaining(
    kind: type[VotingGame | LabelGame], terms: Mapping[str, Any], *, noise: float, moved: bool, mechanism: str
) -> Game:
    """Returns the game about the candidate to abstain: a constant between what the label has with and without."""
    units: tuple[str, ...]
    neighbour: tuple[str, ...]
    if moved:
        sums, size, units, neighbour = ((1.0, 0.0, 0.5), (0.0, 1.0, 0.5)), 1, (YES,), ()
        neighbour = (NO,) if terms["adjacency"] == "replace_one" else neighbour
    else:
        sums, size, units, neighbour = ((2.0, 0.0, 1.5), (1.0, 0.0, 1.5)), 3, (YES, YES), (YES,)
    return kind(
        name=f"one answer or none: {mechanism}, {terms['rows']}, {terms['adjacency']}",
        units=units,
        neighbour=neighbour,
        runs=1_400 if moved else 700,
        options={**terms, "public_size": size, "abstain_below": 0.5},
        law=index_law(mechanism, sums, scale=noise * (2.0 if moved else 1.0)),
    )


def confident_cases(*, rows: str, adjacency: str, teachers: str, sampling: str = "poisson") -> Iterator[Game]:
    """Yields the worst cases of Confident-GNMax: its test, and its answer."""
    noise = 0.5
    sampled = {} if teachers == "fixed" else {**shape_of(rows, adjacency, sampling)}
    terms = {**sampled, "adjacency": adjacency, "teachers": teachers}
    moved = _is_moved(rows, adjacency)
    is_dealt = rows == "units" or teachers == "fixed" or sampling == "fixed"
    # Between a tie and two votes for the other, or none and one, the largest count moves by one.
    beside = (NO,) if moved and is_dealt else ()
    counts = (1.0, 2.0) if moved else (1.0, 0.0)
    middle = sum(counts) / 2
    law = vector_law((-counts[0], -counts[1]), scale=noise, threshold=-middle)
    yield LabelGame(
        name=f"one test: confident_gnmax, {rows}, {adjacency}",
        units=(YES, *beside),
        neighbour=((NO,) if adjacency == "replace_one" else ()) + beside,
        runs=200,
        options={**terms, "public_size": 2 if moved else 1, "confident": (middle, noise, noise)},
        question="test",
        law=law,
    )
    pair = _two("gaussian", rows, adjacency, sampling="partition" if teachers == "fixed" else sampling)
    scale = noise * (_ROOT if moved else 1.0)
    yield LabelGame(
        name=f"one answer: confident_gnmax, {rows}, {adjacency}",
        units=pair["units"],
        neighbour=pair["neighbour"],
        runs=200 if moved else 2_600,
        options={**terms, "public_size": pair["size"], "confident": (_NEVER_REJECTS, noise, scale)},
        question="answer",
        law=index_law("gaussian", pair["sums"], scale=scale),
    )


def free_form_cases(*, aggregation: str, rows: str, adjacency: str, sampling: str = "poisson") -> Iterator[Game]:
    """Yields the worst case of answers in free form: opposite answers, or one keyword."""
    moved = _is_moved(rows, adjacency)
    gone = ("no",) if adjacency == "replace_one" else ()
    terms = {**shape_of(rows, adjacency, sampling), "aggregation": aggregation, "noise_multiplier": 0.5}
    beside: tuple[str, ...] = ()
    if aggregation == "keywords":
        # The gap to the largest count, over twice the multiplier times the range, is what one keyword loses: that is
        # half of what a sequence of several may lose, and is charged.
        law = index_law("gumbel", ((1.0, 0.0), (0.0, float(moved))), scale=2.0 * 0.5 * (2.0 if moved else 1.0))
        runs = 400
    elif moved:
        law, runs = vector_law((1.0, -1.0), scale=0.5 * 2.0, threshold=0.0), 200
    else:
        # One vector of length 1 comes to two that lean the other way by half of it.
        beside, terms["public_size"] = ("up", "down"), 3
        law, runs = vector_law((0.5, -0.5), scale=0.5, threshold=0.0), 200
    yield FreeFormGame(
        name=f"one answer: {aggregation}, {rows}, {adjacency}",
        units=("yes", *beside),
        neighbour=(*gone, *beside),
        runs=runs,
        options=terms,
        law=law,
        is_tight=aggregation != "keywords",
    )


def token_cases(
    *, mechanism: str, rows: str, adjacency: str, sampling: str = "poisson", rule: Mapping[str, Any] | None = None
) -> Iterator[Game]:
    """Yields the worst case of one generated token; `rule` holds the parameters of a logit mechanism."""
    moved = _is_moved(rows, adjacency)
    is_logit = mechanism in LOGIT_MECHANISMS
    noise = 0.5 if is_logit else _TEST_NOISE[mechanism]
    terms = {**shape_of(rows, adjacency, sampling), "mechanism": mechanism, "noise_multiplier": noise, **(rule or {})}
    name = f"one token: {mechanism}, {rows}, {adjacency}"
    gone = (LOUD_B,) if adjacency == "replace_one" else ()
    sides: dict[str, Any] = {"units": (LOUD_A,), "neighbour": gone, "public": _SURE_B}
    odds = odds_law((1.0, -1.0) if moved else (2.0, 0.0))
    if is_logit:
        sides["public"] = _BYSTANDER
        if moved and adjacency == "add_remove":
            # Of a slot's two records the loudest speaks; without the target the other does.
            sides |= {"units": (LOUD_A, LOUD_B), "neighbour": (LOUD_B,)}
            terms |= {"shots_per_slot": 2, "public_size": 2, "num_slots": 1}
        runs = 1_100 if moved else 2_100
        yield TokenGame(name=name, **sides, runs=runs, options=terms, kept=("a", "b"), share=0.4, law=odds)
        return
    if mechanism == "gumbel":
        runs = 640 if moved else 1_400
        yield TokenGame(
            name=name, **sides, runs=runs, options=terms, kept=("a", "b"), share=0.7 if moved else 0.6, law=odds
        )
        return
    sums: Any = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0))
    runs = 340
    if mechanism == "permute_and_flip":
        runs, terms["public_size"] = 1_600, 2
        if moved:
            beside = (LOUD_B,) if rows == "units" or sampling == "fixed" else ()
            sums = ((1.0, 1.0, 0.0), (0.0, 2.0, 0.0))
            sides |= {"units": (LOUD_A, *beside), "neighbour": (*gone, *beside)}
        else:
            sums, terms["public_size"] = ((1.0, 0.0, 0.0), (0.0, 0.0, 0.0)), 1
    elif not moved:
        sums, terms["public_size"], runs = ((1.25, 0.75, 0.0), (0.25, 0.75, 0.0)), 2, 2_000
        sides |= {"units": (LOUD_A, LEANS_B), "neighbour": (LEANS_B,)}
    length = (_ROOT if moved else 1.0) if mechanism == "gaussian" else (2.0 if moved else 1.0)
    yield TokenGame(name=name, **sides, runs=runs, options=terms, law=index_law(mechanism, sums, scale=noise * length))


def step_cases(*, adjacency: str) -> Iterator[Game]:
    """Yields the worst case of a training step: the longest gradient, which goes or turns round."""
    moved = adjacency == "replace_one"
    ends, scale = (1.0, -1.0 if moved else 0.0), 0.5 * (2.0 if moved else 1.0)
    yield StepGame(
        name=f"one training step: gaussian, {adjacency}",
        units=(f"0:{CANARY_LENGTH * CLIP}",),
        neighbour=(f"0:{-CANARY_LENGTH * CLIP}",) if moved else (),
        runs=220,
        options={"adjacency": adjacency, "noise_multiplier": 0.5},
        direction=(1.0, 0.0, 0.0, 0.0),
        threshold=sum(ends) / 2,
        far=1.0 + 2.0 * scale,
        law=vector_law((-ends[0], -ends[1]), scale=scale, threshold=-sum(ends) / 2),
    )
