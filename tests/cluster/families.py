"""A node with all families, for tests of QAT, DSA, IAA, DLB and SGX.

The hardware is an emulated kernel at the machine's real paths. Its initial state is that of a boot: no virtual
functions, no queues. `Families.reset` restores this state by unplugging and plugging in all devices, so that all tests
share one cluster.
"""

from __future__ import annotations

import http
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from accelplane.kubelet.checkpoint import Holding, read_checkpoint
from accelplane.simulate import DlbSpec, DsaSpec, GpuSpec, IaaSpec, NodeSpec, NpuSpec, QatSpec, SgxSpec

from .build import ClusterError
from .cluster import Cluster
from .emulated import emulated_kernel
from .machine import REPOSITORY, wait_until
from .node import Node
from .objects import Object, pod

# The namespace of the Go project's documentation.
NAMESPACE = "inteldeviceplugins-system"
DEPLOY = REPOSITORY / "deploy"
MIB = 1024 * 1024
EPC = 64 * MIB

# Addresses as on real processors. Few virtual functions, to save time.
QAT0, QAT1 = "0000:61:00.0", "0000:65:00.0"
DSA0, IAA0 = "0000:60:01.0", "0000:60:02.0"
DLB0, DLB1 = "0000:62:00.0", "0000:66:00.0"
VFS = 4
HARDWARE = (
    QatSpec(bdf=QAT0, total_vfs=VFS),
    QatSpec(bdf=QAT1, total_vfs=VFS),
    DsaSpec(bdf=DSA0),
    IaaSpec(bdf=IAA0),
    DlbSpec(bdf=DLB0),
    DlbSpec(bdf=DLB1),
)
NODE = NodeSpec(
    gpus=[GpuSpec()],
    npus=[NpuSpec()],
    qats=[each for each in HARDWARE if isinstance(each, QatSpec)],
    dsas=[each for each in HARDWARE if isinstance(each, DsaSpec)],
    iaas=[each for each in HARDWARE if isinstance(each, IaaSpec)],
    dlbs=[each for each in HARDWARE if isinstance(each, DlbSpec)],
    sgx=SgxSpec(epc=EPC),
)
Spec = QatSpec | DsaSpec | IaaSpec | DlbSpec

# Device nodes and variables of every container.
_DEFAULT_NODES = re.compile(r"/dev/(null|zero|full|random|urandom|tty|console|ptmx|pts/.*)")
_DEFAULT_VARIABLES = re.compile(r"(PATH|HOME|HOSTNAME|SHLVL|PWD|TERM|KUBERNETES_.*)=.*")
_INSPECT = "find /dev ! -type d ! -type l ! -path '/dev/shm/*' ! -path /dev/termination-log; echo; env"
_IDLE = ("sh", "-c", "trap exit TERM; sleep 1000000 & wait")


@dataclass(frozen=True)
class ContainerDevices:
    """The device nodes and variables of a container in addition to the default ones."""

    nodes: frozenset[str]
    variables: Mapping[str, str]


