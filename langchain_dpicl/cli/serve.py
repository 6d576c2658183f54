"""Runs `dpicl serve` and `dpicl mcp`: builds what one settings file offers, and serves it until it is stopped."""

# Keys come from environment variables or as SHA-256; none is kept, printed or quoted.

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import importlib.util
import logging
import math
import multiprocessing
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from langchain_dpicl.cli.inputs import (
    TABLES,
    Settings,
    load_embeddings,
    load_model,
    private_examples,
    read_table,
    read_toml,
    settings_of,
    table_of,
)
from langchain_dpicl.cli.parser import DONE, INTERRUPTED, VIOLATED, Explain, Parser
from langchain_dpicl.cli.spending import rehearsed
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.options import Count, EmbeddingAnswers, Option, Positive, Retrieval, Serving, Texts
from langchain_dpicl.privacy._validate import fail

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    import uvicorn
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
    from langchain_dpicl.service.service import Keys, Service, Tenant
    from langchain_dpicl.service.web import Running

_METHODS = {
    "ask": ("voting",),
    "answer": ("free_form",),
    "retrieve_and_answer": ("retrieval_free_form", "retrieval"),
}
"""The tables of a settings file that offer a component, and which components each may hold, the usual one first."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SENDABLE = re.compile(r"[!-~]+")
"""A key that arrives as it was sent: other letters have several encodings in a header, and spaces are cut off."""
_GRACE = 30
_CLOSING = 15
"""Seconds that a service has to close the ledger when its questions were given their time."""
_LOOK_S = 0.5
_LONGEST_PAUSE = 60.0
_MOST_NAME = 200

_SERVE_NOTES = """\
The settings file names model, records, shares and tenants, as docs/production.md shows. The ledger must exist: make it
once with `dpicl ledger create`. Without LEDGER it is what the file or DPICL_LEDGER names; an address with a password
belongs there, as other users see a command's arguments.
All workers, and services on other hosts, spend the same shares of one ledger. Ctrl-C or SIGTERM lets running questions
finish, for at most 30 seconds.
"""
_MCP_NOTES = """\
Without --http it speaks over standard input and output, as agents start it, for the tenant of --tenant; over HTTP the
tenant is whose key the bearer token is. A tenant in the arguments of a tool is refused.
"""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Access(Option):
    """The table [tenants.NAME] or [operator]: a key, and what it opens.

    Args:
      key_env: name of the environment variable that holds the key.
      key_sha256: its SHA-256 in hexadecimal digits, in place of the key.
      max_queries: of a tenant: charged questions of each component; None: as many as there are.
    """

    key_env: str | None = None
    key_sha256: str | None = None
    max_queries: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ServiceLimits(Option):
    """The table [service]: what holds for every question, and which ledgers the operators see.

    Args:
      max_query_chars: characters of a question.
      queries_per_minute: of each tenant and worker, free ones included; None: any number.
      ledger_timeout: seconds to wait for the ledger's lock or database before a question is refused.
      anchor: second place that remembers the last line of the ledger: a file, or a postgresql:// address.
      ledgers: further ledgers that the operators' page shows.
    """

    max_query_chars: Count = 2000
    queries_per_minute: Count | None = None
    ledger_timeout: Positive = 5.0
    anchor: str | None = None
    ledgers: Texts = ()


@dataclass(frozen=True, slots=True, repr=False)
class App:
    """A settings file, read and checked; nothing was opened.

    Attributes:
      ledger: a path or address; None: that of the environment.
      limits: of every question.
      doors: settings of each component that is offered.
      demonstrations: file of released demonstrations.
      tenants: whose keys open what.
      operator: whose key opens the page; None: nobody's.
    """

    ledger: str | None
    limits: ServiceLimits
    doors: Mapping[str, Settings]
    demonstrations: str | None
    tenants: Mapping[str, Access]
    operator: Access | None


def read_app(path: Path, ledger: str | None) -> App:
    """Reads a settings file.

    Args:
      path: of the TOML file.
      ledger: what the command line names; None: what the file names.
    """
    given = read_toml(path)
    shared: dict[str, Any] = {name: given.pop(name) for name in ("data", "model") if name in given}
    for name, table in shared.items():  # also where no component takes it
        read_table(name, TABLES[name], table)
    doors = {name: _door(name, given.pop(name), shared) for name in _METHODS if name in given}
    shares = [_share_name(name, settings) for name, settings in doors.items()]
    if len(set(map(str, shares))) < len(shares):  # the second one would take the share of the first
        raise fail("component", f"a name of its own for each of {list(doors)}", shares)
    named = table_of("tenants", given.pop("tenants", {}))
    tenants = {_name(name): read_table(f"tenants.{name}", Access, table) for name, table in named.items()}
    operator = None if "operator" not in given else read_table("operator", Access, given.pop("operator"))
    limits = read_table("service", ServiceLimits, given.pop("service", {}))
    own, demonstrations = given.pop("ledger", None), given.pop("demonstrations", None)
    if given:
        known = ["ledger", "demonstrations", "service", "operator", "tenants", "data", "model", *_METHODS]
        raise fail("settings", f"keys and tables among {known}", sorted(given))
    for name, value in (("ledger", own), ("demonstrations", demonstrations)):
        if value is not None and not isinstance(value, str):
            raise fail(name, "a text", type(value).__name__)
    return App(ledger if ledger is not None else own, limits, doors, demonstrations, tenants, operator)


def _share_name(name: str, settings: Settings) -> str:
    """Returns the name in the ledger of a table's component."""
    return settings.get("component") or name


