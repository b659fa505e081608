"""The scenarios of this package: what each must show."""

from dataclasses import replace

from chaos.flow import batches, breaker, fairness, limits, ordered
from chaos.scenario import Scenario
from chaos.world import Setup

FLOW = Setup(rate=0, application="chaos.flow.app:registry")

SCENARIOS = (
    Scenario(
        "ordered",
        "LSN-9: 10,000 ordering keys, 8 workers, kills, retries and replays; calls as a model of a key allows them",
        (),
        setup=replace(FLOW, workers=8, lease=6),
        limits={"violations": 0},
        floors={"keys": ordered.KEYS, "kills": 3, "retries": 1, "replays": 1},
        measure=ordered.measure,
    ),
    Scenario(
        "fleet_limits",
        "LSN-10: 7 at once over 5 workers with kills, and 100 a second; neither exceeded, and both used",
        (),
        setup=replace(FLOW, workers=5),
        limits={"at_once": limits.AT_ONCE, "rate_per_s": 1.05 * limits.RATE},
        floors={"slots_used": 0.9, "rate_per_s": 0.95 * limits.RATE, "kills": len(limits.KILLS)},
        measure=limits.measure,
    ),
    Scenario(
        "fairness",
        "LSN-15: the single events of some tenants beside 200,000 of another, at full speed; within a second",
        (),
        setup=FLOW,
        limits={"single_max_s": 1.0},
        floors={"singles": fairness.SINGLES, "left_behind": 1},
        measure=fairness.measure,
    ),
    Scenario(
        "breaker",
        "LSN-17: a partner is down for two minutes with 10,000 events due, workers die; few calls, no dead letter",
        (),
        setup=replace(FLOW, workers=5),
        limits={"calls": 200, "handled_after_s": 20.0, "dead_letters": 0},
        floors={"outage_s": breaker.OUTAGE, "kills": len(breaker.KILLS) + 1},
        measure=breaker.measure,
    ),
    Scenario(
        "poisoned_batch",
        "LSN-12: ten poisoned events among 10,000 in batches; they fail alone",
        (),
        setup=FLOW,
        limits={"others_failed": 0, "attempts": 1},
        floors={"poisoned_failed": batches.POISONED, "handled": batches.COUNT - batches.POISONED},
        measure=batches.measure,
    ),
)
