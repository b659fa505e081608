"""Logging in with OpenID Connect: the authorisation code flow with PKCE, state and nonce, through authlib."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from holdfast.access.principal import Principal, Role
from holdfast.access.provider import Asking
from holdfast.access.sessions import LoggedIn
from holdfast.checks import line
from holdfast.errors import ConfigurationError, RemediedError
from holdfast.installing import require_extra

require_extra("oidc", "authlib")
require_extra("oidc", "httpx")

import httpx
from authlib.common.security import generate_token
from authlib.integrations.httpx_client import AsyncOAuth2Client
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

_ALGORITHMS: Final = ["RS256", "RS384", "RS512", "PS256", "ES256", "ES384", "EdDSA"]  # never none, never HMAC
_TIMEOUT: Final = 10.0
_KEPT_FOR: Final = 3_600.0
_LEEWAY: Final = 60


class LoginFailed(RemediedError):
    """The provider of identities has not said who it is."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A login that has begun: where to send the browser, and what to remember until it comes back."""

    url: str
    state: str
    nonce: str
    verifier: str


@dataclass(slots=True)
class Oidc:
    """An OpenID provider. `roles` are by the values of the claim `role_claim`; who has none of them gets `default`."""

    issuer: str
    client_id: str
    client_secret: str | None = None
    name: str = "your organisation"
    name_claim: str = "email"
    role_claim: str = "groups"
    roles: Mapping[str, Role] = field(default_factory=dict)
    default: Role | None = None  # None: they are not let in
    scope: str = "openid email profile"
    has_login: bool = field(default=True, init=False)
    _metadata: tuple[float, dict[str, Any], Any] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.issuer)
        local = parts.hostname in ("localhost", "127.0.0.1", "::1")
        if parts.scheme != "https" and not (parts.scheme == "http" and local):
            raise ConfigurationError("issuer", "is not an https address", "write https://login.example.com/realm")

    @property
    def oidc_name(self) -> str:
        """How the button of the login page names it."""
        return self.name

    async def principal(self, asking: Asking) -> Principal | None:
        """Nobody: who has logged in has a session."""
        return None

    def current(self, session: LoggedIn) -> Principal | None:
        """Return who a session is of: what the provider of identities said when it began."""
        return session.principal if session.way == "oidc" else None

    async def begin(self, redirect_uri: str) -> Begun:
        """Return where a browser logs in."""
        metadata, _ = await self._discovered()
        state, nonce, verifier = generate_token(32), generate_token(32), generate_token(64)
        async with self._client(redirect_uri) as client:
            url, _ = client.create_authorization_url(
                metadata["authorization_endpoint"], state=state, nonce=nonce, code_verifier=verifier
            )
        return Begun(url, state, nonce, verifier)

    async def finish(self, redirect_uri: str, code: str, *, nonce: str, verifier: str) -> Principal:
        """Return who has come back with a code; the state has been compared by then."""
        metadata, keys = await self._discovered()
        try:
            async with self._client(redirect_uri) as client:
                token = await client.fetch_token(
                    metadata["token_endpoint"], code=code, code_verifier=verifier, grant_type="authorization_code"
                )
            claims = jwt.decode(str(token.get("id_token", "")), keys, algorithms=_ALGORITHMS).claims
            jwt.JWTClaimsRegistry(
                leeway=_LEEWAY,
                iss={"essential": True, "value": metadata["issuer"]},
                aud={"essential": True, "value": self.client_id},
                exp={"essential": True},
                nonce={"essential": True, "value": nonce},
            ).validate(claims)
        except Exception as error:  # of the provider, of authlib, of its HTTP client: whatever it is, nobody is let in
            raise LoginFailed(f"the login was not confirmed: {type(error).__name__}", "log in again") from None
        return self._principal(claims)

    def _principal(self, claims: Mapping[str, Any]) -> Principal:
        # Some say it as text.
        verified = str(claims.get("email_verified", True)).lower() == "true"
        if self.name_claim == "email" and claims.get("email") and not verified:
            raise LoginFailed("the e-mail address is not verified", "verify it there, and log in again")
        try:
            name = line("name", claims.get(self.name_claim) or claims.get("sub"))
        except ConfigurationError:
            raise LoginFailed("the identity has no usable name", f"let it have the claim {self.name_claim}") from None
        given = claims.get(self.role_claim) or ()
        values = [given] if isinstance(given, str) else [each for each in given if isinstance(each, str)]
        found = [self.roles[value] for value in values if value in self.roles]
        role = max(found) if found else self.default
        if role is None:
            raise LoginFailed(f"{name} has no role here", "ask an administrator for one")
        return Principal(name, role)

    async def _discovered(self) -> tuple[dict[str, Any], Any]:
        """Return what the issuer says of itself, and its keys; read again every hour."""
        now = time.monotonic()
        if self._metadata is not None and now - self._metadata[0] < _KEPT_FOR:
            return self._metadata[1], self._metadata[2]
        address = self.issuer.rstrip("/") + "/.well-known/openid-configuration"
        try:
            async with httpx.AsyncClient(timeout=_TIMEOUT) as client:
                metadata = (await client.get(address)).raise_for_status().json()
                keys = (await client.get(metadata["jwks_uri"])).raise_for_status().json()
            if metadata["issuer"].rstrip("/") != self.issuer.rstrip("/"):
                raise ValueError("another issuer")
            imported = KeySet.import_key_set(keys)
        except (httpx.HTTPError, JoseError, ValueError, KeyError, AttributeError) as error:
            raise LoginFailed(
                f"{self.issuer} cannot be asked: {type(error).__name__}", "try again; check the issuer's address"
            ) from None
        self._metadata = (now, metadata, imported)
        return metadata, imported

    def _client(self, redirect_uri: str) -> Any:
        return AsyncOAuth2Client(
            self.client_id,
            self.client_secret,
            scope=self.scope,
            redirect_uri=redirect_uri,
            code_challenge_method="S256",
            timeout=_TIMEOUT,
            token_endpoint_auth_method="client_secret_basic" if self.client_secret else "none",
        )
