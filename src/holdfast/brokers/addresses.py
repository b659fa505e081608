"""Addresses of brokers: a URL with one host or several, and options behind a question mark."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit

from holdfast.brokers.cloudevents import Binding
from holdfast.checks import quoted
from holdfast.errors import ConfigurationError

FIELD = "substrate"
_PORTS = {"nats": 4222, "redis": 6379, "amqp": 5672, "kafka": 9092}


@dataclass(frozen=True, slots=True)
class Address:
    """A broker's address, taken apart; its repr shows no password."""

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

    def encryption(self) -> ssl.SSLContext:
        """Return a TLS context that trusts the certificates of `cafile`, or those of the system."""
        return ssl.create_default_context(cafile=self.file("cafile"))

    def file(self, option: str) -> str | None:
        """Return an option that is a path; refuse a file that cannot be read, and a `cafile` without certificates."""
        path = self.options.get(option)
        if path is None:
            return None
        try:
            if option == "cafile":
                ssl.create_default_context(cafile=path)
            else:
                Path(path).read_bytes()
        except (OSError, ValueError) as error:
            problem = f"has {option}={quoted(path)}: {error.strerror if isinstance(error, OSError) else error}"
            raise ConfigurationError(FIELD, problem, "give the path of a file that the worker can read") from None
        return path

    def binding(self, defined: Binding) -> Binding | None:
        """Return the engine's binding if the address has `mode=binary`, and None for the structured mode."""
        mode = self.options.get("mode", "structured")
        if mode not in ("structured", "binary"):
            raise ConfigurationError(FIELD, f"has mode={quoted(mode)}", "write mode=binary or mode=structured")
        return defined if mode == "binary" else None


def address_of(text: str, schemes: tuple[str, ...], known: tuple[str, ...] | None) -> Address:
    """Take an address apart; refuse an address with another scheme, with an unknown option, or without a host.

    With `known=None` every option is accepted: RabbitMQ's client checks its own.

    >>> address_of("nats://me:secret@one,two:4223/?replicas=3", ("nats",), ("replicas",)).servers
    ('nats://me:secret@one', 'nats://me:secret@two:4223')
    """
    parts = urlsplit(text)
    if parts.scheme not in schemes:
        remedy = _like(schemes[0])
        raise ConfigurationError(FIELD, f"begins with {quoted(parts.scheme)}, which is unknown", remedy)
    login, at, hosts = parts.netloc.rpartition("@")
    servers = tuple(f"{parts.scheme}://{login}{at}{host}" for host in hosts.split(",") if host)
    for server in servers:
        _require_port(server, _like(schemes[0]))
    if not servers:
        raise ConfigurationError(FIELD, "names no host", _like(schemes[0]))
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    for option in options:
        if known is not None and option not in known:
            raise ConfigurationError(
                FIELD, f"has the option {quoted(option)}, which is unknown", f"use one of {', '.join(known)}"
            )
    return Address(parts.scheme, servers, parts.path.strip("/"), options)


def with_names(text: str, naming: str, options: tuple[str, ...]) -> str:
    """Return an address with the templates for names that `naming` has; only `options` are taken from it.

    >>> with_names("nats://me@one,two:4223?replicas=3&stream=A_{channel}", "stream=B_{channel}&creds=x", ("stream",))
    'nats://me@one,two:4223?replicas=3&stream=B_{channel}'
    """
    parts = urlsplit(text)
    given = {option: value for option, value in parse_qsl(naming) if option in options}
    kept = dict(parse_qsl(parts.query, keep_blank_values=True)) | given
    return parts._replace(query=urlencode(kept, safe="{}:/")).geturl()


def _like(scheme: str) -> str:
    """Return an example of an address. Its port is a number: errors hide a word in that place like a password."""
    return f"write it like {scheme}://host:{_PORTS[scheme]}"


def _require_port(server: str, remedy: str) -> None:
    """Refuse a server whose port is not a number from 1 to 65535."""
    try:
        if urlsplit(server).port != 0:
            return
    except ValueError:
        pass
    port = server.rpartition(":")[2]
    raise ConfigurationError(FIELD, f"has the port {quoted(port)}", f"{remedy}, with a port from 1 to 65535")
