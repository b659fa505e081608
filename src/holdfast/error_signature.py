"""The signature of a failure: one for each cause, whatever the ids, numbers and values in its text.

What tells causes apart beside the text: the HTTP status, the SQLSTATE, the name of what is missing, and the place in
the user's code. The place is the file, the function and the text of the line, because line numbers change with every
deployment.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b

from holdfast.frames import Frame
from holdfast.retry import http_status, sqlstate_of

_VARYING = re.compile(
    r"""
      (?P<id>      \b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b )
    | (?P<value>   (?<!\w)'[^'\n]*'(?!\w) | "[^"\n]*" | `[^`\n]*` | “[^“”\n]*” | (?<==)\([^()\n]*\) )
    | (?P<path>    (?<![\w/])(?:\w+://[^\s'"]+ | (?:[A-Za-z]:)?(?:[/\\][\w.@~+-]+){2,}[/\\]?) )
    | (?P<address> (?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)+ | \b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b
                 | (?<![\w:])(?=[0-9:]*(?:[a-f]|::))(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{1,4}(?![\w:]) )
    | (?P<hex>     \b0x[0-9a-f]+\b | \b(?=[a-f]*[0-9])[0-9a-f]{8,}\b )
    # Ids such as ch_3OaBcD2eZvKYlo2C and 01ARZ3NDEKTSV4RRFFQ69G5FAV: long words with digits in more than one place.
    | (?P<token>   \b(?=\w{12})(?:[a-z_]*+\d++){2,}+[a-z_]*\b )
    | (?P<n>       [-+]?\d+(?:[.,:]\d+)*(?:e[-+]?\d+\b)? )
    """,
    re.VERBOSE | re.IGNORECASE,
)
# How deep the stack was decides which call found it full.
_RECURSION = re.compile(r"(maximum recursion depth exceeded)[^\n]*")
# A name that a programmer has given. One with digits may be an id.
_NAME = re.compile(r"[A-Za-z_][A-Za-z_.]{0,59}")
_QUOTED = re.compile(r'"([^"\n]{1,63})"')
# In these classes, and in no others, Postgres quotes names of tables, columns and constraints.
_NAMING_SQLSTATE_CLASSES = ("23", "42")
_MOST_VALUES = 1_000


def signature(text: str, type_name: str, details: Iterable[str] = ()) -> str:
    """Return a short name for a kind of failure: the same for texts that differ only in ids, numbers or values."""
    if "recursion" in text:
        text = _RECURSION.sub(r"\1", text)
    normal = " ".join(_VARYING.sub(_placeholder, text).split())
    whole = "\x1f".join((normal, *details))
    return f"{type_name}:{blake2b(whole.encode(errors='replace'), digest_size=8).hexdigest()}"


def _placeholder(match: re.Match[str]) -> str:
    # Of two ids of one kind, one may have digits only.
    return "<n>" if match.lastgroup in ("id", "hex", "token") else f"<{match.lastgroup}>"


def details_of(error: BaseException, message: Callable[[], str], payload: object) -> Iterator[str]:
    """Yield what tells the cause of one error apart beside its text: status, SQLSTATE, names of what is missing."""
    status = sqlstate = None
    if type(error).__module__ != "builtins" or error.__dict__:
        status, sqlstate = http_status(error), sqlstate_of(error)
    if status is not None:
        yield f"http {status}"
    if sqlstate is not None:
        yield f"sqlstate {sqlstate}"
    names = [name for name in _names(error, sqlstate, message) if _NAME.fullmatch(name)]
    if names:
        data = set(_strings(payload))
        yield from (f"name {name}" for name in names if name not in data)


def place_in(frame: Frame) -> str:
    """Return a place in the user's code in a form that outlives a deployment."""
    return f"at {frame.path} {frame.function} {frame.source}"


def _names(error: BaseException, sqlstate: str | None, message: Callable[[], str]) -> Iterator[str]:
    found: list[object] = []
    match error:
        case KeyError(args=(key,)):
            found = [key]
        case AttributeError(name=str() as name):
            found = [name, type(error.obj).__name__]
        case NameError() | ImportError():
            found = [error.name]
    yield from (name for name in found if isinstance(name, str))
    if sqlstate is not None and sqlstate.startswith(_NAMING_SQLSTATE_CLASSES):
        yield from _QUOTED.findall(message().partition("\n")[0])


def _strings(payload: object) -> Iterator[str]:
    """Yield the strings among the values of a payload: a key that an event names is data."""
    pending, seen = [payload], 0
    while pending and (seen := seen + 1) <= _MOST_VALUES:
        value = pending.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, list):
            pending += value
