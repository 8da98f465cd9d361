"""Provisioning of QAT devices: its effects on an emulated kernel, and rollback."""

import errno
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
from kernelhost import snapshot
from qatnodes import CY, PF, SYS, Node, qat

from accelplane.provision.qat import QatConfig
from accelplane.simulate.offload import QatSpec


class Case(NamedTuple):
    """A device, the changes of it, and its final state; None is unchanged."""

    title: str
    node: Node
    state: str
    config: QatConfig = CY
    reason: str = ""
    note: str = ""
    services: str | None = None
    vfs: dict[str, int] | None = None
    arrange: Callable[[Node], None] = lambda _node: None
    unchanged: bool = False


def fail(name: str, number: int, *, times: int | None = None) -> Callable[[Node], None]:
    return lambda node: node.kernel.fail(name if name.startswith("/") else f"{SYS}/{name}", number, times=times)


def refuse_to_start(node: Node) -> None:
    node.kernel.qat(PF).refuses_to_start = True


def stay_down(node: Node) -> None:
    node.kernel.set_content(f"{SYS}/qat/state", b"down\n")


def cases() -> Sequence[Case]:
    full, bound = {"vfio-pci": 16}, qat(vfs=16, vf_driver="vfio-pci")
    forced = QatConfig(services="sym;asym", force=True)
    plain = QatConfig()
    return [
        Case("services, VFs and their driver", Node(qat()), "applied", services="asym;sym", vfs=full),
        Case("services in the kernel's order are the same", Node(qat(services="asym;sym")), "applied", vfs=full),
        Case("services that nobody configured stay", Node(qat()), "applied", plain, services="dc", vfs=full),
        Case("nothing to do", Node(bound), "unchanged", plain, unchanged=True),
        Case("VFs that are there get their driver", Node(qat(vfs=16)), "applied", plain, vfs=full),
        Case("VFs without any driver, too", Node(qat(vfs=4, vf_driver="none")), "applied", plain, vfs={"vfio-pci": 4}),
        Case("VFs may keep their driver", Node(qat()), "applied", QatConfig(vf_driver=""), vfs={"4xxxvf": 16}),
        Case("new services for VFs that are there", Node(bound), "applied", services="asym;sym", vfs=full),
        Case("a device that is down comes up", Node(qat(state="down", vfs=4, vf_driver="vfio-pci")), "applied", plain),
        Case("a device that is down gets VFs", Node(qat(state="down")), "applied", services="asym;sym", vfs=full),
        Case("auto-reset", Node(bound), "applied", QatConfig(auto_reset="on"), vfs=full),
        Case(
            "three services of the sixth generation",
            Node(qat(model="6xxx")),
            "applied",
            QatConfig(services="dc;asym;sym"),
            services="asym;sym;dc",
            vfs=full,
        ),
        Case(
            "older devices have no services to set",
            Node(qat(model="c4xxx")),
            "applied",
            QatConfig(services="dc", auto_reset="on", pf_ids=("18a0",)),
            vfs={"vfio-pci": 127},
        ),
        Case(
            "another number of VFs stays",
            Node(qat(vfs=4, total_vfs=16, vf_driver="vfio-pci")),
            "skipped",
            plain,
            note="sriov_numvfs is 4, expected 16; use --force to replace the VFs",
            unchanged=True,
        ),
        Case("unless forced", Node(qat(vfs=4, total_vfs=16)), "applied", forced, services="asym;sym", vfs=full),
        Case(
            "VFs of a UIO driver stay",
            Node(qat(vfs=16, vf_driver="igb_uio")),
            "skipped",
            plain,
            note="VF 0000:61:00.1 and 15 more: possibly in use: igb_uio does not report its users",
            unchanged=True,
        ),
        Case("unless forced, too", Node(qat(vfs=2, vf_driver="igb_uio")), "applied", forced, vfs={"vfio-pci": 2}),
        Case(
            "a device in use",
            Node(qat()),
            "skipped",
            arrange=lambda node: node.kernel.hold(PF),
            reason="in use: state up -> down",
            unchanged=True,
        ),
        Case(
            "a VF in use keeps its services",
            Node(bound),
            "skipped",
            forced,
            arrange=Node.open_group,
            reason="services dc -> sym;asym needed, but VF 0000:61:00.1: in use: its VFIO group is open",
            unchanged=True,
        ),
        Case(
            "a VF that is in use through another's group keeps its driver",
            Node(qat(vfs=2)),
            "applied",
            plain,
            arrange=Node.open_group,
            note="VF 0000:61:00.1: in use",
            vfs={"4xxxvf": 1, "vfio-pci": 1},
        ),
        Case(
            "the PF is passed to a virtual machine",
            Node(qat()),
            "skipped",
            arrange=lambda node: bind_all(node, "vfio-pci"),
            reason="bound to the driver vfio-pci, expected 4xxx",
            unchanged=True,
        ),
        Case(
            "the PF has no driver",
            Node(qat()),
            "failed",
            arrange=lambda node: bind_all(node, ""),
            reason="no driver is bound, expected 4xxx",
            unchanged=True,
        ),
        Case(
            "no SR-IOV",
            Node(qat(total_vfs=0)),
            "failed",
            reason="no sriov_totalvfs: SR-IOV is disabled in the firmware, or this is a virtual machine",
            unchanged=True,
        ),
        Case(
            "no vfio-pci",
            Node(qat(), loaded=()),
            "failed",
            reason="the driver vfio-pci is not loaded, but the VFs need it (modprobe vfio-pci)",
            unchanged=True,
        ),
        Case(
            "three services are too many for the fourth generation",
            Node(qat()),
            "failed",
            QatConfig(services="asym;sym;dc"),
            reason="services asym;sym;dc are 3, expected at most 2 with the driver 4xxx",
            unchanged=True,
        ),
        Case(
            "decompression alone is unknown to the fourth generation",
            Node(qat()),
            "failed",
            QatConfig(services="sym;decomp"),
            reason="services sym;decomp contain decomp, which the driver 4xxx does not support",
            unchanged=True,
        ),
        Case(
            "no IOMMU",
            Node(qat(), iommu="off"),
            "rolled back",
            reason="probably because no IOMMU is enabled; add intel_iommu=on to the kernel's command line",
            unchanged=True,
        ),
        Case(
            "services are refused",
            Node(qat()),
            "rolled back",
            arrange=fail("qat/cfg_services", errno.EINVAL),
            reason="services dc -> sym;asym: ",
            unchanged=True,
        ),
        Case(
            "a device that does not come up gets its services, its VFs and their driver back",
            Node(bound),
            "rolled back",
            arrange=lambda node: node.refused.append((f"{SYS}/qat/state", "up", errno.EIO)),
            reason="state down -> up: ",
            unchanged=True,
        ),
        Case(
            "VFs that nobody had bound are left to the kernel again",
            Node(qat(vfs=2)),
            "rolled back",
            arrange=lambda node: node.refused.append((f"{SYS}/qat/state", "up", errno.EIO)),
            reason="state down -> up: ",
            vfs={"4xxxvf": 2},
            unchanged=True,
        ),
        Case(
            "a device that can have no VFs",
            Node(qat()),
            "failed",
            arrange=lambda node: node.kernel.set_content(f"{SYS}/sriov_totalvfs", b"0\n"),
            reason="sriov_totalvfs is 0, expected at least 1",
            unchanged=True,
        ),
        Case(
            "VFs cannot be enabled",
            Node(qat()),
            "rolled back",
            arrange=fail("sriov_numvfs", errno.EIO),
            reason="VFs 0 -> 16: ",
            unchanged=True,
        ),
        Case(
            "VFs in use somewhere else",
            Node(qat(services="sym;asym")),
            "skipped",
            arrange=fail("sriov_numvfs", errno.EBUSY),
            reason="in use: VFs 0 -> 16: ",
            unchanged=True,
        ),
        Case(
            "not writable",
            Node(qat(services="sym;asym")),
            "failed",
            arrange=fail("sriov_numvfs", errno.EROFS),
            reason="Read-only file system",
            unchanged=True,
        ),
        Case(
            "vfio-pci does not take the VFs",
            Node(qat(model="c6xx", total_vfs=2)),
            "failed",
            reason="it is on vfio-pci's denylist; load the module with disable_denylist=1; and 1 more like it",
            vfs={"c6xxvf": 2},
        ),
        Case(
            "a device that never comes up again",
            Node(qat()),
            "failed",
            arrange=refuse_to_start,
            reason="rollback failed",
        ),
        Case(
            "a device that says it is down whatever is written",
            Node(qat(services="sym;asym", vfs=2, vf_driver="vfio-pci")),
            "rolled back",
            arrange=stay_down,
            reason="/qat/state: writing 'up' had no effect",
        ),
        Case(
            "auto-reset is refused, the rest goes on",
            Node(qat()),
            "failed",
            QatConfig(services="sym;asym", auto_reset="on"),
            arrange=fail("qat/auto_reset", errno.EIO),
            reason="auto-reset off -> on: ",
            services="asym;sym",
            vfs=full,
        ),
        Case(
            "no auto-reset on kernels before 6.9",
            Node(bound),
            "skipped",
            QatConfig(auto_reset="on"),
            arrange=lambda node: node.kernel.tree.remove(f"{node.kernel.resolve(SYS)}/qat/auto_reset"),
            note="no qat/auto_reset (Linux 6.9 or newer)",
            unchanged=True,
        ),
        Case(
            "no services on kernels before 6.0",
            Node(bound),
            "failed",
            arrange=lambda node: node.kernel.tree.remove(f"{node.kernel.resolve(SYS)}/qat"),
            reason="no qat/cfg_services (Linux 6.0 or newer)",
            unchanged=True,
        ),
        Case(
            "an attribute that cannot be read",
            Node(qat()),
            "failed",
            arrange=lambda node: node.kernel.fail(f"{SYS}/qat/cfg_services", errno.EIO, on="read"),
            reason="/qat/cfg_services: Input/output error",
            unchanged=True,
        ),
        Case(
            "an attribute that says junk",
            Node(qat()),
            "failed",
            arrange=lambda node: node.kernel.set_content(f"{SYS}/sriov_totalvfs", b"\xff\x00many"),
            reason="/sriov_totalvfs: ",
            unchanged=True,
        ),
    ]


