"""Measures what an evaluation under privacy costs: width of its interval, the choice of a prompt, and time.

    python benchmarks/bench_evaluate.py
    python benchmarks/bench_evaluate.py --records 200

Figures with their goals, PASS or MISSED; ends with 1 if one is missed:
  - the half width of the 95 % interval of an accuracy of .8, by that without noise, at epsilon .5 with 2,000 units:
    of whole evaluations by `Exact` on 2, 4 and 10 labels;
  - how much rarer the best of 20 prompts is chosen than without noise, at epsilon 1, simulated with the plan's noise;
  - the time of 1,000 records at 32 calls in flight, through a server of its own process that answers after 50 ms, by
    that of the model's own `abatch` in this process. Both are run in turn; the median of the quotients is shown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from langchain_core.language_models.llms import LLM
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate

from langchain_dpicl import Budget, PrivateExamples
from langchain_dpicl.evaluation import Exact, dp_aevaluate, dp_evaluate, plan_choice

if TYPE_CHECKING:
    from collections.abc import Iterator

IN_FLIGHT, WAIT = 32, 0.05
PROMPTS, UNITS = 20, 2_000
MESSAGE = {"role": "assistant", "content": "card"}
REPLY = {"id": "1", "object": "chat.completion", "created": 1, "model": "m"}
BODY = json.dumps({**REPLY, "choices": [{"index": 0, "finish_reason": "stop", "message": MESSAGE}]}).encode()
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: " + str(len(BODY)).encode() + b"\r\n\r\n"


async def serve() -> None:
    """Answers every request after the wait; prints its port first."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                await reader.readexactly(int(lines[0].split(b":")[1]))
                await asyncio.sleep(WAIT)
                writer.write(HEAD + BODY)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


@contextmanager
def server() -> Iterator[str]:
    """Runs the server in a process of its own; gives its address."""
    command = [sys.executable, __file__, "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603  this file
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip() if process.stdout else ''}/v1"
        finally:
            process.terminate()


class Teller(LLM):
    """Answers with the last word of the prompt."""

    @property
    def _llm_type(self) -> str:
        return "teller"

    def _call(self, prompt: str, *unused: Any, **more: Any) -> str:
        del unused, more
        return prompt.rsplit(maxsplit=1)[-1]


def width(labels: int) -> float:
    """Returns the half width at epsilon .5 by that without noise, of a chain that is right on four of five records."""
    names = [f"queue{number}" for number in range(labels)]
    records = [
        {"queue": names[place % labels], "says": names[(place + (place % 5 == 0)) % labels]} for place in range(UNITS)
    ]
    private = PrivateExamples(records, text_key="says", label_key="queue", labels=names, public_size=UNITS)
    found = dp_evaluate(
        PromptTemplate.from_template("{says}") | Teller(),
        private,
        evaluators=Exact(),
        budget=Budget(epsilon=1.0, delta=1e-6),
        epsilon=0.5,
    )
    return found.accuracy.half_width / (1.96 * (0.8 * 0.2 / UNITS) ** 0.5)


def rarer(runs: int = 1_000) -> float:
    """Returns by how many points the best of 20 prompts is chosen more rarely than without noise."""
    plan = plan_choice(UNITS, candidates=PROMPTS, epsilon=1.0, delta=1e-6)
    rng, scale = np.random.default_rng(), plan.noise_multiplier * plan.release.sensitivity.require("range")
    # Records are easy or hard for all prompts alike, so that 15 % of the answers of two prompts differ.
    limits = np.r_[0.8416, np.full(PROMPTS - 1, 0.7388)]  # the best is right for 80 %, the others for 77 %
    won = np.zeros(2)
    for _ in range(runs):
        shared, own = rng.standard_normal((UNITS, 1)), rng.standard_normal((UNITS, PROMPTS))
        totals = (np.sqrt(0.8) * shared + np.sqrt(0.2) * own < limits).sum(0)
        won += [totals.argmax() == 0, (totals + scale * rng.gumbel(size=PROMPTS)).argmax() == 0]
    return float(100 * (won[0] - won[1]) / runs)


async def slower(url: str, records: int, turns: int) -> float:
    """Returns the time of an evaluation by that of `abatch`, the median over turns."""
    from langchain_openai import ChatOpenAI

    prompt = ChatPromptTemplate.from_template("{text}\nQueue:")
    held = [{"text": f"the card {number} was declined", "queue": "card"} for number in range(records)]
    budget = Budget(epsilon=100.0, delta=1e-6)
    found = []
    for turn in range(turns + 1):  # the first warms up
        model: Any = ChatOpenAI(base_url=url, api_key="none", model="m", max_retries=0)
        inputs = [prompt.invoke(record) for record in held]
        private = PrivateExamples(
            held, label_key="queue", labels=("card", "transfer"), public_size=records, dataset_id=f"records {turn}"
        )
        start = time.perf_counter()
        await model.abatch(inputs, config={"max_concurrency": IN_FLIGHT})
        plain = time.perf_counter() - start
        start = time.perf_counter()
        await dp_aevaluate(
            prompt | model, private, evaluators=Exact(), budget=budget, config={"max_concurrency": IN_FLIGHT}
        )
        found.append((time.perf_counter() - start) / plain)
    return statistics.median(found[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--records", type=int, default=1_000, help="records through the server (1,000)")
    parser.add_argument("--turns", type=int, default=3, help="turns of both (3)")
    asked = parser.parse_args()
    if asked.serve:
        asyncio.run(serve())
    with server() as url:
        figures = [
            *(
                (f"half width by that without noise, epsilon .5, 2,000 units, {labels} labels", width(labels), 1.1)
                for labels in (2, 4, 10)
            ),
            ("points by which the best of 20 prompts is chosen more rarely, epsilon 1", rarer(), 2.0),
            ("time by that of abatch, 50 ms, 32 in flight", asyncio.run(slower(url, asked.records, asked.turns)), 1.15),
        ]
    for what, found, goal in figures:
        sys.stdout.write(f"{'PASS  ' if found <= goal else 'MISSED'}  {found:6.3f}  (goal {goal})  {what}\n")
    return int(any(found > goal for _, found, goal in figures))


if __name__ == "__main__":
    sys.exit(main())
