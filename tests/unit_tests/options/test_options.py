"""Tests that option values are frozen, checked, documented, and the same in Python, TOML and JSON."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import math
import pickle
import re
import tomllib
from typing import Any

import pytest
from langchain_core.prompts import FewShotPromptTemplate, PromptTemplate
from pydantic import BaseModel

from langchain_dpicl import options
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.options import (
    OPTIONS,
    ByLength,
    ConfidentGNMax,
    Decoding,
    EmbeddingAnswers,
    Evolution,
    FewShotTask,
    GenerationTask,
    KeywordAnswers,
    LabelAnswers,
    LocalExecutor,
    LogitNoise,
    Noise,
    OpenLabel,
    Option,
    Retrieval,
    Rows,
    Serving,
    Similar,
    SoftPromptConfig,
    Student,
    Topics,
    TrainableModel,
    Training,
    noise_of,
)
from langchain_dpicl.planning.expected_utility import RowDesign

FULL: tuple[Option, ...] = (
    Rows(slots=20, shots=4, sampling="disjoint", fill=1.25, redraw_every="run"),
    Rows(units=40, redraw_every=3),
    Noise("gaussian", multiplier=2.5, delta=1e-7),
    LogitNoise("clip_and_blend", clip=3.0, blend_weight=0.5, center="max", multiplier=1.0, delta=1e-8),
    LogitNoise("difference_clip", free_below=0.3, max_private_tokens=10),
    ConfidentGNMax(120.0, 40.0, 20.0, max_answers=7, delta=1e-7),
    FewShotTask(
        "{text} {queue}", "{input}", prefix="P", example_separator="|", labels=("a", "b"), verbalizers={"a": ("x", "y")}
    ),
    OpenLabel("topic", ("a", "b"), 3),
    GenerationTask("Write.", "{queue}: {text}", open_label=OpenLabel("topic"), variation_prompt="{text}", hints=("h",)),
    Decoding(candidates="all", stop=("\n", "."), temperature=0.5, top_k=3, top_p=0.9),
    LabelAnswers(
        votes="soft",
        calibrate=True,
        content_free=("N/A", ""),
        abstain_below=0.25,
        abstain_label="none",
        scores=True,
        other_label="",
    ),
    LabelAnswers(min_votes=3.5),
    EmbeddingAnswers(candidates=("a",), num_candidates=3, writer="openai:m", max_tokens=9, stop=()),
    KeywordAnswers(keywords=("a", "b"), num_keywords=2, answer_prompt="{keywords}"),
    KeywordAnswers(num_keywords=2, max_keywords=5),
    Serving(max_query_chars=99, memo_size=0, memo="answers.db", tenant_max_queries=5, on_exhausted="zero_shot"),
    Retrieval("openai:e", similarity_threshold=0.5, participations=20, slots="per_unit", documents_per_unit=2),
    Topics(("a", "b"), 2, keywords_per_unit=1, epsilon_share=0.5, min_units=9, words=4, pairs=True),
    Evolution(rounds=2, num_candidates=5, neighbours=2, threshold=1.5, candidates={"a": ("x",)}),
    Student(llm="openai:m", shots=2, num_candidates=3, num_validation=4, seed=-1, calibrate=False),
    Similar("openai:e", k=2, fetch_k=5, input_keys=("input",)),
    ByLength(max_length=9),
    SoftPromptConfig("prefix", 5, init_text="Hi"),
    Training(expected_batch_size=64, epochs=2.5, l2_clip_norm=1.0, optimizer="sgd", schedule="linear"),
    Training(expected_batch_size=64, steps=7),
    TrainableModel("./model", micro_batch=2, device="cuda", dtype="bfloat16"),
    LocalExecutor(max_concurrency=2),
)
"""At least one value of each class; together they set every field that is a JSON value."""


class TestValues:
    def test_every_class_is_here(self) -> None:
        assert {type(value) for value in FULL} == set(OPTIONS)
        assert {option.__name__ for option in OPTIONS} == set(options.__all__) - {"Option"}

    @pytest.mark.parametrize("value", FULL, ids=lambda value: type(value).__name__)
    def test_a_value_is_the_same_after_json_and_toml(self, value: Option) -> None:
        shown = value.to_dict()
        assert type(value).from_dict(json.loads(json.dumps(shown))) == value
        toml = "\n".join(f"{name} = {_toml(part)}" for name, part in shown.items())
        assert type(value).from_dict(tomllib.loads(toml)) == value

    @pytest.mark.parametrize("value", FULL, ids=lambda value: type(value).__name__)
    def test_a_value_is_frozen_copied_and_pickled(self, value: Option) -> None:
        name = dataclasses.fields(value)[0].name  # type: ignore[arg-type]
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, getattr(value, name))
        assert pickle.loads(pickle.dumps(value)) == value  # noqa: S301
        assert copy.deepcopy(value) == value == value.replace()

    def test_what_is_not_given_is_not_shown(self) -> None:
        assert Rows().to_dict() == {}
        assert repr(Rows(slots=20, shots=4)) == "Rows(slots=20, shots=4)"
        assert "<td>20</td>" in Rows(slots=20)._repr_html_()

    def test_a_live_object_is_shown_by_its_name(self) -> None:
        class Model:
            model_name = "the-model"
            hidden = "never shown"

        model: Any = Model()
        assert Student(llm=model).to_dict() == {"llm": "the-model"}
        assert repr(TrainableModel(object())) == "TrainableModel(model='object')"

    def test_no_field_of_a_live_object_is_shown(self) -> None:
        class Client(BaseModel):
            address: str = "http://host/canary"

        model: Any = Client()
        assert Student(llm=model).to_dict() == {"llm": "Client"}
        assert "canary" not in repr(Serving(memo=model)) + Serving(memo=model)._repr_html_()

    def test_a_mapping_given_later_changed_does_not_change_the_value(self) -> None:
        given: dict[str, Any] = {"a": ("x",)}
        task = FewShotTask(verbalizers=given)
        given["b"] = "y"
        assert task.verbalizers == {"a": ("x",)}


class TestChecks:
    @pytest.mark.parametrize("given", [{"text": "canary"}, ["canary"], ({"text": "canary"},)])
    def test_a_collection_in_the_wrong_place_is_shown_by_its_type(self, given: Any) -> None:
        for build in (lambda: Rows(slots=given), lambda: Noise(given), lambda: Topics(num_topics=given)):
            with pytest.raises(ConfigurationError, match=type(given).__name__) as caught:
                build()
            assert "canary" not in str(caught.value)

    @pytest.mark.parametrize(
        ("build", "message"),
        [
            (lambda: Rows(slots=0), "Rows.slots: expected a number greater than or equal to 1, found 0"),
            (lambda: Rows(slots=True), "Rows.slots: expected a valid integer"),
            (lambda: Rows(slots=2, units=2), "expected slots or units"),
            (lambda: Rows(units=2, shots=2), "shots=1, sampling='poisson'"),
            (lambda: Rows(units=2, sampling="fixed"), "shots=1, sampling='poisson'"),
            (lambda: Rows(fill=2.0), "Rows.fill: expected None without slots"),
            (lambda: Rows(slots=2, sampling="fixed", fill=2.0), "Rows.fill: expected None"),
            (lambda: Rows(slots=2, sampling="partition", fill=2.0), "Rows.fill: expected None"),
            (lambda: Rows.from_dict(5), "Rows: expected a table"),  # type: ignore[arg-type]
            (lambda: Rows(redraw_every="text"), "a valid integer or 'run'"),  # type: ignore[arg-type]
            (lambda: Rows(slots=2**63), "less than"),
            (lambda: Noise("gausian"), "'gumbel', 'gaussian' or 'permute_and_flip', found 'gausian'"),  # type: ignore[arg-type]
            (lambda: Noise(multiplier=math.nan), "finite"),
            (lambda: Noise(delta=1.0), "less than 1"),
            (lambda: LogitNoise("gumbel"), "recentered_clip"),  # type: ignore[arg-type]
            (lambda: LogitNoise("difference_clip", center="max"), "clip_and_blend"),
            (lambda: LogitNoise("difference_clip", free_below=0.3), "max_private_tokens"),
            (lambda: FewShotTask(labels="ab"), "a list of texts, found 'ab'"),  # type: ignore[arg-type]
            (lambda: LabelAnswers(abstain_below=0.5, min_votes=2.0), "abstain_below or min_votes"),
            (lambda: LabelAnswers(scores=1), "a valid boolean"),  # type: ignore[arg-type]
            (lambda: Decoding(top_p=1.5), "less than or equal to 1"),
            (lambda: Training(expected_batch_size=5), "expected epochs or steps, found 'neither'"),
            (lambda: Training(expected_batch_size=5, epochs=1.0, steps=1), "expected epochs or steps, found 'both'"),
            (lambda: Retrieval(similarity_threshold=0.5), "participations"),  # type: ignore[call-arg]
            (lambda: GenerationTask(open_label={"key": "a"}), "an instance of OpenLabel"),  # type: ignore[arg-type]
            (lambda: GenerationTask(hints="Shout."), "GenerationTask.hints: expected a list"),  # type: ignore[arg-type]
            (lambda: Rows(units=0), "Rows.units.*than or equal to 1"),
            (lambda: Rows(shots=0), "Rows.shots.*than or equal to 1"),
            (lambda: Rows(redraw_every=0), "Rows.redraw_every.*than or equal to 1 or 'run'"),
            (lambda: Rows(slots=2, fill=0.0), "Rows.fill.*greater than 0"),
            (lambda: Noise(multiplier=0.0), "Noise.multiplier.*greater than 0"),
            (lambda: Noise("gaussian", free_below=0.5), "found 'free_below'"),  # type: ignore[call-arg]
            (lambda: LogitNoise("recentered_clip", blend_weight=0.5), "clip_and_blend"),
            (lambda: LogitNoise("clip_and_blend", blend_weight=0.0), "blend_weight.*greater than 0"),
            (lambda: LogitNoise("clip_and_blend", blend_weight=1.1), "blend_weight.*less than or equal to 1"),
            (lambda: LogitNoise("clip_and_blend", center="mean"), "'max' or 'none'"),  # type: ignore[arg-type]
            (lambda: LogitNoise("recentered_clip", max_private_tokens=3), "free_below and max_private_tokens"),
            (lambda: LogitNoise("recentered_clip", free_below=1.0, max_private_tokens=3), "free_below.*less than 1"),
            (
                lambda: LogitNoise("recentered_clip", free_below=0.5, max_private_tokens=0),
                "max_private_tokens.*than or equal to 1",
            ),
            (lambda: LogitNoise("recentered_clip", clip=-1.0), "LogitNoise.clip.*greater than 0"),
            (lambda: Decoding(candidates=0), "Decoding.candidates.*than or equal to 1 or 'all'"),
            (lambda: Decoding(temperature=0.0), "Decoding.temperature.*greater than 0"),
            (lambda: Decoding(top_p=0.0), "Decoding.top_p.*greater than 0"),
            (lambda: Decoding(stop="\n"), "Decoding.stop: expected a list"),  # type: ignore[arg-type]
            (lambda: Topics(num_topics=0), "Topics.num_topics.*than or equal to 1"),
            (lambda: Topics(keywords_per_unit=0), "Topics.keywords_per_unit.*than or equal to 1"),
            (lambda: Topics(epsilon_share=1.0), "Topics.epsilon_share.*less than 1"),
            (lambda: Topics(min_units=0), "Topics.min_units.*than or equal to 1"),
            (lambda: Evolution(candidates="a card"), "Evolution.candidates.*a list"),
            (lambda: Evolution(rounds=0), "Evolution.rounds.*than or equal to 1"),
            (lambda: Evolution(neighbours=0), "Evolution.neighbours.*than or equal to 1"),
            (lambda: Evolution(threshold=-1.0), "Evolution.threshold.*than or equal to 0"),
            (lambda: Serving(on_exhausted="x"), "'raise' or 'zero_shot'"),  # type: ignore[arg-type]
            (lambda: KeywordAnswers(keywords=("a",), candidates=("a", "b")), "KeywordAnswers: expected keywords= or"),
            (lambda: KeywordAnswers(keywords=("a",), max_keywords=5), "KeywordAnswers: expected keywords= or"),
            (lambda: KeywordAnswers(keywords=("a",), num_keywords=0), "num_keywords.*than or equal to 1"),
            (lambda: EmbeddingAnswers(num_candidates=1), "num_candidates.*at least 2"),
            (lambda: EmbeddingAnswers(max_tokens=0), "max_tokens.*than or equal to 1"),
            (lambda: EmbeddingAnswers(stop="\n"), "EmbeddingAnswers.stop: expected a list"),  # type: ignore[arg-type]
        ],
    )
    def test_a_wrong_field_is_refused(self, build: Any, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            build()

    def test_an_unknown_name_is_refused_with_the_closest_one(self) -> None:
        with pytest.raises(ConfigurationError, match=r"found 'slot'\. Did you mean 'slots'\?"):
            Rows(slot=3)  # type: ignore[call-arg]
        with pytest.raises(ConfigurationError, match=r"found 'slot'\. Did you mean 'slots'\?"):
            Rows.from_dict({"slot": 3})
        with pytest.raises(ConfigurationError, match=r"OpenLabel.*found 'vals'\. Did you mean 'values'\?"):
            GenerationTask.from_dict({"open_label": {"key": "a", "vals": ["b"]}})

    def test_every_field_is_checked(self) -> None:
        class Alien:
            """No field but those of live objects takes it."""

        free = {"example_prompt", "suffix", "prefix", "record_prompt", "variation_prompt", "answer_prompt", "grammar"}
        free |= {"embeddings", "candidates", "writer", "llm", "memo", "balances", "model", "tokenizer", "validation"}
        free |= {"get_text_length"}
        for value in FULL:
            for field in dataclasses.fields(value):  # type: ignore[arg-type]
                if field.name in free and not isinstance(value, Decoding):
                    continue
                if field.name in {"grammar", "released_words"}:
                    continue
                with pytest.raises(ConfigurationError):
                    value.replace(**{field.name: Alien()})


class TestWords:
    @pytest.mark.parametrize("option", OPTIONS)
    def test_every_field_is_documented_once(self, option: type[Option]) -> None:
        names = [f.name for f in dataclasses.fields(option)]  # type: ignore[arg-type]
        listed = re.findall(r"^  (\w+): ", inspect.getdoc(option) or "", re.MULTILINE)
        assert listed == names

    @pytest.mark.parametrize("option", OPTIONS)
    def test_the_schema_names_every_field(self, option: type[Option]) -> None:
        schema = option.json_schema()
        assert set(schema["properties"]) == {f.name for f in dataclasses.fields(option)}  # type: ignore[arg-type]
        assert schema["additionalProperties"] is False

    @pytest.mark.parametrize("option", OPTIONS)
    def test_none_is_never_a_choice(self, option: type[Option]) -> None:
        for f in dataclasses.fields(option):  # type: ignore[arg-type]
            assert "None" not in str(f.type) or f.default is None, f"{option.__name__}.{f.name}"

    def test_the_number_of_fields_is_bounded(self) -> None:
        counts = [len(dataclasses.fields(option)) for option in OPTIONS]  # type: ignore[arg-type]
        assert sum(counts) <= 128


class TestUse:
    def test_rows_become_a_design(self) -> None:
        assert RowDesign.of(None) is None
        assert RowDesign.of(Rows(redraw_every="run")) is None
        assert RowDesign.of(Rows(slots=20, shots=4)) == RowDesign("slots", 20, 4, "poisson", 1.0)
        assert RowDesign.of(Rows(slots=20)) == RowDesign("slots", 20, 1, "poisson", 1.5)
        assert RowDesign.of(Rows(units=30)) == RowDesign("units", 30, 1, "poisson", 1.0)
        assert RowDesign.of(Rows(shots=4), smallest_size=10) == RowDesign("slots", 10, 4, "poisson", 1.0)
        assert RowDesign.of(Rows(slots=8, sampling="fixed")) == RowDesign("slots", 8, 1, "fixed", 1.0)

    def test_a_name_is_short_for_its_noise(self) -> None:
        assert noise_of(None, Noise, LogitNoise) == Noise()
        assert noise_of("gaussian", Noise, LogitNoise) == Noise("gaussian")
        assert noise_of("difference_clip", Noise, LogitNoise) == LogitNoise("difference_clip")
        assert noise_of(ConfidentGNMax(1.0, 2.0, 3.0), Noise, ConfidentGNMax) == ConfidentGNMax(1.0, 2.0, 3.0)
        with pytest.raises(ConfigurationError, match="'gumbel', 'gaussian', 'permute_and_flip', Noise"):
            noise_of("difference_clip", Noise)
        with pytest.raises(ConfigurationError, match="noise"):
            noise_of(LogitNoise("difference_clip"), Noise)

    def test_wording_is_flat_or_a_task_and_never_both(self) -> None:
        task = FewShotTask("{text}", "{input}", prefix="P")
        assert FewShotTask.of(task, None, None) is task
        assert FewShotTask.of(None, "{text}", "{input}", "P") == task
        assert FewShotTask.of(None, None, None) == FewShotTask()
        for flat in ({"example_prompt": "{text}"}, {"suffix": "{input}"}, {"prefix": "P"}):
            with pytest.raises(ConfigurationError, match=f"task: expected .*{next(iter(flat))}"):
                FewShotTask.of(task, **{"example_prompt": None, "suffix": None, **flat})
        with pytest.raises(ConfigurationError, match="task: expected FewShotTask"):
            FewShotTask.of("{text}", None, None)  # type: ignore[arg-type]

    def test_fewer_are_not_fetched_than_shown(self) -> None:
        assert Similar(None, k=4, fetch_k=4).fetch_k == 4
        with pytest.raises(ConfigurationError, match="fetch_k"):
            Similar(None, k=5, fetch_k=4)

    def test_the_wording_of_a_langchain_template_is_taken(self) -> None:
        example = PromptTemplate.from_template("{text} -> {queue}")
        template = FewShotPromptTemplate(examples=[], example_prompt=example, suffix="{input} ->", prefix="Queues:")
        task = FewShotTask.from_template(template, labels=("a", "b"))
        assert (task.suffix, task.prefix, task.labels) == ("{input} ->", "Queues:", ("a", "b"))
        assert task.to_dict()["example_prompt"] == "{text} -> {queue}"
        jinja = FewShotPromptTemplate(
            examples=[],
            example_prompt=PromptTemplate.from_template("{{ text }}", template_format="jinja2"),
            suffix="{{ input }}",
            template_format="jinja2",
        )
        for wrong in (jinja, template.partial(input="x"), 5):
            with pytest.raises(ConfigurationError, match="f-string format without partial variables"):
                FewShotTask.from_template(wrong)  # type: ignore[arg-type]


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(part)}" for key, part in value.items()) + "}"
    return json.dumps(value)
