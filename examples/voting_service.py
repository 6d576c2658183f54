"""A service that answers by private votes: FastAPI, async, a cap for each tenant, a ledger that outlives the process.

    python examples/voting_service.py            a rehearsal: no port, a ledger in a temporary folder
    python examples/voting_service.py create     makes the ledger; once
    python examples/voting_service.py serve      http://127.0.0.1:8000; or `uvicorn voting_service:create_app --factory`

Needs fastapi, uvicorn and httpx. Settings come from the environment:

    DPICL_LEDGER      a path (default: voting_service.db) or postgresql://..., which several hosts may share
    DPICL_TENANTS     who may ask: acme=KEY,globex=KEY; the key of a request decides, never what it says of itself

    POST /answers     {"question": "..."}, header X-API-Key     the label, and the receipt of what it cost
    GET  /budget      header X-API-Key                          what was promised, what is left, what you used
    GET  /health                                                503 where the ledger cannot be read

402: all answers of the data set are given. 429: yours are. 503: ledger or model is out, try again. Questions are
public, the records are not: no response, log line or error holds anything of them. The "private" records are made up.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from bank_questions import LABELS, bank_questions
from pydantic import BaseModel, Field

from langchain_dpicl import (
    DPVotingRunnable,
    EmbeddedLLM,
    PrivacyBudgetCallbackHandler,
    PrivacyBudgetExceededError,
    PrivateExamples,
    Rows,
    Serving,
)
from langchain_dpicl.exceptions import LedgerError, ModelCallError
from langchain_dpicl.results import VotingResult

if missing := [name for name in ("fastapi",) if find_spec(name) is None]:
    sys.exit(f"This example needs {missing[0]}: pip install fastapi uvicorn httpx")

from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

SIZE = 1500
NUM_SLOTS = 40
LIMITS = {"epsilon": 4.0, "delta": 1e-5}  # of the ledger, for its whole life
EPSILON = 2.0  # of this service, all its answers together
MAX_QUERIES = 200
TENANT_QUERIES = 50
REHEARSAL = ("acme", "globex")


def make_model() -> Any:
    """The model that votes. It SEES the private prompts: one that you run, or a provider that you trust with them."""
    # With a provider: from langchain_openai import ChatOpenAI; return ChatOpenAI(model="gpt-4.1-mini")
    return EmbeddedLLM()


def load_records() -> list[dict[str, str]]:
    """Reads the private records; put your own in here."""
    return bank_questions(num_per_label=SIZE)


def make_voter(budget: PrivacyBudgetCallbackHandler) -> DPVotingRunnable:
    """Declares the service's share, or finds it again: name and plan are the same after every start, on every host."""
    private = PrivateExamples(
        load_records(),
        label_key="label",
        labels=LABELS,
        public_size=dict.fromkeys(LABELS, SIZE),
        dataset_id="bank-questions",
    )
    return DPVotingRunnable.from_private_examples(
        private,
        llm=make_model(),
        budget=budget,
        component="voting service",
        epsilon=EPSILON,
        max_queries=MAX_QUERIES,
        serving=Serving(tenant_max_queries=TENANT_QUERIES),  # counted on the ledger, so over all processes
        example_prompt="question: {text}\ntopic: {label}",
        suffix="question: {input}\ntopic:",
        rows=Rows(slots=NUM_SLOTS, shots=4),
    )


