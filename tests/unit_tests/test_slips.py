"""What the package answers to the slips of a first week: the cause and the cure, in few words, and no record."""

from __future__ import annotations

import asyncio
import io
import math
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from typing import Any

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import AIMessagePromptTemplate, ChatPromptTemplate, PromptTemplate

import langchain_dpicl as dpicl
from langchain_dpicl import (
    Budget,
    ChatEmbedded,
    DemonstrationSynthesizer,
    DPFewShotChatMessagePromptTemplate,
    DPFewShotPromptTemplate,
    DPVotingRunnable,
    EmbeddedLLM,
    FewShotTask,
    PrivacyBudgetCallbackHandler,
    PrivateExamples,
    PromptPATEExampleSelector,
)
from langchain_dpicl.backends.fake import FakeBackend, scripted
from langchain_dpicl.evaluation import Exact, dp_evaluate
from langchain_dpicl.exceptions import (
    CapabilityError,
    ConfigurationError,
    ModelCallError,
    NoPrivacyBudgetError,
    PrivacyBudgetExceededError,
    PrivacyBudgetMismatchError,
    PrivateAccessError,
    RecordError,
)
from langchain_dpicl.streams import PrivateStream

CANARY = "zx-slip-canary-83"
MOST_WORDS = 60
TOPICS = ("sport", "business", "politics", "tech", "entertainment")
ARTICLES = [{"text": f"{CANARY}: made-up article {n}", "label": TOPICS[n % 5]} for n in range(40)]
FILMS = [{"text": f"{CANARY}: film {n}", "label": n % 2} for n in range(40)]
ROW, QUERY = PromptTemplate.from_template("Article: {text}\nTopic: {label}"), "Article: {input}\nTopic:"
CALLS_OF_CLASSES = "expected to be built by from_private_examples, found a call of the class. Build it with"


class Queue(Enum):
    CARD = "card"


class Topic(str, Enum):  # noqa: UP042  as older code has it; `str` shows a member of it by its name
    SPORT = "sport"
    TECH = "tech"


@dataclass
class Row:
    text: str
    label: str


def declared(**changes: Any) -> PrivateExamples:
    given: dict[str, Any] = {"records": ARTICLES, "label_key": "label", "labels": TOPICS, "public_size": 1_700}
    return PrivateExamples(**{**given, **changes})


def handler(epsilon: float = 4.0, delta: float = 1e-5) -> PrivacyBudgetCallbackHandler:
    return PrivacyBudgetCallbackHandler(epsilon=epsilon, delta=delta)


def voter(private: PrivateExamples | None = None, **changes: Any) -> DPVotingRunnable:
    given: dict[str, Any] = {"llm": EmbeddedLLM(), "budget": handler(), "epsilon": 1.0, "max_queries": 2}
    asked: dict[str, Any] = {**given, "example_prompt": ROW, "suffix": QUERY, **changes}
    return DPVotingRunnable.from_private_examples(
        declared() if private is None else private, **{name: value for name, value in asked.items() if value is not ...}
    )


def prompt(**changes: Any) -> DPFewShotPromptTemplate:
    given: dict[str, Any] = {"llm": EmbeddedLLM(), "budget": handler(), "epsilon": 1.0}
    return DPFewShotPromptTemplate.from_private_examples(
        declared(), **{**given, "example_prompt": ROW, "suffix": QUERY, **changes}
    )


def counter(**changes: Any) -> dpicl.UnitCounter:
    return dpicl.UnitCounter.from_private_examples(
        declared(), **{"field": "label", "budget": handler(), "epsilon": 1.0, **changes}
    )


def three_of_two() -> list[str]:
    asked = voter()
    return [asked.invoke(query) for query in "abc"]


def two_budgets() -> tuple[DPVotingRunnable, DPVotingRunnable]:
    private = declared()
    return voter(private), voter(private)


