"""Stock Hugging Face objects of LangChain: taken apart into an engine, which their observers never hear of."""

from __future__ import annotations

import functools
import gc
from dataclasses import replace
from typing import Any

import pytest
import transformers
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from langchain_huggingface import ChatHuggingFace, HuggingFaceEndpoint, HuggingFacePipeline

from langchain_dpicl import (
    Budget,
    DPFewShotPromptTemplate,
    DPVotingRunnable,
    GenerationTask,
    LabelAnswers,
    LabelClassifier,
    PrivateExamples,
    PromptPATELabeler,
    Rows,
)
from langchain_dpicl.backends import resolve
from langchain_dpicl.backends.hf.backend import HuggingFaceBackend
from langchain_dpicl.backends.hf.engine import LocalSession
from langchain_dpicl.backends.private_calls.model_checks import pipeline_of
from langchain_dpicl.backends.resolve import as_backend, as_choice_backend, as_text_backend
from langchain_dpicl.evaluation.chains import SilentChain
from langchain_dpicl.exceptions import (
    CapabilityError,
    ConfigurationError,
    ModelCallError,
    RunInterruptedError,
    UnsilencableModelError,
)
from langchain_dpicl.generation.synthesizer import DemonstrationSynthesizer
from langchain_dpicl.options import LogitNoise
from langchain_dpicl.serving import ChatLocal, LocalLLM
from tests import tiny_hf
from tests.canary import RECORD, Recorder, leaks, observe

pytestmark = pytest.mark.usefixtures("one_thread")

LABELS = ("card", "transfer")
RECORDS = [{"text": f"{RECORD} my {label} {number}", "topic": label} for label in LABELS for number in range(60)]
EXAMPLE = PromptTemplate.from_template("{topic}: {text}")
ASKED = "my card was charged"


def pipeline(*, context: int = 96, **options: Any) -> Any:
    given = {"max_new_tokens": 4, "do_sample": True, "temperature": 3.0, "top_k": 2, **options}
    tokenizer = tiny_hf.byte_tokenizer(chat=True)
    return transformers.pipeline("text-generation", model=tiny_hf.llama(context=context), tokenizer=tokenizer, **given)


@functools.cache
def stock() -> HuggingFacePipeline:
    return HuggingFacePipeline(pipeline=pipeline())


def stock_ids() -> Any:
    return as_backend(stock()).vocabulary()


@functools.cache
def stock_chat() -> ChatHuggingFace:
    return ChatHuggingFace(llm=stock(), tokenizer=stock().pipeline.tokenizer)


MODELS = {"completion": stock, "chat": stock_chat}


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]()


def private_examples() -> PrivateExamples:
    return PrivateExamples(RECORDS, label_key="topic", labels=LABELS, public_size=dict.fromkeys(LABELS, 60))


def budget(epsilon: float = 500.0) -> Budget:
    return Budget(epsilon=epsilon, delta=1e-5)


GENERATION: dict[str, Any] = {
    "epsilon": 100.0,
    "max_tokens": 4,
    "rows": Rows(units=4, redraw_every="run"),
    "instruction": "Instruction: write a short message",
    "task": GenerationTask(record_prompt="{topic}: {text}"),
}


VOTING: dict[str, Any] = {"epsilon": 4.0, "rows": Rows(units=4)}


def template(llm: Any, **options: Any) -> DPFewShotPromptTemplate:
    return DPFewShotPromptTemplate.from_private_examples(
        private_examples(),
        llm=llm,
        budget=budget(),
        example_prompt=EXAMPLE,
        suffix="{input}",
        **{**GENERATION, **options},
    )


