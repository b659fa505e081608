"""Wake-ups of the claimer: the settler, the sleeper and the listener call `wake`, and the claimer waits."""

import asyncio
import time

# A wake-up that finds nothing is another worker's event, or noise: so many per second are answered at once.
_IDLE_WAKEUPS = 20
_FLOOD_PAUSE = 0.05


class Wakeups:
    """One claimer's wake-ups. Only the worker's event loop may call it."""

    def __init__(self) -> None:
        self._woken = asyncio.Event()
        self._rescan = False
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = 0.0
        self._in_vain: list[float] = []  # when wake-ups of the last second found nothing

    def wake(self, rescan: bool = False) -> None:
        """End the claimer's sleep. With `rescan` it looks from the start of every lane, not only for new rows."""
        self._rescan = self._rescan or rescan
        self._woken.set()

    def wake_in(self, delay: float) -> None:
        """End the claimer's sleep when the delay is over: a row will be due then.

        Only the earliest such moment is kept. A claimer that is woken asks for the next one before it sleeps again.
        """
        loop = asyncio.get_running_loop()
        due = loop.time() + delay
        if self._alarm is not None:
            if self._alarm_at <= due:
                return
            self._alarm.cancel()
        self._alarm, self._alarm_at = loop.call_later(delay, self._ring), due

    def _ring(self) -> None:
        # That it has run is noted here and not read off a clock: uvloop's timers run up to a millisecond early.
        self._alarm = None
        self.wake()

    def look_again(self) -> None:
        """End the claimer's sleep: events may have been committed without a notification."""
        self.wake(rescan=True)

    @property
    def pending(self) -> bool:
        """Whether a wake-up has arrived since the last `take`."""
        return self._woken.is_set()

    def take(self) -> bool:
        """Take the wake-ups that have arrived; true when one of them asked for a rescan."""
        self._woken.clear()
        rescan, self._rescan = self._rescan, False
        return rescan

    async def wait(self, timeout: float) -> bool:
        """Wait for a wake-up; false when none arrives in time."""
        if self._woken.is_set():
            return True
        try:
            async with asyncio.timeout(timeout):
                await self._woken.wait()
        except TimeoutError:
            return False
        return True

    async def temper(self) -> None:
        """Note a wake-up that found nothing. A flood of them costs at most one look in 50 ms."""
        now = time.monotonic()
        self._in_vain = [at for at in self._in_vain if now - at < 1.0]
        self._in_vain.append(now)
        if len(self._in_vain) > _IDLE_WAKEUPS:
            await asyncio.sleep(_FLOOD_PAUSE)
