"""Checks the digest of a saved release, the claims of its report, and what a stream's ledger promises."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy._validate import (
    Adjacency,
    check_adjacency,
    check_delta,
    check_epsilon,
    check_int,
    check_real,
    effective_delta,
    exact,
    fail,
    round_up,
)
from langchain_dpicl.privacy.accounting.events import Event, RepeatedEvent, canonical_json
from langchain_dpicl.privacy.extensions.ledger_anchor import LedgerAbout
from langchain_dpicl.privacy.extensions.stream_ledger import LAST_BLOCK, RUN_TEMPLATE, StreamTerms, hull_of
from langchain_dpicl.privacy.ledger.tickets import Blocks, Component, Extent, ShareTerms, implementation_delta_of
from langchain_dpicl.reports.rendering import (
    PACKAGE,
    check_wrappers,
    format_rounded_up,
    own_version,
    words_of,
)
from langchain_dpicl.reports.verify import UNREADABLE, describe_fault

SPANS = (2, 3, 6, 12)
"""How many windows long the stays of the table are."""

Retired = Mapping[str, int | None]
"""The last block that a retired component reserved, or None where it reserved nothing, by name."""


def heaviest(amounts: Iterable[tuple[Extent | None, float]], window: int) -> float:
    """Returns the largest sum of the amounts of one window, rounded up: of those whose extent the window touches."""
    spans = [(each, exact(amount)) for each, amount in amounts if each is not None]
    # The sum grows only where a window begins to touch an extent, which it does with the extent's first block.
    sums = (
        sum((amount for (first, last), amount in spans if _touches(end, first, last, window)), Fraction(0))
        for end in {first for (first, _), _ in spans}
    )
    return round_up(max(sums, default=Fraction(0)))


def _touches(end: int, first: int, last: int | None, window: int) -> bool:
    return first <= end and (last is None or end <= last + window - 1)


def extent_of(components: Iterable[tuple[str, Extent | None]], retired: Retired) -> Extent | None:
    """Returns the blocks that the components of a share have read or may read, by their names and extents."""
    read: list[Extent] = []
    for name, extent in components:
        if extent is None:
            raise TypeError(f"{name!r} has no extent")
        reach = retired.get(name, -1)
        if reach is not None:  # it has read something, or may
            read.append(extent if name not in retired else (extent[0], reach))
    return hull_of(read)


def share_extent(terms: ShareTerms, retired: Retired) -> Extent | None:
    """Returns the blocks that a share has read or may read."""
    return extent_of(((each.name, each.extent) for each in terms.components), retired)


def shown_extent(share: Mapping[str, Any], retired: Retired) -> Extent | None:
    """Returns the same of a share as a report shows it."""
    return extent_of(((each["name"], tuple(each["extent"])) for each in share["components"]), retired)


def retired_in(stream: Mapping[str, Any]) -> dict[str, int | None]:
    """Returns the retired components that a report shows, checked."""
    return {
        str(name): None if last is None else check_int("retired", last, low=0, high=LAST_BLOCK)
        for name, last in stream["retired"].items()
    }


def promise_words(terms: StreamTerms, *, epsilon: float, delta: float, adjacency: Adjacency) -> str:
    """Returns the promise of a ledger of a stream in words."""
    guard = f"({format_rounded_up(epsilon)}, {format_rounded_up(delta)})-DP"
    start = (
        f"For any person and any {terms.words} in a row: everything that this ledger has released or will release is"
    )
    end = (
        f"{terms.name.capitalize()}s are of the records, not of the releases; old ones get no budget back. A "
        "person who is there for longer is protected as the longer stays below say, for the shares declared so far."
    )
    if adjacency == "replace_one":
        return f"{start} {guard} as to the records of that person in that time, their presence included. {end}"
    whose = "as to the records of that time of a person who has others"
    far = math.inf if epsilon > 700 and delta > 0 else (1 + math.exp(min(epsilon, 700))) * delta  # e^710 overflows
    hop = f"({format_rounded_up(2 * epsilon)}, {format_rounded_up(far, 3)})-DP {whose}"
    if float(format_rounded_up(far, 3)) >= 1:
        hop = f"nothing is promised {whose}, for whom delta would be 1 or more"
    return (
        f"{start} {guard} as to whether that person's records of that time were there, if they have no others; {hop}. "
        f"{end}"
    )


@functools.lru_cache(maxsize=4096)
def _price(event: Event, times: int, delta: float, gap: float, adjacency: Adjacency) -> float:
    """Returns what so many times the tickets of one window cost at delta, of which `gap` is set aside each time."""
    rest = effective_delta(delta, times * gap)
    if rest < 0 or (rest == 0 < delta):
        return math.inf
    repeated = event if times == 1 else RepeatedEvent(event, times)
    return float(accounting.epsilon_bound(repeated, delta=rest, adjacency=adjacency, opinions=False).epsilon)


def longer_stays(
    shares: Sequence[ShareTerms], terms: StreamTerms, retired: Retired, adjacency: Adjacency
) -> Iterator[dict[str, Any]]:
    """Yields, for stays of several windows, epsilon and delta of all that the shares can release about such a person.

    A stay of k windows is touched by at most k times the tickets of one window: each ticket that touches it touches one
    of the k. So many are composed, share by share; the shares that touch one such stay add up.
    """
    for times in SPANS:
        length = times * terms.window
        prices: list[tuple[Extent | None, float]] = []
        deltas: list[tuple[Extent | None, float]] = []
        for share in shares:
            extent = share_extent(share, retired)
            own = times
            if extent is not None and extent[1] is not None:
                own = min(times, -(-(extent[1] - extent[0] + 1) // terms.window))
            cost = _price(share.event, own, share.delta, implementation_delta_of(share.components), adjacency)
            prices.append((extent, max(cost, share.epsilon)))
            deltas.append((extent, share.delta))
        is_finite = all(math.isfinite(price) for _, price in prices)
        epsilon = heaviest(prices, length) if is_finite else None
        yield {"windows": times, "blocks": length, "epsilon": epsilon, "delta": heaviest(deltas, length)}


def reads_claims(terms: StreamTerms, blocks: Blocks) -> dict[str, Any]:
    """Returns what the report of a run says of the blocks that it read, by number and by name."""
    first, last = blocks
    return {"blocks": [first, last], "first": terms.name_of(first), "last": terms.name_of(last)}


def reads_problems(report: Mapping[str, Any], inner: Mapping[str, Any], own: Component) -> Iterator[str]:
    """Compares the blocks that a run's report names with its component; that it read those is its sender's word."""
    if own.extent is None or all(ticket.template != RUN_TEMPLATE for ticket in own.tickets):
        if "reads" in report:
            yield "reads: blocks of a component that has no runs on a stream"
        return
    first, last = (check_int("blocks", block, low=0, high=LAST_BLOCK) for block in report["reads"]["blocks"])
    made = reads_claims(_terms_in(inner["stream"]), (first, last))
    if canonical_json(dict(report["reads"])) != canonical_json(made):
        yield f"reads: expected {made}, found other names or members"
    end = LAST_BLOCK if own.extent[1] is None else own.extent[1]
    if (reach := retired_in(inner["stream"]).get(own.name)) is not None:
        end = min(end, reach)
    if not own.extent[0] <= first <= last <= end or last - first + 1 != own.public["stream"]["length"]:
        yield f"reads: expected the blocks of a run of {own.name!r}, found {[first, last]}"


def _terms_in(stream: Mapping[str, Any]) -> StreamTerms:
    return StreamTerms.from_dict({name: stream[name] for name in ("block", "origin", "window")})


def stream_claims(
    shares: Sequence[ShareTerms],
    terms: StreamTerms,
    retired: Retired,
    *,
    epsilon: float,
    delta: float,
    adjacency: Adjacency,
) -> dict[str, Any]:
    """Returns what a report says of the windows of its ledger."""
    return {
        **terms.to_dict(),
        "retired": dict(retired),
        "promise": promise_words(terms, epsilon=epsilon, delta=delta, adjacency=adjacency),
        "longer_stays": list(longer_stays(shares, terms, retired, adjacency)),
    }


def stream_problems(data: Mapping[str, Any], shares: Sequence[ShareTerms], *, tolerance: float) -> Iterator[str]:
    """Recomputes what a report says of the windows of its ledger; a bound that is too high is no problem."""
    found, limits, adjacency = data["stream"], data["limits"], data["adjacency"]
    terms = _terms_in(found)
    names = {component.name for share in shares for component in share.components}
    if unknown := sorted(set(found["retired"]) - names):
        yield f"stream: retired {unknown}, of which there is no share"
    for share, shown in zip(shares, data["shares"], strict=True):
        yield from _retired_problems(share, retired_in(found), is_sealed=shown["sealed_at"] is not None)
    if any(ticket.label is not None for share in shares for each in share.components for ticket in each.tickets):
        yield "stream: a ticket is of one label, which a person need not keep"
    made = stream_claims(
        shares,
        terms,
        retired_in(found),
        epsilon=limits["epsilon"],
        delta=limits["delta"],
        adjacency=adjacency,
    )
    if found["promise"] != made["promise"]:
        yield "stream: the promise is not in the words of this version"
    if set(found) != set(made) or len(found["longer_stays"]) != len(made["longer_stays"]):
        yield "stream: other members than a report of this version has"
        return
    for shown, row in zip(found["longer_stays"], made["longer_stays"], strict=True):
        is_same = {**shown, "epsilon": 0.0} == {**row, "epsilon": 0.0}
        stated, cost = shown["epsilon"], row["epsilon"]
        is_low = stated is not None and (cost is None or stated < cost * (1 - tolerance))
        if not is_same or is_low:
            yield f"stream: a stay of {row['blocks']} blocks costs up to {row['epsilon']!r}, found {shown!r}"


def _retired_problems(share: ShareTerms, retired: Retired, *, is_sealed: bool) -> Iterator[str]:
    """Compares what is said of a share's retired components with what its ledger can have noted.

    The first reservation seals a share, and only sealed components retire. A reach within these bounds is its sender's
    word.
    """
    found = [(each, retired[each.name]) for each in share.components if each.name in retired]
    if found and not is_sealed:
        yield f"stream: retired {sorted(each.name for each, _ in found)}, of which no ticket was reserved"
    elif len(found) == len(share.components) and all(reach is None for _, reach in found):
        yield f"stream: expected blocks that the sealed share of {share.components[0].name!r} has read, found none"
    for each, reach in found:
        if reach is not None and each.extent is not None:
            first, last = each.extent
            least = first + (
                each.public["stream"]["length"] - 1 if "stream" in each.public else 0
            )  # runs are read whole
            if not least <= reach <= (LAST_BLOCK if last is None else last):
                yield f"stream: expected the last block of a reservation of {each.name!r}, found {reach}"


REPORT_FORMAT = 1
"""Of a ledger's report."""
RELEASE_FORMAT = 2
"""Of the report of a release, which holds its ledger's."""
INSTRUCTION_ONLY = "instruction only"
CONTENT_DIGEST = "content_digest"
"""Where a file's report, or a file without one, holds the digest of its content."""

