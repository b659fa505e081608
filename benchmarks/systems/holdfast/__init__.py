"""Holdfast itself, with every guarantee on and default settings."""

from benchmarks.systems.holdfast.deliver import drain, drain_together, failures, fanout, memory, transactional, work
from benchmarks.systems.holdfast.http import http
from benchmarks.systems.holdfast.publish import produce, publish, publish_many
from benchmarks.systems.holdfast.scrape import scrape
from benchmarks.systems.holdfast.wake import latency

VERBS = {
    each.__name__: each
    for each in (
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
        scrape,
        transactional,
        work,
    )
}
