"""Whether a connection string leads beyond this machine without a check of the server's certificate."""

import ipaddress
import os
from collections.abc import Mapping
from urllib.parse import parse_qs, unquote, urlsplit

from holdfast.telemetry import Notice

_VERIFIED = frozenset(("verify-ca", "verify-full"))
_REQUIRED = _VERIFIED | {"require"}


def unverified_hosts(dsn: str, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the hosts of a DSN that other machines can impersonate: not loopback, no socket, no `sslmode=verify-*`."""
    try:
        parts = urlsplit(dsn)
    except ValueError:
        return []  # refused where it is used
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    if _mode(query, environment) in _VERIFIED:
        return []
    named = parts.netloc.rpartition("@")[2] or query.get("host") or environment.get("PGHOST", "")
    hosts = [_without_port(unquote(each)) for each in named.split(",")]
    return [host for host in hosts if host and not host.startswith(("/", "@")) and not _is_loopback(host)]


def requires_tls(dsn: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether an address that can be read, or else the environment, asks for TLS and nothing else."""
    query = {name: values[-1] for name, values in parse_qs(urlsplit(dsn).query).items()}
    return _mode(query, environment) in _REQUIRED


def _mode(query: Mapping[str, str], environment: Mapping[str, str]) -> str:
    return query.get("sslmode") or environment.get("PGSSLMODE", "")


def unverified_notice(*dsns: str) -> Notice | None:
    """Return the warning about such hosts, if there are any."""
    hosts = sorted({host for dsn in dsns for host in unverified_hosts(dsn)})
    if not hosts:
        return None
    details: dict[str, object] = {
        "hosts": hosts,
        "remedy": "whoever is between could read and change everything: add sslmode=verify-full and, for a private "
        "authority, sslrootcert=... to the address",
    }
    return Notice("warning", "connection_unverified", details)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0] if host.count(":") == 1 else host


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
