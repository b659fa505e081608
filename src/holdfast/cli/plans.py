"""holdfast plans: replays of many events, with a canary, a rate and a failure limit."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.text import Text

from holdfast.cli import output
from holdfast.cli.command_group import command_group
from holdfast.cli.options import (
    Change,
    ForceOption,
    GenerationOption,
    JsonOption,
    LimitOption,
    ReasonOption,
    Target,
    Where,
    spread,
)
from holdfast.cli.selection import Chosen, Filter, failed_selection
from holdfast.operator import Operator, Plan, PlanChange, PlanReport, Preview, Progress

app = command_group("Replay plans: replay many events, starting with a canary.")

PlanArgument = Annotated[int, typer.Argument(metavar="PLAN", help="The plan's number.")]


@app.command("create")
@spread
def create(
    where: Target,
    chosen: Chosen,
    which: Filter,
    archived: Annotated[bool, typer.Option("--archived", help="Select in the archive; ids are found anyway.")] = False,
    generation: GenerationOption = None,
    canary: Annotated[int, typer.Option("--canary", help="Events to replay first; 0: none.")] = 10,
    rate: Annotated[float, typer.Option("--rate", help="Events a second.")] = 50.0,
    max_failure_ratio: Annotated[
        float, typer.Option("--max-failure-ratio", help="Stop when more than this share fails again, from 0 to 1.")
    ] = 0.1,
    patience: Annotated[float, typer.Option("--patience", help="Seconds to wait for outcomes.")] = 300.0,
    force: ForceOption = False,
    reason: ReasonOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what the plan would do, and do not keep it.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Select dead letters for a replay plan and preview it. Nothing is replayed until it is run."""
    selected = failed_selection(chosen, which, archived=archived)
    options: dict[str, Any] = {
        "generation": generation,
        "canary": canary,
        "rate": rate,
        "max_failure_ratio": max_failure_ratio,
        "patience": patience,
        "force": force,
        "reason": reason,
        "dry_run": dry_run,
    }
    made = where.run(lambda operator: operator.plans.create(selected.selection, ids=selected.ids, **options))
    _show(made, as_json)


