"""Looks at the built site in headless Chromium: `make docs` runs it behind mkdocs, and stops at what it finds.

python docs/tools/check_site.py [--site out/site] [--screens out/screens] [--only layout|search|accessibility|planner]

- On a telephone (390 px) nothing is wider than the screen, tables included; only blocks of code may scroll. Letters of
  drawings are not smaller than eight pixels.
- On a desktop (1440 px) no text covers another.
- Questions of a reader, typed into the site's own search, lead to a fitting page as the first result; of ten of them
  the answer stands on the first screen of it, or of the part of it that the search names first.
- The rules of axe-core find nothing in light and dark colours: contrast, names of links and fields, texts of pictures,
  order of headings, language. No letters are smaller than eleven pixels.
- The planner's form, used with the keyboard, says what was computed; without JavaScript its tables stand there.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import planner as numbers
from browser import Browser, chromium, served

ROOT = Path(__file__).resolve().parents[2]
PHONE, DESKTOP = (390, 844), (1440, 900)
SEARCH_PATIENCE_S = 60.0
SHOWN = (
    "index",
    "quickstart",
    "which-component",
    "faq",
    "glossary",
    "voting",
    "what-epsilon-means",
    "benchmarks",
    "architecture",
    "reference/voting",
)
# What readers type, and the pages that answer it.
QUESTIONS: dict[str, tuple[str, ...]] = {
    "which epsilon": ("faq", "what-epsilon-means"),
    "does OpenAI see my data": ("faq", "providers", "privacy-promise"),
    "what if the budget is spent": ("faq", "voting", "production"),
    "which component": ("faq", "which-component"),
    "how do I test offline": ("faq", "quickstart", "embedded-model"),
    "Ollama": ("faq", "providers"),
    "user-level": ("faq", "adjacency-and-units"),
    "how much does it cost": ("faq", "which-component"),
    "is the output anonymous": ("faq", "privacy-promise"),
    "PII": ("faq", "sign-off/officer"),
    "Presidio": ("faq", "sign-off/officer"),
    "PIIMiddleware": ("faq", "sign-off/officer"),
    "OWASP LLM02": ("faq", "sign-off/officer"),
    "NIST SP 800-226": ("faq", "sign-off/officer"),
    "GDPR": ("faq", "sign-off/officer", "sign-off/dpia"),
    "sign a report": ("faq", "budget", "cli", "sign-off/officer"),
    "docker": ("production", "faq"),
    "how do I deploy": ("faq", "production"),
    # The FAQ answers short; who names a thing is led to its own page.
    "soft prompts": ("soft-prompts",),
    "synthetic documents": ("synthetic-documents",),
    "private evolution": ("private-evolution",),
    "membership inference": ("membership",),
    "quickstart": ("quickstart",),
    "PrivacyBudgetExceededError": ("reference/exceptions", "faq", "voting"),
    "how many records do I need": ("faq", "which-component"),
}
# Ten of them, and the words of the answer that a reader sees without scrolling.
ANSWERS = {
    "which epsilon": "1 is strong",
    "does OpenAI see my data": "Yes, if one of their models reads the private prompts",
    "what if the budget is spent": "PrivacyBudgetExceededError",
    "which component": "Examples for a prompt",
    "how many records do I need": "a few hundred per label",
    "how do I test offline": "EmbeddedLLM()",
    "user-level": "unit_key",
    "how much does it cost": "dpicl plan",
    "is the output anonymous": "It is differentially private",
    "how do I deploy": "is a complete HTTP service",
}
WIDE = """(() => {
  const screen = document.documentElement.clientWidth, found = [];
  const named = e => {
    const text = (e.alt || e.innerText || '').trim().replace(/\\s+/g, ' ').slice(0, 50);
    const classes = e.className?.toString().split(' ')[0];
    return e.tagName.toLowerCase() + (classes ? '.' + classes : '') + (text ? ` "${text}"` : '');
  };
  const scrolls = e => /(auto|scroll)/.test(getComputedStyle(e).overflowX);
  const hides = e => /(hidden|clip)/.test(getComputedStyle(e).overflowX);
  const part = document.querySelector('.md-container') || document.body;
  for (const e of part.querySelectorAll('*')) {
    if (e.closest('pre') && e.tagName !== 'PRE') continue;
    if (e.closest('[hidden], .md-sidebar, .md-search, svg, .md-tooltip2')) continue;
    const box = e.getBoundingClientRect();
    if (!box.width || !box.height) continue;
    let inside = false;
    for (let up = e.parentElement; up && up !== part; up = up.parentElement) if (hides(up)) inside = true;
    if (!inside && (box.right > screen + 1 || box.left < -1) && !e.closest('.md-typeset__scrollwrap'))
      found.push(`${named(e)} ends at ${Math.round(box.right)} px`);
    if (e.tagName === 'TABLE') {
      const room = (e.closest('.md-typeset__scrollwrap') || e.parentElement).clientWidth;
      const wide = Math.max(e.scrollWidth, box.width, ...[...e.querySelectorAll('td, th')].map(c => c.scrollWidth));
      if (wide > room + 1) found.push(`${named(e)} is ${Math.round(wide)} px wide`);
    } else if (e.tagName !== 'PRE' && e.tagName !== 'CODE' && scrolls(e) && e.scrollWidth > e.clientWidth + 1
        && !e.querySelector('table') && !e.querySelector('pre'))
      found.push(`${named(e)} scrolls: ${e.scrollWidth} px`);
  }
  return [...new Set(found)];
})()"""
# A drawing has fonts of the reader's: letters must not be tiny, and a text stays in the picture and in its box.
DRAWN = """(async () => {
  const found = [], images = [...document.querySelectorAll('.md-content img, main img, body > img')];
  for (const image of new Set(images)) {
    if (!image.currentSrc.endsWith('.svg')) continue;
    const text = await (await fetch(image.currentSrc)).text(), holder = document.createElement('div');
    holder.style.cssText = 'position: absolute; left: 0; top: 0; visibility: hidden';
    holder.innerHTML = text;
    document.body.append(holder);
    const drawing = holder.querySelector('svg'), whole = drawing.viewBox.baseVal;
    const name = image.currentSrc.split('/').pop();
    const boxes = [whole, ...[...drawing.querySelectorAll('rect')].map(e => e.getBBox())];
    const sizes = [...drawing.querySelectorAll('[font-size]')].map(e => parseFloat(e.getAttribute('font-size')));
    const least = Math.min(...sizes) * image.clientWidth / whole.width;
    if (least < 8) found.push(`${name}: letters of ${least.toFixed(1)} px`);
    for (const e of drawing.querySelectorAll('text')) {
      const t = e.getBBox(), x = t.x + t.width / 2, y = t.y + t.height / 2;
      const around = boxes.filter(b => b.x < x && x < b.x + b.width && b.y < y && y < b.y + b.height);
      const box = around.sort((a, b) => a.width * a.height - b.width * b.height)[0] || whole;
      if (t.x < box.x || t.x + t.width > box.x + box.width) found.push(`${name}: "${e.textContent}" leaves its box`);
    }
    holder.remove();
  }
  return found;
})()"""
COVERED = """(() => {
  const lines = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const block = e => { while (/^(inline|contents)/.test(getComputedStyle(e).display)) e = e.parentElement; return e; };
  for (let node; node = walker.nextNode();) {
    if (!node.data.trim()) continue;
    const e = node.parentElement;
    if (!e.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
    if (e.closest('[hidden], .md-search, .md-top, .md-skip, svg, .md-overlay')) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const r of range.getClientRects()) {
      let [left, top, right, bottom] = [r.left, r.top, r.right, r.bottom];
      for (let up = e; up && up !== document.body; up = up.parentElement) {
        if (getComputedStyle(up).overflowX === 'visible') continue;
        const box = up.getBoundingClientRect();
        [left, top] = [Math.max(left, box.left), Math.max(top, box.top)];
        [right, bottom] = [Math.min(right, box.right), Math.min(bottom, box.bottom)];
      }
      if (right - left > 2 && bottom - top > 2)
        lines.push({left, top, right, bottom, block: block(e), text: node.data.trim()});
    }
  }
  lines.sort((a, b) => a.top - b.top);
  const found = [];
  for (let i = 0; i < lines.length; i++) for (let j = i + 1; j < lines.length && lines[j].top < lines[i].bottom; j++) {
    const a = lines[i], b = lines[j];
    if (a.block === b.block || a.block.contains(b.block) || b.block.contains(a.block)) continue;
    const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (wide > 2 && high > 4) found.push(`"${a.text.slice(0, 40)}" and "${b.text.slice(0, 40)}"`);
  }
  return [...new Set(found)];
})()"""
FIRST_RESULT = """(() => {
  const meta = document.querySelector('.md-search-result__meta')?.innerText || '';
  const links = [...document.querySelectorAll('.md-search-result__item:first-child a')];
  if (links.length) return {
    page: new URL(links[0].href).pathname,
    place: links.map(link => new URL(link.href).hash).find(hash => hash) || '',
    title: links[0].querySelector('h1, h2')?.innerText.trim() || '',
  };
  return /^No matching/.test(meta) ? {page: '', place: '', title: meta} : null;
})()"""
ON_SCREEN = """(() => {
  const seen = [], part = document.querySelector('main') || document.body;
  const nodes = document.createTreeWalker(part, NodeFilter.SHOW_TEXT);
  for (let node = nodes.nextNode(); node; node = nodes.nextNode()) {
    const range = document.createRange();
    range.selectNodeContents(node);
    const box = range.getBoundingClientRect();
    if (box.height && box.top >= 0 && box.bottom <= innerHeight) seen.push(node.data);
  }
  return seen.join('').replace(/\\s+/g, ' ');
})()"""


# A rule by its name, and the first two places where it is broken. Left out is what the theme's script does: some parts
# stand outside of landmarks, the button of each block of code is a landmark without a name, and code that scrolls gets
# the focus only where a pointer can hover, which this browser has not.
AXE = """(async asked => {
  const found = await axe.run(document, {...asked, resultTypes: ['violations'], elementRef: false});
  return found.violations.map(rule => `${rule.id} (${rule.nodes.length}): ` + rule.nodes.slice(0, 2).map(
    node => `${node.target} ${[...node.any, ...node.all, ...node.none][0]?.message || ''}`).join('; '));
})(%s)"""
OF_COLORS = ("color-contrast", "link-in-text-block")
LEFT_OUT = ("region", "landmark-unique", "scrollable-region-focusable", *OF_COLORS)
# Colours come from one style sheet, and take axe-core longest: it compares them on pages of every kind.
COLORED = (
    "index",
    "quickstart",
    "planner",
    "faq",
    "cli",
    "which-component",
    "proofs/gaussian",
    "reference/workers",
    "notebooks/votes",
    "notebooks/privacy_officer",
)
# Colours change at once, as a colour on its way would be measured too.
AT_ONCE = "document.head.insertAdjacentHTML('beforeend', '<style>* {transition: none !important}</style>')"
DARK = "document.body.setAttribute('data-md-color-scheme', 'slate')"
SMALL = """(() => {
  const found = new Set(), nodes = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = nodes.nextNode(); node; node = nodes.nextNode()) {
    const e = node.parentElement;
    if (!node.data.trim() || e.closest('[hidden], script, style, svg, sup, sub') || !e.checkVisibility()) continue;
    const size = parseFloat(getComputedStyle(e).fontSize);
    if (size < 11) found.add(`${e.tagName.toLowerCase()}.${e.className}: letters of ${size.toFixed(1)} px`);
  }
  return [...found];
})()"""
CUT = """[...document.querySelectorAll('#planner-chart text')].filter(e => {
  const box = e.getBBox(), whole = e.ownerSVGElement.viewBox.baseVal;
  const right = whole.x + whole.width, bottom = whole.y + whole.height;
  return box.x < whole.x || box.x + box.width > right || box.y + box.height > bottom;
}).map(e => e.textContent)"""
PLANNER = (
    "Object.fromEntries([...document.querySelectorAll('#planner-answer dt')].map("
    "e => [e.textContent, e.nextElementSibling.textContent]))"
)


def shown(faults: Iterable[str]) -> list[str]:
    """Prints faults when they are found, not when the last page has been seen, and returns them."""
    found = list(faults)
    for fault in found:
        print(f"FAULT {fault}", flush=True)
    return found


def pages_of(site: Path, check: str) -> Iterator[str]:
    """The pages of a site, by their paths; prints how far the check has come."""
    pages = [page.relative_to(site).as_posix() for page in sorted(site.rglob("*.html"))]
    for number, page in enumerate(pages, 1):
        yield page
        if number % 20 == 0 or number == len(pages):
            print(f"{check}: {number} of {len(pages)} pages", flush=True)


def faults_of(browser: Browser, address: str) -> list[str]:
    """What covers what on a desktop, and what does not fit on a telephone. The page is loaded once."""
    browser.screen(*DESKTOP)
    browser.open(address)
    found = [f"1440 px: {what} cover each other" for what in browser.run(COVERED)]
    found += [f"1440 px: {what}" for what in browser.run(DRAWN)]
    browser.screen(*PHONE, phone=True)
    browser.drawn()
    return [*found, *(f"390 px: {what}" for what in browser.run(WIDE) + browser.run(DRAWN))]


def layout(browser: Browser, address: str, site: Path) -> list[str]:
    """Faults of all pages, on both screens."""
    found = []
    # Each page would read the whole index of the search anew, which takes longer than all the rest.
    browser.block("*/search_index.json", "*/workers/search.*")
    for page in pages_of(site, f"layout at {PHONE[0]} and {DESKTOP[0]} px"):
        found += shown(f"{page}: {what}" for what in faults_of(browser, f"{address}/{page}"))
    browser.block()
    print(f"layout: {len(found)} faults", flush=True)
    return found


def first_result(browser: Browser, address: str, question: str) -> tuple[str, str, str]:
    """The page that the site's own search shows first, the part of it that stands first there, and its title."""
    browser.open(f"{address}/index.html?q={question.replace(' ', '+')}")
    until = time.monotonic() + SEARCH_PATIENCE_S
    while not (found := browser.run(FIRST_RESULT)):
        if time.monotonic() > until:
            raise TimeoutError(f"the search gave no answer to {question!r} within {SEARCH_PATIENCE_S:g} seconds")
        time.sleep(0.1)
    return found["page"].lstrip("/").removesuffix(".html"), found["place"], found["title"]


