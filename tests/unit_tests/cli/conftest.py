"""Fixtures of the command line's tests."""

from __future__ import annotations

from tests.other_shells import other_shells

__all__ = ["other_shells"]
