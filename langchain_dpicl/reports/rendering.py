"""Renders a report as plain text or as Markdown, and holds its sentences."""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import json
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any

from langchain_dpicl.privacy._validate import Adjacency, fail

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
# The sentence of earlier versions, in which every component sent private text to a model.
EARLIER_TRUST = (
    "Trusted: the process that ran, the ledger's storage, and the model provider: it SEES the private prompts. "
    "The guarantee covers what the package returned, not what the provider or its logs keep."
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
    """Refuses anything but a list of module names; reports of earlier versions have an empty list."""
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


def are_words_of(data: Mapping[str, Any], name: str, adjacency: Adjacency, epsilon: float) -> bool:
    """Returns whether a report's sentence is one of this version, or of an earlier one."""
    return data[name] == words_of(adjacency, epsilon)[name] or (name, data[name]) == ("trust", EARLIER_TRUST)


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
    """Returns a report as text. `data` is what `PrivacyReport.to_dict` returns, of this version or an earlier one."""
    return "\n".join(_lines(data))


def _lines(data: Json) -> Iterator[str]:
    ledger, limits, promised = data["ledger"], data["limits"], data["promised"]
    yield f"Privacy report of {ledger['name']!r} (ledger {ledger['ledger_id']}, {ledger['storage']})"
    yield f"  limit     epsilon {limits['epsilon']:g}, delta {limits['delta']:g}"
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
    if versions := data.get("packages"):
        yield "  Made with " + ", ".join(f"{name} {version}" for name, version in versions.items()) + "."
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
    return f"{row['blocks']} blocks: at most epsilon {format_rounded_up(row['epsilon'], 3)}, delta {row['delta']:.3g}"


def report_recipients(data: Json) -> list[str]:
    """Returns the hosts to which components send private text; reports of earlier versions name none."""
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
    return str(row["note"]) if row["epsilon"] is None else format_rounded_up(row["epsilon"])


# Names and parameters are untrusted text: they are written as code spans, which have no markup.


def markdown_of(data: Json) -> str:
    """Returns a report as Markdown. `data` is what `PrivacyReport.to_dict` returns, in this or an earlier version."""
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
        "limit": f"epsilon {limits['epsilon']:g}, delta {limits['delta']:g}",
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
        what = f"{'mu' if component['kind'] == 'gdp' else 'rho'} {component['limit']:.6g}"
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
    text = f"at least {low:.6g}" if high is None else f"{low or 0.0:.6g} to {high:.6g}"
    return f"{code_span(opinion['name'])}: {text}"


def _table(data: Json) -> Iterator[str]:
    table = data.get("epsilons")
    if table is None:
        return
    yield "## Epsilon at other deltas"
    yield ""
    yield from table_of(("delta", "epsilon"), ((f"{row['delta']:.6g}", bound_words(row)) for row in table["rows"]))
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
    versions = data.get("packages") or {data["package"]: data["version"]}
    yield "Of the process that made this report; shares may have been declared by others."
    yield ""
    yield from table_of(
        ("package", "version"), ((code_span(name), code_span(value)) for name, value in versions.items())
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


def _describe_composition(event: Json) -> str:
    return " and ".join(_inside(inner) for inner in event["events"])


def _parallel(event: Json) -> str:
    return "; ".join(f"for {code_span(label)}: {_inside(inner)}" for label, inner in event["branches"])


def _describe_allocation(event: Json) -> str:
    deal = f"one secret deal of {event['num_batches']:,} batches (rate {event['sampling_rate']:.6g})"
    return f"{_inside(event['event'])} on each batch of {deal}"


_WORDS: dict[str, Callable[[Json], str]] = {
    "none": lambda _: "nothing beyond what other tickets of the share pay for",
    "non_private": lambda _: "private data without protection",
    "gaussian": lambda event: f"Gaussian noise, multiplier {event['noise_multiplier']:.6g} of the sensitivity",
    "pure": lambda event: f"a release of pure epsilon {event['epsilon']:.6g}",
    "bounded_range": lambda event: f"an exponential mechanism, scores within {event['bound']:.6g} noise scales",
    "failure": lambda event: f"something that tells nothing but with probability {event['delta']:.6g}",
    "zcdp": lambda event: f"a release of rho {event['rho']:.6g} (zCDP)",
    "repeated": lambda event: f"{event['count']:,} times {_inside(event['event'])}",
    "composed": _describe_composition,
    "subsampled": lambda e: f"{_inside(e['event'])} on a secret sample of rate {e['sampling_rate']:.6g}",
    "sampled_ball": lambda e: (
        f"Gaussian noise, multiplier {e['noise_multiplier']:.6g} of the sensitivity, on the sum of a secret sample of "
        f"rate {e['sampling_rate']:.6g}"
    ),
    "allocated": _describe_allocation,
    "parallel": _parallel,
}
