"""20 four-shot prompts, scores, abstention, tenants, a memo on disk: every concern in its own value."""

from langchain_dpicl import DPVotingRunnable, EmbeddedLLM, FewShotTask, LabelAnswers, Noise, Rows, Serving
from tests.programs.common import examples, handler

task = FewShotTask("Ticket: {text}\nQueue: {queue}", "Ticket: {input}\nQueue:", prefix="Classify the ticket.")
voter = DPVotingRunnable.from_private_examples(
    examples("p02"),
    llm=EmbeddedLLM(),
    budget=handler(),
    epsilon=2.0,
    max_queries=100,
    task=task,
    rows=Rows(slots=20, shots=4),
    noise=Noise("gaussian"),
    answers=LabelAnswers(scores=True, abstain_below=0.3, calibrate=False),
    serving=Serving(memo_size=32, tenant_max_queries=20),
    component="triage",
)
result = voter.with_receipts().invoke("my card is lost", {"configurable": {"tenant": "acme"}})
scores: dict[str, float] | None = result.scores
print(result.label, scores, result.receipt.ledger_id[:4], result.receipt.queries_left)
