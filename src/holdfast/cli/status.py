"""holdfast status: the backlog by route, its age, what handlers did lately, and the workers."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from holdfast.characters import shell_word
from holdfast.cli import environment, output, rates, several
from holdfast.cli.fitting import Fitted, Section
from holdfast.cli.next_commands import as_typed
from holdfast.cli.options import Where, spread
from holdfast.cli.rates import Rates
from holdfast.cli.workers import heartbeat
from holdfast.operator import (
    DATABASE_ERRORS,
    MOST,
    MOST_IN_ROUTE,
    MOST_ROUTES,
    MOST_UNSERVED,
    MUCH_LAG,
    NewestFailure,
    Operator,
    Status,
    is_away,
)
from holdfast.redact import redact_dsn

_SHOWN_ROUTES = 50  # --json has more
_EACH = ("database", "pending", "in flight", "delayed", "failed", "archived", "oldest", "wake-up", "workers")


@spread
def status(
    where: Where,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; with --watch one line each time.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again, until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between reads, with --watch.")] = 2.0,
) -> None:
    """Show what is pending, in flight, delayed and failed, what handlers did lately, and the workers."""
    if where.several:
        _show_each(where, as_json, interval if watch else None)
        return
    with _printer(where, as_json, watch) as printer:
        if watch:
            with suppress(KeyboardInterrupt):
                _watch(where, printer, interval)
        else:
            where.run(lambda operator: _read(operator, printer))


def _watch(where: Where, printer: _Printer, interval: float) -> None:
    """Show it again and again. A server that goes away, as in a failover, is looked for until it is back."""

    async def look(operator: Operator) -> None:
        while True:
            await _read(operator, printer)
            await asyncio.sleep(interval)

    while True:
        try:
            where.run(look)
        except DATABASE_ERRORS as error:
            if not is_away(error) or not printer.shown:  # an address that was never right
                raise
            printer.away(error)
            time.sleep(interval)


async def _read(operator: Operator, printer: _Printer) -> None:
    printer.show(await operator.status(), await rates.read(operator))


def _show_each(where: Where, as_json: bool, interval: float | None) -> None:
    """Show several databases: a line for each, and what to look into. One that does not answer has a line too."""
    schema = environment.schema(where.schema)

    async def look(operator: Operator) -> tuple[Status, Rates]:
        return await operator.status(), await rates.read(operator)

    found: Mapping[str, tuple[Status, Rates] | BaseException] = {}
    with _printer(where, as_json, interval is not None) as printer, suppress(KeyboardInterrupt):
        while True:
            found = where.run_in_each(look)
            if as_json:
                data = {name: as_data(schema, *each) for name, each in several.read(found).items()}
                shown = {"databases": data, "errors": several.errors(found)}
                output.print_json(shown, indent=2 if interval is None else None)
            else:
                printer.draw(_each(found, reasons=interval is not None))
            if interval is None:
                break
            time.sleep(interval)
    several.end(found)


def _each(found: Mapping[str, tuple[Status, Rates] | BaseException], *, reasons: bool) -> Fitted:
    """A line for each database. `reasons` says why one was not read; a command that ends says so by itself."""
    statuses = {name: status for name, (status, _) in several.read(found).items()}
    rows: list[tuple[object, ...]] = [
        (name, *_totals(status).values(), sum(worker.living for worker in status.workers))
        for name, status in statuses.items()
    ]
    away = several.errors(found)
    rows = [*((name, "NOT READ", *[""] * (len(_EACH) - 2)) for name in away), *rows]
    said = [f"! {name}: {warning}" for name, status in statuses.items() for warning in warnings(status, name)]
    said += [f"! {name}: {error}" for name, error in away.items() if reasons]
    return Fitted([_listed(_EACH, rows, "databases"), *_warned(said)])


class _Printer:
    """How a status is shown: as JSON, on a screen that is redrawn, or as lines."""

    def __init__(self, where: Where, as_json: bool, again: bool, live: Live | None) -> None:
        self._schema, self._database = environment.schema(where.schema), where.database
        self._as_json, self._again, self._live = as_json, again, live
        self._last = Fitted([])
        self._away = False
        self.shown = False

    def show(self, found: Status, did: Rates) -> None:
        if self._as_json:
            output.print_json(as_data(self._schema, found, did), indent=None if self._again else 2)
        else:
            self._last = _shown(self._schema, found, did, self._database)
            self.draw(self._last)
        self.shown, self._away = True, False

    def away(self, error: BaseException) -> None:
        """Say that the database does not answer: on the screen above what was shown last, elsewhere once."""
        said = output.clean(redact_dsn(" ".join(f"! the database does not answer, trying again: {error}".split())))
        if self._live is not None:
            self.draw(Fitted([Section(output.Line(said, "red")), *self._last.sections]))
        elif not self._away:
            print(said, file=sys.stderr)
        self._away = True

    def draw(self, what: Fitted) -> None:
        if self._live is None:
            output.console().print(what, crop=False)
        else:
            self._live.update(Fitted(what.sections, on_screen=True), refresh=True)


@contextmanager
def _printer(where: Where, as_json: bool, again: bool) -> Iterator[_Printer]:
    console = output.console()
    if again and not as_json and console.is_terminal:
        with Live(console=console, auto_refresh=False, screen=True) as live:
            yield _Printer(where, as_json, again, live)
    else:
        yield _Printer(where, as_json, again, None)


# --- for machines ---


def as_data(schema: str, found: Status, did: Rates) -> dict[str, Any]:
    """A count that equals its limit means "or more"."""
    return {
        "schema": schema,
        "wakeup_mode": found.wakeup_mode,
        "pending": found.pending,
        "in_flight": found.in_flight,
        "expired_leases": found.expired_leases,
        "delayed": found.delayed,
        "failed": found.failed,
        "archived": found.archived,
        "newest_failure": found.newest_failure,
        "oldest_pending_s": found.oldest,
        "limits": {"open": MOST, "failed": MOST, "open_in_route": MOST_IN_ROUTE, "routes": MOST_ROUTES},
        "open_is_more": found.open_is_more,
        "routes": [asdict(route) for route in found.routes],
        "routes_left_out": found.routes.left_out,
        "unrouted": sorted({route.event_type for route in found.unrouted if route.event_type}),
        "unserved_channels_count": found.unserved_channels,
        "unserved_channels": [{"channel": c, "generation": g} for c, g in found.unserved],
        "workers": [asdict(worker) for worker in found.workers],
        "workers_left_out": found.workers.left_out,
        "handlers_limited": [asdict(flow) for flow in found.flows],
        "blocked_keys": [asdict(each) for each in found.blocked],
        "broker_backlogs": [asdict(each) for each in found.backlogs],
        "broker_weaknesses": [asdict(each) for each in found.weaknesses],
        "broker_stranded": [asdict(each) for each in found.stranded],
        "rates": rates.as_data(did),
    }


# --- for people ---


def _shown(schema: str, found: Status, did: Rates, database: str | None) -> Fitted:
    parts = [Section(_counts(schema, found))]
    if found.newest_failure:
        parts.append(Section(output.Line(_newest(found.newest_failure), "red")))
    parts += _warned([f"! {warning}" for warning in warnings(found, database)])
    parts.append(_workers(found) if found.workers else Section(Text("no workers", style="yellow")))
    if found.routes:
        parts.append(_routes(found))
    if (table := rates.table(did)) is not None:
        parts.append(Section(table, "handlers", len(table.wide) + bool(table.left_out)))
    return Fitted(parts)


def _warned(said: list[str]) -> list[Section]:
    return [Section(Group(*(output.Line(line, "yellow") for line in said)), "warnings", len(said))] if said else []


def _counts(schema: str, found: Status) -> RenderableType:
    shown = {name: value for name, value in _totals(found).items() if name != "archived" or found.archived}
    return output.Pairs({"schema": schema} | shown)


def _totals(found: Status) -> dict[str, str]:
    more = "+" if found.open_is_more else ""
    return {
        "pending": f"{found.pending}{more}",
        "in flight": f"{found.in_flight}{more}",
        "delayed": f"{found.delayed}{more}",
        "failed": f"{found.failed}{'+' if found.failed_is_more else ''}",
        "archived": f"{found.archived}{'+' if found.archived_is_more else ''}",
        "oldest": "-" if found.oldest is None else f"{found.oldest:.1f} s",
        "wake-up": found.wakeup_mode or "missing",
    }


def _newest(failure: NewestFailure) -> str:
    at = f" at {failure.raised_at}" if failure.raised_at else ""
    return (
        f"newest failure {output.shown(failure.failed_at)}  {failure.handler_name}  "
        f"{output.first_line(failure.last_error)}{at}{' (in the archive)' if failure.archived else ''}"
    )


def warnings(found: Status, database: str | None = None) -> list[str]:
    """What an operator should look into, each with what to do, in the one of several databases that was read."""
    said = [
        f"channel {channel}, generation {generation}: events wait and no living worker serves it; "
        f"start one with --channel {shell_word(channel)} --generation {generation}"
        for channel, generation in found.unserved
    ]
    if found.more_unserved:
        at_least = " or more" if found.unserved_is_more else ""
        said.append(f"{found.more_unserved}{at_least} more channels have open events and no living worker")
    nowhere = set(found.unserved)
    unrouted = 0
    for route in found.routes:
        where = f"on {route.channel}, generation {route.generation}"
        if not route.handlers and (unrouted := unrouted + 1) <= MOST_UNSERVED:
            to = f" for {route.target}" if route.target else ""
            said.append(
                f"{route.event_type}{to} {where}: no handler subscribes to it; "
                + (f"did you mean {route.meant}? The" if route.meant else "the")
                + " events wait for one"
            )
        elif route.unserved and (route.channel, route.generation) not in nowhere:
            said.append(f"{route.route} {where}: no living worker has {', '.join(route.unserved)}")
    if unrouted > MOST_UNSERVED:
        said.append(f"{unrouted - MOST_UNSERVED} more routes have open events to which no handler subscribes")
    said += [
        f"worker {worker.name} is silent for {worker.silent_for:.0f} s; its events are due again when their leases "
        f"expire; if it was killed: holdfast workers release {worker.id}"
        for worker in found.workers
        if not worker.living
    ]
    said += [
        f"worker {worker.name} has no session in the database, and its last heartbeat was {worker.silent_for:.0f} s "
        "ago; its events are due again when their leases expire; if its process is gone: "
        f"holdfast workers release {worker.id} --force"
        if worker.gone
        else f"worker {worker.name} has missed heartbeats, the last was {worker.silent_for:.0f} s ago; see whether its "
        "process runs, and what its log says"
        for worker in found.workers
        if worker.late
    ]
    if found.expired_leases:
        said.append(
            f"{found.expired_leases} in flight have an expired lease; the next claim of a worker that has room takes "
            "them, and holdfast doctor says if handlers overran and keep the room"
        )
    for flow in found.flows:
        if flow.paused_at is not None:
            resume = f"holdfast handlers resume {flow.handler_name}"
            said.append(f"{flow.handler_name} is paused by {flow.paused_by}; its events wait: {resume}")
        elif flow.opened_at is not None:
            said.append(
                f"the breaker of {flow.handler_name} is open since {output.shown(flow.opened_at)}, "
                f"{flow.failed_probes} probes have failed; its events wait: holdfast handlers show {flow.handler_name}"
            )
    said += [
        f"{output.counted(each.keys, 'ordering key')} of {each.handler_name} {'is' if each.keys == 1 else 'are'} "
        f"blocked by dead letters since {output.shown(each.since)}; what is behind them waits: "
        f"holdfast keys blocked --handler {each.handler_name}"
        for each in found.blocked
    ]
    said += [
        f"{each.broker} has {each.waiting} messages for {each.handler_name} that nobody has taken: holdfast relay show"
        for each in found.backlogs
        if each.waiting is not None and each.waiting >= MUCH_LAG
    ]
    said += [
        f"{each.broker} has {_messages(each.waiting)} for {each.handler_name} by names that no worker uses any more "
        f"({each.naming}): holdfast doctor"
        for each in found.stranded
    ]
    if found.weaknesses:
        brokers = ", ".join(sorted({each.broker for each in found.weaknesses}))
        settings = output.counted(len(found.weaknesses), "setting")
        said.append(f"{settings} of {brokers} may lose events: holdfast doctor")
    if found.wakeup_mode is None:
        said.append("the trigger outbox_bell is missing; holdfast notify when_idle makes it")
    return [as_typed(each, database) for each in said]


def _messages(count: int | None) -> str:
    return "perhaps messages" if count is None else output.counted(count, "message")


def _listed(headers: Sequence[str], rows: list[tuple[object, ...]], noun: str) -> Section:
    return Section(output.Listing(headers, rows), noun, len(rows))


def _routes(found: Status) -> Section:
    rows: list[tuple[object, ...]] = []
    # What no handler is owed comes last, however much there is of it.
    shown = sorted(found.routes, key=lambda route: not route.handlers)[:_SHOWN_ROUTES]
    for route in shown:
        open_ = f"{route.open}{'+' if route.open >= MOST_IN_ROUTE else ''}"
        oldest = "-" if route.oldest is None else f"{route.oldest:.1f} s"
        owed = ", ".join(route.handlers) or "no handler"
        rows.append((route.route, route.channel, route.generation, open_, oldest, owed))
    more = len(found.routes) - len(shown) + found.routes.left_out
    if more:
        rows.append((f"… and {more:,} more", "", "", "", "", ""))
    return _listed(("route", "channel", "generation", "open", "oldest due", "owed to"), rows, "routes")


def _workers(found: Status) -> Section:
    headers = ("worker", "process", "version", "generation", "channels", "handlers", "heartbeat")
    rows: list[tuple[object, ...]] = [
        (
            worker.name,
            f"{worker.host}:{worker.pid}",
            worker.version,
            worker.generation,
            ", ".join(worker.channels),
            len(worker.handlers),
            heartbeat(worker),
        )
        # What is wrong comes first: the end of the list is what a small screen leaves out.
        for worker in sorted(found.workers, key=lambda worker: (worker.living, not worker.late, worker.connected))
    ]
    if found.workers.left_out:
        rows.append((f"… and {found.workers.left_out:,} more", *([""] * 6)))
    return _listed(headers, rows, "workers")
