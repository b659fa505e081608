"""The doctor: is the installation sound, and what would put it right?"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from starlette.responses import Response

from holdfast.console.formatting import plural
from holdfast.console.page import Call, Page
from holdfast.operator import CHECKS, Operator, Report

_SELDOM: Final = 15.0  # seconds that an examination is shown to everybody who asks
GLYPHS: Final = {"problem": "failed", "warning": "warning", "note": "note"}


@dataclass(frozen=True, slots=True)
class Examined:
    """A report of the doctor, and when it was made."""

    report: Report
    read_at: float


class DoctorFeed:
    """The examination, which everybody shares; it is not made live."""

    def normal(self, argument: str) -> str | None:
        """All pages share one examination, so there is no argument."""
        return None if argument else ""

    async def read(self, operator: Operator, argument: str, before: Any) -> Examined:
        """Examine the installation, unless that was done a moment ago."""
        now = time.monotonic()
        if isinstance(before, Examined) and now - before.read_at < _SELDOM:
            return before
        return Examined(await operator.doctor(), now)

    def fragments(self, value: Examined) -> Mapping[str, tuple[str, dict[str, Any]]]:
        """Return nothing: what somebody reads or copies does not move."""
        return {}


async def show(call: Call) -> Response:
    """Show what the doctor found."""
    snapshot = await call.console.hub.latest("doctor")
    report: Report = snapshot.value.report
    asked = {check.name: check.about for check in CHECKS}
    return call.render(
        "doctor.html",
        active="doctor",
        title="Doctor",
        report=report,
        glyphs=GLYPHS,
        passed=[(name, asked.get(name, name)) for name in report.passed],
        sentence=_sentence(report),
        cli="holdfast doctor",
    )


def _sentence(report: Report) -> str:
    found = [
        (len(report.of("problem")), "problem"),
        (len(report.of("warning")), "warning"),
        (len(report.of("note")), "note"),
    ]
    told = ", ".join(plural(number, word) for number, word in found if number)
    if not told:
        return f"It is sound: {plural(len(report.passed), 'check has', 'checks have')} passed."
    sound = "It is not sound" if report.of("problem") else "Nothing is broken"
    return f"{sound}: {told}; {len(report.passed)} of {plural(len(report.checks), 'check')} passed."


PAGES = (Page("/doctor", "doctor", get=show),)
