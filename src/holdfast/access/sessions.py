"""Sessions of browsers: who has logged in, in a signed cookie, and the tokens that a form must bring back."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import time
from dataclasses import dataclass
from typing import Final

from holdfast.access.files import ROLES
from holdfast.access.principal import Principal, Role

LASTS: Final = 8 * 3600
_MOST_ENDED = 10_000


@dataclass(frozen=True, slots=True)
class LoggedIn:
    """What the cookie says: who, by which way, and until when."""

    id: str
    name: str
    role: Role
    way: str
    until: int

    @property
    def principal(self) -> Principal:
        return Principal(self.name, self.role)


class Sessions:
    """Signs and reads cookies. Several processes share the sessions when they share the secret."""

    def __init__(self, secret: str | None = None) -> None:
        self._key = hashlib.sha256((secret or secrets.token_urlsafe(32)).encode()).digest()
        self._ended: dict[str, int] = {}

    def begin(self, principal: Principal, way: str) -> str:
        """Return the cookie of a new session."""
        found = [secrets.token_urlsafe(16), principal.name, str(principal.role), way, int(time.time()) + LASTS]
        return self.sign("session", found)

    def read(self, cookie: str) -> LoggedIn | None:
        """Return the session of a cookie, unless it has ended."""
        try:
            id, name, role, way, until = self.unsign("session", cookie) or []
            found = LoggedIn(str(id), str(name), ROLES[str(role)], str(way), int(str(until)))
        except (ValueError, TypeError, KeyError):
            return None
        return found if found.until > time.time() and found.id not in self._ended else None

    def end(self, session: LoggedIn) -> None:
        """Forget a session before its time."""
        now = time.time()
        self._ended = {id: until for id, until in self._ended.items() if until > now}
        if len(self._ended) < _MOST_ENDED:
            self._ended[session.id] = session.until

    def form_token(self, visit: str, name: str) -> str:
        """Return what a form must bring back: it depends on a cookie that scripts cannot read, and on who asks."""
        return self._mac("form", f"{visit}\n{name}")

    def form_token_is_right(self, given: str, visit: str, name: str) -> bool:
        """Return whether a form is one of ours."""
        return bool(visit) and hmac.compare_digest(
            given.encode(errors="replace"), self.form_token(visit, name).encode()
        )

    def sign(self, purpose: str, value: object) -> str:
        """Return a value as text that cannot be changed."""
        text = base64.urlsafe_b64encode(json.dumps(value).encode()).decode()
        return f"{text}.{self._mac(purpose, text)}"

    def unsign(self, purpose: str, signed: str) -> list[object] | None:
        """Return the value of a text that `sign` made; None if the text is not ours, or was changed."""
        text, _, mac = signed.partition(".")
        if not hmac.compare_digest(mac.encode(errors="replace"), self._mac(purpose, text).encode()):
            return None
        found: list[object] = json.loads(base64.urlsafe_b64decode(text))
        return found

    def _mac(self, purpose: str, text: str) -> str:
        made = hmac.new(self._key, f"{purpose}:{text}".encode(errors="replace"), hashlib.sha256)
        return base64.urlsafe_b64encode(made.digest()).decode().rstrip("=")
