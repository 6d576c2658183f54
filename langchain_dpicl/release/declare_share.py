"""Binds private examples to a budget and declares the share of one component, in the one safe order."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_dpicl.backends.resolve import recipients
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.planning.share_plan import SharePlan
from langchain_dpicl.privacy._validate import check_name, fail
from langchain_dpicl.privacy.extensions.fixed_size_slots import BalancedSlots, PartitionedSlots
from langchain_dpicl.privacy.extensions.private_streams import RollingRange
from langchain_dpicl.privacy.extensions.stream_ledger import QueryShare, RunShare, run_ticket
from langchain_dpicl.privacy.ledger.budget import LedgerBudget
from langchain_dpicl.privacy.ledger.shares import Share
from langchain_dpicl.privacy.ledger.tickets import Blocks, Extent, Ticket
from langchain_dpicl.privacy.mechanisms.release_plan import ReleasePlan
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.release.samples import check_fixed_size

logger = logging.getLogger(__name__)


def declare_share(
    private: PrivateExamples,
    budget: LedgerBudget,
    plan: SharePlan,
    *,
    component: str,
    epsilon: float | None,
    public: Mapping[str, Any],
    engines: Sequence[object] = (),
    runs: StreamRuns | None = None,
    terms: Mapping[str, Any] | None = None,
) -> Share:
    """Binds the examples to the budget's ledger and sets the plan's share aside.

    Formal guarantees:
      - Every check runs before the examples are bound; declaring charges nothing.

    `epsilon` is the share (None: the plan's cost), `public` what reports show, `terms` what of it a later run of the
    share must show too (None: the plan alone), and `engines` are the models and embeddings that get private text, whose
    hosts reports name. Of a stream `runs` says what one run is: `plan` is of all runs that can touch one window, and
    what is returned grants the parts, or the queries, of one.
    """
    check_name("component", component)
    private.check_delta(budget.delta)
    _check_sizes_known(private, plan)
    share = plan.epsilon if epsilon is None else epsilon
    budget.check_fits(component, epsilon=share, delta=plan.delta, extent=None if runs is None else runs.extent)
    budget.bind(private)
    if isinstance(plan.release, ReleasePlan):
        check_fixed_size(private, plan.release, ledger_id=budget.ledger_id)
    tickets = plan.tickets()
    if runs is not None:
        if runs.queries is None:
            tickets = (run_ticket(tickets, runs=runs.per_window, adjacency=budget.adjacency),)
        public = {**public, "stream": runs.to_dict()}
    hosts = recipients(*engines) if engines else []
    declared = budget.declare(
        component,
        tickets=tickets,
        partition=private.dataset_id,
        epsilon=epsilon,
        delta=plan.delta,
        implementation_delta=plan.implementation_delta,
        public={**public, **({"seen_by": hosts} if hosts else {})},
        plan=plan.to_dict() if terms is None else terms,
        extent=None if runs is None else runs.extent,
    )
    _warn_of_hosts(declared, hosts)
    if runs is None:
        return declared
    if runs.queries is not None:
        return QueryShare(declared, runs.blocks, runs.queries)
    return RunShare(declared, runs.parts, runs.blocks)


def _warn_of_hosts(share: Share, hosts: Sequence[str]) -> None:
    """Says which hosts now get private text that reports do not name: they show a share as it was first declared."""
    terms = share._terms()  # noqa: SLF001  no part of what a share promises
    first = [] if terms is None else terms.components
    shown = next((each.public.get("seen_by", []) for each in first if each.name == share.component), hosts)
    if unnamed := sorted({*hosts}.difference(shown)):
        logger.warning(
            "component %r: expected private text to go to %s, as its share was first declared and reports show, "
            "found %s. Give another component= name (a share of its own) for reports that name it.",
            share.component,
            ", ".join(shown) or "nobody",
            ", ".join(unnamed),
        )


@dataclass(frozen=True, slots=True)
class StreamRuns:
    """What a component reads of a stream, and how often.

    Attributes:
      blocks: that its present run reads.
      extent: that its share may read.
      per_window: runs that can touch one window.
      parts: the tickets of one run, which pays for them with one; none where it answers queries.
      every: blocks from one run to the next one; None: there is one run.
      queries: of one run, each with a ticket of its own; None: it answers none.
    """

    blocks: Blocks
    extent: Extent
    per_window: int
    parts: tuple[Ticket, ...]
    every: int | None
    queries: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns what reports show."""
        length = self.blocks[1] - self.blocks[0] + 1
        shown = {"length": length, "every": self.every, "runs_per_window": self.per_window}
        return shown if self.queries is None else {**shown, "queries_per_run": self.queries}


def range_of(private: PrivateExamples | RollingRange) -> PrivateExamples:
    """Returns the examples of a run: of a rolling range the latest ones."""
    return private.latest() if isinstance(private, RollingRange) else private


def answering_range(
    private: PrivateExamples | RollingRange, budget: LedgerBudget, *, component: str | None
) -> PrivateExamples:
    """Returns the examples of a run that answers until the next one begins; of a rolling range the newest run."""
    if not isinstance(private, RollingRange):
        return private
    return private.first_run(None if component is None else budget.sealed_extent(component))


def check_run(component: str | None, sampling: str, **given: object) -> None:
    """Refuses what a run on a stream cannot do: it is one ticket, of one process, or has tickets that are queries.

    Raises:
      ConfigurationError: the component has no name, samples have a fixed size, or an option is given that is not None.
    """
    if component is None:
        raise fail("component", "the name of the share that all runs on a stream have", None)
    if sampling != "poisson":
        advice = "How many people a range has is private, and may change."
        raise fail("sampling", "'poisson' on a stream", sampling, advice)
    for name, value in given.items():
        if value is not None:
            advice = (
                "A run on a stream is one ticket of one process. After an error `error.run` goes on with it; after a "
                "kill the same call begins another run, which takes another ticket of the same windows."
            )
            raise fail(name, "None on a stream", type(value).__name__, advice)


def runs_per_window(private: PrivateExamples | RollingRange, budget: LedgerBudget) -> int | None:
    """Returns how many runs on these examples can touch one window; None: they are of no stream.

    Raises:
      ConfigurationError: they are of a stream, and the budget's promise is for life.
    """
    if private.blocks is None if isinstance(private, PrivateExamples) else False:
        return None
    if budget.window is None:
        advice = 'Make a ledger for windows: PrivacyBudgetCallbackHandler.create(path, ..., per="30 days").'
        raise fail("budget", "one whose promise is for windows of a stream", f"per={budget.per!r}", advice)
    return private.runs_per_window(budget.window) if isinstance(private, RollingRange) else 1


def stream_runs(
    private: PrivateExamples | RollingRange,
    blocks: Blocks | None,
    budget: LedgerBudget,
    *,
    component: str,
    per_window: int | None,
    parts: Sequence[Ticket] = (),
    queries: int | None = None,
) -> StreamRuns | None:
    """Returns the runs of a component: of a rolling range without end, from its first run on; of another range, one.

    Args:
      private: what the caller gave.
      blocks: of its records; None: they have no time.
      budget: the payer.
      component: its name in the ledger.
      per_window: runs in a window; None: there is no stream.
      parts: what one run releases.
      queries: of one run.
    """
    if per_window is None or blocks is None:
        return None
    extent: Extent = blocks
    every = None
    if isinstance(private, RollingRange):
        every = private.every
        extent = budget.sealed_extent(component) or (blocks[0], None)
    return StreamRuns(blocks, extent, per_window, tuple(parts), every, queries)


def _check_sizes_known(private: PrivateExamples, plan: SharePlan) -> None:
    """Refuses a sample of fixed size from one label of units that were split anew: one may be in no label's branch.

    So a unit that is replaced may leave the label, also where there is only one, and no label has a known size.
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
