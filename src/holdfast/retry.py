"""When a failed attempt is tried again, and which errors are worth another attempt.

The classifier reads SQLSTATE codes, HTTP statuses and class names, never texts: texts change with the
server's language. It imports no driver, so it knows the errors of all of them.
"""

import asyncio
import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Literal, get_args

from pydantic import ValidationError

from holdfast.chain import BUILTIN_ERRORS, cause_of
from holdfast.checks import number, one_of, whole
from holdfast.errors import ConfigurationError, PayloadError, TerminalHandlerError, TransientHandlerError
from holdfast.outcome import LONGEST_DELAY

Strategy = Literal["exponential", "linear", "constant", "none"]

# Postgres counts microseconds, and a wait that rounds to nothing is a tight loop.
SHORTEST_DELAY = 0.001


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how fast a handler is tried again.

    `delay(attempt)` waits a random time between zero and `ceiling(attempt)` (full jitter), so events that
    failed together do not come back together. Strategy `none` never retries.

    Examples:
        >>> [RetryPolicy().ceiling(attempt) for attempt in (1, 2, 3, 4, 20)]
        [1.0, 2.0, 4.0, 8.0, 300.0]
    """

    max_attempts: int = 5
    base_delay: float = 1.0
    multiplier: float = 2.0
    max_delay: float = 300.0
    strategy: Strategy = "exponential"
    max_total_delay: float | None = None
    terminal_errors: tuple[type[BaseException], ...] = ()

    def __post_init__(self) -> None:
        whole("RetryPolicy.max_attempts", self.max_attempts, 1, 2**31 - 1)
        number("RetryPolicy.base_delay", self.base_delay, SHORTEST_DELAY, LONGEST_DELAY)
        number("RetryPolicy.multiplier", self.multiplier, 1, 1e6)
        number("RetryPolicy.max_delay", self.max_delay, self.base_delay, LONGEST_DELAY)
        if self.max_total_delay is not None:
            number("RetryPolicy.max_total_delay", self.max_total_delay, 0, LONGEST_DELAY)
        one_of("RetryPolicy.strategy", self.strategy, get_args(Strategy))
        errors: object = self.terminal_errors
        if not isinstance(errors, tuple) or not all(map(_is_exception_class, errors)):
            problem = "is not a tuple of exception classes"
            raise ConfigurationError("RetryPolicy.terminal_errors", problem, "write (SomeError, OtherError)")

    @property
    def budget(self) -> int:
        """How many times a handler is run at most."""
        return 1 if self.strategy == "none" else self.max_attempts

    def ceiling(self, attempt: int) -> float:
        """The longest wait after the given attempt failed; the first attempt is 1."""
        attempt = max(attempt, 1)
        wait = float(self.base_delay)
        try:
            if self.strategy == "exponential":
                wait *= float(self.multiplier) ** (attempt - 1)
            elif self.strategy == "linear":
                wait *= attempt
        except OverflowError:
            wait = math.inf
        return float(min(wait, self.max_delay))

    def delay(self, attempt: int, rand: Callable[[], float] = random.random) -> float:
        """Seconds to wait after the given attempt failed: random, above zero, at most the ceiling."""
        ceiling = self.ceiling(attempt)
        return min(max(ceiling * rand(), SHORTEST_DELAY), ceiling)

    def exhausted(self, attempt: int, waited: float = 0.0) -> bool:
        """Whether the given attempt was the last one; `waited` is the time since the first failure."""
        if attempt >= self.budget:
            return True
        return self.max_total_delay is not None and waited >= self.max_total_delay


def _is_exception_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


DEFAULT_RETRY_POLICY = RetryPolicy()


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an error is terminal, and how many seconds the other service asked to wait."""

    terminal: bool
    retry_after: float | None = None


_TERMINAL = Verdict(terminal=True)
_TRANSIENT = Verdict(terminal=False)

