"""Intel SGX, `sgx.intel.com/enclave` and `sgx.intel.com/provision`: shares of the kernel driver's device nodes.

Enclaves of all processes share the driver's one node, so the ids count how many containers may have it. The memory
that they ask for, `sgx.intel.com/epc`, is no device: it is registered as an extended resource by others (NFD, or
`sgx_epchook`). A node that vanishes leaves its ids listed, unhealthy, until it is back: containers hold them, and the
driver offers the same node again. In a pod the node is a bind mount, which stays though the driver has gone; sysfs
tells of that. Kernel documents: Documentation/arch/x86/sgx.rst, Documentation/admin-guide/devices.rst.
"""

import math
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Annotated, ClassVar, NamedTuple

import msgspec
from msgspec import Meta

from accelplane.devices import CdiDevice, CdiMount, Device, DeviceNode, Skipped
from accelplane.host import Host
from accelplane.host.epc import Epc, numa_epc, read_epc
from accelplane.plugins.base import Config, Plugin, Sample, Watch

ENCLAVE, PROVISION, VEPC = "/dev/sgx_enclave", "/dev/sgx_provision", "/dev/sgx_vepc"
CDI_KIND = "intel.cdi.k8s.io/sgx"
DEFAULT_LIMIT = 110  # the pods of a node, as a kubelet has them by default

_MOST = 100_000  # a kubelet takes a list of 4 MiB
_ABSENT = "no such device node"
_MISC, _CHAR = "/sys/class/misc", "/sys/dev/char"

# Runtimes hide /sys/firmware; a file system of its own brings the variables to containers without privileges.
_EFIVARFS = CdiDevice(
    kind=CDI_KIND,
    name="efivarfs",
    mounts=(CdiMount("efivarfs", "/run/efivars", "efivarfs", ("rw", "nosuid", "nodev", "noexec", "relatime")),),
)


class Limit(NamedTuple):
    """A number of ids and where it comes from; `problem` is for the log."""

    ids: int
    source: str
    problem: str = ""


def default_limit(pods_per_core: str, cpus: int) -> Limit:
    """The limit where none is given, from the environment variable `PODS_PER_CORE` and the CPUs of this process."""
    if not pods_per_core:
        return Limit(DEFAULT_LIMIT, "PODS_PER_CORE not set")
    if re.fullmatch(r"[0-9]{1,40}", pods_per_core) and int(pods_per_core) < 1 << 32:
        if int(pods_per_core) * cpus > _MOST:
            problem = f"PODS_PER_CORE is {int(pods_per_core)} on {cpus} CPUs; the limits are {_MOST}, the most there is"
            return Limit(_MOST, "PODS_PER_CORE cut", problem)
        return Limit(int(pods_per_core) * cpus, f"PODS_PER_CORE {int(pods_per_core)} on {cpus} CPUs")
    problem = f"PODS_PER_CORE is {pods_per_core[:40]!a}, expected a number; the limits are {DEFAULT_LIMIT}"
    return Limit(DEFAULT_LIMIT, "PODS_PER_CORE not understood", problem)


def _from_environment() -> Limit:
    return default_limit(os.environ.get("PODS_PER_CORE", ""), len(os.sched_getaffinity(0)))


def _count() -> int:
    return _from_environment().ids


class SgxConfig(Config, frozen=True, kw_only=True):
    """Options of the SGX plugin."""

    enclave_limit: Annotated[
        int, Meta(ge=0, description="number of containers on the node that may have /dev/sgx_enclave")
    ] = msgspec.field(default_factory=_count)
    provision_limit: Annotated[
        int, Meta(ge=0, description="number of containers on the node that may have /dev/sgx_provision")
    ] = msgspec.field(default_factory=_count)
    dcap_infra_resources: Annotated[
        bool, Meta(description="also publish qe and registration, for a quoting daemon and a registration tool")
    ] = False
    enclave_only: Annotated[bool, Meta(description="publish enclave also where there is no /dev/sgx_provision")] = False
    vepc_limit: Annotated[
        int, Meta(ge=0, description="number of containers that may have /dev/sgx_vepc, for virtual machines")
    ] = 0

    def __post_init__(self) -> None:
        for name in ("enclave_limit", "provision_limit", "vepc_limit"):
            if getattr(self, name) > _MOST:
                option = name.replace("_", "-")
                raise ValueError(f"{option} is {getattr(self, name)}, expected {_MOST} or less")


