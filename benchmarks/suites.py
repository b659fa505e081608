"""The benchmarks: which arms each has, quick and in full, and which limits."""

from typing import Any

from benchmarks import observed
from benchmarks.benchmark import Arm, Benchmark, Limit, Options, Results, course, middle, paired, ratio, to_raw
from benchmarks.suites_of_loads import LOADS
from benchmarks.suites_of_workers import WORKERS


def pair(verb: str, options: Options) -> list[Arm]:
    """Holdfast and the control, doing the same."""
    return [Arm("holdfast", "holdfast", verb, options), Arm("raw", "raw", verb, options)]


# --- delivering ---


def drain(quick: bool) -> list[Arm]:
    options = {"count": 20_000 if quick else 50_000}
    arms = pair("drain", options)
    for label, processes in (("one", 1), ("two", 2)):
        arms.append(Arm(label, "holdfast", "drain_together", options | {"processes": processes}))
        if not quick:
            arms.append(Arm(f"raw {label}", "raw", "drain_together", options | {"processes": processes}))
    # What the log costs, and what the inbox does.
    arms.append(Arm("unobserved", "holdfast", "drain", options | {"observed": observed.OFF}))
    arms.append(Arm("lean", "raw", "drain", options | {"kind": "lean"}))
    return arms


def drain_also(results: Results) -> dict[str, Any]:
    found = {
        "two_to_one": ratio(results, "two", "one"),
        "observed_to_unobserved": ratio(results, "holdfast", "unobserved"),
        "raw_to_lean": ratio(results, "raw", "lean"),
    }
    if "raw two" in results:
        found["raw_two_to_one"] = ratio(results, "raw two", "raw one")
    return found


def observability(quick: bool) -> list[Arm]:
    """Quick: short turns and many of them. Those without a limit are in the first."""
    count = 16_000 if quick else 50_000
    labels = observed.QUICK if quick else observed.ARMS
    watched = [
        Arm(label, "holdfast", "drain", {"count": count, "observed": label}, every=observed_every(label, quick))
        for label in labels
    ]
    return [*watched, Arm("raw", "raw", "drain", {"count": count}, every=observed_every("raw", quick))]


def observed_every(label: str, quick: bool) -> int:
    return 5 if quick and label not in observed.LIMITED else 1


def observability_also(results: Results) -> dict[str, Any]:
    labels = [label for label in observed.ARMS if label in results and label != observed.OFF]
    turns = len(results[observed.OFF])
    return {
        f"{label}_to_off": (paired if len(results[label]) == turns else ratio)(results, label, observed.OFF)
        for label in labels
    }


def horizon(quick: bool) -> list[Arm]:
    return pair("drain", {"count": 100_000 if quick else 200_000, "hold": True})


def horizon_also(results: Results) -> dict[str, Any]:
    return {
        "last_to_first": middle(results, "holdfast", "last_to_first"),
        "raw_last_to_first": middle(results, "raw", "last_to_first"),
        "pace": course(results, "holdfast", "pace"),
        "raw_pace": course(results, "raw", "pace"),
    }


# The application's libraries, beside asyncpg: as a driver's figures are named, and as its arms are.
LIBRARIES = ("async_session", "session", "psycopg_async", "psycopg", "django")


def transactional(quick: bool) -> list[Arm]:
    options = {"count": 4_000 if quick else 20_000}
    arms = pair("transactional", options)
    for library in LIBRARIES:
        own = {"count": 2_000 if quick else 8_000, "kind": library}
        arms.append(Arm(library, "holdfast", "transactional", own))
        arms.append(Arm(f"raw {library}", "raw", "transactional", own))
    return arms


def transactional_also(results: Results) -> dict[str, Any]:
    ratios = {library: ratio(results, library, f"raw {library}") for library in LIBRARIES}
    by_driver = {"asyncpg": ratio(results, "holdfast", "raw"), **ratios}
    return {
        "ratio_to_raw_by_driver": by_driver,
        **{f"ratio_to_raw_{library}": found for library, found in ratios.items()},
    }


def limited(quick: bool) -> list[Arm]:
    options = {"count": 20_000 if quick else 50_000}
    kinds = {"concurrency": "fleet_concurrency", "rate": "rate", "breaker": "breaker"}
    arms = [Arm(label, "holdfast", "drain", options | {"kind": kind}) for label, kind in kinds.items()]
    return [*pair("drain", options), *arms]


