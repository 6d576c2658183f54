"""Looks for keys, tokens and passwords in every file that would be published, with detect-secrets.

    python tests/check_secrets.py                 all files that git does not ignore
    python tests/check_secrets.py FILE ...        these (what pre-commit calls)
    python tests/check_secrets.py --accept        writes down what is found as made up: look at it first

What tests make up is listed in `.secrets.baseline` by file and hash, without the text; a line number does not matter. A
line may say so itself: `# pragma: allowlist secret`. Lines that name a function are left out (`weighs_...` looks like a
token of GitHub). Files that were clean are not read again by the same environment until they change. Prints file, line
and kind, never the text.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from detect_secrets import SecretsCollection
from detect_secrets.__version__ import VERSION
from detect_secrets.core import baseline
from detect_secrets.core.plugins import initialize
from detect_secrets.plugins import keyword
from detect_secrets.plugins.base import BasePlugin
from detect_secrets.plugins.high_entropy_strings import HighEntropyStringsPlugin
from detect_secrets.settings import get_settings, transient_settings

ROOT = Path(__file__).resolve().parents[1]
BASELINE = ROOT / ".secrets.baseline"
SEEN = Path(sys.prefix) / ".secrets-seen.json"
# Tables of numbers; what their builder reads is public text.
SKIPPED = ("langchain_dpicl/backends/data/", ".secrets.baseline")
PICTURES = {".png", ".gz"}
FOLDERS = ("langchain_dpicl", "tests", "docs", "examples", "benchmarks", "cassettes")


def published(root: Path) -> list[str]:
    """Returns the files that git keeps or would take, by their path in the project; without git, its folders."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, check=True, capture_output=True).stdout.decode().split("\0")
    except (OSError, subprocess.CalledProcessError):
        found = [path for folder in FOLDERS for path in (root / folder).rglob("*") if "__pycache__" not in path.parts]
        listed = [path.relative_to(root).as_posix() for path in [*found, *root.glob("*.*")]]
    return sorted({name for name in listed if (root / name).is_file() and not name.startswith(SKIPPED)})


def settings() -> dict[str, Any]:
    """Returns which detectors look, and what they leave out, as the baseline says."""
    return baseline.load_from_file(str(BASELINE))


def found_in(names: Iterable[str], *, root: Path) -> SecretsCollection:
    """Looks through files of a folder; nobody is asked whether a key is real: the baseline has no filter for that.

    Each file line by line, with those detectors alone that may find something in it.
    """
    kept = settings()
    collection = SecretsCollection(root=str(root))
    for chosen, some in _shared_out(names, root, kept).items():
        used = [one for one in kept["plugins_used"] if one["name"] in chosen]
        with transient_settings({"plugins_used": used, "filters_used": kept["filters_used"]}):
            for name in some:
                collection.scan_file(name)
    return collection


def _shared_out(names: Iterable[str], root: Path, kept: dict[str, Any]) -> dict[frozenset[str], list[str]]:
    """Returns the files by the detectors that they need; those that need none are left out."""
    found: dict[frozenset[str], list[str]] = {}
    with transient_settings({"plugins_used": kept["plugins_used"], "filters_used": kept["filters_used"]}):
        plugins = {kind: initialize.from_plugin_classname(kind) for kind in get_settings().plugins}
        for name in names:
            chosen = _that_may_find(root / name, plugins)
            if chosen:
                found.setdefault(chosen, []).append(name)
    return found


# In a line of Python a word like these matters beside a string.
_WORDS = {
    ".md": re.compile("|".join(keyword.DENYLIST), re.IGNORECASE),
    ".py": re.compile(rf"({'|'.join(keyword.DENYLIST)}).*['\"]|['\"].*({'|'.join(keyword.DENYLIST)})", re.IGNORECASE),
}


def _that_may_find(path: Path, plugins: Mapping[str, BasePlugin]) -> frozenset[str]:
    """Returns the detectors that find anything in a text as a whole, which is much faster than line by line.

    What they find in a line they find in the whole text too; only in files of settings they look at more than the text.
    """
    if path.suffix not in _WORDS:
        return frozenset() if path.suffix in PICTURES else frozenset(plugins)
    text = path.read_text(encoding="utf-8")
    return frozenset(kind for kind, plugin in plugins.items() if _may_find(plugin, text, path))


def _may_find(plugin: BasePlugin, text: str, path: Path) -> bool:
    if isinstance(plugin, keyword.KeywordDetector):
        lines = text.split("\n") if _WORDS[path.suffix].search(text) else []
        return any(plugin.analyze_line(str(path), line) for line in lines if _WORDS[path.suffix].search(line))
    if isinstance(plugin, HighEntropyStringsPlugin):
        return any(plugin.calculate_shannon_entropy(one) > plugin.entropy_limit for one in plugin.analyze_string(text))
    return any(True for _ in plugin.analyze_string(text))


def news(found: SecretsCollection) -> list[tuple[str, int, str]]:
    """Returns file, line and kind of what the baseline does not list."""
    known = {(name, item["hashed_secret"]) for name, items in settings()["results"].items() for item in items}
    fresh = [(name, secret) for name, secret in found if (name, secret.secret_hash) not in known]
    return sorted({(name, secret.line_number, secret.type) for name, secret in fresh})


class Seen:
    """What was clean before: a digest of each file's name and content, and of what it was looked at with."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._with = hashlib.sha256(VERSION.encode() + BASELINE.read_bytes()).hexdigest()
        try:
            kept = json.loads(path.read_text())
        except (OSError, ValueError):
            kept = {}
        same = isinstance(kept, dict) and kept.get("with") == self._with
        self._digests = set(kept["digests"]) if same else set()

    def unread(self, names: Sequence[str]) -> list[str]:
        """Returns the files that were not seen as they are now."""
        return [name for name in names if _digest(name) not in self._digests]

    def keep(self, names: Sequence[str]) -> None:
        """Remembers these files as clean, and no others."""
        self._path.write_text(json.dumps({"with": self._with, "digests": [_digest(name) for name in names]}))


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode() + b"\0" + (ROOT / name).read_bytes()).hexdigest()


def accept() -> int:
    """Lists everything that is found now in the baseline, by file and hash."""
    found = found_in(published(ROOT), root=ROOT)
    results = {
        name: [
            {"type": kind, "filename": name, "hashed_secret": digest, "is_verified": False}
            for kind, digest in sorted({(secret.type, secret.secret_hash) for secret in found.data[name]})
        ]
        for name in sorted(found.files)
    }
    kept = {key: value for key, value in settings().items() if key not in {"results", "generated_at"}}
    BASELINE.write_text(json.dumps({**kept, "results": results}, indent=2) + "\n")
    print(f"{sum(map(len, results.values()))} made-up secrets in {len(results)} files are listed in {BASELINE.name}.")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if something is found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--accept", action="store_true")
    given = parser.parse_args(arguments)
    if given.accept:
        return accept()
    every = published(ROOT)
    asked = {path.resolve().relative_to(ROOT).as_posix() for path in given.files}
    names = [name for name in every if name in asked] if given.files else every
    seen = Seen(SEEN)
    wrong = news(found_in(seen.unread(names), root=ROOT))
    for name, line, kind in wrong:
        print(f"{name}:{line}: {kind}")
    if wrong:
        print("Take it out, and have it revoked if it was real. What is made up: tests/check_secrets.py says how.")
        return 1
    if not given.files:
        seen.keep(every)
    return 0


if __name__ == "__main__":
    sys.exit(main())
