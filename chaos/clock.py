"""A server's clock that can be set while it runs, by libfaketime."""

import contextlib
from pathlib import Path

FAKETIME = next(iter(sorted(Path("/usr/lib").glob("**/faketime/libfaketimeMT.so.1"))), None)
MISSING = "libfaketime is not installed (apt-get install faketime)"
# The histories of all processes share the monotonic clock.
KEEP_MONOTONIC = {"FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1"}


class ServerClock:
    """The clock of every process that is started with `environment`, and no other."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._ahead = 0
        self.set("+0")
        _remove_leftovers()

    @property
    def environment(self) -> dict[str, str]:
        return {
            "LD_PRELOAD": str(FAKETIME),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            **KEEP_MONOTONIC,
        }

    def set(self, offset: str) -> None:
        """To the machine's clock and an offset such as "+2h"."""
        partial = self._file.with_suffix(".new")
        partial.write_text(offset + "\n")
        partial.chmod(0o644)
        partial.replace(self._file)

    def step(self, seconds: int) -> None:
        """By so much more than by all steps before."""
        self._ahead += seconds
        self.set(f"{self._ahead:+d}")


def _remove_leftovers() -> None:
    """Remove what libfaketime has left of processes that were killed: another user's process may get their number."""
    shared = Path("/dev", "shm")
    for pattern in ("sem.faketime_sem_*", "faketime_shm_*"):
        for path in shared.glob(pattern):
            if not Path("/proc", path.name.rpartition("_")[2]).exists():
                with contextlib.suppress(OSError):
                    path.unlink()
