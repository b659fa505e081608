"""One event loop in a thread for the whole test session, for tests that have no event loop of their own."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import cache, partial
from queue import SimpleQueue
from typing import Any, TypeVar

from holdfast.errors import ConfigurationError

T = TypeVar("T")


_PATIENCE = 10.0


async def _until_ended(coroutine: Coroutine[Any, Any, T], ended: threading.Event) -> T:
    try:
        return await coroutine
    finally:
        ended.set()


class KitLoop:
    """Runs coroutines from any thread and waits for them."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="holdfast-testing", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], caller: CallingThread | None = None) -> T:
        """Return the result of a coroutine, or raise its error. The thread of a `caller` runs calls while it waits."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise ConfigurationError(
                "outbox",
                "is used by a handler that it runs itself",
                "let the handler return first, or use async_outbox",
            )
        ended = threading.Event()
        result = asyncio.run_coroutine_threadsafe(_until_ended(coroutine, ended), self._loop)
        try:
            if caller is not None:
                caller.work_until(result)
            return result.result()
        except BaseException:
            if not result.done():  # the wait was interrupted: nothing of it may go on beside the next test
                result.cancel()
                ended.wait(_PATIENCE)
            raise

    def has(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Return whether a loop is this one."""
        return loop is self._loop

    async def within(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on this loop, and await it from any loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))


class CallingThread:
    """The thread of a test that waits for the kit's loop. Functions that need what belongs to that thread run in it."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()

    async def call(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Call a function in the thread, and return its result."""
        answer: Future[T] = Future()
        self._calls.put((answer, partial(contextvars.copy_context().run, function, *arguments, **options)))
        return await asyncio.wrap_future(answer)

    def work_until(self, done: Future[Any]) -> None:
        """Run the calls that the loop hands to this thread, until a future is done."""
        done.add_done_callback(lambda _: self._calls.put(None))
        while (call := self._calls.get()) is not None:
            answer, function = call
            try:
                result = function()
            except BaseException as error:
                if answer.set_running_or_notify_cancel():
                    answer.set_exception(error)
            else:
                if answer.set_running_or_notify_cancel():
                    answer.set_result(result)


@cache
def kit_loop() -> KitLoop:
    """Return the loop of this process, which is started when it is first needed."""
    return KitLoop()


def in_event_loop() -> bool:
    """Return whether this thread runs an event loop now, which a blocking call would stop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
