"""A console that browsers can reach, in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator

import uvicorn

from holdfast.access.provider import LocalUser
from holdfast.console import ConsoleSettings, create_console


@contextlib.contextmanager
def served(dsn: str) -> Iterator[str]:
    """A console on a free port; its address."""
    app = create_console(
        dsn, provider=LocalUser("ada@example.com"), settings=ConsoleSettings(environment="production", interval=0.3)
    )
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
