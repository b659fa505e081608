"""Which faults, in which surroundings, and the promise that they prove.

The nemeses of a lane strike one after the other; lanes strike side by side.
"""

from collections.abc import Callable
from dataclasses import replace

from chaos import poison, standby, surroundings
from chaos.flow import scenarios as flow
from chaos.libraries import LIBRARIES
from chaos.nemeses import Nemesis
from chaos.nemeses.brokers import (
    CutBroker,
    CutReplication,
    FreezeBroker,
    KillBroker,
    KillLeader,
    LoseBrokerAnswers,
    PartitionBroker,
    PromoteReplica,
)
from chaos.nemeses.deployments import CloseLogins, RollOut, StepClock
from chaos.nemeses.lines import (
    Blackhole,
    CutLines,
    CutMessage,
    FreezeLines,
    LoseAnswers,
    RefuseLines,
    StopBehindDeadLines,
    SwallowLines,
)
from chaos.nemeses.operators import TurnHandlers, TurnPartitions
from chaos.nemeses.processes import FreezeWorkers, HoldLogs, HurryWorkers, KillWorkers, StopWorkers
from chaos.nemeses.resources import (
    FillDisk,
    FloodOfNotifications,
    HogConnections,
    HoldSnapshot,
    ImpatientProducers,
    LockTable,
    TooManyConnections,
)
from chaos.nemeses.servers import Failover, FreezePostgres, KillPooler, RestartPostgres, SlowCommits, Terminate
from chaos.nemeses.troubles import Crowd, Hostile, Neighbours, Trouble
from chaos.scenario import Lane, Scenario
from chaos.substrates import SUBSTRATES
from chaos.world import Setup


def restart() -> Nemesis:
    return RestartPostgres("fast", "restart_postgres", "B6, P7: workers outlive a restart of the server")


def long_outage() -> Nemesis:
    return RestartPostgres("fast", "long_outage", "P7: connecting is tried in a measured way", (6.0, 9.0))


def crash() -> Nemesis:
    return RestartPostgres("immediate", "crash_postgres", "B6, P1: nothing is lost by a crash and recovery")


def kill_server() -> Nemesis:
    return RestartPostgres(None, "kill_postgres", "B6, P1: nothing is lost when the server is killed")


def terminate_all() -> Nemesis:
    return Terminate("%", "terminate_backends", "B2: every connection may be ended at any moment")


def terminate_listeners() -> Nemesis:
    return Terminate("holdfast listen%", "terminate_listeners", "B1, P4: the next event is there within 5 s")


def exits() -> Nemesis:
    return Trouble("exit", "A3: a handler that ends its process fails by max_deliveries; others flow")


def blocks() -> Nemesis:
    return Trouble("block", "A4: a handler that blocks the loop keeps its lease, and happens once", leases=3.0)


def hangs() -> Nemesis:
    return Trouble("hang", "RTY: a handler that never returns is stopped at its time limit", most=3)


def dies(moment: str) -> Callable[[], Nemesis]:
    return lambda: Trouble(f"die_{moment}", f"A2: SIGKILL {moment.replace('_', ' ')}: one effect", most=2)


def rolling() -> Nemesis:
    return StopWorkers(most=SETUP.workers)


PROCESSES: Lane = (
    KillWorkers,
    KillWorkers,
    FreezeWorkers,
    StopWorkers,
    HurryWorkers,
    exits,
    blocks,
    hangs,
    dies("before_commit"),
    dies("after_commit"),
    dies("after_effect"),
    Hostile,
    HoldLogs,
    RollOut,
    Crowd,
    TurnHandlers,
    TurnPartitions,
    lambda: Neighbours(100),
)
SERVER: Lane = (
    restart,
    crash,
    kill_server,
    FreezePostgres,
    terminate_all,
    LockTable,
    HoldSnapshot,
    FloodOfNotifications,
    CloseLogins,
    SlowCommits,
)
LINES: Lane = (
    terminate_listeners,
    CutLines,
    LoseAnswers,
    RefuseLines,
    lambda: FreezeLines((2.0, 6.0)),
)
SETUP = Setup()
QUIET = Setup(rate=0, probes=5, poll_interval=30)
SLOW_CONCURRENCY = 20
SLOW = Setup(workers=2, imports=3_000, rate=100, batch=100, concurrency=SLOW_CONCURRENCY)
MIX = Setup(imports=3_000, crowd=30)  # with more, workers would mostly be starting
RECLAIM = SETUP.lease + SETUP.poll_interval + 1


