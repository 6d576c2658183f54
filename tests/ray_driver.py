"""A driver in a process of its own, for a test to kill: prints each demonstration as it comes.

python -m tests.ray_driver LEDGER MEMO COMPONENT WORKERS SECONDS
"""

from __future__ import annotations

import json
import sys
from typing import Any

from langchain_dpicl import Decoding, Rows
from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
from langchain_dpicl.distributed import RayExecutor
from langchain_dpicl.generation.synthesizer import DemonstrationSynthesizer
from tests.ray_places import PUBLIC_SIZE, engine, records

SHOTS = 6
OPTIONS: dict[str, Any] = {
    "epsilon": 2.0,
    "shots_per_label": SHOTS,
    "max_tokens": 3,
    "rows": Rows(units=4, redraw_every="run"),
    "decoding": Decoding(candidates=3),
}


def main(ledger: str, memo: str, component: str, workers: str, seconds: str) -> None:
    """Generates, a line for each demonstration."""
    executor = RayExecutor(
        "tests.ray_places:place",
        options={"ledger": ledger, "memo": memo, "seconds": float(seconds)},
        num_workers=int(workers),
        num_cpus=0.0,
    )
    made = DemonstrationSynthesizer.from_private_examples(
        records(ledger, PUBLIC_SIZE),
        llm=engine(),
        budget=PrivacyBudgetCallbackHandler.open(ledger),
        component=component,
        executor=executor,
        **OPTIONS,
    )
    for one in made.stream(progress=False):
        print(json.dumps(one), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
