"""One plan: what would it do, how far is it, and what failed again? Plans that are started here run in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from starlette.responses import Response

from holdfast.console import plan_chart
from holdfast.console.actions import Action, Done, Question, number_of, pages_of
from holdfast.console.formatting import code, count, first_line, moment, percent, plural
from holdfast.console.page import Call, Page, zone_of
from holdfast.console.pages.plans import by_group, what
from holdfast.console.plan_view import PlanView
from holdfast.console.story import compare
from holdfast.errors import ConfigurationError
from holdfast.operator import AuditLine, Operator, PlanOutcomes, PlanReport, Refused

FAILED_AT_ONCE: Final = 10
STEPS: Final = 60  # of the chart
_STARTING: Final = 2.0  # seconds that the answer waits for a run to begin
_LOG: Final = 200


@dataclass(frozen=True, slots=True)
class FoundPlan:
    """A plan with what failed again in it, and the lines of the audit about it."""

    report: PlanReport
    again: Sequence[Any]
    next: int | None
    log: Sequence[AuditLine]
    outcomes: Sequence[PlanOutcomes]
    at: datetime

    @property
    def view(self) -> PlanView:
        return PlanView(self.report.plan)


class PlanFeed:
    """The live parts of one plan, whose number stands behind the colon."""

    def normal(self, argument: str) -> str | None:
        """Return the number."""
        try:
            return str(_number(argument))
        except ConfigurationError:
            return None

    async def read(self, operator: Operator, argument: str, before: Any) -> FoundPlan:
        """Read a plan. What it would do next is only read while that can change."""
        number = _number(argument)
        plan = await operator.plans.read(number)
        old = before if isinstance(before, FoundPlan) else None
        if old is not None and plan == old.report.plan:
            return old
        again = await operator.plans.failed_again(number, limit=FAILED_AT_ONCE)
        report = await operator.plans.detail(number)
        lines = await operator.audit.page(action="plan", since=plan.created_at, limit=_LOG)
        about = [each for each in lines if each.arguments.get("plan") == number]
        outcomes = await operator.plans.outcomes(number, steps=STEPS)
        return FoundPlan(report, again.rows, again.next, about, outcomes, datetime.now(UTC))

    def fragments(self, value: FoundPlan) -> Mapping[str, tuple[str, dict[str, Any]]]:
        """Return the live parts. What may be done stands outside of them: it depends on who looks."""
        shown = _shown(value)
        return {
            f"plan-{name}": (f"plan/{name}.html", shown)
            for name in ("head", "progress", "outcomes", "guard", "again", "log")
        }


async def show(call: Call) -> Response:
    """Show a plan."""
    number = _number(call.request.path_params["plan"])
    feed = f"plan:{number}"
    snapshot = await call.console.hub.latest(feed)
    found: FoundPlan = snapshot.value
    view = found.view
    runners = call.console.runners
    verb = {"ready": "run", "idle": "run", "running": "pause", "paused": "resume", "stopped": "resume"}.get(view.state)
    return call.render(
        "plan.html",
        active="plans",
        title=view.title,
        cli=f'holdfast plans {verb} {number} --reason "…"' if verb else f"holdfast plans show {number}",
        feed=feed,
        snapshot=snapshot,
        here=runners.runs(number),
        ended=runners.ended(number),
        **_shown(found),
    )


async def again(call: Call) -> Response:
    """Show everything that failed again, page by page."""
    number = _number(call.request.path_params["plan"])
    async with call.operator() as operator:
        found = await operator.plans.failed_again(number, after=call.number("after"), limit=50)
    rows = _compared(found.rows)
    return call.render(
        "plan_again.html",
        active="plans",
        title=f"Failed again in plan {number}",
        number=number,
        rows=rows,
        next=found.next,
        first="after" not in call.query,
        cli=f"holdfast plans failed {number}",
    )


async def report(call: Call) -> Response:
    """Show the report of a plan, to be copied into a channel or a ticket."""
    number = _number(call.request.path_params["plan"])
    async with call.operator() as operator:
        found = await PlanFeed().read(operator, str(number), None)
    return call.render(
        "plan_report.html",
        active="plans",
        title=f"Report of plan {number}",
        number=number,
        text=_report(call, found),
        cli=f"holdfast plans show {number} --json",
    )


def _report(call: Call, found: FoundPlan) -> str:
    plan, view, zone = found.report.plan, found.view, zone_of(call)
    environment = call.console.settings.environment
    why = plan.state_reason
    sentence = view.sentence.replace(why, code(why)) if why else view.sentence
    lines = [
        f"## Plan {plan.id}{f' in {environment}' if environment else ''}: {view.word.lower()}",
        "",
        f"{sentence} Made by {code(plan.created_by)} at {moment(plan.created_at, zone)}"
        + (f": {code(first_line(plan.reason))}" if plan.reason else ""),
        "",
        *(f"- {kind.label}: {kind.count:,}" for kind in view.kinds),
        "",
        f"Replays {code(what(plan))}; {plan.canary} as a canary, {plan.rate:g} a second, "
        f"stops above {percent(plan.max_failure_ratio)} that fail again.",
    ]
    if found.again:
        more = " and more" if found.next is not None else ""
        lines += ["", f"Failed again ({plan.failed:,}):", ""]
        lines += [f"- `{each.id}` {code(first_line(each.last_error, 100))}" for each in found.again]
        lines += [f"-{more}"] if more else []
    lines += ["", "Log:", ""]
    lines += [
        f"- {moment(each.at, zone)} {code(each.actor)}: {each.action}"
        + (f" {code(first_line(each.reason))}" if each.reason else "")
        for each in found.log
    ]
    return "\n".join(lines) + "\n"


def _compared(rows: Sequence[Any]) -> list[tuple[Any, bool | None]]:
    """Each row with whether it failed for the same cause as before; None: that is not known."""
    return [
        (each, compare(each.previous_error, each.last_error).same if each.previous_error and each.last_error else None)
        for each in rows
    ]


def _shown(found: FoundPlan) -> dict[str, Any]:
    rows = _compared(found.again)
    return {
        "seen": found.view,
        "plan": found.report.plan,
        "report": found.report,
        "what": what(found.report.plan),
        "groups": by_group(found.report),
        "again": rows,
        "more_again": found.next is not None,
        "same": sum(same is True for _, same in rows),
        "other": sum(same is False for _, same in rows),
        "log": found.log,
        "outcomes": found.outcomes,
        "drawn": partial(plan_chart.outcomes, found.outcomes, found.report.plan, found.at),
    }


def _number(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 18 or int(text) < 1:
        raise ConfigurationError("plan", "is not a number", "open one from the list of plans")
    return int(text)


# --- what can be done ---


async def _ask_run(call: Call, operator: Operator) -> Question:
    number = number_of(call, "plan")
    found = await operator.plans.detail(number)
    plan, preview = found.plan, found.preview
    view = PlanView(plan)
    facts = [
        ("Replays", f"{plural(plan.pending, 'row')} of {count(plan.total)}"),
        (
            "Goes to",
            "the newest generation that is served" if plan.generation is None else f"generation {plan.generation}",
        ),
        ("How", f"{plan.canary:,} as a canary, then {plan.rate:g} a second; {view.eta}"),
        ("Guard", f"it stops by itself above {percent(plan.max_failure_ratio)} that fail again"),
        ("Left out", f"{count(preview.handled)} handled before, {count(preview.not_failed)} no longer failed"),
        ("Undo", "a replay cannot be undone; the plan can be paused"),
        ("Runs in", "this console, under your name; if it ends, the plan stands still and its page says so"),
    ]
    return Question(
        title=f"Start plan {number}?" if view.state == "ready" else f"Run plan {number} here?",
        subject=what(plan),
        lines=[(f"{handler} {cause}", number) for handler, cause, _, number in by_group(found)[:10]],
        facts=facts,
        button=f"Replay {count(plan.pending)}",
        command=f'holdfast plans run {number} --reason "…"',
        back=f"/plans/{number}",
        nothing=plan.state != "open" or plan.running,
    )


async def _run(call: Call, operator: Operator, reason: str | None) -> Done:
    number = number_of(call, "plan")
    plan = await operator.plans.read(number)
    runners = call.console.runners
    runners.start(number, call.principal.name, reason)
    began = time.monotonic()
    while runners.runs(number) and time.monotonic() - began < _STARTING:
        if (await operator.plans.read(number)).running:
            break
        await asyncio.sleep(0.05)
    if (why := runners.ended(number)) is not None:
        raise Refused(why, f"look at it again: holdfast plans show {number}")
    said = f"Plan {number} runs in this console: {plural(plan.pending, 'row')} to come."
    return _shown_on(number, said)


def _shown_on(number: int, said: str) -> Done:
    return Done(path=f"/plans/{number}", said=said, feeds=(f"plan:{number}", "plans"))


def _turning(verb: str, word: str, facts: Sequence[tuple[str, str]], *, danger: bool = False) -> Action:
    async def ask(call: Call, operator: Operator) -> Question:
        number = number_of(call, "plan")
        plan = await operator.plans.read(number)
        await getattr(operator.plans, verb)(number, dry_run=True)
        return Question(
            title=f"{word} plan {number}?",
            subject=what(plan),
            facts=[("To come", f"{count(plan.pending)} of {count(plan.total)}"), *facts],
            button=f"{word} plan {number}",
            command=f'holdfast plans {verb} {number} --reason "…"',
            back=f"/plans/{number}",
            danger=danger,
        )

    async def act(call: Call, operator: Operator, reason: str | None) -> Done:
        number = number_of(call, "plan")
        changed = await getattr(operator.plans, verb)(number, reason=reason)
        said = f"Plan {number} was {changed.before} and is {changed.after}."
        if changed.after == "open" and not changed.running:
            call.console.runners.start(number, call.principal.name, reason)
            said = f"Plan {number} goes on, in this console."
        return _shown_on(number, said)

    return Action(name=f"plans.{verb}", active="plans", ask=ask, act=act)


ACTIONS = (
    Action(name="plans.run", active="plans", ask=_ask_run, act=_run),
    _turning("pause", "Pause", [("What runs", "finishes; nothing more is replayed until it is resumed")]),
    _turning("resume", "Resume", [("Goes on", "where it was; one that its guard stopped begins with a canary again")]),
    _turning(
        "cancel", "Cancel", [("Final", "what it has replayed stays replayed; the rest stays failed")], danger=True
    ),
)
PAGES = (
    Page("/plans/{plan}", "plan", get=show, example="plan"),
    Page("/plans/{plan}/again", "plan.again", get=again, example="plan.again"),
    Page("/plans/{plan}/report", "plan.report", get=report, example="plan.report"),
    *pages_of(*ACTIONS),
)
