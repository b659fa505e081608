"""Where an error was raised: the frames of its traceback, short, bounded, and without the values of variables.

Frames are shown from the outside in, like Python's own, with paths as they are imported, so that they say nothing about
the machine. The text of a line is shown for the application's own code only.
"""

import inspect
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from linecache import getline
from types import CodeType, TracebackType

from pydantic import ValidationError

from holdfast.chain import traceback_of
from holdfast.errors import TerminalHandlerError
from holdfast.redact import redact_secrets

# Frames that are read from each end of a traceback: that of a recursion has as many as the stack.
_READ = 25
_OUTERMOST, _INNERMOST = 4, 8
_LONGEST_PATH = 160
_LONGEST_NAME = 120
_LONGEST_SOURCE = 160
_LONGEST_FUNCTION = 2_000
_LARGEST_FILE = 1_000_000
_AGAIN = "  … and again"
_BLAMED = "holdfast_blamed"
_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_OWN_PACKAGE = __name__.partition(".")[0]
_RETURNED = f"{_OWN_PACKAGE}.batch"
_LIBRARIES = tuple(
    f"{os.path.realpath(folder)}{os.sep}"
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
    if (folder := sysconfig.get_paths().get(name))
)
_INSTALLED = frozenset(("site-packages", "dist-packages"))
# Failures come in storms, each with the same stack as the one before.
_MOST_KNOWN = 1_000
_known: dict[tuple[tuple[int, int | None], ...], "tuple[tuple[Frame, ...], list[CodeType]]"] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """A line of code in a traceback. Equal lines share one object."""

    path: str  # as it is imported: app/handlers.py
    line: int
    function: str
    file: str
    first_line: int  # of the function
    package: str  # the top one
    application: bool  # whether it is neither Python's, nor Holdfast's, nor an installed package's

    def __str__(self) -> str:
        return f"{self.path}:{self.line} in {self.function}"

    def belongs(self, home: str) -> bool:
        """Return whether this is the user's code; `home` is the handler's package, which may be an installed one."""
        return self.application or self.package == home

    @property
    def source(self) -> str:
        """The text of the line; empty when it cannot be read."""
        return _source(self.file, self.line)

    @property
    def equal_lines_before(self) -> int:
        """How many lines of the function before this one have the same text."""
        return _equal_lines(self.file, self.first_line, self.line)


def blame(error: ValidationError, function: object) -> None:
    """Report a function's first line, instead of the line that raised, as the place of an error."""
    error.__dict__[_BLAMED] = function


def frames_of(error: BaseException) -> tuple[Frame, ...]:
    """Return the frames of an error, the innermost last, without the middle of a long traceback.

    What Holdfast does before it calls a handler is left out. For one stack this is always the same object.
    """
    function: object = None
    if isinstance(error, TerminalHandlerError):
        function = error.function
    elif isinstance(error, ValidationError):
        function = error.__dict__.get(_BLAMED)
    if function is not None and (definition := _definition(function)):
        return (definition,)
    frames = _frames_of(traceback_of(error))
    if isinstance(error, SyntaxError) and isinstance(error.filename, str) and isinstance(error.lineno, int):
        return (*frames, _frame(error.filename, error.lineno, "<module>", "", 1))
    return frames


def _frames_of(traceback: TracebackType | None) -> tuple[Frame, ...]:
    found: list[TracebackType] = []
    while traceback is not None:
        found.append(traceback)
        traceback = traceback.tb_next
    if len(found) > 2 * _READ:
        found[_READ:-_READ] = []
    key = tuple([(id(each.tb_frame.f_code), each.tb_lineno) for each in found])
    known = _known.get(key)
    if known is None:
        frames = [_frame_of(each) for each in found]
        own = len(frames) if _was_returned(found) else 0
        start = next((n for n, frame in enumerate(frames) if frame.package != _OWN_PACKAGE), own)
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        # The code is kept: otherwise another could get its id.
        known = _known[key] = tuple(frames[start:]), [each.tb_frame.f_code for each in found]
    return known[0]


def _was_returned(traceback: Sequence[TracebackType]) -> bool:
    """Return whether a batch handler has returned the error for one event, and so nowhere raised it."""
    return bool(traceback) and traceback[-1].tb_frame.f_globals.get("__name__") == _RETURNED