class TestTakingApart:
    def test_an_engine_of_its_model_and_tokenizer_is_made_once(self, model):
        engine = as_backend(model)
        assert isinstance(engine, HuggingFaceBackend)
        for take in (as_backend, as_choice_backend, as_text_backend):
            assert take(model) is take(model.bind(stop=["x"]).with_retry()) is engine
        assert engine.name == "LlamaForCausalLM"

    def test_a_chat_model_reads_messages_and_a_completion_model_text(self):
        completion, chat = as_backend(stock()), as_backend(stock_chat())
        assert (completion.chat, chat.chat) == (False, True)
        by_hand = HuggingFaceBackend(
            stock().pipeline.model, stock().pipeline.tokenizer, chat=True, max_prompt_tokens=72, max_new_tokens=24
        )
        assert chat.top_tokens(ASKED, [], top_k=5) == by_hand.top_tokens(ASKED, [], top_k=5)
        assert chat.top_tokens(ASKED, [], top_k=5) != completion.top_tokens(ASKED, [], top_k=5)

    def test_sampling_parameters_of_the_pipeline_play_no_part(self):
        hot, cold = pipeline(), pipeline(do_sample=False, temperature=1.0, top_k=50)
        rows = [as_backend(HuggingFacePipeline(pipeline=one)).top_tokens(ASKED, [], top_k=30) for one in (hot, cold)]
        assert len(rows[0]) == 30  # `hot` takes one of two
        assert rows[0] == rows[1]

    def test_a_short_context_is_shared_between_prompt_and_text(self):
        engine = as_backend(stock())
        assert (engine.max_prompt_tokens, engine.max_new_tokens) == (72, 24)
        usual = as_backend(HuggingFacePipeline(pipeline=pipeline(context=640)))
        assert (usual.max_prompt_tokens, usual.max_new_tokens) == (512, 128)

    def test_an_engine_goes_with_its_pipeline(self):
        before = len(resolve._engines)
        one = HuggingFacePipeline(pipeline=pipeline())
        as_backend(one)
        as_backend(ChatHuggingFace(llm=one, tokenizer=one.pipeline.tokenizer))
        assert len(resolve._engines) == before + 1
        del one
        gc.collect()
        assert len(resolve._engines) == before

    def test_another_model_in_the_same_pipeline_is_another_engine(self):
        one = HuggingFacePipeline(pipeline=pipeline())
        first = as_backend(one)
        one.pipeline.model = tiny_hf.llama(context=96, num_hidden_layers=1)
        assert as_backend(one) is not first
        assert as_backend(one).top_tokens(ASKED, [], top_k=3) != first.top_tokens(ASKED, [], top_k=3)

    def test_a_copy_of_the_object_has_the_same_engine(self, model):
        assert as_backend(model.model_copy(update={"verbose": True})) is as_backend(model)

    def test_a_subclass_is_taken_and_a_namesake_is_not(self):
        class Mine(HuggingFacePipeline):
            pass

        assert as_backend(Mine(pipeline=stock().pipeline)) is as_backend(stock())
        namesake = type("HuggingFacePipeline", (LocalLLM,), {"__module__": "elsewhere"})
        assert pipeline_of(namesake(backend=as_backend(stock()))) is None

    def test_another_vocabulary_in_the_chat_model_is_refused(self):
        chat = ChatHuggingFace(llm=stock(), tokenizer=tiny_hf.byte_tokenizer(chat=True, size=380))
        with pytest.raises(ConfigurationError, match="another vocabulary in ChatHuggingFace than in its pipeline"):
            as_backend(chat)

    def test_other_tasks_are_refused(self):
        other = pipeline()
        other.task = "image-text-to-text"
        with pytest.raises(CapabilityError, match="for text-generation, found one for image-text-to-text"):
            as_backend(HuggingFacePipeline(pipeline=other))

    def test_what_a_pipeline_writes_is_not_asked_for_in_private(self, model):
        chain = PromptTemplate.from_template("{text}") | model
        for ask in (lambda: as_choice_backend(model, votes="text"), lambda: SilentChain.of(chain, known=("text",))):
            with pytest.raises(UnsilencableModelError, match=rf"found {type(model).__name__} around.*take LocalLLM"):
                ask()

    def test_an_endpoint_is_not_local(self):
        class Endpoint(HuggingFaceEndpoint):
            """Built without a client."""

            def validate_environment(self) -> Any:
                return self

        remote = Endpoint.model_construct(repo_id="none", model="none")
        chat = ChatHuggingFace.model_construct(llm=remote, model_id="none", tokenizer=None)
        assert pipeline_of(chat) is None
        with pytest.raises(UnsilencableModelError, match="'llm'"):
            as_backend(chat)


class TestWork:
    def test_one_model_generates_privately_and_serves(self):
        model = ChatLocal(backend=as_backend(stock_chat()), max_tokens=6)
        prompt = template(model, noise=LogitNoise("recentered_clip"))
        assert [example["topic"] for example in prompt.examples] == list(LABELS)
        assert prompt.privacy_report["epsilon"] <= 100.0
        chain = prompt | model | StrOutputParser()
        answer = chain.invoke({"input": ASKED})
        assert answer == "".join(chain.stream({"input": ASKED})) == chain.batch([{"input": ASKED}])[0]
        assert answer != (model | StrOutputParser()).invoke(ASKED)

    def test_a_stock_object_generates_and_serves(self):
        prompt = template(stock())
        assert len(prompt.examples) == len(LABELS)
        assert isinstance((prompt | stock() | StrOutputParser()).invoke({"input": ASKED}), str)

    def test_a_stock_object_labels_by_whole_labels(self):
        labeler = PromptPATELabeler.from_private_examples(
            private_examples(),
            llm=stock_chat(),
            budget=budget(),
            public_inputs=[ASKED, "the transfer"],
            epsilon=4.0,
            rows=Rows(units=4),
            answers=LabelAnswers(abstain_below="never"),
        )
        assert set(labeler.run().labels) <= set(LABELS)
        found = LabelClassifier(stock_chat(), labels=LABELS)
        assert found.kind == LabelClassifier(as_backend(stock_chat()), labels=LABELS).kind


