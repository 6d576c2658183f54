"""A causal model with random weights and a word-level tokenizer, made on the spot, and what they are asked to continue.

Nothing is downloaded. The weights are random but for two things, so that all who are measured write as
many tokens: rows agree about the next token (embeddings are wide, so that a model repeats itself), and the end of the
text never comes.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

INSTRUCTION = "Write a text like these ."
FRAME_TOKENS = 11
"""Words of the instruction, the heads "text :" of an example and of what is to be written, and room for one more."""
_WORDS = ("<s>", "</s>", "<unk>", "<pad>", "Write", "a", "text", "like", "these", ".", ":")
_WORD = r"w\d+|[A-Za-z]+|<[^>]*>|[^\w\s]"
_LOGIT_SPREAD = 2.5
_NEVER = -40.0
_SPREAD_OF_TENSORS = 0.02
# What GPT-2 is initialised with; the embeddings are widened from it.
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


@dataclasses.dataclass(frozen=True)
class Size:
    """What is measured: a model, and how much it reads and writes.

    Attributes:
      layers, width: of the model; heads are 64 wide.
      vocabulary: its tokens.
      slots: private rows; the public row comes on top.
      prompt: tokens that every row is padded to.
      tokens: tokens to be written.
      shared: words of the instruction, which all rows begin with; 0: a short one.
    """

    layers: int = 6
    width: int = 512
    vocabulary: int = 16_384
    slots: int = 10
    prompt: int = 400
    tokens: int = 100
    shared: int = 0

    @property
    def rows(self) -> int:
        """Rows of a batch: the slots and the public prompt."""
        return self.slots + 1

    @property
    def shown(self) -> str:
        """What it is, in words."""
        return (
            f"{self.layers} layers x {self.width}, vocabulary {self.vocabulary:,}; {self.slots} slots + 1 public row, "
            f"prompts of {self.prompt} tokens, {self.tokens} new tokens"
        )


SMALL = Size()
GPT2_SMALL = Size(layers=12, width=768, vocabulary=50_257)


def make_model(size: Size, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """Returns a model of GPT-2's shape with random weights."""
    config = transformers.GPT2Config(
        vocab_size=size.vocabulary,
        n_embd=size.width,
        n_layer=size.layers,
        n_head=max(1, size.width // 64),
        n_positions=max(1024, size.prompt + size.tokens),
        initializer_range=_SPREAD_OF_TENSORS,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=3,
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config).eval()
        words = model.transformer.wte.weight
        words.mul_(_LOGIT_SPREAD / (_SPREAD_OF_TENSORS * size.width**0.5))
        # The last norm adds one constant vector to every state; the end of the text points the other way.
        constant = torch.randn(size.width)
        model.transformer.ln_f.bias.copy_(constant)
        words[config.eos_token_id] = _NEVER * constant / constant.square().sum()
    return model.to(device=device, dtype=dtype)


def make_tokenizer(size: Size) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of whole words, as many as the model has tokens."""
    names = [*_WORDS, *[f"w{i}" for i in range(size.vocabulary - len(_WORDS))]]
    tokenizer = Tokenizer(models.WordLevel({name: id_ for id_, name in enumerate(names)}, unk_token="<unk>"))  # noqa: S106
    # Words need no space between them: what the engine wrote is counted by reading it again.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_WORD), "removed", invert=True)
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=1_000_000, **special)


def words(count: int, *, seed: int, vocabulary: int) -> str:
    """Returns so many words, of one token each."""
    ids = [(7919 * seed + 104_729 * place + place * place) % (vocabulary - len(_WORDS)) for place in range(count)]
    return " ".join(f"w{id_}" for id_ in ids)


def instruction(size: Size) -> str:
    """Returns the public beginning of all prompts."""
    return INSTRUCTION if not size.shared else words(size.shared, seed=1, vocabulary=size.vocabulary)


def input_ids(size: Size, *, device: str = "cpu") -> torch.Tensor:
    """Returns int64[rows, prompt] for those who take ids."""
    tokenizer = make_tokenizer(size)
    rows = [words(size.prompt, seed=row, vocabulary=size.vocabulary) for row in range(size.rows)]
    return torch.tensor([tokenizer.encode(row, add_special_tokens=False) for row in rows], device=device)


def save(model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes a model folder with a chat template that shows what is said and nothing else."""
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
