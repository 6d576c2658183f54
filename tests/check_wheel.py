"""Builds both archives, installs the wheel as the README says into an empty environment, and tries it out there.

The wheel that is installed is built from the source archive, which holds every file of the repository: so what is tried
holds for both.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_BYTES = 12_000_000  # of which the tables of the embedded model are 9 million at most, as one of its tests holds
LOCK = ROOT / "tests" / "constraints.txt"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CHECK = '[{"id": "A", "mechanisms": [{"type": "gaussian", "noise_multiplier": 1, "count": 1}], "adjacency": "any", "delta": 1e-5}]'
# Behind the README's code: the extra that it installs, every public name that needs no other (those of agents and stores
# do), and a ledger made and checked by the command.
MORE = """
import langchain_openai
import langchain_dpicl
from langchain_dpicl import audit, backends, baselines, discovery, distributed, exceptions, released, reports, results
from langchain_dpicl import soft_prompts
from langchain_dpicl.cli.main import main
parts = (audit, backends, baselines, discovery, distributed, exceptions, released, reports, results, soft_prompts)
for module in (langchain_dpicl, *parts):
    for name in module.__all__:
        getattr(module, name)
assert main(["ledger", "create", "budget.db", "--epsilon", "4", "--delta", "1e-5"]) == 0
assert main(["ledger", "verify", "budget.db"]) == 0
print(langchain_dpicl.__version__, langchain_dpicl.__file__)
"""


def run(*command: str | Path, cwd: Path, path: Path | None = None) -> str:
    """Runs a command; its output is shown only when it fails."""
    # Packages are compiled where they are imported, and kept: of most of them that is a small part.
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", **({"PYTHONPATH": str(path)} if path else {})}
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


def versions(work: Path) -> Path:
    """Writes the versions of the lock; without its hashes, because pip asks for all or none and the wheel has none yet."""
    constraints = work / "versions.txt"
    constraints.write_text(re.sub(r" \\\n +--hash=\S+", "", LOCK.read_text()))
    return constraints


def built(work: Path, install: tuple[str | Path, ...]) -> tuple[Path, Path]:
    """Builds the source archive, and from it the wheel; both are complete and of a size that can be published."""
    tools = work / "tools"  # not in the environment, which stays empty
    run(*install, "--target", tools, *PROJECT["build-system"]["requires"], cwd=work)
    hatch = (install[0], "-m", "hatchling", "build", "-d", work / "dist", "-t")
    run(*hatch, "sdist", cwd=ROOT, path=tools)
    [source] = (work / "dist").glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(work / "source", filter="data")
    [unpacked] = (work / "source").iterdir()
    check_source(unpacked)
    run(*hatch, "wheel", cwd=unpacked, path=tools)
    [wheel] = (work / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for needed in ("langchain_dpicl/py.typed", "licenses/LICENSE", "licenses/NOTICE", "entry_points.txt"):
        if not any(name.endswith(needed) for name in names):
            sys.exit(f"{wheel.name}: expected {needed}, found none")
    for file in (wheel, source):
        if file.stat().st_size > MOST_BYTES:
            sys.exit(f"{file.name}: expected at most {MOST_BYTES} bytes, found {file.stat().st_size}")
    return wheel, source


def check_source(unpacked: Path) -> None:
    """Stops where the source archive lacks a file of the repository that is about the package."""
    if not (ROOT / ".git").exists():
        return  # an unpacked archive has no list to compare with
    kept = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    lacking = [name for name in kept if (ROOT / name).exists() and not (unpacked / name).exists()]
    lacking = [name for name in lacking if not name.startswith(".")]  # those are about this repository
    if lacking:
        sys.exit(f"source archive: expected every file of the repository, found no {lacking}")


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        env = work / "env"
        run(sys.executable, "-m", "venv", env, cwd=work)
        python = env / "bin" / "python"
        install = (python, "-m", "pip", "--disable-pip-version-check", "install", "-q", "-c", versions(work))
        wheel, source = built(work, install)
        wanted = re.search(r'pip install "langchain-dpicl(\[[a-z,]+\])"', readme("bash"))
        if wanted is None:
            sys.exit("README.md: expected a pip install block")
        run(*install, "--no-compile", f"{wheel}{wanted.group(1)}", cwd=work)
        (work / "quickstart.py").write_text(readme("python") + MORE)
        shown = run(python, "quickstart.py", cwd=work)
        version, place = shown.splitlines()[-1].split()
        if version != PROJECT["project"]["version"] or not Path(place).is_relative_to(env):
            sys.exit(f"expected {PROJECT['project']['version']} inside the environment, found {version} at {place}")
        (work / "checks.json").write_text(CHECK)
        priced = run(env / "bin" / "dpicl", "epsilon", "checks.json", "--json", cwd=work)
    if "epsilon left: 0 of 1" not in shown or "verified" not in shown or '"epsilon": 4.377' not in priced:
        sys.exit(f"the installed wheel answered unexpectedly:\n{priced}\n{shown}")
    print(f"{source.name} gives {wheel.name}, which installs into an empty environment and runs the README's code")
    return 0


if __name__ == "__main__":
    sys.exit(main())
