"""holdfast workers: who runs."""

from __future__ import annotations

import typer

from holdfast.cli import output
from holdfast.cli.options import JsonOption, Where, spread
from holdfast.operator import Operator
from holdfast.postgres import reads
from holdfast.postgres.reads import WorkerSeen

app = typer.Typer(help="Workers: who runs, and what they serve.", no_args_is_help=True)


@app.command("list")
@spread
def list_(where: Where, as_json: JsonOption = False) -> None:
    """List the workers that have not said goodbye, the latest heard of first."""

    async def look(operator: Operator) -> list[WorkerSeen]:
        return (await reads.status(operator.connection, operator.schema)).workers

    found = where.run(look)
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
