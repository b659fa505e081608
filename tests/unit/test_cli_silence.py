"""A server that takes connections and never answers (OPS-1): every command ends with a sentence and a remedy."""

from __future__ import annotations

import io
import socket
import sys
from collections.abc import Iterator

import pytest

from holdfast.cli import main
from holdfast.cli.app import COMMANDS, command_tree

ID = "01a1e3b9-decc-719c-b5fc-ffd65dc42ab1"
# What a command needs besides --yes, which is given where it exists.
ARGUMENTS = {
    "import": "pgqueuer",
    "notify": "when_idle",
    "uninstall": "--i-know-this-deletes core",
    "events cancel": ID,
    "failed edit": f"{ID} --payload -",
    "failed note": "h.x/ValueError:5d41402abc4b2a76 text",
    "handlers limit": "h.x --fleet-concurrency 2",
    "handlers via": "outbox h.x",
    "handlers drained": "nats://127.0.0.1:1 h.x",
    "keys release": "h.x key",
    "generations move": "1 --to 2",
    "relay check": "nats",
    "relay again": "nats --since 2h",
    "retention set": "outbox_row --active-days 30 --disposal HARD_DELETE",
    "requests show": "scope key",
    "plans create": "--all --reason x",
    **dict.fromkeys(("failed replay", "failed discard", "failed restore"), ID),
    **dict.fromkeys(("archive replay", "archive discard", "archive restore"), "1"),
}
BY_NAME = {"ID": ID, "KEY": ID, "PLAN": "1", "NUMBER": "1", "NAME": "x", "handler": "h.x", "DOMAIN_ID": ID}
# These need no database, or wait for it: a worker, and what serves pages.
OTHERS = {
    *("worker", "worker status", "console", "console password", "console token", "mcp", "version", "migrate print"),
    *("schema export", "schema check", "relay run"),
}


def commands() -> Iterator[tuple[str, list[str]]]:
    def walk(command: object, path: str) -> Iterator[tuple[str, list[str]]]:
        for name, each in getattr(command, "commands", {}).items():
            yield from walk(each, f"{path} {name}".strip())
        if not hasattr(command, "commands") and path not in OTHERS:
            parameters = command.params  # type: ignore[attr-defined]
            needed = [
                BY_NAME[each.metavar or each.name]
                for each in parameters
                if each.param_type_name == "argument" and each.required and path not in ARGUMENTS
            ]
            agreed = ["--yes"] if any("--yes" in each.opts for each in parameters) else []
            yield path, [*path.split(), *ARGUMENTS.get(path, "").split(), *needed, *agreed]

    return walk(command_tree(*COMMANDS), "")


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of such a server."""
    with socket.create_server(("127.0.0.1", 0), backlog=50) as server:
        monkeypatch.setattr("holdfast.postgres.connection.CONNECT_TIMEOUT", 0.2)
        yield f"postgresql://u@127.0.0.1:{server.getsockname()[1]}/db"


@pytest.mark.parametrize("words", [pytest.param(words, id=name) for name, words in commands()])
def test_a_silent_server_is_told_with_a_remedy(
    words: list[str], silent: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No bare name of an exception (OPS-1)."""
    monkeypatch.setenv("HOLDFAST_DSN", silent)
    monkeypatch.setattr(sys, "stdin", io.StringIO("{}"))
    with pytest.raises(SystemExit) as end:
        main(words)
    said = capsys.readouterr().err.splitlines()
    assert (end.value.code, len(said)) == (1, 2), said
    assert said[0] == "error: the server did not answer within 0 seconds"
    assert said[1].startswith("try: see whether the server is frozen or overloaded")
    assert said[1].endswith("check the host and port in HOLDFAST_DSN; then run it again")
