"""L2 on a server: answers that get lost, sessions that are ended, a server that dies. A spender who got a yes is in the
ledger; a spender who got no answer finds out."""

from __future__ import annotations

import contextlib
import random
import selectors
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import LedgerUnavailableError
from langchain_dpicl.privacy.extensions.durable_writer import MOST_HELD
from langchain_dpicl.privacy.ledger.shares import Share
from langchain_dpicl.stores.postgres import PostgresStore
from tests.faults.counts import Count, require
from tests.faults.leases import check_places
from tests.faults.places import Terms, reserved, settled
from tests.faults.postgres_place import PostgresPlace
from tests.postgres import PostgresServer

TERMS, LEASED = Terms(1_000_000), Terms(1_000_000, refundable=True)
PER_LEDGER = 50
SPENDERS = 2
Places = Callable[[], PostgresPlace]


def lose(places: Places, count: Count, *, trials: int) -> None:
    """Cuts the line at a COMMIT: before the server hears of it, or before the client hears back."""
    for first in range(0, trials, PER_LEDGER):
        place = places()
        TERMS.made(place)[0].close()
        with losing(place.server) as proxy:
            store = PostgresStore(place.server.conninfo(folder=proxy.folder), schema=place.schema)
            share = TERMS.declared(Budget.open(store))
            for number in range(first, min(first + PER_LEDGER, trials)):
                with count.trial(f"lost {number}"):
                    _lose(place, proxy, share, number, count)


def _lose(place: PostgresPlace, proxy: LosingProxy, share: Share, number: int, count: Count) -> None:
    lost = ("request", "answer")[number % 2]
    stands = lost == "answer"
    with place.open() as other:
        before = reserved(other)
        proxy.lose = lost
        require(_is_refused(lambda: share.reserve("t")), "granted with no word from the server")
        require(reserved(other) == before + stands, "the ledger does not hold what the server wrote")
        require(share.remaining("t") == TERMS.count - before - stands, "a spender without an answer did not find out")
        reservation = share.reserve("t")
        reservation.burn()
        before = settled(other)
        proxy.lose = lost
        require(_is_refused(lambda: reservation.commit(wait=True)), "committed with no word from the server")
        share._desk.write_waiting()  # the same again is the same
        require(settled(other) == before + 1, "one commit is there twice, or not at all")
    require(proxy.lose == "", "no line was cut")
    count.seen[f"lost {lost}s"] += 2


def _is_refused(step: Callable[[], object]) -> bool:
    try:
        step()
    except LedgerUnavailableError:
        return True
    return False


def end_sessions(places: Places, count: Count, *, trials: int, leases: bool = False) -> None:
    """Ends a spender's session at a random moment, as an operator or a failing network does."""
    for first in range(0, trials, PER_LEDGER):
        place = places()
        with spending(place, leases=leases) as told:
            for number in range(first, min(first + PER_LEDGER, trials)):
                with count.trial(f"end {number}"):
                    _wait_for_grants(told, 2)
                    time.sleep(random.uniform(0, 0.02))
                    end = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = %s"
                    count.seen["sessions ended"] += place.server.execute(end, "langchain-dpicl")[0][0]
        _check(place, told, count, leases=leases)


def crash(places: Places, count: Count, *, trials: int, leases: bool = False) -> None:
    """Kills the whole server while it is written to, and starts it again."""
    place = places()
    with spending(place, leases=leases) as told:
        for number in range(trials):
            with count.trial(f"crash {number}"):
                _wait_for_grants(told, 3)
                time.sleep(random.uniform(0, 0.02))
                try:
                    place.server.stop(signal.SIGKILL)
                finally:
                    place.server.start()
    _check(place, told, count, leases=leases)


