"""Renders a report as one HTML page that people can print, keep and sign."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from langchain_dpicl.privacy.ledger.amounts import exact
from langchain_dpicl.reports.rendering import (
    ADJACENCY_WORDS,
    DIES,
    event_words,
    format_rounded_up,
    hosts_of,
    report_recipients,
    size_words,
    stay_words,
    wrappers_words,
)

Json = Mapping[str, Any]

_STYLE = """
.dpicl-report { --ink: #1b2330; --soft: #5a6676; --line: #d5dbe3; --fill: #3b6fb6; --pale: #eef2f8; --page: #fff;
  color: var(--ink); background: var(--page); font: 15px/1.5 system-ui, sans-serif; max-width: 48rem; margin: 0 auto;
  padding: 1rem; -webkit-print-color-adjust: exact; print-color-adjust: exact; overflow-wrap: anywhere }
@media screen and (prefers-color-scheme: dark) {
  .dpicl-report { --ink: #e8ecf2; --soft: #a4b0c0; --line: #3a4454; --fill: #7aa7e6; --pale: #232b38;
    --page: #161b23 } }
.dpicl-report h1 { font-size: 1.5rem; line-height: 1.25 } .dpicl-report h2 { font-size: 1.1rem; margin: 1.6rem 0 .4rem }
.dpicl-report table { border-collapse: collapse; width: 100%; margin: .4rem 0; color: inherit; background: none }
.dpicl-report th, .dpicl-report td { border-bottom: 1px solid var(--line); padding: .3rem .5rem .3rem 0;
  text-align: left; vertical-align: top; background: none }
.dpicl-report td[data-of=component] { min-width: 8rem }
.dpicl-report th { color: var(--soft); font-weight: 600 }
.dpicl-report .lead { background: var(--pale); border-left: 4px solid var(--fill); padding: .6rem .9rem }
.dpicl-report .bar { display: flex; height: 1.5rem; background: var(--pale); border: 1px solid var(--line) }
.dpicl-report .bar i { background: var(--fill); color: var(--page); border-right: 2px solid var(--page); min-width: 3px;
  font: 600 .75rem/1.5rem system-ui, sans-serif; overflow: hidden; text-align: center; box-sizing: border-box }
@media screen and (max-width: 32rem) { .dpicl-report .many thead { display: none }
  .dpicl-report .many tr { display: block; border-bottom: 1px solid var(--line); padding: .3rem 0 }
  .dpicl-report .many td { display: block; border: 0; padding: 0 }
  .dpicl-report .many td:empty { display: none }
  .dpicl-report .many td::before { content: attr(data-of) " "; color: var(--soft) } }
.dpicl-report small { color: var(--soft) } .dpicl-report .sign th { width: 12rem }
.dpicl-report .sign td { height: 2.4rem }
@media print { @page { size: A4; margin: 18mm } .dpicl-report { max-width: none; padding: 0; font-size: 10.5pt }
  .dpicl-report h2 { break-after: avoid } .dpicl-report tr, .dpicl-report .lead { break-inside: avoid } }
"""
_BODY = "body { margin: 0 } @media screen and (prefers-color-scheme: dark) { body { background: #161b23 } }"

_PRIORS = (0.01, 0.1, 0.5)
_NOT_COVERED = (
    "What the providers of models and embeddings keep: they receive private text in the clear.",
    "What can be learnt from the people in the data as a whole: learning that is the purpose.",
    "What is true of a person whether or not their records are used.",
    "Copies of the records elsewhere, and releases from the same records under another ledger: their budgets add up.",
    "Records that were used without this package, and values declared public after somebody had looked at them.",
)


def belief(prior: float, epsilon: float, delta: float = 0.0) -> float:
    """Returns what an attacker's belief in what is true of a unit can become, on average over what is released.

    Formal guarantees:
      - What is (epsilon, delta)-differentially private can be made from an answer that tells everything with
        probability delta, and else is (epsilon, 0)-differentially private. Of the first, certainty is counted; of the
        second, prior odds times e^epsilon. At delta 0 no single release brings more; else one can, and with Gaussian
        noise more often than delta says.

    Args:
      prior: belief before, in (0, 1).
      epsilon: what was promised, >= 0.
      delta: what was promised, in [0, 1).

    >>> round(belief(0.01, 1.0), 4), round(belief(0.01, 1.0, 0.1), 4)
    (0.0267, 0.1241)

    Source: Bayes' rule; that it can be made so: Kairouz, Oh and Viswanath (2015).
    """
    most = 1.0 / (1.0 + math.exp(-epsilon) * (1.0 - prior) / prior)
    return delta + (1.0 - delta) * most


def page_of(data: Json, problems: Iterable[str]) -> str:
    """Returns a whole HTML page without scripts, and without anything that is loaded from elsewhere.

    Args:
      data: what `PrivacyReport.to_dict` returns.
      problems: what a recomputation of the report found.
    """
    title = f"Privacy report of {data['ledger']['name']}"
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{_BODY}</style>"
    )
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{fragment_of(data, problems)}</body></html>\n'


def fragment_of(data: Json, problems: Iterable[str] | None = None) -> str:
    """Returns the report as HTML for a notebook's cell.

    Args:
      data: as for `page_of`.
      problems: as for `page_of`; None: nothing was recomputed, and the page does not speak of it.
    """
    parts = [
        f"<style>{_STYLE}</style>",
        f"<h1>Privacy report of {_text(data['ledger']['name'])}</h1>",
        *_promise(data),
        *_declared(data),
        *_belief(data),
        *_spent(data),
        *_recipients(data),
        *_limits_of_promise(data),
        *_checked(problems),
        *_details(data),
    ]
    if problems is not None:
        parts += _signatures(data)
    return f'<div class="dpicl-report">{"".join(parts)}</div>'


def _promise(data: Json) -> Iterator[str]:
    limits, promised = data["limits"], data["promised"]
    yield (
        f'<p class="lead">The promise holds for {_units(data)}. Everything that was and will be released under this '
        f"ledger{_per(data)} is differentially private with epsilon at most "
        f"<b>{_text(format_rounded_up(limits['epsilon']))}</b> and delta at most <b>{limits['delta']:g}</b>; the "
        f"shares below may use epsilon {_text(format_rounded_up(promised['epsilon']))} of it.</p>"
        "<p>In plain words: all outputs together look almost the same, whatever one such unit is or does. Epsilon says "
        "how much &quot;almost&quot; is; what it means for a belief stands below.</p>"
    )
    if "stream" in data:
        stays = "; ".join(stay_words(row) for row in data["stream"]["longer_stays"])
        yield f"<p>{_text(data['stream']['promise'])}</p><p>Longer stays: {_text(stays)}.</p>"
    adjacency = data["adjacency"]
    yield f"<p>Neighbouring relation <b>{_text(adjacency)}</b>: {_text(ADJACENCY_WORDS[adjacency])}.</p>"
    if not data["ledger"]["durable"]:
        yield f"<p><b>{_text(DIES)}</b></p>"
    if data["datasets"]:
        yield "<h2>Data</h2>"
        rows = ((dataset["dataset_id"], dataset["unit"], size_words(dataset)) for dataset in data["datasets"])
        yield _table(("data set", "unit", "declared size"), rows)


def _units(data: Json) -> str:
    """Returns for whom the promise holds, as HTML; that a record is no person stands where a record is the unit."""
    units = {str(dataset["unit"]) for dataset in data["datasets"]}
    named = [
        "<b>one record, which is not a person</b> (who has several is covered for each of them, not for all)"
        if unit == "one record"
        else f"<b>{_text(unit)}</b>"
        for unit in sorted(units)
    ]
    return " or ".join(named) or "<b>one unit of data that is yet to be declared</b>"


_FIELDS = {"purpose": "purpose", "owner": "owner", "approver": "approved by", "retention": "kept for"}


def _declared(data: Json) -> Iterator[str]:
    about = data["ledger"].get("about", {})
    yield "<h2>Declared when the ledger was made</h2>"
    if rows := [(words, about[name]) for name, words in _FIELDS.items() if name in about]:
        yield _table(("", ""), rows)
    missing = [words for name, words in _FIELDS.items() if name not in about]
    nothing = f" Not declared: {_text(', '.join(missing))}." if missing else ""
    yield f"<p><small>In the owner's own words; nothing checks or changes them.{nothing}</small></p>"


def _spent(data: Json) -> Iterator[str]:
    yield "<h2>What it is spent on</h2>"
    if not data["shares"]:
        yield "<p>Nothing yet.</p>"
        return
    limit = data["limits"]["epsilon"]
    bars = "".join(
        f'<i style="width:{100 * min(1.0, share["epsilon"] / limit):.2f}%" title="{_text(_names(share))}">{number}</i>'
        for number, share in enumerate(data["shares"], start=1)
    )
    label = f"epsilon {format_rounded_up(data['promised']['epsilon'])} of {format_rounded_up(limit)} in shares"
    yield f'<div class="bar" role="img" aria-label="{_text(label)}">{bars}</div><small>{_text(label)}</small>'
    shares = ((str(number), *_share(share, limit)) for number, share in enumerate(data["shares"], start=1))
    yield _table(("", "share", "epsilon", "of the limit", "delta", "since"), shares)
    rows = (row for share in data["shares"] for component in share["components"] for row in _tickets(component))
    yield _table(("component", "at most", "each of them releases"), rows)


def _share(share: Json, limit: float) -> tuple[str, ...]:
    since = "declared, not begun" if share["sealed_at"] is None else str(share["sealed_at"])
    part = _percent_up(share["epsilon"] / limit)
    return _names(share), format_rounded_up(share["epsilon"]), part, format_rounded_up(share["delta"], 3), since


def _names(share: Json) -> str:
    return ", ".join(str(component["name"]) for component in share["components"])


def _tickets(component: Json) -> Iterator[tuple[str, ...]]:
    name = str(component["name"])
    if component["limit"] is not None:
        yield name, f"a pool of {component['limit']:.6g} ({component['kind']})", "what its components declare"
    for ticket in component["tickets"]:
        label = "" if ticket["label"] is None else f", label {ticket['label']}"
        shown = f"{ticket['max_count']} x {ticket['template']}{label}"
        yield name, shown, event_words(ticket["event"])


def _per(data: Json) -> str:
    """Returns for what time the promise holds, where it is not for life."""
    return f" about {data['stream']['window']} blocks in a row" if "stream" in data else ""


def _belief(data: Json) -> Iterator[str]:
    epsilon, delta = data["limits"]["epsilon"], data["limits"]["delta"]
    yield "<h2>What it means</h2>"
    asked = {
        "add_remove": "whether one unit is in the data",
        "replace_one": "which of two candidates one unit of the data is",
    }[data["adjacency"]]
    yield (
        f"<p>Somebody who sees every output, knows all other records and the code, and asks {asked}, can be brought to "
        "believe at most this, on average over what is released, when the whole limit is spent:</p>"
    )
    rows = ((f"{prior * 100:g} %", _percent_up(belief(prior, epsilon, delta))) for prior in _PRIORS)
    yield _table(("belief before", "belief afterwards, at most"), rows)
    yield (
        f"<p><small>Delta, {delta:g}, is the chance that everything may come out about a unit; the table counts it as "
        "certainty. A single output can, seldom, bring more. The bound is for the worst case; most "
        "attackers get less.</small></p>"
    )


def _percent_up(share: float) -> str:
    """A share in percent with one digit, rounded up; where that is 100 and the share is less, in words."""
    shown = f"{math.ceil(exact(share) * 1000) / 10:.1f} %"
    return "more than 99.9 %" if 0.999 < share < 1 else shown


def _recipients(data: Json) -> Iterator[str]:
    yield "<h2>Who receives private text</h2>"
    countries = data["ledger"].get("about", {}).get("countries", {})
    rows = [
        (component["name"], component["public"].get("model", ""), host, _country(countries, host) or "not declared")
        for share in data["shares"]
        for component in share["components"]
        for host in hosts_of(component)
    ]
    if rows:
        yield _table(("component", "model", "host, as called", "country, as declared"), rows)
    else:
        yield "<p>No component says that it sends private text anywhere.</p>"
    called = {name for host in report_recipients(data) for name in (host, _without_port(host))}
    if unused := [f"{host} ({place})" for host, place in countries.items() if host not in called]:
        yield f"<p>Declared, and not called by any share: {_text(', '.join(unused))}.</p>"
    if named := data.get("allowed_wrappers"):
        yield f"<p>{_text(wrappers_words(named))}</p>"


def _country(countries: Json, host: str) -> str | None:
    """Returns what was declared of a host, with its port or else without."""
    return countries.get(host) or countries.get(_without_port(host))


def _without_port(host: str) -> str:
    name, _, port = host.rpartition(":")
    return name if name and port.isdecimal() else host


def _limits_of_promise(data: Json) -> Iterator[str]:
    yield "<h2>What is not covered</h2><ul>"
    yield from (f"<li>{_text(line)}</li>" for line in _NOT_COVERED)
    yield f"</ul><p>{_text(data['noise_gap'])}</p>"
    yield f"<p>Declared public, and not checked: {_text('; '.join(data['assumed_public']))}.</p>"


def _checked(problems: Iterable[str] | None) -> Iterator[str]:
    if problems is None:
        return
    found = list(problems)
    yield "<h2>Recomputed</h2>"
    if found:
        yield "<p><b>This report does not hold:</b></p><ul>" + "".join(f"<li>{_text(line)}</li>" for line in found)
        yield "</ul>"
    else:
        yield "<p>Prices, sums and sentences of this report were computed anew when the page was made, and agree.</p>"


def _details(data: Json) -> Iterator[str]:
    yield "<h2>Identity</h2>"
    rows = [("ledger", data["ledger"]["ledger_id"]), ("kept", data["ledger"]["storage"]), ("digest", data["digest"])]
    rows += [(name, version) for name, version in data.get("packages", {}).items()]
    yield _table(("", ""), rows)
    yield f"<p><small>{_text(data['digest_means'])}</small></p>"


def _signatures(data: Json) -> list[str]:
    about = data["ledger"].get("about", {})
    lines = [words for name, words in _FIELDS.items() if name not in about] + ["decision", "date and signature"]
    rows = "".join(f"<tr><th>{line}</th><td></td></tr>" for line in lines)
    return [f'<h2>To be filled in</h2><table class="sign">{rows}</table>']


def _table(head: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """Returns a table; on a narrow screen the cells of one with many columns stand below each other."""
    heads = "".join(f"<th>{_text(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(map(_cell, head, row))}</tr>" for row in rows)
    many = ' class="many"' if len(head) > 2 else ""
    return f"<table{many}><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def _cell(of: str, value: Any) -> str:
    return f'<td data-of="{_text(of)}">{_text(value)}</td>' if of else f"<td>{_text(value)}</td>"


def _text(value: Any) -> str:
    return html.escape(str(value))


__all__ = ["belief", "fragment_of", "page_of"]
