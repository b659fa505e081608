"""`holdfast` in a fork of the test's process, which has imported all that a new one would first have to import."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast.cli import main


def holdfast(
    *words: object, variables: Mapping[str, str], folder: Path | str = "."
) -> subprocess.CompletedProcess[str]:
    """Type a command without a terminal."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull, "rb") as nothing:
        arguments = [str(word) for word in words]
        code = ended(begin(arguments, variables, folder, [each.fileno() for each in (nothing, out, err)]))
        for each in (out, err):
            each.seek(0)
        return subprocess.CompletedProcess(["holdfast", *arguments], code, out.read().decode(), err.read().decode())


def ended(pid: int) -> int:
    """The exit code of a command, as subprocess has it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def begin(arguments: Sequence[str], variables: Mapping[str, str], folder: Path | str, streams: Sequence[int]) -> int:
    """Begin a command with these standard streams; return the id of its process."""
    pid = os.fork()
    if pid != 0:
        return pid
    code: object = 70
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(variables)
        os.chdir(folder)
        main(arguments)
    except SystemExit as error:
        code = 0 if error.code is None else error.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)
