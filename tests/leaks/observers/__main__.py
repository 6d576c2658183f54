"""Runs one observer in this process and writes its row as JSON: `python -m tests.leaks.observers --out FILE NAME`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from tests.leaks.__main__ import stay_here

ALWAYS = ("langchain-core", "openai", "anthropic")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    stay_here()
    warnings.simplefilter("ignore")
    from tests.leaks.observers.listed import OBSERVERS
    from tests.leaks.observers.registry import run_observer

    one = next(one for one in OBSERVERS if one.name == asked.name)
    versions = {name: version(name) for name in (*one.needs, *ALWAYS)}
    cells = [asdict(cell) for cell in run_observer(one)]
    asked.out.write_text(json.dumps({"versions": versions, "cells": cells}))
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # without what observers do at exit: wait for a server, or send what is left
