"""Does all of a release but the upload: builds the commit twice and compares every byte, and leaves what is uploaded.

    python tests/check_release.py --out out/release [--tag v0.1.0]

It needs twine and cyclonedx-bom (the dependency group `release`), hatchling of the lock in an environment of its own,
as `make release-check` makes them, and a working tree without changes. What is built is the commit: once as it stands,
once in a folder of another name, length, age and rights, with other settings of time zone, language and hashes. The
wheel is built from the source archive. Then the metadata is checked as the index checks it, and the wheel is installed
into an empty environment, of which the bill of materials is made.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "tests" / "constraints.txt"
BUILDER = Path(sys.prefix) / "build" / "bin" / "python"
"""The Python that builds; its packages are from the lock, by their hashes."""
ELSEWHERE = {"TZ": "Asia/Kathmandu", "LC_ALL": "C", "PYTHONHASHSEED": "7", "HOME": "/nonexistent"}
"""Of the second build."""


def run(*command: str | Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> str:
    """Runs a command; its output is shown only when it fails."""
    parts = [str(part) for part in command]
    settings = {**os.environ, **(env or {})}
    done = subprocess.run(parts, cwd=cwd, env=settings, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(parts)}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def version_problems(root: Path, tag: str | None) -> Iterator[str]:
    """Says where the version differs: project, changelog, citation, and the tag, if there is one.

    Args:
      root: of the repository.
      tag: such as v0.1.0: then the changelog has to name the day of the release.
    """
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    heads = re.findall(r"^## (\S+)(?: \(([^)]*)\))?", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    first, day = heads[0] if heads else ("nothing", "")
    if first != version:
        yield f"CHANGELOG.md: expected {version} as the first heading, found {first}"
    cited = re.search(r"^version: (\S+)$", (root / "CITATION.cff").read_text(), re.MULTILINE)
    if cited is None or cited[1] != version:
        yield f"CITATION.cff: expected version: {version}, found {cited[1] if cited else 'none'}"
    if tag is None:
        return
    if tag != f"v{version}":
        yield f"tag: expected v{version}, found {tag}"
    if not _is_day(day):
        yield f"CHANGELOG.md: expected the day of the release, such as ## {version} (2026-12-01), found ({day})"


def _is_day(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def copies(work: Path) -> Iterator[tuple[Path, Mapping[str, str]]]:
    """Yields two copies of the commit, with the settings to build each with."""
    archive = work / "commit.tar"
    run("git", "archive", "--format=tar", f"--output={archive}", "HEAD")
    for name, env in (("one", {}), ("another-folder-with-a-longer-name", ELSEWHERE)):
        folder = work / name
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")
        if env:
            _disguise(folder)
        yield folder, env


def _disguise(folder: Path) -> None:
    """Gives every file another age and other rights."""
    for number, path in enumerate(sorted(folder.rglob("*"))):
        path.chmod(0o700 if path.is_dir() else 0o600)
        os.utime(path, (1_000_000_000 + number, 1_000_000_000 + number))


def build(folder: Path, out: Path, env: Mapping[str, str], python: str | Path = sys.executable) -> None:
    """Builds the source archive, and from it the wheel."""
    settings = {"SOURCE_DATE_EPOCH": run("git", "log", "-1", "--format=%ct").strip(), **env}
    hatch = (python, "-m", "hatchling", "build", "-d", out, "-t")
    run(*hatch, "sdist", cwd=folder, env=settings)
    [source] = out.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as unpacked, tarfile.open(source) as archive:
        archive.extractall(unpacked, filter="data")
        run(*hatch, "wheel", cwd=next(Path(unpacked).iterdir()), env=settings)


def digests(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of every file of a folder, by name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def differing(one: Path, other: Path) -> list[str]:
    """Returns the names of the files that are not the same, byte for byte, in two folders."""
    first, second = digests(one), digests(other)
    return sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))


def bill_of_materials(dist: Path, work: Path, version: str) -> dict[str, Any]:
    """Installs the wheel into an empty environment, at the versions of the lock, and lists what is there."""
    env, locked = work / "env", work / "locked.txt"
    locked.write_text(re.sub(r" \\\n +--hash=\S+", "", LOCK.read_text()))
    run(sys.executable, "-m", "venv", env)
    install = (env / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-compile")
    run(*install, "-c", locked, f"--find-links={dist}", f"langchain-dpicl=={version}")
    run(
        env / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "uninstall", "-q", "-y", "setuptools", "pip"
    )
    listed = work / "sbom.json"
    options = ("--pyproject", ROOT / "pyproject.toml", "--mc-type", "library", "--output-reproducible", "--short-PURLs")
    tool = Path(sys.executable).with_name("cyclonedx-py")
    run(tool, "environment", *options, "-o", listed, env / "bin" / "python")
    found: dict[str, Any] = json.loads(listed.read_text())
    return found


def bill_problems(bill: Mapping[str, Any], root: Path) -> Iterator[str]:
    """Says what a bill of materials lacks, and what it shows the machine that made it."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    main = bill.get("metadata", {}).get("component", {})
    if (main.get("name"), main.get("version")) != (project["name"], project["version"]):
        yield f"expected {project['name']} {project['version']} as its subject, found {main.get('name')!r}"
    listed = {_plain(part["name"]): part for part in bill.get("components", [])}
    wanted = {_plain(re.split(r"[\[<>=!~; ]", one)[0]) for one in project["dependencies"]}
    if lacking := sorted(wanted - set(listed)):
        yield f"expected every dependency, found no {', '.join(lacking)}"
    if bare := sorted(name for name, part in listed.items() if not part.get("version")):
        yield f"expected a version of each, found none of {', '.join(bare)}"
    if "file://" in json.dumps(bill):
        yield "expected no folder of a machine, found one"


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> int:
    parser = argparse.ArgumentParser(description="Does all of a release but the upload.")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "release", help="folder to make anew")
    parser.add_argument(
        "--tag",
        default=os.environ.get("RELEASE_TAG"),
        help="such as v0.1.0: it has to be that of the version, and the changelog dated (default: RELEASE_TAG)",
    )
    given = parser.parse_args()
    if changed := run("git", "status", "--porcelain").strip():
        sys.exit(f"expected a working tree without changes, as a commit is released, found\n{changed}")
    if problems := list(version_problems(ROOT, given.tag)):
        sys.exit("\n".join(problems))
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    with tempfile.TemporaryDirectory(prefix="dpicl-release-") as folder:
        work = Path(folder)
        dists = [work / "dist", work / "dist-again"]
        for dist, (source, env) in zip(dists, copies(work), strict=True):
            build(source, dist, env, BUILDER)
        if found := differing(*dists):
            sys.exit(f"expected two builds of one commit to be the same, found others of {', '.join(found)}")
        files = sorted(dists[0].iterdir())
        run(sys.executable, "-m", "twine", "check", "--strict", *files)
        bill = bill_of_materials(dists[0], work, version)
        if problems := list(bill_problems(bill, ROOT)):
            sys.exit("bill of materials: " + "; ".join(problems))
        shutil.rmtree(given.out, ignore_errors=True)
        given.out.mkdir(parents=True)
        for file in files:
            shutil.copy(file, given.out / file.name)
        (given.out / f"langchain_dpicl-{version}.cdx.json").write_text(json.dumps(bill, indent=2) + "\n")
    sums = "".join(f"{digest}  {name}\n" for name, digest in digests(given.out).items())
    (given.out / "SHA256SUMS").write_text(sums)
    print(
        f"two builds of {run('git', 'rev-parse', '--short', 'HEAD').strip()} are the same; in {given.out}:\n{sums}",
        end="",
    )
    print(f"{len(bill['components'])} packages in the bill of materials; nothing was uploaded")
    return 0


if __name__ == "__main__":
    sys.exit(main())