def on_first_screen(browser: Browser, address: str) -> str:
    """The text of a page, or of a place in it, that a reader sees without scrolling."""
    browser.open("about:blank")  # else the place alone would change, and nothing be loaded
    browser.open(address)
    return browser.run(ON_SCREEN)


def search(browser: Browser, address: str) -> list[str]:
    """Questions whose first result does not answer them."""
    found = []
    browser.screen(*DESKTOP)
    for question, fitting in QUESTIONS.items():
        page, place, title = first_result(browser, address, question)
        print(f"{'ok ' if page in fitting else 'BAD'} {question!r} -> {page}{place}: {title}", flush=True)
        if page not in fitting:
            found += shown([f"search {question!r}: {page or 'nothing'} comes first, not one of {', '.join(fitting)}"])
        elif (answer := ANSWERS.get(question)) and not any(
            answer in on_first_screen(browser, f"{address}/{page}.html{part}") for part in dict.fromkeys((place, ""))
        ):
            found += shown([f"search {question!r}: no first screen of {page}, {place or 'its top'}, says {answer!r}"])
    return found


def axe() -> str | None:
    """The rules of axe-core as JavaScript, or None where they are not installed."""
    package = importlib.util.find_spec("axe_playwright_python")
    return (
        None if package is None or package.origin is None else Path(package.origin).with_name("axe.min.js").read_text()
    )


