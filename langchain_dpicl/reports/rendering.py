"""Renders a report as plain text, as Markdown, or as one HTML page to print, keep and sign, and holds its sentences."""

from __future__ import annotations

import functools
import html
import importlib.metadata
import itertools
import json
import math
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any

from langchain_dpicl.privacy._validate import Adjacency, exact, fail

PACKAGE = "langchain-dpicl"
PRICED_WITH = ("dp-accounting", "prv-accountant", "numpy", "scipy")
PYTHON = platform.python_version()

PROVED_EPSILON = 32.0

ADJACENCY_WORDS = {
    "add_remove": "two data sets are neighbours if one is the other without one unit",
    "replace_one": "two data sets are neighbours if one is the other with one unit replaced",
}
TRUST = (
    "Trusted: the process that ran, the ledger's storage, and the providers of the models and embeddings that a "
    "component gives private text to: they SEE it. The guarantee covers what the package returned, not what a provider "
    "or its logs keep."
)
ASSUMED_PUBLIC = (
    "the declarations of each data set below, public_size included",
    "templates, instructions, label sets, model names and every parameter shown under `public`",
    "the tickets of each share: events, rates, noise and maximum counts",
    "queries and their number",
)
NOISE_GAP = (
    "The declared gap between ideal and drawn noise is proved for a total epsilon of at most 32 "
    "(docs/proofs/randomness.md)."
)
NOISE_GAP_OPEN = " This ledger's limit is above: float effects are NOT covered beyond a total epsilon of 32."
DIGEST_MEANS = (
    "The digest is no signature: it catches accidents, and whoever rewrites the whole report can write a fitting one. "
    "Origin is proved by the ledger's own chain of hashes, and by a signature held elsewhere."
)
DIES = "This ledger dies with its process: after a restart nothing remembers what was spent."


def wrappers_words(named: Sequence[str]) -> str:
    """Returns the sentence on wrappers that an operator allowed around private calls."""
    return (
        f"Allowed to stand before private calls, on the operator's word that they read no request and no answer: "
        f"{', '.join(named)}."
    )


def check_wrappers(named: Any) -> None:
    """Refuses anything but a list of module names."""
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise fail("allowed_wrappers", "a list of names of modules", named)


def words_of(adjacency: Adjacency, epsilon: float) -> dict[str, Any]:
    """Returns the sentences of a report on a ledger with this adjacency and limit."""
    return {
        "adjacency_means": ADJACENCY_WORDS[adjacency],
        "assumed_public": list(ASSUMED_PUBLIC),
        "trust": TRUST,
        "noise_gap": NOISE_GAP + (NOISE_GAP_OPEN if epsilon > PROVED_EPSILON else ""),
        "digest_means": DIGEST_MEANS,
    }


def own_version() -> str:
    """Returns the version of this package, or "unknown" where it is not installed."""
    return _version_of(PACKAGE)


def package_versions() -> dict[str, str]:
    """Returns the versions of what computes prices in this process."""
    return {
        PACKAGE: own_version(),
        **{name: _version_of(name) for name in PRICED_WITH},
        "python": PYTHON,
    }


def _version_of(name: str) -> str:
    try:
        return _installed_version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


@functools.cache
def _installed_version(name: str) -> str:
    # Cached: each read takes milliseconds, and every release carries a report.
    return importlib.metadata.version(name)


def format_rounded_up(value: float, digits: int = 6) -> str:
    """Returns a bound as text of so many significant digits, never below the bound.

    >>> format_rounded_up(4.3771711), format_rounded_up(1e-06), format_rounded_up(2.0)
    ('4.37718', '1e-06', '2')
    """
    decimal = Decimal(repr(float(value)))
    if not decimal.is_finite():
        return str(float(value))
    return f"{float(Context(prec=digits, rounding=ROUND_CEILING).plus(decimal)):.{digits}g}"


def format_rounded_down(value: float, digits: int = 6) -> str:
    """Returns what is left as text of so many significant digits, never above it.

    >>> format_rounded_down(0.83379, 3)
    '0.833'
    """
    return format_rounded_up(-value, digits).removeprefix("-")


Json = Mapping[str, Any]


def text_of(data: Json) -> str:
    """Returns a report as text. `data` is what `PrivacyReport.to_dict` returns."""
    return "\n".join(_lines(data))


