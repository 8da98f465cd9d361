"""The operator's trees on a real cluster: its pod with the rights, limits and webhooks of the manifests."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from customresources import resource, sample
from manifests import own_image, render

from accelplane.operator import models

from .build import ClusterError
from .cluster import Cluster
from .families import Families
from .machine import REPOSITORY, wait_until
from .node import Node
from .objects import Object, pod
from .trees import applied, encoded, tls_secret

pytestmark = pytest.mark.cluster

OPERATOR = REPOSITORY / "deploy/operator"
SAMPLES = OPERATOR / "samples"
MAPPINGS = SAMPLES / "mappings-collection.yaml"
NAMESPACE, PREFIX = "inteldeviceplugins-system", "inteldeviceplugins-"
DEPLOYMENT = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{PREFIX}controller-manager"
API = "/apis/deviceplugin.intel.com/v1"
DAEMONSETS = f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets"
SECRET = f"/api/v1/namespaces/{NAMESPACE}/secrets/{PREFIX}own-certificate"
BINDING = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/gpu-manager-rolebinding"
ACCOUNT = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/gpu-manager-sa"
NOWHERE = {"example.com/nowhere": "true"}
READS = """
import http.client, ssl, sys
connection = http.client.HTTPSConnection(sys.argv[1], 8443, context=ssl._create_unverified_context(), timeout=30)
connection.request("GET", "/metrics", headers={"Authorization": sys.argv[2]} if sys.argv[2:] else {})
answer = connection.getresponse()
print(answer.status)
print(answer.read().decode())
"""


def operator(cluster: Cluster) -> Object:
    """The only pod of the operator."""
    label = "labelSelector=control-plane%3Dcontroller-manager"
    found: Any = cluster.get(f"/api/v1/namespaces/{NAMESPACE}/pods?{label}")
    (one,) = (each for each in found["items"] if "deletionTimestamp" not in each["metadata"])
    return one


def check_that_nothing_went_wrong(cluster: Cluster) -> None:
    pod = operator(cluster)
    (status,) = pod["status"]["containerStatuses"]
    assert status["restartCount"] == 0, status
    log = cluster.kubectl("logs", f"--namespace={NAMESPACE}", pod["metadata"]["name"])
    assert "forbidden" not in log.lower(), log
    assert "Traceback" not in log, log


def admits(cluster: Cluster) -> bool:
    """Whether the webhooks complete a custom resource."""
    manifest = resource("gpu", "asked", nodeSelector=NOWHERE)
    status, answer = cluster.request("POST", f"{API}/gpudeviceplugins?dryRun=All", manifest)
    return status == 201 and answer["spec"].get("image") == own_image("intel-gpu-plugin")


def is_rolled_out(cluster: Cluster) -> bool:
    found: Any = cluster.get(DEPLOYMENT)
    status = found["status"]
    counts = [status.get(name, 0) for name in ("replicas", "updatedReplicas", "availableReplicas")]
    return status.get("observedGeneration") == found["metadata"]["generation"] and counts == [1, 1, 1]


def wait_for_it(cluster: Cluster) -> None:
    try:
        wait_until(lambda: is_rolled_out(cluster), "the operator to be ready", 240)
        wait_until(lambda: admits(cluster), "custom resources to be admitted", 60)
    except ClusterError as error:
        words = (f"--namespace={NAMESPACE}", "--selector=control-plane=controller-manager")
        pods = cluster.kubectl("describe", "pods", *words, check=False)
        raise ClusterError(f"{error}\n{pods}{cluster.kubectl('logs', *words, check=False)}") from None


# With devices

# The node has no FPGA.
PRESENT = [family for family in models.KINDS if family != "fpga"]
# The fields of the samples limit the numbers: ten shares per GPU, one virtual function of QAT.
ALLOCATABLE = {
    "dlb.intel.com/pf": 1,
    "dlb.intel.com/vf": 1,
    "dsa.intel.com/wq-user-dedicated": 4,
    "gpu.intel.com/i915": 10,
    "gpu.intel.com/i915_monitoring": 1,
    "iaa.intel.com/wq-user-dedicated": 4,
    "npu.intel.com/accel": 1,
    "qat.intel.com/cy": 1,
    "sgx.intel.com/enclave": 110,
    "sgx.intel.com/provision": 110,
}


def plugins(families: Families) -> list[Any]:
    found: Any = families.cluster.get(f"/api/v1/namespaces/{NAMESPACE}/pods")
    return [each for each in found["items"] if each["metadata"]["labels"].get("app", "").endswith("-plugin")]


@pytest.fixture
def operator_cluster(shared_families: Families) -> Iterator[Families]:
    """The operator on the cluster whose node has devices of all families but FPGAs."""
    families = shared_families
    families.reset()
    labels = [f"intel.feature.node.kubernetes.io/{family}" for family in PRESENT]
    node = ("node", families.node.name)
    # The fixture of the cluster owns the namespace.
    with applied(families.cluster, [each for each in render(OPERATOR / "default") if each["kind"] != "Namespace"]):
        wait_for_it(families.cluster)
        families.cluster.kubectl("label", *node, *(f"{label}=true" for label in labels))
        yield families
        families.cluster.kubectl("label", *node, *(f"{label}-" for label in labels))
        wait_until(lambda: not plugins(families), "the plugins' pods to be deleted", 60)
    wait_until(lambda: not families.devices(), "the kubelet without devices", 60)


def test_the_samples_publish_devices_without_an_edited_file(operator_cluster: Families) -> None:
    operator_cluster.cluster.kubectl("apply", "--kustomize", SAMPLES)
    operator_cluster.wait(ALLOCATABLE, 120)
    operator_cluster.run("asking", {"gpu.intel.com/i915": 1})
    assert any(node.startswith("/dev/dri/") for node in operator_cluster.container_devices("asking").nodes)
    operator_cluster.delete("asking")
    used = {container["image"] for each in plugins(operator_cluster) for container in each["spec"]["containers"]}
    assert used == {own_image(f"intel-{family}-plugin") for family in PRESENT}
    for family in PRESENT:
        found: Any = operator_cluster.cluster.get(f"{API}/{family}deviceplugins/{family}deviceplugin-sample")
        assert not any(holds(found, condition) for condition in ("OriginalImage", "UnsupportedFields"))
    for each in plugins(operator_cluster):
        assert each["spec"]["serviceAccountName"] == "inteldeviceplugins-plugins"
        assert "/var/run/secrets/kubernetes.io/serviceaccount" not in [
            mount["mountPath"] for mount in each["spec"]["containers"][0]["volumeMounts"]
        ]
    kinds = ",".join(f"{family}deviceplugins" for family in models.KINDS)
    operator_cluster.cluster.kubectl("wait", "--for=condition=Available", "--timeout=60s", "--all", kinds)
    listed = operator_cluster.cluster.kubectl("get", "qatdeviceplugins", "--no-headers").split()
    assert listed[:3] == ["qatdeviceplugin-sample", "1", "1"]

    operator_cluster.cluster.kubectl("delete", "--kustomize", SAMPLES)
    wait_until(
        lambda: not operator_cluster.devices() and not plugins(operator_cluster),
        "plugins and devices to be removed",
        120,
    )


# Without devices


def test_the_operator_serves_the_certificate_of_cert_manager_until_default_replaces_the_tree(
    image: None, cluster: Cluster
) -> None:
    tree = OPERATOR / "overlays/default-with-certmanager"
    namespaced, *others = (each for each in render(tree) if "cert-manager" not in each["apiVersion"])
    assert namespaced["kind"] == "Namespace"
    host = f"{PREFIX}webhook-service.{NAMESPACE}.svc"
    secret = tls_secret(NAMESPACE, "webhook-server-cert", cluster.server_certificate(host, host))
    for each in others:
        for hook in each.get("webhooks", ()):
            hook["clientConfig"]["caBundle"] = encoded(cluster.authority)
    with applied(cluster, [namespaced, secret, *others]):
        wait_for_it(cluster)
        check_that_nothing_went_wrong(cluster)
        # Applying the other tree replaces the installation.
        with applied(cluster, render(OPERATOR / "default")):
            wait_for_it(cluster)
            volumes = [volume["name"] for volume in operator(cluster)["spec"]["volumes"]]
            assert "cert" not in volumes
            check_that_nothing_went_wrong(cluster)


@pytest.fixture(scope="module")
def installed(image: None, cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with the documented installation. Checks its logs and that the deletion is complete."""
    with applied(cluster, render(OPERATOR / "default")):
        wait_for_it(cluster)
        yield cluster
        check_that_nothing_went_wrong(cluster)
    assert cluster.get(f"/api/v1/namespaces/{NAMESPACE}") is None


