"""Votes, tests, samples and tickets of `PromptPATELabeler`: their law is the one that is claimed, fresh for every input.

Beside the games of `test_pate_audit`, which bound what answers tell. Every check of the sound package fails by chance
with probability at most 1e-6 (`ALARM`), exactly; there are 20 of them. Every check has positive controls: bugs planted
in the package, under which the same check must fail.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import ndtr

from langchain_dpicl.audit.targets import records_of_prompt
from langchain_dpicl.privacy.accounting.events import GaussianEvent, RepeatedEvent, SubsampledEvent
from tests import audit_plants as plant
from tests import pate_plants as pate
from tests.audit_games import ReadVotes, is_fair_and_fresh
from tests.pate_games import (
    FIXED,
    UNITS,
    confident_faults,
    labeler_of,
    presences,
    tickets_expected,
    tickets_left,
    vote_faults,
)

YES, NO = "1,0", "0,1"
HALF = math.sqrt(0.5)
ONE_SAMPLE, GAUSSIAN = {"teachers": "one_sample"}, {"mechanism": "gaussian"}
SAMPLED = {"public_size": 4, "num_slots": 1, "noise_multiplier": 1 / 3}  # a quarter of the samples hold a unit

# --- released votes: the claimed noise on every label, fresh for every input ------------------------------------------

A, B, C, D = (",".join(str(int(i == j)) for i in range(4)) for j in range(4))
LABELS = ("a", "b", "c", "d")
ROOT = math.sqrt(2.0)
DESIGNS = {
    # design: (units, further options, true votes, L2 sensitivity by its proof); an empty slot votes for the last label
    "fresh slots": ((A,), {"public_size": 3}, (1, 0, 0, 2), ROOT),
    "fresh units": ((A, B, B), {"public_size": 3, **UNITS}, (1, 2, 0, 0), 1.0),
    "one sample": ((A, B, B), {"public_size": 3, **UNITS, **ONE_SAMPLE}, (1, 2, 0, 0), 1.0),
    "fixed": ((A, B, B), {"public_size": 3, **FIXED}, (1, 2, 0, 0), ROOT),
    "no units": ((), {"public_size": 2, **UNITS}, (0, 0, 0, 0), 1.0),
}


def votes_of(design, *, runs=120):
    """Returns what is wrong with the released votes of a design."""
    units, given, votes, sensitivity = DESIGNS[design]
    labeler = labeler_of(units, runs, labels=LABELS, noise_multiplier=0.7, **GAUSSIAN, **given)
    return vote_faults(list(labeler.stream(progress=False)), votes, 0.7 * sensitivity)


@pytest.mark.parametrize("design", DESIGNS)
def test_every_label_has_fresh_noise_of_the_claimed_scale(design):
    """Variance of each label, law, correlations, repeats, grid, label; false alarm at most 1e-6 per design."""
    assert votes_of(design) == set()


VOTE_PLANTS = {
    "sigma over sqrt 2": ("one sample", plant.scaled(HALF), "scale"),
    "sigma over sqrt 2, fixed": ("fixed", plant.scaled(HALF), "scale"),
    "sensitivity 1 for slots": ("fresh slots", pate.moved_votes_of_length_one, "scale"),
    "noise on the first label only": ("fixed", plant.gaussian(lambda x: x * (np.arange(x.size) < 1)), "scale"),
    "one noise for all labels": ("fresh units", plant.gaussian(lambda x: np.full_like(x, x[0])), "links"),
    "noise used for two inputs": ("one sample", plant.used_twice(plant.gaussian), "repeats"),
    "noise that leans on the input before": ("fixed", plant.drifting(plant.gaussian), "links"),
    "more slots than declared": ("fresh slots", plant.more_slots_than_declared, "law"),
    "votes off the grid": ("fresh slots", plant.off_the_grid, "grid"),
}


@pytest.mark.parametrize("bug", VOTE_PLANTS)
def test_a_planted_bug_is_caught_in_the_votes(bug, monkeypatch):
    design, plants, fault = VOTE_PLANTS[bug]
    plants(monkeypatch)
    assert fault in votes_of(design)


def is_made_of_the_votes(runs=100):
    """Whether labels and rejections are what the released votes say, threshold included."""
    labeler = labeler_of((YES, YES), runs, public_size=3, abstain_below=0.5, **UNITS, **GAUSSIAN)
    entries = list(labeler.stream(progress=False))
    assert {entry.status for entry in entries} == {"labelled", "rejected"}  # one of them alone: below 1e-7
    best = [max(entry.votes, key=entry.votes.get) for entry in entries]
    kept = [max(entry.votes.values()) >= 1.5 for entry in entries]
    return [entry.label for entry in entries] == [
        label if is_kept else None for label, is_kept in zip(best, kept, strict=True)
    ]


def test_threshold_and_label_are_made_of_one_released_histogram():
    """No chance is involved but that both kinds occur."""
    assert is_made_of_the_votes()


def test_a_threshold_on_other_votes_than_the_released_ones_is_caught(monkeypatch):
    pate.threshold_on_the_true_histogram(monkeypatch)
    with pytest.raises(AssertionError):  # two true votes: never rejected
        assert is_made_of_the_votes()


# --- Confident-GNMax: the law of test and answer ----------------------------------------------------------------------

CONFIDENT = {
    "fresh": {"public_size": 4, **UNITS},  # at rate 1 every unit is a row
    "one sample": {"public_size": 4, **ONE_SAMPLE, **UNITS},
    "fixed": {"public_size": 4, **FIXED},
}
# The labels are tied, half a vote below the threshold; or one leads by two, and stands one above it.
VOTED = {"tied": ((YES, YES, NO, NO), 0.0, -0.5, 500), "apart": ((YES, YES, YES, NO), 2.0, 1.0, 250)}
SIGMA_TEST, SIGMA_VOTES = 1.0, 6.0


def law_of(teachers, voted):
    """Returns what is wrong with tests and answers of inputs that all have the same true votes."""
    units, lead, above, runs = VOTED[voted]
    largest = (len(units) + lead) / 2
    confident = (largest - above, SIGMA_TEST, SIGMA_VOTES)
    entries = list(labeler_of(units, runs, confident=confident, **CONFIDENT[teachers]).stream(progress=False))
    return confident_faults(entries, passed=ndtr(above / SIGMA_TEST), yes=ndtr(lead / (ROOT * SIGMA_VOTES)))


@pytest.mark.parametrize("voted", VOTED)
@pytest.mark.parametrize("teachers", CONFIDENT)
def test_test_and_answer_have_the_two_noises_that_were_asked_for(teachers, voted):
    """Binomial tests of passes, of answers given a pass, and of changes of both; false alarm at most 1e-6 each."""
    assert law_of(teachers, voted) == set()


LAW_PLANTS = {
    "one draw for test and answer": ("fixed", "tied", pate.one_draw_for_test_and_answer, "answer"),
    "one draw for test and answer, fresh": ("fresh", "tied", pate.one_draw_for_test_and_answer, "answer"),
    "sigmas swapped": ("fixed", "apart", pate.sigmas_swapped, "test"),
    "sigmas swapped, one sample": ("one sample", "apart", pate.sigmas_swapped, "test"),
    "sigmas swapped where they are read": ("fixed", "apart", pate.sigmas_swapped_where_they_are_read, "answer"),
    "threshold without noise": ("one sample", "tied", pate.threshold_without_noise, "test"),
    "noise used for two inputs": ("fresh", "tied", pate.used_for_two_inputs, "links"),
}


@pytest.mark.parametrize("bug", LAW_PLANTS)
def test_a_planted_bug_is_caught_in_tests_and_answers(bug, monkeypatch):
    teachers, voted, plants, fault = LAW_PLANTS[bug]
    plants(monkeypatch)
    assert fault in law_of(teachers, voted)


# --- who teaches ------------------------------------------------------------------------------------------------------

HALF_OF_THEM = {"public_size": 2, "num_slots": 1}


def of_fresh_samples(**options):
    """Two units; the second says no. Returns for each input whether the first was the slot's only one."""
    return presences((YES,), 120, **HALF_OF_THEM, **options)


