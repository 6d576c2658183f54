"""Holds the scores of a membership attack and their statistics; results are NOT PRIVATE."""

# A score reads the record in question, and its statistics add up what many releases say of it: no claim of a release
# covers that. A result belongs into no report and beside no release; printing one shows its name and size only.

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from langchain_dpicl.audit.scores import LOW_RATE, Claim, Floats, RocBand, RocCurve, roc_band
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM, SecureRandom

Nonmembers: TypeAlias = Literal["any", "same_label"]

NOTICE = "NOT PRIVATE (epsilon = infinity): an audit reads records. For synthetic or your own records only."


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MembershipResult:
    """Scores of an attack on one target, prompt by prompt. NOT PRIVATE.

    Attributes:
      name: of the target.
      reads: what the attacker saw.
      num_records: records that each prompt was made of.
      nonmembers: "any", or "same_label": non-members with the labels of the members.
      claim: what the target claims; None: nothing.
      member_scores: float64[prompts, members], at the right label.
      nonmember_scores: float64[prompts, nonmembers], at the right label.
    """

    name: str
    reads: str
    num_records: int
    nonmembers: Nonmembers
    claim: Claim | None
    member_scores: Floats = field(repr=False)
    nonmember_scores: Floats = field(repr=False)

    def __post_init__(self) -> None:
        for name in ("member_scores", "nonmember_scores"):
            scores = np.array(getattr(self, name), dtype=np.float64)
            scores.setflags(write=False)
            object.__setattr__(self, name, scores)

    @property
    def is_private(self) -> bool:
        """False, always."""
        return False

    @property
    def num_prompts(self) -> int:
        """Prompts that were attacked."""
        return len(self.member_scores)

    @property
    def curve(self) -> RocCurve:
        """The curve of one threshold for all prompts."""
        return RocCurve.of(self.member_scores, self.nonmember_scores)

    @property
    def auc(self) -> float:
        """Area under the curve; 1/2 is guessing."""
        return self.curve.auc

    @property
    def mean_prompt_auc(self) -> float:
        """Mean over prompts of the area of each prompt's own scores: the attacker may set a threshold per prompt."""
        pairs = zip(self.member_scores, self.nonmember_scores, strict=True)
        return float(np.mean([RocCurve.of(inside, outside).auc for inside, outside in pairs]))

    def tpr_at(self, false_positive_rate: float = LOW_RATE) -> float:
        """Returns the true-positive rate at a false-positive rate; see `RocCurve.tpr_at`.

        Args:
          false_positive_rate: in [0, 1].
        """
        return self.curve.tpr_at(false_positive_rate)

    def band(self, *, num_resamples: int = 400, confidence: float = 0.95, rng: SecureRandom = SYSTEM_RANDOM) -> RocBand:
        """Returns mean and band of the curve when prompts are drawn again; see `roc_band`.

        Args:
          num_resamples: draws of prompts.
          confidence: share of the curves that the band holds at each false-positive rate; fewer lie in it everywhere.
          rng: of the draws.
        """
        options: dict[str, Any] = {"num_resamples": num_resamples, "confidence": confidence, "rng": rng}
        return roc_band(self.member_scores, self.nonmember_scores, **options)

    def to_dict(self, *, with_scores: bool = False) -> dict[str, Any]:
        """Returns the result as JSON values, marked as what it is.

        Args:
          with_scores: whether every single score is told too.
        """
        band = self.band()
        values: dict[str, Any] = {
            "private": False,
            "epsilon": "infinity",
            "notice": NOTICE,
            "target": self.name,
            "reads": self.reads,
            "prompts": self.num_prompts,
            "records_per_prompt": self.num_records,
            "members_per_prompt": self.member_scores.shape[1],
            "nonmembers_per_prompt": self.nonmember_scores.shape[1],
            "nonmembers": self.nonmembers,
            "auc": self.auc,
            "auc_band": [band.auc[0], band.auc[2]],
            "mean_prompt_auc": self.mean_prompt_auc,
            "tpr_at_1_percent_fpr": self.tpr_at(LOW_RATE),
            "tpr_band": [band.tpr[0], band.tpr[2]],
            "mean_member_score": float(self.member_scores.mean()),
            "mean_nonmember_score": float(self.nonmember_scores.mean()),
        }
        if self.claim is not None:
            terms = {"epsilon": self.claim.epsilon, "delta": self.claim.delta, "adjacency": self.claim.adjacency}
            allowed = {"auc": self.claim.auc, "tpr_at_1_percent_fpr": self.claim.tpr_at(LOW_RATE)}
            values["claimed"] = {**terms, "allows": allowed}
        if with_scores:
            values["member_scores"] = self.member_scores.tolist()
            values["nonmember_scores"] = self.nonmember_scores.tolist()
        return values

    def summary(self) -> str:
        """Returns two lines: the numbers, and that they are not private."""
        low, _, high = self.band().auc
        allowed = f", at most {self.claim.auc:.3f} under its claim" if self.claim is not None else ""
        return (
            f"{self.name}: AUC {self.auc:.3f} [{low:.3f}, {high:.3f}]{allowed}; TPR {self.tpr_at(LOW_RATE):.1%} at 1 % "
            f"FPR; {self.num_prompts} prompts of {self.num_records} records, {self.reads}\n{NOTICE}"
        )

    def __repr__(self) -> str:
        return f"MembershipResult({self.name!r}, {self.num_prompts} prompts, NOT PRIVATE)"
