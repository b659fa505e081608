"""The error tree: what callers may catch, and what the errors tell them."""

import copy
import pickle

import pytest

from holdfast import errors
from holdfast.errors import (
    ConfigurationError,
    FieldError,
    HandlerNameError,
    HoldfastError,
    PayloadError,
    PublishError,
    SchemaMismatch,
    TerminalHandlerError,
    TransientHandlerError,
)

EVERY_ERROR = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]


@pytest.mark.parametrize("error", EVERY_ERROR)
def test_every_error_has_one_root(error: type[Exception]) -> None:
    assert issubclass(error, HoldfastError)


def test_the_docstring_draws_the_whole_tree() -> None:
    assert errors.__doc__ is not None
    public = [error.__name__ for error in EVERY_ERROR if not error.__name__.startswith("_")]
    assert [name for name in public if name not in errors.__doc__] == []


def test_refused_events_are_value_errors_with_field_and_remedy() -> None:
    """Bad input gets a typed error that names the field and what to do (PUB-3)."""
    for kind in (PayloadError, FieldError):
        assert issubclass(kind, PublishError) and issubclass(kind, ValueError)
        error = kind("payload.at", "is datetime", "pass value.isoformat()")
        assert (error.field, error.remedy) == ("payload.at", "pass value.isoformat()")
        assert str(error) == "payload.at is datetime; pass value.isoformat()"


def test_configuration_errors_are_not_value_errors() -> None:
    error = HandlerNameError("handler_name", "is empty", "write billing.charge_card")
    assert isinstance(error, ConfigurationError)
    assert not isinstance(error, ValueError)


def test_a_schema_mismatch_says_what_to_run() -> None:
    error = SchemaMismatch("0001", "0003", "run: holdfast migrate")
    assert "0001" in str(error) and "0003" in str(error) and "holdfast migrate" in str(error)


@pytest.mark.parametrize("name", ["ValidationFault", "AuthorizationFault", "DomainFault", "NotFoundFault"])
def test_the_faults_that_no_retry_can_help_are_terminal(name: str) -> None:
    """Validation, authorization, domain and not-found errors have base classes (RTY-2)."""
    assert issubclass(getattr(errors, name), TerminalHandlerError)


@pytest.mark.parametrize(
    "error",
    [
        FieldError("delay", "is negative", "give seconds"),
        SchemaMismatch("1", "2", "migrate"),
        TransientHandlerError("busy", retry_after=7.5),
    ],
)
def test_errors_survive_copying_and_pickling(error: HoldfastError) -> None:
    for twin in (copy.copy(error), pickle.loads(pickle.dumps(error))):  # noqa: S301 - our own bytes
        assert type(twin) is type(error)
        assert (str(twin), vars(twin)) == (str(error), vars(error))
