"""Secrets and settings of idempotency are judged where they are given, not by the first request (IDM-1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI

from holdfast.errors import ConfigurationError
from holdfast.idempotency import Commands, IdempotencyMiddleware, exchange_of
from holdfast.integrations.fastapi import Idempotency

pytestmark = pytest.mark.newcomer

SECRET = {1: "0123456789abcdef"}
CONSTRUCTORS: dict[str, Callable[..., object]] = {
    "FastAPI": lambda secrets=SECRET, settings=None, connect=dict: Idempotency(
        connect, secrets, scope=str, settings=settings
    ),
    "ASGI": lambda secrets=SECRET, settings=None, connect=dict: IdempotencyMiddleware(
        FastAPI(), connect, secrets, settings
    ),
    "Commands": lambda secrets=SECRET, settings=None, connect=None: Commands(secrets, settings),
}
each = pytest.mark.parametrize("make", CONSTRUCTORS.values(), ids=CONSTRUCTORS)


@each
def test_a_short_secret_is_refused_by_the_constructor(make: Callable[..., object]) -> None:
    make()
    for short in ({1: "short"}, {1: b"x" * 15}, {1: "x" * 16, 2: ""}):
        with pytest.raises(ConfigurationError, match="too short; use 16 bytes or more"):
            make(short)
    wrong: tuple[Any, ...] = ({}, None, "0123456789abcdef", ["0123456789abcdef"], {0: "x" * 16}, {1: 17}, {1: None})
    for secrets in wrong:
        with pytest.raises(ConfigurationError, match=r"^secrets"):
            make(secrets)


@each
def test_wrong_settings_are_refused_by_the_constructor(make: Callable[..., object]) -> None:
    for wrong in ("core", 1, {"keep": 60}, []):
        with pytest.raises(ConfigurationError, match=r"settings is .*, not IdempotencySettings"):
            make(settings=wrong)


def test_a_connection_in_place_of_a_function_is_refused() -> None:
    for name in ("FastAPI", "ASGI"):
        with pytest.raises(ConfigurationError, match=r"connect is .*pool\.acquire"):
            CONSTRUCTORS[name](connect="postgresql://h/db")
    with pytest.raises(ConfigurationError, match="scope is str, not a function"):
        Idempotency(dict, SECRET, scope="tenant")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="add IdempotencyMiddleware"):
        exchange_of("scope")  # type: ignore[arg-type]
