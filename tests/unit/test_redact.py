"""RELIABILITY S8: the password of a connection string never survives."""

from __future__ import annotations

import time
from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.redact import redact_dsn


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("postgresql://u:pw@h:5432/db?sslmode=require", "postgresql://u:***@h:5432/db?sslmode=require"),
        ("postgres://:pw@h/db", "postgres://:***@h/db"),
        ("postgresql+asyncpg://u:pw@h/db", "postgresql+asyncpg://u:***@h/db"),
        ("postgresql://u:p%40w@h/db", "postgresql://u:***@h/db"),
        ("postgresql://u:p@w#x/y?z@h/db", "postgresql://u:***@h/db"),
        ("postgresql://u:two words@h/db", "postgresql://u:***@h/db"),
        ("postgresql://me@azure:pw@h/db", "postgresql://me@azure:***@h/db"),
        ("postgresql://u@h/db?password=pw&x=1", "postgresql://u@h/db?password=***&x=1"),
        ("postgresql://h/db?user=u&password=p@w#1", "postgresql://h/db?user=u&password=***"),
        ("postgresql://h/db?x=1&sslpassword=pw", "postgresql://h/db?x=1&sslpassword=***"),
        ("postgresql://h/db?pass%77ord=pw", "postgresql://h/db?pass%77ord=***"),
        ("postgresql://h/db?PASSWORD=pw", "postgresql://h/db?PASSWORD=***"),
        ("host=h password=pw dbname=d", "host=h password=*** dbname=d"),
        ("password = 'it\\'s two' host=h", "password = *** host=h"),
        ("password='never closed host=h", "password=***"),
        ("password='ends in \\", "password=***"),
        ("host=h sslpassword=pw", "host=h sslpassword=***"),
        ("password=two\\ words host=h", "password=*** host=h"),
        ("PGPASSWORD=pw psql", "PGPASSWORD=*** psql"),
        ("connect(host='h', password='pw')", "connect(host='h', password=***"),
        ('{"password": "pw"}', '{"password": ***'),
        ("postgresql://u:forgot_the_host", "postgresql://u:***"),
        ("postgresql//u:pw@h/db", "postgresql//u:***@h/db"),
        ("postgres:/u:pw@h/db", "postgres:***@h/db"),
        ("u:pw@h/db", "u:***@h/db"),
        ("cannot reach postgresql://u:pw@h/db: refused", "cannot reach postgresql://u:***@h/db: refused"),
    ],
)
def test_the_password_is_hidden_and_the_rest_still_helps(text: str, expected: str) -> None:
    """Every form in which a DSN can be written, and misspelt (S8)."""
    assert redact_dsn(text) == expected
    assert redact_dsn(expected) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "postgresql://u@h:5432/db",
        "postgresql://h:5432,h2:5433/db",
        "postgresql://[::1]:5432/db",
        "postgresql:///db?host=/run/postgresql",
        "host=h dbname=d user=u",
        'password authentication failed for user "u"',
        "could not connect: timeout after 5 s",
    ],
)
def test_text_without_a_password_is_left_alone(text: str) -> None:
    assert redact_dsn(text) == text


SECRET = "S3cr3tCanary"
_user = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
_raw = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=12)
_unspaced = _raw.map(lambda text: "".join(c for c in text if not c.isspace()))


def _around(edges: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.tuples(edges, edges).map(lambda pair: f"{pair[0]}{SECRET}{pair[1]}")


@given(_user, _around(_raw))
def test_no_raw_password_survives_in_a_uri(user: str, password: str) -> None:
    """'@', '#', '/', '?', quotes and spaces in the password, encoded by nobody (S8)."""
    assert SECRET not in redact_dsn(f"postgresql://{user}:{password}@db.example:5432/shop?sslmode=require")


@given(_user, _around(_raw))
def test_no_encoded_password_survives_in_a_uri(user: str, password: str) -> None:
    encoded = quote(password, safe="")
    assert SECRET not in redact_dsn(f"error: postgresql://{user}:{encoded}@h/db failed")
    assert SECRET not in redact_dsn(f"postgresql://{user}@h/db?password={encoded}&sslmode=require")
    assert SECRET not in redact_dsn(f"postgresql://{user}@h/db?a=1&sslpassword={encoded}")


@given(_around(_unspaced.map(lambda text: text.replace("&", ""))))
def test_no_raw_password_survives_in_a_query(password: str) -> None:
    assert SECRET not in redact_dsn(f"postgresql://h/db?user=u&password={password}")


@given(_around(_raw))
def test_no_password_survives_in_keyword_form(password: str) -> None:
    quoted = password.replace("\\", "\\\\").replace("'", "\\'")
    assert SECRET not in redact_dsn(f"host=h password='{quoted}' dbname=d")
    escaped = "".join("\\" + c if c.isspace() or c in "\\'" else c for c in password)
    assert SECRET not in redact_dsn(f"host=h password={escaped} dbname=d")


@given(_user, _around(_unspaced.map(lambda text: text.replace("@", ""))))
@example("_", f"//{SECRET}")
@example("a", f"//{SECRET}")
def test_no_password_survives_a_forgotten_host_or_scheme(user: str, password: str) -> None:
    if not password[0].isdigit():  # postgresql://name:5432/… is a host and a port
        assert SECRET not in redact_dsn(f"postgresql://{user}:{password}")
    assert SECRET not in redact_dsn(f"{user}:{password}@h/db")


@given(st.text(max_size=200))
def test_any_text_is_survived(text: str) -> None:
    redact_dsn(text)


def test_long_text_takes_no_time() -> None:
    """No input makes it backtrack for ever (S9)."""
    pieces = ("a://", ",a:", "a:", "?a=", "&", "a@", "\\", "password='", 'password="', "password=\\")
    started = time.monotonic()
    for piece in pieces:
        redact_dsn(piece * 20_000)
        redact_dsn("@ " + (piece * 20_000)[:16_000])
    assert time.monotonic() - started < 20


def test_long_text_is_cut_before_a_word_that_may_be_half_a_password() -> None:
    text = "x" * 16_000 + " u:" + SECRET * 100 + "@h"
    assert redact_dsn(text) == "x" * 16_000 + " …[truncated]"


@pytest.mark.newcomer
def test_a_text_without_spaces_is_cut_and_not_lost() -> None:
    """base64 or JSON in an error; half a password at the cut is not shown, a whole one is hidden (S9)."""
    assert redact_dsn("x" * 20_000) == "x" * 8_192 + " …[truncated]"
    assert redact_dsn("short " + "x" * 20_000) == ("short " + "x" * 20_000)[:8_192] + " …[truncated]"
    for before in ("x" * 16_380 + "/", "x" * 12_000 + "/"):
        text = redact_dsn(f"{before}u:{SECRET}@h" + "y" * 20_000)
        assert SECRET[:5] not in text and len(text) > 4_000
