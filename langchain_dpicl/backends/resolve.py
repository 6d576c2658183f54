"""Turns the model that a user passes into an engine, and names the hosts that private text is sent to."""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
import weakref
from typing import Any, Literal

from langchain_core.language_models import BaseChatModel, BaseLLM
from langchain_core.runnables import Runnable

from langchain_dpicl.backends.base import ChoiceBackend, GradientBackend, NextTokenBackend, TextBackend
from langchain_dpicl.backends.langchain.backend import LangChainBackend
from langchain_dpicl.backends.langchain.logprobs import DecisionsBackend, NoLogprobsError
from langchain_dpicl.backends.langchain.texts import TextVoteBackend
from langchain_dpicl.backends.private_calls import public_calls
from langchain_dpicl.backends.private_calls.call import RetryPolicy, SilentModel, spelling_of, unwrap
from langchain_dpicl.backends.private_calls.model_checks import (
    DECISION_MODELS,
    attributes_of,
    is_around_pipelines,
    is_one_of,
    pipeline_of,
)
from langchain_dpicl.backends.private_process.engines import PrivateProcess, ProcessEngine
from langchain_dpicl.backends.rows.neighbour_rows import LocalEmbeddings
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError

_NO_WRAPPER = "pass the model itself rather than a chain, fallback or configurable wrapper around it"


def as_backend(llm: Any, *, retry: RetryPolicy | None = None) -> NextTokenBackend:
    """Returns the engine behind `llm`, for writing token by token.

    Args:
      llm: an engine (taken as it is), a model or object that carries one as `backend`, a stock Hugging Face model (see
        the module), a name (see `as_model`), or another LangChain chat or completion model, bound or not (adapted with
        the defaults of `LangChainBackend`, which probes it with public text and takes as many top tokens as it
        reports), or a `PrivateProcess`. A wrapper that chooses a model for each call is none of these.
      retry: how long each row's call of an adapted model is waited for.

    Raises:
      CapabilityError: `llm` is none of these, or reports no logprobs.
      ModelCallError: the model could not be reached.
      UnsilencableModelError: it is a LangChain model that cannot be called in silence.

    >>> from langchain_dpicl.backends.fake import FakeBackend, scripted
    >>> fake = FakeBackend(scripted({"a": 1.0}), max_top_k=1)
    >>> as_backend(fake) is fake
    True
    """
    llm = _in_its_process(as_model(llm), NextTokenBackend, "tokens")
    if isinstance(llm, NextTokenBackend):
        return llm
    carried = _carried_engine(llm)
    if isinstance(carried, NextTokenBackend):
        return carried
    if _kind(llm) in {"chat", "completion"}:
        return LangChainBackend(llm, retry=retry)
    advice = "text token by token; take a chat or completion model that reports logprobs, or the embedded model"
    raise _no_engine(llm, NextTokenBackend, chooses="(LabelClassifier takes it) and cannot write " + advice)


def as_choice_backend(
    llm: Any, *, votes: Literal["text"] | None = None, retry: RetryPolicy | None = None
) -> ChoiceBackend | NextTokenBackend:
    """Returns the best that `llm` has for choosing among labels; never something less in silence.

    | `llm` | engine |
    |---|---|
    | an engine, or something that carries one | itself |
    | `HuggingFacePipeline`, or `ChatHuggingFace` around one | `HuggingFaceBackend` of its model and tokenizer |
    | `OpenAIDecisions` | `DecisionsBackend`: a probability for every label |
    | a chat or completion model | `LangChainBackend`: top tokens; the caller reads the labels' first tokens |
    | a model of a class without logprobs (Anthropic's), or any with `votes="text"` | `TextVoteBackend`: one-hot votes |
    | a `PrivateProcess` | what its model has, in that process |

    Args:
      llm: any of these, bound or not.
      votes: "text" takes what the model writes as its vote, also where it reports logprobs.
      retry: how long each row's call of an adapted model is waited for.

    Raises:
      CapabilityError: `llm` is none of these, or reports no logprobs and `votes` is not "text".
      ModelCallError: the model could not be reached.
      UnsilencableModelError: it is a LangChain model that cannot be called in silence.
      ConfigurationError: `votes` is something else.
    """
    if votes not in {None, "text"}:
        raise ConfigurationError(f'expected votes="text" or None, found {votes!r}')
    llm = _in_its_process(as_model(llm), ChoiceBackend | NextTokenBackend, "text votes" if votes else "choices")
    kind = _kind(llm)
    if votes == "text":
        return _text_votes(llm, kind, retry)
    for engine in (llm, _carried_engine(llm)):
        if isinstance(engine, ChoiceBackend | NextTokenBackend):
            return engine
    if kind == "decisions":
        return DecisionsBackend(llm, retry=retry)
    if kind in {"chat", "completion"}:
        is_writer = spelling_of(unwrap(llm)[0]).is_text_only
        return TextVoteBackend(llm, retry=retry) if is_writer else _first_tokens(llm, kind, retry)
    raise _no_engine(llm, ChoiceBackend, NextTokenBackend)


