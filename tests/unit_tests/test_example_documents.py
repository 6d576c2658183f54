"""`examples/synthetic_documents.py` runs offline, pays once, and shows no note of its own."""

from __future__ import annotations

import pytest

from tests.example_files import example


def test_notes_become_a_store_that_a_stock_chain_searches(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with example("synthetic_documents") as module:
        monkeypatch.setattr(module, "SIZE", 150)
        module.main(["--ask", "Where is my transfer?", "--ask", "Why was my card declined?"])
        notes = {note.page_content for note in module.private_notes()}
    said = capsys.readouterr().out
    assert "card (about" in said
    assert said.count("nearest:") == 2
    assert "recomputed: True" in said
    assert not any(note in said for note in notes)
