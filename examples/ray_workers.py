"""Demonstrations written by several worker processes, with one exact budget, and gone on with after a kill.

    python examples/ray_workers.py                     # a Ray cluster of its own, on this machine
    python examples/ray_workers.py --workers 4 --folder /data/run

Needs the extra `ray`; a cluster takes some seconds to start. Each worker reads the records where it runs, makes the
model there, and pays from the ledger that all of them open. Nothing private goes through Ray. Kill it and start it
again with the same `--folder`: what was released is found, what was paid stays paid, and the rest is written.

On many machines the ledger and the memo are in PostgreSQL, and `--address` names the cluster: docs/many-machines.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bank_questions import LABELS, bank_questions
from langchain_core.prompts import PromptTemplate

from langchain_dpicl import (
    DemonstrationSynthesizer,
    DPFewShotPromptTemplate,
    EmbeddedLLM,
    GenerationTask,
    PrivacyBudgetCallbackHandler,
    PrivateExamples,
    Rows,
    verify_report,
)
from langchain_dpicl.distributed import RayExecutor, Workplace
from langchain_dpicl.stores import SQLiteMemo

SIZE = 300  # declared number of records per label; public
LEDGER, MEMO = "budget.db", "released.db"


def make_model() -> Any:
    """The model that writes, in each worker. It SEES the private prompts, and has to report token probabilities."""
    # With a provider: from langchain_openai import ChatOpenAI; from langchain_dpicl.backends import LangChainBackend
    # and: return LangChainBackend(ChatOpenAI(model="gpt-4.1-mini"), continuation="instruct")
    return EmbeddedLLM()


def records() -> PrivateExamples:
    """The private records, as each worker reads them: the same everywhere, under the same declaration."""
    return PrivateExamples(
        bank_questions(num_per_label=SIZE),
        label_key="label",
        labels=LABELS,
        public_size=dict.fromkeys(LABELS, SIZE),
        dataset_id="bank-questions",
    )


def workplace(folder: str) -> Workplace:
    """Makes the place of one worker: called there, never here."""
    budget = PrivacyBudgetCallbackHandler.open(Path(folder) / LEDGER)
    return Workplace(make_model(), private=records(), budget=budget, memo=SQLiteMemo(Path(folder) / MEMO))


def written(folder: Path, *, workers: int, address: str | None) -> DPFewShotPromptTemplate:
    """Writes two demonstrations of each label, or finds those that stand already."""
    ledger = folder / LEDGER
    make = PrivacyBudgetCallbackHandler.open if ledger.exists() else PrivacyBudgetCallbackHandler.create
    limits = {} if ledger.exists() else {"epsilon": 4.0, "delta": 1e-5}
    budget = make(ledger, **limits)
    executor = RayExecutor(
        "ray_workers:workplace", options={"folder": str(folder)}, num_workers=workers, address=address
    )
    with executor as crew:
        run = DemonstrationSynthesizer.from_private_examples(
            records(),
            llm=make_model(),  # for planning and a public probe; the workers make their own
            budget=budget,
            epsilon=2.0,
            component="few-shot",  # under this name the next run finds what was released
            shots_per_label=2,
            max_tokens=12,
            rows=Rows(units=40, redraw_every="run"),  # one sample, one ticket and one write per text
            instruction="Questions of bank customers.",
            task=GenerationTask(record_prompt="topic: {label}\nquestion: {text}"),
            executor=crew,
        )
        prompt = DPFewShotPromptTemplate.from_run(
            run,
            example_prompt=PromptTemplate.from_template("question: {text}\ntopic: {label}"),
            suffix="question: {input}\ntopic:",
        )
    print(f"left in the ledger: epsilon {budget.remaining_epsilon:g}")
    budget.close()
    return prompt


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Private demonstrations from several worker processes.")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    parser.add_argument("--address", help="of a Ray cluster that this machine is part of; by default one of its own")
    parser.add_argument("--folder", type=Path, help="of ledger and memo, to go on with; by default a new one")
    options = parser.parse_args(argv)
    if find_spec("ray") is None:
        sys.exit('This example needs ray: pip install "langchain-dpicl[ray]"')
    with tempfile.TemporaryDirectory() as fresh:
        folder = (options.folder or Path(fresh)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        prompt = written(folder, workers=options.workers, address=options.address)
    for example in prompt.examples or []:
        print(f"   [{example['label']}] {example['text']}")
    verified = verify_report(prompt.privacy_report)
    print(f"paid once: epsilon {verified.epsilon} at delta {verified.delta}, recomputed: {verified.ok}")


if __name__ == "__main__":
    main()
