"""How a worker is: the value that `Worker.health()` returns, and that probes show.

live   the event loop turns, and heartbeats are sent; or the database is away, and the worker waits for it
ready  it is live, claims succeed, the schema fits the code, and the worker is not about to stop

A worker that is not live should be started again. One that is not ready need not be.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

State = Literal["new", "starting", "running", "draining", "stopped"]
ListenerState = Literal["listening", "connecting", "pooled", "off"]

_LISTENING = {
    "listening": "listening",
    "connecting": "polling until LISTEN is connected",
    "pooled": "polling: LISTEN cannot pass a transaction pooler",
    "off": "polling: LISTEN is off",
}

_STUTTER = 2.0  # seconds without a turn of the event loop, from which on people are told


@dataclass(frozen=True, slots=True)
class Health:
    """How a worker is at one moment, or the processes of one `--processes`, or the workers of several databases."""

    state: State | None  # None, as below: it did not answer
    not_live: tuple[str, ...] = ()  # why it is not live
    not_ready: tuple[str, ...] = ()  # what else keeps it from being ready
    name: str = ""
    pid: int | None = None
    generation: int | None = None
    listener: ListenerState | None = None
    in_flight: int | None = None
    concurrency: int | None = None  # events that each handler may run at once
    loop_silent_s: float | None = None  # since the event loop last turned
    heartbeat_s: float | None = None  # since the database last took a heartbeat; None: it has taken none yet
    processes: tuple[Health, ...] = ()
    database: str | None = None  # its name, where there are several
    databases: tuple[Health, ...] = ()

    @property
    def live(self) -> bool:
        """Whether the worker goes on by itself: if not, start it again."""
        return not self.not_live

    @property
    def ready(self) -> bool:
        """Whether the worker delivers events now."""
        return self.live and not self.not_ready

    @property
    def problems(self) -> tuple[str, ...]:
        """Why it is not live or not ready, the worst first."""
        return self.not_live + self.not_ready

    @property
    def _stutters(self) -> bool:
        """Whether the event loop has not turned for seconds, which is not yet a reason to start it again."""
        return self.live and self.loop_silent_s is not None and self.loop_silent_s >= _STUTTER

    @property
    def verdict(self) -> str:
        """How it is in a word."""
        return "ready" if self.ready else "live, not ready" if self.live else "not live"

    @property
    def reasons(self) -> tuple[str, ...]:
        """Its problems, or, with several databases, those of each with its name."""
        return self.problems or tuple(_named(self.databases, lambda each: each.problems))

    @property
    def known(self) -> str:
        """What else is known of it, in parentheses behind a space; or nothing."""
        ending = self.state in ("draining", "stopped")
        about = [
            *([_LISTENING[self.listener]] if self.listener is not None and not ending else ()),
            *([f"generation {self.generation}"] if self.generation is not None else ()),
            *([f"{self.in_flight} in flight"] if self.in_flight is not None else ()),
            *([f"event loop blocked for {self.loop_silent_s:.0f} s"] if self._stutters else ()),
            *([f"{len(self.processes)} processes"] if self.processes else ()),
            *([_ready_of(self.databases)] if self.databases else ()),
        ]
        return f" ({', '.join(about)})" if about else ""

    def __str__(self) -> str:
        """One line for people."""
        why = f": {'; '.join(self.reasons)}" if self.reasons else ""
        return f"{self.verdict}{why}{self.known}"

    def as_data(self) -> dict[str, Any]:
        """The same for programs, as JSON has it."""
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _PARTS}
        found = {"live": self.live, "ready": self.ready, "problems": list(self.problems)} | own
        if self.processes:
            found["processes"] = [each.as_data() for each in self.processes]
        if self.database is not None:
            found["database"] = self.database
        if self.databases:
            found["databases"] = [each.as_data() for each in self.databases]
        return found


_PARTS = frozenset({"processes", "database", "databases"})  # told only where there are several


def _ready_of(databases: tuple[Health, ...]) -> str:
    return f"{sum(each.ready for each in databases)} of {len(databases)} databases ready"


def _named(databases: Iterable[Health], problems: Callable[[Health], Iterable[str]]) -> Iterator[str]:
    return (f"{each.database}: {why}" for each in databases for why in problems(each))


ReadHealth = Callable[[], Health | Awaitable[Health]]


async def read_now(read: ReadHealth) -> Health:
    """The health of a worker, which answers at once, or of several processes, which have to be asked."""
    found = read()
    return await found if inspect.isawaitable(found) else found


def from_data(data: Mapping[str, Any]) -> Health:
    """The health that `as_data` was made of. What another release has added is left out."""
    known = {field.name: data[field.name] for field in fields(Health) if field.name in data}
    for name in ("not_live", "not_ready"):
        known[name] = tuple(map(str, known.get(name, ())))
    for name in ("processes", "databases"):
        known[name] = tuple(map(from_data, known.get(name, ())))
    return Health(**known)


def joined(own: Health, processes: Iterable[Health]) -> Health:
    """The health of a parent and its worker processes: live if each of them is, ready if each of them is.

    It is starting until the first of them has started.
    """
    found = tuple(processes)
    named = [(f"process {number}", each) for number, each in enumerate(found, start=1)]
    listeners = [each.listener for each in found if each.listener not in (None, "listening")]
    starting = own.state == "running" and found and all(each.state in ("new", "starting", "stopped") for each in found)
    return replace(
        own,
        state="starting" if starting else own.state,
        not_live=own.not_live + tuple(f"{name}: {why}" for name, each in named for why in each.not_live),
        not_ready=own.not_ready + tuple(f"{name}: {why}" for name, each in named for why in each.not_ready),
        listener=listeners[0] if listeners else next((each.listener for each in found if each.listener), None),
        in_flight=sum(each.in_flight or 0 for each in found),
        loop_silent_s=max((each.loop_silent_s or 0.0 for each in found), default=None),
        heartbeat_s=max((each.heartbeat_s or 0.0 for each in found), default=None),
        processes=found,
    )


def together(own: Health, databases: Iterable[Health]) -> Health:
    """The health of a process that serves several databases: live if each worker is, ready if one of them is.

    A database that is away or refuses the worker is no reason to start the others again, or to keep back a deployment.
    """
    found = tuple(databases)
    not_live = tuple(_named(found, lambda each: each.not_live))
    ready = any(each.ready for each in found)
    silent = [each.loop_silent_s for each in found if each.loop_silent_s is not None]
    return replace(
        own,
        not_live=own.not_live + not_live,
        not_ready=own.not_ready + (() if ready else tuple(_named(found, lambda each: each.not_ready))),
        in_flight=sum(each.in_flight or 0 for each in found),
        loop_silent_s=max(silent, default=None),
        databases=found,
    )


def of_database(health: Health, database: str) -> Health:
    """The health of one database, in all processes together. `ready` of it is whether its events are delivered."""
    if health.processes:
        own = replace(health, not_live=(), not_ready=(), processes=(), database=database)
        return joined(own, (of_database(each, database) for each in health.processes))
    unknown = replace(health, not_ready=(*health.not_ready, "it has not told"), database=database, databases=())
    return next((each for each in health.databases if each.database == database), unknown)
