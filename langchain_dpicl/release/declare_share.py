"""Binds private examples to a budget and declares the share of one component, in the one safe order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_dpicl.backends.resolve import recipients
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.planning.share_plan import SharePlan
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.privacy.extensions.fixed_size_slots import BalancedSlots, PartitionedSlots
from langchain_dpicl.privacy.ledger.amounts import check_name
from langchain_dpicl.privacy.ledger.budget import LedgerBudget
from langchain_dpicl.privacy.ledger.shares import Share
from langchain_dpicl.privacy.mechanisms.release_plan import ReleasePlan
from langchain_dpicl.release.dealt_sample import check_fixed_size


def declare_share(
    private: PrivateExamples,
    budget: LedgerBudget,
    plan: SharePlan,
    *,
    component: str,
    epsilon: float | None,
    public: Mapping[str, Any],
    engines: Sequence[object] = (),
) -> Share:
    """Binds the examples to the budget's ledger and sets the plan's share aside.

    Formal guarantees:
      - Every check runs before the examples are bound; declaring charges nothing.

    `epsilon` is the share (None: the plan's cost), `public` what reports show, and `engines` are the models and
    embeddings that get private text, whose hosts reports name.
    """
    check_name("component", component)
    private.check_delta(budget.delta)
    _check_sizes_known(private, plan)
    budget.check_fits(component, epsilon=plan.epsilon if epsilon is None else epsilon, delta=plan.delta)
    budget.bind(private)
    if isinstance(plan.release, ReleasePlan):
        check_fixed_size(private, plan.release, ledger_id=budget.ledger_id)
    return budget.declare(
        component,
        tickets=plan.tickets(),
        partition=private.dataset_id,
        epsilon=epsilon,
        delta=plan.delta,
        implementation_delta=plan.implementation_delta,
        public={**public, **({"seen_by": recipients(*engines)} if engines else {})},
    )


def _check_sizes_known(private: PrivateExamples, plan: SharePlan) -> None:
    """Refuses a sample of fixed size from one label of units that were split anew: one may be in no label's branch.

    So a unit that is replaced may leave the label, also where there is only one, and no label has a known size.

    Raises:
      ConfigurationError: it is such a sample.
    """
    origin, release = private.declaration.get("redeclared"), plan.release
    is_fixed = isinstance(release, ReleasePlan) and isinstance(release.sampler, BalancedSlots | PartitionedSlots)
    if is_fixed and origin and origin["fold_case"] is not None and any(each.label for each in plan.tickets()):
        advice = "How many units have a label that was declared later is private."
        raise fail("sampling", "'poisson' or 'disjoint' for texts of one label", "a fixed size", advice)


def share_of_delta(budget: LedgerBudget, *, epsilon: float | None, delta: float | None) -> float:
    """Returns the requested delta of a share, or the one in proportion to its epsilon."""
    if delta is not None:
        return delta
    if epsilon is None:
        raise ConfigurationError("epsilon: expected this component's share of the budget, found None. Give epsilon=...")
    return budget.default_delta(epsilon)
