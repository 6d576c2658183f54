"""Votes of public examples: the prompts and votes of DPVotingRunnable, without noise, and no private record."""

from __future__ import annotations

import inspect
import json
import pickle
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.load import dumpd
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableLambda
from pydantic import ValidationError

from langchain_dpicl import (
    Budget,
    DPVotingRunnable,
    EmbeddedLLM,
    FewShotTask,
    LabelAnswers,
    Noise,
    PrivateExamples,
    Rows,
)
from langchain_dpicl.backends.fake import FakeBackend
from langchain_dpicl.baselines import PublicVotingResult, PublicVotingRunnable, fixed_rows, label_votes_without_privacy
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError, ModelCallError
from langchain_dpicl.planning.share_plan import Cost
from langchain_dpicl.rehearsal import rehearse, rehearse_generation

CANARY = "zx-public-canary-52"
LABELS = ("card", "transfer")
PLAIN = LabelAnswers(calibrate=False)


def copies_its_labels(prompt: str, prefix: tuple[bytes, ...]) -> Mapping[str, float]:
    """Says what most examples of its prompt say."""
    lines = [line.removeprefix("label: ") for line in prompt.split("\n") if line.startswith("label: ")]
    votes = [sum(label == line for line in lines) + 1.0 for label in LABELS]
    return {f" {label}": vote / sum(votes) for label, vote in zip(LABELS, votes, strict=True)}


def engine(distribution: Any = copies_its_labels, **options: Any) -> FakeBackend:
    return FakeBackend(distribution, vocabulary=[f" {label}" for label in LABELS], **options)


def examples(cards: int = 12, transfers: int = 4) -> list[dict[str, str]]:
    counts = [("card", cards), ("transfer", transfers)]
    return [{"text": f"{CANARY} {label} {i}", "label": label} for label, count in counts for i in range(count)]


def voter(records: Any = None, **options: Any) -> PublicVotingRunnable:
    given: dict[str, Any] = {"llm": engine(), "answers": PLAIN, **options}
    return PublicVotingRunnable.from_public_examples(examples() if records is None else records, **given)


class Watched:
    """A distribution that keeps the prompts it was asked for."""

    def __init__(self, distribution: Any = copies_its_labels) -> None:
        self.prompts: list[str] = []
        self._distribution = distribution

    def __call__(self, prompt: str, prefix: tuple[bytes, ...]) -> Mapping[str, float]:
        self.prompts.append(prompt)
        found: Mapping[str, float] = self._distribution(prompt, prefix)
        return found


# -- answers -----------------------------------------------------------------------------------------------------


def test_the_majority_wins() -> None:
    assert voter(examples(12, 4)).invoke("which?") == "card"
    assert voter(examples(4, 12)).invoke("which?") == "transfer"


def test_votes_are_those_of_all_private_rows_without_noise() -> None:
    records = examples(9, 7)
    private = PrivateExamples(records, label_key="label", labels=LABELS, public_size=16)
    for votes in ("hard", "soft"):
        given: dict[str, Any] = {"rows": Rows(units=16), "answers": PLAIN.replace(votes=votes)}
        unprotected = label_votes_without_privacy(private, ["which?"], llm=engine(), **given)
        found = voter(records, **given).vote("which?")
        assert [found.scores[label] for label in LABELS] == unprotected.totals[0].tolist()
        assert sum(found.scores.values()) == pytest.approx(16)


def test_the_first_of_equals_is_the_answer() -> None:
    assert voter(examples(5, 5), rows=Rows(units=10)).invoke("which?") == "card"
    assert voter(examples(5, 5), rows=Rows(units=10), labels=("transfer", "card")).invoke("which?") == "transfer"


