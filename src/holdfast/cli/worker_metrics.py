"""What `holdfast worker --metrics` serves: what this process has done, or all processes under a supervisor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from holdfast.cli import logs
from holdfast.measurements import Measurements
from holdfast.observability.http import Page
from holdfast.worker.process_reports import ProcessReports, Reporter

if TYPE_CHECKING:
    from prometheus_client import Metric

    from holdfast.observability.prometheus import Measured
# What makes the page is imported where it is served: most workers start without it.


class ProcessMetrics:
    """Those of one worker, or of a group of them."""

    def __init__(self, worker: Measured) -> None:
        self._worker = worker

    def measure(self) -> Measurements:
        """What this process has done."""
        own = replace(Measurements.of_publishing(), log_lines_dropped=logs.dropped())
        return self._worker.measurements() + own

    def pages(self) -> Mapping[str, Page]:
        """The page of the metrics."""
        from holdfast.observability.prometheus import ProcessFamilies

        families = ProcessFamilies()
        return _pages(lambda: families.of(self.measure()))

    @contextlib.contextmanager
    def reported(self, lifeline: int | None) -> Iterator[None]:
        """Report to the parent, if there is one that wants to know, until the block ends."""
        if lifeline is None:
            yield
            return
        reporter = Reporter(lifeline, self.measure)
        try:
            yield
        finally:
            reporter.close()


def pages_of_processes(reports: ProcessReports) -> Mapping[str, Page]:
    """The page of the metrics of all processes together."""
    from holdfast.observability.prometheus import ProcessFamilies

    families = ProcessFamilies()

    def collect() -> Iterator[Metric]:
        own = Measurements(log_lines_dropped=logs.dropped())
        return families.of(reports.measurements() + own, deaths=reports.deaths)

    return _pages(collect)


def _pages(collect: Callable[[], Iterable[Metric]]) -> Mapping[str, Page]:
    from holdfast.observability import endpoint

    return {endpoint.PATH: endpoint.process_page(collect)}