@app.command("list")
@spread
def list_(
    where: Where,
    limit: LimitOption = 20,
    unfinished: Annotated[bool, typer.Option("--unfinished", help="Only plans that can still go on.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List plans, the newest first."""
    found = where.run(lambda operator: operator.plans.page(finished=not unfinished, limit=limit))
    if as_json:
        output.print_json(found)
        output.print_left_out(found, limit, as_json=True)
        return
    output.print_table(
        ("plan", "state", "rows", "pending", "delivered", "failed", "skipped", "created", "by", "what"),
        [
            (
                p.id,
                _state(p),
                p.total,
                p.pending,
                p.delivered,
                p.failed,
                p.skipped,
                p.created_at,
                p.created_by,
                _what(p.selection),
            )
            for p in found
        ],
    )
    output.print_left_out(found, limit)


@app.command("show")
@spread
def show(where: Where, plan: PlanArgument, as_json: JsonOption = False) -> None:
    """Show the progress of a plan and what it would do next."""
    _show(where.run(lambda operator: operator.plans.detail(plan)), as_json)


@app.command("failed")
@spread
def failed(
    where: Where,
    plan: PlanArgument,
    after: Annotated[
        int | None, typer.Option("--after", metavar="POSITION", help="Go on where the page before ended.")
    ] = None,
    limit: LimitOption = 50,
    as_json: JsonOption = False,
) -> None:
    """List what failed again after the plan had replayed it, in the plan's order."""
    found = where.run(lambda operator: operator.plans.failed_again(plan, after=after, limit=limit))
    if as_json:
        output.print_json(found)
        return
    output.print_table(
        ("id", "state", "event type", "handler", "replayed", "failed", "error before", "error now"),
        [
            (
                e.id,
                e.state,
                e.event_type,
                e.handler_name,
                e.replayed_at,
                e.failed_at,
                output.first_line(e.previous_error, 60),
                output.first_line(e.last_error, 60),
            )
            for e in found.rows
        ],
    )
    if found.next is not None:
        output.print_line(f"there may be more: --after {found.next}", "dim")


@app.command("outcomes")
@spread
def outcomes(
    where: Where,
    plan: PlanArgument,
    steps: Annotated[int, typer.Option("--steps", metavar="NUMBER", help="Into how many steps to count them.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """Count what became of what a plan has replayed, by when it was replayed."""
    found = where.run(lambda operator: operator.plans.outcomes(plan, steps=steps))
    if as_json:
        output.print_json(found)
        return
    rows = [(each.start, each.delivered, each.failed, each.waiting) for each in found]
    output.print_table(("replayed from", "delivered", "failed again", "waiting for outcome"), rows)


@app.command("run")
@spread
def run(where: Target, plan: PlanArgument, change: Change) -> None:
    """Run a plan to its end. Ctrl-C ends the run but not the plan: the next run goes on."""

    async def act(operator: Operator) -> PlanReport:
        found = await operator.plans.detail(plan)
        left = found.plan.pending
        change.confirm(
            f"Replay {output.events(left)} at {found.plan.rate:g} a second, {found.plan.canary} of them first?"
        )
        if change.dry_run:
            return found
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        with _bar(found.plan, change.as_json) as show:
            return await operator.plans.run(plan, reason=change.reason, on_progress=show, stop=stop)

    done = where.run(act)
    _show(done, change.as_json)
    if done.plan.state != "done" and not change.dry_run:
        raise typer.Exit(1)


@app.command("pause")
@spread
def pause(where: Target, plan: PlanArgument, change: Change) -> None:
    """Pause a plan, in whatever process it runs."""
    options = _options(change)
    _show_change(where.run(lambda operator: operator.plans.pause(plan, **options)), change)


@app.command("resume")
@spread
def resume(where: Target, plan: PlanArgument, change: Change) -> None:
    """Resume a plan that was paused or has stopped. One that stopped begins with a canary again."""
    options = _options(change)
    _show_change(where.run(lambda operator: operator.plans.resume(plan, **options)), change)


@app.command("cancel")
@spread
def cancel(where: Target, plan: PlanArgument, change: Change) -> None:
    """End a plan. What it has replayed stays replayed."""

    async def act(operator: Operator) -> PlanChange:
        found = await operator.plans.read(plan)
        change.confirm(f"Cancel plan {plan}? {output.events(found.pending)} will not be replayed by it.")
        return await operator.plans.cancel(plan, **_options(change))

    _show_change(where.run(act), change)


def _options(change: Change) -> dict[str, Any]:
    return {"reason": change.reason, "dry_run": change.dry_run}


# --- output ---


def _show_change(done: PlanChange, change: Change) -> None:
    if change.as_json:
        output.print_json(done)
        return
    output.print_line(f"plan {done.id} was {done.before} and {'would be' if change.dry_run else 'is'} {done.after}")
    if done.after == "open" and not done.running:
        output.print_hint(f"no process runs it: holdfast plans run {done.id}")


@contextmanager
def _bar(plan: Plan, quiet: bool) -> Iterator[Callable[[Progress], None]]:
    with output.progress_bar(quiet=quiet) as bar:
        task = bar.add_task(f"plan {plan.id}", total=plan.total, completed=plan.total - plan.pending)
        phase = ""

        def show(progress: Progress) -> None:
            nonlocal phase
            bar.start()
            now = progress.plan
            doing = now.state if now.state != "open" else progress.phase
            text = progress_text(now.id, doing, delivered=now.delivered, failed=now.failed, replayed=now.replayed)
            bar.update(task, completed=now.total - now.pending, description=text)
            if doing != phase and not quiet:
                on_terminal = bar.console.is_terminal
                if not on_terminal:
                    print(f"{text}, {now.pending} to go", file=sys.stderr, flush=True)
                if doing == "waiting" and now.state_reason:
                    waits = Text(output.clean(f"plan {now.id} {now.state_reason}"))
                    bar.console.print(waits, soft_wrap=not on_terminal)
            phase = doing

        yield show


def progress_text(plan: int, doing: str, *, delivered: int, failed: int, replayed: int) -> str:
    """The progress of a run, short enough for a line of 80 columns with a bar beside it."""
    return f"plan {plan}: {doing}, {delivered:,} delivered, {failed:,} failed, {replayed:,} open"


def _show(found: PlanReport, as_json: bool) -> None:
    plan, preview = found.plan, found.preview
    if as_json:
        output.print_json(found)
        return
    because = f": {plan.state_reason}" if plan.state_reason and (plan.running or plan.state != "open") else ""
    title = "a plan that is not kept (dry run)" if found.dry_run else f"plan {plan.id} {_state(plan)}{because}"
    output.print_line(title, "bold")
    output.print_line(
        f"  {output.counted(plan.total, 'row')}: {plan.pending:,} to go, {plan.delivered:,} delivered, "
        f"{plan.failed:,} failed again, {plan.replayed:,} without an outcome, {plan.skipped:,} skipped"
    )
    output.print_line(
        f"  into {_into(plan)} at {plan.rate:g} a second; canary {plan.canary}; "
        f"stops above {plan.max_failure_ratio:.0%} failures; waits {plan.patience.total_seconds():g} s for outcomes"
    )
    output.print_line(f"  created {output.shown(plan.created_at)} by {plan.created_by}" + _because(plan.reason))
    if preview.skipped:
        output.print_line(f"  skipped: {output.shown(preview.skipped)}")
    if preview.lines:
        _show_preview(preview)
    if not found.dry_run:
        for step in next_steps(plan):
            output.print_hint(step, "")


def next_steps(plan: Plan) -> list[str]:
    """What an operator does next about a plan that is not over and that nobody runs."""
    if plan.running:
        return []
    if plan.state == "stopped":
        failed = [f"what failed again: holdfast plans failed {plan.id}"] if plan.failed else []
        return [*failed, f"when the cause is gone: holdfast plans resume {plan.id}"]
    if plan.state == "paused":
        return [f"to go on: holdfast plans resume {plan.id}"]
    if plan.state == "open":
        return [f"{'to go on' if plan.moved else 'run it'}: holdfast plans run {plan.id}"]
    return []


def _show_preview(preview: Preview) -> None:
    output.print_line(
        f"  of those to go, {preview.handled:,} {_was(preview.handled)} handled already and will be skipped by their "
        f"handlers, {preview.not_failed:,} {_is(preview.not_failed)} no longer failed and will be skipped by the plan"
    )
    output.print_table(
        ("handler", "signature", "generation", "to go", "handled", "not failed"),
        [(e.handler_name, e.signature, e.generation, e.count, e.handled, e.not_failed) for e in preview.lines],
    )


def _was(count: int) -> str:
    return "was" if count == 1 else "were"


def _is(count: int) -> str:
    return "is" if count == 1 else "are"


def _what(selection: dict[str, Any]) -> str:
    """The selection of a plan, as its options name it."""
    criteria = {name: value for name, value in selection.items() if name != "archived"}
    where = " in the archive" if selection.get("archived") else ""
    return (output.shown(criteria) if criteria else "every dead letter (--all)") + where


def _state(plan: Plan) -> str:
    return "running" if plan.running else "ready" if plan.state == "open" and not plan.moved else plan.state


def _into(plan: Plan) -> str:
    return "the newest generation that is served" if plan.generation is None else f"generation {plan.generation}"


def _because(reason: str | None) -> str:
    return f": {reason}" if reason else ""
