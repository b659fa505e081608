"""What stands before every page: the host, the origin, who asks, and the headers of every answer."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.access.hosts import Hosts
from holdfast.access.principal import Principal
from holdfast.access.provider import Asking, Provider
from holdfast.access.sessions import LASTS, LoggedIn, Sessions
from holdfast.console.page import Form
from holdfast.console.settings import ConsoleSettings
from holdfast.operator.ended_sessions import EndedSessions

SAFE: Final = frozenset(("GET", "HEAD", "OPTIONS"))
_LONGEST_MESSAGE = 300
PRINCIPAL: Final = "holdfast.principal"  # in the scope of a request: who asks
NONCE: Final = "holdfast.nonce"
OPEN_PATHS: Final = ("/static/", "/login", "/oidc/", "/api/v1/")  # the API asks for a token by itself

HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}


def policy(nonce: str) -> str:
    """Return the Content-Security-Policy: nothing but our own files, and scripts and styles only with the nonce."""
    return (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src 'self' data:; "
        "connect-src 'self'; manifest-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    )


class Guard:
    """An ASGI middleware around the whole console."""

    def __init__(
        self,
        app: ASGIApp,
        settings: ConsoleSettings,
        provider: Provider,
        sessions: Sessions,
        ended: EndedSessions | None = None,
    ) -> None:
        self.app = app
        self.provider = provider
        self.sessions = sessions
        self._ended = ended  # in other processes
        self._https = settings.https
        self._hosts = Hosts(settings.allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope, receive)
        nonce = secrets.token_urlsafe(16)
        scope[NONCE] = nonce
        sender = self._with_headers(send, nonce, scope)
        refusal = self._refusal(request)
        if refusal is None:
            scope[PRINCIPAL] = await self.who(request)
            if scope[PRINCIPAL] is None and not self._is_open(scope):
                refusal = self._unknown(request)
        await (refusal or self.app)(scope, receive, sender)

    # --- who and from where ---

    def _refusal(self, request: Request) -> Response | None:
        """A request for another host, or a change that another site has asked for."""
        if not self._hosts.answers(request.headers.get("host", "")):
            return PlainTextResponse("421: this console does not answer for that host name\n", 421)
        if request.method not in SAFE and not self._is_own_origin(request):
            return PlainTextResponse("403: the request comes from another site\n", 403)
        return None

    def _is_own_origin(self, request: Request) -> bool:
        """Browsers name the origin of every form, and newer ones how it relates to us. One of them has to be there."""
        site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
        if site is not None and site not in ("same-origin", "none"):
            return False
        if origin is not None:
            try:
                return urlsplit(origin).netloc.lower() == request.headers.get("host", "").lower()
            except ValueError:  # such as http://[
                return False
        return site is not None or "authorization" in request.headers

    async def who(self, request: Request) -> Principal | None:
        """Return who asks, as it is now."""
        # Only a provider that logs people in knows its sessions: where a proxy says who asks, a cookie says nothing.
        current = getattr(self.provider, "current", None)
        session = self.session_of(request) if current is not None else None
        if current is not None and session is not None:
            found: Principal | None = current(session)
            if found is not None and self._ended is not None and await self._ended.has(session.id):
                self.sessions.end(session)
                return None
            return found
        client = request.client.host if request.client else None
        return await self.provider.principal(Asking(Headers(scope=request.scope), client))

    def session_of(self, request: HTTPConnection) -> LoggedIn | None:
        """Return the session of a browser."""
        cookie = request.cookies.get(self.cookie_name(request), "")
        return self.sessions.read(cookie) if cookie else None

    def _is_open(self, scope: Scope) -> bool:
        path = str(scope["path"]).removeprefix(str(scope.get("root_path", "")))
        return path.startswith(OPEN_PATHS)

    def _unknown(self, request: Request) -> Response:
        wants_page = request.method == "GET" and "text/html" in request.headers.get("accept", "")
        if wants_page and getattr(self.provider, "has_login", False):
            prefix = request.scope.get("root_path", "").rstrip("/")
            return RedirectResponse(f"{prefix}/login", 303)
        answer = PlainTextResponse("401: who asks is not known here\n", 401)
        answer.headers["WWW-Authenticate"] = "Bearer"
        return answer

    # --- cookies ---

    def is_https(self, request: HTTPConnection) -> bool:
        """Return whether browsers reach the console by https."""
        return self._https or request.url.scheme == "https"

    def cookie_name(self, request: HTTPConnection) -> str:
        """Return the name of the session's cookie; with https one that no other host can set."""
        return "__Host-holdfast" if self.is_https(request) else "holdfast_session"

    def set_cookie(self, request: HTTPConnection, answer: Response, name: str, value: str, seconds: int) -> None:
        """Set a cookie that no script reads and no other site sends."""
        secure = self.is_https(request)
        answer.set_cookie(name, value, seconds, path="/", secure=secure, httponly=True, samesite="strict")

    def begin_session(self, request: HTTPConnection, answer: Response, principal: Principal, way: str) -> None:
        """Log a browser in."""
        self.set_cookie(request, answer, self.cookie_name(request), self.sessions.begin(principal, way), LASTS)

    async def end_session(self, request: HTTPConnection, answer: Response) -> None:
        """Log a browser out, here and in the other processes that know the session."""
        session = self.session_of(request)
        if session is not None:
            self.sessions.end(session)
            if self._ended is not None:
                await self._ended.add(session.id, LASTS)
        self.set_cookie(request, answer, self.cookie_name(request), "", 0)

    def leave_message(self, request: HTTPConnection, answer: Response, said: str) -> None:
        """Let the next page say something, once."""
        self.set_cookie(request, answer, "holdfast_said", self.sessions.sign("said", [said[:_LONGEST_MESSAGE]]), 60)

    def message(self, request: HTTPConnection) -> str | None:
        """Return what the page before has left."""
        signed = request.cookies.get("holdfast_said", "")
        try:
            found = self.sessions.unsign("said", signed) if signed else None
        except ValueError:
            return None
        return str(found[0]) if found else None

    # --- forms ---

    def visit(self, request: HTTPConnection) -> str:
        """Return what the tokens of a browser's forms depend on: a random cookie."""
        return request.cookies.get("holdfast_visit", "")[:64] or str(request.scope.get("holdfast.visit", ""))

    def form_token(self, request: HTTPConnection, name: str) -> str:
        """Return what a form must bring back. The cookie that it depends on is set with the same answer."""
        if not self.visit(request):
            request.scope["holdfast.visit"] = secrets.token_urlsafe(24)
        return self.sessions.form_token(self.visit(request), name)

    def form_is_ours(self, request: Request, form: Form, name: str) -> bool:
        """Return whether a form has the token that was written into it."""
        given = request.headers.get("x-csrf-token") or form.get("_token")
        return self.sessions.form_token_is_right(given, request.cookies.get("holdfast_visit", "")[:64], name)

    # --- headers ---

    def _with_headers(self, send: Send, nonce: str, scope: Scope) -> Send:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Content-Security-Policy", policy(nonce))
                headers.setdefault("Cache-Control", "no-store")
                if scope.get("holdfast.visit"):
                    headers.append("Set-Cookie", self._visit_cookie(scope))
                if self._https:
                    headers["Strict-Transport-Security"] = "max-age=31536000"
            await send(message)

        return sending

    def _visit_cookie(self, scope: Scope) -> str:
        answer = Response()
        self.set_cookie(HTTPConnection(scope), answer, "holdfast_visit", scope["holdfast.visit"], 30 * 86_400)
        return answer.headers["set-cookie"]


def provider_is_needed(hosts: Iterable[str]) -> bool:
    """Return whether some of the addresses can be reached from other machines."""
    for host in hosts:
        try:
            if not ipaddress.ip_address(host).is_loopback:
                return True
        except ValueError:
            if host != "localhost":
                return True
    return False