def daemonsets(cluster: Cluster) -> dict[str, Any]:
    found: Any = cluster.get(DAEMONSETS)
    return {each["metadata"]["name"]: each for each in found["items"]}


def holds(found: Any, condition: str) -> bool:
    conditions = (found or {}).get("status", {}).get("conditions", ())
    return any((each["type"], each["status"]) == (condition, "True") for each in conditions)


def test_all_samples_are_reconciled_unchanged_and_deleted_completely(installed: Cluster) -> None:
    names = {family: sample(family)["metadata"]["name"] for family in models.KINDS}
    expected = {f"intel-{family}-plugin-{name}" for family, name in names.items()}
    installed.kubectl("apply", "--kustomize", SAMPLES)
    wait_until(lambda: {*daemonsets(installed)} == expected, "DaemonSets of all samples", 60)
    for family, name in names.items():
        path = f"{API}/{family}deviceplugins/{name}"
        wait_until(lambda path=path: holds(installed.get(path), "Available"), f"{name}: available", 60)
        result = daemonsets(installed)[f"intel-{family}-plugin-{name}"]["spec"]["template"]["spec"]
        assert result["serviceAccountName"] == f"{PREFIX}plugins"
    listed = installed.kubectl("get", "gpudeviceplugins", "--no-headers").split()
    assert listed[:3] == ["gpudeviceplugin-sample", "0", "0"]
    events = f"/apis/events.k8s.io/v1/namespaces/default/events?fieldSelector=regarding.name%3D{names['gpu']}"
    wait_until(lambda: (installed.get(events) or {})["items"], "an event of a resource", 60)
    # An upgrade applies them again. Nothing is written.
    before = {name: each["metadata"]["generation"] for name, each in daemonsets(installed).items()}
    installed.kubectl("apply", "--kustomize", SAMPLES)
    assert {name: each["metadata"]["generation"] for name, each in daemonsets(installed).items()} == before

    installed.kubectl("delete", "--kustomize", SAMPLES)
    wait_until(lambda: not daemonsets(installed), "DaemonSets to be deleted", 60)


