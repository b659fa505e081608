"""The tables as one statement sees them, their own laws, and the comparison with the model."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import asyncpg

from tests.model.rows import Model
from tests.outbox import Outbox

_AROUND = ("now", "subscriptions_version", "inbox", "effects", "keys", "to_cancel")
_BESIDE = ("settled_at", "delivered_at", "failed_at")  # for the laws alone: the model says the same with the status
_CYCLE_TIMES = ("first_failed_at", "failed_at", "replayed_at")

# The columns of a row have the names of the model's fields.
_QUERY = """
    SELECT now() AS now, v.version AS subscriptions_version,
           ARRAY(SELECT handler_name || ' ' || idempotency_key FROM core.event_handled ORDER BY 1) AS inbox,
           ARRAY(SELECT handler || ' ' || key FROM effects ORDER BY 1) AS effects,
           ARRAY(SELECT source || ' ' || dedupe_key || ' ' || event_id FROM core.outbox_keys ORDER BY 1) AS keys,
           -- A request to cancel an event that is settled already cancels nothing.
           ARRAY(SELECT s.id::text FROM core.cancel_requests s JOIN core.outbox o USING (id)
                 WHERE o.settled_at IS NULL ORDER BY 1) AS to_cancel,
           o.id, o.event_type, o.source, o.target, o.idempotency_key, o.dedupe_key, o.priority,
           coalesce(o.expires_at <= now(), false) AS expired, o.available_at, o.channel, o.generation, o.origin_id,
           o.handler_name, o.status, o.attempts, o.claimed_by, o.lease_token, o.lease_expires_at < now() AS lease_over,
           o.last_error, o.first_failed_at IS NOT NULL AS failing, o.failure_reason, o.error_signature,
           o.deleted_at IS NOT NULL AS deleted, o.failure_history AS history, o.xmin AS version,
           o.settled_at, o.delivered_at, o.failed_at
    FROM core.subscriptions_version v LEFT JOIN core.outbox o ON true
"""


@dataclass(frozen=True)
class Snapshot:
    rows: dict[UUID, dict[str, Any]]
    now: datetime
    subscriptions_version: int
    inbox: list[str]
    effects: list[str]
    keys: list[str]
    to_cancel: list[str]


async def read(connection: asyncpg.Connection) -> Snapshot:
    """The connection must decode jsonb."""
    found = await connection.fetch(_QUERY)
    rows = {}
    for row in map(dict, found):
        around = {name: row.pop(name) for name in _AROUND}
        if row["id"] is not None:  # else the outbox is empty
            rows[row["id"]] = row
            row["history"] = [
                {name: value for name, value in cycle.items() if name not in _CYCLE_TIMES} for cycle in row["history"]
            ]
    return Snapshot(rows, **around)


def require_laws(before: Snapshot, after: Snapshot) -> None:
    """What every reader of the tables may rely on, whatever the model says."""
    gone = [before.rows[id] for id in before.rows.keys() - after.rows.keys()]
    assert all(row["status"] == "delivered" and row["deleted"] for row in gone), "a row is gone that was no tombstone"
    handled = set()
    for id, row in after.rows.items():
        status = row["status"]
        assert (row["settled_at"] is not None) == (status in ("delivered", "failed"))
        assert (row["delivered_at"] is not None) == (status == "delivered")
        assert (row["failed_at"] is not None) == (status == "failed")
        assert (row["lease_token"] is not None) == (row["lease_over"] is not None) == (status == "in_flight")
        if status == "delivered" and row["handler_name"] != "*":
            handled.add(f"{row['handler_name']} {row['idempotency_key']}")
        _require_step(before.rows.get(id), row)
    # The inbox remembers longer than the outbox.
    assert after.inbox == sorted(handled.union(before.inbox)), "the inbox is not what was delivered, each once"
    assert len(after.effects) == len(set(after.effects)), "an effect happened twice"
    assert set(after.effects) <= set(after.inbox), "an effect without its delivery"


async def require_balance(outbox: Outbox) -> None:
    """Of what was begun, each delivery is open or was closed by exactly one outcome (OBS-2)."""
    (row,) = await outbox.call("read_balance")
    counted = dict(row)
    assert counted.pop("begun") == sum(counted.values()), dict(row)


def _require_step(before: dict[str, Any] | None, row: dict[str, Any]) -> None:
    """How one row may have come from what it was a step ago."""
    if before is None:
        assert (row["status"], row["attempts"]) == ("pending", 0)
    elif before["status"] == "delivered":
        assert row["status"] == "delivered", f"{row['id']} was delivered and is {row['status']}"
        assert row["version"] == before["version"] or row["deleted"], f"{row['id']} was delivered and written again"
    elif row["attempts"] != before["attempts"]:
        claimed = row["status"] == "in_flight" and row["attempts"] == before["attempts"] + 1
        released = (before["status"], row["status"]) == ("in_flight", "pending")
        replayed = (before["status"], row["status"]) == ("failed", "pending") and row["attempts"] == 0
        assert claimed or replayed or (released and row["attempts"] == before["attempts"] - 1), (before, row)


def require_equal(model: Model, found: Snapshot) -> None:
    """Compare everything. The model learns when the database wrote what it wrote since the last time."""
    assert found.rows.keys() == model.rows.keys()
    for id, columns in found.rows.items():
        row = model.rows[id]
        row.learn(columns, model.now, found.now)
        differing = {
            name: f"{columns[name]!r} instead of {value!r}"
            for name, value in vars(row).items()
            if columns[name] != value
        }
        assert not differing, f"the row {id} has {differing}"
    assert found.subscriptions_version == model.subscriptions_version
    assert found.inbox == sorted(f"{handler} {key}" for handler, key in model.inbox)
    assert found.effects == sorted(f"{handler} {key}" for handler, key in model.effects)
    assert found.keys == sorted(f"{source} {key} {id}" for (source, key), id in model.keys.items())
    assert found.to_cancel == sorted(str(id) for id in model.to_cancel if model.rows[id].open)
    model.now = found.now
