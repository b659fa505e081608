"""Verbs for what was written down: the audit, and requests with an idempotency key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from holdfast.operator.catalogue.verb import Arguments, Catalogue, Cursor, Id, Limit, Moment, Name, Text, Whole
from holdfast.operator.operator import Operator
from holdfast.postgres.operations.audit import AuditLine
from holdfast.postgres.operations.requests import Request, RequestPage, RequestState

VERBS = Catalogue()

Scope = Annotated[Text, Field(min_length=1, max_length=1_020)]
RequestKey = Annotated[Text, Field(min_length=1, max_length=255)]


@dataclass(frozen=True, slots=True)
class AuditPage:
    """Lines of the audit, the latest first; `next` is the cursor of the next page. None: there are no more."""

    lines: list[AuditLine]
    next: int | None


class ListAudit(Arguments):
    actor: Name | None = None
    action: Name | None = Field(None, description="One action, or what all actions of a kind begin with.")
    since: Moment | None = None
    steps: bool = Field(False, description="Include every single step of replay plans.")
    before: Whole | None = Field(None, description="The `next` of the page before.")
    limit: Limit = 50


class AuditOf(Arguments):
    id: Id = Field(description="Id of an event, or of one of its deliveries.")
    limit: Limit = 50


class ListRequests(Arguments):
    scope: Scope | None = None
    key: RequestKey | None = None
    state: RequestState | None = None
    since: Moment | None = None
    until: Moment | None = None
    before: Cursor | None = Field(None, description="The `next` of the page before.")
    limit: Limit = 50


class ShowRequest(Arguments):
    scope: Scope
    key: RequestKey


@VERBS.reads("audit.list")
async def audit(operator: Operator, given: ListAudit) -> AuditPage:
    """Actions of operators, the latest first."""
    lines = await operator.audit.page(**given.model_dump())
    return AuditPage(lines, lines[-1].id if len(lines) == given.limit else None)


@VERBS.reads("audit.event")
async def audit_of_event(operator: Operator, given: AuditOf) -> list[AuditLine]:
    """Actions that changed any delivery of an event, the latest first."""
    return await operator.audit.of_event(given.id, limit=given.limit)


@VERBS.reads("requests.list")
async def requests(operator: Operator, given: ListRequests) -> RequestPage:
    """Requests with an idempotency key, without bodies and keys; those that expire last first."""
    return await operator.requests.page(**given.model_dump())


@VERBS.reads("requests.show")
async def request(operator: Operator, given: ShowRequest) -> Request:
    """Whether a key was used in a scope, and how the request ended."""
    return await operator.requests.detail(given.scope, given.key)
