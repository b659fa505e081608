"""Kafka: a topic for each channel, and a consumer group for each handler.

    kafka://host:9092,host:9092?partitions=12&replication=3

A user and a password in the address mean SASL (`sasl_mechanism`, by default PLAIN); `kafkas` means TLS, with the
certificates of the system or those of `cafile`. `partitions` and `replication` are used when a topic is made; `topic`
is a template of names, and `mode` is the mode of CloudEvents.
"""

from holdfast.installing import require_extra

require_extra("kafka", "aiokafka")

from holdfast.brokers.kafka.engine import KafkaEngine

__all__ = ["KafkaEngine"]
