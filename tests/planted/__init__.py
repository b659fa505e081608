"""Planted faults: small mistakes in copies of the tree, and the tests that notice them.

    .venv/bin/python -m tests.planted --json found.json

faults   choosing faults, and finding those of another commit again
python   the changes that Python code offers, and where a probe goes
sql      the same for SQL functions
changes  one change, and the lines that it replaces
reach    which tests reach which fault: one run of the suite with a probe at every place
probe    the code that notes that a place was reached
trial    which tests run for a fault, in which order, and what their failures mean
copies   copies of the tree, and runs of tests in them
plugin   loaded into those runs: which test ran when, and how it ended
"""
