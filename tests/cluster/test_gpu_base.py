"""The GPU plugin as users deploy it: `kubectl apply -k` of the base, on a real kubelet, in the real image."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from manifests import own_image

from .build import ClusterError
from .cluster import Cluster
from .hardware import sample_gpu
from .machine import REPOSITORY, wait_until
from .node import Node
from .objects import Object, pod

pytestmark = pytest.mark.cluster

BASE = REPOSITORY / "deployments/gpu_plugin"
RESOURCE = "gpu.intel.com/i915"
MIB = 1024 * 1024


@dataclass(frozen=True)
class Plugin:
    """The only pod of the plugin, with its process and cgroup on the node."""

    cluster: Cluster
    node: Node
    namespace: str

    @property
    def pod(self) -> Object:
        path = f"/api/v1/namespaces/{self.namespace}/pods?labelSelector=app%3Dintel-gpu-plugin"
        listed = (self.cluster.get(path) or {"items": []})["items"]
        running = [each for each in listed if each["status"].get("containerStatuses")]
        assert len(running) == 1
        return running[0]

    @property
    def restarts(self) -> int:
        return self.pod["status"]["containerStatuses"][0]["restartCount"]

    @property
    def process(self) -> int:
        """Its PID on the node."""
        container = self.pod["status"]["containerStatuses"][0]["containerID"].removeprefix("containerd://")
        for line in self.node.run("ctr", "--namespace=k8s.io", "tasks", "list").stdout.splitlines():
            name, number, *_ = line.split()
            if name == container:
                return int(number)
        raise AssertionError(f"{container}: has no process")

    def proc(self, file: str) -> str:
        return self.node.run("cat", f"/proc/{self.process}/{file}").stdout

    def memory(self, file: str) -> int:
        """A number in its memory cgroup."""
        found = re.search(r"^\d+:memory:(.*)$", self.proc("cgroup"), re.MULTILINE)
        if not found:
            pytest.skip("reads cgroups of version 1 only")
        return int(Path(f"/sys/fs/cgroup/memory{found[1]}/{file}").read_text())

    def exec(self, *command: str) -> str:
        return self.cluster.kubectl("exec", self.pod["metadata"]["name"], "-n", self.namespace, "--", *command)


@pytest.fixture
def deploy(image: None, cluster: Cluster, node: Node, namespace: str) -> Iterator[Callable[[Path], Plugin]]:
    """Applies a kustomization and waits until both cards are allocatable. Removes it at the end."""

    def apply(directory: Path) -> Plugin:
        cluster.kubectl("apply", "--kustomize", directory, "--namespace", namespace)
        wait_until(lambda: node.allocatable(RESOURCE) == 2, "both cards", 60, hint=cluster_events(cluster, namespace))
        return Plugin(cluster, node, namespace)

    yield apply
    cluster.kubectl("delete", "daemonset", "intel-gpu-plugin", "-n", namespace, "--ignore-not-found", "--wait")
    cluster.kubectl("delete", "pods", "--all", "-n", namespace, "--force", "--grace-period=0", "--wait")
    wait_until(lambda: not node.allocatable(RESOURCE), "the end of the cards")


@pytest.fixture
def plugin(deploy: Callable[[Path], Plugin]) -> Plugin:
    """The unmodified base with both cards allocatable."""
    return deploy(BASE)


def cluster_events(cluster: Cluster, namespace: str) -> str:
    return f"see kubectl --kubeconfig={cluster.kubeconfig} get events -n {namespace}"


def worker(namespace: str) -> Object:
    return pod("worker", namespace=namespace, resources={RESOURCE: "1"}, restart="Always")


def test_the_pods_fields_are_those_of_the_manifest_and_the_cards_are_advertised(plugin: Plugin) -> None:
    spec = plugin.pod["spec"]
    container = spec["containers"][0]
    assert container["image"] == own_image("intel-gpu-plugin")
    assert "command" not in container
    assert "args" not in container
    assert not plugin.node.allocatable("gpu.intel.com/i915_monitoring")
    assert plugin.restarts == 0


def test_a_pod_gets_one_card_with_its_links_and_no_files_of_the_other(plugin: Plugin) -> None:
    cluster, namespace = plugin.cluster, plugin.namespace
    cluster.apply(worker(namespace))
    cluster.wait_pod("worker", namespace=namespace)

    def run(*command: str) -> str:
        return cluster.kubectl("exec", "worker", "-n", namespace, "--", *command)

    names = run("find", "/dev/dri", "-type", "c").split()
    nodes = {name for name in names if "by-path" not in name}
    index = min(int(re.sub(r"\D", "", name)) for name in nodes)
    assert nodes == {f"/dev/dri/card{index}", f"/dev/dri/renderD{128 + index}"}
    address = f"0000:00:{2 + index:02x}.0"
    links = {f"/dev/dri/by-path/pci-{address}-card", f"/dev/dri/by-path/pci-{address}-render"}
    assert set(names) - nodes == links
    assert run("sh", "-c", f"echo hello > /dev/dri/renderD{128 + index} && echo written") == "written\n"
    mounts = [line.split() for line in run("cat", "/proc/mounts").splitlines()]
    assert {place for _, place, _, options, *_ in mounts if "ro" in options.split(",")} >= links


def test_containerd_applies_the_edits_of_a_cdi_file(plugin: Plugin) -> None:
    """Verified by a variable that is only in the file, written when the plugin can no longer restore it."""
    cluster, node, namespace = plugin.cluster, plugin.node, plugin.namespace
    cluster.apply(worker(namespace))
    cluster.wait_pod("worker", namespace=namespace)
    files = sorted(node.path("/run/cdi").iterdir())
    assert [file.name for file in files] == ["intel.cdi.k8s.io-gpu-card0.yaml", "intel.cdi.k8s.io-gpu-card1.yaml"]
    cluster.kubectl("delete", "daemonset", "intel-gpu-plugin", "-n", namespace, "--wait")
    wait_until(lambda: not node.allocatable(RESOURCE), "the end of the plugin")
    for file in files:
        file.write_text(file.read_text().replace("containerEdits: {}", "containerEdits: {env: [TOLD_BY=cdi]}"))
    cluster.kill_container("worker", namespace=namespace)

    def reported_counts() -> bool:
        try:
            return "TOLD_BY=cdi" in cluster.kubectl("exec", "worker", "-n", namespace, "--", "env")
        except ClusterError:
            return False

    wait_until(reported_counts, "the restarted container with the file's variable", 60)


def test_the_plugin_needs_only_the_rights_of_its_manifest(plugin: Plugin) -> None:
    status = dict(line.split(":\t", 1) for line in plugin.proc("status").splitlines() if ":\t" in line)
    for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(status[kind], 16) == 0, kind
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    mounts = [line.split() for line in plugin.proc("mounts").splitlines()]
    writable = {place for _, place, _, options, *_ in mounts if "rw" in options.split(",")}
    # Mounts of every container; the test harness also mounts the cgroups of the node.
    usual = ("/proc", "/dev", "/sys/fs/cgroup", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf")
    assert {place for place in writable if not place.startswith(usual)} == {
        "/var/lib/kubelet/device-plugins",
        "/run/cdi",
    }


def test_the_image_has_no_shell_and_cannot_be_written_to(plugin: Plugin) -> None:
    with pytest.raises(ClusterError, match="executable file not found"):
        plugin.exec("sh", "-c", "true")
    with pytest.raises(ClusterError, match="Read-only file system"):
        plugin.exec("/usr/bin/python3.11", "-c", "open('/usr/local/x', 'w')")


def test_the_plugin_stays_within_its_memory_limit_during_hot_plug(plugin: Plugin, tmp_path: Path) -> None:
    assert plugin.memory("memory.limit_in_bytes") == 90 * MIB
    plug_and_unplug(plugin.node, tmp_path / "cards", rounds=3)
    assert plugin.restarts == 0
    assert plugin.memory("memory.max_usage_in_bytes") < 45 * MIB


def test_the_plugin_runs_within_30_mib(deploy: Callable[[Path], Plugin], tmp_path: Path) -> None:
    """The limit that users of the Go programs have copied from manifest to manifest."""
    small = tmp_path / "small"
    shutil.copytree(BASE, small / "gpu_plugin")
    resources = {"requests": {"memory": "15Mi"}, "limits": {"memory": "30Mi"}}
    container = {"name": "intel-gpu-plugin", "resources": resources}
    patch = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": "intel-gpu-plugin"},
        "spec": {"template": {"spec": {"containers": [container]}}},
    }
    text = {"resources": ["gpu_plugin"], "patches": [{"patch": json.dumps(patch)}]}
    (small / "kustomization.yaml").write_text(json.dumps(text))
    plugin = deploy(small)
    assert plugin.memory("memory.limit_in_bytes") == 30 * MIB
    plug_and_unplug(plugin.node, tmp_path / "cards", rounds=5)
    assert plugin.restarts == 0
    cluster, namespace = plugin.cluster, plugin.namespace
    cluster.apply(worker(namespace))
    cluster.wait_pod("worker", namespace=namespace)
    assert plugin.restarts == 0


def plug_and_unplug(node: Node, tree: Path, *, rounds: int) -> None:
    """Plugs and unplugs six cards, and waits for the node's status each time."""
    names = [name for card in range(2, 8) for name in (f"card{card}", f"renderD{128 + card}")]
    for _ in range(rounds):
        sample_gpu(tree, first=2, cards=6)
        for name in names:
            node.mknod(f"/dev/dri/{name}", 1, 3)
        node.copy_tree(tree)
        wait_until(lambda: node.allocatable(RESOURCE) == 8, "eight cards")
        shutil.rmtree(tree)
        tree.mkdir()
        node.copy_tree(tree)
        for name in names:
            node.remove(f"/dev/dri/{name}")
        wait_until(lambda: node.allocatable(RESOURCE) == 2, "two cards again")
