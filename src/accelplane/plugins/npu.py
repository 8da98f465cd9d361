"""Intel NPUs, `npu.intel.com/accel`: reads `/sys/class/accel` and `/dev/accel`, yields devices.

Accelerators of other vendors have the same class; the PCI id identifies an NPU. Facts: kernel documents
Documentation/accel and Documentation/ABI/testing/sysfs-driver-intel_vpu (busy time).
"""

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated

from msgspec import Meta

from accelplane.devices import Device, DeviceNode, Skipped, natural
from accelplane.host import Host, HostError, Missing, pci_address
from accelplane.plugins.base import Config, DevicePlans, Plugin, Sample, Watch
from accelplane.plugins.cdi_mode import CDI_MODES, split_by_cdi_mode
from accelplane.plugins.options import AllocationPolicy, CdiMode, Prefix, SharedDevNum, check_choice, normal_prefix
from accelplane.plugins.policies import POLICIES, preferred_ids

CDI_KIND = "intel.cdi.k8s.io/npu"

PRODUCTS = {
    "0x7e4c": "Core Ultra Series 1 (Meteor Lake)",
    "0x643e": "Core Ultra 200V (Lunar Lake)",
    "0xad1d": "Core Ultra Series 2 (Arrow Lake)",
    "0x7d1d": "Core Ultra Series 2 (Arrow Lake H)",
    "0xb03e": "Core Ultra Series 3 (Panther Lake)",
    "0xfd3e": "Wildcat Lake",
    "0xd71d": "Nova Lake",
}

_INTEL = "0x8086"
_ACCEL = re.compile(r"accel[0-9]+")


class NpuConfig(Config, frozen=True, kw_only=True):
    prefix: Prefix = ""
    shared_dev_num: SharedDevNum = 1
    allocation_policy: AllocationPolicy = "none"
    accept_unknown_ids: Annotated[bool, Meta(description="publish Intel accelerators with an unknown PCI id too")] = (
        False
    )
    cdi: CdiMode = "auto"

    def __post_init__(self) -> None:
        try:
            if self.shared_dev_num < 1:
                raise ValueError("the number of containers sharing the same NPU must greater than zero")
            normal_prefix(self.prefix)
            check_choice("allocation-policy", self.allocation_policy, POLICIES)
            check_choice("cdi", self.cdi, CDI_MODES)
        except ValueError as error:
            raise ValueError(f"argument error: {error}") from None


class NpuPlugin(Plugin[NpuConfig]):
    """Publishes `npu.intel.com/accel`."""

    namespace = "npu.intel.com"
    exclusive_namespace = True
    cdi_kinds = (CDI_KIND,)

    def __init__(self, config: NpuConfig | None = None) -> None:
        super().__init__(config)
        prefix = normal_prefix(self.config.prefix)
        self._class = f"{prefix}/sys/class/accel"
        self._dev = f"{prefix}/dev/accel"
        self.watch = Watch(frozenset(("accel", "pci")), (self._class, self._dev))

    def scan(self, host: Host) -> Iterator[Device | Skipped]:
        for name in host.optional_names(self._class):
            if not _ACCEL.fullmatch(name):
                continue
            try:
                yield from self._accelerator(host, name)
            except HostError as error:
                yield Skipped(name, str(error), warning=True)

    async def preferred_allocation(
        self, available: Sequence[Device], must_include: Sequence[Device], size: int, in_use: Mapping[str, int]
    ) -> Sequence[str]:
        return preferred_ids(self.config.allocation_policy, available, must_include, size, in_use)

    def measure(self, host: Host, devices: Iterable[Device]) -> Iterator[Sample]:
        from accelplane.readings import npu  # noqa: PLC0415 - memory of agents without pages

        for name in sorted({device.unit for device in devices}, key=natural):
            try:
                [value] = npu.busy_time(host.text(f"{self._class}/{name}/device/npu_busy_time_us"))
            except (HostError, ValueError):
                continue  # the file exists since Linux 6.11
            description = "Deprecated: use accelplane_npu_busy_seconds_total"
            yield Sample("npu_busy_seconds_total", description, {"device": name}, value.value)

    def readings(self, host: Host, devices: Iterable[Device]) -> DevicePlans:
        from accelplane.readings import npu, pci  # noqa: PLC0415 - memory of agents without pages

        for name in dict.fromkeys(device.unit for device in devices):
            path = pci.canonical(host, f"{self._class}/{name}/device")
            yield pci.plan(host, name, path, npu.sources(host, path))

    def _accelerator(self, host: Host, name: str) -> Iterator[Device | Skipped]:
        """Raises `HostError` before the first device."""
        device = f"{self._class}/{name}/device"
        vendor = host.text(f"{device}/vendor")
        if vendor != _INTEL:
            yield Skipped(name, f"vendor {vendor[:20]!a} is not Intel ({_INTEL})")
            return
        pci_id = host.text(f"{device}/device").partition("\n")[0]
        if pci_id not in PRODUCTS and not self.config.accept_unknown_ids:
            reason = f"unknown PCI id {pci_id[:20]!a}, expected that of an NPU; set accept-unknown-ids to publish it"
            yield Skipped(name, reason, warning=True)
            return
        path = f"{self._dev}/{name}"
        if not host.exists(path):
            raise Missing(path, f"no such device node for {name}")
        nodes, mounts, cdi = split_by_cdi_mode(self.config.cdi, CDI_KIND, name, (DeviceNode(path),))
        accelerator = Device(
            resource="accel",
            id=name,
            nodes=nodes,
            mounts=mounts,
            cdi=cdi,
            topology=host.topology_of(device),
            attributes=_attributes(host, device, pci_id),
            path=device,
        )
        yield from accelerator.shared(self.config.shared_dev_num)


def _attributes(host: Host, device: str, pci_id: str) -> dict[str, str]:
    attributes: dict[str, str] = {}
    if pci_id in PRODUCTS:
        attributes["device-id"] = pci_id
        attributes["product"] = PRODUCTS[pci_id]
    try:
        attributes["driver"] = host.driver(device)
    except HostError as error:
        host.note(f"driver unknown: {error}")
    with contextlib.suppress(HostError):
        if bdf := pci_address(host.link(device).rstrip("/").rpartition("/")[2]):
            attributes["bdf"] = bdf
    return attributes
