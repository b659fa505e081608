"""The worker: one loop, one module."""

from holdfast.worker.substrate import OutboxListener
from holdfast.worker.worker import Worker

__all__ = ["OutboxListener", "Worker"]
