"""Places of workers for tests with Ray: functions that a worker calls by name, with public options alone."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from langchain_core.runnables import RunnableLambda

from langchain_dpicl.backends.fake import FakeBackend
from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
from langchain_dpicl.distributed import Workplace
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.stores import SQLiteMemo
from langchain_dpicl.stores.postgres import PostgresMemo
from tests.canary import RECORD

LABELS = ("card", "cash")
PUBLIC_SIZE = 8
CHANCES = {" paid": 0.3, " late": 0.25, " twice": 0.2, "\n": 0.1, " card": 0.08, " cash": 0.07}
LAW = "Choose one word."
"""An instruction under which the engine writes one of many words: all alike in public, one of them by the records."""
OTHERS = 30
"""Words beside the one that the records speak for."""
TOP = 0.97
"""What a record gives to its word; the rest is shared by the others."""
TURN_SECONDS = 2.0
"""Short, as tests kill who has a turn."""


def engine(
    *, seconds: float = 0.0, kill_file: str = "", fail_file: str = "", stop_file: str = "", name: str = "fake"
) -> FakeBackend:
    """Returns an engine that writes a word or two."""

    def chances(prompt: str, prefix: tuple[bytes, ...]) -> Mapping[str, float]:
        if RECORD in prompt:
            if kill_file and Path(kill_file).exists():
                Path(kill_file).unlink(missing_ok=True)
                os.kill(os.getpid(), signal.SIGKILL)
            if fail_file and Path(fail_file).exists():
                raise ValueError(prompt)
        else:
            time.sleep(seconds)
            if stop_file and prefix and Path(stop_file).exists():
                raise ConnectionError
        if LAW in prompt:
            return {"\n": 1.0} if prefix else word_chances(RECORD in prompt)
        return CHANCES if len(prefix) < 2 else {"\n": 1.0}

    return FakeBackend(chances, max_top_k=OTHERS + 10, name=name)


def word_chances(by_records: bool) -> dict[str, float]:
    """Returns the chances of the words under `LAW`."""
    top = TOP if by_records else 1.5 / (OTHERS + 1.5)
    return {" top": top} | {f" w{number:02}": (1.0 - top) / OTHERS for number in range(OTHERS)}


@functools.cache
def records(ledger: str = "", public_size: int = PUBLIC_SIZE) -> PrivateExamples:
    """Returns the private examples of a ledger, read once by each process."""
    told = [{"text": f"{RECORD} {place}", "queue": LABELS[place % 2]} for place in range(8)]
    return PrivateExamples(told, label_key="queue", labels=LABELS, public_size=public_size, dataset_id="tickets")


def place(ledger: str, memo: str, public_size: int = PUBLIC_SIZE, **options: Any) -> Workplace:
    """Returns a worker's place, on a ledger and a memo in PostgreSQL or in files."""
    budget = PrivacyBudgetCallbackHandler.open(ledger)
    kept = (PostgresMemo.open if "=" in memo or "://" in memo else SQLiteMemo)(memo, turn_seconds=TURN_SECONDS)
    return Workplace(engine(**options), private=records(ledger, public_size), budget=budget, memo=kept)


def writer() -> Workplace:
    """Returns a worker's place without records and ledger: for public texts."""
    return Workplace(engine())


def broken() -> Workplace:
    """Raises with a record in its words."""
    raise ValueError(RECORD)


def nothing() -> None:
    """Makes no place."""


def talker(*, is_out: bool = False) -> Workplace:
    """Returns a worker's place with a model that says back what it is asked, and no more."""

    def say(prompt: str) -> str:
        if is_out:
            raise ConnectionError
        return " ".join(prompt.split())[:80]

    return Workplace(RunnableLambda(say))


def hosted(ledger: str, memo: str, folder: str = "", url: str = "") -> Workplace:
    """Returns a worker's place with a real model: of a folder, in the worker itself, or of a server, by a client."""
    budget = PrivacyBudgetCallbackHandler.open(ledger)
    return Workplace(hosted_model(folder, url), private=records(ledger), budget=budget, memo=SQLiteMemo(memo))


def hosted_model(folder: str = "", url: str = "") -> Any:
    """Returns a Hugging Face model of a folder, or a stock client of a server like OpenAI's, without a retry."""
    if folder:
        from langchain_dpicl.backends.hf.backend import HuggingFaceBackend  # other places start without it

        return HuggingFaceBackend(folder, device="cpu", max_prompt_tokens=256)
    from langchain_openai import OpenAI

    made = OpenAI(model="tiny", base_url=f"{url}/v1", api_key="none", max_retries=0)
    return made.bind(extra_body={"cache_prompt": False})
