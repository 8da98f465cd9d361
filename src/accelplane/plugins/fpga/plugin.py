"""The FPGA plugin: programmed functions (mode af), or regions to program (modes region and regiondevel)."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from accelplane.devices import Device
from accelplane.fpga.drivers import DFL, DRIVERS, detect
from accelplane.fpga.ids import NAMESPACE
from accelplane.fpga.sysfs import Port
from accelplane.host import Host, HostError
from accelplane.logs import v
from accelplane.plugins.base import DevicePlans, Plugin, Sample, ScanResult, Watch
from accelplane.plugins.fpga.config import MODES, FpgaConfig
from accelplane.plugins.fpga.nodemode import NodeMode
from accelplane.plugins.fpga.programmings import programmings
from accelplane.plugins.fpga.scan import CDI_KIND, PublishedPort, Reading, devices_of, read, recall

if TYPE_CHECKING:
    from accelplane.apiserver import ApiServer

log = logging.getLogger(__name__)

_DEFAULT_NAMING_MAX = 54  # characters of a resource with -resource-naming=default


class FpgaPlugin(Plugin[FpgaConfig]):
    """Publishes `fpga.intel.com/af-…`, or `/region-…`."""

    namespace = NAMESPACE
    exclusive_namespace = True
    watch = Watch(frozenset(("fpga", "fpga_region", "platform", "pci")))
    cdi_kinds = (CDI_KIND,)

    def __init__(
        self,
        config: FpgaConfig | None = None,
        *,
        api: "Callable[[], ApiServer | None] | None" = None,
        interval: float = 5.0,
    ) -> None:
        """`api` returns the API server for the Node object. The IDs are read every `interval` seconds."""
        super().__init__(config)
        self._node = NodeMode(self.config, api)
        self._interval = interval
        self._present = asyncio.Event()
        self._reading = Reading()
        self._prepared: Host | None = None  # for the scan after `prepare`, which has read it
        # With whether it has AFU ids: of the other modes it would be incomplete.
        self._known: tuple[bool, Mapping[str, PublishedPort]] = (False, {})
        self._record_problems: set[str] = set()

    async def refresh(self, host: Host) -> None:
        """Reads the mode of the node once a driver is loaded."""
        driver = None if self._present.is_set() else detect(host)
        if driver is not None:
            await self._node.ask()
            log.log(v(1), "FPGA driver %s, mode %s by %s", driver.name, self._node.mode, self._node.source)
            self._present.set()

    def prepare(self, host: Host) -> None:
        """Reads the IDs, and stores them for times at which they cannot be read. Writes nothing."""
        afus = self._afus
        self._reading = read(host, afus=afus)
        self._known = (afus, recall(self._known_of(afus), self._reading))
        self._prepared = host

    def scan(self, host: Host) -> ScanResult:
        mode = self._node.mode
        afus = mode == "af"
        # The mode may have changed since `prepare`.
        reading = self._reading if self._prepared is host and self._known[0] == afus else read(host, afus=afus)
        self._prepared = None
        known, obstacle = self._known_of(afus), self._node.obstacle
        return devices_of(host, reading, known, self.config, mode, obstacle=obstacle)

    async def background(self, host: Host, request_scan: Callable[[], None]) -> None:
        await self._present.wait()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._node.follow(request_scan))
            group.create_task(self._keep_reading(host, request_scan))

    def socket_name(self, resource: str) -> str:
        # With the namespace and the default directory of the kubelet, names of April 2020 exceed sun_path (unix(7)).
        return f"fpga-{resource}.sock" if len(resource) > _DEFAULT_NAMING_MAX else super().socket_name(resource)

    def measure(self, host: Host, devices: Iterable[Device]) -> Iterator[Sample]:
        ports: dict[str, int] = {}
        for device in devices:
            fme = device.text("fme") or device.id
            ports[fme] = ports.get(fme, 0) + len((device.text("ports") or device.id).split(", "))
        for mode in MODES if ports else ():
            description = "1 for the current mode of the FPGA plugin"
            yield Sample("fpga_mode", description, {"mode": mode}, float(mode == self._node.mode))
        for fme, number in ports.items():
            yield Sample("fpga_ports", "Ports published of an FPGA", {"device": fme}, float(number))
        samples, problems = programmings(host)
        for problem in problems - self._record_problems:
            log.warning("%s; its metrics are missing", problem)
        self._record_problems = problems
        yield from samples

    def readings(self, host: Host, devices: Iterable[Device]) -> DevicePlans:
        from accelplane.readings import dfl, opae, pci  # noqa: PLC0415 - memory of agents without pages

        driver = detect(host)
        if driver is None:
            return
        sources = dfl.sources if driver is DFL else opae.sources
        ports_of: dict[str, list[Port]] = {}
        for known in self._known[1].values():
            ports_of.setdefault(known.port.fme.path, []).append(known.port)
        units = {device.unit for device in devices}
        for path, ports in ports_of.items():
            fme = ports[0].fme
            names = {fme.name, *(port.name for port in ports)}
            own_sources = sources(host, path, [(port.name, port.path) for port in ports])
            found = (*pci.sources(host, fme.pci.path), *own_sources)
            attributes = {"driver": driver.name.lower()}
            yield pci.plan(host, fme.name, fme.pci.path, found, attributes, units=sorted(units & names))

    def explain(self, host: Host) -> Mapping[str, object]:
        driver = detect(host)
        if driver is None:
            return {"likely-cause": _ABSENCE}
        return {"driver": driver.name, "options": self.config}

    def absence(self, host: Host) -> str:
        """Returns why the drop-in command does not start on this host, or an empty text."""
        return "" if self.config.wait_for_driver or detect(host) is not None else f"{_ABSENCE}, or set -wait-for-driver"

    @property
    def _afus(self) -> bool:
        return self._node.mode == "af"

    def _known_of(self, afus: bool) -> Mapping[str, PublishedPort]:
        return self._known[1] if self._known[0] == afus else {}

    async def _keep_reading(self, host: Host, request_scan: Callable[[], None]) -> None:
        """Requests a scan if IDs change: the kernel sends no uevent after programming or a firmware crash."""
        while True:
            busy = any(seen.afu is None for seen in self._reading.ports)
            await asyncio.sleep(self._interval / 5 if busy else self._interval)
            try:
                now = await host.fresh().run(lambda host: read(host, afus=self._afus))
            except HostError:
                continue  # the scan reports it
            if now != self._reading:
                request_scan()


_ABSENCE = (
    f"no FPGA driver: neither {DRIVERS[0].class_directory} (OPAE) nor {DRIVERS[1].class_directory} (DFL) exists; "
    "load the module intel-fpga-pci or dfl-pci"
)
