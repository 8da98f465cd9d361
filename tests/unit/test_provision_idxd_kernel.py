"""DSA and IAA devices provisioned on the emulated kernel: each in its desired state, or exactly as before."""

import errno
from pathlib import Path

import pytest
from idxdnodes import BUS, DSA, MakeNode, Node, configured, only, states
from mountpoints import mounted_for_test

from accelplane.host import Host
from accelplane.provision.idxd import planners, read_config
from accelplane.provision.steps import apply
from accelplane.simulate.kernel import Kernel
from accelplane.simulate.offload import DsaSpec, IaaSpec, QueueSpec
from accelplane.simulate.specs import NodeSpec

IAA = {**DSA, "DEVICE_TYPE": "iaa"}

SHARED = """[{"dev": "dsaX", "groups": [
    {"dev": "groupX.0", "read_buffers_allowed": 8, "grouped_workqueues": [
        {"dev": "wqX.0", "mode": "shared", "type": "user", "size": 32, "threshold": 20, "name": "sharedX",
         "priority": 4, "max_batch_size": 33, "max_transfer_size": 65536, "ats_disable": 1, "op_config": "1,003f03ff"},
        {"dev": "wqX.5", "mode": "dedicated", "type": "kernel", "size": 96, "name": "kernelX"}],
     "grouped_engines": [{"dev": "engineX.0"}, {"dev": "engineX.1"}, {"dev": "engineX.2"}, {"dev": "engineX.3"}]}]}]"""


@pytest.fixture
def node(tmp_path: Path) -> MakeNode:
    def make(*dsas: DsaSpec, **spec: object) -> Node:
        return Node(Kernel(NodeSpec(dsas=dsas, **spec)), tmp_path)  # type: ignore[arg-type] # the other fields, as they are

    return make


# ── Templates are applied ──


@pytest.mark.parametrize("count", [1, 12])
def test_every_dsa_gets_the_built_in_profile(node: MakeNode, count: int) -> None:
    machine = node(*[DsaSpec() for _ in range(count)])
    outcomes = machine.apply()
    assert states(outcomes) == {f"dsa{number}": "applied" for number in range(count)}
    for number in range(count):
        assert machine.read(f"dsa{number}/state") == "enabled"
        for queue in range(4):
            path = f"wq{number}.{queue}"
            found = [machine.read(f"{path}/{name}") for name in ("state", "name", "mode", "type", "size")]
            assert found == ["enabled", f"dpdk_{number}{queue}", "dedicated", "user", "16"]
            assert machine.read(f"engine{number}.{queue}/group_id") == str(queue)
            assert machine.kernel.exists(f"/dev/dsa/{path}")
        assert machine.read(f"wq{number}.4/state") == "disabled"


@pytest.mark.parametrize("count", [1, 12])
def test_every_iaa_gets_the_built_in_profile(node: MakeNode, count: int) -> None:
    machine = node(DsaSpec(), iaas=[IaaSpec() for _ in range(count)])
    outcomes = machine.apply(IAA)
    assert states(outcomes) == {f"iax{number}": "applied" for number in range(1, count + 1)}
    for number in range(1, count + 1):
        assert machine.read(f"wq{number}.3/name") == f"iax{number}3"
        assert machine.read(f"wq{number}.3/max_transfer_size") == "4194304"
        assert machine.read(f"wq{number}.3/state") == "enabled"
    assert machine.read("dsa0/state") == "disabled"


def test_a_second_run_writes_nothing(node: MakeNode) -> None:
    machine = node(configured("other"), DsaSpec(), iaas=[IaaSpec()])
    machine.configure("dsa-node1-dsa0.conf", SHARED)
    for environment in (DSA, IAA):
        assert {*states(machine.apply(environment)).values()} == {"applied"}
    machine.kernel.fail("/sys/*", errno.EIO)
    for environment in (DSA, IAA):
        outcomes = machine.apply(environment)
        assert {*states(outcomes).values()} == {"unchanged"}
        assert not [step for outcome in outcomes for step in outcome.steps]


def test_a_plan_writes_nothing(node: MakeNode) -> None:
    machine = node(configured("other"))
    before = machine.all_text()
    outcome = only(machine.preview())
    assert outcome.state == "pending"
    assert outcome.steps[:2] == ["disable wq0.0", "disable dsa0"]
    assert "wq0.0 name other -> dpdk_00" in outcome.steps
    assert outcome.steps[-1] == "enable wq0.3"
    assert machine.all_text() == before


