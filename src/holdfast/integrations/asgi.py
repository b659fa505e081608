"""Holdfast in an application of any ASGI framework: a worker in its lifespan, and transactions that publish.

    app = Starlette(routes=routes, lifespan=worker_lifespan(lambda: Worker(dsn, registry)))
    app = Litestar(handlers, lifespan=[worker_lifespan(lambda: Worker(dsn, registry))])

The worker starts before the first request is served and stops with the application: it stops claiming, lets running
handlers finish within the grace period, and releases the rest. Handlers that need much CPU time are better run by a
separate process (`holdfast worker`), because here they share the processor with the requests.

    events = transaction_per_request(Publisher("shop"), lambda: app.state.pool.acquire())

is a dependency for frameworks that inject them. It imports no framework; `holdfast.integrations.fastapi` has more.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, Unpack

from holdfast.checks import function, instance, is_async, takes
from holdfast.errors import ConfigurationError
from holdfast.measurements import Measurements
from holdfast.new_event import EventOptions
from holdfast.observability.health import Health
from holdfast.postgres.managed_transaction import Connect, open_managed_transaction, uninterrupted
from holdfast.postgres.publisher import Publisher
from holdfast.postgres.queries import Queries
from holdfast.worker.worker import Worker

__all__ = ["Lifespan", "RequestTransaction", "WorkerLifespan", "transaction_per_request", "worker_lifespan"]

# The type of `lifespan` in FastAPI and Starlette. It may yield a mapping: the state that requests see.
Lifespan = Callable[[Any], AbstractAsyncContextManager[Mapping[str, Any] | None]]

_FACTORY = "pass a function that makes it: lambda: Worker(dsn, registry)"
# Seconds, as for idempotent requests.
_CONNECT_WITHIN = 5.0
_BEGIN_WITHIN = 5.0
_COMMIT_WITHIN = 10.0


class WorkerLifespan:
    """The lifespan of an application with a worker in it, which `worker_lifespan` returns."""

    def __init__(self, make_worker: Callable[[], Worker], lifespan: Lifespan | None) -> None:
        function("make_worker", make_worker, _FACTORY)
        if is_async(make_worker):
            raise ConfigurationError("make_worker", "is async def", _FACTORY)
        if not takes(make_worker, 0):
            remedy = f"{_FACTORY}; the application's lifespan is second"
            raise ConfigurationError("make_worker", "takes an argument", remedy)
        if lifespan is not None:
            function("lifespan", lifespan, "pass the lifespan of the framework: a function of the application")
        self._make_worker = make_worker
        self._lifespan = lifespan
        self._worker: Worker | None = None

    def health(self) -> Health:
        """Return the health of the worker, for `HealthApp`."""
        return (
            Health("new", not_live=("the application has not started",))
            if self._worker is None
            else self._worker.health()
        )

    def measurements(self) -> Measurements:
        """Return the counts and the state of the worker, for a `Collector` of prometheus_client."""
        return Measurements() if self._worker is None else self._worker.measurements()

    def check(self, app: Any) -> None:
        """Refuse an application that is set up wrongly, before the worker starts."""

    # FastAPI and Starlette have one type for lifespans that yield nothing, and another for those that yield a mapping.
    @asynccontextmanager
    async def __call__(self, app: Any) -> AsyncIterator[Any]:
        async with AsyncExitStack() as stack:
            state = None if self._lifespan is None else await stack.enter_async_context(self._lifespan(app))
            self.check(app)
            worker = self._make_worker()
            if not isinstance(worker, Worker):
                raise ConfigurationError("make_worker", f"returned {type(worker).__name__}, not a Worker", _FACTORY)
            self._worker = worker
            await stack.enter_async_context(worker)
            yield state


def worker_lifespan(make_worker: Callable[[], Worker], lifespan: Lifespan | None = None) -> WorkerLifespan:
    """Return a lifespan that runs a worker, inside the application's own `lifespan` if there is one.

    The application's own lifespan starts first and ends last, so handlers may use what it opens. `make_worker` is
    called at each start, because a worker that has stopped stays stopped. `health` of what is returned says how it is.
    """
    return WorkerLifespan(make_worker, lifespan)


class RequestTransaction:
    """The transaction of one request, as `tx`, and a publisher for it; usable until the endpoint has returned."""

    def __init__(self, publisher: Publisher, tx: Any) -> None:
        self.publisher = publisher
        self._tx = tx
        self._ended = False

    @property
    def tx(self) -> Any:
        """The connection or session. Raises ConfigurationError when the transaction has ended."""
        if self._ended:
            # Another request may have the connection by now, and would commit what is written here.
            raise ConfigurationError(
                "tx",
                "is used after the transaction of the request has ended",
                "publish before the endpoint returns; in a streamed body or a background task, open a transaction of "
                "your own",
            )
        return self._tx

    def end(self) -> None:
        """Refuse every further use of `tx`."""
        self._ended = True

    def publish(self, event_type: Any, *payload: Any, **options: Unpack[EventOptions]) -> Any:
        """Publish an event in the transaction, as `Publisher.publish` does; await it, unless `tx` is synchronous."""
        return self.publisher.publish(self.tx, event_type, *payload, **options)


def transaction_per_request(publisher: Publisher, connect: Connect) -> Callable[[], AsyncIterator[RequestTransaction]]:
    """Return a dependency that opens a transaction for a request, and commits it when the endpoint has returned.

    `connect` returns the context manager of a connection or session: `pool.acquire`, `pool.connection`, a
    `sessionmaker`. An endpoint that raises has its transaction rolled back; one that returns has it committed, whatever
    the status.
    """
    instance("publisher", publisher, Publisher, 'pass Publisher("shop")')
    function("connect", connect, "pass pool.acquire, pool.connection or a sessionmaker, and do not call it")

    async def transaction() -> AsyncIterator[RequestTransaction]:
        managed = await open_managed_transaction(connect, Queries("core"), _CONNECT_WITHIN, _BEGIN_WITHIN)
        events = RequestTransaction(publisher, managed.tx)
        try:
            try:
                yield events
            finally:
                events.end()
            with managed.deadline(_COMMIT_WITHIN):
                await managed.confirm()  # raises where Postgres would answer COMMIT with a rollback
                await uninterrupted(managed.commit())
        finally:
            await uninterrupted(managed.rollback())

    return transaction
