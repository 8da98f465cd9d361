"""The metrics of the agent's page, from a page with every optional part."""

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from accelplane.devices import Phase
from accelplane.gpuclients.messages import ContainerUse, DeviceUse, Report
from accelplane.host import Host
from accelplane.http.validity import Validity
from accelplane.kubelet.podresources import DeviceHolder
from accelplane.kubelet.server import LATENCY_BOUNDS
from accelplane.node.status import DraStatus, NodeStatus, PluginStatus, ResourceCounters, ResourceStatus, UnitHealth
from accelplane.pages import metrics
from accelplane.pages.clients import ClientUse, NamedPod
from accelplane.pages.holders import Holders
from accelplane.pages.readings import NodeReadings
from accelplane.pages.server import PageCounts, certificate_families
from accelplane.plugins.sgx import SgxPlugin
from accelplane.readings import DevicePlan

METRIC_HEAD = re.compile(r"^# HELP (\w+) (.*)\n# TYPE \w+ (\w+)$", re.MULTILINE)


def agent_families() -> Sequence[tuple[str, str, str]]:
    """Returns the name, type and help of each metric in the order of the page."""
    return [(name, kind, text) for name, text, kind in METRIC_HEAD.findall(_page()) if name.startswith("accelplane_")]


def _page() -> str:
    counters = ResourceCounters(preferred_buckets=(1,) + (0,) * len(LATENCY_BOUNDS), allocation_outcomes={"ok": 1})
    plugin = PluginStatus(
        name="p",
        namespace="n",
        resources={"r": ResourceStatus(name="n/r", counters=counters)},
        health={"u": UnitHealth(phase=Phase.UNHEALTHY)},
        failures={"other": 1},
    )
    status = NodeStatus(version="", root="/", kubelet_dir="")
    status = msgspec.structs.replace(status, plugins={"p": plugin}, uevents={"": 1, "pci": 1}, dra={"p": DraStatus()})
    holders = Holders(
        [DeviceHolder("n", "p", "c", "n/r", ("x",))],
        "podresources",
        since={("n", "p", "c", "n/r"): 1.0},
        allocatable={"n/r": 1},
    )
    counts = PageCounts()
    counts.record("metrics", 0.1)
    counts.answered("metrics", 200)
    with tempfile.TemporaryDirectory() as root:
        epc = Path(root, "sys/devices/system/node/node0/x86")
        epc.mkdir(parents=True)
        (epc / "sgx_total_bytes").write_text("4096")
        samples = list(SgxPlugin().measure(Host(root), ()))
    contents = metrics.Contents(
        readings=NodeReadings(outcomes={"gpu": {"ok": 1}}),
        holders=holders,
        container_use=_client_use().families({"gpu": [DevicePlan(device="card0", bdf="0000:03:00.0", units=())]}),
        requests={("List", "ok"): 1},
        idle={("p", "u"): 1.0},
        lag=0.0,
        dropped={("p", "limit"): 1},
        samples=samples,
    )
    more = (*counts.families(), *certificate_families(Validity(0.0, 1.0)))
    return metrics.MetricsPage().render(status, contents, more).decode()


def _client_use() -> ClientUse:
    device = DeviceUse(
        bdf="0000:03:00.0", driver="xe", clients=1, busy_seconds={"ccs": 1.0}, memory_bytes={"vram0": {"total": 1}}
    )
    report = Report(containers=(ContainerUse(pod="uid", name="c", devices=(device,)),))
    return ClientUse(report, {"uid": NamedPod("n", "p", frozenset(("c",)))}, {"ok": 1})
