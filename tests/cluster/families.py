"""A node that has everything, and what tests of QAT, DSA, IAA, DLB and SGX do to it and see of it.

The hardware is an emulated kernel at the machine's real paths. It is found as at the first boot: no virtual functions,
no queues. `Families.reset` brings it back there by pulling everything out and plugging it in anew, so that one cluster
serves all tests.
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
from .cluster import Cluster, Node
from .emulated import emulated_kernel
from .machine import REPOSITORY, wait_until
from .objects import Object, pod

# Where the originals' documents have users deploy to.
NAMESPACE = "inteldeviceplugins-system"
DEPLOY = REPOSITORY / "deploy"
MIB = 1024 * 1024
EPC = 64 * MIB

# Places as on real processors. Few virtual functions, for the tests' time.
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

# What every container has.
_USUAL_NODES = re.compile(r"/dev/(null|zero|full|random|urandom|tty|console|ptmx|pts/.*)")
_USUAL_VARIABLES = re.compile(r"(PATH|HOME|HOSTNAME|SHLVL|PWD|TERM|KUBERNETES_.*)=.*")
_LOOK = "find /dev ! -type d ! -type l ! -path '/dev/shm/*' ! -path /dev/termination-log; echo; env"
_IDLE = ("sh", "-c", "trap exit TERM; sleep 1000000 & wait")


@dataclass(frozen=True)
class Given:
    """What a container sees beyond what every container does: device nodes, and variables."""

    nodes: frozenset[str]
    variables: Mapping[str, str]


class DaemonSet:
    """The one pod that a DaemonSet has on a node."""

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
        """The one on the node that nobody is ending."""
        name = (node or self.families.node).name
        there = [each for each in self.pods if each["spec"].get("nodeName") == name]
        return next((each for each in there if not each["metadata"].get("deletionTimestamp")), None)

    def init(self, node: Node | None = None) -> Object | None:
        """How the init container's last run ended."""
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
        """Another pod, whose init container runs again."""
        before = self.pod()
        assert before
        self._delete(before["metadata"]["name"])
        uid = before["metadata"]["uid"]
        self._wait(lambda: (after := self.pod()) is not None and after["metadata"]["uid"] != uid, "another pod")
        return self

    @property
    def restarts(self) -> int:
        there = self.pod()
        assert there
        return there["status"]["containerStatuses"][0]["restartCount"]

    def memory(self, file: str) -> int:
        """A number in the container's memory cgroup."""
        there = self.pod()
        assert there
        container = there["status"]["containerStatuses"][0]["containerID"].removeprefix("containerd://")
        top = Path("/sys/fs/cgroup/memory") / self.families.node.cgroup
        if not top.is_dir():
            pytest.skip("reads cgroups of version 1 only")
        (group,) = top.rglob(container)
        return int((group / file).read_text())

    def log(self, container: str = "", node: Node | None = None) -> str:
        there = self.pod(node)
        assert there, self
        path = f"/api/v1/namespaces/{self.namespace}/pods/{there['metadata']['name']}/log"
        said = ""

        def told() -> bool:
            nonlocal said
            status, text = self.cluster.request("GET", f"{path}?container={container}" if container else path)
            assert status == http.HTTPStatus.OK, text
            said = text if isinstance(text, str) else json.dumps(text)
            # A container that is started again may be taken away together with its log just then.
            return not said.startswith("unable to retrieve container logs")

        self._wait(told, f"the log of {container or 'its container'}", node)
        return said

    def init_log(self, node: Node | None = None) -> str:
        """Without its lines' ends, which are where a terminal's would be."""
        there = self.pod(node)
        assert there
        self._wait(lambda: not self._init_runs(node), "its init container at rest", node)
        return " ".join(self.log(there["spec"]["initContainers"][0]["name"], node).split())

    def delete(self) -> None:
        path = f"/apis/apps/v1/namespaces/{self.namespace}/daemonsets/{self.name}"
        self.cluster.request("DELETE", path, {"propagationPolicy": "Background"})
        for each in self.pods:
            self._delete(each["metadata"]["name"])

    def wait_gone(self) -> None:
        wait_until(lambda: not self.pods, f"{self}: end of its pods", 60)

    def _delete(self, name: str) -> None:
        self.cluster.request("DELETE", f"/api/v1/namespaces/{self.namespace}/pods/{name}", {"gracePeriodSeconds": 1})

    def _wait(self, condition: Callable[[], object], what: str, node: Node | None = None) -> None:
        try:
            wait_until(condition, f"{self}: {what}", 60)
        except ClusterError as error:
            words = ("-n", self.namespace, f"--selector=app={self.name}")
            told = self.cluster.kubectl("describe", "pods", *words, check=False)
            logs = self.cluster.kubectl("logs", *words, "--all-containers", "--prefix", check=False)
            raise ClusterError(f"{error}\n{told}\n{logs}") from None


