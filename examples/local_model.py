"""One local model that writes private demonstrations and serves them, offline.

    python examples/local_model.py
    python examples/local_model.py --model FOLDER        a causal language model of the transformers package

Needs the extra `hf`. Without `--model` a tiny model with random weights is made in a temporary folder and reads a few
public sentences for a moment: it knows words and nothing else, so expect no sense. The "private" records are made up
by `bank_questions.py`. The model SEES them; it runs in this process, and nothing leaves it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib.util import find_spec

from bank_questions import LABELS, bank_questions, new_questions
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import Runnable

from langchain_dpicl import (
    ChatLocal,
    DemonstrationSynthesizer,
    DPFewShotPromptTemplate,
    GenerationTask,
    PrivacyBudgetCallbackHandler,
    PrivateExamples,
    Rows,
)
from langchain_dpicl.backends import HuggingFaceBackend
from langchain_dpicl.options import LogitNoise

SIZE = 500
DELTA = 1e-5
PUBLIC_LINES = (
    "Questions of bank customers.\n\ntopic: card payment\nquestion: My card was charged and the payment is pending.\n",
    "Questions of bank customers.\n\ntopic: card payment\nquestion: Why was a payment to the shop declined?\n",
    "Questions of bank customers.\n\ntopic: transfer\nquestion: Why has the transfer not arrived in my account?\n",
    "Questions of bank customers.\n\ntopic: transfer\nquestion: Can I cancel a transfer that I made?\n",
    "Questions of bank customers.\n\ntopic: cash withdrawal\nquestion: I got the wrong amount of cash.\n",
    "Questions of bank customers.\n\ntopic: cash withdrawal\nquestion: What is the fee for a withdrawal at the ATM?\n",
    "Questions of bank customers.\n\ntopic: top up\nquestion: My top up by card is still pending.\n",
    "Questions of bank customers.\n\ntopic: top up\nquestion: How do I top up my account in cash?\n",
)


def make_model(folder: str) -> None:
    """Writes a tiny causal model and its tokenizer; the seed fixes its weights, never any noise."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)  # so small a model takes longer on several
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words.train_from_iterator(PUBLIC_LINES * 3, trainer)
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).train()
    ids = tokenizer(list(PUBLIC_LINES), return_tensors="pt", padding=True)["input_ids"]
    labels = ids.masked_fill(ids == tokenizer.pad_token_id, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(80):
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def plan_demonstrations(
    engine: HuggingFaceBackend, budget: PrivacyBudgetCallbackHandler, *, max_tokens: int
) -> DemonstrationSynthesizer:
    """Plans one demonstration per topic, each from one secret sample of the records; nothing is spent yet."""
    private = PrivateExamples(
        bank_questions(num_per_label=SIZE),
        label_key="label",
        labels=LABELS,
        public_size=dict.fromkeys(LABELS, SIZE),
        dataset_id="bank-questions",
    )
    return DemonstrationSynthesizer.from_private_examples(
        private,
        llm=engine,
        budget=budget,
        epsilon=budget.epsilon,
        noise=LogitNoise("recentered_clip"),
        max_tokens=max_tokens,
        rows=Rows(redraw_every="run"),  # one sample, and one cache, for the whole text
        instruction="Questions of bank customers.",
        task=GenerationTask(record_prompt="topic: {label}\nquestion: {text}"),
    )


def as_chain(released: DPFewShotPromptTemplate, engine: HuggingFaceBackend) -> Runnable[dict[str, str], str]:
    """Serves the released demonstrations with the model that wrote them; free, any number of times."""
    return released | ChatLocal(backend=engine, max_tokens=6, stop=["\n"]) | StrOutputParser()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="One local model that writes private demonstrations and serves them.")
    parser.add_argument("--model", help="folder of a causal language model; default: a tiny one, made on the spot")
    parser.add_argument("--epsilon", type=float, default=4.0)
    parser.add_argument("--max-tokens", type=int, default=12, help="tokens of a demonstration")
    parser.add_argument("--max-prompt-tokens", type=int, default=96, help="what every prompt is padded or cut to")
    options = parser.parse_args(argv)
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        sys.exit(f'This example needs {" and ".join(missing)}: pip install "langchain-dpicl[hf]"')

    with tempfile.TemporaryDirectory() as folder:
        if options.model is None:
            make_model(folder)
        engine = HuggingFaceBackend(options.model or folder, max_prompt_tokens=options.max_prompt_tokens)
    budget = PrivacyBudgetCallbackHandler(epsilon=options.epsilon, delta=DELTA)
    synthesizer = plan_demonstrations(engine, budget, max_tokens=options.max_tokens)
    plan = synthesizer.plan.to_dict()
    print("plan     {mechanism}: clip {clip:.3g}, temperature {temperature:.3g}".format(**plan))
    print("         {num_slots} {rows} expected, one sample per demonstration, {candidates} candidates".format(**plan))
    print("         epsilon {epsilon} at delta {delta:g}, {adjacency}".format(**plan))

    released = DPFewShotPromptTemplate.from_run(
        synthesizer,  # writes the demonstrations here; this is what costs
        example_prompt=PromptTemplate.from_template("question: {text}\ntopic: {label}"),
        suffix="question: {input}\ntopic:",
    )
    for example in released.examples or []:
        print(f"   [{example['label']}] {example['text']}")
    chain = as_chain(released, engine)
    for record in new_questions(num_per_label=1)[:2]:
        print(f"served   {record['text']} -> {chain.invoke({'input': record['text']}).strip()}")
    print(budget.report())


if __name__ == "__main__":
    main()
