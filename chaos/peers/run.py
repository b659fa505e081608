"""One run: every fault, one after the other, each of them against all systems at the same time."""

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.environments import EnvironmentFailed
from chaos.peers import report
from chaos.peers.crew import Crew
from chaos.peers.faults import ACTS, FAULTS, Fault, Figures
from chaos.peers.stage import Stage
from chaos.peers.systems import SYSTEMS, System

errors = Console(stderr=True, highlight=False)
Say = Callable[[str], None]


def main(seed: int, names: Sequence[str], *, as_json: bool, keep_report: bool, keep: bool) -> int:
    systems = usable(SYSTEMS.values())
    faults = [FAULTS[name] for name in names]
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[what]}"), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("", total=len(faults), what="starting Postgres")

        def begin(done: int, fault: Fault) -> Say:
            bar.update(task, completed=done, description=f"{fault.name}, {done + 1} of {len(faults)}")
            return lambda what: bar.update(task, what=what)

        run = asyncio.run(play(seed, systems, faults, begin, show, keep=keep))
    if as_json:
        print(json.dumps(run), flush=True)
    if keep_report and report.is_complete(run):
        errors.print(f"written: {report.write(run)}", soft_wrap=True)
    elif keep_report:
        errors.print("[yellow]not written:[/yellow] a report needs every fault and every system")
    problems = report.broken(run)
    for problem in problems:
        errors.print(f"[red]holdfast, {problem}[/red]")
    return 1 if problems else 0


def usable(systems: Iterable[System]) -> list[System]:
    """Those whose environments are there, or can be made; says what is left out, and why."""
    found = []
    for system in systems:
        try:
            errors.print(f"{system.name} {system.version()}")
            found.append(system)
        except EnvironmentFailed as error:
            errors.print(f"{system.name}: [yellow]not run:[/yellow] {error}", soft_wrap=True)
    return found


async def play(
    seed: int,
    systems: Sequence[System],
    faults: Sequence[Fault],
    begin: Callable[[int, Fault], Say] = lambda done, fault: lambda what: None,
    finish: Callable[[Fault, dict[str, Figures]], None] = lambda fault, found: None,
    *,
    keep: bool = False,
) -> report.Run:
    directory = Path(tempfile.mkdtemp(prefix="holdfast-chaos-peers-"))
    stage = Stage(directory, seed)
    found: dict[str, dict[str, Figures]] = {}
    began = time.monotonic()
    try:
        await stage.open(systems)
        for act in ACTS:
            chosen = [fault for fault in faults if fault.name in act]
            async with stage.crews(systems if chosen else []) as crews:
                for fault in chosen:
                    found[fault.name] = await one(stage, crews, fault, begin(len(found), fault))
                    finish(fault, found[fault.name])
    except BaseException as error:
        error.add_note(f"what is left of the run: {directory}")
        raise
    finally:
        await stage.close()
    if keep:
        errors.print(f"notes and logs: {directory}", soft_wrap=True)
    else:
        shutil.rmtree(directory, ignore_errors=True)
    in_order = {fault.name: found[fault.name] for fault in faults}
    return report.summary(seed, systems, in_order, time.monotonic() - began)


async def one(stage: Stage, crews: list[Crew], fault: Fault, say: Say) -> dict[str, Figures]:
    say("waiting for workers")
    await stage.ready(crews, fault.name)
    telling = asyncio.create_task(tell(crews, say))
    try:
        figures = await fault.play(stage, crews)
    finally:
        telling.cancel()
    return dict(zip((crew.system.name for crew in crews), figures, strict=True))


async def tell(crews: Sequence[Crew], say: Say) -> None:
    while True:
        say("  ".join(f"{crew.system.name} {crew.sight.delivered}/{len(crew.sight.owed)}" for crew in crews))
        await asyncio.sleep(0.5)


def show(fault: Fault, found: dict[str, Figures]) -> None:
    errors.print(f"[bold]{fault.title}[/bold]")
    for name, figures in found.items():
        errors.print(f"  {name}: {fault.tell(figures).replace('**', '')}", soft_wrap=True)
