"""DSA and IAA devices provisioned on the emulated kernel: each in its desired state, or exactly as before."""

import errno
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernelhost import KernelHost, snapshot
from mountpoints import mounted_for_test

from accelplane.host import Host, WriteError
from accelplane.provision.idxd import planners, read_config
from accelplane.provision.steps import Outcome, apply, preview
from accelplane.simulate.kernel import Kernel
from accelplane.simulate.offload import DsaSpec, IaaSpec, QueueSpec
from accelplane.simulate.specs import NodeSpec

DSA = {"NODE_NAME": "node1"}
IAA = {**DSA, "DEVICE_TYPE": "iaa"}
VFIO = {**DSA, "DSA_DRIVER": "vfio-pci"}
BUS = "/sys/bus/dsa"

SHARED = """[{"dev": "dsaX", "groups": [
    {"dev": "groupX.0", "read_buffers_allowed": 8, "grouped_workqueues": [
        {"dev": "wqX.0", "mode": "shared", "type": "user", "size": 32, "threshold": 20, "name": "sharedX",
         "priority": 4, "max_batch_size": 33, "max_transfer_size": 65536, "ats_disable": 1, "op_config": "1,003f03ff"},
        {"dev": "wqX.5", "mode": "dedicated", "type": "kernel", "size": 96, "name": "kernelX"}],
     "grouped_engines": [{"dev": "engineX.0"}, {"dev": "engineX.1"}, {"dev": "engineX.2"}, {"dev": "engineX.3"}]}]}]"""


class Node:
    """An emulated node, its configuration directory, and the provisioning outcomes."""

    def __init__(self, kernel: Kernel, conf: Path) -> None:
        self.kernel = kernel
        self.conf = conf
        self.host = KernelHost(kernel, [])

    def apply(self, environment: dict[str, str] = DSA, *, force: bool = False) -> list[Outcome]:
        config = read_config(str(self.conf), environment, force=force)
        return list(apply("/", planners(self.host, config), timeout=0, host=lambda _root: self.host))

    def preview(self, environment: dict[str, str] = DSA) -> list[Outcome]:
        config = read_config(str(self.conf), environment)
        return list(preview("/", planners(self.host, config), host=lambda _root: self.host))

    def read(self, path: str) -> str:
        return self.kernel.read(f"{BUS}/devices/{path}").strip()

    def write(self, path: str, text: str) -> None:
        self.kernel.write(f"{BUS}/devices/{path}", text)

    def configure(self, name: str, text: str) -> None:
        (self.conf / name).write_text(text)

    def driver(self, address: str) -> str:
        path = f"/sys/bus/pci/devices/{address}/driver"
        return os.path.basename(self.kernel.readlink(path)) if self.kernel.exists(path) else ""

    def all_text(self, device: str = "") -> dict[str, str]:
        """All attributes and links in sysfs and /dev of the device, or of all devices."""
        found = snapshot(self.kernel) | dict.fromkeys((path for path, _entry in self.kernel.tree.walk("/dev")), "")
        return {path: text for path, text in found.items() if device in path and not path.endswith("/cmd_status")}

    def text_without_numbers(self) -> dict[str, str]:
        """The same without device numbers, which depend on the order in which queues are enabled."""
        numbers = ("/char", "/char/", "/cdev_minor", "/dev", "/uevent")
        return {
            path: text for path, text in self.all_text().items() if not path.rstrip("0123456789:").endswith(numbers)
        }


MakeNode = Callable[..., Node]


@pytest.fixture
def node(tmp_path: Path) -> MakeNode:
    def make(*dsas: DsaSpec, **spec: object) -> Node:
        return Node(Kernel(NodeSpec(dsas=dsas, **spec)), tmp_path)  # type: ignore[arg-type] # the other fields, as they are

    return make


def states(outcomes: Sequence[Outcome]) -> dict[str, str]:
    return {outcome.device: outcome.state for outcome in outcomes}


def only(outcomes: Sequence[Outcome]) -> Outcome:
    assert len(outcomes) == 1
    return outcomes[0]


def configured(*names: str, size: int = 16, mode: str = "dedicated") -> DsaSpec:
    """A device with a configuration that differs from all templates here."""
    queues = [QueueSpec(name=name, size=size, mode=mode) for name in names]  # type: ignore[arg-type] # the tests' words
    return DsaSpec(index=0, queues=queues)


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


# ── Failures at any write ──


