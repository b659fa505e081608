"""The signature of a failure: one for each cause, whatever the ids, numbers and values in its text.

Besides the text, these tell causes apart: the HTTP status, the SQLSTATE, the error number of the operating system, the
name of a missing thing, and the place in the user's code. The place is the file, the function and the text of the line,
with its number among the equal lines of the function, because line numbers change with every deployment.

Words of the text that are values of the event's payload count as data, except words of one or two lower-case letters:
every text has some of those, such as "is" and "no".
"""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b

from holdfast.chain import BUILTIN_ERRORS
from holdfast.frames import Frame
from holdfast.retry import http_status, sqlstate_of
from holdfast.short_texts import remembering_short

_VARYING = re.compile(
    r"""
      (?P<id>      \b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b )
    | (?P<value>   (?<!\w)'[^'\n]*'(?!\w) | "[^"\n]*" | `[^`\n]*` | “[^“”\n]*” | (?<==)\([^()\n]*\) )
    | (?P<path>    (?<![\w/])(?:\w+://[^\s'"]+ | (?:[A-Za-z]:)?(?:[/\\][\w.@~+-]+){2,}[/\\]?) )
    | (?P<address> (?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)+ | \b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b
                 | (?<![\w:])(?=[0-9:]*(?:[a-f]|::))(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{1,4}(?![\w:]) )
    | (?P<hex>     \b0x[0-9a-f]+\b | \b(?=[a-f]*[0-9])[0-9a-f]{8,}\b )
    # Ids such as Ord-2026-A235, of which the first part says what it is: words of parts with digits or capitals.
    | (?P<dashed>  (?<![\w-])(?=[a-z-]{0,40}\d)(?!\d{4}-\d\d-\d\d)(?P<first>[a-z0-9]{1,20})
                   (?-i:-(?:[A-Z0-9]{1,40}|(?=[a-z]{0,40}[A-Z0-9])[A-Za-z0-9]{1,40}|[a-f]{1,8})(?!\w)){1,8} )
    # Ids such as ch_3OaBcD2eZvKYlo2C and 01ARZ3NDEKTSV4RRFFQ69G5FAV: long words with digits in more than one place.
    | (?P<token>   \b(?=\w{12})(?:[a-z_]*+\d++){2,}+[a-z_]*\b )
    | (?P<n>       [-+]?\d+(?:[.,:]\d+)*(?:e[-+]?\d+\b)? )
    """,
    re.VERBOSE | re.IGNORECASE,
)
# The rest of this text depends on the call that exceeded the limit, which varies with the depth of the stack before it.
_RECURSION = re.compile(r"(maximum recursion depth exceeded)[^\n]*")
# Words that may be an id of random characters, such as uy6HdjNBwuLxVTEaOVTU, and the parts that a name would have.
_MIXED = re.compile(r"(?<![\w-])(?=[\w-]{0,100}[a-z])(?=[\w-]{0,100}[A-Z])[\w-]{16,100}+(?![\w-])")
_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
_SHORTEST_PART = 3
# A name that a programmer has given, such as first_name, line1 and x-request-id. One with more digits may be an id.
_NAME = re.compile(r"(?=[^\d]*(?:(?<=[A-Za-z])\d[^\d]*)?\Z)[A-Za-z_][\w .-]{0,59}", re.ASCII)
# The last part of sku-f and sku-a1 may be a hexadecimal number.
_HEX_PART = re.compile(r"-[0-9a-f]{1,8}\b")
# A name that is seldom the value of an event; a code of a country, such as DE, often is.
_NAME_IN_CODE = re.compile(r"[a-z_][a-z0-9_.-]*")
_PLACEHOLDER = re.compile(r"<\w+>")
_COMMON_WORD = re.compile(r"[a-z]{0,2}")
_LETTER = re.compile(r"[^\W\d_]")
_QUOTED = re.compile(r'"([^"\n]{1,63})"')
# In these classes, and in no others, Postgres quotes names of tables, columns and constraints.
_NAMING_SQLSTATE_CLASSES = ("23", "42")
_MOST_VALUES = 1_000
_MOST_FOUND = 50
_MOST_PLACES = 1_000


