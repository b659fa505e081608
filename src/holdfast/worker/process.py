"""Runs a process that belongs to a worker alone. In a service's process, its settings are for the service to decide."""

import asyncio
import contextlib
import gc
import importlib.util
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import TypeVar

T = TypeVar("T")

# For tasks that are cancelled when the worker has stopped.
_TASK_PATIENCE = 0.5


def run(work: Coroutine[object, None, T]) -> T:
    """Run a coroutine on the fastest event loop that is installed."""
    with _runner() as runner:
        return runner.run(work)


def run_worker(work: Coroutine[object, None, None]) -> list[str]:
    """Run a worker that ends although handlers have left tasks.

    Returns the names of those that refuse to end: their loop stays open.
    """
    runner = _runner()
    left: list[str] = []
    try:
        runner.run(work)
    finally:
        left = runner.run(_end_tasks())
        if not left:
            runner.close()
    return left


def _runner() -> asyncio.Runner:
    # Imported modules stay: looking for garbage among them is useless. A claim makes thousands of objects at once,
    # which are freed soon without the collector; with Python's own thresholds each claim would cost three collections.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    return asyncio.Runner(loop_factory=_loop_factory())


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def _end_tasks() -> list[str]:
    """Cancel the tasks that are left; returns the names of those that go on."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if not tasks:
        return []
    _, refusing = await asyncio.wait(tasks, timeout=_TASK_PATIENCE)
    return sorted(task.get_name() for task in refusing)


@contextlib.contextmanager
def stopped_by_signals(stop: Callable[[], None], is_stopping: Callable[[], bool]) -> Iterator[None]:
    """Let SIGTERM and SIGINT call `stop`. One that comes while it is stopping ends the process at once."""
    loop = asyncio.get_running_loop()

    def signalled(number: int) -> None:
        if is_stopping():
            exit_now(number)
        stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled, number)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def exit_now(signal_number: int) -> None:
    """End the process at once, with status 128 + signal. Its events are claimed again when their leases expire."""
    os._exit(128 + signal_number)
