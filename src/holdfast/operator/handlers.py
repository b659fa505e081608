"""Verbs for handlers: their subscriptions, their backlog, what holds them back, and the workers that serve them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from holdfast.brokers.engines import NAMES
from holdfast.checks import one_of
from holdfast.errors import ConfigurationError, NotFound
from holdfast.flow import in_the_fleet, per_second
from holdfast.operator import arguments
from holdfast.operator.session import Refused, Session
from holdfast.postgres.operations import brokers, flow, handlers
from holdfast.postgres.operations.connection import Statements
from holdfast.postgres.operations.excerpt import Excerpt
from holdfast.postgres.operations.flow import HandlerFlow, Limit
from holdfast.postgres.operations.handlers import HandlerStatus


@dataclass(frozen=True, slots=True)
class FlowChange:
    """What a change of a handler's limits, pause or breaker has made of them."""

    handler: str
    changed: bool  # False: it was like that before
    flow: HandlerFlow | None  # None: nothing holds it back any more
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class ViaChange:
    """How many handlers get their events another way from now on."""

    handlers: list[str]
    via: str
    changed: int
    dry_run: bool = False


_Change = Callable[[Statements], Awaitable[bool]]


class Handlers:
    """Handlers, as `operator.handlers`."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def all(self) -> Excerpt[HandlerStatus]:
        """Every handler that ever subscribed, with its backlog. Counts end at the limits of the status.

        Of too many those are listed first that living workers have; `left_out` says how many are not listed.
        """
        return await self._read()

    async def known(self, handler: str) -> bool:
        """Whether a handler ever subscribed."""
        return bool(await self._read(handler))

    async def show(self, handler: str) -> HandlerStatus:
        """One handler, with its backlog and what holds it back."""
        arguments.handler(handler)
        found = await self._read(handler)
        if not found:
            raise NotFound("handler", f"{handler} is unknown", "holdfast handlers list")
        return found[0]

    async def limit(
        self,
        handler: str,
        *,
        fleet_concurrency: int | None = None,
        rate: str | float | None = None,
        clear: Sequence[Limit] = (),
        reason: str | None = None,
        dry_run: bool = False,
    ) -> FlowChange:
        """Set limits of a handler for the whole fleet: deliveries at the same time, and a rate like `"100/s"`.

        They win over what its code declares, until they are cleared: `clear` names those that go back to it.
        """
        most, per = in_the_fleet("fleet_concurrency", fleet_concurrency), per_second("rate", rate)
        cleared: list[str] = [clear] if isinstance(clear, str) else list(clear)
        for each in cleared:
            one_of("clear", each, get_args(Limit))
            if {"fleet_concurrency": most, "rate": per}[each] is not None:
                raise ConfigurationError("clear", f"names {each}, which is given too", "set it, or clear it")
        if most is None and per is None and not cleared:
            raise ConfigurationError("fleet_concurrency", "is missing", "give fleet_concurrency, rate or clear")
        asked = {"fleet_concurrency": most, "rate": per, "clear": cleared}
        if twice := [each for each in cleared if asked[each] is not None]:
            raise ConfigurationError("clear", f"names {twice[0]}, which is given too", "give one of them")
        actor = self._session.actor

        async def change(statements: Statements) -> bool:
            return await flow.limit(statements, handler, most, per, cleared, actor=actor, reason=reason)

        return await self._change("handler.limit", handler, change, reason, dry_run, asked)

    async def pause(self, handler: str, *, reason: str | None = None, dry_run: bool = False) -> FlowChange:
        """Claim nothing more for a handler, until it is resumed. Its events wait; what runs may finish."""
        actor = self._session.actor

        async def change(statements: Statements) -> bool:
            return await flow.pause(statements, handler, actor=actor, reason=reason)

        return await self._change("handler.pause", handler, change, reason, dry_run)

    async def resume(self, handler: str, *, reason: str | None = None, dry_run: bool = False) -> FlowChange:
        """End the pause of a handler, and wake its workers."""
        actor = self._session.actor

        async def change(statements: Statements) -> bool:
            return await flow.resume(statements, handler, actor=actor, reason=reason)

        return await self._change("handler.resume", handler, change, reason, dry_run)

    async def open(self, handler: str, *, reason: str | None = None, dry_run: bool = False) -> FlowChange:
        """Open the breaker of a handler: one event probes now and then, and the first that succeeds closes it."""
        return await self._turn_breaker("breaker.open", handler, True, reason, dry_run)

    async def close(self, handler: str, *, reason: str | None = None, dry_run: bool = False) -> FlowChange:
        """Close the breaker of a handler, without waiting for a probe."""
        return await self._turn_breaker("breaker.close", handler, False, reason, dry_run)

    async def _turn_breaker(
        self, action: str, handler: str, open: bool, reason: str | None, dry_run: bool
    ) -> FlowChange:
        actor = self._session.actor

        async def change(statements: Statements) -> bool:
            found = (await flow.every(statements, handler)).get(handler)
            if found is None or found.breaker is None:
                raise Refused(
                    f"{handler} has no breaker", 'declare on_outage="pause", or: holdfast handlers pause ' + handler
                )
            return await flow.turn_breaker(statements, handler, open=open, actor=actor, reason=reason)

        return await self._change(action, handler, change, reason, dry_run)

    async def _change(
        self,
        action: str,
        handler: str,
        change: _Change,
        reason: str | None,
        dry_run: bool,
        named: dict[str, Any] | None = None,
    ) -> FlowChange:
        arguments.handler(handler)
        asked: dict[str, Any] = {"reason": arguments.reason(reason), "handler": handler, **(named or {})}
        if not await self._read(handler):
            raise NotFound("handler", f"{handler} is unknown", "holdfast handlers list")
        async with self._session.changing(action, dry_run=dry_run, **asked) as statements:
            changed = await change(statements)
            found = (await flow.every(statements, handler)).get(handler)
        return FlowChange(handler, changed, found, dry_run)

    async def _read(self, only: str | None = None) -> Excerpt[HandlerStatus]:
        status = await self._session.connection.status()
        async with self._session.reading() as statements:
            return await handlers.every(statements, status, only)

    async def via(
        self, handlers: Sequence[str], via: str, *, reason: str | None = None, dry_run: bool = False
    ) -> ViaChange:
        """Let something else carry the events of handlers from now on: `"outbox"`, or a broker by its name.

        The consumers of the handlers have to be there before: `holdfast handlers via` makes them, and so does a worker
        that is started with the broker. No worker changes what was decided here.
        """
        one_of("via", via, ("outbox", *NAMES))
        names = [arguments.handler(each) for each in ([handlers] if isinstance(handlers, str) else handlers)]
        if not names:
            raise ConfigurationError("handlers", "are missing", "name at least one")
        for each in names:
            if not await self._read(each):
                raise NotFound("handler", f"{each} is unknown", "holdfast handlers list")
        asked: dict[str, Any] = {"reason": arguments.reason(reason), "handlers": names, "via": via}
        async with self._session.changing("handler.via", dry_run=dry_run, **asked) as statements:
            changed = await brokers.set_via(statements, names, via, actor=self._session.actor, reason=reason)
        return ViaChange(names, via, changed, dry_run)

    async def drained(self, handler: str, broker: str, *, reason: str | None = None, dry_run: bool = False) -> bool:
        """Note that a broker has nothing left for a handler that gets its events another way; whether it was not yet.

        Refused while events wait to be sent there for it. Workers then take nothing more for it from there. `holdfast
        handlers drained` also looks whether the broker has messages left, and deletes the consumer.
        """
        arguments.handler(handler)
        one_of("broker", broker, NAMES)
        if not await self._read(handler):
            raise NotFound("handler", f"{handler} is unknown", "holdfast handlers list")
        asked: dict[str, Any] = {"reason": arguments.reason(reason), "handler": handler, "broker": broker}
        async with self._session.changing("handler.drained", dry_run=dry_run, **asked) as statements:
            actor = self._session.actor
            found = await brokers.carried(statements, handler)
            if any(each.via == broker for each in found):
                raise Refused(f"{handler} gets its events by {broker}", f"holdfast handlers via outbox {handler}")
            if waiting := await brokers.unrelayed(statements, handler, broker):
                # The relay would send them when nobody reads them any more.
                events = "1 event waits" if waiting == 1 else f"{waiting:,} events wait"
                raise Refused(
                    f"{events} to be sent to {broker} for {handler}",
                    f"start a worker with --substrate and the address of {broker}, and let it send and take them; if "
                    f"{broker} is gone for good, an empty server does as well",
                )
            return await brokers.set_drained(statements, handler, broker, actor=actor, reason=reason)

    async def retire(
        self, handler: str, event_type: str | None = None, *, reason: str | None = None, dry_run: bool = False
    ) -> int:
        """End the subscriptions of a handler, or one of them; how many ended. Events that already wait for it stay."""
        arguments.handler(handler)
        if event_type is not None and not 1 <= len(event_type) <= 200:
            raise ConfigurationError("event_type", "is empty or too long", "holdfast handlers list")
        known = await self._read(handler)
        wanted = [each for each in known if event_type is None or event_type in each.event_types]
        if not known:
            raise NotFound("handler", f"{handler} is unknown", "holdfast handlers list")
        if not wanted:
            raise NotFound("event_type", f"{handler} has no subscription to {event_type!r}", "holdfast handlers list")
        asked: dict[str, Any] = {"reason": arguments.reason(reason), "handler": handler}
        async with self._session.changing("handler.retire", dry_run=dry_run, **asked) as statements:
            actor = self._session.actor
            return await handlers.retire(statements, handler, event_type, actor=actor, reason=reason)
