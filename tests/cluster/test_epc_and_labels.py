"""EPC and labels on real Nodes, with the tokens, rights and manifests of the programs."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from trees import gpu_card, link, write

from accelplane.apiserver import MERGE_PATCH, ApiServer, ClientConfig, StatusError

from . import settings
from .cluster import Cluster
from .machine import REPOSITORY, wait_until
from .node import Node
from .objects import Object, pod

pytestmark = pytest.mark.cluster

DEPLOY = REPOSITORY / "deploy"
RESOURCE, CAPABLE = "sgx.intel.com/epc", "sgx.intel.com/capable"
PREFIX = "intel.feature.node.kubernetes.io"
EPC = 100_663_296
# Token and authority at the path of service account files in a container.
AS_A_POD = (
    "mount -t tmpfs none /run && mkdir -p /run/secrets/kubernetes.io && "
    'ln -s "$ACCOUNT" /run/secrets/kubernetes.io/serviceaccount && exec "$@"'
)

POLICY = "ValidatingAdmissionPolicy 'accelplane-labels'"
REGISTER_POLICY = "ValidatingAdmissionPolicy 'sgx-plugin'"

Run = Callable[..., "Program"]


class Program:
    """Runs a program with this service account and a tree of files instead of the node's."""

    def __init__(self, cluster: Cluster, account: Path, log: Path, module: str, arguments: tuple[str, ...]) -> None:
        environment = {
            **os.environ,
            "ACCOUNT": str(account),
            "NODE_NAME": "node-1",
            "KUBERNETES_SERVICE_HOST": cluster.addresses.control,
            "KUBERNETES_SERVICE_PORT": str(settings.API_PORT),
        }
        self.log = log
        command = [sys.executable, "-m", f"accelplane.cli.{module}", *arguments]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                ["unshare", "--mount", "sh", "-c", AS_A_POD, "sh", *command],
                stdout=subprocess.PIPE,
                stderr=output,
                env=environment,
            )

    def ended(self) -> tuple[int, str]:
        """Its exit status and output."""
        printed, _ = self.process.communicate(timeout=60)
        return self.process.returncode, printed.decode()

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.ended()[0]


def token(cluster: Cluster, namespace: str, account: str, bound: Object | None = None) -> str:
    request: Object = {"spec": {"audiences": [], **({"boundObjectRef": bound} if bound else {})}}
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
    status, answer = cluster.request("POST", path, request)
    assert status == 201, answer
    return str(answer["status"]["token"])


def node_token(cluster: Cluster, account: str) -> str:
    """A token as a pod of the account on node-1 has."""
    uid = cluster.get("/api/v1/nodes/node-1")["metadata"]["uid"]
    return token(cluster, "kube-system", account, {"apiVersion": "v1", "kind": "Node", "name": "node-1", "uid": uid})


@contextmanager
def applied(cluster: Cluster, tree: Path, *, policy: bool = True) -> Iterator[None]:
    """The objects of a tree except DaemonSets, whose images are not tested here."""
    rendered = cluster.kubectl("kustomize", tree).split("\n---\n")
    omitted = re.compile(
        "^kind: (DaemonSet$)" if policy else "^kind: (DaemonSet$|ValidatingAdmissionPolicy)", re.MULTILINE
    )
    text = "\n---\n".join(each for each in rendered if not omitted.search(each))
    cluster.kubectl("apply", "--filename=-", text=text)
    try:
        yield
    finally:
        cluster.kubectl("delete", "--filename=-", "--wait", text=text)


@pytest.fixture
def labeller(cluster: Cluster) -> Iterator[str]:
    """A token with only the rights of deploy/labels, for any node and label."""
    with applied(cluster, DEPLOY / "labels", policy=False):
        yield token(cluster, "kube-system", "accelplane-labels")


