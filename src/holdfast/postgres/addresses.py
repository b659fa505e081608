"""Addresses of databases as users write them: which can be read, and what is wrong with the others."""

import re
from urllib.parse import parse_qsl, urlsplit

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
_SESSION_ATTRS = ("any", "primary", "standby", "read-write", "read-only", "prefer-standby")
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
    if "#" in dsn or "@" in parts.path or not all(_is_host(host) for host in hosts):
        raise unreadable(field)
    for name in names:
        if name in _OF_LIBPQ:
            raise ConfigurationError(
                field,
                f"has the parameter {name}, which libpq knows and asyncpg does not",
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
