"""Emulated nodes with QAT devices."""

from collections import Counter
from functools import cached_property

from kernelhost import KernelHost

from accelplane.host.drivers import vfio_group
from accelplane.provision.qat import QatConfig, planners
from accelplane.provision.steps import Outcome, apply, preview
from accelplane.simulate.kernel import Kernel
from accelplane.simulate.offload import QatSpec
from accelplane.simulate.specs import NodeSpec

PF, VF = "0000:61:00.0", "0000:61:00.1"
SYS = f"/sys/bus/pci/devices/{PF}"
CY = QatConfig(services="sym;asym")


class Node:
    """An emulated node; `writes` has what was written to it."""

    def __init__(self, *qats: QatSpec, **more: object) -> None:
        spec = {"loaded": ("vfio-pci",), **more}
        self._spec = NodeSpec(qats=qats, **spec)  # pyright: ignore[reportArgumentType]
        self.writes: list[tuple[str, str]] = []
        self.open_groups: set[str] = set()
        self.refused: list[tuple[str, str, int]] = []

    @cached_property
    def kernel(self) -> Kernel:  # made by the test: the collection of tests makes all nodes
        return Kernel(self._spec)

    def host(self, _root: str = "/") -> KernelHost:
        host = KernelHost(self.kernel, self.writes)
        host.open_groups, host.refused = self.open_groups, self.refused
        return host

    def apply(self, config: QatConfig = CY) -> list[Outcome]:
        return list(apply("/", planners(self.host(), config), timeout=0, host=self.host))

    def preview(self, config: QatConfig = CY) -> list[Outcome]:
        return list(preview("/", planners(self.host(), config), host=self.host))

    def read(self, name: str) -> str:
        return self.kernel.read(f"{SYS}/{name}").strip()

    def vf_drivers(self) -> dict[str, int]:
        names = [name for name in self.kernel.list(SYS) if name.startswith("virtfn")]
        paths = [f"{SYS}/{name}/driver" for name in names]
        return Counter(
            self.kernel.readlink(path).rpartition("/")[2] if self.kernel.exists(path) else "" for path in paths
        )

    def open_group(self, address: str = VF) -> None:
        self.open_groups.add(f"/dev/vfio/{vfio_group(self.host(), address)}")


def qat(**spec: object) -> QatSpec:
    return QatSpec(bdf=PF, **{"services": "dc", **spec})  # pyright: ignore[reportArgumentType]
