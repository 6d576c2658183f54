"""A black-box audit of `DPVotingRunnable.invoke`: no answer gives away more than its ticket is charged for.

The noise is a test's: one release has a mu (Gaussian), range (Gumbel) or epsilon (permute-and-flip) of 2 to 4, where
few answers tell a wrong scale. Every check of the sound package fails by chance with probability at most 1e-6
(`ALARM`), exactly; there are 25 of them. Every check has positive controls: bugs planted in the package, under which
the same check must fail. A planted game stops at its first refutation and may go on to four times the size of the
sound one: then each is missed with probability below 1e-12.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os

import numpy as np
import pytest

from tests import audit_plants as plant
from tests.audit_games import QUERY, Game, ReadVotes, is_fair_and_fresh, refutations, score_faults, voter_of

YES, NO, LEANS_NO = "1,0", "0,1", "0.25,0.75"
UNITS, PERMUTE_AND_FLIP = {"rows": "units"}, {"mechanism": "permute_and_flip"}
SAMPLED = {"public_size": 4, "num_slots": 1, "noise_multiplier": 1 / 3}  # a quarter of the samples hold a unit

# --- games: worst cases of every row shape, mechanism and adjacency -------------------------------------------------

GAMES = {
    # The vote of the only slot changes: margin +1 against -1. An empty slot is asked too, and votes no.
    "slot, gumbel": Game(units=(YES,), neighbour=(), runs=1000, options={"noise_multiplier": 0.25}),
    "slot, gaussian index": Game(units=(YES,), neighbour=(), runs=800, options={"mechanism": "gaussian"}),
    "three slots, gumbel": Game(units=(YES,), neighbour=(), runs=200, options={"public_size": 3}),
    # A tie against a gap of 2: there permute-and-flip loses all that it may.
    "slots, replaced, permute and flip": Game(
        units=(YES,),
        neighbour=(NO,),
        runs=800,
        options={"public_size": 2, "adjacency": "replace_one", **PERMUTE_AND_FLIP},
    ),
    "fixed sample, scores": Game(
        units=(YES, NO),
        neighbour=(NO, NO),
        runs=250,
        options={"public_size": 2, "adjacency": "replace_one", "sampling": "fixed"},
        direction=(1.0, -1.0),
        threshold=-1.0,
    ),
    # A soft vote of another unit puts the margin at +1/2 against -1/2.
    "units, gumbel": Game(
        units=(LEANS_NO, YES),
        neighbour=(LEANS_NO,),
        runs=300,
        options={**UNITS, "votes": "soft", "public_size": 2, "noise_multiplier": 0.25},
    ),
    "units, lone vote, gumbel": Game(units=(YES,), neighbour=(), runs=500, options=UNITS),
    "units, replaced, gumbel": Game(
        units=(YES,), neighbour=(NO,), runs=300, options={**UNITS, "adjacency": "replace_one", "noise_multiplier": 0.25}
    ),
    "units, scores": Game(units=(YES,), neighbour=(), runs=250, options=UNITS, direction=(1.0, 0.0), threshold=0.5),
    "units, permute and flip": Game(units=(YES,), neighbour=(), runs=500, options={**UNITS, **PERMUTE_AND_FLIP}),
    # Three votes are declared; the candidate to abstain stands at 1.5, the label at 2 or 1.
    "abstaining, gumbel": Game(
        units=(YES, YES), neighbour=(YES,), runs=600, options={**UNITS, "public_size": 3, "abstain_below": 0.5}
    ),
    "abstaining, gaussian": Game(
        units=(YES, YES),
        neighbour=(YES,),
        runs=200,
        options={**UNITS, "public_size": 3, "abstain_below": 0.5, "mechanism": "gaussian"},
    ),
    "sampled units, gumbel": Game(units=(YES,), neighbour=(), runs=250, options={**UNITS, **SAMPLED}),
    "sampled units, two sides": Game(units=(YES, NO), neighbour=(NO,), runs=300, options={**UNITS, **SAMPLED}),
    "sampled slot, gumbel": Game(units=(YES,), neighbour=(), runs=150, options=SAMPLED),
    # In order, all four pairs begin with no; without the first unit they would begin with yes.
    "pairs in slots": Game(
        units=(NO, YES, NO, YES, NO, YES, NO, YES),
        neighbour=(YES, NO, YES, NO, YES, NO, YES),
        runs=100,
        options={"public_size": 8, "num_slots": 4, "shots_per_slot": 2},
    ),
}


@pytest.mark.parametrize("name", [name for name in GAMES if name.endswith(("gumbel", "gaussian", "permute and flip"))])
def test_a_game_plays_the_mechanism_that_it_is_named_after(name):
    mechanism = GAMES[name].component(GAMES[name].units).plan.to_dict()["mechanism"]
    assert name.endswith(mechanism.replace("_", " "))


@pytest.mark.parametrize("name", GAMES)
def test_no_answer_gives_away_more_than_it_is_charged_for(name):
    """Clopper-Pearson bounds for every outcome and its complement; false alarm at most 1e-6 per game."""
    assert refutations(GAMES[name]) == []


HALF = math.sqrt(0.5)
# (game, bug). At its plain size the game finds the bug with a chance of at least 0.96, by exact binomial sums.
PLANTS = {
    "sigma over sqrt 2, index": ("slot, gaussian index", plant.sensitivity_of_one),
    "sigma halved, scores": ("fixed sample, scores", plant.scaled(0.5)),
    "sigma halved, units": ("units, scores", plant.scaled(0.5)),
    "gumbel scale over sqrt 2": ("slot, gumbel", plant.scaled(HALF)),
    "gumbel scale halved, units": ("units, gumbel", plant.scaled(0.5)),
    "exponential scale halved": ("slots, replaced, permute and flip", plant.scaled(0.5)),
    "exponential scale a third, units": ("units, permute and flip", plant.scaled(1 / 3)),
    "replaced units charged as added ones": ("units, replaced, gumbel", plant.replaced_charged_as_added),
    "noise on the first label only": ("units, lone vote, gumbel", plant.gumbel(lambda x: x * (np.arange(x.size) < 1))),
    "one noise for all labels": ("units, gumbel", plant.gumbel(lambda x: np.full_like(x, x[0]))),
    "no noise": ("slot, gumbel", plant.gumbel(np.zeros_like)),
    "half of it charged": ("slot, gumbel", plant.half_charged),
    "majority of three draws on one ticket": ("slot, gumbel", plant.majority_of_three),
    "tickets given back": ("sampled slot, gumbel", plant.never_burnt),
    "more slots than declared": ("slot, gumbel", plant.more_slots_than_declared),
    "votes over realised rows": ("units, lone vote, gumbel", plant.votes_over_realised_rows),
    "overlapping slots": ("three slots, gumbel", plant.overlapping_slots),
    "slots in order": ("pairs in slots", plant.slots_in_order),
    "a unit in two rows": ("units, gumbel", plant.unit_drawn_with_replacement),
    "everybody charged as a sample": ("sampled units, gumbel", plant.always_sampled),
    "redrawn until not empty": ("sampled units, gumbel", plant.redrawn_until(plant.not_empty)),
    "redrawn until unanimous": ("sampled units, two sides", plant.redrawn_until(plant.unanimous)),
    "abstaining without noise": ("abstaining, gumbel", plant.threshold_on_true_votes),
    "no noise on the candidate to abstain": (
        "abstaining, gumbel",
        plant.gumbel(lambda x: x * (np.arange(x.size) < x.size - 1)),
    ),
    "only labels that were voted for": ("units, lone vote, gumbel", plant.only_seen_labels),
}


@pytest.mark.parametrize("bug", PLANTS)
def test_a_planted_bug_is_caught_in_the_answers(bug, monkeypatch):
    name, plants = PLANTS[bug]
    plants(monkeypatch)
    game = GAMES[name]
    assert refutations(dataclasses.replace(game, runs=4 * game.runs), looks=21)


# --- released scores: the claimed noise on every label, fresh for every query -----------------------------------------

A, B, C, D = (",".join(str(int(i == j)) for i in range(4)) for j in range(4))
ROOT = math.sqrt(2.0)
DESIGNS = {
    # design: (units, further options, true votes, L2 sensitivity by its proof); an empty slot votes for the last label
    "slots": ((A,), {"public_size": 3}, (1, 0, 0, 2), ROOT),
    "fixed sample": (
        (A, B, B),
        {"public_size": 3, "adjacency": "replace_one", "sampling": "fixed"},
        (1, 2, 0, 0),
        ROOT,
    ),
    "units": ((A, B, B), {"public_size": 3, **UNITS}, (1, 2, 0, 0), 1.0),
    "units, replaced": ((A, C), {"public_size": 2, **UNITS, "adjacency": "replace_one"}, (1, 0, 1, 0), ROOT),
    "no units": ((), {"public_size": 2, **UNITS}, (0, 0, 0, 0), 1.0),
}


def scores_of(design, *, runs=200, path="invoke", **options):
    """Returns what is wrong with the scores of a design."""
    units, given, votes, sensitivity = DESIGNS[design]
    voter = voter_of(units, labels=("a", "b", "c", "d"), with_scores=True, noise_multiplier=0.7, **given, **options)
    voter = voter.with_receipts()
    if path == "invoke":
        answers = [voter.invoke(QUERY) for _ in range(runs)]
    elif path == "batch":
        answers = voter.batch([QUERY] * runs, {"max_concurrency": 4})
    else:
        answers = asyncio.run(voter.abatch([QUERY] * runs, {"max_concurrency": 4}))
    return score_faults(answers, votes, 0.7 * sensitivity)


@pytest.mark.parametrize("design", DESIGNS)
def test_every_label_has_fresh_noise_of_the_claimed_scale(design):
    """Variance of each label, law, correlations, repeats, grid, label; false alarm at most 1e-6 per design."""
    assert scores_of(design) == set()


@pytest.mark.parametrize("path", ["batch", "abatch"])
def test_noise_is_fresh_where_queries_run_at_once(path):
    """As above; false alarm at most 1e-6."""
    assert scores_of("slots", path=path) == set()


def only(*kept):
    """Noise on these of four labels."""
    return lambda noise: noise * np.isin(np.arange(noise.size), kept)


SCORE_PLANTS = {
    "sensitivity 1 for slots": ("slots", plant.sensitivity_of_one, "scale"),
    "replaced units charged as added ones": ("units, replaced", plant.replaced_charged_as_added, "scale"),
    "sigma over sqrt 2": ("units", plant.scaled(HALF), "scale"),
    "noise on the first label only": ("slots", plant.gaussian(only(0)), "scale"),
    "noise on all labels but the last": ("units", plant.gaussian(only(0, 1, 2)), "scale"),
    "one noise for all labels": ("units", plant.gaussian(lambda x: np.full_like(x, x[0])), "links"),
    "positive noise": ("units", plant.gaussian(np.abs), "law"),
    "noise used for two queries": ("units", plant.used_twice(plant.gaussian), "repeats"),
    "noise that leans on the query before": ("slots", plant.drifting(plant.gaussian), "links"),
    "coins seeded by the query": ("units", plant.seeded_per_query, "repeats"),
    "more slots than declared": ("slots", plant.more_slots_than_declared, "law"),
    "scores off the grid": ("slots", plant.off_the_grid, "grid"),
    "a label of the true votes": ("slots", plant.label_of_the_true_votes, "label"),
}


@pytest.mark.parametrize("bug", SCORE_PLANTS)
def test_a_planted_bug_is_caught_in_the_scores(bug, monkeypatch):
    design, plants, fault = SCORE_PLANTS[bug]
    plants(monkeypatch)
    assert fault in scores_of(design)


# --- freshness of what does not leave as scores --------------------------------------------------------------------


def tied_answers(runs=200):
    """Two labels that nobody votes for, so many times."""
    voter = voter_of((), **UNITS)
    return [voter.invoke(QUERY) == "yes" for _ in range(runs)]


def test_labels_of_one_query_are_drawn_anew_each_time():
    """A tie is a fair coin: answers, and changes of the answer, are binomial; false alarm at most 1e-6."""
    assert is_fair_and_fresh(tied_answers())


@pytest.mark.parametrize("plants", [plant.used_twice(plant.gumbel), plant.seeded_per_query], ids=["reused", "seeded"])
def test_reused_noise_is_caught_in_labels(plants, monkeypatch):
    """Pairs of equal answers: 400 of them change too often with a chance of 2e-13, 200 with one of .002."""
    plants(monkeypatch)
    assert not is_fair_and_fresh(tied_answers(400))


def samples_of(unit, runs=150):
    """Returns how often a unit that joins half of the samples stood in a row, query by query."""
    engine = ReadVotes()
    voter = voter_of((unit,), engine=engine, **UNITS, public_size=2, num_slots=1)
    found = []
    for _ in range(runs):
        engine.present = {}
        voter.invoke(QUERY)
        found.append(sum(engine.present.values()))
    return found


def is_sampled_as_charged(found):
    return max(found) <= 1 and is_fair_and_fresh([bool(times) for times in found])


def test_every_query_has_a_sample_of_its_own_at_the_charged_rate():
    """A unit that joins half of the samples is a fair coin, fresh for each query; false alarm at most 1e-6."""
    assert is_sampled_as_charged(samples_of(YES))


@pytest.mark.parametrize(
    "plants",
    [
        plant.always_sampled,
        plant.one_sample_for_all_queries,
        plant.unit_drawn_with_replacement,
        plant.redrawn_until(plant.not_empty),
    ],
    ids=["always", "one sample for all queries", "with replacement", "redrawn until not empty"],
)
def test_another_sampling_is_caught(plants, monkeypatch):
    plants(monkeypatch)
    assert not is_sampled_as_charged(samples_of(YES))


def scores_of_a_child():
    """Returns what a forked process, which begins with all of this one's state, is answered three times."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            voter = voter_of((A,), labels=("a", "b", "c", "d"), with_scores=True, public_size=3)
            answers = [list(voter.with_receipts().invoke(QUERY).scores.values()) for _ in range(3)]
            os.write(writable, repr(answers).encode())
        finally:
            os._exit(0)
    os.close(writable)
    with os.fdopen(readable, "rb") as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    assert told
    return told


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_two_processes_that_begin_alike_release_different_scores():
    """Twelve scores agree by chance with probability below 1e-50."""
    assert scores_of_a_child() != scores_of_a_child()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_seeded_noise_is_caught(monkeypatch):
    plant.seeded_once(monkeypatch)
    assert scores_of_a_child() == scores_of_a_child()


# --- the memo ---------------------------------------------------------------------------------------------------------


def told_to_two_tenants():
    """Returns scores and tickets of: one tenant, another, the first again."""
    voter = voter_of((A,), labels=("a", "b", "c", "d"), with_scores=True, public_size=3, memo_size=8)
    answers = [
        voter.with_receipts().invoke(QUERY, {"configurable": {"tenant": name}}) for name in ("one", "two", "one")
    ]
    return [tuple(answer.scores.values()) for answer in answers], [answer.receipt.tickets for answer in answers]


def test_the_memo_tells_nobody_what_another_tenant_was_told():
    """Four scores agree by chance with probability below 1e-16."""
    (one, two, again), tickets = told_to_two_tenants()
    assert one == again
    assert one != two
    assert tickets == [1, 1, 0]


def test_a_memo_for_everybody_is_caught(monkeypatch):
    plant.memo_for_everybody(monkeypatch)
    (one, two, _), tickets = told_to_two_tenants()
    assert one == two
    assert tickets == [1, 0, 0]
