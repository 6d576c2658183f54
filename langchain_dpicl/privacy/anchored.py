"""Reads and writes an anchor so that whatever it raises is a refusal of ours. Knows no line, no state and no store."""

from __future__ import annotations

from langchain_dpicl.exceptions import LedgerError, LedgerUnavailableError
from langchain_dpicl.privacy.stores import LedgerAnchor


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
