"""The model that a user names instead of making it: it is made, and called, in a process of its own."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import astuple
from types import TracebackType
from typing import Any, ClassVar, Self

from langchain_dpicl._opaque import Uncopyable
from langchain_dpicl.backends.private_calls.call import OpaqueValue, RetryPolicy
from langchain_dpicl.backends.private_process.connection import Client
from langchain_dpicl.backends.private_process.engines import ProcessEngine, engine_of
from langchain_dpicl.exceptions import ConfigurationError, DPICLError

_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_EXPECTED = (
    '"provider:model" as LangChain\'s init_chat_model takes it, an importable function that makes a model, or its name '
    '"package.module:function"'
)


class PrivateProcess(Uncopyable):
    """A model in a spawned, clean interpreter, to be handed in where a model or embeddings go (`llm=`, `embeddings=`).

    Prompts go there through a pipe and rows come back. Nothing that watches this process (tracing, logging, callbacks,
    patched SDKs) sees private calls, and environment variables that start instrumentation are not inherited. What is
    checked of any model is checked there. One object is one process; threads and event loops share it, and a forked
    process starts another. It ends with the object, with `close`, and with this process.

    Formal guarantees:
      - Rows are those of the same model in this process, bit by bit.
      - If the process ends, or does not answer in time, another one is started, and each row that was under way is
        asked for once more, alone. A row that fails then abstains, as a failed call does; a public call raises
        ModelCallError.

    Args:
      model: "provider:model", made by LangChain's `init_chat_model` (embeddings: `init_embeddings`); or an importable
        function (or class) that returns a LangChain model, embeddings or an engine, or its name
        "package.module:function", or that of a model made there. A first part with a dot is a module; one without is a
        module only where LangChain makes nothing of the name.
      retry: how long each row's call is waited for, there; an answer takes at most `max_attempts` times
        `deadline + max_wait` seconds for every 32 rows (or `max_concurrency`), then the process is killed.
      arguments: keyword arguments of `init_chat_model` or of the function: text, numbers, lists and dicts of them.

    Raises:
      ConfigurationError: `model` is none of these, or an argument cannot be sent.

    >>> from langchain_dpicl import EmbeddedLLM
    >>> with PrivateProcess(EmbeddedLLM) as llm:
    ...     llm.engine("texts").complete(["one and one is"], max_tokens=2) == EmbeddedLLM().backend.complete(
    ...         ["one and one is"], max_tokens=2
    ...     )
    True
    """

    _pickle_error: ClassVar[type[DPICLError]] = ConfigurationError
    _pickle_advice = "it has a process of its own. Make another one where it is needed"

    def __init__(
        self, model: str | Callable[..., Any], /, *, retry: RetryPolicy | None = None, **arguments: Any
    ) -> None:
        name, function = _named(model)
        retry = RetryPolicy() if retry is None else retry
        if not isinstance(retry, RetryPolicy):
            raise ConfigurationError(
                f"PrivateProcess.retry: expected a RetryPolicy, found {type(retry).__name__}. "
                "Give RetryPolicy(deadline=60)"
            )
        try:
            json.dumps(arguments)
        except (TypeError, ValueError, RecursionError):
            bad = sorted(key for key, value in arguments.items() if not _is_plain(value))
            raise ConfigurationError(
                f"PrivateProcess: expected arguments that are text, numbers, lists and dicts, found others in {bad}. "
                'Make the model in a function, PrivateProcess("package.module:function")'
            ) from None
        self._arguments = OpaqueValue(arguments)  # may be keys
        self._shown = f"{name}:{function}" if function else name
        start = {"model": name, "function": function, "arguments": arguments, "retry": astuple(retry)}
        self._client = Client({**start, "embeds": False}, name=self._shown, retry=retry)
        self._embedder = Client({**start, "embeds": True}, name=self._shown, retry=retry)

    @property
    def model(self) -> str:
        """The name of the model, or of what makes it."""
        return self._shown

    @property
    def options(self) -> Mapping[str, Any]:
        """The arguments that the model is made with, by which a memo tells models apart."""
        return dict(self._arguments.reveal())

    def __repr__(self) -> str:
        return f"PrivateProcess({self._shown!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def engine(self, role: str) -> ProcessEngine:
        """Returns the engine of the model in a role; the first call starts the process.

        Args:
          role: "tokens" (writes token by token), "choices" (chooses among labels), "text votes" (chooses by what it
            writes), "texts" (writes) or "embeddings" (embeds; in another process than the others).

        Raises:
          CapabilityError: the model has nothing for it.
          ConfigurationError: the model cannot be made.
          ModelCallError: the process does not start, or the model cannot be reached.
          UnsilencableModelError: the model cannot be called in silence there either.
        """
        return engine_of(self._embedder if role == "embeddings" else self._client, role)

    def close(self) -> None:
        """Ends the process; later calls of the model are refused."""
        self._client.close()
        self._embedder.close()


def _named(model: object) -> tuple[str, str]:
    """Returns the name of a model and "", or the names of a module and of a function in it."""
    if isinstance(model, str):
        head, sign, tail = model.partition(":")
        if not head or not sign or not tail:
            raise ConfigurationError(f"PrivateProcess: expected {_EXPECTED}, found {model!r}.")
        return (head, tail) if _MODULE.fullmatch(head) else (model, "")
    module, function = (getattr(model, name, None) for name in ("__module__", "__qualname__"))
    if not callable(model) or not isinstance(module, str) or not isinstance(function, str):
        raise ConfigurationError(
            f"PrivateProcess: expected {_EXPECTED}, found an object of {type(model).__name__}. The model is made in "
            "the other process: name it, or hand in the function that makes it"
        )
    found: Any = importlib.import_module(module)
    for part in function.split("."):
        found = getattr(found, part, None)
    if module == "__main__" or found is not model:
        raise ConfigurationError(
            f"PrivateProcess: expected an importable function, found {function} of {module}, which another process "
            "cannot import. Move it to the top of a module"
        )
    return module, function


def _is_plain(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