SLIPS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no public_size": (
        lambda: PrivateExamples(ARTICLES, label_key="label", labels=TOPICS),
        ConfigurationError,
        r"public_size: expected the declared number of units, .*a round number, not the number of records",
    ),
    "integer labels, declared as integers": (
        lambda: PrivateExamples(FILMS, label_key="label", labels=(0, 1), public_size=9_000),
        ConfigurationError,
        r"labels: expected text, found int\. Give labels_as_text=True",
    ),
    "integer labels, declared as text": (
        lambda: PrivateExamples(FILMS, label_key="label", labels=("0", "1"), public_size=9_000),
        RecordError,
        r"expected text under 'label'; a record has an integer\. Give labels_as_text=True.*`dpicl check FILE`",
    ),
    "a label forgotten": (
        lambda: declared(labels=TOPICS[:4]),
        RecordError,
        r"a record has another\. Declare every label, letter by letter: case and white space count\..*`dpicl check FILE`",
    ),
    "booleans, declared as a frame writes them": (
        lambda: PrivateExamples(
            [{"text": "a", "label": True}],
            label_key="label",
            labels=("True", "False"),
            public_size=900,
            labels_as_text=True,
        ),
        RecordError,
        r"a record has another\. Declare every label, .*: case and white space count; of booleans 'true' and 'false'\.",
    ),
    "a field of another name": (
        lambda: PrivateExamples(
            [{"content": "a", "label": "0"}], label_key="label", labels=("0", "1"), public_size=900
        ),
        RecordError,
        r"expected text under 'text'; a record has none\. If it has another name, give text_key=\.",
    ),
    "a set of labels": (
        lambda: declared(labels={*TOPICS}),
        ConfigurationError,
        r"labels: expected a list of texts, whose order is declared too, found 'set'\. Write sorted\(\.\.\.\)",
    ),
    "labels of an enumeration without texts": (
        lambda: declared(labels=tuple(Queue)),
        ConfigurationError,
        r"labels: expected texts alone, found Queue\.",
    ),
    "a label twice": (
        lambda: declared(labels=(*TOPICS, "tech")),
        ConfigurationError,
        "labels: expected distinct texts, found 'one of them twice'",
    ),
    "records in place of labels": (
        lambda: declared(labels=[f"{CANARY}\n", "another record"]),
        ConfigurationError,
        r"labels: expected a printable string of 1 to 200 characters, found 'another text among them'\.",
    ),
    "a label with a joiner": (
        lambda: declared(labels=("\u0627\u0644\u0641", "\u067e\u0631\u062f\u0627\u062e\u062a\u200c\u0647\u0627")),
        ConfigurationError,
        r"labels: expected a printable .*, found 'another text among them'\. Where .* a character shows nothing, .*U\+200C",
    ),
    "a field with a space that breaks no line": (
        lambda: declared(text_key="my\u00a0text"),
        ConfigurationError,
        r"text_key: expected a printable .*, found 'my\\xa0text'\. U\+00A0 shows nothing, or as a space: leave it out, or ",
    ),
    "a document in place of a list": (
        lambda: declared(records=Document(CANARY)),
        ConfigurationError,
        r"records: expected an iterable of texts or mappings, found Document\. .*put a single record into a list",
    ),
    "sizes that are neither a number nor a dict": (
        lambda: declared(public_size=[300, 200], labels_as_text=True),
        ConfigurationError,
        r"public_size: expected an integer >= 1, found 'list'\.",
    ),
    "sizes by text in place of by label": (
        lambda: declared(public_size={CANARY: 3, TOPICS[0]: 400}),
        ConfigurationError,
        rf"public_size: expected a number for each of the {len(TOPICS)} declared labels, found '1 of them and 1 other",
    ),
    "labels that a column with gaps made floats": (
        lambda: declared(records=[{"text": "a", "label": 1.0}], labels=(1, 2), labels_as_text=True),
        RecordError,
        r"under 'label'; a record has another number\. Make it an integer: a column with gaps holds 1\.0 for 1\.",
    ),
    "a field with a dot": (
        lambda: voter(
            declared(records=[{"text": "a", "queue.name": "tech"}], label_key="queue.name"), example_prompt=...
        ),
        ConfigurationError,
        r"label_key: expected a name with a letter first, .*, for templates, found 'queue\.name'\. Rename the field\.",
    ),
    "a path in place of the records": (
        lambda: declared(records="tickets.csv"),
        ConfigurationError,
        r"records: expected an iterable .*, found str\. Read the file first: csv\.DictReader\(file\), map\(json\.loads, file\), a data",
    ),
    "an open file in place of what it holds": (
        lambda: declared(records=io.StringIO(f"text,label\n{CANARY},tech\n")),
        ConfigurationError,
        r"records: expected an iterable .*, found StringIO\. Read the file first: csv\.DictReader\(file\), map\(json\.loads, file\), a data",
    ),
    "an open temporary file": (
        lambda: declared(records=tempfile.NamedTemporaryFile("w+")),  # noqa: SIM115  it goes with the error
        ConfigurationError,
        r"records: expected an iterable .*, found _TemporaryFileWrapper\. Read the file first",
    ),
    "messages in a prompt of text": (
        lambda: prompt(example_prompt=ChatPromptTemplate.from_messages([("human", "{text}"), ("ai", "{label}")])),
        ConfigurationError,
        r"expected text or a PromptTemplate, found 'ChatPromptTemplate'\. For messages take DPFewShotChatMessagePrompt",
    ),
    "an evaluator that is a class": (
        lambda: dp_evaluate(ROW | EmbeddedLLM(), declared(), evaluators=Exact, budget=handler()),  # type: ignore[arg-type]
        ConfigurationError,
        r"evaluators: expected one or more of Exact, Score and Judge, found Exact\. Write Exact\(\.\.\.\)",
    ),
    "a template of another language under test": (
        lambda: dp_evaluate(
            PromptTemplate.from_template("{{text}}", template_format="mustache") | EmbeddedLLM(),
            declared(),
            evaluators=Exact(),
            budget=handler(),
        ),
        CapabilityError,
        r"chain: expected a template of f-strings and fixed messages, .*, found another PromptTemplate\.",
    ),
    "a template with a place for messages under test": (
        lambda: dp_evaluate(
            ChatPromptTemplate.from_messages([("placeholder", "{history}"), ("human", "{text}")]) | EmbeddedLLM(),
            declared(),
            evaluators=Exact(),
            budget=handler(),
        ),
        CapabilityError,
        r"without functions, selectors and placeholders, found another ChatPromptTemplate\.",
    ),
    "one query in place of a batch, whose letters would be charged": (
        lambda: voter().batch("ab"),  # type: ignore[arg-type]
        ConfigurationError,
        r"inputs: expected a list of queries, found str\. Write \[\.\.\.\] around one, or list\(\.\.\.\)",
    ),
    "a generator in place of a batch": (
        lambda: voter().batch(each for each in ("a", "b")),  # type: ignore[arg-type]
        ConfigurationError,
        r"inputs: expected a list of queries, found generator\.",
    ),
    "a column of a frame in place of a batch": (
        lambda: voter().batch(np.array(["a", "b"])),  # type: ignore[arg-type]
        ConfigurationError,
        r"inputs: expected a list of queries, found ndarray\.",
    ),
    "a query that a frame lacks": (
        lambda: voter().invoke(math.nan),  # type: ignore[arg-type]
        ConfigurationError,
        r"input: expected text, .*, found nan\. Leave out what has no text\.",
    ),
    "messages of text": (
        lambda: DPFewShotChatMessagePromptTemplate.from_private_examples(
            declared(), llm=EmbeddedLLM(), budget=handler(), epsilon=1.0, example_prompt=ROW, suffix="{input}"
        ),
        ConfigurationError,
        r"expected a ChatPromptTemplate of one demonstration, found 'PromptTemplate'\. Write ChatPromptTemplate\.",
    ),
    "rows of a dataclass": (
        lambda: declared(records=[Row(CANARY, "tech")]),
        RecordError,
        r"or a Document; one is of another type\. Make a dict of each, as dict\(row\), dataclasses\.asdict and model_dump",
    ),
    "a unit of another name": (
        lambda: declared(unit_key="user"),
        RecordError,
        r"an integer under 'user'; a record has none\. If it has another name, give unit_key=\.",
    ),
    "a unit that is a UUID": (
        lambda: declared(records=[{**one, "user": uuid.uuid4()} for one in ARTICLES], unit_key="user"),
        RecordError,
        r"an integer under 'user'; a record has neither\. Write str\(\.\.\.\) around it\.",
    ),
    "a unit that is missing": (
        lambda: declared(records=[{**one, "user": None} for one in ARTICLES], unit_key="user"),
        RecordError,
        r"an integer under 'user'; a record has none\. Leave out records without one: under one text they would be one unit",
    ),
    "JSON in place of a path": (
        lambda: DPFewShotPromptTemplate.from_released('{"format": "' + 500 * CANARY, example_prompt=ROW, suffix=QUERY),
        ConfigurationError,
        r"path: expected the path of a file, found text that begins with '{'\. Give JSON text to from_json\.",
    ),
    "a short list in place of a path": (
        lambda: dpicl.ReleasedDemonstrations.load(f' ["{CANARY}"]'),
        ConfigurationError,
        r"path: expected the path of a file, found text that begins with '\['\.",
    ),
    "a demonstration without its text": (
        lambda: prompt(example_prompt="Topic: {label}"),
        ConfigurationError,
        r"example_prompt: expected a template with {text}, the released text, found \['label'\]\. Nothing else",
    ),
    "double braces in a demonstration": (
        lambda: prompt(example_prompt="Article: {{text}} Topic: {{label}}"),
        ConfigurationError,
        r"example_prompt: expected a template with {text}, the released text, found \[\]",
    ),
    "JSON in the suffix of a prompt": (
        lambda: prompt(suffix='{"article": "{input}"}'),
        ConfigurationError,
        r"suffix: expected plain {field} names in an f-string template, found .* Write {{ and }} for braces",
    ),
    "a suffix of a prompt without the query": (
        lambda: prompt(suffix="Topic:"),
        ConfigurationError,
        r"suffix: expected a template with the query's variable, .*, found 'Topic:'\. Where another part .* suffix=\"\"",
    ),
    "a format in an example": (
        lambda: voter(example_prompt="Article: {text}\nTopic: {label!r}"),
        ConfigurationError,
        r"example_prompt: expected plain {field} names .*\. Leave out what follows the name in {label\.\.\.}\.",
    ),
    "double braces in an example": (
        lambda: voter(example_prompt="Article: {{text}} Topic: {{label}}"),
        ConfigurationError,
        r"expected a template with fields among .*, found '.*'\. Write a field in single braces\.",
    ),
    "another key in a query": (
        lambda: voter().invoke({"text": "a"}),
        ConfigurationError,
        r"input: expected a dict with \['input'\], found \['text'\]\.",
    ),
    "a prompt without a suffix": (
        lambda: prompt(suffix=None),
        ConfigurationError,
        r"suffix: expected text after the demonstrations, with the query's variable, such as {input}, found None",
    ),
    "a prefix of None": (
        lambda: prompt(prefix=None),
        ConfigurationError,
        r"prefix: expected text or a PromptTemplate .* found 'NoneType'",
    ),
    "a wording that is a text": (
        lambda: FewShotTask(wordings=["Article: {input}"]),  # type: ignore[arg-type]
        ConfigurationError,
        r"FewShotTask\.wordings: expected a list, each item an instance of FewShotTask, found list\.",
    ),
    "no call at a time": (
        lambda: voter().invoke("x", {"max_concurrency": 0}),
        ConfigurationError,
        r"config\['max_concurrency'\]: expected an integer >= 1, found 0\.",
    ),
    "a demonstration of two texts": (
        lambda: prompt(example_prompt="A: {premise}\nB: {text}\nTopic: {label}"),
        ConfigurationError,
        r"found \['premise'\]\. A demonstration has one text: join several in the records",
    ),
    "a scripted chat model that writes demonstrations": (
        lambda: prompt(llm=FakeListChatModel(responses=["sport"])),
        CapabilityError,
        r"without logprobs\..* In a test take `langchain_dpicl\.backends\.fake\.FakeBackend`",
    ),
    "epsilon of a budget that is spent": (
        lambda: [voter(budget=spent) for spent in [handler(1.0)] for _ in range(2)],
        PrivacyBudgetExceededError,
        "requested 1, remaining 0. It is spent for good, or set aside. What was released stays free to use",
    ),
    "len": (lambda: len(declared()), PrivateAccessError, "has no length, .* give it to a component"),
    "an index": (lambda: declared()[0], PrivateAccessError, "has no length, index .* give it to a component"),
    "a loop": (lambda: list(declared()), PrivateAccessError, "or iteration, .* give it to a component"),
    "epsilon above the budget": (
        lambda: voter(budget=handler(1.0), epsilon=2.0),
        PrivacyBudgetExceededError,
        "requested 2, remaining 1. .* lower them",
    ),
    "a third of two queries": (
        three_of_two,
        PrivacyBudgetExceededError,
        "requested 1, remaining 0.* Build another component",
    ),
    "no max_queries": (
        lambda: voter(max_queries=...),
        ConfigurationError,
        "expected max_queries, found None. Give max_queries: queries that the share pays for",
    ),
    "no budget": (lambda: voter(budget=...), NoPrivacyBudgetError, "Give budget=PrivacyBudgetCallbackHandler"),
    "a budget without delta": (
        lambda: PrivacyBudgetCallbackHandler(epsilon=1.0),  # type: ignore[call-arg]
        ConfigurationError,
        r"expected delta=\.\.\., found none\. Build it with .*delta=1e-6\), delta at most 1/\(10 \* public_size\)",
    ),
    "a suffix without the query": (
        lambda: voter(suffix="Topic:"),
        ConfigurationError,
        "suffix: expected a template with the query's variable, such as {input}, found 'Topic:'",
    ),
    "another field in the example": (
        lambda: voter(example_prompt=PromptTemplate.from_template("A: {content}\nTopic: {label}")),
        ConfigurationError,
        r"fields among \['label', 'text'\], found \['content'\]\. Declare further fields",
    ),
    "demonstrations by a model that only writes": (
        lambda: prompt(llm=FakeListChatModel(responses=["x"])),
        CapabilityError,
        "without logprobs.* Take one that reports them: .*embedded model.* it can still vote on labels",
    ),
    "votes by a model that only writes": (
        lambda: voter(llm=FakeListChatModel(responses=["sport"])),
        CapabilityError,
        r'or LabelAnswers\(votes="text"\) to take what it writes as its vote\. .*without logprobs',
    ),
    "a model by its name": (
        lambda: voter(llm="gpt-4.1-mini"),
        ConfigurationError,
        r'Give its provider, such as "openai:gpt-4\.1-mini", or make the model, such as with init_chat_model',
    ),
    "a chat template as example": (
        lambda: voter(example_prompt=ChatPromptTemplate.from_messages([("human", "{text}"), ("ai", "{label}")])),
        ConfigurationError,
        "example_prompt: expected text or a PromptTemplate .*'ChatPromptTemplate'. Write it as one text, such as",
    ),
    "a large delta": (
        lambda: voter(budget=handler(4.0, 1e-2)),
        ConfigurationError,
        r"delta: expected at most 1/\(10 \* public_size\) = 5\.88235\d*e-05 .* Lower delta",
    ),
    "two budgets for the same examples": (
        two_budgets,
        PrivacyBudgetMismatchError,
        "to which it is bound.* Give all components of these examples one budget",
    ),
    "a typo in an option": (
        lambda: voter(max_query=3),
        ConfigurationError,
        r"DPVotingRunnable\.from_private_examples: .* found 'max_query'\. Did you mean 'max_queries'\?",
    ),
    "a typo in an option of a prompt": (
        lambda: prompt(max_tokns=4),
        ConfigurationError,
        r"DPFewShotPromptTemplate\.from_private_examples: .* found 'max_tokns'\. Did you mean 'max_tokens'\?",
    ),
    "an option that a value of options holds": (
        lambda: prompt(shots=4),
        ConfigurationError,
        r"DPFewShotPromptTemplate\.from_private_examples: .* found 'shots'\. Give rows=Rows\(shots=",
    ),
    "a typo in a declaration": (
        lambda: PrivateExamples(ARTICLES, lable_key="label", public_size=1_700),  # type: ignore[call-arg]
        ConfigurationError,
        r"PrivateExamples: .* Did you mean 'label_key'\? Build it with PrivateExamples\(records, public_size=",
    ),
    "a typo in a stream": (
        lambda: PrivateStream(dataset_id="t", time_key="at", unit_key="u", public_size={7: 900}, lable_key="label"),  # type: ignore[call-arg]
        ConfigurationError,
        r"PrivateStream: .* Did you mean 'label_key'\? Build it with PrivateStream\(dataset_id=",
    ),
    "a typo in a model": (
        lambda: ChatEmbedded(max_tokns=4),  # type: ignore[call-arg]
        ConfigurationError,
        r"ChatEmbedded: .* Did you mean 'max_tokens'\?",
    ),
    "one record as the records": (
        lambda: PrivateExamples(ARTICLES[0], public_size=1_700),
        ConfigurationError,
        "found dict. .* put a single record into a list",
    ),
    "a path in place of a release": (
        lambda: prompt().with_released("released.json"),  # type: ignore[arg-type]
        ConfigurationError,
        r"released: expected ReleasedDemonstrations, found 'str'\. Read a file with ReleasedDemonstrations\.load",
    ),
    "one value to count, whose letters would be counted": (
        lambda: counter(values="sport"),
        ConfigurationError,
        "values: expected a list of texts, found 'sport'",
    ),
    "a number of values": (
        lambda: counter(values=5),
        ConfigurationError,
        "values: expected a list of texts, found 5",
    ),
    "an infinite epsilon": (
        lambda: handler(math.inf),
        ConfigurationError,
        r"epsilon: expected a number in \(0\.0, inf\), found inf",
    ),
    "a text as the prompt of a classifier": (
        lambda: dpicl.LabelClassifier(EmbeddedLLM(), labels=TOPICS, prompt=QUERY),  # type: ignore[arg-type]
        ConfigurationError,
        "prompt: expected a prompt template, or None, found 'str'. Make one",
    ),
    "a model by its name, whose maker has an error of its own": (
        lambda: voter(llm="openai:gpt-4.1-mini"),
        ConfigurationError,
        "llm: expected a model that LangChain can make, found 'openai:gpt-4.1-mini'. Missing key",
    ),
    "texts beyond what delta pays for": (
        lambda: prompt(max_tokens=10**9),
        ConfigurationError,
        "declared gap .* Ask for fewer tokens, texts, steps or queries, or give a larger delta",
    ),
}

