"""What a budget was promised to, from public values only, and its verifier. Knows no records and no process.

Never shows how much of a share was really used: realised counts, durations and stop positions stay in the ledger.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from langchain_dpicl.exceptions import ConfigurationError, DPICLError
from langchain_dpicl.privacy._validate import Adjacency, check_adjacency, check_real
from langchain_dpicl.privacy.amounts import exact, round_up
from langchain_dpicl.privacy.events import canonical_json
from langchain_dpicl.privacy.stores import LedgerHeader, LedgerStore
from langchain_dpicl.privacy.tickets import Component, ShareTerms, event_of_components, price

REPORT_FORMAT = 1
PACKAGE = "langchain-dpicl"

# Two machines may sum the same profile in another order; a lie of this relative size would not matter.
RECOMPUTE_TOLERANCE = 1e-9

ADJACENCY_WORDS = {
    "add_remove": "two data sets are neighbours if one is the other without one unit",
    "replace_one": "two data sets are neighbours if one is the other with one unit replaced",
}
TRUST = (
    "Trusted: the process that ran, the ledger's storage, and the model provider: it SEES the private prompts. "
    "The guarantee covers what the package returned, not what the provider or its logs keep."
)
ASSUMED_PUBLIC = (
    "the declarations of each data set below, public_size included",
    "templates, instructions, label sets, model names and every parameter shown under `public`",
    "the tickets of each share: events, rates, noise and maximum counts",
    "queries and their number",
)


@dataclass(frozen=True, slots=True)
class ShareEntry:
    """A share in a report: its terms, and when its first reservation sealed it (None: declared, nothing ran yet)."""

    terms: ShareTerms
    sealed_at: str | None

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON form."""
        return {**self.terms.to_dict(), "sealed_at": self.sealed_at}