def as_text_backend(llm: Any, *, retry: RetryPolicy | None = None) -> TextBackend:
    """Returns the engine behind `llm`, for answers in its own words.

    Args:
      llm: an engine that completes text (taken as it is), a model or object that carries one as `backend`, a stock
        Hugging Face model (see the module), or another LangChain chat or completion model, bound or not (adapted by
        `TextVoteBackend`, which probes it), or a `PrivateProcess`.
      retry: how long each row's call of an adapted model is waited for.

    Raises:
      CapabilityError: `llm` is none of these.
      ModelCallError: the model could not be reached.
      UnsilencableModelError: it is a LangChain model that cannot be called in silence.
    """
    llm = _in_its_process(as_model(llm), TextBackend, "texts")
    for engine in (llm, _carried_engine(llm)):
        if isinstance(engine, TextBackend):
            return engine
    if _kind(llm) in {"chat", "completion"}:
        return TextVoteBackend(llm, retry=retry)
    advice = "text; take a chat or completion model, or the embedded model"
    raise _no_engine(llm, TextBackend, chooses="(DPVotingRunnable takes it) and cannot write " + advice)


def _no_engine(llm: Any, *wanted: type, chooses: str = "") -> CapabilityError:
    """Returns the error for what is no engine of the wanted Protocols; of somebody's own it names what it lacks.

    Args:
      llm: what was given; the message holds names of its class and of members alone.
      wanted: Protocols.
      chooses: what is said of an engine that chooses among labels; empty: that is wanted.
    """
    inner, _ = unwrap(llm)
    name = type(inner).__name__
    if chooses and (_kind(llm) == "decisions" or isinstance(llm, ChoiceBackend)):
        return CapabilityError(f"{name} chooses among given labels {chooses}")
    expected = "an engine or a" if chooses else "an engine, OpenAIDecisions or a"
    told = f"expected {expected} LangChain chat or completion model, found {name}"
    by_share = dict[float, str]()
    for protocol in wanted:
        members = {member for one in protocol.__mro__ for member in vars(one) if not member.startswith("_")}
        # As `isinstance` has it, None is a value of a property and no method.
        gone = {member: None if callable(getattr(protocol, member)) else inner for member in members}
        lacks = sorted(member for member in members if _found(inner, member, gone[member]) is gone[member])
        by_share.setdefault(len(lacks) / len(members), f"{', '.join(lacks)} of {protocol.__name__}")
    least = min(by_share)
    if isinstance(inner, Runnable) or least == 0.0:
        return CapabilityError(f"{told}; {_NO_WRAPPER}")
    if least > 0.5 and not isinstance(inner, _ENGINES):
        return CapabilityError(f"{told}; pass a model, or add what an engine has (docs/extending.md)")
    return CapabilityError(f"{told}, which lacks {by_share[least]}; add it (docs/extending.md), or pass a model")


def _found(thing: object, member: str, default: object) -> object:
    """Returns a member as `isinstance` looks for it: before Python 3.12 it finds what `__getattr__` forwards."""
    if sys.version_info >= (3, 12):
        return inspect.getattr_static(thing, member, default)
    try:
        return getattr(thing, member, default)
    except Exception:  # noqa: BLE001  a property that cannot be read is there
        return ...


def as_model(llm: Any) -> Any:
    """Returns the model that a text such as "openai:gpt-4o" names, and everything else as it is.

    Args:
      llm: a model, an engine, or the "provider:model" of LangChain's `init_chat_model`.

    Raises:
      CapabilityError: it is a class, which has the methods of its instances and would pass for an engine.
      ConfigurationError: the text names no model that can be made here.
    """
    if isinstance(llm, type):
        advice = f"pass the model itself, an instance: {llm.__name__}(...)"
        raise CapabilityError(f"expected a model or an engine, found the class {llm.__name__}; {advice}")
    return named_model(llm) if isinstance(llm, str) else llm


