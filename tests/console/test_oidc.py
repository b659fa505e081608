"""Logging in with OpenID Connect, at a small provider of our own that can also lie."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import socket
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
import uvicorn
from joserfc import jwt
from joserfc.jwk import RSAKey
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from holdfast.access.oidc import Oidc
from holdfast.access.principal import Role
from holdfast.console import Console
from holdfast.errors import ConfigurationError
from tests.console.conftest import Browser

Consoles = Callable[..., Console]


class FakeProvider:
    """A provider on loopback. `claims` replace what it would say; `key` what it would sign with."""

    def __init__(self, claims: dict[str, Any] | None = None, key: RSAKey | None = None) -> None:
        self.published = KEY
        self.key = key or KEY
        self.claims = claims or {}
        self.asked: dict[str, str] = {}
        self._listening = socket.socket()
        self._listening.bind(("127.0.0.1", 0))
        self.issuer = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        routes = [
            Route("/.well-known/openid-configuration", self._configuration),
            Route("/keys", self._keys),
            Route("/token", self._token, methods=["POST"]),
        ]
        config = uvicorn.Config(Starlette(routes=routes), log_config=None, lifespan="off")
        self._server = uvicorn.Server(config)
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[assignment, method-assign]

    async def __aenter__(self) -> FakeProvider:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listening]))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.should_exit = True
        await self._task

    def authorize(self, url: str) -> str:
        """What the browser does there: remember what was asked, and go back with a code."""
        self.asked = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
        assert self.asked["code_challenge_method"] == "S256" and self.asked["response_type"] == "code"
        return f"/oidc/callback?code=the-code&state={self.asked['state']}"

    async def _configuration(self, _: Request) -> Response:
        ends = {f"{each}_endpoint": f"{self.issuer}/{each}" for each in ("authorization", "token")}
        return JSONResponse({"issuer": self.issuer, "jwks_uri": f"{self.issuer}/keys", **ends})

    async def _keys(self, _: Request) -> Response:
        return JSONResponse({"keys": [self.published.as_dict(private=False)]})

    async def _token(self, request: Request) -> Response:
        sent = parse_qs((await request.body()).decode())
        challenge = hashlib.sha256(sent["code_verifier"][0].encode()).digest()
        assert base64.urlsafe_b64encode(challenge).decode().rstrip("=") == self.asked["code_challenge"]
        claims = {
            "iss": self.issuer,
            "aud": "console",
            "sub": "u1",
            "email": "ada@example.com",
            "groups": ["staff", "operators"],
            "nonce": self.asked["nonce"],
            "iat": int(time.time()),
            "exp": int(time.time()) + 300,
            **self.claims,
        }
        token = jwt.encode({"alg": "RS256", "kid": "one"}, claims, self.key)
        return JSONResponse({"access_token": "x", "token_type": "Bearer", "id_token": token})


KEY = RSAKey.generate_key(2048, {"kid": "one"})


def oidc(fake: FakeProvider) -> Oidc:
    return Oidc(fake.issuer, "console", "secret", roles={"operators": Role.OPERATOR})


async def log_in(browser: Browser, fake: FakeProvider) -> httpx.Response:
    begun = await browser.get("/oidc/login")
    assert begun.status_code == 303 and begun.headers["location"].startswith(f"{fake.issuer}/authorization?")
    return await browser.get(fake.authorize(begun.headers["location"]))


async def test_somebody_logs_in(filled: str, consoles: Consoles) -> None:
    """The name and the role are the provider's; the session is ours (S10, S11)."""
    async with FakeProvider() as fake, Browser(consoles(filled, oidc(fake))) as browser:
        assert (await browser.get("/")).headers["location"] == "/login"
        assert "/oidc/login" in (await browser.get("/login")).text
        done = await log_in(browser, fake)
        assert done.status_code == 200 and "ada@example.com" in done.text
        assert "operator ·" in (await browser.get("/preferences")).text


@pytest.mark.parametrize(
    "claims",
    [
        {"nonce": "another"},
        {"aud": "another"},
        {"iss": "https://evil.example"},
        {"exp": 1},
        {"groups": ["staff"]},
        {"email_verified": False},
        {"email_verified": "false"},
        {"email": "a\nb", "sub": ""},
    ],
    ids=lambda claims: ",".join(claims),
)
async def test_what_the_provider_does_not_confirm_lets_nobody_in(
    filled: str, consoles: Consoles, claims: dict[str, Any]
) -> None:
    """S10."""
    async with FakeProvider(claims) as fake, Browser(consoles(filled, oidc(fake))) as browser:
        assert (await log_in(browser, fake)).status_code in (403, 409)
        assert (await browser.get("/preferences")).status_code == 303


async def test_another_key_lets_nobody_in(filled: str, consoles: Consoles) -> None:
    """S10."""
    other = RSAKey.generate_key(2048, {"kid": "one"})
    async with FakeProvider(key=other) as fake, Browser(consoles(filled, oidc(fake))) as browser:
        assert (await log_in(browser, fake)).status_code == 409
        assert (await browser.get("/preferences")).status_code == 303


async def test_a_code_is_for_the_browser_that_was_sent(filled: str, consoles: Consoles) -> None:
    """A state that another browser has, or none, is refused (S12)."""
    async with FakeProvider() as fake:
        console = consoles(filled, oidc(fake))
        mine, other = Browser(console), Browser(console)
        back = fake.authorize((await mine.get("/oidc/login")).headers["location"])
        assert (await other.get(back)).status_code == 403
        await other.get("/oidc/login")
        assert (await other.get(back)).status_code == 403
        assert (await mine.get("/oidc/callback?code=x&state=wrong")).status_code == 403


def test_the_issuer_is_asked_by_https() -> None:
    """S10."""
    with pytest.raises(ConfigurationError, match="https"):
        Oidc("http://login.example", "console")
