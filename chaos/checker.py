"""The total-queue check: what was published against what came out.

Pure: it reads histories and returns a verdict. A key is owed when one transaction that published it has committed;
it is unexpected when none can have.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from chaos.events import CAUSE, DERIVED, NOBODY, OWED, Fate, derived
from chaos.history import Published

Run = tuple[str, str]  # handler and key


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the outbox, as it was left."""

    key: str
    handler: str | None
    status: str
    attempts: int = 1
    reason: str | None = None


@dataclass(slots=True)
class Verdict:
    attempted: int = 0
    acknowledged: int = 0
    aborted: int = 0
    unknown: int = 0
    recovered: int = 0  # unknown commits that had happened
    delivered: int = 0  # every handler has had its due
    put_aside: int = 0  # dead letters and events that nobody wants, as they had to be
    lost: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    effect_duplicates: int = 0
    delivery_duplicates: int = 0
    in_order: int = 0  # deliveries of events with an ordering key
    inversions: list[str] = field(default_factory=list)


def check(
    history: Iterable[Published],
    effects: Iterable[Run],
    deliveries: Iterable[tuple[str, str, str]],
    rows: Iterable[Row],
    owed: Mapping[str, Mapping[str, Fate]] = OWED,
) -> Verdict:
    """`effects` are handler and key, `deliveries` handler, key and row, as often as they happened.

    An effect may happen once for a key, however often that was published. A delivery is twice what it should be when
    the same row is delivered twice.
    """
    verdict = Verdict()
    in_tx = Counter(effects)
    by_row = Counter(deliveries)
    outside = {(handler, key) for handler, key, _ in by_row}
    kept: dict[Run, Row] = {(row.handler or NOBODY, row.key): row for row in rows}
    # Some expire on their way to a broker.
    expired = {row.key for row in kept.values() if row.reason == "expired"}
    due = _due(history, in_tx, verdict)
    for key, (event_type, count) in due.items():
        fates = owed[event_type]
        missing = [h for h, fate in fates.items() if not _happened((h, key), fate, in_tx, outside, kept, expired)]
        verdict.lost += [f"{event_type} {key}: {h or 'nobody'} {_told(kept.get((h, key)))}" for h in missing]
        if not missing:
            if set(fates.values()) <= {"failed", "waiting"}:
                verdict.put_aside += count
            else:
                verdict.delivered += count
    expected = {(handler, key) for key, (event_type, _) in due.items() for handler in owed[event_type]}
    for source, runs in (("effect", set(in_tx)), ("delivery", outside)):
        verdict.unexpected += [f"{source} of {key} by {h}" for h, key in sorted(runs - expected)]
    verdict.effect_duplicates = sum(in_tx.values()) - len(in_tx)
    verdict.delivery_duplicates = sum(by_row.values()) - len(by_row)
    return verdict


def _due(history: Iterable[Published], effects: Iterable[Run], verdict: Verdict) -> dict[str, tuple[str, int]]:
    """Keys that are owed, with their event type and how often they were published; counts the history on the way."""
    due: dict[str, tuple[str, int]] = {}
    for event in history:
        verdict.attempted += 1
        match event.outcome:
            case "acknowledged":
                verdict.acknowledged += 1
            case "aborted":
                verdict.aborted += 1
                continue
            case "recovered":
                verdict.unknown += 1
                verdict.recovered += 1
            case "vanished":
                verdict.unknown += 1
                continue
        _, count = due.get(event.key, ("", 0))
        due[event.key] = event.event_type, count + 1
    for handler, key in effects:
        if handler == CAUSE and key in due:
            # The effect is committed, and with it the event that was published beside it.
            verdict.attempted += 1
            verdict.acknowledged += 1
            due[derived(key)] = next(iter(DERIVED)), 1
    return due


def _happened(
    run: Run,
    fate: Fate,
    effects: Collection[Run],
    deliveries: Collection[Run],
    kept: Mapping[Run, Row],
    expired: Collection[str],
) -> bool:
    row = kept.get(run)
    match fate:
        case "effect":
            return run in effects
        case "delivery":
            return run in deliveries
        case "failed":
            return row is not None and row.status == "failed"
        case "either":
            return run in deliveries or run[1] in expired
        case "waiting":
            return row is not None and row.status == "pending" and row.attempts == 0


def _told(row: Row | None) -> str:
    if row is None:
        return "has no row"
    return f"is {row.status} after {row.attempts} attempts" + (f" ({row.reason})" if row.reason else "")
