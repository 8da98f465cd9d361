"""Provisioning of DLB devices: outcomes, and effects on an emulated kernel."""

import errno
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernelhost import KernelHost, snapshot

from accelplane.provision.config import ConfigError
from accelplane.provision.dlb import ONE_VF, DlbConfig, parse, planners, read_config
from accelplane.provision.steps import Outcome, apply, preview
from accelplane.simulate.kernel import Kernel
from accelplane.simulate.offload import DlbSpec
from accelplane.simulate.specs import NodeSpec

PF, VF = "0000:62:00.0", "0000:62:00.1"
SYS = f"/sys/bus/pci/drivers/dlb2/{PF}"
ONE = DlbConfig()


class Node:
    """An emulated node; `writes` has what was written to it."""

    def __init__(self, *dlbs: DlbSpec) -> None:
        self._spec = NodeSpec(dlbs=dlbs, loaded=("vfio-pci",))
        self.writes: list[tuple[str, str]] = []
        self.refused: list[tuple[str, str, int]] = []

    @cached_property
    def kernel(self) -> Kernel:  # made by the test: the collection of tests makes all nodes
        return Kernel(self._spec)

    def host(self, _root: str = "/") -> KernelHost:
        host = KernelHost(self.kernel, self.writes)
        host.refused = self.refused
        return host

    def apply(self, config: DlbConfig = ONE) -> list[Outcome]:
        return list(apply("/", planners(self.host(), config), timeout=0, host=self.host))

    def resources(self, vf: int, pf: str = SYS) -> dict[str, int]:
        return {name: int(self.kernel.read(f"{pf}/vf{vf}_resources/{name}")) for name in ONE_VF}

    def vfs(self, pf: str = SYS) -> list[str]:
        """The drivers of the virtual functions."""
        links = [f"{pf}/{name}/driver" for name in self.kernel.list(pf) if name.startswith("virtfn")]
        return [self.kernel.readlink(link).rpartition("/")[2] if self.kernel.exists(link) else "" for link in links]


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("", DlbConfig(file="dlb.conf")),
        ("VFs=4\nPFs = first\n", DlbConfig(vfs=4, pfs="first", file="dlb.conf")),
        ("# as in the guide\nnum_ldb_ports=64\n", DlbConfig(resources={"num_ldb_ports": 64}, file="dlb.conf")),
    ],
)
def test_the_file_sets_number_devices_and_resources(text: str, config: DlbConfig) -> None:
    assert parse("dlb.conf", text) == config


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("VFs=0", 1),
        ("VFs=17", 1),
        ("VFs=two", 1),
        ("\nPFs=second", 2),
        ("VFs=1\nVFs=2", 2),
        ("num_ports=3", 1),
        ("4", 1),
    ],
)
def test_errors_in_the_file_have_the_line(text: str, line: int) -> None:
    with pytest.raises(ConfigError, match=rf"^dlb\.conf:{line}: found .* expected "):
        parse("dlb.conf", text)


@given(st.text() | st.text(alphabet="VFsP=12345\n# num_ldb_ports"))
def test_any_text_is_a_configuration_or_a_configuration_error(text: str) -> None:
    try:
        config = parse("dlb.conf", text)
    except ConfigError:
        return
    assert 1 <= config.vfs <= 16


def test_the_environment_has_priority(tmp_path: Path) -> None:
    (tmp_path / "dlb-node1.conf").write_text("VFs=4\nPFs=first")
    environment = {"NODE_NAME": "node1", "DLB_VFS": "2", "DLB_PFS": "all"}
    assert read_config(str(tmp_path), environment) == DlbConfig(vfs=2, pfs="all", file=f"{tmp_path}/dlb-node1.conf")


def test_every_device_gets_one_vf_with_the_resources_of_the_original() -> None:
    node = Node(DlbSpec(), DlbSpec())
    assert [outcome.state for outcome in node.apply()] == ["applied", "applied"]
    for pf in (SYS, "/sys/bus/pci/drivers/dlb2/0000:66:00.0"):
        assert node.resources(0, pf) == ONE_VF
        assert node.vfs(pf) == ["dlb2"]


