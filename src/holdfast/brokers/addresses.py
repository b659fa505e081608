"""Addresses of brokers that have several hosts, and options behind a question mark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlsplit

from holdfast.checks import quoted
from holdfast.errors import ConfigurationError

FIELD = "substrate"


@dataclass(frozen=True, slots=True)
class Address:
    """A broker's address, taken apart; passwords stay out of what is printed."""

    scheme: str
    # One URL for each host, with the login, and without options.
    servers: tuple[str, ...] = field(repr=False)
    path: str
    options: Mapping[str, str] = field(repr=False)

    def number(self, option: str, default: int, low: int, high: int) -> int:
        """Return an option that is a whole number."""
        text = self.options.get(option)
        if text is None:
            return default
        if not text.isascii() or not text.isdecimal() or not low <= int(text[:12]) <= high:
            raise ConfigurationError(FIELD, f"has {option}={quoted(text)}", f"give a whole number from {low} to {high}")
        return int(text)


def address_of(text: str, schemes: tuple[str, ...], known: tuple[str, ...]) -> Address:
    """Take an address apart; refuse another scheme, an option that is not known, and one without a host.

    >>> address_of("nats://me:secret@one,two:4223/?replicas=3", ("nats",), ("replicas",)).servers
    ('nats://me:secret@one', 'nats://me:secret@two:4223')
    """
    parts = urlsplit(text)
    if parts.scheme not in schemes:
        remedy = f"write it like {schemes[0]}://host:port"
        raise ConfigurationError(FIELD, f"begins with {quoted(parts.scheme)}", remedy)
    login, at, hosts = parts.netloc.rpartition("@")
    servers = tuple(f"{parts.scheme}://{login}{at}{host}" for host in hosts.split(",") if host)
    if not servers:
        raise ConfigurationError(FIELD, "names no host", f"write it like {schemes[0]}://host:port")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    for option in options:
        if option not in known:
            raise ConfigurationError(FIELD, f"has the option {quoted(option)}", f"use one of {', '.join(known)}")
    return Address(parts.scheme, servers, parts.path.strip("/"), options)