DENIED, INVALID = 'admission webhook "v{}deviceplugin.kb.io" denied the request: ', "is invalid: spec: "
REFUSALS: list[tuple[str, dict[str, Any], str, str]] = [
    ("gpu", {"image": "intel/intel-qat-plugin:0.31.1"}, DENIED, "incorrect image name"),
    ("dlb", {"image": "intel/intel-dlb-plugin:0.30.0"}, DENIED, "0.31.1"),
    ("npu", {"image": "intel/intel-npu-plugin"}, DENIED, "field is incorrect"),
    ("gpu", {"sharedDevNum": 1, "preferredAllocationPolicy": "packed"}, DENIED, "preferredAllocationPolicy is packed"),
    ("dsa", {"provisioningConfig": "mine"}, DENIED, "initImage is empty"),
    ("npu", {"updateStrategy": {"rollingUpdate": {"maxSurge": 1}}}, INVALID, "remove maxSurge"),
]


@pytest.mark.parametrize(("family", "spec", "by", "words"), REFUSALS, ids=[words for *_, words in REFUSALS])
def test_an_invalid_resource_is_rejected_by_the_webhook_or_the_definition(
    installed: Cluster, family: str, spec: dict[str, Any], by: str, words: str
) -> None:
    with pytest.raises(ClusterError) as refused:
        installed.kubectl("apply", "--filename=-", text=json.dumps(resource(family, "wrong", **spec)))
    assert by.format(family) in str(refused.value)
    assert words in str(refused.value)
    assert installed.get(f"{API}/{family}deviceplugins/wrong") is None


