"""Renders a report as Markdown, with every mechanism, opinion and parameter."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from langchain_dpicl.privacy.report_text import bound_words, seen_by, size_words
from langchain_dpicl.privacy.report_words import DIES, rounded_up, wrappers_words

# Names and parameters are untrusted text: they are written as code spans, which have no markup.

Json = Mapping[str, Any]


def markdown_of(data: Json) -> str:
    """Returns a report as Markdown. `data` is what `PrivacyReport.to_dict` returns, in this or an earlier version."""
    parts = (_head, _datasets, _shares, _mechanisms, _opinions, _table, _words, _versions)
    return "\n".join(itertools.chain.from_iterable(part(data) for part in parts)).rstrip() + "\n"


def code(value: Any) -> str:
    """Returns a value as a code span, without markup.

    >>> code("a `b` *c*")
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
    yield f"# Privacy report of {code(ledger['name'])}"
    yield ""
    sums = f"epsilon {rounded_up(promised['epsilon'])}, delta {rounded_up(promised['delta'])}"
    rows = {
        "ledger": f"{code(ledger['ledger_id'])}, {code(ledger['storage'])}",
        "limit": f"epsilon {limits['epsilon']:g}, delta {limits['delta']:g}",
        "promised to shares": f"{sums} (upper bounds, for everything the shares can ever release together)",
        "adjacency": f"{code(data['adjacency'])}: {data['adjacency_means']}",
    }
    yield from table_of(("", ""), rows.items())
    if not ledger["durable"]:
        yield f"**{DIES}**"
        yield ""


def _datasets(data: Json) -> Iterator[str]:
    yield "## Data sets"
    yield ""
    if not data["datasets"]:
        yield "None is bound."
        yield ""
    rows = (
        (
            code(dataset["dataset_id"]),
            code(dataset["unit"]),
            code(size_words(dataset)),
            ", ".join(map(code, dataset["labels"])) or "none",
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
    yield _named(share)
    yield rounded_up(share["epsilon"])
    yield rounded_up(share["delta"])
    yield "not yet: only declared, nothing ran" if share["sealed_at"] is None else code(share["sealed_at"])


def _named(share: Json) -> str:
    names = ", ".join(code(component["name"]) for component in share["components"])
    return f"joint plan of {names}" if share["joint"] else names


def _mechanisms(data: Json) -> Iterator[str]:
    if data["shares"]:
        yield "## Mechanisms and parameters"
        yield ""
    for share in data["shares"]:
        for component in share["components"]:
            yield f"### {code(component['name'])}"
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
            code(ticket["template"]),
            "all" if ticket["label"] is None else code(ticket["label"]),
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
            ("declared gap of the noise, out of delta", rounded_up(gap)),
            *((code(name), code(value)) for name, value in component["public"].items()),
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
    yield _named(share)
    yield rounded_up(pricing["epsilon"])
    yield code(pricing["engine"])
    yield ", ".join(_interval(opinion) for opinion in pricing["opinions"]) or "none"
    yield ", ".join(map(code, pricing["skipped"])) or "none"


def _interval(opinion: Json) -> str:
    low, high = (opinion[end] for end in ("lower", "upper"))
    text = f"at least {low:.6g}" if high is None else f"{low or 0.0:.6g} to {high:.6g}"
    return f"{code(opinion['name'])}: {text}"


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
    yield "None of it was checked: whoever chose it must not have looked at the records."
    for title, name in (("Trust boundary", "trust"), ("Noise", "noise_gap"), ("Origin", "digest_means")):
        yield ""
        yield f"## {title}"
        yield ""
        yield data[name]
        if name == "trust" and (hosts := seen_by(data)):
            yield ""
            yield "Private text is sent to " + ", ".join(map(code, hosts)) + "."
        if name == "trust" and (named := data.get("allowed_wrappers")):
            yield ""
            yield wrappers_words([code(each) for each in named])
    yield ""


def _versions(data: Json) -> Iterator[str]:
    yield "## Versions"
    yield ""
    versions = data.get("packages") or {data["package"]: data["version"]}
    yield "Of the process that made this report; shares may have been declared by others."
    yield ""
    yield from table_of(("package", "version"), ((code(name), code(value)) for name, value in versions.items()))
    yield f"Digest {code(data['digest'])}"


# --- events in words ----------------------------------------------------------------------------------------------


def event_words(event: Json) -> str:
    """Returns a description of an event; of an unknown kind, its name."""
    words = _WORDS.get(event["kind"])
    return f"an event of kind {code(event['kind'])}" if words is None else words(event)


def _inside(event: Json) -> str:
    words = event_words(event)
    return f"({words})" if event["kind"] in {"composed", "repeated", "parallel"} else words


def _composed(event: Json) -> str:
    return " and ".join(_inside(inner) for inner in event["events"])


def _parallel(event: Json) -> str:
    return "; ".join(f"for {code(label)}: {_inside(inner)}" for label, inner in event["branches"])


def _allocated(event: Json) -> str:
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
    "composed": _composed,
    "subsampled": lambda e: f"{_inside(e['event'])} on a secret sample of rate {e['sampling_rate']:.6g}",
    "sampled_ball": lambda e: (
        f"Gaussian noise, multiplier {e['noise_multiplier']:.6g} of the sensitivity, on the sum of a secret sample of "
        f"rate {e['sampling_rate']:.6g}"
    ),
    "allocated": _allocated,
    "parallel": _parallel,
}
