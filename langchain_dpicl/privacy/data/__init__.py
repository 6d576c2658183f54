"""Private examples, their units, and the pool that only `release/curator.py` may open.

Knows no mechanism and no ledger.
"""
