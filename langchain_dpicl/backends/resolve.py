"""Turns the model a user hands in into an engine. Knows nothing of privacy and makes no private call."""

from __future__ import annotations

from typing import Any

from langchain_core.language_models import BaseChatModel, BaseLLM

from langchain_dpicl.backends.base import NextTokenBackend
from langchain_dpicl.backends.langchain import LangChainBackend
from langchain_dpicl.backends.silent import unwrap
from langchain_dpicl.exceptions import CapabilityError


def as_backend(llm: Any) -> NextTokenBackend:
    """Returns the engine behind `llm`.

    Args:
      llm: an engine (taken as it is), a model of ours that carries one as `backend`, or a LangChain chat or completion
        model, bound or not (adapted with the defaults of `LangChainBackend`, which probes it with public text).

    Raises:
      CapabilityError: `llm` is none of these, or reports no logprobs.
      UnsilencableModelError: it is a LangChain model that cannot be called in silence.

    >>> from langchain_dpicl.backends.fake import FakeBackend, scripted
    >>> fake = FakeBackend(scripted({"a": 1.0}), max_top_k=1)
    >>> as_backend(fake) is fake
    True
    """
    if isinstance(llm, NextTokenBackend):
        return llm
    inner, _ = unwrap(llm)
    carried = getattr(inner, "backend", None)
    if isinstance(carried, NextTokenBackend):
        return carried
    if isinstance(inner, BaseChatModel | BaseLLM):
        return LangChainBackend(llm)
    raise CapabilityError(
        f"expected an engine or a LangChain chat or completion model, found {type(inner).__name__}; "
        "pass the model itself rather than a chain around it"
    )