def _lines(data: Json) -> Iterator[str]:
    ledger, limits, promised = data["ledger"], data["limits"], data["promised"]
    yield f"Privacy report of {ledger['name']!r} (ledger {ledger['ledger_id']}, {ledger['storage']})"
    yield f"  limit     epsilon {format_rounded_up(limits['epsilon'])}, delta {format_rounded_up(limits['delta'])}"
    sums = f"epsilon {format_rounded_up(promised['epsilon'])}, delta {format_rounded_up(promised['delta'])}"
    yield f"  promised  {sums} (an upper bound)"
    if "stream" in data:
        yield f"  {data['stream']['promise']}"
        yield "  Longer stays: " + "; ".join(stay_words(row) for row in data["stream"]["longer_stays"]) + "."
    yield f"  adjacency {data['adjacency']}: {data['adjacency_means']}"
    yield from (f"  {name:<9} {text} (declared)" for name, text in about_rows(ledger.get("about", {})))
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
    if hosts := report_recipients(data):
        yield "  Private text is sent to: " + ", ".join(hosts) + "."
    if named := data.get("allowed_wrappers"):
        yield "  " + wrappers_words(named)
    yield "  " + data["noise_gap"]
    yield "  " + data["digest_means"]
    yield "  Made with " + ", ".join(f"{name} {version}" for name, version in data["packages"].items()) + "."
    if not ledger["durable"]:
        yield "  " + DIES


def about_rows(about: Json) -> Iterator[tuple[str, str]]:
    """Yields what the owners of a ledger declared: what, and their text."""
    yield from ((name, str(text)) for name, text in about.items() if name != "countries")
    yield from (("country", f"{host}: {country}") for host, country in about.get("countries", {}).items())


def stay_words(row: Json) -> str:
    """Returns what a stay of several windows costs, in words."""
    if row["epsilon"] is None:
        return f"{row['blocks']} blocks: no finite bound"
    bounds = f"epsilon {format_rounded_up(row['epsilon'], 3)}, delta {format_rounded_up(row['delta'], 3)}"
    return f"{row['blocks']} blocks: at most {bounds}"


def report_recipients(data: Json) -> list[str]:
    """Returns the hosts to which components send private text."""
    return sorted(
        {host for share in data["shares"] for component in share["components"] for host in hosts_of(component)}
    )


def hosts_of(component: Json) -> list[str]:
    """Returns the hosts to which one component sends private text."""
    named = component["public"].get("seen_by")
    hosts = named if isinstance(named, list) else []
    return [host for host in hosts if isinstance(host, str) and host.isprintable()]


def size_words(dataset: Json) -> str:
    """Returns the declared size of a data set, by label where each has one, and a large delta if it allows one."""
    size = dataset["public_size"]
    words = str(size) if isinstance(size, int) else ", ".join(f"{label}: {count}" for label, count in size.items())
    return f"{words} (a delta of up to 1/size is allowed)" if dataset.get("allow_large_delta") is True else words


def _share_lines(share: Json) -> Iterator[str]:
    cost = f"{format_rounded_up(share['epsilon']):>12}{format_rounded_up(share['delta'], 3):>12}"
    state = "declared" if share["sealed_at"] is None else f"sealed {share['sealed_at']}"
    if share["joint"]:
        yield f"  {'(joint plan)':<28}{cost}  {state}"
    for component in share["components"]:
        charge = f"{'':>24}" if share["joint"] else cost
        name = ("  " if share["joint"] else "") + component["name"]
        yield f"  {name:<28}{charge}  {_tickets(component)}" + ("" if share["joint"] else f"; {state}")


def _tickets(component: Json) -> str:
    if component["limit"] is not None:
        return f"pool, {'mu' if component['kind'] == 'gdp' else 'rho'} = {format_rounded_up(component['limit'])}"
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
        yield f"  {bound_words(row):<28}{format_rounded_up(row['delta'], 3):>12}"
    yield "  " + table["method"]
    yield ""


def bound_words(row: Json) -> str:
    """Returns the bound of a row of the table over deltas, never below it, or why there is none."""
    return str(row["note"]) if row["epsilon"] is None else format_rounded_up(row["epsilon"])


# Names and parameters are untrusted text: they are written as code spans, which have no markup.


def markdown_of(data: Json) -> str:
    """Returns a report as Markdown. `data` is what `PrivacyReport.to_dict` returns."""
    parts = (_head, _datasets, _shares, _mechanisms, _opinions, _table, _words, _versions)
    return "\n".join(itertools.chain.from_iterable(part(data) for part in parts)).rstrip() + "\n"


def code_span(value: Any) -> str:
    """Returns a value as a code span, without markup.

    >>> code_span("a `b` *c*")
    '`` a `b` *c* ``'
    """
    text = value if isinstance(value, str) and value.isprintable() else json.dumps(value, ensure_ascii=True)
    text = text.replace("\\|", "\\u007c")  # no escape protects it inside a cell
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    inner = f" {text} " if "`" in text else text or " "
    return f"{fence}{inner}{fence}"