def of_runs_of_one_sample(runs=45):
    """Returns for each of many runs, and each of its three inputs, whether the unit was in the slot."""
    return [presences((YES,), 3, **HALF_OF_THEM, **ONE_SAMPLE) for _ in range(runs)]


def is_one_sample_for_each_run(found):
    return all(len(set(run)) == 1 for run in found) and is_fair_and_fresh([run[0] for run in found])


@pytest.mark.parametrize("mechanism", ["gumbel", "permute_and_flip"])
def test_every_input_has_a_sample_of_its_own_at_the_charged_rate(mechanism):
    """A unit that joins half of the samples is a fair coin, fresh for each input; false alarm at most 1e-6."""
    assert is_fair_and_fresh(of_fresh_samples(mechanism=mechanism))


def test_one_sample_teaches_a_whole_run_and_is_another_in_the_next():
    """Within a run nothing changes; over runs a unit that joins half of them is a fair coin; at most 1e-6."""
    assert is_one_sample_for_each_run(of_runs_of_one_sample())


def test_the_two_ways_of_sampling_are_told_apart():
    """A fresh sample for each input is no sample of a run."""
    fresh = of_fresh_samples()
    assert not is_one_sample_for_each_run([fresh[place : place + 3] for place in range(0, 120, 3)])


