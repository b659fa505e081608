"""The rows of the security checklist that concern the console."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import asyncpg
import pytest

from holdfast.access.passwords import Passwords, password_line
from holdfast.access.principal import Principal, Role
from holdfast.access.provider import Asking, LocalUser, ProxyHeader
from holdfast.access.tokens import Tokens, new_token, token_line
from holdfast.console import Console
from holdfast.console.login import FREE_ATTEMPTS, FREE_FOR_NAME, FileLogins
from holdfast.console.pages import PAGES
from holdfast.errors import ConfigurationError
from tests.console.conftest import BASE, Browser, as_role

Consoles = Callable[..., Console]
ORIGIN = {"origin": BASE}


def logins(folder: Path, *people: tuple[str, Role, str]) -> FileLogins:
    file = folder / "people"
    file.write_text("".join(password_line(*each) + "\n" for each in people))
    file.chmod(0o600)
    return FileLogins(Passwords(file), None)


# --- S10: who may ask ---


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "192.0.2.7"])  # noqa: S104
def test_other_machines_need_a_login(host: str) -> None:
    """A console that other machines could reach does not start without a provider (OPS-2, S10)."""
    command = [sys.executable, "-c", "from holdfast.cli import main; main()", "console", "--listen", f"{host}:8424"]
    done = subprocess.run([*command, "--dsn", "postgresql://localhost/none"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "nobody has to log in" in done.stderr and "--passwords" in done.stderr


async def test_on_loopback_everybody_is_the_local_user(filled: str, consoles: Consoles) -> None:
    """That is documented, and Host, origin and tokens hold all the same (S10)."""
    async with Browser(consoles(filled, LocalUser("ada"))) as browser:
        assert "ada" in (await browser.get("/")).text
        assert (await browser.get("/", headers={"host": "evil.example"})).status_code == 421
        assert (await browser.post("/preferences", data={"theme": "dark"}, headers=ORIGIN)).status_code == 403


async def test_logging_in_and_out(filled: str, consoles: Consoles, tmp_path: Path) -> None:
    """The session is a cookie that no script reads and no other site sends, and ends with the log-out (S10, S12)."""
    provider = logins(tmp_path, ("ada", Role.OPERATOR, "correct horse battery"))
    async with Browser(consoles(filled, provider)) as browser:
        asked = await browser.get("/")
        assert (asked.status_code, asked.headers["location"]) == (303, "/login")
        wrong = await browser.submit("/login", "/login", name="ada", secret="wrong")
        assert wrong.status_code == 403
        right = await browser.submit("/login", "/login", name="ada", secret="correct horse battery")
        assert right.status_code == 303
        cookie = right.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=strict" in cookie and "Secure" not in cookie
        assert (await browser.get("/")).status_code == 200
        stolen = browser.cookies["holdfast_session"]
        assert (await browser.submit("/logout")).status_code == 303
        assert (await browser.get("/")).status_code == 303
        browser.cookies.set("holdfast_session", stolen)
        assert (await browser.get("/")).status_code == 303


async def test_cookies_are_secure_behind_https(filled: str, consoles: Consoles, tmp_path: Path) -> None:
    """And have a name that no other host can set (S12)."""
    provider = logins(tmp_path, ("ada", Role.OPERATOR, "correct horse battery"))
    async with Browser(consoles(filled, provider, https=True), base="https://127.0.0.1:8424") as browser:
        right = await browser.submit("/login", "/login", name="ada", secret="correct horse battery")
        assert right.headers["set-cookie"].startswith("__Host-holdfast=") and "Secure" in right.headers["set-cookie"]
        assert "max-age" in right.headers["strict-transport-security"]


async def test_a_removed_line_ends_the_session(filled: str, consoles: Consoles, tmp_path: Path) -> None:
    """And a changed role counts at once (S10, S11)."""
    provider = logins(tmp_path, ("ada", Role.OPERATOR, "correct horse battery"), ("bob", Role.VIEWER, "x" * 12))
    async with Browser(consoles(filled, provider)) as browser:
        await browser.submit("/login", "/login", name="ada", secret="correct horse battery")
        assert "operator ·" in (await browser.get("/")).text
        file = tmp_path / "people"
        file.write_text(file.read_text().replace("ada:operator", "ada:viewer"))
        assert "viewer ·" in (await browser.get("/")).text
        file.write_text(file.read_text().split("\n")[1] + "\n")
        assert (await browser.get("/")).status_code == 303


async def test_a_new_password_ends_the_sessions_of_the_old_one(filled: str, consoles: Consoles, tmp_path: Path) -> None:
    """Whoever has taken a session loses it with the change that is made because of that (S10)."""
    console = consoles(filled, logins(tmp_path, ("ada", Role.ADMIN, "correct horse")))
    async with Browser(console) as browser:
        await browser.submit("/login", "/login", name="ada", secret="correct horse")
        assert (await browser.get("/")).status_code == 200
        logins(tmp_path, ("ada", Role.ADMIN, "another password"))
        assert (await browser.get("/", headers={"accept": "text/plain"})).status_code == 401


async def test_a_cookie_says_nothing_where_a_proxy_says_who_asks(
    filled: str, consoles: Consoles, tmp_path: Path
) -> None:
    """A session of another console with the same secret is none of this one's (S10)."""
    first = consoles(
        filled, logins(tmp_path, ("ada", Role.ADMIN, "correct horse")), secret="a secret that two consoles share"
    )
    second = consoles(filled, ProxyHeader("X-User", trusted=["127.0.0.1"]), secret="a secret that two consoles share")
    async with Browser(first) as browser, Browser(second, headers={"accept": "text/plain"}) as other:
        await browser.submit("/login", "/login", name="ada", secret="correct horse")
        other.cookies = browser.cookies
        assert (await other.get("/")).status_code == 401
        twice = [("x-user", "vic"), ("x-user", "ada"), ("accept", "text/plain")]
        assert (await other.get("/", headers=twice)).status_code == 401
        # The API behind it asks the same provider.
        bearer = ("authorization", "Bearer x")
        assert (await other.get("/api/v1/status", headers=[*twice, bearer])).status_code == 401
        assert (await other.get("/api/v1/status", headers=[twice[0], bearer])).status_code == 200


