"""Provisioned nodes, changed configurations while pods use devices, and failed provisioning."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from accelplane.simulate import DlbSpec, DsaSpec, IaaSpec, NodeSpec, QatSpec, QueueSpec

from .families import (
    DLB0,
    DLB1,
    DSA0,
    IAA0,
    NODE,
    QAT0,
    QAT1,
    VFS,
    DaemonSet,
    Families,
    config_map,
)
from .machine import wait_until
from .test_families import CY, DC, DSA, ENCLAVE, EXAMPLES, IAA, PF, PROVISION, TREES, VF

pytestmark = pytest.mark.cluster

ACCELPLANE = Path(sys.executable).with_name("accelplane")
DEVICES, DRIVERS = "/sys/bus/pci/devices", "/sys/bus/pci/drivers"
PREPARED = (
    QatSpec(bdf=QAT0, vfs=VFS),
    QatSpec(bdf=QAT1, vfs=VFS, vf_driver="vfio-pci"),
    DsaSpec(bdf=DSA0, queues=[QueueSpec(), QueueSpec(mode="shared"), QueueSpec(enabled=False)]),
    IaaSpec(bdf=IAA0, queues=[QueueSpec()] * 2),
    DlbSpec(bdf=DLB0, vfs=2),
    DlbSpec(bdf=DLB1),
)
SHARED = "dsa.intel.com/wq-user-shared"


@pytest.fixture
def families(shared_families: Families) -> Iterator[Families]:
    """The node in the state of the first boot, without workloads. It is reset after each test."""
    shared_families.reset()
    yield shared_families
    shared_families.clean_up()


@pytest.fixture
def plain(families: Families) -> Iterator[Families]:
    """The same without an IOMMU."""
    families.boot(NodeSpec(qats=[QatSpec(bdf=QAT0, total_vfs=VFS)], dsas=[DsaSpec(bdf=DSA0)], iommu="off"))
    yield families
    families.clean_up()
    families.boot(NODE)


def provision(families: Families, mode: str, family: str, **config: str) -> dict[str, dict[str, Any]]:
    """`accelplane provision` on the node: the outcome of each device; the key '' has the exit code."""
    directory = families.node.path("/run/provision")
    directory.mkdir(exist_ok=True)
    for file in directory.iterdir():
        file.unlink()
    for name, text in config.items():
        (directory / f"{name}.conf").write_text(text)
    done = families.node.run(
        ACCELPLANE, "provision", mode, family, "--config-dir=/run/provision", "-ojson", check=False
    )
    assert done.stdout, done.stderr
    result = json.loads(done.stdout)
    assert result["problems"] == []
    return {"": {"code": done.returncode}} | {each["device"]: each for each in result["devices"]}


def restart(*daemonsets: DaemonSet) -> None:
    """Restarts the init containers, which must succeed."""
    for daemonset in daemonsets:
        daemonset.restart()
    assert [daemonset.wait_running().wait_init() for daemonset in daemonsets] == [0] * len(daemonsets)


# Devices provisioned before: only the base.


def test_functions_of_the_kernel_driver_are_bound_with_only_new_id_writable(families: Families) -> None:
    """The manifest mounts only /sys/bus/pci, so writes to `driver_override` fail with EROFS."""
    families.reset(PREPARED)
    assert families.driver("0000:61:00.1") == "4xxxvf"
    (plugin,) = families.deploy("qat_plugin")
    families.wait({CY: VFS, DC: VFS})
    pod = plugin.pod()
    assert pod
    assert "initContainers" not in pod["spec"]
    for number in range(1, VFS + 1):
        assert families.driver(f"0000:61:00.{number}") == "vfio-pci"
        assert families.read(f"{DEVICES}/0000:61:00.{number}/driver_override") == "(null)"
    # The ID was added to the driver temporarily and removed again.
    with pytest.raises(OSError, match=os.strerror(errno.ENODEV)):
        families.kernel.write(f"{DRIVERS}/vfio-pci/remove_id", "8086 4941")
    # Uevents of later functions are also sent in the plugin's network namespace.
    families.kernel.plug(QatSpec(bdf="0000:69:00.0", vfs=1))
    families.wait({CY: VFS + 1, DC: VFS})
    families.run("worker", {CY: 2, DC: 1})
    before = families.container_state("worker"), families.container_devices("worker")
    plugin.restart().wait_running()
    families.wait({CY: VFS + 1, DC: VFS})
    assert (families.container_state("worker"), families.container_devices("worker")) == before


def test_trees_without_init_containers_publish_devices_provisioned_before(families: Families) -> None:
    families.reset(PREPARED)
    for tree in ("dsa_plugin", "iaa_plugin", "dlb_plugin", "sgx_plugin/base"):
        families.deploy(tree)
    expected = {DSA: 1, SHARED: 1, IAA: 2, PF: 1, VF: 2, ENCLAVE: 110, PROVISION: 110}
    families.wait(expected)
    assert families.devices() == expected
    families.run("worker", {DSA: 1, SHARED: 1, IAA: 1, VF: 2, PF: 1, ENCLAVE: 1})
    before = families.container_state("worker"), families.container_devices("worker")
    # Two queues with two links each, one IAA queue, three DLB nodes, one SGX node.
    assert len(before[1].nodes) == 10
    for each in families.deployed:
        each.restart()
    for each in families.deployed:
        each.wait_running()
    families.wait(expected)
    families.node.kubelet.restart()
    families.node.wait_ready()
    families.wait(expected)
    assert (families.container_state("worker"), families.container_devices("worker")) == before


def test_complete_dsa_devices_are_published_by_vfio(families: Families) -> None:
    families.reset([DsaSpec(bdf=DSA0, model="11fb"), DsaSpec(bdf="0000:64:01.0", model="11fb"), IaaSpec(bdf=IAA0)])
    (daemonset,) = families.deploy("dsa_plugin/overlays/dsa_vfio_initcontainer")
    assert daemonset.wait_init() == 0
    log = daemonset.init_log()
    assert f"{DSA0} applied" in log
    assert "driver idxd -> vfio-pci" in log
    assert "2 devices: 2 applied" in log
    families.wait({"dsa.intel.com/vfio": 2})
    families.run("worker", {"dsa.intel.com/vfio": 2})
    allocation = families.container_devices("worker")
    assert set(allocation.variables) == {"VFIO_BDF0", "VFIO_BDF1"}
    assert set(allocation.variables.values()) == {DSA0, "0000:64:01.0"}
    groups = {f"/dev/vfio/{families.group(address)}" for address in allocation.variables.values()}
    assert allocation.nodes == {"/dev/vfio/vfio", *groups}
    assert families.driver(IAA0) == "idxd"


def test_a_node_can_have_its_own_file(families: Families) -> None:
    files = {"qat.conf": "ServicesEnabled=dc\n", "qat-node-1.conf": "ServicesEnabled=asym;sym\nAutoresetEnabled=on\n"}
    (daemonset,) = families.deploy(TREES["qat"], config=config_map("qat-config", files))
    families.wait({CY: 2 * VFS})
    log = daemonset.init_log()
    assert "(/qat-init/conf/qat-node-1.conf)" in log
    assert "applied: services dc -> asym;sym; state down -> up; VFs 0 -> 4;" in log.replace("state up -> down; ", "")
    assert {families.read(f"{DEVICES}/{pf}/qat/auto_reset") for pf in (QAT0, QAT1)} == {"on"}


# Changed configuration while pods use devices.


def test_nothing_is_written_to_a_node_in_the_desired_state(families: Families) -> None:
    for family in TREES:
        families.deploy(TREES[family], config=EXAMPLES.get(family))
    families.wait({CY: VFS, DC: VFS, DSA: 4, IAA: 4, VF: 1, PF: 1})
    families.run("worker", {CY: 1, DSA: 1, IAA: 1, VF: 1})
    before = families.snapshot(), families.container_state("worker")
    files = {family: data(family)[f"{family}.conf"] for family in EXAMPLES}
    for family in ("qat", "idxd"):
        result = provision(families, "apply", family, **files)
        assert result.pop("") == {"code": 0}
        assert {name: each["state"] for name, each in result.items()} == dict.fromkeys(result, "unchanged"), result
        assert len(result) == 2
        assert provision(families, "status", family, **files)[""] == {"code": 0}
    assert (families.snapshot(), families.container_state("worker")) == before


def data(family: str) -> Mapping[str, str]:
    """The files in the example of a ConfigMap."""
    return yaml.safe_load(EXAMPLES[family].read_text())["data"]


def test_devices_in_use_are_skipped_until_they_are_free(families: Families) -> None:
    dsa = data("dsa")
    (qat,) = families.deploy(TREES["qat"])
    (idxd,) = families.deploy(TREES["dsa"], config=config_map("intel-dsa-config", {"dsa.conf": dsa["dsa.conf"]}))
    (dlb,) = families.deploy(TREES["dlb"])
    families.wait({CY: VFS, DC: VFS, DSA: 4, VF: 1, PF: 1})
    families.run("worker", {CY: 1, DSA: 1, VF: 1}, restart="Always")
    before = families.container_state("worker"), families.container_devices("worker")
    nodes = [node.removeprefix("/dev/") for node in before[1].nodes if node != "/dev/vfio/vfio" and "char" not in node]
    for name in nodes:
        # The kernel names a queue only by its own name.
        families.kernel.hold(name.removeprefix("dsa/"))

    families.configure(config_map("qat-config", {"qat.conf": "ServicesEnabled=dc\n"}))
    families.configure(config_map("intel-dsa-config", {"dsa.conf": dsa["dsa-node1.conf"]}))
    restart(qat, idxd, dlb)
    log = qat.init_log()
    assert f"{QAT0} skipped" in log, log
    assert f"{QAT1} unchanged" in log
    assert "in use" in log
    log = idxd.init_log()
    assert "dsa0 skipped" in log, log
    assert "in use: 1 client of wq0." in log
    assert "1 unchanged" in dlb.init_log()
    families.wait({CY: VFS, DC: VFS, DSA: 4, VF: 1, PF: 1})
    assert (families.container_state("worker"), families.container_devices("worker")) == before

    for name in nodes:
        families.kernel.release(name.removeprefix("dsa/"))
    families.delete("worker")
    restart(qat, idxd, dlb)
    assert f"{QAT0} applied" in qat.init_log()
    assert "dsa0 applied" in idxd.init_log()
    families.wait({CY: 0, DC: 2 * VFS, DSA: 0, SHARED: 4, VF: 1, PF: 1})


# Failed provisioning.


def failed(daemonset: DaemonSet) -> str:
    """The log of a failed init container; its pod does not start."""
    assert daemonset.wait_init() == 1
    pod = daemonset.pod()
    assert pod
    assert pod["status"]["phase"] == "Pending"
    return daemonset.init_log()


def test_a_failed_device_is_reported_with_its_reason_and_the_others_are_provisioned(families: Families) -> None:
    kernel = families.kernel
    families.reset(
        [
            QatSpec(bdf=QAT0, total_vfs=VFS),
            QatSpec(bdf=QAT1, total_vfs=VFS),
            QatSpec(bdf="0000:69:00.0", total_vfs=VFS, state="down"),
            DsaSpec(bdf=DSA0),
            DsaSpec(bdf="0000:64:01.0"),
            DlbSpec(bdf=DLB0),
        ]
    )
    kernel.fail(f"{DEVICES}/{QAT0}/sriov_numvfs", errno.EIO)
    kernel.do("qat", bdf="0000:69:00.0", starts=False)
    kernel.fail("/sys/bus/dsa/drivers/user/bind", errno.EIO, text="wq0.1")
    kernel.fail(f"{DEVICES}/{DLB0}/vf0_resources/num_ldb_ports", errno.EIO)
    trees = [families.deploy(TREES[family], config=EXAMPLES.get(family))[0] for family in ("qat", "dsa", "dlb")]
    qat, dsa, dlb = (failed(each) for each in trees)
    assert f"{QAT0} failed" in qat, qat
    assert "Input/output error (writing '4')" in qat
    # The log may be that of the second start.
    assert f"{QAT1} applied" in qat or f"{QAT1} unchanged" in qat
    assert "0000:69:00.0 failed" in qat or "0000:69:00.0 rolled back" in qat
    assert "state down -> up" in qat
    assert "dsa0 rolled back" in dsa, dsa
    assert "enable wq0.1" in dsa
    assert "Input/output error" in dsa
    assert "dsa1 applied" in dsa or "dsa1 unchanged" in dsa
    assert f"{DLB0} rolled back" in dlb, dlb
    assert "num_ldb_ports" in dlb
    # The container is restarted, and enables the VF again before it fails.
    wait_until(lambda: families.read(f"{DEVICES}/{DLB0}/sriov_numvfs") == "0", "no VF of the DLB")

    kernel.clear_faults()
    kernel.do("qat", bdf="0000:69:00.0", starts=True)
    restart(*trees)
    families.wait({CY: 2 * VFS, DC: VFS, DSA: 8, VF: 1})


def test_a_missing_vfio_pci_is_reported_with_the_module_to_load(families: Families) -> None:
    families.kernel.do("unload", module="vfio-pci")
    qat = families.deploy(TREES["qat"])[0]
    dsa = families.deploy("dsa_plugin/overlays/dsa_vfio_initcontainer")[0]
    log = failed(qat)
    assert log.count("the driver vfio-pci is not loaded, but the VFs need it (modprobe vfio-pci)") == 2
    assert "2 devices: 2 failed" in log
    assert "the driver vfio-pci is not loaded (modprobe vfio-pci)" in failed(dsa)
    assert families.read(f"{DEVICES}/{QAT0}/sriov_numvfs") == "0"


def test_a_dsa_rejected_by_vfio_pci_is_rolled_back_with_the_reason(families: Families) -> None:
    families.reset([DsaSpec(bdf=DSA0), DsaSpec(bdf="0000:64:01.0", model="11fb")])
    (daemonset,) = families.deploy("dsa_plugin/overlays/dsa_vfio_initcontainer")
    log = failed(daemonset)
    assert f"{DSA0} rolled back" in log, log
    assert "it is on vfio-pci's denylist; load the module with disable_denylist=1" in log
    assert "0000:64:01.0 applied" in log
    assert families.driver(DSA0) == "idxd"


def test_invalid_configuration_stops_the_program_before_any_write(families: Families) -> None:
    before = families.snapshot()
    (daemonset,) = families.deploy(
        TREES["qat"], config=config_map("qat-config", {"qat.conf": "ServicesEnabled=magic\n"})
    )
    log = failed(daemonset)
    assert "/qat-init/conf/qat.conf:1: found 'ServicesEnabled=magic', expected" in log
    assert "nothing was written" in log
    assert families.snapshot() == before


def test_a_missing_iommu_is_reported(plain: Families) -> None:
    qat = plain.deploy(TREES["qat"])[0]
    dsa = plain.deploy(TREES["dsa"], config=EXAMPLES["dsa"])[0]
    log = failed(qat)
    assert f"{QAT0} failed" in log, log
    assert "Invalid argument (writing '4')" in log
    assert "no IOMMU is enabled; add intel_iommu=on to the kernel's command line" in log
    log = failed(dsa)
    assert "dsa0 rolled back" in log, log
    assert "in scalable mode (intel_iommu=on,sm_on on the kernel's command line" in log


# The steps of the original.

ORIGINAL_QAT = """
want='sym;asym'
for device in /sys/bus/pci/devices/*; do
    case $(cat $device/device) in 0x37c8|0x4940|0x4942|0x4944|0x4946) ;; *) continue ;; esac
    if [ "$(cat $device/device)" != 0x37c8 ] && [ "$(cat $device/qat/cfg_services)" != "$want" ]; then
        [ "$(cat $device/qat/state)" != up ] || echo down > $device/qat/state
        echo "$want" > $device/qat/cfg_services
    fi
    [ "$(cat $device/sriov_numvfs)" != 0 ] || cat $device/sriov_totalvfs > $device/sriov_numvfs
done
"""
ORIGINAL_DLB = """
set -- /sys/bus/pci/drivers/dlb2/????:??:??.0
device=$(realpath $1)
[ "$(cat $device/sriov_numvfs)" = 0 ] || exit 0
echo 1 > $device/sriov_numvfs
function=$(basename $(realpath $device/virtfn0))
echo $function > /sys/bus/pci/drivers/dlb2/unbind
while read file value; do
    echo $value > $device/vf0_resources/$file
done <<END
num_atomic_inflights 2048
num_dir_credits 2048
num_dir_ports 8
num_hist_list_entries 2048
num_ldb_credits 8192
num_ldb_ports 4
num_ldb_queues 32
num_sched_domains 32
num_sn0_slots 2
num_sn1_slots 2
END
echo $function > /sys/bus/pci/drivers/dlb2/bind
"""


@pytest.mark.parametrize(
    ("script", "program", "environment"),
    [
        (ORIGINAL_QAT, "qat-init.sh", {"QAT_VF_DRIVER": "none"}),
        (ORIGINAL_DLB, "dlb-init.sh", {}),
    ],
    ids=["qat", "dlb"],
)
def test_the_final_state_equals_that_of_the_original(
    families: Families, script: str, program: str, environment: Mapping[str, str]
) -> None:
    directory = families.node.path("/run/originals")
    directory.mkdir(exist_ok=True)
    (directory / "qat.conf").write_text("ServicesEnabled=sym;asym\n")
    start = families.snapshot()
    families.node.run("sh", "-euc", script)
    original = families.snapshot()
    families.reset()
    assert families.snapshot() == start != original
    own = ACCELPLANE.with_name(program)
    families.node.run(own, "-config-dir=/run/originals", environment=environment)
    assert families.snapshot() == original
