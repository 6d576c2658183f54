"""Names the hosts that private text is sent to, for reports."""

from __future__ import annotations

from typing import Any

from langchain_dpicl.backends._preflight import held_by
from langchain_dpicl.backends.base import ChoiceBackend, GradientBackend, NextTokenBackend, TextBackend
from langchain_dpicl.backends.silent import SilentModel

PROCESS = "this process"
"""Name for models that made no connection."""

_OWN = "langchain_dpicl"
_DEPTH = 6
_ENGINES = (ChoiceBackend, GradientBackend, NextTokenBackend, TextBackend)


def seen_by(*holders: object) -> list[str]:
    """Returns the hosts (with port, proxies included) that public calls of engines, or of their holders, reached.

    >>> from langchain_dpicl.backends.fake import FakeBackend, scripted
    >>> seen_by(FakeBackend(scripted({" a": 1.0}), max_top_k=1))
    ['this process']
    """
    hosts: dict[str, None] = {}
    todo: list[tuple[Any, int]] = [(holder, 0) for holder in holders]
    seen = set(map(id, holders))
    for thing, depth in todo:  # it grows
        if isinstance(thing, SilentModel):
            hosts |= dict.fromkeys(thing.hosts or (PROCESS,))
        elif not type(thing).__module__.startswith(_OWN):
            if isinstance(thing, _ENGINES):
                hosts[f"wherever {type(thing).__name__} sends it"] = None
        elif depth < _DEPTH:
            new = [value for value in held_by(thing).values() if id(value) not in seen]
            seen.update(map(id, new))
            todo += [(value, depth + 1) for value in new]
    return sorted(hosts) or [PROCESS]
