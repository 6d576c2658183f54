"""deploy/: what its page promises stands in its files. Nothing here runs Docker."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from langchain_dpicl import DPVotingRunnable
from langchain_dpicl.cli import serve

REPOSITORY = Path(__file__).parents[2]
DEPLOY = REPOSITORY / "deploy"


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return found


@pytest.fixture(scope="module")
def dockerfile() -> list[str]:
    text = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text())
    return [line for line in text.splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize("name", ["Dockerfile", "compose.yaml", "README.md"])
def test_what_cannot_run_here_says_so(name: str) -> None:
    assert "not run here" in (DEPLOY / name).read_text().casefold()


def test_only_the_service_and_the_model_can_see_a_prompt(compose: dict[str, Any]) -> None:
    on = {name: set(service["networks"]) for name, service in compose["services"].items()}
    assert {name for name, networks in on.items() if "prompts" in networks} == {"service", "model"}
    assert on["model"] == {"prompts"}
    assert {name for name, networks in on.items() if "ledger" in networks} == {"service", "ledger", "owner"}
    assert {name for name, network in compose["networks"].items() if network.get("internal")} == {"prompts", "ledger"}


def test_no_proxy_of_the_host_sees_a_prompt(compose: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    environment = compose["services"]["service"]["environment"]
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://proxy.example:3128")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, environment.get(name, "localhost"))
    client = httpx.Client()
    assert client._transport_for_url(httpx.URL(environment["MODEL_URL"])) is client._transport
    assert client._transport_for_url(httpx.URL("http://other.example")) is not client._transport


@pytest.mark.loopback
def test_no_proxy_of_the_host_is_asked_whether_a_container_is_healthy(
    compose: dict[str, Any], dockerfile: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's network has no way out, and a proxy's own loopback is another."""
    asks = {"service": json.loads(next(line for line in dockerfile if line.startswith("HEALTHCHECK")).split("CMD")[1])}
    asks["model"] = compose["services"]["model"]["healthcheck"]["test"][1:]
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, (_, *options) in asks.items():
        for status in ("200 OK", "503 Out"):
            with socket.create_server(("127.0.0.1", 0)) as door:
                door.settimeout(20)
                port = str(door.getsockname()[1])
                with subprocess.Popen(
                    [sys.executable, *(option.replace("8000", port) for option in options)]
                ) as asking:
                    came, _ = door.accept()
                    with came:
                        assert came.recv(1000).startswith(b"GET /health "), name
                        came.sendall(f"HTTP/1.0 {status}\r\n\r\n".encode())
                    assert (asking.wait(60) == 0) == (status == "200 OK"), name


def test_docker_waits_until_the_workers_have_closed_the_ledger(compose: dict[str, Any]) -> None:
    waits = compose["services"]["service"]["stop_grace_period"]
    assert int(waits.removesuffix("s")) >= serve._GRACE + serve._CLOSING + 5


def test_one_door_is_open_and_only_to_this_host(compose: dict[str, Any]) -> None:
    doors = {name: service["ports"] for name, service in compose["services"].items() if "ports" in service}
    assert doors == {"service": ["127.0.0.1:8000:8000"]}


