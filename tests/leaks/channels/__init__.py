"""Every observer of the matrix, in the order of the table."""

from importlib import import_module

from tests.leaks.channels.registry import CHANNELS, GROUPS, Channel

__all__ = ["CHANNELS", "GROUPS", "Channel"]

_MODULES = (
    "handlers",
    "streams",
    "switches",
    "tracing",
    "failures",
    "objects",
    "wrappers",
    "sdk",
    "telemetry",
    "sentry",
)

for _name in _MODULES:  # each adds its rows
    import_module(f"{__name__}.{_name}")
