"""One agent for all families on one node: the DaemonSet `accelplane-node`, and a change of one family at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from manifests import write_overlay

from accelplane.simulate import DlbSpec, DsaSpec, IaaSpec, QatSpec, QueueSpec

from .families import DLB0, DLB1, DSA0, IAA0, MIB, QAT0, QAT1, VFS, DaemonSet, Families, config_map
from .test_families import CY, DC, DSA, ENCLAVE, IAA, PF, PROVISION, VF

pytestmark = pytest.mark.cluster

HARDWARE = (
    QatSpec(bdf=QAT0, vfs=VFS),
    QatSpec(bdf=QAT1, vfs=VFS),
    DsaSpec(bdf=DSA0, queues=[QueueSpec()] * 4),
    IaaSpec(bdf=IAA0, queues=[QueueSpec()] * 4),
    DlbSpec(bdf=DLB0, vfs=2),
    DlbSpec(bdf=DLB1),
)
DEVICES = "/sys/bus/pci/devices"
GPU, NPU = "gpu.intel.com/i915", "npu.intel.com/accel"
ALL = {GPU: 1, NPU: 1, CY: VFS, DC: VFS, DSA: 4, IAA: 4, PF: 1, VF: 2, ENCLAVE: 20, PROVISION: 10}
# The attributes of a disabled queue that are needed to enable it again.
FORGOTTEN = ("type", "mode", "name", "driver_name", "group_id")
CONFIG = """
health-interval: 1
plugins:
  qat: {allocation-policy: packed}
  sgx: {enclave-limit: 20, provision-limit: 10}
"""


@pytest.fixture(scope="module")
def running(
    shared_families: Families, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Families, DaemonSet]]:
    families = shared_families
    families.reset(HARDWARE)
    tree = tmp_path_factory.mktemp("tree")
    write_overlay(
        tree,
        resources=["deploy/accelplane_node/overlays/config"],
        components=["deploy/accelplane_node/components/qat"],
    )
    (agent,) = families.deploy(str(tree), config=config_map("accelplane-node", {"agent.yaml": CONFIG}))
    families.wait(ALL)
    families.run("worker", {name: 1 for name in ALL if name != GPU}, restart="Always")
    yield families, agent
    families.clean_up()


@pytest.fixture
def families(running: tuple[Families, DaemonSet]) -> Iterator[Families]:
    """The node with the agent, and a pod with a device of every family. No test may affect them."""
    families, agent = running
    before = families.container_state("worker"), families.container_devices("worker"), agent.restarts
    yield families
    families.wait(ALL)
    assert (families.container_state("worker"), families.container_devices("worker"), agent.restarts) == before


def test_one_agent_publishes_all_devices_of_the_node(running: tuple[Families, DaemonSet]) -> None:
    families, agent = running
    assert families.devices() == ALL
    assert agent.restarts == 0
    # The QAT functions had the kernel's driver, and /sys/devices is read-only in the container.
    assert families.driver("0000:61:00.1") == "vfio-pci"
    sockets = {path.name for path in families.node.path("/var/lib/kubelet/device-plugins").glob("*.intel.com-*")}
    assert {name.partition(".")[0] for name in sockets} == {"gpu", "npu", "qat", "dsa", "iaa", "dlb", "sgx"}


def test_memory_stays_below_the_limit(running: tuple[Families, DaemonSet]) -> None:
    _families, agent = running
    assert agent.memory("memory.limit_in_bytes") == 90 * MIB
    assert agent.memory("memory.max_usage_in_bytes") < 60 * MIB


def test_a_pod_gets_a_device_of_every_family(families: Families) -> None:
    allocation = families.container_devices("worker")
    assert set(allocation.variables) == {"QAT0"}
    kinds = {re.sub(r"[\d.:]+$", "", node) for node in allocation.nodes}
    assert {"/dev/dsa/wq", "/dev/iax/wq", "/dev/dlb", "/dev/sgx_enclave", "/dev/sgx_provision", "/dev/vfio/"} <= kinds


@pytest.mark.parametrize(
    ("address", "change"),
    [
        (QAT1, {DC: 0}),
        (DSA0, {DSA: 0}),
        (DLB1, {PF: 0}),
    ],
    ids=["qat", "dsa", "dlb"],
)
def test_unplugging_the_last_device_removes_its_resource(
    families: Families, address: str, change: dict[str, int]
) -> None:
    families.kernel.unplug(address)
    families.wait(ALL | change)
    families.kernel.plug(next(spec for spec in HARDWARE if spec.bdf == address))


def test_a_device_whose_files_block_affects_only_itself(families: Families) -> None:
    blocked = f"{DEVICES}/{DLB1}/*"
    families.kernel.do("block", path=blocked)
    qat, dlb = (next(spec for spec in HARDWARE if spec.bdf == address) for address in (QAT1, DLB0))
    families.kernel.unplug(QAT1)
    families.kernel.unplug(DLB0)
    families.wait(ALL | {DC: 0, VF: 0, PF: 0})
    families.kernel.plug(qat)
    families.kernel.plug(dlb)
    families.wait(ALL | {PF: 0})
    families.kernel.do("unblock", path=blocked)


def test_a_qat_device_without_a_heartbeat_is_unhealthy_with_all_its_functions(families: Families) -> None:
    families.kernel.do("qat", bdf=QAT1, healthy=False)
    families.wait(ALL | {DC: 0})
    families.kernel.do("qat", bdf=QAT1, healthy=True)


def test_a_disabled_queue_is_removed_and_the_other_queues_are_kept(families: Families) -> None:
    allocated_nodes = {
        node.rpartition("/")[2] for node in families.container_devices("worker").nodes if node.startswith("/dev/dsa/")
    }
    queue = min({f"wq0.{number}" for number in range(4)} - allocated_nodes)
    before = {name: families.read(f"/sys/bus/dsa/devices/{queue}/{name}") for name in FORGOTTEN}
    families.kernel.write("/sys/bus/dsa/drivers/user/unbind", queue)
    families.wait(ALL | {DSA: 3})
    for name, value in before.items():
        families.kernel.write(f"/sys/bus/dsa/devices/{queue}/{name}", value)
    families.kernel.write("/sys/bus/dsa/drivers/user/bind", queue)


def test_sgx_without_driver_is_unhealthy_until_the_driver_returns(families: Families) -> None:
    families.kernel.do("unload", module="sgx")
    families.wait(ALL | {ENCLAVE: 0, PROVISION: 0})
    families.kernel.do("load", module="sgx")


def test_a_dlb_function_without_driver_is_removed(families: Families) -> None:
    allocated_nodes = {node for node in families.container_devices("worker").nodes if node.startswith("/dev/dlb")}
    free = [f"0000:62:00.{number}" for number in (1, 2)]
    nodes = {names.pop(): address for address in free if (names := families.names(f"{DEVICES}/{address}/dlb2"))}
    node = min({f"/dev/{name}" for name in nodes} - allocated_nodes)
    address = nodes[node.removeprefix("/dev/")]
    families.kernel.write("/sys/bus/pci/drivers/dlb2/unbind", address)
    families.wait(ALL | {VF: 1})
    assert not families.node.path(node).exists()
    families.kernel.write("/sys/bus/pci/drivers/dlb2/bind", address)