@pytest.fixture
def run(cluster: Cluster, tmp_path: Path) -> Iterator[Run]:
    """`run(token, module, arguments…)`."""
    with ExitStack() as undo:

        def start(as_token: str, module: str, *arguments: str) -> Program:
            account = tmp_path / f"account-{len(list(tmp_path.glob('account-*')))}"
            write(account / "ca.crt", cluster.authority)
            write(account / "token", as_token)
            write(account / "namespace", "kube-system")
            program = Program(cluster, account, tmp_path / f"{account.name}.log", module, arguments)
            undo.callback(program.process.kill)
            return program

        yield start


@pytest.fixture
def sgx(tmp_path: Path) -> str:
    """The flag for a tree of a node with SGX."""
    root = tmp_path / "root"
    write(root / "sys/devices/system/node/node0/x86/sgx_total_bytes", f"{EPC}\n")
    write(root / "sys/class/misc/sgx_enclave/dev", "10:125\n")
    write(root / "proc/cpuinfo", "processor : 0\nflags : sgx sgx_lc\n")
    return f"-root={root}"


@pytest.fixture(autouse=True)
def unmarked(cluster: Cluster) -> Iterator[None]:
    """After the test, the node has all its former labels and resources."""
    before, had = labels(cluster), capacity(cluster)
    yield
    assert labels(cluster).items() >= before.items()
    assert capacity(cluster).items() >= had.items()
    for key in labels(cluster).keys() - before.keys():
        patch_as_administrator(cluster, {"op": "remove", "path": f"/metadata/labels/{key.replace('/', '~1')}"})
    if RESOURCE in capacity(cluster):
        patch_as_administrator(cluster, {"op": "remove", "path": f"/status/capacity/{RESOURCE.replace('/', '~1')}"})


def node_object(cluster: Cluster) -> Object:
    found = cluster.get("/api/v1/nodes/node-1")
    assert found
    return found


def labels(cluster: Cluster) -> dict[str, str]:
    return dict(node_object(cluster)["metadata"]["labels"])


def capacity(cluster: Cluster) -> dict[str, str]:
    return dict(node_object(cluster)["status"]["capacity"])


def patch_as_administrator(cluster: Cluster, *operations: Object) -> None:
    """As administrator, through kubectl."""
    for operation in operations:
        words = ["--subresource=status"] if operation["path"].startswith("/status") else []
        cluster.kubectl("patch", "node", "node-1", "--type=json", f"--patch={json.dumps([operation])}", *words)


def refusal(cluster: Cluster, directory: Path, as_token: str, path: str, change: Object) -> str:
    """The API server's error for a merge patch of the node with this token; empty if it succeeds."""
    authority, token_file = write(directory / "ca", cluster.authority), write(directory / "token", as_token)
    server = f"https://{cluster.addresses.control}:{settings.API_PORT}"
    api = ApiServer(ClientConfig(server=server, authority=str(authority), token=str(token_file)))
    try:
        asyncio.run(api.patch(f"/api/v1/nodes/{path}", change, MERGE_PATCH, Any))
    except StatusError as error:
        return str(error)
    return ""


def take_out_epc(cluster: Cluster) -> None:
    patch_as_administrator(cluster, {"op": "remove", "path": "/status/capacity/sgx.intel.com~1epc"})


def test_the_hook_registers_with_the_rights_of_its_manifest(
    cluster: Cluster, node: Node, namespace: str, run: Run, sgx: str
) -> None:
    with applied(cluster, DEPLOY / "sgx_plugin/overlays/epc-register"):
        account = node_token(cluster, "sgx-plugin")
        assert run(account, "epchook", "-register", "-node-label", sgx).ended() == (0, "")
        assert labels(cluster)[CAPABLE] == "true"
        # The kubelet makes it allocatable.
        wait_until(lambda: node.allocatable(RESOURCE) == EPC, "EPC allocatable")
        cluster.apply(pod("enclave", namespace=namespace, resources={RESOURCE: "512Ki"}))
        cluster.wait_pod("enclave", namespace=namespace)
        stays = run(account, "epchook", "-register", "-node-label", "-daemon", sgx)
        wait_until(lambda: "patched" in stays.log.read_text(), "the daemon's patch")
        assert stays.terminate() == 0
        assert run(account, "epchook", "-cleanup", sgx).ended() == (0, "")
    assert RESOURCE not in capacity(cluster)
    assert CAPABLE not in labels(cluster)
    wait_until(lambda: node.allocatable(RESOURCE) is None, "removal of EPC")


