"""Functions of DSA and IAA that are bound to vfio-pci or back to idxd."""

import errno
from pathlib import Path

import pytest
from idxdnodes import BUS, DSA, MakeNode, Node, only, states, writes

from accelplane.simulate.kernel import Kernel
from accelplane.simulate.offload import DsaSpec, IaaSpec, QueueSpec
from accelplane.simulate.specs import NodeSpec

VFIO = {**DSA, "DSA_DRIVER": "vfio-pci"}


@pytest.fixture
def node(tmp_path: Path) -> MakeNode:
    def make(*dsas: DsaSpec, **spec: object) -> Node:
        return Node(Kernel(NodeSpec(dsas=dsas, **spec)), tmp_path)  # type: ignore[arg-type] # the other fields, as they are

    return make


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
