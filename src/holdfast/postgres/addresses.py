"""Addresses of databases as users write them: which can be read, and what is wrong with the others."""

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from holdfast.errors import ConfigurationError

CONNECT_TIMEOUT = 10.0

_EXAMPLE = "postgresql://user@host:5432/database"
_WITH_DRIVER = re.compile(r"^postgres(?:ql)?\+\w+://")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9.-]{0,30})(?:\+[A-Za-z0-9]+)?://")
_KEYWORDS = re.compile(r"\s*(?:host|hostaddr|port|dbname|user|password|service|sslmode)\s*=")
# Parameters that psycopg and psql take. Left alone, they would reach the server as settings that it does not have.
_OF_LIBPQ = {
    "connect_timeout": f": a connection that is not there after {CONNECT_TIMEOUT:.0f} seconds is tried again",
    "channel_binding": "; sslmode=verify-full makes sure of the server",
    "hostaddr": " and write the address as the host",
    "gssencmode": "",
    "keepalives": "",
    "keepalives_idle": "",
    "keepalives_interval": "",
    "keepalives_count": "",
    "tcp_user_timeout": "",
    "load_balance_hosts": "",
    "fallback_application_name": "",
    "require_auth": "",
    "requirepeer": "",
    "requiressl": ": write sslmode",
    "replication": "",
    "sslcertmode": "",
    "sslcompression": "",
    "sslcrldir": "",
    "sslsni": "",
    "prepare_threshold": "",
    "prepared_statements": ": a pooler is recognised by itself",
    "pgbouncer": ": a pooler is recognised by itself",
    "ssl": ": write sslmode",
}
_OF_OTHERS = frozenset(("ssl", "pgbouncer", "prepared_statements", "prepare_threshold"))  # and not of libpq
_SESSION_ATTRS = ("any", "primary", "standby", "read-write", "read-only", "prefer-standby")
_OF_ADDRESSES = ("sslmode", "sslrootcert", "sslcert", "sslkey", "sslcrl", "passfile", "target_session_attrs", "options")
_DSN = 'write the address that is meant in the settings: HOLDFAST = {"DSN": "postgresql://..."}'
_HOST = re.compile(r"(?:\[[^\]]*\]|[^:\[\]]*)(?::\d*)?")


def readable_address(dsn: str, field: str = "dsn") -> str:
    """Return the address as asyncpg reads it; refuse one that drivers would misread.

    Addresses are often written for SQLAlchemy: the driver in `postgresql+asyncpg://` is left out. A raw / or # in a
    password moves the rest of it into the port, the path or the fragment, from where drivers and servers quote it in
    their messages.
    """
    if not isinstance(dsn, str):
        raise ConfigurationError(field, f"is {type(dsn).__name__}, not str", f"pass an address like {_EXAMPLE}")
    dsn = _WITH_DRIVER.sub("postgresql://", dsn)
    if not dsn.startswith(("postgres://", "postgresql://")):
        raise _other_kind(dsn, field)
    try:
        parts = urlsplit(dsn)
        names = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True)]
    except ValueError:
        raise unreadable(field) from None
    hosts = parts.netloc.rpartition("@")[2].split(",")
    if "#" in dsn or "@" in parts.path or parts.netloc.count("@") > 1 or not all(_is_host(host) for host in hosts):
        raise unreadable(field)
    for name in names:
        if name in _OF_LIBPQ:
            raise ConfigurationError(
                field,
                f"has the parameter {name}, which {_known_by(name)} and asyncpg does not",
                f"remove it{_OF_LIBPQ[name]}",
            )
    for value in (value for name, value in parse_qsl(parts.query) if name == "target_session_attrs"):
        if value not in _SESSION_ATTRS:
            raise ConfigurationError(
                field,
                "has target_session_attrs with a value that is unknown",
                f"write one of {', '.join(_SESSION_ATTRS)}",
            )
    return dsn


