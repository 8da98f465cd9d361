"""Plans for DSA and IAA devices on plain trees: older kernels, unusual devices, and messages."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelplane.host import Host
from accelplane.provision.idxd import planners, read_config
from accelplane.provision.steps import Outcome, Plan, preview
from accelplane.simulate.kernel import Kernel, write_tree
from accelplane.simulate.offload import DsaSpec, IaaSpec, QueueSpec
from accelplane.simulate.specs import NodeSpec

pytestmark = pytest.mark.memory

IAA = {"DEVICE_TYPE": "iaa"}


@pytest.fixture
def tree(tmp_path: Path) -> Callable[[NodeSpec], Path]:
    """Writes the present state of the node as plain files."""

    def make(spec: NodeSpec) -> Path:
        root = tmp_path / "root"
        shutil.rmtree(root, ignore_errors=True)
        write_tree(Kernel(spec), root)
        return root

    return make


def plans(root: Path, environment: dict[str, str] | None = None, *, force: bool = False) -> list[Plan]:
    host = Host(root)
    config = read_config("/nonexistent", environment or {}, force=force)
    return [planner(host) for planner in planners(host, config)]


def outcomes(root: Path, environment: dict[str, str] | None = None) -> list[Outcome]:
    return list(preview(str(root), planners(Host(root), read_config("/nonexistent", environment or {}))))


def device_of(root: Path, name: str) -> Path:
    return (root / "sys/bus/dsa/devices" / name).resolve()


def test_a_node_without_devices_has_no_plan(tmp_path: Path) -> None:
    assert plans(tmp_path) == []
    assert plans(tmp_path, IAA) == []


def test_dsa_and_iaa_are_distinguished_by_their_kernel_names(tree: Callable[[NodeSpec], Path]) -> None:
    root = tree(NodeSpec(dsas=[DsaSpec(index=number) for number in (0, 2, 10)], iaas=[IaaSpec(index=1)]))
    assert [plan.device for plan in plans(root)] == ["dsa0", "dsa2", "dsa10"]
    assert [plan.device for plan in plans(root, IAA)] == ["iax1"]


def test_the_kernel_accepts_the_order_of_the_writes(tree: Callable[[NodeSpec], Path]) -> None:
    root = tree(NodeSpec(dsas=[DsaSpec(max_queues=4)]))
    (plan,) = plans(root)
    written = [step.path.removeprefix("/sys/bus/dsa/devices/dsa0/") for step in plan.steps]
    assert written[:8] == [f"group0.{number}/read_buffers_allowed" for number in range(4)] + [
        f"wq0.{number}/size" for number in range(4)
    ]
    order = ["group_id", "mode", "type", "name", "driver_name", "priority", "block_on_fault"]
    assert written[8:15] == [f"wq0.0/{name}" for name in order]
    assert written[-4:] == [f"engine0.{number}/group_id" for number in range(4)]
    assert list(plan.later) == ["enable dsa0", *(f"enable wq0.{number}" for number in range(4))]


def test_an_enabled_device_is_disabled_from_its_last_queue_on(tree: Callable[[NodeSpec], Path]) -> None:
    root = tree(NodeSpec(dsas=[DsaSpec(queues=[QueueSpec()] * 2)]))
    (plan,) = plans(root)
    assert [(step.path, step.text) for step in plan.steps] == [
        ("/sys/bus/dsa/devices/dsa0/wq0.1/driver/unbind", "wq0.1"),
        ("/sys/bus/dsa/devices/dsa0/wq0.0/driver/unbind", "wq0.0"),
        ("/sys/bus/dsa/devices/dsa0/driver/unbind", "dsa0"),
    ]


def test_the_status_describes_a_device(tree: Callable[[NodeSpec], Path]) -> None:
    root = tree(NodeSpec(dsas=[DsaSpec(max_queues=2, max_groups=2, queues=[QueueSpec(mode="shared", size=64)])]))
    (outcome,) = outcomes(root)
    assert outcome.now == {
        "state": "enabled",
        "group0.0": "wq0.0, engine0.0",
        "wq0.0": "enabled, user, shared, size 64, name app00, clients 0",
        "not set up": "group0.1, wq0.1",
    }
    assert outcome.reason.startswith("cannot be set up from ")
    assert "it has no group0.2 (max_groups is 2)" in outcome.reason


def test_old_kernels_with_an_iax_bus_and_one_driver_are_supported(
    tree: Callable[[NodeSpec], Path],
) -> None:
    root = tree(NodeSpec(iaas=[IaaSpec(index=1, queues=[QueueSpec()] * 4, driver_name_file=False)]))
    (root / "sys/bus/dsa").rename(root / "sys/bus/iax")
    drivers = root / "sys/bus/iax/drivers"
    shutil.rmtree(drivers)
    (drivers / "iax").mkdir(parents=True)
    queue = root / "sys/bus/iax/devices/wq1.0"
    function = root / "sys/bus/iax/devices/iax1"
    for bound in (function, *[root / f"sys/bus/iax/devices/wq1.{number}" for number in range(4)]):
        (bound / "driver").unlink()
        (bound / "driver").symlink_to(drivers / "iax")
    (plan,) = plans(root, IAA)
    assert plan.steps[0].path == "/sys/bus/iax/devices/iax1/wq1.3/driver/unbind"
    for bound in [function, *[root / f"sys/bus/iax/devices/wq1.{number}" for number in range(4)]]:
        (bound / "state").write_text("disabled\n")
    for number in range(4):
        (root / f"sys/bus/iax/devices/wq1.{number}/name").write_text(f"iax1{number}\n")
        (root / f"sys/bus/iax/devices/wq1.{number}/max_transfer_size").write_text("4194304\n")
    (plan,) = plans(root, IAA)
    assert [(step.path, step.text) for step in plan.steps] == [("/sys/bus/iax/drivers/iax/bind", "iax1")]
    (function / "state").write_text("enabled\n")
    (plan,) = plans(root, IAA)
    assert [step.path for step in plan.steps] == ["/sys/bus/iax/drivers/iax/bind"] * 4
    assert (queue / "name").exists()


def test_kernels_before_5_17_have_token_attributes(tree: Callable[[NodeSpec], Path]) -> None:
    root = tree(NodeSpec(dsas=[DsaSpec()]))
    (device_of(root, "dsa0") / "read_buffer_limit").unlink()
    for number in range(4):
        group = device_of(root, f"group0.{number}")
        for name in ("read_buffers_allowed", "read_buffers_reserved", "use_read_buffer_limit"):
            (group / name).unlink()
    (plan,) = plans(root)
    assert plan.steps[0].path == "/sys/bus/dsa/devices/dsa0/group0.0/tokens_allowed"


def test_unbound_functions_are_not_devices_and_are_planned_first(tree: Callable[[NodeSpec], Path]) -> None:
    root = tree(NodeSpec(dsas=[DsaSpec(model="11fb"), DsaSpec(model="11fb", driver="none")]))
    first, second = outcomes(root)
    assert list(first.steps) == ["driver none -> idxd"]
    assert second.device == "dsa0"


def test_functions_of_other_vendors_are_ignored(tree: Callable[[NodeSpec], Path]) -> None:
    root = tree(NodeSpec(dsas=[DsaSpec(model="11fb", driver="none")]))
    (function,) = (root / "sys/bus/pci/devices").glob("*:01.0")
    (function / "vendor").write_text("0x1002\n")
    assert plans(root) == []
    assert plans(root, {"DSA_DRIVER": "vfio-pci"}) == []


def test_without_idxd_its_functions_are_skipped_with_the_reason(tree: Callable[[NodeSpec], Path]) -> None:
    root = tree(NodeSpec(dsas=[DsaSpec(model="11fb", driver="vfio-pci")]))
    shutil.rmtree(root / "sys/bus/pci/drivers/idxd", ignore_errors=True)
    (outcome,) = outcomes(root)
    assert (outcome.state, outcome.reason) == ("skipped", "the driver idxd is not loaded (modprobe idxd)")


@pytest.mark.parametrize("state", ["halted", "", "\N{SNOWMAN}", "enabled and more"])
def test_a_device_in_an_unknown_state_fails(tree: Callable[[NodeSpec], Path], state: str) -> None:
    root = tree(NodeSpec(dsas=[DsaSpec()]))
    (device_of(root, "dsa0") / "state").write_text(state)
    (plan,) = plans(root)
    assert f"its state reads {state!a}, expected enabled or disabled" in plan.failure
    assert not plan.steps


def test_a_device_without_a_required_attribute_fails(tree: Callable[[NodeSpec], Path]) -> None:
    root = tree(NodeSpec(dsas=[DsaSpec()]))
    (device_of(root, "wq0.2") / "priority").unlink()
    (plan,) = plans(root)
    assert "wq0.2 has no attribute priority" in plan.failure


files = st.sampled_from(
    ["state", "clients", "size", "mode", "type", "name", "group_id", "max_transfer_size", "op_config"]
)


@given(st.dictionaries(st.tuples(st.integers(0, 3), files), st.binary(max_size=40), max_size=6), st.booleans())
def test_any_file_contents_give_a_plan(
    tree: Callable[[NodeSpec], Path], contents: dict[tuple[int, str], bytes], force: bool
) -> None:
    root = tree(NodeSpec(dsas=[DsaSpec(max_queues=4, queues=[QueueSpec()] * 4)]))
    for (number, name), content in contents.items():
        (device_of(root, f"wq0.{number}") / name).write_bytes(content)
    (plan,) = plans(root, force=force)
    assert plan.steps or plan.failure or plan.skip_reason
    assert plan.rollback is None or plan.rollback(Host(root)).device == "dsa0"
