"""Reads how much memory is left for this process from the files of Linux; on other systems nothing is known."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_GROUP = Path("/sys/fs/cgroup")
_MACHINE = Path("/proc/meminfo")
_OWN = Path("/proc/self/cgroup")


class _Version(NamedTuple):
    """A version of control groups: its file names, and the line of memory.stat with the bytes that can be reclaimed."""

    most: str  # the text is "max" where there is no limit
    used: str
    reclaimable: str


_FIRST = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_SECOND = _Version("memory.max", "memory.current", "inactive_file")


def share_left(group: Path = _GROUP, machine: Path = _MACHINE, own: Path = _OWN) -> float | None:
    """Return the share of memory that is left, of the machine or of the tightest container; None if unknown."""
    shares = [_of_machine(machine), *(_of_group(*each) for each in _groups(group, own))]
    return min((share for share in shares if share is not None), default=None)


def _groups(top: Path, own: Path) -> Iterator[tuple[Path, _Version]]:
    """Yield the control groups that limit this process: its own, and those around it."""
    found = {(top, _SECOND), (top / "memory", _FIRST)}
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                root, version = top, _SECOND
            elif "memory" in controllers.split(","):
                root, version = top / "memory", _FIRST
            else:
                continue
            folder = root / path.strip("/")
            found |= {(each, version) for each in (folder, *folder.parents) if each.is_relative_to(root)}
    yield from found


def _of_group(folder: Path, version: _Version) -> float | None:
    try:
        most = float((folder / version.most).read_text())
        used = float((folder / version.used).read_text())
        return 1.0 - (used - _field(folder / "memory.stat", version.reclaimable)) / most
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _of_machine(file: Path) -> float | None:
    try:
        return _field(file, "MemAvailable:") / _field(file, "MemTotal:")
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _field(file: Path, name: str) -> float:
    for line in file.read_text().splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name:
            return float(words[1])
    raise ValueError(name)
