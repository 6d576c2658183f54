"""Runs groups of channels in this process and writes their cells as JSON: `python -m tests.leaks --out FILE GROUP ...`."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import socket
import ssl
import sys
import warnings
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

OTHERS = ("LANGSMITH_", "LANGCHAIN_", "OPENAI_", "ANTHROPIC_", "OTEL_", "SENTRY_", "TRACELOOP_")
"""Beginnings of environment variables that would set observers up, or clients."""

LOCAL = ("127.0.0.1", "::1", "localhost", None)


def stay_here() -> None:
    """Refuses every connection to another machine."""
    connect, look_up = socket.socket.connect, socket.getaddrinfo

    def local_connect(self: socket.socket, address: Any) -> None:
        if isinstance(address, tuple) and address[0] not in LOCAL:
            raise ConnectionRefusedError(f"expected an address of this machine, found {address[0]}")
        connect(self, address)

    def local_look_up(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host not in LOCAL:
            raise socket.gaierror(f"expected a name of this machine, found {host}")
        return look_up(host, *args, **kwargs)

    socket.socket.connect = local_connect  # type: ignore[method-assign]
    socket.getaddrinfo = local_look_up


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("groups", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--half", type=int, choices=(0, 1), help="run this half of the cells only")
    asked = parser.parse_args()
    stay_here()
    # Every client reads all certificates again, and none of them uses one here.
    ssl.create_default_context = functools.cache(ssl.create_default_context)
    for name in [name for name in os.environ if name.startswith(OTHERS) or name.lower().endswith("_proxy")]:
        del os.environ[name]
    warnings.simplefilter("ignore")
    from langchain_dpicl.backends.private_calls import call

    call.DEFAULT_CONCURRENCY = 8  # each engine starts all its threads at once, for few rows
    from tests.leaks.matrix import run

    noise = io.StringIO()
    with contextlib.redirect_stdout(noise), contextlib.redirect_stderr(noise):
        cells = run(asked.groups, asked.half)
    found = {"core": version("langchain-core"), "cells": [asdict(cell) for cell in cells]}
    asked.out.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
