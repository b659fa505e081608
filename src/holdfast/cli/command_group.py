"""Groups of commands, and how their help is shown: as plain text that ends at words."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from holdfast.errors import ConfigurationError


class CommandGroup(TyperGroup):
    """A group whose help has the whole first sentence of each command, and whose errors name a remedy."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            if error.param is None or not error.message:  # one that is missing
                raise
            remedy = f"{error.ctx.command_path if error.ctx else 'holdfast'} --help"
            raise ConfigurationError(_shown_name(error.param), _problem(error.message), remedy) from None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, first_sentence(found.help or "")) for name, found in commands if found])


# Words of typer's errors, and of those of the libraries that it uses, in all their releases.
_NUMBERS = {"integer": "a whole number", "float": "a number", "number": "a number"}


def _problem(message: str) -> str:
    """Return what a library says of a value, in our words.

    >>> _problem("Input should be less than or equal to 1")
    'should be less than or equal to 1'
    """
    if kind := next((words for word, words in _NUMBERS.items() if word in message.lower()), None):
        return f"is not {kind}"
    return message.removeprefix("Value error, ").removeprefix("Input ").rstrip(".")


def _shown_name(parameter: Any) -> str:
    option = next((name for name in parameter.opts if name.startswith("--")), None)
    return option or parameter.metavar or str(parameter.name).upper()


def command_group(help: str) -> typer.Typer:
    """An empty group of commands."""
    return typer.Typer(help=help, no_args_is_help=True, cls=CommandGroup)


def first_sentence(text: str) -> str:
    """Return the first sentence of a help text.

    >>> first_sentence("Undo a discard. Restored events are dead letters again.")
    'Undo a discard.'
    """
    sentence, stop, _ = " ".join(text.split()).partition(". ")
    return f"{sentence}." if stop else sentence


def without_types(command: Any) -> Any:
    """Leave Python's names of types out of the help of a command and its subcommands."""
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            parameter.display_type_rich = lambda ctx: None
        elif parameter.metavar is None and not parameter.is_flag:
            parameter.metavar = _metavar(parameter)
    for each in getattr(command, "commands", {}).values():
        without_types(each)
    return command


def _metavar(option: Any) -> str | None:
    kind = getattr(option, "type_descriptor", None)  # earlier releases of typer have names of their own
    if kind is None:
        return None
    if kind.is_choice:
        return "|".join(str(getattr(choice, "value", choice)) for choice in kind.choices)
    return "TEXT" if kind.annotation is str or kind.is_list else "NUMBER"
