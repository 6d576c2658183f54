"""Reads and writes an anchor so that whatever it raises is a refusal of ours. Knows no line, no state and no store."""

from __future__ import annotations

from typing import Any

from langchain_dpicl.exceptions import LedgerError, LedgerRollbackError, LedgerUnavailableError
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.privacy.stores import LedgerAnchor


def check_anchor(anchor: Any) -> LedgerAnchor | None:
    """Returns an anchor as it is, or None.

    Raises:
      ConfigurationError: it is something else, for instance a path, or the class of an anchor.
    """
    if anchor is None or (isinstance(anchor, LedgerAnchor) and not isinstance(anchor, type)):
        return anchor
    found = f"the class {anchor.__name__}" if isinstance(anchor, type) else type(anchor).__name__
    raise fail("anchor", "a LedgerAnchor such as FileAnchor(path), or None", found)


def read_anchor(anchor: LedgerAnchor, ledger_id: str) -> tuple[int, str] | None:
    """Returns number and hash of the last line that the anchor knows, or None.

    Raises:
      LedgerError: as the anchor says.
      LedgerUnavailableError: it raised something else, of which only the kind is told.
    """
    try:
        return anchor.read(ledger_id)
    except LedgerError:
        raise
    except Exception as error:  # noqa: BLE001  whatever an anchor of others raises
        kind = type(error).__name__
    raise LedgerUnavailableError(
        f"anchor: expected to read {anchor.description}, found {kind}. Nothing is granted; try again."
    )


def write_anchor(anchor: LedgerAnchor, ledger_id: str, last: tuple[int, str]) -> None:
    """Remembers the ledger's last line in the anchor; errors as `read_anchor`."""
    try:
        anchor.write(ledger_id, *last)
    except LedgerError:
        raise
    except Exception as error:  # noqa: BLE001  whatever an anchor of others raises
        kind = type(error).__name__
    else:
        return
    raise LedgerUnavailableError(
        f"anchor: expected to write to {anchor.description}, found {kind}. Nothing is granted; what the ledger holds "
        f"up to line {last[0]} stays charged. Try again."
    )


def never_seen(anchor: LedgerAnchor, ledger_id: str) -> LedgerRollbackError:
    """Returns the refusal of a ledger that the anchor does not know; the caller raises it."""
    return LedgerRollbackError(
        f"ledger {ledger_id}: expected one that the anchor knows ({anchor.description}), found one that it has never "
        "seen: another ledger took its place, or this is the wrong anchor. Nothing is granted. To add an anchor to a "
        "ledger that had none, open it once with adopt_anchor=True."
    )