def django_address(settings: Mapping[str, Any]) -> str:
    """Return the address of an entry of Django's DATABASES, with those of its OPTIONS that an address can have.

    An entry that an address would lead elsewhere, or to another role, is refused.
    """
    options = settings.get("OPTIONS") or {}
    for name in ("service", "assume_role"):
        if options.get(name):
            raise ConfigurationError("DATABASES", f"has {name} in its OPTIONS, which an address cannot have", _DSN)
    if not settings["NAME"]:
        raise ConfigurationError("DATABASES", "has no NAME", _DSN)
    login = quote(str(settings["USER"]), safe="")
    if settings["PASSWORD"]:
        login += ":" + quote(str(settings["PASSWORD"]), safe="")
    host, port = str(settings["HOST"]), str(settings["PORT"])
    parameters = {name: options[name] for name in _OF_ADDRESSES if options.get(name)}
    if not host or host.startswith("/"):  # a socket, in the folder that is given or the usual one
        place, parameters = "", parameters | {k: v for k, v in {"host": host, "port": port}.items() if v}
    else:
        place = (f"[{host}]" if ":" in host else host) + (f":{port}" if port else "")
    query = f"?{urlencode(parameters, quote_via=quote)}" if parameters else ""
    return f"postgresql://{login}@{place}/{quote(str(settings['NAME']), safe='')}{query}"


def other_database(dsn: str, name: str) -> str:
    """Return the address of another database, with the host, the login and the parameters of this one."""
    parts = urlsplit(dsn)
    query = f"?{parts.query}" if parts.query else ""
    return f"{parts.scheme}://{parts.netloc}/{quote(name, safe='')}{query}"


def hosts_of(dsn: str) -> str:
    """Return the names of the hosts in an address that can be read."""
    # Without ports: a raw ? in a password would make its beginning look like one.
    hosts = urlsplit(dsn).netloc.rpartition("@")[2].split(",")
    return ", ".join(re.sub(r":\d*$", "", host) for host in hosts)


def _known_by(parameter: str) -> str:
    return "other drivers know" if parameter in _OF_OTHERS else "libpq knows"


def _is_host(text: str) -> bool:
    port = text.rpartition("]")[2].rpartition(":")[2] if ":" in text.rpartition("]")[2] else ""
    return _HOST.fullmatch(text) is not None and int(port or 0) <= 65_535


def _other_kind(dsn: str, field: str) -> ConfigurationError:
    """The error for what does not begin as an address of Postgres. It quotes no part that may be a password."""
    scheme = _SCHEME.match(dsn)
    if dsn.startswith("jdbc:"):
        problem, remedy = "is an address for JDBC", f"remove jdbc: and write it like {_EXAMPLE}"
    elif scheme is not None:
        problem = f"is an address of {scheme[1]}, and Holdfast needs Postgres"
        remedy = f"write {_EXAMPLE}"
    elif _KEYWORDS.match(dsn):
        problem, remedy = "is written as keywords and values", f"write it as a URL: {_EXAMPLE}"
    elif dsn.startswith("/"):
        problem, remedy = "is a path", "for the socket in a folder write postgresql:///database?host=/folder"
    else:
        problem, remedy = "does not begin with postgresql://", f"write {_EXAMPLE}, with :password after the user"
    return ConfigurationError(field, problem, remedy)


def unreadable(field: str = "dsn") -> ConfigurationError:
    """Return the error for an address that cannot be read, which does not quote it."""
    # With the address at the end and no password in it: the redaction of error texts must leave all of it.
    return ConfigurationError(
        field,
        "is not a Postgres address that can be read",
        f"percent-encode / # ? @ : and % in the password (%2F %23 %3F %40 %3A %25) and write {_EXAMPLE}, "
        "with :password after the user",
    )


def next_host_first(dsn: str) -> str:
    """Return the same address with its first host at the end."""
    parts = urlsplit(dsn)
    login, at, hosts = parts.netloc.rpartition("@")
    first, _, others = hosts.partition(",")
    return parts._replace(netloc=f"{login}{at}{others},{first}").geturl() if others else dsn
