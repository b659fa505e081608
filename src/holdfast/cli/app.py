"""The command tree: one file per group, put together here."""

from __future__ import annotations

import functools
import sys
import traceback
from importlib.metadata import version as package_version
from typing import Annotated, Any

import typer

from holdfast.cli import (
    archive,
    audit,
    doctor,
    events,
    failed,
    generations,
    handlers,
    metrics,
    migrate,
    notify,
    plans,
    retention,
    schedules,
    status,
    uninstall,
    worker,
    workers,
)
from holdfast.cli.problems import REPORTED, report
from holdfast.operator.installation import code_version
from holdfast.redact import redact_dsn

app = typer.Typer(
    name="holdfast",
    help="A transactional outbox for Postgres.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(migrate.app, name="migrate")
app.command("worker")(worker.worker)
app.command("status")(status.status)
app.command("metrics")(metrics.metrics)
app.command("doctor")(doctor.doctor)
app.add_typer(events.app, name="events")
app.add_typer(failed.app, name="failed")
app.add_typer(plans.app, name="plans")
app.add_typer(handlers.app, name="handlers")
app.add_typer(workers.app, name="workers")
app.add_typer(generations.app, name="generations")
app.add_typer(schedules.app, name="schedules")
app.command("audit")(audit.audit)
app.command("notify")(notify.notify)
app.add_typer(archive.app, name="archive")
app.add_typer(retention.app, name="retention")
app.command("uninstall")(uninstall.uninstall)


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error. May stand anywhere.")] = False,
) -> None:
    """A transactional outbox for Postgres."""


@app.command()
def version() -> None:
    """Print the version of the package and of the schema it needs."""
    typer.echo(f"holdfast {package_version('holdfast')} (schema version {code_version()})")


@functools.cache
def command_tree() -> Any:
    """Return the commands as typer runs them. Making them takes longer than most commands."""
    return typer.main.get_command(app)


def run(arguments: list[str]) -> int:
    """Run a command; an error becomes two lines and an exit code."""
    # People add --debug at the end, after the command; typer would accept it only before.
    debug = "--debug" in arguments
    try:
        # typer turns usage errors and typer.Exit into SystemExit; what a command raises passes through.
        command_tree()(args=[argument for argument in arguments if argument != "--debug"], prog_name="holdfast")
    except SystemExit as end:
        return _code(end.code)
    except REPORTED as error:
        if debug:
            print(redact_dsn(traceback.format_exc()), file=sys.stderr)
        return report(error)
    return 0


def _code(code: Any) -> int:
    return code if isinstance(code, int) else 0 if code is None else 1
