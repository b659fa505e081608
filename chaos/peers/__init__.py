"""The same faults against other libraries, as a table: `./dev chaos --peers`.

story.py         what every handler and every producer does, the same for all; runs in the peers' environments
programs         one module for each system: how the story is told with it
systems.py       the systems: their versions, their settings, and where they keep what is not done yet
crew.py          two workers and a producer of one system, and what is seen of them
stage.py         one Postgres for all of them, and databases of their own for each
faults.py        what is done to them, and what is counted
report.py        the table; run.py leads through one run
"""