async def test_guesses_that_come_side_by_side_count(tmp_path: Path) -> None:
    """Sixteen at once are not looked at, all of them (S10)."""
    provider = logins(tmp_path, ("ada", Role.ADMIN, "correct horse"))
    found = await asyncio.gather(*(provider.log_in("ada", f"guess {n}", "127.0.0.1") for n in range(16)))
    assert found.count(None) == FREE_ATTEMPTS and sum(isinstance(each, float) for each in found) == 11


async def test_a_stranger_locks_nobody_out(tmp_path: Path) -> None:
    """Who guesses the password of a person waits, and the person, at another address, does not (S10)."""
    provider = logins(tmp_path, ("ada", Role.ADMIN, "correct horse"))
    for n in range(8):
        await provider.log_in("ada", f"guess {n}", "203.0.113.7")
    assert isinstance(await provider.log_in("ada", "correct horse", "203.0.113.7"), float)
    assert isinstance(await provider.log_in("ada", "correct horse", "198.51.100.2"), tuple)


async def test_guesses_from_many_addresses_are_slowed_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After as many as nobody mistypes, whatever the address is (S10)."""
    provider = logins(tmp_path, ("bob", Role.ADMIN, "correct horse"))
    assert provider.passwords is not None
    monkeypatch.setattr(provider.passwords, "verify", lambda name, secret: None)  # a hash takes tens of milliseconds
    for n in range(FREE_FOR_NAME):
        assert await provider.log_in("ada", "guess", f"203.0.113.{n}") is None
    assert isinstance(await provider.log_in("ada", "guess", "198.51.100.2"), float)


async def test_wrong_tokens_do_not_lock_the_right_ones_out(tmp_path: Path) -> None:
    """Everybody may come from the one address of a proxy (S10)."""
    (tmp_path / "tokens").write_text(token_line("bot", Role.VIEWER, token := new_token()) + "\n")
    (tmp_path / "tokens").chmod(0o600)
    provider = FileLogins(None, Tokens(tmp_path / "tokens"))
    for _ in range(60):
        assert await provider.principal(Asking({"authorization": "Bearer stale"}, "127.0.0.1")) is None
    assert await provider.principal(Asking({"authorization": f"Bearer {token}"}, "127.0.0.1")) is not None


def test_a_file_that_becomes_writable_lets_nobody_in(tmp_path: Path) -> None:
    """Whoever its owner is (S10)."""
    passwords = logins(tmp_path, ("ada", Role.ADMIN, "correct horse")).passwords
    assert passwords is not None and passwords.verify("ada", "correct horse") is not None
    (tmp_path / "people").chmod(0o666)
    assert passwords.verify("ada", "correct horse") is None


async def test_guessing_is_slowed_down(filled: str, consoles: Consoles, tmp_path: Path) -> None:
    """After some attempts they are not looked at for a while, even the right one (S10)."""
    provider = logins(tmp_path, ("ada", Role.OPERATOR, "correct horse battery"))
    async with Browser(consoles(filled, provider)) as browser:
        for _ in range(FREE_ATTEMPTS):
            assert (await browser.submit("/login", "/login", name="ada", secret="no")).status_code == 403
        for _ in range(3):
            await browser.submit("/login", "/login", name="ada", secret="no")
        late = await browser.submit("/login", "/login", name="ada", secret="correct horse battery")
        assert late.status_code == 429 and int(late.headers["retry-after"]) >= 0


async def test_tools_send_a_token(filled: str, consoles: Consoles, tmp_path: Path) -> None:
    """With every request; a wrong one is nobody (S10)."""
    token = new_token()
    file = tmp_path / "tokens"
    file.write_text(token_line("robot", Role.VIEWER, token) + "\n")
    file.chmod(0o600)
    async with Browser(consoles(filled, FileLogins(None, Tokens(file)))) as browser:
        assert (await browser.get("/", headers={"authorization": f"Bearer {token}"})).status_code == 200
        refused = await browser.get("/live", headers={"authorization": "Bearer hft_wrong", "accept": "*/*"})
        assert refused.status_code == 401
        assert (await browser.submit("/login", "/login", secret=token)).status_code == 303
        assert "robot" in (await browser.get("/")).text


def test_files_that_others_can_read_are_refused(tmp_path: Path) -> None:
    """S10."""
    file = tmp_path / "people"
    file.write_text(password_line("ada", Role.ADMIN, "correct horse battery"))
    file.chmod(0o644)
    with pytest.raises(ConfigurationError, match="read by others"):
        Passwords(file)


@pytest.mark.parametrize("text", ["", "ada:admin", "ada:boss:scrypt$2$8$1$AA==$AA==", "a:admin:scrypt$3$8$1$AA==$AA=="])
def test_lines_that_are_wrong_are_refused(tmp_path: Path, text: str) -> None:
    """S10."""
    file = tmp_path / "people"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(ConfigurationError):
        Passwords(file)


async def test_a_proxy_is_believed_from_its_address_alone(filled: str, consoles: Consoles) -> None:
    """A header that somebody else sends names nobody (S10)."""
    provider = ProxyHeader("X-Forwarded-User", trusted=["10.0.0.0/24"], roles={"ada": Role.ADMIN})
    console = consoles(filled, provider)
    named = {"x-forwarded-user": "ada"}
    async with Browser(console, client="10.0.0.9", headers=named) as browser:
        assert "admin ·" in (await browser.get("/")).text
    async with Browser(console, client="10.0.0.9", headers={"x-forwarded-user": "eve"}) as browser:
        assert "viewer ·" in (await browser.get("/")).text
    async with Browser(console, client="10.0.1.9", headers=named | {"x-forwarded-for": "10.0.0.9"}) as browser:
        assert (await browser.get("/")).status_code == 401


async def test_the_role_of_a_proxy_is_one_of_ours() -> None:
    """S11."""
    provider = ProxyHeader("x-user", trusted=["::1"], role_header="x-role")
    asked = [
        await provider.principal(Asking({"x-user": "ada", "x-role": role}, "::1")) for role in ("admin", "root", "")
    ]
    assert asked == [Principal("ada", Role.ADMIN), None, Principal("ada", Role.VIEWER)]


# --- S12: other sites ---


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site", "origin": BASE},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": "http://["},
        {"origin": "http://[evil]"},
    ],
)
async def test_changes_come_from_our_own_pages(filled: str, consoles: Consoles, headers: dict[str, str]) -> None:
    """Whatever cookies and tokens the browser sends along (S12)."""
    async with Browser(consoles(filled)) as browser:
        data = {"_token": await browser.token(), "theme": "dark", "zone": "UTC", "keys": "on"}
        assert (await browser.post("/preferences", data=data, headers=headers)).status_code == 403
        assert (await browser.post("/preferences", data=data, headers=ORIGIN)).status_code == 303


async def test_a_token_is_of_one_browser_and_one_person(filled: str, consoles: Consoles) -> None:
    """S12."""
    console = consoles(filled)
    async with Browser(console) as mine, Browser(console) as other:
        token = await mine.token()
        await other.token()
        data = {"_token": token, "theme": "dark", "zone": "UTC", "keys": "on"}
        assert (await other.post("/preferences", data=data, headers=ORIGIN)).status_code == 403
        assert (await mine.post("/preferences", data={**data, "_token": ""}, headers=ORIGIN)).status_code == 403


def test_nothing_changes_by_get() -> None:
    """Every page that changes something does so by POST, and asks for a role above the viewer's (S12)."""
    changing = [page for page in PAGES if page.post is not None]
    assert changing
    assert {page.name for page in changing if page.post_role == Role.VIEWER} <= {"preferences"}


