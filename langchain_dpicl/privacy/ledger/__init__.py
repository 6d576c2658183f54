"""The ledger of a privacy budget: what may be spent, what was, and the only code that writes it.

It reads no record, draws no noise and imports no report.
"""