def unreadable(browser: Browser, address: str, rules: str, *, colors: bool) -> list[str]:
    """What some readers cannot read on a page, by the rules of axe-core; `colors`: in light and dark colours too."""
    browser.screen(*DESKTOP)
    browser.open(address)
    browser.run(f"{rules}; 0")
    browser.run(AT_ONCE)
    options = json.dumps({"rules": {name: {"enabled": False} for name in LEFT_OUT}})
    found = browser.run(SMALL) + browser.run(AXE % options)
    if colors:
        of_colors = AXE % json.dumps({"runOnly": OF_COLORS})
        found += browser.run(of_colors)
        browser.run(DARK)
        browser.drawn()
        found += [f"dark: {what}" for what in browser.run(of_colors)]
    return found


def accessibility(browser: Browser, address: str, site: Path) -> list[str]:
    """What axe-core and the sizes of letters say of all pages."""
    rules = axe()
    if rules is None:
        return shown(["axe-core is not installed: pip install --no-deps --group accessibility"])
    found = []
    browser.block("*/search_index.json", "*/workers/search.*")
    for page in pages_of(site, "accessibility"):
        colors = page.removesuffix(".html") in COLORED
        found += shown(f"{page}: {what}" for what in unreadable(browser, f"{address}/{page}", rules, colors=colors))
    browser.block()
    print(f"accessibility, colours of {len(COLORED)} pages too: {len(found)} faults", flush=True)
    return found


