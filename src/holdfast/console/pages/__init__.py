"""The pages of the console, one module for each."""

from collections.abc import Mapping
from typing import Final

from holdfast.console.live import Feed
from holdfast.console.page import Page
from holdfast.console.pages import (
    archive,
    audit,
    decisions,
    doctor,
    event,
    events,
    failures,
    generations,
    go,
    handler_actions,
    handlers,
    overview,
    plan,
    plans,
    preferences,
    requests,
    retention,
    schedules,
    workers,
)

PAGES: Final[tuple[Page, ...]] = (
    *overview.PAGES,
    *events.PAGES,
    *event.PAGES,
    *failures.PAGES,
    *decisions.PAGES,
    *plans.PAGES,
    *plan.PAGES,
    *handlers.PAGES,
    *handler_actions.PAGES,
    *workers.PAGES,
    *generations.PAGES,
    *schedules.PAGES,
    *requests.PAGES,
    *retention.PAGES,
    *archive.PAGES,
    *doctor.PAGES,
    *audit.PAGES,
    *go.PAGES,
    *preferences.PAGES,
)
FEEDS: Final[Mapping[str, Feed]] = {
    "overview": overview.OverviewFeed(),
    "events": events.FEED,
    "failures": failures.FEED,
    "plans": plans.PlansFeed(),
    "plan": plan.PlanFeed(),
    "handlers": handlers.HandlersFeed(),
    "handler": handlers.HandlerFeed(),
    "workers": workers.WorkersFeed(),
    "doctor": doctor.DoctorFeed(),
}
