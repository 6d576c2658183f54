"""What the papers print for their methods, with their models: accuracies in percent.

Only numbers that were read in the papers' text stand here; what was not is None, and has no closure. Privacy of the
papers is their own claim: other deltas, other neighbouring relations, and for PromptPATE an epsilon that does not hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from _pate_task import PUBLISHED
from _tables_sums import share_closed
from _voting_task import PAPER


@dataclass(frozen=True)
class Paper:
    """A row of a paper.

    Attributes:
      source: paper, model and setting.
      zero: zero-shot.
      private: by epsilon.
      without: without privacy.
      instruction: demonstrations from the instruction alone.
    """

    source: str
    zero: float | None
    private: Mapping[float, float]
    without: float | None
    instruction: float | None = None

    def closed(self, epsilon: float) -> float | None:
        """Returns the share of the gap that the paper closes, by the formula of our tables."""
        if self.zero is None or self.without is None or epsilon not in self.private:
            return None
        return share_closed(self.zero, self.private[epsilon], self.without)


def _panda(title: str) -> Paper:
    numbers = PAPER[title]
    private = {epsilon: share for epsilon, share in numbers.items() if 0 < epsilon < math.inf}
    return Paper("Panda et al. (2023), 10 x 4, 10,000 queries", numbers[0.0], private, numbers[math.inf])


def _duan(title: str) -> Paper:
    found = PUBLISHED[title]
    source = "Duan et al. (2023), 200 teachers, GPT-3, 500 inputs; epsilon does not hold"
    return Paper(source, None, {found.epsilon: found.accuracy}, None)


_TANG = "Tang et al. (2023), Table 1, 4 shots, babbage"
_SOFT = "Duan et al. (2023), soft prompt, RoBERTa-base"
PAPERS: Mapping[tuple[str, str], Paper] = {
    ("generation", "AGNews"): Paper(_TANG, 47.9, {}, 69.3, instruction=68.0),
    ("generation", "TREC"): Paper(_TANG, 35.4, {1.0: 50.7}, 50.6),
    ("promptdpsgd", "SST-2"): Paper(_SOFT, None, {8.0: 92.31}, None),
    **{("voting", title): _panda(title) for title in PAPER},
    **{("pate", title): _duan(title) for title in ("SST-2", "AGNews", "TREC")},
}
"""By method and data set's title."""


def beside(papers: Mapping[tuple[str, str], Paper] = PAPERS) -> list[tuple[str, ...]]:
    """Returns the papers' rows: method, data, source, zero-shot, instruction, accuracies, without privacy, closures."""

    def percent(value: float | None) -> str:
        return "not read" if value is None else f"{value:.1f}"

    rows = []
    for (method, title), paper in papers.items():
        accuracies = ", ".join(f"{share:.1f} at {epsilon:g}" for epsilon, share in paper.private.items())
        shares = {epsilon: paper.closed(epsilon) for epsilon in paper.private}
        closures = ", ".join(
            f"{100 * share:.0f} at {epsilon:g}" for epsilon, share in shares.items() if share is not None
        )
        free = percent(paper.zero), "" if paper.instruction is None else percent(paper.instruction)
        private = accuracies or "not read", percent(paper.without), closures or "unknown"
        rows.append((method, title, paper.source, *free, *private))
    return rows
