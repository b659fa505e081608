"""Addresses of the database as people have them, and what they read when one is wrong."""

from __future__ import annotations

import ast
import asyncio
import socket
from pathlib import Path

import pytest

from holdfast import HandlerRegistry, Operator, Reactions, Worker, WorkerSettings
from holdfast.cli import main
from holdfast.errors import ConfigurationError
from holdfast.postgres.connection import open_connection
from holdfast.postgres.faults import remedy_of
from holdfast.redact import redact_dsn

pytestmark = pytest.mark.newcomer

SOURCE = Path(__file__).parents[2] / "src"

registry = HandlerRegistry()


@registry.handler("order.placed", name="shop.ship")
async def ship(event: object) -> None: ...


@pytest.mark.parametrize("scheme", ["postgresql+asyncpg", "postgresql+psycopg", "postgres", "postgresql"])
def test_an_address_that_is_written_for_sqlalchemy(scheme: str) -> None:
    """The one of the application is taken everywhere, not only by the command."""
    address = f"{scheme}://u@h/db"
    worker = Worker(address, registry, WorkerSettings(listen_dsn=address))
    connections = worker._parts.connections
    plain = "postgres://u@h/db" if scheme == "postgres" else "postgresql://u@h/db"
    assert (connections.address.dsn, connections.listen_address.dsn) == (plain, plain)
    assert Reactions(address, registry)._address.dsn == plain
    assert Operator(address, actor="ada")._session.connection._address.dsn == plain


@pytest.mark.parametrize("address", [None, 17, registry, b"postgresql://h/db", "nonsense", "mysql://u@h/db"])
def test_a_wrong_address_is_refused_where_it_is_given(address: object) -> None:
    """And not when the program first connects (S8)."""
    for make in (
        lambda: Worker(address, registry),  # type: ignore[arg-type]
        lambda: Reactions(address, registry),  # type: ignore[arg-type]
        lambda: Operator(address, actor="ada"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigurationError, match="postgresql://user@host:5432/database") as refused:
            make()
        assert refused.value.field == "dsn"
    if address is not None:
        with pytest.raises(ConfigurationError, match=r"WorkerSettings\.listen_dsn"):
            Worker("postgresql://h/db", registry, WorkerSettings(listen_dsn=address))  # type: ignore[arg-type]


def test_the_command_shows_the_remedy_as_it_is_meant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Texts of ours are not taken for addresses with a password (OPS-1, S8)."""
    monkeypatch.setenv("HOLDFAST_DSN", "nonsense")
    with pytest.raises(SystemExit) as ended:
        main(["status"])
    assert ended.value.code == 2
    error, remedy = capsys.readouterr().err.splitlines()
    assert error == "error: HOLDFAST_DSN does not begin with postgresql://"
    assert "postgresql://user@host:5432/database, with :password after the user" in remedy
    assert "***" not in remedy


def test_no_text_of_the_source_is_hidden_by_the_redaction() -> None:
    """An example of an address in an error has no password, and no @ after it (S8)."""
    for file in sorted(SOURCE.rglob("*.py")):
        if file.name == "redact.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                for text in (each.value for each in ast.walk(node) if isinstance(each, ast.Constant)):
                    if isinstance(text, str) and ("://" in text or "@" in text):
                        assert redact_dsn(text) == text, f"{file.name}:{node.lineno}"


KINDS = {
    "sqlite:///shop.db": "is an address of sqlite, and Holdfast needs Postgres",
    "mysql+aiomysql://u:hunter2@h/db": "is an address of mysql, and Holdfast needs Postgres",
    "jdbc:postgresql://h/db": "is an address for JDBC",
    "host=localhost password=hunter2 dbname=shop": "is written as keywords and values",
    "/var/run/postgresql": "is a path",
    "u:hunter2@localhost/shop": "does not begin with postgresql://",
    "localhost:5432/shop": "does not begin with postgresql://",
    "postgresql://u:hunter2@h:99999/db": "is not a Postgres address that can be read",
    "postgresql://u:hunter2@ss@h/db": "is not a Postgres address that can be read",
    "postgresql://u:hunter2@h/db?ssl=true": "has the parameter ssl, which other drivers know and asyncpg does not",
    "postgresql://u:hunter2@h/db?connect_timeout=10": "has the parameter connect_timeout, which libpq knows",
    "postgresql://u:hunter2@h/db?sslmode=require&channel_binding=require": "has the parameter channel_binding",
    "postgresql://u:hunter2@h/db?keepalives_idle=5": "has the parameter keepalives_idle",
    "postgresql://u:hunter2@h/db?target_session_attrs=nope": "has target_session_attrs with a value that is unknown",
}


@pytest.mark.parametrize("address", KINDS)
def test_an_address_of_another_kind_is_called_what_it_is(address: str) -> None:
    """What is wrong, and no word about percent-encoding where no password is the reason; none of them is quoted
    (S8).
    """
    with pytest.raises(ConfigurationError) as refused:
        Operator(address, actor="ada")
    assert refused.value.problem.startswith(KINDS[address])
    assert refused.value.remedy
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "query", ["", "?sslmode=require", "?application_name=shop&search_path=public", "?target_session_attrs=primary"]
)
def test_what_the_driver_and_the_server_know_is_taken(query: str) -> None:
    address = f"postgresql://u@h1:5432,h2:5433/db{query}"
    assert Operator(address, actor="ada")._session.connection._address.dsn == address


async def test_a_host_that_does_not_exist_is_named() -> None:
    """Without the login, and without a port, which may be a part of a password (S8)."""
    with pytest.raises(socket.gaierror, match=r": nowhere\.invalid$"):
        await open_connection("postgresql://u:hunter2@nowhere.invalid:5432/db")


@pytest.mark.parametrize(("query", "text"), [("", "is not Postgres"), ("?sslmode=require", "rejected SSL upgrade")])
async def test_a_port_where_something_else_listens(query: str, text: str) -> None:
    """TLS is not the reason, unless the address asks for it (OPS-1)."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(8)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConnectionError, match=text) as refused:
            await open_connection(f"postgresql://u@127.0.0.1:{port}/db{query}")
    assert ("TLS" in remedy_of(refused.value)) is bool(query)
