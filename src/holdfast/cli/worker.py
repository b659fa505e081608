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
from collections.abc import Iterator, Sequence
from enum import StrEnum
from types import ModuleType
from typing import Annotated

import typer

from holdfast.cli import environment, logs
from holdfast.cli.environment import DsnOption, LogLevel, LogLevelOption, SchemaOption
from holdfast.errors import ConfigurationError
from holdfast.failure import Redactor
from holdfast.handlers import HandlerRegistry
from holdfast.installing import extra_remedy
from holdfast.observability.logging import log_fact
from holdfast.redact import unredacted
from holdfast.settings import WorkerSettings
from holdfast.telemetry import Notice, Observer
from holdfast.worker import process
from holdfast.worker.readiness import refuse_unready
from holdfast.worker.supervisor import Supervisor, end_with_parent
from holdfast.worker.worker import Worker

_DEFAULT = WorkerSettings(generation=0)
_LIMIT_PAST_GRACE = 15.0


class DeadLetters(StrEnum):
    """What becomes of an event that failed for good."""

    IN_PLACE = "in_place"
    ARCHIVE = "archive"


class LogHandled(StrEnum):
    """Whether each event that was handled is a line of the log, and of which level."""

    NEVER = "never"
    DEBUG = "debug"
    INFO = "info"


