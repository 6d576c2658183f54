"""PromptPATELabeler through its doors: events, budgets, faults, models that write, inputs, and what never shows."""

from __future__ import annotations

import asyncio
import json
import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import RunnableLambda

from langchain_dpicl import (
    Budget,
    EmbeddedLLM,
    FewShotTask,
    LabelAnswers,
    LabelledPool,
    PrivateExamples,
    PromptPATELabeler,
    Rows,
)
from langchain_dpicl.backends.fake import FakeBackend
from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler, get_privacy_budget_callback
from langchain_dpicl.exceptions import (
    CapabilityError,
    ConfigurationError,
    NoPrivacyBudgetError,
    PrivacyBudgetError,
    PrivacyBudgetExceededError,
    PrivacyBudgetMismatchError,
)
from langchain_dpicl.options import LogitNoise
from langchain_dpicl.privacy.extensions.confident_gnmax import ConfidentGNMaxMechanism
from langchain_dpicl.privacy.extensions.fixed_size_slots import PartitionedSlots
from langchain_dpicl.privacy.ledger.shares import Reservation
from langchain_dpicl.privacy.mechanisms.bounded import VoteSum
from langchain_dpicl.privacy.mechanisms.release_plan import GumbelMechanism
from langchain_dpicl.runs.release_run import RunJournal
from langchain_dpicl.tasks import FewShotTemplate
from tests.canary import OURS
from tests.contracts.front_room import (
    CANARY,
    CHARGED,
    REFUSED,
    AsyncObserver,
    Door,
    FrontRoomContract,
    Observer,
    Room,
)
from tests.labelling_doubles import (
    CARD,
    FIXED,
    FRESH,
    GAUSSIAN,
    LABELS,
    MUTE,
    NOISES,
    PLAIN,
    QUIET,
    SURE,
    TEACHERS,
    WIRE,
    Spy,
    counts,
    examples,
    fails,
    house,
    labeler,
    loud,
    told,
)
from tests.unit_tests.test_private_frames import locals_of_ours, shows_private

pytestmark = pytest.mark.usefixtures("remembered_prices")


# -- events and budgets ------------------------------------------------------------------------------------------


def inside(action: Callable[[], Any], *observers: Any) -> Any:
    return RunnableLambda(lambda _: [action()]).invoke(0, {"callbacks": list(observers)})


@pytest.mark.parametrize(
    ("teachers", "mechanism", "tickets"),
    [
        ("fresh", "gumbel", [1, 1, 1]),
        ("one_sample", "gumbel", [1]),
        ("fixed", "gumbel", [1, 1, 1]),
        ("fixed", "confident_gnmax", [2, 1, 2]),
        ("fresh", "confident_gnmax", [1, 1, 1]),
    ],
)
@pytest.mark.parametrize("awaited", [False, True])
def test_observers_hear_of_every_charge_and_of_the_refusal(
    teachers: str, mechanism: str, tickets: list[int], awaited: bool
) -> None:
    inputs, observer, later = [CARD, MUTE, WIRE], Observer(), AsyncObserver()
    made = labeler(rows=TEACHERS[teachers], noise=NOISES[mechanism], public_inputs=inputs)

    async def arun(_: Any) -> None:
        await made.arun()
        await made.alabel("one more")

    def run() -> None:
        made.run()
        made.label("one more")

    with pytest.raises(PrivacyBudgetExceededError):
        if awaited:
            asyncio.run(RunnableLambda(arun).ainvoke(0, {"callbacks": [observer, later]}))
        else:
            inside(run, observer, later)
    assert [data["tickets"] for data in observer.named(CHARGED)] == tickets
    assert {data["component"] for data in observer.named(CHARGED)} == {"PromptPATELabeler"}
    [refused] = observer.named(REFUSED)
    assert (refused["error"], refused["requested"], refused["remaining"]) == ("PrivacyBudgetExceededError", 1, 0)
    assert [name for name, _ in later.heard] == [name for name, _ in observer.heard]
    assert json.loads(json.dumps(observer.heard)) == [list(one) for one in observer.heard]
    assert CANARY not in repr(observer.heard)


