"""Which host names are answered for: others may lead here by DNS rebinding."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit


class Hosts:
    """Names that are answered for: those that were allowed, localhost, and addresses.

    >>> Hosts(["ops.example.com"]).answers("ops.example.com:8443"), Hosts().answers("evil.example")
    (True, False)
    """

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        self._names = {"localhost"} | {host.lower().rstrip(".") for host in allowed}

    def answers(self, field: str) -> bool:
        """Whether the field Host of a request is one of them."""
        try:
            host = urlsplit(f"//{field}").hostname if field and not set(field) & set("/@?#\\ ") else None
        except ValueError:
            return False
        if host is None:
            return False
        if host.lower().rstrip(".") in self._names:
            return True
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return False
        return True
