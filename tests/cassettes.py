"""Recorded conversations with providers: how they are written, read and replayed. `python -m tests.cassettes` records.

A cassette is one scenario of `tests.cassette_scenarios` as YAML: who answered, then requests and responses. Of headers,
only those listed here are kept; addresses become `NEUTRAL`; ids, times and measured speeds of answers are dropped, so
that recording again gives the same file. What `cassettes/README.md` says holds for every file.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import vcr
import yaml
from vcr.request import Request

from langchain_dpicl.backends import allow_wrappers
from tests.cassette_scenarios import ANY_ORDER, NO_KEY, SCENARIOS, Target
from tests.llama_server import MODEL, running_server
from tests.loopback_provider import provider
from tests.secret_words import found_in

FOLDER = Path(__file__).resolve().parents[1] / "cassettes"
NEUTRAL = "http://provider.invalid"
"""Stands for every address."""

REQUEST_HEADERS = ("content-type", "anthropic-version")
RESPONSE_HEADERS = ("content-type",)
DROPPED = frozenset({"timings", "obfuscation", "request_id"})
"""Fields of answers that differ from call to call and mean nothing here."""

_ABOUT = "# Recorded by `python -m tests.cassettes` on synthetic data; see README.md. Do not edit by hand.\n"


class CassetteError(Exception):
    """A recording that may not be kept, or a replay that is not the recorded conversation."""


@dataclass(frozen=True)
class Job:
    """One cassette to record: its scenario, its file, and who answers."""

    scenario: str
    path: Path
    source: str
    serve: Callable[[], contextlib.AbstractContextManager[Target]]


class Readable:
    """Writes a cassette as YAML with bodies as data, under a header that says where it comes from."""

    def __init__(self, header: Mapping[str, Any]) -> None:
        self._header = dict(header)

    def serialize(self, cassette: dict[str, Any]) -> str:
        """Returns the file's text."""
        interactions = [
            {
                "request": {**one["request"], "body": json.loads(one["request"]["body"])},
                "response": {**one["response"], "body": _parsed(one["response"]["body"]["string"])},
            }
            for one in cassette["interactions"]
        ]
        if self._header.get("scenario") in ANY_ORDER:
            interactions.sort(key=lambda one: json.dumps(one["request"], sort_keys=True))
        state = {**self._header, "version": cassette["version"], "interactions": interactions}
        return _ABOUT + yaml.dump(state, Dumper=_Dumper, sort_keys=False, width=118, default_flow_style=None)

    def deserialize(self, text: str) -> dict[str, Any]:
        """Returns what vcrpy reads: bodies as text."""
        state = read(text)
        for one in state["interactions"]:
            one["request"]["body"] = json.dumps(one["request"]["body"])
            one["response"]["body"] = {"string": _unparsed(one["response"]["body"])}
        return state


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast where PyYAML has it


class _Dumper(yaml.SafeDumper):
    """Without anchors: equal parts are written out, as they are in the conversation."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def read(text: str) -> dict[str, Any]:
    """Returns a cassette as data, bodies included."""
    return dict(yaml.load(text, Loader=_LOADER))  # noqa: S506  the safe one


def load(path: Path) -> dict[str, Any]:
    """Returns the cassette in a file as data."""
    return read(path.read_text(encoding="ascii"))


def record(job: Job) -> None:
    """Runs a scenario against the server that answers and keeps the conversation."""
    with tempfile.TemporaryDirectory() as folder, job.serve() as target:
        part = Path(folder) / "part.yaml"
        header = {"scenario": job.scenario, "answered_by": job.source, **target.public()}
        with _tape(header).use_cassette(str(part), record_mode="all"):
            result = _run(job.scenario, target)
        if not all(_says_something(row) for rows in result.get("rows", []) for row in rows):
            raise CassetteError(f"{job.scenario}: a call failed, or a row met no candidate; nothing was kept")
        text = part.read_text(encoding="ascii")
        secret = found_in(text) | ({"the key"} if target.api_key != NO_KEY and target.api_key in text else set())
        if secret:
            raise CassetteError(f"{job.scenario}: the conversation holds {', '.join(sorted(secret))}; nothing was kept")
        job.path.parent.mkdir(parents=True, exist_ok=True)
        job.path.write_text(text, encoding="ascii")


async def replay(path: Path, **changes: Any) -> Any:
    """Runs the cassette's scenario against the recording and returns its result."""
    state = load(path)
    header = {name: value for name, value in state.items() if name not in {"version", "interactions"}}
    target = Target.replayed(NEUTRAL, header, **changes)
    with _tape(header).use_cassette(str(path), record_mode="none") as tape:
        result = SCENARIOS[header["scenario"]](target)
        result = await result if inspect.isawaitable(result) else result
    if tape.play_count != len(tape) or not tape.all_played:
        raise CassetteError(f"expected {len(tape)} recorded answers to be asked for once each, found {tape.play_count}")
    return result


