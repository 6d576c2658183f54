"""Fails unless the vault's branches, and its lines, are each covered to at least 95 %."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

FLOOR = 95.0
VAULT = "langchain_dpicl/privacy/"


def shares(summaries: Iterable[Mapping[str, int]]) -> dict[str, float]:
    """Returns the covered share of branches alone and of lines alone, in percent; 0 where there is nothing to cover."""
    files = list(summaries)

    def share(covered: str, count: str) -> float:
        total = sum(file[count] for file in files)
        return 100.0 * sum(file[covered] for file in files) / total if total else 0.0

    return {
        "branches": share("covered_branches", "num_branches"),
        "lines": share("covered_lines", "num_statements"),
    }


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "coverage.json"
        subprocess.run([sys.executable, "-m", "coverage", "json", "-q", "-o", str(out)], check=True)
        files = json.loads(out.read_text())["files"]
    found = shares(entry["summary"] for name, entry in files.items() if VAULT in name.replace("\\", "/"))
    for what, share in found.items():
        print(f"{what} of langchain_dpicl/privacy covered: {share:.2f} % (floor {FLOOR:.0f} %)")
    return int(min(found.values()) < FLOOR)


if __name__ == "__main__":
    sys.exit(main())
