"""An application as README and docs/production.md describe it, watched by all that may watch it, and killed halfway.

The settings are those of docs/production.md: `dpicl serve` with two workers and `private_process`. The ledger is in
PostgreSQL, OpenTelemetry and Sentry watch, and `ChatOllama` speaks to a model on Ollama's own wire format. `make planted`
runs all of it, and with planted bugs. The suite runs it without `private_process`, OpenTelemetry and Sentry, which take
most of the time.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest

pytest.importorskip("fastapi")

from langchain_dpicl import PrivacyBudgetCallbackHandler
from langchain_dpicl.cli.main import main
from tests.canary import RECORD, canaries_in
from tests.loopback_provider import Fault, Provider, Received, echoing_400, provider
from tests.postgres import PostgresServer
from tests.served import KEYS, ROOT, Server, change, served

pytestmark = pytest.mark.loopback

PATIENCE = 300.0
SAID = {"card": "My card was declined", "transfer": "My transfer has not arrived"}
RIGHT = {0: "transfer", 1: "card", 2: "transfer", 4: "transfer", 5: "card", 6: "transfer", 7: "card"}
HELD, FAILING = 90, 91
CHARGED = {"acme": 5, "globex": 4}
QUERIES = 200
MODEL, PATH = "ollama:llama3.2", "/api/chat"
WATCHERS = """
import logging, os, sys

def into(kind):
    return open(f"{os.environ['WATCHED']}/{kind}-{os.getpid()}", "a", buffering=1)

def log():
    logging.basicConfig(stream=into("log"), level=logging.DEBUG, format="%(message)s")

def watch():
    import sentry_sdk
    from opentelemetry import trace
    from opentelemetry.instrumentation.langchain import LangchainInstrumentor
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
    from sentry_sdk.integrations.fastapi import FastApiIntegration
    from sentry_sdk.integrations.langchain import LangchainIntegration
    from sentry_sdk.integrations.starlette import StarletteIntegration
    from sentry_sdk.transport import Transport

    class Kept(Transport):
        def capture_envelope(self, envelope):
            events.write(envelope.serialize().decode() + "\\n")

    events = into("sentry")
    sentry_sdk.init(
        "http://key@127.0.0.1/1", transport=Kept, traces_sample_rate=1.0, send_default_pii=True,
        auto_enabling_integrations=False,  # imports every package that there is one for
        integrations=[FastApiIntegration(), LangchainIntegration(), StarletteIntegration()],
    )
    tracer = TracerProvider()
    tracer.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(out=into("spans"))))
    trace.set_tracer_provider(tracer)
    LangchainInstrumentor().instrument()

if "spawn_main" in " ".join(sys.orig_argv):  # the workers; the command that starts them answers nobody
    log()
    watch()
"""
"""The application's sitecustomize, which is how `opentelemetry-instrument` starts as well."""


