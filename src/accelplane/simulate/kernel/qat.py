"""QAT: physical functions with their services and state, virtual functions, and debugfs.

Facts: the kernel's drivers/crypto/intel/qat (qat_common/adf_sysfs.c, adf_sriov.c, adf_init.c, adf_cfg_services.c,
adf_heartbeat_dbgfs.c, adf_dbgfs.c), Documentation/ABI/testing/sysfs-driver-qat and debugfs-driver-qat. Only drivers
from the fourth generation on have `qat/`.

Unexpected behaviour: taking a device down removes its virtual functions; any number in `sriov_numvfs` enables them all;
changing services of a device that is up fails with EINVAL, not EBUSY.
"""

import errno
from collections.abc import Sequence
from functools import partial

from accelplane.simulate.kernel.model import Attribute, oserror, variable
from accelplane.simulate.kernel.numbers import boolean, check_range, check_word, decimal
from accelplane.simulate.kernel.pci import PciBus, PciDriver, PciFunction
from accelplane.simulate.offload import QAT_PRODUCTS, QatSpec

_ORDER = ("asym", "sym", "dc", "decomp", "dcc")  # the order of the driver's service mask
_RING_PAIRS = 64  # in the fourth and sixth generation


class QatDevice:
    """The driver's state of one physical function."""

    def __init__(self, driver: "QatDriver", function: PciFunction, spec: QatSpec, number: int) -> None:
        self.driver = driver
        self.core = driver.core
        self.function = function
        self.product = spec.product
        self.services = spec.services or ("dc" if number % 2 else "sym;asym")
        self.auto_reset = spec.auto_reset
        self.idle_power = True
        self.ring = -1
        self.up = False
        self.healthy = True
        self.refuses_to_start = False
        self.debugfs = f"/sys/kernel/debug/qat_{driver.name}_{function.name}"

    def add_files(self) -> None:
        """Adds the files of a bound device."""
        tree = self.core.tree
        tree.directory(self.debugfs, {"dev_cfg": Attribute(read=self._configuration, mode=0o400, raw=True)})
        if self.product.generation < 4:
            return
        tree.directory(
            f"{self.function.path}/qat",
            {
                "state": Attribute(read=lambda: "up" if self.up else "down", write=self._set_state),
                "cfg_services": Attribute(read=lambda: self.services, write=self._set_services),
                "pm_idle_enabled": variable(self, "idle_power", boolean, check=self._check_down),
                "auto_reset": variable(self, "auto_reset", boolean, show=lambda on: "on" if on else "off"),
                "rp2srv": variable(
                    self, "ring", decimal, convert=partial(check_range, 0, _RING_PAIRS - 1), show=self._ring_service
                ),
                "num_rps": _RING_PAIRS,
            },
        )

    def remove_files(self) -> None:
        self.core.tree.remove(self.debugfs)
        self.core.tree.remove(f"{self.function.path}/qat")

    def start(self) -> None:
        """Brings the device up. Raises `OSError` EFAULT if `refuses_to_start` is set."""
        if self.up:
            return
        if self.refuses_to_start:
            raise oserror(errno.EFAULT, self.function.path)
        self.up = True
        self.core.tree.directory(
            f"{self.debugfs}/heartbeat",
            {
                # The kernel's response includes the zero byte after the text.
                "status": Attribute(read=lambda: "0\n\0" if self.healthy else "-1\n\0", mode=0o400, raw=True),
                "queries_sent": Attribute("0\n\0", mode=0o400, raw=True),
                "queries_failed": Attribute("0\n\0", mode=0o400, raw=True),
                "config": Attribute("500\n\0", mode=0o400, raw=True),
            },
        )

    def stop(self) -> None:
        """Removes the virtual functions and takes the device down. Raises `OSError` EBUSY if one is in use."""
        self.driver.bus.disable_vfs(self.function)
        self.up = False
        self.core.tree.remove(f"{self.debugfs}/heartbeat")

    def check_unused(self) -> None:
        """Raises `OSError` EBUSY if the device is in use."""
        if self.core.users[self.function.name]:
            raise oserror(errno.EBUSY, self.function.path)

    def _set_state(self, text: str) -> None:
        self.check_unused()
        if check_word(("up", "down"), text) == "up":
            self.start()
        elif self.up:
            self.stop()

    def _set_services(self, text: str) -> None:
        services = text.removesuffix("\n").split(";")
        chosen = set(services)
        if len(chosen) < len(services) or not chosen <= set(_ORDER) or len(chosen) > self.product.services:
            raise oserror(errno.EINVAL)
        if ("dcc" in chosen and len(chosen) > 1) or ("decomp" in chosen and self.product.generation < 6):
            raise oserror(errno.EINVAL)
        self._check_down()
        self.services = ";".join(word for word in _ORDER if word in chosen)

    def _check_down(self) -> None:
        if self.up:
            raise oserror(errno.EINVAL)

    def _ring_service(self, ring: int) -> str:
        if ring < 0:
            raise oserror(errno.EINVAL)
        services = [word.replace("decomp", "dc").replace("dcc", "dc") for word in self.services.split(";")]
        return services[ring % len(services)]

    def _configuration(self) -> str:
        enabled = f"ServicesEnabled = {self.services}\n" if self.product.generation >= 4 else ""
        return f"[GENERAL]\n{enabled}HeartbeatTimer = 500\n[KERNEL]\nNumberCyInstances = 0\nNumberDcInstances = 0\n"


