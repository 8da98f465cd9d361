"""SGX: the driver's device nodes, and the enclave memory of NUMA nodes.

Facts: the kernel's arch/x86/kernel/cpu/sgx/driver.c and main.c, Documentation/ABI/stable/sysfs-devices-node
(`sgx_total_bytes`, which exists only with a working driver).
"""

from accelplane.simulate.journal import Numbers
from accelplane.simulate.kernel.core import Core
from accelplane.simulate.offload import SgxSpec

_NODES = {"sgx_enclave": Numbers(10, 125), "sgx_provision": Numbers(10, 126), "sgx_vepc": Numbers(10, 124)}


class Sgx:
    """The driver, which is built in: loading it simulates a boot with SGX."""

    def __init__(self, core: Core, spec: SgxSpec, numa_nodes: int) -> None:
        self.core = core
        self.spec = spec
        self.numa_nodes = max(numa_nodes, 1)
        self.loaded = False

    def load(self) -> None:
        self.loaded = True
        for name, numbers in self._nodes().items():
            self.core.add_class_device(f"/sys/devices/virtual/misc/{name}", "misc", numbers, name)
        for node in range(self.numa_nodes):
            self.core.tree.directory(f"/sys/devices/system/node/node{node}/x86", {"sgx_total_bytes": self.spec.epc})

    def unload(self) -> None:
        self.loaded = False
        for name in self._nodes():
            self.core.remove_class_device(f"/sys/devices/virtual/misc/{name}")
        for node in range(self.numa_nodes):
            self.core.tree.remove(f"/sys/devices/system/node/node{node}/x86")

    def _nodes(self) -> dict[str, Numbers]:
        return {name: numbers for name, numbers in _NODES.items() if name != "sgx_provision" or self.spec.provision}
