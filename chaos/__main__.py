"""`./dev chaos [--seed S] [--for SECONDS] [--scenario NAME] [--substrate BROKER] [--peers] [--json]`: nothing lost."""

import argparse
import asyncio
import json
import random
import re
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from chaos import report
from chaos.peers import run as peers
from chaos.peers.faults import FAULTS
from chaos.run import Result, play
from chaos.scenario import Scenario
from chaos.scenarios import SCENARIOS
from chaos.substrates import SUBSTRATES

errors = Console(stderr=True, highlight=False)
SUMMED = (
    *("attempted", "acknowledged", "delivered", "lost", "unexpected", "recovered", "effect_duplicates"),
    *(
        "in_order",
        "inversions",
        "delivery_duplicates",
        "in_flight_at_kill",
        "stuck_in_flight",
        "leaked_connections",
        "strikes",
    ),
)


def main() -> int:
    options = arguments()
    if options.list:
        show_list()
        return 0
    if options.peers:
        what = {"as_json": options.json, "keep_report": options.report, "keep": options.keep}
        return peers.main(options.seeds[0], options.scenario, **what)
    results: list[Result] = []
    recorded = report.recorded() if options.report else []
    plan = [
        (scenario, seed)
        for scenario in possible(options.scenario, as_json=options.json)
        for seed in options.seeds
        if not report.is_recorded(recorded, scenario.name, seed, options.seconds)
    ]
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[what]}"), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        runs = bar.add_task("runs", total=len(plan), what="", visible=len(plan) > 1)
        for done, (scenario, seed) in enumerate(plan):
            bar.update(runs, completed=done, what=f"{done} of {len(plan)}")
            result = run(bar, scenario, seed, options.seconds, keep=options.keep, busy=options.busy)
            results.append(result)
            show(scenario, result)
            if options.report:
                report.append(result.summary())
                report.write()
            if options.json:
                print(json.dumps(result.summary()), flush=True)
    if options.json and len(results) > 1:
        print(json.dumps(in_total(results)), flush=True)
    return 1 if any(result.problems for result in results) else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./dev chaos", description=__doc__)
    parser.add_argument("--seed", type=int, help="of every random choice; the same seed strikes the same way")
    parser.add_argument("--seeds", type=seeds, metavar="A..B", help="one run for each seed")
    parser.add_argument("--for", dest="seconds", type=float, default=40.0, metavar="SECONDS", help="of faults")
    parser.add_argument(
        "--scenario", action="append", metavar="NAME", help="one that --list names, or all; default: mix"
    )
    parser.add_argument(
        "--substrate", choices=sorted(SUBSTRATES), help="a broker that carries the events, and fails too: its mix"
    )
    parser.add_argument("--json", action="store_true", help="one JSON line per run, the last of the output")
    parser.add_argument(
        "--peers", action="store_true", help="the same faults against other libraries, side by side; takes nine minutes"
    )
    parser.add_argument("--list", action="store_true", help="name the scenarios, and the promise that each proves")
    parser.add_argument("--keep", action="store_true", help="keep the files of a run that went well, too")
    parser.add_argument(
        "--report",
        action="store_true",
        help="add each run to chaos/report/runs.jsonl, leave out those it has, and renew docs/reliability.md",
    )
    parser.add_argument(
        "--busy",
        action="store_true",
        help="the machine has other work: judge what was lost or happened twice, and no times; the record says so",
    )
    options = parser.parse_args()
    known = FAULTS if options.peers else SCENARIOS
    if options.substrate and (options.scenario or options.peers):
        parser.error("--substrate has a mix of its own; leave out --scenario and --peers")
    mix = f"mix_{options.substrate}" if options.substrate else "mix"
    everything = list(known) if options.peers else [mix]
    options.scenario = list(known) if options.scenario == ["all"] else options.scenario or everything
    unknown = [name for name in options.scenario if name not in known]
    if unknown:
        names = ", ".join(known) if options.peers else "--list names them"
        parser.error(f"no scenario is named {unknown[0]!r}; {names}")
    if not options.seeds:
        # Runs that are kept on record must be found again.
        fresh = 1 if options.report else random.SystemRandom().randrange(1, 1_000_000)
        options.seeds = [fresh if options.seed is None else options.seed]
    return options


def seeds(text: str) -> list[int]:
    match = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    if match is None or int(match[1]) > int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no range; write it like 1..200")
    return list(range(int(match[1]), int(match[2]) + 1))


def possible(names: list[str], *, as_json: bool) -> Iterator[Scenario]:
    """The scenarios that can be run here; says what cannot, and why."""
    for name in names:
        scenario = SCENARIOS[name]
        reason = scenario.surrounding.missing()
        if not reason:
            yield scenario
        elif scenario.otherwise is not None:
            errors.print(f"{name}: [yellow]{reason}[/yellow]; instead: {scenario.otherwise.promise}")
            yield scenario.otherwise
        else:
            errors.print(f"{name}: [yellow]not run:[/yellow] {reason}")
            if as_json:
                print(json.dumps({"scenario": name, "not_run": reason}), flush=True)


def run(bar: Progress, scenario: Scenario, seed: int, seconds: float, *, keep: bool, busy: bool) -> Result:
    task: TaskID = bar.add_task(f"{scenario.name}, seed {seed}", total=seconds, what="")

    def progress(what: str, elapsed: float) -> None:
        bar.update(task, what=what, completed=min(elapsed, seconds))

    try:
        return asyncio.run(play(scenario, seed, seconds, progress, keep=keep, busy=busy))
    finally:
        bar.remove_task(task)


def in_total(results: list[Result]) -> dict[str, object]:
    summaries = [result.summary() for result in results]
    totals = {name: sum(int(str(each[name])) for each in summaries) for name in SUMMED}
    return {"runs": len(results), "broken": sum(bool(each.problems) for each in results), **totals}


def show(scenario: Scenario, result: Result) -> None:
    summary = result.summary()
    verdict = "[red]broken[/red]" if result.problems else "[green]kept[/green]"
    errors.print(f"[bold]{scenario.name}[/bold], seed {result.seed}, {result.seconds:g} s: {verdict}")
    errors.print(f"  {scenario.promise}")
    for names in (
        ("attempted", "acknowledged", "delivered", "put_aside", "unknown", "recovered", "lost", "unexpected"),
        ("effect_duplicates", "delivery_duplicates", "in_flight_at_kill", "in_order", "inversions", "strikes"),
    ):
        errors.print("  " + "  ".join(f"{name} [bold]{summary[name]:,}[/bold]" for name in names))
    if result.figures:
        errors.print("  " + "  ".join(f"{name} {value:g}" for name, value in result.figures.items()))
    for problem in result.problems[:30]:
        errors.print(f"  [red]{problem}[/red]", soft_wrap=True)
    if result.directory is not None:
        errors.print(f"  strikes, histories and logs: {result.directory}", soft_wrap=True)


def show_list() -> None:
    table = Table("scenario", "promise", "here")
    for scenario in SCENARIOS.values():
        reason = scenario.surrounding.missing()
        table.add_row(scenario.name, scenario.promise, f"no: {reason}" if reason else "yes")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
