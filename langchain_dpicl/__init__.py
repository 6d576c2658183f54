"""Differentially private in-context learning for LangChain.

The public face: what is listed here is promised; everything else is importable but may change. A name is loaded when it
is first used, so that a part of the package loads only what it needs.
"""

from typing import TYPE_CHECKING, Any

from langchain_dpicl._lazy import on_first_use

if TYPE_CHECKING:
    from langchain_dpicl._wrapper_rules import allow_wrappers
    from langchain_dpicl.backends.decisions import DecisionsBackend
    from langchain_dpicl.backends.huggingface import HuggingFaceBackend
    from langchain_dpicl.backends.langchain import LangChainBackend
    from langchain_dpicl.backends.nearest_embeddings import LocalEmbeddings
    from langchain_dpicl.backends.texts import TextVoteBackend
    from langchain_dpicl.backends.tuning.tasks import PromptTask
    from langchain_dpicl.baselines import (
        UnprotectedVotes,
        demonstrations_from_instruction,
        demonstrations_without_privacy,
        label_votes_without_privacy,
        real_demonstrations_without_privacy,
    )
    from langchain_dpicl.budget.budget import Budget
    from langchain_dpicl.callbacks import PrivacyBudgetCallbackHandler, get_privacy_budget_callback
    from langchain_dpicl.classification import LabelClassifier
    from langchain_dpicl.discovery import UnitCounter, ValueDiscovery
    from langchain_dpicl.documents import DocumentSynthesizer
    from langchain_dpicl.evolution import PrivateEvolution
    from langchain_dpicl.example_selectors import PromptPATEExampleSelector
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
    from langchain_dpicl.free_form import DPFreeFormRunnable
    from langchain_dpicl.grammars import Grammar
    from langchain_dpicl.labelled_pool import LabelledPool, PoolEntry
    from langchain_dpicl.labelling import PromptPATELabeler
    from langchain_dpicl.models import ChatEmbedded, ChatLocal, EmbeddedLLM, LocalLLM
    from langchain_dpicl.privacy.examples import PrivateExamples
    from langchain_dpicl.privacy.report import PrivacyReport, verify_report
    from langchain_dpicl.prompts import DPFewShotChatMessagePromptTemplate, DPFewShotPromptTemplate
    from langchain_dpicl.ray_executor import RayExecutor
    from langchain_dpicl.receipts import FreeFormResult, Receipt, RetrievalResult, VotingResult
    from langchain_dpicl.released import ReleasedDemonstrations
    from langchain_dpicl.released_counts import ReleasedCounts
    from langchain_dpicl.released_documents import SyntheticDocuments
    from langchain_dpicl.retrieval import DPRetrievalVotingRunnable
    from langchain_dpicl.retrieval_answers import DPRetrievalFreeFormRunnable
    from langchain_dpicl.soft_prompt import SoftPrompt
    from langchain_dpicl.soft_prompt_classifier import SoftPromptClassifier
    from langchain_dpicl.soft_prompt_serving import SoftPromptBackend
    from langchain_dpicl.soft_prompts import PromptDPSGD
    from langchain_dpicl.synthesis import DemonstrationSynthesizer
    from langchain_dpicl.tuning_baselines import soft_prompt_without_privacy
    from langchain_dpicl.vocabularies import public_vocabulary
    from langchain_dpicl.voting import DPVotingRunnable
    from langchain_dpicl.working import Workplace

    __version__: str

