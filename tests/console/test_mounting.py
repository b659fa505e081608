"""The console in an application of somebody else: FastAPI, and beside Django's ASGI application."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from holdfast.access.passwords import Passwords, password_line
from holdfast.access.principal import Role
from holdfast.console import Console, ConsoleSettings, create_console
from holdfast.console.login import FileLogins

ROOT = Path(__file__).parents[2]
PREFIX = "/ops/holdfast"
SECRET = "correct horse battery"

Consoles = Callable[..., Console]


def logins(folder: Path) -> FileLogins:
    file = folder / "people"
    file.write_text(password_line("ada", Role.OPERATOR, SECRET) + "\n")
    file.chmod(0o600)
    return FileLogins(Passwords(file), None)


async def logs_in(app: Any) -> None:
    """Log in under the prefix and look around; the rest of the application is where it was."""
    base = "http://127.0.0.1:8424"
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=base) as browser:
        assert (await browser.get("/hello")).text == "hello"
        asked = await browser.get(f"{PREFIX}/failures", headers={"accept": "text/html"})
        assert (asked.status_code, asked.headers["location"]) == (303, f"{PREFIX}/login")
        form = (await browser.get(f"{PREFIX}/login")).text
        token = re.search(r'name="_token" value="([^"]+)"', form)
        assert token and f'action="{PREFIX}/login"' in form
        fields = {"_token": token[1], "name": "ada", "secret": SECRET}
        entered = await browser.post(f"{PREFIX}/login", data=fields, headers={"origin": base})
        assert entered.status_code == 303 and entered.headers["location"].startswith(PREFIX)
        for path in ("/", "/failures", "/events"):
            page = await browser.get(PREFIX + path)
            assert page.status_code == 200 and f'href="{PREFIX}/failures"' in page.text
        assert (await browser.get("/failures")).status_code == 404


async def test_in_fastapi(dsn: str, consoles: Consoles, tmp_path: Path) -> None:
    """Mounted under a prefix, with its own login (OPS-2)."""
    app = FastAPI()

    @app.get("/hello")
    async def hello() -> Any:
        from fastapi.responses import PlainTextResponse

        return PlainTextResponse("hello")

    app.mount(PREFIX, consoles(dsn, logins(tmp_path)))
    await logs_in(app)


async def beside_django(dsn: str, folder: Path) -> None:
    """Run in a process of its own: Django is configured once in each."""
    from django.conf import settings
    from django.core.asgi import get_asgi_application
    from django.http import HttpRequest, HttpResponse
    from django.urls import path
    from starlette.applications import Starlette
    from starlette.routing import Mount

    async def hello(_: HttpRequest) -> HttpResponse:
        return HttpResponse("hello")

    settings.configure(ROOT_URLCONF=(path("hello", hello),), ALLOWED_HOSTS=["*"], SECRET_KEY="x", LOGGING_CONFIG=None)
    console = create_console(dsn, provider=logins(folder), settings=ConsoleSettings())
    try:
        await logs_in(Starlette(routes=[Mount(PREFIX, console), Mount("/", get_asgi_application())]))
    finally:
        await console.close()


async def test_beside_django(dsn: str, tmp_path: Path) -> None:
    """One application serves both (OPS-2)."""
    program = (
        "import asyncio, sys, pathlib; from tests.console import test_mounting; "
        "asyncio.run(test_mounting.beside_django(sys.argv[1], pathlib.Path(sys.argv[2])))"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, dsn, str(tmp_path)),
        cwd=ROOT,
        env=dict(os.environ),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
