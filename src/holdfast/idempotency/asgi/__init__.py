"""Idempotent requests of ASGI applications."""
