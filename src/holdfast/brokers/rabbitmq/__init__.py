"""RabbitMQ: a topic exchange for each channel, and a quorum queue for each handler.

    amqp://user:password@host:5672/vhost

The address is one of AMQP; `amqps` and its options (`cafile`, `certfile`, `keyfile`) are those of aiormq.
`exchange` is a template of names, `mode` one of CloudEvents.
"""

from holdfast.installing import require_extra

require_extra("rabbitmq", "aiormq")

from holdfast.brokers.rabbitmq.engine import RabbitmqEngine

__all__ = ["RabbitmqEngine"]
