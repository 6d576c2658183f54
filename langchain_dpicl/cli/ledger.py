"""Runs `dpicl ledger`: create, show, verify, export, anchor, back up and time a ledger."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import json
import math
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from langchain_dpicl.exceptions import (
    CapabilityError,
    ConfigurationError,
    DPICLError,
    LedgerError,
    LedgerRollbackError,
    LedgerUnavailableError,
)
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.reports.rendering import about_rows, format_rounded_down, format_rounded_up

if TYPE_CHECKING:
    from datetime import timedelta

    from langchain_dpicl.budget.budget import Budget
    from langchain_dpicl.privacy.extensions.ledger_anchor import LedgerAnchor
    from langchain_dpicl.privacy.ledger.shares import Share
    from langchain_dpicl.privacy.ledger.state import OpenReservation
    from langchain_dpicl.privacy.ledger.store import LedgerStore
    from langchain_dpicl.reports.ledger_audit import LedgerCheckResult
    from langchain_dpicl.reports.report import PrivacyReport


# Everything in a ledger is public. Addresses of databases are not: no output holds one.


DONE, WRONG = 0, 1
_ADDRESS = re.compile(r"""\b(postgres(?:ql)?):/+[^\s'"/][^\s'"]*""", re.IGNORECASE)
_SECRET = re.compile(r"""\b(password\s*=\s*)(?:'[^']*'|[^\s'"]+)""", re.IGNORECASE)
_WHERE = "SQLite file, postgresql:// address, or exported file"
_SECOND_PLACE = "second place that remembers the last line: a file, made if missing, or a postgresql:// address"
_NOTES = """\
Only `create` makes a ledger; all other commands open an existing one.
Put a password in PGPASSWORD or ~/.pgpass, not in the address: other users can see the arguments of a command.
"""


@dataclass(frozen=True, slots=True)
class CommandOutput:
    """Exit code, text for stdout and complaints for stderr."""

    code: int
    text: str = ""
    complaints: tuple[str, ...] = ()


def redact(text: str, typed: Sequence[str] = ()) -> str:
    """Returns a message without addresses of databases, and without the arguments that may hold a password."""
    for argument in typed:
        if "://" in argument or _SECRET.search(argument):
            for form in (argument, repr(argument), repr(argument)[1:-1]):
                text = text.replace(form, "<address>")
    return _SECRET.sub(r"\1<hidden>", _ADDRESS.sub(r"\1://<address>", text))


def add_ledger(
    commands: Any, *, run: Callable[[argparse.Namespace], int], bench: Callable[[argparse.Namespace], int]
) -> None:
    """Adds `dpicl ledger` and its commands; `bench` runs the one that says what it measures row by row."""
    command = commands.add_parser(
        "ledger",
        help="create, show, verify, export or back up a ledger",
        notes=_NOTES,
    )
    command.set_defaults(run=run, act=None)
    actions = command.add_subparsers(metavar="ACTION", required=True)
    _add_create(actions)
    _add_show(actions)
    _add_verify(actions)
    export = _action(actions, "export", _export, "all lines as JSON, which `verify` and `show` read without a database")
    export.add_argument("--out", type=_file, help="file to make (default: standard output)")
    anchor = _action(actions, "anchor", _adopt, "make a ledger known to an anchor that has never seen it, once")
    anchor.add_argument("--anchor", metavar="FILE", required=True, help=_SECOND_PLACE)
    backup = _action(actions, "backup", _backup, "copy an SQLite ledger while it is in use")
    backup.add_argument("out", type=_file, help="file to make")
    _add_dangling(actions)
    _add_check(actions)
    metrics = _action(actions, "metrics", _metrics, "what is spent, left and open, in the text format of Prometheus")
    metrics.add_argument("--json", action="store_true", help="print JSON and nothing else")
    _add_bench(actions, run=bench)