@dataclass(frozen=True)
class Settings:
    """Where the ledger is, and who may ask.

    Attributes:
      ledger: a path, or postgresql://...
      tenants: name of the tenant by the SHA-256 of its key.
    """

    ledger: str = field(repr=False)  # may hold a password
    tenants: Mapping[str, str]

    @classmethod
    def of(cls, ledger: str, keys: Mapping[str, str]) -> Settings:
        """Takes keys by tenant and keeps their hashes."""
        return cls(ledger, {digest(key): tenant for tenant, key in keys.items()})

    @classmethod
    def from_environment(cls) -> Settings:
        """Reads DPICL_LEDGER and DPICL_TENANTS."""
        pairs = [pair.partition("=") for pair in os.environ.get("DPICL_TENANTS", "").split(",") if pair.strip()]
        if not pairs or not all(name.strip() and key.strip() for name, _, key in pairs):
            sys.exit("DPICL_TENANTS: expected tenants and their keys, as in acme=KEY,globex=KEY")
        keys = {name.strip(): key.strip() for name, _, key in pairs}
        return cls.of(os.environ.get("DPICL_LEDGER", "voting_service.db"), keys)


def digest(key: str) -> str:
    """Hashes a key, so that no table of keys is compared letter by letter."""
    return hashlib.sha256(key.encode()).hexdigest()


class Question(BaseModel):
    """What a caller sends."""

    question: str = Field(min_length=1, max_length=2000)


class Answer(BaseModel):
    """What a caller gets; `receipt` is proof that the ledger holds a line for it.

    `queries_left` is null where the ledger went out behind the answer, which is paid and given all the same.
    """

    label: str
    source: str
    queries_left: int | None
    receipt: dict[str, Any]


class Service:
    """The voter and its ledger between start and shutdown, and what may be shown of them: public values only."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.budget: Any = None
        self.voter: Any = None

    def start(self) -> None:
        """Opens the ledger, which must exist: one that appeared by itself would be a budget that starts again."""
        self.budget = PrivacyBudgetCallbackHandler.open(self.settings.ledger)
        self.voter = make_voter(self.budget)

    def stop(self) -> None:
        """Closes the ledger; what is asked afterwards is refused."""
        self.budget.close()

    def tenant_of(self, key: str) -> str:
        """Returns whose key it is."""
        tenant = self.settings.tenants.get(digest(key))
        if tenant is None:
            raise HTTPException(401, "X-API-Key: expected the key of a tenant.")
        return tenant

    async def answer(self, question: str, tenant: str) -> VotingResult:
        """Answers, or says why not."""
        try:
            return await self.voter.with_receipts().ainvoke(question, {"configurable": {"tenant": tenant}})
        except PrivacyBudgetExceededError:
            left = await asyncio.to_thread(self.left)  # a durable ledger is read off the event loop
        except ModelCallError:
            # Nearly always the public call, which comes first and costs nothing; behind it the ticket is burnt.
            raise HTTPException(503, "The model gave no answer. What is charged: GET /budget.") from None
        except LedgerError:
            raise unreadable() from None
        if left:
            raise HTTPException(429, f"Tenant {tenant}: all {TENANT_QUERIES} private answers are used.")
        raise HTTPException(402, f"The privacy budget is spent: all {MAX_QUERIES} private answers are given.")

    def left(self) -> int:
        """Returns how many private answers are left to all tenants together."""
        try:
            return int(self.voter.queries_left)
        except LedgerError:
            raise unreadable() from None

    def shown(self, tenant: str) -> dict[str, Any]:
        """Returns the state of the budget, as one tenant may see it."""
        left, share = self.left(), self.voter.share
        return {
            "ledger": {"epsilon": self.budget.epsilon, "delta": self.budget.delta, "adjacency": self.budget.adjacency},
            "service": {"epsilon": share.epsilon, "delta": share.delta, "answers": MAX_QUERIES, "answers_left": left},
            "tenant": {"name": tenant, "answers": TENANT_QUERIES, "answers_used": share.used_by(tenant)},
        }


def unreadable() -> HTTPException:
    """What follows where the ledger is out: nothing is granted."""
    return HTTPException(503, "The ledger cannot be read. Nothing is answered until it can.")


def service_of(request: Request) -> Service:
    """Returns the service that the application runs."""
    return request.app.state.service


Running = Annotated[Service, Depends(service_of)]


def tenant_of(service: Running, x_api_key: Annotated[str, Header(max_length=200)]) -> str:
    """Returns who asks, by the key alone."""
    return service.tenant_of(x_api_key)


Tenant = Annotated[str, Depends(tenant_of)]
routes = APIRouter()


@routes.post("/answers")
async def answers(asked: Question, tenant: Tenant, service: Running) -> Answer:
    """Answers a question by a private vote; the same question of the same tenant is free."""
    told = await service.answer(asked.question, tenant)
    receipt = told.receipt
    left = receipt.queries_left
    return Answer(label=told.label, source=receipt.source, queries_left=left, receipt=receipt.model_dump())


@routes.get("/budget")
def budget(tenant: Tenant, service: Running) -> dict[str, Any]:  # not async: runs in a thread, as the ledger may wait
    """Shows what was promised, what is left, and what the tenant used."""
    return service.shown(tenant)


@routes.get("/health")
def health(service: Running) -> dict[str, str]:
    """Says whether the ledger can be read, without which nothing is answered."""
    service.left()
    return {"status": "ok"}


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Opens the ledger at the start, and closes it at shutdown, when the server has let running requests finish."""
    await asyncio.to_thread(app.state.service.start)
    try:
        yield
    finally:
        await asyncio.to_thread(app.state.service.stop)


