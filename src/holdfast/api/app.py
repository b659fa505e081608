"""The application: one route for each verb, and what stands before all of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.access.hosts import Hosts
from holdfast.access.principal import Principal
from holdfast.access.redaction import Redaction
from holdfast.api.bearer import Authenticate, without_cookies
from holdfast.api.openapi import openapi
from holdfast.api.problems import Problem, problem_of
from holdfast.api.queries import query_arguments
from holdfast.idempotency.asgi.middleware import IdempotencyMiddleware, exchange_of
from holdfast.idempotency.settings import IdempotencySettings
from holdfast.observability.prometheus import PLAIN
from holdfast.operator import Operators
from holdfast.operator.catalogue import REVEAL, VERBS, Verb, document

MOST_BYTES: Final = 1024 * 1024
LONGEST_QUERY: Final = 8 * 1024
PRINCIPAL: Final = "holdfast.api.principal"  # in the scope of a request: who asks
HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
}


def create_api(
    operators: Operators,
    authenticate: Authenticate,
    *,
    allowed_hosts: Iterable[str] = (),
    redaction: Redaction | None = None,
    secret: str | None = None,
) -> ASGIApp:
    """Return the HTTP API as an ASGI application, to be mounted at `/api/v1`.

    `authenticate` is called with each request that has a bearer token, without its cookies, and returns who asks.
    `secret` keys the hashes of requests with an `Idempotency-Key`, and has to be the same in every process; without one
    the database has one, which only operators may read.
    """
    api = Api(operators, redaction or Redaction())
    routes = [Route("/openapi.json", api.describe, methods=["GET"])]
    routes += [
        Route(f"/{name.replace('.', '/')}", api.endpoint(verb), methods=["POST" if verb.changes else "GET"])
        for name, verb in VERBS.items()
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _not_here, Exception: _failed})
    return Door(_Keyed(app, operators, secret), authenticate, Hosts(allowed_hosts))


class _Keyed:
    """Has requests with an `Idempotency-Key` carried out once. The first one asks the database for the secret."""

    def __init__(self, app: ASGIApp, operators: Operators, secret: str | None) -> None:
        self._app = app
        self._operators = operators
        self._secret = secret
        self._keyed: IdempotencyMiddleware | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or "idempotency-key" not in Headers(scope=scope):
            await self._app(scope, receive, send)
            return
        if self._keyed is None:
            try:
                secrets = {1: self._secret} if self._secret else await self._operators.secrets()
            except Exception as error:
                await problem_of(error)(scope, receive, send)
                return
            settings = IdempotencySettings(schema=self._operators.schema, request_limit=MOST_BYTES)
            self._keyed = IdempotencyMiddleware(self._app, self._operators.records, secrets, settings)
        await self._keyed(scope, receive, send)


class Door:
    """What stands before every route: the host, who asks, and the headers of every answer."""

    def __init__(self, app: ASGIApp, authenticate: Authenticate, hosts: Hosts) -> None:
        self._app = app
        self._authenticate = authenticate
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refusal = await self._refusal(Request(scope, receive))
        await (refusal or self._app)(scope, receive, sending)

    async def _refusal(self, request: Request) -> Response | None:
        if not self._hosts.answers(request.headers.get("host", "")):
            return Problem(421, "the API does not answer for that host name", "name it in allowed_hosts")
        asking = without_cookies(request)
        principal = None if asking is None else await self._authenticate(asking)
        if principal is None:
            return Problem(
                401,
                "there is no token, or it is not known",
                "send Authorization: Bearer with a token",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if len(request.scope.get("query_string", b"")) > LONGEST_QUERY:
            return Problem(400, f"the query has more than {LONGEST_QUERY:,} bytes", "shorten it")
        request.scope[PRINCIPAL] = principal
        return None


class Api:
    """The endpoints."""

    def __init__(self, operators: Operators, redaction: Redaction) -> None:
        self._operators = operators
        self._redaction = redaction
        self._description: bytes | None = None

    async def describe(self, request: Request) -> Response:
        """The OpenAPI document."""
        if self._description is None:
            self._description = json.dumps(openapi(VERBS.values())).encode()
        return Response(self._description, media_type="application/json")

    def endpoint(self, verb: Verb) -> Any:
        """The endpoint of a verb."""

        async def run(request: Request) -> Response:
            principal: Principal = request.scope[PRINCIPAL]
            if not principal.may(verb.role):
                return Problem(403, f"{verb.name} needs the role {verb.role}", f"you have the role {principal.role}")
            return await self._change(verb, request) if verb.changes else await self._read(verb, request)

        return run

    async def _read(self, verb: Verb, request: Request) -> Response:
        try:
            arguments = verb.parse(query_arguments(verb, request.query_params.multi_items()))
            as_text = verb.result is str and "text/plain" in request.headers.get("accept", "")
            return await self._answer(verb, arguments, request.scope[PRINCIPAL], as_text=as_text)
        except Exception as error:
            return problem_of(error)

    async def _change(self, verb: Verb, request: Request) -> Response:
        if request.url.query:
            return Problem(400, "the arguments of a change are JSON, not a query", "put them into the body")
        if verb.reveals and "idempotency-key" in request.headers:
            # The answer would be kept, with the payload in it, where neither roles nor redaction hide it.
            return Problem(400, f"{verb.name} takes no Idempotency-Key", "leave it out: asking twice changes nothing")
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            return Problem(415, "the body is not application/json", "send Content-Type: application/json")
        body = await _body(request)
        if body is None:
            return Problem(413, f"the body has more than {MOST_BYTES:,} bytes", "shorten it")
        try:
            arguments = verb.parse(body)
        except Exception as error:
            return problem_of(error) if _is_json(body) else Problem(400, "the body is not JSON", "send a JSON object")
        if "idempotency-key" in request.headers:
            # Does not return for a key that was used before: the middleware sends the stored answer.
            await exchange_of(request.scope).begin(_owner(request.scope[PRINCIPAL]))
        try:
            return await self._answer(verb, arguments, request.scope[PRINCIPAL])
        except Exception as error:
            return problem_of(error)

    async def _answer(self, verb: Verb, arguments: Any, principal: Principal, *, as_text: bool = False) -> Response:
        """Run a verb. `as_text`: what is a text itself is sent as it is, as Prometheus wants its metrics."""
        async with self._operators.acting(principal.name) as operator:
            found = document(await verb.run(operator, arguments))
        if as_text:
            return Response(found["value"], media_type=PLAIN)
        if verb.reveals:
            found = self._redaction.document(principal, found, revealed=verb.name == REVEAL)
        return JSONResponse(found)


def _owner(principal: Principal) -> str:
    """Whose key it is. Without a space: of an owner with one a hash is stored, which would not be an operator's."""
    return f"operator-api/{principal.name.replace('%', '%25').replace(' ', '%20')}"


async def _body(request: Request) -> bytes | None:
    """The body; None when it is too large."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BYTES:
            return None
    return bytes(body)


def _is_json(body: bytes) -> bool:
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


async def _not_here(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = error.headers if isinstance(error, HTTPException) else None
    if status == 405:
        return Problem(405, "the method is not allowed here", "reads are GET, changes are POST", headers=headers)
    return Problem(404, "there is no such path", "GET /api/v1/openapi.json lists them")


async def _failed(request: Request, error: Exception) -> Response:
    return problem_of(error)
