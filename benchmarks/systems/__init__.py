"""One module per system. Each runs as a process of its own: `python -m benchmarks.systems.NAME VERB OPTIONS`."""