def _run(scenario: str, target: Target) -> dict[str, Any]:
    result = SCENARIOS[scenario](target)
    return dict(asyncio.run(result) if inspect.iscoroutine(result) else result)


def _says_something(row: np.ndarray) -> bool:
    """Whether a row is no abstention: zeros only among probabilities, -inf only among their logarithms."""
    return bool(np.isfinite(row).any() and row.any())


def _tape(header: Mapping[str, Any]) -> vcr.VCR:
    """Returns vcrpy with our format, filters and matching: method, path, query and the body as data."""
    allow_wrappers("vcr")  # it stands before private calls and keeps them, here of made-up records alone
    tape = vcr.VCR(
        serializer="readable",
        match_on=["method", "path", "query", "json"],
        before_record_request=_neutral_request,
        before_record_response=_neutral_response,
        decode_compressed_response=True,
    )
    tape.register_serializer("readable", Readable(header))
    tape.register_matcher("json", _same_body)
    return tape


def _same_body(one: Request, other: Request) -> None:
    if json.loads(one.body) != json.loads(other.body):
        raise AssertionError("the bodies differ")


def _neutral_request(request: Request) -> Request:
    """Returns the request without its address and without any header that is not listed."""
    address = urlsplit(request.uri)
    query = f"?{address.query}" if address.query else ""
    headers = {name.lower(): value for name, value in request.headers.items() if name.lower() in REQUEST_HEADERS}
    return Request(request.method, f"{NEUTRAL}{address.path}{query}", request.body, headers)


def _neutral_response(response: dict[str, Any]) -> dict[str, Any]:
    """Returns the response without what differs from call to call."""
    headers = {name.lower(): value for name, value in response["headers"].items()}
    body = _parsed(response["body"]["string"])
    return {
        "status": response["status"],
        "headers": {name: headers[name] for name in RESPONSE_HEADERS if name in headers},
        "body": {"string": _unparsed(_settled(body)).encode()},
    }


def _settled(value: Any) -> Any:
    if isinstance(value, list):
        return [_settled(item) for item in value]
    if not isinstance(value, dict):
        return value
    settled = {name: _settled(item) for name, item in value.items() if name not in DROPPED}
    if isinstance(settled.get("id"), str):
        settled["id"] = f"{settled['id'].partition('-')[0].partition('_')[0]}-recorded"
    if "created" in settled:
        settled["created"] = 0
    return settled


def _parsed(text: str | bytes) -> Any:
    """Returns a body as data: JSON, or server-sent events as a list of their fields."""
    text = text.decode() if isinstance(text, bytes) else text
    try:
        return json.loads(text)
    except ValueError:
        blocks = [block for block in text.replace("\r\n", "\n").split("\n\n") if block.strip()]
    try:
        return {"events": [dict(map(_field, block.split("\n"))) for block in blocks]}
    except ValueError as error:
        raise CassetteError("expected a body of JSON or server-sent events") from error


def _field(line: str) -> tuple[str, Any]:
    name, colon, value = line.partition(": ")
    if not colon or name not in {"event", "data"}:
        raise ValueError(line[:40])
    return name, value if name == "event" or value == "[DONE]" else json.loads(value)


