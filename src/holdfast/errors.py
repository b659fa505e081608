"""The errors that applications meet, publish with or raise. What only operators meet stands beside what raises it.

HoldfastError
├── PublishError (ValueError)     the event was refused, the transaction is usable; .field and .remedy
│   ├── PayloadError              .field is the path of the value, e.g. payload.lines[2].at
│   └── FieldError                any other argument of publish
├── ConfigurationError            a setting or an argument of the library; .field and .remedy
│   ├── HandlerNameError
│   └── NotFound                  an argument of an operator names something that is not there
│       └── NothingSelected       a filter of an operator matches no event
├── SchemaMismatch                code and schema do not work together; .found, .expected, .remedy
├── RemediedError                 something could not be done; .problem and .remedy
│   └── NotPermitted              a login lacks a privilege
├── MigrationError
├── LifespanError                 a lifespan of handlers failed, and the worker does not run
├── TerminalHandlerError          raise it in a handler: no retry, the event fails now
│   ├── ValidationFault
│   ├── AuthorizationFault
│   ├── DomainFault
│   │   └── KeyReused             an idempotency key that was used for another command
│   ├── NotFoundFault
│   └── RelayFault                a broker will never take the event
└── TransientHandlerError         raise it in a handler: retry, if given after .retry_after seconds
    └── CommandUnderWay           the command with this key is being carried out already
"""

from typing import Self


class HoldfastError(Exception):
    """Root of every error raised by this library."""


class _FieldProblem(HoldfastError):
    """A value was refused: its field, the problem and the remedy."""

    # The parts stay in args, so that the error survives pickling and copying.
    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(field, problem, remedy)
        self.field = field
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.field} {self.problem}; {self.remedy}"


class PublishError(_FieldProblem, ValueError):
    """The event was refused without an error of the database, so the caller's transaction is still usable."""


class PayloadError(PublishError):
    """A value in the payload cannot be stored as jsonb; `field` is its path."""


class FieldError(PublishError):
    """An argument of publish other than the payload is not acceptable."""


class ConfigurationError(_FieldProblem):
    """A setting or an argument of the library is not acceptable."""


class NotFound(ConfigurationError):
    """An argument names something that does not exist, or does not exist any more."""


class NothingSelected(NotFound):
    """A filter matches no event: nothing is wrong with it, and there is nothing to do."""


class HandlerNameError(ConfigurationError):
    """A handler's name does not begin with a domain context."""


class RemediedError(HoldfastError):
    """Something could not be done; `remedy` says what to do about `problem`."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem, remedy)
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.problem}; {self.remedy}"


class SchemaMismatch(HoldfastError):
    """The schema in the database and this version of the library do not work together."""

    def __init__(self, found: str, expected: str, remedy: str) -> None:
        super().__init__(found, expected, remedy)
        self.found = found
        self.expected = expected
        self.remedy = remedy

    @property
    def is_missing(self) -> bool:
        """Whether there is no such schema."""
        return self.found.endswith("(not installed)")

    @property
    def problem(self) -> str:
        """What does not work together."""
        if self.is_missing:
            return f"the database has no schema {self.found}"
        return f"the database has schema {self.found}, this version needs {self.expected}"

    def __str__(self) -> str:
        return f"{self.problem}; {'run ' if self.remedy.startswith('holdfast ') else ''}{self.remedy}"


class NotPermitted(RemediedError):
    """The login of a connection lacks a privilege that publishing, or a worker, needs."""


class MigrationError(HoldfastError):
    """A migration could not be applied."""


class LifespanError(HoldfastError):
    """A lifespan of a handler registry failed, so that its handlers do not run."""

    def __init__(self, lifespan: str, when: str, error: str) -> None:
        super().__init__(lifespan, when, error)
        self.lifespan = lifespan
        self.problem = f"the lifespan {lifespan} failed {when}: {error}"

    def __str__(self) -> str:
        return self.problem


class TerminalHandlerError(HoldfastError):
    """Raised by a handler for an event that no retry can help: it fails at once."""

    function: object = None  # which returned something wrong, and no longer runs

    def blaming(self, function: object) -> Self:
        """Return the error with the function that stands in place of the line that raised it."""
        self.function = function
        return self


class ValidationFault(TerminalHandlerError):
    """The event asks for something malformed."""


class AuthorizationFault(TerminalHandlerError):
    """The event asks for something that its originator may not do."""


class DomainFault(TerminalHandlerError):
    """A business rule forbids what the event asks for."""


class KeyReused(DomainFault):
    """An idempotency key that was used for another command."""


class NotFoundFault(TerminalHandlerError):
    """The event refers to something that does not exist."""


class RelayFault(TerminalHandlerError):
    """A broker will never take the event: no handler has seen it."""


class TransientHandlerError(HoldfastError):
    """Raised by a handler for a fault that will pass; `retry_after` is a number of seconds."""

    def __init__(self, *args: object, retry_after: float | None = None) -> None:
        super().__init__(*args)
        self.retry_after = retry_after


class CommandUnderWay(TransientHandlerError):
    """The command with this idempotency key is being carried out at this moment."""
