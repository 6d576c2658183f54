import asyncio
import copy
import math
import pickle
import threading
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.example_selectors import (
    BaseExampleSelector,
    LengthBasedExampleSelector,
    MaxMarginalRelevanceExampleSelector,
    SemanticSimilarityExampleSelector,
)
from langchain_core.load import dumps
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompt_values import ChatPromptValue
from langchain_core.prompts import (
    ChatPromptTemplate,
    FewShotChatMessagePromptTemplate,
    FewShotPromptTemplate,
    MessagesPlaceholder,
    PromptTemplate,
)
from langchain_core.runnables import RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore

from langchain_dpicl import LabelAnswers
from langchain_dpicl.backends.fake import FakeBackend
from langchain_dpicl.backends.langchain.logprobs import DecisionsBackend
from langchain_dpicl.backends.langchain.texts import TextVoteBackend
from langchain_dpicl.backends.private_calls.call import RetryPolicy
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError, ModelCallError, PrivateAccessError
from langchain_dpicl.serving import LabelClassifier
from tests.scripted_models import ScriptedLLM, StatusError, fixed
from tests.unit_tests.backends.langchain.test_texts import TextChat, saying

LABELS = ("card", "cash")
PROMPT = PromptTemplate.from_template("Ticket: {input}\nQueue:")


class Choices:
    """Scores whole continuations: log-likelihoods by a function of (prompt, choice)."""

    def __init__(self, log_likelihood):
        self.log_likelihood, self.calls = log_likelihood, []

    def score_choices(self, prompts, choices):
        self.calls.append((tuple(prompts), tuple(choices)))
        return np.array([[self.log_likelihood(prompt, choice) for choice in choices] for prompt in prompts])

    async def ascore_choices(self, prompts, choices):
        return self.score_choices(prompts, choices)


class TopTokens:
    """Reports top tokens only, as bytes; `tokens` gives them by the prompt."""

    name, max_top_k, eos = "top", 5, b""

    def __init__(self, tokens):
        self.tokens, self.opened = tokens, []

    def vocabulary(self):
        raise CapabilityError("top tokens only")

    def top_tokens(self, prompt, prefix, *, top_k):
        return [(text.encode(), probability) for text, probability in self.tokens(prompt).items()]

    async def atop_tokens(self, prompt, prefix, *, top_k):
        return self.top_tokens(prompt, prefix, top_k=top_k)

    def open(self, prompts, prefix):
        self.opened.append(tuple(prompts))
        return TopSession([dict(self.top_tokens(prompt, prefix, top_k=self.max_top_k)) for prompt in prompts])

    def decode(self, tokens):
        return b"".join(tokens).decode("utf-8", "replace")

    def count_tokens(self, text):
        return len(text)


class TopSession:
    def __init__(self, rows):
        self.rows = rows

    def score(self, domain):
        return np.array([[row.get(token, 0.0) for token in domain] for row in self.rows])

    async def ascore(self, domain):
        return self.score(domain)

    def close(self):
        pass


def by_table(table: dict[str, dict[str, float]]):
    """Log-likelihoods from probabilities, by the query inside `PROMPT` and the choice."""

    def log_likelihood(prompt, choice):
        query = prompt.removeprefix("Ticket: ").removesuffix("\nQueue:")
        return math.log(table[query][choice.strip()])

    return log_likelihood


# The hand-computed example. Content-free: (.9, .1) twice and (.6, .4) once -> mean (.8, .2). A query at (.7, .3) leans
# to "card" raw; calibrated .7/.8 : .3/.2 = 7/8 : 12/8 -> (7/19, 12/19), so "cash".
TABLE = {
    "N/A": {"card": 0.9, "cash": 0.1},
    "": {"card": 0.09, "cash": 0.01},  # unnormalised on purpose: only the ratio counts
    "[MASK]": {"card": 0.6, "cash": 0.4},
    "atm kept it": {"card": 0.07, "cash": 0.03},
    "pin": {"card": 0.95, "cash": 0.05},
}


RAW = LabelAnswers(calibrate=False)
COUNTED = LabelAnswers(calibrate=False, other_label="cash")


def classifier(engine=None, **changes) -> LabelClassifier:
    return LabelClassifier(engine or Choices(by_table(TABLE)), **({"labels": LABELS, "prompt": PROMPT} | changes))


# -- the numbers --------------------------------------------------------------------------------------------------


def test_the_worked_example_by_hand():
    one = classifier()
    assert one.probabilities(["atm kept it"]) == pytest.approx(np.array([[7 / 19, 12 / 19]]), abs=1e-12)
    assert one.batch(["atm kept it", "pin"]) == ["cash", "card"]


def test_without_calibration_the_likelihoods_are_only_normalised():
    engine = Choices(by_table(TABLE))
    one = classifier(engine, answers=RAW)
    assert not one.calibrates
    assert one.probabilities(["atm kept it"]) == pytest.approx(np.array([[0.7, 0.3]]), abs=1e-12)
    assert one.batch(["atm kept it", "pin"]) == ["card", "card"]
    assert [len(prompts) for prompts, _ in engine.calls] == [1, 2]


