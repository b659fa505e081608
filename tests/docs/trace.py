"""Draws docs/images/trace.svg, the picture of one order's trace, from the spans that the demo has really exported.

`./dev docs trace` runs the demo's test, which writes the spans to docs/images/trace.json, and draws them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final

from tests.observability.collector import ExportedSpan, depths
from tests.observability.test_trace_of_an_order import TRACE_FILE

IMAGES: Final = Path(__file__).parents[2] / "docs" / "images"
SPANS: Final = IMAGES / "trace.json"
PICTURE: Final = IMAGES / "trace.svg"

WIDTH, LEFT, RIGHT = 1080, 380, 24
HEAD, ROW, FOOT = 92, 32, 44
BREAK = 64  # the width of a pause that is cut out
LONGEST_PAUSE = 50_000_000  # nanoseconds without any span
SERVICES = {"orders-api": ("#2f6fde", "API"), "orders-worker": ("#12866b", "worker")}
MOST_TICKS = 8
STEPS = [number * 10**power for power in range(6, 12) for number in (1, 2, 5)]  # nanoseconds
FAILED, INK, FAINT, LINE = "#c8372d", "#1d2733", "#667382", "#e3e8ee"


@dataclass(frozen=True, slots=True)
class Stretch:
    """A time in which something runs, and where it is drawn."""

    start: int
    end: int
    left: float
    right: float


class Axis:
    """Time from left to right, without the long pauses."""

    def __init__(self, spans: Sequence[ExportedSpan]) -> None:
        busy: list[list[int]] = []
        for span in sorted(spans, key=lambda span: span.start):
            if busy and span.start - busy[-1][1] <= LONGEST_PAUSE:
                busy[-1][1] = max(busy[-1][1], span.end)
            else:
                busy.append([span.start, span.end])
        self.begin = busy[0][0]
        room = WIDTH - LEFT - RIGHT - BREAK * (len(busy) - 1)
        self._scale = room / sum(end - start for start, end in busy)
        self.stretches: list[Stretch] = []
        left = float(LEFT)
        for start, end in busy:
            right = left + (end - start) * self._scale
            self.stretches.append(Stretch(start, end, left, right))
            left = right + BREAK

    def x(self, moment: int) -> float:
        stretch = next(each for each in self.stretches if moment <= each.end)
        return stretch.left + (moment - stretch.start) * self._scale

    def ticks(self) -> Iterable[tuple[float, str]]:
        """A few marks, as text in milliseconds since the beginning."""
        busy = sum(stretch.end - stretch.start for stretch in self.stretches)
        step = next(step for step in STEPS if busy / step <= MOST_TICKS)
        for stretch in self.stretches:
            first = -(-(stretch.start - self.begin) // step) * step
            for moment in range(first, stretch.end - self.begin + 1, step):
                yield self.x(self.begin + moment), f"{moment // 1_000_000} ms"


def draw(spans: Sequence[ExportedSpan]) -> str:
    """The picture as SVG."""
    rows, axis = depths(spans), Axis(spans)
    height = HEAD + ROW * len(rows) + FOOT
    bottom = height - FOOT + 6
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="Inter, Segoe UI, Helvetica, Arial, sans-serif" font-size="13" role="img">',
        "<title>One order as one trace: the request, the publish, the handlers, a retry</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="10" fill="#ffffff"/>',
        text(24, 34, "POST /orders", INK, size=18, weight=600),
        text(24, 56, f"trace {rows[0][1].trace_id}", FAINT, size=12, family="ui-monospace, Menlo, monospace"),
        *legend(),
    ]
    for number, (x, label) in enumerate(axis.ticks()):
        parts.append(f'<line x1="{x:.1f}" y1="{HEAD - 6}" x2="{x:.1f}" y2="{bottom}" stroke="{LINE}"/>')
        anchor = "start" if number == 0 else "middle"
        parts.append(text(x, HEAD - 12, label, FAINT, size=11, anchor=anchor))
    for before, after in zip(axis.stretches, axis.stretches[1:], strict=False):
        parts += pause(before, after, bottom)
    for number, (depth, span) in enumerate(rows):
        parts += row(axis, HEAD + ROW * number, depth, span, shaded=number % 2 == 0)
    note = "Drawn from the spans that the two processes of the demo exported over OTLP/HTTP."
    parts += [text(24, height - 16, note, FAINT, size=11), "</svg>"]
    return "\n".join(parts) + "\n"


def legend() -> Iterable[str]:
    x = WIDTH - RIGHT - 232
    for color, label in (*SERVICES.values(), (FAILED, "failed attempt")):
        yield f'<rect x="{x}" y="24" width="12" height="12" rx="3" fill="{color}"/>'
        yield text(x + 18, 34.5, label, FAINT, size=12)
        x += 30 + 7 * len(label)


def pause(before: Stretch, after: Stretch, bottom: int) -> Iterable[str]:
    """What is cut out between two stretches."""
    middle = (before.right + after.left) / 2
    seconds = (after.start - before.end) / 1e9
    height = bottom - HEAD + 6
    yield f'<rect x="{before.right + 14:.1f}" y="{HEAD - 6}" width="{BREAK - 28}" height="{height}" fill="#f1f4f7"/>'
    yield (
        f'<text transform="translate({middle + 4:.1f} {HEAD + 8}) rotate(-90)" text-anchor="end" '
        f'fill="{FAINT}" font-size="11">{seconds:.2f} s until the retry</text>'
    )


def row(axis: Axis, top: int, depth: int, span: ExportedSpan, *, shaded: bool) -> Iterable[str]:
    color = FAILED if span.failed else SERVICES[span.service][0]
    left, right = axis.x(span.start), axis.x(span.end)
    width = max(right - left, 3.0)
    base = top + ROW / 2
    if shaded:
        yield f'<rect x="12" y="{top}" width="{LEFT - 28}" height="{ROW}" rx="4" fill="#f7f9fb"/>'
    indent = 24 + 16 * depth
    yield f'<circle cx="{indent + 4}" cy="{base}" r="4" fill="{SERVICES[span.service][0]}"/>'
    yield text(indent + 16, base + 4.5, span.name, INK if span.scope == "holdfast" else FAINT)
    yield f'<rect x="{left:.1f}" y="{base - 8}" width="{width:.1f}" height="16" rx="3" fill="{color}"/>'
    label = " · ".join([f"{(span.end - span.start) / 1e6:.1f} ms", *remarks(span)])
    estimated = 6.3 * len(label)
    if left + width + 6 + estimated < WIDTH - 8:
        yield text(left + width + 6, base + 4.5, label, FAILED if span.failed else FAINT, size=12, halo=True)
    else:
        yield text(left - 6, base + 4.5, label, FAILED if span.failed else FAINT, size=12, anchor="end", halo=True)


def remarks(span: ExportedSpan) -> Iterable[str]:
    if span.name.startswith("process "):
        if span.failed or span.attributes["messaging.outbox.attempt"] > 1:
            yield f"attempt {span.attributes['messaging.outbox.attempt']}"
        yield str(span.attributes["messaging.outbox.outcome"])
    if span.failed:
        yield str(span.attributes["error.type"])
    if "http.response.status_code" in span.attributes and not span.parent_id:
        yield str(span.attributes["http.response.status_code"])


def text(
    x: float,
    y: float,
    words: str,
    color: str,
    *,
    size: int = 13,
    weight: int = 400,
    anchor: str = "start",
    family: str | None = None,
    halo: bool = False,
) -> str:
    style = f' font-family="{family}"' if family else ""
    style += ' stroke="#ffffff" stroke-width="3" paint-order="stroke"' if halo else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}"{style}>{escape(words)}</text>'
    )


def kept() -> list[ExportedSpan]:
    """The spans of which the picture is drawn."""
    return [ExportedSpan(**span) for span in json.loads(SPANS.read_text())]


def main() -> int:
    test = Path(__file__).parents[1] / "observability" / "test_trace_of_an_order.py"
    ran = subprocess.run([sys.executable, "-m", "pytest", "-q", test], env={**os.environ, TRACE_FILE: str(SPANS)})
    if ran.returncode == 0:
        PICTURE.write_text(draw(kept()))
    return ran.returncode


if __name__ == "__main__":
    sys.exit(main())
