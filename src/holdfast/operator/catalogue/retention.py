"""Verbs for retention. All that change something are for admins: what they take is gone."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from holdfast.errors import ConfigurationError
from holdfast.operator import encoding
from holdfast.operator.catalogue.overview import Nothing
from holdfast.operator.catalogue.verb import Arguments, Catalogue, Change, Id, Name, ReasonedChange, Text
from holdfast.operator.operator import Operator
from holdfast.operator.retention import Erasure
from holdfast.operator.roles import Role
from holdfast.postgres.operations.retention import RetentionReport
from holdfast.retention import ALL_CLASSES, Disposal, RetentionPolicy

VERBS = Catalogue()

Days = Annotated[int, Field(ge=0, le=36_500)]


class Sweep(Change):
    pass


class SetPolicy(Change):
    entity: Name
    content_class: Annotated[Text, Field(min_length=1, max_length=800)] = ALL_CLASSES
    active_days: Days | None = Field(None, description="Days until a row is tombstoned.")
    grace_days: Days = Field(7, description="Days from then to its disposal.")
    disposal: Disposal = Disposal.HARD_DELETE
    remove: bool = Field(False, description="Remove the policy: such rows are kept.")


class Domain(Arguments):
    domain_id: Id


class Erase(Domain, ReasonedChange):
    cancel_open: bool = Field(False, description="Also cancel and erase its open events.")


@VERBS.reads("retention.show")
async def show(operator: Operator, given: Nothing) -> RetentionReport:
    """The policies, what a sweep would take now, and the last sweep."""
    return await operator.retention.report()


@VERBS.changes("retention.sweep", Role.ADMIN)
async def sweep(operator: Operator, given: Sweep) -> dict[str, Any]:
    """Take everything that is due, in batches."""
    due = encoding.plain((await operator.retention.report()).due)
    if given.dry_run:
        return {"dry_run": True, "due": due, "swept": {}}
    done = await operator.retention.sweep(reason=given.reason)
    return {"dry_run": False, "due": due, **encoding.plain(done)}


@VERBS.changes("retention.set", Role.ADMIN)
async def set_policy(operator: Operator, given: SetPolicy) -> dict[str, Any]:
    """Set how long rows of one kind are kept; the policies in force. Refused if a replay could then run twice."""
    if given.remove == (given.active_days is not None):
        raise ConfigurationError("active_days", "or remove is needed", "give exactly one of them")
    policy = None
    if given.active_days is not None:
        policy = RetentionPolicy(given.active_days, given.grace_days, given.disposal)
    in_force = await operator.retention.set_policy(
        given.entity, given.content_class, policy, reason=given.reason, dry_run=given.dry_run
    )
    return {"dry_run": given.dry_run, "policies": encoding.policies(in_force)}


@VERBS.changes("retention.erase", Role.ADMIN)
async def erase(operator: Operator, given: Erase) -> Erasure:
    """Erase payloads, headers, errors, history and keys of every settled event of a domain, also in the archive."""
    if given.dry_run:
        return await operator.retention.preview_erasure(given.domain_id)
    return await operator.retention.erase(given.domain_id, cancel_open=given.cancel_open, reason=given.reason)
