"""Starts the process of a private model, and exchanges messages with it as JSON with bytes and arrays bit by bit."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import queue
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from langchain_dpicl import exceptions
from langchain_dpicl._opaque import PerProcess
from langchain_dpicl.backends.private_calls.call import DEFAULT_CONCURRENCY, OpaqueValue, RetryPolicy
from langchain_dpicl.backends.private_calls.method_checks import allowed_wrappers
from langchain_dpicl.backends.sync_async import bare, concurrency_limit, run_in_thread, wait_for_thread
from langchain_dpicl.exceptions import ConfigurationError, DPICLError, ModelCallError

_HEAD = struct.Struct(">QQ")
_READ = 1 << 20
"""Bytes read at once."""


def pack(message: Any) -> bytes:
    """Returns a message as one frame; raises TypeError for a value that has no form here.

    Boxes are opened, texts may hold lone surrogates, and sequences become lists.

    >>> unpack(pack({"rows": np.zeros((1, 2)), "tokens": (b"a", 7)}))
    {'rows': array([[0., 0.]]), 'tokens': [b'a', 7]}
    """
    buffers: list[bytes] = []

    def other(value: Any) -> Any:
        if isinstance(value, OpaqueValue):
            return value.reveal()
        if isinstance(value, bytes):
            return {"$bytes": value.decode("latin-1")}
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:  # whose bytes are addresses
            buffers.append(value.tobytes())
            return {"$array": [value.dtype.str, list(value.shape)]}
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, Sequence):
            return list(value)
        raise TypeError(f"expected text, numbers, bytes and arrays, found {type(value).__name__}")

    text = json.dumps(message, default=other).encode()
    return b"".join([_HEAD.pack(len(text), sum(map(len, buffers))), text, *buffers])


def unpack(frame: bytes) -> Any:
    """Returns the message of a whole frame."""
    at = _HEAD.size + _HEAD.unpack_from(frame)[0]
    text = frame[_HEAD.size : at].decode()

    def other(found: dict[str, Any]) -> Any:
        nonlocal at
        if "$bytes" in found:
            return found["$bytes"].encode("latin-1")
        if "$array" not in found:
            return found
        dtype, shape = np.dtype(found["$array"][0]), found["$array"][1]
        array = np.frombuffer(frame, dtype, int(np.prod(shape, dtype=np.int64)), at).reshape(shape).copy()
        at += array.nbytes
        return array

    return json.loads(text, object_hook=other)


def send(descriptor: int, frame: bytes) -> None:
    """Writes a frame; raises OSError where nothing reads any more."""
    rest = memoryview(frame)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def receive(descriptor: int) -> Any:
    """Returns the next message; raises EOFError at the end, also in the middle of a frame."""
    head = _read(descriptor, _HEAD.size)
    return unpack(head + _read(descriptor, sum(_HEAD.unpack(head))))


def _read(descriptor: int, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = os.read(descriptor, min(_READ, size - len(parts)))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


Message: TypeAlias = dict[str, Any]

_INSIDE = "DPICL_PRIVATE_PROCESS"
"""Set in the environment of a private model's process, and of those that it starts: these start no other."""

START_SECONDS = 900.0
"""How long the process may take to start and to make its model, which may have to be loaded."""

MOST_FAILED_STARTS = 3
"""Starts in a row that may fail for public calls before no other is tried, and for the private rows of one request."""

DROPPED_NAMES = frozenset(
    {
        "ANTHROPIC_LOG",
        "AUTOWRAPT_BOOTSTRAP",
        "DYLD_INSERT_LIBRARIES",
        "HTTPX_LOG_LEVEL",
        "LD_AUDIT",
        "LD_PRELOAD",
        "LITELLM_LOG",
        "OPENAI_LOG",
        "SSLKEYLOGFILE",
    }
)
"""Environment variables that the process does not inherit, by name."""

