"""A Kafka cluster by its address: how clients connect, and how topics are made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, TypeVar
from urllib.parse import unquote, urlsplit

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError, TopicAlreadyExistsError, UnknownTopicOrPartitionError, for_code

from holdfast.brokers import cloudevents
from holdfast.brokers.addresses import address_of
from holdfast.brokers.engine import BrokerUnavailable, Interest
from holdfast.brokers.naming import CHANNEL, template_of

# The deadline of requests for which the caller gives none.
ANSWER_SECONDS: Final = 5.0
_OPTIONS: Final = ("partitions", "replication", "cafile", "sasl_mechanism", "topic", "mode")
_USUAL: Final = f"hf.{CHANNEL}"
_LONGEST_NAME: Final = 249
_PARTITIONS: Final = 12
_REPLICATION: Final = 3
_LOST: Final = (KafkaError, OSError, TimeoutError)

Answered = TypeVar("Answered")


async def within(seconds: float, asked: Coroutine[Any, Any, Answered]) -> Answered:
    """Return what the cluster answered. A refusal, or no answer in time, raises `BrokerUnavailable`."""
    try:
        async with asyncio.timeout(seconds):
            return await asked
    except TimeoutError as error:
        raise BrokerUnavailable(f"Kafka did not answer within {seconds:g} s") from error
    except _LOST as error:
        raise BrokerUnavailable(f"Kafka: {error or type(error).__name__}") from error


def group_of(interest: Interest, topic: str) -> str:
    """Return the consumer group of a handler for a topic: each topic has its own, with a start of its own."""
    of = interest.channel if topic == f"{_USUAL.removesuffix(CHANNEL)}{interest.channel}" else topic
    return f"{of}.{interest.handler_name}"


class Cluster:
    """The address of a cluster: its servers, its login, and how topics are named and made."""

    def __init__(self, address: str) -> None:
        found = address_of(address, ("kafka", "kafkas"), _OPTIONS)
        urls = [urlsplit(server) for server in found.servers]
        credentials, _, _ = urls[0].netloc.rpartition("@")
        self.topics = template_of(found, "topic", _USUAL, r"._\-", _LONGEST_NAME)
        self.partitions = found.number("partitions", _PARTITIONS, 1, 10_000)
        self.binding = found.binding(cloudevents.KAFKA)
        self.replication = found.number("replication", _REPLICATION, 1, 100)
        # The request timeout also ends requests of the client's own, for which nobody here waits.
        self.options: dict[str, Any] = {
            "bootstrap_servers": [url.netloc.rpartition("@")[2] for url in urls],
            "client_id": "holdfast",
            "request_timeout_ms": int(2 * ANSWER_SECONDS * 1000),
            "security_protocol": _security(secure=found.scheme == "kafkas", credentials=credentials),
        }
        if found.scheme == "kafkas":
            self.options["ssl_context"] = found.encryption()
        if credentials:
            user, _, password = credentials.partition(":")
            self.options["sasl_mechanism"] = found.options.get("sasl_mechanism", "PLAIN")
            self.options["sasl_plain_username"] = unquote(user)
            self.options["sasl_plain_password"] = unquote(password)

    @asynccontextmanager
    async def admin(self, seconds: float) -> AsyncIterator[AIOKafkaAdminClient]:
        """Yield a connection for requests about topics and groups."""
        admin = AIOKafkaAdminClient(**self.options)
        try:
            await within(seconds, admin.start())
            yield admin
        finally:
            with suppress(BrokerUnavailable):
                await within(seconds, admin.close())

    async def make_topic(self, topic: str, seconds: float) -> None:
        """Make a topic, unless it exists."""
        async with self.admin(seconds) as admin:
            described = await within(seconds, admin.describe_topics([topic]))
            if any(for_code(each["error_code"]) is UnknownTopicOrPartitionError for each in described):
                await within(seconds, self._create(admin, topic))

    async def _create(self, admin: AIOKafkaAdminClient, topic: str) -> None:
        cluster = await admin.describe_cluster()
        replication = min(self.replication, len(cluster["brokers"]))
        settings = {"min.insync.replicas": str(max(1, replication - 1))}
        new = NewTopic(topic, self.partitions, replication, topic_configs=settings)
        answer = await admin.create_topics([new])
        for name, code, *_ in answer.topic_errors:
            error = for_code(code)
            if code and error is not TopicAlreadyExistsError:
                raise error(name)


def _security(*, secure: bool, credentials: str) -> str:
    return ("SASL_" if credentials else "") + ("SSL" if secure else "PLAINTEXT")
