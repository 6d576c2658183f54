"""Audits: what can be told apart of neighbouring data sets, against what was charged. Offline, with fake models.

`audit` and `assert_private` take a component, a plan, or the JSON of `dpicl plan --json`. What they cannot see is part
of every report; see docs/audits.md.
"""

from langchain_dpicl.audit.games import Game, control, play
from langchain_dpicl.audit.results import CANNOT_SEE, AuditReport, AuditResult, PrivacyAuditError
from langchain_dpicl.audit.subjects import Subject
from langchain_dpicl.audit.suite import assert_private, audit, games_of

__all__ = [
    "CANNOT_SEE",
    "AuditReport",
    "AuditResult",
    "Game",
    "PrivacyAuditError",
    "Subject",
    "assert_private",
    "audit",
    "control",
    "games_of",
    "play",
]
