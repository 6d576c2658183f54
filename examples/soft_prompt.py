"""A soft prompt trained on private questions, saved, and served as a classifier and as a LangChain model, offline.

    python examples/soft_prompt.py
    python examples/soft_prompt.py --model FOLDER        a causal language model of the transformers package

Needs the extra `hf`. Without `--model` a tiny model is made in a temporary folder and reads some public sentences for a
moment, which takes most of the time. It stays as it is afterwards: what is trained, with noise, is a prompt of a few
virtual tokens. The "private" records are made up by `bank_questions.py`; the model SEES them, in this process.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from bank_questions import LABELS, bank_questions, new_questions
from langchain_core.output_parsers import StrOutputParser

from langchain_dpicl import (
    LocalLLM,
    PrivacyBudgetCallbackHandler,
    PrivateExamples,
    PromptDPSGD,
    SoftPrompt,
    SoftPromptClassifier,
    verify_report,
)
from langchain_dpicl.options import SoftPromptConfig, TrainableModel, Training
from langchain_dpicl.soft_prompts import PromptTask, SoftPromptBackend

SIZE = 500
DELTA = 1e-5
WORDS = {"card payment": " card", "transfer": " transfer", "cash withdrawal": " cash", "top up": " top"}
PUBLIC_STEPS = 80


def public_lines() -> list[str]:
    """Public exercises that make the model read questions: it reads whether to name the topic, or the next one."""
    lines = []
    for record in bank_questions(num_per_label=60, seed=1):  # stands for questions that the bank has published
        place = LABELS.index(record["label"])
        for told, label in (("topic", LABELS[place]), ("next", LABELS[(place + 1) % len(LABELS)])):
            lines.append(f"{told} : {record['text']}\n={WORDS[label]}")
    return lines


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
        vocab_size=700,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = public_lines()
    words.train_from_iterator(lines, trainer)
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(PUBLIC_STEPS):
        batch = [lines[(step * 32 + place) * 7 % len(lines)] for place in range(32)]
        given = tokenizer(batch, return_tensors="pt", padding=True, padding_side="left")
        told = model(**given).logits[:, :-1].flatten(0, 1)
        each = torch.nn.functional.cross_entropy(told, given["input_ids"][:, 1:].flatten(), reduction="none")
        each = each.view(len(batch), -1) * given["attention_mask"][:, 1:]
        loss = each.sum() / given["attention_mask"][:, 1:].sum() + each[:, -1].mean()  # the answer counts most
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def private_questions() -> PrivateExamples:
    """Declares the records: what is public about them, and what a unit is."""
    return PrivateExamples(
        bank_questions(num_per_label=SIZE),
        label_key="label",
        labels=LABELS,
        public_size=dict.fromkeys(LABELS, SIZE),
        dataset_id="bank-questions",
    )


# How a text is put to the model, and which word stands for which topic: public choices, like all options.
TASK = PromptTask("causal_lm", "{text}\n=", tuple(WORDS), tuple(WORDS.values()), max_input_tokens=56)
PROMPT = SoftPromptConfig(num_virtual_tokens=5, init_text="what is it about ?")


def share_correct(classifier: SoftPromptClassifier, records: list[dict[str, str]]) -> float:
    """Returns how many of the PUBLIC test records are labelled right."""
    labels = classifier.batch([record["text"] for record in records])
    return sum(label == record["label"] for label, record in zip(labels, records, strict=True)) / len(records)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A soft prompt trained on private questions, saved and served.")
    parser.add_argument("--model", help="folder of a causal language model; default: a tiny one, made on the spot")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    options = parser.parse_args(argv)
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        sys.exit(f'This example needs {" and ".join(missing)}: pip install "langchain-dpicl[hf]"')

    with tempfile.TemporaryDirectory() as folder:
        model = options.model or f"{folder}/model"
        if options.model is None:
            make_model(model)
        budget = PrivacyBudgetCallbackHandler(epsilon=options.epsilon, delta=DELTA)
        run = PromptDPSGD.from_private_examples(
            private_questions(),
            llm=TrainableModel(model, micro_batch=64),
            training=Training(expected_batch_size=128, steps=options.steps, learning_rate=options.learning_rate),
            budget=budget,
            epsilon=options.epsilon,
            task=TASK,
            prompt=PROMPT,
        )
        print("plan     {steps} steps, noise {noise_scale:.3g} per number of a gradient".format(**run.plan.to_dict()))
        print(f"         epsilon {run.plan.epsilon} at delta {run.plan.delta:g}")
        tests = new_questions(num_per_label=40)
        before = share_correct(SoftPromptClassifier(model, run.result), tests)
        print(f"before   {before:.0%} of new questions right")
        run.run()  # this is what costs
        run.result.save(f"{folder}/prompt")

        prompt = SoftPrompt.load(f"{folder}/prompt")  # free from here on
        checked = verify_report(prompt)
        print(f"trained  {prompt}, verified: {checked.ok}, epsilon {checked.epsilon}")
        classifier = SoftPromptClassifier(model, prompt)
        print(f"after    {share_correct(classifier, tests):.0%} of new questions right")
        chain = LocalLLM(backend=SoftPromptBackend(model, prompt), max_tokens=1) | StrOutputParser()
        for record in tests[::50]:
            question = record["text"]
            print(f"served   {question} -> {classifier.invoke(question)} ({chain.invoke(question).strip()})")
        print(f"files    {sorted(path.name for path in Path(folder, 'prompt').iterdir())}")
    print(budget.report())


if __name__ == "__main__":
    main()