def signature(text: str, type_name: str, details: Sequence[str] = (), payload: object = None) -> str:
    """Return a short name for a kind of failure: the same for texts that differ only in ids, numbers or values."""
    if "recursion" in text:
        text = _RECURSION.sub(r"\1", text)
    normal = _without_ids(text)
    found = {value for value in _strings(payload) if value and value in text}
    # The longest first: a value may be a part of another.
    for value in sorted(found, key=len, reverse=True)[:_MOST_FOUND]:
        normal = _without_word(normal, value)
    whole = "\x1f".join((" ".join(normal.split()), *details))
    return f"{type_name}:{blake2b(whole.encode(errors='replace'), digest_size=8).hexdigest()}"


@remembering_short
def _without_ids(text: str) -> str:
    return _VARYING.sub(_placeholder, _MIXED.sub(lambda word: "<n>" if _is_random(word[0]) else word[0], text))


def _without_word(normal: str, value: str) -> str:
    """Return a text with a value of the payload replaced, where the value is a whole word."""
    word = _without_ids(value)
    if _COMMON_WORD.fullmatch(word) or not _LETTER.search(_PLACEHOLDER.sub("", word)):
        return normal
    return re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", "<value>", normal)


def _is_random(word: str) -> bool:
    """Return whether a word changes between small letters, capitals and digits more often than names do."""
    return len(word) < _SHORTEST_PART * len(_PART.findall(word))


def _placeholder(match: re.Match[str]) -> str:
    # Ids get the placeholder of numbers: the next id of the same kind may happen to have digits only.
    if match.lastgroup == "dashed":
        return f"{match['first']}<n>" if match["first"].isalpha() else "<n>"
    return "<n>" if match.lastgroup in ("id", "hex", "token") else f"<{match.lastgroup}>"


def details_of(error: BaseException, message: Callable[[BaseException], str], payload: object) -> list[str]:
    """Return what tells the cause of an error apart besides its text: status, SQLSTATE, names of missing things."""
    details: list[str] = []
    sqlstate = None
    if type(error) not in BUILTIN_ERRORS or error.__dict__:
        if (status := http_status(error)) is not None:
            details.append(f"http {status}")
        if (sqlstate := sqlstate_of(error)) is not None:
            details.append(f"sqlstate {sqlstate}")
    if isinstance(error, OSError) and isinstance(error.errno, int):
        details.append(f"errno {error.errno}")
    names = [name for name in _names(error, sqlstate, message) if _is_name(name)]
    if names:
        data = set(_strings(payload))
        details += [f"name {name}" for name in names if _NAME_IN_CODE.fullmatch(name) or name not in data]
    return details


@lru_cache(maxsize=_MOST_PLACES)
def place_in(frame: Frame) -> str:
    """Return a place in the user's code in a form that stays the same when other lines change."""
    again = frame.equal_lines_before
    return f"at {frame.path} {frame.function} {frame.source}{f' again {again}' if again else ''}"


def _is_name(text: str) -> bool:
    if _NAME.fullmatch(text) is None or _HEX_PART.search(text):
        return False
    return not (_MIXED.fullmatch(text) and _is_random(text))


def _names(error: BaseException, sqlstate: str | None, message: Callable[[BaseException], str]) -> list[str]:
    found: list[object] = []
    match error:
        case KeyError(args=(key,)):
            found = [key]
        case AttributeError(name=str() as name):
            found = [name, type(error.obj).__name__]
        case NameError() | ImportError():
            found = [error.name]
    names = [name for name in found if isinstance(name, str)]
    if sqlstate is not None and sqlstate.startswith(_NAMING_SQLSTATE_CLASSES):
        names += _QUOTED.findall(message(error).partition("\n")[0])
    return names


def _strings(payload: object) -> list[str]:
    """Return the strings among the first values of a payload; its keys are names, not data."""
    strings: list[str] = []
    pending, seen = [payload], 0
    while pending and (seen := seen + 1) <= _MOST_VALUES:
        value = pending.pop()
        if isinstance(value, str):
            strings.append(value)
        elif isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, list):
            pending += value
    return strings
