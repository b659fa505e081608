"""What the live demo looks like: a pure function from figures to something rich can draw."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.align import Align
from rich.box import ROUNDED
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.layout import Layout
from rich.panel import Panel
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from examples.orders.figures import Snapshot

_BLOCKS = " ▁▂▃▄▅▆▇█"
_KEYS = (
    ("w", "worker off/on"),
    ("k", "kill -9 it"),
    ("o", "an order"),
    ("b", "500 orders"),
    ("q", "quit"),
)


@dataclass(slots=True)
class Scene:
    """Everything that is on the screen."""

    now: Snapshot = field(default_factory=Snapshot)
    backlog: Sequence[int] = ()
    seconds_per_column: float = 0.25
    per_second: float = 0.0
    confirmations: int = 0
    confirmation_duplicates: int = 0
    worker: str = "starting"  # running, starting, stopping, stopped, killed or died
    worker_pid: int | None = None
    placing: int = 0
    kills: int = 0
    url: str = ""
    console: str = ""  # its address in a browser
    server: str = ""
    dsn: str = ""
    news: Sequence[tuple[str, str]] = ()  # when, what


def draw(scene: Scene) -> RenderableType:
    """The whole screen, at least 80 by 24."""
    layout = Layout()
    layout.split_column(
        Layout(_header(scene), size=4),
        Layout(name="figures", size=7),
        Layout(
            Panel(Chart(scene), title=_chart_title(scene), title_align="left", box=ROUNDED, border_style="dim"), ratio=3
        ),
        Layout(_news(scene), ratio=2, minimum_size=4),
        Layout(_keys(), size=1),
    )
    layout["figures"].split_row(
        Layout(_outbox(scene), ratio=3), Layout(_worker(scene), ratio=3), Layout(_effects(scene), ratio=4)
    )
    return layout


def _header(scene: Scene) -> RenderableType:
    grid = Table.grid(expand=True)
    grid.add_column()
    grid.add_column(justify="right")
    title = Text("Holdfast", style="bold cyan").append("  orders demo", style="bold")
    if scene.console:
        title.append("  console ", style="dim").append(scene.console, style="cyan")
    grid.add_row(title, Text(scene.server, style="dim"))
    command = Text("curl -X POST ", style="dim").append(scene.url, style="cyan")
    command.append(' --json \'{"customer":"Ada","total_cents":1999}\'', style="dim")
    command.no_wrap, command.overflow = True, "ellipsis"
    # With the password, or psql would ask for one that nobody knows; the server is gone with the demo.
    psql = Text("psql ", style="dim").append(scene.dsn, style="cyan")
    psql.no_wrap, psql.overflow = True, "ignore"
    return Group(grid, command, psql)


def _figure(table: Table, name: str, value: str, style: str = "bold") -> None:
    table.add_row(Text(name, style="dim"), Text(value, style=style))


def _panel(title: str, content: RenderableType, style: str = "dim") -> Panel:
    return Panel(content, title=title, title_align="left", box=ROUNDED, border_style=style)


def _table() -> Table:
    table = Table.grid(expand=True, padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    return table


def _outbox(scene: Scene) -> Panel:
    now, table = scene.now, _table()
    _figure(table, "pending", f"{now.waiting:,}", "bold yellow" if now.waiting else "bold")
    _figure(table, "in flight", f"{now.in_flight:,}", "bold cyan" if now.in_flight else "bold")
    _figure(table, "delivered", f"{now.delivered:,}", "bold green")
    _figure(table, "failed", f"{now.failed:,}", "bold red" if now.failed else "bold")
    _figure(table, "oldest", f"{now.oldest:.1f} s" if now.owed else "–", "bold yellow" if now.oldest > 1 else "bold")
    return _panel("Deliveries", table)


_WORKER_STYLES = {"running": "green", "starting": "yellow", "stopping": "yellow", "stopped": "yellow"}


def _worker(scene: Scene) -> Panel:
    style, table = _WORKER_STYLES.get(scene.worker, "red"), _table()
    _figure(table, "state", f"● {scene.worker}", f"bold {style}")
    _figure(table, "process", str(scene.worker_pid or "–"))
    _figure(table, "per second", f"{scene.per_second:,.0f}")
    _figure(table, "killed", f"{scene.kills} time{'' if scene.kills == 1 else 's'}")
    if scene.worker_pid is None and scene.now.in_flight:
        left = scene.now.lease_left
        _figure(table, "lease", f"{left:.1f} s left" if left > 0 else "ended", "bold yellow")
    return _panel("Worker", table, style)


def _effects(scene: Scene) -> Panel:
    now, table = scene.now, _table()
    _figure(table, "orders", f"{now.orders:,}" + (f" (+{scene.placing})" if scene.placing else ""))
    _figure(table, "in the ledger", f"{now.ledger:,}", _done(now.ledger, now.orders))
    _figure(
        table, "  twice or more", f"{now.ledger_duplicates:,}", "bold red" if now.ledger_duplicates else "bold green"
    )
    sent = scene.confirmations - scene.confirmation_duplicates
    _figure(table, "confirmations", f"{sent:,}", _done(sent, now.orders))
    _figure(table, "  sent again", f"{scene.confirmation_duplicates:,}", "bold")
    return _panel("Effects", table)


def _done(value: int, whole: int) -> str:
    return "bold green" if value >= whole else "bold yellow"


def _chart_title(scene: Scene) -> str:
    return f"Deliveries owed: {scene.now.owed:,}"


def _news(scene: Scene) -> Panel:
    lines = [
        Text(f"{when}  ", style="dim", no_wrap=True, overflow="ellipsis").append(what, style="default")
        for when, what in scene.news
    ]
    return _panel("What happened", Group(*reversed(lines)))


def _keys() -> RenderableType:
    line = Text()
    for key, meaning in _KEYS:
        line.append(f" {key} ", style="bold reverse").append(f" {meaning}  ", style="dim")
    return Align.center(line)


class Chart:
    """The backlog over time, as tall as the space it is given; new values come in at the right."""

    def __init__(self, scene: Scene) -> None:
        self._values = scene.backlog
        self._style = Style(color="green" if scene.worker == "running" else "yellow")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, max(1, options.height or 4)
        for row in bars(self._values, width, height):
            yield Segment(row, self._style)
            yield Segment.line()


def bars(values: Sequence[int], width: int, height: int) -> list[str]:
    """Rows of block characters, the top one first. The highest value fills the height."""
    shown = list(values)[-width:]
    shown = [0] * (width - len(shown)) + shown
    scale = height * 8 / max(10, *shown)
    eighths = [max(round(value * scale), 1) if value else 0 for value in shown]
    return [
        "".join(_BLOCKS[min(8, max(0, each - 8 * (height - 1 - row)))] for each in eighths) for row in range(height)
    ]
