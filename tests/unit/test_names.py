"""The rules for names: each stands once, and says what to write instead."""

import re
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.errors import ConfigurationError, FieldError, HandlerNameError
from holdfast.names import channel_name, event_name, event_pattern, handler_name, schedule_name, schema_name


@pytest.mark.parametrize("name", ["billing.charge_card", "a.b", "platform.cards.v2_projection", "a." + "b" * 198])
def test_a_name_with_a_domain_context_is_returned(name: str) -> None:
    """Handlers and schedules have such names (ENV-2)."""
    assert handler_name(name) == schedule_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "charge_card",
        "Billing.charge",
        "billing.",
        ".charge",
        "billing..charge",
        "billing.1st",
        "billing.charge card",
        "billing.charge\n",
        "billing/charge",
        "billing.chärge",
        "a." + "b" * 199,
        None,
        b"billing.charge",
    ],
)
def test_any_other_name_is_refused_with_what_to_write(name: str) -> None:
    """A clear error (ENV-2)."""
    with pytest.raises(HandlerNameError, match=r"billing\.charge_card") as caught:
        handler_name(name)
    assert caught.value.field == "handler_name"
    assert isinstance(caught.value, ConfigurationError)


def test_a_schedule_has_a_remedy_of_its_own() -> None:
    """IDM-4."""
    with pytest.raises(ConfigurationError, match=r"schedule .*<schedule>.*reports\.daily"):
        schedule_name("daily")


@pytest.mark.parametrize("name", ["", "a b", "a/b", "a*", "a\n", "x" * 201, "ü" * 101, 7, None, "\ud800", "a\u2028b"])
def test_event_names_are_checked(name: Any) -> None:
    """Types, sources, targets and content classes have one rule, wherever they are passed (ENV-1)."""
    with pytest.raises(ConfigurationError) as caught:
        event_name("source", name)
    assert (caught.value.field, bool(caught.value.remedy)) == ("source", True)
    with pytest.raises(FieldError):
        event_name("source", name, error=FieldError)


@pytest.mark.parametrize(
    ("field", "example"),
    [
        ("event_type", "order.placed"),
        ("source", "shop"),
        ("NewEvent.target", "billing"),
        ("content_class", "operations"),
    ],
)
def test_the_remedy_has_an_example_of_such_a_name(field: str, example: str) -> None:
    """ENV-1."""
    with pytest.raises(ConfigurationError, match=f"like {example}$"):
        event_name(field, "My Shop")


@pytest.mark.parametrize("length", [201, 256])
def test_one_limit_is_named_for_long_names(length: int) -> None:
    """ENV-1."""
    with pytest.raises(ConfigurationError, match=f"has {length} characters, 200 are allowed"):
        event_name("event_type", "x" * length)


def test_patterns_are_event_names_with_a_star() -> None:
    """LSN-5."""
    assert event_pattern("handler", "order.*") == "order.*"
    with pytest.raises(ConfigurationError, match="order"):
        event_pattern("handler", "order placed")


@pytest.mark.parametrize("check", [lambda name: channel_name("channel", name), schema_name])
@pytest.mark.parametrize("name", ["", "A", "1st", "a-b", 'a"b', "a" * 64, "a\x00", "a\n", 7, None])
def test_identifiers_need_no_quotation_marks(check: Any, name: Any) -> None:
    """S5."""
    with pytest.raises(ConfigurationError, match="of a-z, 0-9 and _, not starting with a digit"):
        check(name)
    assert check("outbox_default") == "outbox_default"


def test_a_rule_about_names_stands_once() -> None:
    """A pattern that is written twice is changed once."""
    root = Path(holdfast.__file__).parent
    patterns = [re.escape(text) for text in ("[a-z][a-z0-9_]*(", "[a-z_][a-z0-9_]", "[^/*\\s]")]
    found = [
        f"{path.relative_to(root)}: {line.strip()}"
        for path in sorted(root.rglob("*.py"))
        for line in path.read_text().splitlines()
        if re.search("|".join(patterns), line) and "-- name:" not in line
    ]
    assert [line.partition(":")[0] for line in found] == ["names.py", "names.py"], found
