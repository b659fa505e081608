"""Holdfast itself, with every guarantee on and default settings."""

from benchmarks.systems.holdfast.brokers import broker_latency, consume, consume_tx, relay
from benchmarks.systems.holdfast.deliver import (
    batch,
    drain,
    drain_together,
    failures,
    fanout,
    memory,
    transactional,
    work,
)
from benchmarks.systems.holdfast.http import http
from benchmarks.systems.holdfast.loads import neighbour, steady, types
from benchmarks.systems.holdfast.partitions import convert, drop
from benchmarks.systems.holdfast.publish import produce, publish, publish_many
from benchmarks.systems.holdfast.scrape import scrape, status
from benchmarks.systems.holdfast.slow_disk import slow_disk, slow_disk_killed, tell_handled
from benchmarks.systems.holdfast.start import idle, start
from benchmarks.systems.holdfast.wake import latency

VERBS = {
    each.__name__: each
    for each in (
        batch,
        broker_latency,
        consume,
        consume_tx,
        convert,
        drain,
        drain_together,
        drop,
        failures,
        fanout,
        http,
        idle,
        latency,
        memory,
        neighbour,
        produce,
        publish,
        publish_many,
        relay,
        scrape,
        slow_disk,
        slow_disk_killed,
        start,
        status,
        steady,
        tell_handled,
        transactional,
        types,
        work,
    )
}
