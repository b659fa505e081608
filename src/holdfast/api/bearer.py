"""Who calls the API: only a bearer token says so. A cookie never does, so that no other site can act for a browser."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request

from holdfast.access.principal import Principal
from holdfast.access.provider import Asking, Provider

Authenticate = Callable[[Request], Awaitable[Principal | None]]


def by_bearer(provider: Provider) -> Authenticate:
    """Return a function for `create_api` that asks a provider of the console."""

    async def authenticate(request: Request) -> Principal | None:
        client = request.client.host if request.client else None
        return await provider.principal(Asking(request.headers, client))

    return authenticate


def without_cookies(request: Request) -> Request | None:
    """Return the request without its cookies; None when it has no bearer token."""
    fields = request.headers.getlist("authorization")
    if len(fields) != 1:
        return None
    kind, _, token = fields[0].partition(" ")
    if kind.lower() != "bearer" or not token.strip():
        return None
    headers = [(name, value) for name, value in request.scope["headers"] if name != b"cookie"]
    return Request({**request.scope, "headers": headers})
