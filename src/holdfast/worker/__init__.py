"""The worker: one loop, one module."""

from holdfast.worker.worker import Worker

__all__ = ["Worker"]