@pytest.mark.parametrize("impossible", [-math.inf, math.nan])
def test_an_impossible_label_is_never_chosen(impossible):
    one = classifier(Choices(lambda _prompt, choice: impossible if choice == " card" else -3.0), answers=RAW)
    assert one.probabilities(["x"]).tolist() == [[0.0, 1.0]]


# -- whole labels -------------------------------------------------------------------------------------------------


def test_multi_token_labels_are_scored_whole():
    """First tokens would say "top up" (.6); the whole label says "cash withdrawal" (.4 x .9 against .6 x .5)."""
    steps = {(): {" top": 0.6, " cash": 0.4}, (b" top",): {" up": 0.5}, (b" cash",): {" withdrawal": 0.9}}
    engine = FakeBackend(lambda _prompt, prefix: steps[prefix], max_top_k=5)
    one = LabelClassifier(engine, labels=["top up", "cash withdrawal"])
    assert one.probabilities(["Queue:"]) == pytest.approx(np.array([[0.30, 0.36]]) / 0.66)
    assert (PromptTemplate.from_template("{input}\nQueue:") | one).batch(["x"]) == ["cash withdrawal"]


def test_verbalizers_are_scored_verbatim_and_labels_returned():
    engine = Choices(lambda _prompt, choice: {" world": -1.0, "\nsports": -0.5}[choice])
    one = LabelClassifier(
        engine, labels=["0", "1"], prompt=PROMPT, verbalizers={"1": "\nsports", "0": " world"}, answers=RAW
    )
    assert one.batch(["x"]) == ["1"]
    assert engine.calls == [(("Ticket: x\nQueue:",), (" world", "\nsports"))]


def test_a_label_may_have_several_texts():
    likelihoods = {" card": 0.2, " cash": 0.3, " coin": 0.2}
    engine = Choices(lambda _prompt, choice: math.log(likelihoods[choice]))
    one = classifier(engine, verbalizers={"card": " card", "cash": [" cash", " coin"]}, answers=RAW)
    assert one.probabilities(["x"]) == pytest.approx(np.array([[2 / 7, 5 / 7]]))


def test_a_batch_is_one_call_and_calibration_is_measured_once():
    engine = Choices(by_table(TABLE))
    one = classifier(engine)
    one.batch(["pin", "atm kept it"])
    one.batch(["pin"])
    assert [len(prompts) for prompts, _ in engine.calls] == [5, 1]
    assert engine.calls[0][0][:3] == tuple(PROMPT.format(input=text) for text in ("N/A", "", "[MASK]"))


def test_the_content_free_scores_kept_are_bounded():
    numbers = iter(range(10_000))
    shown = PromptTemplate.from_template("{number} {q}").partial(number=lambda: str(next(numbers)))
    one = classifier(Choices(lambda _prompt, _choice: -1.0), prompt=shown)
    for _ in range(200):
        one.invoke("x")
    assert len(one._known) <= 192


def test_no_prompts_need_no_call():
    engine = Choices(by_table(TABLE))
    assert classifier(engine).probabilities([]).shape == (0, 2)
    assert classifier(engine).batch([]) == []
    assert engine.calls == []


def test_queries_with_braces_are_scored_as_they_are():
    seen = []
    engine = Choices(lambda prompt, _choice: seen.append(prompt) or -1.0)
    classifier(engine, answers=RAW).batch(['{"a": {q}}', {"input": "{"}])
    assert set(seen) == {'Ticket: {"a": {q}}\nQueue:', "Ticket: {\nQueue:"}


def test_a_chat_prompt_is_scored_where_the_answer_begins():
    engine = Choices(lambda _prompt, _choice: -1.0)
    chat = ChatPromptTemplate.from_messages([("human", "a"), ("ai", "card"), ("human", "{input}")])
    classifier(engine, prompt=chat, answers=RAW).batch(["b"])
    assert engine.calls[0][0] == ("Human: a\nAI: card\nHuman: b\nAI:",)


def test_an_engine_that_answers_in_another_shape_is_reported():
    engine = Choices(lambda _prompt, _choice: -1.0)
    engine.score_choices = lambda prompts, choices: np.zeros((len(prompts), 3))
    with pytest.raises(ModelCallError, match="shape"):
        classifier(engine).probabilities(["a"])


# -- first tokens -------------------------------------------------------------------------------------------------


def test_a_model_with_top_tokens_is_read_at_the_first_token():
    engine = TopTokens(lambda _prompt: {" car": 0.5, "card": 0.1, " cash": 0.2, " ca": 0.1, "The": 0.1})
    found = classifier(engine, answers=RAW).probabilities(["one", "two"])
    assert found == pytest.approx(np.array([[0.75, 0.25]] * 2))
    assert len(engine.opened) == 1


def test_top_tokens_that_begin_no_label_alone_name_none():
    for tokens in ({}, {" ca": 0.7, "The": 0.1}):
        with pytest.raises(ModelCallError, match="names none of the labels"):
            classifier(TopTokens(lambda _prompt, tokens=tokens: tokens), answers=RAW).probabilities(["x"])