def until(condition: Callable[[], bool]) -> None:
    """Waits until something holds, and asks seldom enough to leave the processors to what it waits for."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def question(label: str, number: int) -> str:
    return f"{SAID[label]}, case {number}"


def asked_in(request: Received) -> int | None:
    """Returns the number of the question that a private request asks."""
    text = request.raw.decode()
    found = re.search(r"case (\d+)", text)
    return int(found[1]) if found and RECORD in text else None


@dataclass
class Application:
    """A running application: what it answered, and all that came back from it."""

    server: Server
    model: Provider
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    shown: list[str] = field(default_factory=list)

    def worker(self) -> tuple[int, http.client.HTTPConnection]:
        """Returns a worker's process, and a connection to it."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=PATIENCE)
        connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {KEYS['operator']}"})
        text = connection.getresponse().read().decode()
        self.shown.append(text)
        found = re.search(r'process="(\d+)"', text)
        assert found, text
        return int(found[1]), connection

    def workers(self, *, before: Sequence[int] = ()) -> list[int]:
        """Waits until two workers answer, one of them new; the new ones come first."""
        found = list[int]()

        def are_there() -> bool:
            with contextlib.suppress(ConnectionError, http.client.HTTPException):  # of one that is starting or ending
                process, connection = self.worker()
                connection.close()
                found.append(process)
            return len(set(found)) > 1 and not set(found) <= set(before)

        until(are_there)
        return sorted(set(found), key=lambda process: process in before)

    def ask(self, process: int, label: str, number: int, who: str) -> tuple[int, dict[str, Any]]:
        """Asks one worker, on a connection that the system gave to it; returns the status and the answer."""
        while True:
            found, connection = self.worker()
            if found == process:
                break
            connection.close()
        headers = {"Authorization": f"Bearer {KEYS[who]}", "Content-Type": "application/json"}
        with contextlib.closing(connection):
            connection.request("POST", "/ask", json.dumps({"question": question(label, number)}), headers)
            response = connection.getresponse()
            text = response.read().decode()
        self.shown.append(f"{response.headers} {text}")
        return response.status, json.loads(text)

    def answer(self, process: int, label: str, number: int, who: str) -> None:
        status, self.answers[number] = self.ask(process, label, number, who)
        assert status == 200, self.answers[number]

    def get(self, path: str, who: str) -> Any:
        response = self.server.send("GET", path, who)
        assert response.status_code == 200
        self.shown.append(response.text)
        return response.json() if "json" in response.headers["content-type"] else response.text


@dataclass(frozen=True)
class Place:
    """Where an application is, before it starts."""

    folder: Path
    watched: Path
    postgres: PostgresServer
    database: str
    ledger: str
    anchor: str


