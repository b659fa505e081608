"""ASGI messages between server and application: requests that can be read again, responses that are held back."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from holdfast.errors import ConfigurationError
from holdfast.idempotency.answers import Answer

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class BodyTooLarge(Exception):
    """The body has more bytes than `request_limit`."""


class ClientGone(Exception):
    """The client closed the connection before it had sent the whole body."""


class Body:
    """The request body. What the application reads is kept, up to a limit, for the hash and for a repetition."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._limit = limit
        self._messages: list[Message] = []
        self._size = 0
        self.whole = False  # all of it has come

    def is_repeatable(self) -> bool:
        """Return whether all of the body that was read is kept."""
        return self._size <= self._limit

    def reader(self) -> Receive:
        """Return a `receive` that starts at the first message."""
        position = 0

        async def receive() -> Message:
            nonlocal position
            if position < len(self._messages):
                message = self._messages[position]
            else:
                message = await self._next()
            position += 1
            return message

        return receive

    async def receive(self) -> None:
        """Receive the whole body, or as much of it as is kept; the application reads it as if it came now."""
        while not self.whole and self.is_repeatable():
            if (await self._next(keep=True))["type"] != "http.request":
                raise ClientGone

    async def read(self) -> bytes:
        """Return the whole body, including what the application has not read."""
        await self.receive()
        if not self.is_repeatable():
            raise BodyTooLarge
        return b"".join(message.get("body", b"") for message in self._messages if message["type"] == "http.request")

    async def _next(self, *, keep: bool = False) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._size += len(message.get("body", b""))
            self.whole = not message.get("more_body", False)
            if self.is_repeatable() or keep:
                self._messages.append(message)
            else:
                self._messages.clear()  # the request cannot be repeated, so nothing is kept
        return message


class HeldResponse:
    """A response that is held back until its transaction has ended."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._chunks: list[bytes] = []
        self._size = 0

    def take(self, message: Message) -> Answer | None:
        """Add a message; return the answer when the message completes it."""
        kind = message["type"]
        if kind == "http.response.start":
            # A second start replaces the first response: an error page after a response that broke off.
            self._chunks, self._size = [], 0
            self._status, self._headers = message["status"], [*message.get("headers", ())]
            for name, value in self._headers:
                if value.startswith(b"text/event-stream") and name.lower() == b"content-type":
                    problem = "is an event stream, of which a duplicate would get nothing"
                    self._refuse(problem, "answer with a whole body")
        elif kind == "http.response.body":
            chunk = message.get("body", b"")
            self._chunks.append(chunk)
            self._size += len(chunk)
            if not message.get("more_body", False):
                return Answer(self._status, self._headers, b"".join(self._chunks))
            if self._size > self._limit:
                remedy = "answer with less, or with a Location to fetch it from"
                self._refuse(f"has more than the {self._limit} bytes of buffer_limit", remedy)
        return None

    def _refuse(self, problem: str, remedy: str) -> None:
        raise ConfigurationError("the response to an idempotent request", problem, remedy)


async def send_answer(send: Send, answer: Answer) -> None:
    """Send a complete answer, in the two messages that every server knows."""
    await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
    await send({"type": "http.response.body", "body": answer.body})
