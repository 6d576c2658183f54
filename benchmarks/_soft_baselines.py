"""Baselines that change the model itself, trained by Opacus: DP tuning of all layers, and DP LoRA.

These are NOT this package's engine: they take no `PrivateExamples` and no ledger, their records are a list that nothing
protects but the run itself, and their noise is torch's generator, which is no source of secret coins. The sampler is
Poisson, and the noise is what this package's accountant asks of it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from _soft_task import SoftTask
from _soft_utility import answers, share_right

from langchain_dpicl.backends.tuning.tasks import TaskReader
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.soft_prompts.plan import plan_training

LAYERS, LORA = "all layers", "LoRA"
BASELINES = (LAYERS, LORA)
_RANK, _PHYSICAL = 8, 64


def tuned_by_opacus(
    model: Any,
    tokenizer: Any,
    task: SoftTask,
    *,
    way: str,
    epsilon: float,
    steps: int,
    batch: int,
    clip: float,
    rate: float,
) -> float:
    """Returns the share of right answers of a copy of the model, tuned by DP-SGD on records that no ledger protects.

    Args:
      model: a masked model.
      tokenizer: its tokenizer.
      task: its records are used as a plain list.
      way: one of `BASELINES`; of "all layers", embeddings and the head of words stay as they are.
      epsilon: of all steps; infinity: no clip and no noise, NOT PRIVATE.
      steps: of training.
      batch: expected records of a step.
      clip: length that no record's gradient exceeds.
      rate: size of a step of Adam.
    """
    own = prepared(model, way)
    learning = [parameter for parameter in own.parameters() if parameter.requires_grad]
    reader = TaskReader(tokenizer, task.task)
    rule, trained = _rule(
        own, learning, _noise(task, learning, epsilon, steps, batch), batch=batch, clip=clip, rate=rate
    )
    for _ in range(steps):
        included = SYSTEM_RANDOM.bernoulli(batch / len(task.records), len(task.records))
        chosen = [record for record, is_in in zip(task.records, included, strict=True) if is_in]
        rule.zero_grad()
        _step(trained, rule, reader, chosen, expected=batch)
    if trained is not own:
        trained.remove_hooks()  # private models are asked without the hooks of others
    own.eval()
    plain = own.merge_and_unload() if way == LORA else own
    return share_right(answers(plain, tokenizer, task), task.right)


def prepared(model: Any, way: str) -> Any:
    """Returns a copy of which the way's weights learn."""
    own = copy.deepcopy(model).eval()
    own.requires_grad_(False)
    if way == LORA:
        import peft

        return peft.get_peft_model(own, peft.LoraConfig(r=_RANK, lora_alpha=_RANK, target_modules=["query", "value"]))
    for parameter in own.roberta.encoder.parameters():
        parameter.requires_grad_(True)
    return own


def _noise(task: SoftTask, learning: Sequence[Any], epsilon: float, steps: int, batch: int) -> float:
    if math.isinf(epsilon):
        return 0.0
    plan = plan_training(
        len(task.records),
        epsilon=epsilon,
        delta=task.delta,
        expected_batch_size=batch,
        l2_clip_norm=1.0,
        width=sum(parameter.numel() for parameter in learning),
        steps=steps,
    )
    return plan.noise_multiplier


def _rule(own: Any, learning: Sequence[Any], noise: float, *, batch: int, clip: float, rate: float) -> tuple[Any, Any]:
    """Returns the optimizer and the model that it trains; without noise both are torch's own."""
    rule = torch.optim.Adam(learning, lr=rate)
    if not noise:
        return rule, own
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    own.train()
    trained = GradSampleModule(own, strict=False, loss_reduction="sum")
    private = DPOptimizer(
        rule, noise_multiplier=noise, max_grad_norm=clip, expected_batch_size=batch, loss_reduction="mean"
    )
    return private, trained


def _step(trained: Any, rule: Any, reader: TaskReader, chosen: Sequence[dict[str, str]], *, expected: int) -> None:
    """Makes one step on a Poisson sample, some records at a time; an empty sample is a step of noise alone."""
    is_private = hasattr(rule, "signal_skip_step")
    parts = [chosen[start : start + _PHYSICAL] for start in range(0, len(chosen), _PHYSICAL)]
    for place, part in enumerate(parts):
        loss = _loss(trained, reader, part)
        (loss if is_private else loss / expected).backward()
        if is_private:
            rule.signal_skip_step(do_skip=place + 1 < len(parts))
            rule.step()
            rule.zero_grad()
    if is_private and not parts:
        for parameter in rule.params:
            parameter.grad_sample = parameter.new_zeros((0, *parameter.shape))
    if not is_private or not parts:
        rule.step()


def _loss(trained: Any, reader: TaskReader, part: Sequence[dict[str, str]]) -> torch.Tensor:
    """Returns the summed loss of records at their masks, among the label words."""
    read = [reader.input(record["text"]) for record in part]
    length = reader.task.max_input_tokens
    ids = torch.full((len(read), length), reader.filler)
    for row, one in enumerate(read):
        ids[row, : len(one.ids)] = torch.tensor(one.ids)
    mask = torch.tensor([[place < len(one.ids) for place in range(length)] for one in read]).long()
    logits = trained(input_ids=ids, attention_mask=mask).logits
    at = torch.tensor([one.at for one in read])
    asked = logits[torch.arange(len(read)), at][:, list(reader.word_ids)]
    right = torch.tensor([reader.answer(record["label"])[0] for record in part])
    return torch.nn.functional.cross_entropy(asked, right, reduction="sum")
