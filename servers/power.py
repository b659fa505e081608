"""Simulates a power cut: a disk in a file that loses everything not yet written through. Needs root, to mount it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Self

from servers.processes import ServerProcess

POSSIBLE = sys.platform == "linux" and os.geteuid() == 0 and shutil.which("mkfs.ext4") is not None
_BYTES = 96 * 1024 * 1024


class Disk:
    """An ext4 file system in a file, mounted at `folder`. A cut loses what the kernel has not written to the file."""

    def __init__(self, where: Path) -> None:
        where.mkdir(parents=True, exist_ok=True)
        self._image, self.folder = where / "disk.img", where / "disk"

    def __enter__(self) -> Self:
        with self._image.open("wb") as file:
            file.truncate(_BYTES)
        _run("mkfs.ext4", "-q", "-F", str(self._image))
        self.folder.mkdir()
        self._mount()
        return self

    def __exit__(self, *_: object) -> None:
        _run("umount", str(self.folder))
        self._image.unlink()

    def sync(self) -> None:
        """Write everything that is buffered to the disk."""
        _run("sync", "-f", str(self.folder))

    def cut(self, server: ServerProcess) -> None:
        """Cut the power of a server that has its files here, and start it again with what the disk has left."""
        left = self._image.with_suffix(".left")
        shutil.copyfile(self._image, left)
        server.kill()
        _run("umount", str(self.folder))
        left.replace(self._image)
        self._mount()
        server.start()

    def _mount(self) -> None:
        _run("mount", "-o", "loop", str(self._image), str(self.folder))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)
