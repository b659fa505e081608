"""The worker: an event goes from the claimer to the dispatcher to the settler; `parts` shows how they are connected."""

from holdfast.worker.outbox_listener import OutboxListener
from holdfast.worker.worker import Worker

__all__ = ["OutboxListener", "Worker"]
