"""Draws `results.json`: ratios to the raw control, and rates beside the peers. Runs in an environment of its own."""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

INK, OURS, OTHERS, LINE = "#22313f", "#1f7a6d", "#b8c4c9", "#c0392b"


def ratios(summaries, target: Path) -> None:
    shown = [each for each in summaries if "ratio_to_raw" in each][::-1]
    figure, axes = plt.subplots(figsize=(8, 0.5 * len(shown) + 1.4))
    bars = axes.barh([each["bench"] for each in shown], [each["ratio_to_raw"] for each in shown], color=OURS)
    axes.bar_label(bars, fmt="%.2f", padding=4, color=INK)
    axes.axvline(1.0, color=LINE, linewidth=1, linestyle="--")
    axes.set_xlim(0, max(1.15, *(each["ratio_to_raw"] * 1.12 for each in shown)))
    finish(figure, axes, "Throughput as a share of the raw asyncpg control (dashed)", target)


def peers(summary, target: Path) -> None:
    rates = {"holdfast": summary["holdfast"], **summary["peers"]}
    order = sorted(rates, key=rates.__getitem__)
    figure, axes = plt.subplots(figsize=(8, 0.5 * len(order) + 1.4))
    bars = axes.barh(order, [rates[n] for n in order], color=[OURS if n == "holdfast" else OTHERS for n in order])
    axes.bar_label(bars, labels=[f"{rates[name]:,.0f}" for name in order], padding=4, color=INK)
    axes.set_xlim(0, max(rates.values()) * 1.15)
    finish(figure, axes, f"{summary['bench']}: events per second in one interleaved run", target)


def finish(figure, axes, title: str, target: Path) -> None:
    axes.set_title(title, loc="left", color=INK, fontsize=11)
    axes.tick_params(colors=INK, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(target, dpi=130)
    plt.close(figure)


def main() -> None:
    summaries, folder = json.loads(Path(sys.argv[1]).read_text())["summaries"], Path(sys.argv[2])
    if any("ratio_to_raw" in each for each in summaries):
        ratios(summaries, folder / "ratios.png")
    for each in summaries:
        if each.get("peers") and "ratio_to_peers" in each:
            peers(each, folder / f"peers-{each['bench']}.png")


if __name__ == "__main__":
    main()
