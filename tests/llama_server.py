"""Runs a real llama.cpp server on a model file: `python -m tests.llama_server MODEL.gguf PORT`. Needs `xllamacpp`."""

from __future__ import annotations

import importlib
import sys
import time


def serve(model: str, port: int) -> None:
    """Starts the server, says UP and stays."""
    llama = importlib.import_module("xllamacpp")
    params = llama.CommonParams()
    params.model.path = model
    params.n_ctx = 4096
    params.n_parallel = 2
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.cpuparams.n_threads = 1
    params.warmup = False
    params.offline = True
    params.verbosity = 1
    server = llama.Server(params)
    print("UP", server.listening_address, flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
