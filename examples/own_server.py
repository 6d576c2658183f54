"""Private demonstrations through a model server of your own: llama.cpp, vLLM, anything with OpenAI's endpoints.

    python examples/own_server.py --base-url http://127.0.0.1:8080/v1 --model NAME
    python examples/own_server.py --base-url http://127.0.0.1:8080/v1 --model NAME --completions --full-vocabulary 32000

Needs the extra `openai`. The server SEES the private prompts; here the "private" records are made up by
`bank_questions.py`. `make server-demo` runs it against a llama.cpp server with a tiny random model.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from typing import Any

from bank_questions import LABELS, bank_questions
from langchain_core.prompts import PromptTemplate

from langchain_dpicl import (
    Decoding,
    DPFewShotPromptTemplate,
    GenerationTask,
    PrivacyBudgetCallbackHandler,
    PrivateExamples,
    Rows,
)
from langchain_dpicl.backends import LangChainBackend

SIZE = 600
DELTA = 1e-5


def connect(options: argparse.Namespace) -> LangChainBackend:
    """Wraps a stock client; a probe with public text decides here what the server can do."""
    from langchain_openai import ChatOpenAI, OpenAI

    shared: dict[str, Any] = {"model": options.model, "base_url": options.base_url, "api_key": options.api_key}
    client = OpenAI(**shared) if options.completions else ChatOpenAI(**shared)
    if options.no_prompt_cache:
        client = client.bind(extra_body={"cache_prompt": False})
    return LangChainBackend(client, full_vocabulary=options.full_vocabulary, max_concurrency=options.max_concurrency)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Private demonstrations through a model server of your own.")
    parser.add_argument("--base-url", required=True, help="OpenAI-compatible address, ending in /v1")
    parser.add_argument("--model", default="model", help="model name the server knows")
    parser.add_argument("--api-key", default="none", help="key, if the server wants one")
    parser.add_argument("--completions", action="store_true", help="completion endpoint instead of chat")
    parser.add_argument("--full-vocabulary", type=int, help="ask for every token; give the vocabulary size")
    parser.add_argument("--no-prompt-cache", action="store_true", help="tell llama.cpp not to reuse prompts")
    parser.add_argument("--max-concurrency", type=int, default=8)
    parser.add_argument("--epsilon", type=float, default=4.0)
    parser.add_argument("--shots-per-label", type=int, default=1)
    parser.add_argument("--num-slots", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=12)
    options = parser.parse_args(argv)
    if find_spec("langchain_openai") is None:
        sys.exit('This example needs langchain_openai: pip install "langchain-dpicl[openai]"')

    engine = connect(options)
    print(engine)
    private = PrivateExamples(
        bank_questions(num_per_label=SIZE),
        label_key="label",
        labels=LABELS,
        public_size=dict.fromkeys(LABELS, SIZE),
        dataset_id="bank-questions",
    )
    budget = PrivacyBudgetCallbackHandler(epsilon=options.epsilon, delta=DELTA)
    prompt = DPFewShotPromptTemplate.from_private_examples(
        private,
        llm=engine,
        budget=budget,
        epsilon=options.epsilon,
        instruction="Questions of bank customers.",
        task=GenerationTask(record_prompt="topic: {label}\nquestion: {text}"),
        example_prompt=PromptTemplate.from_template("question: {text}\ntopic: {label}"),
        suffix="question: {input}\ntopic:",
        shots_per_label=options.shots_per_label,
        rows=Rows(units=options.num_slots),
        max_tokens=options.max_tokens,
        decoding=Decoding(candidates="all" if options.full_vocabulary else 20),
    )
    for example in prompt.examples or []:
        print(f"   [{example['label']}] {example['text']}")
    print(f"   epsilon {prompt.epsilon} at delta {DELTA:g}, add_remove; budget left {budget.remaining_epsilon}")


if __name__ == "__main__":
    main()