class QatDriver(PciDriver):
    """The driver of physical functions of some products."""

    def __init__(self, bus: PciBus, name: str, specs: dict[str, QatSpec]) -> None:
        super().__init__(bus)
        products = [product for product in QAT_PRODUCTS.values() if product.driver == name]
        self.name = name
        self.module = products[0].module
        self.ids = [product.device_id for product in products]
        self.devices: dict[str, QatDevice] = {}
        self._specs = specs

    def load(self) -> None:
        if not self.core.tree.has("/sys/module/intel_qat"):
            self.core.add_module("intel_qat")
        super().load()

    def probe(self, device: PciFunction) -> None:
        spec = self._specs.get(device.name, QatSpec())
        qat = QatDevice(self, device, spec, list(self._specs).index(device.name) if device.name in self._specs else 0)
        self.devices[device.name] = qat
        qat.add_files()
        if spec.state == "up":
            qat.start()

    def release(self, device: PciFunction) -> None:
        qat = self.devices[device.name]
        qat.stop()
        qat.remove_files()
        del self.devices[device.name]

    def configure_vfs(self, function: PciFunction, count: int) -> None:
        qat = self.devices[function.name]
        if not count:
            qat.check_unused()
            if qat.up:
                qat.stop()
            else:
                self.bus.disable_vfs(function)
            qat.start()
            return
        if not self.bus.iommu.translates(function):
            raise oserror(errno.EINVAL, function.path)
        if qat.up:
            qat.check_unused()
            qat.stop()
        qat.start()
        self.bus.enable_vfs(function, function.total_vfs)


class QatVfDriver(PciDriver):
    """The driver of virtual functions of some products."""

    def __init__(self, bus: PciBus, name: str) -> None:
        super().__init__(bus)
        products = [product for product in QAT_PRODUCTS.values() if product.vf_driver == name]
        self.name = name
        self.module = products[0].module + "vf"
        self.ids: Sequence[str] = [product.vf_device_id for product in products]

    def probe(self, device: PciFunction) -> None:
        self.core.tree.directory(self._debugfs(device), {"dev_cfg": Attribute("[GENERAL]", mode=0o400)})

    def release(self, device: PciFunction) -> None:
        self.core.tree.remove(self._debugfs(device))

    def _debugfs(self, device: PciFunction) -> str:
        return f"/sys/kernel/debug/qat_{self.name}_{device.name}"