def choose(browser: Browser, name: str, steps: int) -> None:
    """Moves a choice of the planner by so many values, with the keyboard."""
    if not steps:
        return
    browser.run(f"document.getElementById('planner-{name}').focus()")
    key = "ArrowDown" if steps > 0 else "ArrowUp"
    code = {"ArrowDown": 40, "ArrowUp": 38}[key]
    for _ in range(abs(steps)):
        for kind in ("keyDown", "keyUp"):
            browser.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)


def planner(browser: Browser, address: str, data: dict[str, Any]) -> list[str]:
    """Whether the form says what was computed, at the ends of every axis, and the tables stand without JavaScript."""
    found = []
    for size, phone, dark in ((PHONE, True, False), (DESKTOP, False, True)):
        browser.screen(*size, phone=phone, dark=dark)
        browser.open(f"{address}/planner.html")
        fields = {**data["axes"], "prior": data["priors"]}
        at = {name: list(values).index(data["first"][name]) for name, values in fields.items()}
        for places in itertools.product(*(sorted({0, len(values) - 1}) for values in data["axes"].values())):
            chosen = {}
            for (name, values), place in zip(data["axes"].items(), places, strict=True):
                choose(browser, name, place - at[name])
                at[name], chosen[name] = place, values[place]
            prior = min(1, places[-1])  # the belief before takes two values, too
            choose(browser, "prior", prior - at["prior"])
            at["prior"] = prior
            browser.drawn()
            cell = numbers.cell_of(data, **chosen)
            after = data["beliefs"][prior][at["epsilon"]]
            wanted = {
                "Right answers": "{right} % ({low} to {high}), at most {at_most} % ".format(**cell)
                + "({most_low} to {most_high}) whatever the noise; ".format(**cell),
                "Attacker's belief": f"{100 * data['priors'][prior]:g} % becomes at most {after:g} %, ",
                "Calls": "{private:,} private + {public:,} public, {tokens_in:,} tokens in, {tokens_out:,} out ".format(
                    **cell
                ),
            }
            said = browser.run(PLANNER)
            holds = all(said.get(name, "").startswith(begins) for name, begins in wanted.items())
            if not holds or ("Advice" in said) != bool(cell["advises"]):
                found += shown([f"planner.html, {chosen}: expected {wanted!r}, found {said}"])
        found += shown(f"planner.html: the chart cuts {text!r}" for text in browser.run(CUT))
    browser.open(f"{address}/planner.html", scripts=False)
    rows = browser.run(
        "[...document.querySelectorAll('#planner-tables tbody tr')].filter(e => e.checkVisibility()).length"
    )
    if rows != len(data["axes"]["records"]) * len(data["axes"]["queries"]) + len(data["priors"]):
        found += shown([f"planner.html: without JavaScript {rows} rows of its tables are seen"])
    print(f"used the planner with the keyboard: {len(found)} faults", flush=True)
    return found


