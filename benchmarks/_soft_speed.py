"""Those who make a training step on the same rows with the same frozen model: ours, peft's, Opacus' around peft's.

Each makes ready outside the clock; what is timed returns how many rows it used. A model of RoBERTa's shape has random
weights and a tokenizer of made-up words; nothing is downloaded.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from langchain_dpicl import Budget, PrivateExamples, PromptDPSGD
from langchain_dpicl.options import Noise, SoftPromptConfig, TrainableModel, Training
from langchain_dpicl.soft_prompts import PromptTask

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>", "a", "b")
LABELS = ("no", "yes")
WAYS = ("ours", "peft", "opacus")
CLIP, NOISE, RATE = 0.1, 1.0, 0.01
_EPSILON = 1e6
Job = Callable[[], int]
Ready = Callable[[], Job]


@dataclasses.dataclass(frozen=True)
class SpeedSize:
    """A model, and the rows of a step.

    Attributes:
      layers, width: of the model; heads are 64 wide.
      vocabulary: its tokens.
      rows: of a step; all are in every sample.
      tokens: of a row, its frame included.
      virtual_tokens: of the prompt.
      kind: "sequence_classification" or "masked_lm".
    """

    layers: int = 6
    width: int = 512
    vocabulary: int = 16_384
    rows: int = 32
    tokens: int = 64
    virtual_tokens: int = 10
    kind: str = "sequence_classification"

    @property
    def shown(self) -> str:
        """What it is, in words."""
        return (
            f"{self.layers} layers x {self.width}, vocabulary {self.vocabulary:,}, {self.rows} rows of {self.tokens} "
            f"tokens, {self.virtual_tokens} virtual tokens"
        )

    @property
    def task(self) -> PromptTask:
        """How a row is put to the model."""
        if self.kind == "masked_lm":
            return PromptTask("masked_lm", "{text} {mask}", LABELS, (" w0", " w1"), max_input_tokens=self.tokens)
        return PromptTask("sequence_classification", "", LABELS, (), max_input_tokens=self.tokens)

    @property
    def records(self) -> list[dict[str, str]]:
        """Made-up records that fill a row."""
        words = self.tokens - (3 if self.kind == "masked_lm" else 2)
        known = self.vocabulary - len(SPECIAL)
        return [
            {
                "text": " ".join(f"w{(row * 7919 + place * 104729) % known}" for place in range(words)),
                "label": LABELS[row % 2],
            }
            for row in range(self.rows)
        ]


def missing(*packages: str) -> str:
    """Returns which packages are not installed, with how to install them; "" where all are."""
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(absent)} (pip install {' '.join(absent)})" if absent else ""


def make_tokenizer(size: SpeedSize) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of whole words."""
    names = [*SPECIAL, *[f"w{place}" for place in range(size.vocabulary - len(SPECIAL))]]
    tokenizer = Tokenizer(models.WordLevel({name: id_ for id_, name in enumerate(names)}, unk_token="<unk>"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 0), trim_offsets=False, add_prefix_space=False
    )
    named = {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>"}
    others = {"pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named, **others)


def make_model(size: SpeedSize, *, device: str) -> Any:
    """Returns a model of RoBERTa's shape with random weights, without dropout."""
    config = transformers.RobertaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=max(1, size.width // 64),
        intermediate_size=4 * size.width,
        max_position_embeddings=size.tokens + size.virtual_tokens + 2,
        type_vocab_size=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=len(LABELS),
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
    )
    of_kind = {
        "masked_lm": transformers.RobertaForMaskedLM,
        "sequence_classification": transformers.RobertaForSequenceClassification,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return of_kind[size.kind](config).eval().to(device)


class Track:
    """One model, and those who train prompts on it.

    Args:
      size: of the model and the rows.
      device: "cpu" or "cuda".
    """

    def __init__(self, size: SpeedSize, *, device: str = "cpu") -> None:
        self.size = size
        self.device = device
        self.model = make_model(size, device=device)
        self.tokenizer = make_tokenizer(size)

    def wait(self) -> None:
        """Waits for a device that works on its own."""
        if self.device != "cpu":
            torch.cuda.synchronize()

    def ready(self, way: str, method: str, *, steps: int, micro_batch: int | None = None) -> Ready:
        """Returns what makes one of `WAYS` ready.

        Args:
          way: who trains.
          method: "soft_prompt" or "prefix".
          steps: ours pays for so many steps beforehand.
          micro_batch: rows that ours works on at once; None: all.
        """
        if way == "ours":
            job = self._ours(method, steps=steps, micro_batch=micro_batch or self.size.rows)
        else:
            job = self._peft(method, is_private=way == "opacus")
        return lambda: job

    def _ours(self, method: str, *, steps: int, micro_batch: int) -> Job:
        """A step of `PromptDPSGD` from end to end: ticket, sample, reading, gradients, clip, sum, noise, update."""
        private = PrivateExamples(
            self.size.records, label_key="label", labels=LABELS, public_size=self.size.rows, dataset_id="made-up"
        )
        run = PromptDPSGD.from_private_examples(
            private,
            llm=TrainableModel(self.model, self.tokenizer, micro_batch=micro_batch),
            training=Training(
                expected_batch_size=self.size.rows,  # every coin falls on the same side: all rows are in every sample
                steps=steps,
                l2_clip_norm=CLIP,
                learning_rate=RATE,
            ),
            budget=Budget(epsilon=_EPSILON, delta=1e-6),
            epsilon=_EPSILON,
            task=self.size.task,
            prompt=SoftPromptConfig(method, self.size.virtual_tokens),  # type: ignore[arg-type]
            noise=Noise(multiplier=NOISE),
        )
        told = run.stream(progress=False)
        engine, added = run.engine, [0]
        engine.check()
        gradients = engine.gradients

        def counted(parameters: Any, groups: Any, *, add: Callable[[Any], None]) -> None:
            def adds(rows: Any) -> None:
                added[0] += len(rows)
                add(rows)

            gradients(parameters, groups, add=adds)

        engine.gradients = counted

        def job() -> int:
            added[0] = 0
            next(told)
            self.wait()
            return added[0]

        return job

    def _peft(self, method: str, *, is_private: bool) -> Job:
        """A step of peft: forward, backward, update; private: per-sample gradients, clip and noise by Opacus."""
        model = self._wrapped(method)
        learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
        rule: Any = torch.optim.Adam(learning, lr=RATE)
        if is_private:
            from opacus import GradSampleModule
            from opacus.optimizers import DPOptimizer

            model = GradSampleModule(model, strict=False)
            rule = DPOptimizer(rule, noise_multiplier=NOISE, max_grad_norm=CLIP, expected_batch_size=self.size.rows)
        given = self._given(in_front=self.size.virtual_tokens if method == "soft_prompt" else 0)

        def job() -> int:
            rule.zero_grad()
            model(**given).loss.backward()
            rule.step()
            self.wait()
            return len(given["input_ids"])

        return job

    def _wrapped(self, method: str) -> Any:
        """Returns peft's model around a copy of ours; only the prompt learns."""
        import peft

        kind = {"masked_lm": "FEATURE_EXTRACTION", "sequence_classification": "SEQ_CLS"}[self.size.kind]
        config = {"soft_prompt": peft.PromptTuningConfig, "prefix": peft.PrefixTuningConfig}[method]
        model = peft.get_peft_model(
            copy.deepcopy(self.model), config(task_type=kind, num_virtual_tokens=self.size.virtual_tokens)
        )
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("prompt_encoder" in name)
        return model.train()

    def _given(self, *, in_front: int) -> dict[str, torch.Tensor]:
        """Returns the rows as peft reads them, at the same length, made once; a prompt in front has no target."""
        mask = " <mask>" if self.size.kind == "masked_lm" else ""
        told = self.tokenizer([record["text"] + mask for record in self.size.records], return_tensors="pt")
        ids = told["input_ids"].to(self.device)
        right = torch.tensor([LABELS.index(record["label"]) for record in self.size.records], device=self.device)
        if self.size.kind == "masked_lm":
            words = self.tokenizer.convert_tokens_to_ids(["w0", "w1"])
            hidden = ids == self.tokenizer.mask_token_id
            right = torch.where(hidden, torch.tensor(words, device=self.device)[right][:, None], -100)
            right = torch.nn.functional.pad(right, (in_front, 0), value=-100)
        return {"input_ids": ids, "attention_mask": told["attention_mask"].to(self.device), "labels": right}
