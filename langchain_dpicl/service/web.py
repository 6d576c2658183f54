"""The service over HTTP: plain JSON, metrics for Prometheus, and a page for operators."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.resources import files
from typing import Annotated, Any, TypeAlias

from fastapi import APIRouter, Body, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from fastapi.security import HTTPBearer
from pydantic import BaseModel, Field
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from langchain_dpicl.budget.metrics import DPICLMetrics
from langchain_dpicl.service.service import (
    BUDGET,
    DEMONSTRATIONS,
    DOORS,
    Keys,
    OperatorView,
    RefusedError,
    Service,
    Tenant,
    authorization_of,
    bearer_of,
)

_OF_OPERATORS = frozenset({"/", "/standing", "/metrics"})
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}


@dataclass(frozen=True, slots=True)
class Running:
    """What an application serves.

    Attributes:
      service: answers tenants.
      metrics: of the ledger and of this process.
      operators: whose key opens the page and the metrics; None: neither is offered.
      view: what the page shows.
      close: ends it.
    """

    service: Service
    metrics: DPICLMetrics
    operators: Keys | None
    view: OperatorView
    close: Callable[[], object]


class Question(BaseModel):
    """What a tenant sends."""

    question: str = Field(description="Public: it is sent to the model with the private examples.")


class Answer(BaseModel):
    """What a tenant gets.

    `queries_left` is null where the ledger could not be read behind the answer, which is paid for all the same.
    """

    answer: str
    abstained: bool
    source: str = Field(
        description='"release": charged; "memo": given before, free; "zero-shot": without records, free.'
    )
    queries_left: int | None
    receipt: dict[str, Any] = Field(description="Proof that the ledger holds a line for the answer. Keep it.")

    model_config = {"extra": "allow"}


class Refused(BaseModel):
    """What a caller gets instead of an answer."""

    error: str = Field(description="One word for programs.")
    detail: str = Field(description="A sentence for people.")


# Async, so that neither /health nor a refusal waits for a thread: those who read the ledger hold them.
async def _running(request: Request) -> Running:
    found: Running = request.app.state.running
    return found


Here: TypeAlias = Annotated[Running, Depends(_running)]
_bearer = HTTPBearer(auto_error=False, description="The key of a tenant.")


async def _tenant(request: Request, here: Here, _: Annotated[Any, Depends(_bearer)]) -> Tenant:
    """Returns who asks, by the key alone; the scheme of FastAPI is for the description."""
    return here.service.tenant_of(bearer_of(authorization_of(request.headers.raw)))


Asking: TypeAlias = Annotated[Tenant, Depends(_tenant)]


async def _operator(request: Request, here: Here) -> None:
    """Lets operators in, by their key as a bearer token or as the password that a browser asks for."""
    if here.operators is None:
        raise RefusedError(404, "not_offered", "No key of an operator is configured, so nothing is shown here.")
    given = authorization_of(request.headers.raw)
    if here.operators.owner(_key_in(given)) is None:
        refused = RefusedError(401, "unknown_key", "Expected the key of an operator.")
        # A browser first asks without a key, to learn that one is wanted.
        raise here.service.refuse(refused, door="operators") if given else refused


def _key_in(header: str) -> str | None:
    kind, _, given = header.partition(" ")
    if kind.lower() != "basic":
        return bearer_of(header)
    try:
        return base64.b64decode(given, validate=True).decode().partition(":")[2]
    except ValueError:  # no Base64 or no UTF-8
        return None


_REFUSALS: dict[int | str, dict[str, Any]] = {
    401: {"model": Refused, "description": "the key is no tenant's"},
    402: {"model": Refused, "description": "the privacy budget is spent"},
    404: {"model": Refused, "description": "not offered by this service"},
    413: {"model": Refused, "description": "the question is too long"},
    422: {"model": Refused, "description": "no question was found"},
    429: {"model": Refused, "description": "the tenant's answers are used, or it asks too often (Retry-After)"},
    503: {"model": Refused, "description": "the ledger or the model cannot be used now"},
}

public = APIRouter()
operators = APIRouter(dependencies=[Depends(_operator)], include_in_schema=False)


def _tenants(service: Service) -> APIRouter:
    """Returns the routes of what is offered."""
    router = APIRouter(responses=_REFUSALS)
    for name in service.doors:
        _add_door(router, name)
    if service.demonstrations is not None:
        router.get("/demonstrations", summary=DEMONSTRATIONS, operation_id="demonstrations")(_demonstrations)
    router.get("/budget", summary=BUDGET, operation_id="budget")(_budget)
    return router


def _add_door(router: APIRouter, name: str) -> None:
    @router.post(f"/{name}", summary=DOORS[name], operation_id=name)
    async def asked(body: Annotated[Question, Body()], tenant: Asking, here: Here) -> Answer:
        return Answer.model_validate(await here.service.ask(name, body.question, tenant))


async def _demonstrations(tenant: Asking, here: Here) -> dict[str, Any]:
    return here.service.released(tenant)


# Not async: it runs in a thread, since it can wait for the ledger.
def _budget(tenant: Asking, here: Here) -> dict[str, Any]:
    return here.service.standing(tenant)


@public.head("/health", include_in_schema=False)
@public.get(
    "/health", summary="Whether the ledger and its anchor can be read, without which nothing private is answered."
)
async def _health(here: Here) -> dict[str, str]:
    await here.service.check()
    return {"status": "ok"}


@operators.get("/metrics")
def _metrics(here: Here) -> PlainTextResponse:
    return PlainTextResponse(here.metrics.text(), media_type="text/plain; version=0.0.4")


@operators.get("/standing")
def _standing(here: Here) -> JSONResponse:
    return JSONResponse(here.view.to_dict())


@operators.get("/")
def _page() -> HTMLResponse:
    page = (files("langchain_dpicl.service") / "page.html").read_text(encoding="utf-8")
    return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY})


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)  # noqa: S101  registered for this class
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if error.status == 401:
        is_page = request.scope["path"] in _OF_OPERATORS  # request.url also rests on the host that was sent
        headers["WWW-Authenticate"] = 'Basic realm="operators"' if is_page else "Bearer"
    return JSONResponse(error.to_dict(), error.status, headers)


async def _not_understood(request: Request, error: Exception) -> Response:
    """Says what was expected, and repeats nothing of what was sent."""
    del request, error
    said = 'Expected a question as JSON: {"question": "..."}, with Content-Type: application/json.'
    return JSONResponse(RefusedError(422, "no_question", said).to_dict(), 422)


async def _unknown(request: Request, error: Exception) -> Response:
    """Answers for what no route takes, and for a body that is no JSON at all."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    if status == 400:
        return await _not_understood(request, error)
    detail = "Nothing is offered at this address by this method. /openapi.json lists what is."
    return JSONResponse({"error": "not_offered", "detail": detail}, status)


