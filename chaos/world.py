"""What a run takes place in: Postgres, the lines to it, the workers, the producers, and what they leave behind."""

import asyncio
import contextlib
import json
import os
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import asyncpg

from chaos.events import crowd
from chaos.history import History
from chaos.network import Line
from chaos.observer import Observer
from chaos.producers import AsyncpgProducer, Batch, Importer, Prober, Producer, PsycopgProducer, SqlalchemyProducer
from chaos.releases import Releases
from chaos.workers import Death, Fleet, WorkerProcess
from holdfast import NewEvent, WorkerSettings
from holdfast.embedded import EmbeddedPostgres
from holdfast.postgres import migrate

Progress = Callable[[str, float], None]  # what is going on, and for how many seconds

DATABASE = "chaos"
DEFAULTS = WorkerSettings()
RECOVERY_SECONDS = 20.0
SCHEMA = """
    CREATE SCHEMA chaos;
    CREATE TABLE chaos.business (tx bigint NOT NULL);
    CREATE TABLE chaos.effects (
        handler text NOT NULL, key text NOT NULL, at timestamptz DEFAULT clock_timestamp(),
        number bigint GENERATED ALWAYS AS IDENTITY  -- their order, whatever becomes of the clock
    );
    CREATE INDEX ON chaos.effects (handler, key);
    GRANT USAGE ON SCHEMA chaos TO chaos_worker, chaos_producer;
    GRANT INSERT, SELECT ON chaos.effects TO chaos_worker;
    GRANT INSERT ON chaos.business TO chaos_producer;
"""


TERMINATE = """
    SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
    WHERE usename IN ('chaos_worker', 'chaos_producer') AND application_name LIKE $1
"""


MOVED = "SELECT bool_and(via <> 'outbox') FROM core.subscriptions WHERE retired_at IS NULL"
_MOVE_TURNS = 600
_MOST_LATE = 3


def numbers(seed: int, purpose: object) -> random.Random:
    return random.Random(f"{seed}/{purpose}")


@dataclass(frozen=True, slots=True)
class Setup:
    """Times are seconds. Short ones, so that a short run sees many recoveries."""

    workers: int = 3
    lease: float = 3.0
    poll_interval: float = 1.0
    grace: float = 2.0
    connections: int = 5
    batch: int = DEFAULTS.batch
    concurrency: int | Literal["auto"] = DEFAULTS.concurrency
    crowd: int = 0  # handlers of patterns beside the ordinary ones, and ten times as many of one event type
    rate: float = 300.0  # events per second, of all producers
    imports: float = 0.0  # likewise, of the one that publishes hundreds at a time
    probes: float = 0.0  # likewise, of the one that measures
    server: dict[str, str] = field(default_factory=dict)
    application: str = "chaos.app:registry"
    library: str = ""  # of the handlers' transactions; empty: asyncpg
    broker: str = ""  # what carries the events; empty: Postgres alone

    @property
    def connections_at_most(self) -> int:
        """Of all workers together: their own and those of their handlers."""
        substrate = f"{self.broker}://" if self.broker else None
        return self.workers * WorkerSettings(connections=self.connections, substrate=substrate).connections_needed(2)

    @property
    def options(self) -> list[str]:
        """Of `holdfast worker`."""
        options: dict[str, object] = {
            "--lease": self.lease,
            "--poll-interval": self.poll_interval,
            "--grace": self.grace,
            "--connections": self.connections,
            "--batch": self.batch,
            "--concurrency": self.concurrency,
        }
        if self.library:
            options["--transactions"] = "chaos.libraries:transactions"
        return [str(word) for option in options.items() for word in option]


@dataclass(slots=True)
class Strike:
    """One fault. It can have taken the leases of the workers it hit, or of all, or of none."""

    nemesis: str
    at: float
    until: float = 0.0
    hit: list[str] | None = None


