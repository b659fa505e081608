"""The verbs of operators, for the command line and for other tools: see `Operator`."""

from typing import TYPE_CHECKING

from holdfast.lazy import lazy_names

if TYPE_CHECKING:
    from holdfast.operator.failed import Edited
    from holdfast.operator.generations import MovedGeneration
    from holdfast.operator.operator import Operator
    from holdfast.operator.outcome import Moved
    from holdfast.operator.plan_runner import Progress
    from holdfast.operator.plans import PlanChange, PlanReport
    from holdfast.operator.retention import Erasure
    from holdfast.operator.schedules import ScheduleChange, ScheduleReport
    from holdfast.operator.selection import OpenFilters, Selection
    from holdfast.operator.session import Refused
    from holdfast.operator.workers import ReleasedWorker
    from holdfast.postgres.doctor import CHECKS, SEVERITIES, Check, Finding, Part, Report, Severity
    from holdfast.postgres.faults import DATABASE_ERRORS, remedy_of
    from holdfast.postgres.operations.archive import ArchivedDetail, ArchivedEvent
    from holdfast.postgres.operations.audit import AuditLine
    from holdfast.postgres.operations.events import Delivery, EventDetail, OpenEvent
    from holdfast.postgres.operations.failed import FailedEvent, FailureGroup, FailureGroups
    from holdfast.postgres.operations.generations import Generation
    from holdfast.postgres.operations.handlers import HandlerStatus
    from holdfast.postgres.operations.patience import Blocked
    from holdfast.postgres.operations.plans import Plan, Preview
    from holdfast.postgres.operations.retention import RetentionReport
    from holdfast.postgres.operations.status import (
        MOST,
        MOST_IN_ROUTE,
        MOST_ROUTES,
        MOST_UNSERVED,
        NewestFailure,
        RouteStatus,
        Status,
        WorkerStatus,
    )
    from holdfast.postgres.operations.sweeping import SweepReport
    from holdfast.postgres.schedules import MOST_SCHEDULES, ScheduleStatus
    from holdfast.postgres.wakeup.mode import Mode
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "ArchivedDetail": "holdfast.postgres.operations.archive",
            "ArchivedEvent": "holdfast.postgres.operations.archive",
            "AuditLine": "holdfast.postgres.operations.audit",
            "Blocked": "holdfast.postgres.operations.patience",
            "CHECKS": "holdfast.postgres.doctor",
            "Check": "holdfast.postgres.doctor",
            "DATABASE_ERRORS": "holdfast.postgres.faults",
            "Delivery": "holdfast.postgres.operations.events",
            "Edited": "holdfast.operator.failed",
            "Erasure": "holdfast.operator.retention",
            "EventDetail": "holdfast.postgres.operations.events",
            "FailedEvent": "holdfast.postgres.operations.failed",
            "FailureGroup": "holdfast.postgres.operations.failed",
            "FailureGroups": "holdfast.postgres.operations.failed",
            "Finding": "holdfast.postgres.doctor",
            "Generation": "holdfast.postgres.operations.generations",
            "HandlerStatus": "holdfast.postgres.operations.handlers",
            "MOST": "holdfast.postgres.operations.status",
            "MOST_IN_ROUTE": "holdfast.postgres.operations.status",
            "MOST_ROUTES": "holdfast.postgres.operations.status",
            "MOST_SCHEDULES": "holdfast.postgres.schedules",
            "MOST_UNSERVED": "holdfast.postgres.operations.status",
            "Mode": "holdfast.postgres.wakeup.mode",
            "Moved": "holdfast.operator.outcome",
            "MovedGeneration": "holdfast.operator.generations",
            "NewestFailure": "holdfast.postgres.operations.status",
            "OpenEvent": "holdfast.postgres.operations.events",
            "OpenFilters": "holdfast.operator.selection",
            "Operator": "holdfast.operator.operator",
            "Part": "holdfast.postgres.doctor",
            "Plan": "holdfast.postgres.operations.plans",
            "PlanChange": "holdfast.operator.plans",
            "PlanReport": "holdfast.operator.plans",
            "Preview": "holdfast.postgres.operations.plans",
            "Progress": "holdfast.operator.plan_runner",
            "Refused": "holdfast.operator.session",
            "ReleasedWorker": "holdfast.operator.workers",
            "Report": "holdfast.postgres.doctor",
            "RetentionReport": "holdfast.postgres.operations.retention",
            "RouteStatus": "holdfast.postgres.operations.status",
            "SEVERITIES": "holdfast.postgres.doctor",
            "ScheduleChange": "holdfast.operator.schedules",
            "ScheduleReport": "holdfast.operator.schedules",
            "ScheduleStatus": "holdfast.postgres.schedules",
            "Selection": "holdfast.operator.selection",
            "Severity": "holdfast.postgres.doctor",
            "Status": "holdfast.postgres.operations.status",
            "SweepReport": "holdfast.postgres.operations.sweeping",
            "WorkerStatus": "holdfast.postgres.operations.status",
            "remedy_of": "holdfast.postgres.faults",
        },
    )

__all__ = [
    "CHECKS",
    "DATABASE_ERRORS",
    "MOST",
    "MOST_IN_ROUTE",
    "MOST_ROUTES",
    "MOST_SCHEDULES",
    "MOST_UNSERVED",
    "SEVERITIES",
    "ArchivedDetail",
    "ArchivedEvent",
    "AuditLine",
    "Blocked",
    "Check",
    "Delivery",
    "Edited",
    "Erasure",
    "EventDetail",
    "FailedEvent",
    "FailureGroup",
    "FailureGroups",
    "Finding",
    "Generation",
    "HandlerStatus",
    "Mode",
    "Moved",
    "MovedGeneration",
    "NewestFailure",
    "OpenEvent",
    "OpenFilters",
    "Operator",
    "Part",
    "Plan",
    "PlanChange",
    "PlanReport",
    "Preview",
    "Progress",
    "Refused",
    "ReleasedWorker",
    "Report",
    "RetentionReport",
    "RouteStatus",
    "ScheduleChange",
    "ScheduleReport",
    "ScheduleStatus",
    "Selection",
    "Severity",
    "Status",
    "SweepReport",
    "WorkerStatus",
    "remedy_of",
]