def _name(tenant: str) -> str:
    """Returns the name of a tenant, which ledger, log and page can show."""
    if not tenant.strip() or not tenant.isprintable() or len(tenant) > _MOST_NAME:
        raise fail("tenants", f"names of 1 to {_MOST_NAME} printable characters", tenant)
    return tenant


def _door(name: str, table: Any, shared: Mapping[str, Any]) -> Settings:
    """Returns the settings of a component; a table of its own stands in place of a shared one."""
    with _named(name):
        settings = settings_of({**shared, **table_of(name, table)}, methods=_METHODS[name])
        if given := sorted(settings.budget.to_dict()):
            advice = "All components spend the service's ledger: give epsilon in the component's own table."
            raise fail("budget", "no table, as the limits are the ledger's", given, advice)
        if settings.get("epsilon") is None:
            raise fail("epsilon", "this component's share of the ledger", None)
        if settings.data.file is None:
            raise fail("data.file", "the file of the records", None)
        if unread := list(_unread(settings.method, table)):
            raise fail("settings", "keys that a service reads", unread, "Leave them out.")
        return settings


def _unread(method: str, table: Mapping[str, Any]) -> Iterator[str]:
    """Yields the keys of a component's table that only plans read, or other components."""
    if "cost" in table:
        yield "cost"
    yield from (f"guess.{name}" for name in table.get("guess", {}) if name != "rehearsal")
    if method == "voting" and "embeddings" in table.get("model", {}):
        yield "model.embeddings"


@contextlib.contextmanager
def _named(table: str) -> Iterator[None]:
    """Says which table of the settings file an error is about."""
    try:
        yield
    except ConfigurationError as error:
        fault = str(error)
    else:
        return
    raise ConfigurationError(f"[{table}] {fault}")


# -- who may ask -----------------------------------------------------------------------------------------------------


def _keys(tables: Mapping[str, Access]) -> Keys:
    from langchain_dpicl.service.service import Keys, Tenant

    if not tables:
        raise fail("tenants", "a tenant with a key: [tenants.NAME]", "none")
    owners: dict[str, Tenant] = {}
    for name, access in tables.items():
        hashed = _hash_of(f"tenants.{name}", access)
        if hashed in owners:
            raise fail(f"tenants.{name}", "a key of its own", f"that of {owners[hashed].name!r}")
        owners[hashed] = Tenant(name, access.max_queries)
    return Keys(owners)