def bind_all(node: Node, driver: str) -> None:
    node.kernel.write(f"{SYS}/driver_override", driver or "nobody")
    node.kernel.write("/sys/bus/pci/drivers/4xxx/unbind", PF)
    if driver:
        node.kernel.write(f"/sys/bus/pci/drivers/{driver}/bind", PF)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.title)
def test_a_device_reaches_the_desired_state_or_is_rolled_back_with_the_reason(case: Case) -> None:
    node = case.node
    case.arrange(node)
    before = snapshot(node.kernel)
    (outcome,) = node.apply(case.config)
    assert outcome.state == case.state, outcome
    assert case.reason in outcome.reason
    assert case.note in "; ".join(outcome.notes)
    if case.services is not None:
        assert node.read("qat/cfg_services") == case.services
    if case.vfs is not None:
        assert node.vf_drivers() == case.vfs
    if case.state == "applied" and node.kernel.exists(f"{SYS}/qat"):
        assert node.read("qat/state") == "up"
    if case.unchanged:
        assert snapshot(node.kernel) == before


@pytest.mark.parametrize(
    "case", [case for case in cases() if case.state in ("applied", "unchanged")], ids=lambda case: case.title
)
def test_a_second_run_writes_nothing(case: Case) -> None:
    node = case.node
    case.arrange(node)
    node.apply(case.config)
    node.writes.clear()
    (outcome,) = node.apply(case.config)
    assert node.writes == []
    assert not outcome.failed


def test_a_failing_device_does_not_affect_the_others() -> None:
    node = Node(qat(), QatSpec(services="dc"), QatSpec(model="c6xx", total_vfs=1))
    node.kernel.fail(f"{SYS}/qat/state", errno.EIO)
    assert [outcome.state for outcome in node.apply()] == ["failed", "applied", "failed"]


def test_a_node_without_devices_needs_no_changes() -> None:
    assert Node().apply() == []
