"""The worker: one loop, one module."""

from holdfast.worker.outbox_listener import OutboxListener
from holdfast.worker.worker import Worker

__all__ = ["OutboxListener", "Worker"]
