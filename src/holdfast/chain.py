"""Functions that read the links of an error: its traceback, its cause and its context.

They read the slots of BaseException: a subclass may have attributes with the same names, which may raise.
"""

import builtins
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final


def _slot(name: str) -> Callable[[BaseException], Any]:
    read: Callable[[BaseException], Any] = BaseException.__dict__[name].__get__
    return read


traceback_of: Final[Callable[[BaseException], TracebackType | None]] = _slot("__traceback__")
cause_of: Final[Callable[[BaseException], BaseException | None]] = _slot("__cause__")
context_of: Final[Callable[[BaseException], BaseException | None]] = _slot("__context__")
is_context_suppressed: Final[Callable[[BaseException], bool]] = _slot("__suppress_context__")
# By themselves, and not by the name of their module, which any class may have.
BUILTIN_ERRORS: Final = frozenset(
    each for each in vars(builtins).values() if isinstance(each, type) and issubclass(each, BaseException)
)
