"""Kernel mode: instances of QAT devices that the kernel driver assigns to processes, `qat.intel.com/cy1_dc0`.

`adf_ctl status` of Intel's out-of-tree driver lists the devices. The configuration file of a device has sections with
the number of processes that may use them. A process of a section with `LimitDevAccess` gets instances of one device:
the section is pinned. A process of another section gets instances of all devices.
"""

import contextlib
import itertools
import os
import re
import signal
from collections.abc import Collection, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from accelplane.devices import Allocation, Device, DeviceNode, Skipped
from accelplane.host import Host, HostError, pci_address
from accelplane.plugins.base import ScanError, ScanResult
from accelplane.plugins.qat.services import sections

_OUTPUT_LIMIT = 64 * 1024
_MAX_NUMBER = 1024  # of processes in a section, and of instances
_NUMBER = re.compile(r"[0-9]{1,6}")
_SECTION_NAME = "QAT_SECTION_NAME"
_NODES = ("/dev/qat_adf_ctl", "/dev/qat_dev_processes", "/dev/usdm_drv")
_NOT_FOR_PROCESSES = frozenset(("", "GENERAL", "KERNEL", "KERNEL_QAT"))
_UIO = re.compile(r"uio[0-9]+")
_DEVICE = re.compile(
    r"type: (?P<kind>[a-z0-9_]{1,32}),.*?inst_id: (?P<number>[0-9]{1,4}),"
    r".*?bsf: (?P<address>([0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]),.*?state: (?P<state>[a-z]+)\s*$"
)
_HEADINGS = ("Checking status of", "There is ", "There are ", "No devices")
_TRUE = frozenset(("1", "t", "true", "y", "yes", "on"))
_FALSE = frozenset(("0", "f", "false", "n", "no", "off", ""))


class Endpoint(NamedTuple):
    """A device in the output of `adf_ctl status`."""

    name: str
    kind: str
    address: str
    state: str

    @property
    def path(self) -> str:
        address = self.address if pci_address(self.address) else f"0000:{self.address}"
        return f"/sys/bus/pci/drivers/{self.kind}/{address}"


class Section(NamedTuple):
    """A section of a device's configuration file."""

    processes: int
    cy_instances: int
    dc_instances: int
    pinned: bool


async def status(program: str = "adf_ctl") -> str:
    """Returns the output of `adf_ctl status`. Raises `ScanError`."""
    import asyncio  # noqa: PLC0415 - only this mode starts processes
    from asyncio.subprocess import DEVNULL, PIPE, STDOUT  # noqa: PLC0415

    try:
        process = await asyncio.create_subprocess_exec(
            program, "status", stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, start_new_session=True
        )
    except OSError as error:
        raise ScanError(f"{program} status: {error.strerror or error}, expected it in PATH") from None
    assert process.stdout is not None  # noqa: S101 - it is a pipe
    try:
        output = b""
        while len(output) <= _OUTPUT_LIMIT and (piece := await process.stdout.read(_OUTPUT_LIMIT)):
            output += piece
        if len(output) > _OUTPUT_LIMIT:
            raise ScanError(f"{program} status printed more than {_OUTPUT_LIMIT} bytes")
        code = await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            # asyncio reports the end of a process after its output is read to the end.
            while await process.stdout.read(_OUTPUT_LIMIT):
                pass
            await process.wait()
    text = output.decode(errors="replace")
    if code:
        raise ScanError(f"{program} status failed with {code}: {text[-200:]!a}")
    return text


def endpoints(text: str) -> list[Endpoint]:
    """Returns the devices in the output of `adf_ctl status`. `unknown_lines` returns the other lines."""
    return [
        Endpoint(f"dev{match['number']}", match["kind"], match["address"], match["state"])
        for line in text.splitlines()
        if (match := _DEVICE.search(line[:1024]))
    ]


def unknown_lines(text: str) -> list[str]:
    """Returns the lines in the output of `adf_ctl status` that are neither a device nor a known heading."""
    lines = [line.strip()[:1024] for line in text.splitlines()]
    return [line for line in lines if line and not _DEVICE.search(line) and not line.startswith(_HEADINGS)]