def test_the_hook_registers_its_own_node_only(cluster: Cluster, run: Run, sgx: str, tmp_path: Path) -> None:
    with applied(cluster, DEPLOY / "sgx_plugin/overlays/epc-register"), ExitStack() as undo:
        account = node_token(cluster, "sgx-plugin")
        cluster.request("POST", "/api/v1/nodes", {"metadata": {"name": "other-node"}})
        undo.callback(cluster.request, "DELETE", "/api/v1/nodes/other-node")

        def error(path: str, change: Object) -> str:
            return refusal(cluster, tmp_path, account, path, change)

        mark, foreign = {"metadata": {"labels": {CAPABLE: "true"}}}, {"metadata": {"labels": {"example.com/x": "y"}}}
        wait_until(lambda: REGISTER_POLICY in error("other-node/status", mark), "the policy")
        assert REGISTER_POLICY in error("node-1/status", foreign)
        assert REGISTER_POLICY in error("node-1/status", {"status": {"capacity": {"cpu": "99"}}})
        assert 'cannot patch resource "nodes"' in error("node-1", mark)
        assert run(account, "epchook", "-register", "-node-label", sgx).ended() == (0, "")
        assert run(account, "epchook", "-cleanup", sgx).ended() == (0, "")


def test_the_daemon_restores_removed_resources_and_labels(cluster: Cluster, labeller: str, run: Run, sgx: str) -> None:
    program = run(labeller, "epchook", "-register", "-node-label", "-daemon", "-cleanup", sgx)
    wait_until(lambda: RESOURCE in capacity(cluster), "EPC", hint=str(program.log))
    take_out_epc(cluster)
    wait_until(lambda: capacity(cluster).get(RESOURCE) == str(EPC), "EPC again", hint=str(program.log))
    # As a kubelet that registers its node again.
    patch_as_administrator(cluster, {"op": "replace", "path": "/status/capacity/sgx.intel.com~1epc", "value": "0"})
    wait_until(lambda: capacity(cluster).get(RESOURCE) == str(EPC), "EPC a third time", hint=str(program.log))
    cluster.kubectl("label", "node", "node-1", f"{CAPABLE}-")
    wait_until(lambda: labels(cluster).get(CAPABLE) == "true", "the label again", hint=str(program.log))
    assert program.terminate() == 0
    assert RESOURCE not in capacity(cluster)
    assert CAPABLE not in labels(cluster)


def test_the_daemon_outlives_the_api_server(cluster: Cluster, node: Node, labeller: str, run: Run, sgx: str) -> None:
    program = run(labeller, "epchook", "-register", "-daemon", sgx)
    wait_until(lambda: RESOURCE in capacity(cluster), "EPC", hint=str(program.log))
    cluster.apiserver.kill()
    wait_until(lambda: "retrying with backoff" in program.log.read_text(), "the error in the log")
    cluster.apiserver.start()
    node.wait_ready()
    take_out_epc(cluster)
    wait_until(lambda: capacity(cluster).get(RESOURCE) == str(EPC), "EPC again", 90, hint=str(program.log))
    assert program.terminate() == 0