def test_each_node_and_each_device_may_have_a_file_of_its_own(node: MakeNode) -> None:
    machine = node(*[DsaSpec() for _ in range(11)])
    machine.configure("dsa.conf", "[]")
    machine.configure("dsa-node1-dsa10.conf", SHARED)
    outcomes = machine.apply()
    assert states(outcomes)["dsa10"] == "applied"
    assert machine.read("wq10.0/name") == "shared10"
    assert outcomes[0].state == "skipped"
    assert outcomes[0].reason.endswith("/dsa.conf has no configuration for it")


def test_every_option_of_a_template_is_applied(node: MakeNode) -> None:
    machine = node(DsaSpec(model="1212"))
    text = SHARED.replace('"dev": "dsaX",', '"dev": "dsaX", "read_buffer_limit": 90, "event_log_size": 128,')
    machine.configure(
        "dsa.conf",
        text.replace(
            '"read_buffers_allowed": 8,',
            '"read_buffers_allowed": 8, "read_buffers_reserved": 2, "use_read_buffer_limit": 1,'
            '"traffic_class_a": 3, "traffic_class_b": 4, "desc_progress_limit": 1, "batch_progress_limit": 2,',
        ).replace('"ats_disable": 1', '"ats_disable": 1, "prs_disable": 1'),
    )
    assert only(machine.apply()).state == "applied"
    expected = {
        "dsa0/read_buffer_limit": "90",
        "dsa0/event_log_size": "128",
        "group0.0/read_buffers_allowed": "8",
        "group0.0/read_buffers_reserved": "2",
        "group0.0/use_read_buffer_limit": "1",
        "group0.0/traffic_class_a": "3",
        "group0.0/traffic_class_b": "4",
        "group0.0/desc_progress_limit": "1",
        "group0.0/batch_progress_limit": "2",
        "group0.0/engines": "engine0.0 engine0.1 engine0.2 engine0.3",
        "wq0.0/mode": "shared",
        "wq0.0/threshold": "20",
        "wq0.0/priority": "4",
        "wq0.0/max_batch_size": "64",
        "wq0.0/max_transfer_size": "65536",
        "wq0.0/ats_disable": "1",
        "wq0.0/prs_disable": "1",
        "wq0.0/op_config": ",".join(["00000000"] * 6 + ["00000001", "003f03ff"]),
        "wq0.0/state": "enabled",
        "wq0.5/type": "kernel",
        "wq0.5/driver_name": "dmaengine",
        "wq0.5/state": "enabled",
    }
    assert {path: machine.read(path) for path in expected} == expected
    assert only(machine.apply()).state == "unchanged"


def test_only_a_queue_that_differs_is_disabled(node: MakeNode) -> None:
    machine = node(DsaSpec())
    machine.apply()
    machine.kernel.write(f"{BUS}/drivers/user/unbind", "wq0.2")
    outcome = only(machine.apply())
    assert outcome.state == "applied"
    assert not [step for step in outcome.steps if "disable" in step or "dsa0" in step]
    assert outcome.steps[-1] == "enable wq0.2"
    assert machine.read("wq0.2/name") == "dpdk_02"


def test_only_a_queue_missing_in_the_template_is_disabled(node: MakeNode) -> None:
    machine = node(DsaSpec())
    text = SHARED.replace('"dev": "wqX.5"', '"dev": "wqX.1"')
    machine.configure("dsa.conf", text)
    machine.apply()
    one_queue = text[: text.index(',\n        {"dev": "wqX.1"')] + text[text.index('],\n     "grouped_engines"') :]
    machine.configure("dsa.conf", one_queue)
    outcome = only(machine.apply())
    assert list(outcome.steps) == ["disable wq0.1"]
    assert machine.read("wq0.0/state") == "enabled"


def test_disabled_queues_release_their_size_if_needed(node: MakeNode) -> None:
    machine = node(DsaSpec())
    machine.write("wq0.7/group_id", "1")
    machine.write("wq0.7/size", "100")
    assert only(machine.apply()).state == "applied"
    assert [machine.read(f"wq0.7/{name}") for name in ("size", "group_id", "state")] == ["0", "-1", "disabled"]


def test_disabled_queues_keep_their_size_if_not_needed(node: MakeNode) -> None:
    machine = node(DsaSpec())
    machine.write("wq0.7/group_id", "1")
    machine.write("wq0.7/size", "10")
    machine.write("wq0.7/mode", "dedicated")
    assert only(machine.apply()).state == "applied"
    assert machine.read("wq0.7/size") == "10"
    assert "not in the template" in only(machine.apply()).now["wq0.7"]


