"""`./dev bench [NAME ...] [--quick] [--json] [--check] [--against PEERS]`: ratios in one interleaved run."""

import argparse
import json
import os
import platform
import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks import environments, report
from benchmarks.runner import RunFailed, interleaved
from benchmarks.suites import BENCHMARKS, Arm, Benchmark, Results, against_peers, peer_arms
from holdfast.embedded import EmbeddedPostgres

# A checkpoint in the middle of a run would be the measurement.
SERVER = {"shared_buffers": "512MB", "max_wal_size": "8GB", "checkpoint_timeout": "30min", "max_connections": "200"}
errors = Console(stderr=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(BENCHMARKS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="smaller counts and fewer repeats, under 50 s each")
    parser.add_argument("--json", action="store_true", help="one JSON line per benchmark, the last line of the output")
    parser.add_argument("--check", action="store_true", help="exit with 1, naming each figure that misses its limit")
    parser.add_argument("--repeats", type=int, help="runs of each arm")
    parser.add_argument(
        "--against",
        type=lambda text: [each.strip() for each in text.split(",")],
        default=[],
        metavar="PEER,PEER",
        help=f"let peers take part: {', '.join(environments.peers())}, or all",
    )
    parser.add_argument("--report", action="store_true", help="write benchmarks/report and docs/benchmarks.md")
    options = parser.parse_args()
    peers = environments.peers() if options.against == ["all"] else options.against
    strangers = [peer for peer in peers if peer not in environments.peers()]
    if strangers:
        parser.error(f"no peer is named {strangers[0]!r}; there are {', '.join(environments.peers())}")
    unknown = [name for name in options.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark is named {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    try:
        make_environments(peers)
    except environments.EnvironmentFailed as failure:
        errors.print(f"[red]error:[/red] {failure}")
        return 1
    summaries: list[dict[str, Any]] = []
    with EmbeddedPostgres(settings=SERVER) as server:
        for name in options.names or BENCHMARKS:
            benchmark = BENCHMARKS[name]
            repeats = options.repeats or (benchmark.quick_repeats if options.quick else benchmark.repeats)
            try:
                summary = measure(server, benchmark, options.quick, repeats, peers)
            except RunFailed as failure:
                errors.print(f"[red]error:[/red] {failure}")
                return 1
            summaries.append(summary)
            if options.json:
                print(json.dumps(summary), flush=True)
    if options.report or not (options.names or options.check):
        for path in report.write(summaries, " ".join(["./dev bench", *sys.argv[1:]])):
            errors.print(f"wrote {path.relative_to(environments.ROOT)}")
    return check(summaries) if options.check else 0


def check(summaries: list[dict[str, Any]]) -> int:
    misses = [miss for summary in summaries for miss in BENCHMARKS[summary["bench"]].misses(summary)]
    for miss in misses:
        errors.print(f"[red]miss:[/red] {miss}", soft_wrap=True)
    if not misses:
        errors.print(f"{sum(len(BENCHMARKS[summary['bench']].limits) for summary in summaries)} limits kept")
    return 1 if misses else 0


def make_environments(peers: list[str]) -> None:
    """Before anything is timed; only the first time, and after a change of pins, is there something to do."""
    for peer in peers:
        with errors.status(f"environment of {peer}"):
            environments.interpreter(peer)


def measure(
    server: EmbeddedPostgres, benchmark: Benchmark, quick: bool, repeats: int, peers: list[str]
) -> dict[str, Any]:
    rivals = peer_arms(benchmark, quick, peers)
    if peers and not rivals:
        errors.print(f"{benchmark.name}: the peers have no part in it")
    arms = benchmark.arms(quick) + rivals
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True) as bar:
        task = bar.add_task(benchmark.name, total=len(arms) * repeats)
        started = 0

        def progress(arm: Arm) -> None:
            nonlocal started
            bar.update(task, description=f"{benchmark.name}: {arm.label}", completed=started)
            started += 1

        results = interleaved(server, arms, repeats, progress)
    summary = {
        "bench": benchmark.name,
        **benchmark.summary(results),
        **(against_peers(results, [arm.label for arm in rivals]) if rivals else {}),
        "repeats": repeats,
        "options": {arm.label: dict(arm.options) for arm in arms},
        "postgres": server.version,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }
    show(benchmark, arms, results, summary)
    return summary


def show(benchmark: Benchmark, arms: list[Arm], results: Results, summary: dict[str, Any]) -> None:
    table = Table(title=f"{benchmark.name}: {benchmark.question}", title_justify="left")
    figures = list(dict.fromkeys(figure for runs in results.values() for figure in runs[0]))
    table.add_column("arm")
    for figure in figures:
        table.add_column(figure, justify="right")
    for arm in arms:
        cells = []
        for figure in figures:
            values = sorted(run[figure] for run in results[arm.label] if figure in run)
            cells.append(f"{values[len(values) // 2]:g}" if values else "")
        table.add_row(arm.label, *cells)
    errors.print(table)
    ratios = {name: value for name, value in summary.items() if "to_" in name or name.endswith("_ms")}
    errors.print("  ".join(f"{name} [bold]{value}[/bold]" for name, value in ratios.items()))


if __name__ == "__main__":
    sys.exit(main())
