"""The example behind a retriever runs, as a chain and as a graph, and pays for what it should."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def rag_voting(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import rag_voting

    yield rag_voting
    for name in ("rag_voting", "bank_questions"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("shape", ["chain", "graph"])
def test_each_question_is_retrieved_for_voted_on_and_replied_to(rag_voting: Any, shape: str) -> None:
    if shape == "graph":
        pytest.importorskip("langgraph")
    voter, _ = rag_voting.make_voter()
    run = {"chain": rag_voting.as_chain, "graph": rag_voting.as_graph}[shape](voter)
    state = run.invoke({"input": "Can a transfer be cancelled?"})
    assert state["topic"].label in {*rag_voting.LABELS, "a person"}
    assert state["context"][0].page_content == rag_voting.PAGES["transfer"]
    assert state["reply"].startswith(f"For {state['topic'].label}.")
    assert voter.share.remaining("query") == 29
    assert run.invoke({"input": "Can a transfer be cancelled?"})["topic"].receipt.source == "memo"
    assert voter.share.remaining("query") == 29


def test_the_example_prints_what_it_spent(rag_voting: Any, capsys: pytest.CaptureFixture[str]) -> None:
    rag_voting.main([])
    shown = capsys.readouterr().out
    assert "memo: 0 tickets, 22 of 30 queries left" in shown
    assert "Privacy report" in shown
