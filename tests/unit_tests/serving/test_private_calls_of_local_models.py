"""LangChain models around a local engine in private calls: no hook of others sees a prompt, and texts are written alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
import torch
from langchain_core.prompts import PromptTemplate

from langchain_dpicl import Budget, PrivateExamples, serving
from langchain_dpicl.backends.hf.completion import _GrowingRows
from langchain_dpicl.backends.hf.engine import Engine
from langchain_dpicl.backends.hf.model_checks import Hooks
from langchain_dpicl.backends.langchain.texts import TextVoteBackend
from langchain_dpicl.backends.private_calls.call import OpaqueValue
from langchain_dpicl.backends.resolve import as_choice_backend
from langchain_dpicl.backends.sync_async import run_async, run_sync
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


def answers(chain: SilentChain, texts: Sequence[str] = (PROMPT,) * 3, *, awaited: bool = False) -> list[bool]:
    """Whether each of some private records has an answer."""
    walk = chain.answers([OpaqueValue({"text": text}) for text in texts])
    return [answer is not None for answer in (asyncio.run(run_async(walk)) if awaited else run_sync(walk))]


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

    def test_are_looked_for_once_a_call_when_its_turn_has_come(self, monkeypatch: pytest.MonkeyPatch) -> None:
        one, looks, check = llm(), [], Hooks.check
        chain, lock = chain_of(one), one.backend._engine.lock
        monkeypatch.setattr(Hooks, "check", lambda hooks: looks.append(lock._is_owned()) or check(hooks))
        answers(chain)
        assert looks == [True] * 3
        one.generate([PROMPT] * 3)
        assert len(looks) == 3


SHORT, LONG = "about red", "about red and blue, " * 3


def test_private_calls_do_not_queue_up_before_public_ones(model: Any) -> None:
    """Each of 32 threads at the engine's lock would have a whole text written before one public token."""
    assert chain_of(model).calls.limit == 1
    votes = as_choice_backend(model, votes="text")
    assert (votes.calls_at_once, TextVoteBackend(model, max_concurrency=3).calls_at_once) == (1, 3)


class TestMemory:
    """The caches of texts in progress are counted where the device would: it has room for one short text."""

    @pytest.fixture
    def caches(self, monkeypatch: pytest.MonkeyPatch) -> WeakSet[Any]:
        alive: WeakSet[Any] = WeakSet()
        ask = _GrowingRows._told

        def limited(growing: Any, step: Any) -> Any:
            alive.add(growing)
            time.sleep(0.01)  # so that other threads come between two steps, if they may
            if sum(len(row) for each in list(alive) for row in each._rows) > 2 * len(SHORT):
                alive.discard(growing)  # its error may hold it for a while
                raise torch.OutOfMemoryError("CUDA out of memory")
            return ask(growing, step)

        monkeypatch.setattr(_GrowingRows, "_told", limited)
        return alive

    @pytest.mark.parametrize("awaited", [False, True])
    @pytest.mark.parametrize("name", ["text", "soft prompt"])
    @pytest.mark.usefixtures("caches")
    def test_of_one_record_decides_nothing_about_another(self, name: str, awaited: bool) -> None:
        chain = SilentChain.of(PromptTemplate.from_template("{text}") | MODELS[name](), known=("text",))
        chain.calls._given = 4  # as of several components that share the engine
        assert answers(chain, [SHORT] * 4, awaited=awaited) == [True] * 4
        assert answers(chain, [SHORT, LONG, SHORT, SHORT], awaited=awaited) == [True, False, True, True]

    @pytest.mark.parametrize("fails_in", ["", "settle"])
    def test_is_free_again_before_others_go_on(
        self, caches: WeakSet[Any], fails_in: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        chain, left, by_itself = chain_of(LocalLLM(backend=engine(), max_tokens=2)), [], Engine.by_itself

        def watched(one: Engine, action: Any) -> Any:
            try:
                return by_itself(one, action)
            finally:
                left.append(len(caches))

        def fail(one: Engine, states: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

        answers(chain, [""])  # learns how the model pads
        monkeypatch.setattr(Engine, "by_itself", watched)
        if fails_in:
            monkeypatch.setattr(Engine, fails_in, fail)
        assert answers(chain, [""]) == [not fails_in]
        assert left == [0]

    def test_is_kept_from_others_between_two_tokens_of_a_private_text_alone(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one, owned, add = llm(), [], serving._TextInProgress.add
        lock: Any = one.backend._engine.lock

        def looked(row: Any, *token: Any) -> Any:
            owned.append(lock._is_owned())
            return add(row, *token)

        monkeypatch.setattr(serving._TextInProgress, "add", looked)
        assert one.invoke(PROMPT) == "".join(one.stream(PROMPT))
        assert owned == [False] * 4
        answers(chain_of(one), [PROMPT])
        assert owned[4:] == [True] * 2
