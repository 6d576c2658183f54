"""The error tree. A message never carries private text, a count of records, or a raw vote.

DPICLError
+-- ConfigurationError (ValueError)      a public parameter is out of range; nothing was spent
|   +-- CapabilityError                  the model cannot do what the mechanism needs
|   +-- UnsilencableModelError           the model cannot be called without telling LangChain's observers
+-- RecordError (ValueError)             a record is malformed; raised only where records are given
+-- PrivateAccessError (TypeError)       an opaque holder was asked for its content, or to be pickled
+-- AccountingError
|   +-- UnknownEventError                no theorem here prices this event: refused
|   +-- SensitivityError                 a sum carries no bound of the norm the mechanism needs
|   +-- AccountantsDisagreeError         two accountants differ beyond their declared errors
+-- ModelCallError                       a public model call failed; the charge stays, releases are kept
|   +-- RunInterruptedError              a run stopped half-way; it holds what was released and can continue
+-- MemoError                            released answers cannot be kept or read, or the memo is none
+-- PrivacyBudgetError
    +-- NoPrivacyBudgetError             no budget was given or found: fail closed
    +-- PrivacyBudgetMismatchError       the examples are bound to another ledger, or adjacencies differ
    +-- PrivacyBudgetExceededError       the request does not fit; carries requested and remaining
    |   +-- TenantCapExceededError       it does not fit a tenant's cap; others may still ask
    +-- SealedShareError                 a share was changed after its first reservation
    +-- LedgerError                      the ledger is unreadable, broken or refused the record
        +-- LedgerUnavailableError       it cannot be read, locked or written now; trying again later may work
        +-- LedgerRollbackError          lines seen before are gone or changed: an older copy was put in its place

RestsOnGuessWarning (UserWarning)        a component was built without a rehearsal: what it is worth is a guess
NoisyPlanWarning (UserWarning)           noise decides much of a release, or what is free is as good; see dpicl plan
ExactSizeWarning (UserWarning)           a declared public_size reads like a count of the records
LargeDeltaWarning (UserWarning)          a ledger's delta is above 1/(10 * public_size), as the declaration allows
"""

from __future__ import annotations

from typing import Any


class DPICLError(Exception):
    """Base of every error this package raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Goes to other processes whole, but for the `run` that it may carry, which stays in its own."""
        state = {name: value for name, value in self.__dict__.items() if name != "run"}
        return _remade, (type(self), self.args), state


def _remade(kind: type[DPICLError], args: tuple[Any, ...]) -> DPICLError:
    """Returns an error without its constructor, which may want more than the message."""
    return kind.__new__(kind, *args)


class ConfigurationError(DPICLError, ValueError):
    """A public parameter is out of range or contradicts another; nothing was spent."""


class CapabilityError(ConfigurationError):
    """The model lacks a capability the mechanism needs; the message says what works instead."""


class UnsilencableModelError(ConfigurationError):
    """The model cannot be called without LangChain's callbacks, tracers or caches seeing the prompt."""


class RestsOnGuessWarning(UserWarning):
    """A component was built without a rehearsal: what its answers are worth rests on a guess about the model."""


class NoisyPlanWarning(UserWarning):
    """Noise decides much of a release, or what is free is as good, by public numbers and answers alone."""


class ExactSizeWarning(UserWarning):
    """A declared `public_size` reads like a count of the records, which is private."""


class LargeDeltaWarning(UserWarning):
    """A ledger's delta is above 1/(10 * public_size): the declaration of the records allows it."""


class RecordError(DPICLError, ValueError):
    """A record is malformed. Index and value are hidden; raised only where records are given."""


class PrivateAccessError(DPICLError, TypeError):
    """Private content was asked for on a path without a privacy charge, or a copy of what would spend twice."""


class AccountingError(DPICLError):
    """A privacy cost could not be computed soundly."""


class UnknownEventError(AccountingError):
    """No theorem in this package prices the event, so it is refused."""


class SensitivityError(AccountingError):
    """A bounded sum carries no bound in the norm that the mechanism needs."""


class AccountantsDisagreeError(AccountingError):
    """Two accountants disagree beyond their declared errors."""


class ModelCallError(DPICLError):
    """A public model call failed. What was charged stays charged; what was released is kept."""


class RunInterruptedError(ModelCallError):
    """A run stopped before its end.

    Attributes:
      run: call its `run()` (or `arun()`) again to continue with tickets not yet burnt; its `result` is what was
        released. None in a copy, as another process has it.
    """

    run: Any = None

    def __init__(self, message: str, *, run: Any) -> None:
        super().__init__(message)
        self.run = run


class MemoError(DPICLError):
    """A release memo cannot be read or written, is broken, or is none. What was charged stays charged."""


class PrivacyBudgetError(DPICLError):
    """Base of every refusal that concerns a privacy budget."""


class NoPrivacyBudgetError(PrivacyBudgetError):
    """No budget was given, found in the config or active in the context."""


class PrivacyBudgetMismatchError(PrivacyBudgetError):
    """The private examples belong to another ledger, or two budgets were offered."""


class PrivacyBudgetExceededError(PrivacyBudgetError):
    """The request does not fit into what is left.

    Attributes:
      requested: what was asked for (unit named in the message: epsilon, tickets, mu^2 or rho).
      remaining: what is left, in the same unit.
      held: tickets that were reserved and neither used up nor given back; those that other processes do not use may
        come back. For the operator: it tells how often a model failed, so the message leaves it out. 0 unless a share
        is short of tickets.
    """

    def __init__(self, message: str, *, requested: float, remaining: float, held: int = 0) -> None:
        super().__init__(message)
        self.requested = requested
        self.remaining = remaining
        self.held = held


class TenantCapExceededError(PrivacyBudgetExceededError):
    """A tenant has used its cap; the share may have tickets left, for others and for a higher cap."""


class SealedShareError(PrivacyBudgetError):
    """A share was changed after its first reservation sealed it."""


class LedgerError(PrivacyBudgetError):
    """The ledger could not be read, verified or written; nothing was granted."""


class LedgerUnavailableError(LedgerError):
    """The ledger cannot be read, locked or written now: no such path, full disk, read-only, held lock, lost connection.

    Nothing was granted. What was being written may stand, and stays charged if it does. Trying again may work.
    """


class LedgerRollbackError(LedgerError):
    """Lines seen before, in an anchor or on a receipt are gone or changed; nothing is granted on what is left."""


__all__ = [
    "AccountantsDisagreeError",
    "AccountingError",
    "CapabilityError",
    "ConfigurationError",
    "DPICLError",
    "ExactSizeWarning",
    "LargeDeltaWarning",
    "LedgerError",
    "LedgerRollbackError",
    "LedgerUnavailableError",
    "MemoError",
    "ModelCallError",
    "NoPrivacyBudgetError",
    "NoisyPlanWarning",
    "PrivacyBudgetError",
    "PrivacyBudgetExceededError",
    "PrivacyBudgetMismatchError",
    "PrivateAccessError",
    "RecordError",
    "RestsOnGuessWarning",
    "RunInterruptedError",
    "SealedShareError",
    "SensitivityError",
    "TenantCapExceededError",
    "UnknownEventError",
    "UnsilencableModelError",
]
