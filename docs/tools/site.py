"""Hooks of mkdocs: pages written for a repository browser, as pages of the site.

Files beside docs/ (the changelog, the security policy) become pages, and so do the notebooks of examples/, with what
came out of them in this build. A link that leaves docs/ leads to such a page, or else to the repository. Headings get
the anchors that a repository browser gives them. Formulas, which are written as plain text there, get raised and
lowered signs here. Tables say in each cell what its column is, and drawings have their tall variants beside them, for
telephones. The planner's page gets its form and its numbers.
"""

from __future__ import annotations

import functools
import html as markup
import json
import os
import re
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import planner
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[2]
# README is the front of the repository, as docs/index.md is that of the site.
PAGES = {"SECURITY.md": "security.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
# What `make notebooks` wrote: the page of each notebook, and its pictures.
OUTPUTS = ROOT / "out" / "notebooks"
NOTEBOOKS = {
    path.relative_to(ROOT).as_posix(): f"notebooks/{path.stem}.md"
    for path in sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
}
BESIDE = {**PAGES, **NOTEBOOKS}
LINKED = {**BESIDE, "README.md": "index.md", "docs/proofs": "proofs/README.md"}
FENCED = re.compile(r"^( *)(```+).*?^\1\2[ \t]*$", re.MULTILINE | re.DOTALL)
FORMULA_IN_ITEM = re.compile(r"^ {6,7}(?=\S)", re.MULTILINE)
CONTINUED = re.compile(r"^ {2,3}(?=\S)", re.MULTILINE)
LINK = re.compile(r"(\]\()([^()\s]+)(\))")
ROW = re.compile(r"^ *\|.*$", re.MULTILINE)
CODE = re.compile(r"`[^`\n]+`")
# What is no formula: code, the target of a link, and blocks of code by their indentation.
PLAIN = re.compile(r"(`[^`]+`|\]\([^()\s]+\)|^ {4,}(?![-*+ ]|\d+\.).*$)", re.MULTILINE)
RAISED = re.compile(r"(?<=[\w)|\]'])\^(\{[^{}\n]*\}|\((?:[^()\n]|\([^()\n]*\))*\)|-?(?:\d+(?:\.\d+)?|[^\W\d_]+))")
LOWERED = re.compile(
    r"((?<![\w`])(?:sum|prod|max|mean|delta|epsilon|tau|[A-Za-z])'?|\|\||\))"
    r"_(\{[^{}\n]*\}|\(\w\)|-?[A-Za-z0-9]{1,2})(?![\w}])"
)
HAT = re.compile(r"\bP\^(?=[( ])")
# Names and options up to this length are not broken at their dashes.
WHOLE = re.compile(r"(?<!</span>)<code>([^<\n]{1,30})</code>")

# One with a caption is the table of a value in a notebook, two columns wide.
TABLE = re.compile(r"<table>(?!<caption>).*?</table>", re.DOTALL)
HEAD = re.compile(r"<th[^>]*>(.*?)</th>", re.DOTALL)
EMPTY_HEAD = re.compile(r"<th([^>]*)></th>")
TABLE_ROW = re.compile(r"(?<=<tr>).*?(?=</tr>)", re.DOTALL)
CELL = re.compile(r"<td([^>]*)>(.*?)</td>", re.DOTALL)
IMAGE = re.compile(r'<img [^>]*src="([^":]+)\.(svg|png)"[^>]*>')
# What readers type is answered by these; the first that fits wins, and other pages weigh 1.
BOOSTS = {
    "faq.md": 5.0,
    "quickstart.md": 4.0,
    "which-component.md": 4.0,
    "what-epsilon-means.md": 4.0,
    "changelog.md": 0.1,
    "benchmarks.md": 0.1,
    "proofs/": 0.1,
    "reference/": 0.5,
    "notebooks/": 0.5,
}
# Its cards take the room of the table of contents.
LANDING = "index.md"
SEARCH = 'data-md-component="search" role="dialog"'
# The width below which tables are stacked and tall drawings shown: also in stylesheets/site.css.
PHONE = "(max-width: 44.9375em)"


@functools.cache
def project() -> dict[str, Any]:
    """The project's own table."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def on_config(config: Any) -> Any:
    """Gives headings the anchors that a repository browser gives them, and the site its version."""
    # pymdownx keeps two dashes where a mark stood between two words, and underscores, as repository browsers do.
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    config.extra["version_shown"] = project()["version"]
    config.copyright = f"langchain-dpicl {project()['version']}, {config.copyright}"
    config.extra["social"] = [{"icon": "fontawesome/brands/github", "link": project()["urls"]["Homepage"]}]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that stand beside docs/."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    for name, page in NOTEBOOKS.items():
        ran = OUTPUTS / Path(page).name
        if not ran.exists():
            raise PluginError(f"{ran.relative_to(ROOT)} is missing: run make notebooks, as make docs does")
        title, _, rest = ran.read_text(encoding="utf-8").partition("\n\n")
        said = f"[This notebook]({project()['urls']['Homepage']}/blob/main/{name}) ran when the site was built."
        files.append(File.generated(config, page, content=f"{title}\n\n{said}\n\n{rest}"))
        for picture in sorted(OUTPUTS.glob(f"{ran.stem}_*.png")):
            files.append(File.generated(config, f"notebooks/{picture.name}", content=picture.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Leads links that leave docs/ to a page of the site or to the repository, and reads lists as is done there.

    What goes on in a list stands two spaces in there, and four here. A bar inside code inside a table is escaped there,
    and would show its escape here. Blocks of code stay as they are.
    """
    boost = next((weight for name, weight in BOOSTS.items() if page.file.src_uri.startswith(name)), None)
    if boost is not None:
        page.meta["search"] = {"boost": boost}
    if page.file.src_uri == LANDING:
        page.meta["hide"] = ["toc"]
    beside = {shown: ROOT / name for name, shown in BESIDE.items()}
    source = beside.get(page.file.src_uri, ROOT / "docs" / page.file.src_uri)
    parts, end = [], 0
    for fence in FENCED.finditer(markdown):
        parts.append(_read(markdown[end : fence.start()], source, page.file.src_uri))
        parts.append(textwrap.indent(fence[0], " " * (4 - len(fence[1]))) if fence[1] else fence[0])
        end = fence.end()
    return "".join([*parts, _read(markdown[end:], source, page.file.src_uri)])


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Keeps short code in one piece, and makes tables and pictures fit a telephone.

    A browser breaks `--option` behind its dashes.
    """
    folder = (ROOT / "docs" / page.file.src_uri).parent
    if planner.MARK in html:
        if not planner.OUT.exists():
            raise PluginError(f"{planner.OUT.relative_to(ROOT)} is missing: run make planner, as make docs does")
        data = json.loads(planner.OUT.read_text(encoding="utf-8"))
        script = os.path.relpath(planner.SCRIPT, Path(page.file.dest_uri).parent).replace(os.sep, "/")
        html = html.replace(planner.MARK, planner.page_part(data, script))
    html = TABLE.sub(lambda table: _stacked(table[0]), WHOLE.sub(r'<code class="whole">\1</code>', html))
    return IMAGE.sub(lambda image: _pictured(image, folder), html)


def on_post_page(output: str, **_: Any) -> str:
    """Names the theme's search for readers who hear the page."""
    return output.replace(SEARCH, f'{SEARCH} aria-label="Search"', 1)


def on_post_template(output_content: str, **_: Any) -> str:
    """The same on the page for what is not found."""
    return on_post_page(output_content)


def _stacked(table: str) -> str:
    """Gives each cell the heading of its column, which the style sheet shows where rows are stacked."""
    heads = [markup.escape(markup.unescape(re.sub(r"<[^>]+>", "", head)).strip()) for head in HEAD.findall(table)]

    def row(found: re.Match[str]) -> str:
        names = iter(heads)
        return CELL.sub(lambda cell: f'<td{cell[1]} data-label="{next(names, "")}"><div>{cell[2]}</div></td>', found[0])

    # A corner without words is no heading.
    table = EMPTY_HEAD.sub(r"<td\1></td>", TABLE_ROW.sub(row, table))
    return table.replace("<table>", f'<table data-columns="{len(heads)}">', 1)


def _pictured(image: re.Match[str], folder: Path) -> str:
    """A drawing with its tall variant, if it has one; a chart, whose letters are small, with itself to tap on."""
    name, kind = image[1], image[2]
    if kind == "png":
        return f'<a class="chart" href="{name}.png">{image[0]}</a>'
    if not (folder / f"{name}-tall.svg").exists():
        return image[0]
    return f'<picture><source media="{PHONE}" srcset="{name}-tall.svg">{image[0]}</picture>'


def _formulas(text: str) -> str:
    """Raises exponents and lowers indices; P^ is P with a hat. A text between two pieces of code is looked at alone."""
    parts = PLAIN.split(text)
    parts[::2] = [_formula(part) for part in parts[::2]]
    return "".join(parts)


def _formula(text: str) -> str:
    text = HAT.sub("P\u0302", text)
    for _ in range(2):  # an index may have one of its own
        text = LOWERED.sub(lambda found: found[1] + _set("sub", found[2], bare="{"), text)
    text = RAISED.sub(lambda found: _set("sup", found[1], bare="{("), text)
    return re.sub(r"(?<= )>=(?=\s)", "\u2265", re.sub(r"(?<= )<=(?=\s)", "\u2264", text))


def _set(tag: str, text: str, *, bare: str) -> str:
    """Sets an exponent or index, without the brackets that only hold it together, and with a minus for a dash.

    Round brackets stay around an index: c_(i) is not c_i.
    """
    inner = text[1:-1] if text[0] in bare else text
    return f"<{tag}>{inner}</{tag}>".replace("-", "\u2212")


def _read(text: str, source: Path, shown: str) -> str:
    text = _formulas(text) if shown not in BESIDE.values() else text
    # A proof page says on two lines where its code is and where its tests are.
    text = re.sub(r"(?<=[^\n])\n(?=Tests: )", "\n\n", text)
    text = CONTINUED.sub("    ", FORMULA_IN_ITEM.sub("        ", text))
    text = ROW.sub(lambda row: CODE.sub(lambda code: code[0].replace(r"\|", "|"), row[0]), text)
    return LINK.sub(lambda link: link[1] + _target(link[2], source, shown) + link[3], text)


def _target(link: str, source: Path, shown: str) -> str:
    file, mark, place = link.partition("#")
    if not file or "://" in file or file.startswith("mailto:"):
        return link
    target = Path(os.path.normpath(source.parent / file))
    if not target.exists() or not target.is_relative_to(ROOT):
        return link  # mkdocs says that it leads nowhere
    inside = target.relative_to(ROOT).as_posix()
    if inside in LINKED:
        to = LINKED[inside]
    elif inside.startswith("docs/") and target.is_file():
        to = inside.removeprefix("docs/")
    else:
        kind = "tree" if target.is_dir() else "blob"
        return f"{project()['urls']['Homepage']}/{kind}/main/{inside}{mark}{place}"
    return os.path.relpath(to, Path(shown).parent).replace(os.sep, "/") + mark + place
