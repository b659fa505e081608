"""Takes the messages of one handler from a broker, and feeds them to the dispatcher beside rows that are claimed.

take ──▶ look (handled? parked?) ──run──▶ dispatcher ──▶ settler, or the handler's transaction ──▶ acknowledge
                                 └─lane─▶ a row in the handler's lane ──────────────────────────▶ acknowledge

A broker carries first attempts. Messages that it delivers again, events with a key, and all events of a handler with a
limit, a pause or a breaker go into the handler's lane, where the database keeps order, limits and attempts. While the
database cannot be reached, nothing is taken and nothing is acknowledged.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import asyncpg

from holdfast.brokers.engine import BrokerUnavailable, Received, Source
from holdfast.brokers.signing import Verdict
from holdfast.failure import state
from holdfast.postgres.faults import CONNECTION_FAULTS, PASSING_FAULTS
from holdfast.postgres.messages import PLAIN, Message, MessageDeliveries
from holdfast.redact import unredacted
from holdfast.worker.broker_outage import unavailable_notice
from holdfast.worker.dispatcher import Dispatcher
from holdfast.worker.hourly import HourlyLimit
from holdfast.worker.reading import MessageReader, whole
from holdfast.worker.relay_secrets import RelaySecrets
from holdfast.worker.settlements import Fail
from holdfast.worker.settler import Settler
from holdfast.worker.shared import Shared
from holdfast.worker.shared_connection import SharedConnection
from holdfast.worker.unreadable import UNREADABLE

# Seconds that one request to an empty broker waits for a message.
_WAIT = 1.0
# Seconds between two looks for room while a handler has none: a place may become free without a sign.
_FULL = 0.05
_MOST = 500
_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.5, 10.0


@dataclass(frozen=True, slots=True)
class Intake:
    """Where taken messages go: to the dispatcher, into a lane of the outbox, or to the settler as dead letters."""

    dispatcher: Dispatcher
    deliveries: MessageDeliveries
    settler: Settler


class Taker:
    """One loop for one handler on one channel."""

    def __init__(
        self,
        shared: Shared,
        database: SharedConnection,
        secrets: RelaySecrets,
        intake: Intake,
        source: Source,
        reader: MessageReader,
    ) -> None:
        self._in_flight = shared.in_flight
        self._held = shared.held
        self._observe = shared.observe
        self._lease = shared.settings.lease
        self._address = shared.settings.substrate or ""
        self._handler = reader.handler
        self._outage = shared.outages.of(f"take {self._handler.name}")
        self._database = database
        self._secrets = secrets
        self._intake = intake
        self._source = source
        self._reader = reader
        self._taken: dict[Message, Received] = {}
        self._stubs: set[Message] = set()  # kept in short, because the database has refused the rest
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
        self._unsorted = 0  # messages that are being read, or that the database is asked about
        self._waiting = False  # for a database that cannot be reached
        self._limited = bool(self._handler.fleet_concurrency or self._handler.rate or self._handler.breaker)

    @property
    def _stopping(self) -> bool:
        return self._stopped.is_set()

    @property
    def taken(self) -> int:
        """How many taken messages are not settled yet."""
        return len(self._taken)

    def stop(self) -> None:
        """Take no more messages."""
        self._stopped.set()
        self._freed.set()

    async def run(self) -> None:
        """Take until stopped; the dispatcher ends the messages that are in flight then."""
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
                await _rest_until(self._stopped, backoff)  # and not sooner, even if runners become free
                backoff = min(2 * backoff, _LONGEST_BACKOFF)
        await self._sorted()

    async def close(self) -> None:
        """Tell the broker what is settled, give everything else back to it, and disconnect."""
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
        room = min(self._intake.dispatcher.space(self._handler.name) - self._unsorted, _MOST)
        if room <= 0:
            self._freed.clear()
            await _rest_until(self._freed, _FULL)
            return
        received = await self._source.take(room, wait=_WAIT)
        try:
            await self._sorted()
        except BaseException:
            self._returned += received  # stopped while the database is away: others may take them
            raise
        if received:
            # The next messages are taken while these are read and looked up in the database.
            self._unread, self._unsorted = received, len(received)
            self._sorting = asyncio.create_task(self._accept())

    async def _sorted(self) -> None:
        sorting, self._sorting = self._sorting, None
        if sorting is not None:
            await sorting

    # --- what was taken ---------------------------------------------------------------------------------

    async def _accept(self) -> None:
        """Run messages or park them, each as it has to be. Wait for the database, however long that takes."""
        received, self._unread = [whole(each) for each in self._unread], ()
        messages, suspects, unreadable = [], set(), []
        verdicts = await self._verdicts(received)
        now = datetime.now(UTC)
        for each, verdict in zip(received, verdicts, strict=True):
            message, error = self._reader.read(each, verdict, now, self._end)
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
        """Return what the signatures of messages say; ask the database first if a secret is unknown, and may be new."""
        found = self._reader.verdicts(received)
        if Verdict.UNKNOWN not in found:
            return found
        while not self._stopping:
            try:
                if not await self._secrets.renew(unknown=True):
                    return found
                return self._reader.verdicts(received)
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
                if len(messages) > 1:  # one by one, so that only the bad one fails
                    for each in messages:
                        await self._until_sorted([each], suspects)
                else:
                    self._replace(messages[0], f"the database refuses the event: {refusal}")
                return

    def _replace(self, message: Message, error: str) -> None:
        """Fail a message that the database refuses: keep its bytes, or only a few of them if those are refused too."""
        received = self._taken.pop(message)
        tried = message.event_type == UNREADABLE
        letter = self._reader.unreadable(received, datetime.now(UTC), self._end, in_short=tried)
        if tried:
            self._stubs.add(letter)
        self._taken[letter] = received
        self._fail(letter, error)

    def _fail(self, message: Message, error: str) -> None:
        report = state(error, "relay", unredacted)
        self._in_flight.add((message,))
        self._intake.settler.add(Fail(message, "retry_terminal", report, report.signature))

    async def _sort(self, messages: list[Message], suspects: set[Message]) -> None:
        in_lane = self._limited or self._handler.name in self._held.limited
        lane = [each for each in messages if in_lane or _is_keyed(each) or (suspects and each in suspects)]
        rest = [each for each in messages if each not in set(lane)] if lane else messages
        # A handler's transaction looks into the inbox itself, and most messages are new.
        looked = lane if self._handler.transactional else messages
        handled: set[Message] = set()
        if looked:
            async with self._database.lent() as connection:
                runs = await self._intake.deliveries.look(connection, self._handler.name, looked)
                handled = {each for each, run in zip(looked, runs, strict=True) if not run}
                parked = [each for each in lane if each not in handled]
                if parked:
                    await self._intake.deliveries.park(connection, parked, claimed=False)
            for each in parked:
                each.end()
        for each in handled:
            each.handled = True
        running = [*rest, *(each for each in lane if each in handled)]
        if running:
            self._in_flight.add(running)
            self._intake.dispatcher.feed(running)

    # --- what the broker is told ------------------------------------------------------------------------

    def _end(self, message: Message) -> None:
        received = self._taken.pop(message, None)
        if received is not None and message.refused is not None and message not in self._stubs and not self._stopping:
            # Keep it as a dead letter: given back, it would be refused again without end.
            self._taken[message] = received
            self._replace(message, f"the database refuses the event: {message.refused}")
        elif received is not None:
            self._stubs.discard(message)
            (self._returned if message.returned else self._settled).append(received)
            self._ended.set()
        self._freed.set()

    async def _answer(self) -> None:
        """Acknowledge settled messages, and give the others back, as soon as there are any."""
        while True:
            await self._ended.wait()
            self._ended.clear()
            try:
                await self._say()
            except BrokerUnavailable as fault:
                self._report(fault)  # it delivers them again, and the inbox skips them

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
                # No longer than a lease is extended; but a thread cannot be cancelled, and keeps its message.
                if now - (message.started_at or message.claimed_at) < longest or not self._handler.asynchronous
            ]
            if alive:
                with contextlib.suppress(BrokerUnavailable):
                    await self._source.keep_alive(alive)

    def _report(self, fault: BrokerUnavailable) -> None:
        if self._hourly.due("broker_unavailable"):
            action = "trying again; what is not acknowledged comes again"
            named = {"handler_name": self._handler.name, "action": action}
            self._observe(unavailable_notice(self._reader.broker, self._address, fault, **named))


async def _rest_until(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, for at most so many seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def _is_keyed(message: Message) -> bool:
    details = message.details
    return details is not PLAIN and (details.get("ordering_key") is not None or details.get("fairness_key") is not None)
