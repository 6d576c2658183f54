"""The ledger's protocol, checked: every state of small scenes, and random schedules of the real writer.

`make protocol` runs all of it; tests/unit_tests/privacy/ledger/test_protocol.py the small scenes and every plant.
"""
