"""What a user hands in becomes the best engine for the purpose, and never something less in silence."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.language_models import FakeListChatModel, FakeListLLM
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import ConfigurableField
from pydantic import ConfigDict, Field

from langchain_dpicl import Decoding
from langchain_dpicl.backends.base import ChoiceBackend, NextTokenBackend, TextBackend
from langchain_dpicl.backends.fake import FakeBackend, scripted
from langchain_dpicl.backends.langchain.backend import LangChainBackend
from langchain_dpicl.backends.langchain.logprobs import DecisionsBackend
from langchain_dpicl.backends.langchain.texts import TextVoteBackend
from langchain_dpicl.backends.resolve import as_backend, as_choice_backend, as_embeddings, as_model, as_text_backend
from langchain_dpicl.backends.rows.neighbour_rows import LocalEmbeddings
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError, ModelCallError
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.prompts import DPFewShotPromptTemplate
from langchain_dpicl.serving import ChatEmbedded, EmbeddedLLM
from tests.scripted_models import ScriptedChat, ScriptedLLM, StatusError, fixed, spread
from tests.unit_tests.backends.langchain.test_texts import TextChat, TextLLM, saying

WORDS = [f" w{i}" for i in range(20)]
TOPS = fixed(spread(WORDS))


class OnlyChoices:
    """An engine that scores continuations and nothing else."""

    def score_choices(self, prompts: Any, choices: Any) -> Any:
        return np.zeros((len(prompts), len(choices)))

    async def ascore_choices(self, prompts: Any, choices: Any) -> Any:
        return self.score_choices(prompts, choices)


def decision_model() -> Any:
    pytest.importorskip("langchain_openai.decisions")
    from tests.unit_tests.backends.langchain.test_decisions import ScriptedDecisions, hashed

    return ScriptedDecisions(answer=hashed)


class Anthropic(TextChat):
    """Stands for `langchain_anthropic.ChatAnthropic`, which is known by its name."""


Anthropic.__module__, Anthropic.__name__ = "langchain_anthropic.chat_models", "ChatAnthropic"


class TestForChoosingLabels:
    def test_engines_are_taken_as_they_are(self) -> None:
        for engine in (OnlyChoices(), FakeBackend(scripted({"a": 1.0}), max_top_k=1)):
            assert as_choice_backend(engine) is engine

    @pytest.mark.parametrize("model", [EmbeddedLLM(), ChatEmbedded()], ids=["completion", "chat"])
    def test_carried_engines_are_taken(self, model: Any) -> None:
        assert as_choice_backend(model) is model.backend
        assert as_choice_backend(model.bind(max_tokens=3).with_retry()) is model.backend

    def test_an_object_may_carry_an_engine_that_only_chooses(self) -> None:
        class Holder:
            backend = OnlyChoices()

        assert as_choice_backend(Holder()) is Holder.backend

    @pytest.mark.filterwarnings("ignore:.*OpenAIDecisions.*beta")
    def test_decision_models_give_a_probability_for_every_label(self) -> None:
        assert isinstance(as_choice_backend(decision_model()), DecisionsBackend)
        assert isinstance(as_choice_backend(decision_model().bind()), DecisionsBackend)

    @pytest.mark.parametrize("model", [ScriptedChat(answer=TOPS), ScriptedLLM(answer=TOPS)], ids=["chat", "completion"])
    def test_models_with_logprobs_give_their_top_tokens(self, model: Any) -> None:
        engine = as_choice_backend(model)
        assert isinstance(engine, LangChainBackend)
        assert engine.max_top_k == 20

    def test_a_chat_model_that_starts_each_message_anew_will_do(self) -> None:
        """Labels stand right after the prompt: no message is continued."""

        def answer(text: str) -> dict[str, float]:
            return spread(["Quartz", *WORDS]) if "|ai:" in text else spread(WORDS)

        model = ScriptedChat(answer=answer)
        with pytest.raises(CapabilityError, match="new message"):
            as_backend(model)
        engine = as_choice_backend(model)
        assert isinstance(engine, LangChainBackend)
        assert engine.top_tokens("x", [], top_k=1) == [(b" w0", pytest.approx(max(spread(WORDS).values())))]

    @pytest.mark.parametrize("kind", [ScriptedChat, ScriptedLLM])
    def test_a_model_that_ignores_logprobs_is_refused_and_told_of_votes(self, kind: Any) -> None:
        model = kind(answer=TOPS, payload=lambda tops: None)
        with pytest.raises(
            CapabilityError, match=r'or LabelAnswers\(votes="text"\) .*without logprobs\. .*embedded model\.$'
        ):
            as_choice_backend(model)
        assert isinstance(as_choice_backend(model, votes="text"), TextVoteBackend)

    def test_classes_without_logprobs_vote_without_being_asked_for_them(self) -> None:
        model = Anthropic(say=saying({}))
        assert isinstance(as_choice_backend(model.bind(stop=["x"])), TextVoteBackend)
        assert [sorted(options) for _, options in model.seen] == [["max_tokens", "temperature"]]

    def test_votes_can_be_asked_of_any_langchain_model(self) -> None:
        for model in (ScriptedChat(answer=TOPS), EmbeddedLLM(), FakeListLLM(responses=["a"]), TextLLM(say=saying({}))):
            engine = as_choice_backend(model, votes="text")
            assert isinstance(engine, TextVoteBackend)
            assert as_choice_backend(engine, votes="text") is engine
            assert as_choice_backend(engine) is engine

    def test_votes_are_not_asked_of_anything_else(self) -> None:
        for other in (OnlyChoices(), FakeBackend(scripted({"a": 1.0}), max_top_k=1), 7):
            with pytest.raises(CapabilityError, match=r'votes="text", found .*leave votes out'):
                as_choice_backend(other, votes="text")

    @pytest.mark.filterwarnings("ignore:.*OpenAIDecisions.*beta")
    def test_votes_are_not_asked_of_a_decision_model(self) -> None:
        with pytest.raises(CapabilityError, match='votes="text"'):
            as_choice_backend(decision_model(), votes="text")

    def test_there_are_no_other_votes(self) -> None:
        with pytest.raises(ConfigurationError, match="found 'images'"):
            as_choice_backend(ChatEmbedded(), votes="images")  # type: ignore[arg-type]

    @pytest.mark.parametrize("votes", [None, "text"])
    def test_wrappers_are_refused(self, votes: Any) -> None:
        chat = ScriptedChat(answer=TOPS)
        wrappers = (
            chat.with_fallbacks([chat]),
            chat | str,
            chat.configurable_fields(model_name=ConfigurableField(id="m")),
            EmbeddedLLM().with_fallbacks([EmbeddedLLM()]),
        )
        for what in wrappers:
            with pytest.raises(CapabilityError, match="the model itself"):
                as_choice_backend(what, votes=votes)

    @pytest.mark.parametrize(
        "error",
        [StatusError("no", status_code=status) for status in (401, 402, 403, 404)]
        + [TypeError("create() got an unexpected keyword argument 'bogus'")],
        ids=["401", "402", "403", "404", "argument"],
    )
    def test_votes_are_no_advice_where_something_else_is_wrong(self, error: Exception) -> None:
        model = ScriptedChat(answer=TOPS, raises={"": error})
        with pytest.raises(CapabilityError, match="rejected a public probe") as caught:
            as_choice_backend(model)
        assert "votes" not in str(caught.value)

    def test_votes_are_the_advice_where_log_probabilities_are_rejected(self) -> None:
        model = ScriptedChat(answer=TOPS, raises={"": StatusError("no logprobs here", status_code=400)})
        with pytest.raises(CapabilityError, match=r'or LabelAnswers\(votes="text"\) .*no logprobs here'):
            as_choice_backend(model)
        with pytest.raises(CapabilityError) as caught:
            as_choice_backend(ScriptedChat(answer=fixed({" w": 0.9})))
        assert "votes" not in str(caught.value)

    def test_a_class_is_no_model(self) -> None:
        for take in (as_backend, as_choice_backend):
            for cls in (ScriptedChat, FakeBackend, OnlyChoices):
                with pytest.raises(CapabilityError, match=rf"found the class .*an instance: {cls.__name__}\(\.\.\.\)"):
                    take(cls)

    def test_a_name_is_the_model_that_langchain_makes_of_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("langchain")
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        assert as_model("openai:gpt-4o").model_name == "gpt-4o"
        assert as_embeddings("openai:text-embedding-3-small").model == "text-embedding-3-small"
        assert isinstance(as_embeddings(None), LocalEmbeddings)
        for make in (as_model, as_embeddings):
            assert make(monkeypatch) is monkeypatch

    @pytest.mark.parametrize("make", [as_model, as_embeddings])
    def test_a_name_that_langchain_cannot_make_is_refused(self, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ConfigurationError, match=r'"provider:model", found \'gpt-4o\''):
            make("gpt-4o")
        pytest.importorskip("langchain")
        with pytest.raises(ConfigurationError, match="found 'nobody:x'"):
            make("nobody:x")
        for module in ("langchain.chat_models", "langchain.embeddings"):
            monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ConfigurationError, match="pip install langchain"):
            make("openai:gpt-4o")

    def test_a_server_that_is_down_is_not_taken_for_one_without_logprobs(self) -> None:
        model = ScriptedChat(answer=TOPS, raises={"": ConnectionError("refused")})
        with pytest.raises(ModelCallError, match="could not be reached"):
            as_choice_backend(model)


def members(protocol: type) -> list[str]:
    return [name for name in vars(protocol) if not name.startswith("_")]


@pytest.mark.parametrize(
    ("door", "protocol", "member"),
    [
        (door, protocol, name)
        for door, protocol in (
            (as_backend, NextTokenBackend),
            (as_text_backend, TextBackend),
            (as_choice_backend, NextTokenBackend),
            (as_choice_backend, ChoiceBackend),
        )
        for name in members(protocol)
    ],
)
def test_an_engine_that_lacks_a_member_is_told_which(door: Any, protocol: type, member: str) -> None:
    own = type("Own", (), dict.fromkeys({*members(protocol)} - {member}, "a private text"))
    around = type("Own", (), {"__getattr__": lambda _, name: getattr(own, name)})
    for one in (own, around) if sys.version_info < (3, 12) else (own,):  # later ones see nothing that is forwarded
        with pytest.raises(
            CapabilityError, match=f"found Own, which lacks {member} of {protocol.__name__}; "
        ) as caught:
            door(one())
        assert "private" not in str(caught.value)


@pytest.mark.parametrize(
    ("door", "has", "lacks"),
    [
        (as_backend, TextBackend, "atop_tokens, .*, vocabulary of NextTokenBackend"),
        (as_choice_backend, TextBackend, "ascore_choices, score_choices of ChoiceBackend"),
        (as_text_backend, NextTokenBackend, "acomplete, complete of TextBackend"),
    ],
)
def test_an_engine_for_something_else_is_told_what_it_lacks_and_a_stranger_is_not(
    door: Any, has: type, lacks: str
) -> None:
    with pytest.raises(CapabilityError, match=f"found Own, which lacks {lacks}; add"):
        door(type("Own", (), dict.fromkeys(members(has), print))())
    half = type("Own", (), dict.fromkeys(members(has)[: (len(members(has)) - 1) // 2], print))()
    for stranger in (None, object(), Path(), half):
        with pytest.raises(CapabilityError, match=r"found \w+; pass a model, or add what an engine has"):
            door(stranger)


class TestForWritingTokenByToken:
    @pytest.mark.filterwarnings("ignore:.*OpenAIDecisions.*beta")
    def test_what_only_chooses_is_refused_with_advice(self) -> None:
        for llm in (decision_model(), OnlyChoices(), TextVoteBackend(FakeListChatModel(responses=["a"]))):
            with pytest.raises(CapabilityError, match=r"LabelClassifier takes it.*reports logprobs"):
                as_backend(llm)

    def test_text_only_models_are_refused_with_advice(self) -> None:
        with pytest.raises(CapabilityError, match=r"Anthropic reports none.*TextVoteBackend"):
            as_backend(pytest.importorskip("langchain_anthropic").ChatAnthropic(model="claude-none", api_key="none"))


class Slow(ScriptedChat):
    """A model whose blocking calls wait until somebody wakes it, and which remembers where it ran."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    threads: list[int] = Field(default_factory=list)
    asleep: threading.Event = Field(default_factory=threading.Event)
    woken: threading.Event = Field(default_factory=threading.Event)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        self.threads.append(threading.get_ident())
        self.asleep.set()
        assert self.woken.wait(3_600)  # by the loop, which a probe on it would hold up
        return super()._generate(*args, **kwargs)

    async def _agenerate(self, *args: Any, **kwargs: Any) -> Any:
        return ScriptedChat._generate(self, *args, **kwargs)


