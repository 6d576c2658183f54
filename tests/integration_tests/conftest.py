"""The PostgreSQL server for all that asks for it."""

from __future__ import annotations

from tests.postgres import postgres

__all__ = ["postgres"]
