"""Checks whether living workers serve the open events: generations, channels, handlers, leases, and their clocks."""

from __future__ import annotations

from collections.abc import Iterable

import asyncpg

from holdfast.characters import shell_word
from holdfast.postgres.doctor.examination import Examination
from holdfast.postgres.doctor.findings import Check, Finding, Severity
from holdfast.postgres.operations.status import MOST, MOST_IN_ROUTE, MOST_ROUTES, MOST_UNSERVED, RouteStatus

_CLOCK_LOOKS = 5
_WITHOUT_ROW = {
    "subscriptions_version": "no worker can claim anything",
    "sweeps": "no worker sweeps what is past its time",
    "clock": "no step of the clock is noticed",
}


async def _generations(examination: Examination) -> list[Finding]:
    """Report generations that have open events and no living worker."""
    status = await examination.status()
    served = {worker.generation for worker in status.workers if worker.living}
    findings = []
    for generation in sorted({generation for _, generation in status.unserved} - served):
        routes = [route for route in status.routes if route.generation == generation]
        channels = sorted(channel for channel, number in status.unserved if number == generation)[:5]
        findings.append(
            Finding(
                _severity(routes),
                "generation-unserved",
                f"generation {generation}",
                f"events of generation {generation} wait, and no living worker has this generation",
                f"{_open(routes)}; on {', '.join(channels)}",
                f"start a worker with {_serving(generation, channels)}, or move them to a generation that workers serve"
                + (f": holdfast generations move {generation} --to {max(served)}" if served else ""),
            )
        )
    return findings


async def _channels(examination: Examination) -> list[Finding]:
    status = await examination.status()
    served = {worker.generation for worker in status.workers if worker.living}
    findings = []
    for channel, generation in status.unserved:
        if generation in served:
            routes = [route for route in status.routes if (route.channel, route.generation) == (channel, generation)]
            findings.append(
                Finding(
                    _severity(routes),
                    "channel-unserved",
                    channel,
                    f"events wait on the channel {channel}, which no living worker of generation {generation} serves",
                    _open(routes),
                    f"start a worker with --channel {shell_word(channel)} --generation {generation}",
                )
            )
    if status.more_unserved:
        findings.append(
            Finding(
                "warning",
                "channel-flood",
                f"{status.more_unserved} more channels",
                "events wait on more channels than are named here, and no living worker serves them",
                f"{status.unserved_channels}{'+' if status.unserved_is_more else ''} channels without a worker; "
                "a writer may name any",
                "find who writes to them: holdfast events list",
            )
        )
    return findings


async def _handlers(examination: Examination) -> list[Finding]:
    """Report handlers that no living worker has, on served channels."""
    status = await examination.status()
    owed: dict[str, list[RouteStatus]] = {}
    for route in status.routes:
        if (route.channel, route.generation) not in status.unserved:
            for handler in route.unserved:
                owed.setdefault(handler, []).append(route)
    rows = await examination.rows("list_retired_handlers", handlers=list(owed)) if owed else []
    retired = {row["handler_name"] for row in rows}
    return [
        Finding(
            _severity(routes),
            "handler-unserved",
            handler,
            f"events are owed to {handler}, which no living worker has",
            f"{_open(routes)}; routes {', '.join(route.route for route in routes[:5])}",
            _serve(handler)
            or f"start the worker that has it, or, if it is gone for good: "
            f"{_drop(handler, routes, handler in retired)}",
        )
        for handler, routes in owed.items()
    ]


async def _unrouted(examination: Examination) -> list[Finding]:
    status = await examination.status()
    named, more = status.unrouted[:MOST_UNSERVED], len(status.unrouted) - MOST_UNSERVED
    findings = [
        Finding(
            "warning",
            "event-unrouted",
            str(route.event_type),
            f"events {route.event_type}"
            + (f" for {route.target}" if route.target else "")
            + " are open and no handler subscribes to them",
            f"{_open([route])}; channel {route.channel}, generation {route.generation}",
            (f"did you mean {route.meant}? If not, " if route.meant else "")
            + "start a worker with a handler for them, whose subscription is recorded when it starts, or cancel them: "
            + _cancel(route),
        )
        for route in named
    ]
    if more > 0:
        findings.append(
            Finding(
                "warning",
                "event-unrouted",
                f"{more} more routes",
                "events of more types and channels than are named here are open and no handler subscribes to them",
                f"{_open(status.unrouted)}; of the first {MOST_ROUTES} routes",
                "find who writes them: holdfast events list",
            )
        )
    return findings


