"""The systems: what is run, at which settings, and where each keeps what is not done yet."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.environments import clean_environment, interpreter
from chaos.peers.story import ATTEMPTS, CONCURRENCY, POISON_ATTEMPTS
from chaos.workers import COMMAND, ROOT
from holdfast.installing import package_version

PROGRAMS = "chaos.peers.programs"
_VERSION = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"


@dataclass(frozen=True, slots=True)
class System:
    """SQL is asked in the system's own database. `listener` picks backends of its workers out of pg_stat_activity."""

    name: str
    settings: str
    effect: str
    worker: Sequence[str]  # its command; without a path it is an argument of the system's Python
    listener: str
    open: str  # events that are neither done nor failed
    failed: str
    peer: bool = True

    @property
    def python(self) -> str:
        """Of its environment, which is made if it is missing; raises EnvironmentFailed."""
        return interpreter(self.name) if self.peer else sys.executable

    @property
    def program(self) -> str:
        return f"{PROGRAMS}.{self.name.replace('-', '_')}"

    def command(self) -> list[str]:
        return [self.python, *self.worker] if self.peer else [str(COMMAND), *self.worker]

    def version(self) -> str:
        if not self.peer:
            return package_version()
        command = [self.python, "-c", _VERSION, self.name]
        return subprocess.run(
            command, cwd=ROOT, env=clean_environment(), check=True, capture_output=True, text=True
        ).stdout.strip()


HOLDFAST = System(
    "holdfast",
    settings=f"lease 30 s, renewed; poll 5 s; LISTEN (all defaults). {ATTEMPTS} attempts, poison {POISON_ATTEMPTS}",
    effect="in the transaction that settles the event",
    worker=(
        *("worker", f"{PROGRAMS}.holdfast:registry"),
        *("--concurrency", str(CONCURRENCY), "--connections", str(CONCURRENCY)),
    ),
    listener="application_name LIKE 'holdfast listen%'",
    open="SELECT count(*) FROM core.outbox WHERE settled_at IS NULL",
    failed="SELECT count(*) FROM core.outbox WHERE status = 'failed'",
    peer=False,
)
PROCRASTINATE = System(
    "procrastinate",
    settings="heartbeat 10 s, stalled after 30 s, poll 5 s, LISTEN (defaults); the documented `retry_stalled_jobs`, "
    f"every 10 s instead of every 10 minutes; `RetryStrategy` of {ATTEMPTS}, poison {POISON_ATTEMPTS}",
    effect="in its own transaction",
    worker=(
        *("-m", "procrastinate", f"--app={PROGRAMS}.procrastinate.app", "worker"),
        *("--concurrency", str(CONCURRENCY)),
    ),
    listener="query ~* '^(LISTEN |SELECT 1$)'",  # it asks on that connection whether it is still there
    open="SELECT count(*) FROM procrastinate_jobs WHERE task_name ~ '^(order|poison)$' AND status IN ('todo', 'doing')",
    failed="SELECT count(*) FROM procrastinate_jobs WHERE task_name ~ '^(order|poison)$' AND status = 'failed'",
)
PGQUEUER = System(
    "pgqueuer",
    settings="`heartbeat_timeout` 30 s, `dequeue_timeout` 30 s, LISTEN (defaults); `shutdown_on_listener_failure`, "
    "one connection for the manager (deployment and tuning guides); "
    f'`DatabaseRetryEntrypointExecutor` of {ATTEMPTS}, poison {POISON_ATTEMPTS}; `on_failure="hold"`',
    effect="in its own transaction",
    worker=("-m", f"{PROGRAMS}.pgqueuer", "work"),
    # Its one connection; the others are the handlers'.
    listener="application_name <> 'effects'",
    open="SELECT count(*) FROM pgqueuer WHERE status <> 'failed'",
    failed="SELECT count(*) FROM pgqueuer WHERE status = 'failed'",
)
FASTSTREAM_OUTBOX = System(
    "faststream-outbox",
    settings="fetch interval 1 to 10 s, LISTEN (defaults); `lease_ttl_seconds` 30 (documented for quick handlers; "
    f"60 is the default); `dlq_table`, `max_deliveries` {ATTEMPTS}, poison {POISON_ATTEMPTS} (production checklist)",
    effect="in its own transaction",
    worker=("-m", f"{PROGRAMS}.faststream_outbox", "work"),
    listener="query ~* '^(LISTEN |SELECT 1$)'",
    open="SELECT count(*) FROM outbox",
    failed="SELECT count(*) FROM outbox_dlq",
)
SYSTEMS = {each.name: each for each in (HOLDFAST, PROCRASTINATE, PGQUEUER, FASTSTREAM_OUTBOX)}
