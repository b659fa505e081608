"""The seams between an application and the substrate that carries its events."""

import re
from collections.abc import Awaitable, Callable
from typing import Protocol, runtime_checkable

from holdfast.envelope import EventEnvelope
from holdfast.errors import HandlerNameError

EventHandler = Callable[[EventEnvelope], Awaitable[None]]

_HANDLER_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+")
_LONGEST_HANDLER_NAME = 200


@runtime_checkable
class EventPublisher(Protocol):
    """Accepts an event; it is delivered if and only if the surrounding transaction commits."""

    async def publish(self, envelope: EventEnvelope) -> None: ...


@runtime_checkable
class EventListener(Protocol):
    """Delivers the events of a channel to a handler, each at least once.

    `handler_name` is scope-qualified (`billing.charge_card`): it is half of the key under which handled
    events are remembered, so two handlers of one name would hide each other's events.
    """

    async def listen(self, *, channel: str, handler_name: str, handler: EventHandler) -> None: ...


def require_handler_name(name: str) -> str:
    """Return the name if it is scope-qualified, otherwise raise `HandlerNameError`.

    >>> require_handler_name("billing.charge_card")
    'billing.charge_card'
    """
    given: object = name
    if not isinstance(given, str):
        problem = f"is {type(given).__name__}, not str"
    elif len(name) > _LONGEST_HANDLER_NAME:
        problem = f"has {len(name)} characters, {_LONGEST_HANDLER_NAME} are allowed"
    elif not _HANDLER_NAME.fullmatch(name):
        problem = f"{name!r} is not scope-qualified"
    else:
        return name
    remedy = "write <context>.<handler> in lower case, letters, digits and _ only, like billing.charge_card"
    raise HandlerNameError("handler_name", problem, remedy)
