"""The Onload plugin: from NICs, kernel module and installed files to devices that all stand for the same NICs.

A device does not limit what a container can use; the number of devices limits the containers on a node. All devices
have the same health. It is part of the scan, because all of its causes are files whose changes the agent watches.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

from msgspec.structs import replace

from accelplane.devices import HEALTHY, UNHEALTHY, Allocation, Device, Resource, Skipped
from accelplane.host import Host, HostError
from accelplane.plugins.base import DevicePlans, Plugin, ScanError, Watch
from accelplane.plugins.onload import userland
from accelplane.plugins.onload.config import OnloadConfig, join_path
from accelplane.plugins.onload.nics import find_functions, find_nics, numa_nodes

NAMESPACE = "amd.com"
RESOURCE = "onload"

_NO_NIC = "no sfc devices found"


class OnloadPlugin(Plugin[OnloadConfig]):
    """Publishes `amd.com/onload` on nodes with a Solarflare NIC and the files of Onload.

    The plugin of another program may serve the node if those files are not visible here.
    """

    namespace = NAMESPACE
    # Other programs serve other resources of amd.com, such as GPUs.
    exclusive_namespace = False
    removal_delay: ClassVar[float] = math.inf
    # Whether devices are published, as Unhealthy, without NIC and files.
    publishes_always: ClassVar[bool] = False

    def __init__(self, config: OnloadConfig | None = None) -> None:
        super().__init__(config)
        path = self.config.host_onload_path
        self.watch = Watch(frozenset(("module", "pci")), ("/dev", join_path(path), join_path(path, "usr/lib64")))
        self._root = "/"
        # The devices of the last scan: there are hundreds, and most scans have the same result.
        self._devices: tuple[Device, ...] = ()

    def socket_name(self, resource: str) -> str:
        return "sfc-deviceplugin.sock"

    def prepare(self, host: Host) -> None:
        """Keeps the root for `allocate`, which reads the files again. Writes nothing."""
        self._root = host.root

    def scan(self, host: Host) -> Iterator[Device | Resource | Skipped]:
        nics = find_nics(host)
        module, files = userland.module_problem(host), userland.userland_problem(host, self.config)
        absence = _NO_NIC if self.config.need_nic and not nics else ""
        if not self.publishes_always and (absence or files):
            if not absence:
                yield Skipped(RESOURCE, files)
            return
        if problem := absence or module or files:
            host.note(f"all devices are Unhealthy: {problem}")
        yield Resource(RESOURCE)
        yield from self._shares(problem, numa_nodes(nics))

    async def allocate(self, devices: Sequence[Device]) -> Allocation:
        """Each container gets the same, whatever devices it has. Raises `HostError` or `ScanError`."""
        host = Host(self._root)
        if problem := userland.module_problem(host):
            raise ScanError(problem)
        mounts = userland.mounts(host, self.config)
        return Allocation(nodes=userland.NODES, mounts=mounts, envs=userland.environment(self.config))

    def readings(self, host: Host, devices: Iterable[Device]) -> DevicePlans:
        """Sensors of all NICs. Devices stand for all of them: only a single NIC is the device of the unit."""
        from accelplane.readings import nic, pci  # noqa: PLC0415 - memory of agents without pages

        units = {device.unit for device in devices}
        functions = find_functions(host) if units else []
        for path in functions:
            name = path.rpartition("/")[2]
            plan = pci.plan(host, name, path, nic.sources(host, path), {"kind": "nic"})
            yield replace(plan, units=tuple(units) if len(functions) == 1 else ())

    def explain(self, host: Host) -> Mapping[str, object]:
        return {
            "options": self.config,
            "nics": {nic.name: nic.numa_node for nic in find_nics(host)},
            "kernel-module": userland.module_problem(host) or "usable",
            "files": userland.userland_problem(host, self.config) or "usable",
        }

    def absence(self, host: Host) -> str:
        """Returns why the drop-in command does not start on this host, or an empty text."""
        try:
            if not self.config.need_nic or find_nics(host):
                return ""
        except HostError as error:
            return str(error)
        where = os.path.join(host.root, "sys/class/net")
        return f"{_NO_NIC}: {where} has no interface of vendor 0x1924; set -needNic=false to start without one"

    def _shares(self, problem: str, topology: tuple[int, ...] | None) -> tuple[Device, ...]:
        count = max(self.config.max_pods, 0)
        device = Device(
            resource=RESOURCE,
            id="sfc",
            health=UNHEALTHY if problem else HEALTHY,
            reason=problem,
            nodes=userland.NODES,
            envs=userland.environment(self.config),
            topology=topology,
            path=None,
        )
        if len(self._devices) != count or (count and self._devices[0] != next(device.shared(1))):
            self._devices = tuple(device.shared(count))
        return self._devices


class OnloadDropin(OnloadPlugin):
    """The plugin of `onload-device-plugin`, which runs where an administrator has selected the node for Onload."""

    publishes_always = True
