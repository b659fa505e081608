"""An event loop in a thread, for programs that have none."""

import asyncio
import contextlib
import threading
from contextlib import AbstractAsyncContextManager


class BackgroundLoop:
    """Enters an asynchronous context manager in a thread of its own, and leaves it when `end` is called."""

    def __init__(self, resource: AbstractAsyncContextManager[object], name: str) -> None:
        self._resource = resource
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself; its error is raised below
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            asyncio.run(self._live())
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()

    async def _live(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with self._resource:
            self._ready.set()
            await self._stop.wait()
