"""Fails unless branch coverage of the vault is at least 95 %."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

FLOOR = 95.0


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "coverage.json"
        subprocess.run([sys.executable, "-m", "coverage", "json", "-q", "-o", str(out)], check=True)
        files = json.loads(out.read_text())["files"]
    vault = [entry["summary"] for name, entry in files.items() if "langchain_dpicl/privacy/" in name]
    hit = sum(s["covered_lines"] + s["covered_branches"] for s in vault)
    total = sum(s["num_statements"] + s["num_branches"] for s in vault)
    share = 100.0 * hit / total
    print(f"branch coverage of langchain_dpicl/privacy: {share:.1f} % (floor {FLOOR:.0f} %)")
    return int(share < FLOOR)


if __name__ == "__main__":
    sys.exit(main())
