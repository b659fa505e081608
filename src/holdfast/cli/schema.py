"""holdfast schema: the events of an application as an AsyncAPI document, and whether a release only adds to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli import output
from holdfast.cli.command_group import command_group
from holdfast.cli.options import JsonOption
from holdfast.cli.targets import load_module, load_registry
from holdfast.errors import ConfigurationError
from holdfast.schemas.asyncapi import ASYNCAPI, document, event_classes
from holdfast.schemas.changes import breaking_changes

app = command_group("Schemas of events: an AsyncAPI document, and a check that releases only add.")

_REMEDY = "name a file that holdfast schema export has written"

RegistryArgument = Annotated[str, typer.Argument(metavar="MODULE:REGISTRY", help="The handlers of the application.")]
EventsOption = Annotated[
    list[str] | None,
    typer.Option("--events", metavar="MODULE", help="A module whose event classes are published; may be repeated."),
]


@app.command("export")
def export(
    registry: RegistryArgument,
    events: EventsOption = None,
    title: Annotated[str, typer.Option(metavar="TEXT", help="The name of the application.")] = "Events",
    release: Annotated[str, typer.Option(metavar="TEXT", help="The release that is described.")] = "0",
) -> None:
    """Print the AsyncAPI document: a JSON Schema for each event type that has a model."""
    output.print_json(_document(registry, events, title, release))


@app.command("check")
def check(
    registry: RegistryArgument,
    against: Annotated[
        Path, typer.Option(metavar="FILE", help="The document of the last release, as export printed it.")
    ],
    events: EventsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Exit with 1, naming each change, if events and handlers of this release and the last could not meet."""
    current, released = _document(registry, events, "", ""), _read(against)
    try:
        found = breaking_changes(released, current)
    except RecursionError as error:
        raise ConfigurationError("--against", f"{against} is nested too deeply to be compared", _REMEDY) from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            "--against", f"{against} is not as holdfast schema export writes it", _REMEDY
        ) from error
    if as_json:
        output.print_json(found)
    else:
        for change in found:
            output.print_line(str(change))
        output.print_line(
            "a breaking change is a new event type, like order.placed.v2" if found else "only additions", "dim"
        )
    if found:
        raise typer.Exit(1)


def _document(registry: str, events: list[str] | None, title: str, release: str) -> dict[str, Any]:
    classes = []
    for name in events or ():
        found = event_classes(load_module(name))
        if not found:
            raise ConfigurationError("--events", f"{name} defines no event class", "name the module that defines them")
        classes += found
    return document(load_registry(registry), classes, title=title, version=release)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError("--against", f"{path} cannot be read: {error}", _REMEDY) from error
    if not isinstance(found, dict) or found.get("asyncapi") != ASYNCAPI or not found.get("channels"):
        raise ConfigurationError("--against", f"{path} is no AsyncAPI document of events", _REMEDY)
    return found
