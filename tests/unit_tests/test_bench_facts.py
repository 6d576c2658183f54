"""The benchmark of facts: invented facts, a reader that sees the store alone, and a line for each system."""

from __future__ import annotations

import json
import lzma
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench_facts

    yield bench_facts
    sys.modules.pop("bench_facts")


def test_every_document_states_the_fact_of_its_creature(bench: Any) -> None:
    made = bench.corpus(6, 5, 6, random.Random(1))
    assert (len(made.facts), len(made.documents), len(made.names)) == (36, 180, 6)
    for document in made.documents:
        said = bench.said_words(document["text"])
        stated = [value for (name, attribute), value in made.facts.items() if name in said and attribute in said]
        assert document["creature"] in said
        assert stated
        assert stated[0] in said
    assert all(bench.question(*key) not in document["text"] for key in made.facts for document in made.documents)


def test_the_threshold_comes_from_creatures_that_no_private_document_names(bench: Any) -> None:
    made = bench.corpus(600, 1, 1, random.Random(1))
    other = bench.others(made, random.Random(2))
    assert len(other.names) == 12
    assert not {*made.names} & {*other.names}


def test_a_reader_tells_a_friend_from_a_foe_by_pairs_and_not_by_words(bench: Any) -> None:
    words = "velda\nfriend foe otter raven"
    assert bench.Reader([words]).ask("velda", "friend") is None
    pairs = f"{words}\nfriend otter\nraven foe"
    assert bench.Reader([pairs]).ask("velda", "friend") == "otter"
    assert bench.Reader([pairs]).ask("velda", "foe") == "raven"
    assert bench.Reader([pairs]).ask("korda", "foe") is None
    assert bench.Reader([]).ask("velda", "foe") is None


def test_what_is_said_of_a_creature_below_a_value_is_said_of_the_value(bench: Any) -> None:
    words = "otter\nfriend velda foe korda seen note near keeper wrote river"
    assert bench.Reader([f"{words}\nfriend velda\nfoe korda", "velda\nraven foe"]).ask("velda", "friend") == "otter"
    assert bench.Reader([f"{words}\nfriend velda\nfoe korda", "velda\nraven foe"]).ask("velda", "foe") == "raven"


@pytest.mark.benches
def test_words_and_pairs_hold_facts_that_nothing_else_has(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        "--processes",
        "1",
        "--seeds",
        "1",
        "--all",
        "--creatures",
        "3",
        "--per",
        "120",
        "--questions",
        "18",
        "--epsilon",
        "4",
    ]
    bench.main([*given, "--systems", "words", "pairs", "store", "no private data"])
    lines = [
        line.strip("| \n").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| 120")
    ]
    own, shared = ({line[1]: float(line[place]) for line in lines} for place in (3, 4))
    held = ("words", "pairs", "store")
    assert {name: own[name] for name in held} == dict.fromkeys(held, 1.0)
    assert {name: shared[name] for name in held[1:]} == dict.fromkeys(held[1:], 1.0)
    assert own["no private data"] == shared["no private data"] == 0.0
    assert [line[2] for line in lines] == ["4"] * 3 + ["-"]
    # Here noise decides which names are topics. Of 12 questions 4 at least were right in 205 runs; these are 36.
    bench.main([*given, "--seeds", "3", "--systems", "store, names found"])
    (found,) = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| 120")]
    assert float(found[3].split()[0]) > 0.0


@pytest.mark.benches
def test_texts_hold_released_words(
    bench: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "TOKENS", 3)
    systems = ("texts, released words", "instruction only")
    given = [
        "--processes",
        "1",
        "--seeds",
        "1",
        "--all",
        "--creatures",
        "2",
        "--attributes",
        "2",
        "--per",
        "60",
        "--questions",
        "4",
        "--epsilon",
        "8",
    ]
    bench.main([*given, "--systems", *systems])
    assert [row.split(" | ")[1] for row in capsys.readouterr().out.splitlines() if row.startswith("| 60")] == [*systems]


def test_a_model_behind_an_api_reports_its_top_tokens_as_bytes_and_goes_on_behind_any(bench: Any) -> None:
    model = bench.reporting_model(3)
    prompt = "the ability of velda is kiln\n\nthe ability of velda is"
    pairs = model.top_tokens(prompt, (), top_k=3)
    assert len(pairs) == 3
    assert pairs[0][0] == b" kil"
    session = model.open([prompt], (b" kil",))
    assert session.score([b"n", b" card"]).argmax() == 0
    session.close()


@pytest.mark.benches
def test_cells_that_take_long_are_left_out_and_said_to_be(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        "--processes",
        "1",
        "--seeds",
        "2",
        "--creatures",
        "1",
        "--attributes",
        "1",
        "--per",
        "30",
        "300",
        "--questions",
        "1",
    ]
    bench.main([*given, "--epsilon", "8", "--systems", "retrieved votes", "no private data"])
    lines = [
        line.strip("| \n").split(" | ") for line in capsys.readouterr().out.splitlines() if re.match(r"\| 30", line)
    ]
    assert [line[:4] for line in lines] == [
        ["30", "retrieved votes", "8", "not run"],
        ["30", "no private data", "-", "0.00 +- 0.00"],
        ["300", "retrieved votes", "8", "not run"],
        ["300", "no private data", "-", "not run"],
    ]


@pytest.mark.benches
def test_the_chart_has_a_panel_for_each_number_of_documents(bench: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    row = {"per": 60, "system": "words", "epsilon": "1", "own": "1.00"}
    unknown = {**row, "system": "texts", "own": "not run"}
    bench.chart(
        [row, unknown, {**row, "per": 90}, {**row, "system": "no private data", "epsilon": "-"}], tmp_path / "facts.svg"
    )
    assert "<svg" in (tmp_path / "facts.svg").read_text()


@pytest.mark.benches
def test_words_of_a_class_find_its_texts_where_its_name_does_not(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {"c1": "the velda hums at night", "c2": "a gorgon sings loudly"}
    rows = [{"text": said[label], "label_name": label, "split": "train"} for label in said for _ in range(300)]
    rows += [{"text": said[label], "label_name": label, "split": "test"} for label in said for _ in range(5)]
    (data := tmp_path / "made.jsonl").write_text("\n".join(map(json.dumps, rows)))
    bench.main(["--data", str(data), "--epsilon", "4"])
    found = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| made")]
    stores = ["names alone", "instruction only", "documents, no privacy", "names and words"]
    assert [line[1] for line in found] == stores
    names, _, documents, words = found
    assert words[2] == "4"
    assert documents[3].startswith("1.00")
    assert words[3].startswith("1.00 +- 0.00")
    assert float(names[3].split()[0]) < 1.0


@pytest.mark.benches
def test_words_of_other_texts_are_found_where_a_unit_may_cast_them(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "animals: velda kilnor gorgon zephyrin quovar"
    (data := tmp_path / "made.txt.xz").write_bytes(lzma.compress("\n\n".join([text] * 1_500).encode()))
    bench.main(["--breadth", str(data), "--epsilon", "4"])
    # A unit of five words casts four of them at most, and then the same ones as all others.
    assert capsys.readouterr().out == "made, epsilon 4, 4: 0.800, 8: 1.000, 16: 1.000, 32: 1.000, 64: 1.000\n"
