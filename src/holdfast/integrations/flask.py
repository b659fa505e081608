"""Holdfast in a Flask application: a transaction for each request that needs one, to publish in.

    events = TransactionPerRequest(Publisher("shop"), pool.connection, app)

    @app.post("/orders")
    def place_order():
        events.tx.execute("INSERT INTO orders ...")
        events.publish("order.placed", {"order_id": 17})
        return {"order": 17}, 201

The worker is a process of its own: `holdfast worker shop:registry`. See docs/frameworks/flask.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, Unpack

from holdfast.installing import require_extra

require_extra("flask", "flask")

from flask import Flask, Response, current_app, has_request_context, request

from holdfast.checks import function, instance
from holdfast.errors import ConfigurationError
from holdfast.new_event import EventOptions
from holdfast.postgres.drivers import driver_of
from holdfast.postgres.publisher import Publisher
from holdfast.postgres.queries import Queries

__all__ = ["TransactionPerRequest"]

# An attribute of the request object: the transaction of each extension, None once it has ended. It is not kept in the
# environment, which a request made inside another one may copy.
_TRANSACTIONS = "holdfast_transactions"
_CONNECT = "pass pool.connection, a sessionmaker or engine.connect, and do not call it"


class TransactionPerRequest:
    """An extension of Flask. `connect` returns the context manager of a synchronous connection or session.

    The transaction is begun when a view uses `tx` or `publish`. It is committed before the response is sent, whatever
    the status, and rolled back as soon as the view raises or aborts, whatever an error handler makes of that.
    """

    def __init__(
        self, publisher: Publisher, connect: Callable[[], AbstractContextManager[Any]], app: Flask | None = None
    ) -> None:
        self.publisher = instance("publisher", publisher, Publisher, 'pass Publisher("shop")')
        function("connect", connect, _CONNECT)
        if isinstance(connect, contextlib.ContextDecorator):  # pool.connection() can be called, but as a decorator
            raise ConfigurationError("connect", f"is {type(connect).__name__}, not a function", _CONNECT)
        self._connect = connect
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Register the hooks of an application that end the transactions of its requests."""
        app.extensions.setdefault("holdfast", []).append(self)
        app.after_request(self._answered)
        app.teardown_request(self._torn_down)
        # Roll back before error handlers run: one may answer with a success, and a redirect may be raised, too.
        handle: Any = self._rolling_back(app.handle_user_exception)
        app.handle_user_exception = handle  # type: ignore[method-assign]

    @property
    def tx(self) -> Any:
        """The connection or session of this request, in its transaction."""
        return self._transaction().tx

    def publish(self, event_type: Any, *payload: Any, **options: Unpack[EventOptions]) -> Any:
        """Publish an event in the transaction of this request, as `Publisher.publish` does; return the envelope."""
        return self.publisher.publish(self.tx, event_type, *payload, **options)

    def _transaction(self) -> _Transaction:
        if not has_request_context():
            raise ConfigurationError(
                "tx", "is used outside of a request", "open a transaction there, and use publisher.publish(tx, ...)"
            )
        if self not in current_app.extensions.get("holdfast", ()):  # nothing would commit
            problem = f"is of an extension that the application {current_app.name!r} does not know"
            raise ConfigurationError("tx", problem, "call events.init_app(app), or pass app to it")
        known = self._known()
        if self not in known:
            known[self] = _Transaction(self._connect)
        transaction = known[self]
        if transaction is None:
            raise ConfigurationError(
                "tx",
                "is used after the transaction of the request has ended",
                "use it in the view, or in an after_request function that is registered behind this extension",
            )
        return transaction

    def _known(self) -> dict[TransactionPerRequest, _Transaction | None]:
        found: dict[TransactionPerRequest, _Transaction | None] = vars(request).setdefault(_TRANSACTIONS, {})
        return found

    def _rolling_back(self, handle: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(handle)
        def rolled_back(*arguments: Any) -> Any:  # the error is the last of them, in every release of Flask
            if (transaction := self._known().pop(self, None)) is not None:
                transaction.roll_back(arguments[-1])
            return handle(*arguments)

        return rolled_back

    def _answered(self, response: Response) -> Response:
        transaction, self._known()[self] = self._known().get(self), None
        if transaction is not None:
            transaction.commit()
        return response

    def _torn_down(self, error: BaseException | None) -> None:
        """End the transaction of a request that got no response here."""
        transaction, self._known()[self] = self._known().get(self), None
        if transaction is not None:
            transaction.roll_back(error or _Unanswered())


class _Unanswered(Exception):
    """A request has ended without a response and without an error, so its transaction is rolled back."""


class _Transaction:
    """A transaction on a connection or session of the application's."""

    def __init__(self, connect: Callable[[], AbstractContextManager[Any]]) -> None:
        self._holder = connect()
        if not hasattr(self._holder, "__enter__"):
            kind = type(self._holder).__name__
            raise ConfigurationError("connect", f"returned {kind}, which is not a context manager", _CONNECT)
        self.tx: Any = self._holder.__enter__()
        self._block: Any = None
        try:
            self._driver = driver_of(self.tx)
            if self._driver.package == "psycopg":
                # A block, because a connection in autocommit mode would commit each statement.
                block = self.tx.transaction()
                block.__enter__()
                self._block = block
        except BaseException as error:
            self._give_back(error)
            raise

    def commit(self) -> None:
        """Commit; if that fails, roll back and raise."""
        try:
            # Raises if a statement has failed, for which Postgres would answer COMMIT with a rollback.
            self._driver.run(self.tx, Queries("core"), "confirm_request", {})
            if self._block is None:
                self.tx.commit()
            else:
                block, self._block = self._block, None
                block.__exit__(None, None, None)
        except BaseException as error:
            self.roll_back(error)
            raise
        self._holder.__exit__(None, None, None)

    def roll_back(self, error: BaseException) -> None:
        """Roll back because of an error. It raises nothing: a lost connection has no transaction."""
        with contextlib.suppress(Exception):
            if self._block is None:
                self.tx.rollback()
            else:
                self._block.__exit__(type(error), error, error.__traceback__)
        self._give_back(error)

    def _give_back(self, error: BaseException) -> None:
        with contextlib.suppress(Exception):
            self._holder.__exit__(type(error), error, error.__traceback__)