# --- S14, S15, S9 ---


async def test_every_answer_has_the_headers(filled: str, consoles: Consoles) -> None:
    """Also errors and static files; the nonce is another one each time (S14, S13)."""
    nonces = set()
    async with Browser(consoles(filled)) as browser:
        for path in ("/", "/nothing", "/static/console.js", "/preferences"):
            answer = await browser.get(path)
            policy = answer.headers["content-security-policy"]
            assert "frame-ancestors 'none'" in policy and "unsafe" not in policy and "default-src 'none'" in policy
            nonces.add(re.findall(r"'nonce-([\w-]+)'", policy)[0])
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "same-origin"
            kept = "no-store" if "static" not in path else "private, max-age=31536000, immutable"
            assert answer.headers["cache-control"] == kept
            assert "access-control-allow-origin" not in answer.headers
    assert len(nonces) == 4


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8424", 200),
        ("localhost", 200),
        ("[::1]:8424", 200),
        ("console.example", 200),
        ("CONSOLE.example:443", 200),
        ("evil.example", 421),
        ("console.example.evil", 421),
        ("console.example@evil.example", 421),
        ("", 421),
        ("[", 421),
        ("[::1", 421),
        ("[evil]", 421),
    ],
)
async def test_only_our_hosts_are_answered(filled: str, consoles: Consoles, host: str, status: int) -> None:
    """A name that was made to lead here is not answered, on loopback as well (S15)."""
    async with Browser(consoles(filled, allowed_hosts=("console.example",))) as browser:
        assert (await browser.get("/", headers={"host": host})).status_code == status


