"""Runs a coroutine from synchronous code, whether or not its thread has an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def wait_for(work: Coroutine[Any, Any, T]) -> T:
    """Run the work in a thread with a loop of its own, and return its result or raise its error."""
    with ThreadPoolExecutor(1, "holdfast-waiting") as thread:
        return thread.submit(asyncio.run, work).result()
