"""Groups of failures, as a table or as data."""

from __future__ import annotations

from holdfast.cli import output
from holdfast.operator import FailureGroups


def show_groups(found: FailureGroups, as_json: bool) -> None:
    if as_json:
        listed = [{"group": group.name} | output.as_data(group) for group in found.groups]
        more = {"examined": found.examined, "limit": found.limit, "is_more": found.is_more}
        output.print_json({"groups": listed} | more)
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
