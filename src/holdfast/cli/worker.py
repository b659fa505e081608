"""holdfast worker: runs the handlers of an application, in one process or several."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from functools import partial
from typing import Annotated

import typer

from holdfast.cli import environment, logs, tracing, worker_sites
from holdfast.cli.environment import DsnOption, LogLevelOption, LogSuccesses, SchemaOption
from holdfast.cli.targets import load_redactor, load_registry
from holdfast.cli.worker_children import child_command, child_variables
from holdfast.cli.worker_databases import Databases
from holdfast.cli.worker_metrics import ProcessMetrics, pages_of_processes
from holdfast.cli.worker_sites import ProcessesHealth
from holdfast.errors import ConfigurationError
from holdfast.installing import extra_remedy
from holdfast.observability.logging import LogObserver, log_fact
from holdfast.observability.service_manager import ServiceManager
from holdfast.settings import WorkerSettings
from holdfast.telemetry import Notice, Observer
from holdfast.worker import process
from holdfast.worker.group import WorkerGroup
from holdfast.worker.supervisor import Supervisor, end_with_parent
from holdfast.worker.worker import Worker

_DEFAULT = WorkerSettings(generation=0)
_LIMIT_PAST_GRACE = 15.0


class DeadLetters(StrEnum):
    """What becomes of an event that failed for good."""

    IN_PLACE = "in_place"
    ARCHIVE = "archive"


def worker(
    target: Annotated[
        str,
        typer.Argument(metavar="MODULE:REGISTRY", help="Where the handlers are, like app.handlers:registry."),
    ],
    channel: Annotated[
        list[str] | None,
        typer.Option("--channel", help="Serve this channel; may be repeated. Default: the generation's own."),
    ] = None,
    concurrency: Annotated[str, typer.Option(metavar="N|auto", help="Events that each handler runs at once.")] = str(
        _DEFAULT.concurrency
    ),
    concurrency_at_most: Annotated[
        int, typer.Option("--concurrency-at-most", help="The most that --concurrency auto finds.")
    ] = _DEFAULT.concurrency_at_most,
    threads: Annotated[int, typer.Option(help="Threads for handlers that are not async.")] = _DEFAULT.threads,
    connections: Annotated[int, typer.Option(help="Connections for handlers that take tx.")] = _DEFAULT.connections,
    batch: Annotated[int, typer.Option(help="Rows per claim and lane.")] = _DEFAULT.batch,
    processes: Annotated[int, typer.Option(min=1, max=256, help="Worker processes, each with all of the above.")] = 1,
    lease: Annotated[float, typer.Option(help="Seconds until a dead worker's events come back.")] = _DEFAULT.lease,
    poll_interval: Annotated[
        float, typer.Option("--poll-interval", help="Seconds between polls when nothing wakes the worker.")
    ] = _DEFAULT.poll_interval,
    grace: Annotated[float, typer.Option(help="Seconds for running handlers after SIGTERM.")] = _DEFAULT.grace,
    settle_after: Annotated[
        float,
        typer.Option("--settle-after", help="Seconds a finished delivery waits for others to settle with."),
    ] = _DEFAULT.settle_after,
    loop_patience: Annotated[
        float,
        typer.Option(
            "--loop-patience", help="Seconds that handlers may block the event loop until the worker is not live."
        ),
    ] = _DEFAULT.loop_patience,
    no_listen: Annotated[bool, typer.Option("--no-listen", help="Only poll: no LISTEN connection.")] = False,
    dead_letters: Annotated[
        DeadLetters,
        typer.Option(
            "--dead-letters", help="Where events that failed for good go: they stay, or move to core.archive."
        ),
    ] = DeadLetters.IN_PLACE,
    no_sweep: Annotated[
        bool, typer.Option("--no-sweep", help="Leave retention's sweeps to the other workers.")
    ] = False,
    name: Annotated[str, typer.Option(help="Name shown to operators. Default: host and process id.")] = "",
    generation: Annotated[
        int | None, typer.Option(min=0, help="Deployment generation. Default: HOLDFAST_GENERATION, else 0.")
    ] = None,
    schema: SchemaOption = None,
    dsn: DsnOption = None,
    listen_dsn: Annotated[
        list[str] | None,
        typer.Option(
            "--listen-dsn",
            metavar="[NAME=]URL",
            help="A direct address for LISTEN, when the other one goes through a pooler. Default: HOLDFAST_LISTEN_DSN.",
        ),
    ] = None,
    substrate: Annotated[
        str | None,
        typer.Option(
            "--substrate",
            metavar="URL",
            help="A broker that carries the handlers' events, like nats://host:4222. Default: HOLDFAST_SUBSTRATE.",
        ),
    ] = None,
    redact: Annotated[
        str | None,
        typer.Option(
            "--redact",
            metavar="MODULE:FUNCTION",
            help="A function that is applied to every error text, besides the redaction of passwords, tokens and "
            "payloads; none turns all redaction off. Default: HOLDFAST_REDACT.",
        ),
    ] = None,
    transactions: Annotated[
        list[str] | None,
        typer.Option(
            "--transactions",
            metavar="[NAME=]MODULE:NAME",
            help="Where handlers get a tx of SQLAlchemy, psycopg or Django from: a session factory, an engine or a "
            "pool, like shop.db:Session; may be repeated. With several databases, after the name of one.",
        ),
    ] = None,
    health: Annotated[
        str | None,
        typer.Option(
            "--health",
            metavar="[HOST:]PORT",
            help="Serve /health/live and /health/ready over HTTP. Without a host only this machine can ask. "
            "Default: HOLDFAST_HEALTH.",
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            metavar="NAME",
            help="With --health or --metrics: answer requests for this host too; may be repeated. "
            "Without it: for addresses, localhost and this machine's name.",
        ),
    ] = None,
    log_level: LogLevelOption = None,
    log_successes: Annotated[
        LogSuccesses | None,
        typer.Option(
            "--log-successes",
            case_sensitive=False,
            help="The level of a line for each event that was handled. "
            "Default: HOLDFAST_LOG_SUCCESSES, else debug with --log-level debug, else never.",
        ),
    ] = None,
    log_sample: Annotated[
        float | None,
        typer.Option(
            "--log-sample",
            min=0,
            max=1,
            help="The share of those lines that is written, by the ids of the events; failures and retries always are. "
            "Default: HOLDFAST_LOG_SAMPLE, else 1.",
        ),
    ] = None,
    service: Annotated[
        str | None, typer.Option(help="Your application's name, in every line of the log. Default: HOLDFAST_SERVICE.")
    ] = None,
    deployment: Annotated[
        str | None,
        typer.Option(
            "--environment", help="Where it runs, like production, in every line. Default: HOLDFAST_ENVIRONMENT."
        ),
    ] = None,
    service_version: Annotated[
        str | None,
        typer.Option("--service-version", help="Its version, in every line. Default: HOLDFAST_SERVICE_VERSION."),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            "--metrics",
            metavar="[HOST:]PORT",
            help="Serve what each handler did at /metrics, for Prometheus; of all processes together. "
            "Without a host only this machine can read it. Default: HOLDFAST_METRICS.",
        ),
    ] = None,
    lifeline: Annotated[int | None, typer.Option("--lifeline", hidden=True)] = None,
    reports: Annotated[bool, typer.Option("--reports", hidden=True)] = False,
    socket: Annotated[str | None, typer.Option("--socket", hidden=True)] = None,
) -> None:
    """Deliver events to the handlers of an application, until SIGTERM."""
    level = environment.log_level(log_level)
    settings = WorkerSettings(
        schema=environment.schema(schema),
        generation=environment.generation(generation),
        channels=tuple(channel or ()),
        name=name,
        concurrency=environment.concurrency(concurrency),
        concurrency_at_most=concurrency_at_most,
        threads=threads,
        connections=connections,
        batch=batch,
        lease=lease,
        poll_interval=poll_interval,
        grace=grace,
        loop_patience=loop_patience,
        settle_after=settle_after,
        listen=not no_listen,
        dead_letters=dead_letters.value,
        sweep=not no_sweep,
        substrate=environment.substrate(substrate),
        relay_secrets=environment.relay_secrets(),
    )
    observer = partial(
        LogObserver,
        service=environment.service(service),
        environment=environment.deployment_environment(deployment),
        version=environment.service_version(service_version),
        worker=settings.shown_name,
        successes=environment.log_successes(log_successes, level).value,
        sample=environment.log_sample(log_sample),
    )
    log = observer()
    if log_sample is not None and log.successes == "never":
        print("note: --log-sample has no effect without --log-successes", file=sys.stderr)
    health_at, metrics_at = environment.health(health), environment.metrics(metrics)
    databases = Databases.of(environment.addresses(dsn), environment.listen_addresses(listen_dsn), transactions or ())
    databases.require_one_for(settings.substrate)
    registry = load_registry(target)
    redactor_name = environment.redactor(redact)
    redactor = load_redactor(redactor_name)
    manager = worker_sites.service_manager()
    logs.configure(level=level, bound={**log.application, **log.process})
    left: list[str] = []
    child = [target, *(word for name in transactions or () for word in ("--transactions", name))]
    killed = 0
    try:
        with _sentry(environment.sentry_dsn(), log.application) as sentry:
            if processes == 1:
                traced = tracing.configured(note=True)
                worker = databases.worker(
                    registry,
                    settings,
                    lambda database: (observer(database=database), *sentry(database)),
                    redact=redactor,
                    tracing=traced,
                )
                measured = ProcessMetrics(worker)
                sites = worker_sites.sites(
                    health_at, metrics_at, allow_host or (), worker.health, measured.pages, databases.names
                )
                with (
                    worker_sites.serving(sites, worker.health, socket or worker_sites.own_socket(log), log),
                    measured.reported(lifeline if reports else None),
                ):
                    left = process.run_worker(_work(worker, settings, lifeline, manager))
            else:
                # Each child reports its own dead letters; what is refused is found here, before any child is started.
                databases.worker(registry, settings, lambda _: ())
                children = worker_sites.ProcessesHealth(settings, processes, log)
                options = ["--reports"] if metrics_at is not None else []
                supervisor = Supervisor(
                    lambda n, fd: [*child_command(child, settings, n, fd), *children.option(n), *options],
                    processes,
                    log,
                    environment=child_variables(databases, settings, redactor_name, level, log),
                    name=settings.shown_name,
                    when_stopping=children.draining,
                    patience=settings.grace + _LIMIT_PAST_GRACE,
                )
                pages = partial(pages_of_processes, supervisor.reports)
                sites = worker_sites.sites(
                    health_at, metrics_at, allow_host or (), children.read, pages, databases.names
                )
                with worker_sites.serving(sites, children.read, children.socket, log):
                    asyncio.run(_supervise(supervisor, databases, settings, children, manager))
                killed = supervisor.killed
    finally:
        logs.flush()
    if killed:
        raise typer.Exit(1)
    _leave(left)


@contextlib.contextmanager
def _sentry(dsn: str | None, application: Mapping[str, str]) -> Iterator[Callable[[str | None], tuple[Observer, ...]]]:
    """The observer of a database that reports to Sentry, if SENTRY_DSN is set and the extra is installed."""
    if dsn is None:
        yield lambda _: ()
    elif importlib.util.find_spec("sentry_sdk") is None:
        print(f"note: SENTRY_DSN is set and not used; {extra_remedy('sentry')}", file=sys.stderr)
        yield lambda _: ()
    else:
        from holdfast.integrations.sentry import SentryObserver

        try:
            sentry = SentryObserver(
                dsn,
                environment=environment.sentry_environment(application.get("environment")),
                release=environment.sentry_release(application.get("version")),
            )
        except ConfigurationError as error:
            raise ConfigurationError("SENTRY_DSN", error.problem, error.remedy) from None
        with sentry:
            yield lambda database: (sentry.of(database),)


async def _work(
    worker: Worker | WorkerGroup, settings: WorkerSettings, lifeline: int | None, manager: ServiceManager | None
) -> None:
    if lifeline is None:
        async with worker_sites.told(manager, worker.health):
            await worker.run(signals=True)
        return
    # Under a supervisor only that decides when patience is over: service managers signal parent and child alike, and
    # the second signal to a child must not cut its handlers short.
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.stop)
    patience = settings.grace + _LIMIT_PAST_GRACE
    end_with_parent(lifeline, lambda: _call_soon(loop, worker), patience)
    await worker.run()


def _call_soon(loop: asyncio.AbstractEventLoop, worker: Worker | WorkerGroup) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: the worker has stopped already
        loop.call_soon_threadsafe(worker.stop)


async def _supervise(
    supervisor: Supervisor,
    databases: Databases,
    settings: WorkerSettings,
    children: ProcessesHealth,
    manager: ServiceManager | None,
) -> None:
    # Said once here, instead of by every child.
    await databases.refuse_unready(settings)
    watching = asyncio.create_task(children.watch())
    async with worker_sites.told(manager, children.read):
        try:
            await supervisor.run()
        finally:
            watching.cancel()


def _leave(tasks: list[str]) -> None:
    """End although handlers have left threads or tasks that cannot be ended; they are named in the log."""
    deadline = time.monotonic() + 0.5
    threads = [each for each in threading.enumerate() if each is not threading.current_thread() and not each.daemon]
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    alive = sorted(thread.name for thread in threads if thread.is_alive())
    if alive or tasks:
        remedy = "end what a handler starts before it returns; the process ends without waiting for it"
        log_fact(Notice("warning", "left_behind", {"threads": alive, "tasks": tasks, "remedy": remedy}))
        logs.flush()
        sys.stdout.flush()
        os._exit(0)
