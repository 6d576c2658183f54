"""A worker that serves nothing, for the process that keeps workers running."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections.abc import Callable

from langchain_dpicl.cli.main import explain
from langchain_dpicl.cli.serve import _keep_workers, _say_nothing, _work
from langchain_dpicl.exceptions import ConfigurationError


def idle(say: Callable[[str], object]) -> int:
    """Says that it was built, writes its number, and waits; with `fault` it cannot be built, with `later` the first can.

    With `killed` it ends before it is built.
    """
    if "killed" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    if "fault" in sys.argv or ("later" in sys.argv and say is _say_nothing):
        raise ConfigurationError("settings: expected others.")
    say("serving nothing")
    os.write(1, f"{os.getpid()}\n".encode())
    while True:
        time.sleep(3600)


def keep() -> int:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run below nohup, which lets it be ignored
    work = functools.partial(_work, idle, explain)
    return _keep_workers(2, work, lambda text: os.write(1, f"{text}\n".encode()), closing=15)
