"""Holdfast in a FastAPI application: a worker in the same process, transactions that publish, idempotent endpoints.

    app = FastAPI(lifespan=worker_lifespan(lambda: Worker(dsn, registry)))
    events = transaction_per_request(Publisher("shop"), lambda: app.state.pool.acquire())
    Events = Annotated[RequestTransaction, events]

See docs/frameworks/fastapi.md, and `holdfast.integrations.asgi` for other frameworks.

    idempotency = Idempotency(pool.acquire, secrets={1: "..."}, scope=current_tenant)
    idempotency.install(app)
    Tx = Annotated[asyncpg.Connection, Depends(idempotency.required)]

    @app.post("/orders", status_code=201)
    async def place_order(order: NewOrder, tx: Tx) -> Order: ...

The endpoint works in `tx` and never commits. See docs/http.md.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from holdfast.installing import require_extra

require_extra("fastapi", "fastapi")

from fastapi import Depends, FastAPI, Request, routing
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse, StreamingResponse

from holdfast.checks import function
from holdfast.errors import ConfigurationError
from holdfast.idempotency.answers import PROBLEMS
from holdfast.idempotency.asgi.exchange import EXCHANGE, AsgiConfig, current_exchange
from holdfast.idempotency.asgi.middleware import IdempotencyMiddleware, exchange_of
from holdfast.idempotency.keys import LONGEST_KEY
from holdfast.idempotency.settings import IdempotencySettings
from holdfast.integrations import asgi
from holdfast.integrations.asgi import Lifespan, RequestTransaction, WorkerLifespan
from holdfast.observability.logging import log_fact
from holdfast.postgres.managed_transaction import Connect
from holdfast.postgres.publisher import Publisher
from holdfast.telemetry import Observer
from holdfast.tracing import Tracing
from holdfast.worker.worker import Worker

__all__ = [
    "Idempotency",
    "IdempotentRoute",
    "RequestTransaction",
    "TransactionDependency",
    "WorkerLifespan",
    "check_routes",
    "transaction_per_request",
    "worker_lifespan",
]

_INSTALL = "call idempotency.install(app) before the endpoints are declared"


class _CheckedLifespan(WorkerLifespan):
    """A lifespan that also refuses endpoints whose transaction nothing would open."""

    def check(self, app: Any) -> None:
        _require_installed(app)


def worker_lifespan(make_worker: Callable[[], Worker], lifespan: Lifespan | None = None) -> WorkerLifespan:
    """Return a lifespan that runs a worker, inside the application's own `lifespan` if there is one.

    The application's own lifespan starts first and ends last, so handlers may use what it opens. `make_worker` is
    called at each start, because a worker that has stopped stays stopped. `health` of what is returned says how it is.
    """
    return _CheckedLifespan(make_worker, lifespan)


def transaction_per_request(publisher: Publisher, connect: Connect) -> Any:
    """Return a dependency that opens a transaction for a request, and commits it before the response is sent.

        events = transaction_per_request(Publisher("shop"), lambda: app.state.pool.acquire())
        Events = Annotated[RequestTransaction, events]

    `connect` returns the context manager of a connection or session: `pool.acquire`, `pool.connection`, a
    `sessionmaker`. An endpoint that raises, also an `HTTPException`, has its transaction rolled back; one that returns
    has it committed, whatever the status.
    """
    # FastAPI leaves dependencies of the scope "request" only when the response has been sent.
    return Depends(asgi.transaction_per_request(publisher, connect), scope="function")


class Idempotency:
    """Idempotent endpoints. `scope` is a dependency that authenticates the caller and returns the owner of its keys.

    `required` and `optional` are the dependencies that give an endpoint its transaction. `buffered=True` also accepts
    endpoints that answer with a stream or a file; the whole response is then held back until the commit.
    """

    def __init__(
        self,
        connect: Connect,
        secrets: Mapping[int, str | bytes],
        *,
        scope: Callable[..., Any],
        settings: IdempotencySettings | None = None,
        buffered: bool = False,
        observe: Observer = log_fact,
        tracing: Tracing | None = None,
    ) -> None:
        function("scope", scope, "pass a dependency that returns the id of a user or a tenant")
        self._config = AsgiConfig.of(connect, secrets, settings, observe, tracing)
        self.settings: IdempotencySettings = self._config.settings
        self.buffered = buffered
        self.required = TransactionDependency(self, scope, required=True)
        self.optional = TransactionDependency(self, scope, required=False)

    def install(self, app: FastAPI) -> None:
        """Add the middleware; call it before endpoints are declared. Routers need `route_class=IdempotentRoute`."""
        for context, _ in _left_out(app.routes):
            remedy = f"{_INSTALL}; for a router of its own, use APIRouter(route_class=IdempotentRoute)"
            _refuse(context, "was declared before idempotency was installed", remedy)
        app.router.route_class = IdempotentRoute
        app.add_middleware(_CheckedMiddleware, fastapi=app, config=self._config)


class TransactionDependency:
    """A dependency that returns the transaction of the request. The key is taken after all other dependencies and
    after validation, when the endpoint is about to be called.
    """

    def __init__(self, idempotency: Idempotency, scope: Callable[..., Any], *, required: bool) -> None:
        self.idempotency = idempotency
        self.required = required
        parameters = [
            inspect.Parameter("request", inspect.Parameter.KEYWORD_ONLY, annotation=Request),
            inspect.Parameter("scope", inspect.Parameter.KEYWORD_ONLY, annotation=Any, default=Depends(scope)),
        ]
        self.__signature__ = inspect.Signature(parameters)

    async def __call__(self, *, request: Request, scope: Any) -> Any:
        if EXCHANGE not in request.scope:
            raise ConfigurationError("idempotency", "is not installed in the application", _INSTALL)
        route = _route_template(request) if self.idempotency.settings.route_in_scope else None
        return await exchange_of(request.scope).open(scope, required=self.required, route=route)


def _route_template(request: Request) -> str:
    """Return the path of the route with the names of its parameters, and with the prefix of its router."""
    template: str = request.scope["route"].path_format
    path: str = request.scope["path"]
    tail = template.format(**request.path_params)
    return path.removesuffix(tail) + template if path.endswith(tail) else path


class IdempotentRoute(APIRoute):
    """A route whose endpoint may depend on `Idempotency.required` or `.optional`. It does not change others."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        transaction = next(_transactions(self.dependant), None)
        if transaction is None or hasattr(endpoint, "__holdfast_endpoint__"):
            return
        _require_repeatable(self, transaction.idempotency)
        options["responses"] = {**_responses(transaction.idempotency.settings), **(options.get("responses") or {})}
        options["openapi_extra"] = _with_header(options.get("openapi_extra"), transaction.required)
        super().__init__(path, _taking_key_first(endpoint), **options)


