"""Free-form answers whose private calls would all fail or be heard cost nothing: the public ones do not show it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from pydantic import Field

from langchain_dpicl import Serving
from langchain_dpicl.backends import PrivateProcess
from langchain_dpicl.backends.embedded import EmbeddedModel
from langchain_dpicl.backends.langchain.texts import TextVoteBackend
from langchain_dpicl.backends.private_calls.call import unwrap
from langchain_dpicl.exceptions import CapabilityError, DPICLError, ModelCallError
from langchain_dpicl.free_form import PublicModel
from langchain_dpicl.serving import LocalLLM
from tests import tiny_hf
from tests.forked_starts import nursery, quick_starts  # noqa: F401  fixtures
from tests.free_form_doubles import VECTORS, PublicChat, Writer, charged, embedding
from tests.unit_tests.backends.hf_doubles import engine

pytestmark = pytest.mark.usefixtures("quick_starts")


class Strict(BaseChatModel):
    """As a provider that answers 400 where more tokens are asked for than it writes."""

    @property
    def _llm_type(self) -> str:
        return "strict"

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        if kwargs.get("max_tokens", 0) > 4096:
            raise ValueError("max_tokens is too large")
        return ChatResult(generations=[ChatGeneration(message=AIMessage("ask the bank"))])


WRAPS: dict[str, Any] = {
    "model": lambda make: nullcontext(make()),
    "engine": lambda make: nullcontext(TextVoteBackend(make())),
    "process": PrivateProcess,
}


@pytest.mark.parametrize("awaited", [False, True])
@pytest.mark.parametrize("wrap", WRAPS)
def test_too_many_tokens_for_the_model_cost_nothing(wrap: str, awaited: bool) -> None:
    with WRAPS[wrap](Strict) as llm:
        component = embedding(llm=llm, answers=VECTORS.replace(max_tokens=8192))
        with pytest.raises(DPICLError):
            _ = asyncio.run(component.ainvoke("q")) if awaited else component.invoke("q")
    assert charged(component) == 0


class Thinker(Strict):
    """As a reasoning model: no text where the tokens do not suffice for its thoughts."""

    info: dict[str, Any] = Field(default_factory=lambda: {"finish_reason": "length"})
    thinks_about: str = ""

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        has_room = self.thinks_about not in messages[-1].text or kwargs.get("max_tokens", 500) >= 500
        text, info = ("ask the bank", {"finish_reason": "stop"}) if has_room else ("", self.info)
        return ChatResult(generations=[ChatGeneration(message=AIMessage(text), generation_info=info)])


class Caller(Strict):
    """Calls a tool for a question, with a sentence beside; answers anything else."""

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        calls = [{"name": "search", "args": {}, "id": "1"}] if "asks:" in messages[-1].text else []
        return ChatResult(generations=[ChatGeneration(message=AIMessage("Let me look that up.", tool_calls=calls))])


@pytest.mark.parametrize("awaited", [False, True])
@pytest.mark.parametrize("wrap", [lambda llm: llm, TextVoteBackend], ids=["model", "engine"])
def test_a_later_question_whose_answer_would_not_count_costs_nothing(wrap: Any, awaited: bool) -> None:
    component = embedding(llm=wrap(Caller()), answers=VECTORS, suffix="{input}")
    component.invoke("says: what is said")
    with pytest.raises(ModelCallError, match="no text"):
        _ = asyncio.run(component.ainvoke("asks: q")) if awaited else component.invoke("asks: q")
    assert charged(component) == 1


@pytest.mark.parametrize("awaited", [False, True])
def test_a_later_question_that_takes_longer_thoughts_costs_nothing(awaited: bool) -> None:
    component = embedding(llm=Thinker(thinks_about="hard"), answers=VECTORS)
    component.invoke("easy")
    with pytest.raises(ModelCallError, match="more room"):
        _ = asyncio.run(component.ainvoke("hard")) if awaited else component.invoke("hard")
    assert charged(component) == 1


class Halved(Writer):
    """An engine that writes for public prompts alone."""

    def complete(self, prompts: Sequence[str], *, public: bool = False, **limits: Any) -> list[str]:
        return super().complete(prompts, **limits) if public else [""] * len(prompts)

    async def acomplete(self, prompts: Sequence[str], *, public: bool = False, **limits: Any) -> list[str]:
        return self.complete(prompts, public=public, **limits)


@pytest.mark.parametrize("awaited", [False, True])
def test_an_engine_that_writes_for_public_prompts_alone_costs_nothing(awaited: bool) -> None:
    component = embedding(llm=Halved(), answers=VECTORS)
    with pytest.raises(ModelCallError, match="Check its `complete`"):
        _ = asyncio.run(component.ainvoke("q")) if awaited else component.invoke("q")
    assert charged(component) == 0


THINKERS: dict[str, Any] = {
    "a tool": Caller,
    "cut": Thinker,
    "cut, by another name": lambda: Thinker(info={"finish_reason": "model_length"}),
    "cut, without a reason": lambda: Thinker(info={}),
}


@pytest.mark.parametrize("awaited", [False, True])
@pytest.mark.parametrize("make", THINKERS.values(), ids=THINKERS)
def test_answers_without_text_that_counts_cost_nothing(make: Any, awaited: bool) -> None:
    component = embedding(llm=TextVoteBackend(make(), max_tokens=2000), answers=VECTORS)
    with pytest.raises(ModelCallError, match="no text"):
        _ = asyncio.run(component.ainvoke("q")) if awaited else component.invoke("q")
    assert charged(component) == 0


def test_a_thinking_model_answers_with_the_room_that_its_refusal_advises() -> None:
    with pytest.raises(CapabilityError, match=r"more room .*options=\{'max_tokens': \.\.\.\}"):
        embedding(llm=Thinker(), answers=VECTORS)
    component = embedding(llm=TextVoteBackend(Thinker(), options={"max_tokens": 2000}), answers=VECTORS)
    assert component.invoke("q") == "ask the bank"


AROUND: dict[str, Any] = {
    "engine": engine,
    "model": lambda model: LocalLLM(backend=engine(model), max_tokens=2),
    "text": lambda model: TextVoteBackend(LocalLLM(backend=engine(model), max_tokens=2)),
}


@pytest.mark.parametrize("around", AROUND)
def test_a_hook_that_comes_later_costs_nothing(around: str) -> None:
    model = tiny_hf.llama()
    component = embedding(llm=AROUND[around](model), answers=VECTORS.replace(max_tokens=2))
    component.invoke("before")
    handle = model.register_forward_hook(lambda module, args, output: None)
    try:
        with pytest.raises(DPICLError):
            component.invoke("after")
    finally:
        handle.remove()
    assert charged(component) == 1


class Counted(Strict):
    """Counts what it is asked without a record."""

    asked: list[str] = Field(default_factory=list)

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        self.asked += [messages[-1].text] * ("says: " not in messages[-1].text)
        return super()._generate(messages, stop, run_manager, **kwargs)


@pytest.mark.parametrize("awaited", [False, True])
def test_the_door_of_a_chat_model_is_tried_at_each_question_that_is_paid_for(awaited: bool) -> None:
    llm = Counted()
    component = embedding(llm=llm, answers=VECTORS, max_queries=2, serving=Serving(on_exhausted="zero_shot"))
    llm.asked.clear()
    for query in ("one", "two", "one", "three"):  # the third is answered from the memo, the last one without a ticket
        _ = asyncio.run(component.ainvoke(query)) if awaited else component.invoke(query)
    assert [text.removeprefix("asks: ").strip() for text in llm.asked] == ["one", "one", "two", "two", "three"]


@pytest.mark.parametrize("awaited", [False, True])
def test_an_engine_that_tells_no_failures_is_tried_once_and_where_it_said_nothing_in_public(awaited: bool) -> None:
    llm, counts = Writer(lambda prompt: "" if "silent" in prompt else "ask the bank"), []
    component = embedding(llm=llm, answers=VECTORS)
    for query in ("one", "two"):
        before = llm.public
        _ = asyncio.run(component.ainvoke(query)) if awaited else component.invoke(query)
        counts.append(llm.public - before)
    assert counts == [2, 1]
    with pytest.raises(ModelCallError, match="brought no text"):
        component.invoke("silent")


class Down(EmbeddedModel):
    """A local engine that fails from some time on: all private texts are empty, and its public calls raise."""

    down = False

    def complete(self, prompts: Sequence[str], **options: Any) -> list[str]:
        if self.down and options.get("public"):
            raise ModelCallError("the device is gone")
        return [""] * len(prompts) if self.down else ["ask the bank"] * len(prompts)

    async def acomplete(self, prompts: Sequence[str], **options: Any) -> list[str]:
        return self.complete(prompts, **options)

    def generate(self, *given: Any, **options: Any) -> Any:
        if self.down:
            raise ModelCallError("the device is gone")
        return super().generate(*given, **options)


def test_an_outage_of_a_local_model_beside_a_writer_costs_nothing() -> None:
    llm = Down()
    component = embedding(
        llm=LocalLLM(backend=llm, max_tokens=8), answers=VECTORS.replace(writer=PublicChat(says=["x"]))
    )
    component.invoke("one")
    llm.down = True
    with pytest.raises(ModelCallError):
        component.invoke("two")
    assert charged(component) == 1


@pytest.mark.parametrize("awaited", [False, True])
def test_a_blank_answer_to_a_prompt_longer_than_private_ones_is_blank(
    awaited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine(max_prompt_tokens=40, max_new_tokens=8)
    monkeypatch.setattr(llm, "complete", lambda prompts, **_: [""] * len(prompts))
    asked = PublicModel(llm, max_tokens=8, stop=()).ask("w" * 100, {})
    assert (asyncio.run(asked.arun()) if awaited else asked.run()) == ()


class Leaving(Strict):
    """Answers until it is down."""

    down: list[bool] = Field(default_factory=list)

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        if self.down:
            raise ValueError("no such key (401)")
        return super()._generate(messages, stop, run_manager, **kwargs)


CACHES: dict[str, Any] = {
    "none": Leaving,
    "of the model": lambda: Leaving(cache=InMemoryCache()),
    "of all": lambda: set_llm_cache(InMemoryCache()) or Leaving(),
    "of all, but not of the model": lambda: set_llm_cache(InMemoryCache()) or Leaving(cache=False),
    "of a bound model": lambda: Leaving(cache=InMemoryCache()).bind(user="a"),
}


@pytest.mark.parametrize("awaited", [False, True])
@pytest.mark.parametrize("cache", CACHES)
def test_an_outage_that_a_cache_hides_costs_nothing(cache: str, awaited: bool) -> None:
    def ask(query: str) -> None:
        _ = asyncio.run(component.ainvoke(query)) if awaited else component.invoke(query)

    try:
        llm = CACHES[cache]()
        component = embedding(llm=llm, answers=VECTORS, serving=Serving(memo_size=0))
        ask("one")
        unwrap(llm)[0].down.append(True)
        with pytest.raises(ModelCallError):
            ask("one")
    finally:
        set_llm_cache(None)
    assert charged(component) == 1
