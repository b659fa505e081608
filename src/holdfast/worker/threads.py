"""Threads for handlers that are not asynchronous.

Not an executor: the interpreter waits for an executor's threads before it ends, so one handler that hangs would keep
a worker that was told to stop from ever going.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue


@dataclass(slots=True)
class _Call:
    function: Callable[[], object]
    start: Callable[[], None]
    loop: asyncio.AbstractEventLoop
    answer: "asyncio.Future[object]"

    def run(self) -> None:
        self._tell(self._started)
        try:
            result = self.function()
        except (StopIteration, GeneratorExit) as error:
            # They mean something else to a coroutine that waits, and cannot be handed to it.
            replaced = RuntimeError(f"the handler raised {type(error).__name__}")
            replaced.__cause__ = error
            self._tell(self._fail, replaced)
        except BaseException as error:
            self._tell(self._fail, error)
        else:
            self._tell(self._finish, result)

    def _tell(self, callback: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(callback, *arguments)

    # On the loop, where it is known whether somebody still waits.

    def _started(self) -> None:
        if not self.answer.done():
            self.start()

    def _finish(self, result: object) -> None:
        if not self.answer.done():
            self.answer.set_result(result)

    def _fail(self, error: BaseException) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class Threads:
    """At most `size` of them, started when they are needed."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._started = 0
        self._unfinished = 0  # calls that wait or run, whether or not somebody still wants their answer
        self._counting = threading.Lock()

    async def call(self, function: Callable[[], object], start: Callable[[], None]) -> object:
        """Run the function in a thread. `start` is called, on the loop, when a thread has been found for it."""
        loop = asyncio.get_running_loop()
        call = _Call(function, start, loop, loop.create_future())
        with self._counting:
            self._unfinished += 1
            another = self._started < min(self._unfinished, self._size)
        self._calls.put(call)
        if another:
            self._started += 1
            threading.Thread(target=self._work, name=f"holdfast-handler-{self._started}", daemon=True).start()
        return await call.answer

    def close(self) -> None:
        """Let idle threads end. What still runs is left to end by itself."""
        for _ in range(self._started):
            self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            if not call.answer.cancelled():
                call.run()
            with self._counting:
                self._unfinished -= 1
            del call  # not to keep an event alive while waiting for the next