OPTIONS: dict[str, Any] = {
    "epsilon": 8.0,
    "example_prompt": PromptTemplate.from_template("text: {text}"),
    "suffix": "text: {input}",
    "max_tokens": 1,
}


class TestAwaitedConstruction:
    def private(self) -> PrivateExamples:
        return PrivateExamples([{"text": f"case {number}"} for number in range(40)], public_size=40)

    async def test_the_event_loop_goes_on_while_a_model_is_probed(self) -> None:
        model = Slow(answer=TOPS)

        async def wake() -> None:
            await asyncio.to_thread(model.asleep.wait, 3_600)
            model.woken.set()

        waking = asyncio.create_task(wake())
        template = await DPFewShotPromptTemplate.afrom_private_examples(
            self.private(), llm=model, budget=Budget(epsilon=8.0, delta=1e-3), **OPTIONS
        )
        await waking
        assert set(template.examples[0]["text"].split()) <= {word.strip() for word in WORDS}
        assert model.threads
        assert threading.get_ident() not in model.threads

    async def test_the_probe_sees_the_callers_context(self) -> None:
        mark: contextvars.ContextVar[str] = contextvars.ContextVar("mark", default="none")
        seen: list[str] = []

        class Holder:
            @property
            def backend(self) -> FakeBackend:
                seen.append(mark.get())
                return FakeBackend(scripted({"a": 1.0}), vocabulary=["a"])

        mark.set("mine")
        await DPFewShotPromptTemplate.afrom_private_examples(
            self.private(),
            llm=Holder(),
            budget=Budget(epsilon=8.0, delta=1e-3),
            **OPTIONS,
            decoding=Decoding(candidates="all"),
        )
        assert seen == ["mine"]

    async def test_template_arguments_are_refused_before_the_model_is_asked(self) -> None:
        model = Slow(answer=TOPS)
        options = {**OPTIONS, "example_prompt": PromptTemplate.from_template("{unknown}")}
        with pytest.raises(ConfigurationError, match="unknown"):
            await DPFewShotPromptTemplate.afrom_private_examples(
                self.private(), llm=model, budget=Budget(epsilon=8.0, delta=1e-3), **options
            )
        assert model.threads == []

    async def test_a_model_that_will_not_do_is_refused_before_anything_is_spent(self) -> None:
        budget = Budget(epsilon=8.0, delta=1e-3)
        with pytest.raises(CapabilityError, match="without logprobs"):
            await DPFewShotPromptTemplate.afrom_private_examples(
                self.private(), llm=FakeListChatModel(responses=["a"]), budget=budget, **OPTIONS
            )
        assert budget.report().to_dict()["shares"] == []
