"""Brokers that start by themselves, for tests, demos and chaos runs: on loopback, each with its own ports and data.

with named("nats", Path("data")) as server:
    print(server.address)
"""

from collections.abc import Callable
from pathlib import Path

from servers.processes import ServerProcess


def _nats(folder: Path) -> ServerProcess:
    from servers.nats import NatsServer

    return NatsServer(folder)


def _redis(folder: Path) -> ServerProcess:
    from servers.valkey import DURABLE, ValkeyServer

    return ValkeyServer(folder, *DURABLE)


def _rabbitmq(folder: Path) -> ServerProcess:
    from servers.rabbitmq import RabbitmqServer

    return RabbitmqServer(folder)


# Imported when they are wanted: a demo on Postgres alone needs no broker's client.
BROKERS: dict[str, Callable[[Path], ServerProcess]] = {"nats": _nats, "redis": _redis, "rabbitmq": _rabbitmq}


def named(broker: str, folder: Path) -> ServerProcess:
    """Return a server of a broker that stores durably what it confirms; `with` starts it."""
    return BROKERS[broker](folder)
