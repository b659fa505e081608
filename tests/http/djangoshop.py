"""The shop once more, in Django, served by its own threaded server (or by uvicorn, through ASGI)."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from functools import wraps
from typing import Any
from urllib.parse import unquote, urlsplit

from django.conf import settings
from django.core.servers.basehttp import ThreadedWSGIServer, WSGIRequestHandler
from django.core.wsgi import get_wsgi_application
from django.db import DatabaseError, IntegrityError, connection, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.postgresql import base as _  # noqa: F401  (now, and not once more in every server)
from django.db.backends.utils import CursorWrapper
from django.db.models import F
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View

from holdfast import Publisher
from holdfast.integrations.django import exchange_of, idempotent
from tests.http.shop import SECRET

publisher = Publisher("shop", generation=0)  # each request sends the same statements
outside: dict[str, str] = {}


def authenticated(view: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(view)
    def checked(request: Any, *args: Any, **kwargs: Any) -> Any:
        name = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not name:
            return JsonResponse({"detail": "who are you?"}, status=401)
        if name == "mallory":
            return JsonResponse({"detail": "not you"}, status=403)
        request.tenant = name
        return view(request, *args, **kwargs)

    return checked


def tenant_of(request: Any) -> str | None:
    return getattr(request, "tenant", None)


def ran(name: str) -> None:
    import psycopg

    with psycopg.connect(outside["dsn"], autocommit=True) as other:
        other.execute("INSERT INTO runs (name) VALUES (%s)", [name])


def place(request: HttpRequest) -> HttpResponse:
    order = {"status": 201, "seconds": 0, "size": 0, "error": None} | json.loads(request.body)
    ran(order["sku"])
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO effects (name) VALUES (%s)", [order["sku"]])
    publisher.publish(connection, "order.placed", {"sku": order["sku"]})  # type: ignore[call-overload]
    time.sleep(order["seconds"])
    fail(order["error"])
    if order["error"] == "aborted":
        try:
            with connection.cursor() as cursor:
                cursor.execute("SELECT 1 / (1 - 1)")
        except DatabaseError:
            return JsonResponse({"as if": "nothing had happened"}, status=201)
    if refused := refusal(order):
        return refused
    if order["status"] == 204:
        response = HttpResponse(status=204)
    else:
        body = {"sku": order["sku"], "at": time.monotonic_ns(), "filling": "x" * order["size"]}
        response = JsonResponse(body, status=order["status"])
    response["Location"] = f"/orders/{order['sku']}"
    response["X-Request-ID"] = f"request-{time.monotonic_ns()}"
    response.set_cookie("session", "secret")
    if order["status"] >= 400:
        response["Retry-After"] = "7"
    return response


def fail(how: str | None) -> None:
    """In the ways of Django."""
    if how == "exception":
        raise RuntimeError("the shop is broken")
    if how == "missing":
        try:
            with transaction.atomic(), connection.cursor() as cursor:
                cursor.execute("INSERT INTO seats VALUES ('2'), ('2')")
        except IntegrityError as error:
            raise Http404 from error
    if how == "doomed":
        transaction.set_rollback(True)  # as the ORM does when one of its statements has failed
    if how == "late":
        transaction.on_commit(lambda: fail("exception"))


def refusal(order: dict[str, Any]) -> HttpResponse | None:
    """What the database makes of the order; with `catch` the view says what it thinks of that."""
    from tests.http.djangomodels import Counter, Seat

    try:
        if order.get("sql"):
            with connection.cursor() as cursor:
                cursor.execute(order["sql"])
        if order.get("count"):
            Counter.objects.filter(name="orders").update(value=F("value") + 1)
        if order.get("seat"):
            match order.get("through"):
                case "orm":
                    Seat.objects.create(name=order["seat"])
                case "inner":
                    with transaction.atomic():
                        Seat.objects.create(name=order["seat"])
                case _:
                    with connection.cursor() as cursor:
                        cursor.execute("INSERT INTO seats VALUES (%s)", [order["seat"]])
    except DatabaseError:
        if order.get("seat") or order.get("catch"):
            return JsonResponse({"detail": "the seat is taken"}, status=409)
        raise
    return None


@authenticated
@idempotent
def orders(request: HttpRequest) -> HttpResponse:
    return place(request)


@authenticated
@idempotent(required=False)
def notes(request: HttpRequest) -> HttpResponse:
    return place(request)


@method_decorator(authenticated, name="dispatch")
class Gifts(View):
    def get(self, request: HttpRequest) -> HttpResponse:
        return JsonResponse({"gifts": "none"})

    @method_decorator(idempotent)
    def post(self, request: HttpRequest) -> HttpResponse:
        return place(request)


def validated(view: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(view)
    def checked(request: Any, *args: Any, **kwargs: Any) -> Any:
        if not json.loads(request.body)["sku"]:
            return JsonResponse({"detail": "what do you want?"}, status=422)
        return view(request, *args, **kwargs)

    return checked


@authenticated
@validated
@idempotent
def wishes(request: HttpRequest) -> HttpResponse:
    return place(request)


@authenticated
def forms(request: HttpRequest) -> HttpResponse:
    """Validates by itself, and begins when it has."""
    if not json.loads(request.body)["sku"]:
        return JsonResponse({"detail": "what do you want?"}, status=422)
    exchange_of(request).begin()
    return place(request)


@authenticated
@idempotent(required=False)
def uploads(request: Any) -> HttpResponse:
    """Reads what was sent in the way the client asks for, and fails the first time as a database would."""
    request.runs = getattr(request, "runs", 0) + 1
    sent = {
        "files": lambda: request.FILES["file"].read(),
        "stream": request.read,
        "body": lambda: request.body,
    }[request.GET["by"]]()
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO effects (name) VALUES ('image')")
        cursor.execute(AGAIN)
    return HttpResponse(bytes(reversed(sent)) * request.runs, content_type="application/octet-stream", status=201)


# Once, by a sequence of the test's own.
AGAIN = "DO $$ BEGIN IF nextval('tries') = 1 THEN RAISE EXCEPTION 'x' USING ERRCODE = '40001'; END IF; END $$"


@authenticated
@idempotent
def stream(request: HttpRequest) -> HttpResponseBase:
    return StreamingHttpResponse([b"a", b"b"])


@authenticated
@transaction.atomic
@idempotent
def nested(request: HttpRequest) -> HttpResponse:
    return place(request)


def plain(request: HttpRequest) -> HttpResponse:
    return JsonResponse({"plain": "yes"})


def breaking(get_response: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A middleware inside of Holdfast's, which fails after the view has answered."""

    def middleware(request: Any) -> Any:
        response = get_response(request)
        if "X-Break" in request.headers:
            raise RuntimeError("the middleware is broken")
        return response

    return middleware


