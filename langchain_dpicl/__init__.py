"""Differentially private in-context learning for LangChain.

The public face: what is listed here is promised; everything else is importable but may change. A name is loaded when it
is first used, so that a part of the package loads only what it needs.
"""

from typing import TYPE_CHECKING, Any

from langchain_dpicl._lazy import on_first_use

if TYPE_CHECKING:
    from langchain_dpicl.backends.hf.backend import HuggingFaceBackend
    from langchain_dpicl.backends.langchain.backend import LangChainBackend
    from langchain_dpicl.backends.langchain.logprobs import DecisionsBackend
    from langchain_dpicl.backends.langchain.texts import TextVoteBackend
    from langchain_dpicl.backends.private_calls.method_checks import allow_wrappers
    from langchain_dpicl.backends.rows.neighbour_rows import LocalEmbeddings
    from langchain_dpicl.backends.tuning.tasks import PromptTask
    from langchain_dpicl.baselines import (
        UnprotectedVotes,
        demonstrations_from_instruction,
        demonstrations_without_privacy,
        label_votes_without_privacy,
        real_demonstrations_without_privacy,
        soft_prompt_without_privacy,
    )
    from langchain_dpicl.budget.budget import Budget
    from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler, get_privacy_budget_callback
    from langchain_dpicl.discovery import UnitCounter, ValueDiscovery, public_vocabulary
    from langchain_dpicl.distributed.executor import Workplace
    from langchain_dpicl.distributed.ray import RayExecutor
    from langchain_dpicl.documents.synthesizer import DocumentSynthesizer
    from langchain_dpicl.evolution.evolution import PrivateEvolution
    from langchain_dpicl.exceptions import (
        AccountantsDisagreeError,
        AccountingError,
        CapabilityError,
        ConfigurationError,
        DPICLError,
        LabellingInterruptedError,
        LedgerError,
        LedgerRollbackError,
        LedgerUnavailableError,
        MemoError,
        ModelCallError,
        NoPrivacyBudgetError,
        PrivacyBudgetError,
        PrivacyBudgetExceededError,
        PrivacyBudgetMismatchError,
        PrivateAccessError,
        RecordError,
        SealedShareError,
        SensitivityError,
        SynthesisInterruptedError,
        TenantCapExceededError,
        TrainingInterruptedError,
        UnknownEventError,
        UnsilencableModelError,
    )
    from langchain_dpicl.free_form.runnable import DPFreeFormRunnable
    from langchain_dpicl.generation.grammars import Grammar
    from langchain_dpicl.generation.synthesizer import DemonstrationSynthesizer
    from langchain_dpicl.pate.example_selector import PromptPATEExampleSelector
    from langchain_dpicl.pate.labeler import PromptPATELabeler
    from langchain_dpicl.privacy.data.private_examples import PrivateExamples
    from langchain_dpicl.prompts import DPFewShotChatMessagePromptTemplate, DPFewShotPromptTemplate
    from langchain_dpicl.released.counts import ReleasedCounts
    from langchain_dpicl.released.demonstrations import ReleasedDemonstrations
    from langchain_dpicl.released.documents import SyntheticDocuments
    from langchain_dpicl.released.labelled_pool import LabelledPool, PoolEntry
    from langchain_dpicl.released.soft_prompt import SoftPrompt
    from langchain_dpicl.reports.report import PrivacyReport, verify_report
    from langchain_dpicl.retrieval.free_form import DPRetrievalFreeFormRunnable
    from langchain_dpicl.retrieval.voting import DPRetrievalVotingRunnable
    from langchain_dpicl.runs.query_runnable import FreeFormResult, Receipt, RetrievalResult, VotingResult
    from langchain_dpicl.serving.classifier import LabelClassifier
    from langchain_dpicl.serving.models import ChatEmbedded, ChatLocal, EmbeddedLLM, LocalLLM
    from langchain_dpicl.soft_prompts.serving import SoftPromptBackend, SoftPromptClassifier
    from langchain_dpicl.soft_prompts.trainer import PromptDPSGD
    from langchain_dpicl.voting import DPVotingRunnable

    __version__: str

