"""Draws `results.json`: ratios and their targets, peers, waits, growth, costs. Runs in an environment of its own."""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import NullLocator

INK, OURS, RAW, PEER, TARGET, MISSED = "#22313f", "#1f7a6d", "#7fb5ac", "#b8c4c9", "#c0392b", "#d98880"
CPU = (("postgres_us", RAW, "Postgres"), ("python_us", OURS, "Python"))
LATENCY = (("p50_ms", OURS, "p50"), ("p99_ms", PEER, "p99"))


def ratios(summaries, target: Path) -> None:
    """Each ratio with its target as a red mark; those without one are pale, those that miss theirs are red."""
    rows = []
    for each in summaries:
        bounds = {"ratio_to_raw": "", **each["targets"]}
        for figure, bound in bounds.items():
            if "_to_" in figure and figure in each and not figure.startswith("ratio_to_fast"):
                rows.append((f"{each['bench']}: {figure}", each[figure], bound))
    rows.reverse()
    figure, axes = plt.subplots(figsize=(9, 0.34 * len(rows) + 1.0))
    farthest = 1.0
    for row, (_, value, bound) in enumerate(rows):
        relation, limit = bound.split() if bound else (">=", "0")
        met = value >= float(limit) if relation == ">=" else value <= float(limit)
        axes.barh(row, value, color=(OURS if met else MISSED) if bound else PEER, height=0.62)
        farthest = max(farthest, value, float(limit))
        wanted = f"  {'≥' if relation == '>=' else '≤'} {limit}" if bound else ""
        axes.text(max(value, float(limit)) + 0.015, row, f"{value:.2f}{wanted}", va="center", color=INK, fontsize=8)
        if bound:
            axes.plot([float(limit)] * 2, [row - 0.42, row + 0.42], color=TARGET, linewidth=2)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows], fontsize=9)
    axes.set_xlim(0, farthest * 1.15)
    axes.set_ylim(-0.7, len(rows) - 0.3)
    finish(figure, axes, "Ratios, and the target of each in red", target)


def peers(summaries, target: Path) -> None:
    shown = [each for each in summaries if each.get("peers") and each["unit"].endswith("/s")]
    figure, plots = plt.subplots(
        len(shown), 1, figsize=(9, 0.9 + sum(0.3 * len(each["peers"]) + 1.3 for each in shown))
    )
    for each, axes in zip(shown, [plots] if len(shown) == 1 else plots, strict=True):
        control = {"raw control": each["raw"]} if "raw" in each else {}
        rates = {"holdfast": each["holdfast"], **control, **each["peers"]}
        order = sorted(rates, key=rates.__getitem__)
        colors = [OURS if name == "holdfast" else RAW if name == "raw control" else PEER for name in order]
        bars = axes.barh(order, [rates[name] for name in order], color=colors)
        axes.bar_label(bars, labels=[f"{rates[name]:,.0f}" for name in order], padding=4, color=INK, fontsize=9)
        axes.set_xlim(0, max(rates.values()) * 1.15)
        plain(axes, f"{each['bench']}: {each['unit']} in one interleaved run")
    save(figure, target)


def latency(summary, target: Path) -> None:
    arms = summary["arms"]
    names = ["holdfast", "raw", *summary.get("peers", {}), "busy", "raw busy"]
    titles = {"busy": "holdfast\n1,000/s", "raw busy": "raw\n1,000/s"}
    figure, axes = plt.subplots(figsize=(9, 4.2))
    for offset, (name, color, label) in enumerate(LATENCY):
        places = [place + 0.38 * offset for place in range(len(names))]
        bars = axes.bar(places, [arms[each][name] for each in names], 0.36, color=color, label=label)
        axes.bar_label(bars, fmt="%.3g", padding=2, color=INK, fontsize=8)
        limit = float(summary["targets"][name].split()[1])
        axes.plot([-0.2, 0.58], [limit, limit], color=TARGET, linewidth=1.2, linestyle="-" if offset else ":")
    logarithmic(axes, "y", [arms[each][name] for each in names for name, _, _ in LATENCY])
    axes.set_xticks(
        [place + 0.19 for place in range(len(names))], [titles.get(each, each) for each in names], fontsize=9
    )
    axes.legend(frameon=False, fontsize=9)
    finish(figure, axes, "From commit to handler at 50 events/s, ms (targets of p50 and p99 in red)", target)


