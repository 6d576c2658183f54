"""Slots read public wordings in turn: the place of a slot is public, that of a unit row is not."""

from __future__ import annotations

import itertools
import json
import logging
import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest

from langchain_dpicl import (
    Budget,
    DPFreeFormRunnable,
    DPRetrievalFreeFormRunnable,
    DPRetrievalVotingRunnable,
    FewShotTask,
    LabelAnswers,
    Noise,
    PrivateExamples,
    PromptPATEExampleSelector,
    Retrieval,
    Rows,
    Serving,
    verify_report,
)
from langchain_dpicl.backends.rows.label_rows import LabelRows
from langchain_dpicl.baselines import label_votes_without_privacy
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.options import Student
from langchain_dpicl.pate.labeler import LabellingJob
from langchain_dpicl.privacy.extensions.fixed_size_slots import BalancedSlots, PartitionedSlots
from langchain_dpicl.privacy.extensions.random_allocation import AllocatedSlots
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.privacy.mechanisms.release_plan import PoissonSlots, PoissonUnits, Sampler, assign
from langchain_dpicl.release import curator
from langchain_dpicl.release.curator import SlotRenderers
from langchain_dpicl.release.samples import FilteredQuery
from langchain_dpicl.retrieval import document_task
from langchain_dpicl.runs.answer_memo import scope_of_plan
from langchain_dpicl.runs.query_plan import compare_queries
from langchain_dpicl.voting import DPVotingRunnable
from tests.contracts.front_room import CANARY
from tests.contracts.neighbours import Fragile, fixed_coins
from tests.free_form_doubles import VECTORS, Writer
from tests.labelling_doubles import Spy, house, labeler, lines
from tests.retrieval_doubles import TopicEmbeddings

pytestmark = pytest.mark.usefixtures("remembered_prices")

SECOND = FewShotTask("B {text} is {answer}", "B {input} is", prefix="Say.", example_separator="; ")
THIRD = FewShotTask("C {text}: {answer}", "C {input}:")
TASK = FewShotTask("A {text} {answer}", "A {input}", wordings=(SECOND, THIRD))
SLOTS = Rows(slots=5, shots=2)
PLAIN = LabelAnswers(calibrate=False)


def private(texts: list[str], **options: Any) -> PrivateExamples:
    records = [{"text": text, "answer": "no"} for text in texts]
    return PrivateExamples(records, label_key="answer", labels=("yes", "no"), public_size=6, **options)


def voter(texts: list[str], engine: Any = None, *, adjacency: Any = "add_remove", **more: Any) -> DPVotingRunnable:
    options: dict[str, Any] = {"rows": SLOTS, "answers": PLAIN, "task": TASK, "noise": Noise(multiplier=2.0)}
    options |= {"budget": Budget(epsilon=50, delta=1e-4, adjacency=adjacency), "serving": Serving(memo_size=0)}
    options |= {"epsilon": 40, "max_queries": 3, **more}
    return DPVotingRunnable.from_private_examples(private(texts), llm=engine or Fragile(), **options)


def prompts_of(texts: list[str], **more: Any) -> list[str]:
    """The private prompts of one query, slot after slot."""
    engine = Fragile()
    voter(texts, engine, **more).invoke("why?")
    return list(engine.calls[-1])


def changed(some: list[str], others: list[str]) -> list[int]:
    return [slot for slot, (one, other) in enumerate(zip(some, others, strict=True)) if one != other]


# --- which wording a slot reads ---------------------------------------------------------------------------------------


def test_slots_read_the_wordings_in_turn_the_empty_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed_coins(monkeypatch)
    assert prompts_of(["a", "b", "c", "d"]) == [
        "A a no\n\nA why?",
        "Say.; B b is no; B why? is",
        "C c: no\n\nC why?:",
        "A d no\n\nA why?",
        "Say.; B why? is",
    ]


