"""Every python block of README and docs runs, offline, page by page."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
# What README's links begin with, so that they lead somewhere from a package index as well; pictures have a place of theirs.
REPOSITORY = "https://github.com/langchain-dpicl/langchain-dpicl/blob/main/"
PICTURES = "https://github.com/langchain-dpicl/langchain-dpicl/raw/main/"
# What follows a block; the outputs of other pages rest on noise.
SHOWN = re.compile(r"\n\n```text\n(.*?)^```", re.MULTILINE | re.DOTALL)
PRINTED_ALIKE = {"rehearsal.md": 2, "voting.md": 1}
MOST_BYTES = 150_000  # of the README's picture
WITH_CODE = [page for page in PAGES if BLOCK.search(page.read_text())]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda p: str(p.relative_to(ROOT)))
def test_code_blocks_run_and_print_what_is_shown(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "docs"}
    text, compared = page.read_text(), 0
    for match in BLOCK.finditer(text):
        line = text[: match.start()].count("\n") + 1
        code = compile("\n" * line + match.group(1), str(page), "exec")
        exec(code, names)  # noqa: S102  the point of this test
        printed = capsys.readouterr().out.splitlines()
        if page.name in PRINTED_ALIKE and (shown := SHOWN.match(text, match.end())):
            assert [each for each in shown[1].splitlines() if each not in {*printed, "..."}] == []
            compared += 1
    assert compared == PRINTED_ALIKE.get(page.name, 0)


def test_the_readme_has_code_to_run() -> None:
    assert ROOT / "README.md" in WITH_CODE


def test_the_links_of_the_readme_work_on_a_page_elsewhere() -> None:
    text = re.sub(r"^```.*?^```", "", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    assert [target for target in re.findall(r"\]\(([^)]+)\)", text) if not target.startswith(("https://", "#"))] == []


def test_the_readme_shows_what_its_code_prints(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text()
    code, shown = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0]
    exec(code, {"__name__": "readme"})  # noqa: S102  the point of this test
    printed = capsys.readouterr().out

    def settled(output: str) -> list[object]:
        """The lines, with the words that differ from run to run taken out of the demonstrations."""
        lines = [ast.literal_eval(line) if line.startswith("{") else line for line in output.splitlines()]
        assert all(line["text"] for line in lines if isinstance(line, dict))
        return [{**line, "text": "..."} if isinstance(line, dict) else line for line in lines]

    assert settled(printed) == settled(shown)
    assert "07700" in code
    assert not re.search(r"07700|\d{5}", printed + shown)


def test_the_pictures_of_the_readme_are_small_and_there() -> None:
    shown = re.findall(r"!\[[^]]+\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert shown
    assert [picture for picture in shown if not picture.startswith(PICTURES)] == []
    assert all(0 < (ROOT / picture.removeprefix(PICTURES)).stat().st_size < MOST_BYTES for picture in shown)


def test_a_package_page_links_the_docs_the_source_the_issues_and_the_changelog() -> None:
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    assert set(urls) == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    files = [urls[name].removeprefix(REPOSITORY) for name in ("Documentation", "Changelog")]
    assert all((ROOT / file).is_file() for file in files)


def test_all_extras_bring_no_torch() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [line] = extras["all"]
    named = re.findall(r"[a-z]+", line.partition("[")[2])
    assert set(named) == set(extras) - {"all", "hf", "ray"}
    assert not any(package.startswith("torch") for name in named for package in extras[name])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_tests_and_make_targets_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"(?<![\w/.])(?:examples|tests|benchmarks|langchain_dpicl)/[\w/]+\.\w+", text)
    lost = [name for name in named if not (ROOT / name).exists()]
    shell = "\n".join(re.findall(r"^```(?:bash|shell|text|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    asked = re.findall(r"`make ([a-z][a-z-]+)", text) + re.findall(r"^(?:\$ )?make ([a-z][a-z-]+)", shell, re.MULTILINE)
    lost += [f"make {name}" for name in asked if name not in targets]
    assert lost == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_printed_chance_of_a_right_label_says_what_it_rests_on(page: Path) -> None:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    said = [text for kind, text in blocks if kind != "python" and re.search(r"right label [^\n]*\d ?%", text)]
    assert [text for text in said if "rests on" not in text] == []
