"""One run: build a world, let the nemeses strike, heal, wait until everything has come out, and check."""

import asyncio
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from chaos import balance, measures
from chaos.checker import Row, Verdict, check
from chaos.events import OWED, crowd
from chaos.history import read
from chaos.nemeses import AWAY, Nemesis
from chaos.nemeses.deployments import CloseLogins
from chaos.observer import in_flight
from chaos.order import Place, inversions
from chaos.scenario import Lane, Scenario
from chaos.workers import Death, notices
from chaos.world import Progress, Strike, World

DRAIN_SECONDS = 90.0
QUIET_SECONDS = 5.0
# On a machine with other work everything takes longer.
BUSY_PATIENCE = 4.0
# A turn of a loop that takes so long says that nothing on this machine went on.
STILL_SECONDS = 3.0
OPEN = "SELECT count(*) FROM core.outbox WHERE settled_at IS NULL AND event_type <> 'trouble.unrouted'"
# A row that a handler has locked in its transaction is protected by that, and nobody extends its lease.
# What a broker was given, and its handler has not had.
CARRIED = "SELECT count(*) FROM core.relay_lost($1, '-infinity', 'infinity', 100000)"
RELAYED = "SELECT count(*)::float8 FROM core.outbox WHERE handler_name = $1 AND status = 'delivered'"
OVERDUE = """
    SELECT count(*) FILTER (WHERE since > $1) AS rows, coalesce(max(since), 0)::float8 AS most
    FROM (SELECT extract(epoch FROM now() - lease_expires_at)::float8 AS since FROM core.outbox
          WHERE settled_at IS NULL AND status = 'in_flight' AND lease_expires_at < now() FOR UPDATE SKIP LOCKED) o
"""
EFFECTS = "SELECT handler, key FROM chaos.effects ORDER BY number"
# An event that was published twice under one key has the place of the first.
PLACES = """
    SELECT handler_name, idempotency_key, ordering_key, min(seq) FROM core.outbox
    WHERE ordering_key <> '' AND handler_name IS NOT NULL GROUP BY 1, 2, 3
"""
IDLE = "SELECT count(*) FROM pg_stat_activity WHERE usename LIKE 'chaos_%' AND state LIKE 'idle in transaction%'"
CONNECTED = "SELECT count(*) FROM pg_stat_activity WHERE usename = $1"
# What a worker only says when it is at fault itself.
DEFECTS = ("loop_failed", "runner_failed", "settle_refused")
# How handlers that are trouble end their process.
EXPECTED_CODES = (137, -9)
# How long a worker may take to find out that it is not let in.
START_SECONDS = 3.0


@dataclass(slots=True)
class Result:
    """Everything that is known about a run. `problems` is empty when every promise was kept."""

    scenario: str
    seed: int
    seconds: float
    verdict: Verdict
    strikes: dict[str, int]
    in_flight_at_kill: int
    stuck_in_flight: int
    idle_in_transaction: int
    leaked_connections: int
    figures: dict[str, float]
    problems: list[str] = field(default_factory=list)
    directory: Path | None = None
    busy: bool = False  # the machine had other work, and times were not judged
    counted: dict[str, int] = field(default_factory=dict)  # by the roll-up: begun, each outcome, open

    def summary(self) -> dict[str, object]:
        verdict = self.verdict
        return {
            "scenario": self.scenario,
            "seed": self.seed,
            "seconds": self.seconds,
            "attempted": verdict.attempted,
            "acknowledged": verdict.acknowledged,
            "delivered": verdict.delivered,
            "lost": len(verdict.lost),
            "unexpected": len(verdict.unexpected),
            "recovered": verdict.recovered,
            "unknown": verdict.unknown,
            "put_aside": verdict.put_aside,
            "effect_duplicates": verdict.effect_duplicates,
            "delivery_duplicates": verdict.delivery_duplicates,
            "in_order": verdict.in_order,
            "inversions": len(verdict.inversions),
            "in_flight_at_kill": self.in_flight_at_kill,
            "max_recovery_s": self.figures.get("reclaim_max_s", 0.0),
            "stuck_in_flight": self.stuck_in_flight,
            "idle_in_transaction": self.idle_in_transaction,
            "leaked_connections": self.leaked_connections,
            "strikes": sum(self.strikes.values()),
            "struck": self.strikes,
            "figures": self.figures,
            "counted": self.counted,
            "problems": self.problems,
            **({"busy": True} if self.busy else {}),
        }


async def play(
    scenario: Scenario, seed: int, seconds: float, progress: Progress, *, keep: bool = False, busy: bool = False
) -> Result:
    directory = Path(tempfile.mkdtemp(prefix=f"holdfast-chaos-{scenario.name}-{seed}-"))
    world = World(directory, seed, scenario.setup)
    try:
        progress("starting", 0.0)
        await world.build()
        async with scenario.surrounding.around(world):
            await world.open()
            try:
                result = await _play(world, scenario, seconds, progress, busy)
            finally:
                await world.close()
    except BaseException as error:
        error.add_note(f"what is left of the run: {directory}")
        raise
    if result.problems or keep:
        result.directory = directory
    else:
        shutil.rmtree(directory, ignore_errors=True)
    return result


