"""What handlers did lately, as `holdfast status` shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from holdfast.cli import output
from holdfast.handler_tally import Histogram
from holdfast.operator import HandlerRates, Operator

WINDOWS = (1, 5, 60)  # minutes
_SHOWN = 10  # --json has more
_WIDE = "delivered per s in 1 5 60 min; failures of 60 min; p50 p99 of 5 min"
_NARROW = "delivered per s in 5 min; failures of 60 min; p99 of 5 min"
_HEADERS = ("handler", "per s", "retried", "failed", "outbox", "ran")

Rates = Mapping[int, list[HandlerRates]]


async def read(operator: Operator) -> Rates:
    """Read what handlers did in each of the windows."""
    return {minutes: await operator.rates(minutes) for minutes in WINDOWS}


def as_data(found: Rates) -> list[dict[str, Any]]:
    """Return a line for each handler and window."""
    return [
        {
            "handler_name": each.handler_name,
            "minutes": minutes,
            "seconds": round(each.seconds, 1),
            "handled_per_s": round(each.handled, 3),
            **dict(each.tally.counts.items()),
            "archived": each.tally.archived,
            "outbox_p50_s": each.tally.outbox_time.quantile(0.5),
            "outbox_p99_s": each.tally.outbox_time.quantile(0.99),
            "handler_p50_s": each.tally.handler_time.quantile(0.5),
            "handler_p99_s": each.tally.handler_time.quantile(0.99),
        }
        for minutes, some in found.items()
        for each in some
    ]


def table(found: Rates) -> Table | None:
    """Return a line for each handler that is at work, or has failures of the last hour; None without any handler."""
    minute, five, hour = ({each.handler_name: each for each in found[minutes]} for minutes in WINDOWS)
    rows: list[tuple[list[object], list[object]]] = []
    shown = [name for name, each in hour.items() if name in five or each.tally.counts["failed"]]
    for name in shown[:_SHOWN]:
        counts = hour[name].tally.counts
        lately = five[name].tally if name in five else None
        times = [None, None] if lately is None else [lately.outbox_time, lately.handler_time]
        rates = [_rate(some.get(name)) for some in (minute, five, hour)]
        failing = [counts["retried"], counts["failed"]]
        rows.append(
            (
                [name, " ".join(rates), *failing, *(_quantiles(each, 0.5, 0.99) for each in times)],
                [name, rates[1], *failing, *(_quantiles(each, 0.99) for each in times)],
            )
        )
    if not hour:
        return None
    more = len(shown) - len(rows) + getattr(found[WINDOWS[-1]], "left_out", 0)
    idle = len(hour) - len(shown)
    left_out = [f"… and {more:,} more"] * (more > 0) + [f"idle for 5 min and without failures: {idle:,}"] * (idle > 0)
    return Table([wide for wide, _ in rows], [narrow for _, narrow in rows], "; ".join(left_out))


@dataclass(frozen=True)
class Table:
    """One line for each handler, with fewer numbers where all of them do not fit."""

    wide: Sequence[Sequence[object]]
    narrow: Sequence[Sequence[object]]
    left_out: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.wide:
            full = output.Listing(_HEADERS, self.wide)
            fits = full.width(console, options) <= options.max_width
            yield Text(f"handlers: {_WIDE if fits else _NARROW}", style="dim", no_wrap=True, overflow="ellipsis")
            yield full if fits else output.Listing(_HEADERS, self.narrow)
        if self.left_out:
            yield Text(f"{'' if self.wide else 'handlers: '}{self.left_out}", style="dim")


def _rate(found: HandlerRates | None) -> str:
    if found is None:
        return "0"
    rate = found.handled
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}" if rate >= 0.1 else "0" if rate == 0 else f"{rate:.3f}"


def _quantiles(histogram: Histogram | None, *shares: float) -> str:
    if histogram is None or not histogram.count:
        return "-"
    return " ".join(_time(histogram.quantile(share) or 0.0) for share in shares)


def _time(seconds: float) -> str:
    """An estimate within a wide bucket: two digits of it, at most, mean something."""
    seconds = float(f"{seconds:.2g}")
    if seconds < 1:
        return f"~{seconds * 1e3:g}ms"
    return f"~{seconds:g}s" if seconds < 120 else f"~{float(f'{seconds / 60:.2g}'):g}min"