def limited_also(results: Results) -> dict[str, Any]:
    return {f"{label}_to_unlimited": ratio(results, label, "holdfast") for label in ("concurrency", "rate", "breaker")}


def partitioned(quick: bool) -> list[Arm]:
    options = {"count": 20_000 if quick else 50_000}
    return [
        *pair("drain", options),
        Arm("partitioned", "holdfast", "drain", options | {"kind": "partitioned"}),
        Arm("convert", "holdfast", "convert", {"kept": 200_000 if quick else 5_000_000}),
        Arm("drop", "holdfast", "drop", {"kept": 100_000 if quick else 1_000_000}),
    ]


def partitioned_also(results: Results) -> dict[str, Any]:
    return {
        "partitioned_to_plain": ratio(results, "partitioned", "holdfast"),
        **{
            figure: middle(results, "convert", figure)
            for figure in ("conversion_s", "longest_publish_s", "longest_gap_s", "failed_publishes", "lost_events")
        },
        "drop_s": middle(results, "drop", "drop_s"),
    }


def batch(quick: bool) -> list[Arm]:
    options = {"count": 4_000 if quick else 20_000}
    return [
        Arm("holdfast", "holdfast", "batch", options),
        Arm("raw", "raw", "transactional", options),
        Arm("single", "holdfast", "transactional", options),
    ]


def batch_also(results: Results) -> dict[str, Any]:
    return {"batch_to_single": ratio(results, "holdfast", "single")}


def ordered(quick: bool) -> list[Arm]:
    options = {"count": 20_000 if quick else 50_000}
    steady = {"seconds": 5 if quick else 20, "connections": 2, "rate": 100}
    hot = {"kind": "hot", "count": 20_000 if quick else 100_000}
    return [
        *pair("drain", options),
        Arm("ordered", "holdfast", "drain", options | {"kind": "ordered"}),
        Arm("keyed", "holdfast", "latency", steady | {"kind": "keyed"}),
        Arm("hot", "holdfast", "latency", steady | hot),
    ]


def ordered_also(results: Results) -> dict[str, Any]:
    return {
        "ordered_to_unordered": ratio(results, "ordered", "holdfast"),
        "inversions": middle(results, "ordered", "inversions"),
        "keyed_p99_ms": middle(results, "keyed", "p99_ms"),
        "hot_p99_ms": middle(results, "hot", "p99_ms"),
        "hot_to_keyed": ratio(results, "hot", "keyed", "p99_ms"),
        "hot_per_second": middle(results, "hot", "hot_per_second"),
    }


def fair(quick: bool) -> list[Arm]:
    options = {"count": 20_000 if quick else 50_000}
    return [*pair("drain", options), Arm("fair", "holdfast", "drain", options | {"kind": "fair"})]


def fair_also(results: Results) -> dict[str, Any]:
    """`before_single`: after how many events of one tenant the only event of another was handled."""
    return {
        "fair_to_plain": ratio(results, "fair", "holdfast"),
        "before_single": middle(results, "fair", "before_single"),
    }


def brief(quick: bool) -> list[Arm]:
    options = {"count": 20_000 if quick else 50_000}
    return [*pair("drain", options), Arm("brief", "holdfast", "drain", options | {"kind": "brief"})]


def brief_also(results: Results) -> dict[str, Any]:
    return {"brief_to_kept": ratio(results, "brief", "holdfast")}


def failures(quick: bool) -> list[Arm]:
    """With the log as `holdfast worker` writes it by default, into a file; `off` is without observers."""
    count = {"count": 8_000 if quick else 30_000}
    options = count | {"observed": "log"}
    again = {"kind": "retried"}
    return [
        Arm("holdfast", "holdfast", "failures", options),
        Arm("off", "holdfast", "failures", count | {"observed": observed.OFF}),
        Arm("raw", "raw", "failures", count),
        Arm("retried", "holdfast", "failures", options | again, every=2 if quick else 1),
        Arm("raw retried", "raw", "failures", count | again, every=2 if quick else 1),
    ]


def failures_also(results: Results) -> dict[str, Any]:
    return {
        "log_to_off": paired(results, "holdfast", "off"),
        "retried_per_second": middle(results, "retried"),
        "retried_to_raw": ratio(results, "retried", "raw retried"),
    }


def fanout(quick: bool) -> list[Arm]:
    return pair("fanout", {"count": 6_000 if quick else 20_000, "handlers": 3})


