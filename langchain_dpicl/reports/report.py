"""Builds the report of what a budget granted, bounds it at other deltas, and recomputes such reports."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from fractions import Fraction
from typing import Any, Protocol, TypeAlias

from langchain_dpicl._plain_files import unique_keys, write_bytes
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import (
    Adjacency,
    check_adjacency,
    check_delta,
    check_positive,
    check_real,
    effective_delta,
    exact,
    fail,
    round_down,
)
from langchain_dpicl.privacy.extensions.joint_plans import share_price
from langchain_dpicl.privacy.extensions.stream_ledger import Windows
from langchain_dpicl.privacy.ledger.store import LedgerHeader, LedgerStore
from langchain_dpicl.privacy.ledger.tickets import (
    Component,
    ShareTerms,
    event_of_components,
    implementation_delta_of,
)
from langchain_dpicl.privacy.private_examples import Declaration, make_declaration
from langchain_dpicl.reports.claims import (
    REPORT_FORMAT,
    baseline_epsilon,
    claim_problems,
    content_problems,
    header_problems,
    heaviest,
    kind_problems,
    own_component,
    report_digest,
    round_up_sum,
    share_extent,
    stream_claims,
    stream_problems,
    sum_over_shares,
)
from langchain_dpicl.reports.rendering import PACKAGE, markdown_of, own_version, package_versions, text_of, words_of
from langchain_dpicl.reports.verify import (
    RECOMPUTE_TOLERANCE,
    UNREADABLE,
    VerificationContext,
    component_problems,
    describe_fault,
    is_same_number,
    origin_problems,
    own_cost,
    pool_problems,
    problems_in,
    prompt_problems,
    released_count_problems,
    released_demonstration_problems,
    released_document_problems,
    released_first_word_problems,
    released_word_problems,
    step_problems,
)

MAX_ROWS = 200
DEFAULT_SECONDS = 60.0
METHOD = (
    "At each delta every sealed share (a joint plan once) is priced anew at its part of it, delta * its own delta / "
    "the sum of all their deltas, rounded down; the prices are added, rounded up. That is basic composition: an upper "
    "bound of everything the sealed shares can ever release together, not the least one, where no share was sealed "
    "because of what another one had released; elsewhere the ledger's limits alone are proved. What is proved at a "
    "smaller delta, or by the charges at the sum of their deltas, also bounds every larger delta. A share may be "
    "charged more than it costs, and shares that were declared but never sealed are not in the table: they have "
    "released nothing."
)
_Priced: TypeAlias = tuple[float, float | None]  # delta, and the sum of all prices there
NO_BOUND = "no finite bound at this delta"
_WHY_NO_BOUND = re.compile(rf"{NO_BOUND}|not computed within [0-9.e+-]+ s")


@dataclass(frozen=True, slots=True)
class EpsilonRow:
    """A bound at one delta.

    Attributes:
      delta: at which delta.
      epsilon: the bound, rounded up; infinite where nothing is proved; None where time ran out.
      note: why there is no finite bound; "" where there is one.
    """

    delta: float
    epsilon: float | None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON form, with null where there is no finite bound."""
        finite = self.epsilon is not None and math.isfinite(self.epsilon)
        return {"delta": self.delta, "epsilon": self.epsilon if finite else None, "note": self.note}


@dataclass(frozen=True, slots=True)
class EpsilonTable:
    """Epsilon of everything sealed, over deltas. Made by `PrivacyReport.epsilons`.

    Formal guarantees:
      - What the sealed shares release together is (epsilon, delta)-DP for every row: all rows hold at once, where which
        shares were sealed does not depend on what others released. Elsewhere only the ledger's limits are proved.
      - Epsilon never grows with delta.
    """

    rows: tuple[EpsilonRow, ...]
    method: str = METHOD

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON form."""
        return {"method": self.method, "rows": [row.to_dict() for row in self.rows]}


_OF_PURE = 1e-6


def default_deltas(limit: float) -> tuple[float, ...]:
    """Returns a ledger's delta, or 1e-6 where it is 0, and three smaller ones, a power of ten apart."""
    return tuple(round_down(exact(limit or _OF_PURE) / 10**step) for step in (3, 2, 1, 0))