def _operators(app: App) -> Keys | None:
    """Returns whose key opens the page, which no tenant's may."""
    from langchain_dpicl.service.service import Keys, Tenant

    if (access := app.operator) is None:
        return None
    if access.max_queries is not None:
        raise fail("operator", "options among ['key_env', 'key_sha256']", "max_queries")
    hashed = _hash_of("operator", access)
    for name, tenant in app.tenants.items():
        if _hash_of(f"tenants.{name}", tenant) == hashed:
            raise fail("operator", "a key of its own", f"that of {name!r}")
    return Keys({hashed: Tenant("operator")})


def _hash_of(name: str, access: Access) -> str:
    """Returns the digest of a key; the key itself stays in no variable that outlives the call."""
    from langchain_dpicl.service.service import LEAST_KEY, digest

    if (access.key_env is None) == (access.key_sha256 is None):
        raise fail(name, "key_env or key_sha256", "both" if access.key_env is not None else "neither")
    if access.key_sha256 is not None:
        if not _SHA256.fullmatch(access.key_sha256.lower()):
            raise fail(f"{name}.key_sha256", "64 hexadecimal digits", "another text")
        return access.key_sha256.lower()
    # A reader who takes key_env for the key writes it there: the name of the variable is not repeated.
    advice = f"Set the variable that {name}.key_env names to a long random text."
    length = len(os.environ.get(str(access.key_env), ""))
    if length < LEAST_KEY:
        raise fail(f"{name}.key_env", f"a key of at least {LEAST_KEY} characters", length, advice)
    if not _SENDABLE.fullmatch(os.environ[str(access.key_env)]):
        raise fail(f"{name}.key_env", "a key of ASCII letters, digits and signs, without spaces", "another", advice)
    return digest(os.environ[str(access.key_env)])


# -- what is built ---------------------------------------------------------------------------------------------------


def open_ledger(app: App) -> PrivacyBudgetCallbackHandler:
    """Opens the ledger, which must exist."""
    from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler

    return PrivacyBudgetCallbackHandler.open(app.ledger, anchor=app.limits.anchor, timeout=app.limits.ledger_timeout)


def built(app: App, budget: PrivacyBudgetCallbackHandler, tenants: Keys, **observers: Any) -> Service:
    """Reads records, makes models, declares the shares, and returns the service."""
    from langchain_dpicl.released.demonstrations import ReleasedDemonstrations
    from langchain_dpicl.service.service import Limits, Service

    released = None if app.demonstrations is None else ReleasedDemonstrations.load(app.demonstrations)
    records, models, doors = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    for name, settings in app.doors.items():
        data, model = repr(settings.data), repr(settings.model)  # components that declare the same share one
        if data not in records:
            records[data] = private_examples(settings)
        if model not in models:
            models[model] = load_model(settings.model)
        given = {"budget": budget, "private": records[data], "llm": models[model]}
        with _named(name):
            doors[name] = _component(name, settings, app.limits, **given)
    limits = Limits(max_query_chars=app.limits.max_query_chars, queries_per_minute=app.limits.queries_per_minute)
    return Service(budget, doors, tenants=tenants, limits=limits, demonstrations=released, **observers)


def _component(name: str, settings: Settings, limits: ServiceLimits, *, private: Any, **given: Any) -> Any:
    """Builds one component under its own name in the ledger, or finds its share again."""
    serving = settings.get("serving") or Serving()
    if serving.max_query_chars is None:
        serving = serving.replace(max_query_chars=limits.max_query_chars)
    more: dict[str, Any] = {"serving": serving, "component": _share_name(name, settings)}
    if settings.model.embeddings is not None:
        embeddings = load_embeddings(settings.model.embeddings)
        usual = EmbeddingAnswers() if settings.method == "free_form" else None  # what no table stands for
        for option, value in (("retrieval", settings.get("retrieval")), ("answers", settings.get("answers", usual))):
            if isinstance(value, (Retrieval, EmbeddingAnswers)) and value.embeddings is None:
                more[option] = value.replace(embeddings=embeddings)
    return settings.door(private, **given, **{**rehearsed(settings), **more})


