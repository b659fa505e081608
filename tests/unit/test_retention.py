"""How long rows live, and that the inbox remembers longer than anything that can be replayed."""

import re
from typing import Any

import pytest

from holdfast.errors import ConfigurationError
from holdfast.retention import DEFAULT_POLICIES, Disposal, RetentionPolicy, check_policies, policy_for, with_policy


def test_the_default_policies() -> None:
    """Outbox 45 + 7 days, inbox 60 + 7, hard delete; idempotency records go when they expire, the roll-up
    after 14 days (OBX-5).
    """
    assert dict(DEFAULT_POLICIES) == {
        ("outbox_row", "*"): RetentionPolicy(45, 7, Disposal.HARD_DELETE),
        ("event_handled", "*"): RetentionPolicy(60, 7, Disposal.HARD_DELETE),
        ("idempotency_record", "*"): RetentionPolicy(0, 0, Disposal.HARD_DELETE),
        ("rollup_row", "*"): RetentionPolicy(14, 0, Disposal.HARD_DELETE),
    }


def test_the_inbox_outlives_the_outbox() -> None:
    """The inequality that makes de-duplication correct (OBX-5)."""
    outbox, inbox = policy_for("outbox_row", "*"), policy_for("event_handled", "*")
    assert inbox.active_ttl_days > outbox.active_ttl_days + outbox.tombstoned_grace_days
    check_policies()


def test_the_disposals_are_a_closed_set() -> None:
    """OBX-5."""
    assert {*Disposal} == {"HARD_DELETE", "STRIP_PAYLOAD", "RETAIN_METADATA"}


@pytest.mark.parametrize(("inbox", "accepted"), [(53, True), (52, False), (51, False), (0, False)])
def test_an_inbox_that_forgets_too_early_is_refused(inbox: int, accepted: bool) -> None:
    """Refused at start, with the number that would do (OBX-5)."""
    registry = {**DEFAULT_POLICIES, ("event_handled", "*"): RetentionPolicy(inbox, 0)}
    if accepted:
        check_policies(registry)
    else:
        with pytest.raises(ConfigurationError, match="53 or more") as caught:
            check_policies(registry)
        assert caught.value.field == "retention.event_handled.active_ttl_days"


@pytest.mark.parametrize("key", [("outbox_row", "audit"), ("archive_row", "*")])
def test_every_content_class_and_the_archive_count(key: tuple[str, str]) -> None:
    """The longest life of what can be replayed decides (OBX-5)."""
    with pytest.raises(ConfigurationError, match=re.escape(f"({key[0]}, {key[1]})")):
        check_policies({**DEFAULT_POLICIES, key: RetentionPolicy(60, 0)})
    check_policies({**DEFAULT_POLICIES, key: RetentionPolicy(59, 0)})


def test_every_inbox_class_must_remember() -> None:
    """A shorter inbox policy for one content class counts as well (OBX-5)."""
    with pytest.raises(ConfigurationError):
        check_policies({**DEFAULT_POLICIES, ("event_handled", "audit"): RetentionPolicy(52, 0)})


def test_other_entities_do_not_matter() -> None:
    check_policies({**DEFAULT_POLICIES, ("idempotency_record", "*"): RetentionPolicy(3_650, 0)})


@pytest.mark.parametrize("entity", ["outbox_row", "event_handled"])
def test_a_registry_without_a_default_is_refused(entity: str) -> None:
    registry = {key: policy for key, policy in DEFAULT_POLICIES.items() if key[0] != entity}
    with pytest.raises(ConfigurationError, match=entity):
        check_policies(registry)


def test_a_content_class_may_have_a_policy_of_its_own() -> None:
    """Keyed by entity and content class (OBX-5)."""
    audit = RetentionPolicy(10, 0, Disposal.RETAIN_METADATA)
    registry = {**DEFAULT_POLICIES, ("outbox_row", "audit"): audit}
    assert policy_for("outbox_row", "audit", registry) is audit
    assert policy_for("outbox_row", "operations", registry) == RetentionPolicy(45, 7)


def test_zero_days_are_a_policy() -> None:
    """The settle statement deletes the row (OBX-5)."""
    assert RetentionPolicy(0, 0).total_days == 0


@pytest.mark.parametrize("days", [-1, True, 1.5, "45", None, 100_000])
def test_days_are_checked(days: Any) -> None:
    for arguments in ((days, 0), (0, days)):
        with pytest.raises(ConfigurationError, match="days"):
            RetentionPolicy(*arguments)


def test_the_disposal_is_checked() -> None:
    with pytest.raises(ConfigurationError, match="STRIP_PAYLOAD"):
        RetentionPolicy(1, 1, "SHRED")  # type: ignore[arg-type]


@pytest.mark.parametrize("key", [("failed_row", "*"), ("failed_row", "audit")])
def test_failed_rows_count_too(key: tuple[str, str]) -> None:
    """What is configured to be kept as failed can be replayed for as long (OBX-5)."""
    with pytest.raises(ConfigurationError, match=re.escape(f"({key[0]}, {key[1]})")):
        check_policies({**DEFAULT_POLICIES, key: RetentionPolicy(30, 30)})
    check_policies({**DEFAULT_POLICIES, key: RetentionPolicy(30, 29)})


@pytest.mark.parametrize(
    ("policy", "brief"),
    [
        (RetentionPolicy(0, 0), True),
        (RetentionPolicy(0, 1), False),
        (RetentionPolicy(1, 0), False),
        (RetentionPolicy(0, 0, Disposal.STRIP_PAYLOAD), False),
    ],
)
def test_what_is_deleted_with_its_settle(policy: RetentionPolicy, brief: bool) -> None:
    """Neither kept nor stripped (OBX-5)."""
    assert policy.deletes_at_once is brief


def test_a_registry_with_one_more_policy() -> None:
    """The registry itself is left as it is (OBX-5)."""
    billing = RetentionPolicy(30, 1, Disposal.STRIP_PAYLOAD)
    changed = with_policy(DEFAULT_POLICIES, "outbox_row", "billing", billing)
    assert policy_for("outbox_row", "billing", changed) is billing
    assert with_policy(changed, "outbox_row", "billing", None) == DEFAULT_POLICIES
    assert ("outbox_row", "billing") not in DEFAULT_POLICIES
