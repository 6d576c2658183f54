"""Demonstrations from records that no model may see: the model writes, the records vote on this machine.

    python examples/private_evolution.py

Prints who was shown what, round by round. The "private" records are made up by `bank_questions.py`.
"""

from __future__ import annotations

from typing import Any

from bank_questions import LABELS, bank_questions
from langchain_core.prompts import PromptTemplate

from langchain_dpicl import (
    DPFewShotPromptTemplate,
    EmbeddedLLM,
    PrivacyBudgetCallbackHandler,
    PrivateEvolution,
    PrivateExamples,
)
from langchain_dpicl.backends import LocalEmbeddings
from langchain_dpicl.options import Evolution

SIZE = 400
ROUNDS = 3
SURVIVORS = 6
EPSILON = 2.0
INSTRUCTION = "Questions of bank customers."


def make_model() -> Any:
    """The model that writes. It is asked public and released texts, never a record, so a provider's will do."""
    # With a provider: from langchain_openai import ChatOpenAI; return ChatOpenAI(model="gpt-4.1-mini", max_tokens=60)
    return EmbeddedLLM(temperature=1.0, max_tokens=16, stop=["\n"])


def evolve() -> PrivateEvolution:
    """Plans the noise and declares the share; the only function here that has records."""
    private = PrivateExamples(
        bank_questions(num_per_label=SIZE),
        label_key="label",
        labels=LABELS,
        public_size=dict.fromkeys(LABELS, SIZE),
        dataset_id="bank-questions",
    )
    return PrivateEvolution.from_private_examples(
        private,
        llm=make_model(),
        embeddings=LocalEmbeddings(),  # see the records: keep them on your own machine
        instruction=INSTRUCTION,
        budget=PrivacyBudgetCallbackHandler(epsilon=EPSILON, delta=1e-5),
        epsilon=EPSILON,
        shots_per_label=2,
        evolution=Evolution(rounds=ROUNDS, num_survivors=SURVIVORS),
    )


def main() -> None:
    evolution = evolve()
    plan, embedded = evolution.plan, evolution.plan.embedded
    print(f"planned   {plan.rounds} rounds, noise {plan.noise_multiplier:.1f} votes, epsilon {plan.epsilon}")
    print(f"          the model is asked {plan.cost().public_calls} public prompts, and sees no record")
    print(f"          the embeddings see {embedded['private']:,} private texts, each once, here")
    prompt = DPFewShotPromptTemplate.from_run(
        evolution,
        example_prompt=PromptTemplate.from_template("question: {text}\ntopic: {label}"),
        prefix=INSTRUCTION,
        suffix="question: {input}\ntopic:",
    )
    for label, rounds in evolution.history.items():
        print(f"votes     {label}, best candidate of each round (noisy)")
        for votes in rounds:
            best = max(votes, key=lambda text: votes[text])
            print(f"   {votes[best]:7.1f}  {best}")
    print("prompt    free to use, without limit, with any model")
    print(prompt.format(input="why was my card declined?"))


if __name__ == "__main__":
    main()