@pytest.mark.parametrize(
    "plants",
    [pate.one_sample_for_all_inputs, pate.always_sampled, pate.shuffled_with_a_seed],
    ids=["one sample for all inputs", "always", "shuffled with a seed"],
)
def test_another_sampling_of_inputs_is_caught(plants, monkeypatch):
    plants(monkeypatch)
    assert not is_fair_and_fresh(of_fresh_samples())


@pytest.mark.parametrize(
    "plants",
    [pate.redrawn_inside_the_run, pate.always_sampled, pate.shuffled_with_a_seed, pate.one_sample_for_all_inputs],
    ids=["redrawn inside the run", "always", "shuffled with a seed", "one sample for all runs"],
)
def test_another_sampling_of_runs_is_caught(plants, monkeypatch):
    plants(monkeypatch)
    assert not is_one_sample_for_each_run(of_runs_of_one_sample())


class Spy(ReadVotes):
    """Keeps the records of each row asked so far, call by call; all records of a row are one text."""

    def __init__(self):
        self.prompts = []

    def score_choices(self, prompts, choices):
        self.prompts.append(["|".join(records_of_prompt(prompt)) for prompt in prompts])
        return super().score_choices(prompts, choices)


def rows_of_fixed_teachers(runs=3):
    """Returns the rows of every input of a run, by the units that stand in them."""
    engine = Spy()
    labeler = labeler_of(MANY, runs, engine=engine, **FIXED, public_size=len(MANY))
    assert len(list(labeler.stream(progress=False))) == runs
    return [rows for rows in engine.prompts if rows != [""]]  # without what is asked in public


MANY = tuple(f"{share / 12},{1 - share / 12}" for share in range(12))


def is_one_exact_partition(runs):
    """Whether everybody has one row, the same for every input of a run, and another one in another run."""
    is_exact = all(sorted(rows) == sorted(MANY) for run in runs for rows in run)
    is_kept = all(rows == run[0] for run in runs for rows in run)
    return is_exact and is_kept and runs[0][0] != runs[1][0]


def test_fixed_teachers_are_one_exact_partition_for_a_run():
    """Two runs deal twelve units alike with probability below 1e-8."""
    assert is_one_exact_partition([rows_of_fixed_teachers(), rows_of_fixed_teachers()])


@pytest.mark.parametrize(
    "plants",
    [pate.shuffled_with_a_seed, pate.redrawn_inside_the_run, pate.partition_with_replacement],
    ids=["shuffled with a seed", "redrawn inside the run", "with replacement"],
)
def test_another_partition_is_caught(plants, monkeypatch):
    plants(monkeypatch)
    assert not is_one_exact_partition([rows_of_fixed_teachers(), rows_of_fixed_teachers()])


