"""Takes the messages of one handler from a broker, and feeds them to the dispatcher beside what is claimed.

take ──▶ look (handled? parked?) ──run──▶ dispatcher ──▶ settler, or the handler's transaction ──▶ acknowledge
                                 └─lane─▶ a row in the handler's lane ──────────────────────────▶ acknowledge

A broker carries first attempts. What it delivers again, what has a key, and everything of a handler that has a limit, a
pause or a breaker goes into the handler's lane, where the database keeps order, limits and attempts. While the database
cannot be reached nothing is taken, and nothing is acknowledged.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import NAMESPACE_OID, uuid5

import asyncpg

from holdfast.brokers.attributes import CloudEventError
from holdfast.brokers.cloudevents import HEAD, CarriedEvent, read, read_signed, undivided
from holdfast.brokers.engine import BrokerUnavailable, Interest, Received, Source
from holdfast.brokers.interests import Wanted
from holdfast.brokers.signing import Verdict
from holdfast.envelope import EventEnvelope
from holdfast.failure import state
from holdfast.handlers import Handler
from holdfast.postgres.faults import CONNECTION_FAULTS, PASSING_FAULTS
from holdfast.postgres.messages import PLAIN, Message, MessageDeliveries, details_of
from holdfast.redact import unredacted
from holdfast.telemetry import Notice
from holdfast.worker.broker_outage import unavailable_notice
from holdfast.worker.dispatcher import Dispatcher
from holdfast.worker.hourly import HourlyLimit
from holdfast.worker.relay_secrets import RelaySecrets
from holdfast.worker.settlements import Fail
from holdfast.worker.settler import Settler
from holdfast.worker.shared import Shared
from holdfast.worker.shared_connection import SharedConnection
from holdfast.worker.unreadable import UNREADABLE, kept, stub

# How long one look at an empty broker waits for a message.
_WAIT = 1.0
# How often to look for room when a handler has none, if nothing tells.
_FULL = 0.05
_MOST = 500
_MISLABELLED = "its type or target is not the one it was sent under"
_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.5, 10.0


class Taker:
    """One loop for one handler on one channel."""

    def __init__(
        self,
        shared: Shared,
        deliveries: MessageDeliveries,
        database: SharedConnection,
        dispatcher: Dispatcher,
        settler: Settler,
        handler: Handler,
        interest: Interest,
        source: Source,
        broker: str,
        secrets: RelaySecrets,
    ) -> None:
        self._secrets = secrets
        self._signatures = secrets.signatures
        self._accepted = (Verdict.OURS, Verdict.UNSIGNED) if shared.settings.accept_unsigned else (Verdict.OURS,)
        self._in_flight = shared.in_flight
        self._held = shared.held
        self._observe = shared.observe
        self._lease = shared.settings.lease
        self._address = shared.settings.substrate or ""
        self._outage = shared.outages.of(f"take {handler.name}")
        self._deliveries = deliveries
        self._database = database
        self._dispatcher = dispatcher
        self._settler = settler
        self._handler = handler
        self.interest = interest
        self._wanted = Wanted(interest)
        self._source = source
        self._broker = broker
        self._taken: dict[Message, Received] = {}
        self._stubs: set[Message] = set()  # the last that is tried with what the database has refused
        self._settled: list[Received] = []
        self._returned: list[Received] = []
        self._ended = asyncio.Event()
        self._freed = asyncio.Event()
        self._stopped = asyncio.Event()
        self._hourly = HourlyLimit()
        self.answered = False  # whether the broker has let this handler take, when it was last asked
        self._beside: list[asyncio.Task[None]] = []
        self._sorting: asyncio.Task[None] | None = None
        self._unread: Sequence[Received] = ()
        self._unsorted = 0  # messages that are read, or that the database is asked about
        self._waiting = False  # for a database that cannot be reached
        self._limited = bool(handler.fleet_concurrency or handler.rate or handler.breaker)

    @property
    def _stopping(self) -> bool:
        return self._stopped.is_set()

    @property
    def taken(self) -> int:
        """How many messages are not settled yet."""
        return len(self._taken)

    def stop(self) -> None:
        """Take no more."""
        self._stopped.set()
        self._freed.set()

    async def run(self) -> None:
        """Take until stopped; what is in flight then is ended by the dispatcher."""
        if not self._beside:
            self._beside = [asyncio.create_task(self._answer()), asyncio.create_task(self._keep_alive())]
        backoff = _FIRST_BACKOFF
        while not self._stopping:
            try:
                await self._turn()
                self.answered, backoff = True, _FIRST_BACKOFF
            except BrokerUnavailable as fault:
                self.answered = False
                self._report(fault)
                await _rest_until(self._stopped, backoff)  # what is freed meanwhile is no reason to try sooner
                backoff = min(2 * backoff, _LONGEST_BACKOFF)
        await self._sorted()

    async def close(self) -> None:
        """Say the last words to the broker: what was not settled is anybody's."""
        tasks = self._beside if self._sorting is None else [*self._beside, self._sorting]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._returned += (*self._taken.values(), *self._unread)
        self._taken.clear()
        with contextlib.suppress(BrokerUnavailable):
            await self._say()
        with contextlib.suppress(BrokerUnavailable):
            await self._source.close()

    async def _turn(self) -> None:
        if self._waiting:
            await self._sorted()  # the database cannot be reached
        room = min(self._dispatcher.space(self._handler.name) - self._unsorted, _MOST)
        if room <= 0:
            self._freed.clear()
            await _rest_until(self._freed, _FULL)
            return
        received = await self._source.take(room, wait=_WAIT)
        try:
            await self._sorted()
        except BaseException:
            self._returned += received  # a stop while the database is away: they are anybody's
            raise
        if received:
            # While these are read, and the database looks at them, the next are taken.
            self._unread, self._unsorted = received, len(received)
            self._sorting = asyncio.create_task(self._accept())

    async def _sorted(self) -> None:
        sorting, self._sorting = self._sorting, None
        if sorting is not None:
            await sorting

    # --- what was taken ---------------------------------------------------------------------------------

    async def _accept(self) -> None:
        """Run what is to run, and park the rest. Waits for the database, however long that takes."""
        received, self._unread = [_undivided(each) for each in self._unread], ()
        messages, suspects, unreadable = [], set(), []
        verdicts = await self._verdicts(received)
        now = datetime.now(UTC)
        for each, verdict in zip(received, verdicts, strict=True):
            message, error = self._message(each, verdict, now)
            if message is None:
                self._settled.append(each)
                self._ended.set()
                continue
            self._taken[message] = each
            if error is not None:
                unreadable.append((message, error))
                continue
            messages.append(message)
            if each.deliveries is not None and each.deliveries > 1:
                suspects.add(message)
        for message, error in unreadable:
            self._fail(message, error)
        try:
            if messages:
                await self._until_sorted(messages, suspects)
        finally:
            self._waiting, self._unsorted = False, 0
            self._freed.set()

    async def _verdicts(self, received: Sequence[Received]) -> list[Verdict]:
        """Return what the signatures of messages say; a secret that is not known may be a new one."""
        found = [self._signatures.verdict(each.body, self.interest.channel) for each in received]
        if Verdict.UNKNOWN not in found:
            return found
        while not self._stopping:
            try:
                if not await self._secrets.renew(unknown=True):
                    return found
                return [self._signatures.verdict(each.body, self.interest.channel) for each in received]
            except (*PASSING_FAULTS, *CONNECTION_FAULTS) as fault:
                self._database.drop()
                self._waiting = True
                await self._outage.wait(fault)
        return found

    async def _until_sorted(self, messages: list[Message], suspects: set[Message]) -> None:
        while True:
            try:
                await self._sort(messages, suspects)
                self._outage.over()
                return
            except (*PASSING_FAULTS, *CONNECTION_FAULTS) as fault:
                self._database.drop()
                if self._stopping:
                    return
                self._waiting = True
                await self._outage.wait(fault)
            except asyncpg.PostgresError as refusal:
                if len(messages) > 1:  # one bad message costs one message
                    for each in messages:
                        await self._until_sorted([each], suspects)
                else:
                    self._replace(messages[0], f"the database refuses the event: {refusal}")
                return

    def _replace(self, message: Message, error: str) -> None:
        """Fail the bytes of a message in its place, or the least of them: as it is, the database does not take it."""
        received = self._taken.pop(message)
        tried = message.event_type == UNREADABLE
        letter = self._unreadable(stub(received) if tried else kept(received), received, datetime.now(UTC))
        if tried:
            self._stubs.add(letter)
        self._taken[letter] = received
        self._fail(letter, error)

    def _fail(self, message: Message, error: str) -> None:
        report = state(error, "relay", unredacted)
        self._in_flight.add((message,))
        self._settler.add(Fail(message, "retry_terminal", report, report.signature))

    async def _sort(self, messages: list[Message], suspects: set[Message]) -> None:
        in_lane = self._limited or self._handler.name in self._held.limited
        lane = [each for each in messages if in_lane or _is_keyed(each) or (suspects and each in suspects)]
        rest = [each for each in messages if each not in set(lane)] if lane else messages
        # A transaction looks by itself, and most messages are new.
        looked = lane if self._handler.transactional else messages
        handled: set[Message] = set()
        if looked:
            async with self._database.lent() as connection:
                runs = await self._deliveries.look(connection, self._handler.name, looked)
                handled = {each for each, run in zip(looked, runs, strict=True) if not run}
                parked = [each for each in lane if each not in handled]
                if parked:
                    await self._deliveries.park(connection, parked, claimed=False)
            for each in parked:
                each.end()
        for each in handled:
            each.handled = True
        running = [*rest, *(each for each in lane if each in handled)]
        if running:
            self._in_flight.add(running)
            self._dispatcher.feed(running)

    def _message(self, received: Received, verdict: Verdict, now: datetime) -> tuple[Message | None, str | None]:
        """Return a message, and why it is no event; none for an event of others that this handler is not owed."""
        try:
            carried = self._read(received, verdict, now)
        except CloudEventError as error:
            return self._unreadable(kept(received), received, now), str(error)
        event = carried.envelope
        if not self._wanted(event.event_type, event.target) or event.event_type == UNREADABLE:
            if not received.routed:
                return None, None
            return self._unreadable(kept(received), received, now), _MISLABELLED
        if not (carried.foreign or verdict in self._accepted):
            self._report_refused(verdict)
            return self._unreadable(kept(received), received, now), verdict.value
        details = details_of(*carried[2:7])
        expired = carried.expires_at is not None and carried.expires_at <= now
        return self._made(received, event, carried.headers, details, expired), None

    def _read(self, received: Received, verdict: Verdict, now: datetime) -> CarriedEvent:
        if verdict is Verdict.OURS:  # its bytes are the event: no header may have it read as another
            return read_signed(received.body)
        return read(received.body, received.headers, now=now, apart=self._signatures.apart)

    def _unreadable(self, payload: dict[str, Any], received: Received, now: datetime) -> Message:
        """Return a message that keeps what there is of one that is no event. Its id is that of its bytes."""
        event_id = uuid5(NAMESPACE_OID, self._broker + json.dumps(payload, sort_keys=True))
        event = EventEnvelope.trusted(
            {
                "event_id": event_id,
                "event_type": UNREADABLE,
                "event_version": 1,
                "occurred_at": now,
                "source": self._broker,
                "target": None,
                "domain_id": None,
                "payload": payload,
                "idempotency_key": str(event_id),
                "trace_context": None,
            }
        )
        return self._made(received, event, {}, {}, False)

    def _made(
        self,
        received: Received,
        event: EventEnvelope,
        headers: Mapping[str, str],
        details: Mapping[str, object],
        expired: bool,
    ) -> Message:
        return Message(
            event,
            headers,
            self._handler,
            self.interest.channel,
            details,
            size=len(received.body),
            expired=expired,
            received=received,
            on_end=self._end,
        )

    # --- what the broker is told ------------------------------------------------------------------------

    def _end(self, message: Message) -> None:
        received = self._taken.pop(message, None)
        if received is not None and message.refused is not None and message not in self._stubs and not self._stopping:
            # It would come again for ever.
            self._taken[message] = received
            self._replace(message, f"the database refuses the event: {message.refused}")
        elif received is not None:
            self._stubs.discard(message)
            (self._returned if message.returned else self._settled).append(received)
            self._ended.set()
        self._freed.set()

    async def _answer(self) -> None:
        """Acknowledge what is settled, and give the rest back, as soon as there is something."""
        while True:
            await self._ended.wait()
            self._ended.clear()
            try:
                await self._say()
            except BrokerUnavailable as fault:
                self._report(fault)  # it delivers them again, and the inbox has them

    async def _say(self) -> None:
        settled, self._settled = self._settled, []
        returned, self._returned = self._returned, []
        if settled:
            await self._source.acknowledge(settled)
        if returned:
            await self._source.give_back(returned)

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(self._lease / 3)
            longest = self._handler.timeout + 2 * self._lease
            now = time.monotonic()
            alive = [
                received
                for message, received in self._taken.items()
                # Not for ever, as with leases; a thread cannot be cancelled, and keeps its message.
                if now - (message.started_at or message.claimed_at) < longest or not self._handler.asynchronous
            ]
            if alive:
                with contextlib.suppress(BrokerUnavailable):
                    await self._source.keep_alive(alive)

    def _report_refused(self, verdict: Verdict) -> None:
        if self._hourly.due("message_refused", verdict.name):
            details: dict[str, object] = {
                "handler_name": self._handler.name,
                "broker": self._broker,
                "error": verdict.value,
                "action": "kept as a dead letter, and not handled",
                "remedy": "see who may write to the broker, and whether relays and workers have the same secrets",
            }
            self._observe(Notice("error", "message_refused", details))

    def _report(self, fault: BrokerUnavailable) -> None:
        if self._hourly.due("broker_unavailable"):
            action = "trying again; what is not acknowledged comes again"
            named = {"handler_name": self._handler.name, "action": action}
            self._observe(unavailable_notice(self._broker, self._address, fault, **named))


async def _rest_until(event: asyncio.Event, seconds: float) -> None:
    """Wait for the event, and no longer than so many seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def _undivided(received: Received) -> Received:
    if HEAD not in received.headers:
        return received
    body, headers = undivided(received.body, received.headers)
    return received._replace(body=body, headers=headers)


def _is_keyed(message: Message) -> bool:
    details = message.details
    return details is not PLAIN and (details.get("ordering_key") is not None or details.get("fairness_key") is not None)