_HOME = {
    "AccountantsDisagreeError": "langchain_dpicl.exceptions",
    "AccountingError": "langchain_dpicl.exceptions",
    "Budget": "langchain_dpicl.budget.budget",
    "CapabilityError": "langchain_dpicl.exceptions",
    "ChatEmbedded": "langchain_dpicl.models",
    "ChatLocal": "langchain_dpicl.models",
    "ConfigurationError": "langchain_dpicl.exceptions",
    "DPFewShotChatMessagePromptTemplate": "langchain_dpicl.prompts",
    "DPFewShotPromptTemplate": "langchain_dpicl.prompts",
    "DPFreeFormRunnable": "langchain_dpicl.free_form",
    "DPICLError": "langchain_dpicl.exceptions",
    "DPRetrievalFreeFormRunnable": "langchain_dpicl.retrieval_answers",
    "DPRetrievalVotingRunnable": "langchain_dpicl.retrieval",
    "DPVotingRunnable": "langchain_dpicl.voting",
    "DecisionsBackend": "langchain_dpicl.backends.decisions",
    "DemonstrationSynthesizer": "langchain_dpicl.synthesis",
    "DocumentSynthesizer": "langchain_dpicl.documents",
    "EmbeddedLLM": "langchain_dpicl.models",
    "FreeFormResult": "langchain_dpicl.receipts",
    "Grammar": "langchain_dpicl.grammars",
    "HuggingFaceBackend": "langchain_dpicl.backends.huggingface",
    "LabelClassifier": "langchain_dpicl.classification",
    "LabelledPool": "langchain_dpicl.labelled_pool",
    "LabellingInterruptedError": "langchain_dpicl.exceptions",
    "LangChainBackend": "langchain_dpicl.backends.langchain",
    "LedgerError": "langchain_dpicl.exceptions",
    "LedgerRollbackError": "langchain_dpicl.exceptions",
    "LedgerUnavailableError": "langchain_dpicl.exceptions",
    "LocalEmbeddings": "langchain_dpicl.backends.nearest_embeddings",
    "LocalLLM": "langchain_dpicl.models",
    "MemoError": "langchain_dpicl.exceptions",
    "ModelCallError": "langchain_dpicl.exceptions",
    "NoPrivacyBudgetError": "langchain_dpicl.exceptions",
    "PoolEntry": "langchain_dpicl.labelled_pool",
    "PrivacyBudgetCallbackHandler": "langchain_dpicl.callbacks",
    "PrivacyBudgetError": "langchain_dpicl.exceptions",
    "PrivacyBudgetExceededError": "langchain_dpicl.exceptions",
    "PrivacyBudgetMismatchError": "langchain_dpicl.exceptions",
    "PrivacyReport": "langchain_dpicl.privacy.report",
    "PrivateAccessError": "langchain_dpicl.exceptions",
    "PrivateEvolution": "langchain_dpicl.evolution",
    "PrivateExamples": "langchain_dpicl.privacy.examples",
    "PromptDPSGD": "langchain_dpicl.soft_prompts",
    "PromptPATEExampleSelector": "langchain_dpicl.example_selectors",
    "PromptPATELabeler": "langchain_dpicl.labelling",
    "PromptTask": "langchain_dpicl.backends.tuning.tasks",
    "RayExecutor": "langchain_dpicl.ray_executor",
    "Receipt": "langchain_dpicl.receipts",
    "RecordError": "langchain_dpicl.exceptions",
    "ReleasedCounts": "langchain_dpicl.released_counts",
    "ReleasedDemonstrations": "langchain_dpicl.released",
    "RetrievalResult": "langchain_dpicl.receipts",
    "SealedShareError": "langchain_dpicl.exceptions",
    "SensitivityError": "langchain_dpicl.exceptions",
    "SoftPrompt": "langchain_dpicl.soft_prompt",
    "SoftPromptBackend": "langchain_dpicl.soft_prompt_serving",
    "SoftPromptClassifier": "langchain_dpicl.soft_prompt_classifier",
    "SynthesisInterruptedError": "langchain_dpicl.exceptions",
    "SyntheticDocuments": "langchain_dpicl.released_documents",
    "TenantCapExceededError": "langchain_dpicl.exceptions",
    "TextVoteBackend": "langchain_dpicl.backends.texts",
    "TrainingInterruptedError": "langchain_dpicl.exceptions",
    "UnitCounter": "langchain_dpicl.discovery",
    "UnknownEventError": "langchain_dpicl.exceptions",
    "UnprotectedVotes": "langchain_dpicl.baselines",
    "UnsilencableModelError": "langchain_dpicl.exceptions",
    "ValueDiscovery": "langchain_dpicl.discovery",
    "VotingResult": "langchain_dpicl.receipts",
    "Workplace": "langchain_dpicl.working",
    "allow_wrappers": "langchain_dpicl._wrapper_rules",
    "demonstrations_from_instruction": "langchain_dpicl.baselines",
    "demonstrations_without_privacy": "langchain_dpicl.baselines",
    "get_privacy_budget_callback": "langchain_dpicl.callbacks",
    "label_votes_without_privacy": "langchain_dpicl.baselines",
    "public_vocabulary": "langchain_dpicl.vocabularies",
    "real_demonstrations_without_privacy": "langchain_dpicl.baselines",
    "soft_prompt_without_privacy": "langchain_dpicl.tuning_baselines",
    "verify_report": "langchain_dpicl.privacy.report",
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
