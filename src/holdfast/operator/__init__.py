"""The verbs of operators, for the command line and for other tools: see `Operator`."""

from typing import TYPE_CHECKING

from holdfast.lazy import lazy_names

if TYPE_CHECKING:
    from holdfast.operator.failed import Edited
    from holdfast.operator.generations import MovedGeneration
    from holdfast.operator.handlers import FlowChange, ViaChange
    from holdfast.operator.operator import Operator
    from holdfast.operator.outcome import Moved
    from holdfast.operator.plan_runner import Progress
    from holdfast.operator.plans import PlanChange, PlanReport
    from holdfast.operator.pool import DatabaseAway, Operators, OperatorsBusy
    from holdfast.operator.relay import RelayChange, RelayCheck, RelayRotation
    from holdfast.operator.retention import Erasure
    from holdfast.operator.schedules import ScheduleChange, ScheduleReport
    from holdfast.operator.selection import OpenFilters, Selection
    from holdfast.operator.session import Refused
    from holdfast.operator.workers import ReleasedWorker
    from holdfast.postgres.doctor import CHECKS, SEVERITIES, Check, Finding, Part, Report, Severity
    from holdfast.postgres.faults import DATABASE_ERRORS, is_away, remedy_of
    from holdfast.postgres.operations.archive import ArchivedDetail, ArchivedEvent
    from holdfast.postgres.operations.audit import AuditLine
    from holdfast.postgres.operations.brokers import CarriedHandler, LostDelivery
    from holdfast.postgres.operations.events import Delivery, EventDetail, Head, OpenEvent
    from holdfast.postgres.operations.failed import (
        FailedEvent,
        FailureGroup,
        FailureGroups,
        FailureHistogram,
        FailureHistograms,
    )
    from holdfast.postgres.operations.flow import HandlerFlow, Limit
    from holdfast.postgres.operations.generations import Generation
    from holdfast.postgres.operations.handlers import HandlerStatus
    from holdfast.postgres.operations.keys import BlockedKey
    from holdfast.postgres.operations.partitions import Partition, PartitionReport
    from holdfast.postgres.operations.patience import Blocked, ReadTimeout
    from holdfast.postgres.operations.plans import FailedAgain, FailedAgainRow, Plan, PlanOutcomes, Preview
    from holdfast.postgres.operations.rates import Balance, Flow, HandlerRates, Period, Signals
    from holdfast.postgres.operations.requests import Request, RequestPage
    from holdfast.postgres.operations.retention import RetentionReport
    from holdfast.postgres.operations.search import Children, EventLine, EventPage, Relative
    from holdfast.postgres.operations.status import (
        MOST,
        MOST_IN_ROUTE,
        MOST_ROUTES,
        MOST_UNSERVED,
        MUCH_LAG,
        BlockedKeys,
        NewestFailure,
        RouteStatus,
        Status,
        WorkerStatus,
    )
    from holdfast.postgres.operations.sweeping import SweepReport
    from holdfast.postgres.schedules import MOST_SCHEDULES, ScheduleStatus
    from holdfast.postgres.schema.partitions import PartitionStep
    from holdfast.postgres.wakeup.mode import Mode
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "ArchivedDetail": "holdfast.postgres.operations.archive",
            "ArchivedEvent": "holdfast.postgres.operations.archive",
            "AuditLine": "holdfast.postgres.operations.audit",
            "Balance": "holdfast.postgres.operations.rates",
            "Blocked": "holdfast.postgres.operations.patience",
            "BlockedKey": "holdfast.postgres.operations.keys",
            "BlockedKeys": "holdfast.postgres.operations.status",
            "CHECKS": "holdfast.postgres.doctor",
            "CarriedHandler": "holdfast.postgres.operations.brokers",
            "Check": "holdfast.postgres.doctor",
            "Children": "holdfast.postgres.operations.search",
            "DATABASE_ERRORS": "holdfast.postgres.faults",
            "DatabaseAway": "holdfast.operator.pool",
            "Delivery": "holdfast.postgres.operations.events",
            "Edited": "holdfast.operator.failed",
            "Erasure": "holdfast.operator.retention",
            "EventDetail": "holdfast.postgres.operations.events",
            "EventLine": "holdfast.postgres.operations.search",
            "EventPage": "holdfast.postgres.operations.search",
            "FailedAgain": "holdfast.postgres.operations.plans",
            "FailedAgainRow": "holdfast.postgres.operations.plans",
            "FailedEvent": "holdfast.postgres.operations.failed",
            "FailureGroup": "holdfast.postgres.operations.failed",
            "FailureGroups": "holdfast.postgres.operations.failed",
            "FailureHistogram": "holdfast.postgres.operations.failed",
            "FailureHistograms": "holdfast.postgres.operations.failed",
            "Finding": "holdfast.postgres.doctor",
            "Flow": "holdfast.postgres.operations.rates",
            "FlowChange": "holdfast.operator.handlers",
            "Generation": "holdfast.postgres.operations.generations",
            "HandlerFlow": "holdfast.postgres.operations.flow",
            "HandlerRates": "holdfast.postgres.operations.rates",
            "HandlerStatus": "holdfast.postgres.operations.handlers",
            "Head": "holdfast.postgres.operations.events",
            "Limit": "holdfast.postgres.operations.flow",
            "LostDelivery": "holdfast.postgres.operations.brokers",
            "MOST": "holdfast.postgres.operations.status",
            "MOST_IN_ROUTE": "holdfast.postgres.operations.status",
            "MOST_ROUTES": "holdfast.postgres.operations.status",
            "MOST_SCHEDULES": "holdfast.postgres.schedules",
            "MOST_UNSERVED": "holdfast.postgres.operations.status",
            "MUCH_LAG": "holdfast.postgres.operations.status",
            "Mode": "holdfast.postgres.wakeup.mode",
            "Moved": "holdfast.operator.outcome",
            "MovedGeneration": "holdfast.operator.generations",
            "NewestFailure": "holdfast.postgres.operations.status",
            "OpenEvent": "holdfast.postgres.operations.events",
            "OpenFilters": "holdfast.operator.selection",
            "Operator": "holdfast.operator.operator",
            "Operators": "holdfast.operator.pool",
            "OperatorsBusy": "holdfast.operator.pool",
            "Part": "holdfast.postgres.doctor",
            "Partition": "holdfast.postgres.operations.partitions",
            "PartitionReport": "holdfast.postgres.operations.partitions",
            "PartitionStep": "holdfast.postgres.schema.partitions",
            "Period": "holdfast.postgres.operations.rates",
            "Plan": "holdfast.postgres.operations.plans",
            "PlanChange": "holdfast.operator.plans",
            "PlanOutcomes": "holdfast.postgres.operations.plans",
            "PlanReport": "holdfast.operator.plans",
            "Preview": "holdfast.postgres.operations.plans",
            "Progress": "holdfast.operator.plan_runner",
            "ReadTimeout": "holdfast.postgres.operations.patience",
            "Refused": "holdfast.operator.session",
            "RelayChange": "holdfast.operator.relay",
            "RelayCheck": "holdfast.operator.relay",
            "RelayRotation": "holdfast.operator.relay",
            "Relative": "holdfast.postgres.operations.search",
            "ReleasedWorker": "holdfast.operator.workers",
            "Report": "holdfast.postgres.doctor",
            "Request": "holdfast.postgres.operations.requests",
            "RequestPage": "holdfast.postgres.operations.requests",
            "RetentionReport": "holdfast.postgres.operations.retention",
            "RouteStatus": "holdfast.postgres.operations.status",
            "SEVERITIES": "holdfast.postgres.doctor",
            "ScheduleChange": "holdfast.operator.schedules",
            "ScheduleReport": "holdfast.operator.schedules",
            "ScheduleStatus": "holdfast.postgres.schedules",
            "Selection": "holdfast.operator.selection",
            "Severity": "holdfast.postgres.doctor",
            "Signals": "holdfast.postgres.operations.rates",
            "Status": "holdfast.postgres.operations.status",
            "SweepReport": "holdfast.postgres.operations.sweeping",
            "ViaChange": "holdfast.operator.handlers",
            "WorkerStatus": "holdfast.postgres.operations.status",
            "is_away": "holdfast.postgres.faults",
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
    "MUCH_LAG",
    "SEVERITIES",
    "ArchivedDetail",
    "ArchivedEvent",
    "AuditLine",
    "Balance",
    "Blocked",
    "BlockedKey",
    "BlockedKeys",
    "CarriedHandler",
    "Check",
    "Children",
    "DatabaseAway",
    "Delivery",
    "Edited",
    "Erasure",
    "EventDetail",
    "EventLine",
    "EventPage",
    "FailedAgain",
    "FailedAgainRow",
    "FailedEvent",
    "FailureGroup",
    "FailureGroups",
    "FailureHistogram",
    "FailureHistograms",
    "Finding",
    "Flow",
    "FlowChange",
    "Generation",
    "HandlerFlow",
    "HandlerRates",
    "HandlerStatus",
    "Head",
    "Limit",
    "LostDelivery",
    "Mode",
    "Moved",
    "MovedGeneration",
    "NewestFailure",
    "OpenEvent",
    "OpenFilters",
    "Operator",
    "Operators",
    "OperatorsBusy",
    "Part",
    "Partition",
    "PartitionReport",
    "PartitionStep",
    "Period",
    "Plan",
    "PlanChange",
    "PlanOutcomes",
    "PlanReport",
    "Preview",
    "Progress",
    "ReadTimeout",
    "Refused",
    "Relative",
    "RelayChange",
    "RelayCheck",
    "RelayRotation",
    "ReleasedWorker",
    "Report",
    "Request",
    "RequestPage",
    "RetentionReport",
    "RouteStatus",
    "ScheduleChange",
    "ScheduleReport",
    "ScheduleStatus",
    "Selection",
    "Severity",
    "Signals",
    "Status",
    "SweepReport",
    "ViaChange",
    "WorkerStatus",
    "is_away",
    "remedy_of",
]
