"""Faults that a durable ledger meets, each as a function that runs trials and counts violations.

`catalogue.py` lists them. `test_faults.py` runs a few trials of each, `make faults` all of them. A fault asks for
`Places`: every call gives a fresh place for one ledger, so a database of another kind joins by a factory of its own.
"""
