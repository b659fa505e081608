"""Verbs as values: a name, arguments that can be checked, a role, and what runs it."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Final, Self, TypeVar, get_type_hints
from uuid import UUID

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from holdfast.checks import UNPRINTABLE
from holdfast.errors import ConfigurationError
from holdfast.operator.operator import Operator
from holdfast.operator.roles import Role

LONGEST_PAGE: Final = 200
LARGEST: Final = 2**63 - 1
REVEAL: Final = "events.reveal"  # what the audit knows of: values for somebody from whom they are hidden
_DATE: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}").match
A = TypeVar("A", bound="Arguments")


def _printable(value: str) -> str:
    if UNPRINTABLE.search(value):
        raise ValueError("has control characters")
    return value


def _written_out(value: object) -> object:
    """Return the moment of a text. Pydantic takes 0.5 for one of 1970, and, being strict, no text after a check."""
    if not isinstance(value, str):
        return value
    problem = "is not a date and time like 2026-01-31T08:00:00Z"
    if not _DATE(value):
        raise ValueError(problem)
    try:
        return datetime.fromisoformat(value)
    except ValueError:
        raise ValueError(problem) from None


def _within_calendars(value: datetime) -> datetime:
    if not 1 < value.year < 9999:
        raise ValueError("is outside the years that a calendar can show")
    return value


Text = Annotated[str, AfterValidator(_printable)]
Name = Annotated[Text, Field(min_length=1, max_length=200)]
Key = Annotated[Text, Field(min_length=1, max_length=1_020)]
Cursor = Annotated[Text, Field(min_length=1, max_length=200)]
Id = UUID
Moment = Annotated[AwareDatetime, BeforeValidator(_written_out), AfterValidator(_within_calendars)]
Limit = Annotated[int, Field(ge=1, le=LONGEST_PAGE, description="How many to return at most.")]
Whole = Annotated[int, Field(ge=0, le=LARGEST)]
Reason = Annotated[Text, Field(min_length=1, max_length=500, description="The reason, for the audit.")]


class Arguments(BaseModel):
    """Arguments of a verb. What is not known is refused, because leaving it out would do more than was meant."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Counted(Arguments):
    """Arguments that select rows, and can be bound to those that a dry run has counted."""

    _counted: tuple[UUID, ...] | None = PrivateAttr(None)

    def exactly(self, ids: Iterable[UUID]) -> Self:
        """Return the same arguments for these rows and no others; the audit has how they were selected."""
        bound = self.model_copy()
        bound._counted = tuple(ids)
        return bound


class Change(Arguments):
    """Arguments of a verb that changes something. With `force` a reason is needed."""

    reason: Reason | None = None
    dry_run: bool = Field(False, description="Say what would happen, and change nothing.")

    @model_validator(mode="after")
    def _has_its_reason(self) -> Change:
        if getattr(self, "force", False) and self.reason is None and not self.dry_run:
            raise ValueError("reason is missing: force needs one")
        return self


class ReasonedChange(Change):
    """Arguments of a change that cannot be undone, or not for long: only a dry run needs no reason."""

    @model_validator(mode="after")
    def _is_reasoned(self) -> ReasonedChange:
        if self.reason is None and not self.dry_run:
            raise ValueError("reason is missing: this needs one")
        return self


@dataclass(frozen=True, slots=True)
class Verb:
    """Something that an operator can do, once for all skins."""

    name: str
    summary: str
    arguments: type[Arguments]
    result: Any  # the type of what it returns
    role: Role
    changes: bool
    run: Callable[[Operator, Any], Awaitable[object]]

    @property
    def reveals(self) -> bool:
        """Whether it returns payloads and headers when it is asked for them."""
        return self.name == REVEAL or (not self.changes and "payload" in self.arguments.model_fields)

    def parse(self, given: Mapping[str, Any] | str | bytes) -> Arguments:
        """Return checked arguments, from JSON text or from what JSON has. Errors name the field, and quote no value."""
        try:
            text = given if isinstance(given, str | bytes) else json.dumps(given)
            return self.arguments.model_validate_json(text, strict=True)
        except ValidationError as error:
            raise self._refusal(error) from None
        except (TypeError, ValueError, RecursionError):
            raise ConfigurationError("arguments", "are not JSON", "pass an object") from None

    def _refusal(self, error: ValidationError) -> ConfigurationError:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"] if isinstance(part, str))[:80]
        problem = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            known = ", ".join(self.arguments.model_fields) or "none"
            return ConfigurationError("arguments", "have a name that this verb does not know", f"use {known}")
        if not field and problem.startswith("reason "):
            return ConfigurationError("reason", problem.removeprefix("reason "), "say why, for who reads the audit")
        return ConfigurationError(field or "arguments", problem[:300], f"see the arguments of {self.name}")


class Catalogue(dict[str, Verb]):
    """Verbs by their names, as decorated functions add them."""

    def reads(self, name: str, role: Role = Role.VIEWER) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Add a verb that changes nothing."""
        return self._add(name, role, changes=False)

    def changes(self, name: str, role: Role = Role.OPERATOR) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Add a verb that changes something."""
        return self._add(name, role, changes=True)

    def _add(self, name: str, role: Role, *, changes: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def add(run: Callable[..., Any]) -> Callable[..., Any]:
            hints = get_type_hints(run)
            summary = " ".join((inspect.getdoc(run) or "").split())
            self[name] = Verb(name, summary, hints["given"], hints["return"], role, changes, run)
            return run

        return add