@pytest.mark.parametrize("labels", [["card", "card payment"], ["1", "10"]])
def test_a_label_that_begins_another_is_refused_where_only_first_tokens_are_seen(labels):
    with pytest.raises(ConfigurationError, match="verbalizers"):
        LabelClassifier(TopTokens(lambda _prompt: {}), labels=labels)
    assert (
        LabelClassifier(Choices(lambda _prompt, _choice: -1.0), labels=labels, prompt=PROMPT).batch(["x"]) == labels[:1]
    )
    told = LabelClassifier(
        TopTokens(lambda _prompt: {" B": 0.5, " A": 0.4}),
        labels=labels,
        verbalizers={labels[0]: " A", labels[1]: " B"},
        prompt=PROMPT,
        answers=RAW,
    )
    assert told.batch(["x"]) == labels[1:]


def test_verbalizers_that_the_prompt_does_not_show_are_an_error_and_never_the_first_label():
    engine = TopTokens(lambda _prompt: {" P": 0.9, " a": 0.05, "The": 0.01})
    codes = {"P1": " A", "P2": " B"}
    unseen = LabelClassifier(engine, labels=list(codes), prompt=PROMPT, verbalizers=codes)
    with pytest.raises(ModelCallError, match="has to show verbalizers"):
        unseen.probabilities(["x"])


def test_first_tokens_are_calibrated_like_whole_labels():
    def tokens(prompt):
        query = prompt.removeprefix("Ticket: ").removesuffix("\nQueue:")
        return {f" {label}": probability for label, probability in TABLE[query].items()}

    found = classifier(TopTokens(tokens)).probabilities(["atm kept it"])
    assert found == pytest.approx(np.array([[7 / 19, 12 / 19]]), abs=1e-12)


def test_rows_keep_the_order_of_the_prompts():
    engine = TopTokens(lambda prompt: {" card": int(prompt) / 100, " cash": 1 - int(prompt) / 100})
    one = LabelClassifier(engine, labels=LABELS)
    numbers = [*range(1, 90), 5, 1]
    assert one.probabilities([str(number) for number in numbers])[:, 0] == pytest.approx(np.array(numbers) / 100)
    assert [len(prompts) for prompts in engine.opened] == [64, 24]  # the first is a public call alone


# -- the Runnable -------------------------------------------------------------------------------------------------


async def test_the_runnable_takes_text_or_dict_sync_and_async():
    chain = classifier()
    assert chain.invoke("atm kept it") == chain.invoke({"input": "atm kept it"}) == "cash"
    assert await chain.ainvoke("pin") == "card"
    assert chain.batch(["pin", {"input": "atm kept it"}]) == ["card", "cash"]
    assert await chain.abatch(["atm kept it"]) == ["cash"]
    assert chain.batch([]) == await chain.abatch([]) == []
    assert list(chain.stream("pin")) == ["card"]
    assert [part async for part in chain.astream("pin")] == ["card"]
    assert (chain | str.upper).invoke("pin") == "CARD"


async def test_a_batch_of_the_runnable_is_scored_as_one():
    engine = Choices(by_table(TABLE))
    chain = classifier(engine)
    chain.batch(["pin", "atm kept it", "pin"])
    await chain.abatch(["pin", "pin"])
    assert [len(prompts) for prompts, _ in engine.calls] == [5, 1]  # three inputs without content; each text once


async def test_one_bad_input_of_a_batch_fails_alone():
    chain = classifier()
    for found in (
        chain.batch(["pin", {"wrong": 1}, "atm kept it"], return_exceptions=True),
        await chain.abatch(["pin", {"wrong": 1}, "atm kept it"], return_exceptions=True),
    ):
        assert found[0] == "card"
        assert isinstance(found[1], KeyError)
        assert found[2] == "cash"
    with pytest.raises(KeyError):
        chain.batch(["pin", {"wrong": 1}])
    with pytest.raises(KeyError):
        await chain.ainvoke({"wrong": 1})


class Recorder(BaseCallbackHandler):
    def __init__(self):
        self.events = Counter()

    def on_chain_start(self, serialized, inputs, **kwargs):
        self.events["start", kwargs["name"]] += 1

    def on_chain_end(self, outputs, **kwargs):
        self.events["end"] += 1

    def on_chain_error(self, error, **kwargs):
        self.events["error"] += 1


def test_the_run_and_its_prompt_are_traced():
    recorder = Recorder()
    chain = classifier()
    chain.batch(["pin", "pin"], {"callbacks": [recorder]})
    assert recorder.events == {("start", "LabelClassifier"): 2, ("start", "PromptTemplate"): 2, "end": 4}


def test_the_runnable_shows_its_labels():
    assert "LabelClassifier(labels=('card', 'cash'), kind='whole labels', calibrates=True)" in repr(classifier())
    assert "PROMPT" not in dumps(classifier())


def test_the_async_numbers_are_the_sync_numbers():
    async def both():
        one = classifier()
        assert np.array_equal(await one.aprobabilities(["pin"]), one.probabilities(["pin"]))
        assert await one.abatch(["pin", "atm kept it"]) == ["card", "cash"]
        assert (await one.aprobabilities([])).shape == (0, 2)

    asyncio.run(both())


