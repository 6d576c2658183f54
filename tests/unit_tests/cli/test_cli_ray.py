"""`dpicl generate --ray`: what it refuses, what it tells workers, and that the same command goes on."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
from langchain_dpicl.cli.main import main
from langchain_dpicl.exceptions import LedgerUnavailableError
from langchain_dpicl.generation.synthesizer import DemonstrationSynthesizer
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.stores import SQLiteStore
from tests.canary import RECORD
from tests.crews import Crew


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with records and a ledger; workers are of this process, where one data set is one object."""
    records = [{"text": f"{RECORD} {place}", "queue": ("card", "cash")[place % 2]} for place in range(8)]
    (tmp_path / "records.jsonl").write_text("\n".join(map(json.dumps, records)))
    PrivacyBudgetCallbackHandler.create(tmp_path / "ledger.db", epsilon=100.0, delta=1e-3).budget.close()
    monkeypatch.chdir(tmp_path)
    seen: list[PrivateExamples] = []

    def once(*given: Any, **declared: Any) -> PrivateExamples:
        seen[:] = seen or [PrivateExamples(*given, **declared)]
        return seen[0]

    monkeypatch.setattr("langchain_dpicl.privacy.private_examples.PrivateExamples", once)
    return tmp_path


@pytest.fixture
def crews(monkeypatch: pytest.MonkeyPatch) -> list[Crew]:
    """What stands in for Ray, and every crew that was asked for."""
    from langchain_dpicl.distributed import WorkerFactory, _plain

    made: list[Crew] = []

    def executor(name: str, *, options: dict[str, Any], address: Any, num_workers: int, num_gpus: float) -> Crew:
        made.append(Crew(WorkerFactory(name, _plain(options)), num_workers=num_workers))
        made[-1].address = address
        return made[-1]

    monkeypatch.setattr("langchain_dpicl.distributed.RayExecutor", executor)
    return made


OWN = ("--model", "tests.cli_ray_model:MODEL", "--set", "decoding.candidates=3")


def command(*more: str, out: str = "out.json", unnamed: bool = False, model: Sequence[str] = OWN) -> list[str]:
    labels = ["--label-key", "queue", "--label", "card", "--label", "cash", "--public-size", "8"]
    sizes = [
        "--set",
        "rows.units=4",
        "--set",
        "shots_per_label=2",
        "--set",
        "max_tokens=3",
        "--epsilon",
        "8",
        "--delta",
        "1e-4",
    ]
    named = [] if unnamed else ["--set", "data.dataset_id=tickets"]
    return ["generate", "records.jsonl", "--out", out, *labels, *sizes, *model, *named, *more]


