"""Order within a key: what was numbered first must be finished before what comes behind it begins (LSN-9).

Pure: it reads what handlers did and returns what was out of order. The rule holds whatever happens to workers: an event
begins when the one before it is settled, and to be settled that must have been finished by somebody. Only the first of
several runs of an event counts; a worker that was asleep may finish one long after another worker did.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Run = tuple[str, str]  # handler and key
_CLOCK = 0.0002  # seconds by which times that were rounded may differ


@dataclass(frozen=True, slots=True)
class Place:
    """Where a handler meets an event: its ordering key, and its number."""

    ordering_key: str
    number: int


def inversions(
    places: Mapping[Run, Place], effects: Iterable[Run], runs: Iterable[tuple[str, str, float, float]]
) -> list[str]:
    """`effects` in the order in which they were written; `runs` are handler, key, beginning and end of each."""
    found = []
    last: dict[tuple[str, str], int] = {}
    for run in effects:
        if place := places.get(run):
            line = run[0], place.ordering_key
            if place.number < last.get(line, 0):
                found.append(f"effect of {run[1]} by {run[0]} came behind number {last[line]} of {place.ordering_key}")
            last[line] = place.number
    lines: dict[tuple[str, str], dict[int, tuple[float, float]]] = {}
    for handler, key, began, ended in runs:
        if place := places.get((handler, key)):
            line_of = lines.setdefault((handler, place.ordering_key), {})
            earliest = line_of.get(place.number, (began, ended))
            line_of[place.number] = min(began, earliest[0]), min(ended, earliest[1])
    for (handler, ordering_key), line_of in lines.items():
        finished = 0.0
        for number, (began, ended) in sorted(line_of.items()):
            if began + _CLOCK < finished:
                found.append(
                    f"{handler} began number {number} of {ordering_key} before the one in front of it had ended"
                )
            finished = max(finished, ended)
    return found
