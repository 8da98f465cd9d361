"""A Kubernetes cluster of real programs on machines made of namespaces, with fault injection.

``with Cluster.running(nodes=[NodePlan("node-1")]) as cluster`` yields a ready cluster and removes it at the end.
One control machine runs etcd, the API server, the controllers and the scheduler, and is the switch of the cluster's
network; every node is a machine of its own with a container runtime, a kubelet and a kube-proxy. From here the API
server is reached over one veth pair; nothing is routed or translated beyond it.
"""

from __future__ import annotations

import http
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from . import settings
from .apiclient import ApiClient, Object
from .build import Assets, ClusterError, assets
from .images import busybox_image, image_from_program
from .machine import GO, Argument, Machine, wait_until
from .network import Network
from .node import Node, NodePlan
from .pki import Authority, Credentials, signing_key
from .settings import BUSYBOX_IMAGE, PAUSE_IMAGE, Addresses
from .state import Claim, claimed

_MOST_NODES = 200


def why_unavailable() -> str | None:
    """Why no cluster can be started here, or None."""
    if sys.platform != "linux":
        return "needs Linux"
    if os.geteuid() != 0:
        return "needs root, for namespaces, mounts and cgroups"
    if missing := assets().missing():
        return "; ".join(missing)
    if subprocess.run(["unshare", "--mount", "--net", "--pid", "--fork", "true"], check=False).returncode:
        return "this machine does not allow new namespaces (unshare failed)"
    return None


def _raise_inotify_limit() -> None:
    """Allows as many inotify instances as several clusters need: the limit is per user, and all nodes are root's.

    A kubelet ends without one. Where the limit cannot be changed, as many clusters run as it allows.
    """
    limit = Path("/proc/sys/fs/inotify/max_user_instances")
    with suppress(OSError):
        if int(limit.read_text()) < settings.INOTIFY_INSTANCES:
            limit.write_text(str(settings.INOTIFY_INSTANCES))


