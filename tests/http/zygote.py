"""Makes servers by the dozen: everything is imported once, and each server is a fork of this process.

A line of JSON on stdin asks for one: {"app": "shop", "port": ..., "dsn": ..., "options": [...], "kill": n}. The server
says {"ready": pid} on stdout when it serves. With `kill` it ends itself by SIGKILL at the n-th of the moments in which
its first request waits, or has just waited, for something.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from typing import Any

import uvicorn

from holdfast.idempotency.asgi import exchange
from tests.http import djangoshop
from tests.http.plain import Plain, stepped
from tests.http.shop import Shop


class Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(json.dumps({"ready": os.getpid()}), flush=True)


def mortal(app: Any, moment: int) -> Any:
    """The application, which dies with its process."""
    moments = 0

    def step(_phase: str) -> None:
        nonlocal moments
        moments += 1
        if moments == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    # What ends the transaction runs in a task of its own, and is not safer for that.
    unstepped = exchange.uninterrupted
    exchange.uninterrupted = lambda work: unstepped(stepped(work, step))  # type: ignore[assignment]

    async def stepping(scope: Any, receive: Any, send: Any) -> None:
        call = app(scope, receive, send)
        await (stepped(call, step) if scope["type"] == "http" else call)

    return stepping


def serve(wanted: dict[str, Any]) -> None:
    if wanted["app"] == "django":
        djangoshop.serve(wanted["dsn"], wanted["port"], *wanted["options"])
        return
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listening.bind(("127.0.0.1", wanted["port"]))
    app = (
        Plain(wanted["dsn"])
        if wanted["app"] == "plain"
        else Shop(wanted["dsn"], *wanted["options"], **wanted.get("settings", {})).app
    )
    if wanted.get("kill"):
        app = mortal(app, wanted["kill"])
    Server(uvicorn.Config(app, log_level="critical", lifespan="on")).run(sockets=[listening])


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                serve(json.loads(line))
            finally:
                os._exit(0)


if __name__ == "__main__":
    main()
