"""Groups of options that commands share. A parameter of a group's type stands for all of them (`spread`)."""

from __future__ import annotations

import asyncio
import inspect
import re
import sys
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime, timedelta
from functools import wraps
from itertools import islice
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from holdfast.cli import environment
from holdfast.cli.environment import DsnOption, SchemaOption
from holdfast.errors import ConfigurationError
from holdfast.operator import Operator, Selection
from holdfast.operator.arguments import MOST_AT_ONCE

T = TypeVar("T")

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ReasonOption = Annotated[str | None, typer.Option("--reason", metavar="TEXT", help="Why, for the audit.")]
LimitOption = Annotated[int, typer.Option("--limit", help="How many at most.")]
PayloadOption = Annotated[bool, typer.Option("--payload", help="With payload and headers, which may be personal data.")]
GenerationOption = Annotated[
    int | None,
    typer.Option("--generation", help="Whose workers handle it. Default: the newest that a living worker serves."),
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Also events that are older than what the inbox remembers; they may run twice.")
]
IdsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="ID", help="Ids of failed rows, or of events.", show_default=False)
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
    """A database and a schema."""

    dsn: DsnOption = None
    schema: SchemaOption = None

    @property
    def who(self) -> str:
        return environment.actor(None)

    def run(self, verb: Callable[[Operator], Awaitable[T]]) -> T:
        """What a verb answers."""

        async def connected() -> T:
            where = environment.dsn(self.dsn)
            async with Operator(where, actor=self.who, schema=environment.schema(self.schema)) as operator:
                return await verb(operator)

        return asyncio.run(connected())


@dataclass(frozen=True, slots=True)
class Target(Where):
    """The same, and in whose name something is changed there."""

    actor: Annotated[
        str | None,
        typer.Option("--actor", metavar="NAME", help="Who you are. Default: HOLDFAST_ACTOR, else user@host."),
    ] = None

    @property
    def who(self) -> str:
        return environment.actor(self.actor)


@dataclass(frozen=True, slots=True)
class Change:
    """How something is changed."""

    reason: ReasonOption = None
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would happen, and change nothing.")] = False
    as_json: JsonOption = False

    def confirm(self, question: str) -> None:
        """Go on, or leave with exit code 1; where nobody can be asked, with 2."""
        if self.yes or self.dry_run:
            return
        if not sys.stdin.isatty():
            raise ConfigurationError(
                "--yes", f"is needed where nobody can answer: {question}", "add --yes or --dry-run"
            )
        typer.confirm(question, abort=True, err=True)

    @property
    def would(self) -> str:
        return "would be " if self.dry_run else ""


@dataclass(frozen=True, slots=True)
class Filter:
    """Which dead letters."""

    group: Annotated[str | None, typer.Option("--group", metavar="HANDLER/SIGNATURE", help="As in failed groups.")] = (
        None
    )
    handler: Annotated[str | None, typer.Option("--handler", metavar="NAME", help="Failed for this handler.")] = None
    event_type: Annotated[str | None, typer.Option("--event-type", metavar="TYPE", help="Of this type.")] = None
    source: Annotated[str | None, typer.Option("--source", metavar="NAME", help="Published by this context.")] = None
    signature: Annotated[str | None, typer.Option("--signature", metavar="TEXT", help="With this kind of error.")] = (
        None
    )
    failure_reason: Annotated[
        str | None, typer.Option("--failure-reason", help="max_deliveries, retry_terminal or rejected.")
    ] = None
    of_generation: Annotated[int | None, typer.Option("--of-generation", help="Failed in this generation.")] = None
    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", help="Failed since: 2h, 7d, or 2026-01-31T08:00 (UTC).")
    ] = None
    until: Annotated[str | None, typer.Option("--until", metavar="TIME", help="Failed before.")] = None

    def selection(self, everything: bool = False) -> Selection:
        """What the options mean."""
        given: dict[str, Any] = {
            "handler": self.handler,
            "event_type": self.event_type,
            "source": self.source,
            "signature": self.signature,
            "reason": self.failure_reason,
            "generation": self.of_generation,
            "since": moment("--since", self.since),
            "until": moment("--until", self.until),
            "everything": everything,
        }
        if self.group is None:
            return Selection(**given)
        if self.handler or self.signature:
            raise ConfigurationError("--group", "is a handler and a signature", "leave --handler and --signature out")
        return Selection.group(self.group, **given)


@dataclass(frozen=True, slots=True)
class Chosen:
    """Rows by their ids, from the command line or from a file."""

    ids: IdsArgument = None
    ids_from: Annotated[
        str | None, typer.Option("--ids-from", metavar="FILE", help="Ids from a file, one to a line; - is the input.")
    ] = None
    everything: Annotated[bool, typer.Option("--all", help="Every failed event.")] = False

    def given(self) -> list[str] | None:
        """The ids; None when a filter says which."""
        if self.ids_from is None:
            return self.ids or None
        if self.ids:
            raise ConfigurationError("--ids-from", "is given together with ids", "give one of the two")
        try:
            with nullcontext(sys.stdin) if self.ids_from == "-" else open(self.ids_from, encoding="utf-8") as lines:
                # One more than are allowed, so that too many are refused and not cut.
                return [line.strip() for line in islice(filter(str.strip, lines), MOST_AT_ONCE + 1)]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError("--ids-from", f"cannot be read: {error}", "name a file of ids") from None


def moment(option: str, text: str | None) -> datetime | None:
    """A time as people write it: 90s, 15m, 2h, 7d or 2w ago, or a date and time, in UTC if it says nothing else."""
    if text is None:
        return None
    if ago := re.fullmatch(r"([0-9]{1,6})([smhdw])", text):
        units = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
        try:
            return datetime.now(UTC) - timedelta(seconds=int(ago[1]) * units[ago[2]])
        except OverflowError:
            pass
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        remedy = "write 2h, 7d or 2026-01-31T08:00+01:00"
        raise ConfigurationError(option, f"{text[:80]!r} is no time", remedy) from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)