def test_on_request_only_the_first_device_is_provisioned() -> None:
    assert [outcome.device for outcome in Node(DlbSpec(), DlbSpec()).apply(DlbConfig(pfs="first"))] == [PF]


def test_a_plan_shows_the_resources_of_the_vf_and_writes_nothing() -> None:
    node = Node(DlbSpec())
    before = snapshot(node.kernel)
    (outcome,) = preview("/", planners(node.host(), DlbConfig(vfs=2)), host=node.host)
    assert outcome.steps[0] == "VFs 0 -> 2"
    assert "resources of each VF: " in outcome.steps[1]
    assert "dir_ports 32" in outcome.steps[1]
    assert outcome.now == {"driver": "dlb2", "VFs": "0 of 16"}
    assert (snapshot(node.kernel), node.writes) == (before, [])


class Case(NamedTuple):
    """A device, the changes of it, and its final state."""

    title: str
    node: Node
    state: str
    config: DlbConfig = ONE
    reason: str = ""
    resources: Mapping[str, int] = {}
    vfs: Sequence[str] | None = None
    arrange: Callable[[Node], None] = lambda _node: None
    unchanged: bool = False


def fail(name: str, number: int) -> Callable[[Node], None]:
    return lambda node: node.kernel.fail(f"{SYS}/{name}", number)


def interrupted(node: Node) -> None:
    """Another process was killed while it assigned resources to the VF."""
    node.kernel.write("/sys/bus/pci/drivers/dlb2/unbind", VF)
    node.kernel.write(f"{SYS}/vf0_resources/num_ldb_ports", "4")


def vfs_in_use(node: Node) -> None:
    node.kernel.write("/sys/bus/pci/drivers/dlb2/unbind", VF)
    node.kernel.write(f"/sys/bus/pci/devices/{VF}/driver_override", "vfio-pci")
    node.kernel.write("/sys/bus/pci/drivers/vfio-pci/bind", VF)