_PASSING = (
    ConnectionError,
    TimeoutError,
    asyncio.CancelledError,
    KeyboardInterrupt,
    SystemExit,
    GeneratorExit,
    MemoryError,
    RecursionError,
)
_DEEPEST_CAUSE = 10
_MOST_MEMBERS = 100
_SQLSTATE = re.compile(r"[0-9A-Z]{5}")
# Rolled back in favour of another transaction: the same work succeeds when it is done again from its beginning.
CONFLICT_SQLSTATES = frozenset({"40001", "40P01"})  # serialization_failure, deadlock_detected
LOCK_NOT_AVAILABLE = "55P03"
QUERY_CANCELED = "57014"
# Classes of SQLSTATE: bad data, a violated constraint, a statement that the database does not understand or allow.
_TERMINAL_SQLSTATE_CLASSES = ("22", "23", "42")
_DATABASE_NAMES = frozenset(
    ("DatabaseError", "IntegrityError", "OperationalError", "InterfaceError", "DataError", "ProgrammingError")
)
# Names of exceptions that frameworks raise for invalid input, missing permission, and no row or too many.
_FRAMEWORK_ERRORS = frozenset(
    (
        "django.core.exceptions.MultipleObjectsReturned",
        "django.core.exceptions.ObjectDoesNotExist",
        "django.core.exceptions.PermissionDenied",
        "django.core.exceptions.ValidationError",
        "django.http.response.Http404",
        "sqlalchemy.exc.MultipleResultsFound",
        "sqlalchemy.exc.NoResultFound",
    )
)
_PASSING_HTTP = (408, 425, 429)
_FINAL_HTTP = (400, 401, 403, 404)
_SECONDS = re.compile(r"[0-9]+(\.[0-9]+)?")


def classify(exc: BaseException, policy: RetryPolicy = DEFAULT_RETRY_POLICY) -> Verdict:
    """Decide whether an error raised by a handler is worth a retry. It never raises.

    The outermost error that says something decisive wins, then its explicit causes. What is unknown is
    transient: the attempts are bounded, so a wrong guess costs little.
    """
    try:
        return _classify(exc, policy, [_MOST_MEMBERS]) or _TRANSIENT
    except BaseException:  # whatever an exotic exception does while it is read
        return _TRANSIENT


def _classify(exc: BaseException, policy: RetryPolicy, budget: list[int]) -> Verdict | None:
    for error in _causes(exc):
        if budget[0] <= 0:
            return None
        budget[0] -= 1
        verdict = _decide(error, policy)
        if verdict is None and isinstance(error, BaseExceptionGroup):
            verdict = _classify_members(error, policy, budget)
        if verdict is not None:
            return verdict
    return None


def _classify_members(
    group: BaseExceptionGroup[BaseException], policy: RetryPolicy, budget: list[int]
) -> Verdict | None:
    # One member that fails every time makes the whole group fail every time.
    members = group.exceptions[:_MOST_MEMBERS]
    found = [verdict for member in members if (verdict := _classify(member, policy, budget))]
    waits = [verdict.retry_after for verdict in found if verdict.retry_after is not None]
    if any(verdict.terminal for verdict in found):
        return _TERMINAL
    return Verdict(terminal=False, retry_after=max(waits, default=None)) if found else None


def sqlstate_of(exc: BaseException) -> str | None:
    """Return the SQLSTATE of the database error that this error is, wraps or was caused by; None without one."""
    return next(filter(None, map(_sqlstate, _origins(exc))), None)


def _decide(error: BaseException, policy: RetryPolicy) -> Verdict | None:
    if isinstance(error, policy.terminal_errors):
        return _TERMINAL
    if isinstance(error, TerminalHandlerError | ValidationError | PayloadError):
        return _TERMINAL
    if isinstance(error, TransientHandlerError):
        return Verdict(terminal=False, retry_after=_bounded(error.retry_after, policy))
    if type(error) in BUILTIN_ERRORS and not error.__dict__:
        return _decide_passing(error)  # it has none of the attributes that are asked for below
    if not _FRAMEWORK_ERRORS.isdisjoint(f"{base.__module__}.{base.__qualname__}" for base in type(error).__mro__):
        return _TERMINAL
    return _decide_database(error) or _decide_http(error, policy) or _decide_passing(error)