class TestARunWithWorkers:
    def test_is_found_again_by_the_same_command(self, folder: Path, crews: list[Crew], capsys: Any) -> None:
        given = ["--ray", "--workers", "3", "--ledger", "ledger.db"]
        assert main(command(*given)) == 0
        assert main(command(*given)) == 0, "the memo of the workers holds what the file holds"
        assert main(command(*given, "--component", "other")) == 2
        assert main(command(*given, out="again.json")) == 0
        first, again = (json.loads((folder / name).read_text()) for name in ("out.json", "again.json"))
        assert first["examples"] == again["examples"]
        assert len(first["examples"]) == 4
        assert [crew.num_workers for crew in crews] == [3, 3, 3]
        budget = PrivacyBudgetCallbackHandler.open(folder / "ledger.db").budget
        assert budget.dangling() == ()
        assert [entry.terms.components[0].name for entry in budget.report().shares] == ["generation-tickets"]
        assert RECORD not in capsys.readouterr().out

    @pytest.mark.parametrize("is_stopped", [False, True])
    def test_leaves_a_file_that_holds_more_than_it_was_told_or_is_of_another_ledger(
        self, folder: Path, crews: list[Crew], capsys: Any, monkeypatch: pytest.MonkeyPatch, *, is_stopped: bool
    ) -> None:
        given = command("--ray", "--ledger", "ledger.db", "--quiet")
        assert main(given) == 0
        held = json.loads((folder / "out.json").read_text())
        if is_stopped:
            written = DemonstrationSynthesizer.stream

            def stopped(self: Any, **options: Any) -> Any:
                yield next(written(self, **options))
                raise KeyboardInterrupt

            monkeypatch.setattr(DemonstrationSynthesizer, "stream", stopped)
        else:
            held["examples"].append({"text": "of a memo that was lost", "queue": "card"})
            (folder / "out.json").write_text(json.dumps(held))
        capsys.readouterr()
        assert main(given) == (130 if is_stopped else 2)
        assert json.loads((folder / "out.json").read_text()) == held
        shown = capsys.readouterr()
        assert "memo of the workers: expected all that 'out.json' holds" in shown.err
        assert ("Interrupted. Tickets that burnt stay charged.\n" in shown.err) == is_stopped
        assert len(json.loads(shown.out)["examples"]) == (1 if is_stopped else 4)
        held["report"]["ledger_id"] = "two"
        (folder / "out.json").write_text(json.dumps(held))
        assert main(given) == 2
        assert "--ledger: expected the one that paid for 'out.json', found 'another'" in capsys.readouterr().err
        assert len(crews[-1].jobs) == 0

    @pytest.mark.parametrize("is_gone", [True, False])
    def test_says_what_stopped_it_beside_why_nothing_is_saved(
        self, folder: Path, crews: list[Crew], capsys: Any, monkeypatch: pytest.MonkeyPatch, *, is_gone: bool
    ) -> None:
        def stopped(self: Any, **options: Any) -> Any:
            yield next(written(self, **options))
            if is_gone:
                (folder / "d").rmdir()
            else:
                (folder / "d" / "out.json").write_text('{"of": "another command"}')
            raise KeyboardInterrupt

        del crews
        (folder / "d").mkdir()
        written = DemonstrationSynthesizer.stream
        monkeypatch.setattr(DemonstrationSynthesizer, "stream", stopped)
        assert main(command("--ray", "--ledger", "ledger.db", "--json", out="d/out.json")) == 130
        shown = capsys.readouterr()
        assert ("No such file" if is_gone else "a file that no other command writes meanwhile") in shown.err
        again = " The same command continues where this one stopped." if is_gone else ""
        assert "dpicl: The result is printed.\n" in shown.err
        assert shown.err.endswith(f"Tickets that burnt stay charged.{again}\n")
        assert len(json.loads(shown.out)["examples"]) == 1

    @pytest.mark.parametrize("quiet", [(), ("--quiet",)])
    @pytest.mark.parametrize("is_full", [True, False])
    def test_says_that_what_is_not_saved_is_not_printed_either(
        self,
        folder: Path,
        crews: list[Crew],
        capsys: Any,
        monkeypatch: pytest.MonkeyPatch,
        *,
        is_full: bool,
        quiet: tuple[str, ...],
    ) -> None:
        def stopped(self: Any, **options: Any) -> Any:
            item = next(written(self, **options))
            (folder / "d").rmdir()
            yield item
            raise KeyboardInterrupt

        del crews
        (folder / "d").mkdir()
        written = DemonstrationSynthesizer.stream
        monkeypatch.setattr(DemonstrationSynthesizer, "stream", stopped)
        reader, writer = os.pipe()
        os.close(reader)
        if is_full:
            os.close(writer)
            writer = os.open("/dev/full", os.O_WRONLY)
        with os.fdopen(writer, "w", encoding="utf-8") as stdout:
            monkeypatch.setattr(sys, "stdout", stdout)
            given = command("--ray", "--ledger", "ledger.db", *quiet, out="d/out.json")
            assert main(given) == (2 if is_full else 130)
        told = "stdout: No space left" if is_full else "The result is neither saved nor printed: nobody reads stdout."
        assert told in (shown := capsys.readouterr().err)
        assert "is printed" not in shown

    def test_tells_workers_names_alone(self, folder: Path, crews: list[Crew]) -> None:
        limits: dict[str, Any] = {"epsilon": 100.0, "delta": 1e-3}
        PrivacyBudgetCallbackHandler.create("anchored.db", anchor="anchor.json", **limits).budget.close()
        places = ("--ledger", "anchored.db", "--anchor", "anchor.json")
        assert main(command("--ray", "head:6379", *places, "--quiet")) == 0
        options = crews[0].setup.options
        assert crews[0].address == "head:6379"
        assert options["settings"]["data"]["file"] == str(folder / "records.jsonl")
        assert options["settings"]["budget"]["ledger"] == str(folder / "anchored.db")
        assert options["settings"]["budget"]["anchor"] == str(folder / "anchor.json")
        assert RECORD not in json.dumps(options)

    def test_may_write_fields_that_are_called_as_keys_are(self, folder: Path, crews: list[Crew]) -> None:
        fields = {"token": "lost", "link": "https://", "user": "me@here"}  # each searched on its own
        words = ", ".join(f'{name} = {{enum = ["{value}"]}}' for name, value in fields.items())
        schema = f'{{type = "object", properties = {{{words}}}, required = {[*fields]}}}'
        (folder / "task.toml").write_text(f"decoding.grammar.json_schema = {schema}")
        given = command("--ray", "--ledger", "ledger.db", "--set", "max_tokens=12", model=("--config", "task.toml"))
        assert main(given) == 0
        (one, *_) = json.loads((folder / "out.json").read_text())["examples"]
        assert json.loads(one["text"]) == fields

    def test_whose_worker_burnt_a_ticket_saves_the_rest(
        self, folder: Path, crews: list[Crew], capsys: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given = ["--ray", "--ledger", "ledger.db", "--set", "rows.redraw_every=3"]

        def lost(number: int, job: Any) -> bool:
            if number == 1:
                work = crews[-1]._hands[0].handle._works
                next(iter(work.values())).blocks.share.reserve("text: 3 tokens on one sample", label=job[0]).burn()
            return False

        import langchain_dpicl.distributed as room

        executor = room.RayExecutor

        def dying(*given: Any, **named: Any) -> Crew:
            crew = executor(*given, **named)
            crew.dies = lost
            return crew

        monkeypatch.setattr(room, "RayExecutor", dying)
        assert main(command(*given, "--quiet")) == 3
        assert "requested 1 more, remaining 0" in capsys.readouterr().err
        assert len(json.loads((folder / "out.json").read_text())["examples"]) == 3

    @pytest.mark.usefixtures("folder", "crews")
    def test_whose_texts_are_all_empty_saves_its_report(self) -> None:
        ends = ("--model", "tests.unit_tests.cli.test_cli:ENDS")
        assert main(command("--ray", "--ledger", "ledger.db", "--quiet", model=ends)) == 3
        assert json.loads(Path("out.json").read_text())["examples"] == []

    def test_is_saved_where_the_ledger_is_out_at_its_end(
        self, folder: Path, crews: list[Crew], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The workers sealed the share, and this process has not read that."""
        written = DemonstrationSynthesizer.stream

        def gone(*_: Any, **__: Any) -> Any:
            raise LedgerUnavailableError("the database went away")

        def then_out(self: Any, **options: Any) -> Any:
            yield from written(self, **options)
            monkeypatch.setattr(SQLiteStore, "head", gone)

        monkeypatch.setattr(DemonstrationSynthesizer, "stream", then_out)
        assert main(command("--ray", "--ledger", "ledger.db", "--quiet")) == 0
        assert len(crews) == 1
        assert len(json.loads((folder / "out.json").read_text())["examples"]) == 4


class TestItRefuses:
    @pytest.mark.parametrize("option", [("--workers", "2"), ("--gpus-per-worker", "1")])
    def test_a_clusters_options_without_a_cluster(self, folder: Path, capsys: Any, option: tuple[str, str]) -> None:
        assert main(command(*option)) == 2
        assert f"{option[0]}: expected none without --ray" in capsys.readouterr().err

    def test_workers_without_a_ledger(self, folder: Path, capsys: Any) -> None:
        assert main(command("--ray")) == 2
        assert "--ledger: expected the ledger" in capsys.readouterr().err

    def test_records_without_a_name_which_could_be_taken_for_others(self, folder: Path, capsys: Any) -> None:
        for empty in ((), ("--component", "")):  # an unset variable of the shell
            assert main(command("--ray", "--ledger", "ledger.db", *empty, unnamed=True)) == 2
            assert "--component: expected a name, or data.dataset_id, with --ledger" in capsys.readouterr().err

    def test_no_workers(self, folder: Path, capsys: Any) -> None:
        assert main(command("--ray", "--workers", "0", "--ledger", "ledger.db")) == 2
        assert "--workers: expected an integer >= 1" in capsys.readouterr().err

    def test_another_adjacency_than_the_ledgers(self, folder: Path, capsys: Any) -> None:
        assert main(command("--ray", "--ledger", "ledger.db", "--set", "budget.adjacency=replace_one")) == 2
        assert "expected add_remove, as of the ledger" in capsys.readouterr().err
