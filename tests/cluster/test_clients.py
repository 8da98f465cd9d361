"""The overlay `clients` on a real kubelet: cgroups, mounts, checkpoint and rights are real, GPU files are texts.

`accelplane clients` reads a directory with the same processes, whose cgroups and mounts are links to the real ones, and
whose GPU files are written by the test: no driver here has such statistics.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from drmclients import i915
from manifests import overlay
from prometheus_client.parser import text_string_to_metric_families

from .cluster import Cluster
from .machine import wait_until
from .node import Node
from .objects import Object, pod
from .product_image import ORGANISATION, TAG

pytestmark = pytest.mark.cluster

I915 = "gpu.intel.com/i915"
PROC = "/var/lib/gpu-processes"
PYTHON = "/usr/bin/python3.11"
FETCH = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9400/metrics').read().decode())"
# An ordinary directory stands for /proc; its links lead to the real one.
READER = f"""
apiVersion: apps/v1
kind: DaemonSet
metadata:
  name: accelplane-clients
spec:
  template:
    spec:
      containers:
      - name: accelplane-clients
        args: [clients, --socket=/run/accelplane-clients/clients.sock, --proc={PROC}]
        volumeMounts:
        - {{name: test, mountPath: {PROC}, readOnly: true}}
      volumes:
      - name: test
        hostPath: {{path: {PROC}}}
"""


class Setup:
    """The agent with the process beside it, and the directory with GPU files."""

    def __init__(self, cluster: Cluster, node: Node, namespace: str) -> None:
        self.cluster = cluster
        self.node = node
        self.namespace = namespace
        self.proc = node.path(PROC)

    def run(self, described: Object) -> None:
        self.cluster.apply(described)
        self.cluster.wait_pod(described["metadata"]["name"], namespace=self.namespace)

    def process(self, name: str, container: str = "main") -> int:
        """The number of a container's first process on the node."""
        statuses = (self.cluster.pod(name, self.namespace) or {})["status"]["containerStatuses"]
        (id_,) = (each["containerID"].removeprefix("containerd://") for each in statuses if each["name"] == container)
        tasks = [line.split() for line in self.node.run("ctr", "-n=k8s.io", "tasks", "list").stdout.splitlines()]
        (process,) = (number for task, number, *_ in tasks if task == id_)
        return int(process)

    def open_gpu(self, process: int, text: str) -> None:
        """Gives a process a GPU file."""
        directory = self.proc / str(process)
        if not directory.exists():
            (directory / "fdinfo").mkdir(parents=True)
            for name in ("cgroup", "mountinfo"):
                (directory / name).symlink_to(f"/proc/{process}/{name}")
        (directory / "fdinfo/5").write_text(text)

    def python(self, app: str, code: str) -> str:
        """The output of a program in the container of a DaemonSet."""
        words = (f"daemonset/{app}", "-n", self.namespace, "--", PYTHON, "-c", code)
        return self.cluster.kubectl("exec", *words)

    def busy(self) -> Mapping[tuple[str, str, str], float]:
        """The busy seconds by pod, container and device, without those that are 0."""
        page = self.python(
            "accelplane-node",
            FETCH,
        )
        return {
            (sample.labels["pod"], sample.labels["container"], sample.labels["device"]): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == "accelplane_container_gpu_busy_seconds_total"
            and sample.labels["namespace"] == self.namespace
            and sample.value
        }

    def bdf(self, name: str, container: str) -> str:
        """The PCI address of the GPU that a container got."""
        words = ("exec", name, "-n", self.namespace, "-c", container, "--", "ls", "/dev/dri/by-path")
        return self.cluster.kubectl(*words).split()[0].removeprefix("pci-").removesuffix("-card")


@pytest.fixture
def setup(image: None, cluster: Cluster, node: Node, namespace: str, tmp_path: Path) -> Iterator[Setup]:
    instance = Setup(cluster, node, namespace)
    instance.proc.mkdir(parents=True)
    images = [{"name": f"{ORGANISATION}/accelplane", "newTag": TAG}]
    tree, patches = ["deploy/accelplane_node/overlays/clients"], [{"patch": READER}]
    cluster.apply(*overlay(tmp_path, resources=tree, namespace=namespace, images=images, patches=patches))
    wait_until(lambda: node.allocatable(I915) == 2, "both cards", 60)
    yield instance
    cluster.kubectl("delete", "daemonset", "--all", "-n", namespace, "--wait")
    cluster.kubectl("delete", "pods", "--all", "-n", namespace, "--force", "--grace-period=0", "--wait")
    wait_until(lambda: not node.allocatable(I915), "the end of the cards")
    shutil.rmtree(instance.proc)


def test_inspect_and_top_run_in_the_container_of_the_agent(setup: Setup) -> None:
    setup.run(pod("holder", namespace=setup.namespace, resources={I915: "1"}))
    command = ("exec", "daemonset/accelplane-node", "-n", setup.namespace, "--", "accelplane")
    report = json.loads(setup.cluster.kubectl(*command, "inspect", "-o", "json"))
    holder = f"{setup.namespace}/holder/main"
    cards = [row for row in report["devices"] if row["resource"] == I915]
    assert (report["source"], [row["advertised"] for row in cards]) == ("pod-resources", [True, True])
    assert [row["held_by"] for row in cards if row["held_by"]] == [[holder]]
    table = setup.cluster.kubectl(*command, "top", "--once", "--plugins", "gpu")
    assert sum(holder in line for line in table.splitlines()) == 1