def _decide_passing(error: BaseException) -> Verdict | None:
    return _TRANSIENT if isinstance(error, _PASSING) else None


def _decide_database(error: BaseException) -> Verdict | None:
    names = [base.__name__ for base in type(error).__mro__]
    # Django keeps the driver's error as the cause, SQLAlchemy as .orig; both wrap with these names.
    wrapper = _attribute(error, "orig") is not None or not _DATABASE_NAMES.isdisjoint(names)
    sqlstate = next(filter(None, map(_sqlstate, _origins(error) if wrapper else [error])), None)
    if sqlstate is not None:
        return _TERMINAL if sqlstate[:2] in _TERMINAL_SQLSTATE_CLASSES else _TRANSIENT
    if "IntegrityError" in names:
        return _TERMINAL
    if "DataError" in names and ("DatabaseError" in names or "InterfaceError" in names):
        # A value that the driver itself could not encode: class 22 without a round trip.
        return _TERMINAL
    return _TRANSIENT if "OperationalError" in names or "InterfaceError" in names else None


def _decide_http(error: BaseException, policy: RetryPolicy) -> Verdict | None:
    status = http_status(error)
    if status is None or status < 400:
        return None
    wait = _bounded(_retry_after(error), policy)
    if status >= 500 or status in _PASSING_HTTP or (wait is not None and status not in _FINAL_HTTP):
        return Verdict(terminal=False, retry_after=wait)
    return _TERMINAL


def _causes(exc: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    error: BaseException | None = exc
    while error is not None and id(error) not in seen and len(seen) < _DEEPEST_CAUSE:
        seen.add(id(error))
        yield error
        error = cause_of(error)


def _origins(error: BaseException) -> Iterator[BaseException]:
    for link in _causes(error):
        yield link
        orig = _attribute(link, "orig")
        if isinstance(orig, BaseException):
            yield from _causes(orig)


def _attribute(value: object, name: str) -> object:
    try:
        return getattr(value, name, None)
    except BaseException:
        return None


def _sqlstate(error: BaseException) -> str | None:
    for name in ("sqlstate", "pgcode"):
        code = _attribute(error, name)
        if isinstance(code, str) and _SQLSTATE.fullmatch(code):
            return code
    return None


def http_status(error: BaseException) -> int | None:
    """Return the status of the HTTP response that an error stands for; None without one. It never raises."""
    response = _attribute(error, "response")
    found = [_attribute(response, "status_code"), _attribute(response, "status")]
    found += [_attribute(error, "status"), _attribute(error, "status_code")]
    if any(base.__name__ == "HTTPError" for base in type(error).__mro__):
        # Elsewhere .code means anything from an exit status to a close code.
        found.append(_attribute(error, "code"))
    for status in found:
        if isinstance(status, int) and not isinstance(status, bool) and 300 <= status <= 599:
            return int(status)
    return None


def _retry_after(error: BaseException) -> float | None:
    for owner in (_attribute(error, "response"), error):
        get = _attribute(_attribute(owner, "headers"), "get")
        if not callable(get):
            continue
        try:
            value = str(get("Retry-After") or get("retry-after") or "").strip()
            if _SECONDS.fullmatch(value):
                return float(value)
            if value:
                moment = parsedate_to_datetime(value)
                moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
                return (moment - datetime.now(UTC)).total_seconds()
        except Exception:
            # A malformed header of another service must not decide the outcome of our event.
            return None
    return None


def _bounded(wait: object, policy: RetryPolicy) -> float | None:
    if isinstance(wait, bool) or not isinstance(wait, int | float) or not wait > 0:
        return None  # also for NaN, which is not above zero
    return float(min(wait, policy.max_delay))
