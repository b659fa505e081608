"""The wheel of a release, built from the checkout: ./dev release wheel FOLDER"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def build_wheel(folder: Path) -> Path:
    """Build the wheel into a folder, without a network, and return its path."""
    folder = folder.resolve()
    with tempfile.TemporaryDirectory(dir=folder) as empty:  # the folder itself may contain other versions
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", empty]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        [wheel] = Path(empty).glob("holdfast_outbox-*.whl")
        return wheel.replace(folder / wheel.name)


if __name__ == "__main__":
    print(build_wheel(Path(sys.argv[1])))
