"""Made-up tickets for the programs."""

from langchain_dpicl import PrivacyBudgetCallbackHandler, PrivateExamples

CARD = ("my card was declined", "my card has not arrived", "my card was charged twice", "the machine kept my card")
SEND = ("send money abroad", "my transfer is pending", "the transfer failed", "cancel my transfer")
TICKETS = [
    {"text": f"{t} {i}", "queue": q} for i in range(40) for q, ts in (("card", CARD), ("transfer", SEND)) for t in ts
]


def examples(name: str) -> PrivateExamples:
    return PrivateExamples(TICKETS, label_key="queue", labels=("card", "transfer"), public_size=300, dataset_id=name)


def handler(epsilon: float = 8.0) -> PrivacyBudgetCallbackHandler:
    return PrivacyBudgetCallbackHandler(epsilon=epsilon, delta=1e-6)
