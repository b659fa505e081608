"""Runs a process that belongs to a worker alone. In a service's process, its settings are for the service to decide."""

import asyncio
import gc
import importlib.util
import os
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


def run(work: Coroutine[object, None, T]) -> T:
    """Run a coroutine on the fastest event loop that is installed."""
    # Imported modules stay: looking for garbage among them is useless. A claim makes thousands of objects at once,
    # which are freed soon without the collector; with Python's own thresholds each claim would cost three collections.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    if importlib.util.find_spec("uvloop") is None:
        return asyncio.run(work)
    import uvloop

    return uvloop.run(work)


def exit_now(signal_number: int) -> None:
    """End the process at once, with status 128 + signal. Its events are claimed again when their leases expire."""
    os._exit(128 + signal_number)
