"""A simulated sysfs and devfs below a directory, in the layout of the kernel.

Sources: Documentation/ABI/testing/sysfs-bus-pci and sysfs-class-drm, the i915, xe and ivpu drivers' sysfs code, udev's
60-drm.rules. Every device has a directory below `/sys/devices/pci…`, the target of class, bus and number links.

    node = SimulatedNode(tmp_path)
    card = node.plug_gpu(GpuSpec(driver="xe"))     # "card0"
    node.unplug(card)
"""

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

from accelplane.simulate import functions
from accelplane.simulate.functions import ClassDevice, SimulatedDevice
from accelplane.simulate.journal import Journal, Nodes, TreeError
from accelplane.simulate.specs import GpuSpec, Model, NodeSpec, NpuSpec, gpu_address, npu_address

__all__ = ["GpuSpec", "NodeSpec", "NpuSpec", "SimulatedDevice", "SimulatedNode", "TreeError"]

_ROOT_PORT = Model("0x7ab8", "0x060400")
_TOTAL_VFS = 31


class SimulatedNode:
    """The node below `root`. The directory is created if missing; other files in it do not change.

    `device_nodes` selects plain files, which need no privileges, or character devices. These have the numbers of the
    kernel, or all of them `numbers`, for example those of `/dev/null`, so that containers can open them.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        device_nodes: Nodes = "files",
        numbers: tuple[int, int] | None = None,
        numa_nodes: int = 1,
    ) -> None:
        self.root = os.path.realpath(root)
        self._prefix = "" if self.root == "/" else self.root
        self._device_nodes: Nodes = device_nodes
        self._numbers = numbers
        self._numa_nodes = numa_nodes
        self._plugged: dict[str, tuple[SimulatedDevice, Journal]] = {}
        self._mei: dict[int, str] = {}

    def devices(self) -> tuple[SimulatedDevice, ...]:
        """The plugged devices in the order of their creation."""
        return tuple(device for device, _journal in self._plugged.values())

    def device(self, name: str) -> SimulatedDevice:
        """Returns the device with this name. Raises `TreeError` if there is none."""
        if name not in self._plugged:
            raise TreeError(f"{name[:80]!a}: not plugged in, found {', '.join(self._plugged) or 'no devices'}")
        return self._plugged[name][0]

    def build(self, spec: NodeSpec) -> list[str]:
        """Plugs in all devices of `spec`. Returns the names of GPUs and NPUs, without virtual functions.

        QAT, DSA, IAA, DLB, FPGA and SGX devices, and NICs, are plain files that do not react. They cannot be unplugged.
        """
        self._numa_nodes = spec.numa_nodes
        names = [self.plug_gpu(gpu) for gpu in spec.gpus] + [self.plug_npu(npu) for npu in spec.npus]
        if spec.qats or spec.dsas or spec.iaas or spec.dlbs or spec.fpgas or spec.nics or spec.onload or spec.sgx:
            from accelplane.simulate.kernel import Kernel, write_tree  # noqa: PLC0415 - not part of images for nodes

            write_tree(Kernel(spec), self.root, device_nodes=self._device_nodes, numbers=self._numbers)
        return names

    def plug_gpu(self, spec: GpuSpec | None = None) -> str:
        """Plugs in a GPU and its virtual functions. Returns the name of the card.

        Raises `TreeError`. In this case all its files are removed.
        """
        spec = spec or GpuSpec()
        index = self._index("card", spec.index)
        numa_node = self._numa_node(index, spec.numa_node)
        bdf = spec.bdf or gpu_address(index, numa_node)
        virtual = [functions.virtual_address(bdf, number) for number in range(spec.vfs)]
        card = _card(spec, index, bdf, numa_node, self._root_port(bdf, numa_node))
        self._plug_physical(spec, card)
        try:
            for number, address in enumerate(virtual):
                self._plug_virtual(spec, card, number, address)
        except TreeError:
            self.unplug(card.name)
            raise
        return card.name

    def plug_npu(self, spec: NpuSpec | None = None) -> str:
        """Plugs in an NPU and returns its name. Raises `TreeError`. In this case all its files are removed."""
        spec = spec or NpuSpec()
        index = self._index("accel", spec.index)
        numa_node = self._numa_node(index, spec.numa_node)
        bdf = spec.bdf or npu_address(index)
        path = f"{self._root_port(bdf, numa_node)}/{bdf}"
        device = SimulatedDevice(
            name=f"accel{index}",
            kind="npu",
            bdf=bdf,
            driver=spec.driver,
            numa_node=numa_node,
            path=path,
            class_path=f"{path}/accel/accel{index}",
            nodes=(f"/dev/accel/accel{index}",),
        )
        self._plug(device, spec.model, {"npu_busy_time_us": "0"}, [functions.accel_minor(device)])
        return device.name

    def unplug(self, name: str) -> None:
        """Removes a device, the virtual functions of a card first. Raises `TreeError` if there is none."""
        self.device(name)
        for device in reversed(self.devices()):
            if name in (device.name, device.physical):
                self._plugged[device.name][1].undo()
                del self._plugged[device.name]
                self._mei = {number: card for number, card in self._mei.items() if card != device.name}

    def _plug_physical(self, spec: GpuSpec, card: SimulatedDevice) -> None:
        class_devices = functions.drm_minors(card, functions.card_tiles(spec))
        class_devices += [functions.connector(card, output) for output in spec.outputs]
        number = next(number for number in range(len(self._mei) + 1) if number not in self._mei)
        if spec.mei:
            class_devices.append(functions.mei_device(card, number))
        sriov = {"sriov_numvfs": str(spec.vfs), "sriov_totalvfs": str(max(spec.vfs, _TOTAL_VFS))}
        self._plug(card, spec.model, {**sriov, **functions.function_tiles(spec)}, class_devices, by_path=spec.by_path)
        if spec.mei:
            self._mei[number] = card.name

    def _plug_virtual(self, spec: GpuSpec, physical: SimulatedDevice, number: int, bdf: str) -> None:
        index = self._index("card", None)
        card = _card(spec, index, bdf, physical.numa_node, os.path.dirname(physical.path), physical=physical.name)
        links = {f"{card.path}/physfn": physical.path, f"{physical.path}/virtfn{number}": card.path}
        self._plug(card, spec.model, {}, functions.drm_minors(card, {}), links, by_path=spec.by_path)

    def _plug(
        self,
        device: SimulatedDevice,
        model: Model,
        files: Mapping[str, str],
        class_devices: Sequence[ClassDevice],
        links: Mapping[str, str] = {},
        *,
        by_path: bool = False,
    ) -> None:
        """Creates the function and its class devices with their files, then all links to them, then the nodes."""
        with self._writing() as journal:
            if device.kind == "gpu":
                journal.keep("/sys/class/drm/version", "drm 1.1.0 20060810")
            functions.make_function(journal, device.path, model, device.numa_node, driver=device.driver, files=files)
            driver = f"/sys/bus/pci/drivers/{device.driver}"
            journal.link(f"{device.path}/driver", driver)
            for class_device in class_devices:
                functions.make_class_device(journal, class_device)
            for path, target in links.items():
                journal.link(path, target)
            journal.link(f"/sys/bus/pci/devices/{device.bdf}", device.path)
            journal.link(f"{driver}/{device.bdf}", device.path)
            for class_device in class_devices:
                functions.make_class_links(journal, class_device)
            for class_device in class_devices:
                if class_device.numbers:
                    journal.node(class_device.node, class_device.numbers)
            if by_path:  # as udev does
                for node, kind in zip(device.nodes, ("card", "render"), strict=True):
                    journal.link(f"/dev/dri/by-path/pci-{device.bdf}-{kind}", node)
        self._plugged[device.name] = device, journal

    def _root_port(self, bdf: str, numa_node: int) -> str:
        """Returns the parent directory of functions on this bus. Creates the root port of the bus if missing.

        Functions on the bus of a host bridge are directly below it.
        """
        domain, bus, _place = bdf.split(":")
        root_bus = int(bus, 16) & 0xF0
        host_bridge = f"/sys/devices/pci{domain}:{root_bus:02x}"
        number = int(bus, 16) - root_bus
        if number == 0:
            return host_bridge
        port = f"{domain}:{root_bus:02x}:{0x1C + (number - 1) // 8:02x}.{(number - 1) % 8}"
        path = f"{host_bridge}/{port}"
        if not os.path.isdir(self._prefix + path):
            with self._writing() as journal:
                functions.make_function(journal, path, _ROOT_PORT, numa_node, driver="pcieport", files={})
                journal.link(f"/sys/bus/pci/devices/{port}", path)
        return path

    @contextmanager
    def _writing(self) -> Generator[Journal, None, None]:
        journal = Journal(self._prefix, self._device_nodes, self._numbers)
        try:
            yield journal
        except TreeError:
            journal.undo()
            raise

    def _numa_node(self, index: int, spec_numa_node: int | None) -> int:
        if spec_numa_node is not None:
            return spec_numa_node
        return index % self._numa_nodes if self._numa_nodes else -1

    def _index(self, kind: str, number: int | None) -> int:
        if number is None:
            return next(index for index in range(len(self._plugged) + 1) if f"{kind}{index}" not in self._plugged)
        if f"{kind}{number}" in self._plugged:
            raise TreeError(f"{kind}{number}: already plugged in")
        return number


def _card(spec: GpuSpec, index: int, bdf: str, numa_node: int, port: str, *, physical: str = "") -> SimulatedDevice:
    return SimulatedDevice(
        name=f"card{index}",
        kind="gpu",
        bdf=bdf,
        driver=spec.driver,
        numa_node=numa_node,
        path=f"{port}/{bdf}",
        class_path=f"{port}/{bdf}/drm/card{index}",
        nodes=(f"/dev/dri/card{index}", f"/dev/dri/renderD{128 + index}"),
        physical=physical,
    )
