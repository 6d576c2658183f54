"""Holds the option values that components share: frozen, public, checked, the same in Python, TOML and JSON.

Knows no method, no ledger and no model; every component reads its options from here.
"""

from langchain_dpicl.options.answers import EmbeddingAnswers, KeywordAnswers, LabelAnswers, Retrieval, Serving
from langchain_dpicl.options.base import Option
from langchain_dpicl.options.methods import (
    ByLength,
    Evolution,
    LocalExecutor,
    Similar,
    SoftPromptConfig,
    Student,
    Topics,
    TrainableModel,
    Training,
)
from langchain_dpicl.options.rows import ConfidentGNMax, LogitNoise, Noise, Rows
from langchain_dpicl.options.tasks import Decoding, FewShotTask, GenerationTask, OpenLabel

OPTIONS: tuple[type[Option], ...] = (
    Rows,
    Noise,
    LogitNoise,
    ConfidentGNMax,
    FewShotTask,
    OpenLabel,
    GenerationTask,
    Decoding,
    LabelAnswers,
    EmbeddingAnswers,
    KeywordAnswers,
    Serving,
    Retrieval,
    Topics,
    Evolution,
    Student,
    Similar,
    ByLength,
    SoftPromptConfig,
    Training,
    TrainableModel,
    LocalExecutor,
)
"""Every option value, in the order of the page that documents them."""

__all__ = [
    "ByLength",
    "ConfidentGNMax",
    "Decoding",
    "EmbeddingAnswers",
    "Evolution",
    "FewShotTask",
    "GenerationTask",
    "KeywordAnswers",
    "LabelAnswers",
    "LocalExecutor",
    "LogitNoise",
    "Noise",
    "OpenLabel",
    "Option",
    "Retrieval",
    "Rows",
    "Serving",
    "Similar",
    "SoftPromptConfig",
    "Student",
    "Topics",
    "TrainableModel",
    "Training",
]
