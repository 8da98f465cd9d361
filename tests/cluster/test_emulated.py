"""The emulated kernel on a separate machine: processes and mounts of pods use the real paths."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from accelplane.simulate import DlbSpec, DsaSpec, GpuSpec, NodeSpec, QatSpec, QueueSpec, SgxSpec

from .cluster import Cluster
from .emulated import EmulatedKernel, emulated, emulated_kernel, kernel_of
from .machine import Machine
from .node import NodePlan
from .objects import pod

pytestmark = pytest.mark.cluster
QAT = "/sys/bus/pci/devices/0000:61:00.0"


@pytest.fixture
def kernel(cluster_is_possible: None, tmp_path: Path) -> Iterator[EmulatedKernel]:
    """A machine without Kubernetes, with one device of each family."""
    machine = Machine("emulated", tmp_path, cgroup=f"accelplane-emulated-{os.getpid()}", path=os.environ["PATH"])
    machine.power_on()
    try:
        yield emulated_kernel(
            machine,
            NodeSpec(
                gpus=[GpuSpec()],
                qats=[QatSpec()],
                dsas=[DsaSpec(queues=[QueueSpec()])],
                dlbs=[DlbSpec()],
                sgx=SgxSpec(),
            ),
        )
    finally:
        machine.power_off()


def test_a_machine_has_a_kernel_that_reacts(kernel: EmulatedKernel) -> None:
    machine = kernel.machine
    listing = machine.run(
        "ls", "-d", "/sys/class/drm/card0", "/sys/kernel/debug/qat_4xxx_0000:61:00.0", "/sys/class/net"
    )
    assert len(listing.stdout.split()) == 3
    machine.run("sh", "-c", f"echo 16 > {QAT}/sriov_numvfs")
    assert kernel.read(f"{QAT}/sriov_numvfs") == "16\n"
    machine.run("sh", "-c", f"echo vfio-pci > {QAT}/virtfn0/driver_override")
    machine.run("sh", "-c", "echo 0000:61:00.1 > /sys/bus/pci/drivers/4xxxvf/unbind")
    machine.run("sh", "-c", "echo 0000:61:00.1 > /sys/bus/pci/drivers/vfio-pci/bind")
    group = Path(machine.run("readlink", f"{QAT}/virtfn0/iommu_group").stdout.strip()).name
    for node in (f"vfio/{group}", "dsa/wq0.0", "dlb0", "sgx_enclave", "dri/card0"):
        assert machine.run("stat", "-c", "%F %t:%T", f"/dev/{node}").stdout == "character special file 1:3\n"
    assert machine.run("cat", "/sys/devices/system/node/node0/x86/sgx_total_bytes").stdout == "67108864\n"
    assert machine.path("/sys/devices/system/node/node0/cpulist").read_text()


def test_faults_users_and_hardware_are_controlled_by_the_control_file(kernel: EmulatedKernel) -> None:
    kernel.fail(f"{QAT}/qat/state", errno.EIO, times=1)
    with pytest.raises(OSError, match="Input/output error"):
        kernel.write(f"{QAT}/qat/state", "down")
    kernel.hold("0000:61:00.0")
    failed = kernel.machine.run("sh", "-c", f"printf down > {QAT}/qat/state", check=False)
    assert failed.returncode
    kernel.release("0000:61:00.0")
    kernel.write(f"{QAT}/qat/state", "down")
    address = kernel.plug(QatSpec(vfs=2, vf_driver="vfio-pci"))
    assert kernel.read(f"/sys/bus/pci/devices/{address}/sriov_numvfs") == "2\n"
    kernel.unplug(address)
    assert not os.path.lexists(kernel.machine.path(f"/sys/bus/pci/devices/{address}"))


def test_listeners_receive_uevents_of_changes(kernel: EmulatedKernel) -> None:
    with kernel.machine.uevent_listener() as listener:
        listener.settimeout(20)
        kernel.write("/sys/bus/pci/drivers/dlb2/unbind", "0000:62:00.0")
        payload, (sender, _groups) = listener.recvfrom(4096)
    assert sender == 0
    assert payload.startswith(b"remove@/devices/pci0000:62/0000:62:00.0/dlb2/dlb0\0")


def test_a_privileged_pod_configures_a_device_on_a_real_node(start_cluster: Callable[..., Cluster]) -> None:
    cluster = start_cluster(NodePlan(hardware=[emulated(NodeSpec(qats=[QatSpec()]))]))
    node = cluster.nodes["node-1"]
    script = f"echo 16 > {QAT}/sriov_numvfs && ls {QAT} && echo 16 > {QAT}/sriov_totalvfs"
    cluster.apply(pod("init", "sh", "-c", script, host_paths=["/sys"], securityContext={"privileged": True}))
    cluster.wait_pod("init", "Failed")
    log = cluster.kubectl("logs", "init")
    assert "virtfn15" in log
    assert "Permission denied" in log
    kernel = kernel_of(node)
    assert kernel.read(f"{QAT}/sriov_numvfs") == "16\n"
    node.reboot()
    assert kernel.read(f"{QAT}/sriov_numvfs") == "0\n"
