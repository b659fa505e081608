"""Exchanges and queues: their names, how they are made, and how existing ones differ from those.

Under each queue is a second one, `<queue>.dead`: messages that a delivery limit, a length limit or a time to live would
drop go there, and the same handler's source reads them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from aiormq import (
    AMQPChannelError,
    Channel,
    ChannelAccessRefused,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
)

from holdfast.brokers.addresses import address_of
from holdfast.brokers.engine import BrokerUnavailable, Interest, Weakness
from holdfast.brokers.naming import NameTemplate, fitted, template_of
from holdfast.brokers.rabbitmq.link import ANSWER_SECONDS, Link, within
from holdfast.errors import ConfigurationError

# RabbitMQ allows 255 bytes, and a dead queue's name is longer by its ending.
_LONGEST: Final = 245
SCHEMES: Final = ("amqp", "amqps")
OPTION: Final = "exchange"
_INEQUIVALENT: Final = re.compile(r"inequivalent arg '([^']+)'")
_CURRENT: Final = re.compile(
    r"but current is (?:the value '(?P<value>.*)' of type '(?P<kind>.*)'|(?P<plain>.+))$", re.DOTALL
)
# More than a queue has, even if each is asked for twice.
_MOST_ARGUMENTS: Final = 40
_SINGLE_ACTIVE: Final = "x-single-active-consumer"
# From this version on a quorum queue drops by default what it has delivered 20 times.
_HAS_DELIVERY_LIMIT: Final = (4, 0)

_ANEW: Final = "let it drain, delete it, and start the worker again, which makes it anew"
_MEANING: Final = {
    "x-queue-type": "it is no quorum queue: what it holds is lost with its node",
    "durable": "it is not durable: what it holds is lost when the broker restarts",
    "x-delivery-limit": "its delivery limit drops events",
    "x-dead-letter-exchange": "what its limits drop is lost, or goes where no worker reads",
    "x-dead-letter-routing-key": "what its limits drop goes where no worker reads",
    "x-dead-letter-strategy": "what its limits drop may be lost on the way to the dead queue",
    "x-overflow": "when it is full, it drops its oldest events",
    "x-max-length": "when it is full, it drops or refuses events",
    "x-max-length-bytes": "when it is full, it drops or refuses events",
    "x-message-ttl": "it drops events that wait for too long",
    _SINGLE_ACTIVE: "several consumers are active at once: the order of events is lost",
}


def exchanges_of(address: str) -> NameTemplate:
    """Return the template of exchange names of an address."""
    found = address_of(address, SCHEMES, None)
    return template_of(found, OPTION, "hf.{channel}", r"._:\-", _LONGEST)


def queue_of(interest: Interest) -> str:
    return fitted(f"hf.{interest.channel}.{interest.handler_name}", _LONGEST)


def dead_queue_of(interest: Interest) -> str:
    return f"{queue_of(interest)}.dead"


def binding_key(event_type: str) -> str:
    """Return a binding key that matches at least the events of a type or pattern.

    >>> binding_key("order.placed"), binding_key("order.*"), binding_key("order.pl*"), binding_key("*")
    ('order.placed', 'order.#', 'order.#', '#')
    """
    beginning, star, _ = event_type.partition("*")
    if not star:
        return event_type
    words, dot, _ = beginning.rpartition(".")
    return f"{words}{dot}#"


async def make_exchange(channel: Channel, name: str, seconds: float = ANSWER_SECONDS) -> None:
    """Make an exchange, unless it exists."""
    await within(seconds, channel.exchange_declare(name, exchange_type="topic", durable=True))


def refused(error: AMQPChannelError) -> BrokerUnavailable:
    """Return what the broker says against an exchange or a queue, as an outage with its remedy."""
    remedy = ""
    if isinstance(error, ChannelAccessRefused):
        remedy = "let the login configure, write and read what is named hf.* (rabbitmqctl set_permissions)"
    elif isinstance(error, ChannelPreconditionFailed):
        remedy = "delete what is there by this name, or name other exchanges by exchange= in the address"
    return BrokerUnavailable(f"RabbitMQ: {error}", remedy)


async def make_queue(link: Link, interest: Interest, exchanges: NameTemplate) -> None:
    """Make the queue of a handler and its bindings; use an existing queue as it is.

    An operator or an older server may have made it with other arguments: `differences` says what they mean. Only an
    ordered handler refuses a queue with several active consumers, which cannot keep the order of events.
    """
    channel = await link.side_channel()
    for name in exchanges.names(interest):
        await make_exchange(channel, name)
    version = await link.version()
    wanted = {
        dead_queue_of(interest): dead_queue_arguments(interest, version),
        queue_of(interest): queue_arguments(interest, version),
    }
    for name, arguments in wanted.items():
        found = await _differing(link, name, arguments, ANSWER_SECONDS)
        if interest.ordered and _SINGLE_ACTIVE in found:
            problem = f"the queue {name} has several active consumers, so the order of events is lost"
            raise ConfigurationError(interest.handler_name, problem, _ANEW)
    for exchange, key in {(exchanges.name(interest.channel, each), binding_key(each)) for each in interest.event_types}:
        await within(ANSWER_SECONDS, channel.queue_bind(queue_of(interest), exchange, key))
    await within(ANSWER_SECONDS, channel.close())


def queue_arguments(interest: Interest, version: tuple[int, ...]) -> Mapping[str, str | int | bool]:
    """Return the arguments of a queue that drops nothing."""
    return {
        **dead_queue_arguments(interest, version),
        # `at-least-once` dead-lettering keeps a message until the dead queue has it, and requires reject-publish.
        "x-overflow": "reject-publish",
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": dead_queue_of(interest),
        "x-dead-letter-strategy": "at-least-once",
    }


def dead_queue_arguments(interest: Interest, version: tuple[int, ...]) -> Mapping[str, str | int | bool]:
    """Return the arguments of the dead queue under a queue."""
    arguments: dict[str, str | int | bool] = {"x-queue-type": "quorum"}
    if interest.ordered:
        arguments[_SINGLE_ACTIVE] = True
    if version >= _HAS_DELIVERY_LIMIT:
        arguments["x-delivery-limit"] = -1
    return arguments


async def waiting(link: Link, queue: str, seconds: float) -> int | None:
    """Return how many messages a queue holds that nobody has taken, or None if there is no such queue."""
    channel = await link.side_channel(seconds)
    try:
        declared = await within(seconds, channel.queue_declare(queue, passive=True))
    except ChannelNotFoundEntity:
        return None
    await within(seconds, channel.close())
    return declared.message_count or 0


async def differences(link: Link, interest: Interest, seconds: float) -> list[Weakness]:
    """Compare the existing queues of a handler with those that Holdfast would make."""
    version = await link.version()
    wanted = {
        queue_of(interest): queue_arguments(interest, version),
        dead_queue_of(interest): dead_queue_arguments(interest, version),
    }
    return [
        Weakness(name, f"{_MEANING.get(argument, 'it is not as Holdfast makes it')} ({argument} is {current})", _ANEW)
        for name, arguments in wanted.items()
        if await waiting(link, name, seconds) is not None
        for argument, current in (await _differing(link, name, arguments, seconds)).items()
    ]


async def _differing(
    link: Link, queue: str, arguments: Mapping[str, str | int | bool], seconds: float
) -> Mapping[str, str]:
    """Make a queue; if it exists, return the arguments in which it differs, with their present values.

    RabbitMQ names one differing argument at a time, so the queue is declared again with the value it named. Its answer
    is cut off after 255 bytes; if the value is missing for that reason, the argument is left out.
    """
    asked: dict[str, str | int | bool] = dict(arguments)
    found: dict[str, str] = {}
    for _ in range(_MOST_ARGUMENTS):
        channel = await link.side_channel(seconds)
        try:
            await within(seconds, channel.queue_declare(queue, durable=True, arguments=dict(asked)))
        except ChannelPreconditionFailed as error:
            named, current = _INEQUIVALENT.search(str(error)), _CURRENT.search(str(error))
            argument = named[1] if named is not None else "declaration"
            if named is None or (argument in found and argument not in asked and current is None):
                found.setdefault(argument, str(error))
                return found
            found[argument] = "another one" if current is None else current["value"] or current["plain"] or "empty"
            if current is not None and current["kind"] is not None:
                asked[argument] = _typed(current["value"], current["kind"])
            elif asked.pop(argument, None) is None:
                # It is a property of the queue, which RabbitMQ compares first: further differences stay unknown.
                return found
        else:
            await within(seconds, channel.close())
            break
    return found


def _typed(value: str, kind: str) -> str | int | bool:
    if kind == "longstr":
        return value
    return value == "true" if kind.startswith("bool") else int(value)
