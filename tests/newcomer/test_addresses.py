"""Addresses of the database as people have them, and what they read when one is wrong."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from holdfast import HandlerRegistry, Operator, Reactions, Worker, WorkerSettings
from holdfast.cli import main
from holdfast.errors import ConfigurationError
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
    """S8: and not when the program first connects."""
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
    """OPS-1, S8: texts of ours are not taken for addresses with a password."""
    monkeypatch.setenv("HOLDFAST_DSN", "nonsense")
    with pytest.raises(SystemExit) as ended:
        main(["status"])
    assert ended.value.code == 2
    error, remedy = capsys.readouterr().err.splitlines()
    assert error == "error: dsn is not a Postgres address that can be read"
    assert "postgresql://user@host:5432/database, with :password after the user" in remedy
    assert "***" not in remedy


def test_no_text_of_the_source_is_hidden_by_the_redaction() -> None:
    """S8: an example of an address in an error has no password, and no @ after it."""
    for file in sorted(SOURCE.rglob("*.py")):
        if file.name == "redact.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                for text in (each.value for each in ast.walk(node) if isinstance(each, ast.Constant)):
                    if isinstance(text, str) and ("://" in text or "@" in text):
                        assert redact_dsn(text) == text, f"{file.name}:{node.lineno}"
