"""Two workers of one system, started again when they end, its producer, and what is seen of them from outside."""

import asyncio
import contextlib
import ctypes
import itertools
import json
import random
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg

from benchmarks.environments import clean_environment
from chaos.peers.story import CONCURRENCY, Payload
from chaos.peers.systems import System
from chaos.workers import ROOT

WORKERS = 2
RESTART_AFTER = 1.0  # as a service manager would
LOOK = 0.2
_READY = 60.0
# Events that only tell that a worker is there; everything else that is counted leaves them out.
OWED = "SELECT key FROM business WHERE key NOT LIKE 'hello%'"
EFFECTS = "SELECT key FROM effects WHERE key NOT LIKE 'hello%'"
_BACKENDS = "FROM pg_stat_activity WHERE datname = current_database() AND usename = 'chaos_worker' AND "
LISTENING = f"SELECT count(*) {_BACKENDS}"  # and which of them
TERMINATE = f"SELECT count(pg_terminate_backend(pid)) {_BACKENDS}"
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Sight:
    """What is in the database. An event is owed when the business row of its transaction is there."""

    owed: frozenset[str] = frozenset()
    effects: Counter[str] = field(default_factory=Counter)
    open: int = 0
    failed: int = 0

    @property
    def delivered(self) -> int:
        return len(self.owed & set(self.effects))

    @property
    def missing(self) -> int:
        return len(self.owed - set(self.effects))

    @property
    def twice(self) -> int:
        return sum(self.effects.values()) - len(self.effects)

    @property
    def done(self) -> bool:
        """Every effect is there, and the system itself sees nothing left to do."""
        return not self.missing and not self.open


@dataclass(frozen=True, slots=True)
class Note:
    what: str
    key: str
    at: float
    pid: int


def unfinished(notes: Iterable[Note], pid: int) -> set[str]:
    """The handlers that a process is in the middle of, by their events."""
    found: Counter[str] = Counter()
    for each in notes:
        if each.pid == pid and each.what in ("begin", "end"):
            found[each.key] += 1 if each.what == "begin" else -1
    return {key for key, count in found.items() if count > 0}


