"""Recomputes prices, tickets and reports of a configuration."""

from __future__ import annotations

import math
from typing import Any

from langchain_dpicl.audit.bounds import gaussian_epsilon, mu_squared
from langchain_dpicl.audit.components import share_of
from langchain_dpicl.audit.results import AuditResult, Verdict
from langchain_dpicl.audit.subjects import Subject
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy.accounting.events import Event
from langchain_dpicl.privacy.amounts import effective_delta
from langchain_dpicl.privacy.report import verify_report

# Shown epsilons are rounded; a claim may be short by this much.
_ROUNDING = 1e-6
_BLIND = ("an error that the accountant makes here as well: other accountants check it, in tests of the package",)


def price(subject: Subject, *, name: str = "price: computed again") -> AuditResult:
    """Checks that the claimed epsilon covers what the plan's releases cost.

    The price is the package's own, computed now. Where all releases are Gaussian on everybody it is also compared with
    the exact curve, which is written apart.
    """
    plan: Any = subject.plan
    event = plan.event()
    remaining = effective_delta(subject.delta, plan.implementation_delta)
    cost = math.inf
    if remaining > 0.0:
        cost = accounting.epsilon_upper_bound(event, delta=remaining, adjacency=plan.release.adjacency)
    faults = []
    if subject.epsilon * (1.0 + _ROUNDING) < cost:
        faults.append(f"claimed is epsilon {subject.epsilon:.6g}, it costs {cost:.6g} at delta {subject.delta:g}")
    exact = exact_epsilon(event, subject.delta)
    if exact is not None and cost < exact * (1.0 - _ROUNDING):
        faults.append(f"the accountant says epsilon {cost:.6g}, the exact curve {exact:.6g}")
    return AuditResult(
        check=name,
        verdict="violated" if faults else "sound",
        claimed_epsilon=subject.epsilon,
        lower_bound=exact,
        delta=subject.delta,
        confidence=1.0,
        details=tuple(faults) or (f"claimed {subject.epsilon:.6g}, costs {cost:.6g} at delta {subject.delta:g}",),
        blind_to=_BLIND,
    )


def exact_epsilon(event: Event, delta: float) -> float | None:
    """Returns the exact epsilon of Gaussian releases on everybody; None for any other event."""
    total = mu_squared(event)
    return None if total is None else gaussian_epsilon(math.sqrt(total), delta)


def tickets(subject: Subject, *, name: str = "ledger: what was charged is what runs") -> AuditResult:
    """Checks that the ledger's share holds the tickets of the plan that runs, and no share is used up beyond them."""
    share, plan, faults = share_of(subject.component), subject.plan, list[str]()
    if share.event != plan.event():
        faults.append("the share was charged for other releases than the plan runs")
    for ticket in plan.tickets():
        remaining = share.remaining(ticket.template, label=ticket.label)
        if not 0 <= remaining <= ticket.max_count:
            faults.append(f"{remaining} tickets of {ticket.template!r} are left of {ticket.max_count}")
    return _settled(name, faults, "the tickets of the plan")


def report(subject: Subject, *, name: str = "ledger: its report adds up") -> AuditResult:
    """Checks the report of the component's budget: events from tickets, prices from events, and their sum."""
    component = subject.component
    budget = component.budget if hasattr(component, "budget") else component._budget  # noqa: SLF001  to be audited
    verified = verify_report(budget.report())
    faults = [] if verified.ok else [f"it does not add up: {problem}" for problem in verified.problems[:4]]
    return _settled(name, faults, "recomputed from its tickets")


def _settled(name: str, found: list[str], said: str) -> AuditResult:
    verdict: Verdict = "violated" if found else "sound"
    blind = ("a ledger that was put back to an older copy: keep an anchor",)
    return AuditResult(
        check=name,
        verdict=verdict,
        confidence=1.0,
        details=tuple(found) or (said,),
        blind_to=blind,
    )