def test_prompts_are_those_of_private_votes_on_the_same_records() -> None:
    records = examples(5, 5)
    task = FewShotTask(
        "Message: {text}\nlabel: {label}",
        "Message: {input}\nlabel:",
        prefix="Sort.",
        verbalizers={"card": " a", "transfer": " b"},
    )
    says = lambda prompt, prefix: {" a": 0.6, " b": 0.4}  # noqa: E731
    seen, private_seen = Watched(says), Watched(says)
    words = [" a", " b"]
    voter(records, llm=FakeBackend(seen, vocabulary=words), rows=Rows(units=10), task=task).invoke("which?")
    private = PrivateExamples(records, label_key="label", labels=LABELS, public_size=10)
    DPVotingRunnable.from_private_examples(
        private,
        llm=FakeBackend(private_seen, vocabulary=words),
        max_queries=1,
        budget=Budget(epsilon=1e5, delta=1e-4),
        epsilon=2e4,
        rows=Rows(units=10),
        noise=Noise(multiplier=0.05),
        answers=PLAIN,
        task=task,
    ).invoke("which?")
    one_shot = {prompt for prompt in private_seen.prompts if CANARY in prompt}
    assert set(seen.prompts) == one_shot
    assert len(one_shot) == 10


def test_rows_are_calibrated_by_their_own_content_free_answers() -> None:
    def leaning(prompt: str, prefix: tuple[bytes, ...]) -> Mapping[str, float]:
        card = 0.6 if prompt.endswith("text: which?\nlabel:") else 0.9
        return {" card": card, " transfer": 1.0 - card}

    assert voter(llm=engine(leaning)).invoke("which?") == "card"
    made = voter(llm=engine(leaning), answers=LabelAnswers(calibrate=True))
    assert made.invoke("which?") == "transfer"
    assert made.report["content_free"] == ["N/A"]
    by_default = voter(llm=engine(leaning), rows=Rows(units=8), answers=None)
    assert by_default.invoke("which?") == "transfer"


@pytest.mark.parametrize(
    ("below", "label"), [(0.7, "card"), (0.8, "nobody knows"), ("auto", "card"), ("never", "card")]
)
def test_it_abstains_where_no_label_has_enough_votes(below: Any, label: str) -> None:
    answers = PLAIN.replace(abstain_below=below, abstain_label="nobody knows")
    found = voter(examples(12, 4), rows=Rows(units=16), answers=answers).vote("which?")
    assert (found.label, found.abstained) == (label, label == "nobody knows")
    assert found.scores == {"card": 12.0, "transfer": 4.0}


def test_it_abstains_where_no_row_names_a_label() -> None:
    made = voter(llm=FakeListChatModel(responses=["I cannot say."]), answers=PLAIN.replace(votes="text"))
    assert made.vote("which?") == PublicVotingResult(
        label="abstain", abstained=True, scores={"card": 0.0, "transfer": 0.0}
    )


def test_text_is_a_vote_where_a_model_only_writes() -> None:
    model = FakeListChatModel(responses=["Transfer."])
    assert voter(llm=model, answers=PLAIN.replace(votes="text")).invoke("which?") == "transfer"
    with pytest.raises(CapabilityError, match='votes="text"'):
        voter(llm=FakeListChatModel(responses=["card"]))


def test_a_result_is_frozen_and_prints_as_its_label() -> None:
    found = voter().vote("which?")
    assert (str(found), found.epsilon, found.abstained) == ("card", 0.0, False)
    with pytest.raises(ValidationError):
        found.label = "transfer"


# -- rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_examples", "num_rows", "shots"), [(10, 20, 4), (4, 20, 4), (7, 3, 5), (50, 20, 1), (1, 3, 1)]
)
def test_rows_show_distinct_examples_and_use_all_alike(num_examples: int, num_rows: int, shots: int) -> None:
    rows = fixed_rows(num_examples, num_rows=num_rows, shots=shots)
    assert [len(set(row)) for row in rows] == [shots] * num_rows
    used = Counter(place for row in rows for place in row)
    counts = [used[place] for place in range(num_examples)]
    assert max(counts) - min(counts) <= 1
    assert fixed_rows(num_examples, num_rows=num_rows, shots=shots) == rows


def test_rows_are_the_same_in_every_process_and_version() -> None:
    assert fixed_rows(6, num_rows=3, shots=4) == ((5, 4, 0, 2), (1, 2, 4, 3), (1, 0, 3, 5))