_LEDGER = {"ledger_id", "name", "durable", "storage"}
_REPORT = {
    *("report_format", "package", "version", "packages", "ledger", "adjacency", "limits", "promised", "datasets"),
    *("shares", "stream", "epsilons", "allowed_wrappers", "digest"),
}
"""Members of a ledger's report beside its words."""


def content_digest(state: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of a file's content: of all its values, report and plan included, but the digest itself.

    Formal guarantees:
      - Values that JSON writes alike have one digest, however the file is laid out; others have different ones.

    Raises:
      ValueError: a number is not finite.
    """
    whole = {key: value for key, value in state.items() if key != CONTENT_DIGEST}
    if isinstance(report := whole.get("report"), Mapping):
        whole["report"] = {key: value for key, value in report.items() if key != CONTENT_DIGEST}
    return json_digest(whole)


def json_digest(value: Any) -> str:
    """Returns the SHA-256 of a JSON value; of values that JSON writes alike the same.

    Raises:
      ValueError: a number is not finite.
    """
    # UTF-16: a character that JSON gave in two halves and the same one in one piece have the same bytes.
    return hashlib.sha256(canonical_json(value).encode("utf-16-le", "surrogatepass")).hexdigest()


def with_content_digest(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a file's JSON object with its content digest, which stands in the report if there is one."""
    digest = {CONTENT_DIGEST: content_digest(state)}
    return {**state, "report": {**state["report"], **digest}} if "report" in state else {**state, **digest}


def content_problems(state: Mapping[str, Any]) -> Iterator[str]:
    """Compares a file's JSON object with the content digest in it."""
    holder = state.get("report", state)
    digest = holder.get(CONTENT_DIGEST) if isinstance(holder, Mapping) else None
    try:
        is_same = digest == content_digest(state)
    except UNREADABLE:
        is_same = False
    if digest is None:
        yield f"{CONTENT_DIGEST}: expected one, found none: this file's content cannot be checked"
    elif not is_same:
        yield f"{CONTENT_DIGEST}: the content was changed after it was written"


def check_claims(report: Mapping[str, Any]) -> None:
    """Refuses the report of a saved release whose cost does not follow from what stands in it.

    Formal guarantees:
      - What passes is the report of nothing charged (empty), of a baseline at the cost that baselines have, or one that
        claims epsilon, delta, adjacency, data set and ledger as the share of its component has them, in a ledger's
        report whose digest, sums and limits agree.
      - No price is computed: that the share's epsilon is what its tickets cost is checked by `verify_report`.
    """
    problems: list[str] = []
    try:
        problems.extend(_claims(report))
    except UNREADABLE as error:
        problems.append(f"it cannot be read: {describe_fault(error)}")
    if problems:
        advice = "The file was changed, or was not written by this package; get it again from who released it."
        raise ConfigurationError(
            f"report: expected claims that its ledger's report bears out, found {problems[0]}. {advice}"
        )


def _claims(report: Mapping[str, Any]) -> Iterator[str]:
    if not report:
        return
    yield from kind_problems(report)
    if "budget" not in report:
        if baseline_epsilon(report) != report.get("epsilon"):
            yield "no ledger's report under 'budget', and no baseline"
        return
    inner = report["budget"]
    yield from header_problems(inner)
    shares = (
        ShareTerms.from_dict({key: value for key, value in item.items() if key != "sealed_at"})
        for item in inner["shares"]
        if any(one["name"] == report["component"] for one in item["components"])
    )
    yield from claim_problems(report, inner, next(shares, None))


def kind_problems(report: Mapping[str, Any]) -> Iterator[str]:
    """Tells what makes two reports of one, each of which claims another cost."""
    if "budget" in report and "report_format" in report:
        yield "report_format: expected it inside 'budget' alone"
    if "report" in report:
        yield "report: expected one, found another inside it"


def baseline_epsilon(report: Mapping[str, Any]) -> float | str | None:
    """Returns the epsilon of a baseline: 0 of an instruction alone, else "infinity"; None: it is no baseline."""
    if report.get("baseline") == INSTRUCTION_ONLY and report.get("epsilon") == 0 and report.get("delta") == 0:
        return 0.0
    return "infinity" if "baseline" in report or report.get("private") is False else None


def claim_problems(report: Mapping[str, Any], inner: Mapping[str, Any], terms: ShareTerms | None) -> Iterator[str]:
    """Compares what a release claims with the share of its component."""
    name = report.get("component")
    if terms is None:
        yield f"component: expected a share of the ledger's report, found {name!r}"
        return
    own = own_component(terms, name)
    for key, value in release_claims(terms, own, inner).items():
        if canonical_json(report.get(key)) != canonical_json(value):
            yield f"{key}: expected {value!r}, as in the share of {name!r}, found {report.get(key)!r}"
    plan = report.get("plan")
    has_method = isinstance(plan, Mapping) and plan.get("method") == own.public.get("method")
    if not has_method or not _is_part(plan, own.public):
        yield f"plan: expected what {name!r} shows, found another"
    yield from reads_problems(report, inner, own)


def release_claims(terms: ShareTerms, own: Component, inner: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the report of a release says, but for its plan and the ledger's report in it."""
    return {
        "format": RELEASE_FORMAT,
        "private": True,
        "method": own.public.get("method"),
        "component": own.name,
        "ledger_id": inner["ledger"]["ledger_id"],
        "dataset_id": own.partition,
        "unit": unit_of(inner, own.partition),
        "adjacency": inner["adjacency"],
        "epsilon": terms.epsilon,
        "delta": terms.delta,
    }


def unit_of(inner: Mapping[str, Any], dataset_id: str | None) -> str | None:
    """Returns the unit of a data set: "record", or the key whose records are one unit; None: it is not declared."""
    declared = (item for item in inner["datasets"] if item["dataset_id"] == dataset_id)
    return next((item["unit_key"] or "record" for item in declared), None)


def _is_part(part: Any, whole: Any) -> bool:
    """Whether a JSON object says nothing that another one does not say."""
    if isinstance(part, Mapping) and isinstance(whole, Mapping):
        return all(name in whole and _is_part(value, whole[name]) for name, value in part.items())
    return canonical_json(part) == canonical_json(whole)


def own_component(terms: ShareTerms, name: Any) -> Component:
    """Returns the component of a share that has this name."""
    return next(component for component in terms.components if component.name == name)


def header_problems(data: Mapping[str, Any]) -> Iterator[str]:
    """Compares what stands around the shares of a ledger's report: format, digest, sums, limits and words."""
    for name, value in (("report_format", REPORT_FORMAT), ("package", PACKAGE)):
        if data[name] != value:
            yield f"{name}: expected {value!r}, found {data[name]!r}"
    if data["digest"] != report_digest({key: value for key, value in data.items() if key != "digest"}):
        yield "digest: the report was changed after it was made"
    limits = {"epsilon": check_epsilon(data["limits"]["epsilon"]), "delta": check_delta(data["limits"]["delta"])}
    for name, limit in limits.items():
        total = sum_over_shares(data, [check_real(name, share[name], low=0.0) for share in data["shares"]])
        if data["promised"][name] != total:
            yield f"promised {name}: expected {total!r}, the sum over shares, found {data['promised'][name]!r}"
        if exact(total) > exact(limit):
            yield f"limits: shares add to {name} {total!r}, above {limit!r}"
    _check_ledger(data["ledger"])
    if data["version"] == own_version():
        adjacency = check_adjacency(data["adjacency"])
        words = words_of(adjacency, limits["epsilon"])
        for name, sentence in words.items():
            if data[name] != sentence:
                yield f"{name}: not the words of this version"
        yield from _member_problems(data, _REPORT | set(words))
        yield from _member_problems(data["ledger"], _LEDGER | {"about"})
        yield from _member_problems({**data["limits"], **data["promised"]}, set(limits))
    check_wrappers(data.get("allowed_wrappers", []))


def _member_problems(data: Mapping[str, Any], known: set[str]) -> Iterator[str]:
    if unknown := sorted(set(data) - known):
        yield f"{unknown}: other members than a report of this version has"


def sum_over_shares(data: Mapping[str, Any], amounts: Sequence[float]) -> float:
    """Returns the sum of an amount of each share; of a stream: over those of the window where it is largest."""
    if "stream" not in data:
        return round_up_sum(amounts)
    retired, window = retired_in(data["stream"]), check_int("window", data["stream"]["window"], low=1)
    extents = [shown_extent(share, retired) for share in data["shares"]]
    return heaviest(zip(extents, amounts, strict=True), window)


def _check_ledger(ledger: Any) -> None:
    if not isinstance(ledger, Mapping) or not set(ledger) >= _LEDGER:
        raise fail("ledger", f"a JSON object with {sorted(_LEDGER)}", ledger)
    if "about" in ledger:
        about = LedgerAbout.parse(ledger["about"])
        if about is None or about.to_dict() != ledger["about"]:
            raise fail("about", "what a ledger declares, without an empty member", "another form of it")


def round_up_sum(values: Any) -> float:
    """Returns the sum of public amounts, rounded up."""
    return round_up(sum((exact(value) for value in values), Fraction(0)))


def report_digest(data: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of a ledger's report without its digest."""
    return hashlib.sha256(canonical_json(dict(data)).encode("utf-8")).hexdigest()
