"""L2: kill -9 of an agent that asks by the official client of MCP, and of the server that answers it, at random moments.

Private calls never exceed the tickets of the ledger, and no two answers have one ticket.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.stores import SQLiteStore
from tests import ledgers
from tests.faults import storms
from tests.faults.children import Child, Teller
from tests.faults.counts import Count, require

DOORS = {
    "ask": storms.voting_component,
    "answer": storms.free_form_component,
    "retrieve_and_answer": storms.retrieval_component,
}
KEY = "agent-key-000000001"
LONGEST = 0.2
PER_LEDGER = 25


def storm(folder: Path, count: Count, *, trials: int) -> None:
    """Kills `trials` processes, a server and an agent at a time, and compares private calls with tickets."""
    pytest.importorskip("mcp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledgers.accounting, "epsilon_bound", ledgers.free_price)
        _import_all()
        for first in range(0, trials, PER_LEDGER):
            ledger = AgentsLedger(folder / f"{first}.db", "agents")
            for number in range(first, min(first + PER_LEDGER, trials), 2):
                with count.trial(f"agents, kill {number}"):
                    count.trials += 1  # the second of the two
                    ledger.kill_two()
                    ledger.check()
            count.seen["private calls of agents"] += ledger.calls
            count.seen["answers"] += len(ledger.told)


def _import_all() -> None:
    """Imports what the processes need here, and not in each of them."""
    import httpx2  # noqa: F401
    import mcp  # noqa: F401
    import uvicorn  # noqa: F401

    import langchain_dpicl.service.tools  # noqa: F401

    _service(Budget(epsilon=1e6, delta=1e-4), lambda: None)


def _service(budget: Budget, note: Any) -> Any:
    from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
    from langchain_dpicl.service.service import Keys, Service, Tenant, digest

    doors = {name: make(budget, note) for name, make in DOORS.items()}
    keys = Keys({digest(KEY): Tenant("agent")})
    return Service(PrivacyBudgetCallbackHandler.from_budget(budget), doors, tenants=keys)


class AgentsLedger(storms.KilledLedger):
    """A ledger, its private calls, and the tickets of the answers that agents got."""

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(path, name)
        self.told: list[tuple[int, int]] = []

    def kill_two(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as at:
            server = Child(lambda tell: self.serve(tell, at))
            agent = Child(lambda tell: self.ask(tell, at.getsockname()[1]))
            agent.wait_for_a_word()  # it has been answered once, or stands alone
            first, second = random.sample([server, agent], 2)
            time.sleep(random.uniform(0, LONGEST))
            first.kill()
            time.sleep(random.uniform(0, LONGEST / 4))
            second.kill()
        served, asked = server.lines(), agent.lines()
        errors = [line for line in [*served, *asked] if isinstance(line, dict) and "error" in line]
        require(not errors, f"a child failed: {errors}")
        self.told += [(line[0], line[1]) for line in asked if isinstance(line, list)]
        require(len(set(self.told)) == len(self.told), "two answers have one ticket")

    def serve(self, tell: Teller, at: socket.socket) -> None:
        """Serves agents until it is killed."""
        import uvicorn

        from langchain_dpicl.service.tools import create_app

        del tell
        notes = os.open(self.noted, os.O_WRONLY | os.O_APPEND)
        # Without leases, whose tickets would hide a call that none paid for.
        budget = Budget.open(SQLiteStore(self.path, timeout=60.0), most_held=1)
        service = _service(budget, lambda: os.write(notes, b"."))
        config = uvicorn.Config(create_app(service), log_level="critical")
        uvicorn.Server(config).run(sockets=[at])

    def ask(self, tell: Teller, port: int) -> None:
        """Asks until it is killed, or its server is."""
        import httpx2
        from mcp import Client
        from mcp.client.streamable_http import streamable_http_client

        async def asking() -> None:
            async with (
                httpx2.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as http,
                Client(streamable_http_client(f"http://127.0.0.1:{port}/mcp", http_client=http)) as client,
            ):
                while True:
                    door = random.choice([*DOORS])
                    question = "cough" if door == "retrieve_and_answer" else f"what now, {random.random()}?"
                    found = await client.call_tool(door, {"question": question})
                    require(not found.is_error, f"refused: {found.structured_content}")
                    receipt = found.structured_content["receipt"]
                    if receipt["tickets"]:
                        tell([receipt["entry"], receipt["index"]])

        try:
            asyncio.run(asking())
        except BaseException as error:
            if "Violation" in repr(error) or "nternal" in repr(error):  # the server answered, and not as it should
                raise
            tell("the server is gone")