async def _arun(made: PromptPATELabeler, questions: list[str]) -> list[Any]:
    return [await made.arun()]


async def _astream(made: PromptPATELabeler, questions: list[str]) -> list[Any]:
    return [entry async for entry in made.astream()]


async def _alabel(made: PromptPATELabeler, questions: list[str]) -> list[Any]:
    return [await made.alabel(question) for question in questions]


class TestContract(FrontRoomContract):
    doors: ClassVar[Mapping[str, Door]] = {
        "run": Door(lambda made, questions: [made.run()]),
        "arun": Door(_arun),
        "stream": Door(lambda made, questions: list(made.stream())),
        "astream": Door(_astream),
        "label": Door(lambda made, questions: [made.label(question) for question in questions]),
        "alabel": Door(_alabel),
    }

    def make_private(self) -> PrivateExamples:
        return examples()

    def make_engine(self) -> FakeBackend:
        return Spy()

    def make(self, room: Room, **options: Any) -> PromptPATELabeler:
        given = {"llm": room.engine, "public_inputs": self.questions[:2], "max_queries": 4, **loud(), "epsilon": 1.5e4}
        return PromptPATELabeler.from_private_examples(room.private, **{"budget": room.budget, **given, **options})

    def make_refused(self, room: Room) -> PromptPATELabeler:
        """Its share was set aside by one process while another sealed the room it needs."""
        late = self.make(room, budget=Budget.open(room.store), epsilon=7e4, component="late")
        inputs: dict[str, Any] = {"component": "early", "epsilon": 4e4, "public_inputs": ["first"]}
        self.make(room, **inputs).label("first")
        return late

    def faulty_constructions(self, room: Room) -> Sequence[Callable[[], Any]]:
        return [lambda fault=fault: self.make(room, **fault) for fault in FAULTS]  # type: ignore[misc]


FAULTS: list[dict[str, Any]] = [
    {"max_queries": 0},
    {"max_queries": 2.5},
    {"public_inputs": [], "max_queries": None},
    {"public_inputs": "one text"},
    {"public_inputs": {"text": "one dict"}},
    {"public_inputs": 5},
    {"public_inputs": [5j]},
    {"public_inputs": [{"words": "x"}]},
    {"public_inputs": [{"text": "x", "queue": "card"}]},
    {"public_inputs": [{"text": object()}]},
    {"task": FewShotTask(labels=("card",))},
    {"task": FewShotTask(labels=("card", "card"))},
    {"task": FewShotTask(verbalizers={"card": " a"})},
    {"task": FewShotTask(verbalizers={"card": " a", "transfer": " a"})},
    {"task": "{text}"},
    {"task": FewShotTask(), "suffix": "{input}"},
    {"answers": "hard"},
    {"answers": PLAIN.replace(abstain_below=None, min_votes=3.0)},
    {"answers": PLAIN.replace(abstain_label="none")},
    {"answers": PLAIN.replace(scores=True), "noise": "gumbel"},
    {"answers": PLAIN.replace(scores=True, abstain_below=None), "noise": SURE},
    {"answers": PLAIN.replace(abstain_below=0.5), "noise": SURE},  # two thresholds
    {"answers": PLAIN.replace(content_free=(), calibrate=True)},
    {"noise": "laplace"},
    {"noise": "confident_gnmax"},  # without its threshold and noises
    {"noise": 0.05},
    {"noise": LogitNoise("difference_clip")},
    {"noise": SURE.replace(max_answers=2), "answers": PLAIN.replace(abstain_below=None)},
    {"rows": "units"},
    {"rows": FIXED},  # the room's budget is add_remove
    {"rows": FIXED.replace(redraw_every="run")},
    {"rows": Rows(sampling="partition")},
    {"rows": Rows(sampling="disjoint")},
    {"rows": Rows(sampling="fixed")},
    {"rows": FRESH.replace(redraw_every=3)},
    {"rows": Rows(units=41)},
    {"suffix": "{a} {b}", "answers": PLAIN.replace(calibrate=True)},
    {"example_prompt": "{unknown} {queue}"},
    {"example_prompt": "{text}"},  # a demonstration has to show its label
    {"suffix": "no variable"},
    {"suffix": "{queue}"},
    {"suffix": "{input} {queue}"},
    {"epsilon": None, "noise": None},
    {"epsilon": -1.0},
    {"llm": "gpt"},
    {"llm": FakeListChatModel(responses=["x"])},
    {"llm": FakeListChatModel(responses=["x"]), "answers": PLAIN.replace(votes="text", calibrate=True)},
    {"llm": FakeListChatModel(responses=["x"]), "answers": PLAIN.replace(votes="text", other_label="card")},
    {"budget": "a budget"},
    {"component": ""},
    {"teachers": "fixed"},
]


