"""Fixtures of the stores' tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a ledger's file may be."""
    return tmp_path / "budget.db"
