"""What a run measured, in the terms of the promises. A figure that could not be measured is absent."""

import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

from chaos.events import IMPORTS, OWED, PROBES, crowd
from chaos.history import read
from chaos.observer import recoveries
from chaos.workers import notices
from chaos.world import Strike, World

# A wake-up counts as one after a fault when its event was committed until so long after it.
AFTERMATH = 5.0
# What is handled and not settled, or runs while a fault goes on, ends so long before or after it.
AROUND = 1.0
SILENT = ("half_open", "blackhole", "swallow_lines")
# Every worker should have noticed a silence of this length.
NOTICED_BY_ALL = 15.0
# Connection attempts are counted in outages of at least this length: the first second is everybody's first try.
LONG_OUTAGE = 4.0
# Handlers that take no transaction.
PLAIN = {handler for handlers in OWED.values() for handler, fate in handlers.items() if fate in ("delivery", "either")}


@dataclass(frozen=True, slots=True)
class Delivery:
    handler: str
    key: str
    event: str
    attempt: int
    began: float
    ended: float
    process: int = 0


def deliveries(world: World) -> list[Delivery]:
    found = []
    for log in sorted(world.deliveries.glob("*.log")):
        for line in log.read_text().splitlines():
            handler, key, event, attempt, began, ended = line.split()
            found.append(Delivery(handler, key, event, int(attempt), float(began), float(ended), int(log.stem)))
    return found


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def figures(world: World) -> dict[str, float]:
    found: dict[str, float] = {}
    if times := recoveries(world.observer.samples, world.fleet.deaths):
        found |= {"reclaimed": len(times), "reclaim_p99_s": percentile(times, 0.99), "reclaim_max_s": max(times)}
    found["connections_max"] = max((sample.connections for sample in world.observer.samples), default=0)
    runs = deliveries(world)
    found |= _restarts(world, runs) | (_wake_ups(world, runs) if world.setup.probes else {})
    found |= repeats(runs) | _releases(world, runs) | _unread(world, runs) | _beside_neighbours(world, runs)
    if waits := _noticed(world):
        found["noticed_s"] = max(waits)
    for condition in ("idle", "busy", "hurried", "half_open", "unread"):
        if seconds := [stop.seconds for stop in world.fleet.stops if stop.condition == condition]:
            found[f"stop_{condition}_s"] = max(seconds)
    return {name: round(value, 3) for name, value in found.items()}


def messages_in_flight(world: World) -> int:
    """How many handlers had just ended, or ended, in the workers that a fault hit: nobody sees a message in flight."""
    slots = {worker.pid: worker.id for worker in world.fleet.started}
    runs = [(run.ended, slots.get(run.process, "")) for run in deliveries(world)]
    return sum(
        strike.at - AROUND <= ended <= max(strike.at, strike.until) + AROUND
        for strike in world.strikes
        for ended, worker in runs
        if strike.hit is None or worker in strike.hit
    )


def _noticed(world: World) -> list[float]:
    """How long each worker took to say that connections on which nothing comes are dead (B3)."""
    ahead = time.time() - time.monotonic()
    said = [
        [datetime.fromisoformat(each["timestamp"]).timestamp() - ahead for each in notices(log, "database_unavailable")]
        for log in world.fleet.logs
    ]
    return noticed([strike for strike in world.strikes if strike.nemesis in SILENT], said)


def noticed(silences: Sequence[Strike], said: Sequence[Sequence[float]]) -> list[float]:
    """From each silence to what each worker says next.

    One that says nothing counts with the whole of the first silence, if that is long enough for everybody; of a later
    one nobody knows whether it is told: an outage is told once.
    """
    found = []
    long = next((silence for silence in silences if silence.until - silence.at >= NOTICED_BY_ALL), None)
    for times in said:
        for silence in silences:
            later = [at - silence.at for at in times if silence.at <= at < silence.until + AFTERMATH]
            if later:
                found.append(min(later))
            elif silence is long:
                found.append(silence.until - silence.at)
    return found