async def _play(world: World, scenario: Scenario, seconds: float, progress: Progress, busy: bool) -> Result:
    world.note("begin", scenario=scenario.name, seed=world.seed, seconds=seconds, time=datetime.now(UTC).isoformat())
    await world.populate()
    world.produce()
    measured = await scenario.measure(world, progress) if scenario.measure else {}
    began = time.monotonic()
    lanes = [
        asyncio.create_task(_strike(world, scenario, number, lane, began + seconds))
        for number, lane in enumerate(scenario.lanes)
    ]
    while not all(lane.done() for lane in lanes) or (lanes and time.monotonic() - began < seconds):
        elapsed = time.monotonic() - began
        progress(f"{world.history.acknowledged:,} acknowledged, {len(world.strikes)} strikes", min(elapsed, seconds))
        await asyncio.sleep(0.2)
    for lane in lanes:
        lane.result()
    world.note("healed")
    await world.rest()
    drained = await _drain(world, progress, BUSY_PATIENCE if busy else 1.0)
    idle = await _none(world, IDLE)
    # While the workers live they may have what they are configured for, and when they are gone none.
    leaked = await _none(world, CONNECTED, "chaos_worker", allowed=world.setup.connections_at_most)
    await world.fleet.close()
    world.after_workers()
    leaked += await _none(world, CONNECTED, "chaos_worker")
    progress("checking", seconds)
    verdict = await _check(world)
    async with world.admin() as connection:
        counted, begun = await balance.read(connection)
        if world.substrate:
            measured["relayed"] = await connection.fetchval(RELAYED, f"relay.{world.setup.broker}")
    result = Result(
        scenario.name,
        world.seed,
        seconds,
        verdict,
        _counted(world),
        _in_flight(world),
        drained.stuck,
        idle,
        leaked,
        measures.figures(world)
        | {name: round(value, 3) for name, value in {**measured, "overdue_s": drained.overdue}.items()},
        drained.problems,
        busy=busy,
        counted=asdict(counted),
    )
    # A delivery that was replayed has begun once more; a message that was handled has left no row.
    replays = int(measured.get("replays", 0))
    result.problems += balance.problems(counted, counted.begun if world.substrate else begun + replays)
    result.problems += _problems(result, world, scenario)
    return result


# --- the faults -------------------------------------------------------------------------------------------


async def _strike(world: World, scenario: Scenario, number: int, lane: Lane, end: float) -> None:
    """The nemeses of one lane, drawn by the seed or in order, until the time is over."""
    draw = world.rng(f"lane/{number}")
    turn = 0
    while True:
        await asyncio.sleep(draw.uniform(*scenario.pause))
        if time.monotonic() >= end or (scenario.once and turn == len(lane)):
            return
        nemesis = (lane[turn] if scenario.once else draw.choice(lane))()
        await _one_strike(world, nemesis, f"strike/{number}/{turn}")
        turn += 1


async def _one_strike(world: World, nemesis: Nemesis, purpose: str) -> None:
    strike = Strike(nemesis.name, time.monotonic())
    try:
        blow = await nemesis.strike(world, world.rng(purpose))
        strike.hit = blow.hit
        world.strikes.append(strike)
        details = {"rng": purpose, "promise": nemesis.promise, "hold": round(blow.hold, 2), **blow.details}
        world.note("strike", nemesis=nemesis.name, **details)
        await asyncio.sleep(blow.hold)
    except AWAY as error:
        world.note("missed", nemesis=nemesis.name, rng=purpose, error=f"{type(error).__name__}: {error}"[:200])
    finally:
        await _heal(world, nemesis)
        strike.until = time.monotonic()
        world.note("heal", nemesis=nemesis.name)


async def _heal(world: World, nemesis: Nemesis) -> None:
    for _ in range(50):
        try:
            return await nemesis.heal(world)
        except AWAY:
            await asyncio.sleep(0.2)
    await nemesis.heal(world)


def _in_flight(world: World) -> int:
    """What all the faults together can have taken from workers that were at it."""
    samples = world.observer.samples
    return (measures.messages_in_flight(world) if world.substrate else 0) + sum(
        in_flight(samples, strike.at, worker, strike.until)
        for strike in world.strikes
        for worker in ([None] if strike.hit is None else strike.hit)
    )


def _counted(world: World) -> dict[str, int]:
    names = [strike.nemesis for strike in world.strikes]
    return {name: names.count(name) for name in sorted(set(names))}


# --- the end ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Drained:
    """How the rest came out: what is wrong, and how long rows stayed in flight without a live lease (P8)."""

    problems: list[str] = field(default_factory=list)
    stuck: int = 0
    overdue: float = 0.0


