"""Virtual functions (VFs) of QAT devices in sysfs, and the allocation of a container that uses one.

VFs are found through the kernel drivers of their physical functions (PFs). A virtual machine with assigned VFs has no
PFs: there VFs are identified by their PCI ids. Kernel documents: Documentation/ABI/testing/sysfs-driver-qat,
debugfs-driver-qat and sysfs-bus-pci.
"""

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from accelplane.devices import HEALTHY, UNHEALTHY, Device, DeviceNode, Mount, Skipped, natural
from accelplane.host import Host, HostError, Missing, pci_address
from accelplane.host.drivers import DRIVERS, vf_address, vf_links
from accelplane.host.pci import DEVICES
from accelplane.plugins.base import ScanResult
from accelplane.plugins.qat.config import IGB_UIO, QatConfig
from accelplane.plugins.qat.models import BY_VF_DRIVER, VENDOR, QatModel, model_of_vf
from accelplane.plugins.qat.services import GENERIC, Service, sections, service
from accelplane.plugins.vfio import group_nodes, iommufd_nodes

_UIO = re.compile(r"uio[0-9]+")


class Pf(NamedTuple):
    """A physical function: its address and real directory."""

    address: str
    path: str


class Vf(NamedTuple):
    """A virtual function's address and its PF, None in a virtual machine."""

    address: str
    pf: Pf | None

    @property
    def path(self) -> str:
        return f"{DEVICES}/{self.address}"


class Discovery(NamedTuple):
    """The VFs to publish, and the reasons for those that are not published."""

    vfs: Sequence[Vf]
    skipped: Sequence[Skipped]


def discover(host: Host, config: QatConfig) -> Discovery:
    """The VFs of enabled drivers, up to `max_num_devices`. Raises `HostError`."""
    models = [BY_VF_DRIVER[driver] for driver in config.vf_drivers]
    skipped: list[Skipped] = []
    pfs = _physical_functions(host, models, skipped)
    groups = [_virtual_functions(host, pf, skipped) for pf in pfs] or [_passed_through(host, models, skipped)]
    if config.max_num_devices_by == "pf":
        groups = [sorted(group, key=lambda numbered: natural(numbered[0])) for group in groups]
        turns = itertools.chain.from_iterable(itertools.zip_longest(*groups))
    else:
        turns = itertools.chain.from_iterable(groups)
    vfs = [numbered[1] for numbered in turns if numbered is not None]
    most = config.max_num_devices
    if len(vfs) > most:
        skipped.append(Skipped(f"{len(vfs) - most} virtual functions", f"more than max-num-devices, {most}"))
    return Discovery(vfs[:most], skipped)


def scan(host: Host, config: QatConfig, found: Discovery, bind_problem: Callable[[str], str]) -> ScanResult:
    """Devices of the discovered VFs. `bind_problem` is why the VF at an address cannot be bound, empty if it can."""
    yield from found.skipped
    service_of = functools.cache(functools.partial(_resource_of, host))  # several VFs have the same PF
    for vf in found.vfs:
        problem = bind_problem(vf.address)
        try:
            yield _device(host, config, service_of, vf, problem)
        except HostError as error:
            # Every change of services removes all VFs, also during a scan.
            yield Skipped(vf.address, problem or str(error), warning=host.exists(vf.path))


def debugfs(host: Host, pf: Pf) -> str:
    """The PF's directory in debugfs. Raises `HostError` if no driver is bound to the PF."""
    return f"/sys/kernel/debug/qat_{host.driver(pf.path)}_{pf.address}"


def _physical_functions(host: Host, models: Iterable[QatModel], skipped: list[Skipped]) -> Iterator[Pf]:
    for model in models:
        directory = f"{DRIVERS}/{model.pf_driver}"
        try:
            names = host.optional_names(directory)  # empty if it is not loaded
        except HostError as error:
            skipped.append(Skipped(model.pf_driver, str(error), warning=True))
            continue
        for name in filter(pci_address, names):
            try:
                path = host.resolve(f"{directory}/{name}")
            except HostError as error:
                skipped.append(Skipped(name, str(error), warning=True))
            else:
                yield Pf(path.rpartition("/")[2], path)


def _virtual_functions(host: Host, pf: Pf, skipped: list[Skipped]) -> list[tuple[str, Vf]]:
    """A PF's VFs with their numbered names, in byte-wise order."""
    found: list[tuple[str, Vf]] = []
    try:
        links = sorted(vf_links(host, pf.path))
    except HostError as error:
        skipped.append(Skipped(pf.address, str(error), warning=True))
        return found
    if not links:
        skipped.append(Skipped(pf.address, "no virtual functions are enabled (sriov_numvfs)"))
    for name in links:
        try:
            found.append((name, Vf(vf_address(host, f"{pf.path}/{name}"), pf)))
        except HostError as error:
            skipped.append(Skipped(f"{pf.address} {name}", str(error), warning=True))
    return found