class SgxPlugin(Plugin[SgxConfig]):
    """Publishes `sgx.intel.com/enclave` and `provision`; where asked to also `qe`, `registration` and `vepc`."""

    namespace = "sgx.intel.com"
    owns_namespace = True
    config_type = SgxConfig
    watch = Watch(frozenset(("misc",)))
    removal_delay: ClassVar[float] = math.inf
    cdi_kinds = (CDI_KIND,)

    def __init__(self, config: SgxConfig | None = None) -> None:
        super().__init__(config)
        self._default = _from_environment()
        # Built once: there are hundreds, and all that a scan finds out is whether they are there.
        self._enclaves = _shares("enclave", ENCLAVE, self.config.enclave_limit)
        self._provisions = _shares("provision", PROVISION, self.config.provision_limit)
        self._vepcs = _shares("vepc", VEPC, self.config.vepc_limit)
        self._infrastructure = _infrastructure() if self.config.dcap_infra_resources else ()

    def scan(self, host: Host) -> Iterator[Device | Skipped]:
        if self._default.problem:
            host.note(self._default.problem)
        paths = (ENCLAVE, PROVISION, VEPC) if self.config.vepc_limit else (ENCLAVE, PROVISION)
        faults = {path: fault for path in paths if (fault := node_fault(host, path))}
        if VEPC not in faults:
            yield from self._vepcs
        if ENCLAVE not in faults and PROVISION not in faults:
            yield from self._enclaves
            yield from self._provisions
            yield from self._infrastructure
        elif ENCLAVE not in faults and self.config.enclave_only:
            yield from self._enclaves
        if all(faults.get(path) == _ABSENT for path in paths):
            return  # no SGX here, which is no news
        for path, fault in faults.items():
            yield self._skipped(path, fault, faults)

    def explain(self, host: Host) -> Mapping[str, object]:
        epc = read_epc(host)
        faults = {path: node_fault(host, path) for path in (ENCLAVE, PROVISION, VEPC)}
        return {
            "options": self.config,
            "limit-by-default": f"{self._default.ids} ({self._default.source})",
            "device-nodes": {path: fault or "usable" for path, fault in faults.items()},
            "cpu-flags": epc.cpu_flags,
            "cpu": epc.cpu,
            "epc-bytes": epc.total,
            "epc-source": epc.source,
            "epc-bytes-by-numa-node": epc.numa,
            "problems": [*host.notes, *epc.disagreements],
            "likely-cause": likely_cause(epc, {path for path in (ENCLAVE, PROVISION) if faults[path]}),
        }

    def measure(self, host: Host, devices: Iterable[Device]) -> Iterator[Sample]:
        sizes, _problems = numa_epc(host)
        for node, size in sizes.items():
            yield Sample(
                "sgx_epc_bytes", "Enclave page cache that the kernel manages", {"numa_node": str(node)}, float(size)
            )

    def _skipped(self, path: str, fault: str, faults: Collection[str]) -> Skipped:
        if path != PROVISION or ENCLAVE in faults:
            return Skipped(path, fault, warning=True)
        if self.config.enclave_only:
            return Skipped(path, fault)
        return Skipped(path, f"{fault}; nor is {ENCLAVE} published without it, but with enclave-only", warning=True)


def node_fault(host: Host, path: str) -> str:
    """Why containers cannot use the device node, empty when they can. What is no device at all is noted only."""
    status = host.status(path)
    if status is None:
        return _ABSENT
    if not stat.S_ISCHR(status.st_mode):
        if not host.is_plain_stand_in(status):
            host.note(f"{path}: not a character device, published all the same")
        return ""
    return "" if is_registered(host, path, status) else "the node is there, but sysfs has no driver for it any more"


def is_registered(host: Host, path: str, status: os.stat_result) -> bool:
    """Whether a driver stands behind the character device; where sysfs does not show, it is taken for granted."""
    number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    entries = (f"{_MISC}/{os.path.basename(path)}/dev", f"{_CHAR}/{number}")
    return any(map(host.exists, entries)) or not all(map(host.exists, (_MISC, _CHAR)))


def likely_cause(epc: Epc, faulty: Collection[str]) -> str:
    """Why the driver's device nodes are not to be had, as far as the CPU tells; empty when they are."""
    if not faulty:
        return ""
    if ENCLAVE not in faulty:
        return f"the driver offers {PROVISION} beside {ENCLAVE}: it is not in this container, or was removed from /dev"
    flags, cpu = epc.cpu_flags, epc.cpu
    if flags is None and cpu is None:
        return "not known: neither the CPU nor /proc/cpuinfo can be asked"
    if cpu is not None and not cpu.present:
        return "this CPU has no SGX, its firmware (BIOS) hides it, or this virtual machine is not given it"
    if flags is not None and "sgx" not in flags:
        also = "" if cpu is not None else "the CPU has none, or "
        return (
            f"SGX is not in use: {also}the firmware (BIOS) disables it, or the kernel is built without CONFIG_X86_SGX"
        )
    if (flags is not None and "sgx_lc" not in flags) or (cpu is not None and not cpu.flexible):
        return f"flexible launch control is locked by the firmware (BIOS): Linux then has no enclaves, only {VEPC}"
    return (
        "SGX is on: the driver is not loaded or found no EPC (kernel log: sgx), or its nodes are not in this container"
    )


def _shares(resource: str, path: str, count: int) -> tuple[Device, ...]:
    device = Device(resource=resource, id=f"sgx-{resource}", nodes=(DeviceNode(path),), topology=None)
    return tuple(device.shared(count))


def _infrastructure() -> tuple[Device, Device]:
    """The one id for the node's quoting daemon, and the one for its registration tool."""
    nodes = (DeviceNode(ENCLAVE), DeviceNode(PROVISION))
    return (
        Device(resource="qe", id="qe-1", nodes=nodes, topology=None),
        Device(resource="registration", id="registration-1", nodes=nodes, cdi=_EFIVARFS, topology=None),
    )
