"""Worker processes: the real `holdfast worker` command, started again whenever one dies."""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMAND = Path(sys.executable).with_name("holdfast")
_RESTART_AFTER = 0.3
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True, slots=True)
class Death:
    """A worker that ended, and whether somebody had asked for it."""

    at: float
    slot: int
    worker: str
    code: int
    wanted: bool


@dataclass(frozen=True, slots=True)
class Stop:
    """How long a worker took to end after SIGTERM, and what it was doing."""

    seconds: float
    code: int
    condition: str


class LogPipe:
    """What a worker writes, copied to its log as long as somebody reads."""

    def __init__(self, log: Path) -> None:
        self._reading, self.writing = os.pipe()
        os.set_blocking(self._reading, False)
        self._log = log.open("wb", buffering=0)
        self.release()

    def hold(self) -> None:
        """Read no more: the pipe fills."""
        asyncio.get_running_loop().remove_reader(self._reading)
        self.held = True

    def release(self) -> None:
        self.held = False
        if not self._log.closed:
            asyncio.get_running_loop().add_reader(self._reading, self.copy)

    def copy(self) -> None:
        """Everything that is there. At its end the pipe is closed."""
        with contextlib.suppress(BlockingIOError):
            while not self._log.closed:
                data = os.read(self._reading, 65536)
                self._log.write(data)
                if not data:
                    asyncio.get_running_loop().remove_reader(self._reading)
                    os.close(self._reading)
                    self._log.close()


class WorkerProcess:
    def __init__(
        self, slot: int, process: asyncio.subprocess.Process, log: Path, pipe: LogPipe, environment: Mapping[str, str]
    ) -> None:
        self.slot = slot
        self.process = process
        self.log = log
        self.pipe = pipe
        self.environment = environment  # what it has of its own
        self.frozen = False
        self.condemned = False  # we have sent it a deadly signal
        self._id = ""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    @property
    def id(self) -> str:
        """As rows name it in claimed_by; empty until it has started."""
        if not self._id:
            started = notices(self.log, "worker_started")
            self._id = started[0]["worker_id"] if started else ""
        return self._id

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)


class Fleet:
    """`size` workers. One that dies is started again, as a service manager would."""

    def __init__(self, directory: Path, size: int) -> None:
        self.size = size
        self.deaths: list[Death] = []
        self.stops: list[Stop] = []
        self.started: list[WorkerProcess] = []
        self.on_death: Callable[[WorkerProcess, Death], None] = lambda _worker, _death: None
        self.prefix: Callable[[int], Sequence[str]] = lambda _slot: ()
        self.environment: Callable[[int], Mapping[str, str]] = lambda _slot: {}
        self._directory = directory
        self._workers: dict[int, WorkerProcess] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._closing = False

    def start(self, application: str, options: Sequence[str], environment: Mapping[str, str]) -> None:
        arguments = [application, *options]
        self._keepers = [
            asyncio.create_task(self._keep(slot, arguments, dict(environment))) for slot in range(self.size)
        ]

    async def ready(self, within: float = 30.0) -> None:
        # Turns, and not a clock: a machine that stands still for a while is no fault of the workers.
        for _ in range(int(within / 0.05)):
            if len([worker for worker in self.running if worker.id]) >= self.size:
                return
            await asyncio.sleep(0.05)
        raise TimeoutError("the workers have not started")

    @property
    def running(self) -> list[WorkerProcess]:
        return [worker for _, worker in sorted(self._workers.items()) if worker.alive]

    @property
    def logs(self) -> list[Path]:
        return sorted(self._directory.glob("worker-*.log"))

    def kill(self, worker: WorkerProcess) -> None:
        worker.condemned = True
        worker.signal(signal.SIGKILL)

    def freeze(self, worker: WorkerProcess) -> None:
        worker.frozen = True
        worker.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        for worker in self.running:
            if worker.frozen:
                worker.frozen = False
                worker.signal(signal.SIGCONT)

    def read_logs(self) -> None:
        """Those that nobody has read for a while, too."""
        for worker in self.started:
            if worker.pipe.held:
                worker.pipe.release()
            worker.pipe.copy()

    async def stop(self, worker: WorkerProcess, condition: str, *, patience: float = 30.0, twice: bool = False) -> Stop:
        """SIGTERM, and wait. One that does not end in time is killed, and counts with the time it was given."""
        worker.condemned = True
        began = time.monotonic()
        worker.signal(signal.SIGTERM)
        if twice:
            await asyncio.sleep(0.1)  # two that are pending together would become one
            worker.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(patience):
                await worker.process.wait()
        except TimeoutError:
            worker.signal(signal.SIGKILL)
            await worker.process.wait()
        stop = Stop(time.monotonic() - began, worker.process.returncode or 0, condition)
        self.stops.append(stop)
        return stop

    async def close(self, condition: str = "idle") -> None:
        """Stop all of them, for good."""
        self._closing = True
        self.thaw()
        await asyncio.gather(*(self.stop(worker, condition) for worker in self.running))
        await self.abandon()

    async def abandon(self) -> None:
        """End whatever runs, at once."""
        self._closing = True
        for worker in self.running:
            self.kill(worker)
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self.read_logs()

    async def _keep(self, slot: int, arguments: list[str], environment: dict[str, str]) -> None:
        while not self._closing:
            worker = await self._spawn(slot, arguments, environment)
            try:
                code = await worker.process.wait()
            except asyncio.CancelledError:
                self.kill(worker)
                await worker.process.wait()
                raise
            if not worker.pipe.held:
                worker.pipe.copy()  # its name may be among the last that it has written
            death = Death(time.monotonic(), slot, worker.id, code, worker.condemned)
            self.deaths.append(death)
            self.on_death(worker, death)
            await asyncio.sleep(_RESTART_AFTER)

    async def _spawn(self, slot: int, arguments: list[str], environment: dict[str, str]) -> WorkerProcess:
        log = self._directory / f"worker-{slot}-{len(self.started) + 1}.log"
        pipe, own = LogPipe(log), self.environment(slot)
        try:
            process = await asyncio.create_subprocess_exec(
                *self.prefix(slot),
                str(COMMAND),
                "worker",
                *arguments,
                cwd=ROOT,
                env={**os.environ, **environment, **own},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=pipe.writing,
                stderr=pipe.writing,
                process_group=0,  # a Ctrl-C is for us alone
                preexec_fn=_die_with_parent,
            )
        finally:
            os.close(pipe.writing)
        worker = self._workers[slot] = WorkerProcess(slot, process, log, pipe, own)
        self.started.append(worker)
        return worker


def notices(log: Path, name: str) -> list[dict[str, str]]:
    """The entries of one kind in a worker's log."""
    found = []
    for line in log.read_bytes().splitlines():
        if name.encode() in line:
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if entry.get("event") == name:
                    found.append(entry)
    return found


def _die_with_parent() -> None:
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
