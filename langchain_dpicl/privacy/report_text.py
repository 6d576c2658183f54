"""Renders a report as plain text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from langchain_dpicl.privacy.report_words import DIES, rounded_up, wrappers_words

Json = Mapping[str, Any]


def text_of(data: Json) -> str:
    """Returns a report as text. `data` is what `PrivacyReport.to_dict` returns, of this version or an earlier one."""
    return "\n".join(_lines(data))


def _lines(data: Json) -> Iterator[str]:
    ledger, limits, promised = data["ledger"], data["limits"], data["promised"]
    yield f"Privacy report of {ledger['name']!r} (ledger {ledger['ledger_id']}, {ledger['storage']})"
    yield f"  limit     epsilon {limits['epsilon']:g}, delta {limits['delta']:g}"
    sums = f"epsilon {rounded_up(promised['epsilon'])}, delta {rounded_up(promised['delta'])}"
    yield f"  promised  {sums} (an upper bound)"
    yield f"  adjacency {data['adjacency']}: {data['adjacency_means']}"
    for dataset in data["datasets"]:
        yield f"  data set  {dataset['dataset_id']!r}: unit = {dataset['unit']}, size = {size_words(dataset)}"
    yield ""
    yield f"  {'share':<28}{'epsilon':>12}{'delta':>12}  tickets"
    for share in data["shares"]:
        yield from _share_lines(share)
    if not data["shares"]:
        yield "  (none)"
    yield ""
    yield from _table_lines(data.get("epsilons"))
    yield "  Assumed public: " + "; ".join(data["assumed_public"]) + "."
    yield "  " + data["trust"]
    if hosts := seen_by(data):
        yield "  Private text is sent to: " + ", ".join(hosts) + "."
    if named := data.get("allowed_wrappers"):
        yield "  " + wrappers_words(named)
    yield "  " + data["noise_gap"]
    yield "  " + data["digest_means"]
    if versions := data.get("packages"):
        yield "  Made with " + ", ".join(f"{name} {version}" for name, version in versions.items()) + "."
    if not ledger["durable"]:
        yield "  " + DIES


def seen_by(data: Json) -> list[str]:
    """Returns the hosts to which components send private text; reports of earlier versions name none."""
    named = [component["public"].get("seen_by") for share in data["shares"] for component in share["components"]]
    hosts = {host for one in named if isinstance(one, list) for host in one if isinstance(host, str)}
    return sorted(host for host in hosts if host.isprintable())


def size_words(dataset: Json) -> str:
    """Returns the declared size of a data set, by label where it has one for each."""
    size = dataset["public_size"]
    return str(size) if isinstance(size, int) else ", ".join(f"{label}: {count}" for label, count in size.items())


def _share_lines(share: Json) -> Iterator[str]:
    cost = f"{rounded_up(share['epsilon']):>12}{rounded_up(share['delta'], 3):>12}"
    state = "declared" if share["sealed_at"] is None else f"sealed {share['sealed_at']}"
    if share["joint"]:
        yield f"  {'(joint plan)':<28}{cost}  {state}"
    for component in share["components"]:
        charge = f"{'':>24}" if share["joint"] else cost
        name = ("  " if share["joint"] else "") + component["name"]
        yield f"  {name:<28}{charge}  {_tickets(component)}" + ("" if share["joint"] else f"; {state}")


def _tickets(component: Json) -> str:
    if component["limit"] is not None:
        return f"pool, {'mu' if component['kind'] == 'gdp' else 'rho'} = {component['limit']:.6g}"
    counts: dict[str, int] = {}
    for ticket in component["tickets"]:
        counts[ticket["template"]] = counts.get(ticket["template"], 0) + ticket["max_count"]
    labels = len({ticket["label"] for ticket in component["tickets"]} - {None})
    text = ", ".join(f"{template} x {count}" for template, count in counts.items())
    return text + (f" over {labels} labels" if labels else "")


def _table_lines(table: Json | None) -> Iterator[str]:
    if table is None:
        return
    yield f"  {'epsilon of what was sealed':<28}{'at delta':>12}"
    for row in table["rows"]:
        yield f"  {bound_words(row):<28}{row['delta']:>12.3g}"
    yield "  " + table["method"]
    yield ""


def bound_words(row: Json) -> str:
    """Returns the bound of a row of the table over deltas, never below it, or why there is none."""
    return str(row["note"]) if row["epsilon"] is None else rounded_up(row["epsilon"])