# -- templates with an example selector ---------------------------------------------------------------------------

SHOWN = PromptTemplate.from_template("Ticket: {input}\nQueue: {queue}")
BANK = [
    {"input": "lost it", "queue": "card"},
    {"input": "atm ate it", "queue": "cash"},
]


class Chosen(BaseExampleSelector):
    """Chooses an example by the query, and notes for which and which way it was asked."""

    def __init__(self, *, only=("sync", "async")):
        self.asked, self.only, self.bank = [], only, list(BANK)

    def add_example(self, example):
        self.bank.append(example)

    def select_examples(self, input_variables):
        return self._chosen("sync", input_variables["input"])

    async def aselect_examples(self, input_variables):
        await asyncio.sleep(0)
        return self._chosen("async", input_variables["input"])

    def _chosen(self, way, text):
        assert way in self.only
        self.asked.append((way, text))
        if text == "broken":
            raise RuntimeError("no embedding")
        return [self.bank["atm" in text]]


def few_shot(selector):
    return FewShotPromptTemplate(
        example_selector=selector, example_prompt=SHOWN, suffix=PROMPT.template, input_variables=["input"]
    )


def few_shot_chat(selector):
    shown = ChatPromptTemplate.from_messages([("human", "Ticket: {input}"), ("ai", "Queue: {queue}")])
    examples = FewShotChatMessagePromptTemplate(
        example_selector=selector, example_prompt=shown, input_variables=["input"]
    )
    return ChatPromptTemplate.from_messages([("system", "Route it."), examples, ("human", "Ticket: {input}")])


def leaning(prompt, choice):
    """Card .8 below an example of card, .9 for "pin", .4 below one of cash."""
    card = (0.9 if "Ticket: pin" in prompt else 0.8) if "Queue: card" in prompt else 0.4
    return math.log(card if choice.strip() == "card" else 1 - card)


FEW_SHOT = pytest.mark.parametrize("template", [few_shot, few_shot_chat])
FREE = [("sync", "N/A"), ("sync", ""), ("sync", "[MASK]")]
# Content-free inputs get the example of card: (.8, .2). "the atm" gets that of cash: .4/.8 : .6/.2 = 1 : 6,
# "pin" that of card: .9/.8 : .1/.2 = 9 : 4.
BY_HAND = np.array([[1 / 7, 6 / 7], [9 / 13, 4 / 13]])


@FEW_SHOT
def test_content_free_inputs_go_through_the_example_selector(template):
    selector = Chosen(only=("sync",))
    one = classifier(Choices(leaning), prompt=template(selector))
    assert one.probabilities(["the atm", "pin"]) == pytest.approx(BY_HAND)
    assert selector.asked == [("sync", "the atm"), ("sync", "pin"), *FREE]
    assert one.batch(["the atm", {"input": "pin"}]) == ["cash", "card"]


@FEW_SHOT
async def test_awaited_examples_are_selected_by_awaiting_alone(template):
    selector = Chosen(only=("async",))
    one = classifier(Choices(leaning), prompt=template(selector))
    assert await one.aprobabilities(["the atm", "pin"]) == pytest.approx(BY_HAND)
    assert selector.asked == [("async", text) for _, text in [("", "the atm"), ("", "pin"), *FREE]]
    assert await one.ainvoke("the atm") == "cash"
    assert await one.abatch(["pin", {"input": "the atm"}]) == ["card", "cash"]


@FEW_SHOT
def test_binding_a_prompt_selects_no_example(template):
    selector = Chosen()
    classifier(prompt=template(selector))
    assert selector.asked == []


@FEW_SHOT
async def test_an_example_selector_that_fails_for_one_input_fails_alone(template):
    chain = classifier(Choices(leaning), prompt=template(Chosen()))
    for found in (
        chain.batch(["the atm", "broken", "pin"], return_exceptions=True),
        await chain.abatch(["the atm", "broken", "pin"], return_exceptions=True),
    ):
        assert [found[0], found[2]] == ["cash", "card"]
        assert isinstance(found[1], RuntimeError)
    with pytest.raises(RuntimeError, match="no embedding"):
        chain.batch(["the atm", "broken"])


@FEW_SHOT
def test_examples_that_change_are_calibrated_anew(template):
    selector = Chosen()
    one = classifier(Choices(leaning), prompt=template(selector))
    assert one.probabilities(["pin"]) == pytest.approx(BY_HAND[1:])
    selector.bank[1] = {"input": "atm ate it", "queue": "card"}
    selector.bank[0] = {"input": "lost it", "queue": "cash"}
    assert one.probabilities(["the atm"]) == pytest.approx(np.array([[6 / 7, 1 / 7]]))  # .8/.4 : .2/.6


class Words(Embeddings):
    """Two dimensions: whether "atm" is in a text, and whether it is not."""

    def embed_documents(self, texts):
        return [[1.0, 0.1] if "atm" in text else [0.1, 1.0] for text in texts]

    def embed_query(self, text):
        return self.embed_documents([text])[0]