def _action(
    actions: Any, name: str, act: Callable[[argparse.Namespace], CommandOutput], text: str, *, where: str = _WHERE
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    command.add_argument("where", help=where)
    command.add_argument("--name", help="which of the ledgers there (default: budget, which commands that spend open)")
    command.set_defaults(act=act)
    return command


def _file(text: str) -> Path:
    try:
        return _path(text)
    except ConfigurationError:
        pass
    raise argparse.ArgumentTypeError("expected a file, found an address")


def _page(text: str) -> Path:
    return _ending(text, ".html", ".htm")


def _picture(text: str) -> Path:
    return _ending(text, ".png", ".pdf", ".svg")


def _ending(text: str, *endings: str) -> Path:
    """Returns a file that is written anew: by its name no ledger, anchor or file of records."""
    path = _file(text)
    if path.suffix.lower() not in endings:
        found = repr(path.suffix) if path.suffix else "no ending"
        raise argparse.ArgumentTypeError(f"expected a file that ends in {', '.join(endings)}, found {found}")
    return path


def _add_create(actions: Any) -> None:
    words = "make a new ledger, once; an existing one is never touched"
    command = _action(actions, "create", _create, words, where="SQLite file to make, or postgresql:// address")
    limit = "limit; at most 1/(10 * all declared units)"
    command.add_argument("--epsilon", type=float, required=True, help="limit for the ledger's whole life, or --per")
    command.add_argument("--delta", type=float, required=True, help=limit)
    command.add_argument("--adjacency", choices=("add_remove", "replace_one"), default="add_remove")
    per = 'promise for windows of the records\' own time, such as "30 days", in place of their life'
    command.add_argument("--per", default="life", metavar="WINDOW", help=per)
    command.add_argument("--anchor", metavar="FILE", help=_SECOND_PLACE)
    about = command.add_argument_group("public texts for those who approve; they never change, and nothing checks them")
    for name, text in _ABOUT.items():
        about.add_argument(f"--{name}", metavar="TEXT", help=text)
    text = "where a host stands that receives private text; repeat"
    about.add_argument("--country", metavar="HOST=COUNTRY", action="append", default=[], help=text)


_ABOUT = {
    "purpose": "what the records are used for",
    "owner": "who answers for the ledger",
    "approver": "who agreed to the limits",
    "retention": "how long records, ledger and releases are kept",
}


def _about(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns what was declared, in the form that `Budget` takes."""
    texts = {name: text for name in _ABOUT if (text := getattr(arguments, name)) is not None}
    parts = (pair.rpartition("=") for pair in arguments.country)
    pairs = [(host.strip(), country.strip()) for host, _, country in parts]
    if any(not host for host, _ in pairs) or len(dict(pairs)) < len(pairs):
        raise ConfigurationError("--country: expected HOST=COUNTRY, each host once, found something else.")
    return {**texts, **({"countries": dict(pairs)} if pairs else {})}


def _add_show(actions: Any) -> None:
    command = _action(actions, "show", _show, "limits, what was promised and what is left, shares, open reservations")
    command.add_argument("--anchor", metavar="FILE", help="refuse a ledger that went back behind it")
    command.add_argument("--day", metavar="DAY", help="of a ledger for windows: what those with this day have left")
    form = command.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON and nothing else")
    form.add_argument("--markdown", action="store_true", help="print the whole report as Markdown")
    command.add_argument("--deltas", metavar="D,D,...", help="also bound epsilon at these deltas (slow)")
    command.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="with --deltas or --curve: begin no price after so long (default: 60)",
    )
    command.add_argument("--plot", type=_picture, metavar="FILE", help="draw what is promised: .png, .pdf or .svg")
    command.add_argument(
        "--curve", type=_picture, metavar="FILE", help="draw epsilon over delta (slow): .png, .pdf or .svg"
    )
    command.add_argument("--html", type=_page, metavar="FILE", help="write the report as a page to print and sign")
    words = "write the report to a new file as JSON, which `dpicl report` signs and verifies"
    command.add_argument("--report", type=_file, metavar="FILE", help=words)


def _add_verify(actions: Any) -> None:
    command = _action(actions, "verify", _verify, "recompute chain, rules and prices from the entries alone")
    command.add_argument("--anchor", metavar="FILE", help="the line it remembers has to be there")
    command.add_argument("--receipt", type=_file, metavar="FILE", action="append", default=[], help="receipts as JSON")
    command.add_argument("--json", action="store_true", help="print JSON and nothing else")


def _add_dangling(actions: Any) -> None:
    command = _action(actions, "dangling", _dangling, "reservations neither committed nor given back, page by page")
    command.add_argument("--older", type=_duration, metavar="TIME", help="only those of so long ago: 90s, 30m, 1h, 2d")
    command.add_argument("--after", type=int, default=0, metavar="LINE", help="begin behind this line")
    command.add_argument("--limit", type=int, default=1000, metavar="N", help="at most so many (default: 1000)")
    command.add_argument("--json", action="store_true", help="print JSON and nothing else")


def _add_check(actions: Any) -> None:
    command = _action(actions, "check", _check, "which parts are charged; exit code 1 if one of them reaches --warn")
    command.add_argument("--warn", type=_part, default=0.8, metavar="PART", help="above 0, at most 1 (default: 0.8)")
    command.add_argument("--component", metavar="NAME", help="this share alone (default: the ledger and all shares)")
    command.add_argument("--json", action="store_true", help="print JSON and nothing else")


def _part(text: str) -> float:
    try:
        part = float(text)
    except ValueError:
        part = 0.0
    if not 0.0 < part <= 1.0:
        raise argparse.ArgumentTypeError(f"expected a number above 0 and at most 1, found {text!r}")
    return part


def _duration(text: str) -> timedelta:
    from datetime import timedelta

    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if found is None or len(found[1]) > _LONGEST:
        raise argparse.ArgumentTypeError(f"expected a time such as 90s, 30m, 1h or 2d, found {text!r}")
    return timedelta(**{_UNITS[found[2]]: float(found[1])})


_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_LONGEST = 8  # digits that a `timedelta` of days can hold


def _add_bench(actions: Any, *, run: Callable[[argparse.Namespace], int]) -> None:
    text = "measure ledgers on this disk: plain fsync, pairs of reserve and commit per second, waits"
    command = actions.add_parser("bench", help=text, description=text[0].upper() + text[1:] + ".")
    command.add_argument("where", type=_file, metavar="PATH", help="a folder, or a file beside which to measure")
    command.add_argument(
        "--processes", type=int, nargs="+", default=PROCESSES, metavar="N", help="at once (default: 1 8 64)"
    )
    command.add_argument("--seconds", type=float, default=3.0, help="for each of them (default: 3)")
    command.add_argument("--json", action="store_true", help="print JSON and nothing else")
    command.set_defaults(run=run)


# --- opening ------------------------------------------------------------------------------------------------------


def _place(where: str) -> str | Path:
    """Returns an address as it is, and anything else as a path; refuses an address of another spelling."""
    from langchain_dpicl.stores import as_place, is_address

    return where if is_address(as_place(where)) else Path(where)


def _path(where: str) -> Path:
    place = _place(where)
    if isinstance(place, str):  # a path would swallow a slash, and what hides addresses would miss it
        raise ConfigurationError("ledger: expected a path, found an address.")
    return place


def _open_ledger(arguments: argparse.Namespace) -> contextlib.AbstractContextManager[LedgerStore]:
    return opened_store(arguments.where, arguments.name)


@contextlib.contextmanager
def opened_store(where: str, name: str | None) -> Iterator[LedgerStore]:
    """Opens an existing ledger, or an exported file, for as long as the command runs."""
    store = _store(where, name)
    try:
        yield store
    finally:
        close: Callable[[], None] = getattr(store, "close", lambda: None)
        close()


def _store(where: str, name: str | None) -> LedgerStore:
    from langchain_dpicl.stores import open_store

    place = _place(where)
    try:
        return open_store(place, name=name or "budget")
    except LedgerUnavailableError:
        raise
    except LedgerError as error:
        fault = error
    from langchain_dpicl.reports.ledger_audit import is_export, read_export

    if isinstance(place, str) or not is_export(place):
        raise fault
    export = read_export(place)
    if name not in {None, export.header().name}:
        raise LedgerError(f"--name: expected {export.header().name!r}, which the file holds, found {name!r}.")
    return export


def _anchor(arguments: argparse.Namespace, *, may_make: bool = False) -> LedgerAnchor | None:
    """Returns the anchor of an existing ledger, or None."""
    from langchain_dpicl.budget.handler import anchor_at
    from langchain_dpicl.stores import check_apart

    place = None if arguments.anchor is None else _place(arguments.anchor)
    check_apart(lambda: _place(arguments.where), lambda: place)
    return anchor_at(lambda: place, may_make=may_make)


# --- commands -----------------------------------------------------------------------------------------------------


def _create(arguments: argparse.Namespace) -> CommandOutput:
    from langchain_dpicl.budget.budget import Budget
    from langchain_dpicl.budget.handler import anchor_at, make_store_at
    from langchain_dpicl.stores import check_apart
    from langchain_dpicl.stores.sqlite_file import why_lost

    where, second = (None if place is None else _place(place) for place in (arguments.where, arguments.anchor))
    limits: dict[str, Any] = {name: getattr(arguments, name) for name in ("epsilon", "delta", "adjacency", "per")}
    limits |= {"name": arguments.name or "budget", "about": _about(arguments)}
    Budget(**limits)  # in memory: refuses bad limits before anything is made
    check_apart(lambda: where, lambda: second)
    with contextlib.ExitStack() as opened:
        store = make_store_at(lambda: where, limits["name"]).store  # or the room that a stopped creation left
        opened.callback(getattr(store, "close", lambda: None))
        # Only now: where a ledger stands already, no anchor is left behind that knows nothing.
        anchor = anchor_at(lambda: second, may_make=True)
        budget = Budget(**limits, store=store, anchor=anchor)
        words = "none: a restored older copy would not be detected" if anchor is None else anchor.description
        files = [place for place in (where, second) if isinstance(place, Path)]
        lost = tuple(f"{place}: {why}" for place in files if (why := why_lost(place.resolve().parent)) is not None)
        return CommandOutput(DONE, "\n".join(_creation_lines(budget, store, words)), lost)


def _creation_lines(budget: Budget, store: LedgerStore, anchor: str) -> Iterator[str]:
    yield f"ledger {budget.name!r} ({budget.ledger_id}), {store.description}"
    per = _per_words(budget.per)
    limit = f"epsilon {format_rounded_up(budget.epsilon)}, delta {format_rounded_up(budget.delta)}"
    yield f"  limit     {limit}{per}, adjacency {budget.adjacency}"
    yield from (f"  {name:<9} {text}" for name, text in about_rows(budget.about))
    yield f"  anchor    {anchor}"


def _per_words(per: str) -> str:
    """Returns what a limit is for; nothing where it is for life."""
    return "" if per == "life" else f" per {per} of the records' time"


def _adopt(arguments: argparse.Namespace) -> CommandOutput:
    """Makes a ledger known to an anchor, as it stands: nothing can tell whether it is the newest copy."""
    from langchain_dpicl.budget.budget import Budget
    from langchain_dpicl.reports.ledger_audit import ExportedLedger

    _place(arguments.anchor)
    with _open_ledger(arguments) as store:
        if isinstance(store, ExportedLedger):
            raise ConfigurationError("anchor: expected the ledger itself, found an exported file. Anchor the ledger.")
        Budget.open(store)  # a broken one is refused before an anchor is made
        anchor = _anchor(arguments, may_make=True)
        budget = Budget.open(store, anchor=anchor, adopt_anchor=True)
        known = None if anchor is None else anchor.read(budget.ledger_id)
        if anchor is None or known is None:
            raise LedgerUnavailableError("anchor: expected an entry for this ledger, found none. Run it again.")
        words = f"{anchor.description} remembers line {known[0]}; from now on, open the ledger with it"
        return CommandOutput(DONE, f"ledger {budget.name!r} ({budget.ledger_id}): {words}")


def _show(arguments: argparse.Namespace) -> CommandOutput:
    from langchain_dpicl.budget.budget import Budget
    from langchain_dpicl.reports.verify import UNREADABLE

    deltas = _deltas(arguments.deltas)
    try:
        with _open_ledger(arguments) as store:
            _check_anchor(arguments, store)
            budget = Budget.open(store)
            report = budget.report()
            report = report if deltas is None else report.with_epsilons(deltas, max_seconds=arguments.seconds)
            return CommandOutput(DONE, _report_text(budget, report, arguments))
    except UNREADABLE as error:
        if isinstance(error, DPICLError):
            raise
        fault = type(error).__name__
    msg = f"ledger: its entries cannot be shown ({fault}): something wrote what this package never writes."
    raise LedgerError(f"{msg} `dpicl ledger verify` says more.")


def _check_anchor(arguments: argparse.Namespace, store: LedgerStore) -> None:
    """Refuses a ledger that went back behind the anchor, and moves neither."""
    from langchain_dpicl.reports.ledger_audit import anchor_problems

    anchor, header = _anchor(arguments), store.header()
    if anchor is not None and header is not None:
        for problem in anchor_problems(anchor, header, store):
            raise LedgerRollbackError(problem)


def _deltas(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(item) for item in text.split(",")]
    except ValueError:
        raise ConfigurationError(f"--deltas: expected numbers like 1e-6,1e-7, found {text!r}.") from None


def _report_text(budget: Budget, report: PrivacyReport, arguments: argparse.Namespace) -> str:
    remaining: dict[str, Any] = {"epsilon": budget.remaining_epsilon, "delta": budget.remaining_delta}
    if arguments.day is not None:
        left = budget.remaining_at(arguments.day)
        remaining["at"] = {"day": arguments.day, "epsilon": left[0], "delta": left[1]}
    open_ones = [_plain(entry) for entry in _all_open(budget)]
    _write_files(report, arguments)
    if arguments.json:
        data = {
            "report": report.to_dict(),
            "remaining": remaining,
            "use": budget.use().ledger_dict(),
            "dangling": open_ones,
        }
        return json.dumps(data, indent=2, allow_nan=False)
    if arguments.markdown:
        return report.to_markdown().rstrip() + "\n\n" + "\n".join(_operator_markdown(remaining, open_ones))
    of_day = remaining.get("at")
    text = [report.to_text(), "", *remaining_text(budget), *([] if of_day is None else [_day_text(of_day)])]
    return "\n".join([*text, *_operator_text(open_ones)])


def _day_text(left: dict[str, Any]) -> str:
    epsilon, delta = format_rounded_down(left["epsilon"]), format_rounded_down(left["delta"])
    return f"  left in every window with {left['day']}: epsilon {epsilon}, delta {delta}"


def _all_open(budget: Budget) -> Iterator[OpenReservation]:
    page: Sequence[OpenReservation] = budget.dangling()
    while page:
        yield from page
        page = budget.dangling(after=page[-1].entry)


def _write_files(report: PrivacyReport, arguments: argparse.Namespace) -> None:
    from langchain_dpicl.reports import plots

    if arguments.report is not None:  # first: it may be refused
        write_new(arguments.report, report.to_json(), flag="--report")
    if arguments.html is not None:
        report.save_html(arguments.html)
    if arguments.plot is not None:
        plots.plot_budget(report, arguments.plot)
    if arguments.curve is not None:
        plots.plot_epsilon_delta(report, arguments.curve, max_seconds=arguments.seconds)


def _plain(entry: Any) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in _OPEN_FIELDS}


_OPEN_FIELDS = ("entry", "component", "template", "label", "count", "stamp", "holder")


_OPEN_WORDS = (
    "Reservations neither committed nor given back: running now, held by an idle process, or left by a crash. All of "
    "them count as spent. For the operator: not part of a report that is published beside releases."
)


def remaining_text(budget: Budget) -> Iterator[str]:
    """Yields what is left of a budget, and of the shares that its components have sealed."""
    epsilon, delta = format_rounded_down(budget.remaining_epsilon), format_rounded_down(budget.remaining_delta)
    yield f"  remaining epsilon {epsilon}, delta {delta}"
    use = budget.use()
    for component, tickets in use.tickets.items():
        yield f"    of {component}: {tickets.left:,} tickets"
    for component, amount in use.pools.items():
        yield f"    of {component}: {format_rounded_down(amount)} of its pool"


def _operator_text(open_ones: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield f"  open reservations: {len(open_ones)}"
    yield from (_open_line(entry) for entry in open_ones)
    if open_ones:
        yield "  " + _OPEN_WORDS


def _open_line(entry: dict[str, Any]) -> str:
    label = "" if entry["label"] is None else f" for label {entry['label']!r}"
    what = f"{entry['component']!r}, {entry['template']} x {entry['count']}{label}"
    holder = "" if entry["holder"] is None else f", process {entry['holder']}"
    return f"    line {entry['entry']}, {entry['stamp']}: {what}{holder}"


def _operator_markdown(amounts: dict[str, Any], open_ones: Sequence[dict[str, Any]]) -> Iterator[str]:
    from langchain_dpicl.reports.rendering import code_span, table_of

    yield "## For the operator"
    yield ""
    remaining = f"epsilon {format_rounded_down(amounts['epsilon'])}, delta {format_rounded_down(amounts['delta'])}"
    yield f"Remaining: {remaining}. Open reservations: {len(open_ones)}."
    if "at" in amounts:
        yield _day_text(amounts["at"]).strip() + "."
    yield ""
    names = ("entry", "stamp", "component", "template", "label", "count")
    yield from table_of(names, ([code_span(entry[name]) for name in names] for entry in open_ones))
    if open_ones:
        yield _OPEN_WORDS


def _verify(arguments: argparse.Namespace) -> CommandOutput:
    """Verifies a ledger; any reason why it cannot be shown to be complete makes the exit code 1."""
    from langchain_dpicl.reports.ledger_audit import check_ledger, read_receipts
    from langchain_dpicl.reports.verify import UNREADABLE, describe_fault

    try:
        receipts = [receipt for path in arguments.receipt for receipt in read_receipts(path)]
        with _open_ledger(arguments) as store:
            checked = check_ledger(store, anchor=_anchor(arguments), receipts=receipts)
    except (OSError, *UNREADABLE) as error:
        fault = str(error) if isinstance(error, (DPICLError, OSError)) else describe_fault(error)
        text = json.dumps({"ok": False, "problems": [redact(fault, [arguments.where])]})
        return CommandOutput(WRONG, text if arguments.json else "", (f"not verified: {fault}",))
    complaints = tuple(f"not verified: {problem}" for problem in checked.problems)
    text = (
        json.dumps(checked.to_dict(), indent=2)
        if arguments.json
        else "\n".join(_verification_lines(checked, arguments))
    )
    return CommandOutput(WRONG if complaints else DONE, text, complaints)


def _verification_lines(ledger: LedgerCheckResult, arguments: argparse.Namespace) -> Iterator[str]:
    header = ledger.header
    yield f"ledger {header.name!r} ({header.ledger_id}): {'NOT ' if ledger.problems else ''}verified"
    yield f"  lines     {ledger.lines}, last {ledger.head}"
    per = _per_words("life" if header.stream is None else header.stream.words)
    limit = f"epsilon {format_rounded_up(header.epsilon)}, delta {format_rounded_up(header.delta)}"
    yield f"  limit     {limit}{per}, adjacency {header.adjacency}"
    charged = f"epsilon {format_rounded_up(ledger.promised)}, delta {format_rounded_up(ledger.delta)}"
    yield f"  shares    {ledger.shares}, charged {charged}"
    yield f"  prices    epsilon {format_rounded_up(ledger.epsilon)}, computed again from the tickets"
    yield from (f"  checked   {words}" for words in ledger.checked)
    if arguments.anchor is None:
        yield "  no anchor was given: an older copy of this ledger would verify too"


def _export(arguments: argparse.Namespace) -> CommandOutput:
    from langchain_dpicl.reports.ledger_audit import ExportedLedger, export_lines

    with _open_ledger(arguments) as store:
        if isinstance(store, ExportedLedger):
            raise ConfigurationError("export: expected a ledger, found a file that is an export. Copy the file.")
        lines = list(export_lines(store))
    if arguments.out is None:
        text = "\n".join(lines)
        # Within JSON every such letter stands in a string, and a reader of the escapes computes the same hashes.
        return CommandOutput(DONE, text if writes_utf8(sys.stdout) else re.sub(r"[^\x00-\x7f]", _escaped, text))
    write_new(arguments.out, "\n".join(lines) + "\n")
    return CommandOutput(DONE, f"{len(lines) - 2} lines of {store.description} in {arguments.out}")


def writes_utf8(stream: TextIO) -> bool:
    """Whether a stream is read as JSON has to be; others show only its ASCII."""
    return codecs.lookup(stream.encoding or "utf-8").name == "utf-8"


def _escaped(letter: re.Match[str]) -> str:
    return json.dumps(letter[0])[1:-1]


def write_new(path: Path, text: str, *, flag: str = "--out") -> None:
    """Writes a file that is not there yet; `flag` names it where it is."""
    from langchain_dpicl.stores.sqlite_file import check_new_name

    check_new_name(path, flag)
    try:
        file = path.open("x", encoding="utf-8")
    except FileExistsError:
        raise ConfigurationError(f"{flag}: expected a file that is not there yet, found {path}.") from None
    try:
        with file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _dangling(arguments: argparse.Namespace) -> CommandOutput:
    from langchain_dpicl.budget.budget import Budget

    with _open_ledger(arguments) as store:
        page = {"after": arguments.after, "limit": arguments.limit, "older_than": arguments.older}
        open_ones = [_plain(entry) for entry in Budget.open(store).dangling(**page)]
    if arguments.json:
        return CommandOutput(DONE, json.dumps({"dangling": open_ones}, indent=2))
    return CommandOutput(DONE, "\n".join(_dangling_lines(open_ones, arguments.limit)))


def _dangling_lines(open_ones: Sequence[dict[str, Any]], limit: int) -> Iterator[str]:
    yield f"open reservations: {len(open_ones)}{' on this page' if len(open_ones) == limit else ''}"
    yield from (_open_line(entry) for entry in open_ones)
    if len(open_ones) == limit:
        yield f"  the next page: --after {open_ones[-1]['entry']}"
    if open_ones:
        yield "  " + _OPEN_WORDS


def _metrics(arguments: argparse.Namespace) -> CommandOutput:
    from langchain_dpicl.budget.budget import Budget
    from langchain_dpicl.budget.metrics import prometheus_text

    with _open_ledger(arguments) as store:
        budget = Budget.open(store)
        use = budget.use()
        name, ledger_id = budget.name, budget.ledger_id
    if arguments.json:
        data = {"ledger": name, "ledger_id": ledger_id, **use.ledger_dict()}
        return CommandOutput(DONE, json.dumps(data, indent=2))
    return CommandOutput(DONE, prometheus_text(use, ledger=name, ledger_id=ledger_id, process=False).rstrip("\n"))


def _check(arguments: argparse.Namespace) -> CommandOutput:
    from langchain_dpicl.budget.budget import Budget

    with _open_ledger(arguments) as store:
        parts = Budget.open(store).spent_parts()
    if (only := arguments.component) is not None:
        if only not in parts:
            known = ", ".join(repr(name) for name in parts if name is not None) or "none"
            raise ConfigurationError(f"--component: expected a share of this ledger, found {only!r}. Shares: {known}.")
        parts = {only: parts[only]}
    reached = [name for name, part in parts.items() if part >= arguments.warn]
    complaints = tuple(
        f"{_share_word(name)}: {_percent(parts[name])} charged, warned from {arguments.warn:.0%} on" for name in reached
    )
    shown = [{"component": name, "charged": part, "reached": name in reached} for name, part in parts.items()]
    text = (
        json.dumps({"ok": not reached, "warn": arguments.warn, "parts": shown})
        if arguments.json
        else "\n".join(f"{_percent(part):>6}  {_share_word(name)}" for name, part in parts.items())
    )
    return CommandOutput(WRONG if reached else DONE, text, complaints)


def _share_word(name: str | None) -> str:
    return "the ledger's epsilon and delta" if name is None else f"share {name!r}"


def _percent(part: float) -> str:
    return f"{part:.1%}"


def run_bench(arguments: argparse.Namespace, *, say: Callable[[str], object]) -> int:
    """Runs `dpicl ledger bench`."""
    rows = _silence if arguments.json else say
    found = bench(arguments.where, processes=arguments.processes, seconds=arguments.seconds, say=rows)
    if arguments.json:
        say(json.dumps(found, indent=2, allow_nan=False))
    return WRONG if any(row["refused"] for row in found["rows"]) else DONE


def _silence(_: str) -> None:
    """Says nothing: only the JSON is wanted."""


def _backup(arguments: argparse.Namespace) -> CommandOutput:
    with _open_ledger(arguments) as store:
        make: Callable[[Path], object] | None = getattr(store, "backup", None)
        if make is None:
            advice = "Use `dpicl ledger export`, or the database's own tools (pg_dump)."
            raise ConfigurationError(f"backup: expected an SQLite ledger, found {store.description}. {advice}")
        make(arguments.out)
    advice = "Never restore it over a ledger in use: what was spent since would be forgotten. An anchor would tell."
    return CommandOutput(DONE, f"{store.description} copied to {arguments.out}. {advice}")


PROCESSES = (1, 8, 64)
TICKETS = 10_000_000
_COLUMNS = ("processes", "pairs/s", "p50 ms", "p99 ms", "max ms", "cpu ms", "least", "most", "refused")
HEADING = "{:>9}{:>10}{:>9}{:>10}{:>10}{:>8}{:>8}{:>8}{:>9}".format(*_COLUMNS)


@dataclass(frozen=True, slots=True)
class Rate:
    """What processes got from one ledger at once.

    Attributes:
      processes: how many there were.
      pairs: of reserve and commit per second, of all processes together.
      p50: median wait for a pair, in milliseconds.
      p99: 99th percentile of it.
      longest: wait for a pair.
      cpu: milliseconds of a processor that a pair took in its process, without those of a database server.
      least: pairs of the process that got fewest.
      most: pairs of the process that got most.
      refused: pairs that failed.
      fault: what the first of them raised, or why a process ended; "" if none.
    """

    processes: int
    pairs: float
    p50: float
    p99: float
    longest: float
    cpu: float
    least: int
    most: int
    refused: int
    fault: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON form; what was not measured is null."""
        values = asdict(self).items()
        return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in values}

    def line(self) -> str:
        """Returns the rate as a row below `HEADING`."""
        waits = f"{self.p50:>9.2f}{self.p99:>10.2f}{self.longest:>10.2f}{self.cpu:>8.2f}"
        return f"{self.processes:>9}{self.pairs:>10,.0f}{waits}{self.least:>8}{self.most:>8}{self.refused:>9}"


def declared(budget: Budget) -> Share:
    """Returns the share that all processes take tickets of."""
    from langchain_dpicl.privacy.accounting.events import PureEvent
    from langchain_dpicl.privacy.ledger.tickets import Ticket

    ticket = Ticket("query", PureEvent(1e-9), max_count=TICKETS, refundable=True)
    return budget.declare("bench", tickets=[ticket], epsilon=1.0)


def spend(share: Share, *, until: float) -> dict[str, Any]:
    """Reserves, burns and commits one ticket at a time until `time.monotonic()` says so; returns waits and refusals.

    One ticket at least: a busy machine may give this process no time before the end.
    """
    from langchain_dpicl.budget.budget import Waits

    waits, refused, fault, processor = Waits(), 0, "", time.process_time()
    is_over = False
    while not is_over:
        start = time.perf_counter()
        try:
            reservation = share.reserve("query")
            reservation.burn()
            reservation.commit()
        except DPICLError as error:
            fault = fault or f"{type(error).__name__}: {error}"
            refused += 1
        else:
            waits.add(time.perf_counter() - start)
        is_over = time.monotonic() >= until
    cpu = time.process_time() - processor
    return {"waits": waits.to_dict(), "cpu": cpu, "refused": refused, "fault": fault}


def measure(opened: Callable[[], Budget], processes: int, *, seconds: float) -> Rate:
    """Lets forked processes open the ledger, wait for each other, and spend at once."""
    if not hasattr(os, "fork"):
        raise CapabilityError(f"bench: expected a system that can fork, found {sys.platform}. Measure on another one.")
    ready, start = os.pipe(), os.pipe()
    children: dict[int, int] = {}
    try:
        for _ in range(processes):
            pid, out = _started(opened, ready, start, seconds)
            children[pid] = out
        os.close(ready[1])
        ready = ready[0], -1
        # A process that fails to open the ledger closes its end without a word.
        for _ in children:
            os.read(ready[0], 1)
        os.close(start[1])  # its end starts all of them
        start = start[0], -1
        found = [json.loads(_all_of(out) or _died()) for out in children.values()]
    except BaseException:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        raise
    finally:
        for pid, out in children.items():
            os.waitpid(pid, 0)
            os.close(out)
        for end in (*ready, *start):
            if end >= 0:
                os.close(end)
    return _rate(found, seconds)


def _died() -> str:
    from langchain_dpicl.budget.budget import Waits

    return json.dumps({"waits": Waits().to_dict(), "cpu": 0.0, "refused": 1, "fault": "the process was killed"})


def _rate(found: list[dict[str, Any]], seconds: float) -> Rate:
    from langchain_dpicl.budget.budget import Waits

    counts = [Waits.merged([each["waits"]]).count for each in found]
    whole = Waits.merged(each["waits"] for each in found)
    p50, p99, longest = (1e3 * whole.quantile(part) for part in (0.5, 0.99, 1.0))
    refused = sum(each["refused"] for each in found)
    fault = next((each["fault"] for each in found if each["fault"]), "")
    pairs = sum(counts)
    return Rate(
        processes=len(found),
        pairs=pairs / seconds,
        p50=p50,
        p99=p99,
        longest=longest,
        cpu=1e3 * sum(each["cpu"] for each in found) / pairs if pairs else math.nan,
        least=min(counts),
        most=max(counts),
        refused=refused,
        fault=fault,
    )


def _all_of(end: int) -> bytes:
    return b"".join(iter(lambda: os.read(end, 65536), b""))


def _started(
    opened: Callable[[], Budget], ready: tuple[int, int], start: tuple[int, int], seconds: float
) -> tuple[int, int]:
    """Forks a process that spends; returns its number and the end of the pipe that its result comes through."""
    there, out = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        os.close(out)
        return pid, there
    try:
        os.close(start[1])
        os.close(ready[0])
        try:
            budget = opened()
            share = declared(budget)
            os.write(ready[1], b".")
            os.close(ready[1])
            os.read(start[0], 1)
            found = spend(share, until=time.monotonic() + seconds)
            budget.close()
        except Exception as error:  # noqa: BLE001  shown by the parent
            found = json.loads(_died()) | {"fault": f"{type(error).__name__}: {error}"}
        with os.fdopen(out, "w") as file:
            json.dump(found, file)
    finally:
        os._exit(0)


def sync_ms(folder: Path, *, times: int = 100) -> tuple[float, float]:
    """Returns median and 99th percentile of writing 4 KiB and waiting until the disk has them, in milliseconds."""
    from langchain_dpicl.budget.budget import Waits

    waits = Waits()
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(times):
            start = time.perf_counter()
            file.write(b"\0" * 4096)
            getattr(os, "fdatasync", os.fsync)(file.fileno())
            waits.add(time.perf_counter() - start)
    return 1e3 * waits.quantile(0.5), 1e3 * waits.quantile(0.99)


def new_ledger(path: Path) -> None:
    """Makes the ledger that is measured: it binds no data."""
    from langchain_dpicl.budget.budget import Budget
    from langchain_dpicl.stores.sqlite_ledger import SQLiteStore

    with SQLiteStore.new(path) as store:
        Budget(epsilon=1.0, delta=1e-6, store=store)


def bench(place: Path, *, processes: Iterable[int], seconds: float, say: Callable[[str], object]) -> dict[str, Any]:
    """Measures SQLite ledgers in a folder of their own beside `place`, and removes them; says each row as it comes."""
    from langchain_dpicl.privacy.extensions.durable_writer import MOST_HELD

    beside, counts = place if place.is_dir() else place.parent, list(processes)
    if not beside.is_dir():
        raise fail("PATH", "a folder, or a file in one", beside)
    if not counts or min(counts) < 1:
        raise fail("--processes", "numbers of at least 1", counts)
    if not 0.0 < seconds < math.inf:
        raise fail("--seconds", "a time above 0", seconds)
    with tempfile.TemporaryDirectory(prefix=".dpicl-bench-", dir=beside) as name:
        folder = Path(name)
        say(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; temporary ledgers in {beside}")
        disk = sync_ms(folder)
        say(f"4 KiB on the disk: p50 {disk[0]:.2f}, p99 {disk[1]:.2f} ms: {1e3 / disk[0]:,.0f} a second")
        say(f"held {HEADING}")
        rows = [
            {"most_held": most_held, **_rated(folder, count, most_held=most_held, seconds=seconds, say=say).to_dict()}
            for most_held in (1, MOST_HELD)
            for count in counts
        ]
    return {"sync_ms": {"p50": disk[0], "p99": disk[1]}, "rows": rows}


def _rated(folder: Path, count: int, *, most_held: int, seconds: float, say: Callable[[str], object]) -> Rate:
    from langchain_dpicl.budget.budget import Budget
    from langchain_dpicl.stores.sqlite_ledger import SQLiteStore

    path = folder / f"{most_held}-{count}.db"
    new_ledger(path)
    rate = measure(lambda: Budget.open(SQLiteStore(path), most_held=most_held), count, seconds=seconds)
    say(f"{most_held:>4} {rate.line()}")
    if rate.fault:
        say(f"  {rate.fault}")
    return rate
