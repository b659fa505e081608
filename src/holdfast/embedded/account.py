"""Who the server runs as. Postgres refuses to run as root, so root hands it to `nobody`."""

from __future__ import annotations

import hashlib
import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STATE_DIR = Path("/var/lib/holdfast")


@dataclass(frozen=True, slots=True)
class Account:
    """The user and group of the server's processes and files; None means our own."""

    uid: int | None = None
    gid: int | None = None

    def popen_arguments(self) -> dict[str, Any]:
        if self.uid is None:
            return {}
        return {"user": self.uid, "group": self.gid, "extra_groups": []}

    def own(self, path: Path) -> None:
        if self.uid is not None and self.gid is not None:
            os.chown(path, self.uid, self.gid)

    def can_enter(self, directory: Path) -> bool:
        """Whether the server may walk down to this directory (or to its nearest existing parent)."""
        if self.uid is None:
            return True
        directory = directory.resolve()
        return all(self._may_search(os.stat(d)) for d in (directory, *directory.parents) if d.exists())

    def _may_search(self, status: os.stat_result) -> bool:
        if status.st_uid == self.uid:
            return bool(status.st_mode & stat.S_IXUSR)
        if status.st_gid == self.gid:
            return bool(status.st_mode & stat.S_IXGRP)
        return bool(status.st_mode & stat.S_IXOTH)


def server_account() -> Account:
    if os.geteuid() != 0:
        return Account()
    try:
        nobody = pwd.getpwnam("nobody")
    except KeyError:
        return Account(65534, 65534)
    return Account(nobody.pw_uid, nobody.pw_gid)


def usable_data_dir(preferred: Path) -> Path:
    """The preferred directory, or, when the server's user cannot reach it, one of its own under /var/lib.

    Root with a checkout in its closed home directory is the usual case: `nobody` cannot get there, and
    opening somebody's home directory is not ours to do.
    """
    preferred = preferred.absolute()
    if server_account().can_enter(preferred.parent):
        return preferred
    digest = hashlib.sha256(os.fsencode(preferred)).hexdigest()[:8]
    return STATE_DIR / f"{preferred.name.lstrip('.')}-{digest}"
