"""holdfast retention: the policies, what is due, sweeping it, and erasing the data of one domain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any

import typer

from holdfast.cli.command_group import command_group
from holdfast.cli.options import Change, JsonOption, Target, Where, spread
from holdfast.cli.output import counted, print_json, print_line, print_table, progress_bar
from holdfast.errors import ConfigurationError
from holdfast.operator import Erasure, Operator, RetentionReport, SweepReport, encoding
from holdfast.retention import ALL_CLASSES, Disposal, RetentionPolicies, RetentionPolicy

app = command_group("How long rows are kept, and what is left of them.")

# What a step of a sweep does, in words.
STEPS = {
    "delivered": "delivered, to be tombstoned",
    "tombstones": "tombstones, to be disposed of",
    "failed": "failed, to be tombstoned",
    "discarded": "discarded, cancelled or expired, to be disposed of",
    "archived": "archived, to be tombstoned",
    "archive_tombstones": "tombstones of the archive, to be disposed of",
    "inbox": "inbox rows, to be forgotten",
    "keys": "producers' keys, to be freed",
    "heads": "ordering keys that are done with, to be forgotten",
    "records": "idempotency records, to be forgotten",
    "rollup": "lines of the roll-up, to be deleted",
}


@app.command()
@spread
def show(where: Where, as_json: JsonOption = False) -> None:
    """Show the policies, what a sweep would take now, and when the last one ended."""
    found = where.run(lambda operator: operator.retention.report())
    if as_json:
        print_json(found)
        return
    print_policies(found.policies)
    print_due(found)
    last = ", ".join(f"{step} {count}" for step, count in found.last.items()) or "nothing"
    print_line(f"last sweep ended {found.finished_at:%Y-%m-%d %H:%M:%S}: {last}", "dim")
    if found.sweeping:
        print_line("a sweep is running", "dim")


@app.command()
@spread
def sweep(target: Target, change: Change) -> None:
    """Tombstone what has been kept long enough, and dispose of what has been a tombstone long enough."""
    due = target.run(lambda operator: operator.retention.report())
    if change.dry_run or not due.due:
        if change.as_json:
            print_json({"dry_run": change.dry_run, "due": due.due, "swept": {}})
        else:
            print_due(due)
        return
    if not change.as_json:
        print_due(due)
    change.confirm(f"Sweep {due.total:,}{' or more' if due.more else ''} {'row' if due.total == 1 else 'rows'}?")

    async def run(operator: Operator) -> SweepReport:
        with progress("sweeping", None if due.more else due.total) as advance:
            return await operator.retention.sweep(reason=change.reason, on_batch=lambda batch: advance(batch.swept))

    done = target.run(run)
    if change.as_json:
        print_json({"dry_run": False, "due": due.due, **asdict(done)})
    else:
        print_table(["swept", "rows"], [(STEPS[step], count) for step, count in done.swept.items() if count])
        longest = f"the longest took {done.longest * 1000:.0f} ms"
        print_line(f"{counted(done.total, 'row')} in {counted(done.batches, 'batch', 'batches')}, {longest}", "dim")
        for left in done.refused:
            print_line(f"! left {STEPS[left.step]} of {left.content_class or 'all classes'}: {left.error}", "yellow")
    if done.refused:
        raise typer.Exit(1)


@app.command("set")
@spread
def set_policy(
    target: Target,
    change: Change,
    entity: Annotated[
        str,
        typer.Argument(help="outbox_row, failed_row, archive_row, event_handled, idempotency_record or rollup_row."),
    ],
    content_class: Annotated[
        str, typer.Option("--class", metavar="NAME", help="A content class; * is all that have no policy of their own.")
    ] = ALL_CLASSES,
    active_days: Annotated[int | None, typer.Option("--active-days", help="Days until a row is tombstoned.")] = None,
    grace_days: Annotated[int, typer.Option("--grace-days", help="Days from then to its disposal.")] = 7,
    disposal: Annotated[Disposal, typer.Option("--disposal", help="How it is disposed of.")] = Disposal.HARD_DELETE,
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove the policy: such rows are kept until an operator resolves them.")
    ] = False,
) -> None:
    """Set how long rows of one kind are kept. Refused if the inbox would forget before they are gone."""
    if remove == (active_days is not None):
        raise ConfigurationError("--active-days", "or --remove is needed", "give exactly one of them")
    policy = None if active_days is None else RetentionPolicy(active_days, grace_days, disposal)
    kept = "kept until an operator resolves them" if policy is None else f"kept {policy.total_days} days"

    async def act(operator: Operator) -> tuple[RetentionPolicies, RetentionPolicies]:
        options: dict[str, Any] = {"reason": change.reason}
        before = (await operator.retention.report()).policies
        found = await operator.retention.set_policy(entity, content_class, policy, dry_run=True, **options)
        change.confirm(f"Rows ({entity}, {content_class}) are {kept}. Go on?")
        if not change.dry_run:
            found = await operator.retention.set_policy(entity, content_class, policy, **options)
        return before, found

    before, in_force = target.run(act)
    if change.as_json:
        print_json({"dry_run": change.dry_run, "policies": encoding.policies(in_force)})
        return
    if change.dry_run:
        print_line("now:")
        print_policies(before)
        print_line("would be:")
    print_policies(in_force)


@app.command()
@spread
def erase(
    target: Target,
    change: Change,
    domain_id: Annotated[str, typer.Argument(metavar="DOMAIN_ID", help="The person's or tenant's id.")],
    cancel_open: Annotated[bool, typer.Option("--cancel-open", help="Also cancel and erase its open events.")] = False,
) -> None:
    """Erase payload, headers, errors, history and keys of every settled event of a domain, also in the archive."""
    found = target.run(lambda operator: preview(operator, domain_id))
    if change.dry_run:
        print_erasure(found, change, cancel_open)
        return
    rows = found.total + (found.open if cancel_open else 0)
    change.confirm(f"Erase the data of {counted(rows, 'row')} of {found.domain_id} for good?")

    async def run(operator: Operator) -> Erasure:
        with progress("erasing", await operator.retention.size()) as advance:
            return await operator.retention.erase(
                domain_id, cancel_open=cancel_open, reason=change.reason, on_page=advance
            )

    done = target.run(run)
    print_erasure(done, change, cancel_open)
    if done.open:
        raise typer.Exit(1)


async def preview(operator: Operator, domain_id: str) -> Erasure:
    """What an erasure would change."""
    with progress("counting", await operator.retention.size()) as advance:
        return await operator.retention.preview_erasure(domain_id, on_page=advance)


# --- output ---


@contextmanager
def progress(title: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal, and nothing elsewhere. The total may be an estimate."""
    with progress_bar() as bars:
        bar = bars.add_task(title, total=total or None)

        def advance(rows: int) -> None:
            bars.start()
            bars.advance(bar, rows)

        yield advance


