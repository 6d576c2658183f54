"""Differentially private in-context learning for LangChain.

The public face: what is listed here is promised; everything else is importable but may change.
"""

from importlib.metadata import version

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

__version__ = version("langchain-dpicl")

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
