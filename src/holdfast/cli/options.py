"""Groups of options that commands share. `spread` replaces a parameter of such a type by its options."""

from __future__ import annotations

import asyncio
import inspect
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from holdfast.cli import environment, output, tracing
from holdfast.cli.databases import DatabaseOption
from holdfast.cli.environment import DsnOption, SchemaOption
from holdfast.cli.problems import REPORTED
from holdfast.errors import ConfigurationError
from holdfast.operator import Operator

T = TypeVar("T")

HandlerArgument = Annotated[str, typer.Argument(help="The handler's name.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ReasonOption = Annotated[str | None, typer.Option("--reason", metavar="TEXT", help="The reason, for the audit.")]
LimitOption = Annotated[int, typer.Option("--limit", help="How many to show at most.")]
PayloadOption = Annotated[
    bool, typer.Option("--payload", help="Include payload and headers, which may be personal data.")
]
GenerationOption = Annotated[
    int | None,
    typer.Option(
        "--generation", help="The generation whose workers handle it. Default: the newest that a living worker serves."
    ),
]
ForceOption = Annotated[
    bool,
    typer.Option("--force", help="Include events that are older than what the inbox remembers; they may run twice."),
]


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter whose type is a dataclass by the fields of it, which are options."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {}
    shown: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind):
            groups[parameter.name] = kind
            options = get_type_hints(kind, include_extras=True)
            shown += [
                inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=options[f.name])
                for f in fields(kind)
            ]
        else:
            shown.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=kind))

    @wraps(command)
    def run(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = kind(**{f.name: values.pop(f.name) for f in fields(kind)})
        command(**values)

    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    return run


@dataclass(frozen=True, slots=True)
class Where:
    """Options that name a database and a schema."""

    dsn: DsnOption = None
    database: DatabaseOption = None
    schema: SchemaOption = None

    @property
    def who(self) -> str:
        return environment.actor(None)

    @property
    def address(self) -> str:
        """The address of the one database that a command is for."""
        return environment.dsn(self.dsn, self.database)

    @property
    def several(self) -> dict[str, str]:
        """The addresses of the databases by name, if a command that reads all of them has several to read."""
        found = environment.addresses(self.dsn)
        return found if self.database is None and len(found) > 1 else {}

    def run(self, verb: Callable[[Operator], Awaitable[T]]) -> T:
        """Connect, run a verb, and return its result."""
        return asyncio.run(self._connected(self.address, verb))

    def run_in_each(self, verb: Callable[[Operator], Awaitable[T]]) -> dict[str, T | BaseException]:
        """Run a verb in each of several databases at once; return by name what it returns, or raises.

        A database that does not answer is in the way of nobody else.
        """
        addresses = self.several

        async def in_each() -> list[T | BaseException]:
            reading = [self._connected(address, verb) for address in addresses.values()]
            return await asyncio.gather(*reading, return_exceptions=True)

        found = dict(zip(addresses, asyncio.run(in_each()), strict=True))
        for result in found.values():
            if isinstance(result, BaseException) and not isinstance(result, REPORTED):
                raise result
        return found

    async def _connected(self, address: str, verb: Callable[[Operator], Awaitable[T]]) -> T:
        schema, traced = environment.schema(self.schema), tracing.configured()
        async with Operator(
            address, actor=self.who, schema=schema, on_wait=_say_on_terminal, tracing=traced
        ) as operator:
            return await verb(operator)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C end a question. asyncio would only cancel the task, which waits for the answer and not in the loop."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def ask(question: str) -> None:
    """Ask somebody at a terminal, broken at words where it is too narrow: a no, or Ctrl-C, ends the command with 1."""
    # The answer stands behind the last word, and not alone on a line.
    wrapped = output.wrapped(output.clean(f"{question}\N{NO-BREAK SPACE}[y/N]:"), output.error_width())
    *lines, last = (line.replace("\N{NO-BREAK SPACE}", " ") for line in wrapped)
    for line in lines:
        print(line, file=sys.stderr)
    with _interruptible():
        typer.confirm(last, abort=True, err=True, show_default=False, prompt_suffix=" ")


def _say_on_terminal(what: str) -> None:
    if sys.stderr.isatty():
        print("\n".join(output.wrapped(output.clean(what), output.error_width())), file=sys.stderr)


@dataclass(frozen=True, slots=True)
class Target(Where):
    """Options that name a database, a schema, and who changes something there."""

    actor: Annotated[
        str | None,
        typer.Option(
            "--actor", metavar="NAME", help="Your name in the audit. Default: HOLDFAST_ACTOR, else user@host."
        ),
    ] = None

    @property
    def who(self) -> str:
        return environment.actor(self.actor)


@dataclass(frozen=True, slots=True)
class Change:
    """Options of a command that changes something."""

    reason: ReasonOption = None
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would happen, and change nothing.")] = False
    as_json: JsonOption = False

    @property
    def asks(self) -> bool:
        """Whether somebody at a terminal will be asked."""
        return not (self.yes or self.dry_run) and sys.stdin.isatty()

    def confirm(self, question: str) -> None:
        """Ask for confirmation: a no ends the command with exit code 1, a missing terminal with 2."""
        if self.yes or self.dry_run:
            return
        if not sys.stdin.isatty():
            raise ConfigurationError("--yes", f"is needed without a terminal: {question}", "add --yes or --dry-run")
        ask(question)

    @property
    def would(self) -> str:
        return "would be " if self.dry_run else ""
