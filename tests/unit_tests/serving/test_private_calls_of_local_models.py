"""LangChain models around a local engine in private calls: no hook of others sees a prompt, and texts are written alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from langchain_core.prompts import PromptTemplate

from langchain_dpicl import Budget, PrivateExamples
from langchain_dpicl.backends.hf.model_checks import Hooks
from langchain_dpicl.backends.langchain.texts import TextVoteBackend
from langchain_dpicl.backends.private_calls.call import OpaqueValue
from langchain_dpicl.backends.resolve import as_choice_backend
from langchain_dpicl.evaluation import Exact, dp_evaluate
from langchain_dpicl.evaluation.chains import SilentChain
from langchain_dpicl.exceptions import UnsilencableModelError
from langchain_dpicl.serving import ChatLocal, LocalLLM
from tests import tiny_hf
from tests.unit_tests.backends.hf.test_huggingface_hooks import PLACES, PROMPT, Tap
from tests.unit_tests.backends.hf_doubles import engine
from tests.unit_tests.soft_prompts.test_soft_prompt_serving import backend as prompted

pytestmark = pytest.mark.usefixtures("one_thread")

CHAIN = PromptTemplate.from_template("{text} ->")


def chat() -> ChatLocal:
    return ChatLocal(backend=engine(tokenizer=tiny_hf.byte_tokenizer(chat=True), max_prompt_tokens=64), max_tokens=2)


def llm() -> LocalLLM:
    return LocalLLM(backend=engine(max_prompt_tokens=64), max_tokens=2)


MODELS: dict[str, Callable[[], Any]] = {
    "text": llm,
    "chat": chat,
    "soft prompt": lambda: LocalLLM(backend=prompted(), max_tokens=2),
}


@pytest.fixture(params=MODELS)
def model(request: Any) -> Any:
    return MODELS[request.param]()


@pytest.fixture
def tapped() -> Iterator[tuple[Tap, Callable[[], Callable[[], None]]]]:
    """A tap, and what sets it before every module."""
    tap, undo = Tap(), []

    def set_tap() -> Callable[[], None]:
        undo.append(PLACES["before every module"](None, tap))
        return undo[-1]

    yield tap, set_tap
    for each in undo:
        each()


def chain_of(model: Any) -> SilentChain:
    return SilentChain.of(CHAIN | model, known=("text",))


def answers(chain: SilentChain, *, awaited: bool = False) -> list[bool]:
    """Whether each of some private records has an answer."""
    calls = chain.requests([OpaqueValue({"text": PROMPT})] * 3)
    return [answer is not None for answer in (asyncio.run(calls.arun()) if awaited else calls.run())]


class TestForeignHooks:
    def test_refuse_an_evaluation(self, tapped: Any) -> None:
        one, (tap, set_tap) = llm(), tapped
        set_tap()
        records = [{"text": PROMPT, "queue": "card"}] * 9
        private = PrivateExamples(records, label_key="queue", labels=("card", "transfer"), public_size=9)
        budget = Budget(epsilon=1.0, delta=1e-6)
        with pytest.raises(UnsilencableModelError, match=r"test_huggingface_hooks is in the path of .* allow_wrappers"):
            dp_evaluate(CHAIN | one, private, evaluators=Exact(), budget=budget, epsilon=0.5)
        assert not tap.heard
        assert budget.remaining_epsilon == 1.0

    def test_refuse_what_is_built_beside_them(self, model: Any, tapped: Any) -> None:
        tapped[1]()
        for build in (lambda: as_choice_backend(model, votes="text"), lambda: chain_of(model).probe()):
            with pytest.raises(UnsilencableModelError, match="is in the path of"):
                build()

    @pytest.mark.parametrize("awaited", [False, True])
    def test_that_come_later_see_no_record(self, model: Any, tapped: Any, awaited: bool) -> None:
        chain, (tap, set_tap) = chain_of(model), tapped
        assert answers(chain, awaited=awaited) == [True] * 3
        remove = set_tap()
        assert answers(chain, awaited=awaited) == [False] * 3
        assert not tap.heard
        remove()
        assert answers(chain, awaited=awaited) == [True] * 3

    def test_that_come_later_make_text_votes_abstain(self, tapped: Any) -> None:
        votes, (tap, set_tap) = as_choice_backend(llm(), votes="text"), tapped
        assert isinstance(votes, TextVoteBackend)
        set_tap()
        assert np.isneginf(votes.score_choices([PROMPT], ["card", "transfer"])).all()
        assert votes.complete([PROMPT], max_tokens=2) == [""]
        with pytest.raises(UnsilencableModelError):
            votes.score_public(PROMPT, ["card", "transfer"])
        assert not tap.heard

    def test_see_what_the_same_model_is_asked_in_public(self, model: Any, tapped: Any) -> None:
        chain, (tap, set_tap) = chain_of(model), tapped
        answers(chain)
        set_tap()
        assert model.invoke(PROMPT) is not None
        assert tap.heard
        assert list(model.stream(PROMPT))

    def test_are_looked_for_once_a_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        one, looks, check = llm(), [], Hooks.check
        chain = chain_of(one)
        monkeypatch.setattr(Hooks, "check", lambda hooks: looks.append(1) or check(hooks))
        answers(chain)
        assert len(looks) == 3
        one.generate([PROMPT] * 3)
        assert len(looks) == 3
