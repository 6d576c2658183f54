"""`examples/synthetic_documents.py` runs offline, pays once, and shows no note of its own."""

from __future__ import annotations

import pytest

from tests.example_files import example


def test_notes_become_a_store_that_a_stock_chain_searches(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with example("synthetic_documents") as module:
        # 805 notes name a card, 545 the sixth of the other topics, and noise has a deviation of 22: a card is not among
        # six with a chance below 1e-9. With 150 of a label it was so in one run of 900.
        monkeypatch.setattr(module, "SIZE", 600)
        module.main(["--ask", "Where is my transfer?", "--ask", "Why was my card declined?"])
        notes = {note.page_content for note in module.private_notes()}
    said = capsys.readouterr().out
    assert "card (about" in said
    assert said.count("nearest:") == 2
    assert "recomputed: True" in said
    assert not any(note in said for note in notes)
