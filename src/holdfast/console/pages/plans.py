"""Plans: what is replayed as a plan, and how far is it?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from starlette.responses import Response

from holdfast.access.principal import Role
from holdfast.characters import shell_word
from holdfast.console.actions import decimal_of, whole_of
from holdfast.console.filters import FailureFilter
from holdfast.console.formatting import count
from holdfast.console.page import Call, Form, Page
from holdfast.console.plan_view import PlanView
from holdfast.errors import ConfigurationError
from holdfast.operator import Operator, Plan, PlanReport

MOST: Final = 50
DEFAULTS: Final = {"canary": "10", "rate": "50", "max-failure-percent": "10", "patience": "300", "generation": ""}
_NAMES: Final = {"event_type": "event type", "generation": "of generation", "failure_reason": "reason"}


class PlansFeed:
    """The live list."""

    def normal(self, argument: str) -> str | None:
        """It is one for all."""
        return None if argument else ""

    async def read(self, operator: Operator, argument: str, before: Any) -> list[Plan]:
        """Read the newest plans."""
        return await operator.plans.page(limit=MOST)

    def fragments(self, value: list[Plan]) -> Mapping[str, tuple[str, dict[str, Any]]]:
        """Return the list."""
        return {"plans": ("plans/list.html", _shown(value)), "plans-line": ("plans/line.html", _shown(value))}


async def show(call: Call) -> Response:
    """Show the newest plans."""
    snapshot = await call.console.hub.latest("plans")
    return call.render(
        "plans.html",
        active="plans",
        title="Plans",
        cli="holdfast plans list",
        feed="plans",
        snapshot=snapshot,
        **_shown(snapshot.value),
    )


async def new(call: Call) -> Response:
    """Show what a plan would do: which rows, by group and generation. Nothing is kept."""
    return await _preview(call, Form(list(call.query.items())))


async def make(call: Call) -> Response:
    """Make the plan of what was counted, or show another preview."""
    form = call.form
    if form.get("step") != "make":
        return await _preview(call, form)
    which = FailureFilter.of(form)
    options, reason = _options(form), form.get("reason").strip() or None
    if reason is None and options["force"]:
        raise ConfigurationError("reason", "is empty", "say why: it stands in the audit")
    async with call.operator() as operator:
        made = await operator.plans.create(which.selection(everything=True), reason=reason, **options)
    counted = whole_of(form, "counted")
    changed = f" {count(counted)} were counted before." if counted not in (None, made.plan.total) else ""
    said = f"Plan {made.plan.id} has {count(made.plan.total)} rows.{changed} Nothing is replayed until it is started."
    return call.back(f"/plans/{made.plan.id}", said=said)


async def _preview(call: Call, form: Form) -> Response:
    which, until = FailureFilter.of(form), call.now
    chosen = bool(which.given) or form.get("all") == "yes"
    settings = {name: form.get(name, default) or default for name, default in DEFAULTS.items()}
    found: PlanReport | None = None
    if chosen:
        async with call.operator() as operator:
            selection = which.selection(everything=True, until=until)
            found = await operator.plans.create(selection, dry_run=True, **_options(form))
    return call.render(
        "plan_new.html",
        active="plans",
        title="New plan",
        which=which,
        every=form.get("all") == "yes",
        settings=settings,
        force=form.get("force") == "on",
        report=found,
        groups=[] if found is None else by_group(found),
        until=until.isoformat(),
        cli=_command(which, settings) if chosen else "holdfast plans create --group …",
    )


def by_group(report: PlanReport) -> list[tuple[str, str, list[Any], int]]:
    """The lines of a preview: handler, cause, its generations, and how many; the largest first."""
    found: dict[tuple[str, str], list[Any]] = {}
    for line in report.preview.lines:
        found.setdefault((line.handler_name, line.signature), []).append(line)
    rows = [(handler, cause, lines, sum(each.count for each in lines)) for (handler, cause), lines in found.items()]
    return sorted(rows, key=lambda row: (-row[3], row[0], row[1]))


def what(plan: Plan) -> str:
    """The selection of a plan, in words."""
    selection = plan.selection
    where = " in the archive" if selection.get("archived") else ""
    named = {name: value for name, value in selection.items() if name != "archived"}
    if "handler" in named and "signature" in named:
        cause = str(named.pop("signature")).partition(":")[0].rpartition(".")[2]
        named = {"": f"{named.pop('handler')} {cause}", **named}
    if "ids" in named:
        named["ids"] = "chosen events"
    text = ", ".join(f"{_NAMES.get(name, name)} {value}".strip() for name, value in named.items())
    return (text or "every dead letter") + where


def _shown(found: Sequence[Plan]) -> dict[str, Any]:
    views = [(PlanView(each), what(each)) for each in found]
    running = sum(view.state == "running" for view, _ in views)
    waiting = sum(view.unfinished and view.state != "running" for view, _ in views)
    return {"views": views, "running": running, "waiting": waiting, "most": MOST}


def _options(form: Form) -> dict[str, Any]:
    """The settings of a plan, as its verb takes them."""
    given = {name: form.get(name).strip() or default for name, default in DEFAULTS.items()}
    plain = Form(list(given.items()))
    share = decimal_of(plain, "max-failure-percent")
    return {
        "generation": whole_of(plain, "generation"),
        "canary": whole_of(plain, "canary"),
        "rate": decimal_of(plain, "rate"),
        "max_failure_ratio": None if share is None else round(share / 100, 6),
        "patience": decimal_of(plain, "patience"),
        "force": form.get("force") == "on",
    }


def _command(which: FailureFilter, settings: Mapping[str, str]) -> str:
    share = decimal_of(Form(list(settings.items())), "max-failure-percent") or 0.0
    named = {
        "canary": settings["canary"],
        "rate": settings["rate"],
        "max-failure-ratio": f"{share / 100:g}",
        "patience": settings["patience"],
        "generation": settings["generation"],
    }
    usual = {"canary": "10", "rate": "50", "max-failure-ratio": "0.1", "patience": "300", "generation": ""}
    options = "".join(f" --{name} {shell_word(value)}" for name, value in named.items() if value != usual[name])
    return f'holdfast plans create{which.options() or " --all"}{options} --reason "…"'


PAGES = (
    Page("/plans", "plans", get=show),
    Page("/plans/new", "plans.new", get=new, post=make, role=Role.OPERATOR),
)