def test_pods_that_request_epc_get_the_enclave_device(installed: Cluster, namespace: str) -> None:
    requesting_pod = pod("asking", namespace=namespace, resources={"sgx.intel.com/epc": "512Ki"})
    status, answer = installed.request("POST", f"/api/v1/namespaces/{namespace}/pods?dryRun=All", requesting_pod)
    assert status == 201, answer
    assert answer["spec"]["containers"][0]["resources"]["limits"]["sgx.intel.com/enclave"] == "1"


def test_pods_that_request_a_mapping_get_its_region(installed: Cluster, namespace: str) -> None:
    installed.kubectl("apply", f"--namespace={namespace}", "--filename", MAPPINGS)
    region = "fpga.intel.com/region-ce48969398f05f33946d560708be108a"
    requesting_pod = pod("asking", namespace=namespace, resources={"fpga.intel.com/arria10.dcp1.0": "1"})

    def container_limits() -> Any:
        status, answer = installed.request("POST", f"/api/v1/namespaces/{namespace}/pods?dryRun=All", requesting_pod)
        return status == 201 and answer["spec"]["containers"][0]["resources"]["limits"]

    wait_until(lambda: container_limits() == {region: "1"}, "the mapping to be used", 30)


def test_the_account_of_the_resource_manager_is_created_and_deleted(installed: Cluster) -> None:
    requesting_pod = resource("gpu", "managed", resourceManager=True, sharedDevNum=2, nodeSelector=NOWHERE)
    installed.kubectl("apply", "--filename=-", text=json.dumps(requesting_pod))
    wait_until(lambda: installed.get(BINDING) and installed.get(ACCOUNT), "account and binding", 60)
    installed.kubectl("delete", "gpudeviceplugin", "managed")
    wait_until(lambda: not (installed.get(BINDING) or installed.get(ACCOUNT)), "account and binding to be deleted", 60)


def test_a_provisioning_configuration_is_watched(installed: Cluster) -> None:
    image = "intel/intel-qat-initcontainer:0.31.1"
    requesting_pod = resource(
        "qat", "provisioned", provisioningConfig="qat-config", initImage=image, nodeSelector=NOWHERE
    )
    requesting_pod["spec"]["kernelVfDrivers"] = ["4xxxvf"]
    installed.kubectl("apply", "--filename=-", text=json.dumps(requesting_pod))
    path = f"{API}/qatdeviceplugins/provisioned"
    wait_until(lambda: holds(installed.get(path), "ProvisioningConfigMissing"), "ProvisioningConfigMissing: True", 60)
    installed.kubectl("create", "configmap", "qat-config", f"--namespace={NAMESPACE}", "--from-literal=qat.conf=")
    wait_until(
        lambda: not holds(installed.get(path), "ProvisioningConfigMissing"), "ProvisioningConfigMissing: False", 60
    )
    installed.kubectl("delete", "qatdeviceplugin", "provisioned")


