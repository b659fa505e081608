"""The record of a failure: a text of bounded length, a signature for grouping, and earlier failure cycles."""

import re
import reprlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Literal, NamedTuple
from uuid import UUID

from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError

from holdfast.chain import BUILTIN_ERRORS, cause_of, context_of, is_context_suppressed
from holdfast.error_signature import details_of, place_in, signature
from holdfast.event_data import NO_EVENT, EventData
from holdfast.frames import Frame, frames_of, place_of, shown
from holdfast.redact import HIDDEN, redact_secrets, unredacted

FailureReason = Literal["max_deliveries", "retry_terminal", "rejected", "cancelled", "expired"]
Redactor = Callable[[str], str]

MAX_ERROR_BYTES = 8192
MAX_TRACEBACK_BYTES = 4096
TRUNCATED = "…[truncated]"
# Separates an error from its traceback in the text that the database gets; neither contains this character.
_SEPARATOR = "\x1e"
_PLACE = "raised at "

# How much of a text is redacted: more than is kept, so that a secret at the cut is recognised as a whole.
_READ = 4 * MAX_ERROR_BYTES
_DEEPEST_CAUSE = 10
_MOST_MEMBERS = 5
_MOST_FIELDS = 20
_MOST_NAMED = 5  # in the first line of a validation error
_MOST_TRACED = 3
_MOST_LEAVES = 100
_MEMBER = "with "
_WITHHELD = "<text withheld:"
_LONGEST_TYPE_NAME = 200
_MOST_TRACEBACKS = 500
_Message = Callable[[BaseException], str]
_Link = tuple[str, BaseException]
_DRIVERS = frozenset(("asyncpg", "psycopg", "psycopg2", "sqlalchemy", "django"))
_DRIVER_QUOTES = re.compile(r"\n[ \t]*(?:DETAIL|CONTEXT|QUERY|STATEMENT|LINE \d+):|\n?\[SQL: |\n?\[parameters: ")
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


