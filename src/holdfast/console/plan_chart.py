"""The chart of a plan: what became of its replays over time, and where it goes at its rate."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from itertools import accumulate

from markupsafe import Markup

from holdfast.console import formatting
from holdfast.console.charts import LEFT, NARROW, RIGHT, grid, nice_top, svg
from holdfast.operator import Plan, PlanOutcomes

_HEIGHT, _ABOVE, _FOOT = 190, 12, 26


def outcomes(found: Sequence[PlanOutcomes], plan: Plan, now: datetime, zone: str, width: int = NARROW) -> Markup:
    """Return the delivered so far as an area, a mark where some failed again, and the rest of the way dashed.

    Rows stand where they were replayed, not where their outcome came.
    """
    if not found:
        return Markup("")
    begun, seen = found[0].start, found[-1].start + found[-1].step
    way = timedelta(seconds=plan.pending / plan.rate) if plan.running and plan.pending else None
    here = max(seen, now) if plan.running else seen
    end = here + (way or timedelta())
    whole = max(1.0, (end - begun).total_seconds())
    top, bottom = nice_top(plan.total), _HEIGHT - _FOOT

    def x(at: datetime) -> float:
        return LEFT + (width - LEFT - RIGHT) * (at - begun).total_seconds() / whole

    def y(count: float) -> float:
        return bottom - (bottom - _ABOVE) * count / top

    sums = list(accumulate(each.delivered for each in found))
    places = [(x(begun), y(0))]
    places += [(x(each.start + each.step), y(total)) for each, total in zip(found, sums, strict=True)]
    places.append((x(here), y(sums[-1])))
    line = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
    parts = [
        grid(top, width, bottom, _ABOVE),
        f'<polygon class="area-ok" points="{line} {x(here):.1f},{bottom} {x(begun):.1f},{bottom}"/>',
        f'<polyline class="line-ok" points="{line}"/>',
    ]
    parts += [
        f'<rect class="f-again" x="{x(each.start + each.step / 2) - 1:.1f}" y="{bottom - 12}" width="2.5" height="12"/>'
        for each in found
        if each.failed
    ]
    if way is not None:
        all_of_it = sums[-1] + plan.pending + plan.replayed
        parts.append(
            f'<polyline class="line-next" points="{x(here):.1f},{y(sums[-1]):.1f} {x(end):.1f},{y(all_of_it):.1f}"/>'
            f'<line class="mark-line" x1="{x(here):.1f}" y1="{_ABOVE}" x2="{x(here):.1f}" y2="{bottom}"/>'
        )
    parts += _times([(begun, x(begun)), (here, x(here)), (end, x(end))], bottom, zone)
    again = sum(each.failed for each in found)
    sentence = f"{sums[-1]:,} delivered and {again:,} failed again of {plan.total:,}, by when they were replayed."
    return svg(width, _HEIGHT, "chart", sentence, parts)


def _times(places: Sequence[tuple[datetime, float]], bottom: float, zone: str) -> list[str]:
    """Return when it began, where it is and when it may end; what stands too close to the one before is left out."""
    local, last, found = formatting.zone(zone), -1_000.0, []
    for number, (at, place) in enumerate(places):
        if place - last < 72:
            continue
        anchor = "start" if not number else "end" if place > places[-1][1] - 36 else "middle"
        shown = formatting.moment(at, local, "clock")
        found.append(f'<text class="tick" x="{place:.1f}" y="{bottom + 18}" text-anchor="{anchor}">{shown}</text>')
        last = place
    return found
