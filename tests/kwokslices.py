"""ResourceSlices of many simulated nodes with the same accelerators, for clusters of kwok nodes.

offers = simulated_offers(tmp_path)
for name, uid in nodes.items():
    for body in (*node_slices(name, uid, offers), foreign_slice(name)):
        request("POST", "/apis/resource.k8s.io/v1/resourceslices", body)
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from accelplane.dra import catalog
from accelplane.dra.families.facts import with_facts
from accelplane.dra.model import Features, Offer
from accelplane.dra.resourceslice import ApiVersion, OwnerReference, to_api
from accelplane.dra.slices import Target, plan
from accelplane.dra.validation import Layout
from accelplane.host import Host
from accelplane.node.scan_loop import scan
from accelplane.node.units import units_of
from accelplane.plugins import Plugin
from accelplane.plugins.dlb import DlbPlugin
from accelplane.plugins.fpga import FpgaPlugin
from accelplane.plugins.gpu import GpuPlugin
from accelplane.plugins.idxd import DsaPlugin, IaaPlugin
from accelplane.plugins.npu import NpuPlugin
from accelplane.plugins.qat import QatPlugin
from accelplane.simulate.offload import DlbSpec, DsaSpec, FpgaSpec, IaaSpec, QatSpec, QueueSpec
from accelplane.simulate.specs import GpuSpec, NodeSpec, NpuSpec
from accelplane.simulate.tree import SimulatedNode

OffersByDriver = Mapping[str, Mapping[str, Offer]]
ALL = Features(taints=True, counters=True, consumable=True)

# A server with four accelerators of two tiles, as they are sold. It has 82 devices.
SERVER = NodeSpec(
    gpus=[GpuSpec(bdf=f"0000:{number:x}3:00.0", tiles=2) for number in range(1, 5)],
    npus=[NpuSpec(bdf="0000:00:0b.0")],
    qats=[QatSpec(bdf=f"0000:6{number}:00.0", vfs=16) for number in range(2)],
    dsas=[DsaSpec(index=2 * number, bdf=f"0000:7{number}:01.0", queues=[QueueSpec()] * 8) for number in range(2)],
    iaas=[IaaSpec(index=2 * number + 1, bdf=f"0000:7{number}:02.0", queues=[QueueSpec()] * 8) for number in range(2)],
    dlbs=[DlbSpec(bdf=f"0000:8{number}:00.0") for number in range(4)],
    fpgas=[FpgaSpec(bdf="0000:91:00.0")],
    numa_nodes=2,
)
# The allocator considers pools in the order of their drivers, so this one comes before all of ours.
FOREIGN_DRIVER = "accelerator.example.com"
_PLUGINS: tuple[type[Plugin[Any]], ...] = (GpuPlugin, NpuPlugin, QatPlugin, DsaPlugin, IaaPlugin, DlbPlugin, FpgaPlugin)


def simulated_offers(root: Path, spec: NodeSpec = SERVER, shares: Mapping[str, int] | None = None) -> OffersByDriver:
    """The offers of a node that is simulated below the empty directory `root`, all owned by DRA.

    `shares` is the number of containers that may have a device, by driver. A shared GPU has no tiles.
    """
    SimulatedNode(root).build(spec)
    host = Host(root)
    found: dict[str, Mapping[str, Offer]] = {}
    for made in _PLUGINS:
        plugin = made()
        units = [with_facts(host, plugin.namespace, unit) for unit in units_of(host, scan(plugin, host))]
        number = (shares or {}).get(plugin.namespace, 1)
        found[plugin.namespace] = {unit.id: Offer(unit=unit, owner="dra", shares=number) for unit in units}
    return found


def node_slices(
    node: str,
    uid: str,
    offers: OffersByDriver,
    *,
    features: Features = ALL,
    layout: Layout = "separate",
    version: ApiVersion = "v1",
) -> Iterator[dict[str, Any]]:
    """The bodies of requests that create the slices of one Node. Without a UID they have no owner."""
    owner = OwnerReference(api_version="v1", kind="Node", name=node, uid=uid, controller=True) if uid else None
    for driver, given in offers.items():
        pool = catalog.pool(driver, node, given, features, held=(), evict="gone")
        for created in plan(pool, {}, Target(node=node, layout=layout, owner=owner)).creates:
            yield msgspec.to_builtins(to_api(created, version))


def foreign_slice(node: str, devices: int = 8) -> dict[str, Any]:
    """The body of a request that creates a slice of another driver, whose devices have none of our attributes."""
    attributes = {"index": {"int": 0}, "vendor": {"string": "example"}, "shared": {"bool": False}}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": f"{node}-{FOREIGN_DRIVER}"},
        "spec": {
            "driver": FOREIGN_DRIVER,
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": f"device-{number}", "attributes": attributes} for number in range(devices)],
        },
    }