def test_applying_the_tree_again_keeps_the_certificate(installed: Cluster) -> None:
    kept: Any = installed.get(SECRET)
    assert {"ca.crt", "tls.crt", "tls.key"} <= {*kept["data"]}
    installed.kubectl("apply", "--kustomize", OPERATOR / "default")
    again: Any = installed.get(SECRET)
    assert again["data"] == kept["data"]
    wait_until(lambda: admits(installed), "custom resources to be admitted", 30)


def test_a_restricted_namespace_admits_the_pod_of_the_operator(installed: Cluster, namespace: str) -> None:
    label = "pod-security.kubernetes.io/enforce=restricted"
    installed.kubectl("label", "namespace", namespace, label)
    (deployment,) = (each for each in render(OPERATOR / "default") if each["kind"] == "Deployment")
    # The account of the operator is in another namespace.
    spec = deployment["spec"]["template"]["spec"] | {"serviceAccountName": "default"}
    restricted = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "operator"}, "spec": spec}
    status, answer = installed.request("POST", f"/api/v1/namespaces/{namespace}/pods?dryRun=All", restricted)
    assert status == 201, answer
    privileged = pod("another", namespace=namespace)
    assert installed.request("POST", f"/api/v1/namespaces/{namespace}/pods?dryRun=All", privileged)[0] == 403


def read_metrics(node: Node, address: str, *token: str) -> tuple[int, str]:
    """Status and page, read through the Service from the network of the node."""
    command = ["nsenter", f"--target={node.pid}", "--net", "--", sys.executable, "-c", READS, address]
    result = subprocess.run(
        [*command, *(f"Bearer {each}" for each in token)], capture_output=True, text=True, check=True, timeout=60
    )
    status, _, page = result.stdout.partition("\n")
    return int(status), page


def test_metrics_require_the_role(installed: Cluster, node: Node, namespace: str) -> None:
    service: Any = installed.get(f"/api/v1/namespaces/{NAMESPACE}/services/{PREFIX}controller-manager-metrics-service")
    address = service["spec"]["clusterIP"]
    installed.kubectl("create", "serviceaccount", "reader", f"--namespace={namespace}")
    stranger = installed.kubectl("create", "token", "default", f"--namespace={namespace}").strip()
    reader = installed.kubectl("create", "token", "reader", f"--namespace={namespace}").strip()
    binding: Object = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": f"metrics-{namespace}"},
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": f"{PREFIX}metrics-reader",
        },
        "subjects": [{"kind": "ServiceAccount", "name": "reader", "namespace": namespace}],
    }
    with applied(installed, [binding]):
        wait_until(lambda: read_metrics(node, address, reader)[0] == 200, "metrics to be shown", 30)
        assert 'leader_election_master_status{name="d1c7b6d5.intel.com"} 1.0' in read_metrics(node, address, reader)[1]
        assert read_metrics(node, address, stranger)[0] == 403
        assert read_metrics(node, address)[0] == 401


def test_overlaps_name_nodes_if_the_operator_may_list_nodes(installed: Cluster) -> None:
    check_that_nothing_went_wrong(installed)
    taint = {"key": "example.com/no-pods", "effect": "NoSchedule"}
    metadata = {"name": "shared", "labels": NOWHERE}
    node: Object = {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {"taints": [taint]}}
    requesting_pod = [resource("npu", name, nodeSelector=NOWHERE) for name in ("one", "two")]
    with applied(installed, [*render(OPERATOR / "overlays/node-overlaps"), node]):
        # The operator detects new rights within minutes, or at its start.
        installed.kubectl("rollout", "restart", f"--namespace={NAMESPACE}", f"deployment/{PREFIX}controller-manager")
        wait_for_it(installed)
        with applied(installed, requesting_pod):
            path = f"{API}/npudeviceplugins/one"
            wait_until(lambda: holds(installed.get(path), "NodeOverlap"), "NodeOverlap: True", 60)
            found: Any = installed.get(path)
            (condition,) = (each for each in found["status"]["conditions"] if each["type"] == "NodeOverlap")
            assert "NpuDevicePlugin two also selects node shared" in condition["message"]