def running_of(app: App, folder: Path) -> Running:
    """Opens the ledgers and builds what a web server serves."""
    from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
    from langchain_dpicl.budget.metrics import DPICLMetrics
    from langchain_dpicl.service.service import OperatorView, RefusalLog
    from langchain_dpicl.service.web import Running

    tenants, operators = _keys(app.tenants), _operators(app)
    refusals = RefusalLog(folder / "refusals.jsonl")
    with contextlib.ExitStack() as opened:
        budget = open_ledger(app)
        opened.callback(budget.budget.close)
        others = []
        for where in app.limits.ledgers:
            others.append(PrivacyBudgetCallbackHandler.open(where, timeout=app.limits.ledger_timeout))
            opened.callback(others[-1].budget.close)
        metrics = DPICLMetrics(budget, labels={"process": str(os.getpid())})
        service = built(app, budget, tenants, metrics=metrics, on_refusal=refusals.add)
        view = OperatorView([budget.budget, *(other.budget for other in others)], refusals, service.caps())
        return Running(service, metrics, operators, view, opened.pop_all().close)


# -- dpicl serve -----------------------------------------------------------------------------------------------------


def add_serve(commands: Any, *, run: Any) -> None:
    """Adds `dpicl serve`."""
    command = _new(commands, "serve", "answer tenants over HTTP, from one ledger", _SERVE_NOTES, run)
    command.set_defaults(prints=False)
    command.add_argument("--workers", type=_count, default=1, metavar="N", help="processes (default: 1)")
    _add_address(command)


def add_mcp(commands: Any, *, run: Any) -> None:
    """Adds `dpicl mcp`."""
    command = _new(commands, "mcp", "answer agents by the Model Context Protocol", _MCP_NOTES, run)
    command.add_argument("--tenant", metavar="NAME", help="of the settings file, who asks over standard input")
    command.add_argument("--http", action="store_true", help="speak HTTP at /mcp; the key of a tenant is the token")
    _add_address(command)


def _new(commands: Any, name: str, words: str, notes: str, run: Any) -> Parser:
    about = f"{words[0].upper()}{words[1:]}."
    command: Parser = commands.add_parser(name, help=words, description=about, epilog=notes)
    command.add_argument("ledger", nargs="?", help="existing ledger: SQLite file or postgresql:// address")
    command.add_argument("--config", type=Path, required=True, metavar="FILE", help="TOML file of the service")
    command.set_defaults(run=run)
    return command


def _add_address(command: argparse.ArgumentParser) -> None:
    command.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)")
    command.add_argument("--port", type=int, default=8000, metavar="N", help="port (default: 8000)")


def _count(text: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,2}", text):
        raise argparse.ArgumentTypeError(f"expected a number from 1 to 999, found {text!r}")
    return int(text)


def run_serve(arguments: argparse.Namespace, *, complain: Callable[[str], object], explain: Explain) -> int:
    """Serves until it is stopped; returns the exit code."""
    needed("fastapi", "uvicorn", extra="serve")
    app = read_app(arguments.config, arguments.ledger)
    _check_balances(app)
    _warn_of_loss(app, complain)
    with own_folder() as folder, _bound(arguments) as listening:
        serve = functools.partial(_serve, app, folder, listening)
        if arguments.workers == 1:
            return serve(complain)
        work = functools.partial(_work, serve, explain)
        return _keep_workers(arguments.workers, work, complain, closing=_closing(app))


@contextlib.contextmanager
def own_folder() -> Iterator[Path]:
    """A temporary folder that is locked: systemd-tmpfiles removes others when nothing used them for ten days."""
    with tempfile.TemporaryDirectory(prefix="dpicl-serve-") as name:
        try:
            import fcntl
        except ModuleNotFoundError:  # systemd cleans no such system
            yield Path(name)
            return
        held = os.open(name, os.O_RDONLY)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            yield Path(name)
        finally:
            os.close(held)


