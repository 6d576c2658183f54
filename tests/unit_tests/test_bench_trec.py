"""The benchmarks of generation read plain and gzipped JSON lines, whatever their labels are called."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl.options import LogitNoise, Rows

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
ROWS = [
    {"text": f"the {word} number {place}", "label_name": word, "split": "train" if place < 3 else "test"}
    for place in range(5)
    for word in ("card", "boat")
]
LOADERS: dict[str, dict[str, Any]] = {
    "bench_trec": {"min_size": 1, "words": {}},
    "bench_mechanisms": {"min_size": 1, "words": {}},
    "bench_retrieval": {"size": 100, "min_share": 0.0},
}


@pytest.mark.parametrize("is_gzipped", [True, False])
@pytest.mark.parametrize("named", ["label_name", "label", "both"])
@pytest.mark.parametrize("module", LOADERS)
def test_rows_are_read(
    module: str, named: str, is_gzipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    load: Any = pytest.importorskip(module).load
    path = tmp_path / ("data.jsonl.gz" if is_gzipped else "data.jsonl")
    names = {"label_name": ("label_name",), "label": ("label",), "both": ("label_name", "label")}[named]
    with (gzip.open if is_gzipped else open)(path, "wt", encoding="utf-8") as file:
        for row in ROWS:
            shown = {"text": row["text"], "split": row["split"], **dict.fromkeys(names, row["label_name"])}
            file.write(json.dumps(shown) + "\n")
    task = load(path, queries=4, **LOADERS[module])
    assert task.labels == ("boat", "card")
    assert (len(task.train), len(task.test)) == (6, 4)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"label": "x"}, "data.jsonl: line 1: expected a JSON object with text"),
        ({"text": "a", "split": "train"}, "data.jsonl: expected rows of train and test with label"),
        ({"text": "a", "label": "x"}, "data.jsonl: expected rows of train and test with label"),
        ({"text": "a", "label": "x", "split": []}, "data.jsonl: expected rows of train and test with label"),
    ],
)
@pytest.mark.parametrize("module", LOADERS)
def test_what_is_no_data_is_told_in_one_line(
    module: str, line: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    load: Any = pytest.importorskip(module).load
    (tmp_path / "data.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(SystemExit, match=said):
        load(tmp_path / "data.jsonl", queries=4, **LOADERS[module])


@pytest.mark.parametrize("rows", [Rows(slots=80), Rows(units=40)])
def test_a_sweep_changes_one_setting_at_a_time(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from bench_mechanisms import sweep_of

    settings = sweep_of(rows)
    usual = {"noise": LogitNoise("clip_and_blend"), "rows": rows.replace(redraw_every="run")}
    changed = [sum(repr(setting[name]) != repr(usual.get(name)) for name in setting) for setting in settings.values()]
    assert max(changed) == 1
    assert len({repr(setting) for setting in settings.values()} | {repr(usual)}) >= len(settings)
