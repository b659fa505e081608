"""A long run: what grows in it must be named, and what does not must not."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from chaos.soak import BATCH, KINDS, Sample, batch, growing, quarters, soak

STEADY = Sample(
    events=0,
    memory=64.0,
    files=32,
    connections=32,
    outbox=300.0,
    inbox=0.0,
    backlog=0,
    probe_p50_ms=9.0,
    probe_p99_ms=30.0,
)


def samples(**growth: float) -> list[Sample]:
    """A run in which some figures grow by so much from one sample to the next."""
    return [
        replace(
            STEADY,
            events=1000 * number,
            inbox=0.2 * number,
            **{name: getattr(STEADY, name) + amount * number for name, amount in growth.items()},
        )
        for number in range(1, 81)
    ]


def test_a_steady_run_has_no_problem() -> None:
    """The inbox grows by each event, and by the same for each (T36)."""
    assert growing(quarters(samples())) == []


@pytest.mark.parametrize(
    ("figure", "amount"), [("memory", 0.5), ("files", 0.1), ("connections", 0.1), ("outbox", 3), ("probe_p50_ms", 1)]
)
def test_what_grows_is_named(figure: str, amount: float) -> None:
    """T36."""
    (problem,) = growing(quarters(samples(**{figure: amount})))
    assert problem.startswith(f"{figure} grew from ")


def test_a_batch_has_each_kind_in_its_share() -> None:
    """The effects of a run are counted by it (T36)."""
    kinds = [event.event_type for event in batch(7 * BATCH)]
    assert {kind: kinds.count(kind) for kind in KINDS} == KINDS


@pytest.mark.slow
def test_a_short_run_handles_every_event() -> None:
    """Quarters of a second show no growth, but every event must be handled, and every effect once (T36, in small)."""
    result = asyncio.run(soak(total=4 * BATCH, rate=1000, every=0.25))
    assert result["events"] == 4 * BATCH
    assert result["effects"] == 4 * KINDS["soak.transactional"]
    assert [problem for problem in result["problems"] if "grew" not in problem] == []
