"""LSN-14, RUN-1: what is found when an application starts ends its server, with the message on the screen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.newcomer, pytest.mark.newest_postgres]

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
