"""The shop once more, in Django, served by its own threaded server (or by uvicorn, through ASGI)."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from functools import wraps
from typing import Any
from urllib.parse import unquote, urlsplit

from django.conf import settings
from django.db import DatabaseError, connection, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View

from holdfast import Publisher
from holdfast.integrations.django import idempotent
from tests.http.shop import SECRET

publisher = Publisher("shop")
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
    order = {"status": 201, "seconds": 0, "size": 0} | json.loads(request.body)
    ran(order["sku"])
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO effects (name) VALUES (%s)", [order["sku"]])
    publisher.publish(connection, "order.placed", {"sku": order["sku"]})  # type: ignore[call-overload]
    time.sleep(order["seconds"])
    if order.get("error") == "exception":
        raise RuntimeError("the shop is broken")
    if order.get("sql"):
        with connection.cursor() as cursor:
            cursor.execute(order["sql"])
    if order.get("error") == "aborted":
        try:
            with connection.cursor() as cursor:
                cursor.execute("SELECT 1 / (1 - 1)")
        except DatabaseError:
            return JsonResponse({"as if": "nothing had happened"}, status=201)
    if order.get("error") == "doomed":
        transaction.set_rollback(True)  # as the ORM does when one of its statements has failed
    if order.get("seat"):
        try:
            with connection.cursor() as cursor:
                cursor.execute("INSERT INTO seats VALUES (%s)", [order["seat"]])
        except DatabaseError:
            return JsonResponse({"detail": "the seat is taken"}, status=409)
    response = JsonResponse(
        {"sku": order["sku"], "at": time.monotonic_ns(), "filling": "x" * order["size"]}, status=order["status"]
    )
    response["Location"] = f"/orders/{order['sku']}"
    response["X-Request-ID"] = f"request-{time.monotonic_ns()}"
    response.set_cookie("session", "secret")
    if order["status"] >= 400:
        response["Retry-After"] = "7"
    return response


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


urlpatterns = [
    path("orders", orders),
    path("notes", notes),
    path("gifts", Gifts.as_view()),
    path("stream", stream),
    path("nested", nested),
    path("plain", plain),
]


def configure(dsn: str, isolation: str = "read committed", **options: Any) -> None:
    import django
    from psycopg import IsolationLevel

    outside["dsn"] = dsn
    parts = urlsplit(dsn)
    settings.configure(
        ROOT_URLCONF="tests.http.djangoshop",
        ALLOWED_HOSTS=["*"],
        USE_TZ=True,
        LOGGING_CONFIG=None,
        MIDDLEWARE=["holdfast.integrations.django.IdempotencyMiddleware"],
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


def serve(dsn: str, port: int, interface: str, isolation: str, options: dict[str, Any]) -> None:
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
    from django.core.servers.basehttp import ThreadedWSGIServer, WSGIRequestHandler
    from django.core.wsgi import get_wsgi_application

    class Quiet(WSGIRequestHandler):
        def log_message(self, *args: Any) -> None: ...

    class Shared(ThreadedWSGIServer):
        allow_reuse_port = True
        request_queue_size = 128

    wsgi = Shared(("127.0.0.1", port), Quiet)
    wsgi.set_app(get_wsgi_application())
    print(json.dumps({"ready": os.getpid()}), flush=True)
    wsgi.serve_forever()