def _bound(arguments: argparse.Namespace) -> socket.socket:
    """Returns a socket at the address; connections are refused until a server listens at it."""
    if not arguments.host.strip():  # it would be bound to every address of the machine
        raise fail("--host", "an address of this machine", arguments.host)
    found = socket.socket(socket.AF_INET6 if ":" in arguments.host else socket.AF_INET)
    if os.name == "posix":  # elsewhere it lets two servers have one port
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((arguments.host, arguments.port))
    except (OSError, OverflowError) as error:
        found.close()
        why = getattr(error, "strerror", None) or "no such port"
        raise _not_free(f"{arguments.host}:{arguments.port}", why) from None
    return found


def _not_free(address: str, why: str) -> ConfigurationError:
    return fail("--port", "a free address of this machine", f"{address} ({why})")


# Without a configuration of uvicorn's own, which closes all handlers of logging that there are, also an application's.
_QUIET: Mapping[str, Any] = {"log_config": None, "log_level": "warning", "access_log": False, "server_header": False}


def _serve(app: App, folder: Path, listening: socket.socket, say: Callable[[str], object]) -> int:
    """Builds what is served, says where, and serves it in this process until a signal ends it."""
    from langchain_dpicl.service.web import create_app

    # uvicorn sends itself the signal again when it has stopped, which would leave the folder behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(DONE))
    _end_with_terminal()
    running = running_of(app, folder)
    return _listen(create_app(running), running.service, listening, say, closing=_closing(app))


def _closing(app: App) -> float:
    """Returns how many seconds closing a service may take, which may have to wait for the ledger."""
    return max(_CLOSING, app.limits.ledger_timeout)


def _listen(
    asked: Any,
    service: Service,
    listening: socket.socket,
    say: Callable[[str], object],
    *,
    closing: float,
    path: str = "",
) -> int:
    """Says where an application is, and serves it in this process until a signal ends it."""
    import uvicorn

    host, port = listening.getsockname()[:2]
    address = f"{f'[{host}]' if ':' in host else host}:{port}"
    app = _answered_at_end(asked, service, lambda: server.should_exit)
    config = uvicorn.Config(app, timeout_graceful_shutdown=_GRACE, **_QUIET)
    try:
        listening.listen(config.backlog)  # two servers that start at one time may both be bound
    except OSError as error:
        raise _not_free(address, str(error.strerror)) from None
    say(f"serving {', '.join(service.offered)} at http://{address}{path}")
    log_charges()
    server = uvicorn.Server(config)
    logging.getLogger("uvicorn.error").addFilter(lambda _: not server.force_exit)  # what a second Ctrl-C cuts off
    has_ended = threading.Event()
    threading.Thread(target=_end_in_time, args=(server, has_ended, closing), daemon=True).start()
    try:
        server.run(sockets=[listening])
    finally:
        has_ended.set()
    return DONE