class TestSilence:
    """Stock objects with a handler of their own, under every observer of LangChain."""

    def watched(self, kind: type, recorder: Recorder) -> Any:
        inner = HuggingFacePipeline(pipeline=stock().pipeline, callbacks=[recorder], verbose=True)
        if kind is HuggingFacePipeline:
            return inner
        return ChatHuggingFace(llm=inner, tokenizer=stock().pipeline.tokenizer, callbacks=[recorder], verbose=True)

    @pytest.mark.loopback
    @pytest.mark.parametrize("kind", [HuggingFacePipeline, ChatHuggingFace])
    def test_nobody_hears_of_private_generation_and_votes(self, kind):
        recorder = Recorder()
        model = self.watched(kind, recorder)

        def work() -> None:
            template(model, noise=LogitNoise("recentered_clip"))
            DPVotingRunnable.from_private_examples(
                private_examples(), llm=model, budget=budget(), max_queries=1, **VOTING
            ).invoke(ASKED)
            as_text_backend(model).complete([RECORDS[0]["text"]], max_tokens=2)

        seen = observe(work, model_recorder=recorder)
        assert seen.error is None
        assert leaks(seen) == set()
        assert seen.texts["model callbacks"] == ""

    @pytest.mark.loopback
    @pytest.mark.parametrize("kind", [HuggingFacePipeline, ChatHuggingFace])
    def test_they_would_hear_of_a_private_prompt_that_is_invoked(self, kind):
        recorder = Recorder()
        model = self.watched(kind, recorder)
        seen = observe(lambda: model.invoke(RECORDS[0]["text"]), model_recorder=recorder)
        assert leaks(seen) >= {
            "model callbacks",
            "config callbacks",
            "run collector",
            "debug output",
            "LangSmith",
            "logs",
        }


class TestMixedEngines:
    """Generated demonstrations are text and any model may serve them; tokens belong to the engine that released them."""

    def test_any_model_serves_what_another_generated(self):
        released = template(stock()).released
        other = LocalLLM(
            backend=HuggingFaceBackend(tiny_hf.gpt2(480), tiny_hf.piece_tokenizer(), max_prompt_tokens=128)
        )
        prompt = DPFewShotPromptTemplate.from_released(released, example_prompt=EXAMPLE, suffix="{input}")
        assert isinstance((prompt | other.bind(max_tokens=3)).invoke({"input": ASKED}), str)

    def test_a_token_of_another_engine_is_refused(self):
        other = HuggingFaceBackend(tiny_hf.gpt2(480), tiny_hf.piece_tokenizer(), max_prompt_tokens=64)
        strange = max(set(other.vocabulary()) - set(stock_ids()))
        for refused in (
            lambda: as_backend(stock()).open(["x"], [strange]),
            lambda: as_backend(stock()).decode([strange]),
        ):
            with pytest.raises(ConfigurationError, match="tokens of another engine"):
                refused()

    def synthesizer(self, private: PrivateExamples, llm: Any, spender: Budget) -> DemonstrationSynthesizer:
        return DemonstrationSynthesizer.from_private_examples(
            private, llm=llm, budget=spender, component="demos", **GENERATION
        )

    def interrupted(self, private: PrivateExamples, spender: Budget, monkeypatch: pytest.MonkeyPatch) -> Any:
        """A synthesizer that stopped after the second token of its first text."""
        real, left = LocalSession.public, [2]

        def public(session: LocalSession) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise ModelCallError("out of order")
            return real(session)

        monkeypatch.setattr(LocalSession, "public", public)
        with pytest.raises(RunInterruptedError) as caught:
            self.synthesizer(private, stock(), spender).run(progress=False)
        monkeypatch.undo()
        return caught.value.run

    def test_an_interrupted_run_goes_on_with_its_own_engine(self, monkeypatch):
        spender = budget()
        stopped = self.interrupted(private_examples(), spender, monkeypatch)
        released = list(stopped._items[0].tokens)
        assert len(released) == 2
        left = spender.remaining_epsilon
        stopped.run(progress=False)
        assert stopped.is_finished
        assert spender.remaining_epsilon == left

    def test_an_interrupted_run_is_not_taken_up_by_another_engine(self, monkeypatch):
        """The run that takes the share begins anew; an engine slipped in by hand does not know the tokens."""
        private, spender = private_examples(), budget()
        stopped = self.interrupted(private, spender, monkeypatch)
        other = HuggingFaceBackend(tiny_hf.llama(300), tiny_hf.byte_tokenizer(size=300), max_prompt_tokens=64)
        assert self.synthesizer(private, other, spender)._items[0].tokens == []
        [draft, *_] = stopped._items
        draft.tokens[-1] = max(set(stock_ids()) - set(other.vocabulary()))
        stopped._script = replace(stopped._script, backend=other)
        with pytest.raises(ConfigurationError, match="tokens of another engine"):
            stopped.run(progress=False)