def worker(
    target: Annotated[
        str,
        typer.Argument(metavar="MODULE:REGISTRY", help="Where the handlers are, like app.handlers:registry."),
    ],
    channel: Annotated[
        list[str] | None,
        typer.Option("--channel", help="Serve this channel; may be repeated. Default: the generation's own."),
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Events that each handler runs at once.")] = _DEFAULT.concurrency,
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
        str | None,
        typer.Option(
            "--listen-dsn",
            metavar="URL",
            help="A direct address for LISTEN, when the other one goes through a pooler. Default: HOLDFAST_LISTEN_DSN.",
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
    log_level: LogLevelOption = None,
    log_handled: Annotated[
        LogHandled | None,
        typer.Option(
            "--log-handled",
            help="The level of a line for each event that was handled. "
            "Default: debug with --log-level debug, else never.",
        ),
    ] = None,
    lifeline: Annotated[int | None, typer.Option("--lifeline", hidden=True)] = None,
) -> None:
    """Deliver events to the handlers of an application, until SIGTERM."""
    level = environment.log_level(log_level)
    handled = log_handled or (LogHandled.DEBUG if level is LogLevel.DEBUG else LogHandled.NEVER)
    settings = WorkerSettings(
        schema=environment.schema(schema),
        generation=environment.generation(generation),
        channels=tuple(channel or ()),
        name=name,
        concurrency=concurrency,
        threads=threads,
        connections=connections,
        batch=batch,
        lease=lease,
        poll_interval=poll_interval,
        grace=grace,
        settle_after=settle_after,
        listen=not no_listen,
        listen_dsn=environment.listen_dsn(listen_dsn),
        dead_letters=dead_letters.value,
        log_handled=handled.value,
        sweep=not no_sweep,
    )
    address = environment.dsn(dsn)
    registry = load_registry(target)
    redactor_name = environment.redactor(redact)
    redactor = load_redactor(redactor_name)
    logs.configure(level=level)
    left: list[str] = []
    try:
        with _sentry(environment.sentry_dsn()) as observers:
            if processes == 1:
                worker = Worker(address, registry, settings, observers=(log_fact, *observers), redact=redactor)
                left = process.run_worker(_work(worker, lifeline))
            else:
                # Each child reports its own dead letters; a bad address is found here, before any child is started.
                asyncio.run(_supervise(target, address, settings, processes, redactor_name, level))
    finally:
        logs.flush()
    _leave(left)


@contextlib.contextmanager
def _sentry(dsn: str | None) -> Iterator[tuple[Observer, ...]]:
    """The observer that reports to Sentry, if SENTRY_DSN is set and the extra is installed."""
    if dsn is None:
        yield ()
    elif importlib.util.find_spec("sentry_sdk") is None:
        print(f"note: SENTRY_DSN is set and not used; {extra_remedy('sentry')}", file=sys.stderr)
        yield ()
    else:
        from holdfast.integrations.sentry import SentryObserver

        try:
            sentry = SentryObserver(dsn)
        except ConfigurationError as error:
            raise ConfigurationError("SENTRY_DSN", error.problem, error.remedy) from None
        with sentry:
            yield (sentry,)


def load_registry(target: str) -> HandlerRegistry:
    """Import `module:attribute`, looking in the current directory first."""
    module, attribute = _imported(target, "a registry", "MODULE:REGISTRY, like app.handlers:registry")
    if not hasattr(module, attribute):
        found = [name for name, value in vars(module).items() if isinstance(value, HandlerRegistry)]
        remedy = f"did you mean {module.__name__}:{found[0]}?" if found else "make one: registry = HandlerRegistry()"
        raise ConfigurationError(module.__name__, f"has no attribute {attribute}", remedy)
    registry = getattr(module, attribute)
    if not isinstance(registry, HandlerRegistry):
        problem = f"is {type(registry).__name__}, not a HandlerRegistry"
        raise ConfigurationError(target, problem, "name the registry that your handlers are registered with")
    return registry


def load_redactor(target: str | None) -> Redactor | None:
    """Import the function that is applied to error texts; `none` is the one that turns redaction off."""
    if not target:
        return None
    if target == "none":
        return unredacted
    module, attribute = _imported(target, "a function", "MODULE:FUNCTION, like app.privacy:redact, or none")
    found = getattr(module, attribute, None)
    if not callable(found):
        problem = "is not a function" if hasattr(module, attribute) else "does not exist"
        raise ConfigurationError(target, problem, "name a function that takes a text and returns one")
    redactor: Redactor = found
    return redactor


def _imported(target: str, what: str, form: str) -> tuple[ModuleType, str]:
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise ConfigurationError(target, f"does not name {what}", f"write {form}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module_name), attribute
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            remedy = "run this in the directory that holds it, or correct the name"
            raise ConfigurationError(
                module_name, f"cannot be imported: no module named {error.name}", remedy
            ) from error
        raise _broken(module_name, error) from error
    except (Exception, SystemExit) as error:
        raise _broken(module_name, error) from error


def _broken(module: str, error: BaseException) -> ConfigurationError:
    problem = f"failed while it was imported: {type(error).__name__}: {error}"
    return ConfigurationError(module, problem, "correct it; --debug shows where it happened")


async def _work(worker: Worker, lifeline: int | None) -> None:
    if lifeline is None:
        await worker.run(signals=True)
        return
    # Under a supervisor only that decides when patience is over: service managers signal parent and child alike, and
    # the second signal to a child must not cut its handlers short.
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.stop)
    patience = worker.settings.grace + _LIMIT_PAST_GRACE
    end_with_parent(lifeline, lambda: _call_soon(loop, worker), patience)
    await worker.run()


def _call_soon(loop: asyncio.AbstractEventLoop, worker: Worker) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: the worker has stopped already
        loop.call_soon_threadsafe(worker.stop)


async def _supervise(
    target: str, address: str, settings: WorkerSettings, processes: int, redactor_name: str | None, level: LogLevel
) -> None:
    # Said once here, instead of by every child.
    await refuse_unready(address, settings)
    # Addresses hold passwords and travel in the environment, where the process list does not show them.
    variables = {**os.environ, "HOLDFAST_DSN": address, "HOLDFAST_LOG_LEVEL": level}
    if settings.listen_dsn:
        variables["HOLDFAST_LISTEN_DSN"] = settings.listen_dsn
    if redactor_name:
        variables["HOLDFAST_REDACT"] = redactor_name

    def command(number: int, lifeline: int) -> Sequence[str]:
        return child_command(target, settings, number, lifeline)

    await Supervisor(command, processes, log_fact, environment=variables).run()


def child_command(target: str, settings: WorkerSettings, number: int, lifeline: int) -> list[str]:
    """The command of one process under the supervisor."""
    options: dict[str, object] = {
        "--concurrency": settings.concurrency,
        "--threads": settings.threads,
        "--connections": settings.connections,
        "--batch": settings.batch,
        "--lease": settings.lease,
        "--poll-interval": settings.poll_interval,
        "--grace": settings.grace,
        "--settle-after": settings.settle_after,
        "--generation": settings.generation,
        "--schema": settings.schema,
        "--dead-letters": settings.dead_letters,
        "--log-handled": settings.log_handled,
        "--lifeline": lifeline,
    }
    if settings.name:
        options["--name"] = f"{settings.name}/{number}"
    # -P: the directory we stand in must not come before the installed packages.
    command = [sys.executable, "-P", "-c", "from holdfast.cli import main; main()", "worker", target]
    command += [word for option, value in options.items() for word in (option, str(value))]
    command += [word for channel in settings.channels for word in ("--channel", channel)]
    return command + ["--no-listen"] * (not settings.listen) + ["--no-sweep"] * (not settings.sweep)


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
