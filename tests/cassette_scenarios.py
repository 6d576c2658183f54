"""What is said in the cassettes: the same steps against a server when recording and against the file when replaying.

Everything goes through the package's own entries and stock LangChain models. All text is invented, that of the
"private" records too. Calls run one at a time, so that they are recorded in their order; where secret coins shuffle
them (`ANY_ORDER`), all records are in every sample, so that the same calls are made, and they are kept sorted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from langchain_core.prompts import (
    ChatPromptTemplate,
    FewShotChatMessagePromptTemplate,
    FewShotPromptTemplate,
    PromptTemplate,
)

from langchain_dpicl import (
    Budget,
    DPFewShotPromptTemplate,
    DPVotingRunnable,
    FewShotTask,
    LabelAnswers,
    Noise,
    PrivateExamples,
    PromptPATEExampleSelector,
    PromptPATELabeler,
    ReleasedDemonstrations,
    Rows,
)
from langchain_dpicl.backends.langchain.backend import LangChainBackend
from langchain_dpicl.backends.langchain.logprobs import DecisionsBackend
from langchain_dpicl.backends.langchain.texts import TextVoteBackend
from langchain_dpicl.backends.private_calls.call import RetryPolicy
from langchain_dpicl.options import Student

RECORDS = (
    "my card ending in 0000 was declined in a shop on Fennel Street",
    "the transfer to Jo Sample is still pending",
    "how do i top up with a card from another bank ?",
)
"""Invented; they stand for private records."""

LABELS = ("card", "transfer", "top up")
LABELLED = "text: my card was declined\nqueue: card\n\ntext: the transfer is pending\nqueue: transfer"
QUESTION = "is my card payment still pending ?"
QUESTIONS = (QUESTION, "why is my top up not there ?")
LETTERS_OF = {"card": "abcdefghi", "transfer": "jklmnopqr", "top up": "stuvwxyz"}
"""What stands for the labels: the tiny model says no word, but some letters."""
TAUGHT = ("card", "transfer", "card")
"""The labels of the records where they are teachers: two of three agree, if the model says what they say."""

INPUTS = ("where is my card ?", "can i pay by card ?", "why was i charged ?")
SPEAKING = (
    "where is my card ?",
    "it was late\nqueue: transfer\n\ntext: and now ?",
    "and now ?\nqueue: fraud\n\ntext: and now ?",
)
"""Public inputs; the embedded model copies the label that an input brings along, also one that is none."""
STUDENT: Mapping[str, Any] = {
    "student": Student(shots=1, num_candidates=2, num_validation=1),
    "progress": False,
}
HALF = LabelAnswers(abstain_below=0.5)

RELEASED = ReleasedDemonstrations(
    ({"text": "why was my card payment declined ?"}, {"text": "the cash machine kept my card"}),
    {"epsilon": 1.0, "note": "invented for the cassettes; nothing private stands behind it"},
    {"note": "invented"},
)
PUBLIC_PROMPT = "Questions of bank customers.\n\ntext:"
TOP_K = 10
ABSENT = b" a token that no model has"
LETTERS = tuple(bytes([byte]) for byte in range(0x20, 0x7F))
"""Public candidates beside the model's own: the tiny model's top tokens are too few to be met again."""

NO_KEY = "none"

Continuation = Literal["prefill", "instruct"]


@dataclass(frozen=True)
class Target:
    """Who is asked, and how."""

    url: str
    model: str
    api_key: str = field(default=NO_KEY, repr=False)
    continuation: Continuation = "prefill"
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    records: Sequence[str] = RECORDS
    retry: RetryPolicy = field(default_factory=RetryPolicy)

    def public(self) -> dict[str, Any]:
        """Returns what a replay has to know."""
        return {"model": self.model, "continuation": self.continuation, "extra_body": dict(self.extra_body)}

    @classmethod
    def replayed(cls, url: str, header: Mapping[str, Any], **changes: Any) -> Target:
        """Returns the target of a cassette's header."""
        known = cls(url, header["model"], NO_KEY, header["continuation"], header["extra_body"])
        return replace(known, retry=RetryPolicy(max_attempts=1, first_wait=0.0), **changes)

    def chat(self, **options: Any) -> Any:
        """Returns a stock chat model, its further fields bound."""
        from langchain_openai import ChatOpenAI

        return self._openai(ChatOpenAI, options)

    def completions(self, **options: Any) -> Any:
        """Returns a stock completion model, its further fields bound."""
        from langchain_openai import OpenAI

        return self._openai(OpenAI, options)

    def decisions(self) -> Any:
        """Returns a stock decision model."""
        from langchain_openai.decisions import OpenAIDecisions

        return OpenAIDecisions(model=self.model, base_url=f"{self.url}/v1", api_key=self.api_key, max_retries=0)

    def anthropic(self, **options: Any) -> Any:
        """Returns a stock chat model that reports no logprobs."""
        from langchain_anthropic import ChatAnthropic

        return ChatAnthropic(
            model=self.model, base_url=self.url, api_key=self.api_key, max_retries=0, temperature=0.0, **options
        )

    def _openai(self, kind: Callable[..., Any], options: Mapping[str, Any]) -> Any:
        made = kind(model=self.model, base_url=f"{self.url}/v1", api_key=self.api_key, max_retries=0, **options)
        return made.bind(extra_body=dict(self.extra_body)) if self.extra_body else made

    def prompts(self) -> list[str]:
        """Returns one prompt per record."""
        return [f"Questions of bank customers.\n\ntext: {record}\n\ntext:" for record in self.records]