DROPPED_PREFIXES = (
    "AGENTOPS_",
    "ARIZE_",
    "BRAINTRUST_",
    "COVERAGE_",
    "COV_CORE_",
    "DATADOG_",
    "DD_",
    "ELASTIC_APM_",
    "HELICONE_",
    "HONEYHIVE_",
    "INSTANA_",
    "LANGCHAIN_",
    "LANGFUSE_",
    "LANGSMITH_",
    "LANGTRACE_",
    "LITELLM_CALLBACK",
    "LMNR_",
    "LOGFIRE_",
    "LUNARY_",
    "MLFLOW_",
    "NEW_RELIC_",
    "OPENINFERENCE_",
    "OPENLIT_",
    "OPIK_",
    "OTEL_",
    "PHOENIX_",
    "PYTHON",
    "SENTRY_",
    "SPLUNK_",
    "SUBPROCESS_SENTRY_",
    "TRACELOOP_",
    "WANDB_",
    "WEAVE_",
)
"""Environment variables that the process does not inherit, by their beginnings."""

_BOOT = """\
import json, os, sys
inlet, outlet, null = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDWR)
os.dup2(null, 0), os.dup2(null, 1), os.dup2(null, 2)
line = b""
while not line.endswith(b"\\n"):
    more = os.read(inlet, 1)
    if not more:
        sys.exit()
    line += more
sys.path[:] = json.loads(line)
from langchain_dpicl.backends.private_process.child import main
main(inlet, outlet)
"""
# What a package prints as it is imported reaches nothing, and the paths of the parent stand in no command line.


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without what starts or configures instrumentation.

    >>> clean_environment({"OTEL_SERVICE_NAME": "web", "PYTHONPATH": "/agent", "OPENAI_API_KEY": "k", "HOME": "/h"})
    {'OPENAI_API_KEY': 'k', 'HOME': '/h'}
    """
    return {
        name: value
        for name, value in environment.items()
        if name.upper() not in DROPPED_NAMES and not name.upper().startswith(DROPPED_PREFIXES)
    }


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a request.

    Attributes:
      kind: "done"; "fault": a public error of the engine; "failed": an error whose text may be private; "lost": the
        process ended, or did not answer in time.
      value: what was returned, hidden.
      error: of a fault.
    """

    kind: Literal["done", "fault", "failed", "lost"]
    value: OpaqueValue[Any] | None = field(default=None, repr=False)
    error: DPICLError | None = None

    @classmethod
    def of(cls, reply: Message) -> Answer:
        """Returns the answer in a reply of the process."""
        if reply["kind"] == "fault":
            return cls("fault", error=getattr(exceptions, reply["error"])(reply["text"]))
        return cls(reply["kind"], OpaqueValue(reply.get("value")))


LOST = Answer("lost")


