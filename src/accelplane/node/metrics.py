"""The metrics page. Numbers are kept where they arise, as plain attributes; here they become Prometheus families.

prometheus-client is imported with this module, that is only when somebody asked for a page.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from accelplane import __version__
from accelplane.host import Host
from accelplane.host.blocking import in_thread
from accelplane.kubelet.server import LATENCY_BOUNDS, Stage
from accelplane.node.agent import Agent
from accelplane.node.publish import Served
from accelplane.plugins import Sample

log = logging.getLogger(__name__)

_PATIENCE = 5.0  # seconds; scrapers usually wait for ten


class Readings:
    """The plugins' own readings. They are files, which may hang: nobody asks again before the last question returns."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._problems: dict[str, str] = {}
        self._taking: asyncio.Future[list[Sample]] | None = None

    async def take(self) -> list[Sample]:
        """What the plugins measure now; nothing while one of them hangs."""
        if self._taking is None or self._taking.done():
            self._taking = asyncio.ensure_future(in_thread(self._measured))
        done, _pending = await asyncio.wait((self._taking,), timeout=_PATIENCE)
        return self._taking.result() if done else []

    def _measured(self) -> list[Sample]:
        found: list[Sample] = []
        for name, runner in list(self._agent.runners.items()):
            if not runner.plugin.overrides("measure"):
                continue
            problem = ""
            try:
                own = list(runner.plugin.measure(Host(self._agent.settings.root), runner.inventory))
                # Values of other types, and names that are none, would cost the whole page.
                own = msgspec.convert(msgspec.to_builtins(own), list[Sample])
                list(_families(own))
                found += own
            except Exception as error:  # noqa: BLE001 - a plugin's own hook may raise anything; the others are shown
                problem = f"{type(error).__name__}: {error}"
            if problem != self._problems.get(name, ""):
                self._problems[name] = problem
                if problem:
                    log.warning("%s: its measurements are not on the metrics page: %s", name, problem)
        return found


def page(agent: Agent, own: Iterable[Sample]) -> bytes:
    """The text of `/metrics`, the plugins' `own` readings included."""
    registry = CollectorRegistry()
    registry.register(_Agent(agent, own))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class _Agent(Collector):
    """Everything the agent counts."""

    def __init__(self, agent: Agent, own: Iterable[Sample]) -> None:
        self._agent = agent
        self._own = own

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        info = GaugeMetricFamily("accelplane_build_info", "The running version.", labels=["version"])
        info.add_metric([__version__], 1)
        yield info
        refused = GaugeMetricFamily("accelplane_config_refused", "1 while the configuration file is refused.")
        refused.add_metric([], bool(self._agent.config_problem))
        yield refused
        yield from self._plugins()
        yield from _resources(
            {
                f"{runner.plugin.namespace}/{resource}": served
                for runner in self._agent.runners.values()
                for resource, served in runner.publisher.served.items()
            }
        )
        yield from _families(self._own)

    def _plugins(self) -> Iterator[Metric]:
        devices = GaugeMetricFamily("accelplane_devices", "Devices advertised.", labels=["resource", "health"])
        phases = GaugeMetricFamily(
            "accelplane_unit_health",
            "1 for the phase that a physical device is in.",
            labels=["plugin", "unit", "phase"],
        )
        skipped = GaugeMetricFamily("accelplane_skipped", "Hardware seen and not published.", labels=["plugin"])
        scans = CounterMetricFamily("accelplane_scans", "Scans of the host.", labels=["plugin"])
        failures = CounterMetricFamily("accelplane_scan_failures", "Scans that failed.", labels=["plugin"])
        seconds = GaugeMetricFamily("accelplane_scan_seconds", "Duration of the last scan.", labels=["plugin"])
        blind = GaugeMetricFamily("accelplane_scan_failing", "1 while scans fail.", labels=["plugin"])
        writes = CounterMetricFamily("accelplane_cdi_writes", "CDI files written.", labels=["plugin"])
        unwritten = CounterMetricFamily("accelplane_cdi_write_failures", "CDI files not written.", labels=["plugin"])
        for name, runner in self._agent.runners.items():
            for resource, found in runner.publisher.inventory.resources.items():
                counted = Counter({"Healthy": 0, "Unhealthy": 0})
                counted.update(device.health for device in found.values())
                for health, number in counted.items():
                    devices.add_metric([f"{runner.plugin.namespace}/{resource}", health], number)
            for unit, state in runner.health.states.items():
                phases.add_metric([name, unit, state.phase.value], 1)
            skipped.add_metric([name], len(runner.inventory.skipped))
            scans.add_metric([name], runner.scans)
            failures.add_metric([name], runner.scan_failures)
            seconds.add_metric([name], runner.scan_seconds)
            blind.add_metric([name], runner.blind)
            writes.add_metric([name], runner.cdi.writes)
            unwritten.add_metric([name], runner.cdi.write_failures)
        yield from (devices, phases, skipped, scans, failures, seconds, blind, writes, unwritten)


def _families(samples: Iterable[Sample]) -> Iterator[Metric]:
    families: dict[str, Metric] = {}
    for sample in samples:
        family = families.get(sample.name)
        if family is None:
            kind = "counter" if sample.name.endswith("_total") else "gauge"
            family = families[sample.name] = Metric(sample.name.removesuffix("_total"), sample.help, kind)
        family.add_sample(sample.name, dict(sample.labels), sample.value)
    yield from families.values()


def _resources(resources: dict[str, Served]) -> Iterator[Metric]:
    label = ["resource"]
    registered = GaugeMetricFamily("accelplane_registered", "1 while the kubelet knows the resource.", labels=label)
    registrations = CounterMetricFamily("accelplane_registrations", "Registrations accepted.", labels=label)
    refusals = CounterMetricFamily(
        "accelplane_registration_failures", "Registrations that failed, by gRPC status.", labels=["resource", "reason"]
    )
    lists = CounterMetricFamily("accelplane_lists_sent", "Device lists sent to a kubelet.", labels=label)
    last = GaugeMetricFamily(
        "accelplane_last_list_age_seconds", "Time since a device list was sent last.", labels=label
    )
    failures = CounterMetricFamily("accelplane_allocation_failures", "Allocations refused.", labels=label)
    latency = HistogramMetricFamily("accelplane_allocation_seconds", "Time to answer Allocate.", labels=label)
    now = time.time()
    for name, served in resources.items():
        counters = served.server.counters
        registered.add_metric([name], served.server.stage == Stage.REGISTERED)
        registrations.add_metric([name], counters.registrations)
        for reason, number in counters.registration_failures.items():
            refusals.add_metric([name, reason], number)
        lists.add_metric([name], counters.lists_sent)
        if counters.last_list_time:
            last.add_metric([name], now - counters.last_list_time)
        failures.add_metric([name], counters.allocation_failures)
        latency.add_metric([name], list(_cumulative(counters.allocation_seconds)), counters.allocation_seconds_sum)
    yield from (registered, registrations, refusals, lists, last, failures, latency)


def _cumulative(buckets: Iterable[float]) -> Iterator[tuple[str, float]]:
    total = 0.0
    for bound, number in zip((*map(str, LATENCY_BOUNDS), "+Inf"), buckets, strict=True):
        total += number
        yield bound, total
