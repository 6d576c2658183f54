"""Hooks of mkdocs: pages written for a repository browser, as pages of the site.

Files beside docs/ (the changelog, the security policy) become pages. A link that leaves docs/ leads to such a page, or
else to the repository. Headings get the anchors that a repository browser gives them. Formulas, which are written as
plain text there, get raised and lowered signs here.
"""

from __future__ import annotations

import functools
import os
import re
import textwrap
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[2]
# README is the front of the repository, as docs/index.md is that of the site.
PAGES = {"SECURITY.md": "security.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
LINKED = {**PAGES, "README.md": "index.md", "docs/proofs": "proofs/README.md"}
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
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Leads links that leave docs/ to a page of the site or to the repository, and reads lists as is done there.

    What goes on in a list stands two spaces in there, and four here. A bar inside code inside a table is escaped there,
    and would show its escape here. Blocks of code stay as they are.
    """
    beside = {shown: ROOT / name for name, shown in PAGES.items()}
    source = beside.get(page.file.src_uri, ROOT / "docs" / page.file.src_uri)
    parts, end = [], 0
    for fence in FENCED.finditer(markdown):
        parts.append(_read(markdown[end : fence.start()], source, page.file.src_uri))
        parts.append(textwrap.indent(fence[0], " " * (4 - len(fence[1]))) if fence[1] else fence[0])
        end = fence.end()
    return "".join([*parts, _read(markdown[end:], source, page.file.src_uri)])


def on_page_content(html: str, **_: Any) -> str:
    """Keeps short code in one piece: a browser breaks `--option` behind its dashes."""
    return WHOLE.sub(r'<code class="whole">\1</code>', html)


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
    text = _formulas(text) if shown not in PAGES.values() else text
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
