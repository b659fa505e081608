"""Redis and Valkey: a stream for each channel, and a consumer group for each handler.

    redis://user:password@one:6379,two:6379/0?replicas=1&fsync=1

With several hosts, the one that is no replica is used. Options: `replicas` that must have an event before it counts as
sent (0), `fsync=1` to ask whether it is on the disk as well (WAITAOF), `keep`, the minutes for which events stay that
all handlers have read (15), `cafile`, `stream`, a template of names. The scheme `rediss` encrypts.
"""

from holdfast.installing import require_extra

require_extra("redis", "redis")

from holdfast.brokers.redis.engine import RedisEngine

__all__ = ["RedisEngine"]
