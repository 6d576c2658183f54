"""Reports, their rendering and their verification. Spends nothing and reads no record."""

from typing import TYPE_CHECKING

from langchain_dpicl._lazy import on_first_use

if TYPE_CHECKING:
    from langchain_dpicl.reports.report import PrivacyReport, verify_report

_HOME = {
    "PrivacyReport": "langchain_dpicl.reports.report",
    "verify_report": "langchain_dpicl.reports.report",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = on_first_use(__name__, _HOME)

__all__ = [
    "PrivacyReport",
    "verify_report",
]