def _taking_key_first(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the endpoint so that it is called only for a request that has to be carried out."""
    asynchronous = any(inspect.iscoroutinefunction(each) for each in (endpoint, type(endpoint).__call__))

    @functools.wraps(endpoint)
    async def wrapped(*args: Any, **values: Any) -> Any:
        if (exchange := current_exchange.get()) is not None:  # None if the middleware does not handle the method
            await exchange.enter()
        if asynchronous:
            return await endpoint(*args, **values)
        return await run_in_threadpool(endpoint, *args, **values)

    wrapped.__holdfast_endpoint__ = True  # type: ignore[attr-defined]
    return wrapped


# --- checks before the first request ---


class _CheckedMiddleware(IdempotencyMiddleware):
    """The middleware; it checks all routes when the application starts."""

    def __init__(self, app: Any, *, fastapi: FastAPI, config: AsgiConfig) -> None:
        self.app = app
        self._config = config
        self._fastapi = fastapi

    def starting(self) -> None:
        check_routes(self._fastapi.routes)


def check_routes(routes: Iterable[Any]) -> None:
    """Refuse endpoints that depend on a transaction and would not get one."""
    for context, route in _left_out(routes):
        if isinstance(route, IdempotentRoute):
            remedy = "use APIRouter(route_class=IdempotentRoute, dependencies=[...]), or declare it at the endpoint"
            _refuse(context, "is given a transaction by include_router(), which comes too late for it", remedy)
        kind = "a websocket" if not isinstance(route, APIRoute) else "declared on a router without IdempotentRoute"
        _refuse(context, f"depends on a transaction, but is {kind}", "use APIRouter(route_class=IdempotentRoute)")


def _left_out(routes: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the routes that depend on a transaction but are not wrapped for one, each with its original route."""
    for context, route in _all_routes(routes):
        # Includes the dependencies that include_router() adds to those of the route.
        if not _takes_part(route) and any(_transactions(getattr(context, "dependant", None))):
            yield context, route


def _all_routes(routes: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    for context in getattr(routing, "iter_route_contexts", iter)(list(routes)):
        yield context, getattr(context, "original_route", context)


def _takes_part(route: Any) -> bool:
    return hasattr(getattr(route, "endpoint", None), "__holdfast_endpoint__")


def _require_installed(app: Any) -> None:
    """Refuse endpoints that depend on a transaction, in an application without the middleware."""
    if not isinstance(app, FastAPI) or any(
        getattr(each, "cls", None) is _CheckedMiddleware for each in app.user_middleware
    ):
        return
    for context, route in _all_routes(app.routes):
        if _takes_part(route) or any(_transactions(getattr(context, "dependant", None))):
            _refuse(context, "depends on a transaction, and idempotency is not installed", _INSTALL)


def _require_repeatable(route: APIRoute, idempotency: Idempotency) -> None:
    endpoint = inspect.unwrap(route.endpoint)
    methods = set(idempotency.settings.methods)
    if not set(route.methods or ()) <= methods:
        _refuse(route, "has methods without idempotency", f"use {' or '.join(sorted(methods))} for it alone")
    if inspect.isgeneratorfunction(endpoint) or inspect.isasyncgenfunction(endpoint):
        _refuse(route, "is a stream, which cannot be repeated", "return the whole answer")
    if idempotency.buffered:
        return
    for answer in (route.response_class, inspect.signature(endpoint, eval_str=True).return_annotation):
        if isinstance(answer, type) and issubclass(answer, StreamingResponse | FileResponse):
            problem = f"answers with {answer.__name__}, of which a duplicate would get a part or nothing"
            _refuse(route, problem, "return the whole answer, or use Idempotency(buffered=True)")


def _refuse(route: Any, problem: str, remedy: str) -> None:
    raise ConfigurationError(f"the route {getattr(route, 'path', '?')}", problem, remedy)


def _transactions(dependant: Any) -> Iterator[TransactionDependency]:
    if isinstance(getattr(dependant, "call", None), TransactionDependency):
        yield dependant.call
    for dependency in getattr(dependant, "dependencies", ()):
        yield from _transactions(dependency)


# --- OpenAPI ---


def _responses(settings: IdempotencySettings) -> dict[int | str, dict[str, Any]]:
    schema = {
        "type": "object",
        "required": ["type", "title", "status"],
        "properties": {
            "type": {"type": "string", "format": "uri-reference"},
            "title": {"type": "string"},
            "status": {"type": "integer"},
            "detail": {"type": "string"},
        },
    }
    shown = [status for status in PROBLEMS if status != 422 or settings.mismatch_status == 422]
    return {
        status: {"description": PROBLEMS[status], "content": {"application/problem+json": {"schema": schema}}}
        for status in shown
    }


def _with_header(extra: dict[str, Any] | None, required: bool) -> dict[str, Any]:
    header = {
        "name": "Idempotency-Key",
        "in": "header",
        "required": required,
        "description": "Chosen by the client for this request, and the same for every retry of it.",
        "schema": {"type": "string", "minLength": 1, "maxLength": LONGEST_KEY},
    }
    extra = dict(extra or {})
    return {**extra, "parameters": [*extra.get("parameters", ()), header]}
