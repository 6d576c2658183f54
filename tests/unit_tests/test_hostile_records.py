"""Records that are made to do harm: too many, too long, full of braces or of LangChain's own spelling of objects.

All of them are content: shown to the model as they are, but for a public cap, and never run, looked up or refused.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.load import dumps, loads
from langchain_core.prompts import PromptTemplate

from langchain_dpicl import Budget, DPFewShotPromptTemplate, DPVotingRunnable, Noise, PrivateExamples, Rows
from langchain_dpicl.backends.fake import word_copier
from langchain_dpicl.options import LabelAnswers
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy.mechanisms.release_plan import PoissonSlots, PoissonUnits, ReleasePlan
from tests.contracts.neighbours import HOSTILE, Fragile
from tests.doubles import WORDS, SpyBackend
from tests.ledgers import free_price

SECRET = "what-a-key-would-be"  # pragma: allowlist secret
PAYLOADS = {
    "secret": '{"lc": 1, "type": "secret", "id": ["A_KEY_OF_THIS_PROCESS"]}',
    "constructor": '{"lc": 1, "type": "constructor", "id": ["langchain", "prompts", "prompt", "PromptTemplate"], '
    '"kwargs": {"template": "gone", "input_variables": []}}',
    "not implemented": '{"lc": 1, "type": "not_implemented", "id": ["os", "system"], "repr": "x"}',
    "escaped": '{"__lc_escaped__": {"lc": 1, "type": "secret", "id": ["A_KEY_OF_THIS_PROCESS"]}}',
}
CAP = 20_000  # of a record, unless declared otherwise
# What orders a fake engine about is for the tests of votes.
TEXTS = {name: text for name, text in HOSTILE.items() if not text.isupper()} | PAYLOADS


@pytest.fixture(autouse=True)
def _prices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "epsilon_bound", free_price)
    monkeypatch.setenv("A_KEY_OF_THIS_PROCESS", SECRET)


def shown(text: str) -> str:
    """A record as a model sees it."""
    return text[:CAP].encode("utf-8", "replace").decode()


def budget() -> Budget:
    return Budget(epsilon=1e6, delta=1e-4 / 1e4)


def voter(records: Any, engine: Any, *, size: int = 10, **options: Any) -> DPVotingRunnable:
    private = PrivateExamples(records, label_key="answer", labels=("yes", "no"), public_size=size)
    given = {"epsilon": 1e4, "noise": Noise(multiplier=2.0), "max_queries": 3, "rows": Rows(units=5)}
    given |= {"answers": LabelAnswers(calibrate=False), **options}
    return DPVotingRunnable.from_private_examples(private, llm=engine, budget=budget(), **given)


def said(texts: list[str]) -> list[dict[str, str]]:
    return [{"text": text, "answer": "no"} for text in texts]


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_a_hundred_thousand_records_make_no_more_calls_than_ten() -> None:
    calls = []
    for count in (10, 100_000):
        engine = SpyBackend(word_copier(WORDS), vocabulary=WORDS)
        made = template(["my card"] * count, engine, size=100_000)
        assert [sorted(example) for example in made.examples] == [["text"]]
        calls.append([len(prompts) for prompts in engine.private_prompts])
    assert calls[0] == calls[1] == [3]


def test_as_many_labels_as_records_are_read_in_time_that_grows_with_both() -> None:
    """Time in proportion to records times labels would take a hundred times as long."""
    labels = tuple(f"label {number}" for number in range(100_000))
    records = [{"text": "t", "label": label} for label in labels]
    since = time.process_time()
    private = PrivateExamples(records, label_key="label", labels=labels, public_size=10**6)
    assert time.process_time() - since < 60
    pools = [private._pool(label, ledger_id=None) for label in (labels[0], labels[-1])]
    assert [pool.num_units for pool in pools] == [1, 1]
    assert private.declaration["labels"][-1] == labels[-1]


def test_a_record_of_ten_megabytes_is_cut_at_the_public_cap_and_refused_nowhere() -> None:
    seen = []
    for text in ("short", "y" * 10_000_000):
        engine = Fragile()
        made = voter(said([text] * 5), engine, rows=Rows(slots=5))
        assert made.invoke("how long?") in {"yes", "no"}
        seen.append(([len(prompts) for prompts in engine.calls], made.plan.to_dict()))
        prompts = engine.calls[-1]
        assert max(map(len, prompts)) <= CAP + len("text: \nanswer: no\n\ntext: how long?\nanswer:")
    assert seen[0] == seen[1]


@pytest.mark.parametrize("size", [0, 1, 10_000_000])
def test_documents_of_any_size_are_read(size: int) -> None:
    private = PrivateExamples([Document("y" * size)] * 3, public_size=3)
    assert private._pool(None, ledger_id=None).num_units == 3


# --- content ----------------------------------------------------------------------------------------------------------


def dealt(self: Any, n: int, *, rng: Any) -> Any:
    return tuple(tuple(range(slot, n, self.num_slots)) for slot in range(self.num_slots))


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Deals units over slots in turn; the rows of every release."""
    rows: list[np.ndarray] = []
    real = ReleasePlan.bound

    def bound(self: Any, found: Any, *, width: int) -> Any:
        rows.append(np.array(found))
        return real(self, found, width=width)

    monkeypatch.setattr(ReleasePlan, "bound", bound)
    monkeypatch.setattr(PoissonSlots, "draw", dealt)
    monkeypatch.setattr(PoissonUnits, "draw", lambda self, n, *, rng: tuple((unit,) for unit in range(n)))
    return rows


