"""Services built from a settings file, as `dpicl serve` and `dpicl mcp` build them, on a model that costs nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from langchain_dpicl.backends.fake import FakeBackend, scripted
from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
from langchain_dpicl.cli.serve import read_app, running_of
from langchain_dpicl.released.demonstrations import ReleasedDemonstrations
from tests.free_form_doubles import Writer
from tests.retrieval_doubles import TopicEmbeddings
from tests.sealed_files import paid

ROOT = Path(__file__).resolve().parents[1]
CANARY = "Quxbadger"
KEYS = {"acme": "acme-key-0000000001", "globex": "globex-key-00000001", "operator": "operator-key-000001"}
LABELS = ("card", "transfer")
MODEL = FakeBackend(scripted({" card": 0.9, " transfer": 0.1}), vocabulary=[" card", " transfer"])
"""Named by settings files as tests.served:MODEL."""
WRITER = Writer()
"""Completes text; named as tests.served:WRITER."""
EMBEDDINGS = TopicEmbeddings()
EPSILON, DELTA = 20.0, 1e-4
SETTINGS = f"""
[operator]
key_env = "OPERATOR_KEY"

[tenants.acme]
key_env = "ACME_KEY"

[tenants.globex]
key_env = "GLOBEX_KEY"

[data]
file = "records.jsonl"
label_key = "topic"
labels = {json.dumps(LABELS)}
public_size = 300
dataset_id = "messages"

[model]
name = "tests.served:MODEL"
"""
ASK = """
[ask]
epsilon = 2.0
max_queries = {queries}
noise = {{multiplier = 0.4}}
rows = {{units = 20}}
answers = {{calibrate = false}}
"""


FREE_ANSWERS = """
[answer]
epsilon = 2.0
max_queries = 4
noise = {multiplier = 1.5}
rows = {units = 4}
answers = {keywords = ["card", "transfer", "fee"], num_keywords = 1}
model = {name = "tests.served:WRITER"}

[retrieve_and_answer]
epsilon = 8.0
max_queries = 4
answers = {keywords = ["card", "transfer", "fee"], num_keywords = 1}
model = {name = "tests.served:WRITER", embeddings = "tests.served:EMBEDDINGS"}
retrieval = {similarity_threshold = 0.5, participations = 2, slots = 4}
"""


def new_folder(folder: Path, monkeypatch: Any, *, more: str = "", queries: int = 8) -> Path:
    """Writes records and settings into a folder, goes there, and sets the keys; returns the settings file."""
    rows = [(f"my card was declined {CANARY}", "card"), (f"my transfer is late {CANARY}", "transfer")] * 150
    (folder / "records.jsonl").write_text("\n".join(json.dumps({"text": text, "topic": topic}) for text, topic in rows))
    ReleasedDemonstrations(({"text": "a made-up text", "topic": "card"},), paid(1.5), {}).save(folder / "demos.json")
    monkeypatch.chdir(folder)
    for name, key in KEYS.items():
        monkeypatch.setenv(f"{name.upper()}_KEY", key)
    path = folder / "app.toml"
    patient = "" if "[service]" in more else "[service]\nledger_timeout = 300\n"  # however slow the machine is
    path.write_text(more + SETTINGS + ASK.format(queries=queries) + patient)
    return path


def change(config: Path, before: str, after: str) -> None:
    """Changes a settings file in one place."""
    text = config.read_text()
    assert before in text
    config.write_text(text.replace(before, after, 1))


def new_ledger(where: str) -> str:
    PrivacyBudgetCallbackHandler.create(where, epsilon=EPSILON, delta=DELTA).close()
    return where


@contextlib.contextmanager
def running(config: Path, ledger: str) -> Iterator[Any]:
    """Builds what a server serves, and ends it."""
    found = running_of(read_app(config, ledger), config.parent)
    try:
        yield found
    finally:
        found.close()


class Client:
    """Asks an application as a tenant would, and keeps every byte that comes back."""

    def __init__(self, app: Any) -> None:
        self.seen: list[str] = []
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test")

    async def send(self, method: str, path: str, who: str | None = "acme", **options: Any) -> httpx.Response:
        headers = {"content-type": "application/json", **options.pop("headers", {})}
        if who is not None:
            headers["Authorization"] = f"Bearer {KEYS.get(who, who)}"
        response = await self.http.request(method, path, headers=headers, **options)
        self.seen.append(f"{response.headers} {response.text}")
        return response

    async def ask(self, question: str, who: str = "acme", door: str = "ask") -> httpx.Response:
        return await self.send("POST", f"/{door}", who, json={"question": question})

    async def get(self, path: str, who: str | None = "acme") -> Any:
        return (await self.send("GET", path, who)).json()

    async def ask_at_once(self, tenants: str, count: int) -> Mapping[int, int]:
        """Asks `count` different questions for each tenant, all at the same time; counts the answers by status."""
        asked = [self.ask(f"question {number}?", tenant) for number in range(count) for tenant in tenants.split()]
        return Counter(response.status_code for response in await asyncio.gather(*asked))


class Server:
    """A running `dpicl serve`."""

    def __init__(self, process: subprocess.Popen[bytes], said: Path) -> None:
        self.process, self._said, self.port = process, said, 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, question: str, who: str = "acme", **options: Any) -> httpx.Response:
        return self.send("POST", "/ask", who, json={"question": question}, **options)

    def send(self, method: str, path: str, who: str, **options: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {KEYS[who]}"}
        return httpx.request(method, f"{self.url}{path}", headers=headers, timeout=300, **options)

    def stop(self, how: int = signal.SIGTERM) -> tuple[int, str]:
        """Returns the exit code, and what it wrote on both of its outputs."""
        self.process.send_signal(how)
        return self.process.wait(timeout=300), self.said()

    def said(self) -> str:
        return self._said.read_text()

    def is_up(self) -> bool:
        """Whether it has said where it is, and answers there."""
        found = re.search(r"serving .* at http://127\.0\.0\.1:([0-9]+)\n", self.said())
        if found is None:
            return False
        self.port = int(found[1])
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health", timeout=60).status_code == 200
        return False


@contextlib.contextmanager
def served(
    folder: Path, *options: str, before: str = "", end: str = "console()", **environment: str
) -> Iterator[Server]:
    """Runs the command in a folder with settings; ends it and its workers, whatever became of it.

    `before` is code that runs first, `end` what runs the command. The system gives the port: a free one that is looked for
    first may be another's by the time it is used.
    """
    code = f"{before}import sys; from langchain_dpicl.cli.main import console, main; {end}"
    command = [sys.executable, "-c", code, "serve", "--config", "app.toml", "--port", "0", *options]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths, **environment}
    with (
        tempfile.NamedTemporaryFile() as heard,
        subprocess.Popen(
            command, cwd=folder, env=env, start_new_session=True, stdout=heard, stderr=subprocess.STDOUT
        ) as process,
    ):
        server, until = Server(process, Path(heard.name)), time.monotonic() + 300
        try:
            while not server.is_up():
                assert process.poll() is None, server.said()
                assert time.monotonic() < until, "it does not answer"
                time.sleep(0.1)
            yield server
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
