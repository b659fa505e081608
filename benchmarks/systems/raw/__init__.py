"""The control: the shortest asyncpg program with the same guarantees on the same tables.

Claim by one UPDATE ... RETURNING with a lease, settle by one fenced UPDATE, a row in event_handled, rows kept.
"""

from benchmarks.systems.raw.brokers import broker_latency, consume, relay
from benchmarks.systems.raw.deliver import drain, drain_together, failures, fanout, memory, transactional, work
from benchmarks.systems.raw.http import http
from benchmarks.systems.raw.publish import produce, publish, publish_many
from benchmarks.systems.raw.scrape import scrape
from benchmarks.systems.raw.statements import CLAIM, SETTLE
from benchmarks.systems.raw.wake import latency

__all__ = ["CLAIM", "SETTLE", "VERBS"]

VERBS = {
    each.__name__: each
    for each in (
        broker_latency,
        consume,
        drain,
        drain_together,
        failures,
        fanout,
        http,
        latency,
        memory,
        produce,
        publish,
        publish_many,
        relay,
        scrape,
        transactional,
        work,
    )
}
