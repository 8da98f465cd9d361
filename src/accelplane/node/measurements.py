"""The plugins' measurements for the metrics page.

`Plugin.measure` reads files of drivers, and such a read may never return. So each plugin is read in a thread of its
own, and a plugin whose read hangs is left out until that read returns.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

import msgspec

from accelplane.devices import Inventory
from accelplane.host import Host
from accelplane.host.blocking import in_thread
from accelplane.node.exposition import Family
from accelplane.plugins import Plugin, Sample
from accelplane.plugins.base import Config

log = logging.getLogger(__name__)

_CLOSE_TIMEOUT = 0.5

Sources = Mapping[str, tuple[Plugin[Config], Inventory]]


class Measurements:
    """Reads the measurements of `sources()`: plugins by name, with what they found."""

    def __init__(self, sources: Callable[[], Sources], root: str, *, timeout: float = 5.0) -> None:
        """`timeout` is for all plugins together; scrapers usually wait for 10 s."""
        self._sources = sources
        self._root = root
        self.timeout = timeout
        self._reads: dict[str, asyncio.Task[list[Sample]]] = {}
        self._hanging: set[str] = set()
        self._problems: dict[str, str] = {}

    async def take(self) -> list[Sample]:
        """The current samples of every plugin that returns them in time. Calls at the same time share one read."""
        reads: dict[str, asyncio.Task[list[Sample]]] = {}
        for name, (plugin, inventory) in self._sources().items():
            if not plugin.overrides("measure"):
                continue
            read = self._reads.get(name)
            if read is None or read.done():
                self._hanging.discard(name)
                read = self._reads[name] = asyncio.create_task(self._read(name, plugin, inventory))
            if name not in self._hanging:
                reads[name] = read
        if reads:
            await asyncio.wait(reads.values(), timeout=self.timeout)
        samples: list[Sample] = []
        for name, read in reads.items():
            if not read.done():
                self._hanging.add(name)
                self._report(name, f"no result within {self.timeout:g} s")
            elif not read.cancelled():
                samples += read.result()
        return samples

    async def close(self) -> None:
        """Ends all reads. A thread that hangs in the kernel ends with the process."""
        reads = [read for read in self._reads.values() if not read.done()]
        if reads:
            await asyncio.wait(reads, timeout=_CLOSE_TIMEOUT)
        for read in reads:
            read.cancel()
        await asyncio.gather(*reads, return_exceptions=True)

    async def _read(self, name: str, plugin: Plugin[Config], inventory: Inventory) -> list[Sample]:
        samples, problem = await in_thread(lambda: _measure(plugin, Host(self._root), inventory))
        self._report(name, problem)
        return samples

    def _report(self, name: str, problem: str) -> None:
        """Logs each problem once."""
        if problem and problem != self._problems.get(name):
            log.warning("%s: measurements are left out of the metrics page: %s", name, problem)
        self._problems[name] = problem


def families(samples: Iterable[Sample]) -> list[Family]:
    """Raises `ValueError` if a name is invalid."""
    found: dict[str, Family] = {}
    for sample in samples:
        family = found.get(sample.name)
        if family is None:
            kind = "counter" if sample.name.endswith("_total") else "gauge"
            family = found[sample.name] = Family(sample.name, sample.help, kind)
        family.add(sample.value, sample.labels)
    return list(found.values())


def _measure(plugin: Plugin[Config], host: Host, inventory: Inventory) -> tuple[list[Sample], str]:
    """Valid samples, or none and the problem."""
    try:
        samples = list(plugin.measure(host, inventory))
        # One invalid name or value would make the whole page invalid.
        samples = msgspec.convert(msgspec.to_builtins(samples), list[Sample])
        families(samples)
    except Exception as error:  # noqa: BLE001 - a plugin's hook may raise anything
        return [], f"{type(error).__name__}: {error}"
    return samples, ""