STOCK = {
    "similarity": lambda: SemanticSimilarityExampleSelector.from_examples(
        BANK, Words(), InMemoryVectorStore, k=1, input_keys=["input"]
    ),
    "mmr": lambda: MaxMarginalRelevanceExampleSelector.from_examples(
        BANK, Words(), InMemoryVectorStore, k=1, fetch_k=2, input_keys=["input"]
    ),
}


@pytest.mark.parametrize("name", STOCK)
@FEW_SHOT
async def test_langchain_s_own_selectors_serve(name, template):
    one = classifier(Choices(leaning), prompt=template(STOCK[name]()))
    assert one.probabilities(["the atm", "pin"]) == pytest.approx(BY_HAND)
    assert await one.aprobabilities(["the atm", "pin"]) == pytest.approx(BY_HAND)
    assert one.invoke("the atm") == await one.ainvoke("the atm") == "cash"


@FEW_SHOT
async def test_a_selector_by_length_serves(template):
    engine = Choices(leaning)
    selector = LengthBasedExampleSelector(
        examples=BANK, example_prompt=SHOWN, max_length=9, get_text_length=lambda text: len(text.split())
    )
    one = classifier(engine, prompt=template(selector))
    # Room for one example after a short query, and for none after a long one: .4/.8 : .6/.2.
    assert one.probabilities(["pin", "a " * 9]) == pytest.approx(BY_HAND[::-1])
    assert await one.abatch(["a " * 9, "pin"]) == ["cash", "card"]


# -- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"labels": ["card"]}, "labels"),
        ({"labels": "card"}, "labels"),
        ({"labels": ["card", "card"]}, "labels"),
        ({"labels": ["card", ""]}, "labels"),
        ({"labels": ["card", 1]}, "labels"),
        ({"labels": {"card", "cash"}}, "labels"),
        ({"verbalizers": {"card": "a"}}, "verbalizers"),
        ({"verbalizers": {"card": "a", "cash": "b", "more": "c"}}, "verbalizers"),
        ({"verbalizers": {"card": "a", "cash": "a"}}, "verbalizers"),
        ({"verbalizers": {"card": "a", "cash": ""}}, "verbalizers"),
        ({"answers": {"votes": "text"}}, "answers"),
        ({"answers": LabelAnswers(content_free=())}, "content_free"),
        ({"answers": LabelAnswers(other_label="transfer")}, "other_label"),
        ({"answers": LabelAnswers(votes="soft")}, "votes"),
        ({"answers": LabelAnswers(scores=True)}, "scores"),
        ({"answers": LabelAnswers(abstain_below=0.5)}, "abstain_below"),
        ({"answers": LabelAnswers(calibrate=True), "prompt": None}, "prompt="),
    ],
)
def test_unusable_arguments_are_refused_by_name(changes, name):
    with pytest.raises(ConfigurationError, match=name):
        classifier(**changes)


def test_a_single_text_is_not_read_letter_by_letter():
    one = classifier()
    for call in (lambda: one.probabilities("pin"), lambda: one.batch("pin"), lambda: one.batch({})):
        with pytest.raises(ConfigurationError, match="a list"):
            call()


def test_a_model_that_only_completes_text_is_refused_with_advice():
    class Text:
        def complete(self, prompts, *, max_tokens, stop=()):
            return [""] * len(prompts)

        async def acomplete(self, prompts, *, max_tokens, stop=()):
            return [""] * len(prompts)

    with pytest.raises(CapabilityError):
        classifier(Text())


def test_calibration_needs_exactly_one_variable():
    two, engine = PromptTemplate.from_template("{kind}: {input}"), Choices(lambda _prompt, choice: -float(len(choice)))
    with pytest.raises(ConfigurationError, match="partial"):
        classifier(engine, prompt=two, answers=LabelAnswers(calibrate=True))
    plain = classifier(engine, prompt=two)
    assert not plain.calibrates
    assert plain.batch([{"kind": "mail", "input": "x"}]) == ["card"]
    with pytest.raises(ConfigurationError, match="inputs"):
        plain.probabilities(["x"])
    assert classifier(engine, prompt=two.partial(kind="mail")).batch(["x"]) == ["card"]


def test_a_variable_of_messages_is_not_calibrated_as_no_text_stands_for_it():
    chat = ChatPromptTemplate.from_messages([("system", "Sort."), MessagesPlaceholder("messages")])
    engine = Choices(lambda _prompt, choice: -float(len(choice)))
    plain = classifier(engine, prompt=chat)
    assert not plain.calibrates
    assert plain.invoke({"messages": [("human", "pin")]}) == "card"
    with pytest.raises(ConfigurationError, match="a variable of text, found 'messages' of messages"):
        classifier(engine, prompt=chat, answers=LabelAnswers(calibrate=True))


