"""QAT, DSA, IAA, DLB and SGX as users deploy them: the trees with their init containers, on hardware as it boots."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import pytest

from .build import ClusterError
from .families import DEPLOY, DLB0, DLB1, EPC, NAMESPACE, QAT0, QAT1, ContainerDevices, DaemonSet, Families
from .machine import REPOSITORY
from .objects import pod

pytestmark = pytest.mark.cluster

EXAMPLES = {
    "dsa": DEPLOY / "dsa_plugin/overlays/dsa_initcontainer/dsa-config.yaml",
    "iaa": DEPLOY / "iaa_plugin/overlays/iaa_initcontainer/iaa-config.yaml",
}
TREES = {
    "qat": "qat_plugin/overlays/qat_initcontainer",
    "dsa": "dsa_plugin/overlays/dsa_initcontainer",
    "iaa": "iaa_plugin/overlays/iaa_initcontainer",
    "dlb": "dlb_plugin/overlays/dlb_initcontainer",
}
CY, DC = "qat.intel.com/cy", "qat.intel.com/dc"
DSA, IAA = "dsa.intel.com/wq-user-dedicated", "iaa.intel.com/wq-user-dedicated"
PF, VF = "dlb.intel.com/pf", "dlb.intel.com/vf"
ENCLAVE, PROVISION = "sgx.intel.com/enclave", "sgx.intel.com/provision"
EVERYTHING = {CY: 4, DC: 4, DSA: 4, IAA: 4, PF: 1, VF: 1, ENCLAVE: 110, PROVISION: 110, "sgx.intel.com/epc": EPC}
DEMOS = ("qat-compress", "dsa-copy", "iaa-deflate", "dlb-pipeline", "sgx-simulation")


class Deployed:
    """The trees of all families, each with its init container, and their DaemonSets."""

    def __init__(self, families: Families, daemonsets: Mapping[str, DaemonSet]) -> None:
        self.families = families
        self.daemonsets = daemonsets


@pytest.fixture(scope="module")
def deployed(shared_families: Families) -> Iterator[Deployed]:
    """The node is in the state of the first boot: no device is allocatable."""
    families = shared_families
    families.reset()
    assert families.allocatable() == {}
    daemonsets: dict[str, DaemonSet] = {}
    for family, tree in TREES.items():
        (daemonsets[family],) = families.deploy(tree, config=EXAMPLES.get(family))
    for each in families.deploy("sgx_plugin/overlays/epc-register", namespace="kube-system"):
        daemonsets["sgx" if each.name == "intel-sgx-plugin" else "epc"] = each
    families.wait(EVERYTHING)
    yield Deployed(families, daemonsets)
    families.clean_up()
    families.cluster.kubectl("delete", "--kustomize", DEPLOY / "sgx_plugin/overlays/epc-register", "--ignore-not-found")


@pytest.fixture
def families(deployed: Deployed) -> Iterator[Families]:
    """The node with all trees deployed and all devices free. Pods of a test are deleted afterwards."""
    families = deployed.families
    families.delete(*workers(families))
    yield families
    families.delete(*workers(families))


def workers(families: Families) -> set[str]:
    """The pods that are not plugins."""
    listed = (families.cluster.get(f"/api/v1/namespaces/{NAMESPACE}/pods") or {"items": []})["items"]
    plugins = {each["metadata"]["name"] for daemonset in families.deployed for each in daemonset.pods}
    return {each["metadata"]["name"] for each in listed} - plugins


PROVISIONING_LOG = {
    "qat": (
        "qat: desired: services any, auto-reset any, all VFs on vfio-pci",
        f"{QAT0} applied",
        f"{QAT1} applied",
        "applied: VFs 0 -> 4; driver of 4 VFs -> vfio-pci",
        "2 devices: 2 applied",
    ),
    "dsa": ("dsa0 applied", "wq0.3 size 0 -> 16", "enable dsa0; enable wq0.0", "1 device: 1 applied"),
    "iaa": ("iax1 applied", "wq1.3 size 0 -> 16", "enable iax1; enable wq1.0", "1 device: 1 applied"),
    "dlb": (
        "dlb: desired: 1 VF on the first PF",
        f"{DLB0} applied",
        "applied: VFs 0 -> 1; resources of 1 VF: ",
        "ldb_ports 4",
        "1 device: 1 applied",
    ),
}


@pytest.mark.parametrize("family", PROVISIONING_LOG)
def test_an_init_container_reports_its_result_for_each_device(deployed: Deployed, family: str) -> None:
    daemonset = deployed.daemonsets[family]
    ended = daemonset.init()
    assert ended
    assert (ended["exitCode"], ended["reason"]) == (0, "Completed")
    log = daemonset.init_log()
    assert [words for words in PROVISIONING_LOG[family] if words not in log] == [], log


def test_the_node_has_exactly_the_resources_of_the_provisioned_devices(deployed: Deployed) -> None:
    assert deployed.families.allocatable() == EVERYTHING


def test_epc_is_also_published_as_a_label(deployed: Deployed) -> None:
    families = deployed.families
    node = families.cluster.get(f"/api/v1/nodes/{families.node.name}")
    assert node
    assert node["metadata"]["labels"]["sgx.intel.com/capable"] == "true"


def test_the_plugins_have_not_started_twice(deployed: Deployed) -> None:
    pods = {name: daemonset.pod() or {} for name, daemonset in deployed.daemonsets.items()}
    assert {
        name: each["status"]["containerStatuses"][0]["restartCount"] for name, each in pods.items()
    } == dict.fromkeys(pods, 0)


# Allocated devices.

WANTS = {
    "cy": {CY: 2},
    "dc": {DC: 2},
    "dsa": {DSA: 1},
    "iaa": {IAA: 2},
    "pf": {PF: 1},
    "vf": {VF: 1},
    "enclave": {ENCLAVE: 1},
    "provision": {PROVISION: 1},
    "several": {CY: 1, DSA: 1, ENCLAVE: 1, "sgx.intel.com/epc": 4096},
}


@pytest.fixture(scope="module")
def allocations(deployed: Deployed) -> Mapping[str, ContainerDevices]:
    """The devices of the containers of one pod with different requests."""
    families = deployed.families
    requesting_pod = pod("worker", "sleep", "1000000", namespace=NAMESPACE)
    (container,) = requesting_pod["spec"]["containers"]
    requesting_pod["spec"]["containers"] = [
        {**container, "name": name, "resources": {"limits": {resource: str(count) for resource, count in each.items()}}}
        for name, each in WANTS.items()
    ]
    families.cluster.apply(requesting_pod)
    families.running("worker")
    return {name: families.container_devices("worker", name) for name in WANTS}


@pytest.mark.parametrize(("name", "pf"), [("cy", QAT0), ("dc", QAT1)])
def test_a_container_gets_functions_of_qat_by_their_services(
    deployed: Deployed, allocations: Mapping[str, ContainerDevices], name: str, pf: str
) -> None:
    families, allocation = deployed.families, allocations[name]
    assert set(allocation.variables) == {"QAT0", "QAT1"}
    groups = {f"/dev/vfio/{families.group(address)}" for address in allocation.variables.values()}
    assert len(groups) == 2
    assert allocation.nodes == {"/dev/vfio/vfio", *groups}
    for address in allocation.variables.values():
        assert families.leads_to(f"/sys/bus/pci/devices/{address}/physfn") == pf


@pytest.mark.parametrize(("name", "directory", "count"), [("dsa", "/dev/dsa/", 1), ("iaa", "/dev/iax/", 2)])
def test_a_container_gets_a_queue_under_its_name_and_its_number(
    deployed: Deployed, allocations: Mapping[str, ContainerDevices], name: str, directory: str, count: int
) -> None:
    allocation = allocations[name]
    assert allocation.variables == {}
    queues = [node for node in allocation.nodes if node.startswith(directory)]
    assert len(queues) == count
    assert allocation.nodes == {*queues, *(f"/dev/char/{deployed.families.number(queue)}" for queue in queues)}


@pytest.mark.parametrize(("name", "function"), [("pf", DLB1), ("vf", f"{DLB0}/virtfn0")])
def test_a_container_gets_a_function_of_dlb(
    deployed: Deployed, allocations: Mapping[str, ContainerDevices], name: str, function: str
) -> None:
    (own,) = deployed.families.names(f"/sys/bus/pci/devices/{function}/dlb2")
    assert allocations[name] == ContainerDevices(frozenset((f"/dev/{own}",)), {})


@pytest.mark.parametrize(("name", "node"), [("enclave", "/dev/sgx_enclave"), ("provision", "/dev/sgx_provision")])
def test_a_container_gets_sgx(allocations: Mapping[str, ContainerDevices], name: str, node: str) -> None:
    assert allocations[name] == ContainerDevices(frozenset((node,)), {})


def test_one_container_gets_several_resources(deployed: Deployed, allocations: Mapping[str, ContainerDevices]) -> None:
    families, allocation = deployed.families, allocations["several"]
    assert set(allocation.variables) == {"QAT0"}
    (queue,) = (node for node in allocation.nodes if node.startswith("/dev/dsa/"))
    assert allocation.nodes == {
        "/dev/vfio/vfio",
        f"/dev/vfio/{families.group(allocation.variables['QAT0'])}",
        queue,
        f"/dev/char/{families.number(queue)}",
        "/dev/sgx_enclave",
    }


def test_containers_of_a_pod_share_only_shared_devices(allocations: Mapping[str, ContainerDevices]) -> None:
    shared = {"/dev/vfio/vfio", "/dev/sgx_enclave"}
    nodes = [node for allocation in allocations.values() for node in allocation.nodes - shared]
    assert len(nodes) == len(set(nodes))
    addresses = [address for allocation in allocations.values() for address in allocation.variables.values()]
    assert len(addresses) == len(set(addresses)) == 5


def test_nothing_is_mounted_for_these_families(deployed: Deployed, allocations: Mapping[str, ContainerDevices]) -> None:
    holdings = deployed.families.holdings("worker")
    assert {(each.container, each.resource) for each in holdings} == {
        (name, resource) for name in allocations for resource in WANTS[name] if resource != "sgx.intel.com/epc"
    }
    assert [each.resource for each in holdings if each.answer.mounts or each.answer.cdi_devices] == []


def test_our_demos_run_to_their_ends(families: Families) -> None:
    words = [word for demo in DEMOS for word in ("--filename", REPOSITORY / f"demo/{demo}-pod.yaml")]
    families.cluster.kubectl("apply", "--namespace", NAMESPACE, *words)
    outputs = {}
    for demo in DEMOS:
        try:
            families.cluster.wait_pod(demo, "Succeeded", namespace=NAMESPACE)
        except ClusterError as error:
            log = families.cluster.kubectl("logs", demo, "-n", NAMESPACE, check=False)
            raise ClusterError(f"{error}\n{log}") from None
        outputs[demo] = families.cluster.kubectl("logs", demo, "-n", NAMESPACE)
    families.cluster.kubectl("delete", "configmaps", "-n", NAMESPACE, *DEMOS, "--wait=false")
    assert re.search(r"given: QAT0=0000:65:\S+ QAT1=0000:65:\S+\ngiven: /dev/vfio/\d+ ", outputs["qat-compress"])
    assert re.match(r"given: /dev/dsa/wq0\.\d\n", outputs["dsa-copy"])
    assert re.match(r"given: /dev/iax/wq1\.\d\n", outputs["iaa-deflate"])
    assert re.match(r"given: /dev/dlb\d\n", outputs["dlb-pipeline"])
    assert re.match(r"given: /dev/sgx_enclave\n/dev/sgx_enclave can be opened", outputs["sgx-simulation"])


# Restarts.


def test_pods_outlive_the_kubelet_with_their_devices(families: Families) -> None:
    families.run("worker", {CY: 2, DSA: 1, IAA: 1, VF: 1, ENCLAVE: 1}, restart="Always")
    before = families.container_state("worker"), families.container_devices("worker")
    families.node.kubelet.restart()
    families.node.wait_ready()
    families.wait(EVERYTHING)
    # Only free devices, no allocated ones.
    families.run("late", {CY: 2, DSA: 3, IAA: 3, PF: 1})
    assert (families.container_state("worker"), families.container_devices("worker")) == before
    late = families.container_devices("late")
    assert not set(before[1].variables.values()) & set(late.variables.values())
    assert before[1].nodes & late.nodes == {"/dev/vfio/vfio"}


def test_restarts_of_plugins_and_init_containers_change_nothing(families: Families, deployed: Deployed) -> None:
    families.run("worker", {CY: 2, DSA: 1, IAA: 1, VF: 1, ENCLAVE: 1}, restart="Always")
    before = families.container_state("worker"), families.container_devices("worker"), families.snapshot()
    for family in (*TREES, "sgx"):
        deployed.daemonsets[family].restart()
    for family in (*TREES, "sgx"):
        deployed.daemonsets[family].wait_running()
    logs = {family: deployed.daemonsets[family].init_log() for family in TREES}
    for family in TREES:
        assert deployed.daemonsets[family].wait_init() == 0
        count = 2 if family == "qat" else 1
        assert f"{count} device{'s' * (count > 1)}: {count} unchanged" in logs[family], logs[family]
        assert "applied:" not in logs[family]
    families.wait(EVERYTHING)
    assert (families.container_state("worker"), families.container_devices("worker"), families.snapshot()) == before
    families.run("late", {CY: 2, DSA: 3, IAA: 3, PF: 1})