def table_of(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yields a table; nothing where it has no row."""
    names, lines = list(head), [list(row) for row in rows]
    if lines:
        yield _row(names)
        yield _row(["---"] * len(names))
        yield from map(_row, lines)
        yield ""


def _row(cells: Iterable[str]) -> str:
    # A bar ends the cell, even inside a code span.
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _head(data: Json) -> Iterator[str]:
    ledger, limits, promised = data["ledger"], data["limits"], data["promised"]
    yield f"# Privacy report of {code_span(ledger['name'])}"
    yield ""
    sums = f"epsilon {format_rounded_up(promised['epsilon'])}, delta {format_rounded_up(promised['delta'])}"
    rows = {
        "ledger": f"{code_span(ledger['ledger_id'])}, {code_span(ledger['storage'])}",
        "limit": f"epsilon {format_rounded_up(limits['epsilon'])}, delta {format_rounded_up(limits['delta'])}",
        "promised to shares": f"{sums} (upper bounds, for everything the shares can ever release together)",
        **_stream_rows(data, sums),
        "adjacency": f"{code_span(data['adjacency'])}: {data['adjacency_means']}",
    }
    declared = ((f"{name}, as declared", code_span(text)) for name, text in about_rows(ledger.get("about", {})))
    yield from table_of(("", ""), [*rows.items(), *declared])
    if not ledger["durable"]:
        yield f"**{DIES}**"
        yield ""


def _stream_rows(data: Json, sums: str) -> dict[str, str]:
    """Returns what differs where the promise is for windows."""
    if "stream" not in data:
        return {}
    rows = "; ".join(stay_words(row) for row in data["stream"]["longer_stays"])
    promised = f"{sums} (upper bounds, of the window where most is promised)"
    return {"promised to shares": promised, "promise": data["stream"]["promise"], "longer stays": rows}


def _datasets(data: Json) -> Iterator[str]:
    yield "## Data sets"
    yield ""
    if not data["datasets"]:
        yield "None is bound."
        yield ""
    rows = (
        (
            code_span(dataset["dataset_id"]),
            code_span(dataset["unit"]),
            code_span(size_words(dataset)),
            ", ".join(map(code_span, dataset["labels"])) or "none",
        )
        for dataset in data["datasets"]
    )
    yield from table_of(("data set", "unit", "declared size", "labels"), rows)


def _shares(data: Json) -> Iterator[str]:
    yield "## Shares"
    yield ""
    if not data["shares"]:
        yield "None was declared."
        yield ""
    head = ("share", "epsilon", "delta", "sealed by its first reservation at")
    yield from table_of(head, map(_share, data["shares"]))


def _share(share: Json) -> Iterator[str]:
    yield _share_title(share)
    yield format_rounded_up(share["epsilon"])
    yield format_rounded_up(share["delta"])
    yield "not yet: only declared, nothing ran" if share["sealed_at"] is None else code_span(share["sealed_at"])


def _share_title(share: Json) -> str:
    names = ", ".join(code_span(component["name"]) for component in share["components"])
    return f"joint plan of {names}" if share["joint"] else names


def _mechanisms(data: Json) -> Iterator[str]:
    if data["shares"]:
        yield "## Mechanisms and parameters"
        yield ""
    for share in data["shares"]:
        for component in share["components"]:
            yield f"### {code_span(component['name'])}"
            yield ""
            yield from _component(component)


def _component(component: Json) -> Iterator[str]:
    if component["limit"] is not None:
        total = "mu squared" if component["kind"] == "gdp" else "rho"
        what = f"{'mu' if component['kind'] == 'gdp' else 'rho'} {format_rounded_up(component['limit'])}"
        yield f"A pool of {what}: unsampled releases whose parameters are chosen on the way, added up in {total}."
        yield ""
    rows = (
        (
            code_span(ticket["template"]),
            "all" if ticket["label"] is None else code_span(ticket["label"]),
            f"{ticket['max_count']:,}",
            event_words(ticket["event"]),
        )
        for ticket in component["tickets"]
    )
    yield from table_of(("ticket", "label", "at most", "one of them releases"), rows)
    gap = component["implementation_delta"]
    yield from table_of(
        ("parameter", "value"),
        (
            ("declared gap of the noise, out of delta", format_rounded_up(gap)),
            *((code_span(name), code_span(value)) for name, value in component["public"].items()),
        ),
    )


def _opinions(data: Json) -> Iterator[str]:
    if not data["shares"]:
        return
    yield "## Who computed the prices"
    yield ""
    yield (
        "Each price is the upper bound of the engine named. A second opinion is an interval that an independent "
        "computation gives; a share is refused where they disagree. Made when the share was declared."
    )
    yield ""
    yield from table_of(("share", "price", "engine", "second opinions", "not asked"), map(_opinion, data["shares"]))


def _opinion(share: Json) -> Iterator[str]:
    pricing = share["pricing"]
    yield _share_title(share)
    yield format_rounded_up(pricing["epsilon"])
    yield code_span(pricing["engine"])
    yield ", ".join(_interval(opinion) for opinion in pricing["opinions"]) or "none"
    yield ", ".join(map(code_span, pricing["skipped"])) or "none"


def _interval(opinion: Json) -> str:
    low, high = (opinion[end] for end in ("lower", "upper"))
    least = format_rounded_down(low or 0.0)
    text = f"at least {least}" if high is None else f"{least} to {format_rounded_up(high)}"
    return f"{code_span(opinion['name'])}: {text}"


def _table(data: Json) -> Iterator[str]:
    table = data.get("epsilons")
    if table is None:
        return
    yield "## Epsilon at other deltas"
    yield ""
    rows = ((format_rounded_up(row["delta"]), bound_words(row)) for row in table["rows"])
    yield from table_of(("delta", "epsilon"), rows)
    yield table["method"]
    yield ""


def _words(data: Json) -> Iterator[str]:
    yield "## Assumed public"
    yield ""
    yield from (f"- {item}" for item in data["assumed_public"])
    yield ""
    yield "None of it was checked: the person who chose it must not have looked at the records."
    for title, name in (("Trust boundary", "trust"), ("Noise", "noise_gap"), ("Origin", "digest_means")):
        yield ""
        yield f"## {title}"
        yield ""
        yield data[name]
        if name == "trust" and (hosts := report_recipients(data)):
            yield ""
            yield "Private text is sent to " + ", ".join(map(code_span, hosts)) + "."
        if name == "trust" and (named := data.get("allowed_wrappers")):
            yield ""
            yield wrappers_words([code_span(each) for each in named])
    yield ""


def _versions(data: Json) -> Iterator[str]:
    yield "## Versions"
    yield ""
    yield "Of the process that made this report; shares may have been declared by others."
    yield ""
    yield from table_of(
        ("package", "version"), ((code_span(name), code_span(value)) for name, value in data["packages"].items())
    )
    yield f"Digest {code_span(data['digest'])}"


# --- events in words ----------------------------------------------------------------------------------------------


def event_words(event: Json) -> str:
    """Returns a description of an event; of an unknown kind, its name."""
    words = _WORDS.get(event["kind"])
    return f"an event of kind {code_span(event['kind'])}" if words is None else words(event)


def _inside(event: Json) -> str:
    words = event_words(event)
    return f"({words})" if event["kind"] in {"composed", "repeated", "parallel"} else words


def _describe_allocation(event: Json) -> str:
    deal = f"one secret deal of {event['num_batches']:,} batches (rate {format_rounded_up(event['sampling_rate'])})"
    return f"{_inside(event['event'])} on each batch of {deal}"


_WORDS: dict[str, Callable[[Json], str]] = {
    "none": lambda _: "nothing beyond what other tickets of the share pay for",
    "non_private": lambda _: "private data without protection",
    "gaussian": lambda event: (
        f"Gaussian noise, multiplier {format_rounded_down(event['noise_multiplier'])} of the sensitivity"
    ),
    "pure": lambda event: f"a release of pure epsilon {format_rounded_up(event['epsilon'])}",
    "bounded_range": lambda event: (
        f"an exponential mechanism, scores within {format_rounded_up(event['bound'])} noise scales"
    ),
    "failure": lambda event: f"something that tells nothing but with probability {format_rounded_up(event['delta'])}",
    "zcdp": lambda event: f"a release of rho {format_rounded_up(event['rho'])} (zCDP)",
    "repeated": lambda event: f"{event['count']:,} times {_inside(event['event'])}",
    "composed": lambda event: " and ".join(map(_inside, event["events"])),
    "subsampled": lambda e: f"{_inside(e['event'])} on a secret sample of rate {format_rounded_up(e['sampling_rate'])}",
    "sampled_ball": lambda e: (
        f"Gaussian noise, multiplier {format_rounded_down(e['noise_multiplier'])} of the sensitivity, on the sum of a "
        f"secret sample of rate {format_rounded_up(e['sampling_rate'])}"
    ),
    "allocated": _describe_allocation,
    "parallel": lambda event: "; ".join(
        f"for {code_span(name)}: {_inside(inner)}" for name, inner in event["branches"]
    ),
}


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
    """Returns a whole HTML page without scripts, and without anything that is loaded from elsewhere."""
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
        f"<b>{_text(format_rounded_up(limits['epsilon']))}</b> and delta at most "
        f"<b>{format_rounded_up(limits['delta'])}</b>; the shares below may use epsilon "
        f"{_text(format_rounded_up(promised['epsilon']))} of it.</p>"
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
        yield _html_table(("data set", "unit", "declared size"), rows)


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
        yield _html_table(("", ""), rows)
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
    shares = ((str(number), *_share_cells(share, limit)) for number, share in enumerate(data["shares"], start=1))
    yield _html_table(("", "share", "epsilon", "of the limit", "delta", "since"), shares)
    rows = (row for share in data["shares"] for component in share["components"] for row in _ticket_cells(component))
    yield _html_table(("component", "at most", "each of them releases"), rows)


def _share_cells(share: Json, limit: float) -> tuple[str, ...]:
    since = "declared, not begun" if share["sealed_at"] is None else str(share["sealed_at"])
    part = _percent_up(share["epsilon"] / limit)
    return _names(share), format_rounded_up(share["epsilon"]), part, format_rounded_up(share["delta"], 3), since


def _names(share: Json) -> str:
    return ", ".join(str(component["name"]) for component in share["components"])


def _ticket_cells(component: Json) -> Iterator[tuple[str, ...]]:
    name = str(component["name"])
    if component["limit"] is not None:
        limit = format_rounded_up(component["limit"])
        yield name, f"a pool of {limit} ({component['kind']})", "what its components declare"
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
    yield _html_table(("belief before", "belief afterwards, at most"), rows)
    yield (
        f"<p><small>Delta, {format_rounded_up(delta)}, is the chance that everything may come out about a unit; the "
        "table counts it as certainty. A single output can, seldom, bring more. The bound is for the worst case; most "
        "attackers get less.</small></p>"
    )


def _percent_up(share: float) -> str:
    """A share in percent with one digit, rounded up; where that is 100 and the share is less, in words."""
    shown = f"{math.ceil(exact(share) * 1000) / 10:.1f} %"
    return "more than 99.9 %" if 0.999 < share < 1 else shown


def _recipients(data: Json) -> Iterator[str]:
    yield "<h2>Who receives private text</h2>"
    countries = data["ledger"].get("about", {}).get("countries", {})
    # A country is declared of a host with its port, or else without.
    rows = [
        (
            component["name"],
            component["public"].get("model", ""),
            host,
            countries.get(host) or countries.get(_without_port(host)) or "not declared",
        )
        for share in data["shares"]
        for component in share["components"]
        for host in hosts_of(component)
    ]
    if rows:
        yield _html_table(("component", "model", "host, as called", "country, as declared"), rows)
    else:
        yield "<p>No component says that it sends private text anywhere.</p>"
    called = {name for host in report_recipients(data) for name in (host, _without_port(host))}
    if unused := [f"{host} ({place})" for host, place in countries.items() if host not in called]:
        yield f"<p>Declared, and not called by any share: {_text(', '.join(unused))}.</p>"
    if named := data.get("allowed_wrappers"):
        yield f"<p>{_text(wrappers_words(named))}</p>"


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
    rows += [(name, version) for name, version in data["packages"].items()]
    yield _html_table(("", ""), rows)
    yield f"<p><small>{_text(data['digest_means'])}</small></p>"


def _signatures(data: Json) -> list[str]:
    about = data["ledger"].get("about", {})
    lines = [words for name, words in _FIELDS.items() if name not in about] + ["decision", "date and signature"]
    rows = "".join(f"<tr><th>{line}</th><td></td></tr>" for line in lines)
    return [f'<h2>To be filled in</h2><table class="sign">{rows}</table>']


def _html_table(head: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """Returns a table; on a narrow screen the cells of one with many columns stand below each other."""
    heads = "".join(f"<th>{_text(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(map(_cell, head, row))}</tr>" for row in rows)
    many = ' class="many"' if len(head) > 2 else ""
    return f"<table{many}><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def _cell(of: str, value: Any) -> str:
    return f'<td data-of="{_text(of)}">{_text(value)}</td>' if of else f"<td>{_text(value)}</td>"


def _text(value: Any) -> str:
    return html.escape(str(value))