def test_a_node_feature_is_deleted_with_its_node(cluster: Cluster, run: Run, sgx: str) -> None:
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1alpha1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"plural": "nodefeatures", "singular": "nodefeature", "kind": "NodeFeature"}
    group = "nfd.k8s-sigs.io"
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"nodefeatures.{group}",
            "annotations": {"api-approved.kubernetes.io": "https://example/unapproved"},
        },
        "spec": {"group": group, "names": names, "scope": "Namespaced", "versions": [version]},
    }
    rules = [
        {"apiGroups": [group], "resources": ["nodefeatures"], "verbs": ["create", "patch", "delete"]},
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]},
    ]
    rbac = "rbac.authorization.k8s.io"
    objects: list[Any] = [
        definition,
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "teller", "namespace": "kube-system"}},
        {"apiVersion": f"{rbac}/v1", "kind": "ClusterRole", "metadata": {"name": "teller"}, "rules": rules},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "teller"},
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": "teller"},
            "subjects": [{"kind": "ServiceAccount", "name": "teller", "namespace": "kube-system"}],
        },
    ]
    cluster.apply(*objects)
    path = f"/apis/{group}/v1alpha1/namespaces/kube-system/nodefeatures"
    wait_until(lambda: cluster.get(path), "the kind to be served")
    account = token(cluster, "kube-system", "teller")
    words = ("epchook", "-output=node-feature", "-node-label", sgx)
    assert run(account, *words).ended() == (0, "")
    found = cluster.get(f"{path}/node-1-sgx-epc")
    assert found
    assert found["spec"]["labels"] == {RESOURCE: str(EPC), CAPABLE: "true"}
    assert found["metadata"]["ownerReferences"][0]["uid"] == node_object(cluster)["metadata"]["uid"]
    assert run(account, *words, "-cleanup").ended() == (0, "")
    wait_until(lambda: cluster.get(f"{path}/node-1-sgx-epc") is None, "the end of the daemon")


def gpu(root: Path, device_id: str) -> None:
    function = gpu_card(root, 0, device_id=device_id)
    write(function / "class", "0x038000\n")
    link(root / "sys/bus/pci/devices" / function.name, function)
    write(root / "proc/modules", "i915 1 0 - Live 0x0\n")


