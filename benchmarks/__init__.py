"""How fast Holdfast is, as ratios in one interleaved run on one machine. See docs/benchmarks.md."""
