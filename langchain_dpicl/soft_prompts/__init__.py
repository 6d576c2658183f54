"""PromptDPSGD (Duan et al. 2023): training and serving of soft prompts and prefixes."""

from typing import TYPE_CHECKING

from langchain_dpicl._lazy import on_first_use

if TYPE_CHECKING:
    from langchain_dpicl.backends.tuning.tasks import PromptTask
    from langchain_dpicl.soft_prompts.serving import SoftPromptBackend, SoftPromptClassifier
    from langchain_dpicl.soft_prompts.trainer import PromptDPSGD

_HOME = {
    "PromptDPSGD": "langchain_dpicl.soft_prompts.trainer",
    "PromptTask": "langchain_dpicl.backends.tuning.tasks",
    "SoftPromptBackend": "langchain_dpicl.soft_prompts.serving",
    "SoftPromptClassifier": "langchain_dpicl.soft_prompts.serving",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = on_first_use(__name__, _HOME)

__all__ = [
    "PromptDPSGD",
    "PromptTask",
    "SoftPromptBackend",
    "SoftPromptClassifier",
]
