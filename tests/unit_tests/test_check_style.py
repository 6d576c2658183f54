"""The list of odd phrases: each is found where people read it, and code is left alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import check_style

SAID = {
    "for ever": "it waits for ever",
    "told": "nobody is told",
    "whoever": "whoever asks",
    "may do": "what a caller may do",
    "lest": "noise, lest it leaks",
    "nor does": "it reads nothing, nor does it write",
    "dearer for": "dearer for many",
    "in vain": "waits in vain",
    "as ever": "charged as ever",
    "tells of": "it tells of the records",
    "unasked": "calibrated unasked",
    "goes on where": "it goes on where it was",
    "is to know": "who is to know it",
    "to be had": "no lock is to be had",
    "Nor": "It reads nothing. Nor is it asked.",
    "Who": "Who reads it learns nothing.",
}


def found(path: Path, text: str) -> list[tuple[int, str]]:
    path.write_text(text, encoding="utf-8")
    return [(line, phrase) for line, phrase, _ in check_style.odd_phrases(path)]


def test_every_phrase_of_the_list_is_planted_here() -> None:
    assert len(SAID) == len(check_style.PHRASES) + len(check_style.STARTS)


@pytest.mark.parametrize("phrase", SAID)
def test_a_phrase_is_found_in_pages_docstrings_comments_messages_and_notebooks(phrase: str, tmp_path: Path) -> None:
    said = SAID[phrase]
    places = {
        "page.md": f"# One\n\n{said}\n",
        "docstring.py": f'"""One.\n\n{said}\n"""\n',
        "comment.py": f"x = 1\n\n# {said}\n",
        "message.py": f'\n\nprint("{said}")\n',
        "note.ipynb": json.dumps({"cells": [{"cell_type": "markdown", "source": ["One\n", "\n", said]}]}),
    }
    for name, text in places.items():
        assert (3, phrase) in found(tmp_path / name, text), name


def test_a_phrase_over_two_lines_is_found(tmp_path: Path) -> None:
    assert found(tmp_path / "page.md", "it waits for\never\n") == [(1, "for ever")]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("names.py", "told = 1\nwhoever = told + 1\n"),
        ("braces.py", 'print(f"step {told[-1]} of {whoever}")\n'),
        ("args.py", '"""Stores it.\n\nArgs:\n  told: the answer, as text.\n"""\n'),
        ("query.py", 'x = "SELECT told FROM answers WHERE tenant = ?"\n'),
        ("quoted.md", "The field `told` and [a page](told.md)\n"),
        ("block.md", "```python\ntold = whoever\n```\n"),
        ("every.md", "It is paid for every answer. Who reads it? Dear reader, that may document it.\n"),
        ("table.csv", "told,whoever\n"),
    ],
)
def test_names_code_and_plain_sentences_are_left_alone(name: str, text: str, tmp_path: Path) -> None:
    assert found(tmp_path / name, text) == []


def test_the_command_names_file_line_and_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("One.\n\nIt waits for ever.\n", encoding="utf-8")
    assert check_style.main([str(page)]) == 1
    assert capsys.readouterr().out == f"{page}:3: 'for ever': {check_style.PHRASES['for ever']}\n"
    page.write_text("One.\n", encoding="utf-8")
    assert check_style.main([str(page)]) == 0


def test_the_step_is_part_of_the_checks_of_the_source() -> None:
    lines = (check_style.ROOT / "Makefile").read_text(encoding="utf-8")
    assert lines.count(".venv-test/bin/python -m tests.check_style") == 2
