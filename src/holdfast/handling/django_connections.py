"""Closes connections of Django that handlers leave open: in a worker no end of a request does that.

Django looks after them when a request begins and ends. Without that, a connection that an outage has broken would fail
every handler that comes to its thread, until the process ends.
"""

from __future__ import annotations

import select
import sys
from typing import Any


def renew_connections() -> None:
    """Close the connections of this thread that are broken; Django opens them again when they are needed."""
    for connection in _open_connections():
        if (connection.errors_occurred or _has_news(connection.connection)) and not connection.in_atomic_block:
            if connection.is_usable():
                connection.errors_occurred = False
            else:
                connection.close()


def close_connections() -> None:
    """Close the connections of this thread, which ends."""
    for connection in _open_connections():
        connection.close()


def renew_after(error: BaseException) -> None:
    """Close broken connections after an asynchronous handler, in the thread of Django's asynchronous ORM.

    Nothing waits for it: what that thread is asked for next comes after it.
    """
    if str(type(error).__module__).startswith("django.db"):
        from asgiref.sync import SyncToAsync

        SyncToAsync.single_thread_executor.submit(renew_connections)


def _open_connections() -> list[Any]:
    """Return the connections of this thread; none in an application without Django."""
    configuration, database = sys.modules.get("django.conf"), sys.modules.get("django.db")
    if configuration is None or database is None or not configuration.settings.configured:
        return []
    found = database.connections.all(initialized_only=True)
    return [connection for connection in found if connection.connection is not None]


def _has_news(connection: Any) -> bool:
    """Return whether the server has sent something unasked, such as the reason why it ends the session."""
    try:
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLIN)
        return bool(poll.poll(0))
    except Exception:  # the driver knows that it is closed, or is one that has no socket
        return True
