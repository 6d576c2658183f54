"""Hooks of mkdocs: pages written for a repository browser, as pages of the site. Knows no page by its content.

Files beside docs/ (the changelog, the security policy) become pages. A link that leaves docs/ leads to such a page, or
else to the repository. Headings get the anchors that a repository browser gives them.
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
CONTINUED = re.compile(r"^ {2,3}(?=\S)", re.MULTILINE)
LINK = re.compile(r"(\]\()([^()\s]+)(\))")
ROW = re.compile(r"^ *\|.*$", re.MULTILINE)
CODE = re.compile(r"`[^`\n]+`")


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


def _read(text: str, source: Path, shown: str) -> str:
    text = CONTINUED.sub("    ", text)
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