class Crew:
    def __init__(self, system: System, dsns: dict[str, str], directory: Path) -> None:
        self.system = system
        self.rng = random.Random()
        self.exits = 0  # workers that ended, and nobody had killed them
        self.sight = Sight()
        self._dsns = dsns
        self._notes = directory / "notes"
        self._notes.mkdir(parents=True)
        self._directory = directory
        self._workers: dict[int, Process] = {}
        self._condemned: set[int] = set()
        self._keepers: list[asyncio.Task[None]] = []
        self._closing = False
        self._producer: Process | None = None
        self._publishing = asyncio.Lock()
        self._observer: asyncpg.Connection | None = None

    # --- their life ---

    async def open(self) -> None:
        command = [self.system.python, "-m", self.system.program, "produce"]
        self._producer = await self._spawn(command, "producer", stdin=PIPE, stdout=PIPE)
        self._keepers = [asyncio.create_task(self._keep(slot)) for slot in range(WORKERS)]

    async def ready(self, rng: random.Random) -> bool:
        """Forget what was, and see both workers at work. False when something is left that will never be done."""
        if await self.until(lambda sight: not sight.open, 5) is None:
            return False
        for log in self._notes.glob("*.log"):
            log.unlink()
        await self.ask("TRUNCATE business, effects")
        deadline = time.monotonic() + _READY
        while not len(self.running) == WORKERS == len(self._at_work()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.system.name}: no two workers within {_READY:g} s; see {self._directory}")
            some = [self._payload("order", 0.2, f"hello-{n}-{time.monotonic():.4f}") for n in range(2 * CONCURRENCY)]
            await self.publish(some)
            await self.until(lambda sight: not sight.open, 15)
        self.rng = rng
        self.exits = 0
        return True

    def _at_work(self) -> set[int]:
        return {each.pid for each in self.notes()} & {each.pid for each in self.running}

    async def close(self) -> None:
        self._closing = True
        for worker in self.running:
            self.kill(worker)
            self.thaw(worker)
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        if self._producer is not None:
            _signal(self._producer, signal.SIGKILL)
            await self._producer.wait()
        self._blind()

    async def _keep(self, slot: int) -> None:
        for count in range(1, 10_000):
            worker = self._workers[slot] = await self._spawn(self.system.command(), f"worker-{slot}-{count}")
            try:
                await worker.wait()
            except asyncio.CancelledError:
                _signal(worker, signal.SIGKILL)
                await worker.wait()
                raise
            self.exits += worker.pid not in self._condemned
            await asyncio.sleep(RESTART_AFTER)

    async def _spawn(
        self, command: Sequence[str], name: str, stdin: int = DEVNULL, stdout: int | None = None
    ) -> Process:
        role = "producer" if name == "producer" else "worker"
        environment = clean_environment() | {"CHAOS_DSN": self._dsns[role], "CHAOS_NOTES": str(self._notes)}
        environment["HOLDFAST_DSN"] = self._dsns[role]
        with (self._directory / f"{name}.log").open("wb") as log:
            return await asyncio.create_subprocess_exec(
                *command,
                cwd=ROOT,
                env=environment,
                stdin=stdin,
                stdout=log if stdout is None else stdout,
                stderr=log,
                process_group=0,  # a Ctrl-C is for us alone
                preexec_fn=_die_with_parent,
            )

    # --- what is done to them ---

    @property
    def running(self) -> list[Process]:
        return [each for each in self._workers.values() if each.returncode is None]

    def kill(self, worker: Process) -> None:
        self._condemned.add(worker.pid)
        _signal(worker, signal.SIGKILL)

    def freeze(self, worker: Process) -> None:
        _signal(worker, signal.SIGSTOP)

    def thaw(self, worker: Process) -> None:
        _signal(worker, signal.SIGCONT)

    async def terminate(self, which: str = "true") -> int:
        """End backends of the workers; returns how many."""
        return int(await self.ask(TERMINATE + which))

    async def listening(self, within: float) -> None:
        """Wait until every worker listens, or for so many seconds."""
        deadline = time.monotonic() + within
        while await self.ask(LISTENING + self.system.listener) < WORKERS and time.monotonic() < deadline:
            await asyncio.sleep(LOOK)

    async def busiest(self, least: int = CONCURRENCY // 2, within: float = 30.0) -> Process:
        """The worker that is in the middle of the most handlers, as soon as these are enough to be worth it."""
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            notes = self.notes()
            worker = max(self.running, key=lambda each: len(unfinished(notes, each.pid)), default=None)
            if worker is not None and len(unfinished(notes, worker.pid)) >= least:
                return worker
            await asyncio.sleep(0.02)
        raise TimeoutError(f"{self.system.name}: no worker was in the middle of {least} handlers within {within:g} s")

    # --- what they are given ---

    async def orders(self, count: int, least: float, most: float) -> None:
        """So many events in one transaction, each with a business row; their handlers take seconds between the two."""
        await self.publish([self._payload("order", self.rng.uniform(least, most)) for _ in range(count)])

    async def order(self, kind: str = "order", seconds: float = 0.0) -> str:
        payload = self._payload(kind, seconds)
        await self.publish([payload])
        return str(payload["key"])

    async def load(self, rate: float, least: float, most: float, stop: asyncio.Event) -> None:
        """One transaction after the other. One that fails is not owed, and is not tried again."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        for number in itertools.count():
            await asyncio.sleep(max(0.0, began + number / rate - loop.time()))
            if stop.is_set():
                return
            await self.publish([self._payload("order", self.rng.uniform(least, most))], may_fail=True)

    async def publish(self, payloads: Sequence[Payload], *, may_fail: bool = False) -> None:
        answer = await self._tell({"publish": list(payloads)})
        if answer["error"] and not may_fail:
            raise RuntimeError(f"{self.system.name}: publishing failed: {answer['error']}; see {self._directory}")

    async def hostile(self) -> dict[str, Any]:
        """Publish a null character; the answer says which error that was, and whether the transaction survived it."""
        payload = self._payload("order", 0.0)
        return await self._tell({"hostile": payload}) | {"key": payload["key"]}

    def _payload(self, kind: str, seconds: float, key: str = "") -> Payload:
        return {"key": key or f"{self.rng.getrandbits(64):016x}", "kind": kind, "seconds": round(seconds, 3)}

    async def _tell(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._producer is not None and self._producer.stdin is not None and self._producer.stdout is not None
        async with self._publishing:
            self._producer.stdin.write(json.dumps(command).encode() + b"\n")
            await self._producer.stdin.drain()
            line = await self._producer.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.system.name}: the producer has ended; see {self._directory}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    # --- what is seen of them ---

    def notes(self) -> list[Note]:
        found = []
        for log in self._notes.glob("*.log"):
            for line in log.read_text().splitlines():
                what, key, at = line.split()
                found.append(Note(what, key, float(at), int(log.stem)))
        return sorted(found, key=lambda each: each.at)

    async def look(self) -> Sight:
        """What there is now, or what was there when the database last answered."""
        with contextlib.suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            async with asyncio.timeout(5):
                observer = await self._observe()
                # The open ones first: what is done by then has left its effect.
                open_ = await observer.fetchval(self.system.open)
                owed = frozenset(each["key"] for each in await observer.fetch(OWED))
                effects = Counter(each["key"] for each in await observer.fetch(EFFECTS))
                failed = await observer.fetchval(self.system.failed)
                self.sight = Sight(owed, effects, open_, failed)
                return self.sight
        self._blind()
        return self.sight

    async def until(self, condition: Callable[[Sight], bool], within: float) -> float | None:
        """How many seconds it took until it was so; None when it was not in time."""
        began = time.monotonic()
        while not condition(await self.look()):
            if time.monotonic() - began > within:
                return None
            await asyncio.sleep(LOOK)
        return time.monotonic() - began

    async def noted(self, what: str, key: str, within: float) -> float | None:
        """When something was noted first, on the monotonic clock; None when it was not in time."""
        deadline = time.monotonic() + within
        while True:
            found = [each.at for each in self.notes() if each.key == key and each.what == what]
            if found or time.monotonic() > deadline:
                return min(found, default=None)
            await asyncio.sleep(0.02)

    async def ask(self, sql: str) -> Any:
        return await (await self._observe()).fetchval(sql)

    async def _observe(self) -> asyncpg.Connection:
        if self._observer is None or self._observer.is_closed():
            self._observer = await asyncpg.connect(self._dsns["admin"], timeout=5)
        return self._observer

    def _blind(self) -> None:
        if self._observer is not None:
            self._observer.terminate()
            self._observer = None


def _signal(process: Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


def _die_with_parent() -> None:
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
