"""The devices that a simulated node with all families publishes, as selectors see them."""

import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import cel
import memorydirectory

from accelplane.devices import plain
from accelplane.dra import catalog
from accelplane.dra.families.facts import with_facts
from accelplane.dra.model import Features, Offer
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
from accelplane.plugins.sgx import SgxConfig, SgxPlugin
from accelplane.simulate.offload import DlbSpec, DsaSpec, FpgaSpec, IaaSpec, QatSpec, QueueSpec
from accelplane.simulate.specs import GpuSpec, NodeSpec, NpuSpec, SgxSpec
from accelplane.simulate.tree import SimulatedNode

_SPEC = NodeSpec(
    gpus=[
        GpuSpec(bdf="0000:03:00.0", tiles=2, memory=8 << 30),
        GpuSpec(driver="xe", bdf="0000:04:00.0", memory=16 << 30),
    ],
    npus=[NpuSpec(bdf="0000:00:0b.0")],
    qats=[QatSpec(bdf="0000:6b:00.0", vfs=2), QatSpec(bdf="0000:6c:00.0", vfs=2, services="dc")],
    dsas=[DsaSpec(bdf="0000:6a:01.0", queues=[QueueSpec(), QueueSpec(mode="shared")])],
    iaas=[IaaSpec(index=1, bdf="0000:6a:02.0", queues=[QueueSpec()])],
    dlbs=[DlbSpec(bdf="0000:72:00.0")],
    fpgas=[FpgaSpec(bdf="0000:81:00.0")],
    sgx=SgxSpec(),
)
_PLUGINS: tuple[Plugin[Any], ...] = (
    GpuPlugin(), NpuPlugin(), QatPlugin(), DsaPlugin(), IaaPlugin(), DlbPlugin(), FpgaPlugin(),
    SgxPlugin(SgxConfig(enclave_limit=3, provision_limit=3)),
)  # fmt: skip

# The variable `device` of a selector, and the resources of the unit in the device plugin API.
Published = tuple[Mapping[str, Any], list[str]]


@cache
def published_devices() -> Mapping[str, list[Published]]:
    """The devices by driver, on a server that supports everything."""
    with tempfile.TemporaryDirectory(dir=memorydirectory.path()) as root:
        SimulatedNode(Path(root)).build(_SPEC)
        return {plugin.namespace: [*_published(Host(root), plugin)] for plugin in _PLUGINS}


def _published(host: Host, plugin: Plugin[Any]) -> Iterator[Published]:
    driver = plugin.namespace
    units = {unit.id: with_facts(host, driver, unit) for unit in units_of(host, scan(plugin, host))}
    offers = {name: Offer(unit=unit, owner="dra") for name, unit in units.items()}
    features = Features(taints=True, counters=True, consumable=True)
    for each in catalog.pool(driver, "node-1", offers, features, held=(), evict="gone").devices:
        capacities = {name: capacity.value for name, capacity in each.capacities.items()}
        yield cel.device(driver, plain(each.attributes), capacities), [*units[each.unit].ids]
