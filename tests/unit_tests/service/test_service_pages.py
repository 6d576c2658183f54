"""The settings files of the documentation and of examples/ are those of a service that starts and answers."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from langchain_dpicl.cli.main import _parser, main
from langchain_dpicl.cli.serve import read_app, running_of
from langchain_dpicl.service.service import DOORS
from langchain_dpicl.service.web import create_app
from tests.served import Client, new_folder, running

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "examples" / "README.md").read_text()
PRODUCTION = (ROOT / "docs" / "production.md").read_text()


def printed_by(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


async def test_the_example_answers_as_its_readme_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("service.toml", "bank_questions.py"):
        shutil.copy(ROOT / "examples" / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    lines = re.search(r"^## A service.*?```bash\n(.*?)```\n\n```bash\n(.*?)```", README, re.MULTILINE | re.DOTALL)
    assert lines is not None
    _, records, export, create, serve = lines[1].splitlines()
    code = records.removeprefix("python -c '").partition("' > ")[0]
    (tmp_path / "questions.jsonl").write_text(printed_by(code))
    for pair in export.split()[1:]:
        monkeypatch.setenv(*pair.split("="))
    assert main(create.split()[1:]) == 0
    assert serve == "dpicl serve --config service.toml"
    running = running_of(read_app(Path("service.toml"), None), tmp_path)
    try:
        client = Client(create_app(running))
        key = re.search(r"Bearer ([\w-]+)", lines[2])
        body = re.search(r"-d '(.*?)'", lines[2])
        assert key is not None
        assert body is not None
        answer = (await client.send("POST", "/ask", key[1], json=json.loads(body[1]))).json()
        await client.http.aclose()
    finally:
        running.close()
    assert answer["source"] == "release"
    assert answer["queries_left"] == 199


def test_the_noise_of_the_page_is_not_below_that_of_its_plan(capsys: pytest.CaptureFixture[str]) -> None:
    (shown,) = re.findall(r"^dpicl (plan .*)$", PRODUCTION, re.MULTILINE)
    assert main([*shlex.split(shown), "--no-compare", "--json"]) == 0
    least = json.loads(capsys.readouterr().out)["plan"]["noise_multiplier"]
    (stated,) = re.findall(r"^noise = {multiplier = (.*?)}", PRODUCTION, re.MULTILINE)
    assert least <= float(stated) <= 1.02 * least


def test_the_settings_of_the_page_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shown,) = re.findall(r"^```toml\n(ledger.*?)^```", PRODUCTION, re.MULTILINE | re.DOTALL)
    (tmp_path / "app.toml").write_text(shown)
    app = read_app(tmp_path / "app.toml", None)
    assert {*app.doors} == {"ask"}
    assert app.doors["ask"].model.private_process
    assert {*tomllib.loads(shown)} == {"ledger", "service", "operator", "tenants", "model", "data", "ask"}


@pytest.mark.parametrize("source", ["page", "containers"])
def test_a_service_of_the_settings_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    (shown,) = re.findall(r"^```toml\n(ledger.*?)^```", PRODUCTION, re.MULTILINE | re.DOTALL)
    text = shown if source == "page" else (ROOT / "deploy" / "app.toml").read_text()
    config = new_folder(tmp_path, monkeypatch)
    text = re.sub(r"^(ledger|anchor|private_process|unit_key) = .*$", "", text, flags=re.MULTILINE)
    text = re.sub(r'^name = ".*?"', 'name = "tests.served:MODEL"', text, flags=re.MULTILINE)
    config.write_text(re.sub(r'^file = ".*?"', 'file = "messages.jsonl"', text, flags=re.MULTILINE))
    (tmp_path / "messages.jsonl").write_text('{"text": "my card", "queue": "card"}\n' * 40)
    create = re.search(r"^dpicl (ledger create budget.db .*) --anchor", PRODUCTION, re.MULTILINE)
    assert create is not None
    assert main(create[1].split()) == 0
    with running(config, "budget.db") as found:
        assert found.service.doors["ask"].queries_left == 200


def test_the_settings_of_the_containers_are_read() -> None:
    app = read_app(ROOT / "deploy" / "app.toml", None)
    assert ({*app.doors}, {*app.tenants}) == ({"ask"}, {"acme"})
    assert app.operator is not None


def test_the_page_on_agents_starts_the_command_by_options_that_it_has() -> None:
    page = (ROOT / "docs" / "agents.md").read_text().partition("## Agents in other programs")[2].partition("\n## ")[0]
    (shown,) = re.findall(r"^```json\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (over_http,) = re.findall(r"^dpicl (mcp .*)$", page, re.MULTILINE)
    command = json.loads(shown)["mcpServers"]["private-answers"]
    assert command["command"] == "dpicl"
    for arguments in (command["args"], over_http.split()):
        parsed = _parser(arguments).parse_args(arguments)
        assert parsed.config == Path("service.toml")
    assert (parsed.http, parsed.port) == (True, 8001)
    assert {*re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)} == {*DOORS, "demonstrations", "budget"}


def test_the_page_lists_every_refusal() -> None:
    source = "".join((ROOT / "langchain_dpicl" / "service" / name).read_text() for name in ("service.py", "web.py"))
    codes = set(re.findall(r'RefusedError\(\s*(\d{3}), "(\w+)"', source))
    rows = re.findall(r"^\| (\d{3}) \| (`\w+`(?:, `\w+`)*) \|", PRODUCTION, re.MULTILINE)
    listed = {(status, code) for status, words in rows for code in re.findall(r"\w+", words)}
    assert codes == listed