def transactions(library: str) -> Scenario:
    """Everything that may happen to a handler's transaction, in one of the application's libraries."""
    return Scenario(
        f"transactions_{library}",
        f"LSN-13, P1, P2: effects in transactions of {library}; whatever strikes workers, server and lines, once each",
        (
            (
                KillWorkers,
                FreezeWorkers,
                StopWorkers,
                HurryWorkers,
                dies("before_commit"),
                dies("after_commit"),
                blocks,
            ),
            (restart, crash, kill_server, FreezePostgres, terminate_all, LockTable, CloseLogins),
            (CutLines, LoseAnswers, RefuseLines, lambda: FreezeLines((2.0, 6.0))),
        ),
        setup=Setup(rate=150, library=library),
    )


BROKER: Lane = (KillBroker, KillBroker, FreezeBroker, CutBroker, LoseBrokerAnswers, PartitionBroker)


def carried(broker: str, *faults: Callable[[], Nemesis]) -> Scenario:
    """The mix of faults with a broker that carries the events, and faults of its own."""
    return Scenario(
        f"mix_{broker}",
        f"SCL-2, P1, P2: {broker} carries the events; its servers, workers and Postgres fail side by side",
        ((*BROKER, *faults), (*PROCESSES[:12], TurnHandlers), (*SERVER[:7], *LINES)),
        setup=Setup(rate=100, broker=broker),
        surrounding=SUBSTRATES[broker],
        floors={"relayed": 50},
    )


