"""A wrong call of a constructor says how to build the component, and carries nothing of what was passed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.documents import Document
from pydantic import BaseModel, TypeAdapter, ValidationError

from langchain_dpicl import (
    Budget,
    ChatEmbedded,
    ChatLocal,
    DemonstrationSynthesizer,
    DocumentSynthesizer,
    DPFewShotChatMessagePromptTemplate,
    DPFewShotPromptTemplate,
    DPFreeFormRunnable,
    DPRetrievalFreeFormRunnable,
    DPRetrievalVotingRunnable,
    DPVotingRunnable,
    EmbeddedLLM,
    LabelClassifier,
    LocalLLM,
    PrivateEvolution,
    PrivateExamples,
    PromptDPSGD,
    PromptPATEExampleSelector,
    PromptPATELabeler,
    UnitCounter,
    ValueDiscovery,
    WordDiscovery,
)
from langchain_dpicl.backends.fake import FakeBackend, scripted
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.soft_prompts.serving import SoftPromptClassifier

CANARY = "zx-constructor-canary-40"
RECORDS = [{"text": CANARY, "queue": "card"}, {"text": CANARY + " again", "queue": CANARY}]
CARRIED = {"llm": None, "labels": ("card", CANARY), "budget": None}

MODELS: dict[type[Any], dict[str, Any]] = {
    DPVotingRunnable: {"examples": RECORDS, **CARRIED},
    DPFreeFormRunnable: {"private": RECORDS},
    DPRetrievalVotingRunnable: {"examples": RECORDS, "on_exhausted": CANARY, **CARRIED},
    DPRetrievalFreeFormRunnable: {"private": RECORDS, "gives_receipts": RECORDS},
    DPFewShotPromptTemplate: {"llm": CANARY, "epsilon": CANARY},
    DPFewShotChatMessagePromptTemplate: {"examples": CANARY, "private": RECORDS},
}
SERVED: dict[type[Any], dict[str, Any]] = {
    EmbeddedLLM: {"max_tokens": RECORDS},
    ChatEmbedded: {"stop": RECORDS, "private": RECORDS},
    LocalLLM: {"backend": CANARY},
    ChatLocal: {"examples": RECORDS},
}
PLAIN: dict[str, Callable[[], object]] = {
    "PromptPATEExampleSelector.from_private_examples(private, llm=..., public_inputs=..., max_queries=..., ": (
        lambda: PromptPATEExampleSelector(examples=RECORDS, k=4)
    ),
    "DemonstrationSynthesizer.from_private_examples(private, llm=..., budget=..., epsilon=..., ...)": (
        lambda: DemonstrationSynthesizer(llm=CANARY)
    ),
    "LabelClassifier(llm, labels=..., prompt=..., ...)": lambda: LabelClassifier(records=RECORDS),
    "SoftPromptClassifier(model, prompts, ...)": lambda: SoftPromptClassifier(model=CANARY),
    "PromptDPSGD.from_private_examples(private, llm=..., training=..., budget=..., epsilon=..., ...)": lambda: (
        PromptDPSGD(examples=RECORDS)
    ),
    "PromptPATELabeler.from_private_examples(private, ": lambda: PromptPATELabeler(examples=RECORDS),
    "PrivateEvolution.from_private_examples(private, ": lambda: PrivateEvolution(RECORDS),
    "DocumentSynthesizer.from_private_examples(private, ": lambda: DocumentSynthesizer(documents=RECORDS),
    "UnitCounter.from_private_examples(private, ": lambda: UnitCounter(RECORDS),
    "ValueDiscovery.from_private_examples(private, field=..., ": lambda: ValueDiscovery(RECORDS, "queue"),
    "WordDiscovery.from_private_examples(private, ": lambda: WordDiscovery(RECORDS),
    "PrivateExamples(records, public_size=...)": lambda: PrivateExamples(RECORDS),
}


def told(error: BaseException) -> str:
    """All that a log would hold of an error, its chain included."""
    lines = [str(error), repr(error), repr(error.args), repr(vars(error) if hasattr(error, "__dict__") else "")]
    if isinstance(error, ValidationError):
        lines += [repr(error.errors()), error.json()]
    for other in (error.__cause__, error.__context__):
        lines += [] if other is None else [told(other)]
    return "\n".join(lines)


@pytest.mark.parametrize("cls", MODELS, ids=lambda cls: cls.__name__)
def test_a_wrong_call_of_a_model_says_how_to_build_it_and_carries_no_input(cls: type[BaseModel]) -> None:
    for build in (
        lambda: cls(**MODELS[cls]),
        lambda: cls.model_validate(MODELS[cls]),
        lambda: cls.model_validate(RECORDS),
        lambda: cls.model_validate_json(json.dumps({"examples": CANARY})),
        lambda: cls.model_validate_json('{"examples": "' + CANARY),
        lambda: cls(RECORDS),
    ):
        with pytest.raises(
            ConfigurationError, match=rf"Build it with {cls.__name__}.from_private_examples\(private, "
        ) as caught:
            build()
        assert CANARY not in told(caught.value)
        assert caught.value.__cause__ is caught.value.__context__ is None


@pytest.mark.parametrize("cls", MODELS, ids=lambda cls: cls.__name__)
def test_every_other_way_to_validation_carries_no_input_either(cls: type[BaseModel]) -> None:
    class Around(BaseModel):
        inner: cls  # type: ignore[valid-type]

    ways: list[Callable[[], object]] = [
        lambda: TypeAdapter(cls).validate_python(MODELS[cls]),
        lambda: cls.model_validate_json(json.dumps({"examples": CANARY, "private": RECORDS})),
        lambda: cls.model_validate_json('{"examples": "' + CANARY),  # cut off
        lambda: cls.model_validate_json(json.dumps(RECORDS)),
        lambda: cls.parse_raw('{"examples": "' + CANARY),
        lambda: cls.model_validate_strings({"examples": CANARY}),
        lambda: cls.parse_obj(MODELS[cls]),  # what older code calls
        lambda: Around.model_validate({"inner": MODELS[cls]}),
        lambda: TypeAdapter(list[cls]).validate_python([MODELS[cls]]),  # type: ignore[valid-type]
    ]
    for way in ways:
        with pytest.raises((ConfigurationError, ValidationError)) as caught:
            way()
        assert CANARY not in told(caught.value)


@pytest.mark.parametrize("cls", SERVED, ids=lambda cls: cls.__name__)
def test_a_wrong_call_of_a_local_model_or_classifier_carries_no_input(cls: type[BaseModel]) -> None:
    for build in (lambda: cls(**SERVED[cls]), lambda: cls.model_validate(SERVED[cls])):
        with pytest.raises(ConfigurationError) as caught:
            build()
        assert CANARY not in told(caught.value)
        assert caught.value.__cause__ is caught.value.__context__ is None
    with pytest.raises((ConfigurationError, ValidationError)) as kept:
        TypeAdapter(cls).validate_python(SERVED[cls])
    assert CANARY not in told(kept.value)


def voter() -> DPVotingRunnable:
    private = PrivateExamples(RECORDS[:1], label_key="queue", labels=("card", "wire"), public_size=500)
    engine = FakeBackend(scripted({" card": 1.0}), max_top_k=2)
    budget = Budget(epsilon=1.0, delta=1e-6)
    return DPVotingRunnable.from_private_examples(private, llm=engine, budget=budget, epsilon=1.0, max_queries=3)


def test_what_reaches_no_validation_shows_nothing() -> None:
    made = voter()
    for copied in (
        made.model_copy(update={"private": RECORDS}),
        made.copy(update={"private": RECORDS}),
    ):
        assert CANARY not in repr(copied) + str(copied) + str(copied.model_dump())
    built = DPVotingRunnable.model_construct(private=RECORDS, examples=RECORDS, share=None, budget=None)
    assert CANARY not in str(built.model_dump())


def test_one_wrong_field_is_named_and_a_good_component_passes_on() -> None:
    made = voter()
    with pytest.raises(ConfigurationError, match="on_exhausted: Input") as caught:
        DPVotingRunnable(**{**dict(made), "on_exhausted": CANARY})
    assert CANARY not in told(caught.value)
    assert DPVotingRunnable.model_validate(made) is made
    assert type(DPVotingRunnable(**dict(made))) is DPVotingRunnable


def test_our_own_checks_are_told_as_they_are() -> None:
    with pytest.raises(ConfigurationError, match="template_format: expected 'f-string'"):
        DPFewShotPromptTemplate.model_validate({"template_format": "jinja2", "examples": RECORDS})


@pytest.mark.parametrize("how", PLAIN)
def test_a_wrong_call_of_another_component_says_how_to_build_it(how: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        PLAIN[how]()
    assert how in str(caught.value)
    assert CANARY not in told(caught.value)
    assert caught.value.__cause__ is caught.value.__context__ is None


OPTIONS = [
    "component",
    "max_queries",
    "epsilon",
    "noise",
    "serving",
    "answers",
    "rows",
    "task",
    "prefix",
]
DECLARED = ["public_size", "dataset_id", "text_key", "label_key", "labels", "unit_key", "fields", "max_chars"]


@pytest.mark.parametrize("wrong", [RECORDS, RECORDS[0], (RECORDS,), [CANARY, RECORDS], Document(CANARY), CANARY * 20])
@pytest.mark.parametrize("name", [*OPTIONS, *DECLARED])
def test_records_in_the_place_of_a_public_argument_are_not_shown(name: str, wrong: Any) -> None:
    if isinstance(wrong, str) and name not in {"component", "dataset_id"}:
        wrong = [{"text": wrong}]
    if isinstance(wrong, dict) and name in {"labels", "fields"}:
        wrong = [wrong]  # of a mapping the keys are taken
    given: dict[str, Any] = {"label_key": "queue", "labels": ("card", "wire"), "public_size": 500}
    private = PrivateExamples(RECORDS[:1], **given)
    engine = FakeBackend(scripted({" card": 1.0}), max_top_k=2)
    shares: dict[str, Any] = {"epsilon": 1.0, "max_queries": 3, "budget": Budget(epsilon=1.0, delta=1e-6)}
    with pytest.raises(ConfigurationError) as caught:
        if name in OPTIONS:
            DPVotingRunnable.from_private_examples(private, llm=engine, **{**shares, name: wrong})
        else:
            PrivateExamples(RECORDS[:1], **{**given, name: wrong})
    assert CANARY not in told(caught.value)


def test_what_is_bound_is_private_examples() -> None:
    with pytest.raises(ConfigurationError, match="private: expected PrivateExamples, found 'list'") as caught:
        Budget(epsilon=1.0, delta=1e-6).bind(RECORDS)  # type: ignore[arg-type]
    assert CANARY not in told(caught.value)


def test_what_goes_wrong_inside_a_constructor_stays_what_it_is() -> None:
    with pytest.raises(ConfigurationError, match="SoftPrompt"):
        SoftPromptClassifier(FakeBackend, "no prompt")
