"""The one encoding of what verbs return: the same for `--json`, the HTTP API and the MCP server."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, Final
from uuid import UUID

from pydantic import BaseModel

from holdfast.handler_tally import Histogram
from holdfast.operator.plans import PlanReport
from holdfast.postgres.doctor import Report
from holdfast.postgres.operations.archive import ArchivedDetail
from holdfast.postgres.operations.excerpt import Excerpt
from holdfast.postgres.operations.failed import FailureGroup, FailureGroups, FailureHistogram, FailureHistograms
from holdfast.postgres.operations.generations import Generation
from holdfast.postgres.operations.handlers import HandlerStatus
from holdfast.postgres.operations.partitions import PartitionReport
from holdfast.postgres.operations.rates import HandlerRates
from holdfast.postgres.operations.retention import RetentionReport
from holdfast.postgres.schedules import ScheduleStatus
from holdfast.retention import RetentionPolicies
from holdfast.stored_json import decode

# Properties that are worth as much as the fields beside them, by the name that they have in JSON.
ALSO: Final[Mapping[type, Mapping[str, str]]] = {
    FailureGroup: {"group": "name"},
    FailureGroups: {"is_more": "is_more"},
    FailureHistogram: {"group": "name"},
    FailureHistograms: {"is_more": "is_more"},
    ArchivedDetail: {"group": "group"},
    Generation: {"in_the_way": "in_the_way"},
    HandlerStatus: {"unserved": "unserved"},
    HandlerRates: {"handled_per_s": "handled"},
    PartitionReport: {"ends": "ends"},
    Report: {"healthy": "healthy"},
    ScheduleStatus: {"state": "state"},
}


def plain(value: object) -> Any:
    """Return a value as what JSON has: objects, lists, texts, numbers, true, false and null."""
    if value is None or (isinstance(value, str | bool | int | float) and not isinstance(value, Enum)):
        return value
    if shape := _SHAPES.get(type(value)):
        return shape(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _fields(value)
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in value]
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, UUID | Decimal):
        return str(value)
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(type(value).__name__)


def document(value: object) -> dict[str, Any]:
    """Return a result as a JSON object: a list has `items`, with how many are left out; a single value is `value`."""
    if isinstance(value, list | tuple):
        return {"items": plain(value), "left_out": getattr(value, "left_out", None)}
    if isinstance(value, Mapping) or dataclasses.is_dataclass(value):
        return dict(plain(value))
    return {"value": plain(value)}


def policies(value: RetentionPolicies) -> list[dict[str, Any]]:
    """Return policies as a list, in their order."""
    return [
        {"entity": entity, "content_class": content_class, **plain(policy)}
        for (entity, content_class), policy in sorted(value.items())
    ]


def _fields(value: Any) -> dict[str, Any]:
    also = {name: plain(getattr(value, attribute)) for name, attribute in ALSO.get(type(value), {}).items()}
    found = {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    left_out = {
        f"{field.name}_left_out": each.left_out
        for field in dataclasses.fields(value)
        if isinstance(each := getattr(value, field.name), Excerpt)
    }
    return also | found | left_out


def _report(value: Report) -> dict[str, Any]:
    counts = {f"{name}s": len(value.of(name)) for name in ("problem", "warning", "note")}
    return _fields(value) | counts


def _plan_report(value: PlanReport) -> dict[str, Any]:
    return _fields(value) | {"running": value.plan.running}


def _retention(value: RetentionReport) -> dict[str, Any]:
    return {
        "policies": policies(value.policies),
        "due": plain(value.due),
        "limit": value.limit,
        "last_sweep": {"finished_at": plain(value.finished_at), "swept": plain(value.last)},
        "sweeping": value.sweeping,
    }


def _schedule(value: ScheduleStatus) -> dict[str, Any]:
    found = _fields(value)
    if value.payload is None:
        del found["payload"]
    else:
        found["payload"] = decode(value.payload)
    return found


def _histogram(value: Histogram) -> dict[str, Any]:
    return {
        "counts": list(value.counts),
        "sum": value.sum,
        "count": value.count,
        "p50": value.quantile(0.5),
        "p99": value.quantile(0.99),
    }


_SHAPES: Final[Mapping[type, Callable[[Any], Any]]] = {
    Histogram: _histogram,
    PlanReport: _plan_report,
    Report: _report,
    RetentionReport: _retention,
    ScheduleStatus: _schedule,
}