def test_engines_are_removed_before_read_buffers_are_reduced(node: MakeNode) -> None:
    machine = node(DsaSpec())
    for engine in range(4):
        machine.write(f"engine0.{engine}/group_id", "0")
    machine.configure("dsa.conf", SHARED)
    assert only(machine.apply()).state == "applied"
    assert machine.read("group0.0/engines") == "engine0.0 engine0.1 engine0.2 engine0.3"
    assert machine.read("group0.0/read_buffers_allowed") == "8"


def test_a_queue_bound_to_another_driver_is_rebound(node: MakeNode) -> None:
    machine = node(DsaSpec())
    machine.configure("dsa.conf", SHARED)
    machine.apply()
    machine.configure("dsa.conf", SHARED.replace('"type": "kernel"', '"type": "user"'))
    assert only(machine.apply()).state == "applied"
    assert machine.kernel.readlink(f"{BUS}/devices/wq0.5/driver").endswith("/user")


def test_provisioning_through_a_mounted_kernel_gives_the_same_result(tmp_path: Path) -> None:
    kernel = Kernel(NodeSpec(dsas=[configured("other"), DsaSpec()]))
    config = read_config(str(tmp_path), {})
    with mounted_for_test(kernel, tmp_path / "root") as root:
        for state in ("applied", "unchanged"):
            assert {*states(list(apply(str(root), planners(Host(root), config)))).values()} == {state}
        kernel.fail(f"{BUS}/drivers/user/bind", errno.EIO, times=1)
        kernel.write(f"{BUS}/drivers/user/unbind", "wq0.1")
        assert next(apply(str(root), planners(Host(root), config))).state == "rolled back"
        assert kernel.read(f"{BUS}/devices/wq0.0/state") == "enabled\n"
        assert kernel.read(f"{BUS}/devices/wq0.1/state") == "disabled\n"


# ── Devices in use and impossible configurations are unchanged ──


def test_a_device_with_clients_is_skipped_with_the_reason(node: MakeNode) -> None:
    machine = node(configured("other", "more"), DsaSpec())
    machine.kernel.hold("wq0.1")
    before = machine.all_text("dsa0")
    busy, free = machine.apply()
    assert busy.state == "skipped"
    assert not busy.failed
    assert busy.reason == "in use: 1 client of wq0.1"
    assert free.state == "applied"
    assert machine.all_text("dsa0") == before


def test_clients_do_not_matter_if_nothing_changes(node: MakeNode) -> None:
    machine = node(DsaSpec())
    machine.apply()
    machine.kernel.hold("wq0.1")
    assert only(machine.apply()).state == "unchanged"


def test_with_force_a_device_with_clients_is_provisioned(node: MakeNode) -> None:
    machine = node(configured("other"))
    machine.kernel.hold("wq0.0")
    assert only(machine.apply(force=True)).state == "applied"
    assert machine.read("wq0.0/name") == "dpdk_00"


def test_a_device_with_unreadable_clients_is_skipped(node: MakeNode) -> None:
    machine = node(configured("other"))
    machine.kernel.fail(f"{BUS}/devices/wq0.0/clients", errno.EIO, on="read")
    outcome = only(machine.apply())
    assert outcome.state == "skipped"
    assert "in use: wq0.0 does not report its clients" in outcome.reason


def test_a_locked_queue_is_skipped_even_with_force(node: MakeNode) -> None:
    machine = node(configured("other"))
    machine.kernel.set_content(f"{BUS}/devices/wq0.0/state", b"locked\n")
    outcome = only(machine.apply(force=True))
    assert (outcome.state, outcome.reason) == ("skipped", "wq0.0 is locked")


@pytest.mark.parametrize("before", [DsaSpec(), configured("other", "more")])
@pytest.mark.parametrize("iommu", ["legacy", "off"])
def test_without_scalable_mode_the_device_is_rolled_back_and_the_iommu_reported(
    node: MakeNode, before: DsaSpec, iommu: str
) -> None:
    kernel_queues = [QueueSpec(type="kernel", name=queue.name) for queue in before.queues]
    spec = DsaSpec(index=0, queues=kernel_queues)
    machine = node(spec, iommu=iommu)
    picture = machine.all_text()
    outcome = only(machine.apply())
    assert outcome.state == "rolled back"
    assert "cmd_status 0x80110000: queues for user space need shared virtual addressing" in outcome.reason
    assert "intel_iommu=on,sm_on" in outcome.reason
    assert machine.all_text() == picture