def epsilon_table(
    shares: Sequence[ShareTerms],
    deltas: Sequence[float],
    *,
    adjacency: Adjacency,
    max_seconds: float | None = DEFAULT_SECONDS,
) -> EpsilonTable:
    """Prices sealed shares at other deltas; no price is begun once `max_seconds` (None: no limit) are over.

    Raises:
      ConfigurationError: a delta is not in (0, 1), or there are none or too many.
    """
    wanted = sorted({check_real("deltas", delta, low=0.0, high=1.0, low_open=True, high_open=True) for delta in deltas})
    if not 1 <= len(wanted) <= MAX_ROWS:
        raise fail("deltas", f"1 to {MAX_ROWS} values in (0, 1)", len(wanted))
    seconds = math.inf if max_seconds is None else check_positive("max_seconds", max_seconds)
    end = time.monotonic() + seconds
    late = f"not computed within {seconds:g} s"
    raw: dict[float, float | None] = {}
    for delta in reversed(wanted):  # the largest delta first: it is used most
        raw[delta] = _composed_price(shares, delta, adjacency=adjacency, end=end)
    return EpsilonTable(tuple(_rows(shares, [(delta, raw[delta]) for delta in wanted], late=late)))


def _rows(shares: Sequence[ShareTerms], raw: Sequence[_Priced], *, late: str) -> Iterator[EpsilonRow]:
    charged, total = round_up_sum(share.epsilon for share in shares), _sum_of_deltas(shares)
    least = math.inf
    for delta, value in raw:
        least = min(least, math.inf if value is None else value)
        if exact(delta) >= total:
            least = min(least, charged)
        if least < math.inf:
            yield EpsilonRow(delta, least)
        else:
            yield EpsilonRow(delta, value, late if value is None else NO_BOUND)


def _composed_price(shares: Sequence[ShareTerms], delta: float, *, adjacency: Adjacency, end: float) -> float | None:
    """Returns the sum of all prices at their parts of `delta`; None where time ran out."""
    total, prices = _sum_of_deltas(shares), []
    for share in shares:
        if time.monotonic() >= end:
            return None
        part = round_down(exact(delta) * (exact(share.delta) / total if total else Fraction(1, len(shares))))
        if effective_delta(part, implementation_delta_of(share.components)) <= 0 < share.delta:
            return math.inf
        cost, _ = share_price(share.components, delta=part, adjacency=adjacency, opinions=False)
        if cost == math.inf:
            return math.inf
        prices.append(cost)
    return round_up_sum(prices)


def _sum_of_deltas(shares: Sequence[ShareTerms]) -> Fraction:
    return sum((exact(share.delta) for share in shares), Fraction(0))


def table_problems(table: Any, shares: Sequence[ShareTerms], *, adjacency: Adjacency) -> Iterator[str]:
    """Recomputes the bounds that a report states over deltas; too low is wrong, too high is not."""
    for row in table["rows"]:
        if row["note"] != "" and (row["epsilon"] is not None or not _WHY_NO_BOUND.fullmatch(row["note"])):
            yield f"epsilons: another note at delta {row['delta']!r} than why there is no bound"
    stated = [(check_delta(row["delta"]), row["epsilon"]) for row in table["rows"]]
    bounds = [(delta, check_real("epsilon", value, low=0.0)) for delta, value in stated if value is not None]
    if not bounds:
        return
    recomputed = epsilon_table(shares, [delta for delta, _ in bounds], adjacency=adjacency, max_seconds=None)
    costs: Mapping[float, float | None] = {row.delta: row.epsilon for row in recomputed.rows}
    for delta, value in bounds:
        cost = costs[delta]
        if cost is None or value < cost * (1 - RECOMPUTE_TOLERANCE):
            yield f"epsilons: {value!r} at delta {delta!r}, but the sealed shares cost up to {cost!r} there"


