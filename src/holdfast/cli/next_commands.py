"""Commands that are printed to be typed next, such as remedies: they act where the command that prints them acts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from itertools import zip_longest

from holdfast.characters import shell_word

# How the command line is called where it is part of another one, such as manage.py: set by that one, not by people.
TYPED_AS = "_HOLDFAST_TYPED_AS"
# Where that one has the address from: people look for it there, not in our variable.
ADDRESS_IN = "_HOLDFAST_ADDRESS_IN"
# A command that stands on a line of its own, or behind a colon at the end of a sentence.
_COMMAND = re.compile(r"(?:(?<=: )|^)holdfast(?: [^\s,;:…]+)+$", re.MULTILINE)
# The options of this command line that the next command needs as well.
_typed: ContextVar[Mapping[str, str]] = ContextVar("typed", default={})  # noqa: B039 (never changed)


def program() -> str:
    """Return how the command line is called here."""
    return os.environ.get(TYPED_AS, "holdfast")


def address_place() -> str:
    """Return where the address of the database stands here, unless `--dsn` has it."""
    return os.environ.get(ADDRESS_IN, "HOLDFAST_DSN")


def remember(words: Sequence[str]) -> Mapping[str, str]:
    """Keep the options of a command line that say where it acts, for `as_typed`, and return them."""
    found: dict[str, str] = {}
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        option, equals, value = word.partition("=")
        if option in ("--database", "--schema"):
            found[option] = value if equals else following
    _typed.set(found)
    return found


def as_typed(text: str, database: str | None = None) -> str:
    """Return a text whose commands can be typed as they are printed: with the name and the options of this one.

    `database` is the one of several that the text is about, where this command line names none.
    """
    options = {**({} if database is None else {"--database": database}), **_typed.get()}

    def extended(command: re.Match[str]) -> str:
        missing = [f" {name} {shell_word(value)}" for name, value in options.items() if f" {name} " not in command[0]]
        return "".join([program(), command[0].removeprefix("holdfast"), *missing])

    return _COMMAND.sub(extended, text)
