"""Builds the wheel, installs it as the README says into an empty environment, and runs the README's code there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_BYTES = 8_000_000
CONSTRAINTS = ROOT / "tests" / "constraints.txt"
CHECK = '[{"id": "A", "mechanisms": [{"type": "gaussian", "noise_multiplier": 1, "count": 1}], "adjacency": "any", "delta": 1e-5}]'


def run(*command: str | Path, cwd: Path) -> str:
    """Runs a command; its output is shown only when it fails."""
    # Packages are compiled where they are imported, and kept: of most of them that is a small part.
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    parts = [str(part) for part in command]
    done = subprocess.run(parts, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(parts)}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def readme(language: str) -> str:
    """Returns the README's first block of a language."""
    found = re.search(rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    if found is None:
        sys.exit(f"README.md: expected a {language} block, found none")
    return found.group(1)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        run(sys.executable, "-m", "venv", work / "env", cwd=work)
        python = work / "env" / "bin" / "python"
        pip = (python, "-m", "pip", "--disable-pip-version-check")
        run(*pip, "wheel", "-q", "--no-deps", "-w", work, ROOT, cwd=work)
        wheel = next(work.glob("*.whl"))
        names = zipfile.ZipFile(wheel).namelist()
        for needed in ("langchain_dpicl/py.typed", "licenses/LICENSE", "licenses/NOTICE"):
            if not any(name.endswith(needed) for name in names):
                sys.exit(f"{wheel.name}: expected {needed}, found none")
        if wheel.stat().st_size > MOST_BYTES:
            sys.exit(f"{wheel.name}: expected at most {MOST_BYTES} bytes, found {wheel.stat().st_size}")
        wanted = re.search(r'pip install "langchain-dpicl(\[[a-z,]+\])"', readme("bash"))
        if wanted is None:
            sys.exit("README.md: expected a pip install block")
        quickly = ("-q", "--no-compile", "-c", CONSTRAINTS)
        run(*pip, "install", *quickly, f"{wheel}{wanted.group(1)}", cwd=work)
        (work / "quickstart.py").write_text(readme("python"))
        shown = run(python, "quickstart.py", cwd=work)
        (work / "checks.json").write_text(CHECK)
        priced = run(work / "env" / "bin" / "dpicl", "epsilon", "checks.json", "--json", cwd=work)
        run(python, "-c", "import langchain_openai", cwd=work)
    if '"A"' not in priced or "add_remove" not in shown:
        sys.exit(f"the installed wheel answered unexpectedly:\n{priced}\n{shown}")
    print(f"{wheel.name} installs into an empty environment and runs the README's code")
    return 0


if __name__ == "__main__":
    sys.exit(main())