def named_model(name: str, **arguments: Any) -> Any:
    """Returns the chat model that "provider:model" names, made with further arguments."""
    return _made("llm", "langchain.chat_models", "init_chat_model", name, **arguments)


def _in_its_process(llm: Any, wanted: Any, role: str) -> Any:
    """Returns the engine of a private process in a role, unless it is one that suits; everything else as it is."""
    if isinstance(llm, PrivateProcess):
        return llm.engine(role)
    if not isinstance(llm, ProcessEngine):
        return llm
    suits = isinstance(llm, wanted) and (role != "text votes" or llm.kind == role)
    return llm if suits else llm.engine(role)


def as_embeddings(embeddings: Any) -> Any:
    """Returns embeddings: local ones for None, and those that a text such as "openai:text-embedding-3-small" names.

    Args:
      embeddings: LangChain embeddings, the "provider:model" of LangChain's `init_embeddings`, a `PrivateProcess`, or
        None.

    Raises:
      ConfigurationError: the text names no embeddings that can be made here; also what `PrivateProcess.engine` raises.
    """
    if embeddings is None:
        return LocalEmbeddings()
    if isinstance(embeddings, PrivateProcess):
        return embeddings.engine("embeddings")
    return named_embeddings(embeddings) if isinstance(embeddings, str) else embeddings


def named_embeddings(name: str, **arguments: Any) -> Any:
    """Returns the embeddings that "provider:model" names, made with further arguments."""
    return _made("embeddings", "langchain.embeddings", "init_embeddings", name, **arguments)


def _made(parameter: str, module: str, maker: str, name: str, **arguments: Any) -> Any:
    """Returns what LangChain makes of a name."""
    if ":" not in name:
        advice = f'Give its provider, such as "openai:{name}", or make the model, such as with {maker}(...).'
        expected = 'an object, or a text "provider:model"'
        raise ConfigurationError(f"{parameter}: expected {expected}, found {name!r}. {advice}")
    try:
        make = getattr(importlib.import_module(module), maker)
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] != "langchain":
            raise
        make = None
    if make is None:
        expected = f"the package langchain, which makes {name!r}, found none"
        raise ConfigurationError(f"{parameter}: expected {expected}. Run `pip install langchain`, or give the object.")
    try:
        return make(name, **arguments)
    except Exception as error:  # noqa: BLE001  each provider's class has errors of its own, such as for a missing key
        reason = str(error).strip().partition("\n")[0]
    raise ConfigurationError(f"{parameter}: expected a model that LangChain can make, found {name!r}. {reason}")


def _carried_engine(llm: Any) -> Any:
    inner, _ = unwrap(llm)
    if (engine := _local_engine(inner)) is not None:
        return engine
    # Other runnables forward attributes of the wrapped model, but call something else.
    is_model = isinstance(inner, BaseChatModel | BaseLLM)
    return getattr(inner, "backend", None) if is_model or not isinstance(inner, Runnable) else None


def _text_votes(llm: Any, kind: str | None, retry: RetryPolicy | None) -> ChoiceBackend:
    if isinstance(llm, TextVoteBackend):
        return llm
    if isinstance(llm, ProcessEngine) and isinstance(llm, ChoiceBackend):
        return llm
    if kind in {"chat", "completion"}:
        return TextVoteBackend(llm, retry=retry)
    raise CapabilityError(
        f'expected a LangChain chat or completion model with votes="text", found {type(unwrap(llm)[0]).__name__}; '
        "leave votes out, or " + _NO_WRAPPER
    )


def _first_tokens(llm: Any, kind: str, retry: RetryPolicy | None) -> LangChainBackend:
    """Returns the engine of a model; labels follow the prompt, so a chat model need not continue its own message."""
    try:
        return LangChainBackend(llm, continuation="instruct" if kind == "chat" else None, retry=retry)
    except NoLogprobsError as error:
        reason = str(error).replace(public_calls.VOTES, "").rstrip()
    expected = 'log-probabilities, or LabelAnswers(votes="text") to take what it writes as its vote'
    raise CapabilityError(f"llm: expected {expected}. {reason}")


def _kind(llm: Any) -> Literal["chat", "completion", "decisions"] | None:
    inner, _ = unwrap(llm)
    if isinstance(inner, BaseChatModel | BaseLLM):
        return "chat" if isinstance(inner, BaseChatModel) else "completion"
    return "decisions" if is_one_of(inner, DECISION_MODELS) else None