def test_labels_of_a_node_are_set_and_obsolete_labels_are_removed(
    cluster: Cluster, labeller: str, run: Run, sgx: str, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    gpu(root, "0x56c0")
    cluster.kubectl("label", "node", "node-1", "gpu.intel.com/mine=kept")
    words = ("labels", "-output=node", "-daemon", "-epc", sgx)
    program = run(labeller, *words)
    product, family = "gpu.intel.com/product", f"{PREFIX}/gpu"
    wait_until(lambda: labels(cluster).get(product) == "Flex_170", "labels", hint=str(program.log))
    wait_until(lambda: capacity(cluster).get(RESOURCE) is not None, "EPC", hint=str(program.log))
    assert labels(cluster)[family] == labels(cluster)[f"{PREFIX}/sgx"] == "true"
    cluster.kubectl("label", "node", "node-1", f"{family}-")
    wait_until(lambda: labels(cluster).get(family) == "true", "the label again", hint=str(program.log))
    # Another process continues with the fields that the former one owns.
    assert program.terminate() == 0
    (root / "proc/modules").unlink()
    program = run(labeller, *words)
    wait_until(lambda: family not in labels(cluster), "the end of a label", hint=str(program.log))
    assert labels(cluster)[product] == "Flex_170"
    assert labels(cluster)["gpu.intel.com/mine"] == "kept"
    assert program.terminate() == 0
    assert run(labeller, "labels", "-output=node", "-cleanup", "-epc", sgx).ended()[0] == 0
    assert not {key for key in labels(cluster) if key.startswith(PREFIX)}
    assert labels(cluster)["gpu.intel.com/mine"] == "kept"
    assert RESOURCE not in capacity(cluster)


def test_a_label_set_by_the_user_is_unchanged(
    cluster: Cluster, labeller: str, run: Run, sgx: str, tmp_path: Path
) -> None:
    gpu(tmp_path / "root", "0x56c0")
    family = f"{PREFIX}/gpu"
    cluster.kubectl("label", "node", "node-1", f"{family}=false")
    program = run(labeller, "labels", "-output=node", "-daemon", sgx)
    wait_until(lambda: labels(cluster).get(f"{PREFIX}/sgx") == "true", "labels", hint=str(program.log))
    assert labels(cluster)[family] == "false"
    assert f"{family}: found 'false' of another field manager" in program.log.read_text()
    cluster.kubectl("label", "node", "node-1", f"{family}-")
    wait_until(lambda: labels(cluster).get(family) == "true", "ours", hint=str(program.log))
    cluster.kubectl("label", "node", "node-1", f"{family}=never", "--overwrite")
    cluster.kubectl("label", "node", "node-1", f"{PREFIX}/sgx-")
    wait_until(lambda: labels(cluster).get(f"{PREFIX}/sgx") == "true", "the other label again", hint=str(program.log))
    assert labels(cluster)[family] == "never"
    assert program.terminate() == 0


def test_the_role_of_the_labeller_grants_exactly_the_used_permissions(cluster: Cluster, labeller: str) -> None:
    me = "--as=system:serviceaccount:kube-system:accelplane-labels"

    def can(verb: str, resource: str, *words: str) -> bool:
        return cluster.kubectl("auth", "can-i", verb, resource, me, *words, check=False).strip() == "yes"

    assert all(can(verb, "nodes") for verb in ("get", "watch", "patch"))
    assert can("patch", "nodes", "--subresource=status")
    for verb in ("list", "create", "update", "delete", "deletecollection"):
        assert not can(verb, "nodes"), verb
    assert not can("get", "nodes", "--subresource=proxy")
    assert not can("update", "nodes", "--subresource=status")
    for resource in ("pods", "secrets", "configmaps", "serviceaccounts"):
        assert not any(can(verb, resource, "--all-namespaces") for verb in ("get", "list", "create", "patch")), resource


def test_with_the_policy_it_labels_its_own_node_only(cluster: Cluster, run: Run, sgx: str, tmp_path: Path) -> None:
    path = "/api/v1/nodes"
    with applied(cluster, DEPLOY / "labels/overlays/own-node-only"), ExitStack() as undo:
        cluster.request("POST", path, {"metadata": {"name": "other-node"}})
        undo.callback(cluster.request, "DELETE", f"{path}/other-node")
        holder = pod("holder", namespace="kube-system", node="node-1")
        holder["spec"]["serviceAccountName"] = "accelplane-labels"
        cluster.apply(holder)
        undo.callback(cluster.kubectl, "delete", "pod", "holder", "-n", "kube-system", "--now", "--wait")
        existing = cluster.wait_pod("holder", namespace="kube-system")
        bound = {"apiVersion": "v1", "kind": "Pod", "name": "holder", "uid": existing["metadata"]["uid"]}
        own = token(cluster, "kube-system", "accelplane-labels", bound)

        def assert_forbidden(path: str, change: Object) -> bool:
            return POLICY in refusal(cluster, tmp_path, own, path, change)

        changes, foreign = {"labels": {"gpu.intel.com/x": "y"}}, {"labels": {"example.com/x": "y"}}
        # The policy takes effect shortly after its creation.
        wait_until(lambda: assert_forbidden("node-1", {"metadata": foreign}), "the policy")
        assert assert_forbidden("other-node", {"metadata": changes})
        assert assert_forbidden("node-1", {"metadata": {"labels": {"kubernetes.io/hostname": None}}})
        assert assert_forbidden("node-1", {"metadata": {"annotations": {"x": "y"}}})
        assert assert_forbidden("node-1", {"metadata": {"finalizers": ["example.com/x"]}})
        assert assert_forbidden("node-1", {"spec": {"unschedulable": True}})
        assert assert_forbidden("node-1/status", {"metadata": foreign})
        assert assert_forbidden("node-1/status", {"status": {"capacity": {"cpu": "99"}}})
        assert assert_forbidden("node-1/status", {"status": {"capacity": {"cpu": None}}})
        assert assert_forbidden("node-1/status", {"status": {"conditions": []}})
        assert assert_forbidden("node-1/status", {"status": {"addresses": []}})
        assert not refusal(cluster, tmp_path, own, "node-1", {"metadata": changes})
        assert run(own, "labels", "-output=node", "-epc", sgx).ended()[0] == 0
        assert labels(cluster)[f"{PREFIX}/sgx"] == "true"
        assert RESOURCE in capacity(cluster)
        assert run(own, "labels", "-output=node", "-epc", "-cleanup", sgx).ended()[0] == 0
        assert f"{PREFIX}/sgx" not in labels(cluster)
        assert RESOURCE not in capacity(cluster)