def test_examples_without_a_label_field_cannot_teach() -> None:
    plain = PrivateExamples([f"{CANARY} {i}" for i in range(40)], public_size=40)
    with pytest.raises(ConfigurationError, match="label_key"):
        labeler(plain, task=FewShotTask("{text}", "{input}", labels=LABELS))


def test_a_share_that_does_not_fit_is_refused_before_anything_is_bound() -> None:
    private = examples()
    with pytest.raises(PrivacyBudgetExceededError):
        labeler(private, budget=house(epsilon=1.0), epsilon=2.0, noise=None)
    with pytest.raises(PrivacyBudgetExceededError):
        labeler(private, budget=house(epsilon=4.0), epsilon=None, noise=QUIET.replace(delta=1e-5))
    labeler(private, budget=house()).run()


def test_the_budget_is_looked_up_where_it_always_is() -> None:
    given: dict[str, Any] = {"llm": Spy(), "public_inputs": [CARD], **loud()}
    handler = PrivacyBudgetCallbackHandler(epsilon=1e6, delta=1e-4)
    make = PromptPATELabeler.from_private_examples
    with pytest.raises(NoPrivacyBudgetError):
        make(examples(), **given)
    assert make(examples(), budget=handler, **given)._budget is handler.budget
    assert make(examples(dataset_id="more"), budget={"callbacks": [handler]}, **given)._budget is handler.budget
    with get_privacy_budget_callback(epsilon=1e6, delta=1e-4) as active:
        assert told(make(examples(), **given).run()) == [("labelled", "card")]
        assert active.budget.report().to_dict()["shares"]
    private = examples(dataset_id="again")
    make(private, budget=handler, **given)
    with pytest.raises(PrivacyBudgetMismatchError):
        make(private, budget=house(), **given)


def test_a_refused_construction_is_told() -> None:
    observer, poor = Observer(), house(epsilon=1.0)
    with pytest.raises(PrivacyBudgetError):
        inside(lambda: labeler(budget=poor, epsilon=2.0, noise=None), observer)
    assert [data["error"] for data in observer.named(REFUSED)] == ["PrivacyBudgetExceededError"]


# -- models that write text --------------------------------------------------------------------------------------


class Writes(FakeListChatModel):
    """Answers by the last line of what it reads."""

    def _call(self, messages: Any, *args: Any, **options: Any) -> str:
        query = str(messages[-1].content).rsplit("text: ", 1)[-1]
        if MUTE in query:
            return "I would rather not say."
        return "Card." if "card" in query else "transfer"