class DaemonSet:
    """A DaemonSet with one pod on a node."""

    def __init__(self, families: Families, name: str, namespace: str) -> None:
        self.families = families
        self.cluster = families.cluster
        self.name = name
        self.namespace = namespace

    def __str__(self) -> str:
        return f"DaemonSet {self.namespace}/{self.name}"

    @property
    def pods(self) -> list[Object]:
        path = f"/api/v1/namespaces/{self.namespace}/pods?labelSelector=app%3D{self.name}"
        return (self.cluster.get(path) or {"items": []})["items"]

    def pod(self, node: Node | None = None) -> Object | None:
        """The pod on the node that is not being deleted."""
        name = (node or self.families.node).name
        current = [each for each in self.pods if each["spec"].get("nodeName") == name]
        return next((each for each in current if not each["metadata"].get("deletionTimestamp")), None)

    def init(self, node: Node | None = None) -> Object | None:
        """The termination state of the init container's last run."""
        status = (self.pod(node) or {}).get("status", {})
        for each in status.get("initContainerStatuses", ()):
            for when in ("state", "lastState"):
                if ended := each[when].get("terminated"):
                    return ended
        return None

    def _init_runs(self, node: Node | None) -> bool:
        status = (self.pod(node) or {}).get("status", {})
        return any("running" in each["state"] for each in status.get("initContainerStatuses", ()))

    def wait_running(self) -> DaemonSet:
        def running() -> bool:
            status = (self.pod() or {"status": {}})["status"]
            return status.get("phase") == "Running" and all(each["ready"] for each in status["containerStatuses"])

        self._wait(running, "running")
        return self

    def wait_init(self, node: Node | None = None) -> int:
        """The exit code of the init container."""
        self._wait(lambda: self.init(node), "the end of its init container", node)
        ended = self.init(node)
        assert ended
        return ended["exitCode"]

    def restart(self) -> DaemonSet:
        """Replaces the pod, so that the init container runs again."""
        before = self.pod()
        assert before
        self._delete(before["metadata"]["name"])
        uid = before["metadata"]["uid"]
        self._wait(lambda: (after := self.pod()) is not None and after["metadata"]["uid"] != uid, "another pod")
        return self

    @property
    def restarts(self) -> int:
        current = self.pod()
        assert current
        return current["status"]["containerStatuses"][0]["restartCount"]

    def memory(self, file: str) -> int:
        """A number in the container's memory cgroup."""
        current = self.pod()
        assert current
        container = current["status"]["containerStatuses"][0]["containerID"].removeprefix("containerd://")
        top = Path("/sys/fs/cgroup/memory") / self.families.node.cgroup
        if not top.is_dir():
            pytest.skip("reads cgroups of version 1 only")
        (group,) = top.rglob(container)
        return int((group / file).read_text())

    def log(self, container: str = "", node: Node | None = None) -> str:
        current = self.pod(node)
        assert current, self
        path = f"/api/v1/namespaces/{self.namespace}/pods/{current['metadata']['name']}/log"
        log_text = ""

        def has_log() -> bool:
            nonlocal log_text
            status, text = self.cluster.request("GET", f"{path}?container={container}" if container else path)
            assert status == http.HTTPStatus.OK, text
            log_text = text if isinstance(text, str) else json.dumps(text)
            # The log of a restarted container may be removed at this time.
            return not log_text.startswith("unable to retrieve container logs")

        self._wait(has_log, f"the log of {container or 'its container'}", node)
        return log_text

    def init_log(self, node: Node | None = None) -> str:
        """The log of the init container as one line."""
        current = self.pod(node)
        assert current
        self._wait(lambda: not self._init_runs(node), "the end of its init container", node)
        return " ".join(self.log(current["spec"]["initContainers"][0]["name"], node).split())

    def delete(self) -> None:
        path = f"/apis/apps/v1/namespaces/{self.namespace}/daemonsets/{self.name}"
        self.cluster.request("DELETE", path, {"propagationPolicy": "Background"})
        for each in self.pods:
            self._delete(each["metadata"]["name"])

    def wait_removed(self) -> None:
        wait_until(lambda: not self.pods, f"{self}: end of its pods", 60)

    def _delete(self, name: str) -> None:
        self.cluster.request("DELETE", f"/api/v1/namespaces/{self.namespace}/pods/{name}", {"gracePeriodSeconds": 1})

    def _wait(self, condition: Callable[[], object], what: str, node: Node | None = None) -> None:
        try:
            wait_until(condition, f"{self}: {what}", 60)
        except ClusterError as error:
            words = ("-n", self.namespace, f"--selector=app={self.name}")
            description = self.cluster.kubectl("describe", "pods", *words, check=False)
            logs = self.cluster.kubectl("logs", *words, "--all-containers", "--prefix", check=False)
            raise ClusterError(f"{error}\n{description}\n{logs}") from None


