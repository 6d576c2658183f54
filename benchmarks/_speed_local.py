"""Speed of private generation on a local model: against re-prefill, plain `generate`, and one text at a time.

A model of GPT-2's shape with random weights is made on the spot. All ways write the same number of tokens after prompts
of one length, in one thread and turn by turn; a time is the least of the turns, by the processor.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from _speed_goals import Goal

TURNS = 3
TEXTS = 4
REPREFILL_TOKENS = 1


def goals(*, turns: int = TURNS, **changes: Any) -> list[Goal]:
    """Returns the goals of local generation.

    Args:
      turns: of each way.
      **changes: of the model and the work, see `_local_model.Size`.
    """
    import torch
    from _local_model import Size
    from _local_runs import Place

    place = Place(dataclasses.replace(Size(layers=4, width=256, vocabulary=8_192), **changes))
    tokens = place.size.tokens
    ours = place.ours("recentered_clip")
    many = place.ours("recentered_clip", texts=TEXTS)
    ways: dict[str, Callable[[], Callable[[], int]]] = {
        "ours": ours,
        "texts": many,
        "dynamic": place.plain(),
        "static": place.plain(cache="static"),
        "batch": lambda: _reprefill(place, by_row=False),
        "rows": lambda: _reprefill(place, by_row=True),
    }
    least = dict.fromkeys(ways, float("inf"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name in ("ours", "texts"):  # shapes are tried out once
            ways[name]()()
        for _ in range(turns):
            for name, ready in ways.items():
                job = ready()
                started = time.process_time()
                job()
                least[name] = min(least[name], time.process_time() - started)
    finally:
        torch.set_num_threads(threads)
    reprefill = min(least["batch"], least["rows"]) * tokens / REPREFILL_TOKENS
    plain = min(least["dynamic"], least["static"])
    one = least["ours"] * TEXTS
    return [
        Goal("one private text: re-prefill (faster of batched and row by row) / ours", least["ours"], reprefill,
             reprefill / least["ours"], 40.0, at_least=True, unit="s"),
        Goal("one private text: ours / plain generate with its best cache", least["ours"], plain,
             least["ours"] / plain, 0.75, unit="s"),
        Goal(f"{TEXTS} private texts at once: one by one / at once", least["texts"], one, one / least["texts"], 1.5,
             at_least=True, unit="s"),
    ]  # fmt: skip


def _reprefill(place: Any, *, by_row: bool) -> Callable[[], int]:
    """Reads all prompts anew for a token, as Tang et al. (2023) do, in plain torch and at its least length."""
    import torch
    from _local_model import input_ids

    ids = input_ids(place.size, device=place.device)

    def job() -> int:
        with torch.inference_mode():
            for _ in range(REPREFILL_TOKENS):
                parts = ids.split(1) if by_row else (ids,)
                logits = [place.model(input_ids=part, use_cache=False, logits_to_keep=1).logits for part in parts]
                int(torch.cat(logits)[:, -1].softmax(-1).sum(0).argmax())
        place.wait()
        return REPREFILL_TOKENS

    return job