async def _routes(examination: Examination) -> list[Finding]:
    """Report more routes than the others of these checks look at."""
    status = await examination.status()
    if not status.routes.left_out:
        return []
    return [
        Finding(
            "warning",
            "route-flood",
            f"{status.routes.left_out} more routes",
            "events of more types and channels are open than are looked at here",
            f"{status.open} open; at least {len(status.routes) + status.routes.left_out} routes, "
            f"of which {len(status.routes)} are looked at: those to which a handler subscribes first",
            "find who writes them: holdfast events list",
        )
    ]


async def _keys(examination: Examination) -> list[Finding]:
    status = await examination.status()
    return [
        Finding(
            "warning",
            "key-blocked",
            each.handler_name,
            f"dead letters of {each.handler_name} block ordering keys, and the events behind them wait",
            f"{each.keys} {'key' if each.keys == 1 else 'keys'}, the first since {each.since:%Y-%m-%d %H:%M:%S}",
            "replay or discard the heads, or release the keys; they are listed by: "
            f"holdfast keys blocked --handler {each.handler_name}",
        )
        for each in status.blocked
    ]


async def _leases(examination: Examination) -> list[Finding]:
    await examination.require_installed()
    rows = await examination.rows("count_expired_leases", most=MOST, expired_for=examination.limits.expired_for)
    return [_abandoned(examination, row) if row["worker"] is None else _overrun(row) for row in rows]


def _abandoned(examination: Examination, row: asyncpg.Record) -> Finding:
    return Finding(
        "warning",
        "lease-expired",
        f"{examination.schema}.outbox",
        "events in flight have leases that expired long ago, and no worker claims them",
        f"{row['events']} events, the first for {row['longest']:.0f} s; routes {', '.join(row['routes'][:5])}",
        "start a worker that serves them; holdfast status names the routes and who is missing",
    )


def _overrun(row: asyncpg.Record) -> Finding:
    return Finding(
        "problem",
        "handler-overrun",
        row["worker"],
        f"handlers in the worker {row['worker']} run past their timeout and do not end: they keep its slots",
        f"{row['process']}: {row['events']} events, the first lease expired {row['longest']:.0f} s ago; "
        f"routes {', '.join(row['routes'][:5])}",
        "restart that worker, and correct the handlers: they must let CancelledError pass, and wait for no answer "
        "without a limit of its own",
    )


async def _single_rows(examination: Examination) -> list[Finding]:
    await examination.require_installed()
    return [
        Finding(
            "problem",
            "row-lost",
            f"{examination.schema}.{name}",
            f"{examination.schema}.{name} has lost its only row: {_WITHOUT_ROW[name]}",
            "expected 1 row; found none",
            f"INSERT INTO {examination.in_schema(name)} DEFAULT VALUES;",
        )
        for (name,) in await examination.rows("list_lost_rows")
    ]


async def _clock(examination: Examination) -> list[Finding]:
    """Compare the clocks, by the quickest of several answers: it says the most."""
    quickest, offset = float("inf"), 0.0
    for _ in range(_CLOCK_LOOKS):
        async with examination.connection.transaction(isolation="read_committed", readonly=True):
            before = examination.clock()
            there = await examination.connection.fetchval(examination.queries.asyncpg("database_clock").sql)
            after = examination.clock()
        if after - before < quickest:
            quickest, offset = after - before, there - (before + after) / 2
    if abs(offset) - quickest / 2 < examination.limits.clock.total_seconds():
        return []
    return [
        Finding(
            "warning",
            "clock-difference",
            "clock",
            "the clocks of this machine and of the database differ: times and ids of events mislead, leases do not",
            f"the database is {abs(offset):.1f} s {'ahead' if offset > 0 else 'behind'}, within {quickest:.3f} s",
            "let both follow the same time server, and run this where the producers run",
        )
    ]


