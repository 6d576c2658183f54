"""Runs examples/own_server.py against a real llama.cpp server here, every way it can be reached: `make server-demo`.

The model is tiny and random: the path is real, the text has no meaning.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.llama_server import MODEL, running_server

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "own_server.py"


def ways(vocabulary: int) -> list[list[str]]:
    """Chat and completions, each with the top 20 tokens and with the whole vocabulary."""
    full = ["--full-vocabulary", str(vocabulary)]
    return [[], full, ["--completions"], ["--completions", *full]]


def main() -> None:
    with running_server() as server:
        for way in ways(server.size):
            print("own_server.py", *way, flush=True)
            command = [sys.executable, str(EXAMPLE), "--base-url", f"{server.url}/v1", "--model", MODEL]
            subprocess.run([*command, "--no-prompt-cache", "--num-slots", "20", "--max-tokens", "6", *way], check=True)


if __name__ == "__main__":
    main()