FIRST_PROGRAMS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "the records alone": (
        lambda: PrivateExamples(ARTICLES),
        ConfigurationError,
        r"Give PrivateExamples\(records, public_size=\.\.\.\)",
    ),
    "PrivateExamples.from_dicts": (
        lambda: PrivateExamples.from_dicts(ARTICLES),  # type: ignore[attr-defined]
        AttributeError,
        r"no attribute 'from_dicts'\. Build it with PrivateExamples\(records, public_size=",
    ),
    "Budget(1.0, 1e-5)": (
        lambda: Budget(1.0, 1e-5),  # type: ignore[misc]
        ConfigurationError,
        r"Budget: expected epsilon=\.\.\. and delta=\.\.\., found none\. Build it with Budget\(epsilon=",
    ),
    "Budget(epsilon=1.0)": (
        lambda: Budget(epsilon=1.0),  # type: ignore[call-arg]
        ConfigurationError,
        r"Budget: expected delta=\.\.\., found none\.",
    ),
    "the stock few-shot template's arguments": (
        lambda: DPFewShotPromptTemplate(examples=ARTICLES, example_prompt=ROW, suffix=QUERY, llm=EmbeddedLLM()),
        ConfigurationError,
        r"Build it with DPFewShotPromptTemplate\.from_private_examples\(private, llm=",
    ),
    "private examples in the stock template": (
        lambda: DPFewShotPromptTemplate(examples=declared(), example_prompt=ROW, suffix=QUERY, epsilon=1.0),
        ConfigurationError,
        r"Build it with DPFewShotPromptTemplate\.from_private_examples\(private, llm=",
    ),
    "DPFewShotPromptTemplate.from_examples": (
        lambda: DPFewShotPromptTemplate.from_examples(ARTICLES),  # type: ignore[attr-defined]
        AttributeError,
        r"no attribute 'from_examples'\. Build it with DPFewShotPromptTemplate\.from_private_examples\(",
    ),
    "DPVotingRunnable.from_llm": (
        lambda: DPVotingRunnable.from_llm(EmbeddedLLM()),  # type: ignore[attr-defined]
        AttributeError,
        r"no attribute 'from_llm'\. Build it with DPVotingRunnable\.from_private_examples\(",
    ),
    "SoftPromptClassifier(model=)": (
        lambda: dpicl.SoftPromptClassifier(model=EmbeddedLLM()),  # type: ignore[call-arg]
        ConfigurationError,
        r"expected prompts=\.\.\., found none\. Build it with SoftPromptClassifier\(model, prompts, ",
    ),
    "a Budget among the callbacks": (
        lambda: voter().invoke("x", {"callbacks": [Budget(epsilon=1.0, delta=1e-6)]}),  # type: ignore[list-item]
        ConfigurationError,
        "expected handlers, found Budget. Of a budget pass the PrivacyBudgetCallbackHandler",
    ),
}

