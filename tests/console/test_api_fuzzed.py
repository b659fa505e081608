"""The HTTP API against its own OpenAPI document (OPS-3): what schemathesis makes of it, over real HTTP."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount

from holdfast.access.principal import Principal, Role
from holdfast.api import create_api
from holdfast.api.openapi import openapi
from holdfast.operator import Operators
from holdfast.operator.catalogue import VERBS
from tests.servers import SessionServer
from tests.worker.support import until

pytestmark = pytest.mark.slow

TOKEN = "a-token-of-an-admin"
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
    "negative_data_rejection,unsupported_method"
)


async def authenticate(request: Request) -> Principal | None:
    return Principal("ann", Role.ADMIN) if request.headers["authorization"] == f"Bearer {TOKEN}" else None


class Server:
    """The API in a thread of its own, with an event loop that stays."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self.address = ""

    async def _serve(self) -> None:
        async with Operators(self._dsn) as operators:
            app = Starlette(routes=[Mount("/api/v1", create_api(operators, authenticate))])
            server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
            serving = asyncio.create_task(server.serve())
            await until(lambda: server.started, what="the server has started")
            port = server.servers[0].sockets[0].getsockname()[1]
            self.address = f"http://127.0.0.1:{port}/api/v1"
            self._server = server
            self._ready.set()
            await serving

    def __enter__(self) -> Server:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(30)


@pytest.fixture(scope="module")
def address(postgres_server: SessionServer) -> Iterator[str]:
    name = postgres_server.create(schema=True)
    try:
        with Server(postgres_server.dsn(name)) as server:
            yield server.address
    finally:
        postgres_server.drop(name)


# A conversion of the table has tests of its own.
NOUNS = sorted({name.partition(".")[0] for name in VERBS} - {"partitions"})


@pytest.mark.nightly("fuzzed API")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("noun", NOUNS)
def test_the_api_keeps_what_its_document_promises(
    address: str, tmp_path: Path, noun: str, request: pytest.FixtureRequest
) -> None:
    """No error of the server, only documented answers, no argument that the document forbids (OPS-3)."""
    document = openapi(verb for name, verb in VERBS.items() if name.partition(".")[0] == noun)
    (tmp_path / "openapi.json").write_text(json.dumps(document))
    # As a command, because the plugin makes its cases when tests are collected: in every process of a run.
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", "openapi.json", "--url", address]
    command += ["--header", f"Authorization: Bearer {TOKEN}", "--checks", CHECKS]
    command += ["--phases", "examples,coverage,fuzzing"]
    seldom, often = ["--max-examples", "100"], ["--max-examples", "10", "--generation-deterministic"]
    command += seldom if request.config.option.nightly else often
    run = subprocess.run([*command, "--no-color"], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2_000:]
    tested = re.search(r"(\d+) selected / (\d+) total", run.stdout)
    assert tested and tested[1] == tested[2] == str(operations(document)), run.stdout[-2_000:]


def operations(document: dict[str, Any]) -> int:
    return sum(len(methods) for methods in document["paths"].values())
