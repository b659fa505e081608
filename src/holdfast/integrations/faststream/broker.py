"""The broker: subscribers become handlers, and start() runs a worker."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import faststream_outbox
from faststream._internal.endpoint.subscriber import SubscriberUsecase
from sqlalchemy import MetaData, Table
from sqlalchemy.ext.asyncio import AsyncEngine

from holdfast.checks import instance
from holdfast.errors import ConfigurationError
from holdfast.handlers import DEFAULT_TIMEOUT, HandlerRegistry
from holdfast.integrations.faststream.client import EventClient
from holdfast.integrations.faststream.subscriber import SubscriberHandler
from holdfast.outcome import LONGEST_DELAY
from holdfast.postgres.publisher import Publisher
from holdfast.retry import SHORTEST_DELAY, RetryPolicy
from holdfast.settings import WorkerSettings
from holdfast.worker.worker import Worker

# The retry strategy of the subscriber decides how long to wait and when to give up; this policy adds as little to the
# wait as it can.
_UNLIMITED = RetryPolicy(max_attempts=2**31 - 1, base_delay=SHORTEST_DELAY, max_delay=LONGEST_DELAY)


class OutboxBroker(faststream_outbox.OutboxBroker):
    """The broker of faststream-outbox, which publishes and consumes with Holdfast.

    `source` is that of the events, and the first part of the handlers' names. `event_types` gives queues the names of
    other event types. `outbox_table` and `dlq_table` are accepted, and not used. `start()` runs a worker in this
    process; `registry()` is for one of its own.
    """

    def __init__(
        self,
        engine: AsyncEngine | None = None,
        *,
        source: str,
        outbox_table: Table | None = None,
        event_types: Mapping[str, str] | None = None,
        dsn: str | None = None,
        settings: WorkerSettings | None = None,
        **options: Any,
    ) -> None:
        if engine is None and dsn is None:
            raise ConfigurationError("engine", "is missing", "pass the AsyncEngine of the application, or dsn=")
        if engine is not None:
            instance("engine", engine, AsyncEngine, "pass the AsyncEngine of the application, or dsn= with an address")
        table = faststream_outbox.make_outbox_table(MetaData()) if outbox_table is None else outbox_table
        super().__init__(engine, outbox_table=table, **options)
        self._source = source
        self._event_types = dict(event_types or {})
        self._dsn = dsn or (engine.url.render_as_string(hide_password=False) if engine is not None else "")
        self._settings = settings or WorkerSettings()
        publisher = Publisher(source, schema=self._settings.schema)
        self.config.broker_config.client = self._own = EventClient(engine, table, publisher, self._event_type)
        self._running: AsyncExitStack | None = None

    def registry(self) -> HandlerRegistry:
        """Return the subscribers as handlers; call it when all of them are declared.

        A handler is named after the source and its first queue: `shop.send_mail`; where several subscribers share
        it, also after its function: `shop.send_mail_count`. Its name is what its events are owed
        to, so a queue that is renamed is another handler.
        """
        registry = HandlerRegistry(lifespan=self._prepared)
        subscribers: list[Any] = self.subscribers
        shared = Counter(_name(subscriber._config.queues[0]) for subscriber in subscribers)
        for subscriber in subscribers:
            config = subscriber._config
            queues = {self._event_type(queue): queue for queue in config.queues}
            name = _name(config.queues[0])
            if shared[name] > 1:  # all of them: FastStream does not keep the order in which they are declared
                name = "_".join([name, *(_name(call.name) for call in subscriber.calls)])
            registry.add(
                f"{_name(self._source)}.{name}",
                queues,
                SubscriberHandler(subscriber, queues),
                retry=_UNLIMITED,
                timeout=max(DEFAULT_TIMEOUT, config.lease_ttl_seconds),
                concurrency=config.max_workers,
            )
        return registry

    async def start(self) -> None:
        """Run a worker in this process, as `holdfast worker` would in its own."""
        if self.config.broker_config.client is not self._own:  # a TestOutboxBroker, which has one in memory
            await super().start()
            return
        if self._running is None:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(Worker(self._dsn, self.registry(), self._settings))
                self._running = stack.pop_all()

    async def stop(self, *args: object, **options: object) -> None:
        """Stop the worker: running subscribers finish, and the rest is released."""
        running, self._running = self._running, None
        if running is not None:
            await running.aclose()
        await super().stop(*args, **options)

    async def ping(self, timeout: float | None = None) -> bool:
        """Return whether the database answers."""
        return await super().ping(timeout)

    @asynccontextmanager
    async def _prepared(self) -> AsyncIterator[None]:
        """Build what FastStream needs to call subscribers, without its loops."""
        await self.connect()
        for subscriber in self.subscribers:
            await SubscriberUsecase.start(subscriber)
            subscriber._post_start()
        for publisher in self.publishers:
            await publisher.start()
        self.running = True
        try:
            yield
        finally:
            self.running = False
            for subscriber in self.subscribers:
                subscriber.running = False

    async def _connect(self) -> Any:
        return self.config.broker_config.engine  # of the application; the worker has connections of its own

    def _event_type(self, queue: str) -> str:
        return self._event_types.get(queue, queue)


def _name(text: str) -> str:
    """Return a part of a handler's name."""
    return re.sub(r"[^a-z0-9_]", "_", text.lower()).lstrip("_0123456789") or "queue"
