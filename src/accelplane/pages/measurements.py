"""The plugins' measurements for the metrics page.

`Plugin.measure` reads files of drivers, and such a read may never return. Plugins are read one after the other in a
thread, and if one takes long, another thread reads the next one. A plugin whose read hangs is left out until
that read returns.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from accelplane.devices import Inventory
from accelplane.host import Host
from accelplane.host.blocking import ThreadQueue
from accelplane.node.hook_problems import ProblemsOf, problems_by_plugin
from accelplane.node.hook_results import Samples, checked_samples
from accelplane.pages.exposition import Family
from accelplane.plugins import Config, Plugin, Sample

_CLOSE_TIMEOUT = 0.5

Sources = Mapping[str, tuple[Plugin[Config], Inventory]]


class Measurements:
    """Reads the measurements of `sources()`: plugins by name, with what they found."""

    def __init__(
        self,
        sources: Callable[[], Sources],
        root: str,
        *,
        timeout: float = 5.0,
        queue: ThreadQueue | None = None,
        problems: ProblemsOf | None = None,
    ) -> None:
        """`timeout` is for all plugins together; scrapers usually wait for 10 s. `queue` has the threads that read."""
        self._sources = sources
        self._queue = queue or ThreadQueue()
        self._host = Host(root)
        self.timeout = timeout
        self._reads: dict[str, asyncio.Task[list[Sample]]] = {}
        self._hanging: set[str] = set()
        self._problems = problems or problems_by_plugin()
        # Samples that are left out of pages, by plugin and cause.
        self.dropped: Counter[tuple[str, str]] = Counter()

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
                self._problems(name).update("measure", [f"no result within {self.timeout:g} s"])
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
        found = await self._queue.submit(lambda: _measure(plugin, self._host.fresh(), inventory))
        for cause, count in found.dropped.items():
            self.dropped[name, cause] += count
        self._problems(name).update("measure", found.problems)
        return found.samples


def families(samples: Iterable[Sample]) -> list[Family]:
    """The families of valid samples. Of samples with equal names and labels the first one counts."""
    found: dict[str, Family] = {}
    for sample in samples:
        family = found.get(sample.name)
        if family is None:
            kind = "counter" if sample.name.endswith("_total") else "gauge"
            family = found[sample.name] = Family(sample.name, sample.help, kind)
        family.add(sample.value, sample.labels)
    return list(found.values())


def _measure(plugin: Plugin[Config], host: Host, inventory: Inventory) -> Samples:
    try:
        return checked_samples(plugin.measure(host, inventory))
    except Exception as error:  # noqa: BLE001 - a plugin's hook may raise anything
        return Samples([], {}, [f"{type(error).__name__}: {error}"])