def cases() -> Sequence[Case]:
    fourth = {"num_ldb_ports": 16, "num_dir_ports": 16, "num_ldb_credits": 2048, "num_sched_domains": 8}
    bare = DlbSpec(vfs=1, provisioned=False)
    return [
        Case(
            "several VFs divide what there is", Node(DlbSpec()), "applied", DlbConfig(vfs=4), "", fourth, ["dlb2"] * 4
        ),
        Case(
            "resources may be told",
            Node(DlbSpec()),
            "applied",
            DlbConfig(vfs=2, resources={"num_ldb_ports": 8}),
            resources={"num_ldb_ports": 8, "num_dir_ports": 32},
        ),
        Case("a VF that has resources is left as it is", Node(DlbSpec(vfs=1)), "unchanged", unchanged=True),
        Case("a VF that has none gets them", Node(bare), "applied", resources=ONE_VF, vfs=["dlb2"]),
        Case(
            "what was interrupted is finished",
            Node(bare),
            "applied",
            resources=ONE_VF,
            vfs=["dlb2"],
            arrange=interrupted,
        ),
        Case("a VF that is in use is unchanged", Node(bare), "unchanged", arrange=vfs_in_use, unchanged=True),
        Case(
            "another number of VFs stays",
            Node(DlbSpec(vfs=4)),
            "skipped",
            reason="sriov_numvfs is 4, expected 1; use --force to replace the VFs",
            unchanged=True,
        ),
        Case("unless forced", Node(DlbSpec(vfs=4)), "applied", DlbConfig(force=True), resources=ONE_VF, vfs=["dlb2"]),
        Case(
            "VFs that were replaced in vain are there again, with what they had",
            Node(DlbSpec(vfs=4)),
            "rolled back",
            DlbConfig(vfs=2, force=True),
            "/vf0_resources/num_ldb_ports: Invalid argument",
            arrange=lambda node: node.refused.append((f"{SYS}/vf0_resources/num_ldb_ports", "32", errno.EINVAL)),
            unchanged=True,
        ),
        Case(
            "more VFs than it can have",
            Node(DlbSpec(total_vfs=2)),
            "failed",
            DlbConfig(vfs=4),
            "4 VFs expected, but sriov_totalvfs is 2",
            unchanged=True,
        ),
        Case(
            "more resources than it has",
            Node(DlbSpec()),
            "failed",
            DlbConfig(vfs=2, resources={"num_ldb_ports": 33}),
            "num_ldb_ports=33 for each of 2 VFs, but total_resources has 64",
            unchanged=True,
        ),
        Case(
            "no SR-IOV",
            Node(DlbSpec(total_vfs=0)),
            "skipped",
            reason="no sriov_totalvfs",
            unchanged=True,
        ),
        Case(
            "not writable",
            Node(DlbSpec()),
            "skipped",
            reason="Read-only file system",
            arrange=fail("sriov_numvfs", errno.EROFS),
            unchanged=True,
        ),
        Case(
            "in use",
            Node(DlbSpec()),
            "skipped",
            reason="in use: VFs 0 -> 1: ",
            arrange=fail("sriov_numvfs", errno.EBUSY),
            unchanged=True,
        ),
        Case(
            "no VF can be enabled",
            Node(DlbSpec()),
            "failed",
            reason="VFs 0 -> 1: ",
            arrange=fail("sriov_numvfs", errno.ENOMEM),
            unchanged=True,
        ),
        Case(
            "resources are refused",
            Node(DlbSpec()),
            "rolled back",
            reason="/vf0_resources/num_ldb_ports: Invalid argument",
            arrange=lambda node: node.refused.append((f"{SYS}/vf0_resources/num_ldb_ports", "4", errno.EINVAL)),
            unchanged=True,
        ),
        Case(
            "a VF that its driver does not take back",
            Node(DlbSpec()),
            "rolled back",
            reason="/sys/bus/pci/drivers/dlb2/bind: Input/output error",
            arrange=lambda node: node.refused.append(("/sys/bus/pci/drivers/dlb2/bind", VF, errno.EIO)),
            unchanged=True,
        ),
        Case(
            "an attribute that says junk",
            Node(DlbSpec()),
            "failed",
            reason="/total_resources/num_ldb_ports: found 'many', expected a number",
            arrange=lambda node: node.kernel.set_content(f"{SYS}/total_resources/num_ldb_ports", b"many\n"),
            unchanged=True,
        ),
    ]


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.title)
def test_a_device_reaches_the_desired_state_or_is_rolled_back_with_the_reason(case: Case) -> None:
    node = case.node
    case.arrange(node)
    before = snapshot(node.kernel)
    (outcome,) = node.apply(case.config)
    assert outcome.state == case.state, outcome
    assert case.reason in outcome.reason
    if case.resources:
        found = node.resources(0)
        assert {name: found[name] for name in case.resources} == case.resources
    if case.vfs is not None:
        assert node.vfs() == case.vfs
    if case.unchanged:
        assert snapshot(node.kernel) == before


@pytest.mark.parametrize("case", [case for case in cases() if case.state == "applied"], ids=lambda case: case.title)
def test_a_second_run_writes_nothing(case: Case) -> None:
    node = case.node
    case.arrange(node)
    node.apply(case.config)
    node.writes.clear()
    assert [outcome.state for outcome in node.apply(case.config)] == ["unchanged"]
    assert node.writes == []


def test_a_node_without_devices_needs_no_changes() -> None:
    assert Node().apply() == []


JUNK = st.binary(max_size=40) | st.sampled_from([b"", b"\n", b"-1", b"1\n", b"0x10", b"64\n", b"9" * 99])


@given(
    st.dictionaries(
        st.sampled_from(
            ["sriov_totalvfs", "sriov_numvfs", "total_resources/num_ldb_ports", "vf0_resources/num_ldb_ports"]
        ),
        JUNK,
    )
)
def test_any_attribute_content_results_in_a_reported_state(contents: dict[str, bytes]) -> None:
    node = Node(DlbSpec(vfs=1, provisioned=False))
    to_do = planners(node.host(), ONE)
    for name, content in contents.items():
        node.kernel.set_content(f"{SYS}/{name}", content)
    (planned,) = preview("/", to_do, host=node.host)
    (outcome,) = apply("/", to_do, timeout=0, host=node.host)
    assert (planned.device, outcome.device) == (PF, PF)
