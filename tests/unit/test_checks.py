"""Checks of numbers, moments and texts: the value, or an error that names field, problem and remedy."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from enum import IntEnum
from typing import Any

import pytest

from holdfast.checks import LARGEST, line, moment, number, one_of, quoted, text, whole
from holdfast.errors import ConfigurationError, FieldError


class Level(IntEnum):
    LOW = 2


def problem(check: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        check("grace", *arguments, **options)
    assert caught.value.field == "grace"
    return f"{caught.value.problem}; {caught.value.remedy}"


def test_whole_numbers() -> None:
    assert [whole("grace", value, 1, 5) for value in (1, 5, Level.LOW)] == [1, 5, 2]
    assert whole("grace", LARGEST) == LARGEST
    for value in (0, 6, True, 1.0, "1", None, math.nan):
        assert problem(whole, value, 1, 5) == f"is {value!r}; give a whole number from 1 to 5"
    assert problem(whole, -1) == "is -1; give a whole number of 0 or more"
    assert problem(whole, 0, 1, 10_000) == "is 0; give a whole number from 1 to 10,000"
    assert problem(whole, 9, 0, 2, remedy="use 0, 1 or 2") == "is 9; use 0, 1 or 2"
    assert "a value of type int" in problem(whole, 10**5_000)


def test_numbers() -> None:
    assert (number("grace", 1, 0.5, 5), number("grace", 0.5, 0.5, 5)) == (1.0, 0.5)
    for value in (0.4, 5.1, True, "1", None, math.nan, math.inf):
        assert problem(number, value, 0.5, 5) == f"is {value!r}; give a number from 0.5 to 5"
    assert problem(number, -1, 0, 315_619_200.0) == "is -1; give a number from 0 to 315,619,200"


def test_choices() -> None:
    one_of("grace", "all", ("all", "none"))
    assert problem(one_of, "some", ("all", "none")) == "is 'some', which is unknown; use one of all, none"
    assert problem(one_of, ["all"], ("all", "none")) == "is ['all'], which is unknown; use one of all, none"


def test_moments() -> None:
    now = datetime.now(UTC)
    assert moment("grace", now) is now
    assert "not datetime" in problem(moment, "2026-01-31")
    assert "time zone" in problem(moment, now.replace(tzinfo=None))
    assert "years 1 to 9999" in problem(moment, datetime.max.replace(tzinfo=UTC))


def test_texts_and_lines() -> None:
    assert (text("grace", "a b/c"), line("grace", "a b/c")) == ("a b/c", "a b/c")
    for value in ("", "a\0b", "a\nb", "\x85", "\udc80", "x" * 256, None):
        problem(text, value)
        problem(line, value)
    assert "201 characters" in problem(text, "x" * 201, 200)
    assert "more than 200 bytes" in problem(line, "ü" * 101)


def test_the_error_is_of_the_class_that_the_caller_names() -> None:
    with pytest.raises(FieldError):
        whole("priority", 9, 0, 2, error=FieldError)


def test_quotations_are_short_and_plain() -> None:
    class Silent:
        def __repr__(self) -> str:
            raise RuntimeError

    assert quoted("ü\x1b") == r"'\xfc\x1b'"
    assert len(quoted("x" * 1_000)) == 81
    assert quoted(Silent()) == "a value of type Silent"
