"""Looks for phrases that read oddly in everything that people read: pages, docstrings, comments, messages, notebooks.

    python -m tests.check_style            all files that git does not ignore
    python -m tests.check_style FILE ...   these

It is a list of phrases, not a grammar. Names of code are left alone, and so is what stands in back quotes, in a block of
code of a page, or in SQL. Prints file, line, phrase, and what to write instead; ends with 1 if anything was found.
"""

from __future__ import annotations

import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.check_secrets import published

ROOT = Path(__file__).resolve().parents[1]
# They name the phrases.
SKIPPED = {"tests/check_style.py", "tests/unit_tests/test_check_style.py"}
# Words that reports written before hold, by which they are verified.
KEPT = {("langchain_dpicl/reports/rendering.py", "whoever")}
PAGES = {".md", ".toml", ".cff"}
PHRASES: dict[str, str] = {
    r"for ever": "say until when, or for how many",
    r"told(?![:=])": "say who shows, says or reports it",
    r"whoever": "name who it is: the caller, a process, a reader",
    r"may do(?: (?:it|so|anything|that))?": "say what is possible or allowed",
    r"lest|thereof|hereby|therein|wherein|whereof|whence|whosoever|heretofore|hitherto|albeit": "use today's words",
    r"nor (?:does|do|is|are|has|have|can|will)": "begin with the subject: and it does not",
    r"(?:too|is|are|so) dear|dear(?:er|est) (?:in|by|for|to)": "expensive, or costs more",
    r"in vain": "say what did not come",
    r"as ever": "as usual, or leave it out",
    r"tells? of": "reveals, or shows",
    r"unasked": "without being asked, or by default",
    r"goes on where": "continues where",
    r"is to know": "needs to know",
    r"to be had": "available",
}
# Only with a capital, at the start of a sentence.
STARTS: dict[str, str] = {
    r"(?:^|(?<=[.;:] ))Nor": "begin with the subject: and it does not",
    r"(?:^|(?<=[.;:] ))Who(?! (?:am|are|is|was|were)\b)(?= [^?\n|]*[.;])": "A reader who, a caller who",
}
SQL = re.compile(r"\b(?:SELECT|INSERT INTO|CREATE TABLE|ON CONFLICT|UPDATE .*? SET)\b")
ALL = [
    *(
        (re.compile(rf"\b(?:{phrase.replace(' ', chr(92) + 's+')})(?!\w)", re.IGNORECASE), say)
        for phrase, say in PHRASES.items()
    ),
    *((re.compile(rf"{phrase}", re.MULTILINE), say) for phrase, say in STARTS.items()),
]
QUICK = re.compile(rf"(?i:{'|'.join(pattern.pattern for pattern, _ in ALL[: len(PHRASES)])})|\bNor\b|\bWho\b")


def blank(text: str) -> str:
    """Returns as much white space, line by line."""
    return re.sub(r"[^\n]", " ", text)


def prose_of_page(text: str) -> str:
    """Returns a page with blocks of code, code in back quotes and addresses blanked; line numbers stay."""
    text = re.sub(r"^```.*?^```", lambda found: blank(found[0]), text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`|\]\([^)\n]*\)|https?://\S+", lambda found: blank(found[0]), text)


def prose_of_code(text: str) -> str:
    """Returns the comments and texts of a module, all else blanked; line numbers stay."""
    lines = [""] * (text.count("\n") + 2)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        said = token.string
        if token.type != tokenize.COMMENT:
            if token.type != tokenize.STRING or " " not in said or SQL.search(said):
                continue
            said = re.sub(r"\{[^{}\n]*\}", lambda found: blank(found[0]), said)
        for number, line in enumerate(said.split("\n"), token.start[0]):
            lines[number] += " " + re.sub(r"^[\s#]*(?:[rbfu]{0,2}\"{1,3})?", "", line)
    return re.sub(r"`[^`\n]*`", lambda found: blank(found[0]), "\n".join(line.strip() for line in lines[1:]))


def prose_of_notebook(text: str) -> str:
    """Returns the text cells of a notebook; lines are those of the cells."""
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
    return prose_of_page("\n".join("".join(cell["source"]) for cell in cells))


def odd_phrases(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yields line, phrase and advice for a file; nothing for what is no text of ours."""
    read = {".py": prose_of_code, ".ipynb": prose_of_notebook}.get(path.suffix)
    if read is None and (path.suffix in PAGES or path.name == "Makefile"):
        read = prose_of_page
    if read is None:
        return
    text = path.read_text(encoding="utf-8")
    if not QUICK.search(text):
        return
    prose = read(text)
    for pattern, say in ALL:
        for found in pattern.finditer(prose):
            yield prose[: found.start()].count("\n") + 1, " ".join(found[0].split()), say


def main(given: Sequence[str] = ()) -> int:
    """Prints what was found, and returns the exit status."""
    names = [name for name in given or published(ROOT) if name not in SKIPPED]
    found = [(name, *odd) for name in names for odd in sorted(odd_phrases(ROOT / name)) if (name, odd[1]) not in KEPT]
    for name, line, phrase, say in found:
        print(f"{name}:{line}: {phrase!r}: {say}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
