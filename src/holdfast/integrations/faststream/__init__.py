"""Subscribers of faststream-outbox on Holdfast: its broker, with Holdfast's outbox in place of its table and loops.

    from holdfast.integrations.faststream import OutboxBroker      # was: from faststream_outbox import OutboxBroker

    broker = OutboxBroker(engine, source="shop")

    @broker.subscriber("send_mail")
    async def send(mail: Mail, session: Annotated[AsyncSession, Depends(session)]) -> None: ...

A queue is an event type. FastStream still parses messages, injects dependencies, and runs middlewares; the worker
claims, retries and keeps dead letters. See docs/frameworks/faststream.md.
"""

from holdfast.installing import require_extra

require_extra("faststream", "faststream_outbox", "sqlalchemy")

from holdfast.integrations.faststream.broker import OutboxBroker

__all__ = ["OutboxBroker"]