_HOME = {
    "AccountantsDisagreeError": "langchain_dpicl.exceptions",
    "AccountingError": "langchain_dpicl.exceptions",
    "Budget": "langchain_dpicl.budget.budget",
    "CapabilityError": "langchain_dpicl.exceptions",
    "ChatEmbedded": "langchain_dpicl.serving.models",
    "ChatLocal": "langchain_dpicl.serving.models",
    "ConfigurationError": "langchain_dpicl.exceptions",
    "DPFewShotChatMessagePromptTemplate": "langchain_dpicl.prompts",
    "DPFewShotPromptTemplate": "langchain_dpicl.prompts",
    "DPFreeFormRunnable": "langchain_dpicl.free_form.runnable",
    "DPICLError": "langchain_dpicl.exceptions",
    "DPRetrievalFreeFormRunnable": "langchain_dpicl.retrieval.free_form",
    "DPRetrievalVotingRunnable": "langchain_dpicl.retrieval.voting",
    "DPVotingRunnable": "langchain_dpicl.voting",
    "DecisionsBackend": "langchain_dpicl.backends.langchain.logprobs",
    "DemonstrationSynthesizer": "langchain_dpicl.generation.synthesizer",
    "DocumentSynthesizer": "langchain_dpicl.documents.synthesizer",
    "EmbeddedLLM": "langchain_dpicl.serving.models",
    "FreeFormResult": "langchain_dpicl.runs.query_runnable",
    "Grammar": "langchain_dpicl.generation.grammars",
    "HuggingFaceBackend": "langchain_dpicl.backends.hf.backend",
    "LabelClassifier": "langchain_dpicl.serving.classifier",
    "LabelledPool": "langchain_dpicl.released.labelled_pool",
    "LabellingInterruptedError": "langchain_dpicl.exceptions",
    "LangChainBackend": "langchain_dpicl.backends.langchain.backend",
    "LedgerError": "langchain_dpicl.exceptions",
    "LedgerRollbackError": "langchain_dpicl.exceptions",
    "LedgerUnavailableError": "langchain_dpicl.exceptions",
    "LocalEmbeddings": "langchain_dpicl.backends.rows.neighbour_rows",
    "LocalLLM": "langchain_dpicl.serving.models",
    "MemoError": "langchain_dpicl.exceptions",
    "ModelCallError": "langchain_dpicl.exceptions",
    "NoPrivacyBudgetError": "langchain_dpicl.exceptions",
    "PoolEntry": "langchain_dpicl.released.labelled_pool",
    "PrivacyBudgetCallbackHandler": "langchain_dpicl.budget.handler",
    "PrivacyBudgetError": "langchain_dpicl.exceptions",
    "PrivacyBudgetExceededError": "langchain_dpicl.exceptions",
    "PrivacyBudgetMismatchError": "langchain_dpicl.exceptions",
    "PrivacyReport": "langchain_dpicl.reports.report",
    "PrivateAccessError": "langchain_dpicl.exceptions",
    "PrivateEvolution": "langchain_dpicl.evolution.evolution",
    "PrivateExamples": "langchain_dpicl.privacy.data.private_examples",
    "PromptDPSGD": "langchain_dpicl.soft_prompts.trainer",
    "PromptPATEExampleSelector": "langchain_dpicl.pate.example_selector",
    "PromptPATELabeler": "langchain_dpicl.pate.labeler",
    "PromptTask": "langchain_dpicl.backends.tuning.tasks",
    "RayExecutor": "langchain_dpicl.distributed.ray",
    "Receipt": "langchain_dpicl.runs.query_runnable",
    "RecordError": "langchain_dpicl.exceptions",
    "ReleasedCounts": "langchain_dpicl.released.counts",
    "ReleasedDemonstrations": "langchain_dpicl.released.demonstrations",
    "RetrievalResult": "langchain_dpicl.runs.query_runnable",
    "SealedShareError": "langchain_dpicl.exceptions",
    "SensitivityError": "langchain_dpicl.exceptions",
    "SoftPrompt": "langchain_dpicl.released.soft_prompt",
    "SoftPromptBackend": "langchain_dpicl.soft_prompts.serving",
    "SoftPromptClassifier": "langchain_dpicl.soft_prompts.serving",
    "SynthesisInterruptedError": "langchain_dpicl.exceptions",
    "SyntheticDocuments": "langchain_dpicl.released.documents",
    "TenantCapExceededError": "langchain_dpicl.exceptions",
    "TextVoteBackend": "langchain_dpicl.backends.langchain.texts",
    "TrainingInterruptedError": "langchain_dpicl.exceptions",
    "UnitCounter": "langchain_dpicl.discovery",
    "UnknownEventError": "langchain_dpicl.exceptions",
    "UnprotectedVotes": "langchain_dpicl.baselines",
    "UnsilencableModelError": "langchain_dpicl.exceptions",
    "ValueDiscovery": "langchain_dpicl.discovery",
    "VotingResult": "langchain_dpicl.runs.query_runnable",
    "Workplace": "langchain_dpicl.distributed.executor",
    "allow_wrappers": "langchain_dpicl.backends.private_calls.method_checks",
    "demonstrations_from_instruction": "langchain_dpicl.baselines",
    "demonstrations_without_privacy": "langchain_dpicl.baselines",
    "get_privacy_budget_callback": "langchain_dpicl.budget.handler",
    "label_votes_without_privacy": "langchain_dpicl.baselines",
    "public_vocabulary": "langchain_dpicl.discovery",
    "real_demonstrations_without_privacy": "langchain_dpicl.baselines",
    "soft_prompt_without_privacy": "langchain_dpicl.baselines",
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
    "AccountantsDisagreeError",
    "AccountingError",
    "Budget",
    "CapabilityError",
    "ChatEmbedded",
    "ChatLocal",
    "ConfigurationError",
    "DPFewShotChatMessagePromptTemplate",
    "DPFewShotPromptTemplate",
    "DPFreeFormRunnable",
    "DPICLError",
    "DPRetrievalFreeFormRunnable",
    "DPRetrievalVotingRunnable",
    "DPVotingRunnable",
    "DecisionsBackend",
    "DemonstrationSynthesizer",
    "DocumentSynthesizer",
    "EmbeddedLLM",
    "FreeFormResult",
    "Grammar",
    "HuggingFaceBackend",
    "LabelClassifier",
    "LabelledPool",
    "LabellingInterruptedError",
    "LangChainBackend",
    "LedgerError",
    "LedgerRollbackError",
    "LedgerUnavailableError",
    "LocalEmbeddings",
    "LocalLLM",
    "MemoError",
    "ModelCallError",
    "NoPrivacyBudgetError",
    "PoolEntry",
    "PrivacyBudgetCallbackHandler",
    "PrivacyBudgetError",
    "PrivacyBudgetExceededError",
    "PrivacyBudgetMismatchError",
    "PrivacyReport",
    "PrivateAccessError",
    "PrivateEvolution",
    "PrivateExamples",
    "PromptDPSGD",
    "PromptPATEExampleSelector",
    "PromptPATELabeler",
    "PromptTask",
    "RayExecutor",
    "Receipt",
    "RecordError",
    "ReleasedCounts",
    "ReleasedDemonstrations",
    "RetrievalResult",
    "SealedShareError",
    "SensitivityError",
    "SoftPrompt",
    "SoftPromptBackend",
    "SoftPromptClassifier",
    "SynthesisInterruptedError",
    "SyntheticDocuments",
    "TenantCapExceededError",
    "TextVoteBackend",
    "TrainingInterruptedError",
    "UnitCounter",
    "UnknownEventError",
    "UnprotectedVotes",
    "UnsilencableModelError",
    "ValueDiscovery",
    "VotingResult",
    "Workplace",
    "allow_wrappers",
    "demonstrations_from_instruction",
    "demonstrations_without_privacy",
    "get_privacy_budget_callback",
    "label_votes_without_privacy",
    "public_vocabulary",
    "real_demonstrations_without_privacy",
    "soft_prompt_without_privacy",
    "verify_report",
]