def test_a_device_with_fixed_configuration_gets_the_writable_attributes(node: MakeNode) -> None:
    machine = node(configured("other", size=64))
    machine.kernel.set_content(f"{BUS}/devices/dsa0/configurable", b"0\n")
    outcome = only(machine.preview())
    assert "wq0.0 size stays 64 (not 16)" in outcome.notes[0]
    assert not [step for step in outcome.steps if " size " in step]
    assert "wq0.0 name other -> dpdk_00" in outcome.steps


LARGE = SHARED.replace('"size": 32', '"size": 33')


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (LARGE, "the queues' sizes add up to 129, expected at most 128 (max_work_queues_size)"),
        (SHARED.replace("wqX.5", "wqX.8"), "it has no wq0.8 (max_work_queues is 8)"),
        (SHARED.replace("engineX.3", "engineX.4"), "it has no engine0.4 (max_engines is 4)"),
        (SHARED.replace("groupX.0", "groupX.4"), "it has no group0.4 (max_groups is 4)"),
        (SHARED.replace("33", "1025"), "wq0.0 max_batch_size is 2048, expected at most 1024"),
        (SHARED.replace("65536", "2147483649"), "wq0.0 max_transfer_size is 4294967296, expected at most 2147483648"),
        (
            SHARED.replace('"threshold": 20', '"threshold": 20, "group_id": 9'),
            "wq0.0 has group_id 9, but the device has no such group",
        ),
        (
            SHARED.replace('allowed": 8', 'allowed": 97'),
            "read_buffers_allowed, with 0 reserved for other groups, is 97",
        ),
        (SHARED.replace('allowed": 8', 'reserved": 97'), "read_buffers_reserved of the groups add up to 97"),
        (SHARED.replace('"dev": "dsaX",', '"dev": "dsaX", "read_buffer_limit": 97,'), "read_buffer_limit is 97"),
        (SHARED.replace('"dev": "dsaX",', '"dev": "dsaX", "event_log_size": 1,'), "event_log_size is 1, expected 64"),
        (
            SHARED.replace('"kernelX"', '"kernelX", "driver_name": "crypto"'),
            "the driver crypto of the queues is not loaded, expected /sys/bus/dsa/drivers/crypto",
        ),
    ],
)
@pytest.mark.untraced
def test_invalid_templates_are_rejected_before_any_write(node: MakeNode, template: str, reason: str) -> None:
    machine = node(DsaSpec(index=0, model="11fb", queues=[QueueSpec()]), DsaSpec(queues=[QueueSpec()]))
    machine.configure("dsa-node1-dsa0.conf", template)
    before = machine.all_text("dsa0")
    wrong, right = machine.apply()
    assert wrong.failed
    assert reason in wrong.reason
    assert "dsa-node1-dsa0.conf" in wrong.reason
    assert machine.all_text("dsa0") == before
    assert right.state == "applied"


def test_attributes_that_the_hardware_lacks_are_not_written(node: MakeNode) -> None:
    machine = node(DsaSpec())
    machine.configure(
        "dsa.conf",
        SHARED.replace('"dev": "dsaX",', '"dev": "dsaX", "event_log_size": 128,')
        .replace('"read_buffers_allowed": 8,', '"traffic_class_a": 3, "desc_progress_limit": 1,')
        .replace('"ats_disable": 1', '"prs_disable": 1'),
    )
    assert only(machine.apply()).state == "applied"
    outcome = only(machine.apply())
    assert outcome.state == "unchanged"
    assert outcome.now["not supported"] == "dsa0 event_log_size, group0.0 desc_progress_limit, wq0.0 prs_disable"


def test_read_buffers_are_not_written_to_an_iaa(node: MakeNode) -> None:
    machine = node(iaas=[IaaSpec()])
    machine.configure("iaa.conf", SHARED.replace("dsaX", "iaxX"))
    assert only(machine.apply(IAA)).state == "applied"
    assert only(machine.apply(IAA)).state == "unchanged"


def test_a_kernel_without_driver_name_attributes_is_supported(node: MakeNode) -> None:
    machine = node(DsaSpec(driver_name_file=False))
    assert only(machine.apply()).state == "applied"
    assert machine.read("wq0.0/state") == "enabled"
    assert only(machine.apply()).state == "unchanged"
