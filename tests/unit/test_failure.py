"""What is remembered of a failure: bounded, storable, groupable, free of the payload."""

import time
from datetime import UTC, datetime
from typing import Any

import pytest
import sqlalchemy.exc
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from holdfast.failure import MAX_ERROR_BYTES, TRUNCATED, FailureCycle, FailureReason, bound, describe, signature


def storable(text: str) -> bool:
    allowed = all(char in "\n\t" or not (ord(char) < 32 or 127 <= ord(char) < 160) for char in text)
    return allowed and len(text.encode()) <= MAX_ERROR_BYTES


class Unreadable(Exception):
    def __str__(self) -> str:
        raise SystemExit("no")

    __repr__ = __str__


class LyingText(Exception):
    def __str__(self) -> Any:
        return 5


# --- texts


def test_an_error_is_its_type_and_its_message() -> None:
    """DLQ-1."""
    report = describe(ValueError("no such order"))
    assert (report.text, report.type_name) == ("ValueError: no such order", "ValueError")
    assert describe(KeyError("amount")).text == "KeyError: 'amount'"
    assert describe(RuntimeError()).text == "RuntimeError"
    assert describe(OSError(2, "No such file")).text == "FileNotFoundError: [Errno 2] No such file"
    assert describe(Exception("a", 1)).text == "Exception: ('a', 1)"
    assert describe(Exception(b"\xff")).text == r"Exception: b'\xff'"
    assert describe(ValidationError.from_exception_data("X", [])).type_name.startswith("pydantic_core.")


def test_causes_are_told() -> None:
    """DLQ-1."""
    with pytest.raises(RuntimeError) as caught:
        try:
            raise TimeoutError("30 s")
        except TimeoutError as error:
            raise RuntimeError("charge failed") from error
    assert describe(caught.value).text == "RuntimeError: charge failed\ncaused by TimeoutError: 30 s"


def test_the_context_is_told_unless_it_is_suppressed() -> None:
    for suppressed, expected in ((False, "KeyError: 'b'\nwhile handling KeyError: 'a'"), (True, "KeyError: 'b'")):
        error = KeyError("b")
        error.__context__ = KeyError("a")
        error.__suppress_context__ = suppressed
        assert describe(error).text == expected


def test_the_members_of_a_group_are_told() -> None:
    group = ExceptionGroup("two failed", [ValueError("a"), KeyError("b")])
    assert describe(group).text.splitlines() == [
        "ExceptionGroup: two failed (2 sub-exceptions)",
        "  - ValueError: a",
        "  - KeyError: 'b'",
    ]
    assert len(describe(ExceptionGroup("many", [ValueError("a")] * 100_000)).text) < 500


@pytest.mark.parametrize("size", [8_192 - 12, 8_192 - 11])
def test_the_cap_is_8_kib(size: int) -> None:
    """At the cap and one byte above it ("ValueError: " takes twelve) (DLQ-1)."""
    text = describe(ValueError("x" * size)).text
    assert len(text.encode()) <= MAX_ERROR_BYTES
    assert text.endswith(TRUNCATED) == (size + 12 > MAX_ERROR_BYTES)


@pytest.mark.parametrize("char", ["x", "ü", "…", "😀", "\0", "\ud800", "\x1b"])
def test_50_megabytes_are_cut_before_they_are_processed(char: str) -> None:
    """RELIABILITY D4."""
    for error in (ValueError(char * 50_000_000), ValueError(char * 10_000_000, 1), ValueError([char] * 5_000_000)):
        started = time.monotonic()
        text = describe(error).text
        assert time.monotonic() - started < 1
        assert storable(text)
        if len(error.args) == 1 and isinstance(error.args[0], str):
            assert text.endswith("…[truncated]")


def test_huge_bytes_are_cut_too() -> None:
    """RELIABILITY D4."""
    started = time.monotonic()
    text = describe(ValueError(b"\xff" * 50_000_000)).text
    assert time.monotonic() - started < 1
    assert text.endswith(TRUNCATED) and storable(text)


def test_what_postgres_or_a_terminal_chokes_on_is_escaped() -> None:
    """NUL and lone surrogates cannot be stored, escape codes must not reach a terminal (DLQ-1, S22)."""
    text = describe(ValueError("a\0b\ud800c\x1b[31m\r\n\t\x85ü")).text
    assert text == "ValueError: a\\x00b\\ud800c\\x1b[31m\\x0d\n\t\\x85ü"


@pytest.mark.parametrize("error", [Unreadable(), LyingText(), Unreadable(Unreadable()), ValueError(Unreadable(), 1)])
def test_an_error_that_cannot_be_read_is_still_described(error: Exception) -> None:
    """RELIABILITY D4: repr raises."""
    report = describe(error)
    assert type(error).__qualname__ in report.type_name
    assert storable(report.text)