class Connection:
    """One process and its pipes. A thread writes and another reads, so that no caller's frame holds a frame's bytes.

    Where the system has no room for it that raises OSError or RuntimeError, and leaves nothing behind.
    """

    def __init__(self) -> None:
        if _INSIDE in os.environ:  # it may import the same module and start another, without end
            raise ConfigurationError(
                "PrivateProcess: expected a model that is made without another one, found one that starts in its "
                "process. Have the function make the model itself, in a module that starts no PrivateProcess: it is "
                "imported there."
            )
        if not sys.executable:
            raise ConfigurationError("PrivateProcess: expected a Python interpreter to start, found no sys.executable.")
        pipes: list[int] = []
        try:
            own_in, inlet = pipes[:2] = os.pipe()
            outlet, own_out = pipes[2:] = os.pipe()
            self._process = subprocess.Popen(  # noqa: S603  our own interpreter
                [sys.executable, "-I", "-c", _BOOT],
                stdin=own_in,
                stdout=own_out,
                stderr=subprocess.DEVNULL,
                env={**clean_environment(os.environ), _INSIDE: "1"},
                start_new_session=True,  # Ctrl-C in a terminal is for the parent
            )
        except BaseException:
            for descriptor in pipes:
                os.close(descriptor)
            raise
        os.close(own_in)
        os.close(own_out)
        self._descriptors = [inlet, outlet]
        self._waiting: dict[int, Future[Answer]] = {}
        self._outbox: queue.SimpleQueue[tuple[int, Message] | None] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self.is_lost = False
        _OPEN.add(self)
        for place, work in enumerate((self._write, self._read)):
            try:
                threading.Thread(target=work, name="dpicl-private-process", daemon=True).start()
            except RuntimeError:  # no room for one
                self.kill()
                for unused in range(place, 2):  # a thread that runs closes its own
                    self._close(unused)
                raise

    def post(self, message: Message, *, number: int | None = None) -> tuple[int, Future[Answer]]:
        """Sends a message without waiting; returns its number and the answer to come."""
        number = next(self._numbers) if number is None else number
        future: Future[Answer] = Future()
        if message["does"] not in {"cancel", "close"}:
            self._waiting[number] = future
        self._outbox.put((number, message))
        if self.is_lost:
            self._settle(number, LOST)
        return number, future

    def wait(self, message: Message, seconds: float) -> Answer:
        """Sends a message and waits for its answer; the process is killed if none comes in time."""
        number, future = self.post(message)
        try:
            return future.result(seconds)
        except LateError:
            pass
        except BaseException:  # Ctrl-C
            self._forget(number)
            raise
        self.kill()
        return LOST

    async def await_answer(self, message: Message, seconds: float) -> Answer:
        """Async twin of `wait`; a cancelled task cancels the call in the process."""
        number, future = self.post(message)
        try:
            async with asyncio.timeout(seconds):
                await wait_for_thread(future)
        except TimeoutError:
            pass
        except BaseException:  # a cancelled task
            self._forget(number)
            raise
        if future.done():
            return future.result()
        self.kill()
        return LOST

    def kill(self) -> None:
        """Ends the process; its threads close the pipes."""
        self.is_lost = True
        self._process.kill()
        self._outbox.put(None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)  # until the system has taken note of it
        self._settle_all()

    def drop_descriptors(self) -> None:
        """Closes the pipes in a forked process, which would keep the child of its parent alive."""
        for place in (0, 1):
            self._close(place)

    def _forget(self, number: int) -> None:
        self._waiting.pop(number, None)
        self.post({"does": "cancel"}, number=number)

    def _settle(self, number: int, answer: Answer) -> None:
        future = self._waiting.pop(number, None)
        if future is not None:
            future.set_result(answer)

    def _settle_all(self) -> None:
        for number in [*self._waiting]:
            self._settle(number, LOST)

    def _write(self) -> None:
        try:
            send(self._descriptors[0], json.dumps([str(Path(path).absolute()) for path in sys.path]).encode() + b"\n")
            while (item := self._outbox.get()) is not None:
                self._send(*item)
                del item  # until the next one comes, nothing of this one is held
        except Exception:  # noqa: BLE001  nothing of a frame reaches `threading.excepthook`
            self._process.kill()
        self._close(0)

    def _send(self, number: int, message: Message) -> None:
        try:
            frame = pack({"id": number, **message})
        except Exception:  # noqa: BLE001  the caller learns that it failed, and not of what
            self._settle(number, Answer("failed"))
            return
        send(self._descriptors[0], frame)

    def _read(self) -> None:
        with contextlib.suppress(Exception):  # the end, or a reply that cannot be read: its bytes are private
            while True:
                self._take(receive(self._descriptors[1]))
        self.is_lost = True
        self._process.kill()  # it may wait for somebody to read
        self._outbox.put(None)
        self._close(1)
        self._process.wait()
        self._settle_all()

    def _take(self, reply: Message) -> None:
        self._settle(reply["id"], Answer.of(reply))

    def _close(self, place: int) -> None:
        descriptor, self._descriptors[place] = self._descriptors[place], -1
        if descriptor >= 0:
            os.close(descriptor)


