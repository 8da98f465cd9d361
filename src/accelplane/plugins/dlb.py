"""Intel Dynamic Load Balancers, `dlb.intel.com/pf` and `/vf`: from `/dev/dlb*` to devices.

A physical function with enabled virtual functions has no resources of its own, so it is not published.
Driver: dlb2 (out of tree), whose class directory links a node's name to its PCI function.
"""

import re
from collections.abc import Iterable, Iterator

from accelplane.devices import Device, DeviceNode, Skipped
from accelplane.host import Host
from accelplane.plugins.base import Config, DevicePlans, Plugin, Watch

_NODE = re.compile(r"dlb[0-9]+")
PF_IDS = ("0x2710", "0x2714")  # of DLB 2.0 and 2.5; kernels without SR-IOV have no sriov_numvfs


class DlbPlugin(Plugin[Config]):
    """Publishes `dlb.intel.com/pf` and `dlb.intel.com/vf`; it has no options."""

    namespace = "dlb.intel.com"
    exclusive_namespace = True
    watch = Watch(frozenset(("dlb2", "pci")), ("/dev", "/sys/class/dlb2"))

    def scan(self, host: Host) -> Iterator[Device | Skipped]:
        for name in host.optional_names("/dev"):
            if not _NODE.fullmatch(name):
                continue
            function = f"/sys/class/dlb2/{name}/device"
            if not host.exists(function):
                yield Skipped(name, f"{function} does not exist, expected the PCI function of the node", warning=True)
                continue
            vfs = host.vf_count(function)
            if vfs in ("0", "-1"):
                path, is_pf = f"/dev/{name}", vfs == "0" or host.text_or_empty(f"{function}/device") in PF_IDS
                yield Device(resource="pf" if is_pf else "vf", id=path, nodes=[DeviceNode(path)])
            else:
                yield Skipped(name, f"a physical function with virtual functions (sriov_numvfs is {vfs[:20]!a})")

    def readings(self, host: Host, devices: Iterable[Device]) -> DevicePlans:
        from accelplane.readings import offload, pci  # noqa: PLC0415 - memory of agents without pages

        for device in devices:
            name = device.id.rpartition("/")[2]
            path = pci.canonical(host, f"/sys/class/dlb2/{name}/device")
            facts = {"function": device.resource}
            yield pci.plan(host, name, path, offload.dlb(host, path), facts, units=[device.unit])
