"""The comparison with other libraries: what is counted, how it is said, and that the story can be told at all."""

from __future__ import annotations

import ast
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from chaos.peers import report
from chaos.peers.crew import Note, Sight, unfinished
from chaos.peers.faults import ACTS, FAULTS
from chaos.peers.run import play
from chaos.peers.systems import HOLDFAST, SYSTEMS

ROOT = Path(__file__).parents[2]
FIGURES: dict[str, Any] = {
    **{"events": 40, "delivered": 40, "twice": 0, "failed": 0, "exits": 0, "seconds": 31.24, "held": 7, "taken": 7},
    **{"effects": 1, "runs": 1, "first": 0.004, "waits": [0.004, 7.31, 0.8], "slowest": 0.62, "ended": 30},
    **{"error": "PayloadError", "usable": True, "whole": None},
}


def sight(owed: str, effects: str, open_: int = 0) -> Sight:
    return Sight(frozenset(owed), Counter(effects), open_)


def test_an_event_is_owed_by_its_business_row() -> None:
    """What has no effect is missing, what has two happened twice, whoever else wrote effects (P1, P2)."""
    assert (sight("abc", "abc").missing, sight("abc", "abc").twice) == (0, 0)
    assert (sight("abc", "aab").missing, sight("abc", "aab").twice) == (1, 1)
    assert sight("abc", "abbb").twice == 2
    assert sight("ab", "abz").delivered == 2


def test_done_is_what_both_the_effects_and_the_system_say() -> None:
    """An event that waits to be delivered once more is not over when its effect is there (P1)."""
    assert sight("ab", "ab").done
    assert not sight("ab", "a").done
    assert not sight("ab", "ab", open_=1).done


def test_what_a_process_is_in_the_middle_of() -> None:
    """Begun by this process and not ended by it; what it was given twice counts while one run is open (A1)."""
    notes = [
        *(Note("begin", key, 1.0, 7) for key in "abcd"),
        *(Note("end", key, 2.0, 7) for key in "ac"),
        *(Note("begin", "a", 3.0, 7), Note("whole", "b", 3.0, 7), Note("begin", "z", 3.0, 8), Note("end", "d", 3.0, 8)),
    ]
    assert unfinished(notes, 7) == {"a", "b", "d"}
    assert unfinished(notes, 8) == {"z"}
    assert unfinished(notes, 9) == set()


@pytest.mark.parametrize(
    ("fault", "change", "said"),
    [
        ("kill", {}, "40 of 40 delivered, the last of the 7 in its hands after 31.2 s; none twice"),
        ("kill", {"seconds": None, "delivered": 33}, "33 of 40 delivered, the last of the 7 in its hands not in 75 s"),
        ("kill", {"twice": 2}, "**2 effects twice**"),
        ("acknowledgement", {}, "one effect, the handler was run once; settled after 31.2 s"),
        ("acknowledgement", {"effects": 2, "runs": 2}, "**2 effects**, the handler was run 2 times"),
        ("listeners", {}, "after 0.00 s, 7.3 s, 0.80 s; workers stay alive"),
        (
            "listeners",
            {"waits": [0.1, None, 0.3], "exits": 2},
            "after 0.10 s, not in 75 s, 0.30 s; workers end 2 times",
        ),
        ("backends", {"exits": 8, "failed": 1}, "workers end 8 times; 40 of 40 delivered, 1 failed"),
        ("restart", {"exits": 1}, "a worker ends once; first handler after 0.00 s"),
        ("restart", {"seconds": None}, "the last not in 75 s"),
        ("poison", {"runs": 3}, "failed after 3 runs and 31 s; others: 40 of 40, the slowest after 0.62 s"),
        ("poison", {"runs": 5, "seconds": None}, "**5 runs in 120 s, and no end**"),
        ("freeze", {"twice": 1}, "7 of 7 taken over meanwhile; 40 of 40 delivered; **1 effect twice**"),
        ("null", {}, "`PayloadError`; the transaction goes on"),
        ("null", {"usable": False}, "**the caller's transaction is lost**"),
        ("null", {"error": None, "whole": True}, "accepted, and delivered whole"),
        ("null", {"error": None, "whole": False}, "**not delivered whole**"),
    ],
)
def test_what_was_seen_is_said(fault: str, change: dict[str, Any], said: str) -> None:
    """Each cell of the table is a plain fact with its figure, the bad ones in bold (RUN-2)."""
    assert said in FAULTS[fault].tell(FIGURES | change)