CALLED: dict[str, dict[str, Any]] = {
    "DPVotingRunnable": {"llm": EmbeddedLLM, "examples": ARTICLES, "labels": TOPICS, "epsilon": 1.0},
    "DPFreeFormRunnable": {"llm": EmbeddedLLM, "examples": ARTICLES},
    "DPRetrievalVotingRunnable": {"llm": EmbeddedLLM, "retriever": None, "labels": TOPICS},
    "DPRetrievalFreeFormRunnable": {"llm": EmbeddedLLM, "documents": ARTICLES},
    "DemonstrationSynthesizer": {"llm": EmbeddedLLM, "examples": ARTICLES, "k": 4},
    "DocumentSynthesizer": {"llm": EmbeddedLLM, "documents": ARTICLES},
    "PrivateEvolution": {"llm": EmbeddedLLM, "examples": ARTICLES},
    "PromptPATELabeler": {"llm": EmbeddedLLM, "examples": ARTICLES},
    "PromptPATEExampleSelector": {"examples": ARTICLES, "k": 4},
    "PromptDPSGD": {"model": "gpt2", "examples": ARTICLES, "epsilon": 1.0},
    "UnitCounter": {"examples": ARTICLES},
    "ValueDiscovery": {"examples": ARTICLES},
    "WordDiscovery": {"examples": ARTICLES},
}


