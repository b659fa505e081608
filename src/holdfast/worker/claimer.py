"""Keeps the dispatcher's buffer filled: claims while events are due, and sleeps until a wake-up when none are."""

import asyncio
import math
import random
import time
from collections import Counter

import asyncpg

from holdfast.handlers import Handler
from holdfast.postgres.deliveries import EVERY_ROUTE, LaneClaim, RoutePage
from holdfast.postgres.delivery import Delivery
from holdfast.postgres.faults import CONNECTION_FAULTS, PASSING_FAULTS
from holdfast.postgres.subscriptions import Subscriptions, SubscriptionsChanged
from holdfast.postgres.wakeup.sleeper import Sleeper
from holdfast.telemetry import Claimed, Notice
from holdfast.worker.discovery import ChannelLanes
from holdfast.worker.dispatcher import Dispatcher
from holdfast.worker.heartbeat import Heartbeat
from holdfast.worker.keyed import KeyedClaims
from holdfast.worker.routing import Routing
from holdfast.worker.shared import Shared
from holdfast.worker.wakeups import Wakeups

# A worker that finds work this many times in a row is busy, and producers need not ring for it.
_BUSY_AFTER = 3
# The worker that is the sleeper may have died: its deputy tries to become it this often.
_SLEEPER_INTERVAL = 1.0
# The others look this often whether there are a sleeper and a deputy.
_VACANCY_INTERVAL = 10.0
_LONGEST_PACE = 0.005
# Beside a busy handler, an event of another one waits for about this long until it is looked for, and for as long
# until a claim that was under way has ended.
_NEIGHBOUR_PACE = 0.008
_SMALLEST_PORTION = 100


