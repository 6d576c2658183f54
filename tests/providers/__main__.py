"""Talks through one class in this process and writes what it did as JSON: `python -m tests.providers --url URL NAME`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from pathlib import Path

from tests.leaks.__main__ import stay_here


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--url", required=True)
    parser.add_argument("--floor", action="store_true")
    parser.add_argument("--hostile", type=json.loads, default={})
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    stay_here()
    warnings.simplefilter("ignore")
    from tests.providers.listed import CASES
    from tests.providers.talk import talk

    case = next(case for case in CASES if case.name == asked.name)
    found = talk(case, asked.url, case.expected(is_floor=asked.floor)[1], asked.hostile)
    asked.out.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # without what clients do at exit