@dataclass(frozen=True, slots=True)
class PrivacyReport:
    """What was promised under one ledger. Made by `Budget.report`.

    Formal guarantees:
      - Every value is public: declarations, prices and the time a share was sealed; nothing depends on a record
        or on how many tickets were used.
      - `epsilon` and `delta` bound everything the shares listed can ever release together (basic composition).

    Attributes:
      ledger: id, name, limits and adjacency.
      durable: whether the ledger survives its process.
      storage: public words on where it lives.
      datasets: declarations of the data sets bound.
      shares: sealed ones first, then those declared in this process only.
      version: of this package.
    """

    ledger: LedgerHeader
    durable: bool
    storage: str
    datasets: tuple[Mapping[str, Any], ...]
    shares: tuple[ShareEntry, ...]
    version: str

    @classmethod
    def build(
        cls,
        ledger: LedgerHeader,
        store: LedgerStore,
        bindings: Mapping[str, Mapping[str, Any]],
        shares: Sequence[ShareEntry],
    ) -> PrivacyReport:
        """Freezes what the ledger says now."""
        datasets = tuple(copy.deepcopy(dict(bindings[name])) for name in sorted(bindings))
        return cls(ledger, store.durable, store.description, datasets, tuple(shares), _version())

    @property
    def epsilon(self) -> float:
        """Sum over all shares, rounded up."""
        return _sum(share.terms.epsilon for share in self.shares)

    @property
    def delta(self) -> float:
        """Sum over all shares, rounded up."""
        return _sum(share.terms.delta for share in self.shares)

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON form, with a digest over all of it."""
        data = {
            "report_format": REPORT_FORMAT,
            "package": PACKAGE,
            "version": self.version,
            "ledger": {
                "ledger_id": self.ledger.ledger_id,
                "name": self.ledger.name,
                "durable": self.durable,
                "storage": self.storage,
            },
            "adjacency": self.ledger.adjacency,
            "adjacency_means": ADJACENCY_WORDS[self.ledger.adjacency],
            "limits": {"epsilon": self.ledger.epsilon, "delta": self.ledger.delta},
            "promised": {"epsilon": self.epsilon, "delta": self.delta},
            "datasets": [dict(dataset) for dataset in self.datasets],
            "shares": [share.to_dict() for share in self.shares],
            "assumed_public": list(ASSUMED_PUBLIC),
            "trust": TRUST,
        }
        return copy.deepcopy({**data, "digest": _digest(data)})

    def to_json(self, *, indent: int | None = 2) -> str:
        """Returns the JSON text that `verify_report` reads."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False, allow_nan=False)

    def to_text(self) -> str:
        """Returns the report for people."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        limits = self.ledger
        yield f"Privacy report of {limits.name!r} (ledger {limits.ledger_id}, {self.storage})"
        yield f"  limit     epsilon {limits.epsilon:g}, delta {limits.delta:g}"
        yield f"  promised  epsilon {self.epsilon:g}, delta {self.delta:g} (an upper bound)"
        yield f"  adjacency {limits.adjacency}: {ADJACENCY_WORDS[limits.adjacency]}"
        for dataset in self.datasets:
            yield f"  data set  {dataset['dataset_id']!r}: unit = {dataset['unit']}, size = {_words(dataset)}"
        yield ""
        yield f"  {'share':<28}{'epsilon':>12}{'delta':>12}  tickets"
        for share in self.shares:
            yield from _share_lines(share)
        if not self.shares:
            yield "  (none)"
        yield ""
        yield "  Assumed public: " + "; ".join(ASSUMED_PUBLIC) + "."
        yield "  " + TRUST
        if not self.durable:
            yield "  This ledger dies with its process: after a restart nothing remembers what was spent."

    def __str__(self) -> str:
        return self.to_text()


def _words(dataset: Mapping[str, Any]) -> str:
    size = dataset["public_size"]
    return str(size) if isinstance(size, int) else ", ".join(f"{label}: {count}" for label, count in size.items())


def _share_lines(share: ShareEntry) -> Iterator[str]:
    terms = share.terms
    state = "declared" if share.sealed_at is None else f"sealed {share.sealed_at}"
    if terms.joint:
        yield f"  {'(joint plan)':<28}{terms.epsilon:>12.6g}{terms.delta:>12.3g}  {state}"
    for component in terms.components:
        charge = f"{'':>24}" if terms.joint else f"{terms.epsilon:>12.6g}{terms.delta:>12.3g}"
        name = ("  " if terms.joint else "") + component.name
        yield f"  {name:<28}{charge}  {_tickets(component)}" + ("" if terms.joint else f"; {state}")


def _tickets(component: Component) -> str:
    if component.limit is not None:
        return f"pool, {'mu' if component.kind == 'gdp' else 'rho'} = {component.limit:.6g}"
    counts: dict[str, int] = {}
    for ticket in component.tickets:
        counts[ticket.template] = counts.get(ticket.template, 0) + ticket.max_count
    labels = len({ticket.label for ticket in component.tickets} - {None})
    text = ", ".join(f"{template} x {count}" for template, count in counts.items())
    return text + (f" over {labels} labels" if labels else "")


@dataclass(frozen=True, slots=True)
class VerifiedReport:
    """What a verifier found.

    Attributes:
      epsilon: sum of the recomputed costs of all shares; infinite where one could not be recomputed.
      delta: sum of the deltas they were recomputed at.
      ok: whether nothing is wrong.
      problems: what is wrong, in words.
    """

    epsilon: float
    delta: float
    ok: bool
    problems: tuple[str, ...]


def verify_report(report: str | Mapping[str, Any]) -> VerifiedReport:
    """Recomputes a report: every share's event from its tickets, every epsilon from its event, and the sums.

    Formal guarantees:
      - `ok` means: no share is charged less than its tickets can cost, shares stay within the limits, sums and
        digest are right. It says nothing about whether the ledger was used as the report says: for that, keep the
        ledger and call `Budget.verify`.

    Args:
      report: JSON text of `PrivacyReport.to_json`, or the mapping of `to_dict`.

    Raises:
      ConfigurationError: the text is not a JSON object.
    """
    data = _parse(report)
    problems: list[str] = []
    costs: list[float] = []
    deltas: list[float] = []
    try:
        problems += _header_problems(data)
        adjacency = check_adjacency(data["adjacency"])
        for item in data["shares"]:
            terms = ShareTerms.from_dict({key: value for key, value in item.items() if key != "sealed_at"})
            cost, found = _share_problems(terms, adjacency, data["datasets"])
            problems += found
            costs.append(cost)
            deltas.append(terms.delta)
    except (DPICLError, ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        problems.append(f"the report cannot be read: {type(error).__name__}: {error}")
        costs.append(float("inf"))
    finite = all(cost < float("inf") for cost in costs)
    return VerifiedReport(_sum(costs) if finite else float("inf"), _sum(deltas), not problems, tuple(problems))


def _parse(report: str | Mapping[str, Any]) -> Mapping[str, Any]:
    data: Any = report
    if isinstance(report, str):
        try:
            data = json.loads(report)
        except ValueError:
            data = None
    if not isinstance(data, Mapping):
        raise ConfigurationError("report: expected the JSON object of a PrivacyReport, found something else.")
    return data


def _header_problems(data: Mapping[str, Any]) -> Iterator[str]:
    if data["report_format"] != REPORT_FORMAT:
        yield f"report_format: expected {REPORT_FORMAT}, found {data['report_format']!r}"
    if data["digest"] != _digest({key: value for key, value in data.items() if key != "digest"}):
        yield "digest: the report was changed after it was made"
    for name in ("epsilon", "delta"):
        total = _sum(check_real(name, share[name], low=0.0) for share in data["shares"])
        if data["promised"][name] != total:
            yield f"promised {name}: expected {total!r}, the sum over shares, found {data['promised'][name]!r}"
        if exact(total) > exact(data["limits"][name]):
            yield f"limits: shares add to {name} {total!r}, above {data['limits'][name]!r}"


def _share_problems(
    terms: ShareTerms, adjacency: Adjacency, datasets: Sequence[Mapping[str, Any]]
) -> tuple[float, list[str]]:
    names = ", ".join(component.name for component in terms.components)
    problems = []
    if terms.event != event_of_components(terms.components):
        problems.append(f"{names}: the event is not the one of its tickets")
    declared = {dataset["dataset_id"]: set(dataset["labels"]) for dataset in datasets}
    for component in terms.components:
        labels = {ticket.label for ticket in component.tickets} - {None}
        if labels and not labels <= declared.get(component.partition or "", set()):
            problems.append(f"{names}: its labels are not declared by a data set of the report")
    cost, _ = price(terms.components, delta=terms.delta, adjacency=adjacency)
    if cost > terms.epsilon * (1 + RECOMPUTE_TOLERANCE):
        problems.append(f"{names}: charged epsilon {terms.epsilon!r}, but its tickets cost up to {cost!r}")
    return cost, problems


def _sum(values: Any) -> float:
    return round_up(sum((exact(value) for value in values), Fraction(0)))


def _digest(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json(dict(data)).encode("utf-8")).hexdigest()


def _version() -> str:
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
