"""The `dpicl` command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from langchain_dpicl.cli import main

CHECKS = {
    "checks": [
        {
            "id": "A",
            "mechanisms": [{"type": "gaussian", "noise_multiplier": 1.0, "count": 1}],
            "adjacency": "any",
            "delta": 1e-5,
        },
        {"id": "B", "mechanisms": [{"type": "pure", "eps": 0.5, "count": 10}], "adjacency": "any", "delta": 1e-6},
    ]
}


@pytest.fixture
def checks_file(tmp_path: Path) -> Path:
    path = tmp_path / "checks.json"
    path.write_text(json.dumps(CHECKS))
    return path


def test_epsilon_prints_id_and_upper_bound(checks_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["epsilon", str(checks_file)]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()][1][0] == "A"


def test_epsilon_json_is_exactly_a_list_of_id_and_epsilon(
    checks_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["epsilon", str(checks_file), "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert [sorted(row) for row in out] == [["epsilon", "id"]] * 2
    assert out[0]["epsilon"] == pytest.approx(4.3772, abs=1e-3)
    assert out[1]["epsilon"] == pytest.approx(5.0, abs=1e-2)


@pytest.mark.parametrize(
    "content",
    [
        "not json",
        '{"checks": [{"id": "x"}]}',
        '[{"id": "x", "mechanisms": [{"type": "magic"}], "adjacency": "any", "delta": 1e-5}]',
    ],
)
def test_a_broken_file_fails_clearly(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.json"
    path.write_text(content)
    assert main(["epsilon", str(path)]) == 2
    assert capsys.readouterr().err.startswith("dpicl: ")
    assert main(["epsilon", str(tmp_path / "missing.json")]) == 2


def test_plan_shows_noise_calls_money_and_a_recommendation(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--epsilon", "1", "--delta", "1e-6", "--public-size", "12000", "--max-tokens", "20"]
    assert main([*arguments, "--price-in", "0.5", "--price-out", "1.5", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["plan"]["epsilon"] <= 1.0
    assert out["cost"]["private_calls"] == 20 * 40
    assert out["cost"]["money"] > 0
    assert out["recommendation"] == out["options"][0]
    assert {"signal_to_noise", "right_token_prob", "empty_slot_prob"} <= set(out["signal"])


def test_plan_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--public-size", "card=500", "--public-size", "transfer=700"]
    assert (
        main(
            [
                "plan",
                "--epsilon",
                "2",
                "--delta",
                "1e-6",
                *sizes,
                "--max-tokens",
                "10",
                "--shots-per-slot",
                "2",
                "--no-compare",
            ]
        )
        == 0
    )
    text = capsys.readouterr().out
    for word in ("noise", "card: 500 declared units", "transfer: 700", "empty slots", "private + "):
        assert word in text


@pytest.mark.parametrize("sizes", [["x"], ["a=b"], ["10", "a=10"], ["20"]])
def test_plan_refuses_unreadable_or_too_small_sizes(sizes: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    given = [part for size in sizes for part in ("--public-size", size)]
    assert main(["plan", "--epsilon", "1", "--delta", "1e-6", *given, "--no-compare"]) == 2
    assert "dpicl: " in capsys.readouterr().err


class TestGenerate:
    def run(self, path: Path, out: Path, *more: str) -> int:
        given = [
            "--label-key",
            "topic",
            "--label",
            "card",
            "--label",
            "transfer",
            "--public-size",
            "card=150",
            "--public-size",
            "transfer=150",
        ]
        design = ["--epsilon", "3", "--delta", "1e-6", "--max-tokens", "5"]
        model = ["--model", "tests.engines:ENGINE"]
        return main(["generate", str(path), "--out", str(out), *given, *design, *model, *more])

    @pytest.fixture(params=["jsonl", "csv"])
    def records(self, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
        rows = [("my card was declined", "card"), ("my transfer is late", "transfer")] * 150
        path = tmp_path / f"records.{request.param}"
        if request.param == "jsonl":
            path.write_text("".join(json.dumps({"text": text, "topic": topic}) + "\n" for text, topic in rows))
        else:
            path.write_text("text,topic\n" + "".join(f"{text},{topic}\n" for text, topic in rows))
        return path

    def test_records_in_demonstrations_and_report_out(
        self, records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "released.json"
        assert self.run(records, out) == 0
        released = json.loads(out.read_text())
        assert [example["topic"] for example in released["examples"]] == ["card", "transfer"]
        assert released["report"]["epsilon"] <= 3.0
        assert "add_remove" in capsys.readouterr().out

    def test_a_broken_line_is_reported_without_its_content(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "records.jsonl"
        path.write_text('{"text": "CANARY"\n')
        assert self.run(path, tmp_path / "out.json") == 2
        captured = capsys.readouterr()
        assert "CANARY" not in captured.out + captured.err
        assert "broken line" in captured.err

    def test_an_unknown_model_is_refused(
        self, records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.run(records, tmp_path / "out.json", "--model", "nowhere:nothing") == 2
        assert "--model" in capsys.readouterr().err