@pytest.mark.parametrize("query", ["a=" + "x" * 501, "&".join(f"p{n}=1" for n in range(30)), "x" * 61 + "=1"])
async def test_addresses_are_bounded(filled: str, consoles: Consoles, query: str) -> None:
    """S9."""
    async with Browser(consoles(filled)) as browser:
        assert (await browser.get(f"/preferences?{query}")).status_code == 400


async def test_forms_are_bounded(filled: str, consoles: Consoles) -> None:
    """S9."""
    async with Browser(consoles(filled)) as browser:
        assert (await browser.submit("/preferences", theme="x" * 1_100_000)).status_code == 400


@pytest.mark.parametrize("body", [b"x" * 1_100_000, b"_token=\xff\xfe"], ids=["large", "not text"])
@pytest.mark.parametrize("path", ["/logout", "/login", "/preferences"])
async def test_forms_that_cannot_be_read_are_refused(
    filled: str, consoles: Consoles, tmp_path: Path, path: str, body: bytes
) -> None:
    """On the pages of logging in and out as well (S9)."""
    provider = logins(tmp_path, ("ada", Role.OPERATOR, "correct horse battery"))
    headers = {**ORIGIN, "content-type": "application/x-www-form-urlencoded"}
    async with Browser(consoles(filled, provider)) as browser:
        await browser.submit("/login", "/login", name="ada", secret="correct horse battery")
        answer = await browser.post(path, content=body, headers=headers)
        assert answer.status_code == 400 and "the form" in answer.text


