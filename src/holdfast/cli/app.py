"""The command tree: one module per command or group, which is imported when it is used."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import traceback
from collections.abc import Collection, Iterator
from functools import cache
from importlib import import_module
from keyword import iskeyword
from typing import Annotated, Any, Final

import typer

from holdfast.cli.command_group import CommandGroup, without_types
from holdfast.cli.next_commands import address_place, program, remember

# The commands with their help: their modules hold the same texts, and need not be imported to show them.
COMMANDS: Final = {
    "migrate": "Bring the database to the schema this version needs.",
    "worker": "Deliver events to the handlers of an application, until SIGTERM.",
    "worker status": "Say how the worker on this machine is, without the database: exits with 0 if it is live, else "
    "with 1.",
    "status": "Show what is pending, in flight, delayed and failed, what handlers did lately, and the workers.",
    "metrics": "Print the state of the outbox in the text format of Prometheus, or serve it.",
    "console": "Serve the web console.",
    "console password": "Ask for a password and print the line for the password file; without a terminal it is read "
    "from the input.",
    "console token": "Print a new token to stderr, once, and the line for the token file to stdout.",
    "mcp": "Serve the verbs of operators as tools for assistants, by standard input and output or by HTTP.",
    "doctor": "Check the schema for drift and the installation for what blocks delivery.",
    "events": "Events: list them, find one, show one, cancel one or many.",
    "failed": "Dead letters: list, replay, discard or correct them.",
    "plans": "Replay plans: replay many events, starting with a canary.",
    "handlers": "Handlers: their subscriptions, their limits, and the workers that serve them.",
    "keys": "Ordering keys that a dead letter blocks.",
    "workers": "Workers: which run, and what they serve.",
    "generations": "Generations of the deployment.",
    "schedules": "Schedules: events that are published at fixed times.",
    "requests": "Requests with an idempotency key: was it used, and how did it end?",
    "audit": "List the actions of operators, the latest first.",
    "notify": "Show or set the wake-up mode: when publishing wakes the workers, for all users of the schema.",
    "archive": "Dead letters in the archive.",
    "partitions": "Partitions of the outbox by time.",
    "relay": "Brokers: who gets events from them, what they have lost, and sending it again.",
    "import": "Publish what waits in another library, and take it from there.",
    "schema": "Schemas of events: an AsyncAPI document, and a check that releases only add.",
    "retention": "How long rows are kept, and what is left of them.",
    "uninstall": "Remove Holdfast from the database, with every event it holds.",
}


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


def options(
    _version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error. May stand anywhere.")] = False,
) -> None:
    """A transactional outbox for Postgres."""


def version() -> None:
    """Print the version of the package and of the schema it needs."""
    from holdfast.installing import package_version
    from holdfast.operator.release import code_version

    typer.echo(f"holdfast {package_version()} (schema version {code_version()})")


def make_app(used: Collection[str] = COMMANDS.keys()) -> typer.Typer:
    """Return the application, with the modules of the commands that are used; the others have a name and a help."""
    app = typer.Typer(
        name="holdfast",
        help="A transactional outbox for Postgres.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        cls=CommandGroup,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(options)
    for name, help in COMMANDS.items():
        if name not in used:
            app.command(name, help=help)(_unused)
            continue
        module_name = f"{name}_" if iskeyword(name) else name.replace(" ", "_")
        module = import_module(f"holdfast.cli.{module_name}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name)
        else:
            app.command(name)(getattr(module, module_name))
    app.command()(version)
    return app


def _unused() -> None:
    """The place of a command that was not named on the command line."""


@cache
def command_tree(*used: str) -> Any:
    """Return the commands as typer runs them. Making them takes longer than most commands."""
    return without_types(typer.main.get_command(make_app(used)))


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Import modules without the garbage collector, which finds nothing there and takes a sixth of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.freeze()
            gc.enable()


def run(arguments: list[str]) -> int:
    """Run a command; an error becomes two lines and an exit code."""
    if arguments in (["version"], ["--version"]):  # typer takes longer to parse this than to do it
        version()
        return 0
    # People add --debug at the end, after the command; typer would accept it only before.
    debug = "--debug" in arguments
    words = [argument for argument in arguments if argument != "--debug"]
    if " ".join(words[:2]) in COMMANDS:  # `worker status`: no registry, that would be module:name
        words[:2] = [" ".join(words[:2])]
    where = remember(words)
    named = next((word for word in words if not word.startswith("-")), "")
    # A shell that completes a line passes it in the environment.
    used = COMMANDS if "_HOLDFAST_COMPLETE" in os.environ else [named] if named in COMMANDS else []
    try:
        with _uncollected():
            command = command_tree(*used)
        # typer turns usage errors and typer.Exit into SystemExit; what a command raises passes through.
        command(args=words, prog_name=program())
    except SystemExit as end:
        return _code(end.code)
    except Exception as error:
        from holdfast.cli.problems import REPORTED, report
        from holdfast.redact import redact_dsn

        if not isinstance(error, REPORTED):
            raise
        if debug:
            print(redact_dsn(traceback.format_exc()), file=sys.stderr)
        given = any(word.partition("=")[0] == "--dsn" for word in words)
        return report(error, "--dsn" if given else address_place(), where.get("--database"))
    return 0


def _code(code: Any) -> int:
    return code if isinstance(code, int) else 0 if code is None else 1