class FailureCycle(BaseModel):
    """One entry of `failure_history`: the failure that a replay cleared. Fields are only ever added.

    An entry with `edited_to` is the last one: a corrected event has taken this one's place.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)

    attempts: int
    last_error: str | None = None
    first_failed_at: AwareDatetime | None = None
    failed_at: AwareDatetime | None = None
    failure_reason: str | None = None
    raised_at: str | None = None  # the place in the user's code
    generation: int
    replayed_by: str | None = None
    replayed_at: AwareDatetime | None = None
    edited_to: UUID | None = None


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """An error as it is stored: safe for the database, for logs, and for grouping."""

    text: str
    type_name: str
    signature: str
    traceback: str | None = None

    @property
    def stored(self) -> str:
        """The error and its traceback, as the database takes them."""
        return with_traceback(self.text, self.traceback)

    @property
    def stored_briefly(self) -> str:
        """The error and its place, for a row that is likely to be written again soon."""
        return with_traceback(self.text, self.traceback and self.traceback.partition("\n")[0])


def with_traceback(text: str, traceback: str | None) -> str:
    """Return an error and its traceback as one text. The functions of the database take them apart."""
    return f"{text}{_SEPARATOR}{traceback}" if traceback else text


def describe(
    exc: BaseException, redact: Redactor | None = None, event: EventData = NO_EVENT, home: str = ""
) -> ErrorReport:
    """Return an error and its causes as a bounded, storable text, with a traceback. It never raises.

    The text is without what drivers quote of rows and parameters, passwords and tokens, and without the data of the
    `event`. The traceback has neither messages nor the values of variables. A redactor is applied to both besides;
    `unredacted` turns all of that off. `home` is the package of the handler.

    >>> describe(ValueError("no such order")).text
    'ValueError: no such order'
    """
    type_name = _type_name(exc)
    links = _chain(exc)
    try:
        whole = _text(links, _message)
        quoting = redact is not unredacted and any([_is_of_driver(error) for error in _told(links)])
        text = _text(links, _reduced_message) if quoting else whole
        if any([isinstance(error, BaseExceptionGroup) for _, error in links]):
            # How many members a group has, and their order, is no part of the cause.
            whole = "\n".join(f"{prefix}{_headline(error, _common_message)}" for prefix, error in links)
    except BaseException as error:
        # Whatever an exotic exception does while it is read, the row still has to be settled.
        whole = text = f"{type_name}: <unreadable: {_type_name(error)}>"
    traceback, details = _where_raised(links, redact, event.payload, home)
    return _report(text, whole, type_name, redact, event, traceback, details)


def state(reason: str, type_name: str, redact: Redactor | None = None, event: EventData = NO_EVENT) -> ErrorReport:
    """Return the reason that a handler gives for an outcome as a report, as `describe` does for an error."""
    return _report(reason, reason, type_name, redact, event)


def _report(
    text: str,
    whole: str,
    type_name: str,
    redact: Redactor | None,
    event: EventData,
    traceback: str | None = None,
    details: Sequence[str] = (),
) -> ErrorReport:
    own = () if redact is None else (redact,)
    # The signature is made before Holdfast's own redaction, whose rules may change with each release.
    group = signature(bound(whole, *own), type_name, details, event.payload)
    if redact is not unredacted:
        # Secrets first: they are recognised by the words before them, which the second redactor might remove.
        own = (*own, redact_secrets, event.redact)
    return ErrorReport(bound(text, *own), type_name, group, traceback)


# --- where it was raised


def _where_raised(
    links: Sequence[_Link], redact: Redactor | None, payload: object, home: str
) -> tuple[str | None, Sequence[str]]:
    """Return the traceback, and the details that tell the cause apart besides the text."""
    try:
        parts = _traced(links)
        # The members of a group come before the group: their place says more than the place where it was made.
        inner_first = sorted(parts, key=lambda each: each.prefix != _MEMBER) if len(parts) > 1 else parts
        place = _first_place(inner_first, home)
        details = _details(parts, place, redact, payload, home)
        innermost = place or next((each.frames[-1] for each in parts if each.frames), None)
        if innermost is None:
            return None, details
        sections = tuple([(each.prefix and f"{each.prefix}{_type_name(each.error)}", each.frames) for each in parts])
        traceback = _traceback(innermost, sections, home)
        if redact is not None:
            traceback = bound(traceback, redact, most=MAX_TRACEBACK_BYTES)
        return None if not traceback or traceback.startswith(_WITHHELD) else traceback, details
    except BaseException:
        return None, ()


def _details(
    parts: "Sequence[_Traced]", place: Frame | None, redact: Redactor | None, payload: object, home: str
) -> list[str]:
    """Return the details that tell the cause apart besides the text; for a group, the set of its members' causes."""
    chain = [each for each in parts if each.prefix != _MEMBER]
    details = [detail for each in chain for detail in details_of(each.error, _message, payload)]
    groups = [each.error for each in chain if isinstance(each.error, BaseExceptionGroup)]
    if groups:
        members = (member for group in groups for member in islice(_leaves(group), _MOST_LEAVES))
        details += sorted({_member_cause(member, redact, payload, home) for member in members})
        place = _first_place(chain, home)
    if place is not None:
        details.append(place_in(place))
    return details


def _member_cause(member: BaseException, redact: Redactor | None, payload: object, home: str) -> str:
    details = details_of(member, _message, payload)
    place = place_of(member, frames_of(member), home)
    if place is not None:
        details.append(place_in(place))
    own = () if redact is None else (redact,)
    return signature(bound(_headline(member, _message), *own), _type_name(member), details, payload)


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """Yield the members of a group that are no groups themselves, in their order."""
    pending: list[BaseException] = [group]
    while pending:
        error = pending.pop()
        if isinstance(error, BaseExceptionGroup):
            pending += reversed(error.exceptions)
        else:
            yield error


class _Traced(NamedTuple):
    """An error of a chain, or a member of a group: how it belongs to the one before it, and its frames."""

    prefix: str
    error: BaseException
    frames: tuple[Frame, ...]


