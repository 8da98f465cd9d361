"""FPGAs in sysfs: ports (which run functions), FMEs (which program ports), and regions.

    /sys/class/fpga_region/region0 -> ../../devices/pci0000:80/0000:80:01.0/0000:81:00.0/fpga_region/region0
      dfl-fme.0/   dev bitstream_id … dfl-fme-region.1/fpga_region/region1/compat_id
      dfl-port.0/  dev id afu_id

A port of a virtual function has its own class device below that function, while its FME stays below the physical
function; `physfn` links to it. Sources: kernel documents ABI/testing/sysfs-platform-dfl-{fme,port},
sysfs-class-fpga-region, fpga/dfl.rst; OPAE's driver has the same attributes under other names.

Only files of sysfs are opened. In a tree without hardware a regular file may replace a device node.
"""

import errno
import os
import re
import stat
from collections.abc import Iterator
from typing import NamedTuple

from accelplane.fpga import FpgaError, quote
from accelplane.fpga.drivers import DRIVERS, Driver, Kind, kind_of, node_path, parse_name
from accelplane.fpga.ids import hardware_id
from accelplane.host import Host, HostError, pci_address

_PCI_DEVICES = "/sys/devices/pci"
_PLATFORM_DEVICES = "/sys/bus/platform/devices"
_ACCELERATOR = "0x120000"  # PCI class
_DEVICE_NUMBER = re.compile(r"[0-9]{1,10}:[0-9]{1,10}")
_PORT_NUMBER = re.compile(r"[0-9]{1,9}")
_DIGITS = re.compile(r"[0-9]+")

_PCI_ATTRIBUTES = ("vendor", "device", "class", "local_cpulist", "numa_node", "sriov_numvfs", "sriov_totalvfs")
_FME_ATTRIBUTES = ("bitstream_id", "bitstream_metadata", "ports_num", "socket_id")


class Pci(NamedTuple):
    """A PCI function, with the text of `_PCI_ATTRIBUTES` in their order, empty for missing ones."""

    address: str
    path: str
    vendor: str
    device: str
    cls: str
    cpus: str
    numa: str
    vfs: str
    vfs_limit: str
    driver: str
    physical: "Pci | None"


class Fme(NamedTuple):
    """An FPGA management engine, with the text of `_FME_ATTRIBUTES`.

    `interfaces` are the interface ids of its regions in the order of its ports.
    """

    driver: Driver
    name: str
    node: str
    path: str
    pci: Pci
    dev: str
    bitstream_id: str
    bitstream_metadata: str
    ports_num: str
    socket_id: str
    interfaces: tuple[str, ...]


class Port(NamedTuple):
    """A port, and the FME that programs it. `number` is its attribute `id`."""

    driver: Driver
    name: str
    node: str
    path: str
    pci: Pci
    dev: str
    number: str
    fme: Fme


class Fault(NamedTuple):
    """A skipped port or class device, and the reason."""

    name: str
    problem: str


class Scan(NamedTuple):
    """The result of a scan of all devices of a driver: ports with the interface ids of their regions."""

    ports: tuple[tuple[Port, str], ...]
    faults: tuple[Fault, ...]


def scan(host: Host, driver: Driver) -> Scan:
    """Returns all ports, and skipped devices. Does not read AFU ids. Raises `HostError` if devices cannot be listed."""
    faults: list[Fault] = []
    ports: list[tuple[Port, str]] = []
    known: dict[str, Fme] = {}
    for name, directory in _found_ports(host, driver, faults):
        try:
            node = f"/dev/{name}"
            if not host.exists(node):
                raise FpgaError(f"{node}: no such device node")
            port = _port(host, driver, node, host.resolve(directory), known)
            ports.append((port, interface_of(port)))
        except (HostError, FpgaError) as error:
            faults.append(Fault(name, str(error)))
    return Scan(tuple(ports), tuple(faults))


