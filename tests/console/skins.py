"""The four ways to ask for a verb: the command line, the HTTP API, the tools of assistants, and the forms of pages."""

from __future__ import annotations

import asyncio
import contextlib
import html
import io
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
from starlette.requests import Request

from holdfast.access.principal import Principal, Role
from holdfast.api import create_api
from holdfast.cli.app import run
from holdfast.console import ConsoleSettings, create_console
from holdfast.errors import HoldfastError
from holdfast.mcp import Tools
from holdfast.mcp.tools import tool_name
from holdfast.operator import Operators
from holdfast.operator.catalogue import VERBS
from tests.console import asking, test_decisions
from tests.console.conftest import Browser, as_role

COMMANDS = {"audit.list": "audit", "events.cancel_many": "events.cancel"}  # others are called as their verbs are


@dataclass(frozen=True, slots=True)
class Said:
    """An answer: the result as JSON has it, or why there is none."""

    result: Any = None
    refusal: str | None = None


class Skin(Protocol):
    """One way to ask. `actor` is who the audit names."""

    actor: str

    async def ask(self, verb: str, given: Mapping[str, Any]) -> Said: ...


class CommandLine:
    """`holdfast … --json`, in this process."""

    actor = "cli@example.com"

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn

    async def ask(self, verb: str, given: Mapping[str, Any]) -> Said:
        command = COMMANDS.get(verb, verb).split(".")
        words = [*command, *_words(verb, given), "--json", "--dsn", self._dsn]
        if VERBS[verb].changes:
            words += ["--actor", self.actor]
        if VERBS[verb].changes and verb != "plans.create":  # which changes no event
            words.append("--yes")
        code, out, err = await asyncio.to_thread(_run, words)
        if not out:
            found = re.search(r"^error: (.*)\ntry: (.*)$", err, re.MULTILINE)
            assert found and code in (1, 2), err
            return Said(refusal=f"{found[1]}; {found[2]}")
        return Said(json.loads(out))


def _run(words: list[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(words)
    return code, out.getvalue(), err.getvalue()


def _words(verb: str, given: Mapping[str, Any]) -> Sequence[str]:
    """Arguments as options, which have their names."""
    words: list[str] = []
    for name, value in given.items():
        if name == "ids":
            words += value
        elif name == "id" or (name, verb) == ("handler", "handlers.pause"):
            words.append(value)
        else:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


class Http:
    """The HTTP API."""

    actor = "http@example.com"

    def __init__(self, operators: Operators) -> None:
        async def authenticate(_: Request) -> Principal:
            return Principal(self.actor, Role.ADMIN)

        self._transport = httpx.ASGITransport(create_api(operators, authenticate))

    async def ask(self, verb: str, given: Mapping[str, Any]) -> Said:
        path, token = f"http://127.0.0.1/{verb.replace('.', '/')}", {"authorization": "Bearer token"}
        async with httpx.AsyncClient(transport=self._transport, headers=token) as client:
            if VERBS[verb].changes:
                answer = await client.post(path, json=dict(given))
            else:
                answer = await client.get(path, params=dict(given))
        found = answer.json()
        if answer.status_code == 200:
            return Said(found)
        return Said(refusal=f"{found['detail']}; {found['remedy']}")


class Assistant:
    """Tools: a change is shown first, and then confirmed."""

    actor = "mcp@example.com"

    def __init__(self, operators: Operators) -> None:
        self._tools = Tools(operators, changes=True)

    async def ask(self, verb: str, given: Mapping[str, Any]) -> Said:
        name, who = tool_name(VERBS[verb]), Principal(self.actor, Role.ADMIN)
        try:
            found = await self._tools.call(who, name, given)
            code = found.pop("confirm", None)
            if code and not given.get("dry_run"):
                found = await self._tools.call(who, name, {**given, "dry_run": False, "confirm": code})
        except HoldfastError as error:
            return Said(refusal=str(error))
        return Said(found)


class Pages:
    """Forms: a change is asked about first, and then confirmed. A page has no document."""

    actor = "console@example.com"

    def __init__(self, browser: Browser) -> None:
        self._browser = browser

    async def ask(self, verb: str, given: Mapping[str, Any]) -> Said:
        reason = {"reason": given["reason"]} if given.get("reason") else {}
        if verb == "plans.create":
            fields = {name.replace("_", "-"): str(value) for name, value in given.items()}
            answer = await self._browser.submit("/plans/new", step="make", **fields)
        elif verb.startswith("failed."):
            chosen = given.get("ids") or ([given["group"]] if "group" in given else [])
            whole = {"whole": "yes", "handler": given["handler"]} if "handler" in given and not chosen else {}
            asked = {"verb": verb.partition(".")[2], "chosen": chosen, **whole}
            answer = await self._browser.submit("/failures/ask", "/failures", **asked)
            if answer.status_code == 200 and not given.get("dry_run"):
                answer = await test_decisions.confirm(self._browser, answer, **reason)
        else:
            answer = await asking.ask(self._browser, verb, handler=given["handler"])
            if answer.status_code == 200 and not given.get("dry_run"):
                answer = await asking.confirm(self._browser, answer, **reason)
        return Said(refusal=_refusal(answer.text)) if answer.status_code >= 400 else Said()


def _refusal(page: str) -> str:
    found = re.search(r'role="alert">.*?<p>(.*?)\.</p>\s*<p class="muted">Try: (.*?)</p>', page, re.DOTALL)
    assert found, page[-2000:]
    return html.unescape(f"{found[1]}; {found[2]}")


@contextlib.asynccontextmanager
async def skins(dsn: str) -> AsyncIterator[dict[str, Skin]]:
    """All of them, on one database."""
    console = create_console(dsn, provider=as_role(Role.ADMIN, Pages.actor), settings=ConsoleSettings())
    make: Mapping[str, Callable[[Any], Skin]] = {"http": Http, "mcp": Assistant}
    try:
        async with Operators(dsn) as operators, Browser(console) as browser:
            made = {name: each(operators) for name, each in make.items()}
            yield {"cli": CommandLine(dsn), **made, "console": Pages(browser)}
    finally:
        await console.close()
