"""The server: tools over standard input and output, or over HTTP with bearer tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

import mcp.types as types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.server.transport_security import TransportSecuritySettings
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.access.hosts import Hosts
from holdfast.access.principal import Principal
from holdfast.access.provider import Asking, Provider
from holdfast.errors import HoldfastError
from holdfast.mcp.tools import UNTRUSTED, Tools
from holdfast.operator import DATABASE_ERRORS, remedy_of
from holdfast.operator.catalogue import Verb
from holdfast.redact import redact_secrets

PRINCIPAL: Final = "holdfast.mcp.principal"  # in the scope of a request: who asks
INSTRUCTIONS: Final = (
    "Holdfast delivers events from a Postgres outbox to handlers. Dead letters (DLQ events) are deliveries that have "
    "failed for good, grouped by cause: begin with failed_groups, then list_dlq_events and get_dlq_event_detail. A "
    "tool that changes something is a dry run first, and returns a confirm code; call it again with dry_run: "
    f"false, confirm and a reason. {UNTRUSTED}"
)


def create_server(tools: Tools, user: Principal | None = None, *, version: str = "") -> Server[Any]:
    """Return a server of the tools: for `user`, or, over HTTP, for whoever the token of a request names."""

    def principal(context: ServerRequestContext[Any, Any]) -> Principal:
        return user if user is not None else context.request.scope[PRINCIPAL]  # type: ignore[union-attr]

    async def list_tools(
        context: ServerRequestContext[Any, Any], _: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        offered = tools.of(principal(context))
        return types.ListToolsResult(tools=[_tool(tools, name, verb) for name, verb in offered.items()])

    async def call_tool(
        context: ServerRequestContext[Any, Any], asked: types.CallToolRequestParams
    ) -> types.CallToolResult:
        try:
            found = await tools.call(principal(context), asked.name, asked.arguments or {})
        except HoldfastError as error:
            return _refusal(str(error))
        except DATABASE_ERRORS as error:
            remedy = remedy_of(error)
            return _refusal(redact_secrets(f"{type(error).__name__}: {error}" + (f"; {remedy}" if remedy else "")))
        document = found if isinstance(found, dict) else {"result": found}
        texts = (UNTRUSTED, json.dumps(document))
        return types.CallToolResult(
            content=[types.TextContent(type="text", text=text) for text in texts], structured_content=document
        )

    return Server(
        "holdfast", version=version, instructions=INSTRUCTIONS, on_list_tools=list_tools, on_call_tool=call_tool
    )


async def serve_stdio(server: Server[Any]) -> None:
    """Serve one client by standard input and output, until it closes them."""
    async with stdio_server() as (reading, writing):
        await server.run(reading, writing, server.create_initialization_options())


def create_http(tools: Tools, provider: Provider, *, allowed_hosts: Iterable[str] = (), version: str = "") -> ASGIApp:
    """Return the server as an ASGI application, at `/mcp`. Every request needs a bearer token that `provider` knows."""
    server = create_server(tools, version=version)
    # The door checks host and token; a browser's page has no token that it could send.
    app = server.streamable_http_app(
        stateless_http=True,
        json_response=True,
        max_request_body_size=256 * 1024,
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
    )
    return Door(app, provider, Hosts(allowed_hosts))


class Door:
    """What stands before the server: the host, and who asks."""

    def __init__(self, app: Starlette, provider: Provider, hosts: Hosts) -> None:
        self._app = app
        self._provider = provider
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            request = Request(scope, receive)
            if not self._hosts.answers(request.headers.get("host", "")) or "origin" in request.headers:
                refusal = JSONResponse({"error": "the server does not answer for that host or page"}, 421)
                await refusal(scope, receive, send)
                return
            principal = await self._principal(request)
            if principal is None:
                challenge = {"WWW-Authenticate": "Bearer"}
                await JSONResponse({"error": "there is no token, or it is not known"}, 401, challenge)(
                    scope, receive, send
                )
                return
            scope[PRINCIPAL] = principal
        await self._app(scope, receive, send)

    async def _principal(self, request: Request) -> Principal | None:
        # Not as a dict: a field that stands there twice, of which one is the sender's own, has to be seen.
        fields = Headers(raw=[(name, value) for name, value in request.headers.raw if name != b"cookie"])
        asking = Asking(fields, request.client.host if request.client else None)
        return None if asking.bearer() is None else await self._provider.principal(asking)


def _tool(tools: Tools, name: str, verb: Verb) -> types.Tool:
    return types.Tool(
        name=name,
        description=verb.summary,
        input_schema=tools.schema(verb),
        annotations=types.ToolAnnotations(
            read_only_hint=not verb.changes, destructive_hint=verb.changes, open_world_hint=False
        ),
    )


def _refusal(text: str) -> types.CallToolResult:
    """An error. It may quote names that producers and handlers wrote, as a result does."""
    return types.CallToolResult(
        content=[types.TextContent(type="text", text=each) for each in (UNTRUSTED, text)], is_error=True
    )