@pytest.mark.parametrize("payload", ["[" * 100_000, '{"a":' * 10_000, "{", "9" * 5_000], ids=lambda each: each[:5])
async def test_payloads_that_cannot_be_read_are_refused(filled: str, consoles: Consoles, payload: str) -> None:
    """However deep they are (S9)."""
    async with Browser(consoles(filled)) as browser:
        answer = await browser.submit("/events/0199c1f2-5f2e-7a53-8d54-0d6a2f1f9a11/edit", payload=payload, reason="x")
        assert answer.status_code == 400 and "payload" in answer.text


@pytest.mark.parametrize(
    ("error", "title", "shown"),
    [
        (asyncpg.CheckViolationError, "The database has refused that", "CheckViolationError"),
        (asyncpg.InsufficientPrivilegeError, "The database has refused that", "holdfast_operator"),
        (asyncpg.ConnectionDoesNotExistError, "The database does not answer", "tries again by itself"),
    ],
)
async def test_errors_of_the_database_show_no_row(
    filled: str, consoles: Consoles, error: type[asyncpg.PostgresError], title: str, shown: str
) -> None:
    """The server quotes the row that it refuses, with its values; and a refusal is no outage (S9, S11)."""
    console = consoles(filled)
    row = {"S": "ERROR", "C": error.sqlstate, "M": "it was refused", "D": "Failing row contains (41, 4111-canary)."}

    def failing(actor: str) -> object:
        raise asyncpg.PostgresError.new(row)

    console.operators.acting = failing  # type: ignore[assignment, method-assign]
    async with Browser(console) as browser:
        page = await browser.get("/failures")
    assert page.status_code == 503 and title in page.text and shown in page.text
    assert "canary" not in page.text and "Failing row" not in page.text


async def test_pages_have_no_inline_script_or_style(filled: str, consoles: Consoles) -> None:
    """S13."""
    async with Browser(consoles(filled)) as browser:
        for page in PAGES:
            if page.get is None or "{" in page.path:
                continue
            text = (await browser.get(page.path)).text
            assert not re.search(r"<script(?![^>]*\bsrc=)|\sstyle=|<style|\son\w+=|javascript:", text), page.path


async def test_a_role_does_not_see_what_it_may_not_do(filled: str, consoles: Consoles) -> None:
    """Nor does it do it (S11)."""
    async with Browser(consoles(filled, as_role(Role.VIEWER))) as browser:
        token = await browser.token()
        for page in PAGES:
            if page.post is None or "{" in page.path or page.post_role == Role.VIEWER:
                continue
            answer = await browser.post(page.path, data={"_token": token}, headers=ORIGIN)
            assert answer.status_code == 403, page.path