def writes(machine: Node, environment: dict[str, str] = DSA) -> list[tuple[str, str]]:
    """Records all writes of provisioning."""
    writes_: list[tuple[str, str]] = []
    config = read_config(str(machine.conf), environment)
    for planner in planners(machine.host, config):
        while steps := planner(machine.host).steps:
            for step in steps:
                machine.kernel.write(step.path, step.text)
                writes_.append((step.path, step.text))
    return writes_


SMALL = """[{"dev": "dsaX", "read_buffer_limit": 9, "groups": [
    {"dev": "groupX.0", "read_buffers_reserved": 1, "read_buffers_allowed": 5, "use_read_buffer_limit": 1,
     "grouped_workqueues": [
        {"dev": "wqX.0", "mode": "shared", "type": "user", "size": 60, "threshold": 20, "name": "sharedX",
         "priority": 4, "max_batch_size": 64, "max_transfer_size": 65536, "ats_disable": 1, "op_config": "1"}],
     "grouped_engines": [{"dev": "engineX.0"}, {"dev": "engineX.1"}]},
    {"dev": "groupX.1", "grouped_workqueues": [
        {"dev": "wqX.1", "mode": "dedicated", "type": "user", "size": 68, "name": "appX", "block_on_fault": 1}]}]}]"""


def small(*queues: QueueSpec, model: str = "0b25") -> DsaSpec:
    return DsaSpec(index=0, queues=queues, max_queues=3, max_groups=2, max_engines=2, model=model)  # type: ignore[arg-type] # the tests' words


