"""Idempotent requests and commands: one with a key is carried out once, and answered the same way each time."""

from holdfast.idempotency.asgi.middleware import IdempotencyMiddleware, exchange_of
from holdfast.idempotency.commands import Commands
from holdfast.idempotency.keys import job_key
from holdfast.idempotency.settings import IdempotencySettings

__all__ = ["Commands", "IdempotencyMiddleware", "IdempotencySettings", "exchange_of", "job_key"]
