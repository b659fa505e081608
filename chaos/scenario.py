"""A scenario: faults or a measurement, their surroundings, and what must hold."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from chaos.nemeses import Nemesis
from chaos.surroundings import PLAIN, Surrounding
from chaos.world import Progress, Setup, World

Lane = Sequence[Callable[[], Nemesis]]


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    promise: str
    lanes: Sequence[Lane]
    setup: Setup = field(default_factory=Setup)
    surrounding: Surrounding = PLAIN
    pause: tuple[float, float] = (0.5, 2.5)  # seconds between two strikes of a lane
    once: bool = False  # each nemesis strikes once, in order
    limits: Mapping[str, float] = field(default_factory=dict)  # figures and the most they may be
    floors: Mapping[str, float] = field(default_factory=dict)  # figures and the least they may be
    says: Mapping[str, str] = field(default_factory=dict)  # notices that a worker must have given, and what is in them
    otherwise: "Scenario | None" = None  # what is run when the surrounding cannot be had
    measure: Callable[[World, Progress], Awaitable[dict[str, float]]] | None = None  # instead of strikes
