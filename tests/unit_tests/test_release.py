"""The checks of a release see what they look for, and the workflow gives each job the rights that it needs."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import check_release as release

ROOT = Path(__file__).parents[2]


def project(
    folder: Path, *, version: str = "1.2.3", changelog: str = "## 1.2.3 (2026-12-01)", cited: str = "1.2.3"
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        f'[project]\nname = "tiny-one"\nversion = "{version}"\ndependencies = ["tiny_two[x]>=1; python_version>\'3\'"]\n'
    )
    (folder / "tiny_one").mkdir(exist_ok=True)
    (folder / "tiny_one" / "__init__.py").write_text("")
    (folder / "CHANGELOG.md").write_text(f"# Changelog\n\n{changelog}\n\n## 1.2.2 (2026-11-01)\n")
    (folder / "CITATION.cff").write_text(f"cff-version: 1.2.0\nversion: {cited}\n")
    return folder


def test_this_repository_has_one_version() -> None:
    assert list(release.version_problems(ROOT, None)) == []


def test_a_tag_needs_its_version_and_a_dated_changelog(tmp_path: Path) -> None:
    assert list(release.version_problems(project(tmp_path), "v1.2.3")) == []
    assert list(release.version_problems(project(tmp_path), "v1.2.4")) == ["tag: expected v1.2.3, found v1.2.4"]
    undated = project(tmp_path, changelog="## 1.2.3 (unreleased)")
    assert list(release.version_problems(undated, None)) == []
    [problem] = release.version_problems(undated, "v1.2.3")
    assert "expected the day of the release" in problem


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"changelog": "## 1.2.2 (2026-11-01)"}, "expected 1.2.3 as the first heading, found 1.2.2"),
        ({"changelog": "nothing"}, "found 1.2.2"),
        ({"cited": "1.2.2"}, "CITATION.cff: expected version: 1.2.3, found 1.2.2"),
        ({"version": "1.2.4"}, "CHANGELOG.md: expected 1.2.4"),
    ],
)
def test_another_version_is_found(change: dict[str, str], words: str, tmp_path: Path) -> None:
    assert words in "\n".join(release.version_problems(project(tmp_path, **change), None))


def test_builds_are_the_same_unless_something_of_the_machine_gets_in(tmp_path: Path) -> None:
    one, other, later = (project(tmp_path / name) for name in ("one", "other", "later"))
    release._disguise(other)
    dists = [tmp_path / name for name in ("dist", "again", "dist-later")]
    release.build(one, dists[0], {})
    release.build(other, dists[1], release.ELSEWHERE)
    assert [path.suffix for path in sorted(dists[0].iterdir())] == [".whl", ".gz"]
    assert release.differing(dists[0], dists[1]) == []
    release.build(later, dists[2], {"SOURCE_DATE_EPOCH": "1700000000"})  # planted: the time of the build
    assert len(release.differing(dists[0], dists[2])) == 2
    next(dists[1].glob("*.whl")).unlink()
    assert len(release.differing(dists[0], dists[1])) == 1


BILL: dict[str, Any] = {
    "metadata": {"component": {"name": "tiny-one", "version": "1.2.3"}},
    "components": [{"name": "Tiny.Two", "version": "1.0"}],
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ""),
        ({"metadata": {}}, "expected tiny-one 1.2.3 as its subject"),
        ({"metadata": {"component": {"name": "tiny-one", "version": "1.2.2"}}}, "as its subject"),
        ({"components": []}, "found no tiny-two"),
        ({"components": [{"name": "tiny_two"}]}, "found none of tiny-two"),
        ({"more": "file:///home/somebody"}, "no folder of a machine"),
    ],
)
def test_a_bill_that_lacks_something_is_found(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    found = "; ".join(release.bill_problems({**BILL, **change}, project(tmp_path)))
    assert words in found
    assert bool(found) is bool(words)


def test_a_command_that_fails_shows_what_it_said() -> None:
    with pytest.raises(SystemExit, match="said why"):
        release.run(sys.executable, "-c", "import sys; sys.exit('said why')")


@pytest.fixture(scope="module")
def jobs() -> dict[str, Any]:
    found = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    assert found["permissions"] == {"contents": "read"}
    assert found[True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` as true
    return dict(found["jobs"])


def test_nothing_is_published_before_it_was_built_twice_tested_and_attested(jobs: dict[str, Any]) -> None:
    def before(name: str) -> set[str]:
        needs = jobs[name].get("needs", [])
        direct = {needs} if isinstance(needs, str) else set(needs)
        return direct.union(*map(before, direct))

    assert before("publish") == {"attest", "build", "test"}
    assert before("page") >= {"publish"}
    assert before("docs") >= {"publish"}
    assert any("make release-check" in step.get("run", "") for step in jobs["build"]["steps"])
    assert any("make test" in step.get("run", "") for step in jobs["test"]["steps"])
    assert jobs["publish"]["environment"] == "pypi"


def test_each_job_has_only_its_rights_and_no_stored_secret(jobs: dict[str, Any]) -> None:
    rights = {name: job["permissions"] for name, job in jobs.items() if "permissions" in job}
    assert rights == {
        "attest": {"id-token": "write", "attestations": "write"},
        "publish": {"id-token": "write"},
        "page": {"contents": "write"},
        "site": {"contents": "write"},
    }
    assert "secrets." not in (ROOT / ".github" / "workflows" / "release.yml").read_text()
    for name, job in jobs.items():
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False, name


def test_every_action_is_named_by_its_commit() -> None:
    flows = [yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")]
    steps = [step for flow in flows for job in flow["jobs"].values() for step in job["steps"]]
    used = [step["uses"] for step in steps if "uses" in step]
    assert [one for one in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", one)] == []


def test_no_command_is_made_of_the_name_of_a_tag(jobs: dict[str, Any]) -> None:
    for job in jobs.values():
        for step in job["steps"]:
            command = step.get("run", "")
            assert "${{" not in command
            assert not re.search(r"make .*GITHUB_REF_NAME", command)  # make hands its variables to a shell


def test_a_job_that_may_write_runs_nothing_of_the_index(jobs: dict[str, Any]) -> None:
    for name, job in jobs.items():
        if "permissions" in job:
            commands = [step.get("run", "") for step in job["steps"]]
            assert not [one for one in commands if re.search(r"\b(make|pip|python|mike)\b", one)], name


def test_the_tag_comes_from_the_environment_unread(jobs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    [step] = [step for step in jobs["build"]["steps"] if "release-check" in step.get("run", "")]
    assert step["env"] == {"RELEASE_TAG": "${{ github.ref_name }}"}
    tag = "v1$(shell;touch${IFS}made);`touch${IFS}made`"
    monkeypatch.setenv("RELEASE_TAG", tag)
    monkeypatch.setattr(release, "run", lambda *_: "")
    monkeypatch.setattr(sys, "argv", ["check_release.py"])
    with pytest.raises(SystemExit) as refused:
        release.main()
    assert f"found {tag}" in str(refused.value)


def test_both_builds_are_made_by_what_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Any] = []
    monkeypatch.delenv("RELEASE_TAG", raising=False)
    monkeypatch.setattr(sys, "argv", ["check_release.py"])
    monkeypatch.setattr(release, "run", lambda *_: "")
    monkeypatch.setattr(release, "copies", lambda work: [(work, {})] * 2)
    monkeypatch.setattr(release, "build", lambda *given: used.append(given[3:]))
    monkeypatch.setattr(release, "differing", lambda *_: ["both"])
    with pytest.raises(SystemExit, match="found others of both"):
        release.main()
    assert used == [(release.BUILDER,)] * 2


def test_every_file_is_attested_and_the_bill_goes_with_the_wheel(jobs: dict[str, Any]) -> None:
    used = {step["uses"].partition("@")[0]: step.get("with", {}) for step in jobs["attest"]["steps"] if "uses" in step}
    assert used["actions/attest-build-provenance"] == {"subject-path": "out/release/*"}
    assert used["actions/attest-sbom"]["subject-path"] == "out/release/*.whl"


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.name
)
def test_issue_templates_are_read_by_their_form(path: Path) -> None:
    found = yaml.safe_load(path.read_text())
    if path.name == "config.yml":
        assert found["contact_links"][0]["url"].endswith("SECURITY.md")
        return
    assert {"name", "description", "body"} <= set(found)
    assert all(part["type"] in {"markdown", "textarea", "input"} for part in found["body"])


def test_the_citation_has_what_its_format_asks_for() -> None:
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "version", "license"} <= set(found)
    assert all({"type", "title", "authors"} <= set(one) for one in found["references"])
