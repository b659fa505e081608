"""Order, limits, fairness, breakers and batches at full size, with kills: scenarios that measure.

app.py           the handlers, and a line for each beginning and end of their calls
calls.py         reads those lines; publishes many events; kills workers
model.py         what calls of the events of one ordering key are allowed
scenarios.py     what each must show
ordered.py, limits.py, fairness.py, breaker.py, batches.py    one scenario each
"""

AMENDED, AWAY = "amended", "away"  # files that tell handlers how the world is
SLOT_SECONDS = 0.4
