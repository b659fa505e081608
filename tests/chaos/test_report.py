"""What the record of chaos runs says about itself (RUN-2)."""

from chaos import report


def run_of(scenario: str, seed: int, seconds: float = 6.0) -> report.Run:
    return {"scenario": scenario, "seed": seed, "seconds": seconds}


def test_the_commands_make_every_run_again() -> None:
    """A line for neighbouring seeds, and for the scenarios that were run with the same ones (RUN-2)."""
    runs = [
        *(run_of("mix", seed) for seed in (3, 1, 2, 7)),
        *(run_of(name, seed) for seed in (1, 2) for name in ("transactions_session", "transactions_django")),
        run_of("pooler", 1, 8.0),
        *({**run_of("mix_nats", seed, 8.0), "busy": True} for seed in (1, 2)),
    ]
    assert report.commands(runs) == [
        "./dev chaos --seeds 1..3 --for 6 --report",
        "./dev chaos --seed 7 --for 6 --report",
        "./dev chaos --scenario transactions_session --scenario transactions_django --seeds 1..2 --for 6 --report",
        "./dev chaos --scenario pooler --seed 1 --for 8 --report",
        "./dev chaos --scenario mix_nats --seeds 1..2 --for 8 --busy --report",
    ]


def test_the_record_gives_the_commands_that_are_published() -> None:
    """The page shows what the record says (RUN-2)."""
    page = report.PAGE.read_text()
    assert report.measured(report.recorded()) in page


def test_times_of_a_busy_machine_are_left_out() -> None:
    """What was lost or happened twice counts all the same (RUN-2)."""
    quiet, busy = ({"scenario": "deploy", "figures": {"stop_idle_s": each}} for each in (0.5, 4.0))
    assert report.worst([quiet, {**busy, "busy": True}], "stop_idle_s") == "0.5"
    assert report.worst([quiet, busy], "stop_idle_s", "deploy") == "4"