class _Guard:
    """Refuses bodies that are too long before they are read whole, and adds headers to every response.

    An error that nobody foresaw ends here: further out, its words would stand in the log of the server.
    """

    def __init__(self, app: ASGIApp, *, service: Service) -> None:
        self._app, self._service = app, service
        # Of a letter JSON may need twelve bytes; the rest of a body is short.
        self._most = 12 * service.limits.max_query_chars + 1000

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        is_started = False

        async def headed(message: Message) -> None:
            nonlocal is_started
            is_started = True
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        body = await self._body(receive)
        if body is None:
            return  # nobody is there any more
        if len(body) > self._most:
            refused = RefusedError(413, "too_long", f"Expected a body of at most {self._most:,} bytes.")
            await JSONResponse(refused.to_dict(), 413)(scope, receive, headed)
            return
        given = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def replayed() -> Message:
            return next(given, None) or await receive()

        try:
            await self._app(scope, replayed, headed)
        except Exception as error:  # noqa: BLE001
            fault = self._service.fault(error, "web")
            if not is_started:
                await JSONResponse(fault.to_dict(), fault.status)(scope, receive, headed)

    async def _body(self, receive: Receive) -> bytes | None:
        """Returns the body, or somewhat more of it than is allowed."""
        body, more = b"", True
        while more and len(body) <= self._most:
            message = await receive()
            if message["type"] != "http.request":
                return None
            body, more = body + message.get("body", b""), message.get("more_body", False)
        return body


def create_app(running: Running) -> FastAPI:
    """Returns the application of what is running, which ends when the server has let running requests finish."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.to_thread(running.close)

    # The pages of FastAPI for trying things out load scripts from elsewhere.
    app = FastAPI(title="Private answers", lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.running = running
    app.add_middleware(_Guard, service=running.service)
    app.add_exception_handler(RefusedError, _refused)
    app.add_exception_handler(RequestValidationError, _not_understood)
    app.add_exception_handler(HTTPException, _unknown)
    for router in (public, _tenants(running.service), operators):
        app.include_router(router)
    return app