def scan(host: Host, text: str) -> ScanResult:
    """Yields the devices of all sections. `text` is the output of `adf_ctl status`. Raises `HostError`."""
    if unknown := unknown_lines(text):
        reason = f"found {unknown[0][:80]!a}, expected a device"
        yield Skipped(f"{len(unknown)} lines of adf_ctl status", reason, warning=True)
    iommu = bool(host.names("/sys/class/iommu"))
    sections_of: dict[Endpoint, dict[str, Section]] = {}
    uio: list[DeviceNode] = []
    for endpoint in endpoints(text):
        if unusable := _unusable(endpoint, iommu=iommu):
            yield unusable
            continue
        try:
            nodes = _uio_nodes(host, endpoint)
            sections_of[endpoint] = processes_of(host.text(f"/etc/{endpoint.kind}_{endpoint.name}.conf"))
        except (HostError, ValueError) as error:
            yield Skipped(endpoint.name, str(error), warning=True)
        else:
            uio += nodes
    nodes = (*(DeviceNode(path) for path in _NODES), *dict.fromkeys(uio))
    running = itertools.count()
    for name in dict.fromkeys(itertools.chain.from_iterable(sections_of.values())):
        members = {endpoint: named[name] for endpoint, named in sections_of.items() if name in named}
        if problem := _disagreement(members.values(), len(sections_of)):
            yield Skipped(f"section {name[:80]!a}", problem, warning=True)
            continue
        topology = host.topology_of(*(endpoint.path for endpoint in members))
        for endpoint, section in members.items():
            resource = f"cy{section.cy_instances}_dc{section.dc_instances}"
            for process in range(section.processes):
                yield Device(
                    resource=resource,
                    id=f"{name}_{endpoint.name}_{process}",
                    unit=endpoint.name if section.pinned else "",
                    nodes=nodes,
                    envs={_SECTION_NAME: name, f"{_SECTION_NAME}_{resource}_{next(running)}": name},
                    topology=host.topology_of(endpoint.path) if section.pinned else topology,
                    path=endpoint.path if section.pinned else None,
                )
            if not section.pinned:
                break  # a process uses all devices


def processes_of(text: str) -> dict[str, Section]:
    """Returns the sections for processes in a configuration file. Raises `ValueError` that names the section."""
    found: dict[str, Section] = {}
    for name, values in sections(text).items():
        if name in _NOT_FOR_PROCESSES:
            continue
        numbers = [_number(name, key, values) for key in ("NumProcesses", "NumberCyInstances", "NumberDcInstances")]
        limit = values.get("LimitDevAccess", "").lower()
        if limit not in _TRUE | _FALSE:
            raise ValueError(f"section {name[:80]!a}: LimitDevAccess is {limit[:20]!a}, expected 0 or 1")
        found[name] = Section(*numbers, pinned=limit in _TRUE)
    return found


def renumber_sections(allocation: Allocation) -> Allocation:
    """Returns the allocation with sections numbered from 0. Raises `ValueError` for an unexpected variable."""
    envs: dict[str, str] = {}
    count = 0
    for key, value in allocation.envs.items():
        if key.startswith(f"{_SECTION_NAME}_"):
            parts = key.split("_")
            if len(parts) != 6:
                raise ValueError(f"variable {key!a} has {len(parts)} parts between underscores, expected 6")
            envs["_".join((*parts[:5], str(count)))] = value
            count += 1
        else:
            envs[key] = value
    return replace(allocation, envs=envs)


def _number(section: str, key: str, values: Mapping[str, str]) -> int:
    text = values.get(key, "")
    if not _NUMBER.fullmatch(text) or int(text) > _MAX_NUMBER:
        raise ValueError(f"section {section[:80]!a}: {key} is {text[:20]!a}, expected 0 to {_MAX_NUMBER}")
    return int(text)


def _unusable(endpoint: Endpoint, *, iommu: bool) -> Skipped | None:
    """Returns why processes cannot use the device, or None."""
    subject = f"{endpoint.name} ({endpoint.kind}, {endpoint.address})"
    if endpoint.state != "up":
        return Skipped(subject, f"state is {endpoint.state}, expected up", warning=True)
    if endpoint.kind in ("4xxx", "4xxxvf"):
        return Skipped(subject, "unsupported in kernel mode, use dpdk mode", warning=True)
    if iommu and not endpoint.kind.endswith("vf"):
        return Skipped(subject, "physical functions are unusable while the IOMMU is enabled")
    return None


def _uio_nodes(host: Host, endpoint: Endpoint) -> list[DeviceNode]:
    names = [name for name in host.names(f"{endpoint.path}/uio") if _UIO.fullmatch(name)]
    if not names:
        host.note(f"{endpoint.path}/uio: no entry like uio0")
    return [DeviceNode(f"/dev/{name}") for name in names]


def _disagreement(members: Collection[Section], devices: int) -> str:
    """Returns how the section differs between devices so that it is unusable, or an empty text."""
    if len({section.pinned for section in members}) > 1:
        return "LimitDevAccess differs between devices"
    if len({(section.cy_instances, section.dc_instances) for section in members}) > 1:
        return "the numbers of instances differ between devices"
    if not all(section.pinned for section in members):
        return "NumProcesses differs between devices" if len({section.processes for section in members}) > 1 else ""
    if len(members) < devices:
        return f"LimitDevAccess is set, but only {len(members)} of {devices} devices have the section"
    return ""