CASES = {
    "blank": (small(), errno.EIO),
    "dedicated": (small(QueueSpec(name="one", size=50), QueueSpec(name="two", size=50)), errno.EBUSY),
    "shared": (small(QueueSpec(mode="shared", size=80), QueueSpec(mode="shared", size=48)), errno.EIO),
    "for the kernel": (small(*[QueueSpec(type="kernel")] * 3, model="1212"), errno.EIO),
    "not enabled": (small(QueueSpec(enabled=False), QueueSpec(enabled=False, mode="shared")), errno.EIO),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.untraced
def test_after_a_failed_write_the_device_is_unchanged(node: MakeNode, case: str) -> None:
    spec, number = CASES[case]
    machine = node(spec)
    machine.configure("dsa.conf", SMALL)
    sequence = writes(machine)
    assert len(sequence) >= 20
    machine = node(spec)
    before = machine.all_text()
    for place, (path, text) in enumerate(sequence):
        machine.kernel.fail(path, number, text=text, times=1)
        outcome = only(machine.apply())
        in_use = number == errno.EBUSY and place == 0
        assert outcome.state == ("skipped" if in_use else "rolled back" if place else "failed"), (path, outcome)
        assert os.strerror(number) in outcome.reason
        assert machine.all_text() == before, (path, text)
    assert only(machine.apply()).state == "applied"


@pytest.mark.untraced
def test_after_permanently_failing_writes_a_blank_device_is_unchanged(node: MakeNode) -> None:
    machine = node(small())
    machine.configure("dsa.conf", SMALL)
    sequence = writes(machine)
    machine = node(small())
    before = machine.all_text()
    for place, (path, text) in enumerate(sequence):
        machine.kernel.fail(path, errno.EIO)
        outcome = only(machine.apply())
        assert outcome.state == ("rolled back" if place else "failed"), (path, text, outcome)
        machine.kernel.clear_faults()
        assert machine.all_text() == before, (path, text)


class FailingHost(KernelHost):
    """A host on which the write with this number fails once."""

    def __init__(self, kernel: Kernel, fails: int) -> None:
        super().__init__(kernel, [])
        self.left = fails

    def write(self, path: str, text: str) -> None:
        self.left -= 1
        if self.left == 0:
            raise WriteError(path, "Input/output error", errno.EIO)
        super().write(path, text)


def optional_values(name: str, values: st.SearchStrategy[object]) -> st.SearchStrategy[dict[str, object]]:
    return st.just({}) | values.map(lambda value: {name: value})


@st.composite
def queues_of(draw: st.DrawFn, number: int) -> dict[str, object]:
    size = draw(st.integers(1, 42))
    document: dict[str, object] = {
        "dev": f"wqX.{number}",
        "size": size,
        "name": draw(st.sampled_from(["a", "bX", "c d"])),
    }
    document["type"] = draw(st.sampled_from(["user", "kernel"]))
    document |= draw(st.sampled_from([{"mode": "dedicated"}, {"mode": "shared", "threshold": (size + 1) // 2}]))
    for one in (
        optional_values("priority", st.integers(1, 15)),
        optional_values("group_id", st.integers(0, 1)),
        optional_values("max_batch_size", st.integers(1, 1024)),
        optional_values("max_transfer_size", st.sampled_from([1, 4096, 5000])),
        optional_values("ats_disable", st.integers(0, 1)),
        st.sampled_from([{}, {"prs_disable": 1}, {"prs_disable": 0, "block_on_fault": 1}]),
        optional_values("op_config", st.sampled_from(["1", "0,ff"])),
    ):
        document |= draw(one)
    return document


@st.composite
def templates(draw: st.DrawFn) -> str:
    """Templates that a small device of the third version supports."""
    queues = draw(st.lists(st.integers(0, 2), unique=True, min_size=1))
    engines = draw(st.lists(st.integers(0, 1), unique=True, min_size=1))
    groups: list[dict[str, object]] = []
    for number in range(2):
        group: dict[str, object] = {"dev": f"groupX.{number}"}
        for one in (
            optional_values("read_buffers_reserved", st.integers(0, 9)),
            optional_values("read_buffers_allowed", st.integers(8, 80)),
            optional_values("use_read_buffer_limit", st.integers(0, 1)),
            optional_values("desc_progress_limit", st.integers(0, 3)),
        ):
            group |= draw(one)
        group["grouped_workqueues"] = [draw(queues_of(one)) for one in queues if one % 2 == number]
        group["grouped_engines"] = [{"dev": f"engineX.{one}"} for one in engines if one == number]
        groups.append(group)
    device = {"dev": "dsaX"} | draw(optional_values("read_buffer_limit", st.integers(0, 90)))
    return json.dumps([device | {"groups": groups}])


@given(templates(), templates(), st.integers(1, 60))
def test_any_device_reaches_the_desired_state_or_is_unchanged(
    node: MakeNode, before: str, after: str, fails: int
) -> None:
    machine = node(small(model="1212"))
    machine.configure("dsa.conf", before)
    assert only(machine.apply()).state == "applied"
    machine.configure("dsa.conf", after)
    picture = machine.text_without_numbers()
    machine.host = FailingHost(machine.kernel, fails)
    outcome = only(machine.apply())
    if outcome.state in ("rolled back", "failed"):
        assert machine.text_without_numbers() == picture
        outcome = only(machine.apply())
    assert outcome.state in ("applied", "unchanged"), outcome
    assert only(machine.apply()).state == "unchanged"


def test_a_failed_rollback_is_reported(node: MakeNode) -> None:
    machine = node(configured("one"))
    machine.kernel.fail(f"{BUS}/drivers/idxd/bind", errno.EIO)
    outcome = only(machine.apply())
    assert outcome.state == "failed"
    assert "rollback failed: /sys/bus/dsa/drivers/idxd/bind" in outcome.reason
    machine.kernel.clear_faults()
    assert only(machine.apply()).state == "applied"


def test_a_write_without_effect_is_detected_before_the_device_is_enabled(node: MakeNode) -> None:
    machine = node(DsaSpec())
    machine.kernel.set_content(f"{BUS}/devices/wq0.1/priority", b"3\n")
    outcome = only(machine.apply())
    assert outcome.failed
    assert "wq0.1/priority: writing '10' had no effect" in outcome.reason
    assert machine.read("dsa0/state") == "disabled"


@pytest.mark.parametrize("attribute", ["state", "size", "mode", "name", "group_id", "threshold", "driver_name"])
@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"x" * 4096, b"-9" * 3000, b"9" * 30])
@pytest.mark.untraced
def test_invalid_attributes_affect_only_their_device(node: MakeNode, attribute: str, content: bytes) -> None:
    machine = node(configured("one"), DsaSpec())
    machine.kernel.set_content(f"{BUS}/devices/wq0.0/{attribute}", content)
    outcomes = machine.preview()
    assert [outcome.device for outcome in outcomes] == ["dsa0", "dsa1"]
    assert outcomes[1].state == "pending"


@pytest.mark.parametrize("place", ["wq0.0/size", "dsa0/read_buffer_limit"])
@pytest.mark.untraced
def test_rollback_does_not_write_invalid_attributes(node: MakeNode, place: str) -> None:
    machine = node(configured("one"), DsaSpec())
    machine.kernel.set_content(f"{BUS}/devices/{place}", b"")
    outcomes = machine.apply()
    assert outcomes[0].failed
    assert f"{place}: writing" in outcomes[0].reason
    assert outcomes[1].state == "applied"


@pytest.mark.parametrize("limit", ["configurable", "max_work_queues_size", "max_groups", "version", "state"])
@pytest.mark.parametrize("content", [b"junk", b"\xff", b"9" * 5000])
@pytest.mark.untraced
def test_invalid_limits_of_the_device_are_reported(node: MakeNode, limit: str, content: bytes) -> None:
    machine = node(DsaSpec())
    machine.kernel.set_content(f"{BUS}/devices/dsa0/{limit}", content)
    outcome = only(machine.apply())
    assert outcome.failed
    assert limit in outcome.reason or "state" in outcome.reason


def test_an_unreadable_attribute_is_reported(node: MakeNode) -> None:
    machine = node(DsaSpec())
    machine.kernel.fail(f"{BUS}/devices/wq0.2/priority", errno.EIO, on="read")
    outcome = only(machine.apply())
    assert outcome.failed
    assert "wq0.2/priority: Input/output error" in outcome.reason


# ── Functions bound to vfio-pci ──


def test_functions_are_bound_to_vfio_pci(node: MakeNode) -> None:
    machine = node(DsaSpec(model="11fb", queues=[QueueSpec()]), DsaSpec(model="1212"), iaas=[IaaSpec()])
    outcomes = machine.apply(VFIO)
    assert list(states(outcomes).values()) == ["applied", "applied"]
    assert {machine.driver(outcome.device) for outcome in outcomes} == {"vfio-pci"}
    assert not machine.kernel.exists(f"{BUS}/devices/dsa0")
    assert [name for name in machine.kernel.list(f"{BUS}/devices") if name.startswith("iax")]
    assert list(states(machine.apply(VFIO)).values()) == ["unchanged", "unchanged"]


def test_functions_are_rebound_to_idxd_and_provisioned_in_one_run(node: MakeNode) -> None:
    machine = node(DsaSpec(model="11fb", driver="vfio-pci"), DsaSpec(model="11fb", driver="none"))
    outcomes = machine.apply()
    assert [outcome.state for outcome in outcomes] == ["applied"] * 4
    assert [outcome.device for outcome in outcomes][2:] == ["dsa0", "dsa1"]
    assert machine.read("wq1.3/state") == "enabled"


def test_only_functions_with_the_requested_ids_are_rebound(node: MakeNode) -> None:
    machine = node(DsaSpec(model="11fb"), DsaSpec(model="1212"))
    outcomes = machine.apply({**VFIO, "DSA_PCI_IDS": "1212"})
    assert len(outcomes) == 2
    assert outcomes[0].now == {"driver": "vfio-pci"}
    assert (outcomes[1].device, outcomes[1].state) == ("dsa0", "applied")


def test_a_function_with_clients_stays_bound_to_idxd(node: MakeNode) -> None:
    machine = node(DsaSpec(index=0, model="11fb", queues=[QueueSpec()]))
    machine.kernel.hold("wq0.0")
    outcome = only(machine.apply(VFIO))
    assert (outcome.state, outcome.reason) == ("skipped", "in use: 1 client of wq0.0; it stays bound to idxd")
    assert machine.read("wq0.0/state") == "enabled"


def test_without_the_target_driver_a_function_stays_bound(node: MakeNode) -> None:
    machine = node(DsaSpec(model="11fb"), loaded=())
    outcome = only(machine.apply(VFIO))
    assert (outcome.state, outcome.reason) == ("failed", "the driver vfio-pci is not loaded (modprobe vfio-pci)")


def test_a_function_rejected_by_vfio_pci_is_provisioned_with_idxd_again(node: MakeNode) -> None:
    machine = node(DsaSpec(index=0, model="0b25", queues=[QueueSpec(), QueueSpec(mode="shared")]))
    before = machine.all_text()
    outcome = only(machine.apply(VFIO))
    assert outcome.state == "rolled back"
    assert "denylist" in outcome.reason
    assert machine.all_text() == before


def test_a_function_that_cannot_be_bound_is_unchanged(node: MakeNode) -> None:
    spec = DsaSpec(index=0, model="11fb", queues=[QueueSpec(), QueueSpec(mode="shared")])
    machine = node(spec)
    sequence = writes(machine, VFIO)
    machine = node(spec)
    before = machine.all_text()
    for path, text in sequence:
        machine.kernel.fail(path, errno.EIO, text=text, times=1)
        assert only(machine.apply(VFIO)).failed
        assert machine.all_text() == before, (path, text)
