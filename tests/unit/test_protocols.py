"""The protocols: publisher, listener, handler."""

from holdfast.envelope import EventEnvelope
from holdfast.protocols import EventHandler, EventListener, EventPublisher


class Recorder:
    def __init__(self) -> None:
        self.published: list[EventEnvelope] = []

    async def publish(self, envelope: EventEnvelope) -> None:
        self.published.append(envelope)

    async def listen(self, *, channel: str, handler_name: str, handler: EventHandler) -> None:
        for envelope in self.published:
            await handler(envelope)


def test_the_protocols_are_structural() -> None:
    """Nothing has to be inherited (ENV-2)."""
    publisher: EventPublisher = Recorder()
    listener: EventListener = Recorder()
    found: list[object] = [publisher, listener, object()]
    assert [isinstance(value, EventPublisher) for value in found] == [True, True, False]
    assert [isinstance(value, EventListener) for value in found] == [True, True, False]
