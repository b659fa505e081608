"""What the tests of the demo share: its tables, its handlers, and its API without a server around it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.pool import NullPool

from examples.orders import api
from examples.orders.handlers import registry
from holdfast import HandlerRegistry


@pytest.fixture(scope="session")
def holdfast_setup() -> list[Any]:
    return [Path(__file__).parents[1].joinpath("schema.sql").read_text()]


@pytest.fixture(scope="session")
def holdfast_registry() -> HandlerRegistry:
    return registry


@pytest.fixture(scope="session")
def holdfast_transactions(holdfast_dsn: str) -> async_sessionmaker[AsyncSession]:
    """The sessions of the handlers. Without a pool: each test may have an event loop of its own."""
    address = holdfast_dsn.replace("postgresql://", "postgresql+asyncpg://", 1)
    return async_sessionmaker(create_async_engine(address, poolclass=NullPool))


@pytest.fixture
def letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that confirmations are written to."""
    monkeypatch.setenv("ORDERS_SENT", str(tmp_path / "sent"))
    return tmp_path / "sent"


@pytest.fixture
async def client(holdfast_dsn: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    """The API, started and stopped as a server would."""
    monkeypatch.setenv("HOLDFAST_DSN", holdfast_dsn)
    async with api.app.router.lifespan_context(api.app):
        transport = httpx.ASGITransport(api.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://orders") as client:
            yield client