async def _clock_steps(examination: Examination) -> list[Finding]:
    await examination.require_installed()
    (row,) = await examination.rows("read_clock_steps", most=MOST, clock=examination.limits.clock)
    misdated = row["leases"] + row["due"]
    if row["step"] is None and not misdated:
        return []
    seen = "" if row["step"] is None else f"a step of {row['step']:+.0f} s, seen {row['ago']:.0f} s ago; "
    living = any(worker.living for worker in (await examination.status()).workers)
    remedies = [f"holdfast workers release {worker}" for worker in row["workers"] or []][:5]
    if not remedies or row["due"]:
        remedies.append("workers repair those times" if living else "start a worker: it repairs those times")
    if not row["leases"]:
        remedies.append(
            "let the database's machine follow a time server that slews, "
            "and after a step forward look before: holdfast retention sweep"
        )
    return [
        Finding(
            "problem" if misdated else "warning",
            "clock-stepped",
            "clock",
            "the database's clock was set while events were open",
            f"{seen}{row['leases']} leases and {row['due']} due times lie further ahead than they can",
            "; ".join(remedies),
        )
    ]


def _cancel(*routes: RouteStatus) -> str:
    """Return the commands that cancel what waits on routes, and nothing else."""
    return "; ".join(
        f"holdfast events cancel --route {shell_word(route.route)} --channel {shell_word(route.channel)}"
        f" --generation {route.generation}"
        for route in routes[:5]
    )


def _serve(handler: str) -> str:
    """Return how to serve a relay, whose events only its broker can get; nothing for another handler."""
    context, _, broker = handler.partition(".")
    if context != "relay":
        return ""
    return (
        f"start a worker with --substrate and the address of {broker}, or holdfast relay run; if {broker} is gone for "
        "good, an empty server takes what waits, and holdfast handlers via outbox NAME moves the handlers behind it"
    )


def _drop(handler: str, routes: list[RouteStatus], retired: bool) -> str:
    """Return the commands that end a handler, and cancel what only it could handle: another one may take the rest."""
    cancel = f"holdfast events cancel --handler {shell_word(handler)}"
    if retired:
        return cancel
    retire = f"holdfast handlers retire {shell_word(handler)}"
    if all(route.event_type is not None for route in routes):
        return retire
    return f"{retire}; and for what only it could handle: {cancel}"


def _serving(generation: int, channels: list[str]) -> str:
    return " ".join((*(f"--channel {shell_word(channel)}" for channel in channels), f"--generation {generation}"))


def _severity(routes: Iterable[RouteStatus]) -> Severity:
    """What is not due yet can still be served in time."""
    return "problem" if any(route.oldest is not None for route in routes) else "warning"


def _open(routes: list[RouteStatus]) -> str:
    oldest = max((route.oldest for route in routes if route.oldest is not None), default=None)
    more = "+" if any(route.open >= MOST_IN_ROUTE for route in routes) else ""
    return f"{sum(route.open for route in routes)}{more} open, " + (
        "none due yet" if oldest is None else f"the first due for {oldest:.0f} s"
    )


CHECKS = (
    Check(
        "generations",
        "health",
        "living workers serve every generation that has open events",
        ("generation-unserved",),
        _generations,
    ),
    Check(
        "channels",
        "health",
        "living workers serve every channel that has open events",
        ("channel-unserved", "channel-flood"),
        _channels,
    ),
    Check(
        "handlers", "health", "living workers have every handler that is owed events", ("handler-unserved",), _handlers
    ),
    Check("routes", "health", "every route that has open events is looked at", ("route-flood",), _routes),
    Check("routing", "health", "some handler subscribes to each open event", ("event-unrouted",), _unrouted),
    Check("keys", "health", "no dead letter blocks an ordering key", ("key-blocked",), _keys),
    Check(
        "leases",
        "health",
        "no event is in flight a minute after its lease expired",
        ("lease-expired", "handler-overrun"),
        _leases,
    ),
    Check(
        "single-rows",
        "health",
        "tables of one row (the version of the subscriptions, the turn to sweep, the latest time) have it",
        ("row-lost",),
        _single_rows,
    ),
    Check(
        "clock",
        "health",
        "this machine and the database agree on the time, within two seconds",
        ("clock-difference",),
        _clock,
    ),
    Check(
        "clock-steps",
        "health",
        "the database's clock was not set for a day, and no lease or due time lies further ahead than it can",
        ("clock-stepped",),
        _clock_steps,
    ),
)