# --- what is charged, and where a run stops ---------------------------------------------------------------------------


def ledger_of(teachers, *, max_answers):
    """Returns tickets left and expected, released inputs, answers, and whether anything was left to pay with."""
    options = {"confident": (2.0, 1.0, 1.0), **CONFIDENT[teachers]}
    if max_answers is not None:
        options["max_answers"] = max_answers
    labeler = labeler_of((YES, YES, NO, NO), 40, **options)
    entries = list(labeler.stream(progress=False))
    answered = sum(entry.status == "labelled" for entry in entries)
    expected = tickets_expected(labeler, len(entries), answered)
    return tickets_left(labeler), expected, len(entries), answered, labeler.queries_left


@pytest.mark.parametrize(("teachers", "most"), [("fresh", None), ("one sample", 5), ("fixed", 5), ("fixed", None)])
def test_a_run_stops_exactly_when_its_share_does(teachers, most):
    """Tests pass half of the time: all 40 inputs fail, or fewer than 5 pass, with probability below 1e-6."""
    left, expected, asked, answered, queries_left = ledger_of(teachers, max_answers=most)
    assert left == expected
    assert queries_left == 0
    assert answered == most if most else asked == 40


@pytest.mark.parametrize(
    "plants", [pate.answer_given_back, pate.never_burnt, pate.rejected_for_free], ids=["answer", "test", "rejected"]
)
def test_tickets_that_do_not_add_up_are_caught(plants, monkeypatch):
    """Of 40 inputs, each passing half of the time, all pass or none does with probability below 1e-11."""
    plants(monkeypatch)
    left, expected, *_ = ledger_of("fixed", max_answers=None)
    assert left != expected


def is_charged_at_its_rate(inputs=5):
    """Whether a run of one sample is charged for its inputs inside, and for the rate of the sample once."""
    labeler = labeler_of((YES,), inputs, **ONE_SAMPLE, **GAUSSIAN, **SAMPLED)
    inside = RepeatedEvent(GaussianEvent(1 / 3), inputs)
    return labeler.plan.tickets()[0].event == SubsampledEvent(inside, 1 / 4)


def test_one_sample_is_charged_for_its_inputs_inside_and_amplified_once():
    assert is_charged_at_its_rate()


@pytest.mark.parametrize(
    "plants", [pate.amplified_twice, pate.sample_charged_for_one_input], ids=["amplified twice", "for one input"]
)
def test_another_charge_for_one_sample_is_caught(plants, monkeypatch):
    plants(monkeypatch)
    assert not is_charged_at_its_rate()


def is_charged_for_tests_and_answers(teachers):
    """Whether what is charged in all is 20 tests and 7 answers, in terms of mu^2."""
    options = {**CONFIDENT[teachers], "confident": (2.0, 3.0, 5.0), "max_answers": 7}
    plan = labeler_of((YES, YES, NO, NO), 20, **options).plan
    root = 1.0 if options.get("rows") == "units" else ROOT
    paid = [(ticket.event, ticket.max_count) for ticket in plan.tickets()]
    assert all(isinstance(event, GaussianEvent) for event, _ in paid)
    spent = sum(count / event.noise_multiplier**2 for event, count in paid)
    return spent == pytest.approx(20 / 3.0**2 + 7 * root**2 / 5.0**2, rel=1e-12)


@pytest.mark.parametrize("teachers", ["one sample", "fixed"])
def test_a_sample_and_a_partition_pay_for_tests_and_answers_apart(teachers):
    assert is_charged_for_tests_and_answers(teachers)


@pytest.mark.parametrize(
    ("teachers", "plants"),
    [("fixed", pate.moved_votes_of_length_one), ("one sample", pate.sample_charged_for_one_input)],
    ids=["a moved vote charged as one that appears", "a sample charged for one input"],
)
def test_another_charge_for_tests_and_answers_is_caught(teachers, plants, monkeypatch):
    plants(monkeypatch)
    assert not is_charged_for_tests_and_answers(teachers)
