"""Those who write the same number of tokens on the same model, and the clock they take turns under.

Each of them makes ready outside the clock; what is timed returns how many tokens it wrote, which is checked.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from _local_model import FRAME_TOKENS, Size, input_ids, instruction, make_model, make_tokenizer, words

from langchain_dpicl import Budget, DemonstrationSynthesizer, Noise, PrivateExamples, Rows
from langchain_dpicl.backends import HuggingFaceBackend
from langchain_dpicl.options import LogitNoise, noise_of
from langchain_dpicl.privacy.extensions.logit_sums import LOGIT_MECHANISMS

RECORDS = 400
NOISE, LITTLE_NOISE = 20.0, 0.02
"""Noise over sensitivity. It costs no time. Of probabilities it has to be little, or it draws the end of the text."""
EPSILON = 1e6
Job = Callable[[], int]
"""What is timed: returns the tokens that it wrote."""
Ready = Callable[[], Job]
"""Makes a job ready, outside the clock."""


class Place:
    """One model on one device, and the engine around it.

    Args:
      size: of the model and the work.
      device: "cpu" or "cuda".
      dtype: of the weights.
    """

    def __init__(self, size: Size, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        self.size = size
        self.device = device
        self.model = make_model(size, device=device, dtype=dtype)
        self.tokenizer = make_tokenizer(size)
        self.engine = HuggingFaceBackend(
            self.model, self.tokenizer, max_prompt_tokens=size.prompt, max_new_tokens=size.tokens
        )

    def wait(self) -> None:
        """Waits for a device that works on its own."""
        if self.device != "cpu":
            torch.cuda.synchronize()

    def private(self, *, shared: int) -> PrivateExamples:
        """Made-up records that fill a prompt, `shared` words of which are the instruction's."""
        length = max(1, self.size.prompt - FRAME_TOKENS - shared)
        made = [words(length, seed=place, vocabulary=self.size.vocabulary) for place in range(RECORDS)]
        return PrivateExamples(made, public_size=RECORDS)

    def ours(
        self,
        mechanism: str,
        *,
        redraw_every: int | None = None,
        tokens: int | None = None,
        shared: int | None = None,
        texts: int = 1,
    ) -> Ready:
        """Private generation from end to end: ticket, sample, prompts, rows, noise, text.

        Args:
          mechanism: of the released tokens.
          redraw_every: tokens per secret sample; None: all.
          tokens: tokens to write; None: the size's.
          shared: words of the instruction, which all prompts begin with; None: the size's.
          texts: how many to write, at once; the tokens of the first are counted.
        """
        count = tokens or self.size.tokens
        size = self.size if shared is None else dataclasses.replace(self.size, shared=shared)

        def ready() -> Job:
            synthesizer = DemonstrationSynthesizer.from_private_examples(
                self.private(shared=size.shared),
                llm=self.engine,
                budget=Budget(epsilon=EPSILON, delta=1e-6),
                epsilon=EPSILON,
                noise=noise_of(mechanism, Noise, LogitNoise).replace(
                    multiplier=NOISE if mechanism in LOGIT_MECHANISMS else LITTLE_NOISE
                ),
                instruction=instruction(size),
                rows=Rows(slots=self.size.slots, redraw_every=redraw_every or "run"),
                max_tokens=count,
                shots_per_label=texts,
            )

            def job() -> int:
                released = synthesizer.run(progress=False)
                self.wait()
                return self.engine.count_tokens(released.examples[0]["text"])

            return job

        return ready

    def plain(self, *, cache: str = "dynamic") -> Ready:
        """`model.generate` of the same batch: greedy, no privacy.

        Args:
          cache: "dynamic" or "static"; neither is compiled.
        """
        ids = input_ids(self.size, device=self.device)
        count = self.size.tokens

        def job() -> int:
            with torch.inference_mode():
                out = self.model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=count,
                    min_new_tokens=count,
                    do_sample=False,
                    pad_token_id=3,
                    cache_implementation=cache,
                    disable_compile=True,
                )
            self.wait()
            return int(out.shape[1]) - self.size.prompt

        return lambda: job


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of every turn: by the clock, and what the processor spent."""

    clock: tuple[float, ...]
    processor: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median by the clock."""
        return statistics.median(self.clock)

    def over(self, other: Times) -> float:
        """Median over turns of this one's time over the other's, each beside its own."""
        return statistics.median(mine / theirs for mine, theirs in zip(self.clock, other.clock, strict=True))

    def processor_over(self, other: Times) -> float:
        """As `over`, of the processor's time."""
        pairs = zip(self.processor, other.processor, strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)


def race(runners: Mapping[str, tuple[Ready, int]], *, turns: int, warm_up: bool = True) -> dict[str, Times]:
    """Times those who run, turn by turn, so that a busy machine is busy for all of them.

    Args:
      runners: by name: what makes ready, and the tokens that it must write.
      turns: of each.
      warm_up: whether each runs once before the clock runs.

    Raises:
      RuntimeError: one of them wrote another number of tokens.
    """
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in runners}
    names = list(runners)
    for turn in range(-1 if warm_up else 0, turns):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            ready, tokens = runners[name]
            job = ready()
            clock, processor = time.perf_counter(), time.process_time()
            wrote = job()
            spent = (time.perf_counter() - clock, time.process_time() - processor)
            if wrote != tokens:
                raise RuntimeError(f"expected {tokens} tokens from {name}, found {wrote}: nothing can be compared")
            if turn >= 0:
                taken[name].append(spent)
            progress(f"{'warm up' if turn < 0 else f'turn {turn + 1}'}: {name} {spent[0]:.2f} s")
    return {name: Times(*map(tuple, zip(*spent, strict=True))) for name, spent in taken.items()}  # type: ignore[arg-type]


def progress(said: str) -> None:
    """Says where the work stands, beside the results."""
    print(said, file=sys.stderr, flush=True)


def found_device(wanted: str) -> Any:
    """Returns the device's name for people.

    Raises:
      SystemExit: there is none of this kind.
    """
    if wanted == "cpu":
        return f"cpu, {torch.get_num_threads()} threads"
    if not torch.cuda.is_available():
        raise SystemExit(f"expected a device {wanted!r}, found none: run with --device cpu")
    return torch.cuda.get_device_name(0)
