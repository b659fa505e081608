"""Retention policies: how long rows are kept, and what is left of them afterwards."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from holdfast.checks import one_of, whole
from holdfast.errors import ConfigurationError

_LONGEST_DAYS = 36_500
# Rows of these entities can be replayed, so the inbox must remember longer than they live.
_REPLAYABLE = ("outbox_row", "failed_row", "archive_row")
_INBOX = "event_handled"
_RECORDS = "idempotency_record"
_ROLLUP = "rollup_row"
ENTITIES = (*_REPLAYABLE, _INBOX, _RECORDS, _ROLLUP)
# Entities without content classes and without a payload to strip, and what they have instead.
_WHOLE = {
    _INBOX: "the inbox knows keys",
    _RECORDS: "idempotency records have keys",
    _ROLLUP: "the roll-up has handlers",
}
ALL_CLASSES = "*"


class Disposal(StrEnum):
    """What happens to a row when its grace is over."""

    HARD_DELETE = "HARD_DELETE"
    STRIP_PAYLOAD = "STRIP_PAYLOAD"
    RETAIN_METADATA = "RETAIN_METADATA"


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """Days until a settled row is tombstoned, days from there to its disposal, and the disposal."""

    active_ttl_days: int
    tombstoned_grace_days: int
    disposal: Disposal = Disposal.HARD_DELETE

    def __post_init__(self) -> None:
        for field in ("active_ttl_days", "tombstoned_grace_days"):
            whole(field, getattr(self, field), 0, _LONGEST_DAYS, remedy=f"give whole days from 0 to {_LONGEST_DAYS:,}")
        if not isinstance(self.disposal, Disposal):
            raise ConfigurationError("disposal", "is unknown", f"use one of {', '.join(Disposal)}")

    @property
    def total_days(self) -> int:
        return self.active_ttl_days + self.tombstoned_grace_days

    @property
    def deletes_at_once(self) -> bool:
        """Whether a delivered row is deleted by the statement that settles it."""
        return self.total_days == 0 and self.disposal is Disposal.HARD_DELETE


RetentionPolicies = Mapping[tuple[str, str], RetentionPolicy]

# The policies of a new schema. Afterwards those in core.retention_policies count.
DEFAULT_POLICIES: RetentionPolicies = MappingProxyType(
    {
        ("outbox_row", ALL_CLASSES): RetentionPolicy(45, 7, Disposal.HARD_DELETE),
        (_INBOX, ALL_CLASSES): RetentionPolicy(60, 7, Disposal.HARD_DELETE),
        # Counted from the time at which a key expires, which each request decides.
        (_RECORDS, ALL_CLASSES): RetentionPolicy(0, 0, Disposal.HARD_DELETE),
        (_ROLLUP, ALL_CLASSES): RetentionPolicy(14, 0, Disposal.HARD_DELETE),
    }
)


def policy_for(entity: str, content_class: str, policies: RetentionPolicies = DEFAULT_POLICIES) -> RetentionPolicy:
    """Return the policy of a content class, or else the one that its entity has for all classes."""
    policy = policies.get((entity, content_class)) or policies.get((entity, ALL_CLASSES))
    if policy is None:
        problem = f"has no policy for {entity!r}"
        raise ConfigurationError("retention", problem, f"add an entry ({entity!r}, '*')")
    return policy


def check_policies(policies: RetentionPolicies = DEFAULT_POLICIES) -> None:
    """Refuse policies under which a replayed event could run twice.

    The inbox must outlive every row that can be replayed; otherwise a replay finds no trace of the first
    run and repeats its effects.
    """
    for entity in ("outbox_row", _INBOX):
        policy_for(entity, ALL_CLASSES, policies)
    inbox = inbox_days(policies)
    for (entity, content_class), policy in policies.items():
        if entity in _REPLAYABLE and inbox <= policy.total_days:
            raise ConfigurationError(
                f"retention.{_INBOX}.active_ttl_days",
                f"is {inbox}, but ({entity}, {content_class}) rows live {policy.total_days} days",
                f"set it to {policy.total_days + 1} or more, or keep {entity} for less time",
            )


def inbox_days(policies: RetentionPolicies) -> int:
    """Return for how many days the inbox certainly keeps the keys of handled events."""
    return min(policy.active_ttl_days for (entity, _), policy in policies.items() if entity == _INBOX)


def with_policy(
    policies: RetentionPolicies, entity: str, content_class: str, policy: RetentionPolicy | None
) -> RetentionPolicies:
    """Return the policies with one added, changed or (None) removed; refuse what `check_policies` refuses."""
    one_of("entity", entity, ENTITIES)
    if not isinstance(content_class, str) or not 1 <= len(content_class.encode()) <= 800:
        raise ConfigurationError("content_class", f"is {content_class!r}", "name a class, or '*' for all of them")
    if entity in _WHOLE and content_class != ALL_CLASSES:
        problem = f"is {content_class!r}, but {_WHOLE[entity]} and no classes"
        raise ConfigurationError("content_class", problem, "use '*'")
    if entity in _WHOLE and policy is not None and policy.disposal is not Disposal.HARD_DELETE:
        problem = f"is {policy.disposal}, but there is nothing in ({entity}, '*') to strip"
        raise ConfigurationError("disposal", problem, f"use {Disposal.HARD_DELETE}")
    changed = {key: kept for key, kept in policies.items() if key != (entity, content_class)}
    if policy is not None:
        changed[entity, content_class] = policy
    check_policies(changed)
    return MappingProxyType(changed)
