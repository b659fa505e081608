"""What whoever starts or mounts a console decides about it."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from holdfast.access.principal import Role
from holdfast.access.redaction import Redactor
from holdfast.checks import function, line, number, text
from holdfast.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleSettings:
    """Settings of a console. Their names are those of the options of `holdfast console`."""

    environment: str | None = None  # its name is shown on every page, and in every dangerous button
    allowed_hosts: tuple[str, ...] = ()  # answered beside localhost and, on loopback, its addresses
    trace_url: str | None = None  # https://…{trace_id}…: where a trace is looked at
    secret: str | None = None  # signs the cookies; processes that share it share their sessions
    values_from: Role = Role.OPERATOR  # the lowest role that sees the values of payloads without asking
    redact: Redactor | None = None
    interval: float = 2.0  # seconds between snapshots, while somebody watches
    https: bool = False  # browsers reach it by https, also where a proxy speaks http with it

    def __post_init__(self) -> None:
        if self.environment is not None:
            line("environment", self.environment, 60)
        for host in self.allowed_hosts:
            text("allowed_hosts", host)
        if self.trace_url is not None and (
            urlsplit(self.trace_url).scheme != "https" or "{trace_id}" not in self.trace_url
        ):
            raise ConfigurationError(
                "trace_url", "is not an https address with {trace_id}", "write https://traces.example/trace/{trace_id}"
            )
        if self.secret is not None and len(text("secret", self.secret, 1_000)) < 32:
            raise ConfigurationError("secret", "has fewer than 32 characters", "openssl rand -base64 32 makes one")
        if self.redact is not None:
            function("redact", self.redact, "pass a function of principal, event type and value")
        number("interval", self.interval, 0.2, 60)