class Families:
    """The node, its hardware and its workloads."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.node = cluster.nodes["node-1"]
        self.kernel = emulated_kernel(self.node, NODE, openable=False)
        self.deployed: list[DaemonSet] = []
        self.configured: list[str] = []

    # Hardware

    def boot(self, node: NodeSpec) -> None:
        """Replaces the hardware of the node. No workload may run."""
        self.kernel.daemon.stop()
        self.kernel = emulated_kernel(self.node, node, openable=False)

    def read(self, path: str) -> str:
        return self.node.path(path).read_text().strip()

    def reset(self, hardware: Sequence[Spec] = HARDWARE) -> None:
        """Restores the state of the first boot, or sets other hardware."""
        self.kernel.clear_faults()
        for address in self.present():
            self.kernel.unplug(address)
        for module in ("vfio-pci", "sgx"):
            self.kernel.do("load", module=module)
        self.use_null_device_numbers("/dev/sgx_enclave", "/dev/sgx_provision")
        for spec in hardware:
            self.kernel.plug(spec)

    def present(self) -> list[str]:
        """The addresses of all physical functions of these families."""
        devices = self.node.path("/sys/bus/pci/devices")
        devices_of_driver = [
            each for each in sorted(devices.iterdir()) if (each / "class").read_text()[:6] in ("0x0b40", "0x0880")
        ]
        return [each.name for each in devices_of_driver if not (each / "physfn").exists()]

    def use_null_device_numbers(self, *paths: str) -> None:
        """Gives device nodes the number of /dev/null: the host has no driver for their own numbers."""
        for path in paths:
            self.node.remove(path)
            self.node.mknod(path, 1, 3)

    def snapshot(self) -> dict[str, str]:
        """The sysfs attributes of the devices and their drivers."""
        found: dict[str, str] = {}
        for top in ("/sys/devices", "/sys/bus"):
            for each in self.node.path(top).iterdir():
                if each.name.startswith("pci") or each.name == "dsa":
                    found |= _files_below(each, self.node.root)
        return found

    def names(self, directory: str) -> list[str]:
        return sorted(entry.name for entry in self.node.path(directory).iterdir())

    def leads_to(self, link: str) -> str:
        """The last part of a link's target; empty without a link."""
        try:
            return self.node.path(link).readlink().name
        except FileNotFoundError:
            return ""

    def driver(self, address: str) -> str:
        return self.leads_to(f"/sys/bus/pci/devices/{address}/driver")

    def group(self, address: str) -> str:
        """The number of a function's IOMMU group."""
        return self.leads_to(f"/sys/bus/pci/devices/{address}/iommu_group")

    # DaemonSets

    def deploy(self, tree: str, *, config: Path | Object | None = None, namespace: str = NAMESPACE) -> list[DaemonSet]:
        """Applies a tree below deploy/ with kustomize."""
        if config is not None:
            self.configure(config)
        words = ["--namespace", namespace] if namespace == NAMESPACE else []
        output = self.cluster.kubectl("apply", "--kustomize", DEPLOY / tree, *words)
        names = re.findall(r"^daemonset\.apps/(\S+)", output, re.MULTILINE)
        daemonsets = [DaemonSet(self, name, namespace) for name in names]
        self.deployed += daemonsets
        return daemonsets

    def configure(self, config: Path | Object) -> None:
        """Applies a ConfigMap: the example of a tree, or another one."""
        if isinstance(config, Path):
            self.cluster.kubectl("apply", "--filename", config)
        else:
            self.cluster.apply(config)
            self.configured.append(config["metadata"]["name"])

    def wait(self, expected: Mapping[str, int], timeout: float = 60) -> None:
        """Waits until these numbers are allocatable."""
        resources: dict[str, int | None] = {}

        def is_allocatable() -> bool:
            now = self.allocatable()
            resources.update({name: now.get(name) for name in expected})
            return all(now.get(name, 0) == number for name, number in expected.items())

        try:
            wait_until(is_allocatable, f"allocatable {dict(expected)}", timeout)
        except ClusterError as error:
            logs = "".join(f"\n{each}:\n{each.log()[-3000:]}" for each in self.deployed if each.pod())
            raise ClusterError(f"{error}; found {resources}{logs}") from None

    def allocatable(self) -> dict[str, int]:
        """The allocatable accelerators of the node."""
        node = self.cluster.get(f"/api/v1/nodes/{self.node.name}") or {"status": {}}
        amounts = node["status"].get("allocatable", {})
        return {name: int(amount) for name, amount in amounts.items() if ".intel.com/" in name and amount != "0"}

    # Pods

    def run(self, name: str, wants: Mapping[str, int], *, wait: bool = True, **more: Any) -> None:
        """Runs a pod of one container with these requests."""
        amounts = {resource: str(amount) for resource, amount in wants.items()}
        self.cluster.apply(pod(name, *_IDLE, namespace=NAMESPACE, resources=amounts, **more))
        if wait:
            self.running(name)

    def running(self, name: str) -> Object:
        return self.cluster.wait_pod(name, namespace=NAMESPACE)

    def container_devices(self, name: str, container: str = "main") -> ContainerDevices:
        """The device nodes and variables inside a container."""
        words = ("exec", name, "-n", NAMESPACE, "-c", container, "--", "sh", "-c", _INSPECT)
        lines: list[str] = []

        def look() -> bool:
            # A kubelet that has just started does not know its pods yet.
            with suppress(ClusterError):
                lines.append(self.cluster.kubectl(*words))
            return bool(lines)

        wait_until(look, f"exec in container {container} of pod {name}")
        nodes, variables = lines[0].split("\n\n")
        return ContainerDevices(
            frozenset(node for node in nodes.split() if not _DEFAULT_NODES.fullmatch(node)),
            dict(line.split("=", 1) for line in variables.splitlines() if not _DEFAULT_VARIABLES.fullmatch(line)),
        )

    def holdings(self, name: str) -> list[Holding]:
        """The devices of a pod in the kubelet's checkpoint."""
        pod = self.cluster.pod(name, NAMESPACE)
        kept = read_checkpoint(str(self.node.path("/var/lib/kubelet/device-plugins")))
        assert pod
        assert kept
        return [holding for holding in kept.holdings if holding.pod_uid == pod["metadata"]["uid"]]

    def number(self, node: str) -> str:
        """The numbers of a device node, as in /dev/char."""
        device = self.node.path(node).stat().st_rdev
        return f"{os.major(device)}:{os.minor(device)}"

    def container_state(self, name: str) -> tuple[str, int]:
        """The ID of a pod's container, and its restart count."""
        (status,) = self.running(name)["status"]["containerStatuses"]
        return status["containerID"], status["restartCount"]

    def delete(self, *names: str) -> None:
        """Ends pods; when this returns their devices are free."""
        for name in names:
            path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}"
            self.cluster.request("DELETE", path, {"gracePeriodSeconds": 1})
        for name in names:
            wait_until(lambda name=name: not self.cluster.pod(name, NAMESPACE), f"end of pod {name}", 60)

    def clean_up(self) -> None:
        """Deletes all workloads, and waits until no devices are allocatable."""
        for each in self.deployed:
            each.delete()
        listed = self.cluster.get(f"/api/v1/namespaces/{NAMESPACE}/pods") or {"items": []}
        self.delete(*(each["metadata"]["name"] for each in listed["items"]))
        for each in self.deployed:
            each.wait_removed()
        self.deployed.clear()
        for name in self.configured:
            self.cluster.request("DELETE", f"/api/v1/namespaces/{NAMESPACE}/configmaps/{name}")
        self.configured.clear()
        wait_until(lambda: not self.devices(), "the kubelet without devices")

    def devices(self) -> dict[str, int]:
        """As `allocatable`, without EPC, which is not a device."""
        return {name: number for name, number in self.allocatable().items() if name != "sgx.intel.com/epc"}


def config_map(name: str, files: Mapping[str, str]) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "data": dict(files),
    }


def _files_below(top: Path, root: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in _walk(top):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = str(path.readlink())
            continue
        try:
            found[name] = path.read_text(errors="replace")
        except OSError as error:
            found[name] = str(error.errno)
    return found


def _walk(top: Path) -> Iterable[Path]:
    for each in sorted(top.iterdir()):
        if each.is_dir() and not each.is_symlink():
            yield from _walk(each)
        elif each.is_symlink() or each.stat().st_mode & 0o444:
            yield each
