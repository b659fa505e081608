"""How a process that belongs to a worker alone is run. Beside a service, that is for the service to decide."""

import asyncio
import gc
import importlib.util
import os
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


def run(work: Coroutine[object, None, T]) -> T:
    """Run it on the fastest loop there is."""
    # What is imported stays: there is no use in looking for garbage among it. A claim brings thousands of objects at
    # once, which are gone soon by themselves; with Python's own limits each of them would cost three collections.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    if importlib.util.find_spec("uvloop") is None:
        return asyncio.run(work)
    import uvloop

    return uvloop.run(work)


def exit_now(signal_number: int) -> None:
    """End the process without waiting for anything; leases give the events back. The status is 128 + signal."""
    os._exit(128 + signal_number)
