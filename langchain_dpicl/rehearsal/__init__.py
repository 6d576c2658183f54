"""Rehearsals: what a model does with public examples, and the plan that follows. Reads no private record."""

from typing import TYPE_CHECKING

from langchain_dpicl._lazy import on_first_use

if TYPE_CHECKING:
    from langchain_dpicl.planning.row_law import RowFacts, RowGuess, estimate_facts
    from langchain_dpicl.rehearsal.choice import FreeRival, Proposal, Trial, TriedOption, propose_rows, try_components
    from langchain_dpicl.rehearsal.generation import (
        GenerationRehearsal,
        RehearsedStep,
        RehearsedText,
        arehearse_generation,
        rehearse_generation,
    )
    from langchain_dpicl.rehearsal.rehearsal import (
        Rehearsal,
        RehearsalCost,
        RehearsedShape,
        arehearse,
        rehearsal_cost,
        rehearse,
    )

_HOME = {
    "FreeRival": "langchain_dpicl.rehearsal.choice",
    "GenerationRehearsal": "langchain_dpicl.rehearsal.generation",
    "Proposal": "langchain_dpicl.rehearsal.choice",
    "Rehearsal": "langchain_dpicl.rehearsal.rehearsal",
    "RehearsalCost": "langchain_dpicl.rehearsal.rehearsal",
    "RehearsedShape": "langchain_dpicl.rehearsal.rehearsal",
    "RehearsedStep": "langchain_dpicl.rehearsal.generation",
    "RehearsedText": "langchain_dpicl.rehearsal.generation",
    "RowFacts": "langchain_dpicl.planning.row_law",
    "RowGuess": "langchain_dpicl.planning.row_law",
    "Trial": "langchain_dpicl.rehearsal.choice",
    "TriedOption": "langchain_dpicl.rehearsal.choice",
    "arehearse": "langchain_dpicl.rehearsal.rehearsal",
    "arehearse_generation": "langchain_dpicl.rehearsal.generation",
    "estimate_facts": "langchain_dpicl.planning.row_law",
    "propose_rows": "langchain_dpicl.rehearsal.choice",
    "rehearsal_cost": "langchain_dpicl.rehearsal.rehearsal",
    "rehearse": "langchain_dpicl.rehearsal.rehearsal",
    "rehearse_generation": "langchain_dpicl.rehearsal.generation",
    "try_components": "langchain_dpicl.rehearsal.choice",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = on_first_use(__name__, _HOME)

__all__ = [
    "FreeRival",
    "GenerationRehearsal",
    "Proposal",
    "Rehearsal",
    "RehearsalCost",
    "RehearsedShape",
    "RehearsedStep",
    "RehearsedText",
    "RowFacts",
    "RowGuess",
    "Trial",
    "TriedOption",
    "arehearse",
    "arehearse_generation",
    "estimate_facts",
    "propose_rows",
    "rehearsal_cost",
    "rehearse",
    "rehearse_generation",
    "try_components",
]
