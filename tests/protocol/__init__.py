"""The ledger's protocol, checked: every state of small scenes, random schedules of the real writer, disks cut short.

`make protocol` runs all of it; the unit tests in tests/unit_tests/privacy/ledger run the small scenes and every plant.
"""
