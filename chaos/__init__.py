"""Faults on purpose, and a check that nothing is lost by them: `./dev chaos`.

events.py        what is published, to whom each event is owed, and what must become of it
app.py           the handlers, run by real `holdfast worker` processes
producers.py     transactions that publish; history.py is what they saw of them
checker.py       histories in, verdict out: lost, unexpected, recovered, duplicated; order.py, out of order
nemeses          one class per kind of fault
scenarios.py     which faults, in which surroundings, and the promise that they prove
flow             scenarios that measure order, limits, fairness, breakers and batches at full size
world.py         Postgres, the lines to it, the workers; run.py leads them through one run
"""
