"""Builds the errors that refuse a request to a ledger."""

from __future__ import annotations

from langchain_dpicl.exceptions import PrivacyBudgetExceededError, SealedShareError, TenantCapExceededError
from langchain_dpicl.privacy.amounts import Amount, round_down, round_up
from langchain_dpicl.privacy.ledger_state import LedgerState, Slot
from langchain_dpicl.privacy.tickets import Component


def exceeded(
    what: str,
    requested: float,
    remaining: Amount,
    advice: str,
    *,
    kind: type[PrivacyBudgetExceededError] = PrivacyBudgetExceededError,
) -> PrivacyBudgetExceededError:
    """Returns the refusal of a request; the caller raises it."""
    rest = round_down(remaining)
    msg = f"{what}: requested {requested:.9g}, remaining {rest:.9g}. {advice}"
    return kind(msg, requested=requested, remaining=rest)


def check_same_terms(wanted: Component, sealed: Component) -> None:
    """Raises a SealedShareError if the terms differ from the sealed ones."""
    changed = sealed.changed_terms(wanted)
    if changed:
        msg = (
            f"{wanted.name!r}: expected the terms sealed by its first reservation, found others in {changed}. "
            "Declare the same terms to go on with its tickets, or another component name for a new share."
        )
        raise SealedShareError(msg)


def check_tenant(state: LedgerState, component: Component, tenant: str, *, count: int, cap: int) -> None:
    """Raises a TenantCapExceededError if the request is above what the tenant's cap leaves."""
    remaining = max(cap - state.used_by(tenant, component.name), 0)
    if count > remaining:
        what = f"tickets of {component.name!r} for tenant {tenant!r}"
        advice = f"Its cap is {cap}, in all processes together; raise it."
        raise exceeded(what, count, remaining, advice, kind=TenantCapExceededError)


def too_few(component: Component, slot: Slot, cost: Amount, remaining: Amount) -> PrivacyBudgetExceededError:
    """Returns the refusal of more tickets than a slot holds; the caller raises it."""
    if component.kind == "tickets":
        label = "" if slot[1] is None else f" for label {slot[1]!r}"
        what = f"tickets {slot[0]!r}{label} of {component.name!r}"
    else:
        what = f"{'mu^2' if component.kind == 'gdp' else 'rho'} of pool {component.name!r}"
    advice = "What was reserved stays charged; a new share needs budget of its own."
    return exceeded(what, round_up(cost), remaining, advice)
