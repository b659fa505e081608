"""Redis and Valkey: a stream for each channel, and a consumer group for each handler.

    redis://user:password@one:6379,two:6379/0?replicas=1&fsync=1

With several hosts, the one that is not a replica is used. The scheme `rediss` encrypts. Options, with their defaults:
`replicas` (0), how many must have an event before it counts as sent; `fsync=1`, to wait for the disk as well (WAITAOF);
`keep` (15), for how many minutes events stay after all handlers have read them; `cafile`; `stream`, a template of
names.
"""

from holdfast.installing import require_extra

require_extra("redis", "redis")

from holdfast.brokers.redis.engine import RedisEngine

__all__ = ["RedisEngine"]