class KeylessError(Exception):
    """As the packages of providers have: no ValueError."""


def keyless(*_: object, **__: object) -> None:
    raise KeylessError("Missing key\nand more")


@pytest.mark.parametrize("slip", [*SLIPS, *FIRST_PROGRAMS])
def test_a_slip_is_answered_with_its_cause_and_its_cure(slip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("langchain.chat_models.init_chat_model", keyless)
    act, kind, answer = {**SLIPS, **FIRST_PROGRAMS}[slip]
    with pytest.raises(kind, match=answer) as caught:
        act()
    assert CANARY not in str(caught.value)
    assert len(str(caught.value).split()) <= MOST_WORDS


@pytest.mark.parametrize("name", CALLED)
def test_a_class_that_is_called_names_the_constructor_in_one_sentence(name: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        getattr(dpicl, name)(**CALLED[name])
    answer = str(caught.value)
    assert answer.startswith(f"{name}: {CALLS_OF_CLASSES} {name}.from_private_examples(private, ")
    assert CANARY not in answer
    assert len(answer.split()) <= MOST_WORDS


@pytest.mark.parametrize("name", ["from_llm", "from_examples", "from_documents", "from_dicts"])
@pytest.mark.parametrize("component", ["DPVotingRunnable", "PromptPATEExampleSelector", "PrivateExamples"])
def test_a_constructor_that_a_class_does_not_have_is_absent_for_python_too(component: str, name: str) -> None:
    assert not hasattr(getattr(dpicl, component), name)


@pytest.mark.parametrize(
    ("act", "cure"),
    [
        (lambda: declared(public_size=np.int64(1_700)), r"found 'int64'\. Write int\(\.\.\.\) around it"),
        (lambda: voter(max_queries=np.int32(2)), r"found int32\. Write int\(\.\.\.\) around it"),
        (lambda: voter(epsilon=np.float32(1.0)), r"found float32\. Write float\(\.\.\.\) around it"),
        (lambda: handler(Decimal(1)), r"found Decimal\. Write float\(\.\.\.\) around it"),
        (lambda: voter(epsilon="1"), r"found '1'\.$"),
        (lambda: voter(max_queries=np.float32(2.5)), r"found float32\.$"),  # int(...) would cut it to 2
        (lambda: voter(max_queries=Decimal("2.5")), r"found Decimal\.$"),
        (lambda: voter(epsilon=np.complex64(1)), r"found complex64\.$"),
    ],
)
def test_numbers_of_other_kinds_are_refused_with_the_cure(act: Callable[[], object], cure: str) -> None:
    # Many checks keep the number as it was given, and numbers of numpy overflow.
    with pytest.raises(ConfigurationError, match=cure):
        act()


@pytest.mark.parametrize("slip", ["example_prompt", "suffix", "prefix"])
def test_a_template_that_no_prompt_can_use_is_refused_before_it_is_paid_for(slip: str) -> None:
    budget = handler()
    with pytest.raises(ConfigurationError, match=slip):
        prompt(budget=budget, **{slip: "no {text"})
    assert budget.remaining_epsilon == budget.epsilon


@pytest.mark.parametrize("slip", ["prefix", "suffix", "example_prompt"])
def test_a_variable_that_langchain_uses_itself_is_refused_before_it_is_paid_for(slip: str) -> None:
    budget = handler()
    with pytest.raises(ConfigurationError, match=rf"{slip}: expected \w+ other than 'stop'"):
        prompt(budget=budget, **{slip: "At {stop}: {input}"})
    assert budget.remaining_epsilon == budget.epsilon
    assert "{stop}" in DPFewShotPromptTemplate(examples=[], example_prompt=ROW, suffix="{{stop}} {input}").format(
        input="a"
    )


def test_a_template_built_by_hand_takes_a_text_and_names_what_is_missing() -> None:
    made = DPFewShotPromptTemplate(
        examples=[{"text": "a", "label": "b"}],
        example_prompt="{text} -> {label}",  # type: ignore[arg-type]
        suffix="{input} ->",
    )
    assert made.format(input="c") == "a -> b\n\nc ->"
    with pytest.raises(
        ConfigurationError, match=r"examples: expected .* example_selector.*mean 'examples'\?.*Build it"
    ):
        DPFewShotPromptTemplate(exmples=[], example_prompt=ROW, suffix=QUERY)


def test_what_the_stock_templates_take_is_taken() -> None:
    run = DemonstrationSynthesizer.from_private_examples(
        declared(), llm=EmbeddedLLM(), budget=handler(), epsilon=1.0, max_tokens=1
    )
    message = AIMessagePromptTemplate.from_template("{text}: {label}")
    chat = DPFewShotChatMessagePromptTemplate.from_run(run, example_prompt=message)
    assert len(chat.format_messages()) == len(run.result.examples)  # noise may choose a blank text, which is left out
    suffix = "{{{input!s:.3}}} of {size:,}:"
    shown = DPFewShotPromptTemplate.from_released(run.result, example_prompt=ROW, suffix=suffix, prefix="{size:>4}")
    assert shown.format(input="a long one", size=1000).endswith("{a l} of 1,000:")


@pytest.mark.parametrize("example", ["A: {article}\nTopic: {label}", "Topic: {label}"])
def test_a_run_is_not_paid_for_where_no_template_can_show_it(example: str) -> None:
    run = DemonstrationSynthesizer.from_private_examples(
        declared(), llm=EmbeddedLLM(), budget=handler(), epsilon=1.0, max_tokens=1
    )
    for make in (
        DPFewShotPromptTemplate.from_run,
        lambda *a, **k: asyncio.run(DPFewShotPromptTemplate.afrom_run(*a, **k)),
    ):
        with pytest.raises(ConfigurationError, match="example_prompt: expected"):
            make(run, example_prompt=example, suffix=QUERY)
    assert len(run.result.examples) == 0


@pytest.mark.parametrize("kind", ["image_url", "file", "input_image", "text-plain", "search_result", "tool_result"])
def test_a_query_is_not_answered_without_its_picture(kind: str) -> None:
    asked, said = voter(), HumanMessage([{"type": "text", "text": "what is this?"}, {"type": kind, kind: {"url": "a"}}])
    for query in (said, [said], ChatPromptTemplate.from_messages([said]).invoke({})):
        with pytest.raises(ConfigurationError, match=rf"input: expected text alone, found \['{kind}'\]\. A row is"):
            asked.invoke(query)
    untyped = HumanMessage([{"type": "text", "text": "what is this?"}, {kind: {"url": "a"}}])
    with pytest.raises(ConfigurationError, match=r"found \['a part without a type'\]"):
        asked.invoke(untyped)
    assert asked.queries_left == 2
    assert asked.invoke(HumanMessage([{"type": "text", "text": "what is this?"}])) in TOPICS


def test_the_own_steps_of_a_model_are_no_part_of_a_query() -> None:
    call = {"type": "tool_use", "id": "1", "name": "find", "input": {}}
    steps = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "I look."}, call]
    talk = ChatPromptTemplate.from_messages([AIMessage(steps), HumanMessage("what is this?")])
    assert voter().invoke(talk.invoke({})) in TOPICS


