"""A private vote and a private text through one class, under every observer that LangChain has."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from langchain_core.prompts import PromptTemplate

from langchain_dpicl import (
    DPFewShotPromptTemplate,
    DPVotingRunnable,
    PrivacyBudgetCallbackHandler,
    PrivateExamples,
    Rows,
)
from langchain_dpicl.backends import LangChainBackend
from langchain_dpicl.backends.langchain.texts import TextVoteBackend
from langchain_dpicl.backends.private_calls.call import RetryPolicy
from langchain_dpicl.backends.resolve import as_backend, as_choice_backend
from langchain_dpicl.exceptions import CapabilityError, UnsilencableModelError
from tests.canary import RECORD, Seen, aobserve, leaks, observe
from tests.hostile_provider import TARGET
from tests.providers.listed import Case, Writes

README = Path(__file__).resolve().parents[2] / "README.md"
LABELS = ("card", "transfer")
SIZE = 24
LIMITS = RetryPolicy(max_attempts=1, deadline=3.0, max_reply_bytes=2**20)


@dataclass
class Found:
    """What one release of a class did.

    Attributes:
      release: of its package.
      votes: "first tokens", "text" or "refused".
      writes: how it continues a text, "" where it is refused.
      refusals: the messages of refusals, which are public.
      leaked: channels in which a record or a private answer showed.
      control: channels in which they show when the model is called as usual.
      readme: what README's first program prints, where that is run.
      unlimited: manners of hostile servers whose answer counted, by blocking or awaited calls.
    """

    release: str
    votes: str = "refused"
    writes: str = ""
    refusals: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    control: list[str] = field(default_factory=list)
    unlimited: list[str] = field(default_factory=list)
    readme: str = ""


def talk(case: Case, url: str, writes: Writes, hostile: Mapping[str, str]) -> dict[str, Any]:
    """Returns what the class did, as JSON; `hostile`: addresses of servers by their manner."""
    found = Found(version(case.package))
    model = case.make(url)
    try:
        engine = as_choice_backend(model)
    except (CapabilityError, UnsilencableModelError) as error:
        found.refusals.append(str(error))
    else:
        found.control = sorted(leaks(observe(lambda: case.make(url).invoke(f"{RECORD} card"))))
        found.votes = "text" if isinstance(engine, TextVoteBackend) else "first tokens"
        _note(found, observe(lambda: _voter(model).invoke("My card")))
        _note(found, asyncio.run(aobserve(lambda: _voter(model).ainvoke("My card"))))
        found.unlimited = [word for manner, root in hostile.items() for word in _unlimited(case, manner, root)]
    if not writes:
        try:
            as_backend(model)
        except (CapabilityError, UnsilencableModelError) as error:
            found.refusals.append(str(error))
        else:
            found.writes = "accepted"
        return asdict(found)
    continuation: Any = writes
    engine = LangChainBackend(model, continuation=continuation)
    _note(found, observe(lambda: _template(engine)))
    found.writes = engine.continuation
    found.readme = _first_program(model) if case.is_in_readme else ""
    return asdict(found)


def _first_program(model: Any) -> str:
    """Runs README's first program with the line changed that makes the model; returns what it prints."""
    program = README.read_text().partition("```python\n")[2].partition("```")[0]
    changed, num_changed = re.subn(r"^model = .*", "model = given", program, flags=re.MULTILINE)
    if num_changed != 1:
        raise AssertionError(f"expected one line of README that makes the model, found {num_changed}")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(changed, {"given": model})  # noqa: S102  a page of this repository
    return printed.getvalue()


def _unlimited(case: Case, manner: str, root: str) -> Iterator[str]:
    """Yields how a private call was made to which a hostile answer counted; a call that never ends is cut by the parent."""
    model, usual, prompts = case.make(root), ["my card"], [f"{TARGET} my card"]
    patient = TextVoteBackend(model, retry=replace(LIMITS, deadline=60.0))

    async def awaited() -> Any:
        await patient.ascore_with_other(usual, LABELS)
        return await engine.ascore_with_other(prompts, LABELS)

    patient.score_with_other(usual, LABELS)  # what the first calls of a class load takes seconds of a busy machine
    engine = TextVoteBackend(model, retry=LIMITS)
    if np.isfinite(engine.score_with_other(prompts, LABELS)).any():
        yield f"{manner}, blocking"
    if np.isfinite(asyncio.run(awaited())).any():
        yield f"{manner}, awaited"


def _note(found: Found, seen: Seen) -> None:
    if seen.error is not None:
        raise seen.error
    if seen.result is None:
        raise AssertionError("expected a released result, found none")
    found.leaked = sorted({*found.leaked, *leaks(seen)})


def _private() -> PrivateExamples:
    records = [{"text": f"my {LABELS[i % 2]} {RECORD} number {i}", "label": LABELS[i % 2]} for i in range(SIZE)]
    return PrivateExamples(records, label_key="label", labels=LABELS, public_size=dict.fromkeys(LABELS, SIZE // 2))


def _voter(model: Any) -> DPVotingRunnable:
    return DPVotingRunnable.from_private_examples(
        _private(),
        llm=model,
        max_queries=1,
        budget=PrivacyBudgetCallbackHandler(epsilon=30.0, delta=1e-4),
        epsilon=20.0,
        rows=Rows(slots=4, shots=2),
    )


def _template(engine: LangChainBackend) -> DPFewShotPromptTemplate:
    return DPFewShotPromptTemplate.from_private_examples(
        _private(),
        llm=engine,
        budget=PrivacyBudgetCallbackHandler(epsilon=30.0, delta=1e-4),
        epsilon=20.0,
        example_prompt=PromptTemplate.from_template("{text}\n{label}"),
        suffix="{input}\n",
        rows=Rows(units=6),
        max_tokens=2,
    )