async def _drain(world: World, progress: Progress, patience: float) -> Drained:
    """Wait until no event is owed any more."""
    found = Drained()
    poll, healed = world.setup.poll_interval, time.monotonic()
    turn = healed
    while left := await _owed(world):
        progress(f"draining, {left} open", 1e9)
        last, turn = turn, time.monotonic()
        if turn - last > STILL_SECONDS:
            world.note("still", seconds=round(turn - last, 1))
            healed = turn  # the machine itself stood still, and with it whoever has leases to extend
        since = time.monotonic() - healed
        if since > world.recovery:
            # Whoever was hit has had the time to come back: from here on nobody's lease may be over for long.
            async with world.admin() as connection:
                rows, most = await connection.fetchrow(OVERDUE, 2 * poll)
            found.stuck, found.overdue = max(found.stuck, rows), max(found.overdue, most)
        if since > patience * DRAIN_SECONDS:
            found.problems.append(f"{left} events were still open {since:.0f} s after the last fault")
            return found
        await asyncio.sleep(0.1)
    if left := await _none(world, CONNECTED, "chaos_producer", within=30.0):
        found.problems.append(f"{left} connections of producers did not end")
    return found


async def _owed(world: World) -> int:
    """How many deliveries are open, in the outbox or in the broker."""
    left = int(await world.ask(OPEN))
    return left or (int(await world.ask(CARRIED, world.setup.broker)) if world.substrate else 0)


async def _none(world: World, count: str, *arguments: object, within: float = QUIET_SECONDS, allowed: int = 0) -> int:
    """Wait until there are none any more, or no more than are allowed; returns how many are too many."""
    deadline = time.monotonic() + within
    while (left := int(await world.ask(count, *arguments)) - allowed) > 0 and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return max(left, 0)


async def _check(world: World) -> Verdict:
    async with world.admin() as connection:
        committed = {each["tx"] for each in await connection.fetch("SELECT tx FROM chaos.business")}
        effects = [tuple(each) for each in await connection.fetch(EFFECTS)]
        sql = "SELECT idempotency_key, handler_name, status, attempts, failure_reason FROM core.outbox"
        rows = [Row(*each) for each in await connection.fetch(sql)]
        places = {(handler, key): Place(*place) for handler, key, *place in await connection.fetch(PLACES)}
    runs = measures.deliveries(world)
    owed = OWED | crowd(world.setup.crowd)
    deliveries = [(each.handler, each.key, each.event) for each in runs]
    verdict = check(read(world.history.path, committed), effects, deliveries, rows, owed)
    verdict.in_order = len(places)
    verdict.inversions = inversions(places, effects, ((run.handler, run.key, run.began, run.ended) for run in runs))
    return verdict


def _refused(world: World, death: Death) -> bool:
    """Whether a worker ended because it was not let in, when it had just been started."""
    closed = [strike for strike in world.strikes if strike.nemesis == CloseLogins.name]
    return not death.worker and any(strike.at <= death.at <= strike.until + START_SECONDS for strike in closed)


def _problems(result: Result, world: World, scenario: Scenario) -> list[str]:
    verdict = result.verdict
    problems = [f"lost: {each}" for each in verdict.lost[:20]]
    problems += [f"unexpected: {each}" for each in verdict.unexpected[:20]]
    problems += [f"out of order: {each}" for each in verdict.inversions[:20]]
    times = () if result.busy else ("stuck_in_flight",)
    for name in (*times, "idle_in_transaction", "leaked_connections"):
        if count := getattr(result, name):
            problems.append(f"{name}: {count}")
    if verdict.effect_duplicates:
        problems.append(f"effects that happened twice: {verdict.effect_duplicates}")
    if world.unwatched is not None:
        problems.append(f"what was in flight is not known: the observer ended with {world.unwatched!r}")
    if verdict.delivery_duplicates > result.in_flight_at_kill:
        problems.append(
            f"{verdict.delivery_duplicates} deliveries happened twice, {result.in_flight_at_kill} were in flight"
        )
    for death in world.fleet.deaths:
        if not death.wanted and death.code not in EXPECTED_CODES and not _refused(world, death):
            problems.append(f"a worker ended by itself with status {death.code} (slot {death.slot})")
    for log in world.fleet.logs:
        for name in DEFECTS:
            problems += [f"{log.name}: {name} {each.get('error', '')}" for each in notices(log, name)]
    for figure, most in scenario.limits.items() if not result.busy else ():
        if figure not in result.figures:
            problems.append(f"{figure} could not be measured")
        elif result.figures[figure] > most:
            problems.append(f"{figure} is {result.figures[figure]:g}, and {most:g} is the limit")
    for figure, least in scenario.floors.items():
        if result.figures.get(figure, 0.0) < least:
            problems.append(f"{figure} is {result.figures.get(figure, 0.0):g}, and {least:g} is the least")
    for notice, text in scenario.says.items():
        if not any(text in str(each) for log in world.fleet.logs for each in notices(log, notice)):
            problems.append(f"no worker has said {notice} with {text!r}")
    if scenario.lanes and not any(name != "death" for name in result.strikes):
        problems.append("no fault has struck")
    return problems + world.complaints