_RELEASED = (
    ("examples", {"examples", "report"}, released_demonstration_problems),
    ("entries", {"entries", "report"}, pool_problems),
    ("counts", {"counts", "report"}, released_count_problems),
    ("documents", {"documents"}, released_document_problems),
    ("words", {"words", "report"}, released_word_problems),
)
"""Each kind of saved release: keys that tell it, and what compares it with the component that its report names."""
_RELEASES = {"examples", "entries", "arrays", "counts", "documents", "words"}
"""Keys of which a saved release has one beside its report."""
_CLAIMS = {"budget", "report_format", "baseline"}
"""Keys of which a report has one, and no release."""


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
      allowed_wrappers: modules that operators named in processes that this ledger paid in; see `allow_wrappers`.
      packages: versions of what computes prices, in the process that made the report; other processes may have
        declared shares with others.
      table: epsilon at other deltas, where `with_epsilons` was asked for it.
      retired: components of a stream that release no more, with the last block that each of them reserved.
    """

    ledger: LedgerHeader
    durable: bool
    storage: str
    datasets: tuple[Mapping[str, Any], ...]
    shares: tuple[ShareEntry, ...]
    version: str
    allowed_wrappers: tuple[str, ...] = ()
    packages: Mapping[str, str] = field(default_factory=package_versions)
    table: EpsilonTable | None = None
    retired: Mapping[str, int | None] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        ledger: LedgerHeader,
        store: LedgerStore,
        bindings: Mapping[str, Mapping[str, Any]],
        shares: Sequence[ShareEntry],
        wrappers: Sequence[str],
        *,
        windows: Windows | None = None,
    ) -> PrivacyReport:
        """Freezes what the ledger says now.

        Args:
          ledger: the ledger's first line.
          store: where it lives.
          bindings: the declaration of each data set, by `dataset_id`.
          shares: sealed ones in the order of the ledger, then those declared only.
          wrappers: what operators allowed to stand before private calls.
          windows: of a stream: what was promised for them.
        """
        datasets = tuple(copy.deepcopy(dict(bindings[name])) for name in sorted(bindings))
        made = cls(ledger, store.durable, store.description, datasets, tuple(shares), own_version(), tuple(wrappers))
        return made if windows is None else replace(made, retired=windows.retired)

    @property
    def epsilon(self) -> float:
        """Sum over all shares, rounded up; of a stream: over those that touch one window, where it is largest."""
        return self._sum([(share.terms, share.terms.epsilon) for share in self.shares])

    @property
    def delta(self) -> float:
        """As `epsilon`."""
        return self._sum([(share.terms, share.terms.delta) for share in self.shares])

    def _sum(self, amounts: Sequence[tuple[ShareTerms, float]]) -> float:
        stream = self.ledger.stream
        if stream is None:
            return round_up_sum(amount for _, amount in amounts)
        return heaviest(((share_extent(terms, self.retired), amount) for terms, amount in amounts), stream.window)

    def epsilons(
        self, deltas: Sequence[float] | None = None, *, max_seconds: float | None = DEFAULT_SECONDS
    ) -> EpsilonTable:
        """Bounds epsilon of everything sealed at other deltas; prices it anew, which takes seconds a share and delta.

        Args:
          deltas: in (0, 1), at most 200; None: the ledger's own and a tenth, hundredth and thousandth of it.
          max_seconds: no price is begun after so long, and rows without one say so; None: no limit.

        Raises:
          ConfigurationError: an argument is out of range.
        """
        if self.ledger.stream is not None:
            advice = "Its shares hold for windows; the report of a stream shows what longer stays cost."
            raise fail("report", "that of a ledger for life", f"per={self.ledger.stream.words!r}", advice)
        wanted = default_deltas(self.ledger.delta) if deltas is None else deltas
        sealed = [share.terms for share in self.shares if share.sealed_at is not None]
        return epsilon_table(sealed, wanted, adjacency=self.ledger.adjacency, max_seconds=max_seconds)

    def with_epsilons(
        self, deltas: Sequence[float] | None = None, *, max_seconds: float | None = DEFAULT_SECONDS
    ) -> PrivacyReport:
        """Returns the report with the table of `epsilons` in all its forms."""
        return replace(self, table=self.epsilons(deltas, max_seconds=max_seconds))

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON form, with a digest over all of it."""
        data = {
            "report_format": REPORT_FORMAT,
            "package": PACKAGE,
            "version": self.version,
            "packages": dict(self.packages),
            "ledger": {
                "ledger_id": self.ledger.ledger_id,
                "name": self.ledger.name,
                "durable": self.durable,
                "storage": self.storage,
                **({} if self.ledger.about is None else {"about": self.ledger.about.to_dict()}),
            },
            "adjacency": self.ledger.adjacency,
            "limits": {"epsilon": self.ledger.epsilon, "delta": self.ledger.delta},
            "promised": {"epsilon": self.epsilon, "delta": self.delta},
            "datasets": [dict(dataset) for dataset in self.datasets],
            "shares": [share.to_dict() for share in self.shares],
            **self._stream_claims(),
            **({} if self.table is None else {"epsilons": self.table.to_dict()}),
            **({} if not self.allowed_wrappers else {"allowed_wrappers": list(self.allowed_wrappers)}),
            **words_of(self.ledger.adjacency, self.ledger.epsilon),
        }
        return copy.deepcopy({**data, "digest": report_digest(data)})

    def _stream_claims(self) -> dict[str, Any]:
        """Returns what the report says of windows; nothing where the promise is for life."""
        ledger = self.ledger
        if ledger.stream is None:
            return {}
        limits: dict[str, Any] = {"epsilon": ledger.epsilon, "delta": ledger.delta, "adjacency": ledger.adjacency}
        shares = [share.terms for share in self.shares]
        return {"stream": stream_claims(shares, ledger.stream, self.retired, **limits)}

    def to_json(self, *, indent: int | None = 2) -> str:
        """Returns the JSON text that `verify_report` reads.

        Args:
          indent: spaces per level; None: one line.
        """
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False, allow_nan=False)

    def to_text(self) -> str:
        """Returns the report for people."""
        return text_of(self.to_dict())

    def to_markdown(self) -> str:
        """Returns the report for people, with every mechanism, opinion and parameter, as Markdown."""
        return markdown_of(self.to_dict())

    def to_html(self) -> str:
        """Returns the report as one HTML page for readers who sign it: promise, shares, beliefs, recipients, limits.

        It is computed anew first (`verify_report`, up to seconds a share), and the page says what was found. It has no
        scripts, loads nothing, and prints on A4.
        """
        from langchain_dpicl.reports.rendering import page_of

        data = self.to_dict()
        return page_of(data, verify_report(data).problems)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Writes `to_html` to a file, whole or not at all.

        Args:
          path: file to create or replace; its folder must exist.

        Raises:
          OSError: the folder is missing or cannot be written; `path` is then untouched.
        """
        write_bytes(path, self.to_html().encode("ascii", "xmlcharrefreplace"))

    def _repr_html_(self) -> str:
        from langchain_dpicl.reports.rendering import fragment_of

        return fragment_of(self.to_dict())

    def __str__(self) -> str:
        return self.to_text()


class CarriesReport(Protocol):
    """Something released that carries the report of its cost, such as `ReleasedDemonstrations` or `LabelledPool`."""

    @property
    def report(self) -> Mapping[str, Any]:
        """The JSON-able report."""


Reported: TypeAlias = str | bytes | Mapping[str, Any] | PrivacyReport | CarriesReport


@dataclass(frozen=True, slots=True)
class VerifiedReport:
    """What a verifier found.

    Attributes:
      epsilon: sum of the recomputed costs of all shares (of a release: the cost of its own share); infinite where one
        could not be recomputed, nothing is protected, or a labelled pool or prompt is not the one that was paid for.
      delta: sum of the deltas they were recomputed at (of a release: its own).
      ok: whether nothing is wrong.
      problems: what is wrong, in words.
    """

    epsilon: float
    delta: float
    ok: bool
    problems: tuple[str, ...]


def verify_report(report: Reported) -> VerifiedReport:
    """Recomputes a report: events from tickets, prices from events, sums, and what is shown beside them.

    Formal guarantees:
      - `ok` means: no share is charged less than its tickets can cost, shares stay within the limits, delta is at most
        1/(10 * public_size) of every data set, and every component shows a plan that makes its tickets, or no numbers
        at all; how far that goes, and for a `LabelledPool` or a `SoftPrompt`, `reports/verify*.py` say.
      - Of the text of a saved release or evaluation it means also that its content (texts, labels, counts, figures; the
        digest of a prompt's numbers) is what its content digest names.
      - What is priced is what is claimed: where two reports could be read in what is given, it is refused.
      - It does not mean that the report is genuine. Digests are no signatures: they catch accidents, a forger can
        rewrite a whole file. Keep the ledger and call `Budget.verify`, or sign the report and keep the signature.
      - Of the baselines "instruction only" is ok at epsilon 0, which is its author's word; the others never are.

    Args:
      report: JSON text, mapping or object of a `PrivacyReport`; or a release: `ReleasedDemonstrations`, a
        `LabelledPool`, a `SoftPrompt`, the `report` of one, a template's `privacy_report`, or the text of a saved
        release (of a soft prompt: of its `soft_prompt.json`).

    Raises:
      ConfigurationError: it is none of these.
    """
    holder = _json_of(report)
    data = _report_of(holder)
    component = None
    if "budget" in data:
        verified, component = _verify_release(data)
    elif "report_format" in data:
        verified = _verify_budget(data)[0]
    elif "baseline" in data or data.get("private") is False:
        verified = _verify_baseline(data)
    else:
        raise _no_report(f"an object with the keys {sorted(map(str, data))}")
    is_whole = data is not holder or "released" in data  # results of evaluations stand inside their report
    problems = [*verified.problems, *(content_problems(holder) if is_whole else ())]
    for kind, keys, compared in _RELEASED:
        if keys <= set(holder):
            problems += problems_in(compared(holder, component), kind)
    if data.get("released_words") is not None:
        problems += problems_in(released_first_word_problems(data, component), "released_words")
    problems += problems_in(prompt_problems(holder, data, component), "arrays")
    problems += problems_in(step_problems(data, component), "report")
    if len(problems) == len(verified.problems):
        return verified
    return VerifiedReport(math.inf, verified.delta, ok=False, problems=tuple(problems))


def _json_of(report: Any) -> Mapping[str, Any]:
    """Returns what was given as a JSON object; of an object that is none of ours, the report that it carries."""
    if isinstance(report, PrivacyReport):
        return report.to_dict()
    if hasattr(type(report), "_of_state"):  # a `Released`, which stands above: compared as the file that it writes
        try:
            report = report.to_json()
        except (TypeError, ValueError):
            raise _no_report(f"{type(report).__name__} that holds other than JSON values") from None
    if isinstance(report, (str, bytes)):
        try:
            report = json.loads(report, object_pairs_hook=unique_keys)
        except (ValueError, RecursionError):
            raise _no_report("text that is not JSON, or names a key twice") from None
    data = report if isinstance(report, Mapping) else getattr(report, "report", None)
    if not isinstance(data, Mapping):
        raise _no_report(type(report).__name__)
    return data


def _report_of(holder: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the report itself, or the one that a release holds; refuses what could be read as two of them."""
    is_file = "report" in holder and not _RELEASES.isdisjoint(holder) and _CLAIMS.isdisjoint(holder)
    data = holder["report"] if is_file else holder
    if not isinstance(data, Mapping):
        raise _no_report(type(holder).__name__)
    for problem in kind_problems(data):
        raise _no_report(f"two reports ({problem})")
    return data


def _no_report(found: str) -> ConfigurationError:
    return ConfigurationError(
        f"report: expected a PrivacyReport, its JSON, or a release with its report, found {found}. "
        "Give budget.report(), the file of `dpicl ledger show --report`, prompt.privacy_report or the released "
        "demonstrations."
    )


def _verify_baseline(data: Mapping[str, Any]) -> VerifiedReport:
    if baseline_epsilon(data) == 0:
        return VerifiedReport(0.0, 0.0, ok=True, problems=())
    name = data.get("baseline")
    return VerifiedReport(math.inf, 0.0, ok=False, problems=(f"not private: baseline {name!r}, epsilon is infinite",))


def _verify_release(data: Mapping[str, Any]) -> tuple[VerifiedReport, Component | None]:
    """Verifies the ledger's report inside, and that the release claims what its own component's share is charged."""
    inner, name = data["budget"], data.get("component")
    if not isinstance(inner, Mapping):
        raise _no_report(f"a release whose 'budget' is {type(inner).__name__}")
    whole, shares = _verify_budget(inner)
    terms, cost = shares.get(name if isinstance(name, str) else "", (None, math.inf))
    problems = (*whole.problems, *problems_in(claim_problems(data, inner, terms), "its claims"))
    if terms is None:
        return VerifiedReport(math.inf, whole.delta, ok=False, problems=problems), None
    epsilon = cost if whole.epsilon < math.inf else math.inf
    return VerifiedReport(epsilon, terms.delta, not problems, problems), own_component(terms, name)


def _verify_budget(data: Mapping[str, Any]) -> tuple[VerifiedReport, dict[str, tuple[ShareTerms, float]]]:
    """Returns what is wrong, and the terms and recomputed cost of every component's share."""
    problems: list[str] = []
    shares: list[tuple[ShareTerms, float]] = []
    epsilon, delta = math.inf, None
    try:
        problems.extend(header_problems(data))
        adjacency = check_adjacency(data["adjacency"])
        datasets = {item["dataset_id"]: _declaration(item) for item in data["datasets"]}
        window = data["stream"]["window"] if "stream" in data else None
        book = VerificationContext(adjacency, datasets, data["version"] == own_version(), window)
        problems.extend(_delta_problems(data, datasets))
        problems.extend(origin_problems(datasets))
        for item in data["shares"]:
            terms = ShareTerms.from_dict({key: value for key, value in item.items() if key != "sealed_at"})
            cost, _ = share_price(terms.components, delta=terms.delta, adjacency=adjacency)
            shares.append((terms, cost))
            problems.extend(_share_problems(terms, cost, book, sealed_at=item["sealed_at"]))
        problems.extend(_table_problems(data, [terms for terms, _ in shares], book))
        if "stream" in data:
            problems.extend(stream_problems(data, [terms for terms, _ in shares], tolerance=RECOMPUTE_TOLERANCE))
        elif any(component.extent is not None for terms, _ in shares for component in terms.components):
            problems.append("stream: shares of windows in the report of a ledger for life")
        delta = sum_over_shares(data, [terms.delta for terms, _ in shares])
        if all(cost < math.inf for _, cost in shares):
            epsilon = sum_over_shares(data, [cost for _, cost in shares])
    except UNREADABLE as error:
        problems.append(f"the report cannot be read: {describe_fault(error)}")
    named = {component.name: share for share in reversed(shares) for component in share[0].components}
    if delta is None:
        delta = round_up_sum(terms.delta for terms, _ in shares)
    return VerifiedReport(epsilon, delta, not problems, tuple(problems)), named


def _table_problems(data: Mapping[str, Any], shares: Sequence[ShareTerms], book: VerificationContext) -> Iterator[str]:
    """Compares the table of `epsilons`, which a report need not have, with recomputed bounds."""
    if (table := data.get("epsilons")) is None:
        return
    sealed = [terms for terms, item in zip(shares, data["shares"], strict=True) if item["sealed_at"] is not None]
    yield from table_problems(table, sealed, adjacency=book.adjacency)
    if book.this_version and table["method"] != METHOD:
        yield "epsilons: the method is not in the words of this version"


def _declaration(data: Mapping[str, Any]) -> Declaration:
    """Rebuilds a data set's declaration with all checks of its constructor."""
    arguments = {key: value for key, value in data.items() if key not in {"unit", "labels", "extra_fields"}}
    return make_declaration(**arguments, labels=data["labels"] or None, fields=data["extra_fields"])


def _delta_problems(data: Mapping[str, Any], datasets: Mapping[str, Declaration]) -> Iterator[str]:
    for item, declared in zip(data["datasets"], datasets.values(), strict=True):
        if declared.to_dict() != item:
            yield f"datasets: {declared.dataset_id!r} is not described by its own declaration"
        if item.get("stream", {}).get("block") != data.get("stream", {}).get("block"):
            yield f"datasets: {declared.dataset_id!r} has other blocks than the ledger"
        if data["limits"]["delta"] > declared.most_delta:
            yield f"limits: delta is above {declared.delta_rule} of {declared.dataset_id!r}"


def _share_problems(terms: ShareTerms, cost: float, book: VerificationContext, *, sealed_at: Any) -> Iterator[str]:
    names = ", ".join(component.name for component in terms.components)
    if terms.event != event_of_components(terms.components):
        yield f"{names}: the event is not the one of its tickets"
    if len(terms.components) != 1 and not terms.joint:
        yield f"{names}: one share of several components is not said to be a joint plan"
    if cost > terms.epsilon * (1 + RECOMPUTE_TOLERANCE):
        when = "declared" if sealed_at is None else f"sealed {sealed_at}"
        why_wrong = f"{when} at a price that is too low by today's accounting"
        advice = "count the cost instead of the charge, and release nothing more from it"
        yield f"{names}: charged epsilon {terms.epsilon!r}, but its tickets cost up to {cost!r}: {why_wrong}; {advice}"
    stated = terms.pricing["epsilon"]
    if book.is_misstated(stated, cost) or stated > terms.epsilon:
        yield f"{names}: pricing says epsilon {stated!r}, its tickets cost up to {cost!r}, charged {terms.epsilon!r}"
    for opinion in terms.pricing["opinions"]:
        low, high = opinion["lower"] or 0.0, opinion["upper"]
        if low > stated * (1 + RECOMPUTE_TOLERANCE) or (high is not None and low > high):
            yield f"{names}: pricing says epsilon {stated!r}, and a second opinion from {low!r} to {high!r}"
    if sealed_at is not None:
        datetime.fromisoformat(sealed_at)
    for component in terms.components:
        found = (*_asked_problems(component, terms, book), *component_problems(component, book))
        yield from (f"{component.name}: {problem}" for problem in found)


def _asked_problems(component: Component, terms: ShareTerms, book: VerificationContext) -> Iterator[str]:
    labels = {ticket.label for ticket in component.tickets} - {None}
    declared = book.dataset_of(component)
    if terms.joint and component.limit is not None:
        yield "is a pool, which no joint plan takes"
    if labels and not (declared and labels <= set(declared.labels)):
        yield "its labels are not declared by a data set of the report"
    if not terms.joint:
        for name in ("epsilon", "delta"):
            asked, charged = getattr(component, name), getattr(terms, name)
            if asked is not None and not is_same_number(asked, charged):
                yield f"asked for {name} {asked!r}, charged {charged!r}"
    elif component.epsilon is not None and component.delta is not None:
        cost = own_cost(component, book)
        if cost > component.epsilon * (1 + RECOMPUTE_TOLERANCE):
            yield f"asked for epsilon {component.epsilon!r} at its delta, but its tickets cost up to {cost!r}"
