"""Logging in with a name and a password, or with a token, and logging out."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from holdfast.access.passwords import Passwords
from holdfast.access.principal import Principal
from holdfast.access.provider import Asking
from holdfast.access.sessions import LoggedIn
from holdfast.access.tokens import Tokens

FREE_ATTEMPTS: Final = 5  # of one address with one name
# With one name, from everywhere. So many that no stranger locks a person out, and too few to guess a password.
FREE_FOR_NAME: Final = 500
# Of one address, behind which there may be a proxy with everybody.
FREE_FOR_ADDRESS: Final = 50
_LONGEST_WAIT: Final = 60.0
_MOST_KEPT: Final = 10_000


@dataclass(slots=True)
class Throttle:
    """Slows down who guesses: after some attempts each further one has to wait, twice as long every time."""

    free: int = FREE_ATTEMPTS
    _failures: OrderedDict[str, tuple[int, float]] = field(default_factory=OrderedDict)

    def wait_for(self, *keys: str) -> float:
        """Return for how many seconds no attempt is looked at."""
        now = time.monotonic()
        return max((self._until(key) - now for key in keys), default=0.0)

    def failed(self, *keys: str) -> None:
        """Count an attempt."""
        for key in keys:
            count, _ = self._failures.pop(key, (0, 0.0))
            self._failures[key] = (count + 1, time.monotonic())
            if len(self._failures) > _MOST_KEPT:
                self._failures.popitem(last=False)

    def succeeded(self, *keys: str) -> None:
        """Forget the attempts."""
        for key in keys:
            self._failures.pop(key, None)

    def _until(self, key: str) -> float:
        count, last = self._failures.get(key, (0, 0.0))
        if count < self.free:
            return 0.0
        return last + min(_LONGEST_WAIT, 2.0 ** min(count - self.free, 10))


class FileLogins:
    """People of a password file and of a token file. Tools send their token with every request."""

    def __init__(self, passwords: Passwords | None, tokens: Tokens | None) -> None:
        self.passwords = passwords
        self.tokens = tokens
        self._by_both = Throttle()
        self._by_name = Throttle(FREE_FOR_NAME)
        self._by_address = Throttle(FREE_FOR_ADDRESS)
        self.has_login = True

    async def principal(self, asking: Asking) -> Principal | None:
        """Return whose token a request has. Nobody guesses 256 bits: wrong ones do not slow down the right ones."""
        return None if self.tokens is None else await self.tokens.principal(asking)

    def current(self, session: LoggedIn) -> Principal | None:
        """Return who a session is of now: a line that was removed or changed, also its hash, counts at once."""
        way, _, proof = session.way.partition(":")
        source = {"password": self.passwords, "token": self.tokens}.get(way)
        return source.current(session.name, proof) if source is not None else None

    async def log_in(self, name: str, secret: str, client: str) -> tuple[Principal, str] | float | None:
        """Return who it is and by which way; or for how long to wait; or None."""
        if not name:
            bearer = self.tokens.verify(secret) if self.tokens is not None else None
            return (
                None if bearer is None or self.tokens is None else (bearer, f"token:{self.tokens.proof(bearer.name)}")
            )
        both = f"{client} {name}"
        wait = max(self._by_both.wait_for(both), self._by_name.wait_for(name), self._by_address.wait_for(client))
        if wait > 0:
            return wait
        if self.passwords is None:
            return None
        # Counted before it is looked at: those that come side by side count too.
        self._by_both.failed(both)
        self._by_name.failed(name)
        self._by_address.failed(client)
        # A hash takes tens of milliseconds, on purpose: not on the event loop.
        found = await asyncio.to_thread(self.passwords.verify, name, secret)
        if found is None:
            return None
        self._by_both.succeeded(both)
        self._by_name.succeeded(name)
        self._by_address.succeeded(client)
        return found, f"password:{self.passwords.proof(name)}"
