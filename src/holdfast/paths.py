"""The path of a value within a payload, as errors name it: `payload.lines[2].at`."""

import re
from typing import TypeAlias

# The steps to a value, innermost first. They become text only for a value that is refused, which saves time.
Steps: TypeAlias = "tuple[str | int, Steps] | None"

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]{1,40}")


def path(steps: Steps) -> str:
    """Return the path of a value as text.

    >>> path(("at", (2, ("lines", None))))
    'payload.lines[2].at'
    """
    parts = []
    while steps is not None:
        step, steps = steps
        if isinstance(step, int):
            parts.append(f"[{step}]")
        else:
            parts.append(f".{step}" if _PLAIN_KEY.fullmatch(step) else f"[{step[:40]!r}]")
    return "payload" + "".join(reversed(parts))
