"""The outbox as an `EventListener`, for an application that hides what delivers its events behind that protocol."""

import dataclasses

from holdfast.handlers import HandlerRegistry
from holdfast.protocols import EventHandler
from holdfast.settings import WorkerSettings
from holdfast.worker.worker import Worker


class OutboxListener:
    """Delivers the events of a channel to one handler, until it is cancelled."""

    def __init__(self, dsn: str, settings: WorkerSettings | None = None) -> None:
        self._dsn = dsn
        self._settings = settings or WorkerSettings()

    async def listen(self, *, channel: str, handler_name: str, handler: EventHandler) -> None:
        registry = HandlerRegistry()
        registry.add(handler_name, ("*",), handler)
        settings = dataclasses.replace(self._settings, channels=(channel,))
        await Worker(self._dsn, registry, settings).run()