class Families:
    """The node, its hardware, and what runs on it."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.node = cluster.nodes["node-1"]
        self.kernel = emulated_kernel(self.node, NODE, openable=False)
        self.deployed: list[DaemonSet] = []
        self.configured: list[str] = []

    # Hardware

    def boot(self, node: NodeSpec) -> None:
        """Another machine in the place of the one that is; nothing may run on it."""
        self.kernel.daemon.stop()
        self.kernel = emulated_kernel(self.node, node, openable=False)

    def read(self, path: str) -> str:
        return self.node.path(path).read_text().strip()

    def reset(self, hardware: Sequence[Spec] = HARDWARE) -> None:
        """Everything as it was at the first boot, or with other hardware."""
        self.kernel.mend()
        for address in self.present():
            self.kernel.unplug(address)
        for module in ("vfio-pci", "sgx"):
            self.kernel.do("load", module=module)
        self.let_open("/dev/sgx_enclave", "/dev/sgx_provision")
        for spec in hardware:
            self.kernel.plug(spec)

    def present(self) -> list[str]:
        """The addresses of all physical functions of these families."""
        devices = self.node.path("/sys/bus/pci/devices")
        ours = [each for each in sorted(devices.iterdir()) if (each / "class").read_text()[:6] in ("0x0b40", "0x0880")]
        return [each.name for each in ours if not (each / "physfn").exists()]

    def let_open(self, *paths: str) -> None:
        """No driver of this computer answers for the nodes' numbers: those of /dev/null can be opened."""
        for path in paths:
            self.node.remove(path)
            self.node.mknod(path, 1, 3)

    def snapshot(self) -> dict[str, str]:
        """What sysfs says of the devices and their drivers."""
        found: dict[str, str] = {}
        for top in ("/sys/devices", "/sys/bus"):
            for each in self.node.path(top).iterdir():
                if each.name.startswith("pci") or each.name == "dsa":
                    found |= _picture(each, self.node.root)
        return found

    def names(self, directory: str) -> list[str]:
        return sorted(entry.name for entry in self.node.path(directory).iterdir())

    def leads_to(self, link: str) -> str:
        """The last name of where a link of the node leads; empty where there is none."""
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
        """`kubectl apply -k` of a tree below deploy/, as it is."""
        if config is not None:
            self.configure(config)
        words = ["--namespace", namespace] if namespace == NAMESPACE else []
        told = self.cluster.kubectl("apply", "--kustomize", DEPLOY / tree, *words)
        names = re.findall(r"^daemonset\.apps/(\S+)", told, re.MULTILINE)
        made = [DaemonSet(self, name, namespace) for name in names]
        self.deployed += made
        return made

    def configure(self, config: Path | Object) -> None:
        """A ConfigMap: the example beside a tree, or another."""
        if isinstance(config, Path):
            self.cluster.kubectl("apply", "--filename", config)
        else:
            self.cluster.apply(config)
            self.configured.append(config["metadata"]["name"])

    def wait(self, wanted: Mapping[str, int], timeout: float = 60) -> None:
        """Until the node has these numbers to give."""
        seen: dict[str, int | None] = {}

        def there() -> bool:
            now = self.allocatable()
            seen.update({name: now.get(name) for name in wanted})
            return all(now.get(name, 0) == number for name, number in wanted.items())

        try:
            wait_until(there, f"allocatable {dict(wanted)}", timeout)
        except ClusterError as error:
            logs = "".join(f"\n{each}:\n{each.log()[-3000:]}" for each in self.deployed if each.pod())
            raise ClusterError(f"{error}; it is {seen}{logs}") from None

    def allocatable(self) -> dict[str, int]:
        """What the node has to give of all accelerators."""
        node = self.cluster.get(f"/api/v1/nodes/{self.node.name}") or {"status": {}}
        amounts = node["status"].get("allocatable", {})
        return {name: int(amount) for name, amount in amounts.items() if ".intel.com/" in name and amount != "0"}

    # Pods

    def run(self, name: str, wants: Mapping[str, int], *, wait: bool = True, **more: Any) -> None:
        """A pod of one container that asks for something."""
        amounts = {resource: str(amount) for resource, amount in wants.items()}
        self.cluster.apply(pod(name, *_IDLE, namespace=NAMESPACE, resources=amounts, **more))
        if wait:
            self.running(name)

    def running(self, name: str) -> Object:
        return self.cluster.wait_pod(name, namespace=NAMESPACE)

    def given(self, name: str, container: str = "main") -> Given:
        """What a container has, seen by itself."""
        words = ("exec", name, "-n", NAMESPACE, "-c", container, "--", "sh", "-c", _LOOK)
        seen: list[str] = []

        def look() -> bool:
            # A kubelet that has just started has not heard of its pods yet.
            with suppress(ClusterError):
                seen.append(self.cluster.kubectl(*words))
            return bool(seen)

        wait_until(look, f"a look into the container {container} of pod {name}")
        nodes, variables = seen[0].split("\n\n")
        return Given(
            frozenset(node for node in nodes.split() if not _USUAL_NODES.fullmatch(node)),
            dict(line.split("=", 1) for line in variables.splitlines() if not _USUAL_VARIABLES.fullmatch(line)),
        )

    def holdings(self, name: str) -> list[Holding]:
        """What the kubelet remembers of a pod's devices."""
        seen = self.cluster.pod(name, NAMESPACE)
        kept = read_checkpoint(str(self.node.path("/var/lib/kubelet/device-plugins")))
        assert seen
        assert kept
        return [holding for holding in kept.holdings if holding.pod_uid == seen["metadata"]["uid"]]

    def number(self, node: str) -> str:
        """The numbers of a device node, as in /dev/char."""
        device = self.node.path(node).stat().st_rdev
        return f"{os.major(device)}:{os.minor(device)}"

    def life(self, name: str) -> tuple[str, int]:
        """Which container a pod has, and how often it was started again."""
        (status,) = self.running(name)["status"]["containerStatuses"]
        return status["containerID"], status["restartCount"]

    def delete(self, *names: str) -> None:
        """Ends pods; when this returns their devices are free."""
        for name in names:
            path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}"
            self.cluster.request("DELETE", path, {"gracePeriodSeconds": 1})
        for name in names:
            wait_until(lambda name=name: not self.cluster.pod(name, NAMESPACE), f"end of pod {name}", 60)

    def tidy(self) -> None:
        """Nothing runs any more, and the kubelet has nothing to give."""
        for each in self.deployed:
            each.delete()
        listed = self.cluster.get(f"/api/v1/namespaces/{NAMESPACE}/pods") or {"items": []}
        self.delete(*(each["metadata"]["name"] for each in listed["items"]))
        for each in self.deployed:
            each.wait_gone()
        self.deployed.clear()
        for name in self.configured:
            self.cluster.request("DELETE", f"/api/v1/namespaces/{NAMESPACE}/configmaps/{name}")
        self.configured.clear()
        wait_until(lambda: not self.devices(), "the kubelet without devices")

    def devices(self) -> dict[str, int]:
        """As `allocatable`, without EPC, which is no device."""
        return {name: number for name, number in self.allocatable().items() if name != "sgx.intel.com/epc"}


def config_map(name: str, files: Mapping[str, str]) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "data": dict(files),
    }


def _picture(top: Path, root: Path) -> dict[str, str]:
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
