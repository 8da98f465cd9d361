"""Computes the published devices from the FPGAs in sysfs.

Resources are named after ids that change at run time: with every function that is programmed, to all ones if the
firmware crashes, to nothing while a port is programmed or does not answer. So there are three plain functions: `read`
reads the host, `recall` completes the reading with the ids that the same ports had before, and `devices_of` makes
devices of it. A port that crashes or cannot be read keeps its name, and is unhealthy.

In mode region the hook that programs the port reaches the runtime through CDI. A runtime with CDI disabled ignores it
without an error. If the ports are given through CDI only as well, a container then has no port, instead of one that is
not programmed.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from accelplane.devices import HEALTHY, UNHEALTHY, CdiDevice, CdiHook, CdiNode, Device, DeviceNode, Skipped
from accelplane.fpga import FpgaError, sysfs
from accelplane.fpga.allocation import HOOK, annotations, hook_arguments
from accelplane.fpga.drivers import Driver, detect
from accelplane.fpga.ids import CRASHED, MODE_ANNOTATION, REGION_MODE, IdError, Naming, af_type, region_type
from accelplane.fpga.sysfs import Fault, Port
from accelplane.host import Host, HostError
from accelplane.plugins.fpga.config import FpgaConfig, Mode

CDI_KIND = "intel.cdi.k8s.io/fpga"


class PortReading(NamedTuple):
    """A port as it was read: `afu` is None while it is being programmed, and empty if it was not read."""

    port: Port
    interface: str
    afu: str | None


class Reading(NamedTuple):
    """The ports of a host; `unused` are FMEs without a usable port."""

    ports: tuple[PortReading, ...] = ()
    faults: tuple[Fault, ...] = ()
    unused: tuple[str, ...] = ()


class PublishedPort(NamedTuple):
    """A port with the ids under which it is published. `problem` is why it cannot be used now, empty if it can."""

    port: Port
    interface: str
    afu: str
    problem: str

    @property
    def container(self) -> str:
        """The class device that has the port."""
        return self.port.path.split("/")[-2]


def read(host: Host, *, afus: bool) -> Reading:
    """Reads the ports, with `afus` also their AFU ids. Raises `HostError` if nothing can be listed."""
    driver = detect(host)
    if driver is None:
        return Reading()
    found = sysfs.scan(host, driver)
    ports: list[PortReading] = []
    faults = list(found.faults)
    for port, interface in found.ports:
        try:
            ports.append(PortReading(port, interface, sysfs.afu_id(host, port) if afus else ""))
        except (HostError, FpgaError) as error:
            faults.append(Fault(port.name, str(error)))
    used = {port.fme.name for port, _interface in found.ports}
    return Reading(tuple(ports), tuple(faults), tuple(name for name in _fmes(host, driver) if name not in used))


def recall(known: Mapping[str, PublishedPort], reading: Reading) -> Mapping[str, PublishedPort]:
    """The present ports by name, with their ids from this reading, or else from `known`.

    The result is `known` of the next reading. The function is idempotent for the same reading.
    """
    now: dict[str, PublishedPort] = {}
    for port, interface, afu in reading.ports:
        before = known.get(port.name)
        if before is not None and before.port.path != port.path:
            before = None  # another card's port, which has got the name
        if afu is None:
            if before is not None:
                now[port.name] = before
            continue
        problem = _crash(port, interface, afu)
        if problem and before is not None and not _crash(*before[:3]):
            now[port.name] = before._replace(problem=problem)
        else:
            now[port.name] = PublishedPort(port, interface, afu, problem)
    faults = {fault.name: fault.problem for fault in reading.faults}
    for name, before in known.items():
        problem = faults.get(name) or faults.get(before.container)
        if problem and name not in now:
            now[name] = before._replace(problem=problem)
    return now


def devices_of(
    host: Host, reading: Reading, known: Mapping[str, PublishedPort], config: FpgaConfig, mode: Mode, *, obstacle: str
) -> Iterator[Device | Skipped]:
    """The devices of a reading, whose ports were `known` as given before.

    `obstacle` is why no hook on this node would program a region for a container, empty if one does.
    """
    ports = recall(known, reading)
    # As sysfs lists them, whether they were read or recalled.
    in_order = sorted(ports.values(), key=lambda known: (known.container, known.port.name))
    if mode == "af":
        devices = _functions(host, in_order, config.naming)
    else:
        devices = _regions(host, in_order, mode, config.cdi, obstacle)
    for device in devices:
        if isinstance(device, Device) and not device.healthy:
            host.note(f"{device.id} is unhealthy: {device.reason}")
        yield device
    kept = {*ports, *(name for known in ports.values() for name in (known.container, known.port.fme.name))}
    for fault in reading.faults:
        if fault.name not in kept:
            yield Skipped(fault.name, fault.problem, warning=True)
    for seen in reading.ports:
        if seen.port.name not in ports:
            yield Skipped(seen.port.name, "it is being programmed, and its previous function is not known")
    for name in reading.unused:
        if name not in kept:
            yield Skipped(name, "no usable port: its ports are released, or cannot be read")


def _functions(host: Host, ports: list[PublishedPort], naming: Naming) -> Iterator[Device | Skipped]:
    for known in ports:
        port = known.port
        try:
            resource = af_type(known.interface, known.afu, naming)
        except IdError as error:
            yield Skipped(port.name, str(error), warning=True)
            continue
        yield Device(
            resource=resource,
            id=port.name,
            health=UNHEALTHY if known.problem else HEALTHY,
            reason=known.problem,
            nodes=(DeviceNode(port.node),),
            topology=host.topology_of(port.pci.path),
            attributes={
                "driver": port.driver.name,
                "bdf": port.pci.address,
                "fme": port.fme.name,
                "interface": known.interface,
                "afu": known.afu,
            },
            path=port.path,
            part=f"port{port.number}",
        )


def _regions(host: Host, ports: list[PublishedPort], mode: Mode, cdi: str, obstacle: str) -> Iterator[Device]:
    programmed = mode == "region"
    hooked = programmed and cdi != "off"
    by_cdi = programmed and cdi == "only"
    regions: dict[tuple[str, str], list[PublishedPort]] = {}
    for known in ports:
        regions.setdefault((known.port.fme.path, known.interface), []).append(known)
    regions_of = Counter(path for path, _interface in regions)
    for (path, interface), members in regions.items():
        fme = members[0].port.fme
        problem = "; ".join(dict.fromkeys(known.problem for known in members if known.problem))
        if hooked:
            problem = problem or obstacle
        nodes = [known.port.node for known in members]
        if not programmed:
            nodes.append(fme.node)
        names = [known.port.name for known in members]
        name = f"{fme.name}-{interface}" if regions_of[path] > 1 else fme.name
        device = CdiDevice(
            kind=CDI_KIND,
            name=name,
            nodes=[CdiNode(node, node) for node in nodes if by_cdi],
            hooks=(CdiHook("createRuntime", HOOK, hook_arguments(names)),),
        )
        functions = dict.fromkeys(known.port.pci.path for known in members)
        yield Device(
            resource=region_type(interface),
            id=fme.name,
            health=UNHEALTHY if problem else HEALTHY,
            reason=problem,
            nodes=() if by_cdi else [DeviceNode(node) for node in nodes],
            annotations={MODE_ANNOTATION: REGION_MODE, **annotations(name, names)} if programmed else {},
            cdi=device if hooked else None,
            topology=host.topology_of(*functions),
            attributes={
                "driver": fme.driver.name,
                "bdf": fme.pci.address,
                "interface": interface,
                "ports": ", ".join(names),
            },
            path=path,
            part=f"region-{interface[:8]}",
        )


def _crash(port: Port, interface: str, afu: str) -> str:
    """The sign that the firmware has crashed, empty if there is none."""
    if interface == CRASHED:
        return f"the interface id of {port.fme.name} reads {CRASHED}: the card's firmware has crashed"
    if afu == CRASHED:
        return f"the AFU id of {port.name} reads {CRASHED}: the card's firmware has crashed"
    return ""


def _fmes(host: Host, driver: Driver) -> Iterator[str]:
    """The names of all FMEs."""
    within = driver.fme_glob.partition("/")[2]
    for path in host.glob(f"{driver.class_directory}/{within}"):
        name = path.rpartition("/")[2]
        if driver.fme.fullmatch(name):
            yield name