def large(quick: bool) -> list[Arm]:
    return pair("drain", {"count": 3_000 if quick else 10_000, "size": 10_000})


MOST_KEPT = 10_000_000


def kept_labels(quick: bool) -> dict[str, int]:
    """How many delivered events are kept, by arm; `kept` has the most."""
    return {"kept": 300_000} if quick else {"kept 1 M": 1_000_000, "kept": MOST_KEPT}


def growth(quick: bool) -> list[Arm]:
    options = {"count": 20_000 if quick else 50_000}
    return [
        *pair("drain", options),
        *(Arm(label, "holdfast", "drain", options | {"kept": kept}) for label, kept in kept_labels(quick).items()),
    ]


def growth_also(results: Results) -> dict[str, Any]:
    found = {
        "kept_to_empty": ratio(results, "kept", "holdfast"),
        "claim_p50_ms": middle(results, "kept", "claim_p50_ms"),
        "claim_p99_ms": middle(results, "kept", "claim_p99_ms"),
        "claim_p99_to_empty": ratio(results, "kept", "holdfast", "claim_p99_ms"),
    }
    if "kept 1 M" in results:
        found["kept_1m_to_empty"] = ratio(results, "kept 1 M", "holdfast")
    return found


def memory(quick: bool) -> list[Arm]:
    many = {"count": 100_000 if quick else 1_000_000, "until": 20_000}
    big = {"count": 500 if quick else 2_000, "size": 262_000}  # 256 KiB is what the library allows
    return [*pair("memory", many), Arm("large", "holdfast", "memory", big), Arm("raw large", "raw", "memory", big)]


def memory_also(results: Results) -> dict[str, Any]:
    return {"rss_mb_large": middle(results, "large", "rss_mb"), "raw_large": middle(results, "raw large", "rss_mb")}


# --- publishing ---


def publish(quick: bool) -> list[Arm]:
    """In full: 1, 8 and 16 connections, with a business row and without, three ways to notify; and a busy worker."""
    arms = []
    for connections in (8, 1, 16):
        for bare in (False, True):
            options = {"seconds": 1.2 if quick else 4, "connections": connections, "bare": bare}
            arms += [
                Arm(publish_label("holdfast", options), "holdfast", "publish", options),
                Arm(publish_label("raw", options), "raw", "publish", options),
                *(
                    Arm(publish_label(notify, options), "holdfast", "publish", options | {"notify": notify})
                    for notify in ("always", "never")
                ),
            ]
    for connections in (8, 16):
        options = {"seconds": 1.2 if quick else 4, "connections": connections, "busy": True}
        for name, notify in (("busy", "when_idle"), ("busy never", "never")):
            label = publish_label(name, options)
            arms.append(Arm(label, "holdfast", "publish", options | {"notify": notify}))
    wanted = ("holdfast", "raw", *(arm.label for arm in arms if arm.label.startswith("busy")))
    return [arm for arm in arms if arm.label in wanted] if quick else arms


def publish_label(name: str, options: Options) -> str:
    parts = [
        name,
        "" if options["connections"] == 8 else str(options["connections"]),
        "bare" if options.get("bare") else "",
    ]
    return " ".join(filter(None, parts))


def publish_also(results: Results) -> dict[str, Any]:
    found = {
        "when_idle_to_never": ratio(results, "busy", "busy never"),
        "when_idle_to_never_16": ratio(results, "busy 16", "busy never 16"),
    }
    if "always" in results:
        found["always_to_raw"] = ratio(results, "always", "raw")
    for variant in ("1", "16", "bare", "1 bare", "16 bare"):
        if f"holdfast {variant}" in results:
            name = f"ratio_to_raw_{variant.replace(' ', '_')}"
            found[name] = ratio(results, f"holdfast {variant}", f"raw {variant}")
    return found


def business(quick: bool) -> list[Arm]:
    options = {"seconds": 1.2 if quick else 5, "connections": 8}
    return [
        *pair("publish", options),
        Arm("without", "raw", "publish", options | {"kind": "without"}),
        Arm("alone", "holdfast", "publish", options | {"kind": "alone"}),
    ]


def business_also(results: Results) -> dict[str, Any]:
    return {
        "with_to_without": ratio(results, "holdfast", "without"),
        "alone_to_without": ratio(results, "alone", "without"),
        "alone_round_trips": middle(results, "alone", "round_trips"),
    }