class Cluster:
    """One cluster. Start it with ``Cluster.running``; the methods below are for tests while it runs."""

    def __init__(
        self,
        claim: Claim,
        shares: Sequence[Path] = (),
        silence: int = settings.NODE_MONITOR_GRACE_PERIOD,
        *,
        apiserver: Sequence[str] = (),
        gates: Sequence[str] = (),
        variables: Mapping[str, str] = GO,
    ) -> None:
        self.directory = claim.directory
        self.number = claim.number
        self.name = claim.name
        self.owned = claim.owned
        self._claim = claim
        self.addresses = Addresses(self.number)
        self.assets: Assets = assets()
        self.shares = [*shares, self.assets.kubernetes, self.assets.directory]
        self.nodes: dict[str, Node] = {}
        places = [*self.assets.path.split(":"), self.assets.program("etcd").parent, Path(sys.executable).parent]
        system = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"]
        self.path = ":".join([*map(str, places), *system])
        self._authority = Authority("accelplane test cluster")
        self._api = ApiClient(self.addresses.control, settings.API_PORT, self.authority)
        self.control = Machine(
            "control",
            self.directory / "control",
            cgroup=f"accelplane-{self.number}-control",
            path=self.path,
            shares=self.shares,
            owned=self.owned,
            variables=variables,
        )
        self.network = Network(self.addresses, self.control, self.nodes, claim.host_port)
        control = self.control
        self.etcd = control.add_daemon("etcd", settings.etcd())
        enabled = settings.feature_gates(gates)
        self.apiserver = control.add_daemon(
            "kube-apiserver",
            settings.apiserver(self.addresses.control, [*apiserver, *enabled]),
            ready=self._api_is_ready,
        )
        self.controller_manager = control.add_daemon(
            "controller-manager", [*settings.controller_manager(silence), *enabled]
        )
        self.scheduler = control.add_daemon("scheduler", [*settings.scheduler(), *enabled])
        self.kwok = control.add_daemon("kwok", settings.kwok(silence))

    @classmethod
    @contextmanager
    def running(
        cls,
        nodes: Sequence[NodePlan] = (NodePlan(),),
        *,
        name: str = "",
        owned: bool = True,
        shares: Sequence[Path] = (),
        silence: int = settings.NODE_MONITOR_GRACE_PERIOD,
        apiserver: Sequence[str] = (),
        gates: Sequence[str] = (),
        variables: Mapping[str, str] = GO,
    ) -> Iterator[Cluster]:
        """A cluster whose nodes are Ready, for the duration of the block.

        ``shares`` are further host directories, mounted read-only at the same path. A node that sends
        no heartbeat for ``silence`` seconds is lost; kwok on a busy computer needs more for many nodes. An
        owned cluster also ends when this process ends for any reason. ``apiserver`` are further options
        of the API server, ``gates`` the feature gates that the control plane enables, ``variables`` the environment of
        its programs.
        """
        if problem := why_unavailable():
            raise ClusterError(f"no cluster can be started: {problem}")
        with claimed(name or f"process {os.getpid()}", owned=owned) as claim:
            cluster = cls(claim, shares, silence, apiserver=apiserver, gates=gates, variables=variables)
            try:
                cluster.start(nodes)
                yield cluster
            finally:
                if not claim.left_running:
                    cluster.stop()

    def start(self, nodes: Sequence[NodePlan]) -> None:
        _raise_inotify_limit()
        self._start_control()
        # The API server needs two seconds to start. The nodes boot meanwhile.
        for node in [self._make_node(plan) for plan in nodes]:
            node.start_services()
            self._import_basic_images(node)
        self.apiserver.wait_ready()
        self.controller_manager.start(wait=False)
        self.scheduler.start(wait=False)
        for node in self.nodes.values():
            node.join()
        for node in self.nodes.values():
            node.wait_ready()
        self._wait_accepts_pods("default")

    def leave_running(self) -> None:
        """Keep the cluster after the ``running`` block; only for clusters without an owner."""
        if self.owned:
            raise ClusterError(f"{self.name}: ends with this process, so it cannot be left running")
        self._claim.left_running = True

    def stop(self) -> None:
        for machine in (*self.nodes.values(), self.control):
            machine.power_off()
        self._api.close()

    # Reaching it

    @property
    def kubeconfig(self) -> Path:
        """The kubeconfig of the cluster administrator."""
        return self.directory / "kubeconfig"

    @property
    def server(self) -> str:
        return f"https://{self.addresses.control}:{settings.API_PORT}"

    @property
    def authority(self) -> bytes:
        """The certificate that signs all others, PEM."""
        return self._authority.credentials.certificate

    def server_certificate(self, name: str, *addresses: str) -> Credentials:
        """A certificate by the cluster's authority, for a webhook or another server of a test."""
        return self._authority.server(name, *addresses)

    def user(self, name: str, *groups: str) -> str:
        """A kubeconfig for this user, a member of these groups: with only the rights granted by RBAC."""
        return settings.kubeconfig(self.server, self.authority, self._authority.client(name, *groups))

    def kubectl(self, *arguments: Argument, text: str | None = None, check: bool = True) -> str:
        """Run kubectl with the standard input ``text``; returns its output."""
        result = subprocess.run(
            [self.assets.program("kubectl"), *arguments],
            input=text or "",
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            env=os.environ | {"KUBECONFIG": str(self.kubeconfig)},
        )
        if check and result.returncode:
            words = " ".join(map(str, arguments))
            raise ClusterError(f"kubectl {words}: ended with {result.returncode}\n{result.stdout}{result.stderr}")
        return result.stdout

    def apply(self, *objects: Object) -> None:
        """Server-side apply of objects."""
        document = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.kubectl("apply", "--server-side", "--filename=-", text=json.dumps(document))

    def request(
        self, method: str, path: str, body: Object | None = None, *, content: str = "application/json"
    ) -> tuple[int, Any]:
        """One request to the API server as administrator: status and decoded answer. See `ApiClient.request`."""
        return self._api.request(method, path, body, content=content)

    def connection(self, timeout: float = 10) -> AbstractContextManager[Callable[..., tuple[int, Any]]]:
        """A function like ``request`` whose calls share a connection."""
        return self._api.connection(timeout)

    def get(self, path: str) -> Object | None:
        """An object or list at an API path; None without one, or without an API server."""
        return self._api.get(path)

    def pod(self, name: str, namespace: str = "default") -> Object | None:
        return self.get(f"/api/v1/namespaces/{namespace}/pods/{name}")

    def wait_pod(self, name: str, phase: str = "Running", *, namespace: str = "default", timeout: float = 60) -> Object:
        """Wait for a pod's phase; running means that its containers are ready as well."""
        pod: Object = {}

        def there() -> bool:
            pod.clear()
            pod.update(self.pod(name, namespace) or {})
            status = pod.get("status", {})
            if status.get("phase") != phase:
                return False
            return phase != "Running" or all(each["ready"] for each in status.get("containerStatuses", []))

        try:
            wait_until(there, f"pod {namespace}/{name}: {phase}", timeout)
        except ClusterError as error:
            described = self.kubectl("describe", "pod", name, f"--namespace={namespace}", check=False)
            raise ClusterError(f"{error}\n{described}") from None
        return pod

    @contextmanager
    def namespace(self, name: str) -> Iterator[str]:
        """A Kubernetes namespace with its default service account; deleted at the end with its objects."""
        self.create_namespace(name)
        try:
            yield name
        finally:
            pods = f"/api/v1/namespaces/{name}/pods"
            self.request("DELETE", pods, {"gracePeriodSeconds": 0, "propagationPolicy": "Background"})
            self.request("DELETE", f"/api/v1/namespaces/{name}")

    def create_namespace(self, name: str) -> None:
        """Create a namespace, and wait until its default service account exists."""
        self.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        self._wait_accepts_pods(name)

    # Changing it

    def kill_container(self, pod: str, *, namespace: str = "default", number: int = signal.SIGKILL) -> None:
        """Send a signal to the first process of a pod's first container, for example a plugin's. Needs containerd."""
        listed_pod = self.pod(pod, namespace)
        if not listed_pod or not listed_pod["status"].get("containerStatuses"):
            raise ClusterError(f"pod {namespace}/{pod}: has no container to kill")
        container = listed_pod["status"]["containerStatuses"][0]["containerID"].removeprefix("containerd://")
        node = self.nodes[listed_pod["spec"]["nodeName"]]
        node.run("ctr", "--namespace=k8s.io", "task", "kill", f"--signal={int(number)}", container)

    def add_node(self, plan: NodePlan, *, wait: bool = True) -> Node:
        """One more node."""
        node = self._make_node(plan)
        node.boot()
        self._import_basic_images(node)
        if wait:
            node.wait_ready()
        return node

    def start_kwok(self) -> None:
        """Let kwok simulate the kubelets of the nodes that ``add_kwok_nodes`` adds."""
        self.kwok.start()

    def add_kwok_nodes(
        self,
        count: int,
        *,
        prefix: str = "kwok",
        resources: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        timeout: float = 120,
    ) -> list[str]:
        """Add nodes that exist in the API only, and wait until they are Ready."""
        if not self.kwok.running:
            self.start_kwok()
        names = [f"{prefix}-{index}" for index in range(count)]
        with self.connection() as request:
            for index, name in enumerate(names):
                node = settings.kwok_node(name, index, resources or {}, labels or {})
                status, answer = request("POST", "/api/v1/nodes", node)
                if status != http.HTTPStatus.CREATED:
                    raise ClusterError(f"node {name}: {answer}")
        # A list of a thousand nodes also costs time of the API server.
        every = max(0.5, count / 500)
        wait_until(lambda: self._ready_nodes() >= set(names), f"{count} kwok nodes: Ready", timeout, every=every)
        return names

    def import_image(self, archive: Path) -> None:
        """Import an image archive into every node."""
        for node in self.nodes.values():
            node.import_image(archive)

    # Starting it

    def _start_control(self) -> None:
        self._write_control_files()
        self.control.power_on()
        self.network.start()
        self.etcd.start()
        self.apiserver.start(wait=False)

    def _write_control_files(self) -> None:
        control, authority = self.control, self._authority
        private, public = signing_key()
        names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"]
        addresses = [self.addresses.control, settings.API_SERVICE, "127.0.0.1", "localhost"]
        pairs = {
            "ca": authority.credentials,
            "apiserver": authority.server("kube-apiserver", *names, *addresses),
            "kubelet-client": authority.client("kube-apiserver", "system:masters"),
        }
        files = {"kubernetes/pki/service-account.key": private, "kubernetes/pki/service-account.pub": public}
        for name, pair in pairs.items():
            files |= _pair(f"kubernetes/pki/{name}", pair)
        for file, user in (
            ("controller-manager", "system:kube-controller-manager"),
            ("scheduler", "system:kube-scheduler"),
        ):
            files[f"kubernetes/{file}.conf"] = self.user(user).encode()
        administrator = authority.client("administrator", "system:masters")
        kubeconfig = settings.kubeconfig(self.server, self.authority, administrator)
        files["kubernetes/admin.conf"] = kubeconfig.encode()
        _write_etc(control, files)
        self.kubeconfig.write_text(kubeconfig)
        self.kubeconfig.chmod(0o600)
        self._api.authenticate(administrator, self.directory)

    def _make_node(self, plan: NodePlan) -> Node:
        if plan.name in self.nodes or plan.name == "control":
            raise ClusterError(f"{plan.name}: the name is taken")
        if len(self.nodes) >= _MOST_NODES:
            raise ClusterError(f"a cluster has at most {_MOST_NODES} real nodes")
        node = Node(self, plan, len(self.nodes) + 1)
        self.nodes[plan.name] = node
        authority, user = self._authority, f"system:node:{plan.name}"
        node_user = authority.client(user, "system:nodes")
        proxy_user = authority.client("system:kube-proxy")
        kubelet = {"containerRuntimeEndpoint": f"unix://{plan.runtime.socket}", **plan.kubelet}
        files = {
            "kubernetes/pki/ca.crt": self.authority,
            **_pair("kubernetes/pki/kubelet", authority.server(plan.name, plan.name, node.address)),
            "kubernetes/kubelet.conf": settings.kubeconfig(self.server, self.authority, node_user).encode(),
            "kubernetes/kube-proxy.conf": settings.kubeconfig(self.server, self.authority, proxy_user).encode(),
            "kubernetes/kubelet.yaml": settings.kubelet_configuration(node.cgroup, kubelet).encode(),
            **plan.runtime.files(self.assets),
            "cni/net.d/10-test.conflist": settings.cni(self.addresses.pods(node.position)).encode(),
            "resolv.conf": b"",
            "machine-id": f"{uuid.uuid4().hex}\n".encode(),
            "hostname": f"{plan.name}\n".encode(),
            "hosts": f"127.0.0.1 localhost\n{node.address} {plan.name}\n".encode(),
        }
        _write_etc(node, files)
        return node

    def _import_basic_images(self, node: Node) -> None:
        pause, busybox = self.directory / "pause.tar", self.directory / "busybox.tar"
        if not pause.exists():
            image_from_program(pause, PAUSE_IMAGE, self.assets.program("pause"))
            busybox_image(busybox, BUSYBOX_IMAGE, self.assets.program("busybox"))
        for archive in (pause, busybox):
            node.import_image(archive)

    def _api_is_ready(self) -> bool:
        try:
            return self.request("GET", "/readyz")[0] == http.HTTPStatus.OK
        except OSError:
            return False

    def _ready_nodes(self) -> set[str]:
        listed = self.get("/api/v1/nodes") or {"items": []}
        return {
            node["metadata"]["name"]
            for node in listed["items"]
            for condition in node["status"].get("conditions", [])
            if condition["type"] == "Ready" and condition["status"] == "True"
        }

    def _wait_accepts_pods(self, namespace: str) -> None:
        account = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
        hint = f"log: {self.controller_manager.log}"
        wait_until(lambda: self.get(account), f"service account of namespace {namespace}", hint=hint)


def _write_etc(machine: Machine, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        target = machine.etc(name)
        target.write_bytes(content)
        if name.endswith((".key", ".conf")):
            target.chmod(0o600)
        elif content.startswith(b"#!"):
            target.chmod(0o755)


def _pair(name: str, pair: Credentials) -> dict[str, bytes]:
    return {f"{name}.crt": pair.certificate, f"{name}.key": pair.key}