def _answered_at_end(app: ASGIApp, service: Service, is_ending: Callable[[], bool]) -> ASGIApp:
    """Returns an application that answers those requests as JSON that its server cancels when its grace is over."""
    from starlette.responses import JSONResponse

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        is_started = False

        async def noted(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            await app(scope, receive, noted)
        except asyncio.CancelledError as error:
            if scope["type"] != "http" or not is_ending():
                raise
            fault = service.fault(error, "server")
            if not is_started:
                await JSONResponse(fault.to_dict(), fault.status)(scope, receive, send)

    return answered


def _end_in_time(server: uvicorn.Server, has_ended: threading.Event, closing: float) -> None:
    """Ends the process when a server's time to stop is over: its end waits for threads whose model calls hang."""
    while not has_ended.wait(_LOOK_S):
        if server.should_exit and not has_ended.wait(_GRACE + closing):
            os._exit(INTERRUPTED if signal.SIGINT in getattr(server, "_captured_signals", ()) else DONE)


def end_process(run: Callable[[], int]) -> NoReturn:
    """Runs a service and ends its process, soon also where Python's exit waits for a thread whose model call hangs."""
    try:
        sys.exit(run())
    except SystemExit as ended:
        timer = threading.Timer(_CLOSING, os._exit, [ended.code or DONE])
        timer.daemon = True
        timer.start()
        raise


def _end_with_terminal() -> None:
    """Has a terminal that closes stop the service as SIGTERM does, unless `nohup` lets it run on."""
    hangup = getattr(signal, "SIGHUP", None)
    if hangup is not None and signal.getsignal(hangup) == signal.SIG_DFL:
        signal.signal(hangup, lambda *_: signal.raise_signal(signal.SIGTERM))


# -- several workers -------------------------------------------------------------------------------------------------


def _keep_workers(
    count: int, work: Callable[[Connection | None], None], complain: Callable[[str], object], *, closing: float
) -> int:
    """Starts workers, and another one in place of each that ends, until it is stopped; returns the exit code.

    The first one builds everything before the others start, so that a fault of the settings is explained once. Where
    workers end again and again, more and more time passes before the next one; it stops where none is left and the last
    one has explained why.
    """
    # uvicorn's own supervisor asks its workers whether they live: it waits for the answer of one that was killed before
    # it gave one, and looks after no other worker and no signal meanwhile.
    stops = list[int]()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda found, _: stops.append(found))
    _end_with_terminal()
    spawn = multiprocessing.get_context("spawn")
    workers: list[SpawnProcess] = []

    def start(built: Connection | None = None) -> None:
        workers.append(spawn.Process(target=work, args=(built,)))
        workers[-1].start()

    heard, built = spawn.Pipe(duplex=False)
    start(built)
    built.close()
    try:
        with heard:
            said = _said(heard, stops)
        if said is None and not stops:
            workers[0].join()
            return _only_ended(workers[0].exitcode or 0, complain)
        complain(said or "stopped before it served")
        pause, last = 0.0, -math.inf
        while not stops:
            for ended in [each for each in workers if not each.is_alive()]:
                workers.remove(ended)
                code, now = ended.exitcode or 0, time.monotonic()
                if code > 0 and not workers:
                    return _only_ended(code, complain)
                pause = min(max(2 * pause, 1.0), _LONGEST_PAUSE) if now < last + pause + _LONGEST_PAUSE else 0.0
                last = now
                later = f" in {pause:g} s" if pause else ""
                complain(f"a worker has ended ({code}), another one is started{later}")
            while len(workers) < count and time.monotonic() >= last + pause:
                start()
            time.sleep(_LOOK_S)
    finally:
        _end(workers, closing)
    return DONE


def _only_ended(code: int, complain: Callable[[str], object]) -> int:
    """Returns the exit code where no worker is left to serve; one that ended with a positive one has said why."""
    complain("no worker serves" if code > 0 else f"the first worker has ended ({code}) before it served")
    return code if code > 0 else VIOLATED


def _end(workers: Sequence[SpawnProcess], closing: float) -> None:
    """Lets workers finish what runs, and kills those that do not end in time."""
    for each in workers:
        each.terminate()
    until = time.monotonic() + _GRACE + closing
    for each in workers:
        each.join(max(until - time.monotonic(), 0))
    for each in workers:
        each.kill()
        each.join()


def _said(heard: Connection, stops: list[int]) -> str | None:
    """Returns what the first worker says when it has built everything; None: one of both ended first."""
    while not stops:
        if heard.poll(_LOOK_S):
            try:
                return str(heard.recv())
            except EOFError:
                break
    return None


def _work(serve: Callable[[Callable[[str], object]], int], explain: Explain, built: Connection | None) -> None:
    """Serves in a process of its own, until its parent stops it or ends."""
    for number in {signal.SIGINT, getattr(signal, "SIGHUP", signal.SIGINT)}:
        signal.signal(number, signal.SIG_IGN)  # of a terminal, which sends it to the parent too
    threading.Thread(target=_end_with_parent, daemon=True).start()
    say = _say_nothing if built is None else built.send
    end_process(lambda: explain(lambda: serve(say), sys.argv[1:], quiet=built is None))