def test_the_text_of_a_message_is_asked_and_not_its_form():
    engine = Choices(lambda _prompt, choice: -float(len(choice)))
    one = classifier(engine, answers=RAW)
    talk = [HumanMessage("pin"), AIMessage("Which?")]
    for given, asked in (
        (HumanMessage("pin"), "pin"),
        (Document("pin"), "pin"),
        (ChatPromptValue(messages=[HumanMessage("pin")]), "pin"),
        ({"input": HumanMessage("pin")}, "pin"),
        (talk, "Human: pin\nAI: Which?"),
        (tuple(talk), "Human: pin\nAI: Which?"),
    ):
        one.invoke(given)
        one.probabilities([given])
        assert [prompts for prompts, _ in engine.calls[-2:]] == [(PROMPT.format(input=asked),)] * 2


def test_what_a_prompt_reads_of_messages_itself_is_left_to_it():
    engine = Choices(lambda _prompt, choice: -float(len(choice)))
    inner = ChatPromptTemplate.from_messages([MessagesPlaceholder("history")])
    nested = ChatPromptTemplate.from_messages([("system", "Sort."), inner, ("human", "{input}")])
    picture = HumanMessage([{"type": "image", "url": "https://example.org/a.png"}])
    given = {
        "history": [HumanMessage("pin"), AIMessage("Which?")],
        "input": HumanMessage("mine"),
        "messages": [picture],
    }
    classifier(engine, prompt=nested, answers=RAW).invoke(given)
    assert engine.calls[-1][0] == ("System: Sort.\nHuman: pin\nAI: Which?\nHuman: mine\nAI:",)
    alone = ChatPromptTemplate.from_messages([("system", "Sort."), inner])
    assert not classifier(engine, prompt=alone).calibrates
    pages = PromptTemplate.from_template(
        "{% for d in docs %}<{{ d.page_content }}>{% endfor %}", template_format="jinja2"
    )
    classifier(engine, prompt=pages, answers=RAW).invoke({"docs": [Document("a"), Document("b")]})
    assert engine.calls[-1][0] == ("<a><b>",)


def test_without_a_prompt_it_takes_what_a_prompt_gives():
    engine = Choices(by_table(TABLE))
    bare = classifier(engine, prompt=None)
    assert not bare.calibrates
    assert (PROMPT | bare).invoke("pin") == bare.invoke(PROMPT.format(input="pin")) == "card"
    assert bare.probabilities([PROMPT.format_prompt(input="atm kept it")]) == pytest.approx(np.array([[0.7, 0.3]]))
    engine.log_likelihood = lambda prompt, choice: -1.0
    bare.invoke([("human", "Which?")])
    assert engine.calls[-1][0] == ("Human: Which?\nAI:",)
    with pytest.raises(ConfigurationError, match="Give the classifier prompt="):
        bare.invoke({"q": "pin"})


# -- what is read of which model ----------------------------------------------------------------------------------

QUICK = RetryPolicy(first_wait=0.001, max_wait=0.001)


def voter(table: dict, otherwise: str = "card", **changes):
    """A chat model that only writes text, as an engine."""
    return TextVoteBackend(TextChat(say=saying(table, otherwise), raises=changes.pop("raises", {})), retry=QUICK)


def decider(table: dict, **changes):
    """A decision model, as an engine."""
    pytest.importorskip("langchain_openai.decisions")
    from tests.unit_tests.backends.langchain.test_decisions import ScriptedDecisions, telling

    return DecisionsBackend(ScriptedDecisions(answer=telling(table), **changes), retry=QUICK)


def test_what_is_read_is_named():
    tops = fixed({" card": 0.5, " cash": 0.25})
    for engine, kind, calibrates in (
        (Choices(by_table(TABLE)), "whole labels", True),
        (TopTokens(lambda _prompt: {}), "first tokens", True),
        (ScriptedLLM(answer=tops), "first tokens", True),
        (voter({}), "text votes", False),
    ):
        one = classifier(engine)
        assert (one.kind, one.calibrates) == (kind, calibrates)
        assert f"kind={kind!r}" in repr(one)
    assert classifier(ScriptedLLM(answer=tops), answers=LabelAnswers(votes="text")).kind == "text votes"


def test_a_model_without_logprobs_is_told_of_votes():
    silent = ScriptedLLM(answer=fixed({" cash": 1.0}), payload=lambda _tops: None)
    with pytest.raises(CapabilityError, match='votes="text"'):
        classifier(silent)
    assert classifier(silent, answers=LabelAnswers(votes="text")).batch(["x"]) == ["cash"]


async def test_votes_are_certain_and_go_to_the_label_that_is_written():
    one = classifier(voter({"pin": "Queue: Cash."}))
    assert one.probabilities(["pin", "atm"]).tolist() == [[0.0, 1.0], [1.0, 0.0]]
    assert one.batch(["pin", "atm"]) == await one.abatch(["pin", "atm"]) == ["cash", "card"]
    coded = classifier(voter({"pin": "B"}, "A"), verbalizers={"card": " A", "cash": " B"})
    assert coded.batch(["pin", "atm"]) == ["cash", "card"]


def test_votes_cannot_be_calibrated():
    with pytest.raises(ConfigurationError, match=r"calibrate.*not probabilities"):
        classifier(voter({}), answers=LabelAnswers(calibrate=True))
    assert not classifier(voter({}), answers=RAW).calibrates


