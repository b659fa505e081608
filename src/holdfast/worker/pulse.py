"""The pulse of an event loop: when it last turned, for the threads that watch it."""

import asyncio
import time

_INTERVAL = 0.2


class Pulse:
    """Notes the turns of one event loop while `run` runs in it."""

    def __init__(self) -> None:
        self.turned_at = time.monotonic()

    async def run(self) -> None:
        while True:
            self.turned_at = time.monotonic()
            await asyncio.sleep(_INTERVAL)

    @property
    def silent_for(self) -> float:
        """Seconds for which something has blocked the loop; at most a fraction of one while nothing does."""
        return max(0.0, time.monotonic() - self.turned_at)
