"""The demo's processes: the API, the worker and the console, as children that end when the demo does."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).resolve().parents[2]
# Short, so that what a killed worker held comes back while one looks on. The defaults suit production.
LEASE = 3.0
POLL_INTERVAL = 1.0
_CONSOLE_PORT = 8424


class Child:
    """One process that can be started again."""

    def __init__(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str], keep_open: Sequence[int]
    ) -> None:
        self.log = log
        self._command = command
        self._environment = environment
        self._keep_open = keep_open
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self.running else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=self._keep_open,
                process_group=0,  # Ctrl-C is for the demo, which then stops its children
            )

    def kill(self) -> None:
        """As the out-of-memory killer would: no goodbye."""
        if self._process is not None and self.running:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    async def stop(self) -> None:
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        for _ in range(100):
            if process.poll() is not None:
                return
            await asyncio.sleep(0.05)
        self.kill()

    def tail(self, lines: int = 12) -> str:
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""


class Stage:
    """A directory for logs and sent confirmations, the API on a free loopback port, the worker and the console.

    Without somebody who looks at it there need be no console.
    """

    def __init__(self, dsn: str, substrate: str | None = None, *, with_console: bool = False) -> None:
        self._dsn = dsn
        self._substrate = substrate
        self._with_console = with_console

    @property
    def broker(self) -> str:
        """The name of what carries the events, if a broker does."""
        return (self._substrate or "").partition(":")[0]

    async def __aenter__(self) -> Self:
        self.directory = Path(tempfile.mkdtemp(prefix="orders-demo-"))
        self.sent = self.directory / "sent.txt"
        environment = {**os.environ, "HOLDFAST_DSN": self._dsn, "ORDERS_SENT": str(self.sent)}
        self._reading, self._writing = os.pipe()
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen(128)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/orders"
        listening, lifeline = self._socket.fileno(), self._reading
        serve = [sys.executable, "-m", "examples.orders.api", str(listening), str(lifeline)]
        work = [*_holdfast(), "worker", "examples.orders.handlers:registry", "--lease", f"{LEASE:g}"]
        work += ["--transactions", "examples.orders.database:Session"]
        work += ["--poll-interval", f"{POLL_INTERVAL:g}", "--grace", "5", "--lifeline", str(lifeline)]
        work += ["--substrate", self._substrate] if self._substrate else []
        as_api, as_worker = ({**environment, "OTEL_SERVICE_NAME": name} for name in ("orders-api", "orders-worker"))
        self.api = Child(serve, self.directory / "api.log", as_api, (listening, lifeline))
        self.worker = Child(work, self.directory / "worker.log", as_worker, (lifeline,))
        port = _free_port(_CONSOLE_PORT)
        show = [*_holdfast(), "console", "--listen", f"127.0.0.1:{port}", "--environment", "demo"]
        show += ["--lifeline", str(lifeline)]
        self.console = Child(show, self.directory / "console.log", environment, (lifeline,))
        self.console_url = f"http://127.0.0.1:{port}" if self._with_console else ""
        self.api.start()
        self.worker.start()
        if self._with_console:
            self.console.start()
        return self

    async def __aexit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        # Shielded: a second Ctrl-C must not leave half of this undone.
        await asyncio.shield(asyncio.gather(self.worker.stop(), self.api.stop(), self.console.stop()))
        self.worker.kill()
        self.api.kill()
        self.console.kill()
        self._socket.close()
        os.close(self._writing)
        os.close(self._reading)
        shutil.rmtree(self.directory, ignore_errors=True)


def _free_port(wanted: int) -> int:
    """The wanted port, so that a browser's page is found again after a restart; another one where it is taken."""
    for port in (wanted, 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    return wanted


def _holdfast() -> list[str]:
    script = shutil.which("holdfast", path=str(Path(sys.executable).parent))
    return [script] if script else [sys.executable, "-c", "from holdfast.cli import main; main()"]
