"""The scan for keys and passwords: it finds planted ones, tells no text of them, and is part of `make test`."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path

import pytest
from detect_secrets.core.potential_secret import PotentialSecret

from tests import check_secrets

ROOT = Path(__file__).resolve().parents[2]
LETTERS = string.ascii_letters + string.digits


def made_up(length: int, letters: str = LETTERS) -> str:
    return "".join(random.Random(7).choices(letters, k=length))


# Put together here: written out, the scan would find them in this file.
PLANTED = {
    "AWS key": ("key.py", 'KEY = "' + "AKIA" + made_up(16, string.ascii_uppercase + string.digits) + '"'),
    "GitHub token": ("notes.md", "token: " + "ghp_" + made_up(36)),
    "Slack token": ("key.py", '"' + "xox" + "b-1234567890-" + made_up(24) + '"'),
    "Stripe key": ("key.py", 'x = "' + "sk_" + "live_" + made_up(24) + '"'),
    "private key": ("key.md", "-----BEGIN RSA " + "PRIVATE KEY-----"),
    "password": ("key.py", "pass" + 'word = "' + made_up(12) + '"'),
    "password of a database": ("key.md", "postgresql://user:" + made_up(12) + "@db.example/app"),
    "random text": ("key.py", 'x = "' + made_up(48) + '"'),
    "random number": ("key.py", 'x = "' + made_up(40, "0123456789abcdef") + '"'),
    "key in a cassette": ("tape.yaml", "api_key: " + made_up(40)),
    "JSON token": ("key.py", '"' + "eyJhbGciOiJIUzI1NiJ9" + ".eyJzdWIiOiIxMjM0NTYifQ." + made_up(43) + '"'),
    "key in a notebook": ("book.ipynb", '"source": ["client(api_key=\\"' + made_up(40) + '\\")"]'),
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of one clean file, with this one's baseline."""
    monkeypatch.setattr(check_secrets, "ROOT", tmp_path)
    monkeypatch.setattr(check_secrets, "SEEN", tmp_path / "seen")
    monkeypatch.setattr(
        check_secrets, "published", lambda root: sorted(p.name for p in root.iterdir() if "." in p.name)
    )
    (tmp_path / "clean.py").write_text('"""Nothing."""\nNAME = "the password of nobody"\n')
    return tmp_path


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_secret_is_found_by_file_and_line_and_its_text_is_not_told(
    project: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, line = PLANTED[kind]
    assert check_secrets.main([]) == 0
    (project / name).write_text(f"\n\n{line}\n")
    for _ in range(2):  # what was found is looked at again
        assert check_secrets.main([]) == 1
        said = capsys.readouterr().out
        assert f"{name}:3: " in said
        assert line.strip("\"'") not in said
        assert made_up(12) not in said
    (project / name).write_text("\n\n")
    assert check_secrets.main([]) == 0


def test_the_fast_look_at_a_whole_text_leaves_out_nothing_that_is_planted(project: Path) -> None:
    for number, (name, line) in enumerate(PLANTED.values()):
        (project / f"{number}{name}").write_text(f"{line}\n")
    names = check_secrets.published(project)
    found = {name for name, _, _ in check_secrets.news(check_secrets.found_in(names, root=project))}
    assert found == {name for name in names if name[0].isdigit()}


def test_what_is_listed_is_let_through_in_its_file_alone(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, line = PLANTED["password"]
    secret = PotentialSecret(type="Secret Keyword", filename=name, secret=made_up(12))
    listed = json.loads(check_secrets.BASELINE.read_text())
    listed["results"] = {name: [secret.json()]}
    (project / "listed.json").write_text(json.dumps(listed))
    monkeypatch.setattr(check_secrets, "BASELINE", project / "listed.json")
    monkeypatch.setattr(check_secrets, "published", lambda root: [name])
    (project / name).write_text(f"{line}\n")
    assert check_secrets.main([]) == 0
    (project / name).write_text(f"\n\n{line}\n")  # elsewhere in the file
    assert check_secrets.main([]) == 0
    monkeypatch.setattr(check_secrets, "published", lambda root: ["other.py"])
    (project / "other.py").write_text(f"{line}\n")
    assert check_secrets.main([]) == 1


def test_a_line_may_say_that_it_is_made_up(project: Path) -> None:
    name, line = PLANTED["password"]
    (project / name).write_text(f"{line}  # pragma: allowlist secret\n")
    assert check_secrets.main([]) == 0


def test_clean_files_are_not_read_again_until_they_change(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_secrets.main([]) == 0
    read: list[str] = []
    find = check_secrets.found_in
    monkeypatch.setattr(check_secrets, "found_in", lambda names, **given: read.extend(names) or find(names, **given))
    assert check_secrets.main([]) == 0
    assert read == []
    (project / "clean.py").write_text("changed = 1\n")
    assert check_secrets.main([]) == 0
    assert read == ["clean.py"]


def test_every_entry_of_the_baseline_is_of_a_file_that_is_there_and_is_no_real_key() -> None:
    listed = json.loads(check_secrets.BASELINE.read_text())
    names = set(check_secrets.published(check_secrets.ROOT))
    assert sorted(set(listed["results"]) - names) == []
    made_up_only = {"Secret Keyword", "Hex High Entropy String", "Basic Auth Credentials"}
    assert {item["type"] for items in listed["results"].values() for item in items} <= made_up_only
    assert not [kept for kept in listed["filters_used"] if "verif" in kept["path"]]  # nobody is asked over the network


def test_make_test_and_the_hooks_before_a_commit_run_it() -> None:
    rules = f"\n{(ROOT / 'Makefile').read_text()}"

    def rule(name: str) -> str:
        return rules.split(f"\n{name}:")[1].split("\n\n", maxsplit=1)[0]

    for whole, part in (("test", "check-rest"), ("check-rest", "check-source"), ("check-source", "check_secrets.py")):
        assert part in rule(whole)
    assert "python tests/check_secrets.py" in (ROOT / ".pre-commit-config.yaml").read_text()
