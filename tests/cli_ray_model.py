"""A model that a command line can name."""

from __future__ import annotations

from tests.ray_places import engine

MODEL = engine()
