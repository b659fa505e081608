"""holdfast mcp: the verbs of operators as tools for assistants."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.access.principal import Principal, Role
from holdfast.cli import environment
from holdfast.cli.console import RoleName, listening, until_told
from holdfast.cli.options import Where, spread
from holdfast.errors import ConfigurationError
from holdfast.installing import package_version, require_extra
from holdfast.observability.http import address_of

PORT = 8425


@spread
def mcp(
    where: Where,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Offer tools that change something, each after a dry run.")
    ] = False,
    most_rows: Annotated[int, typer.Option("--most-rows", help="How many events one call may change.")] = 100,
    actor: Annotated[str | None, typer.Option("--actor", help="The name in the audit, without --listen.")] = None,
    listen: Annotated[
        str | None,
        typer.Option("--listen", metavar="[HOST:]PORT", help="Serve it by HTTP, at /mcp. Needs --tokens."),
    ] = None,
    tokens: Annotated[
        Path | None, typer.Option("--tokens", metavar="FILE", help="Tokens with their roles: console token.")
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", metavar="NAME", help="Answer requests for this host name too; repeatable."),
    ] = None,
    values_from: Annotated[
        RoleName, typer.Option("--values-from", help="The lowest role that sees the values of payloads.")
    ] = RoleName.ADMIN,
) -> None:
    """Serve the verbs of operators as tools for assistants, by standard input and output or by HTTP."""
    require_extra("mcp", "mcp")
    if not 1 <= most_rows <= 10_000:
        raise ConfigurationError("--most-rows", "is not between 1 and 10,000", "a replay plan takes more")
    if (listen is None) != (tokens is None):
        missing, given = ("--tokens", "--listen") if tokens is None else ("--listen", "--tokens")
        raise ConfigurationError(missing, f"is missing, and {given} is given", "give both, or none for standard input")
    asyncio.run(_serve(where, allow_changes, most_rows, actor, listen, tokens, allow_host or [], values_from))


async def _serve(
    where: Where,
    changes: bool,
    most_rows: int,
    actor: str | None,
    listen: str | None,
    tokens: Path | None,
    hosts: list[str],
    values_from: RoleName,
) -> None:
    from holdfast.access.redaction import Redaction
    from holdfast.mcp import Tools, create_http, create_server, serve_stdio
    from holdfast.operator import Operators

    operators = Operators(where.address, schema=environment.schema(where.schema))
    redaction = Redaction(values_from=Role.named(values_from))
    tools = Tools(operators, changes=changes, most_rows=most_rows, redaction=redaction)
    try:
        if listen is None or tokens is None:
            user = Principal(environment.actor(actor), Role.OPERATOR if changes else Role.VIEWER)
            await serve_stdio(create_server(tools, user, version=package_version()))
        else:
            from holdfast.access.tokens import Tokens

            app = create_http(tools, Tokens(tokens), allowed_hosts=hosts, version=package_version())
            await _serve_http(app, *address_of(listen, example=PORT))
    finally:
        await operators.close()


async def _serve_http(app: Any, host: str, port: int) -> None:
    import uvicorn

    config = uvicorn.Config(app, log_config=None, access_log=False, proxy_headers=False, server_header=False)
    await until_told(uvicorn.Server(config), listening(host, port), "the tools", "/mcp")
