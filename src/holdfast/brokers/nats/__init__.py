"""NATS JetStream: a stream for each channel, and a durable pull consumer for each handler.

    nats://user:password@one:4222,two:4222,three:4222?replicas=3

Options: `replicas` of the streams that the relay makes (3 in a cluster, otherwise 1), `max_age` in days (7), `creds`,
the path of a credentials file, `stream` and `subject`, templates of names, `mode` of CloudEvents. The scheme `tls`
encrypts, with the certificates of the system or those of `cafile`; `nats` does so where the server asks for it.
"""

from holdfast.installing import require_extra

require_extra("nats", "nats")

from holdfast.brokers.nats.engine import NatsEngine

__all__ = ["NatsEngine"]
