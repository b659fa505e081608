"""A worker that says when its handler is called; also the application of `holdfast worker`."""

import asyncio
import os
import time

from holdfast import EventEnvelope, HandlerRegistry, Worker

registry = HandlerRegistry()


@registry.handler("order.placed", name="bench.handle")
async def handle(event: EventEnvelope) -> None:
    print("handled", time.monotonic(), flush=True)


if __name__ == "__main__":
    asyncio.run(Worker(os.environ["HOLDFAST_DSN"], registry).run(signals=True))