def read_port(host: Host, text: str) -> Port:
    """Returns the port of a node's path or a name in `/dev`. Raises `FpgaError` or `HostError`."""
    driver, node, path = _device(host, text, "port")
    return _port(host, driver, node, path, {})


def read_fme(host: Host, text: str) -> Fme:
    """Returns the FME of a node's path or a name in `/dev`. Raises `FpgaError` or `HostError`."""
    driver, node, path = _device(host, text, "fme")
    return _fme(host, driver, node, path, _function(host, path))


def afu_id(host: Host, port: Port) -> str | None:
    """Returns the id of the programmed function, None while the port is being programmed.

    Raises `FpgaError` or `HostError`.
    """
    path = f"{port.path}/afu_id"
    try:
        return hardware_id(host.text(path), f"{path}: AFU id")
    except HostError as error:
        # Both drivers return EBUSY for a disabled port, as during programming.
        if error.errno == errno.EBUSY:
            return None
        raise


def interface_of(port: Port) -> str:
    """Returns the interface id of the port's region. Raises `FpgaError`."""
    fme = port.fme
    ids = [hardware_id(text, f"{fme.path}: interface id") for text in fme.interfaces]
    if not ids:
        raise FpgaError(f"{fme.path}: no interface id, expected one in {fme.driver.interface_glob}")
    if len(set(ids)) == 1:
        return ids[0]
    # One region per port, in the order of the ports (drivers/fpga/dfl-fme-pr.c, pr_mgmt_init).
    if fme.ports_num != str(len(ids)) or not port.number or int(port.number) >= len(ids):
        raise FpgaError(
            f"{port.path}: ambiguous interface id, {fme.name} has {', '.join(ids)}: found port id "
            f"{quote(port.number)} and ports_num {quote(fme.ports_num)}, expected {len(ids)} ports from 0"
        )
    return ids[int(port.number)]


def port_number(port: Port) -> int:
    """Returns the number of the port in the FPGA. Raises `FpgaError`."""
    if not port.number:
        raise FpgaError(f"{port.path}/id: no such file, expected the port's number")
    return int(port.number)


def platform_devices(host: Host) -> tuple[list[str], list[str]]:
    """Returns the names of all FMEs and of all ports of any driver, none if they cannot be listed."""
    names: dict[Kind, list[str]] = {"fme": [], "port": []}
    for name in host.entries(_PLATFORM_DEVICES):
        if (found := parse_name(name)) is not None:
            names[found[1]].append(name)
    return names["fme"], names["port"]


def _found_ports(host: Host, driver: Driver, faults: list[Fault]) -> Iterator[tuple[str, str]]:
    for device in host.names(driver.class_directory):
        if not driver.class_device.fullmatch(device):
            continue
        directory = f"{driver.class_directory}/{device}"
        try:
            names = host.optional_names(directory)  # empty if it was removed during the scan
        except HostError as error:
            faults.append(Fault(device, str(error)))
            continue
        for name in names:
            if driver.port.fullmatch(name):
                yield name, f"{directory}/{name}"


def _device(host: Host, text: str, kind: Kind) -> tuple[Driver, str, str]:
    """Returns the driver, the node and the directory in sysfs."""
    node = node_path(text)
    found = kind_of(host, text)
    if found is None or found[1] != kind:
        expected = " or ".join(("intel-fpga-" if driver.name == "OPAE" else "dfl-") + f"{kind}.N" for driver in DRIVERS)
        raise FpgaError(f"{quote(node)}: not an FPGA {_word(kind)}, expected a device node called {expected}")
    driver = found[0]
    status = host.status(node)
    if status is None:
        raise FpgaError(f"{node}: no such device node; load the FPGA driver")
    if stat.S_ISCHR(status.st_mode):
        number = _number(status.st_rdev)
        path = host.resolve(f"/sys/dev/char/{number}")
        if parse_name(path) == found:
            return driver, node, path
    elif host.is_plain_stand_in(status):
        number = ""
    else:
        raise FpgaError(f"{node}: not a character device")
    # A test tree may lack /sys/dev.
    name = host.resolve(node).rpartition("/")[2]
    for place in host.glob(f"{driver.class_directory}/*/{name}"):
        path = host.resolve(place)
        if not number or _attribute(host, path, "dev") in ("", number):
            return driver, node, path
    raise FpgaError(f"{node}: no FPGA {_word(kind)} {name} with device number {number} in sysfs".rstrip())


