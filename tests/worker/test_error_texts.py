"""What an error's text keeps and hides, and the place that it names."""

from __future__ import annotations

from functools import partial

import pytest

from holdfast import EventEnvelope, HandlerRegistry
from holdfast.cli.output import first_line
from holdfast.errors import TerminalHandlerError
from holdfast.failure import describe
from holdfast.redact import redact_secrets

pytestmark = pytest.mark.newcomer

KEY = "-----BEGIN RSA PRIVATE KEY-----\nMIIEabc\nZZpw\n-----END RSA PRIVATE KEY-----"


@pytest.mark.parametrize(
    "text",
    [
        "401: Bearer ZZpwabcdefghijk rejected",
        "auth=('u','ZZpw18')",
        "auth=BasicAuth('u', 'ZZpw18')",
        "auth=(('u','ZZpw18'), 3)",
        r'password: "a\"ZZpw44"',
        r"client_secret='a\'ZZpw44'",
        r'password=""\ ZZpw dbname=d',
        "PASSWORD => ZZpw42",
        "'password' => 'ZZpw42'",
        "api_key => ZZpw42",
        f"private_key: {KEY}",
        f"password={KEY}",
        f"key={KEY}",
        "AccountName=a;AccountKey=ZZpw/def+123==;EndpointSuffix=core.windows.net",
    ],
)
def test_secrets_in_every_notation_are_hidden(text: str) -> None:
    """DLQ-7."""
    assert "ZZpw" not in redact_secrets(text)


@pytest.mark.parametrize(
    "text", ["Bearer authentication failed", "Basic validation failed", "the Bearer token expired"]
)
def test_sentences_about_secrets_stay(text: str) -> None:
    """DLQ-7."""
    assert redact_secrets(text) == text


def test_the_type_of_an_error_stays() -> None:
    """However much of the text is hidden (DLQ-7)."""
    text = describe(RuntimeError("password=" * 20_000 + "tail")).text
    assert text.startswith("RuntimeError:") and text.count("truncated") == 1


def returns_a_dict(event: EventEnvelope) -> object:
    return {}


class Returning:
    def __call__(self, event: EventEnvelope) -> object:
        return 1


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (returns_a_dict, "returns_a_dict"),
        (partial(returns_a_dict), "returns_a_dict"),
        (Returning(), "Returning.__call__"),
        (Returning().__call__, "Returning.__call__"),
    ],
)
def test_a_wrong_result_is_blamed_on_the_handler(function: object, name: str) -> None:
    """On its definition, because its code has ended (DLQ-7)."""
    handler = HandlerRegistry().add("shop.pack", ("order.placed",), function)  # type: ignore[arg-type]
    with pytest.raises(TerminalHandlerError) as caught:
        handler.outcome_of({})
    report = describe(caught.value, home=handler.package)
    assert report.traceback is not None
    assert "worker/test_error_texts.py:" in report.traceback and f" in {name}" in report.traceback
    assert "holdfast/handlers.py" not in report.traceback


def test_a_group_of_errors_shows_its_first_member() -> None:
    """The text of the group itself says nothing (DLQ-7)."""
    text = describe(ExceptionGroup("unhandled errors in a TaskGroup", [ValueError("no price"), KeyError("x")])).text
    assert first_line(text) == (
        "ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions): ValueError: no price"
    )
