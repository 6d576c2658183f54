"""The servers for all that asks for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.live import Servers, servers_of_this_machine
from tests.postgres import postgres

__all__ = ["postgres"]


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    """Models and embeddings behind HTTP on this machine."""
    with servers_of_this_machine() as found:
        yield found
