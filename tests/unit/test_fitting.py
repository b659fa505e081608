"""What a small screen leaves out, and that it says so (OPS-1)."""

from __future__ import annotations

from rich.console import Console, Group
from rich.text import Text

from holdfast.cli import output
from holdfast.cli.fitting import Fitted, Section

WARNINGS = Section(Group(*(output.Line(f"! warning {n}") for n in range(6))), "warnings", 6)
WORKERS = Section(output.Listing(("worker", "heartbeat"), [(f"w{n}", "3 s ago") for n in range(30)]), "workers", 30)
ROUTES = Section(output.Listing(("route", "note"), [(f"r{n}", "long " * 20) for n in range(9)]), "routes", 9)
EVERYTHING = Fitted([Section(Text("schema core")), WARNINGS, WORKERS, ROUTES])


def shown(what: Fitted, height: int | None) -> list[str]:
    console = Console(width=80, height=height or 24, color_system=None)
    lines = console.render_lines(Fitted(what.sections, on_screen=height is not None), pad=False)
    return [text for line in lines if (text := "".join(segment.text for segment in line).rstrip())]


def test_all_is_shown_where_it_fits() -> None:
    """On paper, and on a screen that is high enough (OPS-1)."""
    assert len(shown(EVERYTHING, None)) == len(shown(EVERYTHING, 200)) == 1 + 6 + 31 + 27


def test_a_small_screen_has_something_of_each_and_says_how_much_is_hidden() -> None:
    """The first sections have the most, and the number of rows that are hidden is true (OPS-1)."""
    lines = shown(EVERYTHING, 24)
    assert len(lines) <= 24
    assert lines[:7] == ["schema core", *(f"! warning {n}" for n in range(6))]
    workers = [line for line in lines if line.startswith("w") and not line.startswith("worker")]
    assert "worker  heartbeat" in lines and f"… {30 - len(workers)} more workers hidden" in lines
    assert "r0" in lines and "… 8 more routes hidden" in lines


def test_a_tiny_screen_names_what_has_no_room() -> None:
    """Three lines are enough to know that there is more (OPS-1)."""
    lines = shown(EVERYTHING, 5)
    assert lines == [
        "schema core",
        "! warning 0",
        "! warning 1",
        "… 4 more warnings hidden",
        "… 30 workers, 9 routes hidden",
    ]