def test_the_page_has_the_use_of_each_container_under_its_name(setup: Setup) -> None:
    described = pod("two", namespace=setup.namespace, resources={I915: "1"})
    (first,) = described["spec"]["containers"]
    # Another user's process, whose /proc/<pid>/fd the reader may not list.
    user = {"runAsUser": 1000, "runAsGroup": 1000}
    described["spec"]["containers"] = [{**first, "name": "a"}, {**first, "name": "b", "securityContext": user}]
    setup.run(described)
    setup.run(pod("none", namespace=setup.namespace))
    for number, container in enumerate(("a", "b")):
        text = i915(number, bdf=setup.bdf("two", container), render=(number + 1) * 10**9)
        setup.open_gpu(setup.process("two", container), text)
    setup.open_gpu(setup.process("none"), i915(7, bdf=setup.bdf("two", "a"), render=10**9))
    wait_until(lambda: len(setup.busy()) == 2, "the use of both containers", 60)
    seconds = {(name, container): value for (name, container, _device), value in setup.busy().items()}
    assert seconds == {("two", "a"): 1.0, ("two", "b"): 2.0}
    assert len({device for _pod, _container, device in setup.busy()}) == 2
    # The real directory of the process of another user is readable, with no more than the rights of the manifest.
    files = f"import os; print(os.listdir('/proc/{setup.process('two', 'b')}/fdinfo'))"
    assert "'0'" in setup.python("accelplane-clients", files)
    assert "cannot be read" not in setup.cluster.kubectl("logs", "daemonset/accelplane-clients", "-n", setup.namespace)
    setup.cluster.kubectl("delete", "pod", "two", "-n", setup.namespace, "--force", "--grace-period=0", "--wait")
    wait_until(lambda: not setup.busy(), "no use after the end of the pod", 60)


def samples(page: str) -> list[tuple[str, Mapping[str, str], float]]:
    families = text_string_to_metric_families(page)
    return [(each.name, each.labels, each.value) for family in families for each in family.samples]


@pytest.fixture
def shared(image: None, cluster: Cluster, node: Node, namespace: str, tmp_path: Path) -> Iterator[Setup]:
    """The plugin with three IDs for each card, and pods as labels of the samples of cards."""
    arguments = ["-shared-dev-num=3", "-allocation-policy=packed", "-metrics-holders=attach"]
    patch = [{"op": "add", "path": "/spec/template/spec/containers/0/args", "value": arguments}]
    patches = [{"target": {"kind": "DaemonSet"}, "patch": json.dumps(patch)}]
    (tmp_path / "arguments").mkdir()
    (tmp_path / "pages").mkdir()
    # Components are applied before patches, so the arguments are in a kustomization of their own.
    overlay(tmp_path / "arguments", resources=["deploy/gpu_plugin"], patches=patches)
    components = ["deploy/monitoring/components/agent-pages"]
    cluster.apply(*overlay(tmp_path / "pages", resources=["../arguments"], components=components, namespace=namespace))
    counters = [f"/sys/devices/pci0000:00/0000:00:{number:02x}.0/aer_dev_correctable" for number in (2, 3)]
    for path in counters:
        node.write(path, "RxErr 0\nTOTAL_ERR_COR 0\n")
    wait_until(lambda: node.allocatable(I915) == 6, "three IDs of both cards", 60)
    yield Setup(cluster, node, namespace)
    for path in counters:
        node.remove(path)
    cluster.kubectl("delete", "daemonset", "--all", "-n", namespace, "--wait")
    cluster.kubectl("delete", "pods", "--all", "-n", namespace, "--force", "--grace-period=0", "--wait")
    wait_until(lambda: not node.allocatable(I915), "the end of the cards")


def test_samples_of_a_shared_card_have_no_pod_and_those_of_a_single_holder_have_it(shared: Setup) -> None:
    for name in ("a", "b", "c"):
        shared.run(pod(name, namespace=shared.namespace, resources={I915: "1"}))

    def page() -> list[tuple[str, Mapping[str, str], float]]:
        return samples(shared.python("intel-gpu-plugin", FETCH))

    def holders() -> set[tuple[str, str, float]]:
        found = page()
        return {
            (labels["pod"], labels["unit"], value)
            for name, labels, value in found
            if name == "accelplane_container_devices"
        }

    def pods_of_cards() -> dict[str, set[str]]:
        """The pods in the labels of the samples of each card."""
        found: dict[str, set[str]] = {}
        for name, labels, _ in page():
            if name == "accelplane_pci_errors_total":
                found.setdefault(labels["device"], set()).add(labels.get("pod", ""))
        return found

    wait_until(lambda: len(holders()) == 3, "a series for each pod", 60)
    (card,) = {unit for _, unit, _ in holders()}
    assert holders() == {(name, card, 1.0) for name in ("a", "b", "c")}
    assert pods_of_cards() == {"card0": {""}, "card1": {""}}
    words = ("-n", shared.namespace, "--force", "--grace-period=0", "--wait")
    shared.cluster.kubectl("delete", "pod", "a", "b", *words)
    wait_until(lambda: pods_of_cards()[card] == {"c"}, "the label of the only holder", 60)
    assert pods_of_cards() == {"card0": {""}, "card1": {""}} | {card: {"c"}}