def test_an_unreadable_error_in_a_chain_does_not_hide_the_rest() -> None:
    """RELIABILITY D4."""
    error = ValueError("outer")
    error.__cause__ = Unreadable()
    error.__cause__.__cause__ = KeyError("inner")
    first, middle, last = describe(error).text.splitlines()
    assert (first, last) == ("ValueError: outer", "caused by KeyError: 'inner'")
    assert "unreadable: SystemExit" in middle


def test_cycles_and_long_chains_are_bounded() -> None:
    """RELIABILITY D4: a cycle of 10,000 causes."""
    links: list[BaseException] = [ValueError(f"link {number}") for number in range(10_000)]
    for number, link in enumerate(links):
        link.__cause__ = links[(number + 1) % len(links)]
    lines = describe(links[0]).text.splitlines()
    assert lines[0] == "ValueError: link 0" and lines[-1] == "… and more causes"
    assert len(lines) == 11
    for link in links:
        link.__cause__ = None
    lonely = ValueError("me")
    lonely.__cause__ = lonely
    assert describe(lonely).text == "ValueError: me"


@given(st.text() | st.binary() | st.lists(st.text()) | st.floats(), st.text(), st.none() | st.just(str.upper))
def test_any_error_becomes_storable_text(message: Any, cause: str, redact: Any) -> None:
    """Describe never raises and is bounded, for arbitrary text (DLQ-1)."""
    error = ValueError(message)
    error.__cause__ = type("Odd", (Exception,), {"__module__": cause})(cause * 500)
    report = describe(error, redact)
    assert storable(report.text) and storable(report.type_name) and storable(report.signature)
    assert len(report.signature) < 256


@given(st.text(max_size=100).map(lambda text: text * 300))
def test_a_bounded_text_is_a_fixed_point(text: str) -> None:
    """What was stored once can be stored again, unchanged (DLQ-1)."""
    once = bound(text)
    assert storable(once)
    assert bound(once) == once


# --- redaction


SECRET = "hunter2-" * 5


def redact(text: str) -> str:
    return text.replace(SECRET, "***")


def test_the_redactor_sees_the_whole_text() -> None:
    """Causes included, before anything is stored (DLQ-1, D5)."""
    error = ValueError(f"login {SECRET}")
    error.__cause__ = ConnectionError(f"postgres://u:{SECRET}@db")
    assert describe(error, redact).text == ("ValueError: login ***\ncaused by ConnectionError: postgres://u:***@db")


@pytest.mark.parametrize("length", range(8_120, 8_200))
def test_a_secret_across_the_cut_does_not_leak_in_part(length: int) -> None:
    """RELIABILITY D5."""
    text = describe(ValueError("x" * length + SECRET + "y" * 100_000), redact).text
    assert "hunter" not in text and text.endswith(TRUNCATED)


def test_a_text_that_was_cut_says_so_even_when_redaction_shortens_it() -> None:
    """DLQ-1."""
    assert describe(ValueError("x" * 1_000_000), lambda _: "short").text == "short…[truncated]"


@pytest.mark.parametrize("fault", [lambda _: None, lambda _: b"x", lambda text: text.nothing, lambda _: exit()])
def test_a_redactor_that_fails_withholds_the_text(fault: Any) -> None:
    """RELIABILITY D5: storing it unredacted would be the leak the redactor is there to prevent."""
    report = describe(ValueError("hunter2"), fault)
    assert "hunter2" not in report.text and "withheld" in report.text
    assert report.type_name == "ValueError"


def test_a_validation_error_does_not_quote_the_payload() -> None:
    """RELIABILITY S7."""

    class Payment(BaseModel):
        card: int
        lines: list[int]

    with pytest.raises(ValidationError) as caught:
        Payment.model_validate({"card": "canary-4242", "lines": [1, "canary"]})
    text = describe(caught.value).text
    assert "canary" not in text
    assert text.splitlines()[0].endswith("ValidationError: 2 invalid in Payment: card, lines.1")
    assert "  lines.1: Input should be a valid integer" in text


def test_the_parameters_of_a_statement_are_not_stored() -> None:
    """RELIABILITY S7."""
    error = sqlalchemy.exc.IntegrityError("INSERT …", {"card": "canary"}, Exception("duplicate key"))
    assert "canary" in str(error)
    text = describe(error).text
    assert "canary" not in text and "duplicate key" in text and "INSERT" not in text


