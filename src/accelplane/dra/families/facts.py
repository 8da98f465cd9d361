"""What sysfs says about units beyond the scan of their plugin. It is read only for units that DRA publishes.

Facts: kernel documents Documentation/ABI/testing/sysfs-bus-pci, sysfs-driver-qat and
Documentation/ABI/stable/sysfs-driver-dma-idxd; sysfs code of the drivers i915 and xe. `lmem_total_bytes`, the memory
of one tile, is an attribute of Intel's out-of-tree i915. Intel's out-of-tree dlb2 has the resources of a physical
function in `total_resources`, and in `vf<n>_resources` those that it gave to a virtual one.
"""

import re
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from accelplane.devices import Attribute, Unit
from accelplane.host import Host, HostError
from accelplane.host.epc import read_epc
from accelplane.host.pci import DEVICES, pci_address

_QUEUES = "/sys/bus/dsa/devices"
_CARD = re.compile(r"card[0-9]{1,9}")
_TILE = re.compile(r"(gt|tile)[0-9]")
_VIRTUAL_FUNCTION = re.compile(r"virtfn([0-9]{1,6})")
_QUEUE = re.compile(r"wq[0-9]+\.[0-9]+")
_INTEGER = re.compile(r"0x[0-9a-f]{1,16}|[0-9]{1,20}")
_MAX_FUNCTIONS = 1024
_DLB_RESOURCES = {
    "ldbQueues": "num_ldb_queues",
    "ldbPorts": "num_ldb_ports",
    "dirPorts": "num_dir_ports",
    "ldbCredits": "num_ldb_credits",
    "dirCredits": "num_dir_credits",
    "schedDomains": "num_sched_domains",
}

Found = tuple[Mapping[str, Attribute], Mapping[str, int]]


def with_facts(host: Host, driver: str, unit: Unit) -> Unit:
    """The unit with further attributes and capacities. What cannot be read is left out."""
    read = _READERS.get(driver)
    if read is None:
        return unit
    attributes, capacities = read(host, unit)
    return replace(unit, attributes={**unit.attributes, **attributes}, capacities={**unit.capacities, **capacities})


def _gpu(host: Host, unit: Unit) -> Found:
    path = _function(unit)
    if not path:
        return {}, {}
    card = next((f"{path}/drm/{name}" for name in host.entries(f"{path}/drm") if _CARD.fullmatch(name)), "")
    i915 = [name for name in host.entries(f"{card}/gt") if _TILE.fullmatch(name)] if card else []
    xe = [name for name in host.entries(path) if name.startswith("tile") and _TILE.fullmatch(name)]
    tiles = len(i915) + len(xe) or 1
    sizes = [_number(host, f"{path}/{name}/physical_vram_size_bytes") or 0 for name in xe]
    of_tile = _number(host, f"{card}/lmem_total_bytes") if card else None
    memory = sum(sizes) or (of_tile or 0) * tiles
    attributes: dict[str, Attribute] = {"tiles": tiles, "sriov": (_number(host, f"{path}/sriov_totalvfs") or 0) > 0}
    index, group = _vf_index(host, path, unit), _iommu_group(host, path)
    if index is not None:
        attributes["vfIndex"] = index
    if group is not None:
        attributes["iommuGroup"] = group
    return attributes, {"memory": memory} if memory else {}


def _qat(host: Host, unit: Unit) -> Found:
    path = _function(unit)
    if not path:
        return {}, {}
    function = f"{DEVICES}/{unit.parent}" if pci_address(unit.parent) else path
    is_vf = host.exists(f"{path}/physfn") or not host.exists(f"{path}/qat")
    return {
        "vf": is_vf,
        "services": host.text_or_empty(f"{function}/qat/cfg_services"),
    }, {}


def _dlb(host: Host, unit: Unit) -> Found:
    path = _function(unit)
    directory = f"{path}/total_resources"
    if (index := _vf_index(host, path, unit)) is not None:
        directory = f"{DEVICES}/{unit.parent}/vf{index}_resources"
    numbers = {name: _number(host, f"{directory}/{file}") for name, file in _DLB_RESOURCES.items()} if path else {}
    return {}, {name: number for name, number in numbers.items() if number is not None}


def _queue(host: Host, unit: Unit) -> Found:
    if not _QUEUE.fullmatch(unit.health):
        return {}, {}
    path = f"{_QUEUES}/{unit.health}"
    attributes: dict[str, Attribute] = {
        "wqName": host.text_or_empty(f"{path}/name"),
        "wqDriver": host.text_or_empty(f"{path}/driver_name"),
        "blockOnFault": host.text_or_empty(f"{path}/block_on_fault") == "1",
    }
    priority = _number(host, f"{path}/priority")
    if priority is not None:
        attributes["priority"] = priority
    names = {"size": "size", "maxBatchSize": "max_batch_size", "maxTransferSize": "max_transfer_size"}
    numbers = {name: _number(host, f"{path}/{file}") for name, file in names.items()}
    return attributes, {name: number for name, number in numbers.items() if number is not None}


def _sgx(host: Host, unit: Unit) -> Found:
    epc = read_epc(host)
    flexible = epc.cpu.flexible if epc.cpu is not None else "sgx_lc" in (epc.cpu_flags or ())
    return {"flc": flexible}, {"epc": epc.total} if unit.id == "sgx-enclave" else {}


_READERS: Mapping[str, Callable[[Host, Unit], Found]] = {
    "gpu.intel.com": _gpu,
    "qat.intel.com": _qat,
    "dsa.intel.com": _queue,
    "iaa.intel.com": _queue,
    "dlb.intel.com": _dlb,
    "sgx.intel.com": _sgx,
}


def _function(unit: Unit) -> str:
    """The directory of the unit's PCI function, empty without one."""
    address = pci_address(unit.text("pciAddress"))
    return f"{DEVICES}/{address}" if address else ""


def _vf_index(host: Host, path: str, unit: Unit) -> int | None:
    """The number of a virtual function in its physical one, from 0."""
    if not pci_address(unit.parent):
        return None
    parent = f"{DEVICES}/{unit.parent}"
    for name in host.entries(parent)[:_MAX_FUNCTIONS]:
        if found := _VIRTUAL_FUNCTION.fullmatch(name):
            try:
                if host.link(f"{parent}/{name}").rstrip("/").rpartition("/")[2] == path.rpartition("/")[2]:
                    return int(found[1])
            except HostError:
                continue
    return None


def _iommu_group(host: Host, path: str) -> int | None:
    try:
        name = host.link(f"{path}/iommu_group").rstrip("/").rpartition("/")[2]
    except HostError:
        return None
    return int(name) if name.isascii() and name.isdecimal() and len(name) < 10 else None


def _number(host: Host, path: str) -> int | None:
    """The number in a file, decimal or hexadecimal, None for another text."""
    text = host.text_or_empty(path).lower()
    return int(text, 16 if text.startswith("0x") else 10) if _INTEGER.fullmatch(text) else None