def _traced(links: Sequence[_Link]) -> list[_Traced]:
    parts: list[_Traced] = []
    for prefix, error in links:
        parts.append(_Traced(prefix, error, frames_of(error)))
        if isinstance(error, BaseExceptionGroup):
            parts += [_Traced(_MEMBER, member, frames_of(member)) for member in islice(_leaves(error), _MOST_TRACED)]
    return parts


def _first_place(parts: Sequence[_Traced], home: str) -> Frame | None:
    for each in parts:
        if (place := place_of(each.error, each.frames, home)) is not None:
            return place
    return None


@lru_cache(maxsize=_MOST_TRACEBACKS)
def _traceback(innermost: Frame, sections: tuple[tuple[str, tuple[Frame, ...]], ...], home: str) -> str:
    """Return the text of a traceback: the place, and for each error its name, except of the first, and its frames."""
    lines = [f"{_PLACE}{innermost}"]
    for name, frames in sections:
        if name:
            lines.append(name)
        if frames:
            lines.append(shown(frames, home))
    text = "\n".join(lines)
    # Frames are escaped already, and a character takes at most four bytes: a short text fits as it is.
    return text if len(text) <= MAX_TRACEBACK_BYTES // 4 else bound(text, most=MAX_TRACEBACK_BYTES)


# --- texts


def bound(text: str, *redactors: Redactor, most: int = MAX_ERROR_BYTES) -> str:
    """Return a redacted text of at most `most` bytes, with characters escaped that Postgres or a terminal refuses."""
    cut = len(text) > _READ
    text = str.__getitem__(text, slice(_READ))
    for redact in redactors:
        text = _redacted(text, redact)
    safe = _safe(text[:_READ])
    if 4 * len(safe) <= most and not cut:
        return safe
    data = safe.encode()
    if len(data) <= most and (not cut or safe.endswith(TRUNCATED)):
        return safe
    return data[: most - len(TRUNCATED.encode())].decode(errors="ignore") + TRUNCATED


def _redacted(text: str, redact: Redactor) -> str:
    try:
        redacted: object = redact(text)
        if isinstance(redacted, str):
            return str.__getitem__(redacted, slice(None))
        problem = f"returned {_type_name(redacted)}"
    except BaseException as error:
        problem = f"raised {_type_name(error)}"
    # Storing the text unredacted would be the leak that the redactor is there to prevent.
    return f"{_WITHHELD} the redactor {problem}>"


def _safe(text: str) -> str:
    # What is printable is safe, and most texts are.
    return text if text.isprintable() else _UNSAFE.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def _type_name(value: object) -> str:
    try:
        cls = type(value)
        module = str(cls.__module__)
        name = cls.__qualname__ if module in ("builtins", "__main__") else f"{module}.{cls.__qualname__}"
        return _safe(name[:_LONGEST_TYPE_NAME])
    except BaseException:
        return "<unnamed>"


def _chain(exc: BaseException) -> list[_Link]:
    """Return an error and those that led to it, each with the words that say how."""
    links: list[_Link] = []
    seen: set[int] = set()
    error: BaseException | None = exc
    prefix = ""
    while error is not None and id(error) not in seen and len(seen) <= _DEEPEST_CAUSE:
        seen.add(id(error))
        links.append((prefix, error))
        if (cause := cause_of(error)) is not None:
            prefix, error = "caused by ", cause
        else:
            prefix, error = "while handling ", None if is_context_suppressed(error) else context_of(error)
    return links


def _text(links: Sequence[_Link], message: _Message) -> str:
    """Return what an error and its causes say, a line or more for each."""
    lines: list[str] = []
    for prefix, error in links[:_DEEPEST_CAUSE]:
        lines.append(f"{prefix}{_headline(error, message)}")
        if isinstance(error, BaseExceptionGroup):
            # Not the groups among them: a task group in a task group would hide what has happened.
            lines += [f"  - {_headline(member, message)}" for member in islice(_leaves(error), _MOST_MEMBERS)]
        if len(links) > 1 and sum(map(len, lines)) > _READ:
            break
    else:
        if len(links) > _DEEPEST_CAUSE:
            lines.append("… and more causes")
    return "\n".join(lines)


