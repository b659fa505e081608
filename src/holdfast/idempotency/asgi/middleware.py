"""Idempotent requests for any ASGI application: one transaction for the change, its events and the answer.

    app = IdempotencyMiddleware(app, pool.acquire, secrets={1: "..."})

An endpoint that takes part asks for its transaction once the caller is authenticated and the request is validated:

    tx = await exchange_of(scope).begin("tenant-17")

If the key was used before, `begin` does not return: the answer of the first request is sent. Otherwise the endpoint
does its work in `tx`, and never commits. The middleware holds the response back, stores it in the same transaction,
commits, and only then sends the first byte.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from holdfast.errors import ConfigurationError
from holdfast.idempotency.asgi.exchange import EXCHANGE, AsgiConfig, AsgiExchange
from holdfast.idempotency.asgi.messages import Receive, Send
from holdfast.idempotency.settings import IdempotencySettings
from holdfast.observability.logging import log_fact
from holdfast.postgres.managed_transaction import Connect
from holdfast.telemetry import Observer
from holdfast.tracing import Tracing

App = Callable[[Any, Any, Any], Awaitable[None]]


class IdempotencyMiddleware:
    """ASGI middleware. `connect` returns a context manager of a connection or a session; `secrets` key the hashes."""

    def __init__(
        self,
        app: App,
        connect: Connect,
        secrets: Mapping[int, str | bytes],
        settings: IdempotencySettings | None = None,
        *,
        observe: Observer = log_fact,
        tracing: Tracing | None = None,
    ) -> None:
        self.app = app
        self._config = AsgiConfig.of(connect, secrets, settings, observe, tracing)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] in self._config.settings.methods:
            await AsgiExchange(self._config, self.app, scope, receive, send).run()
            return
        if scope["type"] == "lifespan":
            try:
                self.starting()
            except ConfigurationError as error:
                # Servers take an error that is raised here for an application without lifespan, and serve it.
                await receive()
                await send({"type": "lifespan.startup.failed", "message": str(error)})
                return
        await self.app(scope, receive, send)

    def starting(self) -> None:
        """Called when the application is about to start, which a ConfigurationError keeps it from.

        An integration checks its routes here.
        """


def exchange_of(scope: Mapping[str, Any]) -> AsgiExchange:
    """Return the exchange of a request, for its endpoint."""
    exchange = scope.get(EXCHANGE) if isinstance(scope, Mapping) else None
    if not isinstance(exchange, AsgiExchange):
        raise ConfigurationError(
            "scope",
            "has no idempotency: the request did not pass the middleware, or has another method",
            "add IdempotencyMiddleware to the application, and take part with POST and PATCH only",
        )
    return exchange
