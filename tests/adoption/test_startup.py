"""What is found when an application starts ends its server, with the message on the screen (LSN-14, RUN-1)."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from holdfast import HandlerRegistry, Worker
from holdfast.errors import ConfigurationError

pytestmark = pytest.mark.newcomer

COMMON = """
import os
from contextlib import asynccontextmanager
from typing import Annotated, Any
from fastapi import APIRouter, Depends, FastAPI
from holdfast import EventEnvelope, HandlerRegistry, Worker
from holdfast.idempotency.asgi.middleware import IdempotencyMiddleware
from holdfast.integrations.fastapi import Idempotency, worker_lifespan

dsn = os.environ["HOLDFAST_DSN"]

def connect(): ...
def tenant(): return "acme"
"""
ROUTE = """
idempotency = Idempotency(connect, secrets={1: "s" * 32}, scope=tenant)
app = FastAPI()
idempotency.install(app)
router = APIRouter()

@router.post("/orders")
async def place(tx: Annotated[Any, Depends(idempotency.required)]) -> None: ...

app.include_router(router)
"""
SECRET = """
async def inner(scope, receive, send): ...
app = IdempotencyMiddleware(inner, connect, secrets={1: "short"})
"""
SECRET_OF_FASTAPI = """
app = FastAPI()
Idempotency(connect, secrets={1: "short"}, scope=tenant).install(app)
"""
WORKER = """
registry = HandlerRegistry()

@registry.handler("order.placed", name="a.b")
async def handler(event: EventEnvelope) -> None: ...

app = FastAPI(lifespan=worker_lifespan(lambda: Worker(dsn, registry)))
"""
LIFESPAN = """
@asynccontextmanager
async def resources():
    raise ConnectionError("no partner")
    yield

registry = HandlerRegistry(lifespan=resources)

@registry.handler("order.placed", name="a.b")
async def handler(event: EventEnvelope) -> None: ...

app = FastAPI(lifespan=worker_lifespan(lambda: Worker(dsn, registry)))
"""


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (ROUTE, "the route /orders depends on a transaction, but is declared on a router without IdempotentRoute"),
        (SECRET, "secrets"),
        (SECRET_OF_FASTAPI, "secrets"),
        (WORKER, "holdfast migrate apply"),
        (LIFESPAN, "the lifespan resources failed at start: ConnectionError: no partner"),
    ],
    ids=["route", "secret", "secret-of-fastapi", "schema", "lifespan"],
)
def test_uvicorn_ends_with_the_message(empty_dsn: str, tmp_path: Path, program: str, message: str) -> None:
    """With its defaults, and a status that is not 0."""
    (tmp_path / "service.py").write_text(COMMON + program)
    run = subprocess.run(
        [sys.executable, "-m", "uvicorn", "service:app", "--port", "0"],
        cwd=tmp_path,
        env=os.environ | {"HOLDFAST_DSN": empty_dsn},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert message in run.stderr
    assert run.returncode in (1, 3)
    assert "running on" not in run.stderr


@contextlib.contextmanager
def served(folder: Path, dsn: str) -> Iterator[subprocess.Popen[str]]:
    """Uvicorn with the worker; what it prints is in the file `log`."""
    (folder / "service.py").write_text(COMMON + WORKER)
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(
            [sys.executable, "-m", "uvicorn", "service:app", "--port", "0"],
            cwd=folder,
            env=os.environ | {"HOLDFAST_DSN": dsn},
            stdout=log,
            stderr=log,
            text=True,
        ) as server,
    ):
        try:
            yield server
        finally:
            server.kill()


def until_printed(folder: Path, text: str, seconds: float = 40) -> str:
    deadline = time.monotonic() + seconds
    while text not in (printed := (folder / "log").read_text()):
        assert time.monotonic() < deadline, printed
        time.sleep(0.05)
    return printed


@pytest.mark.slow
@pytest.mark.parametrize("answers", [False, True], ids=["refused", "silent"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_application_starts_without_the_database(tmp_path: Path, answers: bool, number: signal.Signals) -> None:
    """The worker connects beside it, and a signal ends both (RUN-1)."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        if answers:
            server.listen()
        with served(tmp_path, f"postgresql://ada:secret@127.0.0.1:{port}/shop") as process:
            until_printed(tmp_path, "Application startup complete")
            if not answers:
                printed = until_printed(tmp_path, "database_unavailable")
                assert f"127.0.0.1:{port}/shop" in printed and "secret" not in printed
                assert "check that Postgres runs, and the host and port in the worker's address" in printed
            process.send_signal(number)
            process.wait(30)
    assert "Application shutdown complete" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        ({"user": "nobody_of_that_name"}, "check the user and the password in the worker's address"),
        ({"database": "no_such_database"}, "create the database, or correct its name in the worker's address"),
    ],
    ids=["user", "database"],
)
async def test_a_refused_login_has_a_remedy(empty_dsn: str, wrong: dict[str, str], remedy: str) -> None:
    registry = HandlerRegistry()
    registry.add("a.b", ("order.placed",), print)
    parts = urlsplit(empty_dsn)
    netloc = parts.netloc if "user" not in wrong else f"{wrong['user']}:x@{parts.netloc.rpartition('@')[2]}"
    dsn = parts._replace(netloc=netloc, path=f"/{wrong['database']}" if "database" in wrong else parts.path).geturl()
    with pytest.raises(ConfigurationError) as refused:
        await Worker(dsn, registry).drain()
    assert refused.value.field == "dsn" and refused.value.remedy == remedy
