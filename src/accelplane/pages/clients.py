"""The use of GPUs by containers on the metrics page: sums of `accelplane clients`, with the names of pods.

The sums name pods by UID. The checkpoint of the device manager has UIDs, the pod-resources API has names: a container
in both that holds the same device IDs gives the name of a UID.
"""

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from accelplane.gpuclients.messages import MAX_PODS, ClientsError, ContainerUse, Report, request_report
from accelplane.host.blocking import SerialThread
from accelplane.kubelet import checkpoint
from accelplane.kubelet.checkpoint import Holding
from accelplane.kubelet.podresources import DeviceHolder
from accelplane.node.status import NodeStatus, listed_devices
from accelplane.pages.exposition import Family
from accelplane.pages.holders import Holders
from accelplane.readings.plan import DevicePlan

log = logging.getLogger(__name__)

_GPU_PLUGIN = "gpu"
_UID = re.compile(r"[0-9a-f-]{32,36}", re.ASCII)


class NamedPod(Struct, frozen=True):
    """A pod, and its containers that hold GPUs."""

    namespace: str
    name: str
    containers: frozenset[str]


class ClientUse(Struct, frozen=True):
    """A report with the pods by UID, and the numbers of requests by outcome so far. `failed` without an answer."""

    report: Report
    pods: Mapping[str, NamedPod]
    requests: Mapping[str, int]
    failed: bool = False

    def families(self, plans: Mapping[str, Sequence[DevicePlan]], prefix: str = "") -> Sequence[Family]:
        """The families of the page, for GPUs only. `prefix` is that of the labels that name the container."""
        holder = (f"{prefix}namespace", f"{prefix}pod", f"{prefix}container")
        devices = {plan.bdf: plan.device for plan in plans.get(_GPU_PLUGIN, ()) if plan.bdf}
        busy = Family(
            "accelplane_container_gpu_busy_seconds_total",
            "Time that a container kept engines of a GPU busy, by engine class.",
            "counter",
        )
        memory = Family(
            "accelplane_container_gpu_memory_bytes", "Memory of the GPU clients of a container, by region and kind."
        )
        for (labels, name), value in sorted(sums(self.report, self.pods, devices).items()):
            family = busy if len(name) == 1 else memory
            names = ("engine",) if len(name) == 1 else ("region", "kind")
            family.add(
                value,
                {**dict(zip((*holder, "device", "bdf"), labels, strict=True)), **dict(zip(names, name, strict=True))},
            )
        requests = Family("accelplane_clients_requests_total", "Requests to accelplane clients, by outcome.", "counter")
        for outcome, count in sorted(self.requests.items()):
            requests.add(count, {"outcome": outcome})
        return busy, memory, requests

    def busy_seconds(self, plans: Mapping[str, Sequence[DevicePlan]]) -> Mapping[tuple[str, str], float]:
        """The time that clients kept engines busy, by plugin and unit, 0 for a GPU without clients."""
        by_bdf: dict[str, float] = {}
        for use in self.report.containers:
            for device in use.devices:
                by_bdf[device.bdf] = by_bdf.get(device.bdf, 0.0) + sum(device.busy_seconds.values())
        return {
            (_GPU_PLUGIN, unit): by_bdf.get(plan.bdf, 0.0)
            for plan in plans.get(_GPU_PLUGIN, ())
            if plan.bdf
            for unit in plan.units
        }


class ClientReader:
    """Requests reports at `socket`. `directory` is that of the kubelet's checkpoint. The owner calls `close`."""

    def __init__(self, socket: str, directory: str) -> None:
        self._socket = socket
        self._directory = directory
        self._thread = SerialThread()
        self._joined: tuple[Holders, Mapping[str, NamedPod]] = (Holders(), {})
        self._requests: Counter[str] = Counter()
        self._problem = ""

    async def read(self, holders: Holders, status: NodeStatus) -> ClientUse:
        """The use by the pods that hold GPUs. Never fails: without an answer there are no samples."""
        try:
            pods = await self._pods(holders, status)
            # Without pods that hold GPUs nothing is read.
            report = await request_report(self._socket, pods) if pods else Report()
        except (ClientsError, checkpoint.CheckpointError) as error:
            self._requests["error"] += 1
            if str(error) != self._problem:
                log.warning("the GPU use of containers is missing: %s", error)
            self._problem = str(error)
            return ClientUse(Report(), {}, dict(self._requests), failed=True)
        self._problem = ""
        if pods:
            self._requests["incomplete" if report.incomplete else "ok"] += 1
        return ClientUse(report, pods, dict(self._requests))

    async def close(self) -> None:
        """Waits for the thread that reads the checkpoint."""
        await self._thread.wait_idle("clients")

    async def _pods(self, holders: Holders, status: NodeStatus) -> Mapping[str, NamedPod]:
        """The pods by UID. The checkpoint is read again when the holders were. Raises `CheckpointError`."""
        if holders is self._joined[0]:
            return self._joined[1]
        gpus = {resource for resource, (plugin, _) in listed_devices(status).items() if plugin == _GPU_PLUGIN}
        rows = [row for row in holders.rows if row.pod and row.resource in gpus]
        pods: Mapping[str, NamedPod] = {}
        if rows:
            found = await self._thread.run(lambda: checkpoint.read_checkpoint(self._directory))
            pods = named_pods(found.holdings if found else (), rows)
        self._joined = holders, pods
        return pods


def named_pods(holdings: Iterable[Holding], rows: Iterable[DeviceHolder]) -> dict[str, NamedPod]:
    """The pods by UID, at most as many as a request may have. The checkpoint also has pods that have ended."""
    holders = {(row.resource, row.container, frozenset(row.device_ids)): row for row in rows}
    pods: dict[str, NamedPod] = {}
    for holding in holdings:
        row = holders.get((holding.resource, holding.container, frozenset(holding.ids)))
        uid = holding.pod_uid
        if row is None or not _UID.fullmatch(uid):
            continue
        if uid not in pods and len(pods) >= MAX_PODS:
            continue
        earlier = pods[uid].containers if uid in pods else frozenset[str]()
        pods[uid] = NamedPod(row.namespace, row.pod, earlier | {row.container})
    return pods


_Labels = tuple[str, str, str, str, str]  # namespace, pod, container, device, BDF


def sums(
    report: Report, pods: Mapping[str, NamedPod], devices: Mapping[str, str]
) -> dict[tuple[_Labels, tuple[str, ...]], float]:
    """The values by container and device, and by engine class, or region and kind. `devices` are names by BDF."""
    found: defaultdict[tuple[_Labels, tuple[str, ...]], float] = defaultdict(float)
    for use in report.containers:
        pod = pods.get(use.pod)
        if pod is None:
            continue
        for device in use.devices:
            if device.bdf not in devices:
                continue
            labels = (pod.namespace, pod.name, _container(use, pod), devices[device.bdf], device.bdf)
            for engine, seconds in device.busy_seconds.items():
                found[labels, (engine,)] += seconds
            for region, kinds in device.memory_bytes.items():
                for kind, size in kinds.items():
                    found[labels, (region, kind)] += size
    return found


def _container(use: ContainerUse, pod: NamedPod) -> str:
    """The container's name: if the mounts of its processes do not show it, the only one that holds GPUs, or none."""
    if use.name or len(pod.containers) != 1:
        return use.name
    return next(iter(pod.containers))
