"""The thread that runs a handler together with its transaction, and the event loop beside it."""

import asyncio
import contextlib
import contextvars
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from holdfast.handling.application.transaction import ApplicationTransaction
from holdfast.handling.calls import Call
from holdfast.lifespan import States

R = TypeVar("R")


class HandlerThread:
    """The link between a handler's thread and the event loop. A thread cannot be stopped, only kept from a commit.

    With `forbid` its transaction stays open until the thread ends, and its row locked; with `sever` it ends at once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, transaction: ApplicationTransaction) -> None:
        self._loop = loop
        self._transaction = transaction
        self._around: Future[Any] | None = None
        self.started_at = 0.0  # when it called the handler, of which the event loop may hear after its end

    def post(self, callback: Callable[..., None], *arguments: Any) -> None:
        """Call a function on the event loop."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing is waited for any longer
            self._loop.call_soon_threadsafe(callback, *arguments)

    def forbid(self) -> None:
        """Cancel the handler's statement and its middlewares, and never commit what it wrote."""
        self._transaction.forbid()
        self._cancel_around()

    def sever(self) -> None:
        """Cut the connection of the handler, and cancel its middlewares."""
        self._transaction.terminate()
        self._cancel_around()

    def _cancel_around(self) -> None:
        if self._around is not None:
            self._around.cancel()

    def run_through(self, call: Call[R], function: Callable[[Call[R]], R], states: States) -> R:
        """Run the middlewares on the loop, and the function in this thread when they ask for it."""
        asked: SimpleQueue[tuple[contextvars.Context, Call[R], asyncio.Future[R]] | None] = SimpleQueue()

        async def innermost(call: Call[R]) -> R:
            answer: asyncio.Future[R] = self._loop.create_future()
            asked.put((contextvars.copy_context(), call, answer))
            return await answer

        running: Coroutine[Any, Any, R] = call.through(states, innermost)
        around: Future[R] = asyncio.run_coroutine_threadsafe(running, self._loop)
        self._around = around
        around.add_done_callback(lambda _: asked.put(None))
        while (each := asked.get()) is not None:
            variables, given, answer = each
            try:
                outcome = variables.run(function, given)
            except (StopIteration, GeneratorExit) as error:
                replaced = RuntimeError(f"the handler raised {type(error).__name__}")
                replaced.__cause__ = error
                self.post(_fail, answer, replaced)
            except BaseException as error:
                self.post(_fail, answer, error)
            else:
                self.post(_answer, answer, outcome)
        return around.result()


def _answer(answer: "asyncio.Future[R]", outcome: R) -> None:
    if not answer.done():
        answer.set_result(outcome)


def _fail(answer: "asyncio.Future[Any]", error: BaseException) -> None:
    if not answer.done():
        answer.set_exception(error)
