"""The server of a test session. Where pytest-xdist runs several processes, they share one server and one template."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from holdfast.testing.databases import Setup, drop, make_template, new_name
from holdfast.testing.loop import kit_loop

# Settings without durability: the data lives for minutes, and a crash of the machine ends the session anyway.
_FAST = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off", "jit": "off"}


@contextlib.contextmanager
def test_server(dsn: str | None, shared: Path | None, setup: Sequence[Setup], schema: str) -> Iterator[tuple[str, str]]:
    """The address of the session's server, and the name of its template.

    `dsn` is a server that is there; without one, an embedded one is started. `shared` is a folder that the processes of
    the session have in common: the first of them prepares the server, and ends it when the last one is done.
    """
    if shared is None:
        with _prepared(dsn, setup, schema) as made:
            yield made
        return
    shared.mkdir(mode=0o700, exist_ok=True)
    with _locked(shared / "users", fcntl.LOCK_SH) as users, contextlib.ExitStack() as stack:
        state = shared / "server.json"
        with _locked(shared / "making", fcntl.LOCK_EX):
            if not state.exists():
                made = stack.enter_context(_prepared(dsn, setup, schema))
                stack.callback(_wait_for_others, users, state)
                partial = shared / "server.json.partial"
                with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                    json.dump(made, file)
                partial.replace(state)
        server, template = json.loads(state.read_text())
        yield server, template


def _wait_for_others(users: IO[str], state: Path) -> None:
    """Wait until no other process uses the server. One that has died uses it no longer, and one that comes later waits
    until this one has stopped it, and starts another."""
    fcntl.flock(users, fcntl.LOCK_EX)
    state.unlink()


@contextlib.contextmanager
def _locked(path: Path, how: int) -> Iterator[IO[str]]:
    with path.open("w") as file:
        fcntl.flock(file, how)
        yield file


@contextlib.contextmanager
def _prepared(dsn: str | None, setup: Sequence[Setup], schema: str) -> Iterator[tuple[str, str]]:
    template = f"{new_name()}_template"
    run = kit_loop().run
    if dsn is not None:
        run(make_template(dsn, template, setup, schema))
        try:
            yield dsn, template
        finally:
            run(drop(dsn, template))
        return
    server = _embedded()
    try:
        run(make_template(server.dsn, template, setup, schema))
        yield server.dsn, template
    finally:
        server.stop("immediate")


def _embedded() -> Any:
    from holdfast.embedded import EmbeddedPostgres

    return EmbeddedPostgres(settings=_FAST).start()
