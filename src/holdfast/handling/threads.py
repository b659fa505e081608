"""Threads for handlers that are not asynchronous.

Not an executor: the interpreter waits for an executor's threads before it ends, so one handler that hangs would keep
a stopped worker from ever exiting.
"""

import asyncio
import contextlib
import enum
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue


class NoThread(Exception):
    """No thread became free in time."""


class _State(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    ABANDONED = enum.auto()  # runs on, but nobody waits for its answer
    ENDED = enum.auto()


@dataclass(slots=True)
class _Call:
    function: Callable[..., object]
    start: Callable[[], None]
    loop: asyncio.AbstractEventLoop
    answer: "asyncio.Future[object] | None"  # None when nobody waits for it any more
    early: bool = False  # the function answers by itself, before it ends
    state: _State = _State.WAITING

    def run(self) -> None:
        self._post(self._started)
        try:
            result = self.function(partial(self._post, self._finish)) if self.early else self.function()
        except (StopIteration, GeneratorExit) as error:
            # A future refuses them: they mean something else to the coroutine that awaits it.
            replaced = RuntimeError(f"the handler raised {type(error).__name__}")
            replaced.__cause__ = error
            self._post(self.fail, replaced)
        except BaseException as error:
            self._post(self.fail, error)
        else:
            self._post(self._finish, result)

    def _post(self, callback: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the answer is no longer waited for
            self.loop.call_soon_threadsafe(callback, *arguments)

    # These run on the loop, which knows whether the answer is still waited for.

    def _started(self) -> None:
        if self.answer is not None and not self.answer.done():
            self.start()

    def _finish(self, result: object) -> None:
        if self.answer is not None and not self.answer.done():
            self.answer.set_result(result)

    def fail(self, error: BaseException) -> None:
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(error)


class Threads:
    """At most `size` threads, started when they are needed, and as many again in place of those that hang."""

    def __init__(self, size: int, at_end: Callable[[], None] = lambda: None) -> None:
        self._size = size
        self._at_end = at_end  # runs in each thread, as the last thing
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._lock = threading.Lock()  # for the states of calls and the numbers below
        self._threads = 0
        self._unfinished = 0  # calls that wait or run, abandoned ones included
        self._abandoned = 0

    async def call(
        self, function: Callable[..., object], start: Callable[[], None], *, patience: float, early: bool = False
    ) -> object:
        """Run the function in a thread. `start` is called, on the loop, when a thread has been found for it.

        With `early` the function gets a function to answer with before it ends.
        """
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        call = _Call(function, start, loop, answer, early)
        with self._lock:
            self._unfinished += 1
        self._calls.put(call)
        self._grow()
        overdue = loop.call_later(patience, self._give_up, call)
        try:
            return await answer
        except asyncio.CancelledError:
            if answer.cancelled():
                self._abandon(call)
            raise
        finally:
            overdue.cancel()
            # An error refers by its traceback to this frame and to the thread's: neither may refer to the error.
            call.answer = None
            del answer

    def close(self) -> None:
        """Let idle threads end; busy threads end after their call."""
        for _ in range(self._threads):
            self._calls.put(None)

    def _give_up(self, call: _Call) -> None:
        with self._lock:
            if call.state is not _State.WAITING:
                return
            call.state = _State.ENDED
        call.fail(NoThread())

    def _abandon(self, call: _Call) -> None:
        """Stop waiting for the call. A thread that hangs in it is replaced."""
        with self._lock:
            if call.state is _State.RUNNING:
                call.state = _State.ABANDONED
                self._abandoned += 1
            elif call.state is _State.WAITING:
                call.state = _State.ENDED
        self._grow()

    @property
    def _limit(self) -> int:
        return self._size + min(self._abandoned, self._size)

    def _grow(self) -> None:
        with self._lock:
            if self._threads >= min(self._unfinished, self._limit):
                return
            self._threads += 1
            name = f"holdfast-handler-{self._threads}"
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        try:
            self._take_calls()
        finally:
            self._at_end()

    def _take_calls(self) -> None:
        while (call := self._calls.get()) is not None:
            if self._take(call):
                call.run()
            if not self._finish(call):
                return
            del call  # not to keep an event alive while waiting for the next

    def _take(self, call: _Call) -> bool:
        with self._lock:
            if call.state is not _State.WAITING:
                return False
            call.state = _State.RUNNING
            return True

    def _finish(self, call: _Call) -> bool:
        """Return False if there are enough threads without this one."""
        with self._lock:
            self._unfinished -= 1
            if call.state is _State.ABANDONED:
                self._abandoned -= 1
            call.state = _State.ENDED
            if self._threads <= self._limit:
                return True
            self._threads -= 1
            return False
