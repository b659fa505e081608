"""Templates for the names at a broker: which stream, topic or exchange an event goes to, and where a handler finds it.

A template has places: `{channel}`, `{type}` (the event's type) and `{prefix}` (its type up to the first dot). It is
part of the address, so relays, workers and the operator's commands work out the same names.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.brokers.addresses import FIELD, Address
from holdfast.brokers.engine import Interest
from holdfast.checks import quoted
from holdfast.errors import ConfigurationError

CHANNEL: Final = "{channel}"
TYPE: Final = "{type}"
PREFIX: Final = "{prefix}"
TARGET: Final = "{target}"
_BY_TYPE: Final = (CHANNEL, TYPE, PREFIX)
_places = re.compile(r"\{[^{}]*\}").findall
_ODD: Final = re.compile(r"[^A-Za-z0-9._-]")
# Streams or topics of one handler: each has connections of its own.
_MOST_NAMES: Final = 100


@dataclass(frozen=True, slots=True)
class NameTemplate:
    """A template for one kind of name at a broker, with places that an event's channel and type fill."""

    option: str
    text: str
    longest: int

    @property
    def is_by_type(self) -> bool:
        """Whether the events of one channel go to several names."""
        return TYPE in self.text or PREFIX in self.text

    def name(self, channel: str, event_type: str = "") -> str:
        """Return the name that an event goes to.

        >>> NameTemplate("topic", "shop.{channel}.{prefix}", 249).name("events", "order.placed")
        'shop.events.order'
        """
        if not self.is_by_type:
            return self.text.replace(CHANNEL, channel)
        places = {CHANNEL: channel, TYPE: _plain(event_type), PREFIX: _plain(event_type.partition(".")[0])}
        name = self.text
        for place, value in places.items():
            name = name.replace(place, value)
        return fitted(name, self.longest)

    def names(self, interest: Interest) -> tuple[str, ...]:
        """Return the names of everything a handler is owed; refuse a pattern whose events may be under any name."""
        for event_type in interest.event_types:
            beginning, star, _ = event_type.partition("*")
            if star and (TYPE in self.text or (PREFIX in self.text and "." not in beginning)):
                place = TYPE if TYPE in self.text else PREFIX
                problem = f"has {place} in {self.option}, and {interest.handler_name} gets {quoted(event_type)}"
                broader = "" if place == PREFIX else f", use {PREFIX} with patterns like order.*"
                remedy = f"name the handler's event types{broader}, or leave {place} out of {self.option}"
                raise ConfigurationError(FIELD, problem, remedy)
        found = tuple(sorted({self.name(interest.channel, each) for each in interest.event_types}))
        if len(found) > _MOST_NAMES:
            problem = f"makes {len(found)} names of {self.option} for {interest.handler_name}"
            raise ConfigurationError(FIELD, problem, f"use {PREFIX}, or leave {TYPE} out: {_MOST_NAMES} are the most")
        return found

    def names_of(self, channels: Sequence[str], interests: Sequence[Interest]) -> tuple[str, ...]:
        """Return the names of channels; if names depend on the type, those that these handlers read from."""
        if not self.is_by_type:
            return tuple(map(self.name, channels))
        return tuple(sorted({name for each in interests if each.channel in channels for name in self.names(each)}))


def fitted(name: str, longest: int) -> str:
    """Return a name of at most `longest` characters: the end of a longer one is replaced by a digest of the whole.

    >>> fitted("order.placed", 20), fitted("order.placed.in.the.shop.of.ada", 20)
    ('order.placed', 'ord.bef85171c706014b')
    """
    if len(name) <= longest:
        return name
    return f"{name[: longest - 17]}.{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def template_of(address: Address, option: str, default: str, characters: str, longest: int) -> NameTemplate:
    """Return the template of an address, or the default; refuse one whose names the broker would not take."""
    text = address.options.get(option, default)
    require_places(option, text, _BY_TYPE, usual=default)
    rest = text
    for place in _BY_TYPE:
        rest = rest.replace(place, "")
    if odd := re.search(f"[^A-Za-z0-9{characters}]", rest):
        problem = f"has {quoted(odd[0])} in {option}"
        raise ConfigurationError(FIELD, problem, f"use letters, digits and {' '.join(characters.replace(chr(92), ''))}")
    if len(text) > longest // 2:
        problem = f"has a {option} of {len(text)} characters"
        raise ConfigurationError(FIELD, problem, f"use at most {longest // 2}")
    return NameTemplate(option, text, longest)


def require_places(
    option: str, text: str, known: Sequence[str], needed: Sequence[str] = (CHANNEL,), *, usual: str
) -> None:
    """Refuse a template with an unknown place, or without one that keeps names apart. `usual` is the example shown."""
    for place in _places(text):
        if place not in known:
            raise ConfigurationError(FIELD, f"has {quoted(place)} in {option}", f"use {', '.join(known)}")
    for place in needed:
        if place not in text:
            raise ConfigurationError(FIELD, f"has no {place} in {option}", f"write it like {option}={usual}")


def _plain(text: str) -> str:
    # Two types may become one name; that is harmless, because a source drops the events its handler is not owed.
    return _ODD.sub("_", text)
