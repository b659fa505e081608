"""A worker beside a FastAPI or Starlette application, in the same process.

    app = FastAPI(lifespan=worker_lifespan(lambda: Worker(dsn, registry)))

It starts before the first request is served and stops with the application: it stops claiming, lets running handlers
finish within the grace, and gives the rest back. A process of its own (`holdfast worker`) is the better place for
handlers that need the processor, because here they share it with the requests.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

from holdfast.worker.worker import Worker

# What FastAPI and Starlette take as `lifespan`: it may yield a mapping, the state that requests see.
Lifespan = Callable[[Any], AbstractAsyncContextManager[Mapping[str, Any] | None]]


def worker_lifespan(make_worker: Callable[[], Worker], lifespan: Lifespan | None = None) -> Lifespan:
    """A lifespan that runs a worker; with `lifespan`, inside the one the application has already.

    The application's own lifespan starts first and ends last, so handlers may use what it opens. `make_worker` is
    called at each start, because a worker that has stopped stays stopped.
    """

    @asynccontextmanager
    async def with_worker(app: Any) -> AsyncIterator[Mapping[str, Any] | None]:
        async with AsyncExitStack() as stack:
            state = None if lifespan is None else await stack.enter_async_context(lifespan(app))
            await stack.enter_async_context(make_worker())
            yield state

    return with_worker
