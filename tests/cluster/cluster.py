"""A Kubernetes cluster of real programs on machines made of namespaces, with fault injection.

``with Cluster.running(nodes=[NodePlan("node-1")]) as cluster`` yields a ready cluster and removes it at the end.
One control machine runs etcd, the API server, the controllers and the scheduler, and is the switch of the cluster's
network; every node is a machine of its own with a container runtime, a kubelet and a kube-proxy. From here the API
server is reached over one veth pair; nothing is routed or translated beyond it.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import ssl
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import hardware, settings
from .build import Assets, ClusterError, assets
from .images import busybox_image, image_from_program
from .machine import Argument, Machine, wait_until
from .pki import Authority, Credentials, signing_key
from .runtimes import CONTAINERD, Runtime
from .settings import BUSYBOX_IMAGE, PAUSE_IMAGE, Addresses
from .state import Claim, claimed

_MOST_NODES = 200

Hardware = Callable[["Node"], None]
Object = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class NodePlan:
    """The plan of a node: ``hardware`` is added at every boot, ``kubelet`` are fields of its KubeletConfiguration."""

    name: str = "node-1"
    runtime: Runtime = CONTAINERD
    hardware: Sequence[Hardware] = ()
    kubelet: Mapping[str, object] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


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


class Node(Machine):
    """A machine with a container runtime, a kubelet, a kube-proxy and hardware that is only simulated.

    ``hardware`` is added at each boot. What a test plugs in later is removed by a reboot,
    like all driver configuration, unless it is appended there.
    """

    def __init__(self, cluster: Cluster, plan: NodePlan, position: int) -> None:
        own = list(plan.runtime.programs)
        super().__init__(
            plan.name,
            cluster.directory / plan.name,
            cgroup=f"accelplane-{cluster.number}-{plan.name}",
            path=":".join([*map(str, own), cluster.path]),
            shares=[*cluster.shares, *own],
            owned=cluster.owned,
        )
        self.cluster = cluster
        self.plan = plan
        self.position = position
        self.hardware: list[Hardware] = list(plan.hardware)
        self._trees: dict[Path, frozenset[Path]] = {}
        self.address = cluster.addresses.node(position)
        self.runtime = self.add_daemon(plan.runtime.name, plan.runtime.command, ready=self._runtime_answers)
        self.kubelet = self.add_daemon(
            "kubelet", settings.kubelet(self.name, self.address, plan.labels), ready=self._kubelet_answers
        )
        self.kube_proxy = self.add_daemon("kube-proxy", settings.kube_proxy(self.name))

    # Hardware

    def copy_tree(self, tree: Path) -> None:
        """Show the files, links and device nodes below ``tree`` (``sys/…``, ``dev/…``) in the node.

        Another call with the same tree updates the node: files that are no longer in the tree are removed.
        """
        self._trees[tree] = hardware.copy_tree(self, tree, self._trees.get(tree, frozenset()))

    def mknod(self, path: Argument, major: int, minor: int, *, mode: int = 0o666) -> None:
        """Make a character device node in the node's /dev."""
        hardware.mknod(self, path, major, minor, mode=mode)

    def write(self, path: Argument, text: str) -> None:
        """Set a file below the node's /sys or /dev, for example a health attribute."""
        hardware.write(self, path, text)

    def remove(self, path: Argument) -> None:
        """Remove a file or a directory of the node's /sys or /dev."""
        hardware.remove(self, path)

    # Life

    def boot(self) -> None:
        """Switch on: file system, network, hardware, daemons. The node is not necessarily Ready yet."""
        self.start_services()
        self.join()

    def start_services(self) -> None:
        """The part of ``boot`` that needs no API server."""
        self.power_on()
        self._trees.clear()
        self.cluster.plug_cable(self)
        for put_in in self.hardware:
            put_in(self)
        self.runtime.start()

    def join(self) -> None:
        """The other part of ``boot``."""
        self.kubelet.start(wait=False)
        self.kube_proxy.start()

    def reboot(self, *, wait: bool = True) -> None:
        """Power the node off and on: /run, sockets and containers are lost, the disk is not."""
        self.power_off()
        self.boot()
        if wait:
            self.kubelet.wait_ready()
            # The node's status is still Ready from before: only the report of the new boot counts.
            wait_until(self._reported_since_boot, f"{self.name}: report after the reboot", 60)
            self.wait_ready()

    def wait_ready(self, timeout: float = 60) -> None:
        """Wait until the node is Ready in the API."""

        def ready() -> bool:
            if not self.kubelet.running:
                raise ClusterError(f"{self.kubelet}: ended\n{self.kubelet.tail()}")
            return self.ready

        wait_until(ready, f"{self.name}: Ready", timeout, hint=f"log: {self.kubelet.log}")

    @property
    def ready(self) -> bool:
        node = self.cluster.get(f"/api/v1/nodes/{self.name}")
        conditions = node["status"].get("conditions", []) if node else []
        return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)

    def allocatable(self, resource: str) -> int | None:
        """The allocatable number of a resource in the API; None for an unknown resource."""
        node = self.cluster.get(f"/api/v1/nodes/{self.name}")
        amount = node["status"].get("allocatable", {}).get(resource) if node else None
        return None if amount is None else int(amount)

    def disconnect(self) -> None:
        """Disconnect the node's network; the machine continues to run."""
        self.run("ip", "link", "set", "eth0", "down")

    def connect(self) -> None:
        """Connect the node's network again."""
        self.run("ip", "link", "set", "eth0", "up")
        self.cluster.route(self)

    def import_image(self, archive: Path) -> None:
        """Import the image of a docker or OCI archive into the node, under its name in the archive."""
        self.plan.runtime.import_image(self, self.cluster.assets, archive)

    def _runtime_answers(self) -> bool:
        return self.run(*self.plan.runtime.check, check=False).returncode == 0

    def _kubelet_answers(self) -> bool:
        connection = http.client.HTTPConnection(self.address, settings.KUBELET_HEALTH_PORT, timeout=2)
        try:
            connection.request("GET", "/healthz")
            return connection.getresponse().status == http.HTTPStatus.OK
        except OSError:
            return False
        finally:
            connection.close()

    def _reported_since_boot(self) -> bool:
        node = self.cluster.get(f"/api/v1/nodes/{self.name}")
        current = self.path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return node is not None and node["status"]["nodeInfo"]["bootID"] == current


