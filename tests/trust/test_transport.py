"""A database beyond this machine whose certificate is not checked is reported, and by name (SEC-1, S20)."""

from __future__ import annotations

import socket

import asyncpg
import pytest

from holdfast import HandlerRegistry
from holdfast.postgres.transport import unverified_hosts, unverified_notice
from tests.worker.support import Facts, running, until

pytestmark = pytest.mark.trust


@pytest.mark.parametrize(
    ("dsn", "environment", "hosts"),
    [
        ("postgresql://u@db.example/x", {}, ["db.example"]),
        ("postgresql://u:p@db.example:5432/x?sslmode=require", {}, ["db.example"]),
        ("postgresql://u@db.example/x?sslmode=prefer", {}, ["db.example"]),
        ("postgresql://u@10.0.0.7,[::1]:5433,[fd00::7]:1/x?sslmode=disable", {}, ["10.0.0.7", "fd00::7"]),
        ("postgresql:///x?host=db.example", {}, ["db.example"]),
        ("postgresql:///x", {"PGHOST": "db.example"}, ["db.example"]),
        ("postgresql://u@db.example/x?sslmode=require", {"PGSSLMODE": "verify-full"}, ["db.example"]),
        ("postgresql://u@db.example/x", {"PGSSLMODE": "verify-full"}, []),
        ("postgresql://u@db.example/x?sslmode=verify-full", {}, []),
        ("postgresql://u@db.example/x?sslmode=verify-ca", {}, []),
        ("postgresql://u@127.0.0.1:5432,localhost/x", {}, []),
        ("postgresql://u@/x?host=/run/postgresql", {}, []),
        ("postgresql://u@%2Frun%2Fpostgresql/x", {}, []),
        ("postgresql:///x", {}, []),
    ],
)
def test_hosts_that_are_not_verified(dsn: str, environment: dict[str, str], hosts: list[str]) -> None:
    """Whatever names the host and the mode; loopback and sockets need no certificate (S20)."""
    assert unverified_hosts(dsn, environment) == hosts


async def test_a_worker_warns(dsn: str, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, when it starts, without the password; and not about loopback (S20)."""
    registry, facts = HandlerRegistry(), Facts()
    registry.add("shop.note", ("order.placed",), lambda event: None)
    async with running(dsn, registry, facts):
        await until(lambda: facts.notices("worker_started"), what="the worker started")
    assert not facts.notices("connection_unverified")

    # A name of this machine that nobody would take for loopback.
    name = "db.example"
    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *a, **k: real("127.0.0.1" if host == name else host, *a, **k)
    )
    async with running(dsn.replace("127.0.0.1", name), registry, facts):
        await until(lambda: facts.notices("connection_unverified"), what="the warning")
    (notice,) = facts.notices("connection_unverified")
    assert notice.level == "warning" and notice.details["hosts"] == [name]
    assert "verify-full" in str(notice.details["remedy"]) and "password" not in repr(notice)


def test_a_notice_names_each_host_once() -> None:
    """The address for LISTEN is checked too (S20)."""
    notice = unverified_notice("postgresql://a/x", "postgresql://b/x", "postgresql://a/y")
    assert notice is not None and notice.details["hosts"] == ["a", "b"]