@pytest.mark.parametrize("blank", ["", " \n", HumanMessage([]), []])
def test_a_query_that_asks_nothing_costs_nothing(blank: Any) -> None:
    asked = voter()
    with pytest.raises(ConfigurationError, match="input: expected"):
        asked.invoke({"input": blank})
    with pytest.raises(ConfigurationError, match="input: expected"):
        asyncio.run(asked.ainvoke(blank))
    assert asked.queries_left == 2


def test_no_query_of_a_batch_is_charged_beside_one_that_is_refused() -> None:
    asked, queries = voter(), ["one?", " "]
    for ask in (
        lambda: asked.batch(queries),
        lambda: asyncio.run(asked.abatch(queries)),
        lambda: list(asked.batch_as_completed(queries)),
        lambda: anext(asked.abatch_as_completed(queries)),
    ):
        with pytest.raises(ConfigurationError, match="a blank one"):
            ask()
    assert asked.queries_left == 2
    answer, refused = asked.batch(queries, return_exceptions=True)
    assert answer in TOPICS
    assert isinstance(refused, ConfigurationError)


def test_what_runs_as_it_is_built_is_told_how_to_stand_in_a_joint_plan() -> None:
    budget, private = handler(), declared(dataset_id="articles")
    task: dict[str, Any] = {"example_prompt": ROW, "suffix": QUERY}
    with pytest.raises(ConfigurationError, match=r"DemonstrationSynthesizer .* inside .* by from_run"), budget.plan():
        prompt(budget=budget)
    with budget.plan():
        run = dpicl.DemonstrationSynthesizer.from_private_examples(
            private, llm=EmbeddedLLM(), budget=budget, epsilon=1.0, max_tokens=2
        )
        asked = voter(private, budget=budget)
    assert DPFewShotPromptTemplate.from_run(run, **task).examples
    assert asked.invoke("x") in TOPICS