class Told:
    """What spenders got, each with a store of its own."""

    def __init__(self) -> None:
        self.places: list[tuple[int, int]] = []
        self.refused = 0
        self.others: list[str] = []
        self.stop = threading.Event()
        self._lock = threading.Lock()

    @property
    def granted(self) -> int:
        return len(self.places)

    def spend(self, share: Share) -> None:
        while not self.stop.is_set():
            try:
                reservation = share.reserve("t")
                reservation.burn()
            except LedgerUnavailableError:
                with self._lock:
                    self.refused += 1
                time.sleep(0.005)
            except BaseException as error:
                self.others.append(f"{type(error).__name__}: {error}")
                raise
            else:
                self.places.append((reservation.entry, reservation.index))


@contextlib.contextmanager
def spending(place: PostgresPlace, *, leases: bool) -> Iterator[Told]:
    """Lets threads reserve until the block ends."""
    LEASED.made(place)[0].close()
    told = Told()
    shares = [LEASED.opened(place, most_held=MOST_HELD if leases else 1)[1] for _ in range(SPENDERS)]
    with ThreadPoolExecutor(SPENDERS) as pool:
        spenders = [pool.submit(told.spend, share) for share in shares]
        try:
            yield told
        finally:
            told.stop.set()
    require(not told.others and all(one.exception() is None for one in spenders), f"spenders failed: {told.others}")


def _wait_for_grants(told: Told, number: int) -> None:
    end, wanted = time.monotonic() + 60, told.granted + number
    while told.granted < wanted:
        require(time.monotonic() < end, "nothing is granted any more")
        time.sleep(0.002)


def _check(place: PostgresPlace, told: Told, count: Count, *, leases: bool) -> None:
    budget, _ = LEASED.opened(place)
    budget.verify()
    budget.close()
    with place.open() as store:
        found = reserved(store)
        check_places(store, told.places)
    # With leases also what an answer that was lost had, and what the spenders hold in the end.
    unused = told.refused + (told.refused + SPENDERS) * MOST_HELD * leases
    require(told.granted <= found <= told.granted + unused, f"{told.granted} granted, {found} in the ledger")
    count.seen["granted"] += told.granted
    count.seen["refused meanwhile"] += told.refused
    count.seen["stood without a word"] += found - told.granted


class LosingProxy:
    """Stands between clients and the server, on a unix socket, and cuts the line at the next COMMIT."""

    def __init__(self, server: PostgresServer) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="dpicl-px-"))
        self.lose = ""
        self._target = str(server.folder / ".s.PGSQL.5432")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(self.folder / ".s.PGSQL.5432"))
        self._socket.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed: the end
            while True:
                client, _ = self._socket.accept()
                threading.Thread(target=self._talk, args=[client], daemon=True).start()

    def _talk(self, client: socket.socket) -> None:
        server = socket.socket(socket.AF_UNIX)
        server.connect(self._target)
        with client, server, selectors.DefaultSelector() as ready, contextlib.suppress(OSError):
            ready.register(client, selectors.EVENT_READ, server)
            ready.register(server, selectors.EVENT_READ, client)
            while True:
                for key, _ in ready.select():
                    data = key.fileobj.recv(1 << 20)  # type: ignore[union-attr]
                    if not data or (key.fileobj is client and self._cut(data, server)):
                        return
                    key.data.sendall(data)

    def _cut(self, data: bytes, server: socket.socket) -> bool:
        how = self.lose
        if not how or b"INSERT" not in data or not data.endswith(b"COMMIT\0"):
            return False
        self.lose = ""
        if how == "answer":
            server.sendall(data)
            found = b""
            while not found.endswith(b"Z\0\0\0\5I"):  # ready, and in no transaction: it is done
                found += server.recv(1 << 20)
        return True

    def close(self) -> None:
        """Lets nobody in any more."""
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes who waits for the next client
        self._socket.close()
        (self.folder / ".s.PGSQL.5432").unlink()
        self.folder.rmdir()


@contextlib.contextmanager
def losing(server: PostgresServer) -> Iterator[LosingProxy]:
    """Yields a proxy to a server."""
    proxy = LosingProxy(server)
    try:
        yield proxy
    finally:
        proxy.close()
