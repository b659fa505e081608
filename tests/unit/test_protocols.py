"""The seams: publisher, listener, handler, and the names of handlers."""

import pytest

from holdfast.envelope import EventEnvelope
from holdfast.errors import ConfigurationError, HandlerNameError
from holdfast.protocols import EventHandler, EventListener, EventPublisher, require_handler_name


class Recorder:
    def __init__(self) -> None:
        self.published: list[EventEnvelope] = []

    async def publish(self, envelope: EventEnvelope) -> None:
        self.published.append(envelope)

    async def listen(self, *, channel: str, handler_name: str, handler: EventHandler) -> None:
        require_handler_name(handler_name)
        for envelope in self.published:
            await handler(envelope)


def test_the_protocols_are_structural() -> None:
    """ENV-2: nothing has to be inherited."""
    publisher: EventPublisher = Recorder()
    listener: EventListener = Recorder()
    found: list[object] = [publisher, listener, object()]
    assert [isinstance(value, EventPublisher) for value in found] == [True, True, False]
    assert [isinstance(value, EventListener) for value in found] == [True, True, False]


@pytest.mark.parametrize("name", ["billing.charge_card", "a.b", "platform.cards.v2_projection", "a." + "b" * 198])
def test_a_scope_qualified_name_is_returned(name: str) -> None:
    """ENV-2."""
    assert require_handler_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "charge_card",
        "Billing.charge",
        "billing.",
        ".charge",
        "billing..charge",
        "billing.1st",
        "billing.charge card",
        "billing.charge\n",
        "billing/charge",
        "billing.chärge",
        "a." + "b" * 199,
        None,
        b"billing.charge",
    ],
)
def test_any_other_name_is_refused_with_what_to_write(name: str) -> None:
    """ENV-2: a clear error."""
    with pytest.raises(HandlerNameError, match=r"billing\.charge_card") as caught:
        require_handler_name(name)
    assert caught.value.field == "handler_name"
    assert isinstance(caught.value, ConfigurationError)