def publish_many(quick: bool) -> list[Arm]:
    options = {"count": 20_000 if quick else 100_000}
    return [*pair("publish_many", options), Arm("copy", "raw", "publish_many", options | {"kind": "copy"})]


def http(quick: bool) -> list[Arm]:
    options = {"seconds": 1.5 if quick else 10, "connections": 8}
    asyncpg = options | {"kind": "asyncpg"}
    return [
        *pair("http", options),
        Arm("holdfast asyncpg", "holdfast", "http", asyncpg),
        Arm("raw asyncpg", "raw", "http", asyncpg),
    ]


def http_also(results: Results) -> dict[str, Any]:
    return {
        "ratio_to_raw_asyncpg": ratio(results, "holdfast asyncpg", "raw asyncpg"),
        "raw_p50_ms": middle(results, "raw", "p50_ms"),
    }


# --- waiting and looking ---


def latency(quick: bool) -> list[Arm]:
    steady = {"seconds": 6 if quick else 20, "connections": 2, "rate": 50}
    busy = {"seconds": 4 if quick else 15, "connections": 8, "rate": 1_000}
    return [
        *pair("latency", steady),
        Arm("busy", "holdfast", "latency", busy),
        Arm("raw busy", "raw", "latency", busy),
        Arm("flood", "holdfast", "latency", {"seconds": 3 if quick else 15, "connections": 8, "rate": 0}),
    ]


def latency_also(results: Results) -> dict[str, Any]:
    return {
        "raw_p99_ms": middle(results, "raw", "p99_ms"),
        "busy_per_second": middle(results, "busy"),
        "busy_p50_ms": middle(results, "busy", "p50_ms"),
        "busy_p99_ms": middle(results, "busy", "p99_ms"),
        "raw_busy_p99_ms": middle(results, "raw busy", "p99_ms"),
        "flood_per_second": middle(results, "flood"),
        "flood_notifications_per_event": middle(results, "flood", "notifications"),
    }


def scrape(quick: bool) -> list[Arm]:
    options = {"count": 100 if quick else 300}
    kept = {"kept": kept_labels(quick)["kept"]}
    status = {"count": 20 if quick else 50, "handlers": 1_000}
    return [
        Arm("holdfast", "holdfast", "scrape", options, reads=True),
        Arm("raw", "raw", "scrape", options, reads=True),
        Arm("kept", "holdfast", "scrape", options | kept, reads=True),
        Arm("raw kept", "raw", "scrape", options | kept, reads=True),
        Arm("status", "holdfast", "status", status, reads=True),
        Arm("status kept", "holdfast", "status", status | kept, reads=True),
    ]


def scrape_also(results: Results) -> dict[str, Any]:
    return {
        "ms_empty": middle(results, "holdfast", "ms"),
        "ms_kept": middle(results, "kept", "ms"),
        "ms_kept_to_empty": ratio(results, "kept", "holdfast", "ms"),
        "raw_ms_kept_to_empty": ratio(results, "raw kept", "raw", "ms"),
        "status_ms": middle(results, "status", "ms"),
        "status_ms_kept_to_empty": ratio(results, "status kept", "status", "ms"),
    }


# --- brokers ---


def carried(verb: str, options: Options) -> list[Arm]:
    """Holdfast and the control, on NATS and on Valkey."""
    return [
        *pair(verb, options | {"kind": "nats"}),
        Arm("redis", "holdfast", verb, options | {"kind": "redis"}),
        Arm("raw redis", "raw", verb, options | {"kind": "redis"}),
    ]


def elsewhere(verb: str, count: int) -> list[Arm]:
    """RabbitMQ from the machine's package, and librdkafka's mock of Kafka, which keeps nothing on a disk."""
    return [Arm(kind, "holdfast", verb, {"count": count, "kind": kind}) for kind in ("rabbitmq", "kafka")]


def relay(quick: bool) -> list[Arm]:
    arms = carried("relay", {"count": 20_000 if quick else 50_000})
    return arms if quick else [*arms, *elsewhere("relay", 10_000)]


def consume(quick: bool) -> list[Arm]:
    count = 20_000 if quick else 50_000
    arms = carried("consume", {"count": count})
    if quick:
        return arms
    alone = [Arm("outbox", "holdfast", "drain", {"count": count}), Arm("outbox tx", "holdfast", "transactional", {})]
    tx = [Arm(f"{kind} tx", "holdfast", "consume_tx", {"kind": kind}) for kind in ("nats", "redis")]
    return [*arms, *elsewhere("consume", 10_000), *tx, *alone]


