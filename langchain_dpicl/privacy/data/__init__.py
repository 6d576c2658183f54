"""Private examples, their units, and the pool that only the release corridor may open.

Knows no mechanism and no ledger.
"""
