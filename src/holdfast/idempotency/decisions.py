"""What an event loop and a thread decide alike: how a key is read, and what an error means. No I/O, nothing kept.

Whoever carries a request out asks here, and acts on it: it ends the endpoint, runs it again, or answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from holdfast.errors import HoldfastError
from holdfast.failure import describe
from holdfast.idempotency import answers
from holdfast.idempotency.answers import Answer
from holdfast.idempotency.hashing import Secrets
from holdfast.idempotency.keys import KeyInvalid, KeyMissing, parse_key
from holdfast.idempotency.settings import IdempotencySettings
from holdfast.postgres.idempotency import NewRecord
from holdfast.redact import redact_dsn
from holdfast.retry import sqlstate_of

# What passes when the whole transaction is run again. A unique violation may stand for a serialization failure.
_AGAIN = frozenset(("40001", "40P01", "23505", "55P03"))
# Those of them that no endpoint can mean: whatever it makes of one, the transaction has to be run again.
_NEVER_MEANT = frozenset(("40001", "40P01"))
# The first one is still at it: the lock timeout, or a shorter statement timeout.
_WAITED = frozenset(("55P03", "57014"))
# The server, or the way to it, is gone; or it has ended a session that was idle for too long; or it is a standby now.
_GONE = ("08", "53", "57P", "25P03", "25P04", "25006")

# Whose errors quote statements and their values, also without a code.
_DATABASE = ("sqlalchemy.", "psycopg.", "asyncpg.", "django.db.")


class Unwind(BaseException):
    """Ends the endpoint: its exchange is decided. Not an Exception, so that no endpoint takes it for a fault."""


class Fault(Enum):
    """What an error means for the request."""

    UNDER_WAY = "under way"  # the first one with the key is still at it: 409
    PASSING = "passing"  # it may be gone when everything is run again
    UNAVAILABLE = "unavailable"  # the database is: 503
    OWN = "own"  # the application's own, which answers for it


def read_key(fields: Sequence[bytes], settings: IdempotencySettings, *, required: bool) -> str | Answer | None:
    """The key of a request, or how it is refused; None when there is none, and none is needed."""
    try:
        return parse_key(fields)
    except KeyMissing:
        if required:
            return answers.key_missing(settings)
        return answers.key_invalid(settings, "is empty") if fields else None
    except KeyInvalid as error:
        return answers.key_invalid(settings, str(error))


def new_record(
    scope: str, key: str, request: Sequence[bytes], secrets: Secrets, settings: IdempotencySettings
) -> NewRecord:
    """What is recorded when the request begins; `request` are the parts of it that are hashed."""
    hashes = secrets.hashes(request)
    return NewRecord(scope, key, hashes, secrets.version, settings.keep, settings.wait, settings.idle)


# --- errors -------------------------------------------------------------------------------------------------


def fault_of_taking(error: BaseException) -> Fault:
    """Of the statement that takes the key. Fail closed: whoever cannot remember what was done must not do it."""
    state = sqlstate_of(error)
    if state in _WAITED:
        return Fault.UNDER_WAY
    return Fault.PASSING if state in _AGAIN else Fault.UNAVAILABLE


def fault_of_work(error: BaseException) -> Fault:
    """Of the endpoint. Everything is rolled back, so it may be run again."""
    state = sqlstate_of(error)
    if state is None:
        # What a driver says when the server is gone without a word: there was nobody to give it a code.
        lost = _is_of_database(error) and any(base.__name__ == "OperationalError" for base in type(error).__mro__)
        return Fault.UNAVAILABLE if lost else Fault.OWN
    if state in _AGAIN:
        return Fault.PASSING
    return Fault.UNAVAILABLE if state.startswith(_GONE) else Fault.OWN


def fault_of_ending(error: BaseException) -> Fault:
    """Of keeping the answer and of the commit, which then is not known to have happened: the answer must not go."""
    if sqlstate_of(error) is None and not isinstance(error, HoldfastError):
        return Fault.UNAVAILABLE
    return fault_of_work(error)


def never_meant(error: BaseException) -> bool:
    """Whether an endpoint that caught the error cannot have meant what it answered: the transaction was doomed."""
    return sqlstate_of(error) in _NEVER_MEANT


def told_of(error: BaseException) -> dict[str, object]:
    """What logs may say of an error. A database's message may quote rows, and its driver's the statement's values."""
    kind, state = type(error), sqlstate_of(error)
    quotes = state is not None or _is_of_database(error)
    text = f"{kind.__module__}.{kind.__qualname__}" if quotes else describe(error, redact_dsn).text[:500]
    return {"error": text, "sqlstate": state}


def _is_of_database(error: BaseException) -> bool:
    """Whether it, or what it is described with, comes from a driver or from what wraps one."""
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if any(f"{base.__module__}.".startswith(_DATABASE) for base in type(link).__mro__):
            return True
        link = link.__cause__ or link.__context__
    return False
