"""The middleware: it reads the settings once, and runs every request in an exchange."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from django.core.exceptions import BadRequest, ImproperlyConfigured, PermissionDenied, SuspiciousOperation
from django.core.signals import got_request_exception
from django.db import connections
from django.http import Http404
from django.http.multipartparser import MultiPartParserError
from django.utils.module_loading import import_string

from holdfast.errors import ConfigurationError
from holdfast.idempotency.hashing import Secrets
from holdfast.idempotency.settings import IdempotencySettings
from holdfast.integrations.django.configuration import setting
from holdfast.integrations.django.exchange import ATTRIBUTE, DjangoConfig, DjangoExchange
from holdfast.observability.logging import log_fact
from holdfast.observing import DirectObservers
from holdfast.postgres.idempotency import Records
from holdfast.tracing import require_tracing

_SETTING = "HOLDFAST_IDEMPOTENCY"
_KNOWN = {each.name.upper() for each in fields(IdempotencySettings)}
# Django answers these with 4xx: they are the view's own errors, whatever their cause.
_REFUSALS = (Http404, PermissionDenied, BadRequest, SuspiciousOperation, MultiPartParserError)


class IdempotencyMiddleware:
    """Django middleware. Its place is after authentication, and before all middleware that changes responses."""

    sync_capable = True
    async_capable = False

    def __init__(self, get_response: Callable[[Any], Any]) -> None:
        self.get_response = get_response
        self._config = configured()

    def __call__(self, request: Any) -> Any:
        if request.method not in self._config.settings.methods:
            return self.get_response(request)
        return DjangoExchange(self._config, self.get_response, request).run()

    def process_exception(self, request: Any, exception: Exception) -> None:
        """Judge an error of the view here: afterwards Django makes a response of it."""
        if not isinstance(exception, _REFUSALS):
            _failed(request, exception)


def _failed(request: Any, exception: BaseException | None) -> None:
    exchange = getattr(request, ATTRIBUTE, None)
    if isinstance(exchange, DjangoExchange) and exception is not None:
        exchange.failed(exception)


def _on_request_exception(request: Any = None, **_: Any) -> None:
    """Judge an error of another middleware, for which Django calls no `process_exception`."""
    _failed(request, sys.exception())


got_request_exception.connect(_on_request_exception)


def user_of(request: Any) -> str | None:
    """Return the default scope: the id of the user who is logged in."""
    user = getattr(request, "user", None)
    return str(user.pk) if user is not None and user.is_authenticated else None


def configured() -> DjangoConfig:
    """Read the setting `HOLDFAST_IDEMPOTENCY`; raises ImproperlyConfigured."""
    return _config(setting(_SETTING, '{"SECRETS": {1: "..."}}'))


def _config(options: dict[str, Any]) -> DjangoConfig:
    try:
        secrets = Secrets(options.pop("SECRETS", {}))
        scope = _imported("SCOPE", options.pop("SCOPE", user_of))
        for name in ("CONNECT_WITHIN", "COMMIT_WITHIN"):
            if name in options:
                remedy = "set connect_timeout, tcp_user_timeout and keepalives in the OPTIONS of DATABASES"
                raise ConfigurationError(name, "does not apply: Django opens the connection", remedy)
        using, observe = options.pop("USING", "default"), _imported("OBSERVE", options.pop("OBSERVE", log_fact))
        if using not in connections:
            raise ConfigurationError("USING", f"is {using!r}, which is not in DATABASES", "name one of them")
        tracing = require_tracing(_imported("TRACING", options.pop("TRACING", None)))
        if unknown := sorted(set(options) - _KNOWN):
            raise ConfigurationError(unknown[0], "is unknown", "docs/http.md lists the settings, in small letters")
        chosen = IdempotencySettings(**{name.lower(): value for name, value in options.items()})
    except (ConfigurationError, TypeError) as error:
        raise ImproperlyConfigured(f"{_SETTING}: {error}") from error
    return DjangoConfig(
        secrets=secrets,
        settings=chosen,
        records=Records(chosen.schema),
        observe=DirectObservers((observe,), log_fact),
        tracing=tracing,
        scope=scope,
        using=using,
    )


def _imported(name: str, value: Any) -> Any:
    """Return what a setting names, or is."""
    if not isinstance(value, str):
        return value
    try:
        return import_string(value)
    except ImportError as error:
        raise ConfigurationError(name, f"is {value!r}, and {error}", "write package.module.function") from error
