"""Private votes through live providers on this machine: what they count, receipts, faults, and nobody overhears.

Every record is in every sample and noise is next to nothing (a vote is off by 1/2 with chance below 1e-100), so released
numbers say which rows voted for what. The embedded model behind the loopback provider copies the label of its
prompt's one example; the llama.cpp server has random weights, and its votes are counted here by public calls.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from langchain_dpicl import (
    DPVotingRunnable,
    FewShotTask,
    LabelAnswers,
    PrivacyBudgetExceededError,
    Serving,
    verify_report,
)
from langchain_dpicl.backends.langchain.backend import LangChainBackend
from langchain_dpicl.backends.langchain.logprobs import DecisionsBackend
from langchain_dpicl.backends.langchain.texts import TextVoteBackend
from langchain_dpicl.backends.resolve import as_choice_backend
from langchain_dpicl.exceptions import ModelCallError
from langchain_dpicl.results import VotingResult
from tests.canary import RECORD, aobserve, canaries_in, leaks, observe
from tests.live import (
    LABELS,
    PrivateCalls,
    Servers,
    anthropic_model,
    decision_model,
    openai_model,
)
from tests.live_queries import (
    MAX_QUERIES,
    QUERY,
    RETRY,
    ROWS,
    TEXTS,
    asked_privately,
    component_options,
    labelled_examples,
    left,
    letters_of,
    likelier,
    prompt_of,
    reserved,
)
from tests.llama_server import running_server
from tests.loopback_provider import Hook, Provider, Received, echoing_400, hang_up, rate_limited, server_error

pytestmark = [
    pytest.mark.loopback,
    pytest.mark.filterwarnings("ignore:The class `OpenAIDecisions` is in beta"),
    pytest.mark.usefixtures("remembered_prices"),
]


COUNTED = LabelAnswers(scores=True, calibrate=False)


def voter(llm: Any, **options: Any) -> Any:
    """A voter whose votes can be counted."""
    given = component_options(llm=llm, **{"answers": COUNTED, **options})
    return DPVotingRunnable.from_private_examples(labelled_examples(), **given).with_receipts()


def votes(result: VotingResult) -> tuple[int, ...]:
    """The votes of each label, without the noise."""
    counted = np.array(list((result.scores or {}).values()))
    assert np.abs(counted - counted.round()).max() < 0.5
    return tuple(counted.round().astype(int).tolist())


def first_tokens(model: Any, **options: Any) -> LangChainBackend:
    is_chat = hasattr(model, "bind_tools")
    return LangChainBackend(model, continuation="instruct" if is_chat else None, retry=RETRY, **options)


def chat(served: Provider) -> Any:
    return first_tokens(openai_model("ChatOpenAI", served.url))


def completions(served: Provider) -> Any:
    return first_tokens(openai_model("OpenAI", served.url))


def decisions(served: Provider) -> Any:
    return DecisionsBackend(decision_model(served.url), retry=RETRY)


def anthropic(served: Provider) -> Any:
    return TextVoteBackend(anthropic_model(served.root), retry=RETRY)


def chat_text(served: Provider) -> Any:
    return TextVoteBackend(openai_model("ChatOpenAI", served.url), retry=RETRY)


Make = Callable[[Provider], Any]
ENGINES: list[Make] = [chat, completions, decisions, anthropic, chat_text]
every_engine = pytest.mark.parametrize("make", ENGINES, ids=lambda make: make.__name__)


class TestVotes:
    """Each kind of provider, end to end; models are handed in as people do."""

    @pytest.mark.parametrize(
        ("model", "reads", "options"),
        [
            (lambda served: openai_model("ChatOpenAI", served.url), "first tokens", {}),
            (lambda served: openai_model("OpenAI", served.url), "first tokens", {}),
            (lambda served: decision_model(served.url), "decisions", {}),
            (lambda served: anthropic_model(served.root), "text votes", {}),
            (
                lambda served: openai_model("ChatOpenAI", served.url),
                "text votes",
                {"answers": COUNTED.replace(votes="text")},
            ),
        ],
        ids=["chat", "completions", "decisions", "anthropic", "chat-text"],
    )
    async def test_are_counted_unheard(
        self,
        servers: Servers,
        model: Callable[[Provider], Any],
        reads: str,
        options: dict[str, Any],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        calls, made = PrivateCalls(monkeypatch), voter(model(servers.served()), **options)
        assert made.rows.kind == reads
        seen, awaited = observe(lambda: made.invoke(QUERY)), await aobserve(lambda: made.ainvoke("and that ?"))
        for place, one in enumerate((seen, awaited)):
            assert one.error is None
            assert leaks(one) == set()
            assert (one.result.label, votes(one.result)) == ("card", (8, 4))
            assert (one.result.receipt.source, one.result.receipt.queries_left) == ("release", MAX_QUERIES - 1 - place)
        assert (calls.made, calls.awaited, calls.failed) == (2 * ROWS, ROWS, 0)
        assert seen.result.receipt.entry != awaited.result.receipt.entry
        report = json.loads(made.budget.report().to_json())
        assert verify_report(report).ok
        assert canaries_in(json.dumps(report)) == []

    @pytest.mark.parametrize("kind", ["ChatOpenAI", "OpenAI"])
    async def test_of_a_real_server_are_those_that_its_tokens_cast(self, servers: Servers, kind: str) -> None:
        """A random model has letters of its own: rows are counted by public calls with the same prompts."""
        model = openai_model(kind, f"{servers.llama.url}/v1").bind(extra_body={"cache_prompt": False})
        engine = as_choice_backend(model)
        said = dict(zip(LABELS, letters_of(engine), strict=True))
        made = voter(engine, task=FewShotTask(verbalizers=said))
        assert made.rows.kind == "first tokens"
        counted = Counter(likelier(engine, prompt_of(text, said[label]), said) for text, label in TEXTS)
        expected = tuple(counted[label] for label in LABELS)
        assert sum(expected) > 0
        for result in (made.invoke(QUERY), await made.ainvoke(QUERY, {"configurable": {"tenant": "other"}})):
            assert votes(result) == expected
        assert left(made) == MAX_QUERIES - 2

    async def test_of_a_real_server_that_names_no_label_are_none(
        self, servers: Servers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls = PrivateCalls(monkeypatch)
        for model in (openai_model("ChatOpenAI", f"{servers.llama.url}/v1"), anthropic_model(servers.llama.url)):
            made = voter(
                model,
                answers=LabelAnswers(
                    votes="text", calibrate=False, abstain_below=0.5, abstain_label="nobody knows", scores=True
                ),
            )
            for result in (made.invoke(QUERY), await made.ainvoke("and that ?")):
                assert (result.label, result.abstained, votes(result)) == ("nobody knows", True, (0, 0))
        assert (calls.made, calls.failed) == (4 * ROWS, 0)  # every row was asked and answered

    async def test_of_several_queries_each_cost_a_ticket(self, servers: Servers) -> None:
        made = voter(chat(servers.served()))
        results = [*made.batch(["one ?", "two ?"]), *await made.abatch(["three ?", "four ?", "one ?"])]
        assert [votes(result) for result in results] == [(8, 4)] * 5
        assert [result.receipt.source for result in results] == ["release"] * 4 + ["memo"]
        assert len({result.receipt.entry for result in results[:4]}) == 4
        assert left(made) == MAX_QUERIES - 4

    async def test_are_zero_shot_when_the_budget_is_spent_and_that_was_asked_for(self, servers: Servers) -> None:
        served = servers.served()
        made = voter(decisions(served), max_queries=1, serving=Serving(on_exhausted="zero_shot"))
        strict = voter(decisions(served), max_queries=1)
        assert (made.invoke(QUERY).label, strict.invoke(QUERY).label) == ("card", "card")
        served.clear()
        result = await made.ainvoke("text: my transfer\nqueue: transfer\n\ntext: where is it ?")
        assert (result.label, result.receipt.source, result.scores) == ("transfer", "zero-shot", None)
        assert not any(RECORD.encode() in request.raw for request in served.received)
        with pytest.raises(PrivacyBudgetExceededError):
            strict.invoke("one more ?")


# -- what goes wrong ----------------------------------------------------------------------------------------------


@every_engine
class TestFaults:
    """Rows that fail abstain, in public nothing shows; with `public_first` a provider that is out costs nothing."""

    async def test_with_public_first_an_outage_is_raised_before_any_ticket(self, servers: Servers, make: Make) -> None:
        served = servers.served()
        made = voter(make(served), serving=Serving(public_first=True))
        for hook in (hang_up(), server_error()):
            served.clear()
            served.script(hook)
            with pytest.raises(ModelCallError):
                made.invoke(QUERY)
            with pytest.raises(ModelCallError):
                await made.ainvoke(QUERY)
            assert not any(RECORD.encode() in request.raw for request in served.received)
        assert (left(made), reserved(made)) == (MAX_QUERIES, 0)
        served.clear()
        assert votes(made.invoke(QUERY)) == (8, 4)

    async def test_rows_that_are_limited_or_broken_for_a_while_are_waited_for(
        self, servers: Servers, make: Make
    ) -> None:
        served = servers.served()
        made = voter(make(served))

        def script() -> None:
            served.clear()
            served.script(rate_limited(retry_after="0"), when="card number 3", times=1)
            served.script(server_error(), when="transfer number 1", times=2)

        script()
        assert votes(made.invoke(QUERY)) == (8, 4)
        assert asked_privately(served) == ROWS + 3
        script()
        assert votes(await made.ainvoke("and that ?")) == (8, 4)
        assert asked_privately(served) == ROWS + 3

    async def test_when_every_row_fails_the_answer_is_noise_and_charged(self, servers: Servers, make: Make) -> None:
        served = servers.served()
        made = voter(make(served), answers=LabelAnswers(calibrate=False, abstain_below=0.5, scores=True))
        served.script(echoing_400(), when=RECORD)
        seen = await aobserve(lambda: made.ainvoke(QUERY))
        assert (seen.error, seen.result.label, votes(seen.result)) == (None, "abstain", (0, 0))
        assert leaks(seen) == set()
        assert left(made) == MAX_QUERIES - 1


FAILING = [
    (chat, server_error(), 3),
    (completions, rate_limited(), 3),
    (anthropic, rate_limited(), 3),
    (decisions, echoing_400(), 1),
    (chat_text, server_error(), 3),
    (chat_text, rate_limited(), 3),
    (chat_text, echoing_400(), 1),
]
"""An engine, a fault, and how often a row is asked. test_provider_faults.py has all faults of all but the last engine."""


@pytest.mark.parametrize(("make", "hook", "asked"), FAILING, ids=[make.__name__ for make, _, _ in FAILING])
async def test_rows_that_fail_for_good_abstain(servers: Servers, make: Make, hook: Hook, asked: int) -> None:
    served = servers.served()
    made = voter(make(served))

    def fails(request: Received) -> bool:
        return any(mark in request.raw for mark in (b"card number 3", b"transfer number 1"))

    served.script(hook, when=fails)
    for seen in (observe(lambda: made.invoke(QUERY)), await aobserve(lambda: made.ainvoke("and that ?"))):
        assert seen.error is None
        assert votes(seen.result) == (7, 3)
        assert leaks(seen) == set()
    marked = sum(map(fails, served.received))
    assert (asked_privately(served) - marked, marked) == (2 * (ROWS - 2), 2 * 2 * asked)
    assert left(made) == MAX_QUERIES - 2


@pytest.mark.parametrize("make", [chat, decisions, anthropic, chat_text], ids=lambda make: make.__name__)
async def test_rows_that_a_provider_refuses_abstain(servers: Servers, make: Make) -> None:
    made = voter(make(servers.served(refuse="number 2")))
    for result in (made.invoke(QUERY), await made.ainvoke("and that ?")):
        assert votes(result) == (7, 3)


async def test_a_server_that_goes_away_costs_nothing_more_with_public_first() -> None:
    with running_server() as llama:
        models = [openai_model("ChatOpenAI", f"{llama.url}/v1"), anthropic_model(llama.url)]
        first, words = Serving(public_first=True), FewShotTask(verbalizers={"card": "<", "transfer": "Q"})
        made = [voter(first_tokens(models[0]), task=words, serving=first)]
        made.append(voter(TextVoteBackend(models[1], retry=RETRY), serving=first))
        assert [one.invoke(QUERY).receipt.tickets for one in made] == [1, 1]
    for one in made:
        with pytest.raises(ModelCallError):
            one.invoke("and that ?")
        with pytest.raises(ModelCallError):
            await one.abatch(["and that ?", "and these ?"])
        assert one.invoke(QUERY).receipt.source == "memo"
        assert (left(one), reserved(one)) == (MAX_QUERIES - 1, 1)
