"""Tells systemd how a worker is: READY=1, WATCHDOG=1, STOPPING=1 and a line for `systemctl status`.

The protocol is one datagram for each message (sd_notify(3)); other managers speak it too.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time

from holdfast.observability.health import Health, ReadHealth, read_now

_TURN = 0.25
_STATUS_INTERVAL = 10.0
_MORE_TIME = 30  # seconds, with each turn, for a start that waits for the database


class ServiceManager:
    """The manager that listens at `path`; a name in Linux' abstract namespace begins with @.

    `watchdog` is the time in seconds after which the manager ends a process that says nothing.
    """

    def __init__(self, path: str, watchdog: float | None = None) -> None:
        self._path = f"\0{path[1:]}" if path.startswith("@") else path
        self._watchdog = watchdog
        self._ready = self._stopping = False  # whether it has been told
        self._told: tuple[object, ...] = ()
        self._told_at = self._fed_at = float("-inf")

    async def follow(self, read: ReadHealth) -> None:
        """Tell how a worker is, with the turns of the event loop that runs this; cancelled when it has ended."""
        turn = _TURN if self._watchdog is None else min(_TURN, self._watchdog / 4)
        try:
            while True:
                self._send(self._news(await read_now(read), time.monotonic()))
                await asyncio.sleep(turn)
        finally:
            self._send(self._news(Health("stopped"), time.monotonic()))

    def _news(self, health: Health, now: float) -> list[str]:
        """What the manager has not been told yet."""
        lines = []
        if health.ready and health.state == "running" and not self._ready:
            self._ready = True
            lines.append("READY=1")
        elif health.state == "starting" and health.live and not self._ready:
            lines.append(f"EXTEND_TIMEOUT_USEC={_MORE_TIME * 1_000_000}")
        if health.state in ("draining", "stopped") and not self._stopping:
            self._stopping = True
            lines.append("STOPPING=1")
        if self._watchdog is not None and health.live and now - self._fed_at >= self._watchdog / 4:
            self._fed_at = now
            lines.append("WATCHDOG=1")
        state = (health.state, health.live, health.ready)
        if health.state != "stopped" and (state != self._told or now - self._told_at >= _STATUS_INTERVAL):
            self._told, self._told_at = state, now
            # A message is lines: the text of an error must not become one.
            lines.append(f"STATUS={' '.join(str(health).split())}")
        return lines

    def _send(self, lines: list[str]) -> None:
        if not lines:
            return
        # A manager that does not listen, or is slow, must not hold up the worker.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as to:
            to.setblocking(False)
            to.sendto("\n".join(lines).encode("utf-8", "replace"), self._path)