def kept(summaries, target: Path) -> None:
    """Left: the drain beside kept events. Right: its pace while a snapshot is held open."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
    if growth := summaries.get("growth"):
        arms = {"holdfast": "0", **{each: each for each in growth["arms"] if each.startswith("kept")}}
        counts = [f"{growth['options'][arm].get('kept', 0):,}" for arm in arms]
        rates = [growth["arms"][arm]["per_second"] for arm in arms]
        bars = left.bar(counts, rates, 0.5, color=OURS)
        waits = [growth["arms"][arm]["claim_p99_ms"] for arm in arms]
        labels = [f"{rate:,.0f}/s\nclaim p99 {wait:.0f} ms" for rate, wait in zip(rates, waits, strict=True)]
        left.bar_label(bars, labels=labels, padding=2, fontsize=8, color=INK)
        left.set_ylim(0, max(rates) * 1.25)
        left.set_xlabel("delivered events that are kept", color=INK, fontsize=9)
    plain(left, "growth: events/s")
    if horizon := summaries.get("horizon"):
        for figures, color, label in (("pace", OURS, "holdfast"), ("raw_pace", RAW, "raw control")):
            shares = [100 * (part + 0.5) / len(horizon[figures]) for part in range(len(horizon[figures]))]
            right.plot(shares, horizon[figures], color=color, marker="o", label=label)
        right.set_ylim(0)
        right.set_xlabel("% of the backlog drained", color=INK, fontsize=9)
        right.legend(frameon=False, fontsize=9, loc="lower left")
    plain(right, "horizon: events/s while a snapshot is held")
    save(figure, target)


def cost(summary, target: Path) -> None:
    arms = {name: summary["arms"][name] for name in ("holdfast", "raw", *summary.get("peers", {}))}
    order = sorted(arms, key=lambda name: arms[name]["python_us"] + arms[name]["postgres_us"], reverse=True)
    figure, axes = plt.subplots(figsize=(9, 0.6 * len(order) + 1.2))
    for offset, (name, color, label) in enumerate(CPU):
        places = [place + 0.38 * offset for place in range(len(order))]
        bars = axes.barh(places, [arms[each][name] for each in order], 0.36, color=color, label=label)
        axes.bar_label(bars, fmt="{:,.0f}", padding=3, color=INK, fontsize=9)
    axes.set_yticks([place + 0.19 for place in range(len(order))], order)
    logarithmic(axes, "x", [arms[each][name] for each in order for name, _, _ in CPU])
    axes.legend(frameon=False, fontsize=9)
    finish(figure, axes, "drain: CPU per event, µs, on a logarithmic scale", target)


def logarithmic(axes, direction: str, values) -> None:
    """Peers may be a hundred times apart. Ticks are plain numbers."""
    low, high = min(values) / 2, max(values) * 2
    ticks = [step * 10**power for power in range(-2, 6) for step in (1, 2, 5) if low <= step * 10**power <= high]
    getattr(axes, f"set_{direction}scale")("log")
    getattr(axes, f"set_{direction}ticks")(ticks, [f"{tick:g}" for tick in ticks])
    getattr(axes, f"{direction}axis").set_minor_locator(NullLocator())
    getattr(axes, f"set_{direction}lim")(low, high)


def plain(axes, title: str) -> None:
    axes.set_title(title, loc="left", color=INK, fontsize=11)
    axes.tick_params(colors=INK, length=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def save(figure, target: Path) -> None:
    figure.tight_layout()
    figure.savefig(target, dpi=130)
    plt.close(figure)


def finish(figure, axes, title: str, target: Path) -> None:
    plain(axes, title)
    save(figure, target)


def main() -> None:
    summaries, folder = json.loads(Path(sys.argv[1]).read_text())["summaries"], Path(sys.argv[2])
    by_name = {each["bench"]: each for each in summaries}
    ratios(summaries, folder / "ratios.png")
    if any(each.get("peers") and each["unit"].endswith("/s") for each in summaries):
        peers(summaries, folder / "peers.png")
    if "latency" in by_name:
        latency(by_name["latency"], folder / "latency.png")
    if "growth" in by_name or "horizon" in by_name:
        kept(by_name, folder / "kept.png")
    if "drain" in by_name:
        cost(by_name["drain"], folder / "cost.png")


if __name__ == "__main__":
    main()