def place_of(error: BaseException, frames: Sequence[Frame], home: str) -> Frame | None:
    """Return the innermost frame of the user's code; of a recursion, the first frame that repeats often."""
    if isinstance(error, RecursionError) and (own := [frame for frame in frames if frame.belongs(home)]):
        # In a recursion the innermost frame varies with the depth of the stack before it.
        counts = Counter(own)
        often = max(counts.values()) / 2
        return next(frame for frame in own if counts[frame] >= often)
    for frame in reversed(frames):
        if frame.belongs(home):
            return frame
    return None


def shown(frames: tuple[Frame, ...], home: str) -> str:
    """Return the text that shows the frames of a traceback, at most a dozen of them."""
    blocks: list[str] = []
    for n, frame in enumerate(frames):
        if not n or frame is not frames[n - 1]:
            blocks.append(_block(frame, home))
        elif blocks[-1] != _AGAIN:
            blocks.append(_AGAIN)
    if len(blocks) > _OUTERMOST + _INNERMOST:
        blocks[_OUTERMOST:-_INNERMOST] = ["  …"]
    return "\n".join(blocks)


def _block(frame: Frame, home: str) -> str:
    source = frame.source if frame.belongs(home) else ""
    return f"  {frame}\n    {source}" if source else f"  {frame}"


def _frame_of(traceback: TracebackType) -> Frame:
    frame = traceback.tb_frame
    module = frame.f_globals.get("__name__")
    name = module if type(module) is str else ""
    code = frame.f_code
    return _frame(code.co_filename, traceback.tb_lineno or 0, code.co_qualname, name, code.co_firstlineno)


def _definition(function: object) -> Frame | None:
    """Return the first line of a function as a frame."""
    while isinstance(function, partial):
        function = function.func
    if callable(function):
        function = inspect.unwrap(function)
    if not isinstance(code := getattr(function, "__code__", None), CodeType):
        code = getattr(getattr(type(function), "__call__", None), "__code__", None)  # noqa: B004
    if not isinstance(code, CodeType):
        return None
    module = str(getattr(function, "__module__", ""))
    return _frame(code.co_filename, code.co_firstlineno, code.co_qualname, module, code.co_firstlineno)


@lru_cache(maxsize=4096)
def _frame(filename: str, line: int, function: str, module: str, first_line: int) -> Frame:
    package = module.partition(".")[0]
    return Frame(
        path=_safe(_as_imported(filename, module))[-_LONGEST_PATH:],
        line=line,
        function=_safe(function)[:_LONGEST_NAME],
        file=filename,
        first_line=first_line,
        package=package,
        application=package != _OWN_PACKAGE and not _is_installed(filename),
    )


def _is_installed(filename: str) -> bool:
    if filename.startswith("<"):
        return True  # made while the program runs, as dataclasses do
    path = os.path.realpath(filename)
    if not os.path.exists(path):
        return True  # of an extension module, or installed without sources
    return path.startswith(_LIBRARIES) or not _INSTALLED.isdisjoint(path.split(os.sep))


def _as_imported(filename: str, module: str) -> str:
    """Return a path that begins at the module's top package; the file's name for code outside of modules."""
    *folders, file = filename.replace(os.sep, "/").split("/")
    names = module.split(".")
    if file != "__init__.py" and file.partition(".")[0] == names[-1]:
        names.pop()
    elif file != "__init__.py":
        return file
    return "/".join([*folders[max(len(folders) - len(names), 0) :], file]) if names else file


@lru_cache(maxsize=4096)
def _source(filename: str, line: int) -> str:
    try:
        if filename.startswith("<") or os.stat(filename).st_size > _LARGEST_FILE:
            return ""
        text = getline(filename, line).strip()
        # Long lines are data more often than code. A password may stand in the code too.
        return _safe(redact_secrets(text[:_LONGEST_SOURCE]))[:_LONGEST_SOURCE]
    except Exception:
        return ""


@lru_cache(maxsize=4096)
def _equal_lines(filename: str, first: int, line: int) -> int:
    text = _source(filename, line)
    if not text or line - first > _LONGEST_FUNCTION:
        return 0
    own = getline(filename, line).strip()
    return sum(getline(filename, before).strip() == own for before in range(first, line))


def _safe(text: str) -> str:
    return _UNSAFE.sub(lambda match: ascii(match[0])[1:-1], text)
