"""The thirteen benchmarks: which arms each has, quick and in full, and which limits."""

from typing import Any

from benchmarks.benchmark import Arm, Benchmark, Limit, Options, Results, course, middle, ratio, to_raw


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
    return arms


def drain_also(results: Results) -> dict[str, Any]:
    found = {"two_to_one": ratio(results, "two", "one")}
    if "raw two" in results:
        found["raw_two_to_one"] = ratio(results, "raw two", "raw one")
    return found


def horizon(quick: bool) -> list[Arm]:
    return pair("drain", {"count": 100_000 if quick else 200_000, "hold": True})


def horizon_also(results: Results) -> dict[str, Any]:
    return {
        "last_to_first": middle(results, "holdfast", "last_to_first"),
        "raw_last_to_first": middle(results, "raw", "last_to_first"),
        "pace": course(results, "holdfast", "pace"),
        "raw_pace": course(results, "raw", "pace"),
    }


def transactional(quick: bool) -> list[Arm]:
    return pair("transactional", {"count": 4_000 if quick else 20_000})


def failures(quick: bool) -> list[Arm]:
    options = {"count": 8_000 if quick else 30_000}
    again = options | {"kind": "retried"}
    return [
        *pair("failures", options),
        Arm("retried", "holdfast", "failures", again),
        Arm("raw retried", "raw", "failures", again),
    ]


def failures_also(results: Results) -> dict[str, Any]:
    return {
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


def publish_many(quick: bool) -> list[Arm]:
    options = {"count": 20_000 if quick else 100_000}
    return [*pair("publish_many", options), Arm("copy", "raw", "publish_many", options | {"kind": "copy"})]


def http(quick: bool) -> list[Arm]:
    options = {"seconds": 3 if quick else 10, "connections": 8}
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
    full = options | {"kept": kept_labels(quick)["kept"]}
    return [
        *pair("scrape", options),
        Arm("kept", "holdfast", "scrape", full),
        Arm("raw kept", "raw", "scrape", full),
    ]


def scrape_also(results: Results) -> dict[str, Any]:
    return {
        "ms_empty": middle(results, "holdfast", "ms"),
        "ms_kept": middle(results, "kept", "ms"),
        "ms_kept_to_empty": ratio(results, "kept", "holdfast", "ms"),
        "raw_ms_kept_to_empty": ratio(results, "raw kept", "raw", "ms"),
    }


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
            quick_repeats=3,
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
            "How fast do events fail for good, and after a retry?",
            failures,
            failures_also,
            peers="failures",
        ),
        Benchmark(
            "transactional",
            "How fast are handlers that write in the same transaction?",
            transactional,
            limits=to_raw(0.6),
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
            "Do the events that are kept slow a scrape of the metrics down?",
            scrape,
            scrape_also,
            figure="ms",
            unit="ms",
            repeats=3,
            limits={"ms_kept_to_empty": Limit("<=", 1.5)},
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
    )
}