async def unreadable_request(request: Request, error: RequestValidationError) -> JSONResponse:
    """Says what was expected, and repeats nothing of what was sent."""
    del request
    wrong = sorted({".".join(str(part) for part in fault["loc"]) for fault in error.errors()})
    expected = 'a question of 1 to 2000 characters as {"question": "..."}, and the header X-API-Key'
    return JSONResponse({"detail": f"Expected {expected}. Look at: {', '.join(wrong)}."}, 422)


def create_app(settings: Settings | None = None) -> FastAPI:
    """Makes the application."""
    app = FastAPI(title="Private votes", lifespan=lifespan)
    app.state.service = Service(Settings.from_environment() if settings is None else settings)
    app.add_exception_handler(RequestValidationError, unreadable_request)
    app.include_router(routes)
    return app


async def rehearse(settings: Settings) -> None:
    """Asks the application in this process, without a port, as two tenants."""
    import httpx

    app = create_app(settings)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://rehearsal") as client:
            print("GET  /health  ", (await client.get("/health")).json())
            asked = ["Why was my card payment declined?", "Where is my transfer?", "Where is my transfer?"]
            for tenant in REHEARSAL:
                headers = {"X-API-Key": f"key of {tenant}"}
                for question in asked:
                    answer = await client.post("/answers", json={"question": question}, headers=headers)
                    shown = answer.json()
                    print(f"POST /answers  {tenant}: {question} ->", shown["label"], f"({shown['source']})")
                print("GET  /budget  ", (await client.get("/budget", headers=headers)).json()["tenant"])
            stranger = await client.post("/answers", json={"question": "?"}, headers={"X-API-Key": "guessed"})
            print("a wrong key   ", stranger.status_code, stranger.json()["detail"])
            print("GET  /budget  ", (await client.get("/budget", headers=headers)).json()["service"])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A service that answers by private votes.")
    parser.add_argument("step", nargs="?", choices=("create", "serve"), help="default: a rehearsal")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args(argv)
    if options.step == "create":
        where = os.environ.get("DPICL_LEDGER", "voting_service.db")
        PrivacyBudgetCallbackHandler.create(where, **LIMITS).close()
        print("Made the ledger. From now on it is opened, by as many processes as you like: serve")
    elif options.step == "serve":
        import uvicorn

        uvicorn.run(create_app(), port=options.port, timeout_graceful_shutdown=30)
    else:
        with tempfile.TemporaryDirectory() as folder:
            ledger = str(Path(folder, "budget.db"))
            PrivacyBudgetCallbackHandler.create(ledger, **LIMITS).close()
            asyncio.run(rehearse(Settings.of(ledger, {tenant: f"key of {tenant}" for tenant in REHEARSAL})))


if __name__ == "__main__":
    main()