LONG = "long/" + "x" * 1100
urlpatterns = [
    path("orders", orders),
    path("notes", notes),
    path("gifts", Gifts.as_view()),
    path("stream", stream),
    path("nested", nested),
    path("plain", plain),
    path("wishes", wishes),
    path("forms", forms),
    path("uploads", uploads),
    path(f"{LONG}/one", orders),
    path(f"{LONG}/two", orders),
]


def configure(dsn: str, isolation: str = "read committed", **options: Any) -> None:
    import django
    from psycopg import IsolationLevel

    outside["dsn"] = options.pop("outside", dsn)
    parts = urlsplit(dsn)
    settings.configure(
        ROOT_URLCONF="tests.http.djangoshop",
        ALLOWED_HOSTS=["*"],
        USE_TZ=True,
        LOGGING_CONFIG=None,
        MIDDLEWARE=["holdfast.integrations.django.IdempotencyMiddleware", "tests.http.djangoshop.breaking"],
        HOLDFAST_IDEMPOTENCY={"SECRETS": {1: SECRET}, "SCOPE": "tests.http.djangoshop.tenant_of", **options},
        DATABASES={
            "default": {
                "ENGINE": "django.db.backends.postgresql",
                "NAME": parts.path[1:],
                "USER": unquote(parts.username or ""),
                "PASSWORD": unquote(parts.password or ""),
                "HOST": parts.hostname,
                "PORT": parts.port,
                "OPTIONS": {"isolation_level": IsolationLevel[isolation.upper().replace(" ", "_")]},
            }
        },
    )
    django.setup()


def die_at(moment: int) -> None:
    """By SIGKILL, at the n-th of the moments before and after a statement or a commit."""
    moments = itertools.count(1)

    def step() -> None:
        if next(moments) == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def stepped(call: Callable[..., Any]) -> Any:
        def stepping(*args: Any, **kwargs: Any) -> Any:
            step()
            result = call(*args, **kwargs)
            step()
            return result

        return stepping

    CursorWrapper._execute = stepped(CursorWrapper._execute)
    BaseDatabaseWrapper._commit = stepped(BaseDatabaseWrapper._commit)


def serve(dsn: str, port: int, interface: str, isolation: str, options: dict[str, Any]) -> None:
    if moment := options.pop("kill", 0):
        die_at(moment)
    configure(dsn, isolation, **options)
    if interface == "asgi":
        import uvicorn
        from django.core.asgi import get_asgi_application

        app: Any = get_asgi_application()
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen(128)
        print(json.dumps({"ready": os.getpid()}), flush=True)
        server.run(sockets=[listening])
        return

    class Quiet(WSGIRequestHandler):
        def log_message(self, *args: Any) -> None: ...

    class Shared(ThreadedWSGIServer):
        allow_reuse_port = True
        request_queue_size = 128

    wsgi = Shared(("127.0.0.1", port), Quiet)
    wsgi.set_app(get_wsgi_application())
    print(json.dumps({"ready": os.getpid()}), flush=True)
    wsgi.serve_forever()