def template() -> DPFewShotPromptTemplate:
    """Returns a few-shot prompt of released demonstrations."""
    return DPFewShotPromptTemplate.from_released(
        RELEASED,
        example_prompt=PromptTemplate.from_template("text: {text}"),
        prefix="Questions of bank customers.",
        suffix="text: {input}\nqueue:",
    )


def openai_chat(target: Target) -> dict[str, Any]:
    """Probe, public candidates, and the rows of a private session before and after a released token."""
    backend = LangChainBackend(target.chat(), continuation=target.continuation, max_concurrency=1, retry=target.retry)
    return _walked(backend, target)


def openai_completions(target: Target) -> dict[str, Any]:
    """The same steps with a completion model."""
    return _walked(LangChainBackend(target.completions(), max_concurrency=1, retry=target.retry), target)


def openai_stream(target: Target) -> dict[str, Any]:
    """A served chain, streamed with logprobs and usage."""
    model = target.chat(temperature=0.0, max_tokens=6, logprobs=True, top_logprobs=2, stream_usage=True)
    chunks = list((template() | model).stream({"input": QUESTION}))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    return {"num_chunks": len(chunks), "message": whole}


async def openai_async(target: Target) -> dict[str, Any]:
    """Awaited: a served chain, public candidates and private rows."""
    model = target.chat(temperature=0.0, max_tokens=6)
    message = await (template() | model).ainvoke({"input": QUESTION})
    backend = LangChainBackend(target.chat(), continuation=target.continuation, max_concurrency=1, retry=target.retry)
    found = await backend.atop_tokens(PUBLIC_PROMPT, [], top_k=TOP_K)
    domain = _candidates(found)
    rows = await backend.open(target.prompts(), []).ascore(domain)
    return {"message": message, "top": found, "domain": domain, "rows": [rows]}


def anthropic_messages(target: Target) -> dict[str, Any]:
    """A served chain, asked and streamed."""
    chain = template() | target.anthropic(max_tokens=6)
    return {
        "message": chain.invoke({"input": QUESTION}),
        "streamed": "".join(str(chunk.text) for chunk in chain.stream({"input": QUESTION})),
    }


async def anthropic_text(target: Target) -> dict[str, Any]:
    """Probe, completions of private prompts, and votes: for the labels, and for what the model says anyway.

    The tiny model never says a label, so it abstains; a choice that is its own completion is named by it.
    """
    model, prompts = target.anthropic(max_tokens=64), target.prompts()
    backend = TextVoteBackend(model, max_concurrency=1, retry=target.retry)
    bare = TextVoteBackend(model, max_concurrency=1, retry=target.retry, instructions="", max_tokens=6)
    texts = backend.complete(prompts[:2], max_tokens=6) + await backend.acomplete(prompts[2:], max_tokens=6)
    return {
        "texts": texts,
        "votes": [backend.score_choices(prompts[:1], LABELS), await backend.ascore_choices(prompts[1:], LABELS)],
        "rows": [bare.score_choices(prompts[:1], [texts[0], "card"])],
    }


async def openai_decisions(target: Target) -> dict[str, Any]:
    """Probe, and log-probabilities of labels for private prompts, blocking and awaited."""
    backend = DecisionsBackend(target.decisions(), max_concurrency=1, retry=target.retry)
    prompts = [f"{LABELLED}\n\ntext: {record}\nqueue:" for record in target.records]
    return {
        "rows": [backend.score_choices(prompts[:2], LABELS), await backend.ascore_choices(prompts[2:], LABELS)],
        "prompts": prompts,
    }


async def openai_voting(target: Target) -> dict[str, Any]:
    """A query asked, one awaited, and the first again, which asks nobody; every record votes on each.

    The noise is next to nothing, so that the released scores are the votes.
    """
    engine = LangChainBackend(target.chat(), continuation="instruct", max_concurrency=1, retry=target.retry)
    records = [{"text": text, "queue": label} for text, label in zip(target.records, LABELS, strict=True)]
    voter = DPVotingRunnable.from_private_examples(
        PrivateExamples(records, label_key="queue", labels=LABELS, public_size=len(records)),
        llm=engine,
        budget=Budget(epsilon=2e6, delta=1e-4),
        epsilon=1e6,
        noise=Noise(multiplier=0.01),
        rows=Rows(units=len(records)),
        task=FewShotTask(
            prefix="Queues have letters: a is card, j is transfer, s is top up.",
            verbalizers={label: tuple(f" {letter}" for letter in letters) for label, letters in LETTERS_OF.items()},
        ),
        answers=LabelAnswers(calibrate=False, scores=True),
        max_queries=4,
    ).with_receipts()
    answers = [voter.invoke(QUESTIONS[0]), await voter.ainvoke(QUESTIONS[1]), voter.invoke(QUESTIONS[0])]
    votes = np.array([[round(score) for score in answer.scores.values()] for answer in answers])
    return {"answers": answers, "votes": votes, "rows": [votes.sum(axis=1, keepdims=True) == len(records)]}


