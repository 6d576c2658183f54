"""The exit codes of `dpicl`, and which error ends with which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from langchain_dpicl.exceptions import LedgerError, ModelCallError, PrivacyBudgetError

DONE = 0
VIOLATED = 1
"""`ledger verify` found a fault, `ledger check` a share that is nearly spent, or `audit` a violation."""
BAD_INPUT = 2
"""An option, a file, a setting or a record is wrong, or the model cannot do what is asked of it."""
BUDGET_REFUSED = 3
"""The budget is spent, does not suffice, or is not the one of these records."""
PROVIDER_FAILED = 4
"""The model could not be reached or failed in the middle."""
INTERRUPTED = 130
"""Ctrl-C."""


def exit_code_of(error: BaseException) -> int:
    """Returns the exit code of an error that is explained on stderr.

    >>> exit_code_of(ModelCallError("no answer")), exit_code_of(LedgerError("no such file")), exit_code_of(OSError())
    (4, 2, 2)
    """
    if isinstance(error, ModelCallError):
        return PROVIDER_FAILED
    # A ledger that cannot be read is a wrong file; what is left in it was not asked.
    if isinstance(error, PrivacyBudgetError) and not isinstance(error, LedgerError):
        return BUDGET_REFUSED
    return BAD_INPUT


class Explain(Protocol):
    """Runs a command and says on stderr why it failed: `langchain_dpicl.cli.main.explain`."""

    def __call__(self, run: Callable[[], int], typed: Sequence[str], *, quiet: bool) -> int:
        """Returns the exit code."""
        ...