@pytest.mark.parametrize(
    ("cards", "rows", "shape"),
    [
        (12, None, (20, 4)),
        (1, None, (20, 2)),
        (12, Rows(), (20, 4)),
        (12, Rows(shots=2), (20, 2)),
        (12, Rows(slots=3, shots=2), (3, 2)),
        (12, Rows(slots=5), (5, 1)),
        (12, Rows(units=40), (40, 1)),
    ],
)
def test_rows_have_the_shape_that_was_asked_for(cards: int, rows: Rows | None, shape: tuple[int, int]) -> None:
    seen = Watched()
    made = voter(examples(cards, 1), llm=engine(seen), rows=rows)
    assert (made.report["num_rows"], made.report["shots_per_row"]) == shape
    assert sum(made.vote("which?").scores.values()) == shape[0]
    assert {prompt.count(CANARY) for prompt in seen.prompts} == {shape[1]}


def test_every_query_is_asked_with_the_same_rows() -> None:
    seen = Watched()
    made = voter(llm=engine(seen))
    made.invoke("one")
    first, seen.prompts = set(seen.prompts), []
    made.invoke("two")
    assert {prompt.replace("two", "one") for prompt in seen.prompts} == first


# -- faults ------------------------------------------------------------------------------------------------------


def test_private_examples_are_refused_before_any_call() -> None:
    asked = engine()
    private = PrivateExamples(examples(), label_key="label", labels=LABELS, public_size=16)
    with pytest.raises(ConfigurationError, match=r"no private record is read; use DPVotingRunnable") as caught:
        PublicVotingRunnable.from_public_examples(private, llm=asked)  # type: ignore[arg-type]
    assert CANARY not in str(caught.value)
    assert asked.calls == {}
    Budget(epsilon=1.0, delta=1e-6).bind(private)  # not opened: still fit for a ledger


@pytest.mark.parametrize(("kind", "labels"), [(int, ("0", "1")), (np.int64, ("0", "1")), (bool, ("false", "true"))])
def test_integers_and_booleans_as_labels_become_text(kind: type, labels: tuple[str, ...]) -> None:
    records = [{"text": f"is {n} even", "label": kind(n % 2)} for n in range(8)]
    assert voter(records, llm=EmbeddedLLM()).labels == labels
    assert rehearse(EmbeddedLLM(), records, shots=(1,), progress=False).labels == labels
    texts = rehearse_generation(EmbeddedLLM(), records, label_key="label", shots=(1,), max_tokens=1, progress=False)
    assert texts.labels == labels


FAULTS: dict[str, dict[str, Any]] = {
    "a list of dicts or Documents, found str": {"records": CANARY},
    "a list of dicts or Documents, found dict": {"records": examples()[0]},
    "a list of dicts or Documents, found list_iterator": {"records": iter(examples())},
    "at least one example, found 0": {"records": []},
    r"public_examples\[0\]: expected a dict or a Document, found str": {"records": [CANARY]},
    r"public_examples\[16\]: expected text under 'text', found \['label'\]": {
        "records": [*examples(), {"label": "card"}]
    },
    r"public_examples\[16\]: expected text under 'label', found float": {
        "records": [*examples(), {"text": CANARY, "label": 1.0}]
    },
    r"public_examples\[0\]: expected text under 'who'": {"example_prompt": "{who}: {label}", "suffix": "{input}:"},
    r"public_examples\[12\]: expected a label among \('card', 'cash'\) under 'label'": {"labels": ("card", "cash")},
    "labels: expected a sequence of at least 2": {"records": examples(3, 0)},
    "labels: expected labels=, or": {"labels": LABELS, "task": FewShotTask(labels=LABELS)},
    "labels: expected a sequence": {"labels": "card"},
    "text_key: expected the name of a field": {"text_key": ""},
    "label_key: expected the name of a field": {"label_key": None},
    "at most 16, the number of public examples": {"rows": Rows(slots=2, shots=17)},
    r"Rows: expected .*found \['sampling'\]": {"rows": Rows(slots=2, sampling="partition")},
    r"Rows: expected .*found \['fill'\]": {"rows": Rows(slots=2, fill=2.0)},
    r"Rows: expected .*found \['redraw_every'\]": {"rows": Rows(slots=2, redraw_every="run")},
    r"rows: expected Rows\(...\)": {"rows": {"slots": 2}},
    r"answers: expected LabelAnswers\(...\)": {"answers": {"votes": "hard"}},
    "min_votes": {"answers": PLAIN.replace(min_votes=3.0)},
    "other_label": {"answers": PLAIN.replace(other_label="none")},
    "abstain_label": {"answers": PLAIN.replace(abstain_label="card")},
    "task: expected task=, or": {"task": FewShotTask(), "prefix": "Sort."},
}


