"""Finds the engine of an address by its scheme. The client of a broker is imported when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import Final
from urllib.parse import urlsplit

from holdfast.brokers.addresses import FIELD
from holdfast.brokers.engine import Engine
from holdfast.checks import quoted
from holdfast.errors import ConfigurationError

_ENGINES: Final = {
    "nats": ("nats", "NatsEngine"),
    "tls": ("nats", "NatsEngine"),
    "redis": ("redis", "RedisEngine"),
    "rediss": ("redis", "RedisEngine"),
    "valkey": ("redis", "RedisEngine"),
    "amqp": ("rabbitmq", "RabbitmqEngine"),
    "amqps": ("rabbitmq", "RabbitmqEngine"),
    "kafka": ("kafka", "KafkaEngine"),
    "kafkas": ("kafka", "KafkaEngine"),
}
# The names of brokers in the database.
NAMES: Final = ("nats", "redis", "rabbitmq", "kafka")


def engine_of(address: str) -> Engine:
    """Return the engine of a broker's address, like `nats://host:4222`."""
    scheme = urlsplit(address).scheme if isinstance(address, str) else ""
    if scheme not in _ENGINES:
        given = scheme or (address[:20] if isinstance(address, str) else type(address).__name__)
        raise ConfigurationError(
            FIELD,
            f"{quoted(given)} is not a broker that Holdfast knows",
            "write nats://…, redis://…, amqp://… or kafka://…",
        )
    module, name = _ENGINES[scheme]
    engine: Engine = getattr(import_module(f"holdfast.brokers.{module}"), name)(address)
    return engine
