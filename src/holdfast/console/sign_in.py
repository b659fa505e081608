"""The pages before anybody is known: logging in and out."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from holdfast.access.principal import Principal, Role
from holdfast.console import problems
from holdfast.console.login import FileLogins
from holdfast.console.page import Call, read_form
from holdfast.console.security import PRINCIPAL
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.console.app import Console


class Begun(Protocol):
    """A login that has begun."""

    @property
    def url(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def nonce(self) -> str: ...
    @property
    def verifier(self) -> str: ...


@runtime_checkable
class Redirecting(Protocol):
    """A provider that sends the browser elsewhere, like `holdfast.access.oidc.Oidc`, whose extra may be missing."""

    async def begin(self, redirect_uri: str) -> Begun: ...
    async def finish(self, redirect_uri: str, code: str, *, nonce: str, verifier: str) -> Principal: ...


# Who has not logged in, for the page that asks for it.
_NOBODY = Principal("nobody", Role.VIEWER)


def routes(console: Console) -> list[Route]:
    """Return the addresses of logging in and out."""

    async def form(request: Request) -> Response:
        if request.scope.get(PRINCIPAL) is not None:
            return RedirectResponse(Call(console, request, _NOBODY, {}).url("/"), 303)
        return _page(Call(console, request, _NOBODY, {}))

    async def log_in(request: Request) -> Response:
        call = Call(console, request, _NOBODY, {})
        if not isinstance(console.provider, FileLogins):
            return problems.missing(call)
        try:
            call.form = await read_form(request)
        except HoldfastError as error:
            return problems.shown(call, error)
        if not console.guard.form_is_ours(request, call.form, _NOBODY.name):
            return problems.forged(call)
        client = request.client.host if request.client else "unknown"
        found = await console.provider.log_in(call.form.get("name")[:200], call.form.get("secret"), client)
        if isinstance(found, float):
            answer = _page(call, f"Too many attempts. Try again in {found:.0f} s.", 429)
            answer.headers["Retry-After"] = f"{found:.0f}"
            return answer
        if found is None:
            return _page(call, "That name and password, or token, is not known here.", 403)
        answer = RedirectResponse(call.url("/"), 303)
        console.guard.begin_session(request, answer, *found)
        return answer

    async def log_out(request: Request) -> Response:
        principal = request.scope.get(PRINCIPAL) or _NOBODY
        call = Call(console, request, principal, {})
        try:
            call.form = await read_form(request)
        except HoldfastError as error:
            return problems.shown(call, error)
        if not console.guard.form_is_ours(request, call.form, principal.name):
            return problems.forged(call)
        answer = RedirectResponse(call.url("/login"), 303)
        await console.guard.end_session(request, answer)
        return answer

    async def go_there(request: Request) -> Response:
        """Send the browser to the provider of identities, and remember what it has to bring back."""
        call, provider = Call(console, request, _NOBODY, {}), console.provider
        if not isinstance(provider, Redirecting):
            return problems.missing(call)
        try:
            begun = await provider.begin(_redirect_uri(call))
        except HoldfastError as error:
            return problems.shown(call, error)
        answer = RedirectResponse(begun.url, 303)
        kept = console.guard.sessions.sign("oidc", [begun.state, begun.nonce, begun.verifier])
        # Lax, because the browser comes back from another site. It is signed, short-lived and of no other use.
        secure = console.guard.is_https(request)
        answer.set_cookie("holdfast_oidc", kept, 600, path="/", secure=secure, httponly=True, samesite="lax")
        return answer

    async def come_back(request: Request) -> Response:
        """Let in who comes back from there with a code, to the browser that was sent."""
        call, provider = Call(console, request, _NOBODY, {}), console.provider
        if not isinstance(provider, Redirecting):
            return problems.missing(call)
        try:
            state, nonce, verifier = (
                console.guard.sessions.unsign("oidc", request.cookies.get("holdfast_oidc", "")) or []
            )
        except ValueError:
            return problems.forged(call)
        given = request.query_params
        if not hmac.compare_digest(given.get("state", "").encode(), str(state).encode()) or not given.get("code"):
            return problems.forged(call)
        try:
            principal = await provider.finish(
                _redirect_uri(call), given["code"][:2_000], nonce=str(nonce), verifier=str(verifier)
            )
        except HoldfastError as error:
            return problems.shown(call, error)
        # A page of our own, so that the session's cookie, which no other site may send, is sent with the next one.
        answer = call.render("welcome.html", title="Logged in", who=principal)
        console.guard.begin_session(request, answer, principal, "oidc")
        answer.delete_cookie("holdfast_oidc", path="/")
        return answer

    return [
        Route("/oidc/login", go_there, methods=["GET"]),
        Route("/oidc/callback", come_back, methods=["GET"]),
        Route("/login", form, methods=["GET"], name="login"),
        Route("/login", log_in, methods=["POST"]),
        Route("/logout", log_out, methods=["POST"]),
    ]


def _redirect_uri(call: Call) -> str:
    """Return where the provider sends the browser back to; it has to be registered there."""
    scheme = "https" if call.console.guard.is_https(call.request) else "http"
    return f"{scheme}://{call.request.headers['host']}{call.url('/oidc/callback')}"


def _page(call: Call, problem: str | None = None, status: int = 200) -> Response:
    provider = call.console.provider
    return call.render(
        "login.html",
        status,
        title="Log in",
        problem=problem,
        passwords=isinstance(provider, FileLogins) and provider.passwords is not None,
        tokens=isinstance(provider, FileLogins) and provider.tokens is not None,
        oidc=getattr(provider, "oidc_name", None),
    )