@pytest.fixture
def place(tmp_path: Path, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Does what docs/production.md has one do before the first start."""
    page = (ROOT / "docs" / "production.md").read_text()
    folder, watched = tmp_path / "app", tmp_path / "watched"
    for each in (folder, watched, folder / "watchers"):
        each.mkdir()
    monkeypatch.chdir(folder)
    (settings,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (folder / "app.toml").write_text(settings + '\n[tenants.globex]\nkey_env = "GLOBEX_KEY"\n')
    change(folder / "app.toml", 'ledger = "budget.db"', "")
    change(folder / "app.toml", "[service]\n", "[service]\nledger_timeout = 300\n")  # however slow the machine is
    change(folder / "app.toml", "openai:gpt-4.1-mini", MODEL)
    change(folder / "app.toml", "max_queries = 50 ", f"max_queries = {CHARGED['acme']} ")
    # A row of few records often has none of the label that is asked for, and then votes for another one.
    change(folder / "app.toml", "epsilon = 1.0\n", "epsilon = 3.9\nrows = {slots = 20, shots = 16}\n")
    (folder / "watchers" / "sitecustomize.py").write_text(WATCHERS)
    records = [
        {"customer": f"{label} {number}", "text": f"{said}, please help. {RECORD} {number}", "queue": label}
        for number in range(6000)
        for label, said in SAID.items()
    ]
    (folder / "messages.jsonl").write_text("\n".join(map(json.dumps, records)))
    roles = {name: postgres.fresh(name) for name in ("ledger_app", "anchor_app")}
    databases = {name: postgres.new_database() for name in roles}

    def address(name: str, *, user: str) -> str:
        return f"postgresql://{user}@/{databases[name]}?host={postgres.folder}&port=5432"

    ledger, anchor = (address(name, user="owner") for name in roles)
    assert main(["ledger", "create", ledger, "--epsilon", "4", "--delta", "1e-6", "--anchor", anchor]) == 0
    for (name, role), rights in zip(roles.items(), re.findall(r"```sql\n(.*?)```", page, re.DOTALL), strict=True):
        with psycopg.connect(postgres.conninfo(databases[name]), autocommit=True) as connection:
            connection.execute(rights.replace(name, role).encode())
    ledger, anchor = (address(name, user=role) for name, role in roles.items())
    change(folder / "app.toml", "anchor.json", anchor)
    return Place(folder, watched, postgres, databases["ledger_app"], ledger, anchor)


@contextlib.contextmanager
def started(place: Place) -> Iterator[Application]:
    """Starts the application on a model of its own."""
    keys = {f"{who.upper()}_KEY": key for who, key in KEYS.items()}
    paths = os.pathsep.join([str(ROOT), str(place.folder / "watchers")])
    with provider() as model:
        model.script(echoing_400(), when=lambda request: asked_in(request) == FAILING)
        at = {"OLLAMA_HOST": model.root, "WATCHED": str(place.watched), "DPICL_LEDGER": place.ledger}
        given = {**keys, **at, "PYTHONPATH": paths}
        with served(place.folder, "--workers", "2", **given) as server:
            yield Application(server, model)


def kill_a_worker(application: Application, victim: int, other: int) -> None:
    """Kills a worker while its question is at the model, and the other worker answers."""
    arrived, let_go = threading.Event(), threading.Event()

    def hold(answer: bytes) -> bytes:
        arrived.set()
        let_go.wait(PATIENCE)
        return answer

    application.model.script(lambda _: Fault(spoil=hold), when=lambda one: asked_in(one) == HELD, times=1)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(application.ask, victim, "card", HELD, "acme")
        try:
            assert arrived.wait(PATIENCE)
            application.answer(other, "transfer", 4, "globex")
            os.kill(victim, signal.SIGKILL)
            with pytest.raises((ConnectionError, http.client.HTTPException)):
                asking.result(PATIENCE)
        finally:
            let_go.set()


def use(application: Application) -> None:
    """Asks both workers side by side, kills one, and goes on with what is started in its place.

    The killed one was asked once by each tenant: a second question in a second has a worker reserve further tickets,
    which are lost with it.
    """
    victim, other = application.workers()
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(application.answer, victim, "transfer", 0, "globex")
        application.answer(other, "card", 1, "acme")
        application.answer(other, "transfer", 2, "globex")
        asking.result(PATIENCE)
    kill_a_worker(application, victim, other)
    new, *_ = application.workers(before=[victim, other])
    application.answer(other, "card", 7, "globex")
    application.answer(new, "card", 5, "acme")
    application.answer(new, "transfer", 6, "acme")
    application.answer(new, "card", FAILING, "acme")
    status, free = application.ask(other, "card", 1, "acme")
    assert (status, free["source"], free["answer"]) == (200, "memo", application.answers[1]["answer"])
    status, refused = application.ask(new, "card", 8, "acme")
    assert (status, refused.get("error")) == (429, "tenant_spent")


def check_charges(place: Place, application: Application) -> None:
    """Holds tenants, log, receipts and ledger against what the model was asked; stops the application."""
    private = [asked_in(request) for request in application.model.received]
    asked = {number for number in private if number is not None}
    assert asked == {*application.answers, HELD}
    assert {request.path for request in application.model.received if RECORD in request.raw.decode()} == {PATH}

    def used(who: str) -> int:
        tickets: int = application.get("/budget", who)["components"]["ask"]["yours_used"]
        return tickets

    # What a worker has reserved for further questions it gives back after a few seconds.
    until(lambda: {who: used(who) for who in CHARGED} == CHARGED)
    application.get("/", "operator")
    (shown,) = application.get("/standing", "operator")["ledgers"]
    assert {each["tenant"]: each["used"] for each in shown["tenants"]} == CHARGED
    code, said = application.server.stop()
    application.shown.append(said)
    assert code == 0
    logs = "".join(each.read_text() for each in place.watched.glob("log-*"))
    lines = [json.loads(line) for line in logs.splitlines() if line.startswith('{"time"')]
    logged = Counter[str]()
    for line in lines:
        logged[line["tenant"]] += line["tickets"]
    assert logged == Counter(CHARGED) - Counter(acme=1)  # the killed worker logged none for the question that it had
    budget = PrivacyBudgetCallbackHandler.open(place.ledger, anchor=place.anchor).budget
    with contextlib.closing(budget):
        budget.verify()
        assert budget.use().tickets["ask"].left == QUERIES - len(asked)
        for answer in application.answers.values():
            budget.check_receipt(answer["receipt"])
        paid = {answer["receipt"]["entry"] for answer in application.answers.values()}
        assert [each.count for each in budget.dangling() if each.entry not in paid] == [1]


def check_answers(application: Application) -> None:
    """Rows of 16 records erred 5 times in 480. If 5 in 100 do, an answer is wrong in less than one run in a million.

    Of 20 rows all but X vote right, X of Binomial(20, 0.05), and noise of a deviation of 1.96 is added to their lead of
    20 - 2 X. With the rows of 4 records that the page has, one row in five errs, and one answer in a hundred.
    """
    for number, answer in application.answers.items():
        assert answer["answer"] in SAID
        assert number == FAILING or answer["answer"] == RIGHT[number], number


def check_silence(place: Place, application: Application, signs: Mapping[str, str]) -> None:
    """Nothing but the file of records and the model has a canary; and watchers, which may see the questions, saw them."""
    dump = place.postgres.run("pg_dump", "-h", str(place.postgres.folder), "-p", "5432", "-U", "owner", place.database)
    seen = {"database": dump, "database log": (place.postgres.folder / "log").read_text()}
    seen["responses"] = "\n".join(application.shown)
    for kind in signs:
        files = [*place.watched.glob(f"{kind}-*")]
        assert len(files) == 3, kind  # of two workers, and of the one that was started in place of one
        seen[kind] = "".join(each.read_text() for each in files)
    for path in place.folder.rglob("*"):
        if path.is_file() and path.name != "messages.jsonl":
            seen[str(path)] = path.read_text(errors="replace")
    assert [name for name, text in seen.items() if canaries_in(text)] == []
    for name, sign in {**signs, "database": "globex"}.items():
        assert sign in seen[name], name


LOGGED = {"log": "tickets"}
WATCHED = {**LOGGED, "spans": "case 5", "sentry": "case 5"}
"""What each watcher keeps, by the kind of its files."""


def run(place: Place, signs: Mapping[str, str] = WATCHED) -> None:
    with started(place) as application:
        use(application)
        check_charges(place, application)
        check_answers(application)
        check_silence(place, application, signs)


def test_an_application_answers_and_charges_exactly_through_a_kill(place: Place) -> None:
    change(place.folder / "app.toml", "private_process = true ", "private_process = false ")
    change(place.folder / "watchers" / "sitecustomize.py", "    watch()\n", "")
    run(place, LOGGED)


@pytest.mark.planted
def test_an_application_answers_charges_exactly_and_keeps_quiet_through_a_kill(place: Place) -> None:
    run(place)


LOGS_PROMPTS = """
    from langchain_dpicl.backends.private_process import connection
    pack = connection.pack
    def logged(message):
        logging.info("%s", pack(message))
        return pack(message)
    connection.pack = logged
"""
GIVES_TICKETS_BACK = """
    from langchain_dpicl.privacy.ledger.shares import Reservation
    Reservation.burn = Reservation.commit = lambda *given, **options: None
"""


@pytest.mark.planted
@pytest.mark.parametrize(("plant", "words"), [(LOGS_PROMPTS, r"\['log'"), (GIVES_TICKETS_BACK, "429")])
def test_planted_bugs_in_the_workers_are_found(plant: str, words: str, place: Place) -> None:
    change(place.folder / "watchers" / "sitecustomize.py", "    watch()\n", f"    watch()\n{plant}")
    with pytest.raises(AssertionError, match=words):
        run(place)
