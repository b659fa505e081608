"""Selections of dead letters, and of open events."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Any, TypedDict, get_args

from holdfast.errors import ConfigurationError
from holdfast.failure import FailureReason
from holdfast.names import channel_name
from holdfast.operator import arguments

# The reasons of a failure that an operator can put right.
REASONS = tuple(reason for reason in get_args(FailureReason) if reason not in ("cancelled", "expired"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The dead letters that match every given field.

    >>> Selection(handler="billing.charge_card", reason="rejected").as_json()
    '{"handler": "billing.charge_card", "reason": "rejected"}'
    """

    handler: str | None = None
    event_type: str | None = None
    source: str | None = None
    signature: str | None = None
    reason: str | None = None
    generation: int | None = None
    since: datetime | None = None  # failed at that time or later
    until: datetime | None = None  # failed before
    everything: bool = False  # no field is given on purpose
    archived: bool = False  # of those in the archive rather than in the outbox

    def __post_init__(self) -> None:
        if self.handler is not None:
            arguments.handler(self.handler)
        if self.event_type is not None:
            arguments.name("event_type", self.event_type)
        if self.source is not None:
            arguments.name("source", self.source)
        if self.signature is not None:
            arguments.signature(self.signature)
        if self.reason is not None and self.reason not in REASONS:
            raise ConfigurationError("reason", f"{self.reason!r} is unknown", f"use one of {', '.join(REASONS)}")
        if self.generation is not None:
            arguments.whole("generation", self.generation)
        if self.since is not None:
            arguments.moment("since", self.since)
        if self.until is not None:
            arguments.moment("until", self.until)
        if self.since is not None and self.until is not None and self.since >= self.until:
            raise ConfigurationError("until", "is not after since", "swap them")
        if self.everything and self.criteria:
            raise ConfigurationError("everything", "is given together with a filter", "give one of them")

    @classmethod
    def group(cls, group: str, **others: Any) -> Selection:
        """The dead letters of a group, which is written as handler/signature."""
        handler, signature = cls.parts(group)
        return cls(**{**others, "handler": handler, "signature": signature})

    @staticmethod
    def parts(group: str) -> tuple[str, str]:
        """The handler and the signature of a group's name."""
        handler, slash, signature = group.partition("/")
        if not slash:
            raise ConfigurationError(
                "group",
                f"{group[:80]!r} is not a failure group",
                "copy one from: holdfast failed groups (handler/signature)",
            )
        return handler, signature

    @property
    def criteria(self) -> dict[str, Any]:
        """The given fields, by name."""
        names = [field.name for field in fields(self) if field.name not in ("everything", "archived")]
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def in_archive(self) -> Selection:
        """The same selection, of the dead letters in the archive."""
        return replace(self, archived=True)

    def required(self) -> Selection:
        """The selection itself. An error when it is empty: a change of all events has to be explicit."""
        if not self.criteria and not self.everything:
            raise ConfigurationError("selection", "is empty", "name ids, a group or a filter, or select all: --all")
        return self

    def as_json(self, *, discarded: bool = False) -> str:
        """The selection for the database; `discarded`: of the discarded events rather than the dead letters."""
        plain = {name: v.isoformat() if isinstance(v, datetime) else v for name, v in self.criteria.items()}
        places = {"discarded": discarded, "archived": self.archived}
        return json.dumps(plain | {name: True for name, wanted in places.items() if wanted})

    def __str__(self) -> str:
        criteria = " ".join(f"{name}={value}" for name, value in self.criteria.items())
        text = criteria or f"every dead letter{' (--all)' if self.everything else ''}"
        return f"{text} in the archive" if self.archived else text


class OpenFilters(TypedDict, total=False):
    """The fields of `OpenSelection`, for type checkers."""

    event_type: str | None
    handler: str | None
    source: str | None
    generation: int | None
    channel: str | None
    route: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSelection:
    """The open deliveries that match every given field.

    A `route` is what the status and the doctor name: a handler, or a target and an event type, as in `*/order.placed`.
    """

    event_type: str | None = None
    handler: str | None = None
    source: str | None = None
    generation: int | None = None
    channel: str | None = None
    route: str | None = None

    def __post_init__(self) -> None:
        if self.event_type is not None:
            arguments.name("event_type", self.event_type)
        if self.handler is not None:
            arguments.handler(self.handler)
        if self.source is not None:
            arguments.name("source", self.source)
        if self.generation is not None:
            arguments.whole("generation", self.generation)
        if self.channel is not None:
            channel_name("channel", self.channel)
        if self.route is not None:
            arguments.line("route", self.route, 500)

    def required(self) -> OpenSelection:
        """The selection itself. An error when it is empty: what it selects is going to be changed."""
        if all(getattr(self, field.name) is None for field in fields(self)):
            raise ConfigurationError("selection", "is empty", "name an id, or a filter like --handler")
        return self