def test_every_container_is_tight(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "privileged" not in service, name
        for volume in service.get("volumes", []):
            written = "ledger:/var/lib/postgresql/data", "anchor:/anchor"
            assert volume.endswith(":ro") or volume in written, (name, volume)


def test_nothing_runs_as_root(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        if "build" not in service:  # the image of the others says it, as another test reads
            assert service["user"] in {"postgres", "10001:10001"}, name
    # Libraries of the model ask for a name, which its user has in no list of the image.
    assert compose["services"]["model"]["environment"]["USER"]


def test_a_command_inside_the_ledger_has_the_password_that_its_server_asks_for(compose: dict[str, Any]) -> None:
    page = (DEPLOY / "README.md").read_text().replace("\\\n", " ")
    commands = [line for line in page.splitlines() if "exec" in line and "psql" in line]
    assert len(commands) == 2
    assert "--auth=scram-sha-256" in compose["services"]["ledger"]["environment"]["POSTGRES_INITDB_ARGS"]
    for command in commands:
        assert 'PGPASSWORD="$(cat "$POSTGRES_PASSWORD_FILE")" psql' in command, command


def test_no_password_stands_in_a_file_an_address_or_a_command(compose: dict[str, Any]) -> None:
    for path in DEPLOY.iterdir():
        if path.is_file():
            assert not re.search(r"postgres(ql)?://[^/\s]*:[^@\s]+@", path.read_text()), path
    for name, service in compose["services"].items():
        for variable, value in service.get("environment", {}).items():
            if re.search("PASS|KEY|SECRET", variable):
                assert re.fullmatch(r"/run/secrets/\w+|\$\{\w+:\?.*\}", value), (name, variable)
        assert set(service.get("secrets", [])) <= set(compose["secrets"]), name
    assert {"deploy/secrets/", "deploy/.env"} <= set((REPOSITORY / ".gitignore").read_text().split())


def test_the_image_is_slim_and_runs_as_nobody_in_particular(dockerfile: list[str]) -> None:
    stages = [line for line in dockerfile if line.startswith("FROM ")]
    assert [stage.split()[1].partition("-")[2] for stage in stages] == ["slim", "slim"]
    last = dockerfile[dockerfile.index(stages[-1]) :]
    assert [line for line in last if line.startswith("USER ")] == ["USER 10001:10001"]
    assert not [line for line in last if re.search(r"apt-get|pip install|^ADD|sudo|chmod 777", line)]
    assert 'ENTRYPOINT ["dpicl"]' in last
    assert any("LANGSMITH_TRACING=false" in line for line in last)


def test_the_image_installs_extras_that_there_are(dockerfile: list[str]) -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = re.search(r'"\.\[([\w,]+)\]"', "\n".join(dockerfile))
    assert wanted is not None
    assert set(wanted[1].split(",")) - set(extras) <= {"serve"}


def test_the_image_is_made_of_the_package_and_what_its_build_reads() -> None:
    shown = [line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"]
    assert all((REPOSITORY / name).exists() for name in shown)
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert {name for line in copied for name in line.split()} == set(shown)


def test_the_command_is_that_of_the_service(compose: dict[str, Any]) -> None:
    command = compose["services"]["service"]["command"]
    assert command[:4] == ["serve", "postgresql://ledger_app@ledger/app", "--config", "app.toml"]
    mounted = compose["services"]["service"]["volumes"]
    assert {"./app.toml:/app/app.toml:ro", "./model.py:/app/model.py:ro"} <= set(mounted)


def test_the_settings_name_what_compose_gives(compose: dict[str, Any]) -> None:
    settings = tomllib.loads((DEPLOY / "app.toml").read_text())
    environment = compose["services"]["service"]["environment"]
    keys = [table["key_env"] for table in (settings["operator"], *settings["tenants"].values())]
    assert set(keys) <= set(environment)
    read = set(re.findall(r'os\.environ\["(\w+)"\]', (DEPLOY / "model.py").read_text()))
    assert read <= set(environment)
    assert settings["data"]["file"].startswith("records/")
    parameters = set(DPVotingRunnable.model_fields) | {"epsilon", "max_queries", "noise"}
    assert set(settings["ask"]) <= parameters


def test_the_roles_are_those_of_the_page() -> None:
    page = (REPOSITORY / "docs" / "production.md").read_text()
    shown = re.findall(r"```sql\n(.*?)```", page, re.DOTALL)
    files = [(DEPLOY / name).read_text() for name in ("roles.sql", "anchor_roles.sql")]
    # They can be run again, where the role is there already.
    once = [re.sub(r"^DO \$\$ BEGIN (.*;) EXCEPTION .* END \$\$;$", r"\1", text, flags=re.MULTILINE) for text in files]
    assert [re.sub(r"^--.*\n", "", text, flags=re.MULTILINE) for text in once] == shown