def take_screens(browser: Browser, address: str, out: Path) -> None:
    """Screenshots of ten pages: on a telephone, and on a desktop in light and dark colours."""
    for kind, size, phone, dark, height in (
        ("phone", PHONE, True, False, 2600),
        ("desktop", DESKTOP, False, False, 1800),
        ("dark", DESKTOP, False, True, 1800),
    ):
        browser.screen(*size, phone=phone, dark=dark)
        browser.open(f"{address}/{SHOWN[0]}.html")
        browser.run("localStorage.clear()")  # the theme keeps the colours of the page before
        for page in SHOWN:
            browser.open(f"{address}/{page}.html")
            browser.screenshot(out / f"{kind}-{page.replace('/', '-')}.png", height=height)
    print(f"{3 * len(SHOWN)} screenshots in {out}")


def main() -> int:
    """Runs the checks; 1 if one found something."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--site", type=Path, default=ROOT / "out" / "site")
    parser.add_argument("--screens", type=Path, default=ROOT / "out" / "screens")
    parser.add_argument("--only", choices=("layout", "search", "accessibility", "planner", "screens"))
    asked = parser.parse_args()
    program = chromium()
    if program is None:
        print("Chromium is not installed: install it (apt-get install chromium), or name it with CHROMIUM=")
        return 1
    found: list[str] = []
    with served(asked.site) as address, Browser(program) as browser:
        if asked.only in {None, "search"}:
            found += search(browser, address)
        if asked.only in {None, "layout"}:
            found += layout(browser, address, asked.site)
        if asked.only in {None, "accessibility"}:
            found += accessibility(browser, address, asked.site)
        if asked.only in {None, "planner"}:
            found += planner(browser, address, json.loads(numbers.OUT.read_text(encoding="utf-8")))
        if asked.only in {None, "screens"}:
            take_screens(browser, address, asked.screens)
    print("\n".join([f"{len(found)} faults", *found]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
