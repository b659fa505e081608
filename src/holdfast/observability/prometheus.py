"""The state of an outbox in Prometheus' text format: what waits, since when, who works on it, who listens.

Everything comes from `holdfast.postgres.reads`, which never looks at settled rows: a scrape costs the same beside ten
delivered events or ten million (OBS-4). Counts end at a limit; one that has reached `holdfast_outbox_count_limit` means
"or more".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

import asyncpg

from holdfast.postgres import reads, schedules
from holdfast.postgres.reads import MOST, Lane, Notifications, Status
from holdfast.postgres.schedules import ScheduleSeen

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
NOTIFY_MODES: Final = ("when_idle", "always", "never", "missing")

Sample = tuple[Mapping[str, object], float]


async def scrape(connection: asyncpg.Connection, schema: str = "core") -> str:
    """Look once at a schema, and render what was found."""
    found = render(await reads.status(connection, schema), await reads.notifications(connection))
    return found + render_schedules(await schedules.listing(connection, schema))


def render(status: Status, notifications: Notifications) -> str:
    """All metrics; each is a gauge, and each stands there also when it is zero."""
    living = sum(worker.living for worker in status.workers)
    return "".join(
        (
            _gauge("outbox_pending", "Events that are due and wait for a worker.", status.pending),
            _gauge("outbox_delayed", "Events that are not due yet, retries among them.", status.delayed),
            _gauge("outbox_in_flight", "Events that a worker holds under a lease.", status.in_flight),
            _gauge("outbox_abandoned", "Events in flight whose lease has ended.", status.abandoned),
            _gauge("outbox_failed", "Events that failed for good and wait for an operator.", status.failed),
            _gauge("outbox_archived", "Events that failed for good and were moved to the archive.", status.archived),
            _gauge("outbox_count_limit", "Where these counts end: one that equals it means or more.", MOST),
            _gauge("outbox_oldest_seconds", "Since when the first pending event is due.", status.oldest or 0.0),
            _gauges("lane_open", "Open events of a lane.", _by_lane(status.lanes, lambda lane: lane.open)),
            _gauges(
                "lane_oldest_seconds",
                "Since when the first pending event of a lane is due.",
                _by_lane(status.lanes, lambda lane: lane.oldest or 0.0),
            ),
            _gauges(
                "lane_unrouted",
                "1 for a lane whose events no handler is interested in.",
                _by_lane(status.lanes, lambda lane: not lane.handlers),
            ),
            _gauges(
                "lane_unserved_handlers",
                "Handlers that are owed events of a lane and that no living worker has.",
                _by_lane(status.lanes, lambda lane: len(lane.unserved)),
            ),
            _gauges(
                "channel_unserved",
                "1 for a channel that has open events and no living worker.",
                [({"channel": channel, "generation": generation}, 1) for channel, generation in status.unserved],
            ),
            _gauge("workers_living", "Workers with a heartbeat in the last 30 s.", living),
            _gauge("workers_silent", "Workers that went silent without a goodbye.", len(status.workers) - living),
            _gauge("listeners", "Connections of workers that listen for wake-ups.", notifications.listeners),
            _gauges(
                "notify_mode",
                "1 for the way in which publishing wakes the workers.",
                [({"mode": mode}, mode == (status.bell or "missing")) for mode in NOTIFY_MODES],
            ),
            _gauge(
                "notification_queue_usage",
                "Share of the server's notification queue that is in use; alert at 0.25.",
                notifications.queue_usage,
            ),
        )
    )


def render_schedules(seen: Iterable[ScheduleSeen]) -> str:
    """What there is of each schedule."""
    by_name = [({"schedule": each.name}, each) for each in seen]
    return "".join(
        (
            _gauges(
                "schedule_overdue_seconds",
                "Since when a slot of a schedule is past and not fired.",
                [(labels, each.overdue_for or 0.0) for labels, each in by_name],
            ),
            _gauges(
                "schedule_attended",
                "1 for a schedule that a living worker declares.",
                [(labels, each.attended) for labels, each in by_name],
            ),
            _gauges(
                "schedule_paused",
                "1 for a schedule that an operator has paused.",
                [(labels, each.paused_at is not None) for labels, each in by_name],
            ),
        )
    )


def _by_lane(lanes: Iterable[Lane], value: Callable[[Lane], float]) -> list[Sample]:
    return [
        ({"channel": lane.channel, "generation": lane.generation, "route": lane.route}, value(lane)) for lane in lanes
    ]


def _gauge(name: str, text: str, value: float) -> str:
    return _gauges(name, text, [({}, value)])


def _gauges(name: str, text: str, samples: Iterable[Sample]) -> str:
    name = f"holdfast_{name}"
    lines = [f"# HELP {name} {_escape(text)}", f"# TYPE {name} gauge"]
    lines += [f"{name}{_labels(labels)} {_number(value)}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, object]) -> str:
    pairs = ",".join(f'{name}="{_escape(str(value), quoted=True)}"' for name, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""


def _escape(text: str, *, quoted: bool = False) -> str:
    # Anybody who may publish chooses event types, and with them the names of lanes.
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quoted else text


def _number(value: float) -> str:
    return repr(value) if isinstance(value, float) else str(int(value))
