"""The generation of this process: that of the worker that runs in it, else that of its environment.

A deployment sets `HOLDFAST_GENERATION` for all its processes. A publisher that is given no number takes that of the
worker around it, then this variable, and otherwise leaves the choice to the database: the current generation there.
"""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from holdfast.checks import LARGEST
from holdfast.errors import ConfigurationError

VARIABLE = "HOLDFAST_GENERATION"

# Schema and generation of the worker that runs this task or thread, for handlers in a process with several workers.
_around: ContextVar[tuple[str, int] | None] = ContextVar("holdfast_generation", default=None)
# By schema, how many workers of this process have which generation, for requests that are served beside a worker.
_running: defaultdict[str, Counter[int]] = defaultdict(Counter)
os.register_at_fork(after_in_child=_running.clear)


def environment_generation() -> int | None:
    """Return the number in `HOLDFAST_GENERATION`; None when it is not set, or empty."""
    found = os.environ.get(VARIABLE)
    if not found:
        return None
    if not re.fullmatch(r"[0-9]{1,19}", found) or int(found) > LARGEST:
        remedy = "set it to what holdfast generations begin printed, or unset it"
        raise ConfigurationError(VARIABLE, "is not a whole number of 0 or more", remedy)
    return int(found)


def deployment_generation() -> int:
    """Return the number in `HOLDFAST_GENERATION`, else 0: the generation of applications without deployments."""
    return environment_generation() or 0


@contextmanager
def serving_generation(schema: str, generation: int) -> Iterator[None]:
    """Make a worker's generation that of the publishers around it, while it runs."""
    token = _around.set((schema, generation))
    _running[schema][generation] += 1
    try:
        yield
    finally:
        _around.reset(token)
        _running[schema] -= Counter({generation: 1})  # this also removes a generation without workers


def worker_generation(schema: str) -> int | None:
    """Return the generation of the worker whose handler runs, else the only one of this process; None without one."""
    around = _around.get()
    if around is not None and around[0] == schema:
        return around[1]
    if schema not in _running:
        return None
    running = _running[schema]
    return next(iter(running)) if len(running) == 1 else None