def _wake_ups(world: World, runs: Sequence[Delivery]) -> dict[str, float]:
    """From the commit of a probe to its handler (P4), in quiet times and after a fault."""
    quiet: list[float] = []
    after: list[float] = []
    for at, waited in _waits(world, runs, PROBES | crowd(world.setup.crowd)):
        (after if _within(world.strikes, at, AFTERMATH) else quiet).append(waited)
    found: dict[str, float] = {}
    if quiet:
        found |= {"probes": len(quiet), "wake_p50_ms": 1000 * percentile(quiet, 0.5)}
        found["wake_p99_ms"] = 1000 * percentile(quiet, 0.99)
    if after:
        found["wake_after_fault_s"] = max(after)
    return found


def _waits(world: World, runs: Sequence[Delivery], event_types: Container[str]) -> Iterator[tuple[float, float]]:
    """When each event was committed, and how long it waited for a handler."""
    heard: dict[str, float] = {}
    for run in runs:
        heard[run.key] = min(run.began, heard.get(run.key, run.began))
    for event in read(world.history.path, ()):
        if event.event_type in event_types and event.outcome == "acknowledged" and event.key in heard:
            yield event.at, max(0.0, heard[event.key] - event.at)


def _within(strikes: Iterable[Strike], at: float, aftermath: float = 0.0) -> bool:
    return any(strike.at - 0.1 <= at <= strike.until + aftermath for strike in strikes)


def repeats(runs: Sequence[Delivery]) -> dict[str, float]:
    """How often finished handlers without a transaction ran again, for the process that had finished most of them.

    A handler that takes tx has finished before its commit, which may fail. Overlaps are two runs of a row at once.
    """
    by_row: dict[tuple[str, str], list[Delivery]] = {}
    for run in runs:
        by_row.setdefault((run.handler, run.event), []).append(run)
    again: Counter[int] = Counter()
    overlaps = 0
    for same in by_row.values():
        same.sort(key=lambda run: run.began)
        overlaps += sum(later.began < earlier.ended for earlier, later in pairwise(same))
        again.update(run.process for run in same[:-1] if run.handler in PLAIN)
    return {"repeats": again.total(), "repeats_of_one": max(again.values(), default=0), "overlaps": overlaps}


def _releases(world: World, runs: Sequence[Delivery]) -> dict[str, float]:
    """How many workers of each release have handled something with the schema of the next one (T13)."""
    migrated = world.releases.migrated
    if migrated is None:
        return {}
    new = {worker.pid for worker in world.fleet.started if worker.environment}
    at_work = {run.process for run in runs if run.began > migrated}
    return {"old_at_work": len(at_work - new), "new_at_work": len(at_work & new)}


def _unread(world: World, runs: Sequence[Delivery]) -> dict[str, float]:
    """How many handlers were run in a second while nobody read the logs (T16)."""
    held = [strike for strike in world.strikes if strike.nemesis == "hold_logs"]
    rates = [sum(_within([each], run.began) for run in runs) / (each.until - each.at) for each in held]
    return {"unread_per_s": min(rates)} if rates else {}


def _beside_neighbours(world: World, runs: Sequence[Delivery]) -> dict[str, float]:
    """How long lone events and those of a fast handler wait while others are slow (LSN-17)."""
    found: dict[str, float] = {}
    slow = [strike for strike in world.strikes if strike.nemesis == "slow_neighbours"]
    if lone := [waited for at, waited in _waits(world, runs, PROBES) if _within(slow, at)]:
        found |= {"lone_p50_ms": 1000 * percentile(lone, 0.5), "lone_p99_ms": 1000 * percentile(lone, 0.99)}
    if fast := [waited for at, waited in _waits(world, runs, IMPORTS) if _within(slow, at)]:
        found["fast_p99_s"] = percentile(fast, 0.99)
    return found


def _restarts(world: World, runs: Sequence[Delivery]) -> dict[str, float]:
    """From the moment the server takes connections to the first handler's start (P7), and how often it was tried."""
    found: dict[str, float] = {}
    begins = sorted(run.began for run in runs)
    waits = [next((b - up for b in begins if b >= up), None) for _, up in world.outages if up != float("inf")]
    if known := [wait for wait in waits if wait is not None]:
        found["first_claim_s"] = max(known)
    long = [(down, up) for down, up in world.outages if LONG_OUTAGE <= up - down < float("inf")]
    if long:
        tries = sum(down < at < up for at in world.worker_line.attempts for down, up in long)
        found["connects_per_s"] = tries / sum(up - down for down, up in long) / world.setup.workers
    return found
