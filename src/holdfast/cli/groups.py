"""Groups of failures, and when they failed, as a table or as data."""

from __future__ import annotations

from holdfast.cli import output
from holdfast.operator import FailureGroups, FailureHistograms

_BARS = " ▁▂▃▄▅▆▇█"


def show_groups(found: FailureGroups, as_json: bool) -> None:
    if as_json:
        output.print_json(found)
        output.print_left_out(found.groups, as_json=True)
        return
    more_than = "+" if found.is_more else ""
    output.print_line(
        f"{found.examined}{more_than} failed in {output.counted(len(found.groups), 'group')}; times are UTC", "dim"
    )
    output.print_table(
        ("group", "count", "first seen", "last seen", "reasons", "event types", "note", "raised at", "newest error"),
        [
            (
                g.name,
                g.count,
                g.first_seen,
                g.last_seen,
                g.reasons,
                g.event_types,
                g.note,
                g.raised_at,
                output.first_line(g.sample_error),
            )
            for g in found.groups
        ],
    )
    output.print_left_out(found.groups)


def show_histograms(found: FailureHistograms, as_json: bool) -> None:
    if as_json:
        output.print_json(found)
        return
    more_than = "+" if found.is_more else ""
    output.print_line(
        f"{found.examined}{more_than} failed since {output.shown(found.since)} UTC; steps of {found.step / 60:g} min",
        "dim",
    )
    highest = max((max(group.counts) for group in found.groups), default=1)
    output.print_table(
        ("group", "count", "when"), [(g.name, sum(g.counts), f"|{bars(g.counts, highest)}|") for g in found.groups]
    )


def bars(counts: list[int], highest: int) -> str:
    """One character for each count: what is not zero is seen.

    >>> bars([0, 1, 50, 100], 100)
    ' ▁▄█'
    """
    return "".join(_BARS[0 if count == 0 else max(1, count * 8 // highest)] for count in counts)
