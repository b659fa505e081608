"""One event with its deliveries and their history, as `events show` and `failed show` print it."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime

from holdfast.characters import shell_word
from holdfast.cli import output
from holdfast.cli.next_commands import as_typed
from holdfast.operator import Delivery, EventDetail, Head


def show(found: EventDetail, as_json: bool) -> None:
    if as_json:
        output.print_json(found)
        return
    output.print_line(f"{found.event_type} v{found.event_version} {found.event_id}", "bold")
    rows: list[tuple[str, object]] = [
        ("occurred", found.occurred_at),
        ("source", found.source),
        ("target", found.target),
        ("class", found.content_class),
        ("domain id", found.domain_id),
        ("idempotency key", found.idempotency_key),
        ("event key", found.event_key),
        ("trace", found.trace_context),
        ("handled by", found.handled_by),
    ]
    output.print_facts(rows)
    for each in found.deliveries:
        output.print_line("")
        _delivery(each, found)
    if found.payload is not None:
        output.print_line("")
        output.print_line("payload", "bold")
        output.print_json(found.payload)
    if found.headers is not None:
        output.print_line("")
        output.print_line("headers", "bold")
        output.print_json(found.headers)


def _delivery(each: Delivery, event: EventDetail) -> None:
    if each.state == "fanned_out":
        output.print_line(f"fanned out  {_fates(event)}  {each.id}", "bold")
        output.print_line(f"  {'generation':<15} {each.generation} on {each.channel}")
        return
    output.print_line(f"{each.state}  {each.handler_name or each.route}  {each.id}", "bold")
    facts: list[tuple[str, object]] = [
        ("generation", f"{each.generation} on {each.channel}"),
        ("attempts", each.attempts),
    ]
    if each.archive_id is not None:
        facts.append(("archive number", each.archive_id))
    if each.status == "pending":
        facts.append(("due since" if each.available_at <= datetime.now(UTC) else "next attempt", each.available_at))
    if each.handler_name is None and each.owed_to:
        facts.append(("owed to", each.owed_to))
    facts += [("ordering key", each.ordering_key), ("fairness key", each.fairness_key)]
    facts += [("waits behind", _head(head, each)) for head in each.behind]
    if each.lease_expires_at:
        facts += [("worker", each.worker or "unknown"), ("claimed", each.claimed_at)]
        facts.append(("leased until", each.lease_expires_at))
    if each.delivered_at:
        facts.append(("delivered", each.delivered_at))
    if each.failed_at:
        facts += [("failed", each.failed_at), ("reason", each.failure_reason), ("group", _group(each))]
    if each.deleted_at:
        facts.append(("discarded", each.deleted_at))
    output.print_facts(facts)
    for line in (each.last_error or "").splitlines():
        output.print_line(f"  {line}", "red")
    for line in (each.traceback or "").splitlines():
        output.print_line(f"  {line}", "dim")
    for number, cycle in enumerate(each.cycles, start=1):
        if cycle.edited_to is not None:
            corrected = f"corrected {output.shown(cycle.replayed_at)} by {cycle.replayed_by}"
            output.print_line(f"  {corrected}: {cycle.edited_to} has taken its place")
            continue
        output.print_line(
            f"  cycle {number}: {output.counted(cycle.attempts, 'attempt')}, failed {output.shown(cycle.failed_at)} "
            f"in generation {cycle.generation}, replayed {output.shown(cycle.replayed_at)} by {cycle.replayed_by}: "
            f"{output.first_line(cycle.last_error)}{f' at {cycle.raised_at}' if cycle.raised_at else ''}"
        )
    for plan in each.plans:
        output.print_line(f"  plan {plan.plan_id}: {plan.why or plan.state} {output.shown(plan.replayed_at)}")
    for action in each.actions:
        reason = f": {action.reason}" if action.reason else ""
        output.print_line(f"  {output.shown(action.at)} {action.action} by {action.actor}{reason}")


def _fates(event: EventDetail) -> str:
    """What became of the deliveries of an event that was split: each handler has one of its own."""
    states = Counter(each.state for each in event.deliveries if each.state != "fanned_out")
    if not states:
        return "none of its deliveries is kept"
    counted = ", ".join(f"{count} {state.replace('_', ' ')}" for state, count in sorted(states.items()))
    return f"{output.counted(states.total(), 'delivery', 'deliveries')}: {counted}"


def _head(head: Head, each: Delivery) -> str:
    """What a delivery waits for, and how an operator lets its key go on."""
    if not head.failed:
        return f"{head.id}, which {head.handler_name} has not finished"
    words = f"{shell_word(head.handler_name)} {shell_word(each.ordering_key or '')}"
    return f"{head.id}, a dead letter of {head.handler_name}; replay or discard it, or: " + as_typed(
        f"holdfast keys release {words}"
    )


def _group(each: Delivery) -> str | None:
    """The name of its failure group. What was cancelled or has expired has none."""
    if each.handler_name is None or each.failure_reason in ("cancelled", "expired"):
        return None
    return f"{each.handler_name}/{each.error_signature or ''}"
