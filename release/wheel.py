"""The wheel of a release, built from the checkout: ./dev release wheel FOLDER"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[1]


def build_wheel(folder: Path) -> Path:
    """Build the wheel into a folder, without a network, and return its path."""
    folder = folder.resolve()
    with tempfile.TemporaryDirectory(dir=folder) as empty:  # the folder itself may contain other versions
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", empty]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        [wheel] = Path(empty).glob("holdfast_outbox-*.whl")
        return wheel.replace(folder / wheel.name)


def write_wheel(folder: Path, metadata: str, files: Mapping[str, str] | None = None) -> Path:
    """Write a wheel of such metadata and files, with no more than an installer needs, and return its path."""
    headers = HeaderParser().parsestr(metadata)
    stem = f"{headers['Name'].replace('-', '_')}-{headers['Version']}"
    contents = {
        **(files or {}),
        f"{stem}.dist-info/METADATA": metadata,
        f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{stem}.dist-info/RECORD"
    path = folder / f"{stem}-py3-none-any.whl"
    with ZipFile(path, "w") as archive:
        for name, text in contents.items():
            archive.writestr(name, text)
        archive.writestr(record, "".join(f"{name},,\n" for name in (*contents, record)))
    return path


def write_decoy(folder: Path) -> Path:
    """Write a wheel as the index has one that is not ours: its package has our name, and its version is higher."""
    files = {"holdfast/__init__.py": "", "holdfast/__main__.py": "print('another program')\n"}
    return write_wheel(folder, "Metadata-Version: 2.1\nName: holdfast\nVersion: 9.9.9\n", files)


if __name__ == "__main__":
    print(build_wheel(Path(sys.argv[1])))
