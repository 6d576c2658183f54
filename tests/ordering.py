"""Puts tests in a random order that a seed gives again: modules among themselves, and tests inside their modules."""

from __future__ import annotations

import random

import pytest


def shuffled(items: list[pytest.Item], seed: int) -> list[pytest.Item]:
    """Returns the items in another order; those of a module stay together, as fixtures of modules are expensive."""
    coins = random.Random(seed)
    modules: dict[str, list[pytest.Item]] = {}
    for item in items:
        modules.setdefault(str(item.path), []).append(item)
    some = list(modules.values())
    coins.shuffle(some)
    for module in some:
        coins.shuffle(module)
    return [item for module in some for item in module]
