"""The engines: prompts in, rows out. Know nothing of privacy, budgets or records.

`base` says what an engine can do, as Protocols; `fake` holds deterministic engines for tests and docs. LangChain models
are called in silence (`silent` makes the calls): `langchain` for those that report log-probabilities (`logprobs` reads
them), `decisions` for those that have a probability for every label, `texts` for those that only write (`answers` says
which label an answer names). `private_process` holds those whose model has a process of its own. `resolve.as_backend`
and `resolve.as_choice_backend` turn what a user hands in into one.
"""

from typing import TYPE_CHECKING

from langchain_dpicl._lazy import on_first_use

if TYPE_CHECKING:
    from langchain_dpicl.backends.hf.backend import HuggingFaceBackend
    from langchain_dpicl.backends.langchain.backend import LangChainBackend
    from langchain_dpicl.backends.langchain.logprobs import DecisionsBackend
    from langchain_dpicl.backends.langchain.texts import TextVoteBackend
    from langchain_dpicl.backends.private_calls.method_checks import allow_wrappers
    from langchain_dpicl.backends.private_process.engines import PrivateProcess
    from langchain_dpicl.backends.rows.neighbour_rows import LocalEmbeddings

_HOME = {
    "DecisionsBackend": "langchain_dpicl.backends.langchain.logprobs",
    "HuggingFaceBackend": "langchain_dpicl.backends.hf.backend",
    "LangChainBackend": "langchain_dpicl.backends.langchain.backend",
    "LocalEmbeddings": "langchain_dpicl.backends.rows.neighbour_rows",
    "PrivateProcess": "langchain_dpicl.backends.private_process.engines",
    "TextVoteBackend": "langchain_dpicl.backends.langchain.texts",
    "allow_wrappers": "langchain_dpicl.backends.private_calls.method_checks",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = on_first_use(__name__, _HOME)

__all__ = [
    "DecisionsBackend",
    "HuggingFaceBackend",
    "LangChainBackend",
    "LocalEmbeddings",
    "PrivateProcess",
    "TextVoteBackend",
    "allow_wrappers",
]
