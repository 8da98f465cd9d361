"""The cluster harness: real programs, isolated nodes, fault injection, and complete removal."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from . import state
from .build import ClusterError
from .cluster import Cluster, why_unavailable
from .hardware import sample_gpu
from .images import ImageConfig, image_from_directory, image_from_program
from .machine import REPOSITORY, wait_until
from .node import Node, NodePlan
from .objects import pod, service

pytestmark = pytest.mark.cluster


def test_the_node_shows_simulated_hardware_at_the_real_paths_and_no_other(node: Node) -> None:
    assert node.ready
    cards = sorted(path.name for path in node.path("/sys/class/drm").iterdir())
    assert cards == ["card0", "card1", "renderD128", "renderD129"]
    assert node.run("cat", "/sys/class/drm/card1/device/vendor").stdout == "0x8086\n"
    assert node.run("ls", "/sys/bus/pci/devices").stdout.split() == ["0000:00:02.0", "0000:00:03.0"]
    assert node.path("/dev/dri/renderD129").is_char_device()
    links = node.run("ls", "/sys/class/net").stdout.split()
    assert [link for link in links if not link.startswith("veth")] == ["eth0", "lo"], "and those of pods"


def test_the_kubelets_sockets_are_reached_from_outside(node: Node) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(node.path("/var/lib/kubelet/pod-resources/kubelet.sock")))
    assert node.path("/var/lib/kubelet/device-plugins/kubelet.sock").is_socket()


def test_a_pod_runs_with_logs_and_exec(cluster: Cluster, namespace: str) -> None:
    cluster.apply(pod("worker", "sh", "-c", "echo hello; sleep 1000", namespace=namespace))
    cluster.wait_pod("worker", namespace=namespace)
    assert cluster.kubectl("logs", "worker", "-n", namespace) == "hello\n"
    assert cluster.kubectl("exec", "worker", "-n", namespace, "--", "hostname") == "worker\n"


def test_a_service_is_reached_from_a_pod_through_kube_proxy(cluster: Cluster, namespace: str) -> None:
    page = "mkdir /www; echo hello from $HOSTNAME > /www/index.html; exec httpd -f -p 8080 -h /www"
    cluster.apply(service("web", 8080, namespace=namespace), pod("web", "sh", "-c", page, namespace=namespace))
    cluster.wait_pod("web", namespace=namespace)
    retried = "until timeout 2 wget -q -O - http://$WEB_SERVICE_HOST:8080/; do sleep 0.2; done"
    cluster.apply(pod("client", "sh", "-c", retried, namespace=namespace))
    cluster.wait_pod("client", "Succeeded", namespace=namespace)
    assert cluster.kubectl("logs", "client", "-n", namespace).endswith("hello from web\n")


def test_a_pod_sees_the_simulated_sysfs_read_only_unless_it_is_privileged(cluster: Cluster, namespace: str) -> None:
    attribute = "/sys/class/drm/card0/device/numa_node"
    script = f"ls /sys/class/drm /dev/dri; echo 0 > {attribute} && echo written"
    for name, privileged in (("plain", False), ("mighty", True)):
        cluster.apply(
            pod(
                name, "sh", "-c", script, namespace=namespace, host_paths=["/sys/class/drm", "/dev/dri"],
                securityContext={"privileged": privileged},
            )
        )  # fmt: skip
    cluster.wait_pod("plain", "Failed", namespace=namespace)
    cluster.wait_pod("mighty", "Succeeded", namespace=namespace)
    output = cluster.kubectl("logs", "plain", "-n", namespace)
    assert output.count("renderD128") == 2
    assert "Read-only file system" in output
    assert "written" in cluster.kubectl("logs", "mighty", "-n", namespace)


def test_an_image_is_built_from_a_directory(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "bin").mkdir(parents=True)
    (root / "bin/busybox").write_bytes(cluster.assets.program("busybox").read_bytes())
    (root / "bin/busybox").chmod(0o755)
    (root / "greeting").write_text("made here\n")
    config = ImageConfig(entrypoint=["/bin/busybox", "cat"], command=["/greeting"], user="65534")
    cluster.import_image(image_from_directory(tmp_path / "image.tar", "localhost/greeting:1", root, config))
    described = pod("greeter", namespace=namespace, image="localhost/greeting:1")
    del described["spec"]["containers"][0]["command"]
    cluster.apply(described)
    cluster.wait_pod("greeter", "Succeeded", namespace=namespace)
    assert cluster.kubectl("logs", "greeter", "-n", namespace) == "made here\n"


def test_a_memory_limit_is_enforced(cluster: Cluster, namespace: str) -> None:
    greedy = ["dd", "if=/dev/zero", "of=/dev/null", "bs=200M", "count=1"]
    cluster.apply(pod("greedy", *greedy, namespace=namespace, resources={"memory": "30Mi"}))
    failed_pod = cluster.wait_pod("greedy", "Failed", namespace=namespace)
    assert failed_pod["status"]["containerStatuses"][0]["state"]["terminated"]["reason"] == "OOMKilled"


@pytest.mark.parametrize("name", ["kubelet", "containerd", "kube-proxy"])
def test_a_pod_survives_the_loss_of_a_node_daemon(cluster: Cluster, node: Node, namespace: str, name: str) -> None:
    cluster.apply(pod("worker", namespace=namespace))
    before = cluster.wait_pod("worker", namespace=namespace)["status"]["containerStatuses"]
    daemon = node.daemons[name]
    daemon.kill()
    assert not daemon.running
    daemon.start()
    node.wait_ready()
    cluster.apply(pod("second", namespace=namespace))
    cluster.wait_pod("second", namespace=namespace)
    assert cluster.wait_pod("worker", namespace=namespace)["status"]["containerStatuses"] == before


def test_a_killed_container_is_restarted(cluster: Cluster, namespace: str) -> None:
    cluster.apply(pod("worker", namespace=namespace, restart="Always"))
    cluster.wait_pod("worker", namespace=namespace)
    cluster.kill_container("worker", namespace=namespace)

    def restarted() -> bool:
        status = cluster.wait_pod("worker", namespace=namespace)["status"]["containerStatuses"][0]
        return status["restartCount"] == 1

    wait_until(restarted, "the restart of the container")


def test_a_restarted_api_server_keeps_its_objects(cluster: Cluster, namespace: str) -> None:
    cluster.apply(pod("worker", namespace=namespace))
    cluster.wait_pod("worker", namespace=namespace)
    cluster.apiserver.kill()
    assert cluster.pod("worker", namespace) is None
    cluster.apiserver.start()
    cluster.wait_pod("worker", namespace=namespace)


def test_a_uevent_is_received_only_in_the_node_and_as_sent_by_the_kernel(cluster: Cluster, node: Node) -> None:
    device = "/sys/devices/pci0000:00/0000:00:02.0/drm/card0"
    with node.uevent_listener() as inside, cluster.control.uevent_listener() as elsewhere:
        node.uevent("change", device, "drm", HOTPLUG="1")
        inside.settimeout(5)
        message, (sender, _) = inside.recvfrom(4096)
        elsewhere.setblocking(False)
        with pytest.raises(BlockingIOError):
            elsewhere.recv(4096)
    assert sender == 0
    words = message.decode().split("\0")
    assert words[0] == "change@/devices/pci0000:00/0000:00:02.0/drm/card0"
    assert {"ACTION=change", "SUBSYSTEM=drm", "HOTPLUG=1"} < set(words)
    assert any(word.startswith("SEQNUM=") for word in words)


def test_hardware_is_plugged_and_unplugged_while_the_node_runs(node: Node, tmp_path: Path) -> None:
    node.copy_tree(sample_gpu(tmp_path, first=2))
    node.mknod("/dev/dri/card2", 1, 3)
    assert node.run("cat", "/sys/class/drm/card2/device/device").stdout == "0x56c0\n"
    node.write("/sys/class/drm/card2/device/device", "0x1234\n")
    assert node.run("cat", "/sys/devices/pci0000:00/0000:00:04.0/device").stdout == "0x1234\n"

    shutil.rmtree(tmp_path)
    node.copy_tree(tmp_path)
    node.remove("/dev/dri/card2")
    output = node.run("find", "/sys/class/drm", "/sys/bus/pci", "/sys/devices/pci0000:00", "/dev/dri").stdout
    assert "card2" not in output
    assert "0000:00:04.0" not in output
    assert "card1" in output


def test_emulated_hardware_may_be_below_directories_of_the_real_sysfs(node: Node, tmp_path: Path) -> None:
    (tmp_path / "sys/devices/system/node/node7").mkdir(parents=True)
    (tmp_path / "sys/devices/system/node/node7/cpulist").write_text("0\n")
    processors = node.run("cat", "/sys/devices/system/cpu/online").stdout
    node.copy_tree(tmp_path)
    assert node.run("cat", "/sys/devices/system/node/node7/cpulist").stdout == "0\n"
    assert node.run("cat", "/sys/devices/system/cpu/online").stdout == processors
    assert not Path("/sys/devices/system/node/node7").exists()
    node.remove("/sys/devices/system/node/node7")


def test_a_user_may_do_what_rbac_grants_and_no_more(cluster: Cluster, tmp_path: Path) -> None:
    (file := tmp_path / "kubeconfig").write_text(cluster.user("somebody", "visitors"))
    assert "system:discovery" not in cluster.kubectl(f"--kubeconfig={file}", "auth", "whoami")
    assert cluster.kubectl(f"--kubeconfig={file}", "auth", "can-i", "list", "pods", check=False) == "no\n"


def test_a_webhook_of_the_test_is_called_through_a_service_and_verified(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    host = f"hook.{namespace}.svc"
    pair = cluster.server_certificate("hook", host)
    (file := tmp_path / "server.pem").write_bytes(pair.certificate + pair.key)
    with _refusing_webhook(cluster.addresses.host, file) as port:
        cluster.apply(
            {
                "apiVersion": "v1", "kind": "Service", "metadata": {"name": "hook", "namespace": namespace},
                "spec": {"ports": [{"port": 443, "targetPort": port}]},
            },
            {
                "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
                "metadata": {"name": "h", "namespace": namespace, "labels": {"kubernetes.io/service-name": "hook"}},
                "ports": [{"port": port, "name": ""}], "endpoints": [{"addresses": [cluster.addresses.host]}],
            },
            {
                "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration",
                "metadata": {"name": namespace},
                "webhooks": [{
                    "name": "refuse.example.com", "sideEffects": "None", "admissionReviewVersions": ["v1"],
                    "clientConfig": {
                        "service": {"name": "hook", "namespace": namespace},
                        "caBundle": base64.b64encode(cluster.authority).decode(),
                    },
                    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
                    "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"],
                               "resources": ["pods"]}],
                }],
            },
        )  # fmt: skip
        try:
            with pytest.raises(ClusterError, match="not on my watch"):
                cluster.apply(pod("worker", namespace=namespace))
        finally:
            cluster.kubectl("delete", "validatingwebhookconfiguration", namespace)


def test_kwok_simulates_many_nodes(cluster: Cluster, namespace: str) -> None:
    names = cluster.add_kwok_nodes(20, resources={"gpu.intel.com/i915": "4"})
    try:
        cluster.apply(pod("worker", namespace=namespace, node=names[3]))
        cluster.wait_pod("worker", namespace=namespace)
    finally:
        cluster.request("DELETE", f"/api/v1/namespaces/{namespace}/pods/worker")
        for name in names:
            cluster.request("DELETE", f"/api/v1/nodes/{name}")
        cluster.kwok.stop()


def test_two_nodes_are_one_network_and_each_loses_only_its_own(start_cluster: Callable[..., Cluster]) -> None:
    cluster = start_cluster(NodePlan(name="node-1"), NodePlan(name="node-2", labels={"rack": "b"}))
    first, second = cluster.nodes.values()
    page = "mkdir /www; echo hello > /www/index.html; exec httpd -f -p 8080 -h /www"
    cluster.apply(pod("web", "sh", "-c", page, node="node-2", restart="Always"))
    address = cluster.wait_pod("web")["status"]["podIP"]
    fetch = f"until timeout 2 wget -q -O - http://{address}:8080/; do sleep 0.1; done"
    cluster.apply(pod("client", "sh", "-c", fetch, node="node-1"))
    cluster.wait_pod("client", "Succeeded")
    assert cluster.kubectl("get", "nodes", "-l", "rack=b", "-o", "name") == "node/node-2\n"

    second.disconnect()
    wait_until(lambda: not second.ready, "node-2: not Ready without its network", 60)
    assert first.ready
    second.connect()
    second.wait_ready()


def test_a_reboot_clears_memory_file_systems_and_keeps_the_disk(start_cluster: Callable[..., Cluster]) -> None:
    def one_gpu(node: Node) -> None:
        node.write("/sys/class/drm/card0/device/vendor", "0x8086\n")

    cluster = start_cluster(NodePlan(hardware=[one_gpu]))
    node = cluster.nodes["node-1"]
    cluster.apply(pod("worker", restart="Always"))
    before = cluster.wait_pod("worker")["status"]["containerStatuses"][0]
    node.path("/run/in-memory").touch()
    node.path("/var/lib/kubelet/device-plugins/on-disk").touch()
    node.write("/sys/class/drm/card1/device/vendor", "0x8086\n")

    node.reboot()

    assert not node.path("/run/in-memory").exists()
    assert node.path("/var/lib/kubelet/device-plugins/on-disk").exists()
    assert node.run("ls", "/sys/class/drm").stdout == "card0\n"

    def restarted() -> bool:
        after = cluster.wait_pod("worker")["status"]["containerStatuses"][0]
        return after["containerID"] != before["containerID"]

    wait_until(restarted, "the pod's new container")


def test_a_cluster_is_removed_completely_even_after_a_failure(cluster_is_possible: None) -> None:
    traces: list[Traces] = []

    def fails() -> None:
        with Cluster.running() as cluster:
            cluster.apply(pod("worker"))
            cluster.wait_pod("worker")
            traces.append(Traces.of(state.Claim(cluster.directory, "", owned=True)))
            raise RuntimeError("a test fails")

    with pytest.raises(RuntimeError, match="a test fails"):
        fails()
    traces[0].assert_removed()


def test_a_killed_owner_ends_its_cluster_and_the_next_start_cleans_up(cluster_is_possible: None) -> None:
    script = (
        "from tests.cluster.cluster import Cluster\n"
        "with Cluster.running() as cluster: print(cluster.directory, flush=True); input()\n"
    )
    command, pipe = [sys.executable, "-c", script], subprocess.PIPE
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=pipe, stdout=pipe, text=True) as owner:
        assert owner.stdout
        directory = Path(owner.stdout.readline().strip())
        traces = Traces.of(state.Claim(directory, "", owned=True))
        assert set(traces.claim.machines()) == {"control", "node-1"}
        owner.kill()
    wait_until(lambda: not traces.processes(), "end of all processes")
    with state.claimed("next", owned=True):
        pass
    traces.assert_removed()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_leaves_no_files(cluster_is_possible: None, number: signal.Signals) -> None:
    name = f"interrupted-{os.getpid()}"
    command = [sys.executable, "-m", "tests.cluster", "up", f"--name={name}"]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        wait_until(lambda: "node-1" in _machines(name), "the node's machine")
        traces = Traces.of(state.find(name))
        process.send_signal(number)
        process.communicate(timeout=30)
    assert process.returncode == 130
    traces.assert_removed()


def test_the_cluster_command_runs_until_it_is_stopped(cluster_is_possible: None) -> None:
    try:
        line = _command("up", "--name=people").strip()
        traces = Traces.of(state.find("people"))
        listed = subprocess.run(["sh", "-c", f"{line}; kubectl get nodes -o name"], capture_output=True, check=True)
        assert listed.stdout == b"node/node-1\n"
        assert _command("enter", "--name=people", "node-1", "ls", "/sys/class/drm").split() == ["card0", "renderD128"]
        assert "people, export" in _command("status")
    finally:
        _command("down", "--name=people")
    traces.assert_removed()


def test_a_dynamically_linked_program_is_rejected_for_an_image(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="linked dynamically"):
        image_from_program(tmp_path / "image.tar", "localhost/broken:1", Path("/bin/sh").resolve())


def test_missing_programs_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    monkeypatch.setenv("ACCELPLANE_KUBE_ASSETS", str(tmp_path))
    assert "run python -m tests.cluster.build" in (why_unavailable() or "")


def _command(*words: str) -> str:
    command = [sys.executable, "-m", "tests.cluster", *words]
    return subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True).stdout


@contextmanager
def _refusing_webhook(address: str, certificate: Path) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            response = {
                "uid": review["request"]["uid"],
                "allowed": False,
                "status": {"message": "not on my watch"},
            }
            answer = json.dumps({**review, "request": None, "response": response}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's name
            """Does not log; the test checks the response of the API server."""

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with ThreadingHTTPServer((address, 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def _machines(name: str) -> dict[str, int]:
    claim = state.find(name)
    return claim.machines() if claim else {}


@dataclass(frozen=True)
class Traces:
    """The processes and files of a running cluster on this computer, to check their removal later.

    `namespaces` are the open PID namespaces of its machines: other clusters start and end meanwhile, and the kernel
    reuses inode numbers.
    """

    claim: state.Claim
    namespaces: Mapping[str, int]

    @classmethod
    def of(cls, claim: state.Claim | None) -> Traces:
        assert claim
        holders: dict[str, int] = {}
        for parent in claim.machines().values():
            for first in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
                namespace = Path(f"/proc/{first}/ns/pid")
                holders[str(namespace.readlink())] = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
        return cls(claim, holders)

    def processes(self) -> dict[str, str]:
        """Processes that are in one of the namespaces, or have the directory in their command line."""
        found: dict[str, str] = {}
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                command = (process / "cmdline").read_bytes().decode(errors="replace")
                inside = str((process / "ns/pid").readlink()) in self.namespaces
                if inside or f"{self.claim.directory}/" in command:
                    found[process.name] = command.replace("\0", " ")
        return found

    def remains(self) -> list[str]:
        network = Path("/sys/class/net") / self.claim.host_port
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        return [
            *(f"process {number}: {command}" for number, command in self.processes().items()),
            *(f"cgroup {name}" for name in self.claim.cgroups()),
            *(f"mount {mount}" for mount in mounts if f"{self.claim.directory}/" in mount),
            *(f"file {path}" for path in (network, self.claim.directory) if path.exists()),
        ]

    def assert_removed(self) -> None:
        assert self.namespaces
        with suppress(ClusterError):
            wait_until(lambda: not self.remains(), "the end")
        remains = self.remains()
        for descriptor in self.namespaces.values():
            os.close(descriptor)
        assert remains == []
