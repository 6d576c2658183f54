"""The page for operators in headless Chromium, on desktop and telephone, light and dark; skipped where none is installed."""

from __future__ import annotations

import importlib
import itertools
import re
import threading
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")
import uvicorn

from langchain_dpicl.service.web import create_app
from tests.served import CANARY, KEYS, change, new_folder, new_ledger, running

pytestmark = pytest.mark.loopback

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "langchain_dpicl" / "service" / "page.html"
CONTRAST = """[...document.querySelectorAll('body *')].filter(one => one.children.length === 0 && one.textContent.trim()
  && one.getClientRects().length && !['STYLE', 'SCRIPT'].includes(one.tagName)).map(one => {
  const light = colour => { const parts = colour.match(/[\\d.]+/g).slice(0, 3).map(part => part / 255)
    .map(part => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2] };
  let under = one;
  while (/, 0\\)$|transparent/.test(getComputedStyle(under).backgroundColor)) under = under.parentElement;
  const [a, b] = [light(getComputedStyle(one).color), light(getComputedStyle(under).backgroundColor)].sort((x, y) => y - x);
  return [(a + 0.05) / (b + 0.05), one.textContent.trim().slice(0, 30)]
}).filter(([ratio]) => ratio < 4.5)"""


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a service that has answered and refused, and shows a second ledger."""
    config = new_folder(tmp_path, monkeypatch, queries=8)
    change(config, "[service]", f"[service]\nledgers = ['{new_ledger(str(tmp_path / 'second.db'))}']")
    with running(config, new_ledger("budget.db")) as found:
        server = uvicorn.Server(uvicorn.Config(create_app(found), port=0, log_level="error"))
        thread = threading.Thread(target=server.run)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        address = f"127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        for number in range(7):
            ask(address, f"question {number}?", "acme" if number % 3 else "globex")
        ask(address, "?", "nobody")
        yield address
        server.should_exit = True
        thread.join(60)


def ask(address: str, question: str, who: str) -> int:
    headers = {"Authorization": f"Bearer {KEYS.get(who, who)}"}
    return httpx.post(f"http://{address}/ask", json={"question": question}, headers=headers, timeout=60).status_code


@pytest.fixture
def browser(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(ROOT / "docs" / "tools")
    module = importlib.import_module("browser")
    program = module.chromium()
    if program is None:
        pytest.skip("Chromium is not installed")
    with module.Browser(program) as found:
        yield found


def await_text(browser: Any, wanted: str) -> str:
    until = time.monotonic() + 60
    while wanted not in (shown := str(browser.run("document.body.innerText"))):
        assert time.monotonic() < until, shown
        time.sleep(0.05)
    return shown


def opened(browser: Any, address: str, width: int, *, dark: bool) -> str:
    browser.screen(width, 900, phone=width < 500, dark=dark)
    browser.open(f"http://operator:{KEYS['operator']}@{address}/")
    return await_text(browser, "Last refusals")


def test_operators_see_what_is_spent_left_and_refused_and_it_is_refreshed(browser: Any, served: str) -> None:
    browser.call(
        "Page.addScriptToEvaluateOnNewDocument",
        source="const later = setTimeout; window.setTimeout = (what, after) => later(what, Math.min(after, 100));",
    )
    shown = opened(browser, served, 1440, dark=False)
    assert shown.count("Ledger budget") == 2
    for words in (
        r"epsilon\s+10 %\s+2 of 20",
        r"ask\s+88 %\s+1\s+\d+\s+168\s+under a day",
        r"acme\s+ask\s+4",
        r"globex\s+ask\s+3",
        r"-\s+-\s+401\s+unknown key",
        "No share is sealed",
    ):
        assert re.search(words, shown), (words, shown)
    assert CANARY not in shown
    assert "question" not in shown
    assert ask(served, "the last one?", "acme") == 200
    assert ask(served, "one too many?", "acme") == 402
    assert re.search(r"acme\s+ask\s+402\s+budget spent", await_text(browser, "budget spent"))
    await_text(browser, "100 %")


def test_it_fits_and_is_legible_on_every_screen(browser: Any, served: str) -> None:
    check = importlib.import_module("check_site")
    for width, dark in itertools.product((1440, 390), (False, True)):
        opened(browser, served, width, dark=dark)
        assert browser.run("document.documentElement.scrollWidth") <= width
        assert browser.run(check.COVERED if width > 500 else check.WIDE) == []
        assert browser.run(CONTRAST) == []
        background = browser.run("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background))) < 200) == dark


def test_it_says_so_when_the_service_is_gone(browser: Any, served: str) -> None:
    opened(browser, served, 390, dark=False)
    browser.block("*/standing")
    browser.run("refresh()")
    assert "older" in await_text(browser, "does not answer")
    assert browser.run("document.getElementById('state').className") == "late"


def test_it_says_so_while_the_service_waits_for_a_ledger(browser: Any, served: str) -> None:
    opened(browser, served, 390, dark=False)
    browser.run("window.fetch = () => new Promise(() => {}); void refresh()")
    assert "As of" not in await_text(browser, "What is shown is older")
    assert browser.run("document.getElementById('state').className") == "late"


def test_it_is_one_file_that_loads_nothing_and_changes_nothing() -> None:
    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: Any) -> None:
            assert tag not in {"link", "img", "iframe", "form", "input", "button", "object"}
            assert not {"src", "href", "action"} & {name for name, _ in attrs}

    text = PAGE.read_text()
    Reader().feed(text)
    assert "://" not in text
    assert "innerHTML" not in text
    assert re.findall(r"fetch\(.*?\)", text) == [
        'fetch(location.origin + location.pathname.replace(/[^/]*$/, "standing")'
    ]