class Short(FakeBackend):
    """Would cut prompts of more than 150 letters, and then keep no example."""

    def check_public(self, prompt: str) -> None:
        if len(prompt) > 150:
            raise ModelCallError("expected a shorter prompt")


def short() -> Short:
    words = [f" {topic}" for topic in TOPICS]
    return Short(scripted(dict.fromkeys(words, 0.2)), vocabulary=words)


@pytest.mark.parametrize("wordings", [(), (FewShotTask(example_prompt=ROW, suffix="in other words: " + QUERY),)])
@pytest.mark.parametrize("is_awaited", [False, True])
def test_a_query_that_the_engine_would_cut_costs_nothing(is_awaited: bool, wordings: tuple[FewShotTask, ...]) -> None:
    task = FewShotTask(example_prompt=ROW, suffix=QUERY, wordings=wordings)
    asked = voter(llm=short(), task=task, example_prompt=..., suffix=...)
    long = "x" * (150 - len(QUERY) if wordings else 150)
    with pytest.raises(ModelCallError, match="a shorter prompt"):
        _ = asyncio.run(asked.ainvoke(long)) if is_awaited else asked.invoke(long)
    assert asked.queries_left == 2
    assert asked.invoke("word") in TOPICS


def test_an_input_that_the_engine_would_cut_is_refused_before_the_share_is_sealed() -> None:
    given = {"example_prompt": ROW, "suffix": QUERY, "budget": handler(), "epsilon": 1.0}
    inputs = ["a", "a", "word " * 30, "b"]
    with pytest.raises(ModelCallError, match="number 2 of the distinct ones: expected a shorter prompt"):
        dpicl.PromptPATELabeler.from_private_examples(declared(), public_inputs=inputs, llm=short(), **given)
    assert given["budget"].remaining_epsilon == 4.0