class Claimer:
    """One loop, one connection. It sleeps between wake-ups while nothing is due."""

    def __init__(
        self,
        shared: Shared,
        dispatcher: Dispatcher,
        handlers: list[Handler],
        wakeups: Wakeups,
        sleeper: Sleeper,
        heartbeat: Heartbeat,
    ) -> None:
        self._connection = shared.connections.claim
        self._deliveries = shared.deliveries
        self._subscriptions = shared.subscriptions
        self._in_flight = shared.in_flight
        self._flow = shared.flow
        self._held = shared.held
        self._counters = shared.counters
        self._reports = shared.reports
        self._batch = shared.settings.batch
        self._lease = shared.settings.lease
        self._poll_interval = shared.settings.poll_interval
        self._dispatcher = dispatcher
        self._handlers = handlers
        self._wakeups = wakeups
        self._sleeper = sleeper
        self._heartbeat = heartbeat
        self._channels = {channel: ChannelLanes() for channel in shared.settings.served_channels}
        self._keyed = KeyedClaims(shared, {each.name: each for each in handlers}, tuple(self._channels))
        shared.in_flight.when_freed(wakeups.wake)
        self._observe = shared.observe
        self._wants_claimed = shared.observe.wants(Claimed)
        self._version = 0  # of the subscriptions, which only a restored backup turns back
        self._routing: Routing | None = None
        self._ranges: tuple[list[str], list[str]] = ([], [])
        self._more = False  # pages of routes were left
        self._rested = asyncio.Event()
        self._rounds = self._rest_after = 0
        self._cautious = False
        self._claimed_on: asyncpg.Connection | None = None
        self._rooms: dict[str, int] = {}  # by handler, for the next claim
        self._wanted = 0
        self._portion = self._batch  # rows of one claim
        self._rescan = True  # the next look goes from the start of every lane
        self._looked_at = time.monotonic()
        self._streak = 0
        self._woken = False
        self._polled_at = time.monotonic()
        self._vacancy_at = -math.inf  # when this worker last looked for a place as the sleeper or the deputy
        self._outage = shared.outages.of("claim")
        self._asked_at: float | None = None  # when claims began that have not succeeded yet
        self.stopped = asyncio.Event()
        self._held.when_free(wakeups.wake)

    async def rest(self) -> None:
        """Look from the start of every lane, and return when nothing is due."""
        self._rested.clear()
        self._rest_after = self._rounds  # a round under way began too early to answer
        self._wakeups.wake(rescan=True)
        await self._rested.wait()

    def stop(self) -> None:
        self.stopped.set()
        self._wakeups.wake()
        self._rested.set()

    async def run(self) -> None:
        while not self.stopped.is_set():
            try:
                await self._turn()
                self._outage.over()
            except SubscriptionsChanged:
                self._routing = None
            except PASSING_FAULTS:
                await asyncio.sleep(random.uniform(0.02, 0.2))
            except (*CONNECTION_FAULTS, asyncpg.InsufficientPrivilegeError) as fault:
                self._connection.drop()
                self._rescan = True
                self._vacancy_at = -math.inf
                await self._wakeups.wait(self._outage.begin(fault))

    async def _turn(self) -> None:
        if self._cautious and self._in_flight.unblocked:
            await asyncio.sleep(_LONGEST_PACE)
            return
        if self._routing is not None and self._routing.few and not self._find_room(*self._channels.values()):
            # The dispatcher wakes the claimer when there is room.
            if self._rounds > self._rest_after and not self._held.passing and not self._dispatcher.left_out:
                self._rested.set()  # all that is due is held back
            await self._wakeups.wait(self._held.timeout(self._poll_interval))
            self._take_wakeups()
            return
        self._take_wakeups()
        self._rounds += 1
        self._looked_at = started = time.monotonic()
        for channel in self._channels.values():
            if self._rescan:
                channel.restart()
            for lanes in (channel.claimed, channel.split):
                lanes.rescan(before=math.inf if self._rescan else started - self._poll_interval)
        if self._rescan:
            self._keyed.restart()
        self._rescan = False
        if self._asked_at is None:
            self._asked_at = started
        found, exhausted = await self.run_once()
        self._asked_at = None
        took = time.monotonic() - started
        woken, self._woken = self._woken, False
        if found:
            self._vacancy_at = -math.inf  # it may have got up, or will
        if not found and self._more:
            return
        if not found and self._dispatcher.soon:
            # A busy handler has no room for a moment: meanwhile look for the others.
            await self._wakeups.wait(_NEIGHBOUR_PACE)
        elif not found:
            if exhausted and self._rounds > self._rest_after and not self._held.passing:
                self._rested.set()
            if woken:
                await self._wakeups.temper()
            if self._streak and not self._asleep:
                # A lull between bursts: look once more before producers have to ring.
                self._streak = 0
                await self._wakeups.wait(_LONGEST_PACE)
            elif exhausted or not self._rescan_if_cheap():
                await self._idle()
        elif exhausted and self._asleep and not self._wakeups.pending:
            await self._idle()  # everything is claimed, and every later commit rings
        else:
            self._streak += 1
            if self._streak >= _BUSY_AFTER and self._sleeper.chosen:
                await self._sleeper.get_up()
            if found < self._wanted:
                # Few rows: wait as long as the claim took, so that the next one is worth its round trip.
                await self._wakeups.wait(min(took, _LONGEST_PACE))

    def _take_wakeups(self) -> None:
        if self._wakeups.pending:
            self._vacancy_at = -math.inf  # perhaps by a sleeper that got up
        if self._wakeups.take():
            self._rescan = True
            self._held.clear()  # an operator may have changed something

    def _find_room(self, *channels: ChannelLanes) -> bool:
        """Ask which handlers have room; false when none of those that are served has any."""
        served = {name for channel in channels for name in channel.claimed.handlers}
        room, holds = self._dispatcher.room, self._held.holds
        self._rooms = {name: 0 if holds(name) else 1 if self._cautious else room(name) for name in served}
        self._wanted = min(self._portion, max(self._rooms.values(), default=1))
        return any(room > 0 for room in self._rooms.values())

    @property
    def asking_for(self) -> float | None:
        """Seconds for which claims have been tried and none has succeeded; None when the last one has."""
        asked_at = self._asked_at
        return None if asked_at is None else time.monotonic() - asked_at

    @property
    def _asleep(self) -> bool:
        """Whether every commit on the served channels notifies on behalf of this worker."""
        return all(map(self._sleeper.asleep, self._channels))

    async def run_once(self) -> tuple[int, bool]:
        """Claim from every channel. Returns how many rows came, and whether nothing more is there."""
        connection = await self._connection.use()
        if connection is not self._claimed_on:
            await self._extend_own(connection)
        routing = self._routing or await self._reload(connection)
        found, exhausted, self._more = 0, True, False
        for name, channel in self._channels.items():
            if routing.few:
                channel.restart()
            else:
                if channel.needs_page:
                    channel.take_page(routing, await self._page(connection, name, channel.after))
                channel.use_page(routing)
            if channel.split:
                split = await self._split(connection, routing.version, name, channel)
                found += split
                if split and not routing.few:
                    channel.exhausted = False  # the siblings may be on a page that was looked at before
            # In turn, so that neither takes all the room; where the lanes had nothing, they need no share.
            first = self._keyed.there(name) and self._rounds % 2 == 0
            share = 1 if channel.empty else 2
            claimed, seen = await self._claim_keyed(connection, name, share) if first else (0, True)
            found += claimed
            self._find_room(channel)
            claimed = await self._claim(connection, routing.version, name, channel)
            channel.empty = not claimed
            found += claimed
            if not first and self._keyed.there(name):
                claimed, seen = await self._claim_keyed(connection, name, 1)
                found += claimed
            self._more = self._more or channel.more
            exhausted = exhausted and seen and channel.exhausted and not channel.more
        return found, exhausted

    async def _claim_keyed(self, connection: asyncpg.Connection, name: str, share: int) -> tuple[int, bool]:
        """Claim events that have a key, for a part of the room. Returns how many, and whether nothing more is there."""
        room, holds = self._dispatcher.room, self._held.holds
        rooms = {
            each.name: 0 if holds(each.name) else 1 if self._cautious else -(-room(each.name) // share)
            for each in self._handlers
        }
        started = time.monotonic()
        self._in_flight.claiming()
        claimed, exhausted = await self._keyed.claim(connection, name, rooms)
        if claimed:
            self._counters.claims += 1
            self._counters.claimed += len(claimed)
            if self._wants_claimed:
                self._observe(Claimed(name, len(claimed), time.monotonic() - started))
            await self._accept(await self._still_leased(connection, claimed, started))
        return len(claimed), exhausted

    async def _page(self, connection: asyncpg.Connection, channel: str, after: str) -> RoutePage:
        """Return a page of the routes that have open rows and may be ours.

        Nearly always one page has all of them, ours or not: then the ranges of thousands of handlers need not be sent.
        """
        if not after:
            page = await self._deliveries.routes_within(connection, channel, EVERY_ROUTE, "")
            if not page.after:
                return page
        return await self._deliveries.routes_within(connection, channel, self._ranges, after)

    async def _claim(self, connection: asyncpg.Connection, version: int, name: str, channel: ChannelLanes) -> int:
        asked = channel.claimed.claims(self._rooms, self._portion)
        if not asked:
            return 0
        started = time.monotonic()
        self._in_flight.claiming()
        asks = self._keyed.asks(name)
        claimed, keyed = await self._deliveries.claim(connection, version, name, asked, asks)
        if asks:
            self._keyed.learn(name, keyed, time.monotonic() - started)
        self._counters.claims += 1
        self._counters.claimed += len(claimed)
        if self.stopped.is_set() and not claimed:
            return 0
        ended = time.monotonic()
        channel.exhausted &= channel.claimed.observe(claimed, started, ended)
        if self._held.limited:
            await self._ask_limits(connection, asked, claimed)
        if claimed:
            channel.note({each.route for each in claimed})
            channel.learn(ended - started, _NEIGHBOUR_PACE)
            self._learn_portion(len(claimed), ended - started)
            if self._wants_claimed:
                self._observe(Claimed(name, len(claimed), ended - started))
            await self._accept(await self._still_leased(connection, claimed, started))
        return len(claimed)

    async def _ask_limits(
        self, connection: asyncpg.Connection, asked: list[LaneClaim], claimed: list[Delivery]
    ) -> None:
        """Ask how long to leave out the handlers that have limits, and of which less came than there is room for."""
        came = Counter(each.handler.name for each in claimed)
        self._held.came(came)
        short = {
            lane.handler.name
            for lane in asked
            if lane.handler.name in self._held.limited and came[lane.handler.name] < self._rooms[lane.handler.name]
        }
        if short:
            self._held.note(await self._flow.waits(connection, short, self._deliveries.clock.ended_before()))

    async def _extend_own(self, connection: asyncpg.Connection) -> None:
        """Extend this worker's leases on a new connection: they may have expired in the outage before it.

        A claim would take the rows anew, and handlers that have finished and are not yet settled would run again.
        """
        leased = self._in_flight.snapshot()
        for chunk in (leased[start : start + self._batch] for start in range(0, len(leased), self._batch)):
            gone = set(await self._deliveries.extend(connection, chunk))
            self._dispatcher.cancel(each for each in chunk if each.id in gone)
        self._claimed_on = connection

    def _learn_portion(self, claimed: int, took: float) -> None:
        """Keep claims short if there are several handlers: one claim at a time is made, and all wait for it."""
        if len(self._rooms) < 2:
            self._portion = self._batch
        elif 2 * claimed >= self._portion or took > _NEIGHBOUR_PACE:
            fitting = self._portion * max(0.5, min(_NEIGHBOUR_PACE / took, 1.5))
            self._portion = min(self._batch, max(int(fitting), _SMALLEST_PORTION))

    async def _still_leased(
        self, connection: asyncpg.Connection, claimed: list[Delivery], started: float
    ) -> list[Delivery]:
        """Leave out deliveries whose leases other workers have by now.

        A handler that blocks the loop may have kept the answer waiting for longer than the lease, and the lease keeper
        does not know of a delivery before it is accepted.
        """
        if time.monotonic() - started < self._lease / 2:
            return claimed
        lost = set(await self._deliveries.extend(connection, claimed))
        self._reports.lost([each for each in claimed if each.id in lost])
        return [each for each in claimed if each.id not in lost]

    async def _split(self, connection: asyncpg.Connection, version: int, name: str, channel: ChannelLanes) -> int:
        lanes = channel.split
        started = time.monotonic()
        # Of a part of many routes about as many siblings as the claim takes that comes next.
        few = self._routing is None or self._routing.few
        most = self._batch if few else max(1, self._batch // channel.siblings)
        asked = lanes.claims(dict.fromkeys(lanes.handlers, most), most)
        finds = await self._deliveries.split(connection, version, name, asked)
        split = sum(find.count for find in finds)
        self._counters.split += split
        channel.exhausted &= lanes.learn(finds, started, time.monotonic())
        return split

    async def _accept(self, claimed: list[Delivery]) -> None:
        if not claimed:
            return
        self._reports.lost(self._in_flight.add(claimed))
        if self.stopped.is_set():
            await self._dispatcher.release(claimed)
            return
        suspects = [each for each in claimed if each.suspect]
        if suspects or self._cautious:
            claimed = await self._beware(claimed, suspects)
        self._dispatcher.feed(claimed)

    async def _beware(self, claimed: list[Delivery], suspects: list[Delivery]) -> list[Delivery]:
        """Run suspects one at a time, with nothing else in the worker.

        A worker that dies takes an attempt from every delivery in flight. One that loses all its attempts that way
        may be the cause, or was beside it each time: the last attempt is made alone, so that only the cause fails.
        """
        self._cautious = bool(suspects)
        if not suspects:
            return claimed
        alone = suspects[:1] if self._in_flight.unblocked == len(claimed) else []
        await self._dispatcher.release([each for each in claimed if each not in alone])
        self._wakeups.wake(rescan=True)
        return alone

    async def _reload(self, connection: asyncpg.Connection) -> Routing:
        """Read the subscriptions, and route the lanes by them."""
        subscriptions = await self._subscriptions.read(connection)
        if subscriptions.version < self._version:
            subscriptions = await self._subscribe_again(connection, subscriptions.version)
        self._version = subscriptions.version
        self._held.limited = await self._flow.limited(connection, [handler.name for handler in self._handlers])
        self._held.clear()
        self._routing = routing = Routing(subscriptions, self._handlers)
        self._ranges = routing.ranges()
        for channel in self._channels.values():
            channel.restart()
            channel.use(routing.routes if routing.few else {})
        return routing

    async def _subscribe_again(self, connection: asyncpg.Connection, version: int) -> Subscriptions:
        """Record again what this worker's handlers are owed, in a database of an earlier time: a restored backup."""
        details: dict[str, object] = {
            "subscriptions_version": version,
            "seen_before": self._version,
            "action": "subscribing again; what the backup has open is delivered, also what was delivered after it",
        }
        self._observe(Notice("warning", "database_restored", details))
        owed = [handler for handler in self._handlers if handler.via == "outbox"]
        await self._subscriptions.subscribe(connection, owed)
        return await self._subscriptions.read(connection)

    def _rescan_if_cheap(self) -> bool:
        now = time.monotonic()
        lanes = [each for channel in self._channels.values() for each in (channel.claimed, channel.split)]
        return any([each.rescan_cheap(now) for each in lanes])

    # --- nothing to do --------------------------------------------------------------------------------

    async def _idle(self) -> None:
        connection = await self._connection.use()
        if await self._fall_asleep(connection):
            return
        timeout = self._held.timeout(self._poll_interval)
        if self._sleeper.possible and (self._sleeper.waiting or not self._sleeper.hears):
            timeout = min(timeout, _SLEEPER_INTERVAL)
        now = time.monotonic()
        for name, channel in self._channels.items():
            # What became due after the claim asked, and before this does, must not wait for the next poll.
            due = await self._deliveries.due_in(connection, name, channel.keys, time.monotonic() - self._looked_at)
            if due is not None:
                timeout = min(timeout, max(due, 0.001))
            timeout = min(timeout, max(channel.claimed.rescan_at() - now, 0.001))
        timeout = min(timeout, max(self._keyed.look_at - now, 0.001))
        if not self._wakeups.pending:
            self._streak = 0
        until = time.monotonic() + timeout
        while not await self._wait(until):
            if time.monotonic() >= until:
                break
            if not self._heartbeat.due_in:
                await self._heartbeat.send(connection)
                if self._sleeper.chosen or not self._sleeper.possible:  # of a fleet that idles, two are enough
                    await self._heartbeat.end_silent_sessions(connection)
            if await self._fall_asleep(connection):
                return
        if not self._woken and time.monotonic() - self._polled_at >= self._poll_interval:
            self._polled_at = time.monotonic()
            self._counters.polls += 1
            self._rescan = True

    async def _fall_asleep(self, connection: asyncpg.Connection) -> bool:
        """Try to become the sleeper of each channel. True: look once more, what was committed before rang no bell."""
        now = time.monotonic()
        if not self._sleeper.chosen and now - self._vacancy_at < _VACANCY_INTERVAL:
            return False
        self._vacancy_at = now
        for name in self._channels:
            if await self._sleeper.fall_asleep(name, connection):
                self._rescan = True
                return True
        await self._sleeper.leave()
        return False

    async def _wait(self, until: float) -> bool:
        """Wait for a wake-up, or until something is to be done that is no claim."""
        steps = [until - time.monotonic(), self._heartbeat.due_in]
        if self._sleeper.possible and not self._asleep:
            steps.append(_SLEEPER_INTERVAL if self._sleeper.deputy else _VACANCY_INTERVAL)
        self._woken = await self._wakeups.wait(max(min(steps), 0.001))
        return self._woken
