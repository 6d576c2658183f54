"""Audits: how well neighbouring data sets can be distinguished, against what was charged. Offline, with fake models.

`audit` and `assert_private` take a component, a plan, or the JSON of `dpicl plan --json`. What they cannot see is part
of every report; see docs/audits.md.
"""

from typing import TYPE_CHECKING

from langchain_dpicl._lazy import on_first_use

if TYPE_CHECKING:
    from langchain_dpicl.audit.game import CANNOT_SEE, AuditReport, AuditResult, Game, PrivacyAuditError, control, play
    from langchain_dpicl.audit.suite import assert_private, audit, games_of
    from langchain_dpicl.audit.targets import Subject

_HOME = {
    "AuditReport": "langchain_dpicl.audit.game",
    "AuditResult": "langchain_dpicl.audit.game",
    "CANNOT_SEE": "langchain_dpicl.audit.game",
    "Game": "langchain_dpicl.audit.game",
    "PrivacyAuditError": "langchain_dpicl.audit.game",
    "Subject": "langchain_dpicl.audit.targets",
    "assert_private": "langchain_dpicl.audit.suite",
    "audit": "langchain_dpicl.audit.suite",
    "control": "langchain_dpicl.audit.game",
    "games_of": "langchain_dpicl.audit.suite",
    "play": "langchain_dpicl.audit.game",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = on_first_use(__name__, _HOME)

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