def _say_nothing(_: str) -> None:
    """The first worker has said it."""


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def _check_balances(app: App) -> None:
    """Refuses balances of one process: the share pays for them once, and a restart or another worker has none."""
    settings = app.doors.get("retrieve_and_answer")
    retrieval = None if settings is None else settings.get("retrieval")
    if retrieval is not None and retrieval.balances is None:
        advice = "Without it the first restart loses the share. It needs data.unit_key."
        raise fail("retrieve_and_answer.retrieval.balances", "a file, which all processes share", None, advice)


def _warn_of_loss(app: App, complain: Callable[[str], object]) -> None:
    """Says which files are lost with a container or a restart: a ledger begins anew there, with its whole budget."""
    from langchain_dpicl.budget.handler import LEDGER_VARIABLE
    from langchain_dpicl.stores import is_address
    from langchain_dpicl.stores.sqlite_file import why_lost

    for where in (app.ledger or os.environ.get(LEDGER_VARIABLE), app.limits.anchor):
        if where is None or is_address(where):
            continue
        if (why := why_lost(Path(where).resolve().parent)) is not None:
            complain(f"{where}: {why}")


def log_charges() -> None:
    """Writes a line on standard error for every question, unless the application has set its logging up already."""
    logger = logging.getLogger("langchain_dpicl.service.charges")
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(logging.INFO)


def needed(*packages: str, extra: str) -> None:
    """Refuses a command whose packages are missing, with the line that installs them."""
    for name in packages:  # which are not imported: of several workers the first process uses none of them
        if importlib.util.find_spec(name) is None:
            line = f"pip install 'langchain-dpicl[{extra}]'"
            raise ConfigurationError(f"{extra}: expected the package {name}, found none. Install it: {line}.")


# -- dpicl mcp -------------------------------------------------------------------------------------------------------


def run_mcp(arguments: argparse.Namespace, *, complain: Callable[[str], object]) -> int:
    """Serves agents until they close the connection, or over HTTP until it is stopped; returns the exit code."""
    needed("mcp", "uvicorn", extra="mcp")
    from langchain_dpicl.service.service import Keys
    from langchain_dpicl.service.tools import create_app, serve_stdio

    app = read_app(arguments.config, arguments.ledger)
    _check_balances(app)
    _warn_of_loss(app, complain)
    if not arguments.http:
        tenant = _only_tenant(app, arguments.tenant)
        with _service_of(app, Keys({})) as service:
            signal.signal(signal.SIGTERM, lambda *_: _leave(service, DONE))
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where Ctrl-C is ignored
                signal.signal(signal.SIGINT, lambda *_: _leave(service, INTERRUPTED))
            _end_with_terminal()
            log_charges()
            asyncio.run(serve_stdio(service, tenant))
        return DONE
    if arguments.tenant is not None:
        raise fail("--tenant", "none with --http, where the key says who asks", arguments.tenant)
    with _bound(arguments) as listening, _service_of(app, _keys(app.tenants)) as service:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(DONE))
        _end_with_terminal()
        return _listen(create_app(service), service, listening, complain, closing=_closing(app), path="/mcp")


@contextlib.contextmanager
def _service_of(app: App, tenants: Keys) -> Iterator[Service]:
    """Opens the ledger, and closes it whatever became of the service."""
    budget = open_ledger(app)
    try:
        yield built(app, budget, tenants)
    finally:
        budget.budget.close()


def _leave(service: Service, code: int) -> None:
    """Closes the ledger and ends the process, whose thread that reads standard input waits for another line."""

    def close() -> None:
        try:
            service.close()
        finally:
            os._exit(code)

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a further Ctrl-C ends a close that waits for a store
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # In a thread of its own: what the signal interrupts may hold a lock of the ledger.
    threading.Thread(target=close).start()


def _only_tenant(app: App, name: str | None) -> Tenant:
    """Returns for whom a server without keys answers: the one that is named, or the only one there is."""
    from langchain_dpicl.service.service import Tenant

    if name is None and len(app.tenants) == 1:
        (name,) = app.tenants
    if name is None or name not in app.tenants:
        raise fail("--tenant", f"one of {sorted(app.tenants)}", name, "Name who asks, or give --http.")
    return Tenant(name, app.tenants[name].max_queries)
