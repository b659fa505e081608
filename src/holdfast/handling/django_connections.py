"""Connections of Django that outlive the handlers which open them, in a worker as in no request.

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
    """Do the same behind an asynchronous handler, in the thread in which Django's asynchronous ORM works.

    Nothing waits for it: what that thread is asked for next comes after it.
    """
    if str(type(error).__module__).startswith("django.db"):
        from asgiref.sync import SyncToAsync

        SyncToAsync.single_thread_executor.submit(renew_connections)


def _open_connections() -> list[Any]:
    """Those of this thread, where the application uses Django."""
    configuration, database = sys.modules.get("django.conf"), sys.modules.get("django.db")
    if configuration is None or database is None or not configuration.settings.configured:
        return []
    found = database.connections.all(initialized_only=True)
    return [connection for connection in found if connection.connection is not None]


def _has_news(connection: Any) -> bool:
    """Return whether the server has sent something that nothing has asked for, such as its farewell."""
    try:
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLIN)
        return bool(poll.poll(0))
    except Exception:  # the driver knows that it is closed, or is one that has no socket
        return True
