"""The verbs of operators, for the command line and for other tools: see `Operator`."""

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
from holdfast.postgres.schedules import ScheduleStatus
from holdfast.postgres.wakeup.mode import Mode

__all__ = [
    "CHECKS",
    "DATABASE_ERRORS",
    "MOST",
    "MOST_IN_ROUTE",
    "MOST_ROUTES",
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
