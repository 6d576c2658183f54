"""A small RoBERTa-like masked model, made from public text in minutes, and kept.

It begins with word vectors from counts of what stands near what. Then it fills gaps now and then, and learns many small
lessons: tell some labels of a shelf apart, by words that are drawn per lesson, behind a prompt that is the lesson's own
and is learnt beside the weights. So prompts decide what it says, and a new one can be trained while the model stays
frozen. Lessons with words of their own are asked oftener, and in one step of three without their prompts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from _soft_corpus import Corpus
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from langchain_dpicl.backends.tuning.prompted_model import PromptedModel, stack_inputs
from langchain_dpicl.backends.tuning.tasks import TaskReader
from langchain_dpicl.soft_prompts import PromptTask

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
WORDS = {
    "review": {"negative": "terrible", "positive": "great"},
    "topic": {"world": "world", "sports": "sports", "business": "business", "science": "science"},
    "question": {name: name for name in ("short", "description", "thing", "person", "place", "number")},
}
"""Words of the shelves that have words of their own; they are made single tokens."""
TEMPLATES = {"review": "{text} it was{mask}.", "topic": "{text} topic:{mask}.", "question": "{text} answer:{mask}."}
OTHER_TEMPLATES = ("{text} label:{mask}.", "{text} this is{mask}.")
COLOURS = ("red", "blue", "green", "black", "white", "yellow")
ANSWERS = ("yes", "no", "good", "bad", "first", "last", "one", "two", "three", "north", "south", "water", "fire")
DRAWN = (*COLOURS, *ANSWERS)
"""Words that stand for labels in the other lessons."""
_PAD = 1
_HIDDEN_SHARE, _WINDOW, _SPREAD = 0.15, 4, 0.1
_OWN_SHARE = 0.25
"""Of the rows behind prompts, those of the lessons with words of their own."""
_FEWEST = 100.0
# Neighbours that a token needs for its counts to say something; the others begin at random.


@dataclasses.dataclass(frozen=True)
class BaseSize:
    """How the base model is made.

    Attributes:
      layers, width, heads: of the model.
      vocabulary: its tokens.
      length: tokens of a text at most.
      prompt: virtual tokens of a lesson's prompt.
      lessons: with drawn labels and words, beside those with words of their own.
      steps, batch: of training; every sixth step fills gaps.
      learning_rate: at its highest.
      most_chars: of each plain file.
    """

    layers: int = 2
    width: int = 128
    heads: int = 4
    vocabulary: int = 6_000
    length: int = 40
    prompt: int = 8
    lessons: int = 120
    steps: int = 2_400
    batch: int = 64
    learning_rate: float = 2e-3
    most_chars: int = 1_000_000

    @property
    def shown(self) -> str:
        """What it is, in words."""
        return (
            f"{self.layers} layers x {self.width}, vocabulary {self.vocabulary:,}, {self.steps:,} steps x {self.batch}"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Lesson:
    """A task of the public text, and its texts by label."""

    reader: TaskReader
    texts: list[list[str]] = dataclasses.field(repr=False)


def base_model(size: BaseSize, read: Callable[[], Corpus], *, kept: Path, say: Callable[[str], None]) -> Path:
    """Returns the folder of the model; makes it where it is not there yet.

    Args:
      size: how it is made.
      read: gives the public text.
      kept: folder of such folders.
      say: gets how far the work is.
    """
    sources = "".join(
        Path(__file__).with_name(name).read_text("utf-8") for name in ("_soft_model.py", "_soft_corpus.py")
    )
    digest = hashlib.sha256((json.dumps(dataclasses.asdict(size)) + sources).encode()).hexdigest()[:12]
    folder = kept / f"base-{digest}"
    if (folder / "made.json").exists():
        return folder
    began = time.perf_counter()
    corpus = read()
    say(corpus.shown)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tokenizer = make_tokenizer(corpus, vocabulary=size.vocabulary)
        ids = [one.ids for one in tokenizer._tokenizer.encode_batch(corpus.lines, add_special_tokens=False)]  # noqa: SLF001
        model = make_model(size, vocabulary=len(tokenizer), vectors=near_vectors(ids, len(tokenizer), size.width))
        say(f"tokenizer and word vectors, {time.perf_counter() - began:.0f} s")
        losses = taught(model, tokenizer, corpus, ids, size, say=say)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    made = {"size": dataclasses.asdict(size), "seconds": time.perf_counter() - began, "losses": losses}
    (folder / "made.json").write_text(json.dumps(made, indent=2))  # last: a folder without it is not whole
    return folder


def make_tokenizer(corpus: Corpus, *, vocabulary: int) -> PreTrainedTokenizerFast:
    """Returns a byte-level tokenizer of the public text; label words are single tokens of it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    named = [word for words in WORDS.values() for word in words.values()]
    texts = corpus.lines[:: max(1, len(corpus.lines) // 40_000)]
    tokenizer.train_from_iterator(texts + [f" {word}" * 50 for word in (*named, *DRAWN)] * 20, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    named_tokens = {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>"}
    others = {"pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named_tokens, **others)


def near_vectors(ids: list[list[int]], vocabulary: int, width: int) -> torch.Tensor:
    """Returns float32[vocabulary, width]: vectors whose products say how much oftener than by chance two are near."""
    line = np.concatenate([np.array([*one, *[_PAD] * _WINDOW]) for one in ids])
    counts = np.zeros(vocabulary * vocabulary)
    for gap in range(1, _WINDOW + 1):
        counts += np.bincount(line[:-gap] * vocabulary + line[gap:], minlength=vocabulary**2) / gap
    near = torch.from_numpy(counts.reshape(vocabulary, vocabulary)).float()
    near[_PAD], near[:, _PAD] = 0.0, 0.0
    near += near.T.clone()
    each = near.sum(dim=1)
    rare = each < _FEWEST
    near[rare], near[:, rare] = 0.0, 0.0
    each = each.clamp(min=1.0)
    chance = each[:, None] * each.pow(0.75)[None] / each.pow(0.75).sum()
    near = (near / chance).clamp_(min=1.0).log_()
    left, strength, _ = torch.svd_lowrank(near, q=width, niter=4)
    found = left * strength.sqrt()
    found *= _SPREAD / found[~rare].std()
    found[rare] = _SPREAD * torch.randn(int(rare.sum()), width)
    return found


def make_model(size: BaseSize, *, vocabulary: int, vectors: torch.Tensor | None = None) -> Any:
    """Returns a masked model with random weights, but for its word vectors."""
    config = transformers.RobertaConfig(
        vocab_size=vocabulary,
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.width,
        max_position_embeddings=size.length + 64,
        type_vocab_size=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=_PAD,
        bos_token_id=0,
        eos_token_id=2,
        initializer_range=0.5 / size.width**0.5,
    )
    model = transformers.RobertaForMaskedLM(config)
    if vectors is not None:
        with torch.no_grad():
            model.get_input_embeddings().weight.copy_(vectors)
    return model


def lessons(tokenizer: Any, corpus: Corpus, size: BaseSize) -> list[Lesson]:
    """Returns those with words of their own, and then those with drawn labels and words."""
    coins = random.Random(1)
    found = []
    for shelf, words in WORDS.items():
        found.append(_lesson(tokenizer, corpus.shelves[shelf], words, TEMPLATES[shelf], size))
    for _ in range(size.lessons):
        shelf = coins.choice(sorted(corpus.shelves))
        labels = [label for label, texts in corpus.shelves[shelf].items() if len(texts) >= 20]
        labels = coins.sample(sorted(labels), min(len(labels), coins.randint(2, 6)))
        words = dict(zip(labels, coins.sample(DRAWN, len(labels)), strict=True))
        template = coins.choice([*TEMPLATES.values(), *OTHER_TEMPLATES])
        found.append(_lesson(tokenizer, corpus.shelves[shelf], words, template, size))
    return found


def _lesson(
    tokenizer: Any, shelf: dict[str, list[str]], words: dict[str, str], template: str, size: BaseSize
) -> Lesson:
    known = {label: word for label, word in words.items() if shelf.get(label)}
    spoken = tuple(f" {word}" for word in known.values())
    task = PromptTask("masked_lm", template, tuple(known), spoken, max_input_tokens=size.length)
    return Lesson(TaskReader(tokenizer, task), [shelf[label] for label in known])


def taught(
    model: Any, tokenizer: Any, corpus: Corpus, ids: list[list[int]], size: BaseSize, *, say: Callable[[str], None]
) -> list[float]:
    """Trains all weights, and the prompts of the lessons; returns the mean loss of the lessons per hundred steps."""
    coins = random.Random(2)
    every = lessons(tokenizer, corpus, size)
    prompted = PromptedModel(model.eval(), method="soft_prompt", kind="masked_lm")
    prompts = torch.nn.Parameter(torch.randn(len(every), size.prompt, size.width) * _SPREAD)
    rule = torch.optim.AdamW([*model.parameters(), prompts], lr=size.learning_rate, weight_decay=0.01)
    pace = torch.optim.lr_scheduler.OneCycleLR(rule, size.learning_rate, size.steps + 1, pct_start=0.1)
    told: list[float] = []
    losses: list[float] = []
    for step in range(size.steps):
        is_gaps = step % 6 == 2
        loss = (
            _gap_loss(model, coins.choices(ids, k=size.batch), size)
            if is_gaps
            else _lesson_loss(prompted, every, prompts, size, coins, alone=step % 3 == 0)
        )
        rule.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*model.parameters(), prompts], 1.0)
        rule.step()
        pace.step()
        if not is_gaps:
            losses.append(loss.item())
        if (step + 1) % 100 == 0 or step + 1 == size.steps:
            told.append(sum(losses) / max(1, len(losses)))
            losses = []
            say(f"base model: step {step + 1} of {size.steps}, loss of the lessons {told[-1]:.3f}")
    return told


def _gap_loss(model: Any, chosen: list[list[int]], size: BaseSize) -> torch.Tensor:
    """Returns the loss of filling gaps: of those, 4 of 5 are hidden and the others seen."""
    cut = [[0, *ids[: size.length - 2], 2] for ids in chosen]
    rows = stack_inputs(cut, length=max(map(len, cut)), filler=_PAD, device=torch.device("cpu"), is_causal=False)
    asked = (torch.rand(rows.ids.shape) < _HIDDEN_SHARE) & rows.mask & (rows.ids > len(SPECIAL))
    hidden = asked & (torch.rand(rows.ids.shape) < 0.8)
    states = model.roberta(torch.where(hidden, SPECIAL.index("<mask>"), rows.ids), attention_mask=rows.mask.long())
    logits = model.lm_head(states.last_hidden_state[asked])
    return torch.nn.functional.cross_entropy(logits, rows.ids[asked], reduction="sum") / asked.sum().clamp(min=1)


def _lesson_loss(
    prompted: PromptedModel,
    every: list[Lesson],
    prompts: torch.Tensor,
    size: BaseSize,
    coins: random.Random,
    *,
    alone: bool,
) -> torch.Tensor:
    """Returns the loss of one row per drawn lesson; alone: lessons with words of their own, without their prompts."""
    own, whole = len(WORDS), len(every)
    numbers = [coins.randrange(own if alone or coins.random() < _OWN_SHARE else whole) for _ in range(size.batch)]
    read, right = [], []
    for number in numbers:
        lesson = every[number]
        label = coins.randrange(len(lesson.texts))
        read.append(lesson.reader.input(coins.choice(lesson.texts[label])))
        right.append(lesson.reader.word_ids[label])
    length = max(len(one.ids) for one in read)
    device = prompted.device
    rows = stack_inputs([one.ids for one in read], length=length, filler=_PAD, device=device, is_causal=False)
    rows.at = torch.tensor([one.at for one in read])
    chosen = prompts[numbers][:, :0] if alone else prompts[numbers]
    logits = prompted.forward(chosen, rows)[:, 0]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(right))
