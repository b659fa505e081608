"""The extension for Flask: the transaction of a request is committed with its response, and rolled back by an error."""

from collections.abc import Iterator
from typing import Any

import asyncpg
import flask
import psycopg
import psycopg_pool
import pytest
import sqlalchemy.orm

from holdfast import Publisher
from holdfast.errors import ConfigurationError
from holdfast.integrations.flask import TransactionPerRequest


def flask_application(dsn: str, connect: Any = None) -> Any:
    """Answer /N with the status N, after publishing; /0 raises; /1 goes on after a failed statement."""
    app = flask.Flask("shop")
    events = TransactionPerRequest(Publisher("shop"), connect or (lambda: psycopg.connect(dsn)))
    events.init_app(app)

    @app.post("/<int:status>")
    def place(status: int) -> Any:
        events.publish("order.placed", {"status": status})
        if status == 0:
            raise LookupError
        if status == 1:
            with pytest.raises(psycopg.errors.UndefinedTable):
                events.tx.execute("SELECT FROM nothing")
        return "", max(status, 200)

    return app.test_client()


@pytest.mark.parametrize("library", ["psycopg", "sqlalchemy"])
async def test_flask_commits_what_is_answered(library: str, dsn: str, conn: asyncpg.Connection) -> None:
    """The transaction of a request is committed before the response, and rolled back by an error (PUB-1)."""
    engine = sqlalchemy.create_engine(dsn.replace("postgresql://", "postgresql+psycopg://"))
    connect = sqlalchemy.orm.sessionmaker(engine) if library == "sqlalchemy" else None
    client = flask_application(dsn, connect)
    answered, failing = [201, 302, 409], [0, 1] if library == "psycopg" else [0]
    assert [client.post(f"/{status}").status_code for status in [*answered, *failing]] == [
        *answered,
        *(500 for _ in failing),
    ]
    engine.dispose()
    rows = await conn.fetch("SELECT payload->>'status' FROM core.outbox ORDER BY 1")
    assert [row[0] for row in rows] == ["201", "302", "409"]
    assert await conn.fetchval("SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in%'") == 0


def test_a_connection_in_place_of_a_function_is_refused(dsn: str) -> None:
    """`pool.connection()` in place of `pool.connection` is found when the application is made (S20)."""
    pool = psycopg_pool.ConnectionPool(dsn, open=False)
    with pytest.raises(ConfigurationError, match=r"connect is _GeneratorContextManager.* do not call it"):
        TransactionPerRequest(Publisher("shop"), pool.connection())  # type: ignore[arg-type]


def test_flask_outside_of_a_request_is_refused() -> None:
    events = TransactionPerRequest(Publisher("shop"), list)  # type: ignore[arg-type]
    app = flask.Flask("shop")
    with app.app_context(), pytest.raises(ConfigurationError, match="tx is used outside of a request"):
        events.publish("order.placed", {})
    with app.test_request_context(), pytest.raises(ConfigurationError, match=r"call events\.init_app\(app\)"):
        events.publish("order.placed", {})  # nobody would commit it
    events.init_app(app)
    with app.test_request_context(), pytest.raises(ConfigurationError, match="connect returned list"):
        events.publish("order.placed", {})


async def kept(conn: asyncpg.Connection) -> list[str]:
    rows = await conn.fetch("SELECT event_type FROM core.outbox ORDER BY 1")
    return [row[0] for row in rows]


async def test_what_a_view_raises_is_rolled_back_whatever_the_answer(dsn: str, conn: asyncpg.Connection) -> None:
    """An error handler may answer with a success, or an exception be a redirect, and nothing is kept (PUB-1)."""
    app = flask.Flask("shop")
    events = TransactionPerRequest(Publisher("shop"), lambda: psycopg.connect(dsn), app)

    @app.post("/<end>")
    def place(end: str) -> Any:
        events.publish("order.placed", {})
        if end == "redirected":
            flask.abort(flask.redirect("/login"))
        raise LookupError

    @app.errorhandler(LookupError)
    def answer(error: LookupError) -> Any:
        events.publish("order.refused", {})  # in a transaction of its own, which is that of the response
        return "it is all right"

    client = app.test_client()
    assert [client.post(f"/{end}").status_code for end in ("redirected", "handled")] == [302, 200]
    assert await kept(conn) == ["order.refused"]