def test_a_run_goes_on_with_a_long_input_that_is_answered(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"budget": handler(), "epsilon": 1.0, "component": "labels", "checkpoint": tmp_path / "run"}
    wording, private = {"example_prompt": ROW, "suffix": QUERY}, declared(dataset_id="articles")

    def labeler(inputs: list[str], **more: int) -> dpicl.PromptPATELabeler:
        asked = {**given, **wording, **more}
        return dpicl.PromptPATELabeler.from_private_examples(private, public_inputs=inputs, llm=short(), **asked)

    inputs = ["word " * 30, "word " * 40, "b"]
    with monkeypatch.context() as patch:
        patch.setattr(Short, "check_public", None)  # as it was before such inputs were refused
        labeler(inputs).label(inputs[0])
    with pytest.raises(ModelCallError, match=r"number 2 .*er prompt\. Or leave it out, and give max_queries=3"):
        labeler(inputs)
    assert len(labeler(inputs[::2], max_queries=3).run().entries) == 2


@pytest.mark.parametrize("half", ["\ud83d", {"text": "\ud83d"}, Document("\ud83d")])
def test_a_text_that_no_model_is_sent_is_not_labelled(half: Any) -> None:
    given = {"example_prompt": ROW, "suffix": QUERY, "llm": EmbeddedLLM(), "budget": handler(), "epsilon": 1.0}
    with pytest.raises(ConfigurationError, match=r"public_inputs.*: expected valid Unicode text"):
        PromptPATEExampleSelector.from_private_examples(declared(), public_inputs=["a", half], **given)
    assert given["budget"].remaining_epsilon == 4.0


def test_a_blank_text_is_not_labelled() -> None:
    given: dict[str, Any] = {"llm": EmbeddedLLM(), "budget": handler(), "epsilon": 1.0, "component": "labels"}
    wording = {"example_prompt": ROW, "suffix": QUERY}
    with pytest.raises(ConfigurationError, match="public_inputs: expected inputs with text, found 'a blank one'"):
        PromptPATEExampleSelector.from_private_examples(declared(), public_inputs=["a", " "], **given, **wording)
    assert given["budget"].remaining_epsilon == 4.0


def test_members_of_an_enumeration_of_texts_are_their_texts() -> None:
    rows = [{"text": f"article {n}", "label": (Topic.SPORT, Topic.TECH)[n % 2], "user": Topic.TECH} for n in range(40)]
    private = declared(records=rows, labels=tuple(Topic), public_size=400, unit_key="user")
    assert private.labels == ("sport", "tech")
    assert [type(label) for label in private.labels or ()] == [str, str]
    assert voter(private).invoke("x") in {"sport", "tech"}
    assert declared(public_size=dict.fromkeys(Topic, 1_700), labels=tuple(Topic), records=rows).public_size == {
        "sport": 1_700,
        "tech": 1_700,
    }


def test_documents_are_records() -> None:
    documents = [Document(one["text"], metadata={"label": one["label"]}) for one in ARTICLES]
    assert voter(declared(records=documents)).invoke("x") in TOPICS


def test_the_wording_of_the_query_is_optional_and_its_variable_has_any_name() -> None:
    assert voter(suffix=None).invoke("x") in TOPICS
    assert voter(suffix="Article: {article}\nTopic:").invoke("x") in TOPICS