class World:
    def __init__(self, directory: Path, seed: int, setup: Setup) -> None:
        self.directory = directory
        self.seed = seed
        self.setup = setup
        # The server's data and the deliveries are written by other users than root.
        directory.chmod(0o755)
        self.deliveries = directory / "deliveries"
        self.deliveries.mkdir()
        self.history = History(directory / "producers.jsonl")
        self.server = EmbeddedPostgres(directory / "postgres", settings=setup.server)
        self.fleet = Fleet(directory, setup.workers)
        self.fleet.on_death = self._died
        self.releases = Releases(directory / "next")
        self.fleet.environment = self.releases.environment
        self.strikes: list[Strike] = []
        self.outages: list[tuple[float, float]] = []  # from when to when the server was down, or refused workers
        self.recovery = setup.lease + setup.poll_interval  # after the faults whoever was hit is back by then
        self.complaints: list[str] = []  # what must not happen and is not a matter of counting
        self.worker_address: Callable[[], str] = lambda: self.address(
            "chaos_worker", self.worker_line.port, self.worker_host
        )
        self.producer_address: Callable[[], str] = lambda: self.address("chaos_producer", self.producer_line.port)
        self.worker_host = "127.0.0.1"
        self.worker_target: int | None = None  # what the workers' line leads to, if not to the server itself
        self.producer_target: int | None = None
        self.after_workers: Callable[[], None] = lambda: None  # ends what holds connections on their behalf
        self.around: Any = None  # what a surrounding leaves here for its nemesis
        self.substrate = ""  # the address of the broker that carries the events, if one does
        self.admin_port: int | None = None  # where the server is, once another one has taken over
        self.worker_line: Line
        self.producer_line: Line
        self.observer: Observer
        self.password = secrets.token_hex(8)  # of workers and producers
        self._log = (directory / "strikes.jsonl").open("a", buffering=1)
        self._producers: list[Producer] = []
        self._producing: list[asyncio.Task[None]] = []
        self._watching: asyncio.Task[None] | None = None

    # --- the log ---

    def note(self, what: str, **details: object) -> None:
        """One line of the run's log: what was done to whom, and when."""
        line = {"at": round(time.monotonic(), 3), "what": what, **details}
        self._log.write(json.dumps(line, default=str) + "\n")

    def rng(self, purpose: object) -> random.Random:
        """Numbers of their own for each purpose, so that none of them moves when another one draws more."""
        return numbers(self.seed, purpose)

    # --- addresses ---

    def address(self, role: str, port: int, host: str = "127.0.0.1") -> str:
        # Without sslmode drivers knock twice, and attempts to connect could not be counted.
        return f"postgresql://{role}:{self.password}@{host}:{port}/{DATABASE}?sslmode=disable"

    @property
    def admin_address(self) -> str:
        address = self.server.database_dsn(DATABASE)
        return address.replace(f":{self.server.port}/", f":{self.admin_port}/") if self.admin_port else address

    @contextlib.asynccontextmanager
    async def admin(self) -> AsyncIterator[asyncpg.Connection]:
        """A superuser's connection, past all lines."""
        connection = await self._connect()
        try:
            yield connection
        finally:
            connection.terminate()

    async def _connect(self) -> asyncpg.Connection:
        """Connect; a server that is just recovering is waited for: libfaketime makes one crash now and then."""
        deadline = time.monotonic() + RECOVERY_SECONDS
        late = 0
        while True:
            try:
                return await asyncpg.connect(
                    self.admin_address, timeout=10, server_settings={"application_name": "chaos"}
                )
            except asyncpg.CannotConnectNowError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.1)
            except TimeoutError:
                # As when the machine itself has stood still.
                late += 1
                if late == _MOST_LATE:
                    raise

    async def ask(self, sql: str, *arguments: object) -> Any:
        async with self.admin() as connection:
            return await connection.fetchval(sql, *arguments)

    # --- its life ---

    async def build(self) -> None:
        """The server and an empty outbox; nobody is connected yet."""
        await asyncio.to_thread(self.server.start)
        await asyncio.to_thread(self.server.create_database, DATABASE)
        await migrate.apply(self.admin_address)
        async with self.admin() as connection:
            for role, member in (("chaos_worker", "holdfast_worker"), ("chaos_producer", "holdfast_producer")):
                await connection.execute(f"CREATE ROLE {role} LOGIN PASSWORD '{self.password}' IN ROLE {member}")
            await connection.execute("GRANT holdfast_producer TO chaos_worker")  # its handlers publish
            await connection.execute(SCHEMA)

    async def open(self) -> None:
        """The lines to the server."""
        self.worker_line = await Line("127.0.0.1", self.worker_target or self.server.port).open(self.worker_host)
        self.producer_line = await Line("127.0.0.1", self.producer_target or self.server.port).open()

    async def populate(self) -> None:
        environment = {
            "HOLDFAST_DSN": self.worker_address(),
            "CHAOS_LIBRARY": self.setup.library,
            "CHAOS_DELIVERIES": str(self.deliveries),
            "CHAOS_LEASE": str(self.setup.lease),
            "CHAOS_CROWD": str(self.setup.crowd),
        }
        substrate = ["--substrate", self.substrate] if self.substrate else []
        self.fleet.start(self.setup.application, [*self.setup.options, *substrate], environment)
        await self.fleet.ready()
        if self.substrate:
            await self._moved()
        self.observer = Observer(self.admin_address)
        self._watching = asyncio.create_task(self.observer.run())

    async def _moved(self) -> None:
        """Wait until the broker carries what the handlers are owed."""
        for _ in range(_MOVE_TURNS):
            if await self.ask(MOVED):
                return
            await asyncio.sleep(0.1)
        raise TimeoutError("the handlers did not move to the broker")

    @property
    def unwatched(self) -> BaseException | None:
        """What ended the observer before the run was over, if anything did."""
        watching = self._watching
        return watching.exception() if watching is not None and watching.done() else None

    def produce(self) -> None:
        kinds: list[type[Producer]] = [AsyncpgProducer, AsyncpgProducer, AsyncpgProducer]
        kinds += [PsycopgProducer, SqlalchemyProducer]
        if self.setup.rate:
            for number, kind in enumerate(kinds):
                rng, rate = self.rng(f"producer/{number}"), self.setup.rate / len(kinds)
                self._producers.append(kind(self.producer_address(), self.history, rng, rate))
        if self.setup.imports:
            rng = self.rng("importer")
            self._producers.append(Importer(self.producer_address(), self.history, rng, self.setup.imports))
        if self.setup.probes:
            prober = Prober(self.producer_address(), self.history, self.rng("prober"), self.setup.probes)
            prober.event_types = sorted(crowd(self.setup.crowd)) or prober.event_types
            self._producers.append(prober)
        self._producing = [asyncio.create_task(each.run()) for each in self._producers]

    async def trouble(self, events: Sequence[NewEvent], refused: dict[str, Any] | None = None) -> None:
        """Publish events that are faults themselves. Like any other publication they may fail or stay unknown."""
        producer = AsyncpgProducer(self.producer_address(), self.history, self.rng("trouble"), 1)
        connection = await producer.publish(None, Batch(list(events), [], False, 0, True, refused))
        self.complaints += producer.complaints
        if connection is not None:
            connection.terminate()

    # --- its server ---

    async def terminate(self, purpose: str = "%") -> int:
        """End the connections of workers and producers, or those of one purpose; returns how many."""
        return int(await self.ask(TERMINATE, purpose))

    def outage_begins(self) -> None:
        self.outages.append((time.monotonic(), float("inf")))

    def outage_ends(self) -> None:
        began, _ = self.outages.pop()
        self.outages.append((began, time.monotonic()))

    async def start_server(self) -> None:
        """After an outage; a running server is left alone."""
        if self.server.running:
            return
        await asyncio.to_thread(self.server.start)
        self.outage_ends()

    def server_processes(self) -> list[int]:
        data = str((self.server.data_dir / "cluster").resolve())
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(entry / "cwd") == data:
                    found.append(int(entry.name))
        return found

    async def rest(self) -> None:
        """No more publications."""
        for producer in self._producers:
            producer.stopping.set()
        if self._producing:
            await asyncio.wait(self._producing, timeout=30)

    async def close(self) -> None:
        await self.fleet.abandon()
        tasks = [*self._producing, *([self._watching] if self._watching else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for line in (getattr(self, "worker_line", None), getattr(self, "producer_line", None)):
            if line is not None:
                await line.close()
        await asyncio.to_thread(self.server.stop, "immediate")
        self.history.close()
        self._log.close()

    # --- its deaths ---

    def _died(self, worker: WorkerProcess, death: Death) -> None:
        self.note("death", slot=death.slot, code=death.code, wanted=death.wanted, worker=death.worker)
        if not death.wanted:
            self.strikes.append(Strike("death", death.at, death.at, [death.worker]))
