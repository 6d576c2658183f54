"""A real llama.cpp server on this machine: `python -m tests.llama_server MODEL.gguf`, or `running_server()`.

Needs `xllamacpp`; `running_server` makes the model that is served and needs `gguf` too.
"""

from __future__ import annotations

import contextlib
import importlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.tiny_gguf import build

ROOT = Path(__file__).resolve().parents[1]
MODEL = "tiny"
"""What the served model is called."""


@dataclass(frozen=True)
class RunningServer:
    """The address of a server, without a path, and the size of its model's vocabulary."""

    url: str
    size: int


class ServerDidNotStartError(RuntimeError):
    """The server said nothing, or something else than that it is up."""


@contextlib.contextmanager
def running_server() -> Iterator[RunningServer]:
    """Runs a server of the tiny model in a process of its own, with an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / f"{MODEL}.gguf"
        size = build(model)
        command = [sys.executable, "-m", "tests.llama_server", str(model)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            said = "" if process.stdout is None else process.stdout.readline()
            if not said.startswith("UP "):
                raise ServerDidNotStartError("the llama.cpp server does not start on this machine")
            yield RunningServer(said.removeprefix("UP ").strip(), size)
        finally:
            process.kill()
            process.communicate()


def serve(model: str) -> None:
    """Starts the server at a port that the system gives to it, says UP and where, and stays."""
    llama = importlib.import_module("xllamacpp")
    params = llama.CommonParams()
    params.model.path = model
    params.model_alias = {MODEL}  # otherwise answers name the file
    params.n_ctx = 4096
    params.n_parallel = 2
    params.hostnames = ["127.0.0.1"]
    params.port = 0  # a free one that is looked for first may be another's by the time it is used
    params.cpuparams.n_threads = 1
    params.warmup = False
    params.offline = True
    params.verbosity = 1
    server = llama.Server(params)
    print("UP", server.listening_address, flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    serve(sys.argv[1])
