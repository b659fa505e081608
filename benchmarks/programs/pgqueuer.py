"""A worker of pgqueuer that says when its handler is called."""

import asyncio
import os
import time

import asyncpg
from pgqueuer import Job, PgQueuer


async def main() -> None:
    connection = await asyncpg.connect(os.environ["HOLDFAST_DSN"])
    queuer = PgQueuer.from_asyncpg_connection(connection)

    @queuer.entrypoint("order.placed")
    async def handle(job: Job) -> None:
        print("handled", time.monotonic(), flush=True)

    await queuer.run()


if __name__ == "__main__":
    asyncio.run(main())
