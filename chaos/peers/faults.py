"""What is done to all systems at the same time, what is counted, and how that is said in one cell of the table."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from chaos.peers.crew import WORKERS, Crew, unfinished
from chaos.peers.stage import Stage

EVENTS = 40
LIMIT = 75.0  # seconds that are waited for anything; a lease of 30 s and the longest poll of 30 s fit
FREEZE = 65.0  # likewise, before the frozen worker goes on
POISON_WINDOW = 120.0  # three leases, and what is between them
TERMINATIONS, EVERY = 5, 2.0
TRIALS = 3
SLOWEST = """
    SELECT max(extract(epoch FROM effect.at - business.at))::float8 FROM business
    JOIN (SELECT key, min(at) AS at FROM effects GROUP BY key) AS effect USING (key) WHERE key NOT LIKE 'hello%'
"""

Figures = dict[str, Any]  # what was seen of one system
Play = Callable[[Stage, Sequence[Crew]], Awaitable[list[Figures]]]


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    title: str
    play: Play
    tell: Callable[[Figures], str]


def each(one: Callable[[Crew], Awaitable[Figures]]) -> Play:
    """A fault that needs no more than the crew itself; all crews suffer it side by side."""

    async def play(stage: Stage, crews: Sequence[Crew]) -> list[Figures]:
        return list(await asyncio.gather(*map(one, crews)))

    return play


def outcome(crew: Crew) -> Figures:
    """Of every fault in which events are counted. What is missing now was given its time."""
    sight = crew.sight
    counts = {"events": len(sight.owed), "delivered": sight.delivered, "twice": sight.twice}
    return counts | {"failed": sight.failed, "exits": crew.exits}


@contextlib.asynccontextmanager
async def under_load(crew: Crew, rate: float, least: float, most: float) -> AsyncIterator[asyncio.Event]:
    """Events are published all the time, or until the event that it gives is set; handlers take so many seconds."""
    stop = asyncio.Event()
    load = asyncio.create_task(crew.load(rate, least, most, stop))
    try:
        yield stop
    finally:
        stop.set()
        await load


def rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 2)


# --- what is done -----------------------------------------------------------------------------------------


async def kill(crew: Crew) -> Figures:
    await crew.orders(EVENTS, 0.5, 1.5)
    victim = await crew.busiest()
    crew.kill(victim)
    await victim.wait()
    held = unfinished(crew.notes(), victim.pid)
    seconds = await crew.until(lambda sight: sight.done, LIMIT)
    return outcome(crew) | {"held": len(held), "seconds": rounded(seconds)}


async def kill_before_acknowledgement(crew: Crew) -> Figures:
    key = await crew.order("die", 0.5)
    struck = await crew.noted("begin", key, LIMIT)
    assert struck is not None, f"{crew.system.name} has not begun"
    await crew.until(lambda sight: crew.exits > 0 and key in sight.effects, 10)
    seconds = await crew.until(lambda sight: sight.done, LIMIT)
    runs = sum(note.key == key and note.what == "begin" for note in crew.notes())
    return outcome(crew) | {"effects": crew.sight.effects[key], "runs": runs, "seconds": rounded(seconds)}


async def end_listeners(crew: Crew) -> Figures:
    """Several times: it is a matter of luck whether somebody would have looked at that moment anyway."""
    waits = []
    for trial in range(TRIALS):
        await crew.listening(within=LIMIT)
        await asyncio.sleep(crew.rng.uniform(8, 12))  # until those who look less often the longer nothing comes do so
        if await crew.terminate(crew.system.listener) < WORKERS and not trial:
            raise RuntimeError(f"{crew.system.name}: its listeners were not found")
        waits.append(rounded(await probe(crew)))
    return {"waits": waits, "exits": crew.exits}


async def probe(crew: Crew) -> float | None:
    """Seconds from the commit of one event to the start of its handler."""
    key = await crew.order()
    committed = time.monotonic()
    begun = await crew.noted("begin", key, LIMIT)
    return None if begun is None else max(0.0, begun - committed)


async def end_all_backends(crew: Crew) -> Figures:
    ended = 0
    async with under_load(crew, 10, 0.1, 0.5):
        for _ in range(TERMINATIONS):
            await asyncio.sleep(EVERY)
            ended += await crew.terminate()
    seconds = await crew.until(lambda sight: sight.done, LIMIT)
    return outcome(crew) | {"ended": ended, "seconds": rounded(seconds)}


async def restart_postgres(stage: Stage, crews: Sequence[Crew]) -> list[Figures]:
    async with contextlib.AsyncExitStack() as loads:
        for crew in crews:
            await loads.enter_async_context(under_load(crew, 10, 0.1, 0.5))
        await asyncio.sleep(3)
        up = await stage.restart()
        await asyncio.sleep(5)

    async def follow(crew: Crew) -> Figures:
        seconds = await crew.until(lambda sight: sight.done, LIMIT)
        first = min((note.at for note in crew.notes() if note.what == "begin" and note.at >= up), default=None)
        last = None if seconds is None else time.monotonic()
        times = {"first": first, "seconds": last}
        return outcome(crew) | {name: None if at is None else rounded(at - up) for name, at in times.items()}

    return list(await asyncio.gather(*map(follow, crews)))


async def poison(crew: Crew) -> Figures:
    # Slow enough that there are others in a worker's hands when it dies.
    async with under_load(crew, 4, 1.0, 1.5) as stop:
        await asyncio.sleep(3)
        key = await crew.order("exit")
        # What is published last has time left to outlast a worker that is killed on it.
        asyncio.get_running_loop().call_later(POISON_WINDOW - LIMIT, stop.set)
        failed = await crew.until(lambda sight: sight.failed > 0, POISON_WINDOW)
    if failed is not None:
        await crew.until(lambda sight: not sight.open, POISON_WINDOW - failed)
    runs = sum(note.key == key and note.what == "begin" for note in crew.notes())
    others = outcome(crew)
    return others | {
        "events": others["events"] - 1,
        "runs": runs,
        "seconds": rounded(failed),
        "slowest": rounded(await crew.ask(SLOWEST)),
    }


async def freeze(crew: Crew) -> Figures:
    await crew.orders(EVENTS, 0.5, 1.5)
    victim = await crew.busiest()
    crew.freeze(victim)
    held = unfinished(crew.notes(), victim.pid)
    await asyncio.sleep(FREEZE)
    taken = len(held & set((await crew.look()).effects))
    crew.thaw(victim)
    # It may end or go on; both show within the time that its handlers still need.
    await asyncio.sleep(5)
    await crew.until(lambda sight: sight.done, LIMIT - FREEZE)
    return outcome(crew) | {"held": len(held), "taken": taken}


async def publish_null(crew: Crew) -> Figures:
    answer = await crew.hostile()
    whole = None
    if answer["error"] is None:
        await crew.noted("end", answer["key"], LIMIT)
        whole = any(note.what == "whole" and note.key == answer["key"] for note in crew.notes())
    return {"error": answer["error"], "usable": answer["usable"], "whole": whole}


# --- how it is said ---------------------------------------------------------------------------------------


def when(seconds: float | None) -> str:
    if seconds is None:
        return f"not in {LIMIT:g} s"
    return f"after {seconds:.1f} s" if seconds >= 0.95 else f"after {seconds:.2f} s"


def delivered(figures: Figures) -> str:
    text = f"{figures['delivered']} of {figures['events']} delivered"
    return text + (f", {figures['failed']} failed" if figures["failed"] else "")


def twice(figures: Figures) -> str:
    count = figures["twice"]
    return f"**{count} effects twice**" if count > 1 else "**1 effect twice**" if count else "none twice"


def alive(figures: Figures) -> str:
    exits = figures["exits"]
    return f"workers end {exits} times" if exits > 1 else "a worker ends once" if exits else "workers stay alive"


def tell_kill(figures: Figures) -> str:
    held = f"the last of the {figures['held']} in its hands {when(figures['seconds'])}"
    return f"{delivered(figures)}, {held}; {twice(figures)}"


def tell_acknowledgement(figures: Figures) -> str:
    effect = "one effect" if figures["effects"] == 1 else f"**{figures['effects']} effects**"
    runs = "run once" if figures["runs"] == 1 else f"run {figures['runs']} times"
    return f"{effect}, the handler was {runs}; settled {when(figures['seconds'])}"


def tell_listeners(figures: Figures) -> str:
    return f"{', '.join(map(when, figures['waits']))}; {alive(figures)}".replace(", after", ",")


def tell_backends(figures: Figures) -> str:
    return f"{alive(figures)}; {delivered(figures)}, the last {when(figures['seconds'])}; {twice(figures)}"


def tell_restart(figures: Figures) -> str:
    last = f"{delivered(figures)}, the last {when(figures['seconds'])}"
    return f"{alive(figures)}; first handler {when(figures['first'])}; {last}; {twice(figures)}"


def tell_poison(figures: Figures) -> str:
    fate = f"**{figures['runs']} runs in {POISON_WINDOW:g} s, and no end**"
    if figures["seconds"] is not None:
        fate = f"failed after {figures['runs']} runs and {figures['seconds']:.0f} s"
    return f"{fate}; others: {figures['delivered']} of {figures['events']}, the slowest {when(figures['slowest'])}"


def tell_freeze(figures: Figures) -> str:
    taken = f"{figures['taken']} of {figures['held']} taken over meanwhile"
    return f"{taken}; {delivered(figures)}; {twice(figures)}"


def tell_null(figures: Figures) -> str:
    if figures["error"] is None:
        return "accepted, and delivered whole" if figures["whole"] else "accepted, **not delivered whole**"
    state = "the transaction goes on" if figures["usable"] else "**the caller's transaction is lost**"
    return f"`{figures['error']}`; {state}"


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("kill", "SIGKILL of a worker in the middle of handlers", each(kill), tell_kill),
        Fault(
            "acknowledgement",
            "SIGKILL between the effect's commit and the acknowledgement",
            each(kill_before_acknowledgement),
            tell_acknowledgement,
        ),
        Fault(
            "listeners",
            "The listeners' backends are ended, three times: the next event",
            each(end_listeners),
            tell_listeners,
        ),
        Fault(
            "backends",
            "All backends of the workers are ended, every 2 s for 10 s",
            each(end_all_backends),
            tell_backends,
        ),
        Fault("restart", "Postgres crashes (immediate), and is back after 2 s", restart_postgres, tell_restart),
        Fault("poison", "A handler that ends its process each time", each(poison), tell_poison),
        Fault(
            "freeze",
            f"SIGSTOP of a worker for {FREEZE:g} s, longer than its lease, then SIGCONT",
            each(freeze),
            tell_freeze,
        ),
        Fault("null", "A payload with `\\0` in the caller's transaction", each(publish_null), tell_null),
    )
}
# Faults that leave workers as they were share them: eight starts of so many processes would be most of the time.
ACTS = (("kill", "acknowledgement", "freeze", "null", "listeners"), ("backends",), ("restart",), ("poison",))