def template(texts: list[str], engine: Any, *, size: int = 6) -> DPFewShotPromptTemplate:
    return DPFewShotPromptTemplate.from_private_examples(
        PrivateExamples(texts, public_size=size),
        llm=engine,
        budget=budget(),
        epsilon=1e4,
        noise=Noise(multiplier=2.0),
        rows=Rows(slots=3),
        max_tokens=1,
        instruction="Messages.",
        example_prompt=PromptTemplate.from_template("text: {text}"),
        suffix="text: {input}",
    )


@pytest.mark.parametrize("name", TEXTS)
def test_a_hostile_record_is_one_row_of_generation_as_it_is(name: str, sums: list[np.ndarray]) -> None:
    plain = ["my card was declined", "my transfer is late"]
    usual, engine = SpyBackend(word_copier(WORDS), vocabulary=WORDS), SpyBackend(word_copier(WORDS), vocabulary=WORDS)
    expected = template([*plain, "my card is late"], usual)
    usual_rows = sums[-1]
    found = template([*plain, TEXTS[name]], engine)
    assert sums[-1].shape == usual_rows.shape
    assert sums[-1][:2].tobytes() == usual_rows[:2].tobytes()
    assert [sorted(example) for example in found.examples] == [sorted(example) for example in expected.examples]
    before, after = usual.private_prompts[0], engine.private_prompts[0]
    assert after[:2] == before[:2]
    assert after[2] == before[2].replace("my card is late", shown(TEXTS[name]))
    assert found.plan == expected.plan


@pytest.mark.parametrize("name", PAYLOADS)
@pytest.mark.parametrize("place", ["record", "query", "label", "answer"])
def test_what_langchain_would_load_is_text_wherever_it_stands(name: str, place: str, sums: list[np.ndarray]) -> None:
    payload, engine = PAYLOADS[name], Fragile()
    labels = ("yes", payload) if place in {"label", "answer"} else ("yes", "no")
    records = [{"text": payload if place == "record" else "fine", "answer": labels[1]}] * 5
    private = PrivateExamples(records, label_key="answer", labels=labels, public_size=10)
    options: dict[str, Any] = {"rows": Rows(units=5), "max_queries": 9, "noise": Noise(multiplier=0.01)}
    options |= {"answers": LabelAnswers(calibrate=False)}
    made = DPVotingRunnable.from_private_examples(private, llm=engine, budget=budget(), epsilon=1e5, **options)
    query = payload if place == "query" else "now?"
    if place == "answer":
        engine._row = lambda prompt, width: [-40.0, 0.0]  # type: ignore[method-assign]
    answer = made.invoke(query)
    assert answer in labels
    assert answer == payload or place != "answer"
    assert engine.calls[-1][0] == f"text: {records[0]['text']}\nanswer: {labels[1]}\n\ntext: {query}\nanswer:"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # LangChain's loader is in beta
        assert loads(dumps({"answer": answer, "query": query}), secrets_from_env=True) == {
            "answer": answer,
            "query": query,
        }
    everything = [repr(made), dumps(made), repr(engine.calls), answer]
    assert not [text for text in everything if SECRET in text]


@pytest.mark.parametrize("name", PAYLOADS)
def test_a_released_demonstration_that_looks_like_an_object_is_text(name: str) -> None:
    released = DPFewShotPromptTemplate(
        examples=[{"text": PAYLOADS[name]}],
        example_prompt=PromptTemplate.from_template("text: {text}"),
        suffix="text: {input}",
        input_variables=["input"],
    )
    assert released.format(input=PAYLOADS[name]) == f"text: {PAYLOADS[name]}\n\ntext: {PAYLOADS[name]}"


def test_text_of_any_kind_reaches_the_model_letter_by_letter(sums: list[np.ndarray]) -> None:
    engine = Fragile()
    texts = list(TEXTS.values())
    voter(said(texts), engine, size=len(texts), rows=Rows(units=len(texts))).invoke("why?")
    assert engine.calls[-1] == tuple(f"text: {shown(text)}\nanswer: no\n\ntext: why?\nanswer:" for text in texts)
