"""The navigation: which pages stand where, with which icon, key and count."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """One page of the navigation."""

    name: str
    label: str
    path: str
    icon: str
    key: str = ""  # after g
    count: str = ""  # of the snapshot, shown beside the label


SECTIONS: tuple[tuple[str, tuple[Entry, ...]], ...] = (
    (
        "",
        (
            Entry("overview", "Overview", "/", "home", "o"),
            Entry("events", "Events", "/events", "lines", "e", "open"),
            Entry("failures", "Failures", "/failures", "failures", "f", "failed"),
            Entry("plans", "Plans", "/plans", "plan", "p", "plans"),
        ),
    ),
    (
        "Fleet",
        (
            Entry("handlers", "Handlers", "/handlers", "plug", "h"),
            Entry("workers", "Workers", "/workers", "chip", "w", "workers"),
            Entry("generations", "Generations", "/generations", "layers"),
            Entry("schedules", "Schedules", "/schedules", "calendar", "s"),
        ),
    ),
    (
        "Keeping",
        (
            Entry("requests", "Requests", "/requests", "key"),
            Entry("retention", "Retention", "/retention", "hourglass"),
            Entry("archive", "Archive", "/archive", "archived"),
        ),
    ),
    (
        "Trust",
        (
            Entry("doctor", "Doctor", "/doctor", "pulse", "d"),
            Entry("audit", "Audit", "/audit", "book", "a"),
        ),
    ),
)
TABS = ("overview", "failures", "events", "plans")  # of phones; the last one is More
