"""Whatever a provider answers, a row is a row: 12,000 answers end to end, from the model's `_generate` to the rows.

Every choice is independent and the seeds are fixed, so the cases are the same each time.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from langchain_core.language_models import BaseChatModel, BaseLLM
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, ChatResult, Generation, LLMResult

from langchain_dpicl.backends.langchain.backend import LangChainBackend, PublicTokenizer
from langchain_dpicl.backends.langchain.logprobs import EOS
from langchain_dpicl.backends.private_calls.call import RetryPolicy
from tests.local_encoding import local_encoding
from tests.scripted_models import chat_payload, legacy_payload

GOOD = {" a": 0.5, "b": 0.25, "</s>": 0.125}
DOMAIN = [b" a", b"b", EOS, "é".encode(), b"token_id:7", b"\xef\xbf\xbd", b"never", b"\x07"]
GOOD_ROW = [0.5, 0.25, 0.125, 0.0, 0.0, 0.0, 0.0, 0.0]
ONCE = RetryPolicy(max_attempts=1)


def fails(*args: Any, **kwargs: Any) -> Any:
    raise ValueError("a private word")


class Touchy:
    """Raises at every touch."""

    __eq__ = __hash__ = __bool__ = __len__ = __iter__ = __getitem__ = __str__ = __repr__ = fails  # type: ignore[assignment]
    __lt__ = __le__ = __gt__ = __ge__ = __float__ = __int__ = __index__ = __bytes__ = __getattr__ = fails


class TouchyText(str):  # noqa: SLOT000
    __eq__ = __hash__ = encode = __len__ = fails  # type: ignore[assignment]


class TouchyNumber(float):
    __le__ = __lt__ = __gt__ = __ge__ = __eq__ = __hash__ = fails  # type: ignore[assignment]


class TouchyDict(dict[Any, Any]):
    get = items = keys = __getitem__ = __contains__ = __iter__ = __len__ = fails  # type: ignore[assignment]


class TouchyList(list[Any]):
    __getitem__ = __iter__ = __len__ = fails  # type: ignore[assignment]


class Endless(list[Any]):
    """A list that says it is longer than it is, and whose iteration never ends."""

    def __iter__(self) -> Any:
        return itertools.repeat({"token": "a", "logprob": -1.0})

    def __len__(self) -> int:
        return 2**40


def deep(levels: int = 5000) -> Any:
    made: Any = {"token": "a", "logprob": -1.0}
    for _ in range(levels):
        made = {"content": [made], "top_logprobs": [made]}
    return made


HUGE, DEEP = 10**400, deep()
Case = tuple[Any, Any, Any]  # logprobs, text, finish reason
NUMBERS: list[Any] = [
    *(-0.1, -3.0, -0.6931471805599453, 0.0, -0.0, 1e-7, 1e-3, 2.0, 1e308, -1e308, -9999.0, -5e-324),
    *(math.nan, math.inf, -math.inf, HUGE, -HUGE, True, False, None, "-1", "", b"-1", [], {}, (), 1j),
    *(np.float64(-0.5), np.float32(-0.5), np.nan, np.array([-0.5])),
]
TEXTS: list[Any] = [
    *("", " a", "b", "é", "</s>", "<|im_end|>", "\ufffd", "\ud800", "\udcff x", "x" * 5000, "\x07", "bytes:\\xe2"),
    *("token_id:7", "token_id:258", "token_id:299", "token_id:" + "9" * 5000, None, 7, ["a"], b" a", 1.5, ("a",)),
]
BYTES: list[Any] = [
    *(None, [], [97], [32, 97], [226], [195, 169], [300], [-1], [True], [HUGE], [None], [1.5], ["a"], (32, 97)),
    *(b" a", b"\xff", "a", 7, [97] * 5000, {"a": 1}),
]
IDS: list[Any] = [7, 258, 299, 300, -1, HUGE, True, None, "7", 7.0, []]
REASONS: list[Any] = ["stop", "length", "content_filter", "", None, 3, ["stop"], HUGE]
TOUCHY: list[Any] = [
    *(Touchy(), TouchyText(" a"), TouchyText("stop"), TouchyNumber(-0.5), TouchyList([97]), TouchyDict(token="a")),
    *(Endless([97]), Endless([{"token": "a", "logprob": -0.5}])),
]


class Cases:
    """Draws answers: mostly of the right shape with wrong parts in it, and every fifth with a part that raises."""

    def __init__(self, seed: int) -> None:
        self.coins = random.Random(seed)
        self.touchy = False

    def case(self, texts: list[str]) -> Case:
        self.touchy = self.coins.random() < 0.2
        return self.payload(), self.coins.choice(texts), self.pick(REASONS)

    def pick(self, values: list[Any]) -> Any:
        return self.coins.choice(TOUCHY if self.touchy and self.coins.random() < 0.1 else values)

    def entry(self) -> Any:
        made = {
            "token": self.pick(TEXTS),
            "logprob": self.pick(NUMBERS),
            "bytes": self.pick(BYTES),
            self.coins.choice(["id", "token_id"]): self.pick(IDS),
        }
        for name in list(made):
            if self.coins.random() < 0.25:
                del made[name]
        return made if self.coins.random() < 0.9 else self.pick([*NUMBERS, *TEXTS, DEEP])

    def several(self) -> Any:
        many = [self.entry() for _ in range(self.coins.randrange(8))]
        if many and self.coins.random() < 0.2:
            many.extend([many[0]] * 3)
        return many if self.coins.random() < 0.95 else self.pick([tuple(many), None])

    def legacy(self) -> Any:
        names = [text for text in TEXTS if isinstance(text, str | int | bytes)]
        made = {self.coins.choice(names): self.pick(NUMBERS) for _ in range(self.coins.randrange(8))}
        return TouchyDict(made) if self.touchy and self.coins.random() < 0.1 else made

    def payload(self) -> Any:
        many = self.several()
        place = {"token": self.pick(TEXTS), "logprob": self.pick(NUMBERS), "top_logprobs": many}
        return self.pick(
            [
                {"content": [place]},
                {"content": [place, place]},
                {"content": (place,), "top_logprobs": None, "tokens": None},
                [place],
                {"tokens": [self.pick(TEXTS)], "top_logprobs": [self.legacy()]},
                {"top_logprobs": [self.legacy()]},
                {"top_logprobs": [many]},
                {"top_logprobs": self.legacy()},
                {"content": many},
                {"content": [place, None]},
                many,
                self.pick([*NUMBERS, *TEXTS, DEEP, {}, {"content": None}, []]),
            ]
        )


class NastyChat(BaseChatModel):
    """Answers the prompt "case N" with the N-th case, and everything else well."""

    cases: list[Case]

    @property
    def _llm_type(self) -> str:
        return "nasty"

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        payload, text, reason = _case(self.cases, messages[0].text, chat_payload(GOOD))
        generation = ChatGeneration(message=AIMessage(text), generation_info=None)
        generation.generation_info = {"logprobs": payload, "finish_reason": reason}
        return ChatResult.model_construct(generations=[generation])


class NastyLLM(BaseLLM):
    """The same as a completion model."""

    cases: list[Case]

    @property
    def _llm_type(self) -> str:
        return "nasty"

    def _generate(self, prompts: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> LLMResult:
        payload, text, reason = _case(self.cases, prompts[0], legacy_payload(GOOD))
        generation = Generation(text=text, generation_info=None)
        generation.generation_info = {"logprobs": payload, "finish_reason": reason}
        return LLMResult.model_construct(generations=[[generation]])


def _case(cases: list[Case], prompt: str, good: Any) -> Case:
    return cases[int(prompt[5:])] if prompt.startswith("case ") else (good, " a", "length")


def check(rows: Any, num_rows: int) -> int:
    """Asserts that these are rows; returns how many say something."""
    assert rows.shape == (num_rows, len(DOMAIN))
    assert rows.dtype == np.float64
    assert np.isfinite(rows).all()
    assert (rows >= 0.0).all()
    assert (rows.sum(axis=1) <= 1.0).all()
    assert (rows[:, 6] == 0.0).all()  # a token that nobody reported
    return int(rows.any(axis=1).sum())


@pytest.mark.parametrize("kind", [NastyChat, NastyLLM])
@pytest.mark.parametrize("spelled", [False, True], ids=["texts", "ids"])
def test_three_thousand_answers_become_rows_and_leave_the_others_alone(kind: Callable[..., Any], spelled: bool) -> None:
    drawn = Cases(seed=2 * spelled + (kind is NastyLLM))
    texts = [text for text in TEXTS if type(text) is str]
    cases = [drawn.case(texts) for _ in range(3_000)]
    tokenizer = local_encoding() if spelled else None
    backend = LangChainBackend(kind(cases=cases), max_top_k=3, retry=ONCE, max_concurrency=4, tokenizer=tokenizer)
    said = 0
    for start in range(0, len(cases), 500):
        prompts = [f"case {number}" for number in range(start, start + 500)]
        session = backend.open([*prompts, "good"], [])
        rows = session.score(DOMAIN) if start else asyncio.run(session.ascore(DOMAIN))
        said += check(rows, 501) - 1
        assert rows[-1].tolist() == pytest.approx(GOOD_ROW)
    assert said > 300  # what could be read was read


def test_more_entries_than_the_largest_vocabulary_become_a_row() -> None:
    many = [{"token": f"t{number}", "logprob": -12.0} for number in range(1000)] * 301
    cases = [({"content": [{"top_logprobs": [{"token": " a", "logprob": math.log(0.5)}, *many]}]}, "x", "length")]
    backend = LangChainBackend(NastyChat(cases=cases), max_top_k=3, retry=ONCE)
    rows = backend.open(["case 0", "good"], []).score(DOMAIN)
    check(rows, 2)
    assert 0.1 < rows[0, 0] < 0.5
    assert rows[1].tolist() == pytest.approx(GOOD_ROW)


def test_sums_do_not_pass_one_in_whatever_order_they_are_taken() -> None:
    """Whole distributions, with the rounding that adding them up brings."""
    coins = np.random.Generator(np.random.PCG64(5))
    words = [f"w{number}" for number in range(40)]
    cases = []
    for _ in range(500):
        row = coins.dirichlet(np.full(len(words), 0.3)) + 1e-12
        tops = [{"token": w, "logprob": math.log(p)} for w, p in zip(words, row / row.sum(), strict=True)]
        cases.append(({"content": [{"top_logprobs": tops}]}, "x", "length"))
    backend = LangChainBackend(NastyChat(cases=cases), max_top_k=3, retry=ONCE)
    rows = backend.open([f"case {number}" for number in range(500)], []).score([word.encode() for word in words])
    assert rows.sum(axis=1).min() > 1.0 - 1e-9
    for order in (slice(None), slice(None, None, -1)):
        assert (rows[:, order].sum(axis=1) <= 1.0).all()
        assert all(sum(row[order].tolist()) <= 1.0 for row in rows)


def test_hostile_ids_and_domains_do_not_raise() -> None:
    spell = PublicTokenizer(local_encoding()).spelled
    assert [spell(number) for number in (HUGE, -HUGE, 2**63)] == [None] * 3
    backend = LangChainBackend(NastyChat(cases=[]), max_top_k=3)
    assert backend.open(["good"], []).score([b" a", " a", 7, ("a",), None]).tolist() == [
        [pytest.approx(0.5), 0.0, 0.0, 0.0, 0.0]
    ]
