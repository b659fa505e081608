"""Opening connections: one place that judges an address, for workers as for migrations."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from holdfast.errors import ConfigurationError
from holdfast.postgres import connection
from holdfast.postgres.connection import Address
from holdfast.postgres.faults import CONNECTION_FAULTS
from holdfast.postgres.schema import ddl

SECRET = "s3cr3t-w0rd"


@pytest.mark.parametrize(
    "address",
    [
        f"postgresql://u:{SECRET}/x@127.0.0.1/db",
        f"postgresql://u:1/{SECRET}@127.0.0.1/db",
        f"postgresql://u:1#{SECRET}@127.0.0.1/db",
        f"postgresql://u:{SECRET}#x@127.0.0.1/db",
        f"postgresql://u:{SECRET}",
        f"host=127.0.0.1 password={SECRET}",
        f"postgresql://[{SECRET}@127.0.0.1/db",
    ],
)
async def test_an_address_that_cannot_be_read_is_refused_and_not_quoted(address: str) -> None:
    """Before any driver sees it, by a worker's connections as by those of migrations (S8)."""

    async def addressed() -> None:
        Address(address)

    for attempt in (addressed(), ddl.connect(address)):
        with pytest.raises(ConfigurationError, match="postgresql://user@host:5432/database") as refused:
            await attempt
        assert refused.value.field == "dsn"
        assert SECRET not in str(refused.value)
        assert refused.value.__cause__ is None


async def test_what_the_driver_refuses_is_a_wrong_setting_and_no_outage() -> None:
    """A worker that took it for an outage would wait for ever; the driver's words are kept, the password is not
    (S8).
    """
    address = f"postgresql://u:{SECRET}@127.0.0.1/db?sslmode=perhaps"
    for attempt in (Address(address).probe(), ddl.connect(address)):
        with pytest.raises(ConfigurationError, match="sslmode") as refused:
            await attempt
        assert SECRET not in str(refused.value)
        assert not isinstance(refused.value, CONNECTION_FAULTS)


@pytest.mark.parametrize(
    "address",
    [
        "postgresql:///db?host=/var/run/postgresql",
        "postgres://u:a%2Fb%23@h:5432/db",
        "postgresql://h1:5432,h2:5433/db",
        "postgresql://u@[::1]:5432/db",
    ],
)
async def test_addresses_that_can_be_read(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets, several hosts and IPv6 pass (OBX-7)."""
    seen: list[str] = []

    async def connected(dsn: str, **_options: object) -> None:
        seen.append(dsn)

    monkeypatch.setattr(asyncpg, "connect", connected)
    await connection.open_connection(address)
    assert seen == [address]


async def test_a_connection_that_is_still_being_set_up_is_not_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that stops while it connects leaves no backend behind (LSN-4)."""

    class Silent:
        terminated = False

        async def execute(self, *_: object) -> None:
            await asyncio.Event().wait()

        def terminate(self) -> None:
            self.terminated = True

    silent = Silent()

    async def connected(_dsn: str, **_options: object) -> Silent:
        return silent

    monkeypatch.setattr(asyncpg, "connect", connected)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await ddl.connect("postgresql://h/db")
    assert silent.terminated