def _port(host: Host, driver: Driver, node: str, path: str, known: dict[str, Fme]) -> Port:
    pci = _function(host, path)
    home = pci.physical or pci
    places = [place for place in host.glob(f"{home.path}/{driver.fme_glob}") if parse_name(place) == (driver, "fme")]
    if len(places) != 1:
        found = ", ".join(place.rpartition("/")[2] for place in places) or "none"
        raise FpgaError(f"{path}: FMEs below {home.path}: {found}; expected exactly one ({driver.fme_glob})")
    place = host.resolve(places[0])
    if place not in known:
        known[place] = _fme(host, driver, "", place, _function(host, place))
    number = _attribute(host, path, "id")
    if number and not _PORT_NUMBER.fullmatch(number):
        raise FpgaError(f"{path}/id: {quote(number)}, expected a number")
    return Port(driver, path.rpartition("/")[2], node, path, pci, _attribute(host, path, "dev"), number, known[place])


def _fme(host: Host, driver: Driver, node: str, path: str, pci: Pci) -> Fme:
    name = path.rpartition("/")[2]
    dev = _attribute(host, path, "dev")
    node = node or _fme_node(host, name, dev)
    texts = [_attribute(host, path, each) for each in _FME_ATTRIBUTES]
    ids = sorted(
        host.glob(f"{path}/{driver.interface_glob}"),
        key=lambda place: [int(digits[:20]) for digits in _DIGITS.findall(place)],
    )
    return Fme(driver, name, node, path, pci, dev, *texts, interfaces=tuple(host.text(place) for place in ids))


def _fme_node(host: Host, name: str, dev: str) -> str:
    """Returns the FME's node: by its kernel name if its device number matches, else by its number in /dev/char."""
    node = f"/dev/{name}"
    status = host.status(node)
    if status is not None and (host.is_plain_stand_in(status) or dev in ("", _number(status.st_rdev))):
        return node
    by_number = f"/dev/char/{dev}"
    if _DEVICE_NUMBER.fullmatch(dev) and host.exists(by_number):
        return host.resolve(by_number)
    raise FpgaError(f"{node}: found neither this device node with number {quote(dev)} nor {quote(by_number)}")


def _function(host: Host, path: str) -> Pci:
    """Returns the PCI function above a directory. Raises `FpgaError` unless it is an accelerator."""
    place = path
    while place.startswith(_PCI_DEVICES):
        above, _, name = place.rpartition("/")
        if pci_address(name) is not None:
            pci = _pci(host, place)
            if pci.cls != _ACCELERATOR:
                raise FpgaError(f"{place}/class: {quote(pci.cls)}, expected {_ACCELERATOR} (processing accelerators)")
            return pci
        place = above
    raise FpgaError(f"{path}: not below a PCI function")


def _pci(host: Host, path: str, *, virtual: bool = True) -> Pci:
    physical = host.resolve(f"{path}/physfn") if virtual and host.exists(f"{path}/physfn") else ""
    texts = [_attribute(host, path, name) for name in _PCI_ATTRIBUTES]
    above = _pci(host, physical, virtual=False) if physical else None
    pci = Pci(path.rpartition("/")[2], path, *texts, driver=host.driver_or_empty(path), physical=above)
    if not pci.vendor or not pci.device:
        raise FpgaError(f"{path}: vendor or device id is missing")
    return pci


def _attribute(host: Host, directory: str, name: str) -> str:
    return host.optional_text(f"{directory}/{name}") or ""


def _number(device: int) -> str:
    return f"{os.major(device)}:{os.minor(device)}"


def _word(kind: Kind) -> str:
    return "FME" if kind == "fme" else kind
