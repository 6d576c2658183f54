"""A whole voting answer of an engine that takes no time, beside LangChain's own run of a function that does nothing."""

from __future__ import annotations

from typing import Any

from _speed_goals import Goal
from _voting_speed import ALONE, LABELS, ONE_SHOT, PLAIN, InstantEngine, times_of
from langchain_core.runnables import RunnableLambda

from langchain_dpicl import Budget, DPVotingRunnable, PrivateExamples, Serving

WARM_UP = 200


def _voter(num_records: int, *, max_queries: int) -> DPVotingRunnable:
    """Returns a Runnable of ten rows of one record each, on average; its ledger is in memory."""
    records = [
        {"text": f"question number {place} about my money", "queue": LABELS[place % 2]} for place in range(num_records)
    ]
    private = PrivateExamples(
        records, label_key="queue", labels=LABELS, public_size=dict.fromkeys(LABELS, num_records // 2)
    )
    return DPVotingRunnable.from_private_examples(
        private,
        llm=InstantEngine(),
        budget=Budget(epsilon=1.0, delta=1e-7),
        epsilon=1.0,
        max_queries=max_queries,
        answers=PLAIN,
        serving=Serving(memo_size=0),
        **ONE_SHOT,
    )


def goals(*, records: tuple[int, ...] = (8_000, 400_000), rounds: int = 2_000) -> list[Goal]:
    """Measures the median processor time of an answer for each number of records; ours and LangChain's take turns."""
    empty: Any = RunnableLambda(lambda question: question)
    found = []
    for number in records:
        voter = _voter(number, max_queries=rounds + WARM_UP)
        ours, theirs = times_of(
            [
                lambda turn, voter=voter: voter.invoke(f"query {turn}", ALONE),  # type: ignore[misc]
                lambda turn: empty.invoke(f"query {turn}", ALONE),
            ],
            rounds=rounds,
            warm_up=WARM_UP,
            shown=f"answers from {number:,} records",
        )
        name = f"one answer, 10 rows of {number:,} records, instant engine / an empty RunnableLambda"
        found.append(Goal(name, ours.processor, theirs.processor, ours.processor / theirs.processor, 2.5))
    return found


if __name__ == "__main__":
    from _speed_goals import table_of

    print(table_of(goals()))
