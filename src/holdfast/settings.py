"""Settings of a worker. Every value has a default that suits one process beside one service."""

import os
import socket
from dataclasses import dataclass, field
from typing import Literal, get_args

from holdfast.checks import number, one_of, whole
from holdfast.errors import ConfigurationError
from holdfast.flow import MOST_IN_A_WORKER
from holdfast.generation import deployment_generation
from holdfast.names import channel_name, event_pattern

DeadLetters = Literal["in_place", "archive"]
CONCURRENCY_REMEDY = f'give a whole number from 1 to {MOST_IN_A_WORKER:,}, or "auto"'
DEAD_LETTERS: tuple[DeadLetters, ...] = get_args(DeadLetters)


def channel_of(generation: int) -> str:
    """Return the channel of a deployment generation; generation 0 is for applications without deployments."""
    return "outbox_default" if generation == 0 else f"outbox_gen_{generation}"


_SECRETS_REMEDY = "make each by: openssl rand -hex 32"


def _require_secrets(given: object) -> None:
    """Refuse secrets that are easy to guess, and too many of them; the error quotes none."""
    field_name = "WorkerSettings.relay_secrets"
    if not isinstance(given, tuple) or not all(isinstance(each, str) for each in given):
        raise ConfigurationError(field_name, "is no tuple of texts", _SECRETS_REMEDY)
    if len(given) > 10:
        raise ConfigurationError(field_name, f"has {len(given)} secrets", "name at most 10")
    for number_of, each in enumerate(given, 1):
        if not 32 <= len(each) <= 1024 or not each.isprintable() or not each.isascii():
            problem = f"has {len(each)} characters in secret {number_of}, or characters that cannot be printed"
            raise ConfigurationError(field_name, problem, f"use 32 to 1,024 characters of ASCII; {_SECRETS_REMEDY}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """How a worker behaves. Times are seconds. `docs/settings.md` explains when to change which."""

    schema: str = "core"
    generation: int = field(default_factory=deployment_generation)  # HOLDFAST_GENERATION, else 0
    channels: tuple[str, ...] = ()  # empty: the generation's own
    name: str = ""  # shown to operators; empty: host and pid
    concurrency: int | Literal["auto"] = "auto"  # events that each handler runs at once
    concurrency_at_most: int = 500  # where that is "auto"
    threads: int = 16  # for all handlers together that are not asynchronous
    connections: int = 10  # for the database transactions of all handlers that take tx
    batch: int = 500  # rows per claim; twice as many may be handled and not settled
    lease: float = 30.0
    poll_interval: float = 5.0
    grace: float = 30.0  # for running handlers when the worker stops
    loop_patience: float = 30.0  # how long handlers may block the event loop until the worker is not live
    settle_after: float = 0.005  # how long a finished delivery waits for others to settle with
    listen: bool = True
    listen_dsn: str | None = None  # a direct connection when the other one goes through a pooler
    dead_letters: DeadLetters = "in_place"  # or "archive": what fails for good moves to core.archive
    sweep: bool = True  # take turns with the other workers in retention's sweeps
    substrate: str | None = field(default=None, repr=False)  # a broker that carries events, like nats://host:4222
    relayed: tuple[str, ...] = ()  # event types that are sent there although no handler here gets them from there
    relay_secrets: tuple[str, ...] = field(default=(), repr=False)  # shared with other databases; the first one signs

    def __post_init__(self) -> None:
        whole("WorkerSettings.generation", self.generation)
        if self.concurrency != "auto":
            whole("WorkerSettings.concurrency", self.concurrency, 1, MOST_IN_A_WORKER, remedy=CONCURRENCY_REMEDY)
        whole("WorkerSettings.concurrency_at_most", self.concurrency_at_most, 1, MOST_IN_A_WORKER)
        whole("WorkerSettings.threads", self.threads, 1, 1_000)
        whole("WorkerSettings.connections", self.connections, 1, 1_000)
        whole("WorkerSettings.batch", self.batch, 1, 500)
        number("WorkerSettings.lease", self.lease, 0.5, 3_600)
        number("WorkerSettings.poll_interval", self.poll_interval, 0.01, 3_600)
        number("WorkerSettings.grace", self.grace, 0, 3_600)
        number("WorkerSettings.loop_patience", self.loop_patience, 1, 3_600)
        number("WorkerSettings.settle_after", self.settle_after, 0, 1)
        one_of("WorkerSettings.dead_letters", self.dead_letters, DEAD_LETTERS)
        if isinstance(self.channels, str):
            raise ConfigurationError("WorkerSettings.channels", "is a string", f"write ({self.channels!r},)")
        for channel in self.channels:
            channel_name("WorkerSettings.channels", channel)
        if isinstance(self.relayed, str):
            raise ConfigurationError("WorkerSettings.relayed", "is a string", f"write ({self.relayed!r},)")
        for event_type in self.relayed:
            event_pattern("WorkerSettings.relayed", event_type)
        if self.relayed and self.substrate is None:
            raise ConfigurationError("WorkerSettings.relayed", "is given without substrate", "name the broker")
        _require_secrets(self.relay_secrets)

    @property
    def most_at_once(self) -> int:
        """The most events that a handler without a limit of its own may ever run at once."""
        return self.concurrency_at_most if self.concurrency == "auto" else self.concurrency

    @property
    def shown_name(self) -> str:
        """The name that operators see: the chosen one, else the host and the id of this process."""
        return self.name or f"{socket.gethostname()}:{os.getpid()}"

    @property
    def served_channels(self) -> tuple[str, ...]:
        """The channels that a worker claims from, each once."""
        return tuple(dict.fromkeys(self.channels)) or (channel_of(self.generation),)

    def sessions_at_most(self, transactional: int) -> int:
        """Return how many database sessions so many handlers that take `tx` use at most."""
        # Several: quick handlers have `connections`, and slow ones as many of their own.
        return self.connections * min(transactional, 2)

    def connections_needed(self, transactional: int, scheduled: bool = False) -> int:
        """Return how many database connections a worker process opens at most, if so many handlers take `tx`."""
        reserved = 4 + (2 if self.listen else 0)  # claim, settle, leases, maintenance; listen, sleeper
        reserved += 1 if self.substrate else 0
        return reserved + self.sessions_at_most(transactional) + (1 if scheduled else 0)
