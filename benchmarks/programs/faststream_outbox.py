"""A worker of faststream-outbox that says when its handler is called."""

import asyncio
import os
import time
from typing import Any

from faststream_outbox import OutboxBroker, make_outbox_table
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import create_async_engine


async def main() -> None:
    engine = create_async_engine(os.environ["HOLDFAST_DSN"].replace("postgresql://", "postgresql+asyncpg://", 1))
    broker = OutboxBroker(engine, outbox_table=make_outbox_table(MetaData(), table_name="outbox"))

    @broker.subscriber("order.placed")
    async def handle(body: dict[str, Any]) -> None:
        print("handled", time.monotonic(), flush=True)

    async with broker:
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
