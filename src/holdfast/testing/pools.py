"""Pools of psycopg that a test passes and has not opened: a pool that was closed once cannot be opened again."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from typing import Any

from holdfast.handling.application.sources import Transactions
from holdfast.testing.loop import kit_loop


class OpenPools:
    """Opens pools before the first worker of a test would, and closes them when the test has ended.

    So they outlive a worker that a fault has killed, as they outlive a drain.
    """

    def __init__(self) -> None:
        self._opened: list[tuple[Any, asyncio.AbstractEventLoop]] = []

    async def open(self, given: Transactions) -> None:
        """Open the pools that are not open, on the running loop."""
        every: Sequence[Any] = given if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
        for each in every:
            if type(each).__module__.startswith("psycopg_pool") and each.closed:
                if inspect.iscoroutinefunction(each.open):
                    await each.open()
                else:
                    await asyncio.to_thread(each.open)
                self._opened.append((each, asyncio.get_running_loop()))

    def close(self) -> None:
        """Close the pools that were opened here, each on its loop; those of a test's ended loop are dropped."""
        opened, self._opened = self._opened, []
        for pool, loop in opened:
            if not inspect.iscoroutinefunction(pool.close):
                pool.close()
            elif kit_loop().has(loop):
                kit_loop().run(pool.close())
            elif not (loop.is_closed() or loop.is_running()):
                loop.run_until_complete(pool.close())
