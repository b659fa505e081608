"""What the page of a plan says: its kinds of rows, its steps, its guard and how long it may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from holdfast.console.formatting import count, duration, percent, plural
from holdfast.operator import Plan

_STATES = {
    "ready": ("pending", "Ready"),
    "running": ("in_flight", "Running"),
    "idle": ("warning", "Not run by anybody"),
    "paused": ("paused", "Paused"),
    "stopped": ("failed", "Stopped by its guard"),
    "cancelled": ("discarded", "Cancelled"),
    "done": ("delivered", "Done"),
}
_VERDICTS = {"running": "is running", "idle": "stands still", "ready": "has not begun"}


@dataclass(frozen=True, slots=True)
class Kind:
    """Rows of a plan that have something in common."""

    name: str
    label: str
    count: int
    share: float


@dataclass(frozen=True, slots=True)
class Step:
    """A part of the way of a plan: `state` is done, now or later."""

    label: str
    note: str
    state: str


@dataclass(frozen=True, slots=True)
class Guard:
    """How many of the outcomes are failures, and from where on the plan stops."""

    failed: int
    outcomes: int
    limit: float

    @property
    def share(self) -> float:
        return self.failed / self.outcomes if self.outcomes else 0.0

    @property
    def drawing(self) -> Markup:
        """The share so far, hatched, and a mark where the plan stops."""
        top = min(1.0, max(self.limit * 1.5, self.share * 1.1, 0.001))
        width, at, now = 360, 360 * min(1.0, self.limit / top), 360 * min(1.0, self.share / top)
        sentence = f"{percent(self.share)} failed again; the plan stops above {percent(self.limit)}."
        mark = min(width - 2.0, at)
        # Only numbers, and a sentence of this module.
        return Markup(  # noqa: S704
            f'<svg class="guard-bar" role="img" aria-label="{sentence}" viewBox="0 0 {width} 28" '
            f'preserveAspectRatio="none" width="{width}" height="28">'
            f'<rect class="f-rest" x="0" y="8" width="{width}" height="12" rx="4"/>'
            f'<rect class="f-fail" x="0" y="8" width="{now:.1f}" height="12"/>'
            f'<rect class="f-mark" x="{mark:.1f}" y="2" width="2" height="24"/></svg>'
        )


@dataclass(frozen=True, slots=True)
class PlanView:
    """A plan, as its page shows it."""

    plan: Plan

    @property
    def state(self) -> str:
        """One of ready, running, idle, paused, stopped, cancelled, done."""
        plan = self.plan
        if plan.state != "open":
            return plan.state
        if plan.running:
            return "running"
        return "idle" if plan.moved or plan.run_by else "ready"

    @property
    def glyph(self) -> str:
        return _STATES[self.state][0]

    @property
    def word(self) -> str:
        return _STATES[self.state][1]

    @property
    def unfinished(self) -> bool:
        return self.plan.state in ("open", "paused", "stopped")

    @property
    def had_turn(self) -> int:
        """How many rows had their turn."""
        return self.plan.total - self.plan.pending

    @property
    def progress(self) -> str:
        return percent(self.had_turn / self.plan.total) if self.plan.total else "0 %"

    @property
    def title(self) -> str:
        """The title of the page, which says the state."""
        return f"Plan {self.plan.id}, {self.progress}" if self.state == "running" else f"Plan {self.plan.id}"

    @property
    def kinds(self) -> list[Kind]:
        """Five kinds, whose counts are the total."""
        plan, total = self.plan, self.plan.total or 1
        named = (
            ("ok", "Delivered", plan.delivered),
            ("wait", "Waiting for outcome", plan.replayed),
            ("fail", "Failed again", plan.failed),
            ("skip", "Skipped", plan.skipped),
            ("rest", "To come", plan.pending),
        )
        return [Kind(name, label, number, number / total) for name, label, number in named]

    @property
    def guard(self) -> Guard:
        return Guard(self.plan.failed, self.plan.delivered + self.plan.failed, self.plan.max_failure_ratio)

    @property
    def eta(self) -> str:
        """How long it may take, and on what that depends."""
        plan = self.plan
        at = f"at {plan.rate:g} a second"
        if self.state in ("cancelled", "done"):
            return ""
        if not plan.pending:
            return f"waits up to {duration(plan.patience)} for the last outcomes" if plan.replayed else ""
        left = f"{duration(max(1.0, plan.pending / plan.rate))}"
        if self.state == "running":
            return f"about {left} left {at}, if nothing stops it"
        return f"about {left} of work left {at}, once it runs"

    @property
    def steps(self) -> list[Step]:
        """Frozen, canary, the rest, outcomes."""
        plan, state = self.plan, self.state
        passed = plan.canary_passed or plan.canary == 0
        begun = state != "ready"
        done = state == "done"
        canary = "done" if done or (passed and begun) else "now" if begun else "later"
        rest = "done" if done or (passed and not plan.pending) else "now" if begun and passed else "later"
        last = "done" if done else "now" if begun and passed and not plan.pending else "later"
        note = "none" if plan.canary == 0 else f"{min(plan.canary, plan.total):,} first, judged alone"
        return [
            Step("Frozen", plural(plan.total, "row"), "done"),
            Step("Canary", f"{note}, passed" if passed and begun and plan.canary else note, canary),
            Step("The rest", f"{plan.rate:g} a second", rest),
            Step("Outcomes", f"waits up to {duration(plan.patience)}", last),
        ]

    @property
    def sentence(self) -> str:
        """How far it is, in a sentence."""
        plan = self.plan
        if self.state == "done":
            return f"{count(plan.delivered)} of {count(plan.total)} delivered."
        if self.state in ("paused", "stopped", "cancelled"):
            return f"{count(self.had_turn)} of {count(plan.total)} had their turn: {plan.state_reason or self.state}."
        waiting = f" It {plan.state_reason}." if plan.state_reason else ""
        return f"It {_VERDICTS[self.state]}: {count(self.had_turn)} of {count(plan.total)} had their turn.{waiting}"

    def bar(self, width: int = 1104, height: int = 28) -> Markup:
        """Return the bar: one part for each kind, told apart by its pattern. None is invisible that is not zero."""
        return bar(self.kinds, width, height)


def bar(kinds: Sequence[Kind], width: int, height: int) -> Markup:
    """Return a bar of kinds."""
    wide = [max(3.0, kind.share * width) if kind.count else 0.0 for kind in kinds]
    if wide:
        largest = wide.index(max(wide))
        wide[largest] = max(0.0, wide[largest] - (sum(wide) - width))
    parts, x = [f'<rect class="f-rest" width="{width}" height="{height}" rx="6"/>'], 0.0
    for kind, each in zip(kinds, wide, strict=True):
        if each and kind.name != "rest":
            parts.append(f'<rect class="f-{kind.name}" x="{x:.1f}" width="{each:.1f}" height="{height}"/>')
        x += each
    sentence = ", ".join(f"{kind.count:,} {kind.label.lower()}" for kind in kinds)
    # Only numbers, and words of this module.
    return Markup(  # noqa: S704
        f'<svg class="plan-bar" role="img" aria-label="{sentence}" viewBox="0 0 {width} {height}" '
        f'preserveAspectRatio="none" width="{width}" height="{height}">{"".join(parts)}</svg>'
    )