async def test_what_comes_after_the_commit_is_refused(dsn: str, conn: asyncpg.Connection) -> None:
    """What cannot be committed any more is an error, and not lost in silence (PUB-1)."""
    app = flask.Flask("shop")
    refused: list[str] = []

    def late() -> None:
        with pytest.raises(ConfigurationError, match="tx is used after the transaction of the request has ended") as e:
            events.publish("order.late", {})
        refused.append(str(e.value))

    @app.after_request  # registered before the extension, so that it is called after it
    def audit(response: flask.Response) -> flask.Response:
        late()
        return response

    events = TransactionPerRequest(Publisher("shop"), lambda: psycopg.connect(dsn), app)

    @app.get("/")
    def stream() -> Any:
        def lines() -> Iterator[str]:
            late()
            yield "a"

        events.publish("order.placed", {})
        return flask.Response(flask.stream_with_context(lines()))

    with app.app_context():  # two requests in one: neither knows of the other's end
        assert [app.test_client().get("/").get_data(as_text=True) for _ in range(2)] == ["a", "a"]
    assert len(refused) == 4
    assert await kept(conn) == ["order.placed", "order.placed"]


async def test_a_connection_in_autocommit_mode_has_a_transaction(dsn: str, conn: asyncpg.Connection) -> None:
    """The first statement of a request is rolled back with the rest (PUB-1)."""
    await conn.execute("CREATE TABLE orders (id bigint)")
    app = flask.Flask("shop")
    events = TransactionPerRequest(Publisher("shop"), lambda: psycopg.connect(dsn, autocommit=True), app)

    @app.post("/<int:status>")
    def place(status: int) -> Any:
        events.tx.execute("INSERT INTO orders VALUES (%s)", [status])
        events.publish("order.placed", {})
        if status == 409:
            flask.abort(409)
        return "", status

    assert [app.test_client().post(f"/{status}").status_code for status in (409, 201)] == [409, 201]
    assert [row[0] for row in await conn.fetch("SELECT id FROM orders")] == [201]
    assert await kept(conn) == ["order.placed"]


@pytest.mark.parametrize("library", ["psycopg", "sqlalchemy"])
def test_a_lost_connection_does_not_hide_the_error_of_the_view(library: str, dsn: str) -> None:
    engine = sqlalchemy.create_engine(dsn.replace("postgresql://", "postgresql+psycopg://"))
    connect: Any = engine.connect if library == "sqlalchemy" else lambda: psycopg.connect(dsn)
    app = flask.Flask("shop")
    events = TransactionPerRequest(Publisher("shop"), connect, app)

    @app.post("/")
    def place() -> Any:
        events.publish("order.placed", {})
        with psycopg.connect(dsn, autocommit=True) as other:
            found = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE state = 'idle in transaction'"
            assert other.execute(found + " AND datname = current_database()").fetchall() == [(True,)]
        raise LookupError("no address")

    @app.errorhandler(LookupError)
    def answer(error: LookupError) -> Any:
        return str(error), 404

    assert app.test_client().post("/").get_data(as_text=True) == "no address"
    engine.dispose()


def test_the_context_manager_of_the_connection_learns_of_the_error(dsn: str) -> None:
    """A pool may throw away a connection whose request has failed."""
    told: list[Any] = []

    class Holder:
        def __enter__(self) -> Any:
            self.connection = psycopg.connect(dsn)
            return self.connection

        def __exit__(self, kind: Any, *_: Any) -> None:
            told.append(kind)
            self.connection.close()

    client = flask_application(dsn, Holder)
    for status in (0, 201):
        client.post(f"/{status}")
    assert told == [LookupError, None]


async def test_a_request_inside_another_has_a_transaction_of_its_own(dsn: str, conn: asyncpg.Connection) -> None:
    """Neither the end nor the failure of one is that of the other (PUB-1)."""
    app = flask.Flask("shop")
    events = TransactionPerRequest(Publisher("shop"), lambda: psycopg.connect(dsn), app)

    @app.post("/inner/<int:status>")
    def inner(status: int) -> Any:
        events.publish("order.inner", {})
        if status >= 400:
            flask.abort(status)
        return "", status

    @app.post("/outer/<int:status>")
    def outer(status: int) -> Any:
        first = events.publish("order.outer", {})
        # With what the outer request brought: who is logged in, and where the application is mounted.
        inside = app.test_client().post(f"/inner/{status}", environ_base=flask.request.environ)
        assert inside.status_code == status
        events.publish("order.outer", {})  # in the transaction of the first one, which is open
        assert events.tx.execute("SELECT count(*) FROM core.outbox WHERE id = %s", [first.event_id]).fetchone() == (1,)
        if status < 400:
            flask.abort(409)
        return "", 201

    client = app.test_client()
    assert [client.post(f"/outer/{status}").status_code for status in (409, 201)] == [201, 409]
    assert await kept(conn) == ["order.inner", "order.outer", "order.outer"]