@pytest.mark.parametrize("mechanism", NOISES)
@pytest.mark.parametrize("teachers", TEACHERS)
def test_votes_without_a_label_are_a_candidate_and_reject_where_it_wins(teachers: str, mechanism: str) -> None:
    made = labeler(
        llm=Writes(responses=[]),
        answers=PLAIN.replace(votes="text"),
        rows=TEACHERS[teachers],
        noise=NOISES[mechanism],
        public_inputs=[CARD, MUTE, WIRE],
    )
    pool = made.run()
    assert made.rows.width == 3
    assert told(pool) == [("labelled", "card"), ("rejected", None), ("labelled", "transfer")]
    if mechanism == "gaussian":
        votes = pool.entries[1].votes
        assert votes is not None
        assert set(votes) == {"card", "transfer", "other"}
        assert votes["other"] > 2 > abs(votes["card"])
    assert made.result.plan["other_label"] == "other"


def test_other_votes_can_be_named_or_left_uncounted() -> None:
    given: dict[str, Any] = {"llm": Writes(responses=[]), "noise": GAUSSIAN}
    named = labeler(answers=PLAIN.replace(votes="text", other_label="refused"), public_inputs=[MUTE], **given)
    [entry] = named.run().entries
    assert entry.votes is not None
    assert set(entry.votes) == {"card", "transfer", "refused"}
    uncounted = PLAIN.replace(votes="text", abstain_below="never", other_label="")
    silent = labeler(answers=uncounted, public_inputs=[MUTE], **given)
    [entry] = silent.run().entries
    assert silent.rows.width == 2
    assert entry.status == "labelled"  # nobody voted, and the noise had to say something
    assert "other_label" not in silent.result.plan


def test_models_with_probabilities_have_no_such_candidate() -> None:
    made = labeler(noise=GAUSSIAN)
    assert made.rows.width == 2
    assert "other_label" not in made.result.plan
    assert set(made.run().entries[0].votes or ()) == set(LABELS)


def test_labels_may_be_called_as_a_status_or_as_other_votes_are_where_there_are_none() -> None:
    private = PrivateExamples(
        [{"text": f"{CANARY} {i}", "queue": "other"} for i in range(40)],
        label_key="queue",
        labels=("rejected", "other"),
        public_size=40,
    )
    engine = FakeBackend(lambda prompt, _: {" rejected": 0.9, " other": 0.1}, max_top_k=2)
    assert told(labeler(private, llm=engine, public_inputs=[CARD]).run()) == [("labelled", "rejected")]


def test_a_decision_by_text_alone_has_to_be_asked_for() -> None:
    with pytest.raises(CapabilityError, match='votes="text"'):
        labeler(llm=Writes(responses=[]))


def test_teachers_are_calibrated_by_their_own_content_free_answers() -> None:
    def leaning(prompt: str, prefix: tuple[bytes, ...]) -> Mapping[str, float]:
        card = 0.6 if prompt.endswith(f"text: {WIRE}\nqueue:") else 0.9
        return {" card": card, " transfer": 1 - card}

    plain, spy = Spy(leaning), Spy(leaning)
    assert told(labeler(llm=plain, public_inputs=[WIRE]).run()) == [("labelled", "card")]
    assert not [prompt for prompts in plain.private for prompt in prompts if "N/A" in prompt]
    made = labeler(llm=spy, answers=PLAIN.replace(calibrate=True, content_free=("N/A", "")), public_inputs=[WIRE])
    assert told(made.run()) == [("labelled", "transfer")]
    asked = Counter(prompt.rsplit("text: ", 1)[-1] for prompts in spy.private for prompt in prompts)
    assert set(asked) == {f"{text}\nqueue:" for text in (WIRE, "N/A", "")}
    assert len(set(asked.values())) == 1
    assert made.cost().private_calls == 3 * labeler(public_inputs=[WIRE]).cost().private_calls


# -- what an input is --------------------------------------------------------------------------------------------


