"""The databases that `holdfast worker` serves: one, or several with a name each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.cli.databases import are_several
from holdfast.cli.targets import load_transactions
from holdfast.errors import ConfigurationError
from holdfast.failure import Redactor
from holdfast.handlers import HandlerRegistry
from holdfast.settings import WorkerSettings
from holdfast.telemetry import Observer
from holdfast.tracing import Tracing
from holdfast.worker.group import WorkerGroup
from holdfast.worker.readiness import refuse_unready
from holdfast.worker.worker import Worker


@dataclass(frozen=True, slots=True)
class Databases:
    """Addresses, addresses for LISTEN and sources of transactions, by the names of the databases."""

    addresses: Mapping[str, str]
    listen: Mapping[str, str]
    transactions: Mapping[str, Sequence[object]]

    @classmethod
    def of(cls, addresses: Mapping[str, str], listen: Mapping[str, str], transactions: Iterable[str]) -> Databases:
        """Check that what is given for a database names one that there is."""
        sources: dict[str, list[object]] = {}
        for given in transactions:
            name, _, target = given.rpartition("=")
            sources.setdefault(name, []).append(load_transactions(target))
        for option, names in (("--listen-dsn", listen), ("--transactions", sources)):
            for name in names:
                if name not in addresses:
                    problem = f"is for {name}, which has no address" if name else "does not say for which database"
                    shown = ", ".join(sorted(addresses)) if are_several(addresses) else "one without a name"
                    raise ConfigurationError(option, problem, f"begin it with NAME=; there is {shown}")
        return cls(addresses, listen, sources)

    @property
    def names(self) -> list[str]:
        """The names, if the databases have names."""
        return list(self.addresses) if are_several(self.addresses) else []

    def require_one_for(self, substrate: str | None) -> None:
        """Refuse a broker for several databases: what one has sent there, the workers of another would take."""
        if substrate is not None and len(self.addresses) > 1:
            remedy = "start a worker for each database that uses a broker"
            raise ConfigurationError("--substrate", "is given with several databases", remedy)

    def worker(
        self,
        registry: HandlerRegistry,
        settings: WorkerSettings,
        observers: Callable[[str | None], Iterable[Observer]],
        *,
        redact: Redactor | None = None,
        tracing: Tracing | None = None,
    ) -> Worker | WorkerGroup:
        """Return the worker, or the group of them. `observers` are those of a database, by its name."""

        def make(name: str) -> Worker:
            return Worker(
                self.addresses[name],
                registry,
                self._of(name, settings),
                observers=observers(name or None),
                redact=redact,
                tracing=tracing,
                transactions=self.transactions.get(name, ()),
            )

        return WorkerGroup(self.names, make) if self.names else make("")

    def _of(self, name: str, settings: WorkerSettings) -> WorkerSettings:
        return replace(settings, listen_dsn=self.listen.get(name))

    async def refuse_unready(self, settings: WorkerSettings) -> None:
        """Raise why the database refuses workers; of several, only if all of them do."""
        asked = [refuse_unready(address, self._of(name, settings)) for name, address in self.addresses.items()]
        found = await asyncio.gather(*asked, return_exceptions=True)
        if found[0] is not None and None not in found:
            raise found[0]

    def variables(self) -> dict[str, str]:
        """Return the environment in which a worker process finds the same databases."""
        found = {"HOLDFAST_DSN": self.addresses, "HOLDFAST_LISTEN_DSN": self.listen}
        return {
            variable: " ".join(f"{name}={address}" if name else address for name, address in addresses.items())
            for variable, addresses in found.items()
            if addresses
        }
