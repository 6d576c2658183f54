"""Adversarial backends that copy the first record of a prompt into its row."""

# They replace the model in every audit: no real model distinguishes records better.

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from langchain_core.embeddings import Embeddings
from numpy.typing import NDArray

from langchain_dpicl.backends.base import Rows, Token, TokenSession, TrainingExample
from langchain_dpicl.backends.fake import FakeBackend
from langchain_dpicl.backends.tuning.tasks import PromptTask

MARK = "votes "
"""Stands before what a record says; a line break ends it."""
_RECORD = re.compile(rf"^{MARK}(.+)$", re.MULTILINE)


def records_of_prompt(prompt: str) -> list[str]:
    """Returns what the records of a prompt say, in their order; nothing for the public prompt."""
    return _RECORD.findall(prompt)


class Spied:
    """Counts private prompts, so that an audit sees who was in a sample.

    Attributes:
      present: prompts with records that were asked since somebody last set this to 0.
    """

    present = 0

    def note(self, prompts: Sequence[str | None]) -> None:
        """Counts the prompts that hold records."""
        self.present += sum(bool(prompt and records_of_prompt(prompt)) for prompt in prompts)


@lru_cache(maxsize=256)
def parse_numbers(record: str) -> tuple[float, ...]:
    """Returns the numbers of a record such as "1,0"."""
    return tuple(float(number) for number in record.split(","))


class ReadVotes(Spied):
    """Scores labels: a record's text lists the probability of each label; all zeros: the row fails.

    A prompt without records votes for the last label.

    Attributes:
      prompts: the records of each row asked so far, call by call, if `spies`; all records of a row are one text.
    """

    name = "reads votes"

    def __init__(self, *, spies: bool = False) -> None:
        self.prompts: list[list[str]] = []
        self._spies = spies

    def score_choices(self, prompts: Sequence[str], choices: Sequence[str]) -> Rows:
        """Returns float64[prompts, choices]: log-probabilities."""
        self.note(prompts)
        records = [records_of_prompt(prompt) for prompt in prompts]
        if self._spies:
            self.prompts.append(["|".join(one) for one in records])
        rows = [_log_votes(one[0] if one else "", len(choices)) for one in records]
        return np.array(rows, dtype=np.float64).reshape(len(prompts), len(choices))

    async def ascore_choices(self, prompts: Sequence[str], choices: Sequence[str]) -> Rows:
        """Async version of `score_choices`."""
        return self.score_choices(prompts, choices)


@lru_cache(maxsize=256)
def _log_votes(record: str, width: int) -> tuple[float, ...]:
    shares = parse_numbers(record) if record else (0.0,) * (width - 1) + (1.0,)
    return tuple(math.log(share) if share > 0 else -math.inf for share in shares)


TOKENS = (" a", " b", " c")
"""What is written: the first two are fought for, the third stands by."""
_NEVER = -40.0
"""The logit of the end of the text, everywhere: it would be one more candidate."""


class ReadTokens(Spied, FakeBackend):
    """Writes text: the loudest record of a prompt lists the logit of each of `TOKENS`, and none of them ends the text.

    The public prompt has the logits `public`.

    Args:
      public: logits of `TOKENS` after the public prompt.
    """

    def __init__(self, public: Sequence[float] = (0.0, 0.0, 0.0)) -> None:
        self._public = tuple(public)
        super().__init__(self._distribution_of, vocabulary=TOKENS, name="reads tokens")

    def logits_of(self, prompt: str) -> tuple[float, ...]:
        """Returns the logits of `TOKENS` after a prompt; of several records the one with the largest number speaks."""
        records = [parse_numbers(one) for one in records_of_prompt(prompt)]
        return max(records, default=self._public)

    def open(self, prompts: Sequence[str], prefix: Sequence[Token]) -> TokenSession:
        """Starts a session."""
        self.note(prompts)
        return super().open(prompts, prefix)

    def _distribution_of(self, prompt: str, prefix: tuple[bytes, ...]) -> Mapping[str, float]:
        del prefix
        logits = np.array(self.logits_of(prompt))
        shares = np.exp(np.clip(logits - min(logits.max(), 700.0), -745.0, 0.0))
        return dict(zip(TOKENS, (shares / shares.sum()).tolist(), strict=True))


class ReadLogits(ReadTokens):
    """The same, for the logit mechanisms: shows the logits of its whole vocabulary, with the public prompt beside."""

    def open_full(self, prompts: Sequence[str | None], prefix: Sequence[Token], *, public: str, **_: Any) -> Any:
        """Starts a session."""
        del prefix
        self.note(prompts)
        return _LogitSession([self._logits(prompt) for prompt in prompts], self._logits(public))

    def _logits(self, prompt: str | None) -> list[float]:
        known = dict(zip((token.encode() for token in TOKENS), self.logits_of(prompt or ""), strict=True))
        return [known.get(token, _NEVER) if isinstance(token, bytes) else _NEVER for token in self.vocabulary()]


