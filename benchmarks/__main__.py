"""`./dev bench [NAME ...] [--quick] [--json] [--check] [--against PEERS]`: ratios in one interleaved run."""

import argparse
import json
import os
import platform
import sys
from typing import Any

from rich.markup import escape

from benchmarks import databases, environments, report, terminal
from benchmarks.benchmark import Benchmark, peer_arms
from benchmarks.databases import Databases
from benchmarks.runner import RunFailed, interleaved
from benchmarks.suites import BENCHMARKS
from holdfast.embedded import EmbeddedPostgres

errors = terminal.console


def main() -> int:
    options = parse()
    asked = environments.peers() if options.against == ["all"] else options.against
    left_out = make_environments(asked)
    peers = [peer for peer in asked if peer not in left_out]
    wanted = options.report or not (options.names or options.check)
    if wanted and left_out:
        errors.print("[yellow]no report will be written:[/yellow] it would lose the peers that are left out")
    summaries: list[dict[str, Any]] = []
    failed = bool(left_out)
    load = os.getloadavg()[0]
    if load > (os.cpu_count() or 1) / 2:
        errors.print(f"note: the load is {load:.1f} already; what else runs on this machine will be in the figures")
    with EmbeddedPostgres(settings=databases.settings()) as server:
        stock = Databases(server)
        for name in options.names or BENCHMARKS:
            benchmark = BENCHMARKS[name]
            repeats = options.repeats or (benchmark.quick_repeats if options.quick else benchmark.repeats)
            try:
                summary = measure(stock, benchmark, options.quick, repeats, peers)
            except RunFailed as failure:
                # The others may well succeed, and what they find is not lost.
                errors.print(f"[red]error:[/red] {benchmark.name}: {failure}", soft_wrap=True)
                failed = True
                continue
            summary |= {"postgres": server.version, "python": platform.python_version(), "cores": os.cpu_count()}
            summary["load_before"] = round(load, 2)
            if benchmark.peers and left_out:
                summary["peers_left_out"] = left_out
            summaries.append(summary)
            if options.json:
                print(json.dumps(summary), flush=True)
    if wanted and summaries and not left_out:
        for path in report.write(summaries, " ".join(["./dev bench", *sys.argv[1:]])):
            errors.print(f"wrote {path.relative_to(environments.ROOT)}")
    missed = options.check and check(summaries)
    return 1 if failed or missed else 0


def parse() -> argparse.Namespace:
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
    parser.add_argument(
        "--report", action="store_true", help="write benchmarks/report, docs/benchmarks.md and docs/comparison.md"
    )
    options = parser.parse_args()
    strangers = [peer for peer in options.against if peer not in (*environments.peers(), "all")]
    if strangers:
        parser.error(f"no peer is named {strangers[0]!r}; there are {', '.join(environments.peers())}")
    unknown = [name for name in options.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark is named {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    return options


def check(summaries: list[dict[str, Any]]) -> bool:
    """Name each figure that misses its limit; true if one does."""
    misses = [miss for summary in summaries for miss in BENCHMARKS[summary["bench"]].misses(summary)]
    for miss in misses:
        errors.print(f"[red]miss:[/red] {miss}", soft_wrap=True)
    if not misses:
        errors.print(f"{sum(len(BENCHMARKS[summary['bench']].judged(summary)) for summary in summaries)} limits kept")
    return bool(misses)


def make_environments(peers: list[str]) -> dict[str, str]:
    """Make the environments of peers, before anything is timed; return the peers that are left out, and why."""
    left_out: dict[str, str] = {}
    for peer in peers:
        try:
            with errors.status(f"environment of {peer}"):
                environments.interpreter(peer)
        except environments.EnvironmentFailed as failure:
            left_out[peer] = str(failure)
            errors.print(f"[yellow]left out:[/yellow] {escape(left_out[peer])}", soft_wrap=True)
    return left_out


def measure(stock: Databases, benchmark: Benchmark, quick: bool, repeats: int, peers: list[str]) -> dict[str, Any]:
    rivals = peer_arms(benchmark, quick, peers)
    if peers and not rivals:
        errors.print(f"{benchmark.name}: the peers have no part in it")
    arms = benchmark.arms(quick) + rivals
    with terminal.progress(benchmark, sum(-(-repeats // arm.every) for arm in arms)) as progress:
        results = interleaved(stock, arms, repeats, progress)
    summary = benchmark.summary(results, [arm.label for arm in rivals])
    full = {arm.label for arm in benchmark.arms(False)}
    summary |= {
        "targets": {figure: str(limit) for figure, limit in benchmark.limits.items()},
        "repeats": repeats,
        "options": {arm.label: dict(arm.options) for arm in arms},
        "left_out": sorted(full - {arm.label for arm in arms}),
    }
    terminal.show(benchmark, summary)
    return summary


if __name__ == "__main__":
    sys.exit(main())