def print_policies(policies: RetentionPolicies) -> None:
    print_table(
        ["kept", "class", "active days", "grace days", "then"],
        [
            (entity, name, policy.active_ttl_days, policy.tombstoned_grace_days, policy.disposal.value)
            for (entity, name), policy in sorted(policies.items())
        ],
    )


def print_due(found: RetentionReport) -> None:
    if not found.due:
        print_line("nothing is due")
        return
    print_table(
        ["due", "class", "rows"],
        [
            (STEPS[each.step], each.content_class or "-", f"{each.count:,}{'+' if each.more else ''}")
            for each in found.due
        ],
    )


def print_erasure(found: Erasure, change: Change, cancel_open: bool) -> None:
    if change.as_json:
        print_json({**asdict(found), "cancel_open": cancel_open})
        return
    print_line(
        f"{counted(found.outbox, 'row')} of the outbox and {found.archive:,} of the archive {change.would}erased"
    )
    if found.failed:
        are = "is a dead letter, which" if found.failed == 1 else "are dead letters, which"
        print_line(f"! {found.failed:,} of them {are} cannot be replayed afterwards", "yellow")
    if found.records:
        print_line(f"{found.records:,} idempotency records that name it {change.would}forgotten, or lose their answers")
    for place, count in found.kept.items():
        print_line(f"! {count:,} in {place} name it and stay", "yellow")
    print_line(f"not known: {'; '.join(found.unknown)}")
    if found.open:
        remedy = "they are cancelled first" if cancel_open and found.dry_run else "erase again when they are settled"
        print_line(f"! {found.open:,} are open; {remedy}, or use --cancel-open", "yellow")
