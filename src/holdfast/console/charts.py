"""Charts as SVG, drawn by the server. What they say is told by shape and pattern, never by hue alone.

Each is an `img` with a sentence; its numbers stand in a table beside it. They are drawn for two widths, because text
that is scaled cannot be read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from holdfast.console import formatting
from holdfast.operator import Flow

if TYPE_CHECKING:
    from holdfast.console.story import Lane

WIDE, NARROW = 744, 334
LEFT, RIGHT = 56, 8


def steps(flow: Sequence[Flow], minutes: int, step: int, now: datetime) -> list[Flow]:
    """Return the flow with empty steps where nothing happened, up to the last whole step."""
    found = {each.start: each for each in flow}
    width = timedelta(minutes=step)
    origin = datetime(2000, 1, 1, tzinfo=UTC)
    last = origin + ((now - origin) // width) * width
    starts = [last - width * n for n in range(minutes // step, 0, -1)]
    return [found.get(start) or Flow(start, 0, 0, 0, 0, 0, 0, 0) for start in starts]


def nice_top(value: float) -> float:
    """Return a round number that is not below a value.

    >>> [nice_top(each) for each in (0, 3, 18, 120, 340)]
    [4, 4, 20, 120, 400]
    """
    if value <= 4:
        return 4
    scale = 10 ** (len(str(int(value))) - 1)
    return next(int(each * scale) for each in (1, 1.2, 1.6, 2, 3, 4, 6, 8, 10) if each * scale >= value)


def flow_chart(flow: Sequence[Flow], step: int, zone: str, width: int = WIDE, height: int = 190) -> Markup:
    """Return attempts a minute: delivered ones as a plain area, failed ones hatched on top of it."""
    if not flow:
        return Markup("")
    delivered = [each.delivered / step for each in flow]
    both = [(each.delivered + each.failed_attempts) / step for each in flow]
    top = nice_top(max(both))
    inner, bottom, above = width - LEFT - RIGHT, height - 26, 12
    places = [LEFT + inner * n / max(1, len(flow) - 1) for n in range(len(flow))]

    def y(value: float) -> float:
        return bottom - (bottom - above) * value / top

    def points(values: Sequence[float]) -> str:
        return " ".join(f"{x:.1f},{y(value):.1f}" for x, value in zip(places, values, strict=True))

    floor = f"{places[-1]:.1f},{bottom} {places[0]:.1f},{bottom}"
    back = " ".join(f"{x:.1f},{y(v):.1f}" for x, v in reversed(list(zip(places, delivered, strict=True))))
    parts = [grid(top, width, bottom, above)]
    parts.append(f'<polygon class="area-ok" points="{points(delivered)} {floor}"/>')
    if any(each.failed_attempts for each in flow):
        parts.append(f'<polygon class="area-fail" points="{points(both)} {back}"/>')
        parts.append(f'<polyline class="line-fail" points="{points(both)}"/>')
    parts.append(f'<polyline class="line-ok" points="{points(delivered)}"/>')
    parts.append(_axis([each.start for each in flow], places, bottom, zone, 5 if width >= WIDE else 3))
    failed = sum(each.failed_attempts for each in flow)
    good = sum(each.delivered for each in flow)
    sentence = f"{good:,} deliveries and {failed:,} failed attempts in {len(flow) * step} minutes."
    return svg(width, height, "chart chart-wide" if width >= WIDE else "chart chart-narrow", sentence, parts)


def heat(flow: Sequence[Flow], width: int = WIDE) -> Markup:
    """Return how long attempts took from when they were due: four rows, darker where there are more."""
    rows = (
        ("> 10 s", [each.longer for each in flow]),
        ("1–10 s", [each.within_10_s for each in flow]),
        ("0.1–1 s", [each.within_1_s for each in flow]),
        ("< 0.1 s", [each.within_100_ms for each in flow]),
    )
    if not flow:
        return Markup("")
    count = len(flow) if width >= WIDE else len(flow) // 2
    inner = width - LEFT - RIGHT
    cell, tall = inner / count, 17
    most = max(1, *(value for _, values in rows for value in values))
    parts = []
    for row, (label, values) in enumerate(rows):
        top = row * (tall + 3)
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{top + 12}" text-anchor="end">{escape(label)}</text>')
        if count != len(flow):
            values = [a + b for a, b in zip(values[::2], values[1::2], strict=False)][:count]
        for n, value in enumerate(values):
            parts.append(
                f'<rect class="h{_level(value, most)}" x="{LEFT + n * cell:.1f}" y="{top}" '
                f'width="{max(1, cell - 2):.1f}" height="{tall}" rx="2"/>'
            )
    slow = sum(each.longer for each in flow)
    sentence = f"From due to handled: {slow:,} attempts took more than 10 seconds."
    return svg(width, 4 * (tall + 3), "chart chart-wide" if width >= WIDE else "chart chart-narrow", sentence, parts)


def bars(values: Sequence[int], sentence: str, width: int = 116, height: int = 28, kind: str = "") -> Markup:
    """Return a sparkline of counts, which starts at zero. None of them is invisible that is not zero."""
    most = max(1, *values) if values else 1
    each = width / max(1, len(values))
    parts = [f'<line class="base" x1="0" y1="{height - 0.5}" x2="{width}" y2="{height - 0.5}"/>']
    for n, value in enumerate(values):
        if value:
            tall = max(2.0, (height - 3) * value / most)
            parts.append(
                f'<rect class="bar" x="{n * each:.1f}" y="{height - 1 - tall:.1f}" '
                f'width="{max(1.0, each - 1.2):.1f}" height="{tall:.1f}"/>'
            )
    return svg(width, height, f"spark {kind}".strip(), sentence, parts)


def lanes(found: Sequence[Lane], now: datetime, zone: str, width: int = WIDE) -> Markup:
    """Return what each handler did with an event over time: handled solid, failing hatched, waiting dotted.

    Gaps in which nothing happened are drawn short, so that seconds and hours fit into one line.
    """
    replays = {moment for lane in found for moment in lane.replays}
    moments = sorted({m for lane in found for bar in lane.bars for m in (bar.start, bar.end)} | replays | {now})
    if not found or len(moments) < 2:
        return Markup("")
    left, right, tall, above = 250, 16, 44, 28
    weights = [min(max((b - a).total_seconds(), 0.0), 600.0) ** 0.35 + 0.4 for a, b in pairwise(moments)]
    scale = (width - left - right) / sum(weights)
    places = {moments[0]: float(left)}
    for (a, b), weight in zip(pairwise(moments), weights, strict=True):
        places[b] = places[a] + weight * scale
    height = above + tall * len(found) + 4
    parts, last_label = [], -1_000.0
    local = formatting.zone(zone)
    for each in moments:
        x = places[each]
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{above - 6}" x2="{x:.1f}" y2="{height - 4}"/>')
        if x - last_label >= 66 and (x <= width - right - 40 or each == now):
            anchor = "end" if each == now else "start" if each == moments[0] else "middle"
            shown = "now" if each == now else formatting.moment(each, local, "clock")
            parts.append(f'<text class="tick" x="{x:.1f}" y="14" text-anchor="{anchor}">{shown}</text>')
            last_label = x
    for row, lane in enumerate(found):
        y = above + row * tall
        name = formatting.visible(lane.handler)
        short = name if len(name) <= 34 else f"{name[:33]}…"
        parts.append(f'<text class="lane-name" x="0" y="{y + 13}">{escape(short)}</text>')
        for moment in lane.replays:
            x = places[moment]
            parts.append(f'<path class="f-replay" d="M{x - 4:.1f},{y} l8,7.5 l-8,7.5 z"/>')
        for bar in lane.bars:
            x, end = places[bar.start], places[bar.end]
            kind = {"handled": "f-ok", "failing": "f-fail", "waiting": "f-wait"}[bar.kind]
            parts.append(
                f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{max(4.0, end - x):.1f}" height="15" rx="2"/>'
            )
            parts.append(f'<text class="tick" x="{x:.1f}" y="{y + 29}">{escape(bar.label)}</text>')
    many = formatting.plural(len(found), "handler")
    sentence = f"What {many} did with the event over time; the story below has the same in words."
    return svg(width, height, "chart lanes", sentence, parts)


def hours(found: Mapping[datetime, int], now: datetime, count: int = 24) -> list[int]:
    """Return counts by hour, the oldest first."""
    this = now.replace(minute=0, second=0, microsecond=0)
    return [found.get(this - timedelta(hours=n), 0) for n in range(count - 1, -1, -1)]


def _level(value: int, most: int) -> int:
    """Return one of six steps; each is a few times as much as the one before."""
    if not value:
        return 0
    share = value / most
    return 1 + sum(share > bound for bound in (0.02, 0.08, 0.25, 0.6))


def grid(top: float, width: int, bottom: float, above: float) -> str:
    """Return four lines across a chart, with what they stand for."""
    lines = []
    for n in range(5):
        value = top * n / 4
        y = bottom - (bottom - above) * n / 4
        shown = f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"
        kind = "axis" if n == 0 else "grid"
        lines.append(f'<line class="{kind}" x1="{LEFT}" y1="{y:.1f}" x2="{width - RIGHT}" y2="{y:.1f}"/>')
        lines.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{shown}</text>')
    return "".join(lines)


def _axis(starts: Sequence[datetime], places: Sequence[float], bottom: float, zone: str, labels: int) -> str:
    local = formatting.zone(zone)
    found = []
    for n in range(labels):
        at = round((len(starts) - 1) * n / (labels - 1))
        anchor = "start" if n == 0 else "end" if n == labels - 1 else "middle"
        shown = formatting.moment(starts[at], local, "minute")
        found.append(f'<text class="tick" x="{places[at]:.1f}" y="{bottom + 18}" text-anchor="{anchor}">{shown}</text>')
    return "".join(found)


def svg(width: float, height: float, kind: str, sentence: str, parts: Sequence[str]) -> Markup:
    """Return the parts as an image with a sentence; all that is not a number is escaped here or by its maker."""
    # All that is not a number is escaped here or above.
    return Markup(  # noqa: S704
        f'<svg class="{kind}" role="img" aria-label="{escape(sentence)}" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}">{"".join(parts)}</svg>'
    )