# Stock objects of `langchain_huggingface` that hold a local model are unwrapped: private work calls the model itself,
# so that their callbacks, caches and traces see none of it; their sampling parameters are ignored.
_engines: weakref.WeakKeyDictionary[Any, dict[tuple[bool, int, int], NextTokenBackend]] = weakref.WeakKeyDictionary()
"""Engines made of pipelines, by the pipeline: an engine holds its model and tokenizer, and not the pipeline."""

_making = threading.Lock()
_USUAL_LENGTH = 512 + 128


def _local_engine(model: Any) -> NextTokenBackend | None:
    """Returns the engine of a stock object's pipeline, the same for the same pipeline; None for other objects."""
    pipeline = pipeline_of(model)
    if pipeline is None:
        return None
    if pipeline.task != "text-generation":
        raise CapabilityError(
            f"expected a pipeline for text-generation, found one for {pipeline.task}; take a causal language model"
        )
    is_chat = is_around_pipelines(model)
    tokenizer = _one_tokenizer(model if is_chat else pipeline, pipeline)
    key = (is_chat, id(tokenizer), id(pipeline.model))  # an engine keeps both alive, so ids are not reused
    with _making:
        known = _engines.setdefault(pipeline, {})
        if key not in known:
            known[key] = _engine_of(pipeline.model, tokenizer, is_chat=is_chat)
        return known[key]


def _one_tokenizer(model: Any, pipeline: Any) -> Any:
    """Returns the tokenizer of a chat model, which has its template, or of the pipeline; both need one vocabulary."""
    tokenizer = model.tokenizer
    if tokenizer is None or pipeline.tokenizer is None:
        return pipeline.tokenizer if tokenizer is None else tokenizer
    if tokenizer is not pipeline.tokenizer and tokenizer.get_vocab() != pipeline.tokenizer.get_vocab():
        raise ConfigurationError(
            f"expected one tokenizer, found another vocabulary in {type(model).__name__} than in its pipeline; "
            "pass ChatHuggingFace(llm=..., tokenizer=pipeline.tokenizer)"
        )
    return tokenizer


def _engine_of(model: Any, tokenizer: Any, *, is_chat: bool) -> NextTokenBackend:
    """Returns an engine with default lengths; of a shorter context three quarters are for the prompt."""
    from langchain_dpicl.backends.hf.backend import HuggingFaceBackend
    from langchain_dpicl.backends.hf.loading import inspect_model

    context = inspect_model(model).context
    if context is None or context >= _USUAL_LENGTH:
        return HuggingFaceBackend(model, tokenizer, chat=is_chat)
    room = context // 4
    return HuggingFaceBackend(model, tokenizer, chat=is_chat, max_prompt_tokens=context - room, max_new_tokens=room)


PROCESS = "this process"
"""Name for models that made no connection."""

_PACKAGE = "langchain_dpicl"
_DEPTH = 6
_ENGINES = (ChoiceBackend, GradientBackend, NextTokenBackend, TextBackend)


def recipients(*holders: object) -> list[str]:
    """Returns the hosts (with port, proxies included) that public calls of engines, or of their holders, reached.

    >>> from langchain_dpicl.backends.fake import FakeBackend, scripted
    >>> recipients(FakeBackend(scripted({" a": 1.0}), max_top_k=1))
    ['this process']
    """
    hosts: dict[str, None] = {}
    todo: list[tuple[Any, int]] = [(holder, 0) for holder in holders]
    seen = set(map(id, holders))
    for thing, depth in todo:  # it grows
        if isinstance(thing, SilentModel):
            hosts |= dict.fromkeys(thing.hosts or (PROCESS,))
        elif isinstance(thing, ProcessEngine):
            hosts |= dict.fromkeys(thing.hosts)
        elif not type(thing).__module__.startswith(_PACKAGE):
            # Numbers and texts are most of what there is, and no engines.
            if type(thing).__module__ != "builtins" and isinstance(thing, _ENGINES):
                hosts[f"wherever {type(thing).__name__} sends it"] = None
        elif depth < _DEPTH:
            new = [value for value in attributes_of(thing).values() if id(value) not in seen]
            seen.update(map(id, new))
            todo += [(value, depth + 1) for value in new]
    return sorted(hosts) or [PROCESS]
