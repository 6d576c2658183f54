"""Evaluates and chooses chains on private records: counts of declared outcomes, and the best of several."""

from typing import TYPE_CHECKING

from langchain_dpicl._lazy import on_first_use

if TYPE_CHECKING:
    from langchain_dpicl.evaluation.choose import Choice, dp_achoose, dp_choose
    from langchain_dpicl.evaluation.evaluate import EvaluationResult, dp_aevaluate, dp_evaluate
    from langchain_dpicl.evaluation.evaluators import Exact, Judge, Pure, Score
    from langchain_dpicl.evaluation.plan import Estimate, plan_choice, plan_evaluation

_HOME = {
    "Choice": "langchain_dpicl.evaluation.choose",
    "Estimate": "langchain_dpicl.evaluation.plan",
    "EvaluationResult": "langchain_dpicl.evaluation.evaluate",
    "Exact": "langchain_dpicl.evaluation.evaluators",
    "Judge": "langchain_dpicl.evaluation.evaluators",
    "Pure": "langchain_dpicl.evaluation.evaluators",
    "Score": "langchain_dpicl.evaluation.evaluators",
    "dp_achoose": "langchain_dpicl.evaluation.choose",
    "dp_aevaluate": "langchain_dpicl.evaluation.evaluate",
    "dp_choose": "langchain_dpicl.evaluation.choose",
    "dp_evaluate": "langchain_dpicl.evaluation.evaluate",
    "plan_choice": "langchain_dpicl.evaluation.plan",
    "plan_evaluation": "langchain_dpicl.evaluation.plan",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = on_first_use(__name__, _HOME)

__all__ = [
    "Choice",
    "Estimate",
    "EvaluationResult",
    "Exact",
    "Judge",
    "Pure",
    "Score",
    "dp_achoose",
    "dp_aevaluate",
    "dp_choose",
    "dp_evaluate",
    "plan_choice",
    "plan_evaluation",
]
