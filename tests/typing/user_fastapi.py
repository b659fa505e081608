"""An application with FastAPI: a worker in it, its health, and its metrics."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TypedDict

from fastapi import FastAPI

from holdfast import HandlerRegistry, Worker
from holdfast.integrations.fastapi import WorkerLifespan, worker_lifespan
from holdfast.observability.health_pages import HealthApp
from holdfast.observability.prometheus import Collector

registry = HandlerRegistry()


class State(TypedDict):
    name: str


@asynccontextmanager
async def of_nothing(app: FastAPI) -> AsyncGenerator[None, None]:
    yield


@asynccontextmanager
async def of_a_mapping(app: FastAPI) -> AsyncGenerator[State, None]:
    yield {"name": "shop"}


def make_worker() -> Worker:
    return Worker("postgresql://localhost/shop", registry)


lifespan: WorkerLifespan = worker_lifespan(make_worker)
app = FastAPI(lifespan=lifespan)
app.mount("/health", HealthApp(lifespan.health))
collector = Collector(lifespan, make_worker())

FastAPI(lifespan=worker_lifespan(make_worker, of_nothing))
FastAPI(lifespan=worker_lifespan(make_worker, of_a_mapping))

HealthApp(make_worker())  # mistake
Collector("worker")  # mistake