# --- signatures


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("order 17 is unknown", "order 4711 is unknown"),
        ("took 1.5 s", "took 22.75 s"),
        ("at 2026-01-01T10:00:00", "at 2027-12-31T23:59:59"),
        ("no 01890a5d-ac96-774b-bcce-b302099a8057", "no 6f1c9a52-8f55-4b1c-9a55-2f54ad0c1a10"),
        ("<Order object at 0x7f00aa>", "<Order object at 0x7fffbb00>"),
        ("digest 9f86d081884c7d65", "digest 60303ae22b998861"),
        ("connect 10.0.0.1:5432 failed", "connect 192.168.1.77:6432 failed"),
        ("mail ann@example.com bounced", "mail bob.b@test.example.org bounced"),
        ("no file /var/lib/a/b.txt", "no file /srv/c.log"),
        ("GET https://api.example.com/a?b=1 failed", "GET https://other.example.com/ failed"),
        ("can't find 'apple' here", "can't find 'pear tree' here"),
        ('unknown sku "A-1"', 'unknown sku "B 9"'),
        ("unknown sku “A-1”", "unknown sku “Bee”"),
        ("Key (email)=(ann) already exists", "Key (email)=(bob b) already exists"),
        ("no charge ch_3OaBcD2eZvKYlo2C", "no charge ch_1Fq9XyZvKYlopQr7"),
        ("no order 01ARZ3NDEKTSV4RRFFQ69G5FAV", "no order 01BX5ZZKBKACTAV9WEVGEMMVRZ"),
        ("connect [fe80::1ff:fe23:4567:890a] failed", "connect [2001:db8::1] failed"),
        ("at 10:00:00", "at 23:59:59.5"),
        ("two  spaces\nand a line", "two spaces and a line"),
    ],
)
def test_errors_that_differ_only_in_values_have_one_signature(one: str, other: str) -> None:
    """DLQ-5."""
    assert describe(ValueError(one)).signature == describe(ValueError(other)).signature


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (ValueError("order is unknown"), ValueError("order is closed")),
        (ValueError("order is unknown"), KeyError("order is unknown")),
        (ValueError("card declined"), ValueError("card expired")),
        (ValueError("deadbeef"), ValueError("facade")),
        (ValueError("HTTP2_PROTOCOL_ERROR"), ValueError("HTTP2_INTERNAL_ERROR")),
    ],
)
def test_errors_of_different_kinds_have_different_signatures(one: Exception, other: Exception) -> None:
    """DLQ-5."""
    assert describe(one).signature != describe(other).signature


def test_a_signature_is_the_type_and_16_hex_digits() -> None:
    """Stable between processes and releases, because it is stored (DLQ-5)."""
    assert signature("ValueError: order 17 is unknown", "ValueError") == "ValueError:ccc1cb28da3bb57a"


@pytest.mark.parametrize("text", ["a", "1", "a.", "'", "/", "a@", "0x", "-", "a-", "://", '"', "a:/"])
def test_no_text_makes_the_signature_slow(text: str) -> None:
    """RELIABILITY D4: the expressions stay linear on what fills 8 KiB."""
    started = time.process_time()
    signature(text * (MAX_ERROR_BYTES // len(text)), "E")
    assert time.process_time() - started < 0.1


# --- cycles


def test_a_failure_cycle_reads_what_a_replay_wrote() -> None:
    """DLQ-3."""
    cycle = FailureCycle.model_validate_json(
        '{"attempts": 5, "last_error": "boom", "first_failed_at": "2026-04-25T12:00:00+00:00",'
        ' "failed_at": "2026-04-25T12:00:31.5+00:00", "generation": 3, "replayed_by": "sql-direct",'
        ' "replayed_at": "2026-04-26T08:00:00+00:00", "added_later": true}'
    )
    assert cycle == FailureCycle(
        attempts=5,
        last_error="boom",
        first_failed_at=datetime(2026, 4, 25, 12, tzinfo=UTC),
        failed_at=datetime(2026, 4, 25, 12, 0, 31, 500_000, tzinfo=UTC),
        generation=3,
        replayed_by="sql-direct",
        replayed_at=datetime(2026, 4, 26, 8, tzinfo=UTC),
    )


def test_the_fields_of_a_cycle_are_only_ever_added() -> None:
    """An entry without what came later can still be read (DLQ-3)."""
    assert set(FailureCycle.model_fields) >= {
        "attempts",
        "last_error",
        "first_failed_at",
        "failed_at",
        "generation",
        "replayed_by",
        "replayed_at",
    }
    assert FailureCycle.model_validate({"attempts": 1, "generation": 0}).last_error is None


def test_the_reasons_are_a_closed_set() -> None:
    """DLQ-1."""
    assert FailureReason.__args__ == ("max_deliveries", "retry_terminal", "rejected", "cancelled", "expired")  # type: ignore[attr-defined]


def test_a_group_in_a_group_shows_what_has_happened() -> None:
    """A task group in a task group: the error that matters is the innermost (OBS-1)."""
    inner = ExceptionGroup("unhandled errors in a TaskGroup", [ValueError("bad amount"), KeyError("customer")])
    report = describe(ExceptionGroup("unhandled errors in a TaskGroup", [inner, OSError("no disk")]))
    assert report.text.splitlines()[1:] == [
        "  - ValueError: bad amount",
        "  - KeyError: 'customer'",
        "  - OSError: no disk",
    ]
