"""Private evolution: no private text reaches the model, the noise there is, and one unit moves one vote.

Statistical tests fail with a chance of at most 1e-6 each where the code is right.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
from scipy import stats

from langchain_dpicl.audit.component_checks import check_row_contribution
from langchain_dpicl.audit.component_games import evolution_cases, evolution_of
from langchain_dpicl.audit.game import play
from langchain_dpicl.backends.rows.neighbour_rows import NearestRows
from langchain_dpicl.evolution import EvolutionTemplate, PrivateEvolution
from langchain_dpicl.exceptions import PrivateAccessError, RunInterruptedError
from langchain_dpicl.options import Noise
from langchain_dpicl.privacy.extensions.normalized_sums import UnitVectorSum
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.prompts import DPFewShotPromptTemplate
from tests import audit_plants as plant
from tests.canary import RECORD, VOTE, Recorder, aobserve, canaries_in, describe, leaks, observe
from tests.contracts.front_room import shown_by
from tests.doubles import sums_before_noise
from tests.evolution_doubles import RECORDS, SEARCH, Muse, Topical, budget_of, evolution

pytestmark = pytest.mark.usefixtures("remembered_prices")

CANARIES = [{"text": f"my card {RECORD} {place} {{q}}", "queue": f"{VOTE}"} for place in range(12)]
DECLARED = {"public_size": 12, "fields": ("queue",)}


# -- no private text reaches the model ---------------------------------------------------------------------------


def secretive(**options: Any) -> PrivateEvolution:
    return evolution(
        CANARIES,
        declared=DECLARED,
        **{"evolution": SEARCH.replace(rounds=3), "noise": Noise(multiplier=1.0), **options},
    )


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_the_model_is_asked_public_and_released_texts_alone_and_the_embeddings_see_the_records(is_async: bool) -> None:
    muse, embeddings = Muse(), Topical()
    made = secretive(llm=muse, embeddings=embeddings)
    asyncio.run(made.arun(progress=False)) if is_async else made.run(progress=False)
    public = {"a card", "a boat", "a film", "the rain"}
    asked = {"Write a text.\n\ntext:"}
    asked |= {
        "Rewrite the following text: say something similar in other words. Write nothing else.\n\n"
        f"text: {text}\n\nAnother text:"
        for text in public
    }
    assert set(muse.asked) <= asked
    assert len(muse.asked) == made.plan.cost().public_calls
    assert canaries_in(repr(muse.asked) + repr(muse.options)) == []
    assert {text for text in embeddings.asked if RECORD in text} == {record["text"] for record in CANARIES}
    assert VOTE not in repr(embeddings.asked)  # another field of the records is not even embedded


@pytest.mark.planted
def test_a_planted_prompt_with_a_record_in_it_is_seen_by_the_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[str] = []
    votes, prompts = NearestRows._votes, EvolutionTemplate.variation_prompts

    def overheard(self: Any, units: Any, candidates: Any) -> Any:
        kept.extend(text for unit in units for text in unit.reveal())
        return votes(self, units, candidates)

    def quoting(self: Any, *args: Any) -> list[str]:
        return [f"{prompt}\nLike this: {kept[0]}" for prompt in prompts(self, *args)]

    monkeypatch.setattr(NearestRows, "_votes", overheard)
    monkeypatch.setattr(EvolutionTemplate, "variation_prompts", quoting)
    muse = Muse()
    secretive(llm=muse).run(progress=False)
    assert canaries_in(repr(muse.asked)) == [RECORD]


@pytest.mark.loopback
def test_nothing_shows_to_any_observer() -> None:
    recorder = Recorder()
    muse, made = Muse(callbacks=[recorder], verbose=True), []

    def action() -> Any:
        # Given, as one of the observers is a response cache: the same prompt would bring the same text each time.
        made.append(secretive(llm=muse, evolution=SEARCH.replace(rounds=3, candidates=["a card", "a boat"])))
        return made[0].run(progress=True)

    seen = observe(action, model_recorder=recorder)
    assert seen.error is None
    assert leaks(seen) == set()
    assert muse.asked
    assert canaries_in(repr(muse.asked)) == []
    room = made[0]
    for thing in (room, room._nearest, room._items, room.plan, seen.result, room._budget, room._budget.report()):
        assert canaries_in(shown_by(thing)) == []
    for line in room._budget._store.records():
        assert canaries_in(repr(line)) == []


@pytest.mark.loopback
async def test_nothing_shows_to_any_observer_of_an_awaited_template() -> None:
    recorder = Recorder()
    muse = Muse(callbacks=[recorder])
    from langchain_core.prompts import PromptTemplate

    async def made() -> Any:
        return await DPFewShotPromptTemplate.afrom_run(
            await PrivateEvolution.afrom_private_examples(
                PrivateExamples(CANARIES, **DECLARED),
                llm=muse,
                embeddings=Topical(),
                budget=budget_of(),
                epsilon=9e11,
                shots_per_label=1,
                evolution=SEARCH.replace(candidates=["a card", "a boat"]),  # the same prompt is answered from a cache
                noise=Noise(multiplier=1.0),
            ),
            example_prompt=PromptTemplate.from_template("{text}"),
            suffix="{input}",
        )

    seen = await aobserve(made, model_recorder=recorder)
    assert seen.error is None
    assert leaks(seen) == set()
    assert canaries_in(repr(muse.asked) + shown_by(seen.result)) == []


def test_while_units_vote_their_texts_stay_in_boxes_and_the_room_cannot_be_copied_away() -> None:
    said = iter(["a card", "a boat", "a film", "the rain"])
    made = secretive(llm=Muse(says=lambda prompt: next(said, OSError("out"))))
    with pytest.raises(RunInterruptedError) as caught:
        made.run(progress=False)
    assert len(made._nearest._held.reveal()) == 12
    assert canaries_in(describe(caught.value)) == []
    assert canaries_in(shown_by(made) + repr(vars(made)) + repr(vars(made._nearest))) == []
    assert copy.deepcopy(made) is made
    with pytest.raises(PrivateAccessError):
        pickle.dumps(made)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, ValueError, SystemExit], ids=lambda stop: stop.__name__)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_embeddings_that_fail_or_stop_on_a_record_show_nothing(stop: Any, is_async: bool) -> None:
    class Failing(Topical):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            if RECORD in texts[0]:
                raise stop(texts)
            return super().embed_documents(texts)

    made = secretive(embeddings=Failing(), evolution=SEARCH.replace(rounds=1))

    def run() -> Any:
        return asyncio.run(made.arun(progress=False)) if is_async else made.run(progress=False)

    if stop is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt) as caught:
            run()
        assert canaries_in(describe(caught.value)) == []
    else:
        assert len(run().examples) == 1  # every row abstained, and a release was made


# -- the noise, and one unit's vote ------------------------------------------------------------------------------


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_the_released_histogram_has_the_noise_that_is_priced(adjacency: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Squares of 400 counts over the variance, chi-squared; half of the variance and twice as much are distinguished."""
    topics = [f"topic{place:03}" for place in range(400)]
    made = evolution(
        ["topic000"] * 9,
        embeddings=Topical(topics),
        evolution=SEARCH.replace(rounds=1, num_survivors=400, num_variations=0, candidates=topics),
        budget=budget_of(adjacency=adjacency),
        noise=Noise(multiplier=3.0),
    )
    made.run(progress=False)
    votes = made.history[None][0]
    sensitivity = 1.0 if adjacency == "add_remove" else 2.0**0.5
    noise = np.array([votes[topic] - 9.0 * (topic == "topic000") for topic in topics]) / (3.0 * sensitivity)
    total = float(np.square(noise).sum())
    low, high = stats.chi2.ppf(5e-7, 400), stats.chi2.isf(5e-7, 400)
    assert low < total < high
    assert not low < total * 2.0 < high
    assert not low < total / 2.0 < high


