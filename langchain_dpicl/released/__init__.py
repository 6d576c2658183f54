"""What has been released: demonstrations, counts, words, documents, pools, soft prompts, and their files.

Reads no private record.
"""

from typing import TYPE_CHECKING

from langchain_dpicl._lazy import on_first_use

if TYPE_CHECKING:
    from langchain_dpicl.released.counts import ReleasedCounts, ReleasedWords
    from langchain_dpicl.released.demonstrations import ReleasedDemonstrations
    from langchain_dpicl.released.documents import SyntheticDocuments
    from langchain_dpicl.released.labelled_pool import LabelledPool, PoolEntry
    from langchain_dpicl.released.soft_prompt import SoftPrompt

_HOME = {
    "LabelledPool": "langchain_dpicl.released.labelled_pool",
    "PoolEntry": "langchain_dpicl.released.labelled_pool",
    "ReleasedCounts": "langchain_dpicl.released.counts",
    "ReleasedDemonstrations": "langchain_dpicl.released.demonstrations",
    "ReleasedWords": "langchain_dpicl.released.counts",
    "SoftPrompt": "langchain_dpicl.released.soft_prompt",
    "SyntheticDocuments": "langchain_dpicl.released.documents",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = on_first_use(__name__, _HOME)

__all__ = [
    "LabelledPool",
    "PoolEntry",
    "ReleasedCounts",
    "ReleasedDemonstrations",
    "ReleasedWords",
    "SoftPrompt",
    "SyntheticDocuments",
]