def two_fields(**options: Any) -> PromptPATELabeler:
    records = [{"title": f"{CANARY} {i}", "text": "x", "queue": LABELS[i % 2]} for i in range(40)]
    private = PrivateExamples(records, label_key="queue", labels=LABELS, public_size=40, fields=["title"])
    wording = {"example_prompt": "{title}: {text}\nqueue: {queue}", "suffix": "title: {title}\ntext: {input}\nqueue:"}
    return labeler(private, **{"public_inputs": [], "max_queries": 4, **wording, **options})


def test_an_input_of_several_fields_is_a_dict_of_them_or_of_the_querys_variables() -> None:
    spy = Spy()
    made = two_fields(llm=spy)
    by_field, by_variable = {"title": "T", "text": CARD}, {"title": "T", "input": CARD}
    assert made.label(by_field) == made.label(by_variable)
    assert made.label(by_field).fields == by_field
    assert spy.private[0][0].endswith(f"title: T\ntext: {CARD}\nqueue:")
    assert counts(made._budget)["reserve label"] == 1
    assert made.label({"title": "U", "text": CARD}).fields["title"] == "U"
    for bad in (CARD, Document(CARD), {"text": CARD}, {"title": "T"}, {**by_field, "queue": "card"}, None):
        with pytest.raises(ConfigurationError, match="public_inputs"):
            made.label(bad)
    assert counts(made._budget)["reserve label"] == 2
    assert len(made.result.entries) == 2


def test_templates_may_be_langchains_own_and_texts_stand_for_labels() -> None:
    spy = Spy(lambda prompt, _: {" plastic": 0.9, " wire": 0.1})
    spy._vocabulary = None
    spy._max_top_k = 2
    made = labeler(
        llm=spy,
        task=FewShotTask(
            PromptTemplate.from_template("{text} -> {queue}"),
            PromptTemplate.from_template("{input} ->"),
            prefix="Sort {input}.",
            verbalizers={"card": [" plastic", " Plastic"], "transfer": " wire"},
        ),
        public_inputs=[CARD],
    )
    pool = made.run()
    assert pool.examples == [{"text": CARD, "queue": "plastic"}]
    assert pool.entries[0].label == "card"
    for prompt in spy.private[0]:
        assert prompt.startswith(f"Sort {CARD}.\n\n{CANARY}")
        assert prompt.endswith(f"\n\n{CARD} ->")
        assert prompt.count("-> plastic") + prompt.count("-> wire") == 1


def test_braces_in_inputs_arrive_byte_for_byte() -> None:
    spy = Spy()
    labeler(llm=spy, public_inputs=["{input} {{card}} {0}"]).run()
    assert spy.asked == ["{input} {{card}} {0}"]


# -- what shows --------------------------------------------------------------------------------------------------


def stop(*args: Any, **more: Any) -> Any:
    raise KeyboardInterrupt


STOPS = {
    "rendering": (FewShotTemplate, "renderer"),
    "scoring": (Spy, "score_choices"),
    "bounding": (VoteSum, "bound"),
    "noising": (GumbelMechanism, "release"),
    "testing": (ConfidentGNMaxMechanism, "release"),
    "saving": (RunJournal, "append"),
    "committing": (Reservation, "commit"),
}


