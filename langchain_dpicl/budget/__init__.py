"""The budget that users hold, on top of the ledger and its reports."""