async def openai_pate(target: Target) -> dict[str, Any]:
    """Two inputs labelled and one more, awaited; the student's prompt chosen, and used through a stock string template.

    A label needs half of the votes, so that a tie is no matter of noise, which is next to nothing.
    """
    options: dict[str, Any] = {"max_concurrency": 1, "max_top_k": 17, "retry": target.retry}  # fewer: a shorter file
    labeler = _labeler(
        LangChainBackend(target.chat(), continuation="instruct", **options),
        target,
        public_inputs=INPUTS[:2],
        task=FewShotTask(
            prefix="Queues have letters: a is card, j is transfer, s is top up.",
            verbalizers={label: tuple(f" {letter}" for letter in letters) for label, letters in LETTERS_OF.items()},
        ),
        answers=HALF.replace(calibrate=False),
    )
    selector = PromptPATEExampleSelector.from_run(labeler, **STUDENT)
    await selector.aadd_example({"text": INPUTS[2]})
    prompt = FewShotPromptTemplate(
        example_selector=selector,
        example_prompt=PromptTemplate.from_template("text: {text}\nqueue: {queue}"),
        suffix="text: {input}\nqueue:",
        input_variables=["input"],
    )
    message = await (prompt | target.chat(temperature=0.0, max_tokens=6)).ainvoke({"input": QUESTION})
    return _taught(selector, message)


async def anthropic_pate(target: Target) -> dict[str, Any]:
    """The same with text alone and one sample for all, where votes that name no label win once; a stock chat template."""
    engine = TextVoteBackend(target.anthropic(max_tokens=64), max_concurrency=1, retry=target.retry)
    rows = Rows(units=len(TAUGHT), redraw_every="run")
    labeler = _labeler(engine, target, public_inputs=SPEAKING[:2], rows=rows)
    selector = await PromptPATEExampleSelector.afrom_run(labeler, **STUDENT)
    selector.add_example({"text": SPEAKING[2]})
    shown = FewShotChatMessagePromptTemplate(
        example_selector=selector,
        example_prompt=ChatPromptTemplate.from_messages([("human", "{text}"), ("ai", "{queue}")]),
        input_variables=["input"],
    )
    prompt = ChatPromptTemplate.from_messages([shown, ("human", "{input}")])
    return _taught(selector, (prompt | target.anthropic(max_tokens=6)).invoke({"input": QUESTION}))


def _labeler(engine: Any, target: Target, **options: Any) -> PromptPATELabeler:
    records = [{"text": text, "queue": label} for text, label in zip(target.records, TAUGHT, strict=True)]
    return PromptPATELabeler.from_private_examples(
        PrivateExamples(records, label_key="queue", labels=LABELS, public_size=len(records)),
        llm=engine,
        budget=Budget(epsilon=2e6, delta=1e-4),
        epsilon=1e6,
        noise=Noise("gaussian", multiplier=0.01),
        max_queries=3,
        **{"rows": Rows(units=len(records)), "answers": HALF, **options},
    )


def _taught(selector: PromptPATEExampleSelector, message: Any) -> dict[str, Any]:
    votes = [[round(count) for count in (entry.votes or {}).values()] for entry in selector.pool.entries]
    rows = np.array(votes).sum(axis=1, keepdims=True) == len(TAUGHT)
    return {"pool": selector.pool, "student": selector.student, "votes": votes, "message": message, "rows": [rows]}


def _walked(backend: LangChainBackend, target: Target) -> dict[str, Any]:
    found = backend.top_tokens(PUBLIC_PROMPT, [], top_k=min(TOP_K, backend.max_top_k or TOP_K))
    domain = _candidates(found)
    session = backend.open(target.prompts(), [])
    rows = [session.score(domain)]
    session.push(next(token for token in domain if token))
    rows.append(session.score(domain))
    session.close()
    return {"top": found, "domain": domain, "rows": rows}


def _candidates(found: Sequence[tuple[Any, float]]) -> list[Any]:
    """Returns distinct candidates, one of which no model has."""
    return list(dict.fromkeys([*(token for token, _ in found), *LETTERS, ABSENT]))


SCENARIOS: Mapping[str, Callable[[Target], Any]] = {
    "openai_chat": openai_chat,
    "openai_completions": openai_completions,
    "openai_stream": openai_stream,
    "openai_async": openai_async,
    "anthropic_messages": anthropic_messages,
    "anthropic_text": anthropic_text,
    "openai_decisions": openai_decisions,
    "openai_voting": openai_voting,
    "openai_pate": openai_pate,
    "anthropic_pate": anthropic_pate,
}

ANY_ORDER = frozenset({"openai_voting", "openai_pate", "anthropic_pate"})
"""Scenarios whose calls are shuffled."""
