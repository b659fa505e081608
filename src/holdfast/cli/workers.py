"""holdfast workers: the running workers and what they serve."""

from __future__ import annotations

import typer

from holdfast.cli import output
from holdfast.cli.options import JsonOption, Where, spread

app = typer.Typer(help="Workers: which run, and what they serve.", no_args_is_help=True)


@app.command("list")
@spread
def list_(where: Where, as_json: JsonOption = False) -> None:
    """List the workers that have not stopped in order, the latest heartbeat first."""
    found = where.run(lambda operator: operator.workers())
    if as_json:
        output.print_json(found)
        return
    output.print_table(
        ("worker", "process", "version", "generation", "channels", "handlers", "started", "heartbeat"),
        [
            (
                *(w.name, f"{w.host}:{w.pid}", w.version, w.generation, w.channels, w.handlers, w.started_at),
                f"{w.silent_for:.0f} s ago" if w.living else f"SILENT for {w.silent_for:.0f} s",
            )
            for w in found
        ],
    )