def test_labels_that_a_vote_could_not_tell_apart_are_refused_at_once():
    with pytest.raises(ConfigurationError, match="verbalizers"):
        LabelClassifier(voter({}), labels=["US", "us"])
    told = LabelClassifier(voter({}, "A"), labels=["US", "us"], prompt=PROMPT, verbalizers={"US": "A", "us": "B"})
    assert told.batch(["x"]) == ["US"]
    assert LabelClassifier(voter({}, "card payment"), labels=["card", "card payment"], prompt=PROMPT).batch(["x"]) == [
        "card payment"
    ]


@pytest.mark.filterwarnings("ignore:.*OpenAIDecisions.*beta")
async def test_decisions_are_probabilities_of_whole_labels():
    table = {"pin": {"card payment": 0.6, "card": 0.3}, "atm": {"card payment": 0.0, "card": 1.0}}
    one = LabelClassifier(decider(table), labels=["card", "card payment"], prompt=PROMPT)
    assert (one.kind, one.calibrates) == ("decisions", False)
    expected = np.array([[1 / 3, 2 / 3], [1.0, 0.0]])
    assert one.probabilities(["pin", "atm"]) == pytest.approx(expected, abs=1e-12)
    assert await one.aprobabilities(["pin", "atm"]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.filterwarnings("ignore:.*OpenAIDecisions.*beta")
def test_decisions_are_calibrated_on_request():
    table = {"kept": {"card": 0.7, "cash": 0.3}, "Ticket": {"card": 0.8, "cash": 0.2}}
    one = classifier(decider(table), answers=LabelAnswers(calibrate=True))
    assert one.probabilities(["kept"]) == pytest.approx(np.array([[7 / 19, 12 / 19]]), abs=1e-12)


# -- answers without a label, and calls that fail -------------------------------------------------------------------


# Engines whose answer to "pin" names no label, and to anything else names "cash".
WITHOUT_A_LABEL = {
    "votes": voter({"pin": "I cannot tell."}, "cash"),
    "top tokens": TopTokens(lambda prompt: {"The": 0.9} if "pin" in prompt else {" cash": 0.9}),
}


@pytest.mark.parametrize("engine", WITHOUT_A_LABEL.values(), ids=list(WITHOUT_A_LABEL))
async def test_an_answer_without_a_label_is_an_error_and_never_the_first_label(engine):
    one = classifier(engine, answers=RAW)
    assert one.batch(["atm"]) == ["cash"]
    for call in (lambda: one.batch(["pin"]), lambda: one.probabilities(["pin"])):
        with pytest.raises(ModelCallError, match=r"names none of the labels.*other_label="):
            call()
    for acall in (lambda: one.abatch(["atm", "pin"]), lambda: one.aprobabilities(["pin"])):
        with pytest.raises(ModelCallError, match="names none of the labels"):
            await acall()
    counted = classifier(engine, answers=LabelAnswers(calibrate=False, other_label="cash"))
    assert counted.batch(["pin", "atm"]) == await counted.abatch(["pin", "atm"])
    assert counted.probabilities(["pin"]).tolist() == [[0.0, 1.0]]


# Engines of likelihoods that have none for any label after "pin": by their contract the call failed.
WITHOUT_A_LIKELIHOOD = {
    "minus infinity": Choices(lambda prompt, choice: -math.inf if "pin" in prompt else -float(choice != " cash")),
    "NaN": Choices(lambda prompt, choice: math.nan if "pin" in prompt else -float(choice != " cash")),
    "failed row": FakeBackend(lambda _prompt, _prefix: {" cash": 0.9}, max_top_k=2, fail_rows_containing="pin"),
}


@pytest.mark.parametrize("engine", WITHOUT_A_LIKELIHOOD.values(), ids=list(WITHOUT_A_LIKELIHOOD))
async def test_an_engine_without_any_likelihood_has_failed_and_names_no_label(engine):
    for one in (classifier(engine, answers=RAW), classifier(engine, answers=COUNTED)):
        assert one.batch(["atm"]) == ["cash"]
        with pytest.raises(ModelCallError, match="no likelihood for any label"):
            one.batch(["atm", "pin"])
        with pytest.raises(ModelCallError, match="no likelihood for any label"):
            await one.aprobabilities(["pin"])
        found = one.batch(["atm", "pin"], return_exceptions=True)
        assert found[0] == "cash"
        assert isinstance(found[1], ModelCallError)


@pytest.mark.filterwarnings("ignore:.*OpenAIDecisions.*beta")
@pytest.mark.parametrize("kind", [voter, decider])
async def test_a_public_call_that_fails_is_an_error_and_no_even_row(kind):
    raises = {"down": StatusError("gateway", status_code=502)}
    one = classifier(
        kind({}, raises=raises), answers=LabelAnswers(other_label="cash")
    )  # which counts for answers, and there is none
    with pytest.raises(ModelCallError, match="HTTP 502"):
        one.probabilities(["atm", "down"])
    with pytest.raises(ModelCallError, match="HTTP 502"):
        await one.aprobabilities(["down"])


@pytest.mark.filterwarnings("ignore:.*OpenAIDecisions.*beta")
@pytest.mark.parametrize("kind", [voter, decider])
async def test_one_failed_call_of_a_batch_fails_alone(kind):
    raises = {"down": StatusError("gateway", status_code=502)}
    table = {
        "atm": {"card": 0.1, "cash": 0.9} if kind is decider else "cash",
        "dunno": SimpleNamespace(answers={}) if kind is decider else "?",
    }
    chain = classifier(kind(table, raises=raises))
    inputs = ["atm", "down", {"wrong": 1}, "dunno", "atm"]
    for found in (
        chain.batch(inputs, return_exceptions=True),
        await chain.abatch(inputs, return_exceptions=True),
    ):
        assert [found[0], found[4]] == ["cash", "cash"]
        assert "HTTP 502" in str(found[1])
        assert isinstance(found[2], KeyError)
        assert "names none" in str(found[3])
        assert {type(found[1]), type(found[3])} == {ModelCallError}
    with pytest.raises(ModelCallError, match="HTTP 502"):
        chain.batch(["atm", "down"])
    with pytest.raises(ModelCallError, match="names none"):
        await chain.ainvoke("dunno")


async def test_after_an_error_no_further_batch_is_asked():
    engine = Choices(lambda prompt, _choice: -math.inf if prompt == "0" else -1.0)
    one = LabelClassifier(engine, labels=LABELS)
    prompts = [str(number) for number in range(200)]
    for call in (one.aprobabilities, one.abatch):
        engine.calls.clear()
        with pytest.raises(ModelCallError, match="no likelihood"):
            await call(prompts)
        assert [len(prompts) for prompts, _ in engine.calls] == [64, 1]
    engine.calls.clear()
    kept = one.batch(prompts, return_exceptions=True)
    assert [len(prompts) for prompts, _ in engine.calls] == [64, 1, 64, 64, 8]
    assert [place for place, found in enumerate(kept) if isinstance(found, ModelCallError)] == [0]


async def test_calls_of_voters_are_limited_by_the_run():
    """Each call but the first, which is made alone, waits until as many are made as may be; one more has a moment."""
    running, most, limit = 0, 0, 1
    lock = threading.Condition()

    def say(text):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            lock.notify_all()
            lock.wait_for(lambda: most >= limit or "Ticket: 0" in text, 60)
        time.sleep(0.02)
        with lock:
            running -= 1
        return "card"

    one = classifier(TextVoteBackend(TextChat(say=say)))
    one.batch(["a", "b", "c"], {"max_concurrency": 1})
    assert most == 1
    for most_allowed in (3, 2):
        most, limit = 0, most_allowed
        texts = [str(number) for number in range(4 * limit)]
        given = {"max_concurrency": limit}
        one.batch(texts, given) if limit == 3 else await one.abatch(texts, given)
        assert most == limit


@pytest.mark.parametrize("limit", [0, -1, True, 2.5, "8"])
async def test_a_limit_of_calls_that_is_none_is_refused_before_any_call(limit):
    model = TextChat(say=saying({}, otherwise="card"))
    one, given = classifier(TextVoteBackend(model)), {"max_concurrency": limit}
    asked = len(model.seen)
    for ask in (one.invoke, RunnableLambda(lambda text: one.batch([text, "b"])).invoke):
        with pytest.raises(ConfigurationError, match=r"max_concurrency.*: expected an integer >= 1"):
            ask("a", given)
    with pytest.raises(ConfigurationError, match=r"max_concurrency.*: expected an integer >= 1"):
        await one.abatch(["a", "b"], given)
    assert len(model.seen) == asked


def test_content_free_inputs_that_fail_are_an_error():
    engine = Choices(lambda prompt, _choice: -math.inf if "MASK" in prompt else -1.0)
    with pytest.raises(ModelCallError, match="no likelihood"):
        classifier(engine).batch(["x"])


def test_a_content_free_answer_that_names_no_label_is_left_out():
    table = {"N/A": {" card": 0.8, " cash": 0.2}, "atm": {" card": 0.4, " cash": 0.6}}
    engine = TopTokens(lambda prompt: next((row for text, row in table.items() if text in prompt), {"The": 0.9}))
    assert classifier(engine).probabilities(["atm"]) == pytest.approx(np.array([[1 / 7, 6 / 7]]))


@pytest.mark.parametrize("votes", ["hard", "text"])
def test_copies_share_the_engine_of_a_langchain_model_and_another_process_builds_its_own(votes):
    classifier = LabelClassifier(
        ScriptedLLM(answer=fixed({" card": 0.5, " cash": 0.25})),
        labels=LABELS,
        prompt=PROMPT,
        answers=LabelAnswers(votes=votes, calibrate=False),
    )
    assert copy.deepcopy(classifier).invoke("x") == copy.copy(classifier).invoke("x") == "card"
    with pytest.raises(PrivateAccessError, match=r"Backend cannot be pickled: .* Construct it in the other process"):
        pickle.dumps(classifier)
