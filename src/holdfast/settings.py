"""How a worker behaves. Every value has a default that suits one process beside one service."""

import re
from dataclasses import dataclass
from typing import Literal, get_args

from holdfast.errors import ConfigurationError

DeadLetters = Literal["in_place", "archive"]
DEAD_LETTERS: tuple[DeadLetters, ...] = get_args(DeadLetters)

_CHANNEL = re.compile(r"[a-z_][a-z0-9_]{0,62}")


def channel_of(generation: int) -> str:
    """The channel of a deployment generation; generation 0 is everybody who has no deployments."""
    return "outbox_default" if generation == 0 else f"outbox_gen_{generation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Times are seconds. `docs/settings.md` explains when to change which."""

    schema: str = "core"
    generation: int = 0
    channels: tuple[str, ...] = ()  # empty: the generation's own
    name: str = ""  # shown to operators; empty: host and pid
    concurrency: int = 100  # handlers running at once
    threads: int = 16  # of them in threads, for handlers that are not asynchronous
    connections: int = 10  # of them in database transactions, for handlers that take tx
    batch: int = 500  # rows per claim and lane
    lease: float = 30.0
    poll_interval: float = 5.0
    grace: float = 30.0  # for running handlers when the worker is told to stop
    settle_after: float = 0.005  # how long a finished delivery waits for others to settle with
    listen: bool = True
    listen_dsn: str | None = None  # a direct connection when the other one goes through a pooler
    dead_letters: DeadLetters = "in_place"  # or "archive": what fails for good moves to core.archive
    sweep: bool = True  # take turns with the other workers in retention's sweeps

    def __post_init__(self) -> None:
        _require("generation", self.generation, 0, 2**63 - 1, whole=True)
        _require("concurrency", self.concurrency, 1, 10_000, whole=True)
        _require("threads", self.threads, 1, 1_000, whole=True)
        _require("connections", self.connections, 1, 1_000, whole=True)
        _require("batch", self.batch, 1, 500, whole=True)
        _require("lease", self.lease, 0.5, 3_600)
        _require("poll_interval", self.poll_interval, 0.01, 3_600)
        _require("grace", self.grace, 0, 3_600)
        _require("settle_after", self.settle_after, 0, 1)
        if self.dead_letters not in DEAD_LETTERS:
            problem = f"is {self.dead_letters!r}"
            raise ConfigurationError("WorkerSettings.dead_letters", problem, f"use one of {', '.join(DEAD_LETTERS)}")
        if isinstance(self.channels, str):
            raise ConfigurationError("channels", "is a string", f"write ({self.channels!r},)")
        for channel in self.channels:
            if not isinstance(channel, str) or not _CHANNEL.fullmatch(channel):
                remedy = "use 1 to 63 of a-z, 0-9 and _, not starting with a digit"
                raise ConfigurationError("channels", f"has {channel!r}, which is no channel name", remedy)

    @property
    def served_channels(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.channels)) or (channel_of(self.generation),)

    def connections_needed(self, transactional: bool, scheduled: bool = False) -> int:
        """How many database connections a worker process opens at most (OBX-7)."""
        reserved = 4 + (2 if self.listen else 0)  # claim, settle, heartbeat, maintenance; listen, sleeper
        return reserved + (self.connections if transactional else 0) + (1 if scheduled else 0)


def _require(field: str, value: float, low: float, high: float, *, whole: bool = False) -> None:
    kind = int if whole else int | float
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
        remedy = f"give a {'whole ' if whole else ''}number from {low:g} to {high:g}"
        raise ConfigurationError(f"WorkerSettings.{field}", f"is {value!r}", remedy)
