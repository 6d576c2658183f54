"""The canary test: a string in every private example, and one in every private answer, show nowhere.

Each front room runs inside a chain under every observer LangChain has; the same net catches the naive call.
"""

from __future__ import annotations

import base64
import copy
import os
import pickle
from typing import Any

import pytest
from langchain_core.load import dumps
from langchain_core.prompts import PromptTemplate
from pydantic import BaseModel

from langchain_dpicl import Decoding, Rows
from langchain_dpicl.backends.langchain.backend import LangChainBackend
from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
from langchain_dpicl.exceptions import DPICLError, RunInterruptedError
from langchain_dpicl.generation.synthesizer import DemonstrationSynthesizer
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.prompts import DPFewShotPromptTemplate
from tests.canary import RECORD, VOTE, Recorder, canaries_in, describe, leaks, locals_in, observe, said_by
from tests.scripted_models import ScriptedLLM, StatusError

pytestmark = pytest.mark.loopback

RECORDS = [{"text": f"my card {RECORD} {{q}} {{0}}", "topic": "card", "user": f"{RECORD}-{i}"} for i in range(60)]
PUBLIC = {" my": 0.5, " card": 0.3, " late": 0.1}  # none ends a text


def answer(text: str) -> dict[str, float]:
    """What the provider sends: private prompts get a token that names them."""
    return {f" {VOTE}": 0.6, " my": 0.3, " card": 0.1} if RECORD in text else dict(PUBLIC)


def private_examples() -> PrivateExamples:
    return PrivateExamples(
        RECORDS, label_key="topic", labels=("card", "other"), public_size=120, unit_key="user", dataset_id="canary"
    )


def model(**options: Any) -> Any:
    return ScriptedLLM(answer=answer, **options)


def engine(llm: Any, **options: Any) -> LangChainBackend:
    return LangChainBackend(llm, max_top_k=3, **options)


def run(llm: Any, budget: PrivacyBudgetCallbackHandler | None = None, **options: Any) -> DPFewShotPromptTemplate:
    return DPFewShotPromptTemplate.from_private_examples(
        private_examples(),
        llm=llm,
        budget=budget or PrivacyBudgetCallbackHandler(epsilon=8.0, delta=1e-5),
        epsilon=8.0,
        max_tokens=3,
        rows=Rows(units=20),
        decoding=Decoding(candidates=3),
        instruction="Messages.",
        example_prompt=PromptTemplate.from_template("{text} -> {topic}"),
        suffix="{input} ->",
        **options,
    )


def shows(thing: Any) -> list[str]:
    """Every way to look at an object."""
    looks = [repr(thing), str(thing), format(thing), repr(getattr(thing, "__dict__", "")), dumps(thing)]
    if isinstance(thing, BaseModel):
        looks.append(repr(thing.model_dump()))
    return [canary for look in looks for canary in canaries_in(look)]


def test_the_net_catches_the_naive_call() -> None:
    recorder = Recorder()
    llm = model(callbacks=[recorder])
    seen = observe(lambda: llm.invoke(f"{RECORD}\nmy"), model_recorder=recorder)
    assert {"config callbacks", "model callbacks", "debug output", "LangSmith", "run collector"} <= leaks(seen)


@pytest.mark.parametrize("canary", [RECORD, VOTE])
def test_the_net_knows_a_canary_in_every_spelling(canary: str) -> None:
    encoded = [base64.b64encode(f"{'-' * before}{canary}, and more".encode()).decode() for before in range(7)]
    raw = canary.encode()
    cut = [f"{canary[:11]}...", f"...{canary[-11:]}"]
    for text in (canary, f"<{canary}>", str(list(raw)), str(list(raw)).replace(" ", ""), raw.hex(), *cut, *encoded):
        assert canaries_in(text) == [canary]
    assert canaries_in("zx-front canary 9137") == []


def test_the_net_looks_into_what_an_exception_says_is_linked_to_and_came_through() -> None:
    def component(records: list[str]) -> None:
        try:
            int(VOTE)
        except ValueError:
            raise ValueError("public") from None

    with pytest.raises(ValueError) as caught:
        component([RECORD])
    assert canaries_in(said_by(caught.value)) == [VOTE]
    assert canaries_in(locals_in(caught.value, frames_of=f"{os.sep}test_canary.py")) == [RECORD]
    assert locals_in(caught.value) == ""


def test_a_failing_provider_tells_nobody_which_record() -> None:
    """The provider refuses every private prompt, echoing it; rows abstain and the run goes on."""
    llm = model(raises={RECORD: lambda text: StatusError(text, status_code=400)})
    seen = observe(lambda: run(engine(llm)))
    assert seen.error is None
    assert leaks(seen) == set()


def test_an_outage_in_the_middle_shows_nothing_either() -> None:
    llm = model()
    made = DemonstrationSynthesizer.from_private_examples(
        private_examples(),
        llm=engine(llm),
        budget=PrivacyBudgetCallbackHandler(epsilon=8.0, delta=1e-5),
        epsilon=8.0,
        max_tokens=3,
        rows=Rows(units=20),
        decoding=Decoding(candidates=3),
    )
    llm.raises["text:"] = lambda text: StatusError(text, status_code=400)
    with pytest.raises(RunInterruptedError) as caught:
        made.run()
    assert canaries_in(describe(caught.value)) == []
    assert shows(caught.value.run) == []


def test_no_object_of_ours_shows_a_record() -> None:
    budget = PrivacyBudgetCallbackHandler(epsilon=8.0, delta=1e-5)
    private = private_examples()
    prompt = run(engine(model()), budget)
    chain = prompt | model()
    for thing in (private, prompt, chain, budget, budget.report(), budget.budget, prompt.partial(input="x")):
        assert shows(thing) == []
    assert RECORD not in prompt.format(input="x") + str(prompt.privacy_report)
    assert RECORD.encode() not in pickle.dumps(prompt)


def test_private_examples_refuse_every_way_out() -> None:
    private = private_examples()
    assert copy.copy(private) is private
    assert copy.deepcopy({"x": private})["x"] is private
    with pytest.raises(DPICLError) as caught:
        pickle.dumps(private)
    assert canaries_in(describe(caught.value)) == []
    for way in (iter, len, list, dict):
        with pytest.raises(TypeError) as refused:
            way(private)
        assert canaries_in(describe(refused.value)) == []
    for name in dir(private):
        if not name.startswith("__"):
            assert canaries_in(repr(getattr(private, name))) == []