class Cluster:
    """One cluster. Start it with ``Cluster.running``; the methods below are for tests while it runs."""

    def __init__(
        self, claim: Claim, shares: Sequence[Path] = (), silence: int = settings.NODE_MONITOR_GRACE_PERIOD
    ) -> None:
        self.directory = claim.directory
        self.number = claim.number
        self.name = claim.name
        self.owned = claim.owned
        self._claim = claim
        self.addresses = Addresses(self.number)
        self.assets: Assets = assets()
        self.shares = [*shares, self.assets.directory]
        self.nodes: dict[str, Node] = {}
        places = [self.assets.bin, self.assets.program("etcd").parent, Path(sys.executable).parent]
        system = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"]
        self.path = ":".join([*map(str, places), *system])
        self._authority = Authority("accelplane test cluster")
        self._tls = ssl.create_default_context(cadata=self.authority.decode())
        self._idle: list[http.client.HTTPSConnection] = []
        self.control = Machine(
            "control",
            self.directory / "control",
            cgroup=f"accelplane-{self.number}-control",
            path=self.path,
            shares=self.shares,
            owned=self.owned,
        )
        control = self.control
        self.etcd = control.add_daemon("etcd", settings.etcd())
        self.apiserver = control.add_daemon(
            "kube-apiserver", settings.apiserver(self.addresses.control, []), ready=self._api_is_ready
        )
        self.controller_manager = control.add_daemon("controller-manager", settings.controller_manager(silence))
        self.scheduler = control.add_daemon("scheduler", settings.scheduler())
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
    ) -> Iterator[Cluster]:
        """A cluster whose nodes are Ready, for the duration of the block.

        ``shares`` are further host directories, mounted read-only at the same path. A node that sends
        no heartbeat for ``silence`` seconds is lost; kwok on a busy computer needs more for many nodes. An
        owned cluster also ends when this process ends for any reason.
        """
        if problem := why_unavailable():
            raise ClusterError(f"no cluster can be started: {problem}")
        with claimed(name or f"process {os.getpid()}", owned=owned) as claim:
            cluster = cls(claim, shares, silence)
            try:
                cluster.start(nodes)
                yield cluster
            finally:
                if not claim.left_running:
                    cluster.stop()

    def start(self, nodes: Sequence[NodePlan]) -> None:
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
        while self._idle:
            self._idle.pop().close()

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
        """One request to the API server as administrator: status and decoded answer.

        GET requests, which tests repeat 20 times a second, reuse connections. Other requests do not: if the server has
        closed a connection, it is unknown whether it has received the request, so it must not be repeated.
        """
        if method == "GET":
            return self._get(path)
        with self.connection() as request:
            return request(method, path, body, content=content)

    @contextmanager
    def connection(self, timeout: float = 10) -> Iterator[Callable[..., tuple[int, Any]]]:
        """A function like ``request`` whose calls share a connection."""
        connection = self._connect(timeout)

        def request(
            method: str, path: str, body: Object | None = None, *, content: str = "application/json"
        ) -> tuple[int, Any]:
            return _exchange(connection, method, path, body, content)

        try:
            yield request
        finally:
            connection.close()

    def _get(self, path: str) -> tuple[int, Any]:
        while True:
            try:
                connection, reused = self._idle.pop(), True
            except IndexError:
                connection, reused = self._connect(), False
            try:
                answer = _exchange(connection, "GET", path)
            except BaseException as error:
                connection.close()
                if reused and isinstance(error, (ConnectionError, ssl.SSLError)):
                    continue
                raise
            self._idle.append(connection)
            return answer

    def _connect(self, timeout: float = 10) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(
            self.addresses.control, settings.API_PORT, context=self._tls, timeout=timeout
        )

    def get(self, path: str) -> Object | None:
        """An object or list at an API path; None without one, or without an API server."""
        try:
            status, answer = self.request("GET", path)
        except OSError:
            return None
        return answer if status == http.HTTPStatus.OK else None

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

    def plug_cable(self, node: Node) -> None:
        """Connect a freshly booted machine to the cluster's network."""
        port = f"port{node.position}"
        _ip(
            f"link add {port} netns {self.control.pid} type veth "
            f"peer name eth0 address {self.addresses.hardware(node.position)} netns {node.pid}"
        )
        self._in_network(self.control, f"link set {port} master switch up")
        self._in_network(node, "link set lo up", f"address add {node.address}/24 dev eth0", "link set eth0 up")
        for each in self.nodes.values():
            if each.powered:
                self.route(each)

    def route(self, node: Node) -> None:
        """Set the machine's routes to the pods of other nodes; the kernel drops them on disconnect."""
        others = [other for other in self.nodes.values() if other is not node]
        self._in_network(
            node,
            f"route replace default via {self.addresses.control}",
            *(f"route replace {self.addresses.pods(other.position)} via {other.address}" for other in others),
        )
        pods = self.addresses.pods(node.position)
        self._in_network(self.control, f"route replace {pods} via {node.address}")

    # Starting it

    def _start_control(self) -> None:
        self._write_control_files()
        self.control.power_on()
        _ip(f"link add {self._claim.host_port} type veth peer name host netns {self.control.pid}")
        _ip(f"address add {self.addresses.host}/24 dev {self._claim.host_port}", f"link set {self._claim.host_port} up")
        self._in_network(
            self.control,
            "link set lo up",
            f"link add switch address {self.addresses.hardware(0)} type bridge",
            "link set host master switch up",
            f"address add {self.addresses.control}/24 dev switch",
            "link set switch up",
        )
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
        certificate = self.directory / "administrator.pem"
        certificate.write_bytes(administrator.certificate + administrator.key)
        self._tls.load_cert_chain(certificate)
        certificate.unlink()

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

    def _in_network(self, machine: Machine, *commands: str) -> None:
        _ip(*commands, enter=["nsenter", f"--net=/proc/{machine.pid}/ns/net"])

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


def _exchange(
    connection: http.client.HTTPSConnection,
    method: str,
    path: str,
    body: Object | None = None,
    content: str = "application/json",
) -> tuple[int, Any]:
    connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": content})
    answer = connection.getresponse()
    text = answer.read().decode()
    try:
        return answer.status, json.loads(text)
    except ValueError:
        return answer.status, text


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


def _ip(*commands: str, enter: Sequence[str] = ()) -> None:
    result = subprocess.run(
        [*enter, "ip", "-batch", "-"],
        input="\n".join(commands) + "\n",
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise ClusterError(f"ip: {'; '.join(commands)}: {result.stderr.strip()}")