def _passed_through(host: Host, models: Sequence[QatModel], skipped: list[Skipped]) -> list[tuple[str, Vf]]:
    """VFs by their ids, if no PF is bound to its driver; an unbound PF may exist."""
    found: list[tuple[str, Vf]] = []
    for name, path in host.class_devices("pci", bus=True):
        try:
            if not pci_address(name) or model_of_vf(host.text(f"{path}/device")) not in models:
                continue
            vendor = host.optional_text(f"{path}/vendor")
        except HostError as error:
            host.note(f"PCI function {name} skipped: {error}")
            continue
        if vendor in (None, "", f"0x{VENDOR}"):
            pf = host.resolve(f"{path}/physfn") if host.is_vf(path) else ""
            found.append((name, Vf(name, Pf(pf.rpartition("/")[2], pf) if pf else None)))
        else:
            skipped.append(Skipped(name, f"has the device id of a QAT, but the vendor is {vendor[:20]!a}"))
    return found


def _device(host: Host, config: QatConfig, service_of: Callable[[Pf], str], vf: Vf, problem: str) -> Device:
    """One VF. Raises `HostError`."""
    device_id = host.text(f"{vf.path}/device")
    model = model_of_vf(device_id)
    resource = GENERIC
    if model is not None and model.detects_services:
        if vf.pf is None:
            host.note(f"the services of QAT are not visible in a virtual machine, so its resource is {GENERIC}")
        else:
            resource = service_of(vf.pf)
    mounts: tuple[Mount, ...] = ()
    if config.dpdk_driver == IGB_UIO:
        uio = _uio(host, vf)
        nodes: tuple[DeviceNode, ...] = (DeviceNode(f"/dev/{uio}"),)
        mounts = (Mount(f"/sys/class/uio/{uio}/device", read_only=False),)
    else:
        nodes = _vfio(host, vf, iommufd=config.iommufd)
    attributes = {"device-id": device_id[:20]}
    if model is not None:
        attributes["model"] = model.pf_driver
    return Device(
        resource=resource,
        id=vf.address,
        # Without a PF the VFs of one bus count as one device.
        unit=vf.pf.address if vf.pf else vf.address.rpartition(":")[0],
        health=UNHEALTHY if problem else HEALTHY,
        reason=problem,
        nodes=nodes,
        mounts=mounts,
        topology=host.topology_of(vf.pf.path if vf.pf else vf.path),
        attributes=attributes,
        path=vf.path,
    )


def _resource_of(host: Host, pf: Pf) -> str:
    """The resource of the PF's VFs."""
    try:
        found = _service(host, pf)
    except (HostError, ValueError) as error:
        found = Service(GENERIC, str(error))
    if found.problem:
        host.note(f"virtual functions of {pf.address} are {found.resource}: {found.problem}")
    return found.resource


def _service(host: Host, pf: Pf) -> Service:
    """The services of the PF. Raises `HostError`, or `ValueError` for a file that cannot be parsed.

    Kernels before 6.0 report them in debugfs only. A PF that is down will start with the services in `cfg_services`, so
    its VFs, unhealthy until then, keep their resource.
    """
    state = host.optional_text(f"{pf.path}/qat/state")
    text = host.optional_text(f"{pf.path}/qat/cfg_services")
    if state == "up" and text:
        return service(text)
    try:
        path = f"{debugfs(host, pf)}/dev_cfg"
        enabled = sections(host.text(path)).get("GENERAL", {}).get("ServicesEnabled", "")
    except (HostError, ValueError):
        if text:
            return service(text)
        raise
    return service(enabled)


def _vfio(host: Host, vf: Vf, *, iommufd: bool) -> tuple[DeviceNode, ...]:
    nodes = group_nodes(host, vf.address)
    if not iommufd:
        return nodes
    more = iommufd_nodes(host, vf.address)
    if not more:
        host.note(f"{vf.address}: no IOMMUFD node, only that of its group ({nodes[0].host_path})")
    return (*nodes, *more)


def _uio(host: Host, vf: Vf) -> str:
    """The name of the VF's uio device."""
    directory = f"{vf.path}/uio"
    name = next(filter(_UIO.fullmatch, host.names(directory)), "")
    if not name:
        raise Missing(directory, "no entry like uio0")
    return name
