"""Runs the lifespans of handlers: enters them in order, and leaves them in the opposite order, in one task of its own.

Task groups and time limits within a lifespan need to be entered and left by the same task.
"""

import asyncio
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack

from holdfast.errors import ConfigurationError, LifespanError
from holdfast.failure import Redactor, describe
from holdfast.handlers import Handler
from holdfast.lifespan import Lifespan, lifespan_name
from holdfast.telemetry import Notice, Observer

# Seconds after which the log names the lifespan that the start waits for.
SLOW_START = 10.0
# Seconds in which all lifespans have to end, and to end after they have been cancelled.
END_PATIENCE = 5.0
_CANCEL_PATIENCE = 0.5


class Lifespans:
    """The lifespans of some handlers. While they are open, `states` has the values that they yield."""

    def __init__(self, handlers: Iterable[Handler], observe: Observer, redact: Redactor | None = None) -> None:
        self._handlers = tuple(handlers)
        # Registries that are included twice, or by two others, have one lifespan.
        self._lifespans = tuple(dict.fromkeys(each for handler in self._handlers for each in handler.lifespans))
        self._observe = observe
        self._redact = redact
        self._task: asyncio.Task[None] | None = None
        self._current: Lifespan | None = None
        self.states: dict[Lifespan, object] = {}
        for handler in self._handlers:
            names = [handler.name] if handler.wants_state else []
            names += [each.name for each in handler.middleware if "state" in each.wanted]
            if names and not handler.lifespans:
                remedy = "give one to the registry: HandlerRegistry(lifespan=resources)"
                raise ConfigurationError(f"{names[0]}.state", "is filled by no lifespan", remedy)

    async def start(self, stop: asyncio.Event | None = None) -> bool:
        """Enter all lifespans, or raise a `LifespanError`; return False if `stop` was set meanwhile."""
        if not self._lifespans:
            return True
        self._ready, self._end = asyncio.Event(), asyncio.Event()
        self._task = asyncio.create_task(self._live(), name="holdfast-lifespans")
        self._task.add_done_callback(self._report_early_end)
        slow = asyncio.get_running_loop().call_later(SLOW_START, self._report_slow_start)
        waits = {asyncio.create_task(self._ready.wait())}
        if stop is not None:
            waits.add(asyncio.create_task(stop.wait()))
        try:
            await asyncio.wait({self._task, *waits}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._task.cancel()
            await self.stop()
            raise
        finally:
            slow.cancel()
            for each in waits:
                each.cancel()
        if self._task.done():
            raise self._failed(self._task, "at start")
        if not self._ready.is_set():
            self._task.cancel()
            await self.stop()
            return False
        try:
            self._require_types()
        except ConfigurationError:
            await self.stop()
            raise
        return True

    async def ended(self) -> None:
        """Wait until a lifespan ends by itself, which is a failure; without lifespans, wait for ever."""
        if self._task is None:
            await asyncio.Event().wait()
        else:
            await asyncio.wait({self._task})

    async def stop(self) -> None:
        """Leave all lifespans, within a time limit. Report an error; raise it if a lifespan ended too early."""
        task = self._task
        if task is None:
            return
        if task.done():
            raise self._failed(task, "while handlers ran")
        self._task = None
        self._end.set()
        done, _ = await asyncio.wait({task}, timeout=END_PATIENCE)
        if not done:
            task.cancel()
            await asyncio.wait({task}, timeout=_CANCEL_PATIENCE)
            self._report("lifespan_overran", {"limit_s": END_PATIENCE, "remedy": "give what it closes a time limit"})
        elif not task.cancelled() and (error := _error_of(task)) is not None:
            self._report("lifespan_failed", {"error": describe(error, self._redact).text})
        self.states.clear()

    async def _live(self) -> None:
        try:
            await self._enter_and_leave()
        except SystemExit as error:
            raise _Exit from error  # asyncio would end the event loop with it, and every other task

    async def _enter_and_leave(self) -> None:
        async with AsyncExitStack() as stack:
            for lifespan in self._lifespans:
                self._current = lifespan
                manager = lifespan()
                if not isinstance(manager, AbstractAsyncContextManager):
                    raise TypeError(f"it returned {type(manager).__name__}, which is no asynchronous context manager")
                self.states[lifespan] = await stack.enter_async_context(manager)
            self._ready.set()
            await self._end.wait()

    def _require_types(self) -> None:
        for handler in self._handlers:
            if handler.wants_state and (kind := handler.parameters.state_type) is not None:
                lifespan = handler.lifespans[-1]
                state = self.states[lifespan]
                if not _fits(state, kind):
                    problem = f"is annotated with {kind.__name__}, and gets {type(state).__name__}"
                    remedy = f"annotate it with what {lifespan_name(lifespan)} yields"
                    raise ConfigurationError(f"{handler.name}.state", problem, remedy)

    def _failed(self, task: asyncio.Task[None], when: str) -> LifespanError:
        self._task = None
        error = _error_of(task)
        text = describe(error, self._redact).text if error is not None else "it ended"
        failure = LifespanError(lifespan_name(self._current), when, text.partition("\n")[0])
        failure.__cause__ = error
        return failure

    def _report_slow_start(self) -> None:
        details: dict[str, object] = {
            "lifespan": lifespan_name(self._current),
            "after_s": SLOW_START,
            "remedy": "nothing is handled before it yields: give what it opens a time limit",
        }
        self._observe(Notice("warning", "lifespan_slow", details))

    def _report_early_end(self, task: asyncio.Task[None]) -> None:
        if self._ready.is_set() and not self._end.is_set():
            error = _error_of(task)
            self._report(
                "lifespan_failed", {"error": "it ended" if error is None else describe(error, self._redact).text}
            )

    def _report(self, name: str, details: dict[str, object]) -> None:
        names = [lifespan_name(each) for each in self._lifespans]
        self._observe(Notice("error", name, {"lifespans": names, **details}))


class _Exit(Exception):
    """A lifespan called sys.exit(); its error is the cause."""


def _error_of(task: asyncio.Task[None]) -> BaseException | None:
    if task.cancelled():
        return asyncio.CancelledError()
    error = task.exception()
    return error.__cause__ if isinstance(error, _Exit) else error


def _fits(state: object, kind: type) -> bool:
    try:
        return isinstance(state, kind)
    except TypeError:  # a TypedDict
        return True
