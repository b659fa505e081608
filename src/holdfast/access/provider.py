"""What tells a console who asks: see `Provider`."""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from holdfast.access.files import ROLES
from holdfast.access.principal import Principal, Role
from holdfast.checks import line
from holdfast.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Asking:
    """What a provider may know of a request: its header fields, by names in small letters, and who sent it.

    `headers` with a `getlist` tell fields that stand there several times, as those of Starlette do.
    """

    headers: Mapping[str, str]
    client: str | None  # the address of the peer, not one that a header claims

    def only(self, name: str) -> str:
        """Return a field that stands there once; several are as good as none, because one may be the sender's own."""
        every = getattr(self.headers, "getlist", None)
        if every is not None and len(every(name)) != 1:
            return ""
        return self.headers.get(name, "")

    def bearer(self) -> str | None:
        """Return the token of the field Authorization, if it stands there once."""
        kind, _, token = self.only("authorization").partition(" ")
        return token.strip() if kind.lower() == "bearer" and token.strip() else None


@runtime_checkable
class Provider(Protocol):
    """Says who asks, by the request alone; None: nobody it knows."""

    async def principal(self, asking: Asking) -> Principal | None: ...


class ProxyHeader:
    """The name that a reverse proxy has established, believed from the addresses of that proxy alone."""

    def __init__(
        self,
        header: str,
        *,
        trusted: Iterable[str],
        roles: Mapping[str, Role] | None = None,
        default: Role | None = Role.VIEWER,
        role_header: str | None = None,
    ) -> None:
        self._header = header.lower()
        self._role_header = role_header and role_header.lower()
        try:
            self._trusted = [ipaddress.ip_network(address) for address in trusted]
        except ValueError as error:
            raise ConfigurationError(
                "trusted", f"is not an address or a network: {error}", "write 10.0.0.5 or 10.0.0.0/24"
            ) from None
        if not self._trusted:
            raise ConfigurationError("trusted", "is empty", "name the addresses of the proxy")
        self._roles = dict(roles or {})
        self._default = default

    async def principal(self, asking: Asking) -> Principal | None:
        """Return whom the proxy names."""
        name = asking.only(self._header)
        if not name or not self._is_trusted(asking.client):
            return None
        try:
            line("name", name)
        except ConfigurationError:
            return None
        claimed = asking.only(self._role_header) if self._role_header else ""
        if self._role_header and claimed:
            return Principal(name, ROLES[claimed]) if claimed in ROLES else None
        role = self._roles.get(name, self._default)
        return None if role is None else Principal(name, role)

    def _is_trusted(self, client: str | None) -> bool:
        try:
            address = ipaddress.ip_address(client or "")
        except ValueError:
            return False
        return any(address in network for network in self._trusted)


class Embedded:
    """The application around the console says who asks."""

    def __init__(self, ask: Callable[[Asking], Awaitable[Principal | None]]) -> None:
        self._ask = ask

    async def principal(self, asking: Asking) -> Principal | None:
        """Return whom the application names."""
        return await self._ask(asking)


class LocalUser:
    """Everybody who reaches the loopback address of this machine is its user, and may do everything."""

    def __init__(self, name: str) -> None:
        self._principal = Principal(line("name", name), Role.ADMIN)

    async def principal(self, asking: Asking) -> Principal | None:
        """Return the user."""
        return self._principal