def test_a_row_is_calibrated_in_its_own_wording(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed_coins(monkeypatch)
    prompts = prompts_of(["a", "b", "c"], answers=LabelAnswers(calibrate=True, content_free=("N/A", "[]")))
    assert prompts[3:6] == [f"Say.; B b is no; B {asked} is" for asked in ("why?", "N/A", "[]")]
    assert [prompt[0] for prompt in prompts] == list("AAASSSCCCAAASSS")


def test_the_public_row_reads_the_first_wording() -> None:
    engine = Fragile()
    voter(["a"], engine).invoke("why?")
    assert engine.calls[0] == ("A why?",)


def test_variables_are_found_by_name_whatever_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed_coins(monkeypatch)
    turned = FewShotTask("B {text} {answer}", "B {who} asks {input}")
    engine = Fragile()
    task = FewShotTask("A {text} {answer}", "A {input} from {who}", wordings=[turned])
    voter(["a", "b"], engine, task=task).invoke({"input": "why?", "who": "Ann"})
    assert engine.calls[-1][:2] == ("A a no\n\nA why? from Ann", "B b no\n\nB Ann asks why?")


def test_labels_read_in_every_wording_as_the_task_says(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed_coins(monkeypatch)
    prompts = prompts_of(["a", "b"], task=TASK.replace(verbalizers={"yes": " aye", "no": " nay"}))
    assert prompts[:2] == ["A a nay\n\nA why?", "Say.; B b is nay; B why? is"]


# --- neighbours -------------------------------------------------------------------------------------------------------

SEATS = {"u": 3, "v": 2, "w": 0, "x": 3, "y": 3, "z": 1}
"""The slot of each unit, by a coin of its own: slot 1 is empty without z, and slot 3 has one unit more than shots."""
NEIGHBOURS = {
    "an empty slot is filled": ("uvwxy", "zuvwxy", [1]),
    "an over-full slot turns another unit away": ("vwxyz", "uvwxyz", [3]),
    "a slot is filled up": ("wxz", "wxyz", [3]),
}


def seated(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Deals each unit to its seat; returns prompts by the texts of the units."""
    texts: list[str] = []

    def draw(self: Any, n: int, *, rng: Any) -> Any:
        return assign(range(n), [SEATS[text] for text in texts], num_slots=5, shots_per_slot=2)

    monkeypatch.setattr(PoissonSlots, "draw", draw)

    def prompts(units: str, **more: Any) -> list[str]:
        texts[:] = units
        return prompts_of(list(units), **more)

    return prompts


@pytest.mark.parametrize(("without", "with_one", "slots"), NEIGHBOURS.values(), ids=NEIGHBOURS)
def test_one_record_more_changes_the_prompt_of_one_slot(
    without: str, with_one: str, slots: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = seated(monkeypatch)
    assert changed(prompts(without), prompts(with_one)) == slots


def test_a_wording_by_the_place_among_filled_slots_would_change_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: the wording is that of the next slot that has records."""
    filled: Counter[int] = Counter()

    def at(self: Any, slot: int) -> Any:
        def render(records: Any) -> Any:
            place = filled[id(self)]
            filled[id(self)] += bool(records)
            return self.by_wording[place % len(self.by_wording)](records)

        return render

    prompts = seated(monkeypatch)
    monkeypatch.setattr(SlotRenderers, "at", at)
    found = changed(prompts("uvwxy"), prompts("zuvwxy"))
    assert len(found) > 1, "the neighbours above tell"


@pytest.mark.parametrize("sampler", [BalancedSlots, PartitionedSlots])
def test_a_record_that_is_replaced_changes_one_slot_of_a_fixed_sample(sampler: Any) -> None:
    """With the same coins, whatever they are."""
    for seed in range(5):
        coins = np.random.default_rng(seed)
        order = coins.permutation(8).tolist()

        class Coins:
            def choice_without_replacement(self, n: int, size: int) -> Any:
                return np.array(order[:size])  # noqa: B023  used at once

        rows = sampler(num_slots=3, shots_per_slot=2, public_size=8).draw(8, rng=Coins())
        assert len(rows) == 3
        for unit in range(8):
            before, after = list("abcdefgh"), list("abcdefgh")
            after[unit] = "new"
            told = [[[texts[member] for member in row] for row in rows] for texts in (before, after)]
            moved = [slot for slot, (one, other) in enumerate(zip(*told, strict=True)) if one != other]
            assert moved == [slot for slot, row in enumerate(rows) if unit in row]


@pytest.mark.parametrize(
    "sampler",
    [
        PoissonSlots(0.3, num_slots=7, shots_per_slot=2),
        BalancedSlots(num_slots=7, shots_per_slot=2, public_size=9),
        PartitionedSlots(num_slots=7, shots_per_slot=2, public_size=9),
        AllocatedSlots(0.5, num_batches=3, num_slots=7, shots_per_slot=2),
    ],
)
def test_every_sampler_of_slots_has_a_row_for_each_slot_whatever_is_in_it(sampler: Sampler) -> None:
    assert sampler.row_shape == "slots"
    for _ in range(20):
        assert len(sampler.draw(9, rng=SYSTEM_RANDOM)) == sampler.num_rows


def test_a_row_that_cannot_be_rendered_moves_no_wording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rendering row by row, after a failure of one, keeps the places of slots."""
    fixed_coins(monkeypatch)
    real = SlotRenderers.at

    def at(self: Any, slot: int) -> Any:
        def render(records: Any) -> Any:
            if any(record["text"] == "b" for record in records):
                raise RuntimeError
            return real(self, slot)(records)

        return render

    monkeypatch.setattr(SlotRenderers, "at", at)
    assert [prompt[0] for prompt in prompts_of(["a", "b", "c", "d"])] == list("ACAS")


# --- unit rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [Rows(units=6), Rows(slots=2), Rows(slots=2, shots=2, redraw_every=None)])
def test_rows_without_a_slot_for_each_wording_are_refused_before_anything_is_charged(rows: Rows) -> None:
    budget = house()
    before = lines(budget)
    expected = r"FewShotTask\.wordings: expected a slot for each of 3 wordings .* found '(6 units|2 slots)'"
    with pytest.raises(ConfigurationError, match=expected) as caught:
        voter([CANARY], rows=rows, budget=budget)
    assert CANARY not in str(caught.value)
    assert lines(budget) == before


@pytest.mark.parametrize("noise", [Noise(), Noise("gaussian"), Noise(multiplier=2.0)])
def test_the_planner_takes_slots_where_nothing_is_said(noise: Noise) -> None:
    made = voter(["a"], rows=None, noise=noise, task=TASK.replace(wordings=(SECOND,)))
    assert made.plan.design.rows == "slots"


def test_a_comparison_of_several_wordings_leaves_unit_rows_out() -> None:
    terms: dict[str, Any] = {"epsilon": 4.0, "delta": 1e-5, "max_queries": 10, "labels": 2, "mechanisms": ["gumbel"]}
    assert {one.plan.design.rows for one in compare_queries(500, **terms)} == {"units", "slots"}
    several = [one.plan.design for one in compare_queries(500, wordings=4, **terms)]
    assert {design.rows for design in several} == {"slots"}
    assert min(design.num_slots for design in several) >= 4


def test_rendering_refuses_several_wordings_for_unit_rows_though_the_plan_was_not_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The curator itself looks, before it burns a ticket."""
    from langchain_dpicl.planning.expected_utility import RowDesign

    monkeypatch.setattr(RowDesign, "check_wordings", lambda self, wordings: self)
    engine = Fragile()
    made = voter(["a"], engine, rows=Rows(units=6))
    with pytest.raises(ConfigurationError, match="slots, whose places are public"):
        made.invoke("why?")
    assert [len(prompts) for prompts in engine.calls] == [1], "the public row alone"
    assert made.share.remaining("query") == 3


def test_a_unit_row_is_asked_nothing_though_nobody_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind every check: records without a public place are not rendered, so the row abstains."""
    from langchain_dpicl.planning.expected_utility import RowDesign

    monkeypatch.setattr(RowDesign, "check_wordings", lambda self, wordings: self)
    for room in (curator, curator):
        monkeypatch.setattr(room, "check_one_wording", lambda render, sampler=None: _refuse_no_place(sampler))
    monkeypatch.setattr(PoissonUnits, "draw", lambda self, n, *, rng: tuple((unit,) for unit in range(n)))
    asked = []
    real = LabelRows.ask
    monkeypatch.setattr(LabelRows, "ask", lambda self, prompts: asked.append(prompts) or real(self, prompts))
    voter(["a", "b"], rows=Rows(units=6)).invoke("why?")
    assert asked == [(None, None)]


def _refuse_no_place(sampler: Any) -> None:
    if sampler is None:
        raise ConfigurationError("no place")


def test_records_without_a_place_are_refused_in_several_wordings_and_shown_in_none() -> None:
    several = SlotRenderers((lambda records: "A", lambda records: "B"))
    assert several(()) == "A"
    assert [several.at(slot)(()) for slot in range(3)] == ["A", "B", "A"]
    with pytest.raises(ConfigurationError, match="wordings: expected slots") as caught:
        several([{"text": CANARY}])
    assert CANARY not in str(caught.value)
    assert SlotRenderers((len,))([{}]) == 1


# --- what reports and memos say ---------------------------------------------------------------------------------------


def test_reports_show_every_wording_and_hold() -> None:
    made = voter(["a"], noise=None)
    made.invoke("why?")
    told = made.budget.report().to_dict()
    shown = json.dumps(told)
    assert all(wording.suffix in shown for wording in (TASK, SECOND, THIRD))
    assert verify_report(told).ok
    assert made.task.to_dict()["wordings"] == [
        {
            "example_prompt": "B {text} is {answer}",
            "prefix": "Say.",
            "suffix": "B {input} is",
            "example_separator": "; ",
        },
        {"example_prompt": "C {text}: {answer}", "prefix": "", "suffix": "C {input}:", "example_separator": "\n\n"},
    ]
    assert "wordings" not in voter(["a"], task=TASK.replace(wordings=())).task.to_dict(), "older shares stay the same"


def test_cached_answers_of_other_wordings_are_not_told() -> None:
    made = voter(["a"])
    scopes = set()
    for wordings in ((), (SECOND,), (THIRD,), (SECOND, THIRD), (THIRD, SECOND)):
        public = voter(["a"], task=TASK.replace(wordings=wordings)).task.to_dict()
        scope = scope_of_plan(made.budget, made.share, dataset_id=made.private.dataset_id, public=public)
        scopes.add(json.dumps(scope, sort_keys=True))
    assert len(scopes) == 5


def test_no_record_shows(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        made = voter([CANARY], answers=LabelAnswers(calibrate=True))
        made.invoke("why?")
        render = made.wording.renderer(made.task.queries(("why?",)))
    seen = [repr(made), repr(made.task), repr(TASK), repr(render), str(made.budget.report()), caplog.text]
    assert not [one for one in seen if CANARY in one]


# --- components -------------------------------------------------------------------------------------------------------

OTHER = FewShotTask("X {text} = {queue}", "X text: {input}\nqueue:")
TEACHING = FewShotTask("{text}\nqueue: {queue}", "text: {input}\nqueue:", wordings=(OTHER,))


@pytest.mark.parametrize(
    "rows",
    [Rows(slots=20), Rows(slots=20, redraw_every="run"), Rows(slots=20, sampling="partition"), None],
    ids=["fresh", "one_sample", "fixed", "planned"],
)
def test_teachers_read_them_in_turn(rows: Rows | None) -> None:
    spy = Spy()
    made = labeler(llm=spy, rows=rows, task=TEACHING)
    made.run()
    assert made.plan.design.rows == "slots"
    assert spy.private
    for asked in spy.private:
        assert [("\n\nX text: " in f"\n\n{prompt}") for prompt in asked] == [
            slot % 2 == 1 for slot in range(len(asked))
        ]
    assert not [prompt for prompt in spy.public if "X text" in prompt]
    assert made.result.plan["wordings"] == [made.task.wording.others[0].to_dict()]
    assert made.result.verify().ok


@pytest.mark.parametrize("rows", [Rows(units=20), Rows(units=20, redraw_every="run"), Rows(slots=1)])
def test_teachers_of_unit_rows_are_refused(rows: Rows) -> None:
    with pytest.raises(ConfigurationError, match="a slot for each of 2 wordings"):
        labeler(rows=rows, task=TEACHING)


def test_a_worker_gets_every_wording() -> None:
    made = labeler(rows=Rows(slots=20), task=TEACHING)
    given: dict[str, Any] = {"ledger_id": "l", "component": "c", "epsilon": 1.0, "plan": made.plan}
    given |= {"inputs": made.inputs, "public": made._public, "reads": (False, False)}
    work = LabellingJob(task=made.task, **given)
    there = pickle.loads(pickle.dumps(work))  # noqa: S301
    assert there.task == made.task
    assert there.task.wording.num_wordings == 2
    alone = labeler(rows=Rows(slots=20), task=TEACHING.replace(wordings=()))
    assert there.key == work.key != LabellingJob(task=alone.task, **given).key


def test_the_student_is_asked_in_the_first_wording() -> None:
    spy = Spy()
    texts = [f"my card {place}" for place in range(4)] + [f"wire {place}" for place in range(4)]
    made = labeler(llm=spy, rows=Rows(slots=20), task=TEACHING, public_inputs=texts)
    made.run()
    spy.public.clear()
    chosen = PromptPATEExampleSelector.from_run(made, student=Student(shots=2, num_candidates=2, num_validation=2))
    assert chosen.student is not None
    assert spy.public
    assert not [prompt for prompt in spy.public if "X text" in prompt]


def test_answers_in_free_form_read_them_in_turn() -> None:
    asked: list[str] = []

    def answer(prompt: str) -> str:
        asked.append(prompt)
        return "ask the bank"

    examples = PrivateExamples([{"text": "says: ask the bank"}] * 10, public_size=40)
    task = FewShotTask("A {text}", "A {input}", wordings=(FewShotTask("B {text}", "B {input}"),))
    options: dict[str, Any] = {"budget": Budget(epsilon=50, delta=1e-4), "epsilon": 20, "max_queries": 2, "task": task}
    options |= {"llm": Writer(answer), "answers": VECTORS}
    with pytest.raises(ConfigurationError, match="a slot for each of 2 wordings"):
        DPFreeFormRunnable.from_private_examples(examples, rows=Rows(units=6), **options)
    made = DPFreeFormRunnable.from_private_examples(examples, **options)
    assert made.plan.design.rows == "slots"
    asked.clear()
    made.invoke("why?")
    rows = asked[-made.plan.design.num_slots :]
    assert [prompt.rsplit("\n\n", 1)[-1] for prompt in rows] == ["A why?", "B why?"] * (len(rows) // 2)


@pytest.mark.parametrize("component", [DPRetrievalVotingRunnable, DPRetrievalFreeFormRunnable])
def test_retrieved_rows_are_refused_whose_places_depend_on_others(component: Any) -> None:
    examples = PrivateExamples([{"text": CANARY}], public_size=40)
    task = FewShotTask("{text}", "{input}", wordings=(FewShotTask("D {text}", "{input}"),))
    near = Retrieval(TopicEmbeddings(), similarity_threshold=0.5, participations=3, slots=10)
    with pytest.raises(ConfigurationError, match=r"FewShotTask\.wordings: expected none") as caught:
        component.from_private_examples(
            examples, llm=Fragile(), retrieval=near, budget=Budget(epsilon=5, delta=1e-4), epsilon=4, task=task
        )
    assert CANARY not in str(caught.value)
    assert document_task(examples, task.replace(wordings=())).suffix == "{input}"


def test_a_retrieved_query_refuses_them_itself() -> None:
    several = SlotRenderers((lambda records: "A", lambda records: "B"))
    with pytest.raises(ConfigurationError, match="expected slots"):
        FilteredQuery(np.ones(2), rows=lambda prompts: None, render=several, width=2)  # type: ignore[arg-type,return-value]


def test_votes_without_noise_read_them_in_turn() -> None:
    engine = Fragile()
    options: dict[str, Any] = {"llm": engine, "task": TASK, "answers": PLAIN}
    label_votes_without_privacy(private(["a"] * 6), ["why?"], rows=SLOTS, **options)
    assert [prompt[0] for prompt in engine.calls[-1]] == list("ASCAS")
    label_votes_without_privacy(private(["a"] * 6), ["why?"], **options)
    assert len(engine.calls[-1]) == 6, "a slot for each declared unit, of at most 40"
    with pytest.raises(ConfigurationError, match="a slot for each of 3 wordings"):
        label_votes_without_privacy(private(["a"] * 6), ["why?"], rows=Rows(units=6), **options)


# --- templates that do not go together --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (FewShotTask(suffix="B {question} is"), r"wordings: expected the query's variables \['input'\].*'question'"),
        (FewShotTask(suffix="B {input} of {who} is"), "wordings: expected the query's variables"),
        (FewShotTask("B {unknown}"), "example_prompt: expected a template with fields among"),
        (FewShotTask(suffix="B {input.x}"), "suffix: expected plain"),
    ],
)
def test_a_wording_of_another_query_is_refused(other: FewShotTask, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        voter(["a"], task=TASK.replace(wordings=(other,)))


@pytest.mark.parametrize(
    "other",
    [
        FewShotTask("B {text}", labels=("yes", "no")),
        FewShotTask("B {text}", verbalizers={"yes": " y"}),
        FewShotTask("B {text}", wordings=(FewShotTask("C {text}"),)),
    ],
)
def test_a_wording_holds_templates_alone(other: FewShotTask) -> None:
    with pytest.raises(ConfigurationError, match=r"FewShotTask\.wordings: expected templates alone"):
        FewShotTask(wordings=(other,))


@pytest.mark.parametrize("wrong", ["B {text}", {"suffix": "B"}, [{"suffix": "B"}], [CANARY], 3])
def test_what_is_no_list_of_tasks_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"FewShotTask\.wordings: expected") as caught:
        FewShotTask(wordings=wrong)
    assert CANARY not in str(caught.value)


def test_tables_become_wordings() -> None:
    state = {"suffix": "A {input}", "wordings": [{"suffix": "B {input}"}, {"prefix": "Say."}]}
    task = FewShotTask.from_dict(state)
    assert task.wordings == (FewShotTask(suffix="B {input}"), FewShotTask(prefix="Say."))
    assert FewShotTask.from_dict(task.to_dict()) == task
    assert task.to_dict() == state
    with pytest.raises(ConfigurationError, match=r"found 'sufix'\. Did you mean 'suffix'"):
        FewShotTask.from_dict({"wordings": [{"sufix": "B {input}"}]})
    for wrong in ({"suffix": "B"}, [3], 3, "B"):
        with pytest.raises(ConfigurationError, match=r"FewShotTask\.wordings: expected"):
            FewShotTask.from_dict({"wordings": wrong})


@pytest.mark.parametrize("endless", [itertools.count(), itertools.repeat(SECOND)])
def test_wordings_that_never_end_are_refused(endless: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"FewShotTask\.wordings: expected a list, found"):
        FewShotTask("A {text} {answer}", "A {input}", wordings=endless)
    with pytest.raises(ConfigurationError, match=r"FewShotTask\.labels: expected a list, found"):
        FewShotTask(labels=itertools.repeat("a"))  # type: ignore[arg-type]