def broker_latency(quick: bool) -> list[Arm]:
    return carried("broker_latency", {"seconds": 5 if quick else 20, "connections": 8, "rate": 1_000})


def carried_also(results: Results) -> dict[str, Any]:
    return {
        "ratio_to_raw_nats": ratio(results, "holdfast", "raw"),
        "ratio_to_raw_redis": ratio(results, "redis", "raw redis"),
    }


def broker_latency_also(results: Results) -> dict[str, Any]:
    return {
        "p99_ms_redis": middle(results, "redis", "p99_ms"),
        "raw_p99_ms": middle(results, "raw", "p99_ms"),
        "raw_p99_ms_redis": middle(results, "raw redis", "p99_ms"),
        "carried_per_second": middle(results, "holdfast", "per_second"),
    }


CARRIED = {"ratio_to_raw_nats": Limit(">=", 0.7), "ratio_to_raw_redis": Limit(">=", 0.7)}

# What no noise of a machine can move. Of an event's two updates the claim should be heap-only.
DRAIN_COUNTERS = {
    "wal_bytes": Limit("<=", 2_000),
    "hot_share": Limit(">=", 0.45),
    "round_trips": Limit("<=", 0.02),
}

BENCHMARKS = {
    each.name: each
    for each in (
        Benchmark(
            "drain",
            "How fast does one process deliver what is waiting, and how fast do two?",
            drain,
            drain_also,
            peers="drain",
            limits=to_raw(0.75)
            | {
                "two_to_one": Limit(">=", 1.0),
                "ratio_to_fastest_peer": Limit(">=", 1.6, if_measured=True),
                "ratio_to_faststream_outbox": Limit(">=", 4, if_measured=True),
            }
            | DRAIN_COUNTERS,
        ),
        Benchmark(
            "publish",
            "What does publishing add to a business transaction?",
            publish,
            publish_also,
            repeats=3,
            peers="publish",
            limits=to_raw(0.9) | {"when_idle_to_never": Limit(">=", 0.9), "when_idle_to_never_16": Limit(">=", 0.8)},
        ),
        Benchmark(
            "business",
            "What does an event add to a user's transaction?",
            business,
            business_also,
            peers="publish",
            limits={
                "with_to_without": Limit(">=", 0.42),
                "ratio_to_fastest_peer": Limit(">=", 1.15, if_measured=True),
                "alone_round_trips": Limit("<=", 1.01),
            },
        ),
        Benchmark(
            "publish_many",
            "How fast is bulk publishing, beside the fastest insert of the same rows?",
            publish_many,
            lambda results: {"ratio_to_copy": ratio(results, "holdfast", "copy")},
            peers="publish_many",
            limits=to_raw(0.8),
        ),
        Benchmark(
            "http",
            "What does an idempotency key add to a request that commits?",
            http,
            http_also,
            unit="requests/s",
            limits=to_raw(0.87),  # at most 15 % more time for each request
        ),
        Benchmark(
            "latency",
            "How long from commit to handler, at 50 and at 1,000 events per second?",
            latency,
            latency_also,
            figure="p50_ms",
            unit="ms",
            repeats=3,
            quick_repeats=1,
            peers="latency",
            limits={
                "p50_ms": Limit("<=", 3),
                "p99_ms": Limit("<=", 15),
                "busy_p99_ms": Limit("<=", 50),
                "flood_notifications_per_event": Limit("<", 0.05),
            },
        ),
        Benchmark(
            "failures",
            "How fast do events fail for good, and after a retry, while all of it is logged?",
            failures,
            failures_also,
            peers="failures",
            limits={"ratio_to_fastest_peer": Limit(">=", 3, if_measured=True)},
        ),
        Benchmark(
            "transactional",
            "How fast are handlers that write in the same transaction?",
            transactional,
            transactional_also,
            quick_repeats=1,  # of twelve arms
            limits=to_raw(0.75) | {f"ratio_to_raw_{library}": Limit(">=", 0.75) for library in LIBRARIES},
        ),
        Benchmark(
            "batch",
            "How fast is a batch handler, beside one that writes the same in a transaction for each event?",
            batch,
            batch_also,
            limits={"batch_to_single": Limit(">=", 1.3)},
        ),
        Benchmark(
            "growth",
            "Do the events that are kept slow the drain down?",
            growth,
            growth_also,
            repeats=3,
            quick_repeats=3,
            limits={"kept_to_empty": Limit(">=", 0.95), "claim_p99_to_empty": Limit("<=", 1.2)},
        ),
        Benchmark(
            "horizon",
            "Does a snapshot that is held open slow the drain down?",
            horizon,
            horizon_also,
            repeats=3,
            quick_repeats=1,
            limits={"last_to_first": Limit(">=", 0.8)},
        ),
        Benchmark(
            "observability",
            "What do logs, metrics and traces cost a worker that drains?",
            observability,
            observability_also,
            quick_repeats=5,
            limits={
                "log_metrics_to_off": Limit(">=", 0.9),
                "traces_1_to_off": Limit(">=", 0.85),
            },
        ),
        Benchmark(
            "limited",
            "What do a limit that never binds, and a breaker that stays closed, cost a worker that drains?",
            limited,
            limited_also,
            quick_repeats=3,
            limits={"concurrency_to_unlimited": Limit(">=", 0.7), "rate_to_unlimited": Limit(">=", 0.7)},
        ),
        Benchmark(
            "partitioned",
            "What do partitions cost a drain, how long does a conversion hold others up, and how long is a drop?",
            partitioned,
            partitioned_also,
            repeats=3,
            quick_repeats=3,
            limits={
                "partitioned_to_plain": Limit(">=", 0.9),
                "failed_publishes": Limit("<=", 0),
                "lost_events": Limit("<=", 0),
                "longest_publish_s": Limit("<=", 2),
                "longest_gap_s": Limit("<=", 2),
                "drop_s": Limit("<=", 1),
            },
        ),
        Benchmark(
            "ordered",
            "How fast does a worker drain 10,000 ordering keys, in order, and does a hot key slow the others down?",
            ordered,
            ordered_also,
            quick_repeats=3,
            limits={
                "ordered_to_unordered": Limit(">=", 0.5),
                "inversions": Limit("<=", 0),
                "hot_to_keyed": Limit("<=", 1.5),
            },
        ),
        Benchmark(
            "fair",
            "How long does the single event of one tenant wait behind all the others, which are another's?",
            fair,
            fair_also,
            quick_repeats=3,
            limits={"before_single": Limit("<=", 1_000)},
        ),
        Benchmark(
            "brief",
            "How fast does a worker drain if no delivered row is kept, beside one that keeps them?",
            brief,
            brief_also,
            quick_repeats=3,
            limits={"brief_to_kept": Limit(">=", 1.0)},
        ),
        Benchmark("large", "How fast are payloads of 10 KB?", large),
        Benchmark(
            "fanout",
            "How fast are three handlers per event?",
            fanout,
            unit="deliveries/s",
            limits=to_raw(0.8),
        ),
        Benchmark(
            "scrape",
            "Do the events that are kept slow a scrape of the metrics down, or the status of 1,000 busy handlers?",
            scrape,
            scrape_also,
            figure="ms",
            unit="ms",
            repeats=3,
            limits={"ms_kept_to_empty": Limit("<=", 1.5), "status_ms_kept_to_empty": Limit("<=", 1.5)},
        ),
        Benchmark(
            "memory",
            "How much memory does a worker need with a backlog of many, and of large, events?",
            memory,
            memory_also,
            figure="rss_mb",
            unit="MB",
            repeats=1,
            quick_repeats=1,
            limits={"rss_mb": Limit("<=", 150), "rss_mb_large": Limit("<=", 150)},
        ),
        *WORKERS,
        *LOADS,
        Benchmark(
            "relay",
            "How fast does the relay send events to a broker, confirmed before they are settled?",
            relay,
            carried_also,
            repeats=3,
            limits=CARRIED,
        ),
        Benchmark(
            "consume",
            "How fast does a worker handle what a broker has, beside a loop with the same inbox?",
            consume,
            carried_also,
            repeats=3,
            limits=CARRIED,
        ),
        Benchmark(
            "broker_latency",
            "How long is it from commit to handler by way of a broker, at 1,000 events a second?",
            broker_latency,
            broker_latency_also,
            figure="p99_ms",
            unit="ms",
            repeats=3,
            quick_repeats=1,
            limits={"p99_ms": Limit("<=", 50), "p99_ms_redis": Limit("<=", 50)},
        ),
    )
}
