"""The notebooks of `examples/notebooks` run from top to bottom, small, and one of them at its size, on a kernel, to its page."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest

from tests.notebooks import NOTEBOOKS, cells_of, run_here, write_page

BY_NAME = {path.stem: path for path in NOTEBOOKS}


@pytest.fixture(autouse=True)
def unseen() -> Iterator[None]:
    """Pictures are drawn without a display, and closed; those that other tests of this process left are closed before."""
    with mpl.rc_context():
        plt.switch_backend("Agg")
        plt.close("all")
        yield
        plt.close("all")


def pictures() -> list[Any]:
    return [plt.figure(number) for number in plt.get_fignums()]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs_and_says_what_it_needs(path: Path) -> None:
    book = json.loads(path.read_text())
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"]) > 5
    for cell in cells_of(path):
        assert (cell["outputs"], cell["execution_count"]) == ([], None)
        assert not re.search(r"^\s*[%!]", cell["text"], re.MULTILINE), "only Python, so that it runs anywhere"
    first, *others = cells_of(path, "markdown")
    assert first["text"].startswith("# ")
    assert "Needs `pip install" in first["text"]
    for cell in (first, *others):
        for target in re.findall(r"\]\(([^)#:]+\.ipynb)\)", cell["text"]):
            assert (path.parent / target).is_file(), target


def test_a_notebook_runs_on_a_kernel_and_its_page_shows_what_came_out(tmp_path: Path) -> None:
    """Its records and votes are all there; the rehearsal and the last curve, which take longest, are small."""
    root = Path(__file__).resolve().parents[2]
    few = json.dumps({"NUM_PUBLIC": 4, "EPSILONS": [4.0], "REPEATS": 1})
    command = [sys.executable, "-m", "tests.notebooks", "votes", "--out", str(tmp_path), "--set", few]
    paths = {**os.environ, "PYTHONPATH": str(root), "IPYTHONDIR": str(tmp_path), "JUPYTER_PLATFORM_DIRS": "1"}
    run = subprocess.run(command, cwd=root, env=paths, capture_output=True, text=True, timeout=500, check=False)
    assert run.returncode == 0, run.stderr
    page, ran = (tmp_path / "votes.md").read_text(), json.loads((tmp_path / "votes.ipynb").read_text())
    assert all(cell["execution_count"] for cell in ran["cells"] if cell["cell_type"] == "code")
    for cell in cells_of(BY_NAME["votes"]):
        assert f"```python\n{cell['text']}\n```" in page
    (right,) = re.findall(r"^private votes, epsilon 1 +(\d+) of 20 right$", page, re.MULTILINE)
    assert int(right) > 6  # guessing finds 5; the records find about 17, and fewer than 7 with a chance below 1e-7
    assert "epsilon left: 0\n```" in page
    drawn = re.findall(r"^!\[[^]]+\]\((\S+)\)$", page, re.MULTILINE)
    assert len(drawn) == 2
    assert all((tmp_path / picture).read_bytes().startswith(b"\x89PNG") for picture in drawn)
    assert "Warning" not in page  # it would name places of this machine


def test_notes_of_a_clinic_vote_within_one_budget_and_epsilon_buys_answers() -> None:
    small: dict[str, Any] = {"SIZE": 300, "PER_ROOM": 3, "NUM_SLOTS": 20, "NUM_PUBLIC": 4, "EPSILONS": (0.125, 4.0)}
    ran = run_here(BY_NAME["votes"], **small, REPEATS=1)
    assert ran.names["budget"].remaining_epsilon == pytest.approx(0.0)
    assert len(ran.names["results"]) == 12
    assert all(len(result.scores) == 4 for result in ran.names["results"])
    assert len(re.findall(r"of 12 right$", ran.printed, re.MULTILINE)) == 3
    assert re.search(r"^4-shot +raw +\d+%", ran.printed, re.MULTILINE)
    assert "verdict: " in ran.printed
    votes, curve = pictures()
    assert len(votes.axes) == 4
    assert {epsilon: len(shares) for epsilon, shares in ran.names["shares"].items()} == {0.125: 1, 4.0: 1}
    assert [line.get_label() for line in curve.axes[0].lines[2:]] == ["private votes, mean", "no noise", "no records"]


def test_an_officer_decides_epsilon_reads_a_report_and_finds_a_changed_file() -> None:
    ran = run_here(BY_NAME["privacy_officer"], SIZE=100, NUM_SLOTS=10)
    assert "largest epsilon of these: 1\n" in ran.printed
    assert "epsilon 2       7.0%   no\n" in ran.printed  # 6.95 %, rounded up
    assert "approver  Data protection, B. Officer (declared)" in ran.printed
    first, signed, verified, changed = ran.printed.split("$ dpicl ")[1:]
    assert [int(said.rsplit("exit code ", 1)[1]) for said in (first, signed, verified, changed)] == [0, 0, 0, 1]
    assert "signer B. Officer" in verified
    assert "file: it was changed after it was signed" in changed
    assert "sorting: charged epsilon 0.08, but its tickets cost up to 0.79" in changed
    assert str(ran.names["folder"].name) not in ran.printed
    assert not Path(ran.names["folder"].name).exists()
    (belief,) = pictures()
    assert [line.get_label() for line in belief.axes[0].lines] == [
        "before: 1 in 10",
        "before: 1 in 100",
        "before: 1 in 1,000",
    ]
    assert belief.axes[0].lines[1].get_ydata()[2] == pytest.approx(2.67, abs=0.01)  # e / (e + 99)


def test_a_page_leaves_out_the_lines_of_cells_that_hide_them(tmp_path: Path) -> None:
    import nbformat

    book = nbformat.v4.new_notebook()
    for tags, line in (([], "shown = 1"), (["hide-input"], "hidden = 2")):
        cell = nbformat.v4.new_code_cell(line, metadata={"tags": tags})
        cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=f"printed by {line}")]
        book.cells.append(cell)
    write_page(book, "book", tmp_path)
    page = (tmp_path / "book.md").read_text()
    assert "```\nshown = 1\n```" in page
    assert "\nhidden = 2" not in page
    assert page.count("printed by ") == 2


def test_made_up_notes_are_searched_at_no_further_cost() -> None:
    ran = run_here(BY_NAME["rag"], SIZE=300, NUM_TOPICS=2, PER_TOPIC=1)
    budget, documents = ran.names["budget"], ran.names["documents"]
    assert budget.remaining_epsilon < 1e-3
    assert {one.metadata["topic"] for one in documents.documents} == {name for name, _ in documents.topics}
    assert ran.printed.count("nearest note: ") == 4
    made = [document.page_content for document in documents.documents]
    part = sum(any(sign.isdigit() for sign in text) for text in made) / 2  # noise may write one
    assert re.search(rf"made-up notes +2 texts, +{part:.0%} with", ran.printed)
    assert "paid once: epsilon 1 at delta 1e-06, recomputed: True" in ran.printed


def test_the_quickstart_spends_its_budget() -> None:
    ran = run_here(BY_NAME["quickstart"], SIZE=300, NUM_SLOTS=20)
    budget, voter = ran.names["budget"], ran.names["voter"]
    assert budget.remaining_epsilon < 1e-3
    assert voter.share.remaining("query") == 16
    assert [example["label"] for example in ran.names["prompt"].examples] == list(ran.names["LABELS"])
    assert ran.printed.count("\n   -> ") == 8
    assert "asked for epsilon 0.5, " in ran.printed
    assert voter in ran.shown


def test_operators_see_refusals_alerts_and_a_ledger_that_went_back() -> None:
    ran = run_here(BY_NAME["operator"], SIZE=300, NUM_SLOTS=10)
    assert "epsilon left for further components: 1.5" in ran.printed
    assert "a fourth question of Oslo: asked for 1, 0 left" in ran.printed
    assert "a component for epsilon 2: asked for 2, 1.5 left" in ran.printed
    codes = [int(code) for code in re.findall(r"^exit code (\d)$", ran.printed, re.MULTILINE)]
    assert codes == [0, 2, 0, 1, 0, 0, 1]  # made, made again, shown, warned, copied, verified, behind its anchor
    assert "NOT verified" in ran.printed.split("--anchor anchor.json")[-1]
    assert ran.printed.rstrip().endswith("the receipt: LedgerRollbackError")
    assert str(ran.names["folder"].name) not in ran.printed
    assert not ran.names["place"].exists()


def test_the_audit_attacks_prompts_and_votes_and_refutes_half_of_the_noise() -> None:
    small = {"NUM_PROMPTS": 4, "NUM_BUILDS": 2, "NUM_MEMBERS": 2, "NUM_OTHERS": 4, "SIZE": 80}
    ran = run_here(BY_NAME["auditing"], **small)
    leaks, holds = ran.names["leaks"], ran.names["holds"]
    assert (leaks.num_records, leaks.member_scores.shape, leaks.nonmember_scores.shape) == (4, (4, 1), (4, 4))
    assert (holds.num_records, holds.member_scores.shape, holds.nonmember_scores.shape) == (80, (2, 2), (2, 4))
    assert (leaks.claim, holds.claim.epsilon, holds.claim.delta) == (None, 1.0, 1e-5)
    report, planted = ran.names["report"], ran.names["planted"]
    assert report.ok  # a false alarm has a chance of at most 1e-6 per check
    assert any(result.lower_bound is not None for result in report.results)
    assert planted.check.startswith("control, half of the noise")  # refuted with a chance of .99: not asserted
    assert len([shown for shown in ran.shown if isinstance(shown, mpl.figure.Figure)]) == 3
    assert ran.printed.count("NOT PRIVATE") == 2
