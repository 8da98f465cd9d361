"""Intel SGX, `sgx.intel.com/enclave` and `sgx.intel.com/provision`: shares of the kernel driver's device nodes.

Enclaves of all processes share one device node, so the number of IDs limits the number of containers. The memory of
enclaves, `sgx.intel.com/epc`, is no device but an extended resource, which NFD or `sgx_epchook` registers. The IDs of a
vanished node stay listed as Unhealthy until the node is back, because the driver always makes the same node. In a pod
the node is a bind mount, which remains when the driver is unloaded; sysfs shows that. Kernel documents:
Documentation/arch/x86/sgx.rst, Documentation/admin-guide/devices.rst.
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
DEFAULT_LIMIT = 110  # as the default of maxPods in the kubelet

_MAX_LIMIT = 100_000  # the kubelet receives messages of up to 4 MiB
_ABSENT = "no such device node"
_MISC, _CHAR = "/sys/class/misc", "/sys/dev/char"

# Container runtimes mask /sys/firmware. A mount of efivarfs gives unprivileged containers the EFI variables.
_EFIVARFS = CdiDevice(
    kind=CDI_KIND,
    name="efivarfs",
    mounts=(CdiMount("efivarfs", "/run/efivars", "efivarfs", ("rw", "nosuid", "nodev", "noexec", "relatime")),),
)
_BOTH_NODES = (DeviceNode(ENCLAVE), DeviceNode(PROVISION))
# The device of the quoting daemon and that of the registration tool. Each has one ID.
_INFRASTRUCTURE = (
    Device(resource="qe", id="qe-1", nodes=_BOTH_NODES, topology=None),
    Device(resource="registration", id="registration-1", nodes=_BOTH_NODES, cdi=_EFIVARFS, topology=None),
)


class Limit(NamedTuple):
    """A number of IDs with its source. `problem` is a log message, or empty."""

    ids: int
    source: str
    problem: str = ""


def default_limit(pods_per_core: str, cpus: int) -> Limit:
    """Returns the default limit, from the environment variable `PODS_PER_CORE` and the CPUs of this process."""
    if not pods_per_core:
        return Limit(DEFAULT_LIMIT, "PODS_PER_CORE not set")
    if re.fullmatch(r"[0-9]{1,40}", pods_per_core) and int(pods_per_core) < 1 << 32:
        if int(pods_per_core) * cpus > _MAX_LIMIT:
            problem = f"PODS_PER_CORE is {int(pods_per_core)} on {cpus} CPUs; using the maximum limit, {_MAX_LIMIT}"
            return Limit(_MAX_LIMIT, "PODS_PER_CORE exceeds the maximum", problem)
        return Limit(int(pods_per_core) * cpus, f"PODS_PER_CORE {int(pods_per_core)} on {cpus} CPUs")
    problem = f"PODS_PER_CORE is {pods_per_core[:40]!a}, expected a number; using the default limit, {DEFAULT_LIMIT}"
    return Limit(DEFAULT_LIMIT, "PODS_PER_CORE invalid", problem)


def _from_environment() -> Limit:
    return default_limit(os.environ.get("PODS_PER_CORE", ""), len(os.sched_getaffinity(0)))


class SgxConfig(Config, frozen=True, kw_only=True):
    enclave_limit: Annotated[
        int, Meta(ge=0, description="number of containers on the node that may use /dev/sgx_enclave")
    ] = msgspec.field(default_factory=lambda: _from_environment().ids)
    provision_limit: Annotated[
        int, Meta(ge=0, description="number of containers on the node that may use /dev/sgx_provision")
    ] = msgspec.field(default_factory=lambda: _from_environment().ids)
    dcap_infra_resources: Annotated[
        bool, Meta(description="also publish qe and registration, for a quoting daemon and a registration tool")
    ] = False
    enclave_only: Annotated[bool, Meta(description="publish enclave also without /dev/sgx_provision")] = False
    vepc_limit: Annotated[
        int, Meta(ge=0, description="number of containers on the node that may use /dev/sgx_vepc (virtual machines)")
    ] = 0

    def __post_init__(self) -> None:
        for name in ("enclave_limit", "provision_limit", "vepc_limit"):
            if getattr(self, name) > _MAX_LIMIT:
                option = name.replace("_", "-")
                raise ValueError(f"{option} is {getattr(self, name)}, expected {_MAX_LIMIT} or less")


_EPC_METRICS = {
    "accelplane_sgx_epc_bytes": "Enclave page cache that the kernel manages",
    "sgx_epc_bytes": "Deprecated: use accelplane_sgx_epc_bytes",
}


class SgxPlugin(Plugin[SgxConfig]):
    """Publishes `sgx.intel.com/enclave` and `provision`; by option also `qe`, `registration` and `vepc`."""

    namespace = "sgx.intel.com"
    exclusive_namespace = True
    watch = Watch(frozenset(("misc",)))
    removal_delay: ClassVar[float] = math.inf
    cdi_kinds = (CDI_KIND,)

    def __init__(self, config: SgxConfig | None = None) -> None:
        super().__init__(config)
        self._default = _from_environment()
        # Built once: there are hundreds of devices, and scans only select from them.
        self._enclaves = _shares("enclave", ENCLAVE, self.config.enclave_limit)
        self._provisions = _shares("provision", PROVISION, self.config.provision_limit)
        self._vepcs = _shares("vepc", VEPC, self.config.vepc_limit)

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
            if self.config.dcap_infra_resources:
                yield from _INFRASTRUCTURE
        elif ENCLAVE not in faults and self.config.enclave_only:
            yield from self._enclaves
        if all(faults.get(path) == _ABSENT for path in paths):
            return  # no SGX
        for path, fault in faults.items():
            yield self._skip(path, fault, faults)

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
        for name, description in _EPC_METRICS.items():
            for node, size in sizes.items():
                yield Sample(name, description, {"numa_node": str(node)}, float(size))

    def _skip(self, path: str, fault: str, faults: Collection[str]) -> Skipped:
        if path != PROVISION or ENCLAVE in faults:
            return Skipped(path, fault, warning=True)
        if self.config.enclave_only:
            return Skipped(path, fault)
        return Skipped(path, f"{fault}; {ENCLAVE} is not published either, unless enclave-only is set", warning=True)


def node_fault(host: Host, path: str) -> str:
    """Returns why containers cannot use the device node, or an empty text. Other files are usable, with a note."""
    status = host.status(path)
    if status is None:
        return _ABSENT
    if not stat.S_ISCHR(status.st_mode):
        if not host.is_plain_stand_in(status):
            host.note(f"{path}: not a character device, but published")
        return ""
    return "" if is_registered(host, path, status) else "the node exists, but sysfs shows no driver for it"


def is_registered(host: Host, path: str, status: os.stat_result) -> bool:
    """Whether sysfs shows a driver for the character device. Also true if sysfs is not readable."""
    number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    entries = (f"{_MISC}/{os.path.basename(path)}/dev", f"{_CHAR}/{number}")
    return any(map(host.exists, entries)) or not all(map(host.exists, (_MISC, _CHAR)))


def likely_cause(epc: Epc, faulty: Collection[str]) -> str:
    """Returns the likely reason for faulty device nodes, from CPU features, or an empty text if there are none."""
    if not faulty:
        return ""
    if ENCLAVE not in faulty:
        return f"the driver makes {PROVISION} with {ENCLAVE}: it is not mounted in this container or was removed"
    flags, cpu = epc.cpu_flags, epc.cpu
    if flags is None and cpu is None:
        return "unknown: neither CPUID nor /proc/cpuinfo is readable"
    if cpu is not None and not cpu.present:
        return "the CPU has no SGX, the firmware (BIOS) hides it, or the hypervisor does not provide it"
    if flags is not None and "sgx" not in flags:
        also = "" if cpu is not None else "the CPU has none, or "
        return f"SGX is disabled: {also}the firmware (BIOS) disables it, or the kernel has no CONFIG_X86_SGX"
    if (flags is not None and "sgx_lc" not in flags) or (cpu is not None and not cpu.flexible):
        return f"the firmware (BIOS) locks flexible launch control: Linux then supports no enclaves, only {VEPC}"
    return "SGX is enabled: the driver is not loaded or found no EPC (see the kernel log), or its nodes are not mounted"


def _shares(resource: str, path: str, count: int) -> tuple[Device, ...]:
    device = Device(resource=resource, id=f"sgx-{resource}", nodes=(DeviceNode(path),), topology=None)
    return tuple(device.shared(count))
