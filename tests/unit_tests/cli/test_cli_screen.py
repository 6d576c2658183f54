"""What `dpicl` shows of itself: help that fits a screen, one line about a mistake, exit codes, and models by name."""

from __future__ import annotations

import re
import shlex
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl import exceptions
from langchain_dpicl.cli.inputs import PROVIDERS, Model, load_embeddings, load_model
from langchain_dpicl.cli.main import _parser, main
from langchain_dpicl.cli.parser import exit_code_of
from langchain_dpicl.exceptions import ConfigurationError

PAGE = Path(__file__).resolve().parents[3] / "docs" / "cli.md"
SPENDING = ("vote", "label", "generate", "documents", "discover", "evaluate", "choose", "evolve", "train")
COMMANDS = (*SPENDING, "try", "rehearse", "plan", "check", "serve", "mcp", "ledger", "audit", "epsilon")


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    assert stopped.value.code == 0
    return capsys.readouterr().out.splitlines()


def test_the_help_lists_every_command_by_task_on_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, "--help")
    assert len(lines) < 24
    assert max(map(len, lines)) <= 80
    places = [next(place for place, line in enumerate(lines) if line.startswith(title)) for title in TITLES]
    assert places == sorted(places)
    known = next(action.choices for action in _parser([])._actions if action.choices)
    listed = [re.search(rf"\b{name}  +\S", "\n".join(lines)) is not None for name in known]
    assert all(listed)