_OPEN: weakref.WeakSet[Connection] = weakref.WeakSet()


def _drop_in_forked_process() -> None:
    for connection in list(_OPEN):
        connection.drop_descriptors()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_in_forked_process)


class _Here:
    """The process that one process of the application has started; neither pipes nor threads survive a fork.

    Attributes:
      failed_starts: of the shared process, in a row, for public calls alone: how many starts private rows try, and
        whether public calls need a spare process, depends on the rows, and so decides nothing that others see.
      spare_turn: one spare process starts at a time: a crash may leave many calls that need one.
    """

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.spare_turn = threading.Lock()
        self.connection: Connection | None = None
        self.failed_starts = 0


class Client:
    """A model in a process of its own, as engines call it; threads and event loops share the process."""

    def __init__(self, start: Mapping[str, Any], *, name: str, retry: RetryPolicy) -> None:
        self._start = OpaqueValue(dict(start))  # arguments may be keys
        self._row_seconds = retry.max_attempts * (retry.deadline + retry.max_wait)
        self._places = PerProcess(_Here)
        self._is_closed = self._was_started = False
        self.name = name
        self.facts: dict[str, Any] = {}
        weakref.finalize(self, _end, self._places)

    def connected(self, *, is_public: bool = True) -> Connection:
        """Returns the process, started if there is none.

        Args:
          is_public: whether it is for a public call, whose failed starts count.

        Raises:
          ConfigurationError: the model was closed, or could not be made.
          ModelCallError: the process does not start.
        """
        here = self._places.here
        with here.turn:
            self._check_open()
            if here.connection is None or here.connection.is_lost:
                try:
                    here.connection = self.started()
                except DPICLError:
                    here.failed_starts += is_public
                    raise
                if self._is_closed:  # between the check in `started` and here
                    here.connection.kill()
            self._check_open()
            if is_public:  # also where private rows started it
                here.failed_starts = 0
            return here.connection

    def started(self) -> Connection:
        """Returns a new process, which has made its model; see `connected`."""
        here = self._places.here
        self._check_open()
        if here.failed_starts >= MOST_FAILED_STARTS:
            raise ModelCallError(
                f"the private process of {self.name} failed to start {MOST_FAILED_STARTS} times in a row. Look at the "
                "memory of this machine and at what makes the model, then make another PrivateProcess"
            )
        refused = ""
        try:
            connection = Connection()
        except (OSError, RuntimeError) as error:  # no private text: nothing was sent
            refused = f"{type(error).__name__}: {error}"
        if refused:
            raise ModelCallError(
                f"the private process of {self.name} could not be started ({refused}). Look at the limits of this "
                "system on processes, threads and memory, and whether the Python that runs here can be started"
            )
        try:
            start = {"does": "start", "allowed": allowed_wrappers(), "how": self._start}
            answer = connection.wait(start, START_SECONDS)
        except BaseException:  # Ctrl-C
            connection.kill()
            raise
        if self._is_closed:
            connection.kill()
            self._check_open()
        if answer.kind == "done":
            self._was_started = True
            return connection
        connection.kill()
        if answer.error is not None and not self._was_started:
            raise bare(answer.error)
        raise ModelCallError(  # a restart serves private rows, which abstain whatever it was
            f"the private process of {self.name} ended as it started. Look at the memory of this machine, and whether "
            "langchain_dpicl and the model can be imported and made by the Python that runs here"
        )

    def ask(
        self,
        compose: Callable[[Connection], Message],
        rows: int,
        spare: Spare | None = None,
        *,
        is_public: bool = False,
    ) -> Answer:
        """Sends what `compose` returns for the process as it is now, and waits.

        Args:
          compose: returns the message; may hold boxes of private text.
          rows: how many rows the message is about, which the wait is for.
          spare: the process to take, instead of the shared one.
          is_public: whether the call is public.
        """
        try:
            connection = self.connected(is_public=is_public) if spare is None else spare.connected()
        except ModelCallError:
            if is_public:
                raise
            return LOST
        limit = concurrency_limit()
        return connection.wait({**compose(connection), "limit": limit}, self._seconds(rows, limit))

    async def aask(
        self,
        compose: Callable[[Connection], Message],
        rows: int,
        spare: Spare | None = None,
        *,
        is_public: bool = False,
    ) -> Answer:
        """Async twin of `ask`; the process is started in a thread."""
        self._check_open()
        here = self._places.here
        connection = here.connection if spare is None else spare.connection
        if connection is None or connection.is_lost:
            try:
                start = partial(self.connected, is_public=is_public) if spare is None else spare.connected
                connection = await run_in_thread(start)
            except ModelCallError:
                if is_public:
                    raise
                return LOST
        elif is_public and spare is None:
            here.failed_starts = 0
        limit = concurrency_limit()
        message = {**compose(connection), "limit": limit, "awaited": True}
        return await connection.await_answer(message, self._seconds(rows, limit))

    def facts_of(self, role: str) -> dict[str, Any]:
        """Returns what is public of the model's engine in a role; the first call makes it, and may probe the model."""
        if role not in self.facts:
            asked = {"does": "facts", "role": role}
            seconds = max(START_SECONDS, self._row_seconds)
            answer = self.connected().wait(asked, seconds)
            if answer.kind == "lost":  # perhaps by a private row of another component; see `ProcessEngine`
                spare = Spare(self)
                try:
                    answer = spare.connected().wait(asked, seconds)
                finally:
                    spare.close()
            self.facts[role] = self.public_value(answer)
        facts: dict[str, Any] = self.facts[role]
        return facts

    def public_value(self, answer: Answer) -> Any:
        """Returns what a public call brought, or raises its error."""
        if answer.kind == "done" and answer.value is not None:
            return answer.value.reveal()
        if answer.error is not None:
            raise bare(answer.error)
        what = "failed" if answer.kind == "failed" else "ended, or did not answer in time,"
        raise ModelCallError(
            f"the private process of {self.name} {what} during a public call. The next call starts another; look at "
            "the memory of this machine if that happens again"
        )

    def close(self) -> None:
        """Ends the process of this process of the application; later calls are refused."""
        self._is_closed = True
        _end(self._places)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigurationError(f"the private process of {self.name} is closed; make another PrivateProcess")

    def _seconds(self, rows: int, limit: int | None) -> float:
        """Returns the most seconds that so many rows may take, one after the other where they wait for each other."""
        waves = -(-max(rows, 1) // min(limit or DEFAULT_CONCURRENCY, DEFAULT_CONCURRENCY))
        return self._row_seconds * waves


class Spare:
    """A process for rows and public calls that were under way when the shared one ended: each is alone in it.

    A row that ends its process must not take others along, whatever else is asked meanwhile.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._failed_starts = 0
        self._is_closed = False
        self.connection: Connection | None = None

    def connected(self) -> Connection:
        """Returns the process, started if there is none; errors as `Client.connected`, also after failed starts."""
        if self.connection is None or self.connection.is_lost:
            if self._failed_starts >= MOST_FAILED_STARTS:
                raise ModelCallError("the private process failed to start for earlier rows")
            self._failed_starts += 1
            with self._client._places.here.spare_turn:  # noqa: SLF001  its own module
                self.connection = self._client.started()
            self._failed_starts = 0
            if self._is_closed:  # by a coroutine that was closed, while a thread went on to start it
                self.connection.kill()
        return self.connection

    def close(self) -> None:
        """Ends the process."""
        self._is_closed = True
        if self.connection is not None:
            self.connection.kill()


def _end(places: PerProcess[_Here]) -> None:
    here = places.here
    if here.connection is not None:
        here.connection.kill()
