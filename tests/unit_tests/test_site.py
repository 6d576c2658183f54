"""The pages of `make docs`: each is in the navigation, every link and anchor leads somewhere, both renderers read alike.

Without mkdocs, so that it costs nothing here; `make docs` itself stops at what is broken, too.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
BESIDE = {"security.md": "SECURITY.md", "changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
NOTEBOOKS = [f"notebooks/{path.stem}.md" for path in (ROOT / "examples" / "notebooks").glob("*.ipynb")]
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", *(ROOT / name for name in BESIDE.values())])
# What links of the README begin with, so that they lead somewhere from a package index as well.
REPOSITORY = "https://github.com/langchain-dpicl/langchain-dpicl/blob/main/"
LINK = re.compile(r"(!?)\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(([^()\s]+)\)")
ITEM = re.compile(r"^( *)(?:[-*+]|\d+\.) ")
MOST_PICTURE_BYTES = 150_000


@functools.cache
def prose(page: Path) -> tuple[str, ...]:
    """The lines of a page; those of code are empty."""
    lines, fence = [], ""
    for line in page.read_text(encoding="utf-8").split("\n"):
        mark = re.match(r" *(```+)", line)
        closes = bool(mark and fence and mark[1] == fence)
        lines.append("" if fence or mark else line)
        fence = "" if closes else fence or (mark[1] if mark else "")
    assert not fence, f"{page}: a block of code does not end"
    return tuple(lines)


def slug(heading: str) -> str:
    """The anchor of a heading, as repository browsers make it and docs/tools/site.py asks for it."""
    shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", shown.lower()).strip().replace(" ", "-")


@functools.cache
def anchors(page: Path) -> tuple[str, ...]:
    return tuple(slug(line.lstrip("#")) for line in prose(page) if re.match(r"#{1,6} ", line))


def links(page: Path) -> Iterator[tuple[bool, str]]:
    text = re.sub(r"`[^`\n]*`", "", "\n".join(prose(page)))
    text = text.replace(f"]({REPOSITORY}", f"]({os.path.relpath(ROOT, page.parent)}/")
    return ((bool(mark), target) for mark, target in LINK.findall(text))


def named_in(entry: object) -> Iterator[str]:
    """The pages of a part of the navigation."""
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, dict):
        for part in entry.values():
            yield from named_in(part)
    elif isinstance(entry, list):
        for part in entry:
            yield from named_in(part)


def broken_links(page: Path) -> list[str]:
    """What a page links to that is not there. Of headings that read alike only the first has the same anchor everywhere."""
    found = []
    for picture, link in links(page):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, place = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        inside = target.exists() and ROOT in [target, *target.parents]
        if not inside or (place and (target.suffix != ".md" or place not in anchors(target))):
            found.append(link)
        elif picture and target.stat().st_size > MOST_PICTURE_BYTES:
            found.append(f"{link}: {target.stat().st_size} bytes")
    return found


def read_otherwise(page: Path) -> list[str]:
    """Lines that repository browsers and Python-Markdown do not read alike."""
    found, before, lines, has_paragraphs = [], "", prose(page), False
    for number, line in enumerate(lines, 1):
        item = ITEM.match(line)
        # Behind an item of several paragraphs Python-Markdown takes the next marker for text.
        if item and has_paragraphs and before.strip():
            found.append(f"{page.name}:{number}: an empty line is wanted above {line[:40]!r}")
        if not line.startswith("  "):
            has_paragraphs = not line and bool(before.startswith("  ") or ITEM.match(before))
        begins_list = item and not ITEM.match(before) and not before.startswith(" ")
        begins_table = re.match(r"\|[ :|-]+\|$", lines[min(number, len(lines) - 1)]) and not before.startswith("|")
        if before.strip() and (begins_list or (line.startswith("|") and begins_table)):
            found.append(f"{page.name}:{number}: an empty line is wanted above {line[:40]!r}")
        if item and len(item[1]) % 4:
            found.append(f"{page.name}:{number}: four spaces are wanted before {line[:40]!r}")
        before = line
    return found


def test_the_navigation_names_every_page_once() -> None:
    named = list(named_in(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    there = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    assert sorted(named) == sorted([*there, *BESIDE, *NOTEBOOKS])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_anchors_and_pictures_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_is_finished_has_one_title_and_reads_alike_in_a_repository_browser_and_on_the_site(page: Path) -> None:
    assert read_otherwise(page) == []
    assert [number for number, line in enumerate(prose(page)) if line.startswith("# ")] == [0]
    assert [line for line in prose(page) if re.search(r"@@|\?\?\?|^(placeholder|tbd)\W*$", line, re.IGNORECASE)] == []


def test_every_picture_is_shown_somewhere() -> None:
    shown = {(page.parent / link).resolve() for page in PAGES for picture, link in links(page) if picture}
    there = {path for path in DOCS.rglob("*") if path.suffix in {".png", ".svg"}}
    assert there
    # A tall variant is shown with its drawing: docs/tools/site.py.
    shown |= {path.with_name(f"{path.stem}-tall.svg") for path in shown if path.suffix == ".svg"}
    assert there - shown == set()


def test_the_site_asks_nothing_of_other_servers() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert settings["theme"]["font"] is False
    assert "repo_url" not in settings  # the theme would ask its host for the number of stars
    assert not {"extra_javascript"} & set(settings)
    sheets = [path.read_text() for path in (DOCS / "stylesheets").iterdir()]
    assert sheets
    assert [sheet for sheet in sheets if re.search(r"https?:|@import", sheet)] == []


def first_block(page: Path, kind: str) -> str:
    found = re.search(rf"^```{kind}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


def test_the_landing_page_shows_what_its_lines_print(capsys: pytest.CaptureFixture[str]) -> None:
    code = first_block(DOCS / "index.md", "python")
    assert len([line for line in code.splitlines() if line and not line.startswith("from ")]) == 8
    exec(compile(code, "index.md", "exec"), {"__name__": "docs"})  # noqa: S102  the point of this test
    assert capsys.readouterr().out == first_block(DOCS / "index.md", "text")


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Path:
    """docs/tools, from which its programs import one another."""
    monkeypatch.syspath_prepend(DOCS / "tools")
    return DOCS / "tools"


@pytest.mark.usefixtures("tools")
def test_the_pictures_of_the_folders_are_those_of_the_import_contract() -> None:
    house = importlib.import_module("house")
    assert {name: (DOCS / "pictures" / name).read_text() for name in house.SHAPES} == {
        name: house.drawn(*shape) for name, shape in house.SHAPES.items()
    }


@pytest.mark.usefixtures("tools")
def test_the_pictures_of_methods_are_those_that_the_program_draws() -> None:
    drawn = importlib.import_module("flows").pictures()
    assert {name: (DOCS / "pictures" / name).read_text() for name in drawn} == drawn


@pytest.mark.usefixtures("tools")
def test_ten_questions_of_a_reader_have_an_answer_to_look_for() -> None:
    check = importlib.import_module("check_site")
    assert len(check.ANSWERS) == 10
    assert set(check.ANSWERS) <= set(check.QUESTIONS)


@pytest.mark.loopback
@pytest.mark.usefixtures("tools")
class TestTheCheckInTheBrowser:
    """docs/tools/check_site.py sees what it looks for; skipped where no Chromium is installed."""

    @pytest.fixture(scope="class")
    def chromium(self) -> Iterator[Any]:
        """One for all pages: each test says on which screen they are shown."""
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(DOCS / "tools")
            browser = importlib.import_module("browser")
            if (program := browser.chromium()) is None:
                pytest.skip("Chromium is not installed")
            with browser.Browser(program) as found:
                yield found

    def faults(self, chromium: Any, folder: Path, body: str) -> list[str]:
        browser, check = importlib.import_module("browser"), importlib.import_module("check_site")
        head = '<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        (folder / "page.html").write_text(f"{head}<body><main>{body}</main></body>")
        with browser.served(folder) as address:
            return check.faults_of(chromium, f"{address}/page.html")

    def test_finds_nothing_on_a_page_that_fits_and_whose_code_scrolls(self, chromium: Any, tmp_path: Path) -> None:
        code = f"<pre style='overflow: auto'><code>{'word ' * 80}</code></pre>"
        assert (
            self.faults(chromium, tmp_path, f"<p>{'word ' * 80}</p>{code}<table><tr><td>a</td><td>b</td></tr></table>")
            == []
        )

    def test_finds_tables_text_and_drawings_that_do_not_fit(self, chromium: Any, tmp_path: Path) -> None:
        (tmp_path / "small.svg").write_text(
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 60"><rect x="5" y="5" width="90" height="50"/>'
            '<text x="10" y="30" font-size="12">longer than its box</text></svg>'
        )
        table = f"<div style='overflow: auto'><table><tr>{'<td>number</td>' * 30}</tr></table></div>"
        wide = "<p style='width: 500px'>wide</p>"
        over = "<p>below this</p><p style='margin-top: -2.2em'>stands that</p>"
        found = "\n".join(
            self.faults(chromium, tmp_path, f"{over}{wide}{table}<img src='small.svg' style='width: 100%'>")
        )
        for said in (
            '"stands that" and "below this" cover',
            'p "wide" ends at',
            "px wide",
            "leaves its box",
            "letters of",
        ):
            assert said in found

    def test_finds_what_some_readers_cannot_read_in_light_and_in_dark(self, chromium: Any, tmp_path: Path) -> None:
        browser, check = importlib.import_module("browser"), importlib.import_module("check_site")
        if (rules := check.axe()) is None:
            pytest.skip("axe-core is not installed")
        style = (
            "<style>body { background: #fff } [data-md-color-scheme=slate] { background: #000; color: #222 }</style>"
        )
        pages = {
            "good": '<html lang="en"><title>T</title><main><h1>Title</h1><label>n <input></label><p>text</main>',
            "bad": f"<html><title>T</title>{style}<main><h1>Title</h1><h3>skips</h3><input><img src='a.png'><a href='#x'></a>"
            "<p style='color: #bbb'>pale</p><p style='font-size: 9px'>small</p><p>dark on dark</p></main>",
        }
        for name, page in pages.items():
            (tmp_path / f"{name}.html").write_text(f"<!doctype html>{page}")
        with browser.served(tmp_path) as address:
            good = check.unreadable(chromium, f"{address}/good.html", rules, colors=True)
            bad = "\n".join(["", *check.unreadable(chromium, f"{address}/bad.html", rules, colors=True)])
        assert good == []
        for rule in ("html-has-lang", "heading-order", "label", "image-alt", "link-name", "color-contrast"):
            assert f"\n{rule} (" in bad
        assert "letters of 9.0 px" in bad
        assert "dark: color-contrast (" in bad

    def test_sees_what_stands_on_the_first_screen_and_not_what_is_below_it(self, chromium: Any, tmp_path: Path) -> None:
        browser, check = importlib.import_module("browser"), importlib.import_module("check_site")
        (tmp_path / "page.html").write_text(
            "<!doctype html><main><p>above the <b>fold</b></p><p style='margin-top: 3000px' id='low'>below it</p></main>"
        )
        with browser.served(tmp_path) as address:
            chromium.screen(*check.DESKTOP)
            top = check.on_first_screen(chromium, f"{address}/page.html")
            low = check.on_first_screen(chromium, f"{address}/page.html#low")
        assert (top, low) == ("above the fold", "below it")


class TestTheCheckerItself:
    """It sees what it looks for."""

    def page(self, folder: Path, text: str) -> Path:
        path = folder / "page.md"
        path.write_text(text)
        return path

    def test_sees_missing_files_and_anchors(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(globals(), "ROOT", tmp_path.resolve())
        (tmp_path / "other.md").write_text("# One\n\n## Two `x_y` & three\n\n## Twice\n\n## Twice\n")
        text = "[a](other.md#two-x_y--three) [b](none.md) [c](other.md#four) [d](other.md#twice-1) `[e](code.md)`\n"
        assert broken_links(self.page(tmp_path, text)) == ["none.md", "other.md#four", "other.md#twice-1"]

    def test_sees_lists_and_tables_without_an_empty_line(self, tmp_path: Path) -> None:
        page = self.page(tmp_path, "Text\n- item\n\n- good\n  - nested\n\nText\n| a |\n|---|\n| b |\n")
        assert [found.split(":")[1] for found in read_otherwise(page)] == ["2", "5", "8"]

    def test_sees_an_item_that_would_be_text_of_the_one_before(self, tmp_path: Path) -> None:
        page = self.page(tmp_path, "1. one\n\n   more of it\n2. two,\n   goes on\n3. three\n\n   more\n\n4. four\n")
        assert [found.split(":")[1] for found in read_otherwise(page)] == ["4"]