def _unparsed(body: Any) -> str:
    if not (isinstance(body, dict) and set(body) == {"events"}):
        return json.dumps(body)

    def line(name: str, value: Any) -> str:
        return f"{name}: {value if isinstance(value, str) else json.dumps(value)}\n"

    return "".join("".join(line(*item) for item in event.items()) + "\n" for event in body["events"])


@contextlib.contextmanager
def _llama() -> Iterator[Target]:
    """A server of its own for every cassette, so that none depends on what was asked before."""
    with running_server() as server:
        yield Target(server.url, model=MODEL, extra_body={"cache_prompt": False, "seed": 1})


@contextlib.contextmanager
def _loopback() -> Iterator[Target]:
    with provider() as served:
        yield Target(served.root, model="gpt-6-luna")


REAL = {
    "openai": (
        "https://api.openai.com",
        "OPENAI_API_KEY",
        ("openai_chat", "openai_stream", "openai_async", "openai_voting", "openai_pate"),
    ),
    "openai-completions": ("https://api.openai.com", "OPENAI_API_KEY", ("openai_completions",)),
    "openai-decisions": ("https://api.openai.com", "OPENAI_API_KEY", ("openai_decisions",)),
    "anthropic": (
        "https://api.anthropic.com",
        "ANTHROPIC_API_KEY",
        ("anthropic_messages", "anthropic_text", "anthropic_pate"),
    ),
}
"""The real services: address, where the key is, and the scenarios that they can answer."""

OF_WORDS = frozenset({"openai_decisions", "anthropic_pate"})
"""Scenarios for the loopback provider: the tiny model has no such endpoint, or never says a label."""


def local_jobs(folder: Path) -> list[Job]:
    """Returns the cassettes that this machine can record."""
    llama = f"llama.cpp server (xllamacpp {importlib.metadata.version('xllamacpp')}), model of tests/tiny_gguf.py"
    ours = "tests/loopback_provider.py with the embedded model: NOT the real service, whose shape it follows"
    return [
        Job(name, folder / "loopback" / f"{name}.yaml", ours, _loopback)
        if name in OF_WORDS
        else Job(name, folder / "llama_cpp" / f"{name}.yaml", llama, _llama)
        for name in SCENARIOS
    ]


def real_jobs(folder: Path, service: str, model: str, environ: Mapping[str, str]) -> list[Job]:
    """Returns the cassettes of a real service."""
    url, variable, names = REAL[service]
    if not model or not environ.get(variable):
        raise CassetteError(f"expected --model NAME and the key in {variable} to record the real {service}")

    @contextlib.contextmanager
    def serve() -> Iterator[Target]:
        yield Target(url, model=model, api_key=environ[variable], continuation="instruct")

    return [Job(name, folder / "real" / f"{name}.yaml", f"{service}, the real service", serve) for name in names]


def jobs(arguments: Sequence[str], environ: Mapping[str, str]) -> list[Job]:
    """Returns what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.cassettes", description="Records the cassettes again.")
    parser.add_argument("--only", nargs="+", choices=sorted(SCENARIOS), help="these scenarios, not all")
    parser.add_argument("--into", type=Path, default=FOLDER, help="another folder than cassettes/")
    parser.add_argument("--real", choices=sorted(REAL), help="ask the real service; its key is in the environment")
    parser.add_argument("--model", default="", help="the real service's model")
    asked = parser.parse_args(arguments)
    if asked.model and not asked.real:
        parser.error("--model goes with --real")
    try:
        found = real_jobs(asked.into, asked.real, asked.model, environ) if asked.real else local_jobs(asked.into)
    except CassetteError as error:
        parser.error(str(error))
    return [job for job in found if not asked.only or job.scenario in asked.only]


def main(arguments: Sequence[str]) -> None:
    for job in jobs(arguments, os.environ):
        record(job)
        print(f"{job.path.parent.name}/{job.path.name}: {job.path.stat().st_size} bytes, {job.source}")


if __name__ == "__main__":
    main(sys.argv[1:])
