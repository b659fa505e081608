"""What a worker does with rows that have a key, call by call."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple
from uuid import UUID

import asyncpg

from tests.outbox import CHANNEL, EVENT, HANDLER, InFlight, Outbox


class Claim(NamedTuple):
    """The answer of a claim: rows, and for each handler where the next claim goes on and when something is due."""

    rows: list[asyncpg.Record]
    after: Mapping[str, str | None]
    due_in: Mapping[str, float | None]
    token: UUID

    @property
    def keys(self) -> list[str]:
        return sorted(row["ordering_key"] if "ordering_key" in row.keys() else row["fairness_key"] for row in self.rows)  # noqa: SIM118

    @property
    def held(self) -> list[InFlight]:
        return [InFlight(row["id"], self.token, row["handler"], row["route"]) for row in self.rows]


def _common(
    channel: str,
    generation: int,
    lease: float,
    limits: Mapping[str, int],
    after: Mapping[str, str],
    wanted: Mapping[str, Sequence[str]] | None,
    probes: int,
    ended_before: datetime | None,
) -> dict[str, object]:
    pairs = [(name, kind) for name in limits for kind in (wanted or {}).get(name, ("%",))]
    return {
        "worker": uuid.uuid4(),
        "token": uuid.uuid4(),
        "lease": timedelta(seconds=lease),
        "channel": channel,
        "generation": generation,
        "handlers": list(limits),
        "limits": list(limits.values()),
        "after": [after.get(name, "") for name in limits],
        "wanted_by": [name for name, _ in pairs],
        "wanted": [kind for _, kind in pairs],
        "most_probes": probes,
        "ended_before": ended_before,
    }


def _answer(rows: Sequence[asyncpg.Record], key: str, token: object) -> Claim:
    assert isinstance(token, UUID)
    ends = [row for row in rows if row["id"] is None]
    return Claim(
        [row for row in rows if row["id"] is not None],
        {row["handler"]: row[key] for row in ends},
        {row["handler"]: row["failing_for"] for row in ends},
        token,
    )


async def claim_ordered(
    outbox: Outbox,
    limit: int = 10,
    *,
    limits: Mapping[str, int] | None = None,
    after: Mapping[str, str] | None = None,
    keys: Sequence[tuple[str, str, int]] = (),
    discover: bool = True,
    skip: Sequence[str] = (),
    channel: str = CHANNEL,
    generation: int = 0,
    lease: float = 60,
    wanted: Mapping[str, Sequence[str]] | None = None,
    probes: int = 1000,
    ended_before: datetime | None = None,
) -> Claim:
    """Claim heads for `billing.charge_card`, or for the handlers in `limits`; `skip` names those that do not block."""
    limits = limits or {HANDLER: limit}
    values = _common(channel, generation, lease, limits, after or {}, wanted, probes, ended_before)
    rows = await outbox.call(
        "outbox_claim_ordered",
        **values,
        blocks=[name not in skip for name in limits],
        key_handlers=[handler for handler, _, _ in keys],
        keys=[key for _, key, _ in keys],
        seqs=[seq for _, _, seq in keys],
        discover=discover,
    )
    return _answer(rows, "ordering_key", values["token"])


async def claim_fair(
    outbox: Outbox,
    limit: int = 10,
    *,
    limits: Mapping[str, int] | None = None,
    after: Mapping[str, str] | None = None,
    per_key: int | None = None,
    channel: str = CHANNEL,
    generation: int = 0,
    lease: float = 60,
    wanted: Mapping[str, Sequence[str]] | None = None,
    probes: int = 1000,
) -> Claim:
    limits = limits or {HANDLER: limit}
    values = _common(channel, generation, lease, limits, after or {}, wanted, probes, None)
    rows = await outbox.call("outbox_claim_fair", **values, per_key=[per_key for _ in limits])
    return _answer(rows, "fairness_key", values["token"])


async def publish(outbox: Outbox, key: str, n: int = 1, event_type: str = EVENT, **columns: object) -> list[UUID]:
    """Rows of one ordering key, in the order of their numbers."""
    return [await outbox.insert(event_type=event_type, ordering_key=key, **columns) for _ in range(n)]
