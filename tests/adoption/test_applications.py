"""First mistakes in an application of FastAPI: found when it starts, with what to write instead."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import httpx
import pytest
from fastapi import APIRouter, Depends, FastAPI

from holdfast import HandlerRegistry, Reactions, Worker
from holdfast.errors import ConfigurationError
from holdfast.integrations.fastapi import Idempotency, IdempotentRoute, worker_lifespan

pytestmark = pytest.mark.newcomer

DSN = "postgresql://h/db"
registry = HandlerRegistry()
registry.add("shop.ship", ("order.placed",), print)


def idempotency() -> Idempotency:
    return Idempotency(lambda: None, {1: "s" * 32}, scope=lambda: "acme")  # type: ignore[arg-type, return-value]


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield


async def made_later() -> Worker:
    return Worker(DSN, registry)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((made_later,), "make_worker is async def"),
        ((lifespan, lambda: Worker(DSN, registry)), "make_worker takes an argument"),
        ((lambda: None, "lifespan"), "lifespan is str, not a function"),
    ],
    ids=["async", "swapped", "lifespan"],
)
def test_what_makes_no_worker_is_refused(arguments: Any, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem) as refused:
        worker_lifespan(*arguments)
    assert refused.value.remedy


async def test_a_function_that_returns_no_worker_is_refused() -> None:
    app = FastAPI(lifespan=worker_lifespan(lambda: None))  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigurationError, match="make_worker returned NoneType, not a Worker"):
        async with app.router.lifespan_context(app):
            raise AssertionError("it started")


@pytest.mark.parametrize("route_class", [None, IdempotentRoute], ids=["app", "router"])
async def test_a_forgotten_install_ends_the_start(route_class: Any) -> None:
    found = idempotency()
    app = FastAPI(lifespan=worker_lifespan(lambda: Worker(DSN, registry)))
    router = app if route_class is None else APIRouter(route_class=route_class)

    @router.post("/orders")
    async def place(tx: Annotated[Any, Depends(found.required)]) -> None: ...

    if isinstance(router, APIRouter):
        app.include_router(router)
    with pytest.raises(ConfigurationError, match="the route /orders depends on a transaction, and idempotency is not"):
        async with app.router.lifespan_context(app):
            raise AssertionError("it started")


async def test_a_forgotten_install_is_named_by_the_first_request() -> None:
    """Without a worker nothing of Holdfast runs when the application starts."""
    found, app = idempotency(), FastAPI()

    @app.post("/orders")
    async def place(tx: Annotated[Any, Depends(found.required)]) -> None: ...

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
        with pytest.raises(ConfigurationError) as refused:
            await client.post("/orders", headers={"Idempotency-Key": "k"})
    assert refused.value.remedy == "call idempotency.install(app) before the endpoints are declared"


def test_install_comes_first() -> None:
    found, app = idempotency(), FastAPI()

    @app.post("/orders")
    async def place(tx: Annotated[Any, Depends(found.required)]) -> None: ...

    with pytest.raises(ConfigurationError) as refused:
        found.install(app)
    assert "the route /orders was declared before idempotency was installed" in str(refused.value)
    assert "call idempotency.install(app) before" in refused.value.remedy


@pytest.mark.parametrize("secret", ["a secret that is long enough, surely", b"b" * 32])
def test_a_secret_without_a_number(secret: Any) -> None:
    with pytest.raises(ConfigurationError, match="secrets are one text without a number"):
        Idempotency(lambda: None, secret, scope=lambda: "acme")  # type: ignore[arg-type, return-value]


async def asynchronous(fact: object) -> None: ...
def of_two(fact: object, more: object) -> None: ...


class Later:
    async def __call__(self, fact: object) -> None: ...


@pytest.mark.parametrize(
    ("observer", "problem"),
    [
        (asynchronous, "has asynchronous, which is async def"),
        (Later(), "has Later, which is async def"),
        (of_two, "has of_two, which does not take one argument"),
    ],
)
@pytest.mark.parametrize("user", [Worker, Reactions])
def test_an_observer_that_would_see_nothing_is_refused(user: Any, observer: Any, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=f"observers {problem}"):
        user(DSN, registry, observers=[observer])


def test_observers_of_every_kind_are_accepted() -> None:
    facts: list[object] = []
    Worker(DSN, registry, observers=[facts.append, print, lambda fact: None, lambda *facts: None])