@pytest.mark.parametrize("message", FAULTS)
def test_public_faults_are_told_before_any_call_and_without_texts(message: str) -> None:
    asked = engine()
    with pytest.raises(ConfigurationError, match=message) as caught:
        voter(**{"llm": asked, **FAULTS[message]})
    assert CANARY not in str(caught.value)
    assert asked.calls == {}


def test_a_wrong_constructor_call_says_how_to_build_it() -> None:
    with pytest.raises(ConfigurationError, match=r"PublicVotingRunnable.from_public_examples\(public_examples, llm="):
        PublicVotingRunnable(examples=examples())  # type: ignore[call-arg]


def test_a_failed_call_raises() -> None:
    made = voter(llm=engine(fail_rows_containing="text: bad"))
    with pytest.raises(ModelCallError):
        made.invoke("bad")
    with pytest.raises(ModelCallError):
        made.batch(["good", "bad"])
    assert made.invoke("good") == "card"


async def test_a_batch_that_keeps_errors_loses_only_the_queries_that_failed() -> None:
    made = voter(llm=engine(fail_rows_containing="text: bad"))
    inputs: list[Any] = ["good", "bad", {"wrong": "x"}, "fine"]
    for found in (made.batch(inputs, return_exceptions=True), await made.abatch(inputs, return_exceptions=True)):
        assert [type(one) for one in found] == [str, ModelCallError, ConfigurationError, str]
    [alone] = made.batch(["bad"], return_exceptions=True)
    assert isinstance(alone, ModelCallError)


@pytest.mark.parametrize(
    "given", [*({"max_concurrency": limit} for limit in (0, -1, True, 2.5, "8")), {"tags": "x"}, {"run_name": 5}, "x"]
)
async def test_a_config_that_is_none_makes_no_call(given: Any) -> None:
    asked = engine()
    made = voter(llm=asked)
    before = dict(asked.calls)
    for ask in (made.invoke, made.vote, made.ainvoke, made.avote):
        with pytest.raises(ConfigurationError, match=r"^config.*: expected"):
            found = ask("one", given)
            await found if inspect.isawaitable(found) else None
    assert asked.calls == before


def test_a_wrong_input_makes_no_call() -> None:
    asked = engine()
    made = voter(llm=asked)
    before = dict(asked.calls)
    for wrong in ({"wrong": "x"}, 1.5j):
        with pytest.raises(ConfigurationError):
            made.batch(["good", wrong])
    with pytest.raises(ConfigurationError, match="no further arguments"):
        made.invoke("good", stop=["x"])
    with pytest.raises(ConfigurationError, match="Put a single value into a list"):
        made.batch("good")
    assert dict(asked.calls) == before


# -- in LangChain ------------------------------------------------------------------------------------------------


async def test_answers_are_the_same_alone_in_a_batch_and_awaited() -> None:
    for llm in (engine(), EmbeddedLLM()):
        made = voter(llm=llm, answers=PLAIN.replace(votes="soft"))
        queries = [f"{word}?" for word in "abcdefg"] * 2
        alone = [made.vote(query) for query in queries]
        assert [await made.avote(query) for query in queries] == alone
        assert made._batch_with_config(made._answered, queries, is_whole=True) == alone
        labels = [found.label for found in alone]
        assert made.batch(queries) == await made.abatch(queries) == labels
        assert [made.invoke(query) for query in queries] == [await made.ainvoke(query) for query in queries] == labels
        assert list(made.stream(queries[0])) == [chunk async for chunk in made.astream(queries[0])] == labels[:1]
    assert made.batch([]) == []


def test_a_batch_is_asked_as_one() -> None:
    class Counting(FakeBackend):
        sizes: list[int] = []  # noqa: RUF012

        def score_choices(self, prompts: Any, choices: Any) -> Any:
            self.sizes.append(len(prompts))
            return super().score_choices(prompts, choices)

    made = voter(llm=Counting(copies_its_labels, vocabulary=[f" {label}" for label in LABELS]))
    Counting.sizes.clear()
    made.batch([f"query {i}" for i in range(8)])
    assert Counting.sizes == [64, 64, 32]


