"""Settings of a worker: defaults that fit, and refusals that name the field and the remedy."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from holdfast import HandlerRegistry, Worker, WorkerSettings
from holdfast.errors import ConfigurationError
from holdfast.settings import channel_of


def test_defaults() -> None:
    """Poll at 5 s, lease of 30 s; generation 0 has the default channel (LSN-2, LSN-3)."""
    settings = WorkerSettings()
    assert (settings.poll_interval, settings.lease, settings.schema) == (5.0, 30.0, "core")
    assert settings.served_channels == ("outbox_default",)


def test_channels() -> None:
    """A generation's own channel, unless others are named; each is served once (OBX-4, GEN-1)."""
    assert channel_of(0) == "outbox_default"
    assert channel_of(7) == "outbox_gen_7"
    assert WorkerSettings(generation=7).served_channels == ("outbox_gen_7",)
    chosen = WorkerSettings(generation=7, channels=("outbox_cold", "outbox_gen_7", "outbox_cold"))
    assert chosen.served_channels == ("outbox_cold", "outbox_gen_7")


@pytest.mark.parametrize(
    "channels", [("",), ("Outbox",), ("1st",), ("a-b",), ('a"b',), ("a" * 64,), ("a\x00",), (7,), "outbox_cold"]
)
def test_channel_names_are_checked(channels: Any) -> None:
    """What LISTEN would cut off or misread is refused, and a bare string is not taken letter by letter (S5)."""
    with pytest.raises(ConfigurationError) as caught:
        WorkerSettings(channels=channels)
    assert "channels" in caught.value.field
    assert caught.value.remedy


RANGES = {
    "generation": (0, 2**63 - 1),
    "concurrency": (1, 10_000),
    "concurrency_at_most": (1, 10_000),
    "threads": (1, 1_000),
    "connections": (1, 1_000),
    "batch": (1, 500),
    "lease": (0.5, 3_600),
    "poll_interval": (0.01, 3_600),
    "grace": (0, 3_600),
    "loop_patience": (1, 3_600),
    "settle_after": (0, 1),
}
WHOLE = ("generation", "concurrency", "concurrency_at_most", "threads", "connections", "batch")


@pytest.mark.parametrize("field", RANGES)
def test_numbers_have_a_range(field: str) -> None:
    """Both ends are allowed; beyond them, and what is no number, is refused by name (OBX-7)."""
    low, high = RANGES[field]
    for value in (low, high):
        assert getattr(WorkerSettings(**{field: value}), field) == value  # type: ignore[arg-type]
    beyond = (low - 1, high * 2, float("nan"), float("inf"), "5", None, True)
    for value in beyond:
        with pytest.raises(ConfigurationError) as caught:
            WorkerSettings(**{field: value})  # type: ignore[arg-type]
        assert caught.value.field == f"WorkerSettings.{field}"
        assert "give a" in caught.value.remedy


@pytest.mark.parametrize("field", WHOLE)
def test_counts_are_whole_numbers(field: str) -> None:
    """There is no generation 1.5, nor half a connection (GEN-1)."""
    with pytest.raises(ConfigurationError) as caught:
        WorkerSettings(**{field: 1.5})  # type: ignore[arg-type]
    assert caught.value.field == f"WorkerSettings.{field}"


def test_every_number_is_checked() -> None:
    """A setting that is added later must be added to these tests (OBX-7)."""
    numbers = {each.name for each in dataclasses.fields(WorkerSettings) if each.type in ("int", "float", int, float)}
    assert numbers | {"concurrency"} == set(RANGES), 'concurrency may be "auto" too'


def test_connections_are_bounded() -> None:
    """What a worker process opens at most, with and without listening and transactions (OBX-7)."""
    settings = WorkerSettings(connections=7)
    assert settings.connections_needed(0) == 6
    assert settings.connections_needed(1) == 13
    assert settings.connections_needed(2) == settings.connections_needed(5) == 20
    assert WorkerSettings(listen=False).connections_needed(0) == 4


def test_settings_are_frozen() -> None:
    """What a worker was started with stays true (OBX-7)."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        WorkerSettings().lease = 1  # type: ignore[misc]


def test_worker_without_handlers_is_refused() -> None:
    """Nothing to do is a mistake (LSN-5)."""
    with pytest.raises(ConfigurationError, match="has no handlers"):
        Worker("postgresql://nobody@127.0.0.1:1/none", HandlerRegistry())
