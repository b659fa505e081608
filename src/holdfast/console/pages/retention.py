"""Retention: what is kept for how long, and what would a sweep take now?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from starlette.responses import Response

from holdfast.access.principal import Role
from holdfast.characters import shell_word
from holdfast.console.actions import Action, Done, Question, number_of, pages_of, text_of, typed
from holdfast.console.formatting import ago, count, plural
from holdfast.console.page import Call, Page
from holdfast.errors import ConfigurationError
from holdfast.operator import Operator, RetentionReport
from holdfast.retention import ALL_CLASSES, Disposal, RetentionPolicy

STEPS: Final = {
    "delivered": "delivered, to be tombstoned",
    "tombstones": "tombstones, to be disposed of",
    "failed": "failed, to be tombstoned",
    "discarded": "discarded, cancelled or expired, to be disposed of",
    "archived": "archived, to be tombstoned",
    "archive_tombstones": "tombstones of the archive, to be disposed of",
    "inbox": "inbox rows, to be forgotten",
    "keys": "producers' keys, to be freed",
    "records": "idempotency records, to be forgotten",
    "rollup": "lines of the roll-up, to be deleted",
}
ENTITIES: Final = {
    "outbox_row": "Delivered events",
    "failed_row": "Failed events",
    "archive_row": "Archived events",
    "event_handled": "What the inbox remembers",
    "idempotency_record": "Idempotency records, once expired",
    "rollup_row": "The roll-up of counts",
}
DISPOSALS: Final = {
    "HARD_DELETE": "deleted",
    "STRIP_PAYLOAD": "kept without payload",
    "RETAIN_METADATA": "kept as metadata",
}


async def show(call: Call) -> Response:
    """Show the policies, and what is due."""
    async with call.operator() as operator:
        found = await operator.retention.report()
    policies = sorted((entity, kind, policy) for (entity, kind), policy in found.policies.items())
    return call.render(
        "retention.html",
        active="retention",
        title="Retention",
        report=found,
        policies=policies,
        unkept=[entity for entity in ("failed_row", "archive_row") if (entity, "*") not in found.policies],
        entities=ENTITIES,
        disposals=DISPOSALS,
        steps=STEPS,
        sentence=_sentence(call, found),
        cli="holdfast retention show",
    )


def _sentence(call: Call, found: RetentionReport) -> str:
    last = f"the last ended {ago(found.finished_at, call.now)}"
    if found.sweeping:
        return f"A sweep is running; {last}."
    if not found.due:
        return f"A sweep would take nothing now; {last}."
    return f"A sweep would take {count(found.total, more=found.more)} rows now; {last}."


async def _ask_sweep(call: Call, operator: Operator) -> Question:
    found = await operator.retention.report()
    return Question(
        title=f"Sweep {count(found.total, more=found.more)} rows?",
        lines=[(f"{STEPS.get(due.step, due.step)} {due.content_class}".strip(), due.count) for due in found.due],
        facts=[
            ("Final", "what is deleted or stripped cannot be brought back"),
            ("How", "in batches, each of them audited; workers leave their own sweeps to it"),
            ("How long", "the answer comes when it is done; a terminal shows the progress of a large one"),
        ],
        button=f"Sweep {count(found.total, more=found.more)}",
        command='holdfast retention sweep --reason "…"',
        back="/retention",
        danger=True,
        nothing=not found.due,
        typed=typed(found.total),
    )


async def _sweep(call: Call, operator: Operator, reason: str | None) -> Done:
    done = await operator.retention.sweep(reason=reason)
    refused = f" {plural(len(done.refused), 'step was', 'steps were')} refused by the database." if done.refused else ""
    said = f"{plural(done.total, 'row')} swept in {plural(done.batches, 'batch', 'batches')}.{refused}"
    return Done(path="/retention", said=said)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A policy as a form asks for it; `policy` None: there should be none."""

    entity: str
    content_class: str
    policy: RetentionPolicy | None

    @classmethod
    def of(cls, call: Call) -> Wanted:
        """Return what the form asks for."""
        entity = text_of(call, "entity")
        content_class = call.form.get("class").strip() or ALL_CLASSES
        if call.form.get("remove") == "yes":
            return cls(entity, content_class, None)
        try:
            disposal = Disposal(call.form.get("disposal"))
        except ValueError:
            raise ConfigurationError("disposal", "is unknown", f"use one of {', '.join(Disposal)}") from None
        policy = RetentionPolicy(number_of(call, "active-days"), number_of(call, "grace-days"), disposal)
        return cls(entity, content_class, policy)

    @property
    def name(self) -> str:
        of_class = "" if self.content_class == ALL_CLASSES else f" of {self.content_class}"
        return f"{ENTITIES.get(self.entity, self.entity)}{of_class}"

    def command(self) -> str:
        """The command that sets it."""
        of_class = "" if self.content_class == ALL_CLASSES else f" --class {shell_word(self.content_class)}"
        days = self.policy and f"--active-days {self.policy.active_ttl_days} --grace-days "
        how = (
            f"{days}{self.policy.tombstoned_grace_days} --disposal {self.policy.disposal}"
            if self.policy
            else "--remove"
        )
        return f'holdfast retention set {shell_word(self.entity)}{of_class} {how} --reason "…"'


async def _ask_set(call: Call, operator: Operator) -> Question:
    wanted = Wanted.of(call)
    before = (await operator.retention.report()).policies.get((wanted.entity, wanted.content_class))
    await operator.retention.set_policy(wanted.entity, wanted.content_class, wanted.policy, dry_run=True)
    facts = [("Now", _told(before)), ("Then", _told(wanted.policy))]
    if wanted.policy is not None:
        facts.append(
            ("From", "the next sweep on, also for what is there already; what it takes cannot be brought back")
        )
    return Question(
        title="Change how long it is kept?" if wanted.policy else "Keep it until somebody decides?",
        subject=wanted.name,
        facts=facts,
        button="Change the policy" if wanted.policy else "Remove the policy",
        command=wanted.command(),
        back="/retention",
        danger=True,
        nothing=before == wanted.policy,
    )


async def _set(call: Call, operator: Operator, reason: str | None) -> Done:
    wanted = Wanted.of(call)
    await operator.retention.set_policy(wanted.entity, wanted.content_class, wanted.policy, reason=reason)
    return Done(path="/retention", said=f"{wanted.name}: {_told(wanted.policy)}.")


def _told(policy: RetentionPolicy | None) -> str:
    if policy is None:
        return "no policy of its own"
    days, grace = plural(policy.active_ttl_days, "day"), plural(policy.tombstoned_grace_days, "day")
    return f"{days}, {grace} of grace, then {DISPOSALS[str(policy.disposal)]}"


PAGES = (
    Page("/retention", "retention", get=show),
    *pages_of(
        Action(name="retention.sweep", active="retention", ask=_ask_sweep, act=_sweep, role=Role.ADMIN),
        Action(name="retention.set", active="retention", ask=_ask_set, act=_set, role=Role.ADMIN),
    ),
)