USERS = [{"text": text, "user": f"u{place % 12}"} for place, text in enumerate(RECORDS)]
EVIL = ["card" * 4_000, "", "\x00\ud800", "{text} {0}", "the rain and a film and a boat and a card"]


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_a_unit_of_any_content_moves_a_histogram_by_its_sensitivity_at_most(adjacency: str) -> None:
    """Neighbours, with 1, 3 or 6 records of the unit that comes or changes; the candidates are the same for both."""
    declared = {"public_size": 13, "unit_key": "user", "records_per_unit": 6}
    worst = 0.0
    for number in (1, 3, 6):
        mine = [{"text": (EVIL * 2)[place + number % 3], "user": "target"} for place in range(number)]
        other = [{"text": "a film", "user": "target"}] if adjacency == "replace_one" else []
        sums = []
        for records in (USERS + mine, USERS + other):
            made = evolution(
                records,
                declared=declared,
                evolution=SEARCH.replace(
                    rounds=1, num_survivors=4, num_variations=0, candidates=["a card", "a boat", "a film", "the rain"]
                ),
                budget=budget_of(adjacency=adjacency),
            )
            sums.append(sums_before_noise(made.run, progress=False)[0])
        worst = max(worst, float(np.square(sums[0] - sums[1]).sum()))
    assert 0.9 <= worst <= (1.0 if adjacency == "add_remove" else 2.0) + 1e-12


# -- planted bugs, as the audit sees them ------------------------------------------------------------------------


def unnormalised(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(UnitVectorSum, "bounded_rows", lambda self, rows, *, width: np.asarray(rows, dtype=float))


def same_noise(patch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []

    def first(values: Any) -> Any:
        kept.append(values)
        return kept[0]

    plant.gaussian(first)(patch)


PLANTS: dict[str, tuple[Any, str]] = {
    "half of the noise": (plant.scaled(0.5), "add_remove"),
    "no noise": (plant.gaussian(np.zeros_like), "add_remove"),
    "a unit votes as often as it has records": (unnormalised, "add_remove"),
    "a unit votes twice": (plant.unit_drawn_with_replacement, "add_remove"),
    "a changed vote is charged as a new one": (plant.replaced_charged_as_added, "replace_one"),
    "the same coins in every round": (same_noise, "add_remove"),
}


@pytest.mark.planted
@pytest.mark.parametrize("bug", PLANTS)
def test_a_planted_bug_is_caught_by_a_worst_case(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a part of a plan, or of a game, at twice its size: half of the noise is then missed with less than 1e-6."""
    plants, adjacency = PLANTS[bug]
    plants(monkeypatch)
    if check_row_contribution(evolution_of((), 1, adjacency=adjacency).plan.release).verdict == "violated":
        return
    games = [dataclasses.replace(game, runs=2 * game.runs) for game in evolution_cases(adjacency=adjacency)]
    assert any(play(game).verdict == "violated" for game in games)


@pytest.mark.audited
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_the_worst_cases_are_sound(adjacency: str) -> None:
    for game in evolution_cases(adjacency=adjacency):
        found = play(game)
        assert (found.verdict, found.details) == ("sound", ())
        assert found.power is not None
        assert found.power >= 0.99


def test_the_audited_component_votes_on_both_candidates_in_every_round() -> None:
    made = evolution_of(("yes", "no"), 3)
    made.run(progress=False)
    assert [sorted(votes) for votes in made.history[None]] == [["no", "yes"]] * 3
