"""The web application of `examples/`: answers, refusals, and a ledger that is closed when it stops."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from langchain_dpicl import PrivacyBudgetCallbackHandler
from tests.example_files import example

pytest.importorskip("fastapi")


async def test_it_answers_refuses_and_holds_no_ticket_when_it_has_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = tmp_path / "topics.db"
    PrivacyBudgetCallbackHandler.create(ledger, epsilon=4.0, delta=1e-5).close()
    monkeypatch.setenv("DPICL_LEDGER", str(ledger))
    with example("web_application", SIZE=60) as module:
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app=module.app), base_url="http://test")
        async with module.lifespan(module.app), http:

            async def ask(question: str) -> httpx.Response:
                return await http.post("/topic", json={"question": question})

            answered = [await ask(f"Where is transfer {number}?") for number in range(8)]
            again = await ask("Where is transfer 7?")
            assert [answer.status_code for answer in answered] == [200] * 8
            assert again.json() == answered[-1].json()
            assert again.json()["topic"] in module.LABELS
            assert (await ask(" ")).status_code == 422
    opened = PrivacyBudgetCallbackHandler.open(ledger)
    used = opened.budget.use().tickets["topics"]
    opened.close()
    assert (used.left, used.held, used.committed) == (92, 0, 8)
