"""Removes a model's settings for public traffic from private calls: storage, user tags and prompt-cache keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DROPPED = frozenset(
    {
        "cache_control",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "user",
        "user_profile_id",
    }
)
"""Arguments of providers that tag a call or store its prompt; never sent with private calls."""

_MAPPINGS = ("model_kwargs", "extra_body")
_STORING = "store"
_OWN_HOSTS = ("openai.com", "openai.azure.com")
"""Where `store` is known; other servers may reject it."""


def private_settings(model: Any) -> dict[str, Any]:
    """Returns the model's fields that have other values in private calls; the model is unchanged."""
    fields = type(model).model_fields
    changed: dict[str, Any] = {}
    for name in DROPPED & fields.keys():
        if fields[name].default is None:
            changed[name] = None
        elif isinstance(getattr(model, name, None), Mapping):  # `Field(default_factory=dict)`
            changed[name] = {}
    for name in _MAPPINGS:
        value = getattr(model, name, None)
        if name in fields and isinstance(value, Mapping):
            changed[name] = private_arguments(value)
    if _STORING in fields and (getattr(model, _STORING, None) is not None or _is_own_host(model)):
        changed[_STORING] = False
    return changed


def private_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keyword arguments of a call, or a part of its body, as private calls send them.

    >>> private_arguments({"seed": 7, "user": "me", "store": True, "extra_body": {"metadata": {"team": "x"}}})
    {'seed': 7, 'store': False, 'extra_body': {}}
    """
    sent = {name: value for name, value in arguments.items() if name not in DROPPED}
    for name in _MAPPINGS:
        if isinstance(sent.get(name), Mapping):
            sent[name] = private_arguments(sent[name])
    return {**sent, _STORING: False} if sent.get(_STORING) is not None else sent


def _is_own_host(model: Any) -> bool:
    host = getattr(getattr(getattr(model, "root_client", None), "base_url", None), "host", None)
    return isinstance(host, str) and any(host == own or host.endswith(f".{own}") for own in _OWN_HOSTS)