SCENARIOS = {
    each.name: each
    for each in (
        *map(transactions, LIBRARIES),
        Scenario(
            "mix",
            "P1, P2, P8: nothing lost, nothing twice, whatever happens together",
            (PROCESSES, (*SERVER, StepClock), LINES),
            setup=MIX,
            surrounding=surroundings.STEPPING_CLOCK,
            otherwise=Scenario(
                "mix",
                "P1, P2, P8: the same with a clock that nobody sets",
                (PROCESSES, SERVER, LINES),
                setup=MIX,
            ),
        ),
        carried("nats", KillLeader),
        carried("redis", PromoteReplica, PromoteReplica, CutReplication),
        carried("rabbitmq"),
        Scenario(
            "nats_leader",
            "SCL-2, P1: the leader of three NATS servers is killed every five seconds",
            ((KillLeader,),),
            setup=Setup(rate=150, lease=10, broker="nats"),
            surrounding=SUBSTRATES["nats"],
            pause=(5, 5),
        ),
        Scenario(
            "redis_promotions",
            "SCL-2, P1: the replica of a Valkey is promoted again and again",
            ((PromoteReplica, PromoteReplica, CutReplication),),
            setup=Setup(rate=150, broker="redis"),
            surrounding=SUBSTRATES["redis"],
            pause=(3, 5),
        ),
        Scenario(
            "rabbitmq_restarts",
            "SCL-2, P1: a RabbitMQ node is killed and started again under load",
            ((KillLeader,),),
            setup=Setup(rate=100, broker="rabbitmq"),
            surrounding=SUBSTRATES["rabbitmq"],
            pause=(3, 6),
        ),
        Scenario(
            "kill_workers",
            "A1, P1-P3: SIGKILL in the middle of anything; re-claimed within lease + poll + 1 s",
            ((KillWorkers,),),
            pause=(2, 3.5),  # most of the time somebody must be left to claim
            limits={"reclaim_p99_s": RECLAIM},
        ),
        Scenario("stop_workers", "P2: SIGSTOP for longer than the lease; fenced on waking", ((FreezeWorkers,),)),
        Scenario(
            "kill_after_effect",
            "A2: SIGKILL between effect and settle; one effect, row done",
            ((dies("before_commit"), dies("after_commit"), dies("after_effect")),),
        ),
        Scenario(
            "exit_poison",
            "A3: os._exit in a handler; failed after its attempts, others flow",
            ((exits,),),
            pause=(3, 5),
        ),
        Scenario(
            "block_loop",
            "A4: time.sleep for three leases; not run twice, and a warning names the handler",
            ((blocks,),),
            pause=(2, 4),
            says={"loop_blocked": "trouble.block"},
        ),
        Scenario("hang", "A handler that never returns; stopped at its time limit, others flow", ((hangs,),)),
        Scenario(
            "restart_postgres",
            "B6, P7: pg_ctl restart; first claim within 5 s, at most one connect per second and worker",
            ((restart, long_outage),),
            setup=Setup(lease=10),
            pause=(3, 5),
            limits={"first_claim_s": 5.0, "connects_per_s": 1.0},
        ),
        Scenario(
            "kill_postgres",
            "B6, P7: immediate stops and SIGKILL of the server under load",
            ((crash, kill_server),),
            pause=(3, 6),
            limits={"first_claim_s": 5.0},
        ),
        Scenario("freeze_postgres", "P1: a server that answers nobody, then goes on", ((FreezePostgres,),)),
        Scenario(
            "terminate_backends",
            "B2: every connection ended every three seconds, and never more of them than configured",
            ((terminate_all,),),
            pause=(3, 3),
            limits={"connections_max": SETUP.connections_at_most},
        ),
        Scenario(
            "terminate_listener",
            "B1, P4: 50 ms with LISTEN, 5 s after the listener's connection is ended, with no polling",
            ((terminate_listeners,),),
            setup=QUIET,
            pause=(6, 8),
            limits={"wake_p99_ms": 50.0, "wake_after_fault_s": 5.0},
        ),
        Scenario("cut_lines", "P1: connections reset in the middle of anything", ((CutLines, RefuseLines),)),
        Scenario(
            "lose_answers",
            "P1, P2: carried out by the server, and nobody was told",
            ((LoseAnswers,),),
            pause=(0.5, 1.5),
        ),
        Scenario(
            "half_open",
            "B3, P4: connections on which nothing comes any more; found out within 15 s",
            ((lambda: FreezeLines((16.0, 18.0), producers=0.0),),),
            # A dead line is noticed after a third of the lease and two seconds, which a lease has to outlast.
            setup=replace(QUIET, lease=10),
            pause=(2, 3),
            limits={"wake_after_fault_s": 15.0, "noticed_s": 15.0},
        ),
        Scenario(
            "blackhole",
            "B3: the workers' network swallows every packet for 16 s; found out, and nothing twice",
            ((Blackhole,),),
            surrounding=surroundings.NAMESPACE,
            pause=(4, 6),
            limits={"noticed_s": 15.0},
            otherwise=Scenario(
                "blackhole_by_proxy",
                "B3: a proxy in place of the network swallows everything; found out, and nothing twice",
                ((SwallowLines,),),
                pause=(4, 6),
                limits={"noticed_s": 15.0},
            ),
        ),
        Scenario(
            "pool_exhausted",
            "B9: one connection for handlers, and handlers that sit on it",
            ((HogConnections,),),
            setup=Setup(connections=1, rate=30),
            pause=(4, 8),
            says={"connections_exhausted": "WorkerSettings.connections"},
        ),
        Scenario(
            "too_many_connections",
            "B10: max_connections reached (53300) while workers start",
            ((TooManyConnections,),),
            setup=Setup(server={"max_connections": "90"}, rate=150),
        ),
        Scenario("lock_table", "B11: ACCESS EXCLUSIVE on the outbox, past every statement's limit", ((LockTable,),)),
        Scenario(
            "statement_timeout",
            "B11: statements of 200 ms at most (50 ms for producers) and a table that is locked for longer",
            ((lambda: ImpatientProducers((1.0, 3.0)),),),
            setup=Setup(lease=0.6),
            pause=(1, 3),
        ),
        Scenario(
            "disk_full",
            "B15: the tablespace is full (53100), and then it is not",
            ((FillDisk,),),
            surrounding=surroundings.SMALL_DISK,
            setup=Setup(rate=150),
            pause=(3, 5),
        ),
        Scenario(
            "deploy",
            "A9, A10, P5: rolling restarts under load; idle 2 s, busy grace + 1 s, half-open grace + 5 s",
            ((rolling, HurryWorkers, StopBehindDeadLines),),
            limits={
                "stop_idle_s": 2.0,
                "stop_busy_s": SETUP.grace + 1,
                "stop_hurried_s": 2.0,
                "stop_half_open_s": SETUP.grace + 5,
            },
        ),
        Scenario(
            "limits",
            "LSN-10, LSN-17: limits, pauses and a partner's outages while workers die; no dead letter, nothing stuck",
            ((KillWorkers, FreezeWorkers, StopWorkers, terminate_all), (TurnHandlers,)),
            pause=(1, 3),
        ),
        Scenario(
            "partitions",
            "OBX-6: the outbox is partitioned and made one table again while workers die; nothing lost, nothing twice",
            ((KillWorkers, FreezeWorkers, StopWorkers, terminate_all), (TurnPartitions,)),
            pause=(1, 3),
        ),
        Scenario("hostile", "A12, D1-D6: payloads, errors and exceptions that nobody expects", ((Hostile,),)),
        Scenario(
            "clock_skew",
            "C1: workers ten minutes ahead and behind; leases, retries and delays are the database's",
            ((KillWorkers, FreezeWorkers, terminate_all),),
            surrounding=surroundings.SKEWED_CLOCKS,
        ),
        Scenario(
            "pooler",
            "B4, B5: pgbouncer in transaction mode; one error names the cause, polling works",
            ((KillPooler, KillWorkers, terminate_all),),
            surrounding=surroundings.POOLED,
            says={"listener_pooled": "pooler"},
        ),
        Scenario(
            "poison",
            "P6: one bad row in a thousand costs one row; 0.95 of the throughput is left",
            (),
            setup=Setup(rate=0),
            floors={f"throughput_{kind}": 0.95 for kind in (*poison.AT_FULL_SPEED, *poison.AT_A_STEADY_RATE)},
            measure=poison.measure,
        ),
        Scenario(
            "cut_messages",
            "P1, P2: the connection is cut before, within or after any message of the protocol",
            ((CutMessage,),),
            surrounding=surroundings.WIRED,
            setup=Setup(rate=150),
            pause=(0.2, 1.0),
        ),
        Scenario(
            "failover",
            "B7: a standby is promoted under load, addresses name both; first claim within 10 s",
            ((Failover,),),
            surrounding=standby.STANDBY,
            pause=(8, 10),
            once=True,
            limits={"first_claim_s": 10.0},
        ),
        Scenario(
            "clock_steps",
            "T14: the database's clock 2 h forward and 1 h back; no overlap, and the dead's rows come back in time",
            ((StepClock,), (KillWorkers,)),
            surrounding=surroundings.STEPPING_CLOCK,
            pause=(1, 3),
            # A lease that was cut to its length after a step back ends that much later.
            limits={"overlaps": 0, "reclaim_p99_s": RECLAIM + SETUP.lease + 1},
        ),
        Scenario(
            "failed_logins",
            "T12: password, login, database or connections denied to workers; nothing runs again, back within 5 s",
            ((CloseLogins,),),
            setup=Setup(lease=15),
            pause=(2, 3),
            limits={"repeats": 0, "first_claim_s": 5.0, "connects_per_s": 1.0},
        ),
        Scenario(
            "blocked_log",
            "T16: logs that nobody reads; deliveries go on, SIGTERM ends within grace + 5 s, lines are counted",
            ((HoldLogs,),),
            limits={"stop_unread_s": SETUP.grace + 5},
            floors={"unread_per_s": SETUP.rate / 5},
            says={"log_lines_dropped": "count"},
        ),
        Scenario(
            "rolling_upgrade",
            "T13: old and new release beside each other: migrate, deploy, kills, and back; all of them at work",
            ((RollOut,), (KillWorkers,)),
            pause=(1, 3),
            floors={"old_at_work": SETUP.workers, "new_at_work": 1},
        ),
        Scenario(
            "many_handlers",
            "T15: 300 patterns and 3,000 event types with a handler each; heard of at once, with no polling",
            ((Crowd, terminate_listeners, StopWorkers),),
            setup=replace(QUIET, crowd=300),
            pause=(6, 8),
            # The promise of 50 ms (p99) is for a machine that does nothing else than this.
            limits={"wake_p50_ms": 50.0, "wake_p99_ms": 100.0, "wake_after_fault_s": 5.0},
        ),
        Scenario(
            "slow_commits",
            "LSN-16: commits of 60 ms and SIGKILL; at most two batches and what runs are repeated",
            ((lambda: SlowCommits(backlog=10_000),), (KillWorkers,)),
            setup=SLOW,
            pause=(0.5, 1.5),
            limits={"repeats_of_one": 2 * SLOW.batch + SLOW_CONCURRENCY},
        ),
        Scenario(
            "slow_neighbours",
            "LSN-17: handlers that wait, hang or block threads; a fast one and lone events go on as before",
            ((Neighbours,),),
            setup=Setup(rate=30, imports=500, probes=20),
            pause=(1, 2),
            limits={"lone_p50_ms": 100.0, "fast_p99_s": 2.0},
        ),
        *flow.SCENARIOS,
    )
}
