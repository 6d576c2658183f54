"""Turns the model a user hands in into an engine. Knows nothing of privacy and makes no private call."""

from __future__ import annotations

from typing import Any

from langchain_core.language_models import BaseChatModel, BaseLLM
from langchain_core.runnables import Runnable

from langchain_dpicl.backends.base import NextTokenBackend
from langchain_dpicl.backends.langchain import LangChainBackend
from langchain_dpicl.backends.silent import unwrap
from langchain_dpicl.exceptions import CapabilityError


def as_backend(llm: Any) -> NextTokenBackend:
    """Returns the engine behind `llm`.

    Args:
      llm: an engine (taken as it is), a model or object that carries one as `backend`, or a LangChain chat or
        completion model, bound or not (adapted with the defaults of `LangChainBackend`, which probes it with public
        text and takes as many top tokens as it reports). A wrapper that chooses a model for each call is none of these.

    Raises:
      CapabilityError: `llm` is none of these, or reports no logprobs.
      ModelCallError: the model could not be reached.
      UnsilencableModelError: it is a LangChain model that cannot be called in silence.

    >>> from langchain_dpicl.backends.fake import FakeBackend, scripted
    >>> fake = FakeBackend(scripted({"a": 1.0}), max_top_k=1)
    >>> as_backend(fake) is fake
    True
    """
    if isinstance(llm, NextTokenBackend):
        return llm
    inner, _ = unwrap(llm)
    is_model = isinstance(inner, BaseChatModel | BaseLLM)
    # Other runnables pass on attributes of what they wrap, but call something else than it: an engine is not theirs.
    carried = getattr(inner, "backend", None) if is_model or not isinstance(inner, Runnable) else None
    if isinstance(carried, NextTokenBackend):
        return carried
    if is_model:
        return LangChainBackend(llm)
    raise CapabilityError(
        f"expected an engine or a LangChain chat or completion model, found {type(inner).__name__}; "
        "pass the model itself rather than a chain, fallback or configurable wrapper around it"
    )