def test_inputs_are_those_of_private_votes() -> None:
    made = voter()
    inputs: list[Any] = ["which?", HumanMessage("which?"), {"input": "which?"}, Document("which?")]
    assert made.batch(inputs) == ["card"] * 4
    two = voter(suffix="{who} says {what}\nlabel:")
    assert two.invoke({"who": "I", "what": "which?"}) == "card"


def test_documents_are_examples_too() -> None:
    documents = [Document(record["text"], metadata={"label": record["label"], "page": 3}) for record in examples()]
    assert voter(documents).vote("which?") == voter().vote("which?")
    renamed = voter(documents, text_key="body")
    assert renamed.report["example_prompt"] == "body: {body}\nlabel: {label}"


def test_it_is_a_step_of_a_chain_and_a_tool() -> None:
    chain = {"input": lambda ticket: ticket["message"]} | voter() | RunnableLambda(str.upper)
    assert chain.invoke({"message": "which?"}) == "CARD"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `as_tool` is a beta of LangChain, which says so once
        assert voter().as_tool(name="queue_of", description="Which queue.").invoke("which?") == "card"
    assert voter().get_input_schema().model_json_schema()["type"] == "string"
    two = voter(suffix="{who} says {what}\nlabel:")
    assert set(two.get_input_schema().model_json_schema()["properties"]) == {"who", "what"}


def test_callbacks_see_one_run_per_query() -> None:
    class Seen(BaseCallbackHandler):
        def __init__(self) -> None:
            self.told: list[Any] = []

        def on_chain_start(self, serialized: Any, inputs: Any, **kwargs: Any) -> None:
            self.told.append(inputs)

        def on_chain_end(self, outputs: Any, **kwargs: Any) -> None:
            self.told.append(str(outputs))

        def on_chain_error(self, error: BaseException, **kwargs: Any) -> None:
            self.told.append(type(error))

    seen = Seen()
    made = voter(llm=engine(fail_rows_containing="text: bad"))
    made.batch(["one", "two"], {"callbacks": [seen], "max_concurrency": 1})
    made.vote("three", {"callbacks": [seen]})
    with pytest.raises(ModelCallError):
        made.invoke("bad", {"callbacks": [seen]})
    assert seen.told == ["one", "two", "card", "card", "three", "card", "bad", ModelCallError]


def test_nothing_public_shows_an_example() -> None:
    made = voter()
    chain = made | RunnableLambda(str.upper)
    shown = [
        json.dumps(made.report),
        repr(made),
        str(made),
        repr(chain),
        json.dumps(dumpd(made)),
        json.dumps(dumpd(chain)),
    ]
    shown += [repr(made.vote("which?")), repr(made.cost(1))]
    assert [text for text in shown if CANARY in text] == []


def test_the_report_says_what_epsilon_0_rests_on() -> None:
    report = voter(rows=Rows(slots=6, shots=2)).report
    assert (
        report.items()
        >= {
            "private": True,
            "epsilon": 0.0,
            "delta": 0.0,
            "basis": "epsilon 0: the caller declares these examples public",
            "num_examples": 16,
            "num_rows": 6,
            "shots_per_row": 2,
            "model": "fake",
            "reads": "whole labels",
            "suffix": "text: {input}\nlabel:",
            "labels": ["card", "transfer"],
        }.items()
    )


def test_the_cost_is_that_of_public_calls_alone() -> None:
    calls = 10 * 6 * 2
    made = voter(rows=Rows(slots=6, shots=3), answers=LabelAnswers(calibrate=True))
    assert made.cost(10) == Cost(0, calls, calls * (3 * 60 + 60), calls)
    asked = engine()
    plain = voter(llm=asked)
    asked.calls.clear()
    plain.invoke("which?")
    assert asked.calls["choice_rows"] == plain.cost(1).public_calls == 20
    with pytest.raises(ConfigurationError):
        made.cost(-1)


def test_it_can_be_pickled_with_its_engine() -> None:
    made = voter()
    assert pickle.loads(pickle.dumps(made)).vote("which?") == made.vote("which?")  # noqa: S301  its own


async def test_it_can_be_built_awaiting() -> None:
    made = await PublicVotingRunnable.afrom_public_examples(examples(), llm=engine(), answers=PLAIN)
    assert await made.ainvoke("which?") == "card"
