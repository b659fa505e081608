"""holdfast console: the web console, until SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.access.principal import Role
from holdfast.cli import environment
from holdfast.cli.options import Where, spread
from holdfast.errors import ConfigurationError
from holdfast.installing import require_extra
from holdfast.observability.http import Site, address_of, is_loopback, unusable

if TYPE_CHECKING:
    from holdfast.access.provider import Provider

PORT = 8424
_PATIENCE = 5.0


class RoleName(StrEnum):
    """A role, as options name it."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"


@spread
def console(
    where: Where,
    listen: Annotated[
        str, typer.Option("--listen", metavar="[HOST:]PORT", help="Where to serve it. Other machines need a login.")
    ] = f"127.0.0.1:{PORT}",
    environment_name: Annotated[
        str | None,
        typer.Option(
            "--environment",
            metavar="NAME",
            help="The name of the environment, shown in every dangerous button. Default: HOLDFAST_ENVIRONMENT.",
        ),
    ] = None,
    passwords: Annotated[
        Path | None, typer.Option("--passwords", metavar="FILE", help="People who may log in: console password.")
    ] = None,
    tokens: Annotated[
        Path | None, typer.Option("--tokens", metavar="FILE", help="Tokens of tools and people: console token.")
    ] = None,
    proxy_header: Annotated[
        str | None,
        typer.Option("--proxy-header", metavar="NAME", help="The header in which a reverse proxy names who asks."),
    ] = None,
    proxy_role_header: Annotated[
        str | None, typer.Option("--proxy-role-header", metavar="NAME", help="The header in which it names the role.")
    ] = None,
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option("--trusted-proxy", metavar="ADDRESS", help="An address or network of that proxy; repeatable."),
    ] = None,
    proxy_role: Annotated[
        RoleName, typer.Option("--proxy-role", help="The role of who comes by the proxy without one.")
    ] = RoleName.VIEWER,
    oidc_issuer: Annotated[
        str | None,
        typer.Option("--oidc-issuer", metavar="URL", help="Log in with OpenID Connect, at this issuer."),
    ] = None,
    oidc_client: Annotated[
        str | None,
        typer.Option("--oidc-client", metavar="ID", help="Its client id; the secret is HOLDFAST_OIDC_SECRET."),
    ] = None,
    oidc_role: Annotated[
        list[str] | None,
        typer.Option("--oidc-role", metavar="GROUP=ROLE", help="The role of a group in the claim groups; repeatable."),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", metavar="NAME", help="Answer requests for this host name too; repeatable."),
    ] = None,
    https: Annotated[
        bool, typer.Option("--https", help="Browsers reach it by https, through a proxy that speaks http with it.")
    ] = False,
    trace_url: Annotated[
        str | None,
        typer.Option("--trace-url", metavar="URL", help="Where traces are looked at: https://…{trace_id}…"),
    ] = None,
    values_from: Annotated[
        RoleName, typer.Option("--values-from", help="The lowest role that sees the values of payloads.")
    ] = RoleName.OPERATOR,
    lifeline: Annotated[int | None, typer.Option("--lifeline", hidden=True)] = None,
) -> None:
    """Serve the web console. Without a login only this machine reaches it."""
    require_extra("console", "starlette", "jinja2", "uvicorn")
    from holdfast.console import ConsoleSettings, create_console

    host, port = address_of(listen, example=PORT)
    provider: Provider
    if oidc_issuer is not None:
        provider = _oidc(oidc_issuer, oidc_client, oidc_role or [])
    else:
        provider = _provider(host, passwords, tokens, proxy_header, proxy_role_header, trusted_proxy or [], proxy_role)
    settings = ConsoleSettings(
        environment=environment.deployment_environment(environment_name),
        allowed_hosts=tuple(allow_host or ()),
        trace_url=trace_url,
        secret=environment.console_secret(),
        values_from=Role.named(values_from),
        https=https,
    )
    made = create_console(where.address, provider=provider, schema=environment.schema(where.schema), settings=settings)
    _serve(made, host, port, lifeline)


def _oidc(issuer: str, client: str | None, groups: list[str]) -> Provider:
    require_extra("oidc", "authlib", "httpx")
    from holdfast.access.oidc import Oidc

    if client is None or not groups:
        raise ConfigurationError(
            "--oidc-client", "or --oidc-role is missing", "name the client, and a role for at least one group"
        )
    roles = {group: Role.named(role, "--oidc-role") for group, _, role in (each.rpartition("=") for each in groups)}
    return Oidc(issuer, client, environment.oidc_secret(), roles=roles)


def _provider(
    host: str,
    passwords: Path | None,
    tokens: Path | None,
    header: str | None,
    role_header: str | None,
    trusted: list[str],
    role: RoleName,
) -> Provider:
    from holdfast.access.passwords import Passwords
    from holdfast.access.provider import LocalUser, ProxyHeader
    from holdfast.access.tokens import Tokens
    from holdfast.console.login import FileLogins

    if header is not None:
        if passwords or tokens:
            raise ConfigurationError("--proxy-header", "is given together with a file", "give one of them")
        return ProxyHeader(header, trusted=trusted, role_header=role_header, default=Role.named(role))
    if passwords or tokens:
        return FileLogins(Passwords(passwords) if passwords else None, Tokens(tokens) if tokens else None)
    if not is_loopback(host):
        raise ConfigurationError(
            "--listen",
            f"is {host}, which other machines reach, and nobody has to log in",
            "add --passwords FILE, --tokens FILE, --proxy-header NAME or --oidc-issuer URL, or listen on 127.0.0.1",
        )
    return LocalUser(environment.actor(None))


def _serve(app: Any, host: str, port: int, lifeline: int | None) -> None:
    import uvicorn

    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        # The address of the peer decides whom a proxy's header is believed from: no header may replace it.
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=2,
    )
    server = uvicorn.Server(config)
    # Ours end it with exit code 0; uvicorn's own would raise the signal again.
    server.capture_signals = contextlib.nullcontext  # type: ignore[assignment, method-assign]
    asyncio.run(until_told(server, listening(host, port), "the console", lifeline=lifeline))


async def until_told(
    server: Any, listening: socket.socket, what: str, path: str = "", *, lifeline: int | None = None
) -> None:
    """Serve on a socket, until SIGTERM, SIGINT or the end of the lifeline."""

    def stop() -> None:
        server.should_exit = True

    if lifeline is not None:
        from holdfast.worker.supervisor import end_with_parent

        end_with_parent(lifeline, stop, _PATIENCE)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    host, port = listening.getsockname()[:2]
    print(f"serving {what} on {Site(host, port, {}).url}{path}", file=sys.stderr, flush=True)
    await server.serve(sockets=[listening])


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise unusable("--listen", host, port, error) from None
    return made
