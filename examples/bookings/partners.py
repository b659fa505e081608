"""The bank and the mail, as the example plays them: in memory, and failing when they are told to."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


class CardDeclined(Exception):
    """The bank says no, and would say it again."""


@dataclass
class Bank:
    """Requests by their keys: one that is repeated is the same request."""

    requests: dict[str, tuple[str, int]] = field(default_factory=dict)
    calls: int = 0
    down_for: int = 0  # calls that fail before the bank is there again
    declines: set[str] = field(default_factory=set)

    async def request(self, key: str, customer: str, cents: int) -> None:
        self.calls += 1
        if self.down_for > 0:
            self.down_for -= 1
            raise ConnectionError("the bank cannot be reached")
        if customer in self.declines:
            raise CardDeclined(f"the card of {customer} is declined")
        self.requests[key] = customer, cents


@dataclass
class Mail:
    """Letters that were sent, the same one twice if it was sent twice."""

    sent: list[str] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)
    down_for: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, text: str, attempt: int) -> None:
        with self._lock:
            self.attempts.append(attempt)
            if self.down_for > 0:
                self.down_for -= 1
                raise TimeoutError("the mail server does not answer")
            self.sent.append(text)


@dataclass
class Partners:
    """Who else is involved."""

    bank: Bank
    mail: Mail
