"""Rehearsals: what a model does with public examples, and the plan that follows. Reads no private record."""

from typing import TYPE_CHECKING, Any

from langchain_dpicl._lazy import on_first_use

if TYPE_CHECKING:
    from langchain_dpicl.planning.row_law import RowFacts, RowGuess, estimate_facts
    from langchain_dpicl.rehearsal.asking import RehearsalCost, arehearse, rehearsal_cost, rehearse
    from langchain_dpicl.rehearsal.choice import FreeRival, Proposal, propose_rows
    from langchain_dpicl.rehearsal.rehearsal import Rehearsal, RehearsedShape

_HOME = {
    "FreeRival": "langchain_dpicl.rehearsal.choice",
    "Proposal": "langchain_dpicl.rehearsal.choice",
    "RehearsalCost": "langchain_dpicl.rehearsal.asking",
    "RehearsedShape": "langchain_dpicl.rehearsal.rehearsal",
    "Rehearsal": "langchain_dpicl.rehearsal.rehearsal",
    "RowFacts": "langchain_dpicl.planning.row_law",
    "RowGuess": "langchain_dpicl.planning.row_law",
    "arehearse": "langchain_dpicl.rehearsal.asking",
    "estimate_facts": "langchain_dpicl.planning.row_law",
    "propose_rows": "langchain_dpicl.rehearsal.choice",
    "rehearsal_cost": "langchain_dpicl.rehearsal.asking",
    "rehearse": "langchain_dpicl.rehearsal.asking",
}

if not TYPE_CHECKING:
    _load, __dir__ = on_first_use(__name__, _HOME)

    def __getattr__(name: str) -> Any:
        return _load(name)


__all__ = [
    "FreeRival",
    "Proposal",
    "Rehearsal",
    "RehearsalCost",
    "RehearsedShape",
    "RowFacts",
    "RowGuess",
    "arehearse",
    "estimate_facts",
    "propose_rows",
    "rehearsal_cost",
    "rehearse",
]
