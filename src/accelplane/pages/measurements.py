"""The plugins' measurements for the metrics page.

`Plugin.measure` reads files of drivers, and such a read may never return. Plugins are read one after the other in a
thread, and if one takes long, another thread reads the next one. A plugin whose read hangs is left out until
that read returns.
"""

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from accelplane.devices import Inventory
from accelplane.host import Host
from accelplane.host.blocking import ThreadQueue
from accelplane.pages.exposition import MAX_PLUGIN_SAMPLES, OWN_PREFIXES, Family
from accelplane.plugins import Config, Plugin, Sample

log = logging.getLogger(__name__)

_CLOSE_TIMEOUT = 0.5
_MAX_EXAMINED = 20_000
# The agent's own families that plugins of this project measure.
_MEASURED_OWN = frozenset(("accelplane_sgx_epc_bytes",))

Sources = Mapping[str, tuple[Plugin[Config], Inventory]]


class Measurements:
    """Reads the measurements of `sources()`: plugins by name, with what they found."""

    def __init__(
        self, sources: Callable[[], Sources], root: str, *, timeout: float = 5.0, queue: ThreadQueue | None = None
    ) -> None:
        """`timeout` is for all plugins together; scrapers usually wait for 10 s. `queue` has the threads that read."""
        self._sources = sources
        self._queue = queue or ThreadQueue()
        self._host = Host(root)
        self.timeout = timeout
        self._reads: dict[str, asyncio.Task[list[Sample]]] = {}
        self._hanging: set[str] = set()
        self._problems: dict[str, str] = {}
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
        found = await self._queue.submit(lambda: _measure(plugin, self._host.fresh(), inventory))
        for cause, count in found.dropped.items():
            self.dropped[name, cause] += count
        self._report(name, found.problem)
        return found.samples

    def _report(self, name: str, problem: str) -> None:
        if problem and problem != self._problems.get(name):
            log.warning("%s: measurements are left out of the metrics page: %s", name, problem)
        self._problems[name] = problem


class _Measured(NamedTuple):
    """Valid samples within the limits, the number of others by cause, and why there are others."""

    samples: list[Sample]
    dropped: Mapping[str, int] = {}
    problem: str = ""


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


def _measure(plugin: Plugin[Config], host: Host, inventory: Inventory) -> _Measured:
    try:
        # One more than the limit of what is examined: a plugin may yield without end.
        found = list(itertools.islice(plugin.measure(host, inventory), _MAX_EXAMINED + 1))
        samples = msgspec.convert(msgspec.to_builtins(found), list[Sample])
    except msgspec.ValidationError as error:
        return _Measured([], {"invalid-value": 1}, f"{type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001 - a plugin's hook may raise anything
        return _Measured([], {}, f"{type(error).__name__}: {error}")
    try:
        # One invalid name would make the whole page invalid.
        for name in {sample.name for sample in samples}:
            if name.startswith(OWN_PREFIXES) and name not in _MEASURED_OWN:
                raise ValueError(f"metric name {name!a}: expected another prefix than {' or '.join(OWN_PREFIXES)}")
        families(samples)
    except ValueError as error:
        return _Measured([], {"invalid-name": len(samples)}, f"{type(error).__name__}: {error}")
    return _limit(samples)


def _limit(samples: Sequence[Sample]) -> _Measured:
    """The samples of the first families, as many as the limit allows. A family is complete or left out."""
    counts = Counter(sample.name for sample in samples)
    totals = zip(counts, itertools.accumulate(counts.values()), strict=True)
    kept = {name for name, total in totals if total <= MAX_PLUGIN_SAMPLES}
    found = [sample for sample in samples if sample.name in kept]
    left_out = len(samples) - len(found)
    if not left_out:
        return _Measured(found)
    problem = f"found {len(samples)} samples, expected at most {MAX_PLUGIN_SAMPLES}; {left_out} are left out"
    return _Measured(found, {"limit": left_out}, problem)
