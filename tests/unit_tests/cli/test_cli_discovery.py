"""`dpicl discover`: what it says before and after, and what it never says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl import ReleasedCounts, discovery, verify_report
from langchain_dpicl.cli.main import main
from langchain_dpicl.cli.vote import _counts_text
from langchain_dpicl.released import ReleasedWords
from tests.other_shells import OtherShells

CANARY = "canary-7f3a"
TERMS = ("--epsilon", "1", "--delta", "1e-9")
"""Delta bounds the chance that what one unit alone has is released, which tests here say does not happen."""
USUAL = ("--delta", "1e-6")


@pytest.fixture
def films(tmp_path: Path) -> Path:
    path = tmp_path / "films.jsonl"
    names = ["Christopher Nolan"] * 150 + ["GRETA gerwig"] * 100 + [CANARY]
    rows = [json.dumps({"director": name, "user": str(place % 200)}) for place, name in enumerate(names)]
    path.write_text("\n".join(rows))
    return path


def discover(films: Path, *more: str) -> int:
    return main(["discover", str(films), *TERMS, *more])


def test_unknown_values_are_found_saved_and_recomputed(
    films: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert discover(films, "--by", "director", "--out", str(out)) == 0
    found, said = ReleasedCounts.load(out), capsys.readouterr()
    assert found.values == ("christopher nolan", "greta gerwig")
    assert verify_report(out.read_text()).ok
    assert verify_report(found).epsilon <= 1.0
    assert "from a noisy count of 22 on" in said.out
    assert f"{found.counts['greta gerwig']:>11,}" in said.out
    assert CANARY not in said.out + said.err + out.read_text()


@pytest.mark.parametrize("more", [(), ("--words",)])
def test_a_field_that_no_record_has_is_named_by_its_flag(
    films: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    assert discover(films, "--by", "directr", *more, "--out", str(tmp_path / "out.json")) == 2
    said = capsys.readouterr().err
    assert "expected text under 'directr'; a record has none. If it has another name, give --by." in said
    assert "`dpicl check FILE --text-key directr` with the same declaration shows them to the owner." in said
    assert CANARY not in said


def test_declared_values_and_units_are_counted(films: Path, tmp_path: Path) -> None:
    one, two, three = (str(tmp_path / name) for name in ("one.json", "two.json", "three.json"))
    assert discover(films, "--by", "director", "--value", "Greta Gerwig", "--value", "no", "--out", one, "--quiet") == 0
    assert ReleasedCounts.load(one).values == ("Greta Gerwig", "no")
    assert discover(films, "--text-key", "director", "--unit-key", "user", "--out", two, "--quiet") == 0
    assert abs(ReleasedCounts.load(two).public_size(side="middle") - 200) < 40
    assert discover(films, "--by", "director", "--keep-case", "--max-values", "2", "--out", three, "--quiet") == 0
    assert ReleasedCounts.load(three).values == ("Christopher Nolan", "GRETA gerwig")


def test_a_value_that_nobody_holds_has_no_lower_bound_above_zero(films: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert discover(films, "--by", "director", "--value", "no", "--value", "few", "--out", str(out), "--quiet") == 0
    found = dataclasses.replace(ReleasedCounts.load(out), counts={"no": 2, "few": 90})
    _, none, few = _counts_text(found)
    assert none.split() == ["no", "2", "0"]
    assert few.split() == ["few", "90", str(found.public_size()["few"])]
    assert found.public_size()["no"] == 1


def test_a_dry_run_reads_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more in (("--dry-run", "--out", str(tmp_path / "out.json")), ()):
        assert discover(tmp_path / "missing.jsonl", "--by", "director", *USUAL, *more) == 0
        said = capsys.readouterr().out
        assert "one of a single unit with at most 6.1e-07" in said
        assert "spent    nothing: this is a plan; --out FILE without --dry-run releases" in said
    assert discover(tmp_path / "missing.jsonl", "--by", "director", *USUAL, "--epsilon", "1.1", "--dry-run") == 0
    assert "one of a single unit with at most 4.7e-07" in capsys.readouterr().out  # 4.624e-07, rounded up
    assert list(tmp_path.iterdir()) == []


def test_a_size_that_nobody_declared_does_not_read_like_a_count(
    films: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert discover(films, "--text-key", "director", "--delta", "3e-7", "--out", str(out)) == 0
    assert '"public_size": 330000' in out.read_text()
    assert "reads like a count" not in capsys.readouterr().err


NAMES = ("--text-key", "user", "--label-key", "director", "--label", "Christopher Nolan", "--label", "GRETA gerwig")


@pytest.mark.parametrize("what", [("--by", "director"), (*NAMES, "--label", CANARY)])
def test_a_dry_run_has_the_plan_of_the_run_with_a_part_of_the_budget(
    what: tuple[str, ...], films: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (config := tmp_path / "task.toml").write_text("epsilon = 0.5\n[budget]\nepsilon = 1.0\ndelta = 1e-6\n")
    asked = ["discover", str(films), *what, "--config", str(config)]
    assert main([*asked, "--dry-run", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert main([*asked, "--out", str(tmp_path / "out.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["report"]["plan"] == planned


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--delta", "0", "--by", "director", "--value", "no"), "--public-size: expected the declared number of units"),
        (("--by", "director", "--public-size", "1000000000"), "delta: expected at most 1/(10 * public_size)"),
    ],
)
def test_a_dry_run_is_refused_as_the_run_is(
    more: tuple[str, ...], said: str, films: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for last in (("--dry-run",), ("--out", str(tmp_path / "out.json"))):
        assert discover(films, *more, *last) == 2
        assert said in capsys.readouterr().err


def test_nothing_found_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path := tmp_path / "one.jsonl").write_text(json.dumps({"director": CANARY}))
    assert discover(path, "--by", "director", "--out", str(tmp_path / "out.json")) == 0
    said = capsys.readouterr().out
    assert "nothing reached the threshold" in said
    assert CANARY not in said


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--by", "nobody"), "text under 'nobody'"),
        (("--value", "a"), "field"),
        (("--by", "director", "--label-key", "director", "--label", "a"), "without --by"),
        (("--by", "director", "--max-values", "0"), "max_values"),
        (("--by", "director", "--public-size", "1000000000"), "delta"),
        (("--by", "director", "--set", "data.records_per_unit=0"), "records_per_unit"),
    ],
)
def test_faults_are_explained_without_a_record(
    more: tuple[str, ...], said: str, films: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert discover(films, *more, "--out", str(tmp_path / "out.json")) == 2
    err = capsys.readouterr().err
    assert said in err
    assert CANARY not in err


def test_what_is_paid_for_is_printed_where_it_cannot_be_saved(
    films: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: ReleasedCounts, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ReleasedCounts, "save", full)
    assert discover(films, "--by", "director", "--out", str(tmp_path / "out.json"), "--quiet") == 2
    assert ReleasedCounts.from_json(capsys.readouterr().out).values == ("christopher nolan", "greta gerwig")


def test_the_noise_that_is_asked_for_is_used(films: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more in (("--dry-run",), ("--out", str(tmp_path / "out.json"))):
        assert discover(films, "--by", "director", "--value", "no", "--set", "noise.multiplier=50", *more) == 0
        assert "scale 50.000" in capsys.readouterr().out


def test_a_key_that_a_flag_stands_for_is_refused(films: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert discover(films, "--by", "director", "--dry-run", "--set", "max_values=5") == 2
    assert "--max-values" in capsys.readouterr().err


def test_the_same_component_is_not_counted_twice(films: Path, other_shells: OtherShells, tmp_path: Path) -> None:
    ledger, out = str(tmp_path / "ledger.db"), tmp_path / "out.json"
    assert main(["ledger", "create", ledger, "--epsilon", "4", "--delta", "1e-6"]) == 0
    paid = ("--by", "director", "--value", "no", "--ledger", ledger, "--component", "mine")
    first = other_shells.run("discover", str(films), *TERMS, *paid, "--out", str(out))
    assert "  mine " in first.stdout, first.stderr
    kept = out.read_text()
    again = other_shells.run("discover", str(films), *TERMS, *paid, "--out", str(out))
    assert (again.returncode, out.read_text()) == (2, kept)
    assert "--out: expected a file that does not exist yet" in again.stderr
    assert "--checkpoint" not in again.stderr, "discover has none"
    again = other_shells.run("discover", str(films), *TERMS, *paid, "--out", str(tmp_path / "again.json"))
    assert again.returncode == 3
    assert "remaining 0" in again.stderr


@pytest.mark.parametrize("delta", [(), ("--delta", "1e-8")])
def test_a_ledger_gives_the_delta_and_the_size(films: Path, tmp_path: Path, delta: tuple[str, ...]) -> None:
    ledger, out = str(tmp_path / "ledger.db"), str(tmp_path / "out.json")
    assert main(["ledger", "create", ledger, "--epsilon", "4", "--delta", "1e-6"]) == 0
    paid = ("--ledger", ledger, "--component", "mine", "--epsilon", "1", *delta, "--out", out)
    assert main(["discover", str(films), "--text-key", "director", *paid]) == 0


def test_a_dry_run_knows_the_field_of_by_as_the_declaration_of_the_ledger_does(
    films: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger, out = str(tmp_path / "ledger.db"), ("--out", str(tmp_path / "out.json"))
    assert main(["ledger", "create", ledger, "--epsilon", "4", "--delta", "1e-6"]) == 0
    paid = [
        "discover",
        str(films),
        "--ledger",
        ledger,
        "--dataset-id",
        "films",
        "--epsilon",
        "1",
        "--public-size",
        "300",
    ]
    director = [*paid, "--by", "director", "--value", "no"]
    assert main([*director, "--component", "one", *out]) == 0
    assert main([*director, "--component", "two", "--dry-run"]) == 0
    user = [*paid, "--by", "user", "--value", "no", "--component", "two"]
    assert main([*user, "--dry-run"]) == 3
    advice = "--by declares its field as the text, unless data.fields names it from the first release on."
    assert advice in capsys.readouterr().err
    assert main([*user, "--out", str(tmp_path / "other.json")]) == 3
    assert main([*user, "--dry-run", "--text-key", "director", "--set", "data.fields=['user']"]) == 3
    said = capsys.readouterr().err
    assert "found another in ['fields']." in said
    assert advice not in said


def test_a_dry_run_without_a_size_compares_the_one_of_the_run_with_the_ledger(films: Path, tmp_path: Path) -> None:
    ledger, out = str(tmp_path / "ledger.db"), ("--out", str(tmp_path / "out.json"))
    assert main(["ledger", "create", ledger, "--epsilon", "4", "--delta", "1e-6"]) == 0
    paid = ["discover", str(films), "--text-key", "director", "--ledger", ledger, "--epsilon", "1"]
    first = [*paid, "--dataset-id", "films"]
    assert main([*first, "--component", "one", *out]) == 0
    assert main([*first, "--component", "two", "--dry-run"]) == 0
    sized = [*paid, "--dataset-id", "sized", "--component", "three"]
    assert main([*sized, "--public-size", "300", "--out", str(tmp_path / "sized.json")]) == 0
    other = [*sized[:-1], "four"]
    assert main([*other, "--dry-run"]) == main([*other, "--out", str(tmp_path / "other.json")]) == 3


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    path = tmp_path / "notes.jsonl"
    rows = [{"text": "the velda hums", "kind": "old", "user": f"o{place}"} for place in range(300)]
    rows += [{"text": "a gorgon sings", "kind": "new", "user": f"n{place}"} for place in range(300)]
    rows += [{"text": f"{CANARY} canaryword", "kind": "new", "user": "loud"}] * 300
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_words_are_found_for_each_label_saved_and_recomputed(
    notes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, labels = tmp_path / "words.json", ("--label-key", "kind", "--label", "old", "--label", "new")
    paid = ("--words", "--pairs", "--unit-key", "user", *labels, "--out", str(out))
    assert main(["discover", str(notes), "--epsilon", "2", "--delta", "1e-9", *paid]) == 0
    found, said = ReleasedWords.load(out), capsys.readouterr()
    assert {label: set(words) for label, words in found.by_label.items()} == {
        "old": {"velda", "hums"},
        "new": {"gorgon", "sings"},
    }
    assert set(found.pairs) == {"velda hums", "gorgon sings"}
    assert verify_report(out.read_text()).ok
    assert "Read these words" in said.out
    assert "old: 1 pairs: velda hums" in said.out
    assert "canary" not in said.out + said.err + out.read_text()


def test_denied_words_of_a_public_file_are_not_found(notes: Path, tmp_path: Path) -> None:
    (denied := tmp_path / "denied.txt").write_text("Velda\n\n")
    out = tmp_path / "words.json"
    assert discover(notes, "--words", "--unit-key", "user", "--deny", str(denied), "--out", str(out), "--quiet") == 0
    assert set(ReleasedWords.load(out).words) == {"hums", "gorgon", "sings"}
    assert discover(notes, "--words", "--deny", str(notes), "--out", str(out)) == 2


def test_a_dry_run_of_words_reads_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert discover(tmp_path / "missing.jsonl", "--words", "--dry-run", *USUAL) == 0
    assert (
        "a word of 87 units with a chance of 95 %, one of a single unit with at most 5e-07" in capsys.readouterr().out
    )
    labels = ("--label-key", "kind", "--public-size", "old=1000", "--public-size", "new=1000")
    assert discover(tmp_path / "missing.jsonl", "--words", *labels) == 0
    assert "each of 2 labels by itself" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_no_word_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path := tmp_path / "one.jsonl").write_text(json.dumps({"text": CANARY}))
    assert discover(path, "--words", "--out", str(tmp_path / "out.json")) == 0
    said = capsys.readouterr().out
    assert "no word reached the threshold" in said
    assert "canary" not in said


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--pairs",), "--pairs, --deny"),
        (("--words", "--keep-case"), "--value, --keep-case"),
        (("--words", "--by", "text", "--value", "velda"), "--value, --keep-case"),
        (("--words", "--by", "nobody"), "text under 'nobody'"),
        (("--words", "--max-values", "0"), "max_values"),
    ],
)
def test_faults_of_words_are_explained_without_a_record(
    more: tuple[str, ...], said: str, notes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert discover(notes, *more, "--out", str(tmp_path / "out.json")) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "canary" not in err


@pytest.mark.parametrize(("fields", "said"), [((), "declaration"), (("--set", "data.fields=['kind']"), "velda")])
def test_a_declared_field_is_counted_on_the_data_set_of_other_components(
    notes: Path, tmp_path: Path, other_shells: OtherShells, fields: tuple[str, ...], said: str
) -> None:
    ledger, out = str(tmp_path / "ledger.db"), str(tmp_path / "out.json")
    assert main(["ledger", "create", ledger, "--epsilon", "4", "--delta", "1e-6"]) == 0
    paid = ("--ledger", ledger, "--delta", "4e-7", "--set", "data.dataset_id=notes", *fields)
    assert discover(notes, "--by", "kind", *paid, "--component", "kinds", "--out", out) == 0
    named = ("--component", "words", "--out", str(tmp_path / "words.json"))
    words = other_shells.run("discover", str(notes), *TERMS, "--words", *paid, *named)
    assert said in words.stdout + words.stderr


def test_words_that_were_released_before_a_stop_are_saved(
    notes: Path,
    tmp_path: Path,
    other_shells: OtherShells,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger, out, real = str(tmp_path / "ledger.db"), tmp_path / "words.json", discovery.release_words
    assert main(["ledger", "create", ledger, "--epsilon", "4", "--delta", "1e-6"]) == 0
    labels = ("--label-key", "kind", "--label", "old", "--label", "new", "--public-size", "1000")
    terms = ("--epsilon", "2", "--unit-key", "user", "--ledger", ledger, "--component", "words")
    paid = ("discover", str(notes), "--words", "--pairs", *labels, *terms)

    def stops_in_pairs(*given: Any, **asked: Any) -> Any:
        if asked["plan"].rule.kind == "unit_pairs":
            raise KeyboardInterrupt
        return real(*given, **asked)

    monkeypatch.setattr(discovery, "release_words", stops_in_pairs)
    assert main([*paid, "--out", str(out)]) == 130
    assert set(ReleasedWords.load(out).by_label["old"]) == {"velda", "hums"}
    said = capsys.readouterr().err
    assert f"What was released is saved in {out}. The same command with another --out releases what is left," in said
    again = other_shells.run(*paid, "--out", str(rest := tmp_path / "rest.json"))
    assert again.returncode == 0, again.stderr
    assert set(ReleasedWords.load(rest).by_label["new"]) == {"gorgon", "sings"}


def test_a_stop_before_anything_is_released_saves_nothing(
    films: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(discovery, "release_counts", stopped)
    for more in (("--by", "director"), ("--by", "director", "--json")):
        assert discover(films, *more, "--out", str(tmp_path / "out.json")) == 130
        said = capsys.readouterr()
        assert "Nothing was released. A new run starts over, on a budget of its own." in said.err
        assert "noisy count  at least" not in said.out
    ledger = str(tmp_path / "ledger.db")
    assert main(["ledger", "create", ledger, "--epsilon", "4", "--delta", "1e-6"]) == 0
    kept = ("--ledger", ledger, "--component", "kept", "--delta", "1e-7")
    assert discover(films, "--by", "director", *kept, "--out", str(tmp_path / "out.json")) == 130
    assert "Nothing was released. The same command releases what is left, if anything is." in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()
