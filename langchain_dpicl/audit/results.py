"""Frozen audit results with a verdict each, and their report."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

from langchain_dpicl.audit.bounds import ALARM, POWER
from langchain_dpicl.exceptions import DPICLError

Verdict: TypeAlias = Literal["sound", "violated", "undecided", "skipped", "failed"]

CANNOT_SEE: tuple[str, ...] = (
    "failures with a chance below about 1e-6 (the delta)",
    "a wrong definition of neighbours, or a wrong unit (one person with five records)",
    "slack or an error of a few percent in an accountant's formula",
    "parameters that were chosen by looking at the data",
    "coins that are weak but look uniform",
    "side channels: timing, traffic, the provider's logs",
    "a ledger that was put back to an older copy",
    "neighbours worse than those that were tried",
    "what the model's provider sees: every private prompt",
)
"""What no audit of this kind catches; proofs, reviews and the ledger's own checks are for those."""


HALF = "half of the noise"
"""What most powers are for."""


class PrivacyAuditError(DPICLError, AssertionError):
    """An audit found a violation, or could not decide where it had to.

    Attributes:
      report: what was found.
    """

    def __init__(self, message: str, *, report: AuditReport) -> None:
        super().__init__(message)
        self.report = report


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditResult:
    """What one check found.

    Attributes:
      check: what was looked at.
      verdict: "violated": the claim is refuted; "sound": it is not, and where there is a `power` it is at least .99;
        "undecided": it is not, but the check was too small to tell; "skipped": it does not fit what is audited, and
        `details` say why; "failed": the check ended with an exception, whose class `details` name.
      lower_bound: epsilon that the answers prove, at `delta`; None where the check is about no epsilon.
      claimed_epsilon: epsilon, at the same delta, of the event that one trial is charged for.
      delta: of both.
      found: the same proof in the event's own unit; `claimed` is what it may be.
      claimed: mu, range or epsilon of one release.
      unit: which of them.
      confidence: chance, at least, that sound code is not called violated.
      runs: trials of each side, or draws that were looked at.
      power: chance that what `power_for` names is called violated; None: not computed, so that "sound" says only that
        nothing was refuted.
      power_for: the fault that `power` is for.
      details: what refutes the claim, or why it is undecided.
      blind_to: what this check in particular cannot see.
    """

    check: str
    verdict: Verdict
    lower_bound: float | None = None
    claimed_epsilon: float | None = None
    delta: float | None = None
    found: float | None = None
    claimed: float | None = None
    unit: str | None = None
    confidence: float = 1.0 - ALARM
    runs: int = 0
    power: float | None = None
    power_for: str = HALF
    details: tuple[str, ...] = ()
    blind_to: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as JSON values; an infinite number is the text "inf"."""
        return {one.name: _plain(getattr(self, one.name)) for one in fields(self)}

    def __str__(self) -> str:
        parts = [f"{self.verdict:<9} {self.check}"]
        if self.claimed_epsilon is not None and self.lower_bound is not None:
            parts.append(f"epsilon at least {self.lower_bound:.3g}, claimed {self.claimed_epsilon:.3g}")
        if self.found is not None and self.claimed is not None and self.unit != "epsilon":
            parts.append(f"{self.unit} {max(self.found, 0.0):.3g} of {self.claimed:.3g}")
        parts += [f"{self.runs:,} runs"] if self.runs else []
        parts += [f"power {self.power:.3f} ({self.power_for})"] if self.power is not None else []
        return "; ".join([*parts, *self.details])


def result_of(
    check: str,
    faults: Iterable[str],
    *,
    runs: int,
    blind: tuple[str, ...],
    power: float | None = None,
    power_for: str = HALF,
    is_certain: bool = False,
) -> AuditResult:
    """Returns the result of a check that lists faults; `is_certain` where no chance is involved."""
    details = tuple(dict.fromkeys(faults))[:4]
    verdict: Verdict = "violated" if details else "sound"
    if power is not None and power < POWER and not details:
        verdict, details = "undecided", (f"{power_for} would be seen with a chance of {power:.2f} only",)
    return AuditResult(
        check=check,
        verdict=verdict,
        confidence=1.0 if is_certain else 1.0 - ALARM,
        runs=runs,
        power=power,
        power_for=power_for,
        details=details,
        blind_to=blind,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditReport:
    """All that an audit found.

    Attributes:
      subject: what was audited.
      results: one per check.
      seconds: how long it took.
      cannot_see: what no audit of this kind catches.
    """

    subject: str
    results: tuple[AuditResult, ...]
    seconds: float = 0.0
    cannot_see: tuple[str, ...] = field(default=CANNOT_SEE)

    @property
    def verdict(self) -> Verdict:
        """The worst of all verdicts; what was skipped has none."""
        verdicts = {result.verdict for result in self.results}
        worst: tuple[Verdict, ...] = ("violated", "failed")
        for verdict in worst:
            if verdict in verdicts:
                return verdict
        return "sound" if "sound" in verdicts and "undecided" not in verdicts else "undecided"

    @property
    def ok(self) -> bool:
        """Whether nothing was refuted, and every check came to its end."""
        return self.verdict not in {"violated", "failed"}

    def violations(self) -> tuple[AuditResult, ...]:
        """Returns the checks that refuted a claim."""
        return tuple(result for result in self.results if result.verdict == "violated")

    @property
    def false_alarm(self) -> float:
        """Chance, at most, that sound code fails this audit."""
        return sum(1.0 - result.confidence for result in self.results)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON values."""
        return {
            "subject": self.subject,
            "verdict": self.verdict,
            "false_alarm": self.false_alarm,
            "seconds": round(self.seconds, 2),
            "results": [result.to_dict() for result in self.results],
            "cannot_see": list(self.cannot_see),
        }

    def to_json(self) -> str:
        """Returns the report as JSON."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def summary(self) -> str:
        """Returns what is said after the results: the verdict, how sure it is, and what no audit sees."""
        skipped = sum(result.verdict == "skipped" for result in self.results)
        failed = sum(result.verdict == "failed" for result in self.results)
        checks = f"{len(self.results) - skipped} checks, {skipped} skipped"
        checks += f", {failed} not finished" if failed else ""
        lines = [
            f"{self.subject}: {self.verdict} ({checks}, {self.seconds:.0f} s)",
            f"Sound code is called violated with a chance of at most {_rounded_up(self.false_alarm)}.",
            "A check with a power would have seen what is named beside it with that chance; others have none computed.",
            "No audit sees:",
        ]
        return "\n".join([*lines, *(f"  - {text}" for text in self.cannot_see)])

    def __str__(self) -> str:
        return "\n".join([*(f"  {result}" for result in self.results), self.summary()])


def _rounded_up(chance: float) -> str:
    """Returns a chance with one digit, and never a smaller one."""
    if chance <= 0.0:
        return "0"
    unit = 10.0 ** math.floor(math.log10(chance))
    # What sums of 1 - (1 - 1e-6) are off by is no chance: without it 1e-6 would read 2e-06.
    return f"{math.ceil(chance / unit * (1 - 1e-9)) * unit:.0e}"


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
