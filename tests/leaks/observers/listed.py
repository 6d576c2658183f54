"""Every observer, in the order of the table."""

from tests.leaks.observers import recorders, spans
from tests.leaks.observers.registry import OBSERVERS

__all__ = ["OBSERVERS", "recorders", "spans"]
