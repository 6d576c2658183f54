"""What the papers print for their methods, with their models: accuracies in percent.

Only numbers that stand in the papers' text are here; others are None, and have no closure. Privacy of the
papers is their own claim: other deltas, other neighbouring relations, and for PromptPATE an epsilon that does not hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from _pate_task import PUBLISHED, PUBLISHED_CURIE, PUBLISHED_FOUR_SHOTS, PUBLISHED_TEXT, Published
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


def _pate(found: Published, teachers: str) -> Paper:
    source = f"Duan et al. (2023), {teachers}; epsilon does not hold"
    return Paper(source, found.zero, {found.epsilon: found.accuracy}, found.best)


_TEACHERS: Mapping[str, Mapping[str, Published]] = {
    "200 one-shot teachers, GPT-3 Babbage, 500 inputs": PUBLISHED,
    "200 one-shot teachers, GPT-3 Curie, 500 inputs": PUBLISHED_CURIE,
    "200 four-shot teachers, GPT-3 Babbage, 500 inputs": PUBLISHED_FOUR_SHOTS,
    "400 teachers that give text alone, Claude, 200 inputs": PUBLISHED_TEXT,
}

_TANG = "Tang et al. (2023), Table 1, 4 shots, babbage"
_SOFT = "Duan et al. (2023), soft prompt, RoBERTa-base"
_PREFIX = "Duan et al. (2023), prefix, RoBERTa-base"
PAPERS: Sequence[tuple[str, str, Paper]] = (
    ("generation", "AGNews", Paper(_TANG, 47.9, {}, 69.3, instruction=68.0)),
    ("generation", "TREC", Paper(_TANG, 35.4, {1.0: 50.7}, 50.6)),
    ("promptdpsgd", "SST-2", Paper(_SOFT, None, {3.0: 90.48, 8.0: 92.31}, 95.64)),
    ("promptdpsgd", "SST-2", Paper(_PREFIX, None, {3.0: 90.37, 8.0: 91.97}, 96.33)),
    ("promptdpsgd", "QNLI", Paper(_SOFT, None, {3.0: 83.62, 8.0: 84.11}, 89.48)),
    ("promptdpsgd", "QNLI", Paper(_PREFIX, None, {3.0: 86.05, 8.0: 87.17}, 94.84)),
    ("promptdpsgd", "QQP", Paper(_SOFT, None, {3.0: 80.29, 8.0: 81.52}, 86.56)),
    ("promptdpsgd", "QQP", Paper(_PREFIX, None, {3.0: 80.89, 8.0: 82.58}, 91.42)),
    ("promptdpsgd", "MNLI", Paper(_SOFT, None, {3.0: 73.97, 8.0: 75.15}, 82.49)),
    ("promptdpsgd", "MNLI", Paper(_PREFIX, None, {3.0: 80.10, 8.0: 80.57}, 90.34)),
    *(("voting", title, _panda(title)) for title in PAPER),
    *(
        ("pate", title, _pate(found, teachers))
        for teachers, settings in _TEACHERS.items()
        for title, found in settings.items()
    ),
)
"""Method, data set's title, and what the paper prints. Table 1 of Tang et al. has no numbers in the text that was read;
these stand in its prose."""


def beside(papers: Sequence[tuple[str, str, Paper]] = PAPERS) -> list[tuple[str, ...]]:
    """Returns the papers' rows: method, data, source, zero-shot, instruction, accuracies, without privacy, closures."""

    def percent(value: float | None) -> str:
        return "not in its text" if value is None else f"{value:.1f}"

    rows = []
    for method, title, paper in papers:
        accuracies = ", ".join(f"{share:.1f} at {epsilon:g}" for epsilon, share in paper.private.items())
        shares = {epsilon: paper.closed(epsilon) for epsilon in paper.private}
        closures = ", ".join(
            f"{100 * share:.0f} at {epsilon:g}" for epsilon, share in shares.items() if share is not None
        )
        free = percent(paper.zero), "" if paper.instruction is None else percent(paper.instruction)
        private = accuracies or "not in its text", percent(paper.without), closures or "unknown"
        rows.append((method, title, paper.source, *free, *private))
    return rows
