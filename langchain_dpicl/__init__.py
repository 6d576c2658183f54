"""Differentially private in-context learning for LangChain.

The names listed here are promised. So are those that the modules `agents`, `audit`, `backends`, `baselines`,
`discovery`, `distributed`, `evaluation`, `exceptions`, `options`, `rehearsal`, `released`, `reports`, `results`,
`soft_prompts`, `stores` and `streams` list in `__all__`; everything else is importable but may change. A name is
loaded when it is first used, so that a part of the package loads only what it needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from langchain_dpicl._lazy import on_first_use, provide

provide("calls", lambda: import_module("langchain_dpicl._calls"))

if TYPE_CHECKING:
    from langchain_dpicl.budget.budget import Budget
    from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler, get_privacy_budget_callback
    from langchain_dpicl.discovery import UnitCounter, ValueDiscovery, WordDiscovery
    from langchain_dpicl.documents import DocumentSynthesizer
    from langchain_dpicl.evolution import PrivateEvolution
    from langchain_dpicl.exceptions import DPICLError, PrivacyBudgetExceededError, RunInterruptedError
    from langchain_dpicl.free_form import DPFreeFormRunnable
    from langchain_dpicl.generation.grammars import Grammar
    from langchain_dpicl.generation.synthesizer import DemonstrationSynthesizer
    from langchain_dpicl.options import (
        Decoding,
        EmbeddingAnswers,
        FewShotTask,
        GenerationTask,
        KeywordAnswers,
        LabelAnswers,
        Noise,
        Retrieval,
        Rows,
        Serving,
    )
    from langchain_dpicl.pate.example_selector import PromptPATEExampleSelector
    from langchain_dpicl.pate.labeler import PromptPATELabeler
    from langchain_dpicl.privacy.private_examples import PrivateExamples
    from langchain_dpicl.prompts import DPFewShotChatMessagePromptTemplate, DPFewShotPromptTemplate
    from langchain_dpicl.released.counts import ReleasedCounts
    from langchain_dpicl.released.demonstrations import ReleasedDemonstrations
    from langchain_dpicl.released.documents import SyntheticDocuments
    from langchain_dpicl.released.labelled_pool import LabelledPool
    from langchain_dpicl.released.soft_prompt import SoftPrompt
    from langchain_dpicl.reports.report import verify_report
    from langchain_dpicl.retrieval import DPRetrievalFreeFormRunnable, DPRetrievalVotingRunnable
    from langchain_dpicl.serving import ChatEmbedded, ChatLocal, EmbeddedLLM, LabelClassifier, LocalLLM
    from langchain_dpicl.soft_prompts.serving import SoftPromptClassifier
    from langchain_dpicl.soft_prompts.trainer import PromptDPSGD
    from langchain_dpicl.voting import DPVotingRunnable

    __version__: str

_HOME = {
    "Budget": "langchain_dpicl.budget.budget",
    "ChatEmbedded": "langchain_dpicl.serving",
    "ChatLocal": "langchain_dpicl.serving",
    "DPFewShotChatMessagePromptTemplate": "langchain_dpicl.prompts",
    "DPFewShotPromptTemplate": "langchain_dpicl.prompts",
    "DPFreeFormRunnable": "langchain_dpicl.free_form",
    "DPICLError": "langchain_dpicl.exceptions",
    "DPRetrievalFreeFormRunnable": "langchain_dpicl.retrieval",
    "DPRetrievalVotingRunnable": "langchain_dpicl.retrieval",
    "DPVotingRunnable": "langchain_dpicl.voting",
    "Decoding": "langchain_dpicl.options",
    "DemonstrationSynthesizer": "langchain_dpicl.generation.synthesizer",
    "DocumentSynthesizer": "langchain_dpicl.documents",
    "EmbeddedLLM": "langchain_dpicl.serving",
    "EmbeddingAnswers": "langchain_dpicl.options",
    "FewShotTask": "langchain_dpicl.options",
    "GenerationTask": "langchain_dpicl.options",
    "Grammar": "langchain_dpicl.generation.grammars",
    "KeywordAnswers": "langchain_dpicl.options",
    "LabelAnswers": "langchain_dpicl.options",
    "LabelClassifier": "langchain_dpicl.serving",
    "LabelledPool": "langchain_dpicl.released.labelled_pool",
    "LocalLLM": "langchain_dpicl.serving",
    "Noise": "langchain_dpicl.options",
    "PrivacyBudgetCallbackHandler": "langchain_dpicl.budget.handler",
    "PrivacyBudgetExceededError": "langchain_dpicl.exceptions",
    "PrivateEvolution": "langchain_dpicl.evolution",
    "PrivateExamples": "langchain_dpicl.privacy.private_examples",
    "PromptDPSGD": "langchain_dpicl.soft_prompts.trainer",
    "PromptPATEExampleSelector": "langchain_dpicl.pate.example_selector",
    "PromptPATELabeler": "langchain_dpicl.pate.labeler",
    "ReleasedCounts": "langchain_dpicl.released.counts",
    "ReleasedDemonstrations": "langchain_dpicl.released.demonstrations",
    "Retrieval": "langchain_dpicl.options",
    "Rows": "langchain_dpicl.options",
    "RunInterruptedError": "langchain_dpicl.exceptions",
    "Serving": "langchain_dpicl.options",
    "SoftPrompt": "langchain_dpicl.released.soft_prompt",
    "SoftPromptClassifier": "langchain_dpicl.soft_prompts.serving",
    "SyntheticDocuments": "langchain_dpicl.released.documents",
    "UnitCounter": "langchain_dpicl.discovery",
    "ValueDiscovery": "langchain_dpicl.discovery",
    "WordDiscovery": "langchain_dpicl.discovery",
    "get_privacy_budget_callback": "langchain_dpicl.budget.handler",
    "verify_report": "langchain_dpicl.reports.report",
}
"""The module of each public name; a test compares it with the imports above, which type checkers read."""

if not TYPE_CHECKING:  # a type checker that saw a `__getattr__` would accept any name
    _load, __dir__ = on_first_use(__name__, _HOME)

    def __getattr__(name: str) -> Any:
        if name != "__version__":
            return _load(name)
        from importlib.metadata import version

        return version("langchain-dpicl")


__all__ = [
    "Budget",
    "ChatEmbedded",
    "ChatLocal",
    "DPFewShotChatMessagePromptTemplate",
    "DPFewShotPromptTemplate",
    "DPFreeFormRunnable",
    "DPICLError",
    "DPRetrievalFreeFormRunnable",
    "DPRetrievalVotingRunnable",
    "DPVotingRunnable",
    "Decoding",
    "DemonstrationSynthesizer",
    "DocumentSynthesizer",
    "EmbeddedLLM",
    "EmbeddingAnswers",
    "FewShotTask",
    "GenerationTask",
    "Grammar",
    "KeywordAnswers",
    "LabelAnswers",
    "LabelClassifier",
    "LabelledPool",
    "LocalLLM",
    "Noise",
    "PrivacyBudgetCallbackHandler",
    "PrivacyBudgetExceededError",
    "PrivateEvolution",
    "PrivateExamples",
    "PromptDPSGD",
    "PromptPATEExampleSelector",
    "PromptPATELabeler",
    "ReleasedCounts",
    "ReleasedDemonstrations",
    "Retrieval",
    "Rows",
    "RunInterruptedError",
    "Serving",
    "SoftPrompt",
    "SoftPromptClassifier",
    "SyntheticDocuments",
    "UnitCounter",
    "ValueDiscovery",
    "WordDiscovery",
    "get_privacy_budget_callback",
    "verify_report",
]