@pytest.mark.parametrize("teachers", TEACHERS)
@pytest.mark.parametrize("where", STOPS)
@pytest.mark.parametrize("awaited", [False, True])
def test_a_stop_leaves_nothing_private_in_our_frames(
    teachers: str, where: str, awaited: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mechanism = "confident_gnmax" if where == "testing" else "gumbel"
    made = labeler(
        rows=TEACHERS[teachers], noise=NOISES[mechanism], checkpoint=tmp_path / "labels.json", public_inputs=[CARD]
    )
    owner, name = STOPS[where]
    real = getattr(owner, name)

    def later(*args: Any, **more: Any) -> Any:
        """Stops at the private call: the first one of its kind that the caller is in the middle of."""
        is_private = where != "scoring" or CANARY in args[1][0]
        if not is_private:
            return real(*args, **more)
        if where == "rendering":
            inner = real(*args, **more)

            def render(records: Any) -> Any:
                return stop() if records else inner(records)

            render.public = inner.public  # type: ignore[attr-defined]
            return render
        return stop()

    monkeypatch.setattr(owner, name, later)
    with pytest.raises(KeyboardInterrupt) as caught:
        asyncio.run(made.arun()) if awaited else made.run()
    if not (awaited and where == "scoring"):
        assert caught.value.run is made  # type: ignore[attr-defined]
    # The one row that may be there is the public model's own answer to the public input.
    assert [look for look in shows_private(caught.value) if look != "array([[0.9, 0.1]])"] == []
    assert CANARY not in repr(locals_of_ours(caught.value))


def test_the_look_into_frames_would_find_a_record() -> None:
    """A frame of the package, made for the purpose."""
    code = compile("def hold(records):\n    raise ValueError\n", f"{OURS}planted.py", "exec")
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102
    with pytest.raises(ValueError, match=r"^$") as caught:
        names["hold"]([{"text": CANARY}])
    assert CANARY in repr(locals_of_ours(caught.value))


def test_what_a_record_raises_in_the_model_is_no_error_of_the_run() -> None:
    spy = Spy()
    made = labeler(llm=spy, public_inputs=[CARD])
    spy.at_private = fails(*[ValueError(CANARY)] * 100)
    assert told(made.run()) == [("rejected", None)]
    assert counts(made._budget) == {"reserve label": 1, "commit label": 1}


def test_by_default_a_label_needs_half_of_what_chance_gives() -> None:
    given: dict[str, Any] = {"answers": LabelAnswers(calibrate=False), "public_inputs": [CARD]}
    assert labeler(**given).plan.release.constants == (5.0,)
    assert labeler(noise=GAUSSIAN, **given).plan.threshold == 5.0
    sure = labeler(noise=SURE, **given)
    assert (sure.plan.release.constants, sure.plan.threshold) == ((), None)


def test_its_cost_counts_every_call() -> None:
    made = labeler(rows=FIXED, public_inputs=[CARD, WIRE, MUTE])
    assert (made.cost().private_calls, made.cost().public_calls) == (60, 3)
    assert made.cost(record_tokens=10, query_tokens=5).tokens_in == 60 * 15 + 3 * 5


def test_a_bar_shows_where_it_is_asked_for(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    labeler().run(progress=True)
    assert "private labels" in capsys.readouterr().err
    labeler().run()
    labeler().run(progress=False)
    assert "private labels" not in capsys.readouterr().err
    went_away = fails(BrokenPipeError(), BrokenPipeError())
    monkeypatch.setattr("tqdm.std.tqdm.update", lambda bar, n=1: went_away())
    assert len(labeler().run(progress=True).labelled) == 2


def test_sampler_and_share_are_those_of_the_teachers() -> None:
    fixed = labeler(rows=FIXED)
    assert isinstance(fixed.plan.release.sampler, PartitionedSlots)
    assert fixed.plan.release.sampler.sampling_rate == 1.0
    assert labeler().plan.release.sampler.sampling_rate == 0.5
    assert isinstance(fixed.run(), LabelledPool)
    assert isinstance(fixed.stream(), types.GeneratorType)


def test_the_embedded_model_teaches_offline() -> None:
    """A slot without the query's label votes wrong: five of ten are such with a chance of 1e-14 (of four shots: 4e-5)."""
    records = [{"text": f"my {LABELS[i % 2]} {i}", "queue": LABELS[i % 2]} for i in range(120)]
    private = PrivateExamples(records, label_key="queue", labels=LABELS, public_size=120)
    rows = Rows(slots=10, shots=8, sampling="partition")
    made = labeler(private, llm=EmbeddedLLM(), public_inputs=["my card", "my transfer"], rows=rows)
    assert [entry.label for entry in made.run().entries] == ["card", "transfer"]
