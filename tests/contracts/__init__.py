"""Abstract suites: subclass one, name your implementation in its factory, and pytest runs the contract on it.

`doubles.py` holds the sources of coins that tests use in place of the operating system's.
"""

import pytest

pytest.register_assert_rewrite(
    "tests.contracts.mechanism",
    "tests.contracts.sampler",
    "tests.contracts.aggregation",
    "tests.contracts.backend",
    "tests.contracts.store",
    "tests.contracts.front_room",
)
