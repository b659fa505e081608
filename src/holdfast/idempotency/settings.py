"""Settings of idempotent requests. Every value has a default that suits a JSON API."""

from dataclasses import dataclass, field

from holdfast.checks import instance, number
from holdfast.errors import ConfigurationError

# These headers describe the stored response and are sent again with it. All others are made anew by the server, or
# concern one client alone.
KEPT_HEADERS = frozenset(
    (
        "content-type", "content-language", "content-encoding", "location", "link", "etag", "cache-control",
        "retry-after", "x-request-id",
    )
)  # fmt: skip
# Never stored, even if configured: they would hand one client's session to another, or misdescribe the connection.
_NEVER_KEPT = frozenset(
    (
        "set-cookie", "authorization", "www-authenticate", "authentication-info", "date", "server", "connection",
        "transfer-encoding", "content-length", "keep-alive", "upgrade", "trailer", "content-security-policy",
        "content-security-policy-report-only",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class IdempotencySettings:
    """Times are seconds, sizes are bytes. `docs/http.md` explains when to change which."""

    schema: str = "core"
    methods: tuple[str, ...] = ("POST", "PATCH")
    keep: float = 24 * 3_600.0  # how long a key is remembered; longer than clients go on retrying
    wait: float = 2.0  # how long a duplicate waits for the first request before it gets 409
    idle: float = 60.0  # how long an endpoint may leave its transaction idle before the database ends it
    receive_within: float = 60.0  # for the body of a request that is hashed, before the answer is 408
    connect_within: float = 5.0  # for a connection from the pool, before the answer is 503
    commit_within: float = 10.0  # for the database to answer, before its connection is cut and the answer is 503
    retries: int = 3  # after a serialization failure or a deadlock
    request_limit: int = 1024 * 1024  # of a request body that is hashed; above it the answer is 413
    response_limit: int = 1024 * 1024  # of a response body that is stored; above it a duplicate gets 409
    buffer_limit: int = 16 * 1024 * 1024  # of a response body that is held back until the commit
    store_4xx: bool = True  # duplicates get a deliberate 4xx of the endpoint again
    store_5xx: bool = False
    mismatch_status: int = 409  # 422 is what the IETF draft says
    route_in_scope: bool = False  # a key then belongs to one route, and another route may use it too
    raw_body: bool = False  # hash the body as it was sent: white space and the order of keys count
    keep_headers: tuple[str, ...] = ()  # to be stored besides KEPT_HEADERS
    problems: str = "/problems"  # where your API documents its problems; their types begin with it
    kept_headers: frozenset[bytes] = field(init=False, repr=False)  # KEPT_HEADERS and keep_headers, as bytes

    def __post_init__(self) -> None:
        for name, low, high in (
            ("keep", 1, 366 * 24 * 3_600),
            ("wait", 0.001, 60),
            ("idle", 1, 3_600),
            ("receive_within", 0.01, 3_600),
            ("connect_within", 0.01, 600),
            ("commit_within", 0.01, 600),
            ("retries", 0, 10),
            ("request_limit", 0, 64 * 1024 * 1024),
            ("response_limit", 0, 64 * 1024 * 1024),
            ("buffer_limit", 0, 1024 * 1024 * 1024),
        ):
            number(f"IdempotencySettings.{name}", getattr(self, name), low, high)
        if self.mismatch_status not in (409, 422):
            self._refuse("mismatch_status", f"is {self.mismatch_status!r}", "use 409 or 422")
        if isinstance(self.methods, str) or not set(self.methods) <= {"POST", "PATCH", "PUT", "DELETE"}:
            self._refuse("methods", f"is {self.methods!r}", "name some of POST, PATCH, PUT and DELETE")
        if isinstance(self.keep_headers, str):
            self._refuse("keep_headers", "is a string", f"write ({self.keep_headers!r},)")
        for name in self.keep_headers:
            if name.lower() in _NEVER_KEPT or name.lower().startswith("proxy-"):
                self._refuse("keep_headers", f"has {name!r}, which belongs to one exchange", "leave it out")
        kept = KEPT_HEADERS | {name.lower() for name in self.keep_headers}
        object.__setattr__(self, "kept_headers", frozenset(name.encode("latin-1", "replace") for name in kept))

    def _refuse(self, field: str, problem: str, remedy: str) -> None:
        raise ConfigurationError(f"IdempotencySettings.{field}", problem, remedy)


def require_settings(settings: IdempotencySettings | None) -> IdempotencySettings:
    """Return the settings, or the defaults; refuse anything else in their place."""
    chosen = IdempotencySettings() if settings is None else settings
    return instance("settings", chosen, IdempotencySettings, "pass IdempotencySettings(...)")