TITLES = ("before spending", "spend a budget", "serve", "budgets", "trust")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_fits_a_screen_and_points_to_the_rest(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(capsys, command, "--help")
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    everything = shown(capsys, command, "--help-all")
    assert everything == lines or "--help-all" in "\n".join(lines)
    if command in SPENDING:
        assert "private records: plain file" in "\n".join(lines)
        assert "--unit-key FIELD" in "\n".join(lines)
        assert "--dataset-id" not in "\n".join(lines)
        assert "--help-all shows every option and all notes." in " ".join(lines)
        words = " ".join(everything)
        assert "--dataset-id NAME" in words
        assert "`dpicl ledger create` makes a ledger that all runs share" in words
        assert {"--ledger", "--config", "--set", "--json", "--dry-run", "--out"} <= set(words.split())


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("vote r.jsonl --lable card", "--lable: expected an option of dpicl vote, did you mean --label?"),
        ("generate r.jsonl --zzz", "--zzz: expected an option of dpicl generate, `dpicl generate --help` lists them."),
        (
            "ledger create b.db --epsilom 3",
            "--epsilom: expected an option of dpicl ledger create, did you mean --epsilon?",
        ),
        ("vot r.jsonl", "vot: expected a command of dpicl, did you mean vote?"),
        ("xyzzy", "xyzzy: expected a command of dpicl, `dpicl --help` lists them."),
        ("vote --epsilon x", "--epsilon: expected a number, found 'x'."),
        ("vote --max-queries 1.5", "--max-queries: expected a whole number, found '1.5'."),
        ("vote --epsilon", "--epsilon: expected a value, found none."),
        (
            "vote a.jsonl b.jsonl",
            "b.jsonl: expected no further argument. `dpicl --help` lists what the command accepts.",
        ),
        (
            "ledger create b.db --delta 1",
            "--epsilon: expected a value, found none. `dpicl ledger create --help` describes it.",
        ),
        ("try --shots a", "--shots: expected numbers such as 1,2,4,8, found 'a'."),
    ],
)
def test_a_wrong_option_is_answered_by_the_one_line_that_matters(
    typed: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(typed.split())
    assert stopped.value.code == 2
    assert capsys.readouterr() == ("", f"dpicl: {said}\n")


def test_labels_in_one_option_are_refused_with_the_options_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vote", "r.jsonl", "--label", "sport,business", "--query", "a"]) == 2
    said = (
        "--label: expected one label, once per label, found 'sport,business'. Give --label sport --label business ..."
    )
    assert capsys.readouterr().err == f"dpicl: {said}\n"


def test_a_wrong_choice_names_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--method", "votin"])
    said = capsys.readouterr().err
    assert said.startswith("dpicl: --method: expected one of generation, ")
    assert said.endswith("found 'votin'. Did you mean voting?\n")


def test_a_warning_is_one_line_and_none_with_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    checks = tmp_path / "checks.json"
    checks.write_text("[]")

    def warning(_: Any) -> list[Any]:
        warnings.warn("rests on a guess", UserWarning, stacklevel=1)
        return []

    monkeypatch.setattr("langchain_dpicl.cli.main.read_json", warning)
    assert main(["epsilon", str(checks)]) == 0
    assert capsys.readouterr().err == "dpicl: note: rests on a guess\n"


def test_the_commands_of_the_page_plan_what_they_would_spend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = PAGE.read_text()
    (settings,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("roberta").mkdir()
    Path("task.toml").write_text(settings)
    # Documents have no labels.
    bare = re.sub(r"^label.*\n", "", settings, flags=re.MULTILINE)
    Path("notes.toml").write_text(re.sub(r"public_size = .*", "public_size = 6000", bare))
    for name in ("short.txt", "long.txt"):
        Path(name).write_text(f"{{text}} {name}:")
    for name in ("new.txt", "public.txt", "keywords.txt"):
        Path(name).write_text("card\n")
    assert main(["ledger", "create", "budget.db", "--epsilon", "8", "--delta", "1e-6"]) == 0
    commands = re.findall(rf"^dpicl ((?:{'|'.join(SPENDING)}) --config .*)$", page, re.MULTILINE)
    assert {command.split()[0] for command in commands} == {*SPENDING}
    for command in commands:
        capsys.readouterr()
        assert main([*shlex.split(command), "--dry-run"]) == 0, command
        assert "epsilon" in capsys.readouterr().out


def test_every_error_has_the_exit_code_that_the_page_says() -> None:
    refused = {"NoPrivacyBudgetError", "PrivacyBudgetMismatchError", "PrivacyBudgetExceededError"}
    refused |= {"PrivacyBudgetError", "TenantCapExceededError", "SealedShareError"}
    failed = {"ModelCallError", "RunInterruptedError"}
    for name in exceptions.__all__:
        kind: Any = getattr(exceptions, name)
        code = exit_code_of(kind.__new__(kind))
        assert code == (3 if name in refused else 4 if name in failed else 2), name
    page = PAGE.read_text()
    for code, word in (
        (0, "done"),
        (1, "`ledger verify`"),
        (2, "bad input"),
        (3, "the budget"),
        (4, "the model"),
        (130, "Ctrl-C"),
    ):
        assert re.search(rf"^\| {code} \| {re.escape(word)}", page, re.MULTILINE), code


@pytest.mark.usefixtures("here")
class TestAModelByTheNameOfItsProvider:
    @pytest.fixture
    def here(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
        monkeypatch.chdir(tmp_path)

    def test_is_made_by_langchain(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("langchain")
        openai = pytest.importorskip("langchain_openai")
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        assert isinstance(load_model(Model(name="openai:gpt-4o")), openai.ChatOpenAI)
        assert isinstance(load_embeddings("openai:text-embedding-3-small"), openai.OpenAIEmbeddings)

    def test_whose_package_is_missing_is_explained_by_the_line_that_installs_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("langchain")
        monkeypatch.setitem(sys.modules, "langchain_groq", None)
        with pytest.raises(ConfigurationError, match=r"^--model: .*pip install.*langchain-groq"):
            load_model(Model(name="groq:llama"))
        monkeypatch.setitem(sys.modules, "langchain", None)
        monkeypatch.setitem(sys.modules, "langchain.chat_models", None)
        with pytest.raises(ConfigurationError, match=r"^--model: expected the package langchain"):
            load_model(Model(name="groq:llama"))

    def test_that_its_provider_refuses_is_explained_on_one_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("langchain")
        pytest.importorskip("langchain_openai")
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        monkeypatch.delenv("OPENAI_ADMIN_KEY", raising=False)
        with pytest.raises(
            ConfigurationError, match=r"^--model: .* found 'openai:gpt-4o'\. .*OPENAI_API_KEY"
        ) as caught:
            load_model(Model(name="openai:gpt-4o"))
        assert "\n" not in str(caught.value)

    def test_gives_way_to_a_module_of_the_current_folder(self) -> None:
        Path("meta.py").write_text("llm = 5\n")
        assert "meta" in PROVIDERS
        assert load_model(Model(name="meta:llm")) == 5
