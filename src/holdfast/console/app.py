"""The application: routes, the guard around them, and what all pages share."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.access.principal import Principal
from holdfast.access.provider import Provider
from holdfast.access.redaction import Redaction
from holdfast.access.sessions import Sessions
from holdfast.api import by_bearer, create_api
from holdfast.console import problems, sign_in
from holdfast.console.deciding import Deciding
from holdfast.console.live import Feed, Hub
from holdfast.console.page import Call, Page, read_form, read_query
from holdfast.console.pages import FEEDS, PAGES
from holdfast.console.pages.overview import counts
from holdfast.console.runners import PlanRunners
from holdfast.console.security import PRINCIPAL, SAFE, Guard
from holdfast.console.settings import ConsoleSettings
from holdfast.console.templating import FOLDER, Templates
from holdfast.errors import HoldfastError
from holdfast.operator import DATABASE_ERRORS, Operator, Operators
from holdfast.operator.ended_sessions import EndedSessions

Endpoint = Callable[[Request], Awaitable[Response]]
NAV: Final = ("overview", "nav-counts")  # the counts of the navigation, which every page has
_YEAR: Final = "private, max-age=31536000, immutable"


class Console:
    """A console on one database: an ASGI application, which can be served or mounted."""

    def __init__(
        self, dsn: str, provider: Provider, *, schema: str = "core", settings: ConsoleSettings | None = None
    ) -> None:
        self.settings = settings or ConsoleSettings()
        self.schema = schema
        self.provider = provider
        self.deciding = Deciding()
        self.operators = Operators(dsn, schema=schema)
        self.runners = PlanRunners(lambda actor: Operator(dsn, actor=actor, schema=schema))
        self.templates = Templates(self.settings, schema, frozenset(page.name for page in PAGES))
        feeds: Mapping[str, Feed] = FEEDS
        self.hub = Hub(self.operators, feeds, self.templates.render_fragment, self.settings.interval, NAV)
        # Without a secret of its own, which others could share, no other process knows the sessions of this one.
        ended = EndedSessions(self.operators) if self.settings.secret else None
        self.guard = Guard(self._application(), self.settings, provider, Sessions(self.settings.secret), ended)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.guard(scope, receive, send)

    async def close(self) -> None:
        """Let browsers go and close the connections. Whoever mounts a console calls it when the application ends."""
        await self.runners.close()
        await self.hub.close()
        await self.operators.close()

    def has(self, name: str) -> bool:
        """Whether there is such a page."""
        return any(page.name == name for page in PAGES)

    def nav_counts(self) -> dict[str, Any]:
        """Return the counts beside the navigation, of the last snapshot."""
        return counts(self.hub.last("overview"))

    def receipt(self, call: Call) -> dict[str, Any]:
        """Return what a page has cost, for its footer."""
        return {"watchers": self.hub.watchers, "interval": self.settings.interval}

    def _application(self) -> Starlette:
        static = StaticFiles(directory=FOLDER / "static")
        routes: list[Route | Mount] = [
            Route("/live", self._live, methods=["GET"]),
            Route("/fragment", self._fragment, methods=["GET"]),
            Mount("/static", _kept(static)),
            Mount("/api/v1", self._api()),
            *(Route(page.path, self._endpoint(page), methods=_methods(page), name=page.name) for page in PAGES),
            *sign_in.routes(self),
        ]

        @contextlib.asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            try:
                yield
            finally:
                await self.close()

        return Starlette(routes=routes, lifespan=lifespan, exception_handlers={404: self._not_found})

    def _api(self) -> ASGIApp:
        """The HTTP API, which asks for a token by itself: the cookie of a browser means nothing to it."""
        return create_api(
            self.operators,
            by_bearer(self.provider),
            allowed_hosts=self.settings.allowed_hosts,
            redaction=Redaction(self.settings.values_from, self.settings.redact),
            secret=self.settings.secret,
        )

    def _endpoint(self, page: Page) -> Endpoint:
        """Return what answers for a page: it checks what no page may forget."""

        async def answer(request: Request) -> Response:
            call = Call(self, request, request.scope[PRINCIPAL], {})
            try:
                call.query = read_query(request)
                if request.method in SAFE:
                    assert page.get is not None  # noqa: S101 - the route has no GET otherwise
                    return await page.get(call) if call.may(page.role) else problems.forbidden(call)
                call.form = await read_form(request)
                if not self.guard.form_is_ours(request, call.form, call.principal.name):
                    return problems.forged(call)
                if page.post is None or not call.may(page.post_role):
                    return problems.forbidden(call)
                return await page.post(call)
            except (HoldfastError, *DATABASE_ERRORS) as error:
                return problems.shown(call, error)

        return answer

    async def _live(self, request: Request) -> Response:
        """The stream of what has changed."""
        feed = self.hub.named(request.query_params.get("feed", "overview"))
        who = request.scope[PRINCIPAL].name
        if feed is None:
            return PlainTextResponse("404: there is no such feed\n", 404)
        if self.hub.is_full(who):
            return PlainTextResponse("503: too many browsers watch\n", 503, {"Retry-After": "30"})
        if not await self.hub.exists(feed):
            return PlainTextResponse("404: there is nothing that this feed could show\n", 404)
        call = Call(self, request, request.scope[PRINCIPAL], {})
        version, parts = request.query_params.get("version", ""), request.query_params.get("parts")
        wanted = None if parts is None else frozenset(parts.split(","))

        async def allowed() -> bool:
            # Whoever was let in may have been removed, or have logged out, since the stream began.
            now = await self.guard.who(request)
            return now is not None and now.name == who

        stream = self.hub.watch(
            feed, call.zone_name, call.prefix, who=who, version=version, parts=wanted, allowed=allowed
        )
        return StreamingResponse(stream, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    async def _fragment(self, request: Request) -> Response:
        """One live part that did not fit into a message."""
        call = Call(self, request, request.scope[PRINCIPAL], {})
        feed, id = self.hub.named(request.query_params.get("feed", "")), request.query_params.get("id", "")
        html = None if feed is None else self.hub.fragment(feed, id, call.zone_name, call.prefix)
        return (
            PlainTextResponse("404: there is no such part\n", 404)
            if html is None
            else Response(html, media_type="text/html")
        )

    async def _not_found(self, request: Request, _: Exception) -> Response:
        principal = request.scope.get(PRINCIPAL)
        if not isinstance(principal, Principal):
            return PlainTextResponse("404\n", 404)
        return problems.missing(Call(self, request, principal, {}))


def create_console(
    dsn: str,
    *,
    provider: Provider,
    schema: str = "core",
    settings: ConsoleSettings | None = None,
) -> Console:
    """Return the console of a database, to be served or mounted under any prefix.

    `provider` says who asks: `Embedded(function)` where the application around it knows, or one of `holdfast.access`.
    """
    return Console(dsn, provider, schema=schema, settings=settings)


def _methods(page: Page) -> list[str]:
    return [name for name, handler in (("GET", page.get), ("POST", page.post)) if handler is not None]


def _kept(static: StaticFiles) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """Static files, which a browser may keep: their address changes with them."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                message["headers"] = [*message["headers"], (b"cache-control", _YEAR.encode())]
            await send(message)

        await static(scope, receive, sending)

    return serve
