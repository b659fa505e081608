"""The shop's sessions: the API stores orders with them, and the handlers write with them."""

import os

from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine


def connect(dsn: str) -> tuple[AsyncEngine, async_sessionmaker[AsyncSession]]:
    """Return an engine on the shop's database, and the factory of its sessions."""
    address = dsn.replace("postgresql://", "postgresql+asyncpg://", 1)
    engine = create_async_engine(address, pool_size=10, max_overflow=10)
    return engine, async_sessionmaker(engine, expire_on_commit=False)


# For the worker, whose command names it.
_, Session = connect(os.environ.get("HOLDFAST_DSN", "postgresql://"))
