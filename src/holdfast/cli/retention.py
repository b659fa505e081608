"""holdfast retention: how long what is kept, what is due, sweeping it, and erasing the data of one domain."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from holdfast.cli.options import Change, JsonOption, Target, Where, spread
from holdfast.cli.output import print_json, print_line, print_table
from holdfast.errors import ConfigurationError
from holdfast.operator import Operator, retention
from holdfast.operator.retention import MOST, Erasure, RetentionReport, SweepReport
from holdfast.postgres.retention import Batch
from holdfast.retention import ALL_CLASSES, Disposal, RetentionPolicies, RetentionPolicy

app = typer.Typer(help="How long rows are kept, and what is left of them.", no_args_is_help=True)

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
    "records": "idempotency records, to be forgotten",
}


@app.command()
@spread
def show(where: Where, as_json: JsonOption = False) -> None:
    """Show the policies, what a sweep would take now, and when the last one ended."""
    found = where.run(retention.show)
    if as_json:
        print_json(as_data(found))
        return
    print_policies(found.policies)
    print_due(found)
    last = ", ".join(f"{step} {count}" for step, count in found.last.items()) or "nothing"
    print_line(f"last sweep ended {found.finished_at:%Y-%m-%d %H:%M:%S}: {last}", "dim")
    if found.sweeping:
        print_line("a sweep is going on", "dim")


@app.command()
@spread
def sweep(target: Target, change: Change) -> None:
    """Tombstone what has been kept long enough, and dispose of what has been a tombstone long enough."""
    due = target.run(retention.show)
    if change.dry_run or not due.due:
        if change.as_json:
            print_json({"dry_run": change.dry_run, "due": as_data(due)["due"], "swept": {}})
        else:
            print_due(due)
        return
    if not change.as_json:
        print_due(due)
    change.confirm(f"Sweep {due.total:,}{' or more' if due.more else ''} rows?")

    async def run(operator: Operator) -> SweepReport:
        with progress("sweeping", None if due.more else due.total) as advance:

            def on_batch(batch: Batch) -> None:
                advance(batch.swept)

            return await retention.sweep(operator, reason=change.reason, on_batch=on_batch)

    done = target.run(run)
    if change.as_json:
        print_json({"dry_run": False, "due": as_data(due)["due"], **asdict(done)})
    else:
        print_table(["swept", "rows"], [(STEPS[step], count) for step, count in done.swept.items() if count])
        longest = f"the longest took {done.longest * 1000:.0f} ms"
        print_line(f"{done.total:,} rows in {done.batches} batches, {longest}", "dim")
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
        str, typer.Argument(help="outbox_row, failed_row, archive_row, event_handled or idempotency_record.")
    ],
    content_class: Annotated[
        str, typer.Option("--class", metavar="NAME", help="A content class; * is all that have no policy of their own.")
    ] = ALL_CLASSES,
    active_days: Annotated[int | None, typer.Option("--active-days", help="Days until a row is tombstoned.")] = None,
    grace_days: Annotated[int, typer.Option("--grace-days", help="Days from there to its disposal.")] = 7,
    disposal: Annotated[Disposal, typer.Option("--disposal", help="What is done then.")] = Disposal.HARD_DELETE,
    remove: Annotated[bool, typer.Option("--remove", help="Keep such rows until somebody resolves them.")] = False,
) -> None:
    """Set how long rows of one kind are kept. Refused if the inbox would forget before they are gone."""
    if remove == (active_days is not None):
        raise ConfigurationError("--active-days", "and --remove: one of them is needed", "say how long, or --remove")
    policy = None if active_days is None else RetentionPolicy(active_days, grace_days, disposal)
    kept = "kept until somebody resolves them" if policy is None else f"kept {policy.total_days} days"
    change.confirm(f"Rows ({entity}, {content_class}) are {kept}. Go on?")
    registry = target.run(
        lambda operator: retention.set_policy(
            operator, entity, content_class, policy, reason=change.reason, dry_run=change.dry_run
        )
    )
    if change.as_json:
        print_json({"dry_run": change.dry_run, "policies": policies_as_data(registry)})
    else:
        print_policies(registry)


@app.command()
@spread
def erase(
    target: Target,
    change: Change,
    domain_id: Annotated[str, typer.Argument(metavar="DOMAIN_ID", help="The person's or tenant's id.")],
    cancel_open: Annotated[
        bool, typer.Option("--cancel-open", help="Also cancel and erase its events that wait or run.")
    ] = False,
) -> None:
    """Take payload, headers, errors, history and keys from every settled event of a domain, here and in the archive."""
    found = target.run(lambda operator: look(operator, domain_id))
    if change.dry_run:
        print_erasure(found, change, cancel_open)
        return
    rows = found.total + (found.open if cancel_open else 0)
    change.confirm(f"Erase the data of {rows:,} rows of {found.domain_id} for good?")

    async def run(operator: Operator) -> Erasure:
        with progress("erasing", await retention.size(operator)) as advance:
            return await retention.erase(
                operator, domain_id, cancel_open=cancel_open, reason=change.reason, on_page=advance
            )

    done = target.run(run)
    print_erasure(done, change, cancel_open)
    if done.open:
        raise typer.Exit(1)


async def look(operator: Operator, domain_id: str) -> Erasure:
    """What an erasure would find."""
    with progress("looking", await retention.size(operator)) as advance:
        return await retention.preview_erasure(operator, domain_id, on_page=advance)


# --- how it is shown ---


@contextmanager
def progress(title: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, and nothing elsewhere. The total may be a guess."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bars:
        bar = bars.add_task(title, total=total or None)
        yield lambda rows: bars.advance(bar, rows)


def as_data(found: RetentionReport) -> dict[str, Any]:
    """Counts end at the limit."""
    return {
        "policies": policies_as_data(found.policies),
        "due": [asdict(each) for each in found.due],
        "limit": MOST,
        "last_sweep": {"finished_at": found.finished_at, "swept": found.last},
        "sweeping": found.sweeping,
    }


def policies_as_data(registry: RetentionPolicies) -> list[dict[str, Any]]:
    return [
        {"entity": entity, "content_class": content_class, **asdict(policy)}
        for (entity, content_class), policy in sorted(registry.items())
    ]


def print_policies(registry: RetentionPolicies) -> None:
    print_table(
        ["kept", "class", "active days", "grace days", "then"],
        [
            (entity, name, policy.active_ttl_days, policy.tombstoned_grace_days, policy.disposal.value)
            for (entity, name), policy in sorted(registry.items())
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
    print_line(f"{found.outbox:,} rows of the outbox and {found.archive:,} of the archive {change.would}erased")
    if found.open:
        remedy = "they are cancelled first" if cancel_open and found.dry_run else "erase again when they are settled"
        print_line(f"! {found.open:,} are open; {remedy}, or use --cancel-open", "yellow")