class _LogitSession:
    """A batch of prompts of `ReadLogits`."""

    def __init__(self, rows: list[list[float]], public: list[float]) -> None:
        self._rows, self._public = np.array(rows, dtype=np.float64).reshape(len(rows), len(public)), np.array(public)

    def public(self) -> NDArray[np.float64]:
        return self._public

    def logits(self, columns: NDArray[np.int64] | None = None) -> Rows:
        return self._rows if columns is None else self._rows[:, columns]

    async def apublic(self) -> NDArray[np.float64]:
        return self.public()

    async def alogits(self, columns: NDArray[np.int64] | None = None) -> Rows:
        return self.logits(columns)

    def push(self, token: Token) -> None:
        del token

    def close(self) -> None:
        self._rows = self._rows[:0]


class ReadAnswers(Spied):
    """Completes text: answers with what the first record says, and the public prompt with `public`."""

    name = "reads answers"

    def __init__(self, public: str = "no") -> None:
        self._public = public

    def complete(self, prompts: Sequence[str], *, max_tokens: int, stop: Sequence[str] = ()) -> list[str]:
        """Returns an answer to each prompt."""
        del max_tokens, stop
        self.note(prompts)
        return [(records_of_prompt(prompt) or [self._public])[0] for prompt in prompts]

    async def acomplete(self, prompts: Sequence[str], *, max_tokens: int, stop: Sequence[str] = ()) -> list[str]:
        """Async version of `complete`."""
        return self.complete(prompts, max_tokens=max_tokens, stop=stop)


class Opposite(Embeddings):
    """Embeds "yes" and "no" in opposite directions; "up" and "down" lean to "no", together by half a vote."""

    _PLACES: ClassVar[Mapping[str, tuple[float, float]]] = {
        "yes": (1.0, 0.0),
        "no": (-1.0, 0.0),
        "up": (-0.25, math.sqrt(1.0 - 0.0625)),
        "down": (-0.25, -math.sqrt(1.0 - 0.0625)),
    }

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Returns two numbers for each text."""
        return [list(self._PLACES.get(text, (0.0, 0.0))) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        """Returns two numbers."""
        return self.embed_documents([text])[0]


class ReadGradients(Spied):
    """Gives gradients: an example's text is "axis:length"; one number for each axis is trained.

    Attributes:
      calls: the texts of each step's groups, if `spies`.
    """

    name = "reads gradients"
    method = "soft_prompt"
    task = PromptTask("causal_lm", "{text}\nIt was", ("good", "bad"), (" good", " bad"))
    tokenizer_fingerprint = "words"

    def __init__(self, width: int, *, spies: bool = False) -> None:
        self.width = width
        self.num_virtual_tokens, self.token_dim = 1, width
        self.calls: list[list[str]] = []
        self._spies = spies

    def gradients(
        self,
        parameters: NDArray[np.float64],
        groups: Sequence[Sequence[TrainingExample] | None],
        *,
        add: Callable[[Any], None],
    ) -> None:
        """Hands over one row for each group."""
        del parameters
        texts = ["" if not group else group[0].text for group in groups]
        self.present += len(texts)
        if self._spies:
            self.calls.append(texts)
        rows = np.zeros((len(texts), self.width))
        for row, text in zip(rows, texts, strict=True):
            axis, length = text.split(":")
            row[int(axis)] = float(length)
        add(rows)

    async def agradients(
        self,
        parameters: NDArray[np.float64],
        groups: Sequence[Sequence[TrainingExample] | None],
        *,
        add: Callable[[Any], None],
    ) -> None:
        """Async version of `gradients`."""
        await asyncio.sleep(0)
        self.gradients(parameters, groups, add=add)

    def check(self, parameters: NDArray[np.float64]) -> None:
        """Works."""

    def losses(self, parameters: NDArray[np.float64], examples: Sequence[TrainingExample]) -> NDArray[np.float64]:
        """Returns zeros."""
        del parameters
        return np.zeros(len(examples))

    def initial(self, text: str | None = None) -> NDArray[np.float64]:
        """Returns zeros."""
        del text
        return np.zeros(self.width)

    def arrays(self, parameters: NDArray[np.float64]) -> dict[str, Any]:
        """Returns what would be saved."""
        return {"prompt_embeddings": parameters.reshape(1, self.width).astype(np.float32)}

    def peft_config(self) -> dict[str, Any]:
        """Returns what would be saved beside it."""
        return {
            "peft_type": "PROMPT_TUNING",
            "task_type": "CAUSAL_LM",
            "num_virtual_tokens": 1,
            "token_dim": self.width,
        }

    def weights_digest(self) -> str:
        """Returns a digest of nothing."""
        return "0" * 64