def run_of(**change: Any) -> report.Run:
    figures = {name: {system: FIGURES for system in SYSTEMS} for name in FAULTS}
    facts = {name: {"version": "1.0", "settings": "as they come", "effect": "its own"} for name in SYSTEMS}
    machine = {"seed": 1, "seconds": 500, "day": "2030-01-01", "postgres": "18.1", "python": "3.11", "cores": 2}
    return {**machine, "systems": facts, "faults": figures, **change}


def test_the_table_has_every_system_and_every_fault() -> None:
    """Versions and settings stand beside the figures (RUN-2)."""
    head, _, *rows = report.table(run_of())
    assert all(f"{name} 1.0" in head for name in SYSTEMS)
    assert {row.count(" | ") for row in rows} == {len(SYSTEMS)}
    assert all(any(row.startswith(f"| {fault.title} |") for row in rows) for fault in FAULTS.values())


def test_every_fault_has_its_turn() -> None:
    assert sorted(name for act in ACTS for name in act) == sorted(FAULTS)


def test_a_part_of_a_run_is_no_report() -> None:
    """A table with a system or a fault left out is not published (RUN-2)."""
    whole = run_of()
    assert report.is_complete(whole)
    assert not report.is_complete(run_of(faults={"kill": whole["faults"]["kill"]}))
    assert not report.is_complete(run_of(systems={"holdfast": whole["systems"]["holdfast"]}))


def test_a_broken_promise_of_our_own_is_found() -> None:
    """What others do is a fact; what Holdfast does is a promise (P1, P2)."""
    assert report.broken(run_of()) == []
    ours = {"kill": {"holdfast": FIGURES | {"delivered": 39}, "pgqueuer": FIGURES}}
    theirs = {"kill": {"holdfast": FIGURES, "pgqueuer": FIGURES | {"twice": 3}}}
    assert report.broken(run_of(faults=ours)) == ["kill: 39 of 40 delivered"]
    assert report.broken(run_of(faults={"kill": {"holdfast": FIGURES | {"twice": 3}}})) == ["kill: 3 effects twice"]
    assert report.broken(run_of(faults=theirs)) == []


def test_the_page_keeps_what_is_around_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report renews its own section, and no other (RUN-2)."""
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\noutdated\n{report.END}\nafter\n")
    monkeypatch.setattr(report, "PAGE", page)
    monkeypatch.setattr(report, "RESULT", tmp_path / "report" / "peers.json")
    report.write(run_of())
    text = page.read_text()
    assert text.startswith(f"before\n{report.BEGIN}\n") and text.endswith(f"{report.END}\nafter\n")
    assert "outdated" not in text and "faststream-outbox 1.0" in text
    assert json.loads(report.RESULT.read_text()) == run_of()


def test_the_page_has_the_markers() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text()
    assert text.count(report.BEGIN) == text.count(report.END) == 1


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=lambda system: system.name)
def test_programs_import_nothing_of_ours_but_the_story(system: Any) -> None:
    """They run in environments in which Holdfast is not installed (RUN-2)."""
    source = ROOT.joinpath(*system.program.split(".")).with_suffix(".py").read_text()
    imported = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and node.module}
    ours = {name for name in imported if name.split(".")[0] in ("chaos", "benchmarks", "holdfast", "tests")}
    allowed = {"chaos.peers", "chaos.peers.story"} | (set() if system.peer else {"holdfast", "holdfast.postgres"})
    assert ours <= allowed


@pytest.mark.slow
async def test_the_story_is_told() -> None:
    """With Holdfast, which needs no other environment: one effect, and a null character refused in time (A2, D1)."""
    names = ("acknowledgement", "null")
    run = await play(3, [HOLDFAST], [FAULTS[name] for name in names])
    acknowledged, null = (run["faults"][name]["holdfast"] for name in names)
    assert (acknowledged["effects"], acknowledged["runs"], acknowledged["exits"]) == (1, 1, 1)
    assert acknowledged["delivered"] == acknowledged["events"] == 1
    assert FAULTS["null"].tell(null) == "`PayloadError`; the transaction goes on"
    assert report.broken(run) == []


@pytest.mark.slow
@pytest.mark.nightly("faults of a peer")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", [name for name, system in SYSTEMS.items() if system.peer])
async def test_a_peer_meets_the_same_faults(name: str, request: pytest.FixtureRequest) -> None:
    """Its program runs in an environment of its own, and each fault ends with figures for both (RUN-2)."""
    faults = list(FAULTS) if request.config.option.nightly else ["acknowledgement", "null"]
    run = await play(3, [HOLDFAST, SYSTEMS[name]], [FAULTS[fault] for fault in faults])
    assert {fault: set(found) for fault, found in run["faults"].items()} == {
        each: {"holdfast", name} for each in faults
    }
    assert all(figures for found in run["faults"].values() for figures in found.values())
    assert report.broken(run) == []
