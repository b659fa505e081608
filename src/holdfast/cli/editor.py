"""The operator's editor: the one of VISUAL or EDITOR, else vi."""

from __future__ import annotations

import shlex
import subprocess
import tempfile
from pathlib import Path

from holdfast.cli import environment
from holdfast.errors import ConfigurationError


def edited(text: str, *, suffix: str) -> str | None:
    """Return the text as it was saved in the editor; None if it was left as it was."""
    chosen = environment.editor()
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:  # for its owner alone: it may be personal data
        file = Path(folder, f"edited{suffix}")
        file.write_text(text, encoding="utf-8")
        try:
            subprocess.run([*shlex.split(chosen), str(file)], check=True)
            found = file.read_text(encoding="utf-8")
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            remedy = "set EDITOR to a command that edits the file it is given"
            raise ConfigurationError("EDITOR", f"is {chosen!r}, which failed: {error}", remedy) from None
    return None if found == text else found
