"""The service as tools of the Model Context Protocol, over standard input and output or HTTP."""

# Thin on purpose: who asks is decided here, everything else in `service`.

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping
from typing import Any

import anyio
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.server.transport_security import TransportSecuritySettings
from mcp.types import CallToolRequestParams, CallToolResult, ListToolsResult, TextContent, Tool, ToolAnnotations
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from langchain_dpicl.backends.sync_async import run_in_thread
from langchain_dpicl.reports.rendering import own_version
from langchain_dpicl.service.service import (
    BUDGET,
    DEMONSTRATIONS,
    DOORS,
    RefusedError,
    Service,
    Tenant,
    authorization_of,
    bearer_of,
    not_offered,
)

_NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_INSTRUCTIONS = (
    "Answers come from private examples under differential privacy. Each new question costs a ticket of a budget that "
    "is never refilled; the same question again is free. Ask only what you need, and look at the budget first."
)


def create_server(service: Service, tenant: Tenant | None = None) -> Server[Any]:
    """Returns the server.

    Args:
      service: what answers.
      tenant: who asks; None: whose key the bearer token of each HTTP request is.
    """

    async def listed(_: Any, __: Any) -> ListToolsResult:
        return ListToolsResult(tools=tools_of(service))

    async def called(context: Any, params: CallToolRequestParams) -> CallToolResult:
        try:
            who = service.tenant_of(_key_of(context)) if tenant is None else tenant
            found = await _answered(service, params.name, params.arguments or {}, who)
        except RefusedError as error:
            refused = error
        except Exception as error:  # noqa: BLE001  the server would send and log its words, which may be private
            refused = service.fault(error, "mcp")
        else:
            return _result(str(found["answer"]) if "answer" in found else json.dumps(found), found)
        return _result(refused.detail, refused.to_dict(), is_error=True)

    return Server("dpicl", version=own_version(), instructions=_INSTRUCTIONS, on_list_tools=listed, on_call_tool=called)


def tools_of(service: Service) -> list[Tool]:
    """Returns the tools that a service offers."""
    question = {"type": "string", "minLength": 1, "maxLength": service.limits.max_query_chars}
    asked = {**_NOTHING, "properties": {"question": question}, "required": ["question"]}
    asks = ToolAnnotations(read_only_hint=False, destructive_hint=False, idempotent_hint=True, open_world_hint=False)
    reads = ToolAnnotations(read_only_hint=True, open_world_hint=False)
    free = (
        {"budget": BUDGET} if service.demonstrations is None else {"demonstrations": DEMONSTRATIONS, "budget": BUDGET}
    )
    return [
        *(Tool(name=name, description=DOORS[name], input_schema=asked, annotations=asks) for name in service.doors),
        *(Tool(name=name, description=words, input_schema=_NOTHING, annotations=reads) for name, words in free.items()),
    ]


async def _answered(service: Service, name: str, arguments: Mapping[str, Any], tenant: Tenant) -> dict[str, Any]:
    if name not in service.offered:
        raise service.refuse(not_offered("This tool", service.offered), tenant=tenant.name)
    if "tenant" in arguments:
        detail = "The tenant is no argument: it is whose key the token is, or the one that the server was started for."
        raise service.refuse(RefusedError(422, "tenant_given", detail), door=name, tenant=tenant.name)
    known = {"question"} if name in service.doors else set[str]()
    if unknown := set(arguments) - known:
        detail = f"Expected no arguments but {sorted(known)}, found {len(unknown)} more."
        raise service.refuse(RefusedError(422, "no_question", detail), door=name, tenant=tenant.name)
    if name in service.doors:
        return await _cancelled_once(service.ask(name, arguments.get("question"), tenant))
    if name == "budget":
        return await _cancelled_once(run_in_thread(lambda: service.standing(tenant)))
    return service.released(tenant)


async def _cancelled_once(asked: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """Awaits a question; if the client cancels it, cancels it once, and waits until its charge is logged.

    The server cancels what it runs at every turn of the loop, also what is awaited to note the charge.
    """
    task = asyncio.ensure_future(asked)
    # asyncio would log the words of an error that nobody looks at.
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait({task})  # a second cancellation ends the wait, and not the task
        raise
    return task.result()


def _result(text: str, shown: dict[str, Any], *, is_error: bool = False) -> CallToolResult:
    content = [TextContent(type="text", text=text)]
    return CallToolResult(content=[*content], structured_content=shown, is_error=is_error)


def _key_of(context: Any) -> str | None:
    """Returns the bearer token of the HTTP request that a message came with."""
    request = context.request
    return None if request is None else bearer_of(authorization_of(request.headers.raw))


async def serve_stdio(service: Service, tenant: Tenant) -> None:
    """Serves one client over standard input and output until it closes them, whatever is still to be written."""
    server = create_server(service, tenant)
    try:
        async with stdio_server() as (reads, writes):
            await server.run(reads, writes, server.create_initialization_options())
    except* BrokenPipeError:  # of its task that writes
        pass


def create_app(service: Service) -> ASGIApp:
    """Returns the application for HTTP; every request needs the key of a tenant."""
    most = 12 * service.limits.max_query_chars + 10_000
    # A proxy hands on the host that it was asked by. What a check of hosts stops, web pages that reach this server
    # through a browser, have no key.
    any_host = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    # Without sessions any process can answer any request.
    app = create_server(service).streamable_http_app(
        stateless_http=True, json_response=True, max_request_body_size=most, transport_security=any_host
    )
    app.router.redirect_slashes = False  # it would send callers to whichever host a request names
    return _TenantsOnly(app, service)


class _TenantsOnly:
    """Refuses requests without the key of a tenant before anything of them is read."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._service.tenant_of(bearer_of(authorization_of(scope["headers"])))
            except RefusedError as refused:
                answer = JSONResponse(refused.to_dict(), refused.status, {"WWW-Authenticate": "Bearer"})
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)