def _headline(error: BaseException, message: _Message) -> str:
    try:
        text = message(error)
    except BaseException as raised:
        text = f"<unreadable: {_type_name(raised)}>"
    name = _type_name(error)
    return f"{name}: {text}" if text else name


def _message(error: BaseException) -> str:
    if isinstance(error, ValidationError):
        return _validation_message(error)
    if type(error).__str__ is BaseException.__str__:
        # Like str(), but a huge argument is cut before it is turned into text.
        args = error.args
        if len(args) > 1:
            return "(" + ", ".join(map(_shown, args[:_MOST_FIELDS])) + ")"
        text = (args[0] if isinstance(args[0], str) else _shown(args[0])) if args else ""
    else:
        text = str(error)
    text = str.__getitem__(text, slice(_READ + 1))
    if hasattr(error, "params") and hasattr(error, "statement"):
        # SQLAlchemy appends the statement's parameters, which are the application's data.
        text = text.partition("\n[parameters: ")[0]
    return text


def _common_message(error: BaseException) -> str:
    """Return the message; of a group, without the number of its members."""
    return error.message if isinstance(error, BaseExceptionGroup) else _message(error)


def _is_of_driver(error: BaseException) -> bool:
    if type(error) in BUILTIN_ERRORS:
        return False
    return not _DRIVERS.isdisjoint([str(cls.__module__).partition(".")[0] for cls in type(error).__mro__])


def _told(links: Sequence[_Link]) -> Iterator[BaseException]:
    for _, error in links:
        yield error
        if isinstance(error, BaseExceptionGroup):
            yield from islice(_leaves(error), _MOST_MEMBERS)


def _reduced_message(error: BaseException) -> str:
    """Return the message without what a database driver quotes of rows, statements and parameters."""
    text = _message(error)
    if not _is_of_driver(error):
        return text
    reduced = _DRIVER_QUOTES.split(text, maxsplit=1)[0]
    reduced = "\n".join(map(_without_value_at_end, reduced.split("\n")))
    hint = getattr(error, "hint", None) or getattr(getattr(error, "diag", None), "message_hint", None)
    return f"{reduced}\nHINT:  {hint}" if hint and "HINT:" not in reduced else reduced


def _without_value_at_end(line: str) -> str:
    """Messages of class 22, data exceptions, end with the value: invalid input syntax for type integer: "…"."""
    shown = line.rstrip()
    start = shown.find(f": {shown[-1:]}", 0, -1) if shown.endswith(("'", '"')) else -1
    return line if start < 0 else f"{line[: start + 2]}{HIDDEN}"


def _validation_message(error: ValidationError) -> str:
    # Pydantic's own text quotes the input, which is part of a payload.
    details = error.errors(include_url=False, include_context=False, include_input=False)
    fields = [".".join(map(str, detail["loc"])) or "(whole)" for detail in details[:_MOST_FIELDS]]
    # The first line is all that lists show.
    named = ", ".join(dict.fromkeys(fields[:_MOST_NAMED])) + (", …" if len(details) > _MOST_NAMED else "")
    lines = [f"{error.error_count()} invalid in {error.title}: {named}"]
    lines += [f"  {field}: {detail['msg']}" for field, detail in zip(fields, details, strict=False)]
    return "\n".join(lines)


class _Repr(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = _READ
        self.maxlong = 100
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = _MOST_FIELDS

    def repr_bytes(self, value: bytes, level: int) -> str:
        return repr(value[:_READ])

    def repr_bytearray(self, value: bytearray, level: int) -> str:
        return repr(bytes(value[:_READ]))

    def repr_str(self, value: str, level: int) -> str:
        return repr(value[:_READ])


_shown = _Repr().repr
