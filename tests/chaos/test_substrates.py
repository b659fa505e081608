"""A short run with brokers that carry the events and fail beside workers and Postgres; longer with --nightly."""

from __future__ import annotations

import json

import pytest

from tests.chaos.test_mix import chaos

pytestmark = pytest.mark.slow

SHORT = {"mix_nats": 6, "mix_redis": 6, "mix_rabbitmq": 8}
LONG = {"mix_nats": 40, "mix_redis": 40, "mix_rabbitmq": 40}
LONG |= {"nats_leader": 60, "redis_promotions": 60, "rabbitmq_restarts": 60}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "scenario" in metafunc.fixturenames:
        chosen = LONG if metafunc.config.option.nightly else SHORT
        metafunc.parametrize(("scenario", "seconds"), chosen.items(), ids=chosen)


@pytest.mark.nightly("mix of faults")
@pytest.mark.timeout(300)
def test_nothing_is_lost_with_a_broker(scenario: str, seconds: int) -> None:
    """No event lost, none unexpected, no effect twice, and events went through the broker (SCL-2, P1, P2)."""
    run = chaos("--scenario", scenario, "--seed", "5", "--for", str(seconds), "--busy", "--json", timeout=280)
    found = json.loads(run.stdout.splitlines()[-1])
    assert run.returncode == 0, f"{found['problems']}\n{run.stderr}"
    assert found["strikes"] >= 2
    assert found["figures"]["relayed"] >= 50
    assert found["acknowledged"] + found["recovered"] == found["delivered"] + found["put_aside"]
    must_be_zero = ("lost", "unexpected", "effect_duplicates", "leaked_connections")
    assert {name: found[name] for name in must_be_zero} == dict.fromkeys(must_be_zero, 0)


def test_a_substrate_has_a_mix_of_its_own() -> None:
    run = chaos("--substrate", "nats", "--scenario", "kill_workers")
    assert run.returncode == 2
    assert "--substrate has a mix of its own" in run.stderr
